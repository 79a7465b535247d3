"""The extremes of functions between float8 products: largest result, offset, and slope."""

import math

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import Literal

from jmp.autocasting.float8._extremes import ScalarEquation, extremes_of

INF = math.inf
LARGEST = float(jnp.finfo(jnp.bfloat16).max)
# Steps are exact, or each rounded to bfloat16: the larger of the two counts.
EXTREMES = {
    "tanh": (jnp.tanh, (1, 0, 1)),
    "square": (lambda x: x * x, (INF, 0, INF)),
    "gelu": (lambda x: 0.5 * x * (1 + lax.erf(x * 0.7071)), (LARGEST, 0, 1.1328125)),
    "large numbers that cancel": (lambda x: (x + 1000.0) - 1000.0, (LARGEST, 32, 1)),
    "a function that jumps": (jnp.floor, (LARGEST, 1, 1)),
    "not at zero": (lambda x: jnp.abs(x) * 3.0 + 5.0, (INF, 8, 3.011236)),
    "a part": (lambda x: jnp.maximum(x, -2.0) * 0.3, (1.0168594e38, 0, 0.300926)),
    "cut off": (
        lambda x: jnp.tanh(jnp.exp(jnp.minimum(x, 3.0) * 1.7) + 0.3) * 2.6,
        (2.6, 2.246976, 1.3125)),
}  # fmt: skip


def equations_of(function):
    jaxpr = jax.make_jaxpr(function)(jnp.float32(1)).jaxpr
    slots, equations = {jaxpr.invars[0]: 0}, []
    for equation in jaxpr.eqns:
        reads = ((float(v.val),) if isinstance(v, Literal) else slots[v] for v in equation.invars)
        params = tuple(sorted(equation.params.items()))
        equations.append(ScalarEquation(equation.primitive, params, tuple(reads)))
        slots[equation.outvars[0]] = len(equations)
    return tuple(equations)


@pytest.mark.parametrize("name", EXTREMES)
def test_the_extremes_of_a_function(name):
    function, expected = EXTREMES[name]
    assert tuple(extremes_of(equations_of(function))) == pytest.approx(expected, rel=1e-4)
