"""Finds every product of a program and the dtypes it works in; weights for such products.

A matrix that a function makes of literals, and an axis of length one, are no stand-ins for weights
and features: such products are float32, or multiplications (`jmp.autocasting._products`).
"""

import collections
import functools

import jax
import jax.numpy as jnp
from jax import lax

PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")


@functools.cache
def eye(n, dtype="float32"):
    """Returns an identity matrix to close over: it counts as a weight, wherever this is called."""
    with jax.ensure_compile_time_eval():
        return jnp.eye(n, dtype=dtype)


@functools.cache
def ones(*shape, dtype="float32"):
    """Returns an array of ones to close over: it counts as data or as a weight."""
    with jax.ensure_compile_time_eval():
        return jnp.ones(shape, dtype)


def half(x):
    """A product: under autocast its result is half. The numbers stay what they were."""
    assert x.shape[-1] > 1, "this would be a multiplication"
    return x @ eye(x.shape[-1])


def convolved(images, kernel):
    """A convolution of images whose channels are their last axis."""
    layout = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=layout)


def equations(jaxpr):
    """Yields every equation of a jaxpr and of all jaxprs inside it, but what is only for CPUs."""
    for equation in jaxpr.eqns:
        yield equation
        params = dict(equation.params)
        if platforms := params.pop("branches_platforms", None):
            pairs = zip(platforms, params["branches"], strict=True)
            params["branches"] = [branch for names, branch in pairs if names != ("cpu",)]
        for value in jax.tree.leaves(list(params.values()), is_leaf=lambda v: hasattr(v, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def equations_of(function, *args):
    """Yields every equation of what JAX traces of `function(*args)`, at any depth."""
    return equations(jax.make_jaxpr(function)(*args).jaxpr)


def named(names, function, *args):
    """Returns the equations of what JAX traces of `function(*args)` that bind such a primitive.

    `names` is the name of a primitive, or several of them.
    """
    names = (names,) if isinstance(names, str) else names
    return [e for e in equations_of(function, *args) if e.primitive.name in names]


def product_dtypes(function, *args):
    """Counts the dtypes of the products of `function(*args)`: operands and result."""
    return product_dtypes_of(jax.make_jaxpr(function)(*args).jaxpr)


def product_dtypes_of(jaxpr):
    """Counts the dtypes of the products of a jaxpr: operands and result."""
    counts = collections.Counter()
    for equation in equations(jaxpr):
        if equation.primitive.name in PRODUCTS:
            dtypes = {str(v.aval.dtype) for v in (*equation.invars, *equation.outvars)}
            counts[" ".join(sorted(dtypes))] += 1
    return dict(counts)


def operand_dtypes_of(jaxpr):
    """Returns the dtypes that products read; a result may be the float32 that it is added up in."""
    products = (e for e in equations(jaxpr) if e.primitive.name in PRODUCTS)
    return {str(v.aval.dtype) for e in products for v in e.invars}


@jax.custom_vjp
def tanh_layer(x, w):
    """A layer with a derivative of its own: three products in all."""
    return jnp.tanh(x @ w)


def _forward(x, w):
    y = jnp.tanh(x @ w)
    return y, (x, w, y)


def _backward(residuals, cotangent):
    x, w, y = residuals
    cotangent = cotangent * (1 - y**2)
    return cotangent @ w.T, x.T @ cotangent


tanh_layer.defvjp(_forward, _backward)


def half_product(dtype):
    """Returns a product with half operands and a half result; its gradients are such products."""
    return lambda x, y: (x.astype(dtype) @ y.astype(dtype)).astype(jnp.float32)
