"""The comparison of small trainings with small states, and its file."""

import json

import jax
import jax.numpy as jnp
import optax
import pytest

from benchmarks import small_states
from jmp import transforms
from testbed import ROOT

pytestmark = pytest.mark.full

SMALL_STATES = json.loads((ROOT / "results" / "small_states.json").read_text())


def test_each_seed_draws_bits_of_its_own():
    inner = transforms.with_stored_state(optax.sgd(0.1, momentum=0.9), "bfloat16")
    state = transforms.with_stochastic_rounding(inner).init(jnp.ones(2, jnp.bfloat16))
    apart = small_states.counted_apart(state, jnp.int32(3))
    assert apart.count == apart.inner_state.count == 3 * 2**20
    assert jax.tree.structure(apart) == jax.tree.structure(state)


def test_bytes_are_those_of_the_formats():
    ways = SMALL_STATES["bytes"]["ways"]
    held = {"full": 14, "split": 12, "kahan": 12, "stochastic": 10, "split, bfloat16 state": 8}
    for way, expected in (held | {"none": 10, "optax": 6}).items():
        assert ways[way]["held"] == pytest.approx(expected, abs=1e-4)
