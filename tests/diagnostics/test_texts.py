"""Reports of a few programs print what is written down."""

import pytest

from tests.autocasting.plans import HAS_THESE_TRACES
from tests.diagnostics.texts import TEXTS, text_of, written


@pytest.mark.skipif(not HAS_THESE_TRACES, reason="the traces of JAX 0.10")
@pytest.mark.parametrize("name", TEXTS)
def test_a_report_prints_what_is_written_down(name):
    message = "If it is meant to change: python -m tests.diagnostics.texts"
    assert text_of(name) == written()[name], message
