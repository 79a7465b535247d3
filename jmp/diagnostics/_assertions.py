"""`assert_products_in`: for users' tests."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr
from jax.typing import DTypeLike

from jmp import _jax_compat
from jmp._calls import ArrayCall
from jmp._describe import name_of
from jmp.autocasting._operations import is_product
from jmp.diagnostics._asked import check_asked
from jmp.diagnostics._places import Placed, place_name, with_places
from jmp.diagnostics._scoped_modules import apart, of_modules
from jmp.dtypes import floating_dtype

SHOWN = 8  # products in another dtype


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
        name = name_of(fun)
        if not products:
            raise AssertionError(f"{name} has no product whose dtype could be checked.")
        others = []
        for (equation, path, source, _), dtypes in products:
            if dtypes != [expected]:
                what = f"{equation.primitive.name} in {', '.join(map(str, dtypes))}"
                others.append(f"{what} at {place_name(source, path)}")
        if others:
            count = f"{len(others)} of {len(products)}"
            more = [f"and {len(others) - SHOWN} more"] if len(others) > SHOWN else []
            lines = [f"{count} products of {name} are not in {expected}:", *others[:SHOWN], *more]
            raise AssertionError("\n".join(lines))

    return check


def _products(jaxpr: Jaxpr) -> Iterator[tuple[Placed, list[Any]]]:
    """Yields each product with the dtypes of its floating operands."""
    for placed in with_places(jaxpr):
        if is_product(placed.equation):
            dtypes = {atom.aval.dtype for atom in placed.equation.invars}
            yield placed, sorted((d for d in dtypes if jnp.issubdtype(d, jnp.floating)), key=str)
