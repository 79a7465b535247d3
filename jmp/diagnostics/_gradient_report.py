"""`gradient_report`: between which powers of two the numbers of a training step lie.

A *tap* follows each product, reduction and exponential. It is the identity; its backward pass hands
the cotangent on, and sends the counts of value and cotangent to the host. So only values on the way
from the parameters to the loss are counted, each turn of a loop and only the branch that runs; and
remat, jit and shardings need no code here.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from jmp import _jax_compat
from jmp._array_calls import ArrayCall
from jmp.autocasting._autocast import autocast
from jmp.autocasting._emit import as_if_differentiated
from jmp.autocasting._propagation import inner_equations
from jmp.diagnostics._asked import asked_function, split_arguments
from jmp.diagnostics._interpreter import REPLAYED_INSIDE, replay
from jmp.diagnostics._places import path_of, users_line
from jmp.diagnostics._ranges import FLOAT8_PRODUCT, RangeReport, exponent_of, exponents, row_of
from jmp.diagnostics._reports import FLOAT8
from jmp.diagnostics._rows import kind_of_row
from jmp.dtypes import is_half
from jmp.loss_scaling._gradients import scaled_loss
from jmp.loss_scaling._scales import StaticLossScale
from jmp.policy import Policy, get_policy

# Counts of values and of their cotangents, an array int[2, ...] for each run of a tap, by place:
# path of modules or name scopes, dtype, operation, source.
Counts = dict[tuple[str, str, str, str], list[Any]]


def gradient_report(
    loss_fn: Callable[..., Any],
    policy: str | Policy | None = None,
    *early: Any,
    scale: float = 1.0,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    **options: Any,
) -> Callable[..., RangeReport]:
    """Returns a function that measures the ranges of a loss's gradient computation.

    Called with `loss_fn`'s arguments it runs the loss and its gradient once, and counts parameters,
    gradients, activations and activation gradients by powers of two. Activations are the results of
    products, reductions and exponentials on the way from the parameters to the loss. Under a policy
    with float8 products it also counts what the rounding to float8 loses of their cotangents.

    Args:
      loss_fn: any function that JAX can trace and differentiate, returning a real floating scalar.
      policy: measures `jmp.autocast(loss_fn, policy)`, and the activations that it stores in half:
        this is what a half type *does* lose. Without a policy `loss_fn` is measured as it is: in
        float32 this is what a half type *would* lose.
      scale: a loss scale, a power of two. The float32 loss is multiplied by it.
      argnums, has_aux: as in `jax.value_and_grad`. All floating leaves of these arguments are
        differentiated; they may have other leaves too (integers, keys).
      options: further options of `jmp.autocast`; they need a policy.

    Returns: a function that returns a `RangeReport`. Its counts are exact if no tensor has 2**31
      elements. In several processes only the first one has the activations.

    Raises: ValueError for a scale that is no power of two, or arguments without a floating array to
      differentiate; TypeError for a loss that is no real floating scalar, and for the arguments of
      `loss_fn` in the first call.

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
    call = "gradient_report(loss_fn, policy)(*args)"
    loss_fn = asked_function(call, loss_fn, early, policy, options)
    exponent_of(scale)  # refuses what is no power of two
    compute_dtype = np.dtype(np.float32 if policy is None else get_policy(policy).compute_dtype)
    half = compute_dtype if is_half(compute_dtype) else None
    if policy is not None:
        loss_fn = autocast(loss_fn, policy, **options)
    scaled = scaled_loss(loss_fn, StaticLossScale(scale), has_aux)

    def report(*args: Any, **kwargs: Any) -> RangeReport:
        call = ArrayCall(scaled, *split_arguments(*args, **kwargs))
        arrays = call.arrays
        paths = call.floating_within(argnums, "gradient_report")
        with as_if_differentiated(True):
            closed = jax.make_jaxpr(lambda *arrays: call(*arrays)[0])(*arrays)
        counts: Counts = {}
        step = counting_step(closed, list(paths), counts, half)
        own, gradients = jax.device_get(jax.jit(step)(*arrays))
        jax.effects_barrier()  # all counts have come
        rows = []
        for role, found, in_them in (("parameter", own, 1.0), ("gradient", gradients, scale)):
            for (i, path), counted in zip(paths.items(), found, strict=True):
                rows.append(row_of(role, path, str(arrays[i].dtype), counted, in_them))
        for index, role, in_them in ((0, "activation", 1.0), (1, "activation gradient", scale)):
            for (path, dtype, *where), runs in counts.items():
                if runs:  # else no gradient reaches it
                    total: Any = np.sum([run[index] for run in runs], axis=0, dtype=np.int64)
                    rows.append(row_of(role, path, dtype, total, in_them, *where))
        return RangeReport(tuple(rows), str(half or "float16"))

    return report


def counting_step(
    closed: Any, positions: list[int], counts: Counts, dtype: Any = None
) -> Callable[..., Any]:
    """Returns a function of arrays that counts parameters, those at `positions`, and gradients.

    When it runs, `counts` gets the counts of activations. For these it has a tap behind each
    operation that has a row in precision reports. Equations that are bound as a whole (a custom
    derivative, a kernel, shard_map) are tapped at their outputs if such an operation is inside.

    Args:
      closed: the jaxpr of a loss.
      dtype: only results that are stored in this dtype are tapped; None for all.
    """

    def tapped(equations: tuple[JaxprEqn, ...], results: list[Any]) -> list[Any]:
        operation = _operation_of(equations[-1])
        if operation is None:
            return results
        found = []
        for result in results:
            if jnp.issubdtype(result.dtype, jnp.inexact) and dtype in (None, result.dtype):
                place = path_of(equations), str(result.dtype), operation, users_line(equations)
                result = _tap(result, counts.setdefault(place, []).append)
            found.append(result)
        return found

    loss = lambda *arrays: replay(closed, arrays, tapped)[0]

    def step(*arrays: Any) -> Any:
        gradients = jax.grad(loss, positions)(*arrays)
        return [exponents(arrays[i]) for i in positions], list(map(exponents, gradients))

    return step


def _operation_of(equation: JaxprEqn) -> str | None:
    """Returns the name of the operation whose results an equation has; None if none is counted."""
    name = equation.primitive.name
    if kind_of_row(equation) is not None:
        return name
    if name in REPLAYED_INSIDE or not any(map(kind_of_row, inner_equations(equation))):
        return None
    if any(str(getattr(x.aval, "dtype", "")) == FLOAT8 for x in equation.invars):
        return FLOAT8_PRODUCT
    return _jax_compat.called_name(equation)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _tap(value: Any, send: Callable[[Any], None]) -> Any:
    return value


def _forward(value: Any, send: Callable[[Any], None]) -> tuple[Any, Any]:
    # The counts are kept and not the value: a tap makes nothing live longer than it did.
    return value, exponents(value)


def _backward(send: Callable[[Any], None], counted: Any, cotangent: Any) -> tuple[Any]:
    jax.debug.callback(send, jnp.stack([counted, exponents(cotangent)]))
    return (cotangent,)


_tap.defvjp(_forward, _backward)
