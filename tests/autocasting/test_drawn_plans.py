"""Programs that were drawn have the plans, gradients and reports that are written down."""

import pytest

from tests.autocasting.drawn_plans import lines_of, parts, written
from tests.autocasting.plans import HAS_THESE_TRACES


@pytest.mark.skipif(not HAS_THESE_TRACES, reason="the traces of JAX 0.10")
@pytest.mark.parametrize("part", parts())
def test_programs_that_were_drawn_have_the_plans_that_are_written_down(part):
    found = list(lines_of(part))
    differ = [line for line, known in zip(found, written()[part], strict=True) if line != known]
    assert not differ, (
        "If these are meant to change, see how they do by\n"
        "  python -m benchmarks.plan_sample compare --base main\n"
        "and write them down by\n  python -m tests.autocasting.drawn_plans"
    )


def test_what_is_written_down_are_these_programs():
    assert list(written()) == parts()
