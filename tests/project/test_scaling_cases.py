"""The comparison of small trainings with and without loss scaling."""

import json

import numpy as np
import pytest

from benchmarks import scaling_cases
from testbed import ROOT

pytestmark = pytest.mark.full

FOUND = json.loads((ROOT / "results" / "scaling_cases.json").read_text())


def test_a_case_is_trained_in_each_way_and_the_others_are_kept(tmp_path):
    output = tmp_path / "found.json"
    kept = {name: FOUND["cases"][name] for name in FOUND["cases"] if "sigmoid" not in name}
    output.write_text(json.dumps({"cases": kept}))
    name = "autoencoder, 8 sigmoid layers"
    scaling_cases.main([f"--output={output}", "--only", name, "--steps=12", "--seeds=2"])
    cases = json.loads(output.read_text())["cases"]
    assert list(cases) == [case for case in scaling_cases.CASES if case in {name, *kept}]
    assert {case: cases[case] for case in kept} == kept
    shares = {run: np.mean(cases[name][run]["zero_gradients"]) for run in scaling_cases.RUNS}
    assert shares["unscaled"] > 0.4
    assert shares["scaled"] == pytest.approx(shares["float32"], abs=0.01)
    losses = {run: cases[name][run]["final_losses"] for run in scaling_cases.RUNS}
    np.testing.assert_allclose(losses["scaled"], losses["float32"], rtol=1e-3)


def test_the_file_has_cases_of_the_program_alone_each_with_all_seeds():
    assert FOUND["cases"].keys() <= scaling_cases.CASES.keys()
    for case in FOUND["cases"].values():
        assert {len(case[run]["final_losses"]) for run in scaling_cases.RUNS} == {FOUND["seeds"]}
