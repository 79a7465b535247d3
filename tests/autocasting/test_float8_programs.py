"""Random chains of moves, biases, functions, gates and blocks between float8 products."""

import jax
import jax.numpy as jnp
import pytest

from jmp.autocasting.float8 import _arithmetic
from testbed import float8_verdicts as programs

pytestmark = pytest.mark.full

NUMBERS = 30


@pytest.mark.usefixtures("small_is_float8", "users_rank_promotion")
@pytest.mark.parametrize("first", range(0, NUMBERS, 10))
def test_gradients_of_random_programs_are_near_wherever_those_of_bfloat16_are_right(
    first, quick_compilation
):
    rows = [programs.compare(number) for number in range(first, first + 10)]
    assert [row for row in rows if row["verdict"] not in ("near", programs.BEYOND)] == []
    assert sum(row["verdict"] == "near" for row in rows) >= 8
    assert sum(row["float8_products"] for row in rows) > 20
    assert any(row["bounded_products"] for row in rows)


@pytest.mark.usefixtures("small_is_float8", "users_rank_promotion")
def test_what_is_not_finite_is_a_finding(monkeypatch):
    multiply = _arithmetic.multiply
    spoilt = lambda *args: jax.tree.map(lambda x: x * jnp.nan, multiply(*args))
    monkeypatch.setattr(_arithmetic, "multiply", spoilt)
    assert programs.compare(3)["verdict"] == "not finite"


def test_float8_is_far_if_neither_bfloat16_nor_rounded_inputs_are():
    assert programs.verdict(0.009, 0.31, 0.1) == "far"
    assert programs.verdict(0.009, 0.31, 0.11) == programs.BEYOND  # nearly so with inputs rounded
    assert programs.verdict(0.01, 0.31, 0.0) == programs.BEYOND  # five bits fewer
    assert programs.verdict(0.03, 0.31, 0.0) == programs.BEYOND
    assert programs.verdict(0.03, float("nan"), 0.0) == "not finite"


def test_the_number_of_a_program_is_all_that_it_depends_on():
    first, again = (programs.program(7) for _ in range(2))
    assert first.names == again.names
    jax.tree.map(lambda a, b: (a == b).all() or pytest.fail(), first.params, again.params)
