"""The comparison of small states: what is trained, what is marked, what a file keeps."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks import small_states
from jmp import transforms
from testbed import ROOT

pytestmark = pytest.mark.full

FOUND = json.loads((ROOT / "results" / "small_states.json").read_text())


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
    marks = lambda curves: tuple(
        small_states.summary(curves, reference)[mark] for mark in ("large", "beyond_two_spreads")
    )
    assert marks(reference) == (False, False)
    assert marks(reference + 0.001 * noise) == (False, False)
    assert marks(reference + 0.005 + 0.001 * noise) == (False, True)
    assert marks(reference + 0.02 + 0.02 * noise) == (True, False)
    assert marks(reference + np.nan) == (True, True)


def test_each_seed_draws_bits_of_its_own():
    tx = transforms.with_stochastic_rounding(
        transforms.with_stored_state(optax.sgd(0.1, momentum=0.9), "bfloat16")
    )
    state = tx.init(jnp.ones(2, jnp.bfloat16))
    apart = small_states.counted_apart(state, jnp.int32(3))
    assert apart.count == apart.inner_state.count == 3 * 2**20
    assert jax.tree.structure(apart) == jax.tree.structure(state)


@pytest.mark.parametrize("name", FOUND["digits"]["optimizers"])
def test_every_optimizer_trains_as_in_float32_with_masters_however_they_are_stored(name):
    ways = FOUND["digits"]["optimizers"][name]
    for way in ("full", "split", "kahan", "stochastic", "split, bfloat16 state"):
        assert not ways[way]["large"], way


def test_bytes_are_those_of_the_formats():
    ways = FOUND["bytes"]["ways"]
    held = {"full": 14, "split": 12, "kahan": 12, "stochastic": 10, "split, bfloat16 state": 8}
    for way, expected in (held | {"none": 10, "optax": 6}).items():
        assert ways[way]["held"] == pytest.approx(expected, abs=1e-4)
