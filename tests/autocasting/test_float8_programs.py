"""Random chains of moves, biases, functions, gates and blocks between float8 products.

`python -m benchmarks.soak float8_programs` runs 2,000 of them.
"""

import json

import pytest

from benchmarks.processes import ROOT
from benchmarks.soak import float8_programs as programs

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


def test_of_the_programs_of_the_long_check_none_was_not_finite():
    found = json.loads((ROOT / "results" / "soak.json").read_text())["float8_programs"]
    assert found["passed"] and found["programs"] >= 2000 and found["faults"] == []
    assert found["verdicts"]["near"] > 0.95 * found["programs"]
    assert found["bounded_products"] > found["programs"] / 2
