"""Each program of `testbed/planned/` has the plan that is written down in `plan_listings/`."""

import pytest

from testbed.planned import MODULES
from tests.autocasting.plans import HAS_THESE_TRACES, listing_of, written_plans

CASES = [(name, case) for name, module in MODULES.items() for case in module.CASES]


@pytest.mark.skipif(not HAS_THESE_TRACES, reason="the traces of JAX 0.10")
@pytest.mark.parametrize(
    ("module", "case"), CASES, ids=[f"{name}-{case.fun.__name__}" for name, case in CASES]
)
def test_a_program_has_the_plan_that_is_written_down(module, case):
    plans = written_plans(module)
    assert case.fun.__name__ in plans, "run: python -m tests.autocasting.plans"
    assert "\n".join(listing_of(case)) == plans[case.fun.__name__]


@pytest.mark.parametrize("name", MODULES)
def test_each_plan_that_is_written_down_is_that_of_a_program(name):
    assert list(written_plans(name)) == [case.fun.__name__ for case in MODULES[name].CASES]
