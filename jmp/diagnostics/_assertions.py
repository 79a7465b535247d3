"""`assert_products_in`: for users' tests."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jmp import _jax_compat
from jmp.autocasting._equations import is_inner_product
from jmp.autocasting._registry import Category, rule_for
from jmp.diagnostics._places import with_places
from jmp.trees import holds_numbers


def assert_products_in(fun: Callable[..., Any], dtype: Any) -> Callable[..., None]:
    """Returns a function that checks that every product of `fun` multiplies in `dtype`.

    Called with `fun`'s arguments it traces `fun`, gradients and recomputations included where `fun`
    is a gradient, and runs nothing. Inner products are sums and do not count; what a kernel or a
    custom call does inside is not seen.

    Args:
      fun: any function that JAX can trace, such as `jax.grad(jmp.autocast(loss, policy))`.
      dtype: the dtype that all floating operands must have.

    Raises: AssertionError with a line for each product in another dtype; also if there is none.

    >>> def loss(w, x):
    ...     return jnp.mean(x @ w)
    >>> gradient = jax.grad(autocast(loss, "mixed_bfloat16"))
    >>> assert_products_in(gradient, jnp.bfloat16)(jnp.ones((8, 8)), jnp.ones((4, 8)))
    """
    expected = jnp.dtype(dtype)

    def check(*args: Any, **kwargs: Any) -> None:
        jaxpr, _ = _jax_compat.open_jaxpr(_traced(fun, args, kwargs))
        products = list(_products(jaxpr))
        name = getattr(fun, "__name__", "the function")
        if not products:
            raise AssertionError(f"{name} has no product whose dtype could be checked.")
        others = [
            f"{equation.primitive.name} in {', '.join(map(str, dtypes))} at "
            f"{source or '?'}" + (f" ({path})" if path else "")
            for equation, path, source, dtypes in products
            if dtypes != [expected]
        ]
        if others:
            raise AssertionError(
                f"{len(others)} of {len(products)} products of {name} are not in {expected}:\n"
                + "\n".join(others)
            )

    return check


def _traced(fun: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Returns the jaxpr of a call; what is no array (`train=True`) reaches `fun` as it is."""
    leaves, structure = jax.tree.flatten((args, kwargs))
    is_traced = [holds_numbers(x) or isinstance(x, jax.ShapeDtypeStruct) for x in leaves]

    def of_arrays(*arrays: Any) -> Any:
        following = iter(arrays)
        filled = [next(following) if t else x for t, x in zip(is_traced, leaves, strict=True)]
        args, kwargs = jax.tree.unflatten(structure, filled)
        return [x for x in jax.tree.leaves(fun(*args, **kwargs)) if holds_numbers(x)]

    return jax.make_jaxpr(of_arrays)(*(x for x, t in zip(leaves, is_traced, strict=True) if t))


def _products(jaxpr: Any) -> Iterator[tuple[Any, str, str, list[Any]]]:
    for equation, path, source, _ in with_places(jaxpr):
        is_low = rule_for(equation.primitive.name).category is Category.LOW
        if is_low and not is_inner_product(equation):
            dtypes = [atom.aval.dtype for atom in equation.invars]
            floating = {d for d in dtypes if jnp.issubdtype(d, jnp.floating)}
            yield equation, path, source, sorted(floating, key=str)
