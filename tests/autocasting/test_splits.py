"""Splits under autocast: sums of all parts go before one; in an island the parts are cast."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jmp
from jmp.autocasting import _flatten, _islands
from jmp.autocasting._propagation import walk
from tests.commands import in_full

ROWS, WIDTH = 64, 256
KEYS = jax.random.split(jax.random.key(0), 4)
X, H = (jax.random.normal(key, (ROWS, 32)) for key in KEYS[:2])
W, U = (jax.random.normal(key, (32, WIDTH)) * 0.3 for key in KEYS[2:])
SIZES = {"alike": [64] * 4, "unlike": [16, 48, 128, 64]}


def use(parts):
    """A function of parts of any widths, nonlinear and not symmetrical."""
    return sum(jnp.sum(jnp.tanh(part) * (i + 1.0)) for i, part in enumerate(parts))


def both(a, b, sizes):
    """Returns pairs of the same parts of two arrays."""
    return zip(lax.split(a, sizes, 1), lax.split(b, sizes, 1), strict=True)


# All these have one sum and one split.


def added(a, b, sizes):
    return use([p + q for p, q in both(a, b, sizes)])


def subtracted(a, b, sizes):
    return use([p - q for p, q in both(a, b, sizes)])


# All these have the splits that they are written with.


def read_as_a_whole_too(a, b, sizes):
    return added(a, b, sizes) + jnp.sum(a * b)


def of_one_array(a, b, sizes):
    return use([p + q for p, q in both(a, a, sizes)])


def of_a_repeated_row(a, b, sizes):
    return use([p + q for p, q in both(jnp.broadcast_to(b[:1], a.shape), a, sizes)])


def of_one_row(a, b, sizes):
    return use([p + q for p, q in both(b[:1], a, sizes)])


def in_float32_in_part(a, b, sizes):
    (p, q), *others = both(a, b, sizes)
    first = jmp.full_precision(lambda p, q: jnp.exp(p + q))(p, q)
    return use([first, *(p + q for p, q in others)])


def read_twice(a, b, sizes):
    pairs = list(both(a, b, sizes))
    return use([p + q for p, q in pairs]) + jnp.sum(pairs[2][0])


def without_one(a, b, sizes):
    parts = list(both(a, b, sizes))
    return use([p + q for p, q in parts[:-1]])


def one_subtracted(a, b, sizes):
    (p, q), *others = both(a, b, sizes)
    return use([p - q, *(p + q for p, q in others)])


def in_another_order(a, b, sizes):
    parts = lax.split(b, sizes[::-1], 1)[::-1]
    return use([p + q for p, q in zip(lax.split(a, sizes, 1), parts, strict=True)])


def to_themselves(a, b, sizes):
    return use([p + p for p in lax.split(a + b, sizes, 1)])


def to_one_array(a, b, sizes):
    rows = b[:, :1]
    return use([p + rows for p in lax.split(a, sizes, 1)])


WHOLE = (added, subtracted)
IN_PARTS = (
    *(read_twice, without_one, one_subtracted, in_another_order, to_themselves, to_one_array),
    *(read_as_a_whole_too, of_one_array, of_a_repeated_row, of_one_row),
    in_float32_in_part,
)


def counted(function, *arguments):
    """Returns how many splits a program has."""
    names = [e.primitive.name for e, *_ in walk(jax.make_jaxpr(function)(*arguments).jaxpr)]
    return names.count("split")


def gradients(function, sizes, half):
    loss = lambda x, h, w, u: function(x @ w, h @ u, sizes)
    return jax.value_and_grad(jmp.autocast(loss, f"mixed_{half}"), (0, 1, 2, 3))(X, H, W, U)


def program(function, sizes):
    return jmp.autocast(lambda x, h, w, u: function(x @ w, h @ u, sizes), "mixed_bfloat16")


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("function", WHOLE, ids=lambda f: f.__name__)
def test_sums_of_all_parts_go_before_the_split(function, sizes):
    assert counted(program(function, sizes), X, H, W, U) == 1


@pytest.mark.parametrize("function", IN_PARTS, ids=lambda f: f.__name__)
def test_other_splits_stay_as_written(function):
    written = counted(lambda x, h, w, u: function(x @ w, h @ u, SIZES["unlike"]), X, H, W, U)
    assert counted(program(function, SIZES["unlike"]), X, H, W, U) == written


@pytest.mark.parametrize("half", in_full(["float16", "bfloat16"], first=1))
@pytest.mark.parametrize("function", (*WHOLE, *IN_PARTS), ids=lambda f: f.__name__)
def test_sums_before_a_split_change_no_number(function, half, monkeypatch):
    before = gradients(function, SIZES["unlike"], half)
    monkeypatch.setattr(_flatten, "_sums_of_parts", lambda *_: None)
    jax.tree.map(np.testing.assert_array_equal, before, gradients(function, SIZES["unlike"], half))


def test_a_rule_about_the_sums_alone_holds():
    def parts(x, h, w, u):
        pairs = both(x @ w, h @ u, SIZES["alike"])
        with jax.named_scope("head"):
            return [p + q for p, q in pairs]

    rules = [("head", "params=float32,compute=float32,output=bfloat16")]
    for part in jmp.autocast(parts, "mixed_bfloat16", rules=rules)(X, H, W, U):
        np.testing.assert_array_equal(part, part.astype(jnp.bfloat16).astype(jnp.float32))


def test_a_part_that_is_an_output_is_computed():
    def parts(x, h, w, u):
        left, right = lax.split(x @ w, SIZES["alike"], 1), lax.split(h @ u, SIZES["alike"], 1)
        return left[1], *(p + q for p, q in zip(left, right, strict=True))

    got = jmp.autocast(parts, "mixed_bfloat16")(X, H, W, U)
    for found, expected in zip(got, parts(X, H, W, U), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0.05, atol=0.05)


# Parts in islands.


def gates(x, w):
    first, second = jnp.split(x @ w, 2, 1)
    return jnp.sum(jax.nn.sigmoid(first) * jnp.tanh(second))


def test_an_island_casts_the_parts_and_not_the_whole():
    found = jax.make_jaxpr(jax.grad(jmp.autocast(gates, "mixed_bfloat16")))(X, W)
    types = {e.invars[0].aval.dtype for e, *_ in walk(found.jaxpr) if e.primitive.name == "split"}
    assert types == {jnp.dtype("bfloat16")}


def test_cotangents_of_a_part_add_up_in_float32():
    """A part that is read twice is cast once, so the sum of its cotangents is rounded once."""

    def loss(x, w):
        first, second = jnp.split(x @ w, 2, 1)
        return jnp.sum(first * jax.nn.sigmoid(first) * jnp.tanh(second))

    found = jax.make_jaxpr(jax.grad(jmp.autocast(loss, "mixed_bfloat16")))(X, W)
    sums = {
        e.outvars[0].aval.dtype
        for e, *_ in walk(found.jaxpr)
        if e.primitive.name == "add_any" and e.outvars[0].aval.shape == (ROWS, WIDTH // 2)
    }
    assert sums == {jnp.dtype("float32")}


# What a loop keeps for its backward pass.

TURNS = 4
XS = jnp.stack([X, H, X, H])


def recurrent(w, u):
    """The sum of the states of an LSTM, whose float32 cells make islands of its gates."""

    def turn(state, x):
        cells, h = state
        gates = both(x @ w, h @ u, SIZES["alike"])
        into, forget, new, out = (p + q for p, q in gates)
        cells = jax.nn.sigmoid(forget) * cells + jax.nn.sigmoid(into) * jnp.tanh(new)
        h = (jax.nn.sigmoid(out) * jnp.tanh(cells))[:, :32]
        return (cells, h), h

    return jnp.sum(lax.scan(turn, (jnp.zeros((ROWS, WIDTH // 4)), H), XS)[1])


def kept(platform):
    """Returns the widths of the half arrays of gates that the loop keeps, in all its turns."""
    gradient = jax.grad(jmp.autocast(recurrent, "mixed_bfloat16", platform=platform), (0, 1))
    walked = walk(jax.make_jaxpr(gradient)(W, U).jaxpr)
    forward = next(e for e, *_ in walked if e.primitive.name == "scan")
    found = [v.aval for v in forward.outvars if v.aval.dtype == jnp.bfloat16]
    return [aval.shape[2] for aval in found if aval.shape[:2] == (TURNS, ROWS)]


def test_on_a_tpu_a_loop_keeps_the_parts_of_small_arrays(monkeypatch):
    states = [32, 32, 32]  # the result, and what two products read
    assert sorted(kept("gpu")) == [*states, WIDTH]
    assert sorted(kept("tpu")) == [*states, *[WIDTH // 4] * 4]
    monkeypatch.setattr(_islands, "WHOLE", (TURNS + 1) * ROWS * WIDTH)
    assert sorted(kept("tpu")) == [*states, WIDTH]


def test_what_a_loop_keeps_changes_no_number():
    def gradients(platform):
        function = jmp.autocast(recurrent, "mixed_bfloat16", platform=platform)
        return jax.value_and_grad(function, (0, 1))(W, U)

    jax.tree.map(np.testing.assert_array_equal, gradients("tpu"), gradients("gpu"))


def gelu_of_one(first, second):
    return jax.nn.gelu(first) * second


def softmax_of_one(first, second):
    return jax.nn.softmax(first) * second


@pytest.mark.parametrize("use_parts", [gelu_of_one, softmax_of_one], ids=lambda f: f.__name__)
def test_what_else_reads_parts_finds_them_in_the_whole(use_parts, monkeypatch):
    def loss(w, u):
        def turn(h, x):
            h = use_parts(*jnp.split(x @ w + h @ u, 2, 1))
            return h[:, :32], h

        return jnp.sum(lax.scan(turn, H, XS)[1] ** 2)

    def found():
        function = jmp.autocast(loss, "mixed_bfloat16", platform="tpu", recompute="all")
        return jax.value_and_grad(function, (0, 1))(W, U)

    before = found()
    monkeypatch.setattr(_islands, "WHOLE", 0)
    jax.tree.map(np.testing.assert_array_equal, before, found())


def test_a_split_in_float32_stays_in_its_island():
    def loss(w, u):
        def turn(h, x):
            first, second = jmp.full_precision(lambda y: jnp.split(y, 2, 1))(x @ w + h @ u)
            return first[:, :32] @ w[:, :32] + second[:, :32], None

        return jnp.sum(lax.scan(turn, H, XS)[0])

    function = jmp.autocast(loss, "mixed_bfloat16", platform="tpu", recompute="all")
    np.testing.assert_allclose(function(W, U), loss(W, U), rtol=0.05, atol=2.0)


def test_without_a_loop_arrays_are_kept_whole():
    splits = [
        counted(jax.grad(jmp.autocast(gates, "mixed_bfloat16", platform=platform)), X, W)
        for platform in ("gpu", "tpu")
    ]
    assert splits[0] == splits[1] > 0
