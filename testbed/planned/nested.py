"""What the planner decides of what nests: a small program each, whose plan is in `plan_listings/`.

Arrays have 128 x 128 elements unless said otherwise: large enough to be recomputed.
"""

import jax
import jax.numpy as jnp
from jax import lax

from testbed.planned.cases import INDICES, ROW, W, X, new_cases, struct

CASES, planned = new_cases()

# Loops, branches, calls.


@planned(X, struct(128, 128, 128), struct(129, 128, 128), W)
def scans_over_layers(x, layers, too_many, w):
    """A residual stream that comes in half is carried in half, if it may be that of 128 layers."""
    run = lambda ws: lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), x @ w, ws)[0] @ w
    return run(layers), run(too_many)


@planned(X, W)
def while_loop_with_labels(x, w):
    """No gradient goes backwards through it, so labels are gathered and not summed."""

    def turn(carry):
        turns, labels, _ = carry
        scores = jax.nn.log_softmax(x @ w)
        return turns + 1, labels, jnp.take_along_axis(scores, labels[:, None], -1)[:, 0]

    carry = 0, jnp.arange(x.shape[0]), jnp.zeros(x.shape[0])
    return lax.while_loop(lambda carry: carry[0] < 3, turn, carry)[2]


@planned(X, W, struct(dtype=jnp.int32))
def branches(x, w, index):
    """A result is half if every branch leaves it half."""
    y = x @ w
    halves = lax.switch(index, [lambda y: y @ w, lambda y: jnp.tanh(y)], y)
    mixed = lax.switch(index, [lambda y: y @ w, lambda y: w], y)
    return halves @ w, mixed @ w


@planned(X, W)
def remat_in_a_scan(x, w):
    """The user's remat: islands inside are kept apart from the forward pass, also in a loop."""
    layer = jax.checkpoint(lambda h, _: (jnp.exp(-(h @ w)) @ w, None))
    return lax.scan(layer, x @ w, None, length=3)[0]


@planned(X, W)
def jit_that_pins_something(x, w):
    """A jit with donation is a level of its own; any other is inlined."""
    donating = jax.jit(lambda y: jnp.exp(y) @ w, donate_argnums=0)
    return donating(x @ w), jax.jit(lambda y: y @ w)(x @ w)


@jax.custom_jvp
def doubled(x, w):
    return 2 * jnp.tanh(x @ w)


doubled.defjvp(lambda primals, tangents: (doubled(*primals), 2 * tangents[0]))


@planned(X, W)
def custom_jvp(x, w):
    """A custom_jvp with a product is planned inside; its rule when a derivative is asked for."""
    return doubled(x @ w, w) @ w


@planned(X, W, full=["dot_general"])
def custom_jvp_whose_product_is_float32(x, w):
    """What the caller asks for holds inside as well."""
    return doubled(x @ w, w)


@planned(struct(4, 128, dtype=jnp.int32), X, W)
def embedding_in_a_loop(tokens, table, w):
    """Rows that reach the float32 carry of a loop are not rounded; others are."""

    def step(total, ids):
        rows = table[ids]
        return total + rows, table[ids] @ w

    return lax.scan(step, jnp.zeros((128, 128)), tokens)


@planned(struct(4, 128, 64), W)
def carries_that_are_moved(xs, w):
    """A carry may be moved on its way to a product; one that is added to is float32."""

    def step(carry, x):
        h, total, count = carry
        joined = jnp.concatenate([h.T.reshape(128, 64), x], 1) @ w
        return (joined[:, :64].T, total + joined, count + 1), total[:2]

    return lax.scan(step, (jnp.zeros((64, 128)), jnp.zeros((128, 128)), 0), xs)


@planned(struct(4, 128, 128), W)
def carry_that_is_handed_on(xs, w):
    """A half carry that becomes a float32 one is float32, though only products read it else."""

    def step(carry, x):
        h, before, total = carry
        return (jnp.tanh(x @ w + h @ w), h.T, total + before), None

    return lax.scan(step, (jnp.zeros((128, 128)),) * 3, xs)[0]


@planned(X, W)
def carry_that_is_kept_outside(x, w):
    """A result that reaches a float32 carry outside is carried in float32 inside."""

    def outer(total, _):
        inner = lambda h, _: (jnp.tanh(h @ w), None)
        return total + lax.scan(inner, x, None, length=2)[0], None

    return lax.scan(outer, jnp.zeros((128, 128)), None, length=2)[0]


# What an inner level is told, and what it tells.


@planned(X, W, INDICES)
def results_that_feed_outside(x, w, tokens):
    """A function inside is told which of its results products read, and which nothing rounds."""
    inside = jax.jit(lambda y: (jnp.exp(y), jnp.tanh(y) * 1e9), donate_argnums=0)
    y, z = inside(x @ w)
    return y @ w, z


@planned(X, W, ROW)
def operands_that_are_known_inside(x, w, b):
    """What is known of an operand is known inside: a number, a row, a boolean, a mask."""
    inside = jax.jit(lambda y, *others: [(y + z) @ w for z in others], donate_argnums=0)
    row = jnp.broadcast_to(b, (128, 128))
    return inside(x @ w, 1e9, row, jnp.ones((128, 128), bool).astype(jnp.float32))


@planned(struct(4, 128, 128), W)
def carry_that_is_exchanged(xs, w):
    """Carries that products read, one turn after another, are half."""

    def step(carry, x):
        a, b = carry
        turned = lax.rev(a, (0,))
        return (jnp.tanh(b @ w), turned), (x @ w + turned @ w)[0]

    return lax.scan(step, (jnp.zeros((128, 128)),) * 2, xs)


@planned(struct(4, 128, 128), W, ROW)
def constants_of_a_scan(xs, w, b):
    """What has a gradient enters in float32; what has none enters as it is."""
    y = lax.stop_gradient(xs[0] @ w)
    positions = jnp.sin(jnp.arange(128.0))
    body = lambda c, x: (c, (x @ w + b) * positions + y)
    return lax.scan(body, 0, xs)[1] @ w


@planned(struct(4, 128, 128), W)
def stacked_results(xs, w):
    """Rows that a product outside reads leave half; rows that the loss reads do not."""
    _, (y, z) = lax.scan(lambda c, x: (c, (jnp.exp(x @ w), jnp.exp(x @ w))), 0, xs)
    return y @ w, z.sum()


@planned(struct(1, 128, 128), W)
def scan_of_one_turn(xs, w):
    """A loop of one turn is a loop: it counts as two."""
    half = lax.scan(lambda c, x: (c, jnp.exp(x[:64] @ w) @ w), 0, xs)[1]
    less = lax.scan(lambda c, x: (c, jnp.exp(x[:63] @ w) @ w), 0, xs)[1]
    return half, less


@planned(X, W)
def scan_in_a_scan(x, w):
    """Turns multiply."""
    inner = lambda c, _: (c, jnp.exp(x[:16] @ w) @ w)
    outer = lambda c, _: (c, lax.scan(inner, 0, None, length=3)[1])
    return lax.scan(outer, 0, None, length=2)[1]


@planned(struct(8, 128), W)
def while_loop_in_a_remat(x, w):
    """Nothing of a while loop is kept, so nothing is kept apart; after it all is as before."""

    def function(y):
        body = lambda c: (c[0] + 1, jnp.exp(c[1] @ w))
        return jnp.exp(lax.while_loop(lambda c: c[0] < 3, body, (0, y))[1] @ w) @ w

    return jax.checkpoint(function)(jnp.concatenate([x] * 16) @ w)


@planned(X, W, low=["while"])
def loop_to_a_tolerance_in_half(x, w):
    """A loop to a tolerance that the user asks to be lowered is."""
    return lax.while_loop(lambda c: c.max() > 1e-3, lambda c: jnp.tanh(c @ w) / 2, x @ w) @ w
