"""For users' tests: products in the expected dtype."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jmp._array_calls import ArrayCall
from jmp._messages import function_name
from jmp.autocasting._operations import is_product
from jmp.diagnostics._arguments import asked_function, split_arguments
from jmp.diagnostics._walk import place_name, with_places
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
            more = [f"and {len(others) - SHOWN} more"] if len(others) > SHOWN else []
            raise AssertionError("\n".join([first, *others[:SHOWN], *more]))

    return check
