"""Transformations make and update their states by the programs that are written down."""

import pytest

from tests.autocasting.plans import HAS_THESE_TRACES
from tests.transforms.programs import CASES, LIST, line_of


@pytest.mark.skipif(not HAS_THESE_TRACES, reason="the traces of JAX 0.10")
@pytest.mark.parametrize("case", CASES, ids=", ".join)
def test_a_state_is_made_and_updated_by_the_program_that_is_written_down(case):
    message = (
        "If it is meant to change, run tests/h200/test_update_step.py, then\n"
        "  python -m tests.transforms.programs"
    )
    assert line_of(*case) in LIST.read_text().splitlines(), message
