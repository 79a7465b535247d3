"""Random programs at inputs of any size: where float16 ends, and a loss scale with it.

A program is a list of steps of `random_programs`, between two products. Its input is multiplied by
a power of two, its loss by a loss scale. The reference has half operands and half results of
products, and computes all else in float32: whatever it can, autocast has to do as well, or show an
infinity, which skips the step. Small inputs lose digits in any half type: there autocast may not do
worse than the program that is written in half, or than the reference.
"""

import random
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jmp
from testbed.random_programs import OPERATIONS, TRANSFORMATIONS, multiply, multiplying_by, program
from testbed.relative_errors import numbers, relative_error

LOSS_SCALE = 2.0**16
POWERS = range(-12, 13)
# They say by themselves what is computed in which dtype, or which product; or have another
LEFT_OUT = ("full precision", "inner autocast", "clip gradient", "einsum")
NEAR, FAR = 0.02, 0.05  # relative errors of the reference, and of autocast


class Case(NamedTuple):
    """A program and the power of two that its input is multiplied by."""

    names: tuple[str, ...]
    power: int


class Errors(NamedTuple):
    """Relative errors of the whole gradient against float32; infinite where it is not finite.

    That of the way by hand is infinite too where it is not asked, or names float32.
    """

    reference: float
    by_hand: float
    autocast: float


def is_fault(given: Case, found: Errors) -> bool:
    """Returns whether autocast is wrong, and finite, where it should be right."""
    if given.power < 0:
        limit = max(FAR, 1.05 * max(found.reference, found.by_hand))
    else:
        limit = FAR if found.reference < NEAR else np.inf
    return limit < found.autocast < np.inf


def case(number: int) -> Case:
    """Returns the case of a number, always the same."""
    drawn = random.Random(number)
    names = [*sorted(set(OPERATIONS) - {*LEFT_OUT}), *sorted(TRANSFORMATIONS)]
    return Case(tuple(drawn.choices(names, k=drawn.randint(1, 5))), drawn.choice(POWERS))


def half_product(x: jax.Array, y: jax.Array) -> jax.Array:
    """A product with half operands and a half result, as are those of its gradients."""
    return (x.astype(jnp.float16) @ y.astype(jnp.float16)).astype(jnp.float32)


def loss_of(names: Sequence[str]):
    """Returns the loss of a program, a function of two matrices and the input."""

    def loss(weights, x):
        y = program(names)(multiply(x, weights[0]))
        return jnp.mean(multiply(y, weights[1]).astype(jnp.float32) ** 2)

    return loss


def arguments(power: int):
    """Returns two matrices and an input."""
    keys = jax.random.split(jax.random.key(0), 3)
    weights = [jax.random.normal(key, (8, 8)) / 8**0.5 for key in keys[:2]]
    return weights, 2.0**power * jax.random.normal(keys[2], (4, 8))


def errors(given: Case) -> Errors | None:
    """Returns the errors of a case; None where JAX has no gradient, or float32 is not finite."""
    loss = loss_of(given.names)
    weights, x = arguments(given.power)

    def gradient(fun, scale):
        scaled = lambda weights, x: scale * fun(weights, x).astype(jnp.float32)
        found = jax.jit(jax.grad(scaled))(weights, x)
        return numbers(found) / scale

    try:
        exact = gradient(loss, 1.0)
    except (TypeError, ValueError, NotImplementedError):  # a loop has no reverse derivative
        return None
    if not np.isfinite(exact).all() or not exact.any():
        return None
    # A function of its own: JAX would find the trace of the other one.
    with multiplying_by(half_product):
        reference = gradient(lambda weights, x: loss(weights, x), LOSS_SCALE)
    found = gradient(jmp.autocast(loss, "mixed_float16"), LOSS_SCALE)
    errors = Errors(_relative_error(reference, exact), np.inf, _relative_error(found, exact))
    if given.power >= 0 or not FAR < errors.autocast < np.inf:
        return errors
    by_hand = lambda *x: loss(*jmp.cast_floating(x, jnp.float16))
    product = lambda x, y: x.astype(jnp.float16) @ y.astype(jnp.float16)
    try:
        with multiplying_by(product):
            half = gradient(by_hand, LOSS_SCALE)
    except TypeError:  # it names float32
        return errors
    return errors._replace(by_hand=_relative_error(half, exact))


def _relative_error(found: np.ndarray, exact: np.ndarray) -> float:
    return relative_error(found, exact) if np.isfinite(found).all() else np.inf
