"""The comparisons of small trainings, with small states and with loss scaling, and their files."""

import json
import operator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks import scaling_cases, small_states
from jmp import transforms
from testbed import ROOT

pytestmark = pytest.mark.full

SMALL_STATES = json.loads((ROOT / "results" / "small_states.json").read_text())
SCALING = json.loads((ROOT / "results" / "scaling_cases.json").read_text())


def test_some_ways_are_trained_anew_and_the_others_are_kept(monkeypatch, tmp_path):
    ways = {name: small_states.STRATEGIES[name] for name in ("float32", "full", "split")}
    monkeypatch.setattr(small_states, "STRATEGIES", ways)
    monkeypatch.setattr(small_states, "OPTIMIZERS", {"sgd": optax.sgd(0.1, momentum=0.9)})
    output = tmp_path / "small_states.json"
    options = [f"--output={output}", "--only=digits", "--seeds=2", "--digits-steps=25"]
    small_states.main(options)
    first = json.loads(output.read_text())["digits"]["optimizers"]["sgd"]
    assert first["float32"]["differences"] == [0, 0]
    assert 0 < max(map(abs, first["full"]["differences"])) < 0.02
    small_states.main([*options, "--ways", "split"])
    again = json.loads(output.read_text())["digits"]["optimizers"]["sgd"]
    assert again == first


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


def test_each_seed_draws_bits_of_its_own():
    inner = transforms.with_stored_state(optax.sgd(0.1, momentum=0.9), "bfloat16")
    state = transforms.with_stochastic_rounding(inner).init(jnp.ones(2, jnp.bfloat16))
    apart = small_states.counted_apart(state, jnp.int32(3))
    assert apart.count == apart.inner_state.count == 3 * 2**20
    assert jax.tree.structure(apart) == jax.tree.structure(state)


@pytest.mark.parametrize("name", SMALL_STATES["digits"]["optimizers"])
def test_every_optimizer_trains_as_in_float32_with_masters_however_they_are_stored(name):
    ways = SMALL_STATES["digits"]["optimizers"][name]
    for way in ("full", "split", "kahan", "stochastic", "split, bfloat16 state"):
        assert not ways[way]["large"], way


def test_bytes_are_those_of_the_formats():
    ways = SMALL_STATES["bytes"]["ways"]
    held = {"full": 14, "split": 12, "kahan": 12, "stochastic": 10, "split, bfloat16 state": 8}
    for way, expected in (held | {"none": 10, "optax": 6}).items():
        assert ways[way]["held"] == pytest.approx(expected, abs=1e-4)


def test_a_case_is_trained_in_each_way_and_the_others_are_kept(tmp_path):
    output = tmp_path / "found.json"
    kept = {name: SCALING["cases"][name] for name in SCALING["cases"] if "sigmoid" not in name}
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


def test_the_file_has_only_cases_of_the_program_and_each_with_all_seeds():
    assert SCALING["cases"].keys() <= scaling_cases.CASES.keys()
    for case in SCALING["cases"].values():
        assert {len(case[run]["final_losses"]) for run in scaling_cases.RUNS} == {SCALING["seeds"]}
