"""A loop's carry is half if only products read it, and float32 if arithmetic reads it.

Each program is a turn of a loop. The carry that is asked about is called "kept"; beside it is "x",
the activation. The loop is a scan and a while loop.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jmp
from jmp import _jax_compat
from testbed import decoding
from tests.products import named

TURNS, ROWS, WIDTH = 8, 4, 16
PAGE = 2
W = jnp.eye(WIDTH) * 0.9
X = jnp.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH)
CACHE = jnp.zeros((ROWS, TURNS, WIDTH))


class Turn(NamedTuple):
    """A program: what "kept" is at first, one turn of the loop, and what is done afterwards."""

    turn: Callable[[Any, Any, Any], tuple[Any, Any]]  # of kept, x and the turn's number
    kept: Any = CACHE
    after: Callable[[Any], Any] = lambda kept: jnp.zeros(())


def attended(x, cache):
    """A product of queries and the cache, and one of weights and the cache."""
    weights = jax.nn.softmax(jnp.einsum("bd,btd->bt", x @ W, cache))
    return jnp.einsum("bt,btd->bd", weights, cache) @ W


def filled(cache, x, t):
    return lax.dynamic_update_slice(cache, (x @ W)[:, None], (0, t, 0))


def with_cache(update, read=attended):
    """A turn that attends to what `update` makes of the cache."""

    def turn(kept, x, t):
        kept = update(kept, x, t)
        return kept, read(x, kept)

    return turn


def with_paged_cache(kept, x, t):
    table = jnp.arange(TURNS // PAGE)[::-1]
    kept = kept.at[table[t // PAGE], :, t % PAGE].set(x @ W)
    return kept, attended(x, jnp.swapaxes(kept[table], 0, 1).reshape(CACHE.shape))


def stacked_rows(kept, x, t, read=attended):
    """Layers, of whose caches each is a row of "kept"; with rotary positions."""

    def layer(x, cache):
        angles = t * 10.0 ** -jnp.arange(WIDTH)
        x = x * jnp.cos(angles)[None] + jnp.roll(x, 1, -1) * jnp.sin(angles)[None]
        cache = filled(cache, x, t)
        return read(x, cache), cache

    x, kept = lax.scan(layer, x, kept)
    return kept, x


def stacked_carry(kept, x, t):
    def layer(index, carry):
        x, kept = carry
        cache = filled(kept[index], x, t)
        return attended(x, cache), kept.at[index].set(cache)

    x, kept = lax.fori_loop(0, 2, layer, (x, kept))
    return kept, x


def in_a_branch(kept, x, t):
    return lax.cond(t < 5, lambda: (filled(kept, x, t), x @ W), lambda: (kept, x))


def record_through_a_branch(kept, x, t):
    written = kept.at[t].set(jax.nn.log_softmax(x)[:, 0])
    return lax.cond(t < 5, lambda kept: (written, x @ W), lambda kept: (kept, x), kept)


def for_each_sequence(kept, x, t):
    update = lambda cache, row, place: lax.dynamic_update_slice(cache, row[None], (place, 0))
    kept = jax.vmap(update)(kept, x @ W, (t + jnp.arange(ROWS)) % TURNS)
    return kept, attended(x, kept)


def in_a_region(x, kept):
    return jmp.full_precision(attended)(x, kept) @ W


def in_a_region_of_layers(kept, x, t):
    kept, x = stacked_rows(kept, x, t, in_a_region)
    return kept, x @ W


def with_highest(x, kept):
    return jnp.einsum("bd,btd->bt", x, kept, precision="highest") @ kept[0] @ W


def normalised_on_reading(x, kept):
    return attended(x, kept * lax.rsqrt(jnp.mean(kept * kept, -1, keepdims=True) + 1e-6))


def gru(kept, x, t):
    gate = jax.nn.sigmoid(kept @ W)
    kept = (1 - gate) * kept + gate * jnp.tanh(kept @ W + x)
    return kept, kept @ W


def next_to_a_sum(kept, x, t):
    """A float32 sum receives a carry that otherwise only products read."""
    h, total = kept
    return (jnp.tanh(h @ W), total + h), x @ W


def in_dtypes_of_the_user(x, w):
    return (x.astype(jnp.float16) @ w.astype(jnp.float16)).astype(jnp.float32)


@jax.custom_jvp
def product_with_a_rule(kept, w):
    return kept @ w


@product_with_a_rule.defjvp
def _(primals, tangents):
    kept, w = primals
    return kept @ w, (kept - 1000.0) @ tangents[1]


def with_record(read):
    """A turn that writes into a buffer, of which it reads a part."""
    return lambda kept, x, t: (kept.at[t].set(x @ W), read(kept[0], x))


STACKED = jnp.zeros((2, *CACHE.shape))
ROW_OF_EACH = jnp.zeros((TURNS, ROWS, WIDTH))
RECORD = jnp.zeros((TURNS, ROWS))

# What a turn makes of the cache before it attends to it.
UPDATED = {
    "dynamic_update_slice": filled,
    "at set": lambda kept, x, t: kept.at[:, t].set(x @ W),
    "what islands write": lambda kept, x, t: kept.at[:, t].set(jnp.exp(x)),
    "a window": lambda kept, x, t: jnp.concatenate([kept[:, 1:], x[:, None]], 1),
    "beams": lambda kept, x, t: filled(kept, x, t)[jnp.array([1, 0, 3, 3])],
    "finished sequences": lambda kept, x, t: jnp.where(
        x[:, :1, None] > 0, filled(kept, x, t), kept
    ),
    "a branch": lambda kept, x, t: in_a_branch(kept, x, t)[0],
}
IN_HALF = {
    **{name: Turn(with_cache(update)) for name, update in UPDATED.items()},
    "pages": Turn(with_paged_cache, jnp.zeros((TURNS // PAGE, ROWS, PAGE, WIDTH))),
    "a place for each sequence": Turn(for_each_sequence),
    "layers as rows": Turn(stacked_rows, STACKED),
    "layers as a carry": Turn(stacked_carry, STACKED),
    "transposed": Turn(
        lambda kept, x, t: (kept.at[:, :, t].set(x @ W), attended(x, jnp.swapaxes(kept, 1, 2))),
        jnp.swapaxes(CACHE, 1, 2),
    ),
    "checkpoint": Turn(jax.checkpoint(with_cache(filled))),
    "read before it is written": Turn(lambda kept, x, t: (filled(kept, x, t), attended(x, kept))),
    "returned": Turn(with_cache(filled), after=lambda kept: kept),
    "cast by the user": Turn(
        lambda kept, x, t: (filled(kept, x, t), attended(x, kept.astype(jnp.bfloat16)))
    ),
    "hidden state": Turn(lambda kept, x, t: (jnp.tanh(kept @ W + x), x @ W), X),
    "hidden state, read after": Turn(
        lambda kept, x, t: (jnp.tanh(kept @ W + x), x @ W), X, lambda kept: jnp.sum(kept * kept)
    ),
}

IN_FLOAT32 = {
    "a sum": Turn(lambda kept, x, t: (kept + x @ W, x @ W), X),
    "a gated unit": Turn(gru, X),
    "a maximum": Turn(lambda kept, x, t: (jnp.maximum(kept, x @ W), kept @ W), X),
    "added to at a place": Turn(with_cache(lambda kept, x, t: kept.at[:, t].add(x @ W))),
    "outer products, added up": Turn(
        lambda kept, x, t: (kept + jnp.einsum("bd,be->de", x, x), x @ kept), W
    ),
    "a record through a branch": Turn(record_through_a_branch, RECORD, lambda kept: kept),
    "normalised on reading": Turn(with_cache(filled, normalised_on_reading)),
    "read by a sum after the loop": Turn(with_cache(filled), after=lambda kept: jnp.sum(kept**2)),
    "a product with precision": Turn(with_cache(filled, with_highest)),
    "a region inside layers": Turn(in_a_region_of_layers, STACKED),
    "an angle": Turn(with_record(lambda kept, x: x @ jnp.sin(kept).T @ X), ROW_OF_EACH),
    "a product in dtypes of the user": Turn(
        with_record(lambda kept, x: in_dtypes_of_the_user(kept, W)), ROW_OF_EACH
    ),
    "the rule of a derivative": Turn(
        with_record(lambda kept, x: product_with_a_rule(kept, W)), ROW_OF_EACH
    ),
    "changing places, and a sum after the loop": Turn(
        lambda kept, x, t: (kept[::-1], x @ W + kept[0] @ W), (X, X), lambda kept: jnp.sum(kept[0])
    ),
    "next to a sum": Turn(next_to_a_sum, (X, X)),
}


def looped(case, loop):
    """Returns a function without arguments, and the places of "kept" among the loop's carries."""
    turn, kept, after = case

    def scanned(kept, x):
        step = lambda carry, t: (turn(*carry, t), None)
        kept, x = lax.scan(step, (kept, x), jnp.arange(TURNS))[0]
        return after(kept), jnp.sum(x)

    def repeated(kept, x):
        step = lambda carry: (carry[0] + 1, *turn(*carry[1:], carry[0]))
        _, kept, x = lax.while_loop(lambda carry: carry[0] < TURNS, step, (0, kept, x))
        return after(kept), jnp.sum(x)

    return {"scan": scanned, "while": repeated}[loop]


def dtypes_kept(case, loop):
    """Returns the dtypes of "kept" as the loop under autocast carries it."""
    mixed = jmp.autocast(looped(case, loop), "mixed_bfloat16")
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(case.kept)]
    equation, *_ = named(loop, mixed, case.kept, X)
    params = equation.params
    if loop == "scan":
        _, carries, _ = _jax_compat.Scan.of(params).split(equation.invars)
    else:
        _, _, carries = _jax_compat.While.of(params).split(equation.invars)
        carries = carries[1:]
    carries = carries[: len(shapes)]
    assert [carry.aval.shape for carry in carries] == shapes
    return {str(carry.aval.dtype) for carry in carries}


@pytest.mark.parametrize("loop", decoding.LOOPS)
@pytest.mark.parametrize("name", IN_HALF)
def test_what_products_alone_read_is_carried_in_half(name, loop):
    assert dtypes_kept(IN_HALF[name], loop) == {"bfloat16"}


@pytest.mark.parametrize("loop", decoding.LOOPS)
@pytest.mark.parametrize("name", IN_FLOAT32)
def test_what_anything_else_reads_is_carried_in_float32(name, loop):
    assert dtypes_kept(IN_FLOAT32[name], loop) == {"float32"}


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_the_gradient_of_a_buffer_adds_up_in_float32(policy):
    """Each of 4096 turns adds one to the gradient of a row that none of them writes."""

    def loss(prefix):
        def turn(carry, _):
            kept, x = carry
            return (kept.at[1].set(jnp.tanh(x)), x), (kept[:1] @ jnp.eye(WIDTH)[:, :1])

        return jnp.sum(lax.scan(turn, (prefix, jnp.zeros(WIDTH)), None, 4096)[1])

    prefix = jnp.zeros((2, WIDTH))
    for gradient in (
        jax.grad(jmp.autocast(loss, policy)),
        jax.jit(jax.grad(jmp.autocast(loss, policy))),
        jax.grad(jax.jit(jmp.autocast(loss, policy))),
        jmp.autocast(jax.grad(loss), policy),
    ):
        found = gradient(prefix)
        assert found.dtype == jnp.float32
        assert found[0, 0] == 4096


# What a loop closes over: "kept", which each turn reads beside "x" and a row of positions.

POSITIONS = 300 * jax.random.normal(jax.random.key(0), (TURNS, ROWS, WIDTH))
FREQUENCIES, OUT = jnp.ones((WIDTH, 12)), W[:12]
MASK = jnp.zeros((ROWS, WIDTH)).at[0, 0].set(-1e9)


def sine_in_a_branch(kept, x, row):
    sine = lambda row: jnp.sin(row @ kept)
    return lax.cond(row[0, 0] < 1e9, sine, lambda row: 2 * sine(row), row) @ OUT


def sine_in_a_scan(kept, x, row):
    return lax.scan(lambda c, each: (c, jnp.sin(each @ kept)), 0, row[:, None])[1][:, 0] @ OUT


def sine_in_a_checkpoint(kept, x, row):
    return jax.checkpoint(lambda row: jnp.sin(row @ kept))(row) @ OUT


def condition_of_an_inner_loop(kept, x, row):
    is_on = lambda carry: carry[0] < jnp.argmax(kept[:, 0])
    x = lax.while_loop(is_on, lambda c: (c[0] + 1, jnp.tanh(c[1] @ W)), (0, x))[1]
    return x @ kept @ OUT


def chosen_mask(kept, x, row):
    return jnp.tanh(jax.nn.softmax(jnp.where(x > 0, kept, 0.0)) @ W)


def mask_beside_scores(kept, x, row):
    return jnp.tanh(jax.nn.softmax(jnp.concatenate([x, kept], -1)) @ jnp.concatenate([W, W]))


CLOSED_OVER = {
    "a weight": (lambda kept, x, row: jnp.tanh(x @ kept) @ OUT, FREQUENCIES, "bfloat16"),
    "angles in a branch": (sine_in_a_branch, FREQUENCIES, "float32"),
    "angles in a scan": (sine_in_a_scan, FREQUENCIES, "float32"),
    "angles in a checkpoint": (sine_in_a_checkpoint, FREQUENCIES, "float32"),
    "in dtypes of the user": (
        lambda kept, x, row: in_dtypes_of_the_user(x, kept) @ OUT, FREQUENCIES, "float32"),
    "the condition of an inner loop": (condition_of_an_inner_loop, FREQUENCIES, "float32"),
    "a mask that is chosen": (chosen_mask, MASK, "float32"),
    "a mask beside scores": (mask_beside_scores, MASK, "float32"),
}  # fmt: skip


@pytest.mark.parametrize("name", CLOSED_OVER)
def test_what_products_alone_read_is_rounded_before_a_loop_and_nothing_else(name):
    read, kept, dtype = CLOSED_OVER[name]
    half = "float16" if kept is MASK else "bfloat16"  # whose range holds each mask

    def loop(kept, x):
        return lax.scan(lambda x, row: (read(kept, x, row), None), x, POSITIONS)[0]

    scan, *_ = named("scan", jmp.autocast(loop, f"mixed_{half}"), kept, X)
    constants, _, _ = _jax_compat.Scan.of(scan.params).split(scan.invars)
    found = [v.aval.dtype for v in constants if v.aval.shape == kept.shape]
    assert found == [dtype]
