"""For users' tests: products in the expected dtype, and nothing added up over devices twice.

Where types say along which axes a value varies (`shard_map(..., check_vma=True)`), AD adds up the
gradient of a parameter that is the same on all devices. A `psum` or `pmean` of that gradient, as
pmap needs it, then adds up equal numbers: JAX makes them varying without a word, and the gradient
is as many times too large as there are devices. `assert_summed_once` finds such sums.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Literal
from jax.typing import DTypeLike

from jmp import _jax_compat
from jmp._array_calls import ArrayCall
from jmp._messages import function_name, listed
from jmp.autocasting._operations import is_product
from jmp.autocasting._propagation import Propagation, WayInside
from jmp.diagnostics._arguments import asked_function, split_arguments
from jmp.diagnostics._walk import place_name, source_line, with_places
from jmp.dtypes import floating_dtype

SHOWN = 8  # products in another dtype; sums


def assert_products_in(
    fun: Callable[..., Any], dtype: DTypeLike, *early: Any
) -> Callable[..., None]:
    """Returns a function that checks that every product of `fun` multiplies in `dtype`.

    Called with `fun`'s arguments it traces `fun`, gradients and recomputations included where `fun`
    is a gradient, and runs nothing. Inner products are sums and do not count; what a kernel or a
    custom call does inside is not seen.

    Args:
      fun: any function that JAX can trace, such as `jax.grad(jmp.autocast(loss, policy))`; or a
        module of nnx, such as a view. Of nnx modules, also among the arguments, copies are traced.
      dtype: the dtype that all floating operands must have.

    Raises: TypeError if `fun` is no function, or its arguments were given in the first call;
      ValueError for a dtype that is not real floating. When called, AssertionError with a line for
      each of the first products in another dtype; also if there is none.

    >>> def loss(w, x):
    ...     return jnp.mean(x @ w)
    >>> gradient = jax.grad(autocast(loss, "mixed_bfloat16"))
    >>> assert_products_in(gradient, jnp.bfloat16)(jnp.ones((8, 8)), jnp.ones((4, 8)))
    """
    call = "assert_products_in(fun, dtype)(*args)"
    function = asked_function("assert_products_in", call, fun, early)
    expected = floating_dtype(dtype, "dtype")

    def check(*args: Any, **kwargs: Any) -> None:
        call = ArrayCall(function, *split_arguments(*args, **kwargs))
        closed = jax.make_jaxpr(call.results)(*call.arrays)
        products = [each for each in with_places(closed) if is_product(each[0])]
        name = function_name(fun)
        if not products:
            raise AssertionError(f"{name} has no product whose dtype could be checked.")
        others = []
        for equation, path, source in products:
            dtypes = {atom.aval.dtype for atom in equation.invars}
            floating = sorted(str(d) for d in dtypes if jnp.issubdtype(d, jnp.floating))
            if floating != [str(expected)]:
                where = place_name(source, path)
                others.append(f"{equation.primitive.name} in {', '.join(floating)} at {where}")
        if others:
            count = f"{len(others)} of {len(products)}"
            first = f"{count} products of {name} are not in {expected}:"
            raise AssertionError(_listed_lines(first, others))

    return check


def _listed_lines(first: str, lines: Sequence[str]) -> str:
    more = [f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return "\n".join([first, *lines[:SHOWN], *more])


def assert_summed_once(fun: Callable[..., Any], *early: Any) -> Callable[..., None]:
    """Returns a function that checks that no sum over devices is added up over them again.

    Called with the arguments of `fun`, it traces `fun` and runs nothing. A sum counts as added up
    again if `psum` or `pmean` gets it, or what was computed from it, as a value that is the same on
    all devices along its axis; a mean of a mean is accepted. This is checked only inside
    `jax.shard_map(..., check_vma=True)`, where JAX notes along which axes values differ: with
    `check_vma=False` and under pmap differentiation adds nothing up, and such a `psum` is right.

    Args:
      fun: any function that JAX can trace: a step, or one that returns gradients.

    Raises: TypeError if `fun` is no function, or its arguments were given in the first call. When
      called, AssertionError with a line for each of the first such sums.

    >>> from jax.sharding import AxisType, PartitionSpec as P
    >>> mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    >>> def gradient(w, x):
    ...     return jax.grad(lambda w: jnp.mean(x @ w))(w) / 8  # AD's sum, as a mean
    >>> step = jax.shard_map(gradient, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    >>> assert_summed_once(step)(jnp.ones(4), jnp.ones((16, 4)))
    """
    function = asked_function("assert_summed_once", "assert_summed_once(fun)(*args)", fun, early)

    def check(*args: Any, **kwargs: Any) -> None:
        call = ArrayCall(function, *split_arguments(*args, **kwargs))
        closed = jax.make_jaxpr(call.results)(*call.arrays)
        lines: list[str] = []
        transfer = functools.partial(_sums_of_results, lines)
        inputs = [NOT_SUMMED for _ in call.arrays]
        Propagation(transfer, _either, lambda _: NOT_SUMMED).through(closed, inputs)
        found = list(dict.fromkeys(lines))
        if found:
            first = f"{function_name(fun)} adds up over devices what was added up over them before:"
            raise AssertionError(_listed_lines(first, found))

    return check


class Summed(NamedTuple):
    """Where a value, or what it was computed from, was added up over devices."""

    places: Mapping[str, str]  # by axis
    # It was the same on all devices until it was made varying, without a word of the user's.
    is_made_varying: bool = False


NOT_SUMMED = Summed({})


def _sums_of_results(
    lines: list[str],
    equation: JaxprEqn,
    around: tuple[JaxprEqn, ...],
    operands: list[Summed],
    inside: WayInside[Summed],
) -> list[Summed]:
    """Returns where results were added up; `lines` gets a line for what is added up again.

    Args:
      around: the equations that hold this one.
    """
    name = equation.primitive.name
    results = inside()
    if results is None:
        count = len(equation.outvars)
        places = [operand.places for operand in operands]
        places = places if len(places) == count else [_union(operands)] * count
        results = [Summed(each, name == "pvary") for each in places]
    sizes: dict[str, int] = {}  # of the axes that are mapped here
    for mapping in around:
        if mapping.primitive.name == "shard_map":
            sizes |= mapping.params["mesh"].shape
    if name == "div" and _divides_by_devices(equation, results[0], sizes):
        return [NOT_SUMMED]  # a mean is no sum
    if name not in _jax_compat.PSUMS:
        return results
    here = source_line(equation, around)
    axes = [axis for axis in equation.params["axes"] if isinstance(axis, str)]
    for operand in operands:
        twice = [axis for axis in axes if axis in operand.places]
        if twice and operand.is_made_varying:
            size = math.prod(sizes.get(axis, 1) for axis in twice)
            before = place_name(operand.places[twice[0]], "")
            lines.append(
                f"psum over {listed(twice)} at {place_name(here, '')}, of what was added up at "
                f"{before}: {size} times too large. Leave it out; for a mean divide by {size}."
            )
    return [Summed({**result.places, **dict.fromkeys(axes, here)}) for result in results]


def _either(choices: Sequence[Summed], deciding: Sequence[Summed]) -> Summed:
    return Summed(_union(choices), all(choice.is_made_varying for choice in choices))


def _union(values: Sequence[Summed]) -> Mapping[str, str]:
    return {axis: place for value in values for axis, place in value.places.items()}


def _divides_by_devices(equation: JaxprEqn, dividend: Summed, sizes: Mapping[str, int]) -> bool:
    """Returns whether a division is by the number of devices that its operand was summed over."""
    divisor = equation.invars[1]
    devices = math.prod(sizes.get(axis, 1) for axis in dividend.places)
    return isinstance(divisor, Literal) and bool(divisor.val == devices)
