"""`gradient_report`: between which powers of two the numbers of a training step lie.

A *tap* follows each product, reduction and exponential. It is the identity; its backward pass hands
the cotangent on, and returns the counts of value and cotangent as the gradient of a *probe*, an
argument of zeros. Gradients with respect to one argument add up. So JAX itself adds up the turns of
loops and takes the branch that runs, and remat, jit and shardings need no code here.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp import _jax_compat
from jmp._array_calls import ArrayCall, argument_numbers, vjp_at
from jmp.autocasting._emit import as_if_differentiated
from jmp.autocasting._propagation import inner_equations
from jmp.diagnostics._arguments import asked_function, autocast_if_asked, split_arguments
from jmp.diagnostics._ranges import (
    FLOAT8,
    FLOAT8_PRODUCT,
    RangeReport,
    exponent_of,
    exponents,
    row_of,
)
from jmp.diagnostics._rows import kind_of_row
from jmp.diagnostics._walk import REPLAYED_INSIDE, Replayed, replay, users_line
from jmp.dtypes import is_half
from jmp.loss_scaling._constant import StaticLossScale
from jmp.loss_scaling._gradients import scaled_loss
from jmp.policy import Policy, get_policy
from jmp.trees import as_jax_array


class Tapped(NamedTuple):
    """The place of a tap: an operation on a source line of a module. Taps of one place are
    merged."""

    path: str
    dtype: str
    operation: str
    source: str


BYTES = 4  # of an int32

Position = tuple[int, ...]  # indices of an equation, then of its result
TapPlaces = dict[Position, Tapped]
Tap = Callable[[Position, Tapped, Any], Any]  # (position, place, value) -> value


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
      elements and no line of a module runs 2**16 times.

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
    loss_fn = asked_function("gradient_report(loss_fn, policy)(*args)", loss_fn, early, policy)
    exponent_of(scale)  # refuses what is no power of two
    compute_dtype = np.dtype(np.float32 if policy is None else get_policy(policy).compute_dtype)
    half = compute_dtype if is_half(compute_dtype) else None
    loss_fn = autocast_if_asked("gradient_report", loss_fn, policy, options)
    scaled = scaled_loss(loss_fn, StaticLossScale(scale), has_aux)

    def report(*args: Any, **kwargs: Any) -> RangeReport:
        args, kwargs = split_arguments(*args, **kwargs)
        numbers = argument_numbers(argnums, len(args), "gradient_report")
        # Python floats to differentiate become arrays.
        of_float: Callable[[Any], Any] = lambda x: as_jax_array(x) if isinstance(x, float) else x
        given = [jax.tree.map(of_float, x) if i in numbers else x for i, x in enumerate(args)]
        call = ArrayCall(scaled, given, kwargs)
        arrays = list(map(as_jax_array, call.arrays))
        paths = call.floating_within(argnums, "gradient_report")
        with as_if_differentiated():
            closed = jax.make_jaxpr(lambda *arrays: call(*arrays)[0])(*arrays)
        step, probes = counting_step(closed, arrays, list(paths), half)
        own, gradients, sums = jax.device_get(jax.jit(step)(arrays, probes))
        rows = []
        for role, counts, in_them in (("parameter", own, 1.0), ("gradient", gradients, scale)):
            for (i, path), counted in zip(paths.items(), counts, strict=True):
                rows.append(row_of(role, path, str(arrays[i].dtype), counted, in_them))
        both = {place: from_bytes(sums[place]) for place in probes}  # a value, and its cotangent
        for index, role, in_them in ((0, "activation", 1.0), (1, "activation gradient", scale)):
            for (path, dtype, *where), counts in both.items():
                if counts[index].any():  # else no gradient reaches it
                    rows.append(row_of(role, path, dtype, counts[index], in_them, *where))
        return RangeReport(tuple(rows), str(half or "float16"))

    return report


def counting_step(
    closed: Any, arrays: list[Any], positions: list[int], dtype: Any = None
) -> tuple[Callable[..., Any], dict[Tapped, jax.Array]]:
    """Returns the step that counts, a function of (arrays, probes), and the probes.

    It returns the counts of parameters, which are the arrays at `positions`, the counts of their
    gradients, and sums of bytes by place, for activations that are stored in `dtype`, or for all if
    it is None.
    """
    places = _places(closed, arrays, positions, dtype)
    probes = {}  # zeros, one for each byte of what a tap counts: of a value and of its cotangent
    for place in places.values():
        counts = jax.eval_shape(exponents, jax.ShapeDtypeStruct((), place.dtype))
        probes[place] = jnp.zeros((2, counts.size, BYTES), np.float32)

    def loss(*operands: Any) -> Any:
        *arrays, probes = operands

        def tap(position: Position, place: Tapped, value: Any) -> Any:
            return _tap(value, probes[place]) if position in places else value

        return _tapped(closed, tap, dtype)(*arrays)

    def step(arrays: Any, probes: Any) -> Any:
        *gradients, sums = jax.grad(loss, (*positions, len(arrays)))(*arrays, probes)
        return [exponents(arrays[i]) for i in positions], list(map(exponents, gradients)), sums

    return step, probes


@jax.custom_vjp
def _tap(value: Any, probe: Any) -> Any:
    return value


def _forward(value: Any, probe: Any) -> tuple[Any, Any]:
    # The counts are kept and not the value: a tap makes nothing live longer than it did.
    return value, exponents(value)


def _backward(counted: Any, cotangent: Any) -> tuple[Any, Any]:
    return cotangent, bytes_of(jnp.stack([counted, exponents(cotangent)]))


_tap.defvjp(_forward, _backward)


def bytes_of(counts: jax.Array) -> jax.Array:
    """Splits int32[...] counts into float32[..., BYTES] bytes, the lowest first.

    A gradient adds up in float32, which is exact to 2**24. Bytes may be added up 2**16 times before
    that, over as many turns of a loop; the counts themselves could exceed it in one turn.
    """
    return lax.bitcast_convert_type(counts.astype(np.int32), np.uint8).astype(np.float32)


def from_bytes(sums: np.ndarray) -> np.ndarray:
    """Returns the int64[...] counts of float32[..., BYTES] sums of bytes."""
    return sums.astype(np.int64) @ 256 ** np.arange(BYTES)


def _tapped(closed: Any, tap: Tap, dtype: Any) -> Callable[..., Any]:
    """Returns the loss with a tap behind each operation that has a row in precision reports.

    Equations that are bound as a whole (a custom derivative, a kernel, shard_map) are tapped at
    their outputs if such an operation is inside. Only results that are stored in `dtype` are
    tapped.
    """

    def on_results(replayed: Replayed, results: list[Any]) -> list[Any]:
        equation = replayed.equation
        name = equation.primitive.name
        is_whole = name not in REPLAYED_INSIDE and any(map(kind_of_row, inner_equations(equation)))
        if kind_of_row(equation) is None and not is_whole:
            return results
        operation = _jax_compat.called_name(equation) if is_whole else name
        if is_whole and any(str(getattr(x.aval, "dtype", "")) == FLOAT8 for x in equation.invars):
            operation = FLOAT8_PRODUCT
        tapped = []
        for index, result in enumerate(results):
            if jnp.issubdtype(result.dtype, jnp.inexact) and dtype in (None, result.dtype):
                place = Tapped(replayed.path, str(result.dtype), operation, users_line(equation))
                result = tap((*replayed.position, index), place, result)
            tapped.append(result)
        return tapped

    return lambda *arrays: replay(closed, arrays, on_results)[0]


def _places(closed: Any, arrays: list[Any], positions: list[int], dtype: Any) -> TapPlaces:
    """Returns the places of values that depend on the parameters, in the program's order.

    A tap makes everything behind it depend on its probe. At any other value it would add a backward
    pass that the program does not have, or cannot have, as through a while loop.
    """
    order: TapPlaces = {}
    found = set()

    def tap(position: Position, place: Tapped, value: Any) -> Any:
        @jax.custom_jvp
        def look(value: Any) -> Any:
            return value

        @look.defjvp
        def rule(primals: Any, tangents: Any) -> Any:  # called if there is a tangent
            found.add(position)
            return primals[0], tangents[0]

        order[position] = place
        return look(value)

    loss = _tapped(closed, tap, dtype)
    jax.eval_shape(lambda *arrays: vjp_at(loss, arrays, positions)[0], *arrays)
    return {position: place for position, place in order.items() if position in found}
