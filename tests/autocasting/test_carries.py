"""A loop's carry is half if only products read it, and float32 if arithmetic reads it.

Each program is a turn of a loop. The carry that is asked about is called "kept"; beside it is "x",
the activation. The loop is a scan and a while loop.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jmp
from jmp import _jax_compat
from testbed import decoding
from tests.products import equations_of, named

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


def stacked_rows(kept, x, t, read=attended, positioned=lambda x, t: x):
    """Layers, of whose caches each is a row of "kept"."""

    def layer(x, cache):
        x = positioned(x, t)
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


def rotated(x, t):
    """Rotary positions: sines inside the loop over the layers."""
    angles = t * 10.0 ** -jnp.arange(WIDTH)
    return x * jnp.cos(angles)[None] + jnp.roll(x, 1, -1) * jnp.sin(angles)[None]


def in_a_branch(kept, x, t):
    return lax.cond(t < 5, lambda: (filled(kept, x, t), x @ W), lambda: (kept, x))


def record_through_a_branch(kept, x, t):
    written = kept.at[t].set(jax.nn.log_softmax(x)[:, 0])
    return lax.cond(t < 5, lambda kept: (written, x @ W), lambda kept: (kept, x), kept)


def for_each_sequence(kept, x, t):
    update = lambda cache, row, place: lax.dynamic_update_slice(cache, row[None], (place, 0))
    kept = jax.vmap(update)(kept, x @ W, (t + jnp.arange(ROWS)) % TURNS)
    return kept, attended(x, kept)


def of_groups(kept, x, t):
    """Half as many heads of keys as of queries."""
    kept = kept.at[:, t].set((x @ W)[:, : WIDTH // 2])
    return kept, attended(x, jnp.repeat(kept, 2, -1))


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


def leaky(kept, x, t):
    kept = 0.99 * kept + 0.01 * jnp.tanh(kept @ W)
    return kept, kept @ W


def added_to(amount):
    def turn(kept, x, t):
        return kept + amount(x), x @ W

    return turn


def next_to_a_sum(kept, x, t):
    """A float32 sum receives a carry that otherwise only products read."""
    h, total = kept
    return (jnp.tanh(h @ W), total + h), x @ W


STACKED = jnp.zeros((2, *CACHE.shape))
RECORD = jnp.zeros((TURNS, ROWS))

# What a turn makes of the cache before it attends to it.
UPDATED = {
    "dynamic_update_slice": filled,
    "at set": lambda kept, x, t: kept.at[:, t].set(x @ W),
    "set, with drop": lambda kept, x, t: kept.at[:, t].set(x @ W, mode="drop"),
    "what islands write": lambda kept, x, t: kept.at[:, t].set(jnp.exp(x)),
    "a window": lambda kept, x, t: jnp.concatenate([kept[:, 1:], x[:, None]], 1),
    "roll": lambda kept, x, t: jnp.roll(kept, -1, 1).at[:, -1].set(x @ W),
    "beams": lambda kept, x, t: filled(kept, x, t)[jnp.array([1, 0, 3, 3])],
    "beams along an axis": lambda kept, x, t: jnp.take_along_axis(
        filled(kept, x, t), jnp.array([1, 0, 3, 3])[:, None, None], 0
    ),
    "finished sequences": lambda kept, x, t: jnp.where(
        x[:, :1, None] > 0, filled(kept, x, t), kept
    ),
    "a branch": lambda kept, x, t: in_a_branch(kept, x, t)[0],
    "heads": lambda kept, x, t: filled(kept, x, t).reshape(ROWS, TURNS, 2, 8).reshape(kept.shape),
}
IN_HALF = {
    **{name: Turn(with_cache(update)) for name, update in UPDATED.items()},
    "pages": Turn(with_paged_cache, jnp.zeros((TURNS // PAGE, ROWS, PAGE, WIDTH))),
    "a place for each sequence": Turn(for_each_sequence),
    "layers as rows": Turn(stacked_rows, STACKED),
    "layers as rows, with rotary positions": Turn(
        functools.partial(stacked_rows, positioned=rotated), STACKED
    ),
    "layers as a carry": Turn(stacked_carry, STACKED),
    "transposed": Turn(
        lambda kept, x, t: (kept.at[:, :, t].set(x @ W), attended(x, jnp.swapaxes(kept, 1, 2))),
        jnp.swapaxes(CACHE, 1, 2),
    ),
    "groups of heads": Turn(of_groups, CACHE[..., : WIDTH // 2]),
    "checkpoint": Turn(jax.checkpoint(with_cache(filled))),
    "jit": Turn(jax.jit(with_cache(filled))),
    "read before it is written": Turn(lambda kept, x, t: (filled(kept, x, t), attended(x, kept))),
    "filled before the loop": Turn(
        with_cache(filled), jnp.pad(X[:, None] @ W, ((0, 0), (0, 7), (0, 0)))
    ),
    "returned": Turn(with_cache(filled), after=lambda kept: kept),
    "multiplied after the loop": Turn(with_cache(filled), after=lambda kept: kept[:, 0] @ W),
    "cast by the user": Turn(
        lambda kept, x, t: (filled(kept, x, t), attended(x, kept.astype(jnp.bfloat16)))
    ),
    "hidden state": Turn(lambda kept, x, t: (jnp.tanh(kept @ W + x), x @ W), X),
    "hidden state, read after": Turn(
        lambda kept, x, t: (jnp.tanh(kept @ W + x), x @ W), X, lambda kept: jnp.sum(kept * kept)
    ),
}

IN_FLOAT32 = {
    "a sum": Turn(added_to(lambda x: x @ W), X),
    "log-probabilities, added up": Turn(
        added_to(lambda x: jnp.max(jax.nn.log_softmax(x @ W), -1)), X[:, 0]
    ),
    "a moving average": Turn(lambda kept, x, t: (0.99 * kept + 0.01 * x, x @ W), X),
    "a state-space model": Turn(lambda kept, x, t: (kept * jnp.exp(-x * x) + x, kept @ W), X),
    "a leaky state": Turn(leaky, X),
    "a gated unit": Turn(gru, X),
    "a maximum": Turn(lambda kept, x, t: (jnp.maximum(kept, x @ W), kept @ W), X),
    "cumsum": Turn(lambda kept, x, t: (jnp.cumsum(kept, -1), kept @ W), X),
    "added to at a place": Turn(with_cache(lambda kept, x, t: kept.at[:, t].add(x @ W))),
    "outer products, added up": Turn(
        lambda kept, x, t: (kept + jnp.einsum("bd,be->de", x, x), x @ kept), W
    ),
    "a record of log-probabilities": Turn(
        lambda kept, x, t: (kept.at[t].set(jnp.max(jax.nn.log_softmax(x), -1)), x @ W),
        RECORD,
        lambda kept: kept,
    ),
    "a record through a branch": Turn(record_through_a_branch, RECORD, lambda kept: kept),
    "normalised on reading": Turn(with_cache(filled, normalised_on_reading)),
    "read by a sum after the loop": Turn(with_cache(filled), after=lambda kept: jnp.sum(kept**2)),
    "a product with precision": Turn(with_cache(filled, with_highest)),
    "a region": Turn(with_cache(filled, in_a_region)),
    "a region inside layers": Turn(in_a_region_of_layers, STACKED),
    "clipped": Turn(with_cache(lambda kept, x, t: jnp.clip(filled(kept, x, t), -1, 1))),
    "an angle": Turn(
        lambda kept, x, t: (kept.at[t].set(x @ W), x @ jnp.sin(kept[0]).T @ X),
        jnp.zeros((TURNS, ROWS, WIDTH)),
    ),
    "rounded to integers": Turn(
        lambda kept, x, t: (kept.at[t].set(x[0, 0]), x @ W * kept.astype(jnp.int32)[0]),
        jnp.zeros(TURNS),
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


def error_of(function, policy, *args):
    """Returns the largest error under autocast, over the largest number of the float32 function."""
    found, exact = jmp.autocast(function, policy)(*args), function(*args)
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True)
    return max(float(abs(a - b).max() / abs(b).max()) for a, b in pairs)


def scanned(turn, carry, turns):
    return lax.scan(turn, carry, jnp.arange(turns))


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_the_gradient_of_a_buffer_adds_up_in_float32(policy):
    """Each of 4096 turns adds one to the gradient of a row that none of them writes."""

    def loss(prefix):
        def turn(carry, _):
            kept, x = carry
            return (kept.at[1].set(jnp.tanh(x)), x), (kept[:1] @ jnp.eye(WIDTH)[:, :1])

        return jnp.sum(scanned(turn, (prefix, jnp.zeros(WIDTH)), 4096)[1])

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


@pytest.mark.parametrize("inside", ["checkpoint", "cond", "scan"])
def test_a_weight_of_an_exact_product_inside_is_not_rounded(inside):
    """Angles of hundreds of radians, from a matrix of frequencies."""

    def angles(position, frequencies):
        if inside == "cond":
            sine = lambda: jnp.sin(position @ frequencies)
            return lax.cond(position[0, 0] < 1e9, sine, lambda: sine() * 2)
        if inside == "scan":
            return lax.scan(lambda c, row: (c, jnp.sin(row @ frequencies)), 0, position)[1]
        return jax.checkpoint(lambda p: jnp.sin(p @ frequencies))(position)

    def function(positions, frequencies, w):
        turn = lambda count, position: (count + 1, angles(position, frequencies) @ w)
        return lax.scan(turn, 0, positions)[1]

    keys = jax.random.split(jax.random.key(0), 3)
    positions = jax.random.normal(keys[0], (4, 8, 3))
    frequencies = jax.random.normal(keys[1], (3, 16))
    w = jax.random.normal(keys[2], (16, 16)) / 4
    assert error_of(function, "mixed_bfloat16", 300 * positions, frequencies, w) < 0.01


@pytest.mark.filterwarnings("ignore::jmp.NoHalfProductWarning")
def test_a_product_in_dtypes_that_the_user_chose_reads_no_rounded_numbers():
    """Numbers beyond float16's range in a product in bfloat16."""

    def function(kept, w):
        def turn(carry, _):
            kept, h = carry
            kept = kept.at[0].set(h)
            y = (kept.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32)
            return (kept, jnp.tanh(y[0])), y * 1e-5

        return scanned(turn, (kept, kept[0]), 3)[1]

    kept = jax.random.normal(jax.random.key(0), (4, WIDTH))
    assert error_of(function, "mixed_float16", 1e5 * kept, W) == 0
    assert error_of(function, "mixed_float16", kept, 1e6 * W) == 0


@jax.custom_jvp
def product_with_a_rule(kept, w):
    return kept @ w


@product_with_a_rule.defjvp
def _(primals, tangents):
    kept, w = primals
    return kept @ w, (kept - 1000.0) @ tangents[1]


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_the_rule_of_a_custom_derivative_reads_the_buffer_unrounded(policy):
    def loss(w, kept):
        def turn(carry, _):
            kept, h = carry
            kept = kept.at[1].set(h)
            y = product_with_a_rule(kept, w)
            return (kept, jnp.tanh(y[1] * 1e-3)), y[0]

        return jnp.sum(scanned(turn, (kept, kept[0] * 0), 3)[1])

    gradient = jax.grad(loss)
    mixed = jax.grad(jmp.autocast(loss, policy))
    kept = jnp.full((4, WIDTH), 1000.3)
    found, exact = mixed(W, kept), gradient(W, kept)
    assert abs(found - exact).max() < 0.02 * abs(exact).max()


def test_what_the_condition_of_an_inner_loop_reads_is_not_rounded():
    """Differences of 1e-4 decide which entry is the largest."""

    def function(table, w):
        def turn(x, _):
            is_on = lambda carry: carry[0] < jnp.argmax(table[0])
            count, x = lax.while_loop(is_on, lambda c: (c[0] + 1, jnp.tanh(c[1] @ w)), (0, x))
            return x @ table.T @ table, count

        return scanned(turn, jnp.ones((1, WIDTH)), 2)[1]

    table = jnp.ones((2, WIDTH)).at[0].set(jnp.linspace(1, 1.002, WIDTH))
    assert jmp.autocast(function, "mixed_bfloat16")(table, W).tolist() == [WIDTH - 1] * 2


@pytest.mark.parametrize("apply", ["where", "concatenate"])
def test_a_mask_that_a_loop_closes_over_stays_within_the_range_of_float16(apply):
    def function(mask, w):
        def turn(x, _):
            if apply == "where":
                y = jax.nn.softmax(jnp.where(x > 0, mask, 0.0)) @ w
            else:
                y = jax.nn.softmax(jnp.concatenate([x, mask], -1)) @ jnp.concatenate([w, w])
            return jnp.tanh(y), y

        return scanned(turn, jnp.ones((ROWS, WIDTH)), 2)[1]

    mask = jnp.zeros((ROWS, WIDTH)).at[0, 0].set(-1e9)
    w = W.at[0].set(0)
    assert abs(jmp.autocast(function, "mixed_float16")(mask, w) - function(mask, w)).max() < 0.01


def test_buffers_that_change_places_are_float32_if_a_sum_reads_them_afterwards():
    def function(a, b):
        def turn(carry, _):
            a, b, x = carry
            return (b, a, jnp.tanh(x @ W + a[:1] @ W)), None

        return jnp.sum(scanned(turn, (a, b, a[:1]), 6)[0][0] - 1000.0)

    a, b = (1000 + jax.random.uniform(jax.random.key(i), (ROWS, WIDTH)) for i in (0, 1))
    assert error_of(function, "mixed_bfloat16", a, b) == 0


# Loops that floating numbers end.


def beams(t, cache, scores):
    """A turn of beam search: rows that go on take their caches along."""
    cache = filled(cache, X, t)
    sums = jax.nn.log_softmax(attended(X, cache)) + scores[:, None]
    scores, places = lax.top_k(sums.reshape(-1), ROWS)
    return t + 1, cache[places // WIDTH], scores


def jacobi(t, x, scores):
    return t + 1, 1 - 0.1 * W @ x, -jnp.log(jnp.max(jnp.abs(W @ x - 1), -1))[:ROWS]


LOOPS = {"beams": (beams, CACHE), "a solver": (jacobi, jnp.zeros((WIDTH, ROWS)))}


def found_in(name, **options):
    """Returns the dtypes of the carry, and of the products."""
    turn, first = LOOPS[name]
    is_on = lambda carry: (carry[0] < TURNS) & jnp.all(carry[2] > -9)
    loop = lambda x: lax.while_loop(is_on, lambda carry: turn(*carry), (0, x, jnp.zeros(ROWS)))[2]
    found = list(equations_of(jmp.autocast(loop, "mixed_bfloat16", **options), first))
    equation = next(e for e in found if e.primitive.name == "while")
    _, _, carries = _jax_compat.While.of(equation.params).split(equation.invars)
    products = [e for e in found if e.primitive.name == "dot_general"]
    return (
        {str(carry.aval.dtype) for carry in carries if carry.aval.shape == first.shape},
        {str(atom.aval.dtype) for product in products for atom in product.invars},
    )


@pytest.mark.filterwarnings("ignore::jmp.NoHalfProductWarning")
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_that_floating_numbers_end_is_float32_unless_one_asks(name):
    assert found_in(name) == ({"float32"}, {"float32"})
    carries, products = found_in(name, follow=["while"])
    assert products == {"bfloat16"} and carries == {"bfloat16"}
