"""The comparisons of small trainings, with small states and with loss scaling, and their files."""

import json
import operator

import numpy as np
import pytest

from benchmarks import scaling_cases, small_states
from testbed import ROOT

pytestmark = pytest.mark.full

SMALL_STATES = json.loads((ROOT / "results" / "small_states.json").read_text())
SCALING = json.loads((ROOT / "results" / "scaling_cases.json").read_text())


def test_a_difference_is_marked_where_it_is_large_or_beyond_its_spread():
    reference = np.zeros((5, 30))
    noise = np.linspace(-1, 1, 5)[:, None]
    marks_of = operator.itemgetter("large", "beyond_two_spreads")
    marks = lambda curves: marks_of(small_states.summary(curves, reference))
    assert marks(reference) == (False, False)
    assert marks(reference + 0.001 * noise) == (False, False)
    assert marks(reference + 0.005 + 0.001 * noise) == (False, True)
    assert marks(reference + 0.02 + 0.02 * noise) == (True, False)
    assert marks(reference + np.nan) == (True, True)


@pytest.mark.parametrize("name", SMALL_STATES["digits"]["optimizers"])
def test_every_optimizer_trains_as_in_float32_with_masters_however_they_are_stored(name):
    ways = SMALL_STATES["digits"]["optimizers"][name]
    for way in ("full", "split", "kahan", "stochastic", "split, bfloat16 state"):
        assert not ways[way]["large"], way


def test_the_file_has_only_cases_of_the_program_and_each_with_all_seeds():
    assert SCALING["cases"].keys() <= scaling_cases.CASES.keys()
    for case in SCALING["cases"].values():
        assert {len(case[run]["final_losses"]) for run in scaling_cases.RUNS} == {SCALING["seeds"]}
