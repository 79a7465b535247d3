"""Random chains of moves, biases, functions, gates and blocks between float8 products.

`python -m benchmarks.soak float8_programs` runs 2,000 of them.
"""

import json

import jax
import pytest

from benchmarks.processes import ROOT
from benchmarks.soak import float8_programs as programs
from jmp.autocasting._autocast import make_program
from jmp.autocasting._passes import Pass
from jmp.autocasting._steps import Nested, Plan
from jmp.autocasting.float8 import _arithmetic
from jmp.autocasting.float8._arithmetic import ProductForm
from jmp.autocasting.float8._passes import ProductInFloat8, products_in_float8
from testbed.passes import changed_targets

pytestmark = pytest.mark.full

NUMBERS = 30
SMALL_IS_FLOAT8 = pytest.mark.usefixtures("small_is_float8", "users_rank_promotion")


@SMALL_IS_FLOAT8
@pytest.mark.parametrize("first", range(0, NUMBERS, 10))
def test_gradients_of_random_programs_are_near_wherever_those_of_bfloat16_are_right(
    first, quick_compilation
):
    rows = [programs.compare(number) for number in range(first, first + 10)]
    assert [row for row in rows if row["verdict"] not in ("near", programs.BEYOND)] == []
    assert sum(row["verdict"] == "near" for row in rows) >= 8
    assert sum(row["float8_products"] for row in rows) > 20
    assert any(row["bounded_products"] for row in rows)


def levels(plan):
    """Yields a plan, and those inside its steps."""
    yield plan
    for step in plan.steps:
        for inside in step.insides if isinstance(step, Nested) else ():
            if isinstance(inside, Plan):
                yield from levels(inside)


def readers_without_bound(plan):
    """Returns what reads the result of a bounded product on some way, and gives back no bound."""
    in_float8 = products_in_float8(plan.steps)
    found = []
    for product, lowering in in_float8.items():
        (result,) = product.outputs
        stack = [result] if lowering.form.is_bounded else []
        while stack:
            value = stack.pop()
            found += ["the caller"] * (value in plan.graph.outputs)
            for user in value.users:
                if user not in in_float8:
                    stack += user.outputs
                    continue
                for read, bounds in zip(user.inputs, in_float8[user].factors, strict=True):
                    if read is value and result not in [bound.product for bound in bounds]:
                        found.append(user)
    return found


def bounds_that_nobody_gives(plan):
    """Returns the products whose bounds are read, and which have none."""
    products = products_in_float8(plan.steps)
    given = {node.outputs[0] for node, product in products.items() if product.form.is_bounded}
    read = {b.product for product in products.values() for each in product.factors for b in each}
    return read ^ given


@SMALL_IS_FLOAT8
def test_who_gives_a_bound_and_who_reads_it_agree_in_every_plan():
    bounded = 0
    for number in range(NUMBERS, NUMBERS + 40):
        loss, params, x, _ = programs.program(number)
        program = make_program(loss, "mixed_float8", float8="all")
        for plan in levels(program.trace((params, x), {}).plan):
            assert readers_without_bound(plan) == []
            assert bounds_that_nobody_gives(plan) == set()
            products = products_in_float8(plan.steps)
            bounded += sum(product.form.is_bounded for product in products.values())
    assert bounded > 20


def test_a_product_that_waits_for_a_bound_that_nobody_gives_is_a_finding(monkeypatch, capsys):
    def without_readers(steps, _):
        bounded = ProductInFloat8(ProductForm(is_shared=False, is_bounded=True))
        products = products_in_float8(steps)
        return [
            s._replace(lowering=bounded) if getattr(s, "node", None) in products else s
            for s in steps
        ]

    def changed(target):
        without = target.without("float8 bounds")
        return without._replace(passes=(*without.passes, Pass("no readers", "", without_readers)))

    with changed_targets(changed):
        programs.main(3, 4)
    (row,) = json.loads(capsys.readouterr().out)
    assert row["verdict"] == "not finite" and row["steps"]
    monkeypatch.setattr(_arithmetic, "multiply", lambda *_: 1 / 0)
    programs.main(3, 4)
    (row,) = json.loads(capsys.readouterr().out)
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
