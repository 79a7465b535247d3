"""What the planner decides of what nests: a small program each, with its plan in the docstring.

A line is a step. `f32>f16` is a float32 operand that is read in half, `->` what is stored. Arrays
have 128 x 128 elements unless said otherwise: large enough to be recomputed.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.plans import (
    HAS_THESE_TRACES,
    ROW,
    SMALL,
    Case,
    W,
    X,
    add_case,
    expected,
    listing_of,
    struct,
)

CASES: list[Case] = []
planned = functools.partial(add_case, CASES)

# Loops, branches, calls.


@planned(struct(4, 128, 128), W, W)
def scan_over_time(xs, w, u):
    """The hidden state of an RNN, read by products alone, is carried in half.

    broadcast_in_dim in float32: 0 f32 -> f32
    scan inside: f32 f32 f32>f16 f32 -> f16 f16
      function, reads f32 f32 - -, stores f16 f16
      dot_general in half: f32>f16 f32>f16 -> f16
      dot_general in half: f32>f16 f32>f16 -> f16
      add in half: f32>f16 f32>f16 -> f16
      tanh in half: f32>f16 -> f16
    """

    def step(h, x):
        h = jnp.tanh(x @ w + h @ u)
        return h, h

    return lax.scan(step, jnp.zeros((128, 128)), xs)


@planned(struct(4, 128, 128), W)
def scan_with_a_leak(xs, w):
    """What adds up over the turns is carried in float32, and not rounded on the way.

    broadcast_in_dim in float32: 0 f32 -> f32
    scan inside: f32 f32 f32 -> f32
      function, reads f32 - -, stores f32
      island, plain: f32 -> f32
        mul; an operand is float32
      dot_general in half: f32>f16 f32>f16 -> f16
      island, recompute: f32>f16 f32 -> f32
        tanh
        mul
        add; an operand is float32
    dot_general in half: f32>f16 f32>f16 -> f16
    """

    def step(h, x):
        return 0.9 * h + 0.1 * jnp.tanh(x @ w), None

    return lax.scan(step, jnp.zeros((128, 128)), xs)[0] @ w


@planned(X, struct(4, 128, 128), W)
def scan_over_layers(x, ws, w):
    """A residual stream that comes in half is carried in half.

    dot_general in half: f32>f16 f32>f16 -> f16
    scan inside: f32>f16 f32 -> f16
      function, reads - -, stores f16
      dot_general in half: f32>f16 f32>f16 -> f16
      tanh in half: f32>f16 -> f16
      add in half: f32>f16 f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    return lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), x @ w, ws)[0] @ w


@planned(X, struct(200, 128, 128), W)
def scan_over_many_layers(x, ws, w):
    """But not in a loop that is too long for layers.

    dot_general in half: f32>f16 f32>f16 -> f16
    scan inside: f32 f32 -> f32
      function, reads - -, stores f32
      dot_general in half: f32>f16 f32>f16 -> f16
      island, recompute: f32>f16 f32 -> f32
        tanh
        add; an operand is float32
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    return lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), x @ w, ws)[0] @ w


@planned(struct(4, 8, 8), SMALL)
def scan_counts_its_turns(xs, w):
    """What is kept is kept for every turn: four turns of 64 elements are few.

    scan inside: i32 f32 f32 -> f16
      function, reads i32 f32 -, stores f16
      dot_general in half: f32>f16 f32>f16 -> f16
      island, plain: f32>f16 -> f16
        exp; full
      dot_general in half: f32>f16 f32>f16 -> f16
    """
    return lax.scan(lambda c, x: (c, jnp.exp(x @ w) @ w), 0, xs)[1]


@planned(struct(400, 8, 8), SMALL)
def scan_counts_many_turns(xs, w):
    """400 turns are many.

    scan inside: i32 f32 f32 -> f16
      function, reads i32 f32 -, stores f16
      dot_general in half: f32>f16 f32>f16 -> f16
      island, recompute: f32>f16 -> f16
        exp; full
      dot_general in half: f32>f16 f32>f16 -> f16
    """
    return lax.scan(lambda c, x: (c, jnp.exp(x @ w) @ w), 0, xs)[1]


@planned(X, W)
def while_loop(x, w):
    """A while loop carries float32; its condition runs as it was written.

    while inside: f32 i32 f32 -> i32 f32
      function, not planned
      function, stores i32 f32
      add: i32 i32 -> i32
      dot_general in half: f32>f16 f32>f16 -> f16
      tanh in half: f32>f16 -> f16
    """
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(c[1] @ w)), (0, x))[1]


@planned(X, W)
def loop_to_a_tolerance(x, w):
    """A loop whose number of turns depends on floating numbers is float32 throughout.

    dot_general in half: f32>f16 f32>f16 -> f16
    while in float32: f32 f32 -> f32
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    return lax.while_loop(lambda c: c.max() > 1e-3, lambda c: jnp.tanh(c @ w) / 2, x @ w) @ w


@planned(X, W, struct(dtype=jnp.int32))
def branches(x, w, index):
    """A result is half if every branch leaves it half.

    dot_general in half: f32>f16 f32>f16 -> f16
    clamp: i32 i32 i32 -> i32
    cond inside: i32 f32 f32>f16 -> f16
      function, stores f16
      dot_general in half: f32>f16 f32>f16 -> f16
      function, stores f16
      tanh in half: f32>f16 -> f16
    clamp: i32 i32 i32 -> i32
    cond inside: i32 f32 f32>f16 -> f32
      function, stores f32
      dot_general in half: f32>f16 f32>f16 -> f16
      function, stores f32
    dot_general in half: f32>f16 f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    y = x @ w
    halves = lax.switch(index, [lambda y: y @ w, lambda y: jnp.tanh(y)], y)
    mixed = lax.switch(index, [lambda y: y @ w, lambda y: w], y)
    return halves @ w, mixed @ w


@planned(X, W)
def remat(x, w):
    """The user's remat: islands inside are kept apart from the forward pass.

    dot_general in half: f32>f16 f32>f16 -> f16
    remat2 inside: f32 f32>f16 -> f16
      function
      dot_general in half: f32>f16 f32>f16 -> f16
      island, recompute, apart: f32>f16 -> f16
        integer_pow; full
        mul
        add
        mul
        tanh
        add; near its bound a bounded function leaves few digits of one
        mul
        mul
      dot_general in half: f32>f16 f32>f16 -> f16
    """
    return jax.checkpoint(lambda y: jax.nn.gelu(y @ w) @ w)(x @ w)


@planned(X, W)
def remat_in_a_scan(x, w):
    """Also in a loop.

    dot_general in half: f32>f16 f32>f16 -> f16
    scan inside: f32 f32>f16 -> f16
      function, reads f32 -, stores f16
      remat2 inside: f32 f32>f16 -> f16
        function
        dot_general in half: f32>f16 f32>f16 -> f16
        island, recompute, apart: f32>f16 -> f16
          neg
          exp; full
        dot_general in half: f32>f16 f32>f16 -> f16
    """
    layer = jax.checkpoint(lambda h, _: (jnp.exp(-(h @ w)) @ w, None))
    return lax.scan(layer, x @ w, None, length=3)[0]


@planned(X, W)
def jit_that_pins_something(x, w):
    """A jit with donation is a level of its own; any other is inlined.

    dot_general in half: f32>f16 f32>f16 -> f16
    jit inside: f32 f32>f16 -> f16
      function
      island, recompute, apart: f32>f16 -> f16
        exp; full
      dot_general in half: f32>f16 f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    donating = jax.jit(lambda y: jnp.exp(y) @ w, donate_argnums=0)
    return donating(x @ w), jax.jit(lambda y: y @ w)(x @ w)


@jax.custom_jvp
def doubled(x, w):
    return 2 * jnp.tanh(x @ w)


doubled.defjvp(lambda primals, tangents: (doubled(*primals), 2 * tangents[0]))


@jax.custom_vjp
def halved(x, w):
    return 0.5 * jnp.tanh(x @ w)


halved.defvjp(lambda x, w: (halved(x, w), None), lambda _, ct: (ct, ct))


@planned(X, W)
def custom_jvp(x, w):
    """A custom_jvp with a product is planned inside; its rule when a derivative is asked for.

    dot_general in half: f32>f16 f32>f16 -> f16
    custom_jvp_call inside: f32>f16 f32 -> f16
      function, stores f16
      dot_general in half: f32>f16 f32>f16 -> f16
      tanh in half: f32>f16 -> f16
      mul in half: 2 f32>f16 f32>f16 -> f16
      function, not planned
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    return doubled(x @ w, w) @ w


@planned(X, W)
def custom_vjp(x, w):
    """A custom_vjp runs as written.

    dot_general in half: f32>f16 f32>f16 -> f16
    custom_vjp_call in float32: f32 f32 -> f32
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    return halved(x @ w, w) @ w


@planned(X, W, inside_custom_vjp=True)
def inside_custom_vjp(x, w):
    """Unless the caller says otherwise.

    dot_general in half: f32>f16 f32>f16 -> f16
    custom_vjp_call inside: f32>f16 f32 -> f16
      function, stores f16
      dot_general in half: f32>f16 f32>f16 -> f16
      tanh in half: f32>f16 -> f16
      mul in half: 0.5 f32>f16 f32>f16 -> f16
      function, not planned
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    return halved(x @ w, w) @ w


@planned(X, W)
def constants_of_a_jit(x, w):
    """Arrays that a function inside holds by itself are neutral and fixed.

    dot_general in half: f32>f16 f32>f16 -> f16
    jit inside: f32 f32 f32>f16 -> f16
      function
      broadcast_in_dim in float32, rounded: f32 -> f16
      add in half: f32>f16 f32>f16 repeated saturated -> f16
      dot_general in half: f32>f16 f32>f16 -> f16
    """
    table = np.linspace(0, 1, 64 * 128, dtype=np.float32).reshape(64, 1, 128)
    return jax.jit(lambda y: (y[:, None] + table[:1]) @ w, donate_argnums=0)(x @ w)


@planned(struct(4, 128, dtype=jnp.int32), X, W)
def embedding_in_a_loop(tokens, table, w):
    """Rows that reach the float32 carry of a loop are not rounded; others are.

    broadcast_in_dim in float32: 0 f32 -> f32
    scan inside: f32 f32 f32 i32 -> f32 f16
      function, reads f32 f32 - -, stores f32 f16
      lt: i32 i32 -> bool
      add: i32 i32 -> i32
      select_n: bool i32 i32 -> i32
      broadcast_in_dim: i32 -> i32
      gather in float32: f32 i32 -> f32
      island, plain: f32 f32 -> f32
        add; an operand is float32
      lt: i32 i32 -> bool
      add: i32 i32 -> i32
      select_n: bool i32 i32 -> i32
      broadcast_in_dim: i32 -> i32
      gather in float32, rounded: f32 i32 -> f16; rows of a float32 table, rounded after the lookup
      dot_general in half: f32>f16 f32>f16 -> f16
    """

    def step(total, ids):
        rows = table[ids]
        return total + rows, table[ids] @ w

    return lax.scan(step, jnp.zeros((128, 128)), tokens)


@planned(struct(4, 128, 64), W)
def carries_that_are_moved(xs, w):
    """A carry may be moved on its way to a product; one that is added to is float32.

    broadcast_in_dim in float32: 0 f32 -> f32
    broadcast_in_dim in float32: 0 f32 -> f32
    scan inside: f32 f32>f16 f32 i32 f32 -> f16 f32 i32 f32
      function, reads f32 - - - -, stores f16 f32 i32 f32
      transpose in half: f32>f16 -> f16
      concatenate in half: f32>f16 f32>f16 saturated -> f16
      dot_general in half: f32>f16 f32>f16 -> f16
      slice in half: f32>f16 -> f16
      transpose in half: f32>f16 -> f16
      island, plain: f32 f32>f16 -> f32
        add; an operand is float32
      add: i32 i32 -> i32
      island, plain: f32 -> f32
        slice; an operand is float32
    """

    def step(carry, x):
        h, total, count = carry
        joined = jnp.concatenate([h.T.reshape(128, 64), x], 1) @ w
        return (joined[:, :64].T, total + joined, count + 1), total[:2]

    return lax.scan(step, (jnp.zeros((64, 128)), jnp.zeros((128, 128)), 0), xs)


@planned(struct(4, 128, 128), W)
def carry_that_is_handed_on(xs, w):
    """A half carry that becomes a float32 one is float32.

    broadcast_in_dim in float32: 0 f32 -> f32
    broadcast_in_dim in float32: 0 f32 -> f32
    scan inside: f32 f32 f32 f32 -> f32 f32
      function, reads f32 - - -, stores f32 f32
      dot_general in half: f32>f16 f32>f16 -> f16
      dot_general in half: f32>f16 f32>f16 -> f16
      add in half: f32>f16 f32>f16 -> f16
      tanh in half: f32>f16 -> f16
      island, plain: f32 f32 -> f32
        add; an operand is float32
    """

    def step(carry, x):
        h, before = carry
        return (jnp.tanh(x @ w + h @ w), h + before), None

    return lax.scan(step, (jnp.zeros((128, 128)), jnp.zeros((128, 128))), xs)[0]


@planned(X, W)
def carry_that_is_kept_outside(x, w):
    """A result that reaches a float32 carry outside is carried in float32 inside.

    broadcast_in_dim in float32: 0 f32 -> f32
    scan inside: f32 f32 f32 -> f32
      function, reads f32 f32 -, stores f32
      scan inside: f32 f32 -> f32
        function, reads f32 -, stores f32
        dot_general in half: f32>f16 f32>f16 -> f16
        tanh in half: f32>f16 -> f16
      island, plain: f32 f32 -> f32
        add; an operand is float32
    """

    def outer(total, _):
        inner = lambda h, _: (jnp.tanh(h @ w), None)
        return total + lax.scan(inner, x, None, length=2)[0], None

    return lax.scan(outer, jnp.zeros((128, 128)), None, length=2)[0]


@planned(X, W, ROW)
def loop_with_constants(x, w, b):
    """What condition and body close over.

    dot_general in half: f32>f16 f32>f16 -> f16
    while inside: f32 f32 i32 f32 -> i32 f32
      function, not planned
      function, stores i32 f32
      add: i32 i32 -> i32
      dot_general in half: f32>f16 f32>f16 -> f16
      broadcast_in_dim in float32: f32 -> f32
      add in half: f32>f16 f32>f16 repeated -> f16
      island, recompute: f32>f16 -> f32
        sin
    """
    return lax.while_loop(
        lambda c: c[0] < b.shape[0] + jnp.int32(3),
        lambda c: (c[0] + 1, jnp.sin(c[1] @ w + b)),
        (jnp.int32(0), x @ w),
    )[1]


@planned(X, W)
def sharded(x, w):
    """What is mapped over devices is planned on the shards.

    dot_general in half: f32>f16 f32>f16 -> f16
    shard_map inside: f32 f32>f16 -> f16
      function
      island, recompute, apart: f32>f16 -> f16
        exp; full
      pvary in float32: f32 -> f32
      dot_general in half: f32>f16 f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    mesh = jax.make_mesh((1,), ("devices",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.PartitionSpec("devices")
    one = jax.shard_map(lambda y: jnp.exp(y) @ w, mesh=mesh, in_specs=rows, out_specs=rows)
    return one(x @ w) @ w


@pytest.mark.skipif(not HAS_THESE_TRACES, reason="the traces of JAX 0.10")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.fun.__name__)
def test_plan(case):
    assert "\n".join(listing_of(case)) == expected(case)
