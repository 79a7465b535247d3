"""`assert_products_in`: for users' tests.

`assert_summed_once`: for users' tests, that nothing is added up over devices twice.

Where types say along which axes a value varies (`shard_map(..., check_vma=True)`), AD adds up the
gradient of a parameter that is the same on all devices. A `psum` or `pmean` of that gradient, as
pmap needs it, then adds up equal numbers: JAX makes them varying without a word, and the gradient
is as many times too large as there are devices.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.extend.core import Jaxpr
from jax.typing import DTypeLike

from jmp import _jax_compat
from jmp._array_calls import ArrayCall
from jmp._messages import function_name, listed
from jmp.autocasting._operations import is_product
from jmp.diagnostics._arguments import apart, check_asked, of_modules
from jmp.diagnostics._walk import Placed, place_name, source_line, with_places
from jmp.dtypes import floating_dtype

PRODUCTS_SHOWN = 8  # products in another dtype


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
    check_asked("assert_products_in", "assert_products_in(fun, dtype)(*args)", fun, early, None)
    expected = floating_dtype(dtype, "dtype")

    def check(*args: Any, **kwargs: Any) -> None:
        call = ArrayCall(of_modules(fun), *apart(*args, **kwargs))
        closed = jax.make_jaxpr(call.results)(*call.arrays)
        products = list(_products(_jax_compat.open_jaxpr(closed)[0]))
        name = function_name(fun)
        if not products:
            raise AssertionError(f"{name} has no product whose dtype could be checked.")
        others = []
        for (equation, path, source, _), dtypes in products:
            if dtypes != [expected]:
                what = f"{equation.primitive.name} in {', '.join(map(str, dtypes))}"
                others.append(f"{what} at {place_name(source, path)}")
        if others:
            count = f"{len(others)} of {len(products)}"
            more = (
                [f"and {len(others) - PRODUCTS_SHOWN} more"] if len(others) > PRODUCTS_SHOWN else []
            )
            lines = [
                f"{count} products of {name} are not in {expected}:",
                *others[:PRODUCTS_SHOWN],
                *more,
            ]
            raise AssertionError("\n".join(lines))

    return check


def _products(jaxpr: Jaxpr) -> Iterator[tuple[Placed, list[Any]]]:
    """Yields each product with the dtypes of its floating operands."""
    for placed in with_places(jaxpr):
        if is_product(placed.equation):
            dtypes = {atom.aval.dtype for atom in placed.equation.invars}
            yield placed, sorted((d for d in dtypes if jnp.issubdtype(d, jnp.floating)), key=str)


SUMS_SHOWN = 8  # sums
_MADE_VARYING = "pvary"

# By axis: where a value, or what it was computed from, was added up along it.
Sums = Mapping[str, str]


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
    check_asked("assert_summed_once", "assert_summed_once(fun)(*args)", fun, early, None)

    def check(*args: Any, **kwargs: Any) -> None:
        call = ArrayCall(of_modules(fun), *apart(*args, **kwargs))
        closed = jax.make_jaxpr(call.results)(*call.arrays)
        jaxpr = _jax_compat.open_jaxpr(closed)[0]
        search = _Search()
        search.run(jaxpr, [{} for _ in jaxpr.invars], {}, "")
        found = list(dict.fromkeys(search.found))
        if found:
            more = [f"and {len(found) - SUMS_SHOWN} more"] if len(found) > SUMS_SHOWN else []
            first = f"{function_name(fun)} adds up over devices what was added up over them before:"
            raise AssertionError("\n".join([first, *found[:SUMS_SHOWN], *more]))

    return check


class _Search:
    """Follows sums through a program; `found` gets a line for each that is added up again."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def run(
        self, jaxpr: core.Jaxpr, given: Sequence[Sums], sizes: Mapping[str, int], line: str
    ) -> list[Sums]:
        """Returns the sums in the results of a jaxpr.

        Args:
          given: those in its arguments.
          sizes: of the mapped axes.
          line: the source line around it.
        """
        sums: dict[Any, Sums] = dict(zip(jaxpr.invars, given, strict=True))
        same: dict[Any, Sums] = {}  # of values that were the same until they were made varying

        def of(atoms: Sequence[Any]) -> list[Sums]:
            return [{} if _is_literal(atom) else sums.get(atom, {}) for atom in atoms]

        for equation in jaxpr.eqns:
            place = source_line(equation) or line
            name = equation.primitive.name
            results = self._inner(equation, of(equation.invars), sizes, place)
            if name == _MADE_VARYING:
                same.update(zip(equation.outvars, results, strict=True))
            elif name in _jax_compat.PSUMS:
                axes = _axes(equation)
                again = [same.get(a, {}) for a in equation.invars if not _is_literal(a)]
                self._note(equation, axes, again, sizes, place)
                results = [{**before, **dict.fromkeys(axes, place)} for before in results]
            elif name == "div":
                results = [_without_mean(results[0], equation.invars[1], sizes)]
            sums.update(zip(equation.outvars, results, strict=True))
        return of(jaxpr.outvars)

    def _inner(
        self, equation: Any, given: list[Sums], sizes: Mapping[str, int], place: str
    ) -> list[Sums]:
        """Returns the sums in an equation's results, of a psum those of its operands."""
        inner = list(_jax_compat.inner_jaxprs(equation))
        count = len(equation.outvars)
        if not inner:
            return given if len(given) == count else [_union(given)] * count
        if equation.primitive.name == "shard_map":
            sizes = {**sizes, **equation.params["mesh"].shape}
        results: list[Sums] = [{}] * count
        for jaxpr in inner:
            arguments = given
            if len(jaxpr.invars) != len(given):
                arguments = [_union(given)] * len(jaxpr.invars)
            found = self.run(jaxpr, arguments, sizes, place)
            if len(found) != count:
                found = [_union(found)] * count
            results = [_union(both) for both in zip(results, found, strict=True)]
        return results

    def _note(
        self,
        equation: Any,
        axes: Sequence[str],
        again: Sequence[Sums],
        sizes: Mapping[str, int],
        place: str,
    ) -> None:
        for sums in again:
            twice = [axis for axis in axes if axis in sums]
            if twice:
                size = math.prod(sizes.get(axis, 1) for axis in twice)
                before = place_name(sums[twice[0]], "")
                self.found.append(
                    f"psum over {listed(twice)} at {place_name(place, '')}, of what was added up "
                    f"at {before}: {size} times too large. Leave it out; for a mean divide by "
                    f"{size}."
                )


def _is_literal(atom: Any) -> bool:
    return isinstance(atom, core.Literal)


def _axes(equation: Any) -> list[str]:
    return [axis for axis in equation.params["axes"] if isinstance(axis, str)]


def _union(many: Sequence[Sums]) -> Sums:
    return {axis: place for sums in many for axis, place in sums.items()}


def _without_mean(sums: Sums, divisor: Any, sizes: Mapping[str, int]) -> Sums:
    """Returns the sums that are left after a division by the number of devices: means are none."""
    devices = math.prod(sizes.get(axis, 1) for axis in sums)
    return {} if _is_literal(divisor) and divisor.val == devices else sums
