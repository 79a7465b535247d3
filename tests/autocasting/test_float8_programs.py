"""Random chains of moves, biases, functions, gates and blocks between float8 products.

`python -m benchmarks.soak float8_programs` runs 2,000 of them.
"""

import json

import jax
import jax.numpy as jnp
import pytest

from benchmarks.processes import ROOT
from benchmarks.soak import float8_programs as programs
from jmp.autocasting.float8 import _arithmetic

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


def test_what_is_not_finite_is_a_finding_and_so_is_an_error(monkeypatch, capsys):
    def verdict_of(multiply):
        monkeypatch.setattr(_arithmetic, "multiply", multiply)
        programs.main(3, 4)
        (row,) = json.loads(capsys.readouterr().out)
        return row

    multiply = _arithmetic.multiply
    row = verdict_of(lambda *args: jax.tree.map(lambda x: x * jnp.nan, multiply(*args)))
    assert row["verdict"] == "not finite" and row["steps"]
    row = verdict_of(lambda *_: 1 / 0)
    assert row["verdict"] == "raised" and "ZeroDivisionError" in row["why"]
    assert programs.verdict(0.009, 0.31, 0.1) == "far"
    assert programs.verdict(0.009, 0.31, 0.11) == programs.BEYOND  # nearly so with inputs rounded
    assert programs.verdict(0.01, 0.31, 0.0) == programs.BEYOND  # five bits fewer
    assert programs.verdict(0.03, 0.31, 0.0) == programs.BEYOND
    assert programs.verdict(0.03, float("nan"), 0.0) == "not finite"


def test_the_number_of_a_program_is_all_that_it_depends_on():
    first, again = (programs.program(7) for _ in range(2))
    assert first.names == again.names
    jax.tree.map(lambda a, b: (a == b).all() or pytest.fail(), first.params, again.params)


def test_of_the_programs_of_the_long_check_none_was_not_finite():
    found = json.loads((ROOT / "results" / "soak.json").read_text())["float8_programs"]
    assert found["passed"] and found["programs"] >= 2000 and found["faults"] == []
    assert found["verdicts"]["near"] > 0.95 * found["programs"]
    assert found["bounded_products"] > found["programs"] / 2
