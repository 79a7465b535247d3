"""`gradient_report`: between which powers of two the numbers of a training step lie."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from jmp._calls import ArrayCall, argument_numbers
from jmp.autocasting import autocast
from jmp.diagnostics._range_report import RangeReport
from jmp.diagnostics._ranges import Range, exponent_of, row_of
from jmp.diagnostics._taps import Counts, count
from jmp.dtypes import is_half
from jmp.loss_scaling import StaticLossScale
from jmp.loss_scaling._gradients import scaled_loss
from jmp.policy import Policy, get_policy
from jmp.trees import as_jax_array, is_complex, is_floating


def gradient_report(
    loss_fn: Callable[..., Any],
    policy: str | Policy | None = None,
    *,
    scale: float = 1.0,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    **options: Any,
) -> Callable[..., RangeReport]:
    """Returns a function that measures the ranges of a loss's gradient computation.

    Called with `loss_fn`'s arguments it runs the loss and its gradient once, and counts parameters,
    gradients, activations and activation gradients by powers of two. Activations are the results of
    products, reductions and exponentials on the way from the parameters to the loss.

    Args:
      loss_fn: any function that JAX can trace and differentiate, returning a real floating scalar.
      policy: measure `jmp.autocast(loss_fn, policy)`, and of its activations those that are stored
        in half: what a half type *does* lose. Left out, `loss_fn` is measured as it is: in float32
        that is what a half type *would* lose.
      scale: a loss scale, a power of two. The float32 loss is multiplied by it.
      argnums, has_aux: as in `jax.value_and_grad`. All floating leaves of those arguments are
        differentiated; others (integers, keys) may stand among them.
      options: those of `jmp.autocast`.

    Returns: a function that returns a `RangeReport`. Its counts are exact where no tensor has 2**31
      elements and no line of a module runs 2**16 times.

    Raises: ValueError for a scale that is no power of two, or arguments without a floating array to
      differentiate; TypeError for a loss that is no real floating scalar.

    >>> def loss(w, x):
    ...     return 1e-6 * jnp.mean(jnp.tanh(x @ w) ** 2)
    >>> w, x = jnp.ones((4, 4)) / 8, jnp.ones((2, 4))
    >>> report = gradient_report(loss)(w, x)
    >>> report.total("activation gradient").shares("float16").subnormal
    1.0
    >>> scaled = gradient_report(loss, "mixed_float16", scale=2.0**10)(w, x)
    >>> scaled.total("activation gradient").shares("float16").normal
    1.0
    """
    exponent_of(scale)  # refuses what is no power of two
    half = None
    if policy is not None:
        compute_dtype = get_policy(policy).compute_dtype
        half = compute_dtype if is_half(compute_dtype) else None
        loss_fn = autocast(loss_fn, policy, **options)
    elif options:
        got = sorted(options)
        raise TypeError(f"gradient_report got {got}, options of autocast, but no policy.")
    scaled = scaled_loss(loss_fn, StaticLossScale(scale), has_aux)

    def report(*args: Any, **kwargs: Any) -> RangeReport:
        numbers = argument_numbers(argnums, len(args), "gradient_report")
        # Python floats to differentiate become arrays.
        of_float: Callable[[Any], Any] = lambda x: as_jax_array(x) if isinstance(x, float) else x
        given = [jax.tree.map(of_float, x) if i in numbers else x for i, x in enumerate(args)]
        call = ArrayCall(scaled, given, kwargs)
        arrays = list(map(as_jax_array, call.arrays))
        paths = {
            i: path
            for i, path in call.within(argnums, "gradient_report").items()
            if is_floating(arrays[i]) or is_complex(arrays[i])
        }
        if not paths:
            raise ValueError(
                f"gradient_report got argnums={argnums!r} and {len(args)} positional arguments, "
                "with no floating array to differentiate there; expected the parameters."
            )
        closed = jax.make_jaxpr(lambda *arrays: call(*arrays)[0])(*arrays)
        counts = count(closed, arrays, list(paths), half)
        named = [(path, str(arrays[i].dtype)) for i, path in paths.items()]
        return RangeReport(tuple(_rows(named, counts, scale)), str(half or "float16"))

    return report


def _rows(parameters: list[tuple[str, str]], counts: Counts, scale: float) -> Iterator[Range]:
    """Yields the rows of a report; of the parameters paths and dtypes are given."""
    for (path, dtype), counted in zip(parameters, counts.parameters, strict=True):
        yield row_of("parameter", path, dtype, counted)
    for (path, dtype), counted in zip(parameters, counts.gradients, strict=True):
        yield row_of("gradient", path, dtype, counted, scale=scale)
    for index, (role, own) in enumerate((("activation", 1.0), ("activation gradient", scale))):
        for (path, operation, source, dtype), both in counts.activations.items():
            where = {"scale": own, "operation": operation, "source": source}
            if both[index].any():  # else no gradient reaches it
                yield row_of(role, path, dtype, both[index], **where)
