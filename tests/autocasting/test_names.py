"""What `checkpoint_name` marks beside a float32 island is kept in half."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import jmp
from tests.errors import relative_error
from tests.products import named

W = jax.random.normal(jax.random.key(0), (64, 64)) / 8
X = jax.random.normal(jax.random.key(1), (8, 64))


def layer_norm(y):
    return (y - y.mean(-1, keepdims=True)) * jax.lax.rsqrt(y.var(-1, keepdims=True) + 1e-6)


ISLANDS = {
    "gelu": jax.nn.gelu,
    "softmax": jax.nn.softmax,
    "layer norm": layer_norm,
    "rms norm": lambda y: y * jax.lax.rsqrt(jnp.mean(y**2, -1, keepdims=True) + 1e-6),
}
PLACES = {
    "before": lambda island, y: island(checkpoint_name(y, "kept")),
    "behind": lambda island, y: checkpoint_name(island(y), "kept"),
    "both": lambda island, y: checkpoint_name(island(checkpoint_name(y, "kept")), "kept"),
    "moved": lambda island, y: island(checkpoint_name(y.T, "kept").T),
}
POLICIES = {
    "only these": jax.checkpoint_policies.save_only_these_names("kept"),
    "any but these": jax.checkpoint_policies.save_any_names_but_these("other"),
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=["kept"],
        names_which_can_be_offloaded=[],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}


def block(island, place, x, w):
    return PLACES[place](ISLANDS[island], x @ w) @ w


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("island", ISLANDS)
def test_a_name_beside_an_island_is_half(island, place, half):
    lowered = jmp.autocast(lambda x, w: block(island, place, x, w).sum(), f"mixed_{half}")
    marked = named("name", lowered, X, W)
    assert {str(e.outvars[0].aval.dtype) for e in marked} == {half}
    exact = block(island, place, X, W).sum()
    np.testing.assert_allclose(lowered(X, W), exact, rtol=0.05, atol=0.5)


@pytest.mark.parametrize("policy", POLICIES)
def test_what_a_policy_keeps_by_name_is_half(policy):
    def loss(w, x):
        for island in ("gelu", "rms norm", "gelu"):
            call = functools.partial(block, island, "before")
            x = jax.checkpoint(call, policy=POLICIES[policy])(x, w)
        return jnp.sum(x**2)

    lowered = jmp.autocast(loss, "mixed_bfloat16")
    _, pull_back = jax.vjp(lowered, W, X)
    kept = [leaf for leaf in jax.tree.leaves(pull_back) if leaf.shape == X.shape]
    # The input of the whole and what the loss squares are float32, all others of this shape half.
    assert sum(leaf.dtype == jnp.float32 for leaf in kept) <= 2 < len(kept) - 2
    assert relative_error(jax.grad(lowered)(W, X), jax.grad(loss)(W, X)) < 0.03
