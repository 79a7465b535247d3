"""Finds every product of a program and the dtypes it works in."""

import collections

import jax

PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")


def equations(jaxpr):
    """Yields every equation of a jaxpr and of all jaxprs inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda v: hasattr(v, "eqns")
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def product_dtypes(function, *args):
    """Counts the dtypes of the products of `function(*args)`: operands and result."""
    return product_dtypes_in(jax.make_jaxpr(function)(*args).jaxpr)


def product_dtypes_in(jaxpr):
    counts = collections.Counter()
    for equation in equations(jaxpr):
        if equation.primitive.name in PRODUCTS:
            dtypes = {str(v.aval.dtype) for v in (*equation.invars, *equation.outvars)}
            counts[" ".join(sorted(dtypes))] += 1
    return dict(counts)
