"""Errors of numbers that were computed in half precision."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jmp
from testbed.relative_errors import relative_error as relative_error
from tests.products import half_product


def largest_error(got, expected):
    """The largest relative error of any array of a tree."""
    return max(jax.tree.leaves(jax.tree.map(relative_error, got, expected)))


def errors_beside_half_products(program, half, arguments):
    """The errors of a program's value and gradient: under autocast, and with half products by hand.

    Args:
      program: a scalar function of the product to use and of `arguments`.
      half: a half type.
      arguments: parameters first, of which the gradient is taken.
    """

    def gradient_of(function):
        return jax.jit(jax.value_and_grad(function))(*arguments)

    exact = functools.partial(program, jnp.matmul)
    autocast = jmp.autocast(exact, jmp.Policy(jnp.float32, half, jnp.float32))
    by_hand = functools.partial(program, half_product(half))
    wanted = gradient_of(exact)
    return tuple(relative_error(gradient_of(function), wanted) for function in (autocast, by_hand))


def assert_close(got, expected, rtol=0.0, atol=0.0):
    """Compares two trees: their structure, and shape, dtype and numbers of each array."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for x, y in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        assert (jnp.shape(x), jnp.result_type(x)) == (jnp.shape(y), jnp.result_type(y))
        np.testing.assert_allclose(x, y, rtol, atol)


def assert_near(got, expected, bound):
    """The same, with numbers that differ by no more than `bound` of the largest of their array."""
    near = lambda x, y: assert_close(x, y, atol=bound * float(np.abs(y).max()))
    jax.tree.map(near, got, expected)


def assert_all_derivatives(got, expected, tolerance, *args, argnums=0):
    """Compares both Jacobians and the Hessian, by the largest number of each."""
    for derivative in (jax.jacfwd, jax.jacrev, jax.hessian):
        found, exact = (derivative(function, argnums)(*args) for function in (got, expected))
        assert_near(found, exact, tolerance)
