"""Generation under autocast: the tokens and log-probabilities of the loop by hand, or better."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp
from jmp import _jax_compat
from jmp.autocasting.targets import _cross_entropy
from jmp.diagnostics import logprob_gap
from testbed.decoding import CACHES, LOOPS, SMALL, Decoder
from tests.errors import largest_error
from tests.products import named


def text(decoder):
    """Returns parameters, and a text that these generate."""
    params, first = decoder.example()
    return params, jnp.concatenate([first[None], decoder(params, first)[0]])


@pytest.mark.full
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("cache", CACHES)
def test_log_probabilities_are_as_exact_as_by_hand(cache, loop):
    exact = Decoder(loop=loop, cache=cache, **SMALL)
    by_hand = Decoder(jnp.bfloat16, loop, cache, **SMALL)
    params, tokens = text(exact)
    score = jmp.autocast(exact.score, "mixed_bfloat16")
    ours = logprob_gap(exact.score, score)(params, tokens)
    theirs = logprob_gap(exact.score, by_hand.score)(params, tokens)
    print(f"{cache} {loop}: mean gap {ours.mean:.4f}, by hand {theirs.mean:.4f}")
    assert 0 < ours.mean <= 1.1 * theirs.mean


@pytest.mark.full
@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_prefill_and_decoding_are_no_further_apart_than_by_hand(half):
    exact = Decoder(**SMALL)
    by_hand = Decoder(getattr(jnp, half), **SMALL)
    params, tokens = text(exact)
    at_once, in_turns = (
        jmp.autocast(function, f"mixed_{half}") for function in (exact.score_at_once, exact.score)
    )
    ours = logprob_gap(at_once, in_turns)(params, tokens)
    theirs = logprob_gap(by_hand.score_at_once, by_hand.score)(params, tokens)
    print(f"{half}: mean gap {ours.mean:.2g}, by hand {theirs.mean:.2g}")
    assert 0 < ours.mean <= 1.1 * theirs.mean
    assert logprob_gap(exact.score_at_once, exact.score)(params, tokens).maximum < 1e-4


def test_sampling_takes_random_bits_as_without_autocast():
    decoder = Decoder(**SMALL)
    params, first = decoder.example()

    def sample(params, key):
        def turn(params, number, token, caches):
            logits, caches = decoder.logits(params, number, token, caches)
            token = jax.random.categorical(jax.random.fold_in(key, number), logits)
            return token, caches, jnp.zeros(token.shape)

        return decoder.start(params, first, turn)[0]

    tokens = jmp.autocast(sample, "mixed_bfloat16")(params, jax.random.key(0))
    same = np.mean(np.asarray(tokens == sample(params, jax.random.key(0)))[:4])
    assert same > 0.7  # a first token that differs by its rounding changes all that follow


def weights_in_loops(function, *args):
    """Returns the dtypes of the matrices that the outermost loop of a program closes over."""
    loop, *_ = named("scan", function, *args)
    constants, _, _ = _jax_compat.Scan.of(loop.params).split(loop.invars)
    matrices = [x.aval for x in constants if x.aval.ndim > 1 and min(x.aval.shape[-2:]) > 2]
    assert matrices
    return {str(matrix.dtype) for matrix in matrices}


AROUND = {"checkpoint": jax.checkpoint, "jit": jax.jit}


@pytest.mark.parametrize("way", ["plain", "vmap", *AROUND, "eight devices"])
def test_weights_are_rounded_before_the_loop(way):
    decoder = Decoder(**SMALL)
    params, first = decoder.example()
    generate = jmp.autocast(decoder, "mixed_bfloat16")
    if way == "vmap":
        generate, first = jax.vmap(generate, (None, 0)), jnp.stack([first, first])
    if way in AROUND:
        generate = AROUND[way](generate)
    if way == "eight devices":
        mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        divided = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "data"))
        params["blocks"] = jax.tree.map(
            lambda x: x if x.shape[1] % 8 else jax.device_put(x, divided), params["blocks"]
        )
        tokens, _ = jax.jit(generate)(params, first)
        assert tokens.shape == (decoder.length, decoder.batch)
    assert weights_in_loops(generate, params, first) == {"bfloat16"}


@pytest.mark.full
@pytest.mark.parametrize("cache", ["stacked", "filled"])
def test_differentiated_generation_has_float32_weights_and_caches(cache):
    """The gradient of a text's log-probability through the loop, as without a cache."""
    decoder = Decoder(cache=cache, **{**SMALL, "length": 16})
    params, tokens = text(decoder)
    exact = jax.grad(lambda p: decoder.score(p, tokens).mean())(params)
    mixed = jmp.autocast(decoder.score, "mixed_bfloat16")
    found = jax.grad(lambda p: mixed(p, tokens).mean())(params)
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.dtype("float32")}
    assert largest_error(found, exact) < 0.03


@pytest.mark.parametrize("loop", LOOPS)
def test_labels_are_gathered_where_no_gradient_goes_backwards(loop, monkeypatch):
    monkeypatch.setattr(_cross_entropy, "LARGE", 1)
    decoder = Decoder(loop=loop, **SMALL)
    params, tokens = text(decoder)
    rows, labels = 1, 1
    mixed = jmp.autocast(decoder.score, "mixed_bfloat16")
    assert len(named("gather", mixed, params, tokens)) == rows + labels
    if loop == "scan":  # JAX does not transpose the other
        gradient = jax.grad(lambda p: mixed(p, tokens).mean())
        assert len(named("gather", gradient, params)) == rows
