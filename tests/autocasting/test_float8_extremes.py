"""The extremes of functions between float8 products: largest result, offset, and slope."""

import math

import jax.numpy as jnp
import pytest
from jax import lax

from jmp.autocasting._autocast import make_program
from jmp.autocasting.float8._extremes import FunctionOfProduct

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


@pytest.mark.parametrize("name", EXTREMES)
def test_the_extremes_of_a_function(name):
    function, expected = EXTREMES[name]
    program = make_program(function, "mixed_bfloat16").trace((jnp.float32(1),), {})
    (argument,), nodes = program.plan.graph.inputs, program.plan.graph.nodes
    found = FunctionOfProduct(argument, (), argument, tuple(nodes)).extremes
    assert tuple(found) == pytest.approx(expected, rel=1e-4)
