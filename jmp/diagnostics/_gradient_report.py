"""`gradient_report`: between which powers of two the numbers of a training step lie."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from jmp.autocasting import autocast
from jmp.diagnostics._range_report import RangeReport
from jmp.diagnostics._ranges import Range, exponent_of, row_of
from jmp.diagnostics._taps import Counts, count
from jmp.dtypes import is_half
from jmp.loss_scaling import StaticLossScale
from jmp.loss_scaling._gradients import scaled_loss
from jmp.policy import Policy, get_policy
from jmp.trees import as_jax_array, is_array, is_complex, is_floating, path_string


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
        raise TypeError(
            f"gradient_report got {sorted(options)}, options of autocast, but no policy."
        )
    scaled = scaled_loss(loss_fn, StaticLossScale(scale), has_aux)

    def report(*args: Any, **kwargs: Any) -> RangeReport:
        run, parameters, others = _flatten(scaled, argnums, args, kwargs)
        arrays = [array for _, array in parameters]
        counts = count(jax.make_jaxpr(run)(arrays, others), arrays, others, half)
        return RangeReport(tuple(_rows(parameters, counts, scale)), str(half or "float16"))

    return report


def _flatten(
    function: Callable[..., Any],
    argnums: int | Sequence[int],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Callable[..., Any], list[tuple[str, jax.Array]], list[jax.Array]]:
    """Returns the loss as a function of two lists, and these: named parameters, other arrays.

    What is no array is held, because it may decide what is traced.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path((args, kwargs))
    chosen = [argnums] if isinstance(argnums, int) else argnums
    chosen = [number % max(1, len(args)) for number in chosen]

    parameters, others = {}, {}
    for index, (path, leaf) in enumerate(leaves):
        differentiable = is_floating(leaf) or is_complex(leaf) or isinstance(leaf, float)
        if differentiable and path[0].idx == 0 and path[1].idx in chosen:
            parameters[index] = as_jax_array(leaf)
        elif is_array(leaf):
            others[index] = as_jax_array(leaf)
    if not parameters:
        raise ValueError(
            f"gradient_report got argnums={argnums!r} and {len(args)} positional arguments, with "
            "no floating array to differentiate there; expected the parameters."
        )

    def run(*lists: Sequence[jax.Array]) -> Any:
        arrays = dict(zip((*parameters, *others), itertools.chain(*lists), strict=True))
        filled = [arrays.get(index, leaf) for index, (_, leaf) in enumerate(leaves)]
        args, kwargs = jax.tree.unflatten(structure, filled)
        return function(*args, **kwargs)[0]

    # Within its own argument, or within all of them.
    first = 2 if isinstance(argnums, int) else 1
    named = [(path_string(leaves[i][0][first:]), array) for i, array in parameters.items()]
    return run, named, list(others.values())


def _rows(parameters: list[tuple[str, jax.Array]], counts: Counts, scale: float) -> Iterator[Range]:
    for role, found, own in (
        ("parameter", counts.parameters, 1.0),
        ("gradient", counts.gradients, scale),
    ):
        for (path, array), counted in zip(parameters, found, strict=True):
            yield row_of(role, path, str(array.dtype), counted, scale=own)
    for index, (role, own) in enumerate((("activation", 1.0), ("activation gradient", scale))):
        for place, both in counts.activations.items():
            if both[index].any():  # else no gradient reaches it
                path, operation, source, dtype = place
                where = {"operation": operation, "source": source}
                yield row_of(role, path, dtype, both[index], scale=own, **where)
