"""Plans of products that are no matrix products of a network; see `autocasting/_exact_products`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.autocasting.plans import INDICES, ROW, Case, W, X, add_case, plan_test, struct

CASES: list[Case] = []
planned = functools.partial(add_case, CASES)

TABLE = np.float32(np.random.default_rng(0).normal(size=(128, 128)))
TOKENS = struct(128, dtype=jnp.int32)
WEIGHTS = jnp.ones((128, 128)) / 3
LOOKED_UP = jax.jit(lambda tokens: WEIGHTS[tokens], donate_argnums=0, keep_unused=True)


@planned(X, W, ROW, ROW)
def outer_products(x, w, positions, frequencies):
    """A product that contracts nothing, or one column with one row, is a multiplication.

    broadcast_in_dim in float32: f32 -> f32
    broadcast_in_dim in float32: f32 -> f32
    mul in float32: f32 f32 -> f32
    broadcast_in_dim in float32: f32 -> f32
    broadcast_in_dim in float32: f32 -> f32
    squeeze in float32: f32 -> f32
    transpose in float32: f32 -> f32
    squeeze in float32: f32 -> f32
    broadcast_in_dim in float32: f32 -> f32
    broadcast_in_dim in float32: f32 -> f32
    mul in float32: f32 f32 -> f32
    dot_general in half: f32>f16 f32>f16 -> f16
    island, plain, apart: f32>f16 f32 f32 -> f32
      mul; an operand is a float32 input as large as the result
      mul; an operand is a float32 input as large as the result
    """
    angles = jnp.einsum("i,j->ij", positions, frequencies)
    others = positions[:, None] @ frequencies[None]
    return (x @ w) * angles * others


@planned(struct(4, 128), struct(128, 4), W)
def batches_of_outer_products(a, b, w):
    """Axes of batches come first; between half values it is half.

    dot_general in half: f32>f16 f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    transpose in half: f32>f16 -> f16
    broadcast_in_dim in float32, rounded: f32 -> f16
    broadcast_in_dim in float32, rounded: f32 -> f16
    mul in half: f32>f16 repeated f32>f16 repeated -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    y, z = a @ w, w @ b
    return jnp.einsum("bi,jb->bij", y, z) @ w


@planned(X, struct(128, 1), struct(1, 128), W)
def rank_one(x, a, b, w):
    """Parameters of rank one: the first product is one, the second a half multiplication.

    dot_general in half: f32>f16 f32>f16 -> f16
    squeeze in half: f32>f16 -> f16
    transpose in float32: f32 -> f32
    squeeze in float32: f32 -> f32
    broadcast_in_dim in float32, rounded: f32 -> f16
    broadcast_in_dim in float32: f32 -> f32
    mul in half: f32>f16 repeated f32>f16 repeated -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    return ((x @ a) @ b) @ w


@planned(X, TOKENS)
def counts(w, tokens):
    """What has no gradient is counted in float32; a table that is looked up so is half.

    broadcast_in_dim: i32 -> i32
    iota: -> i32
    eq: i32 i32 -> bool
    convert_element_type in float32: bool -> f32
    broadcast_in_dim in float32: 1 f32 -> f32
    iota: -> i32
    add: i32 i32 -> i32
    iota: -> i32
    ge: i32 i32 -> bool
    broadcast_in_dim in float32: 0 f32 -> f32
    select_n in float32: bool f32 f32 -> f32
    dot_general in float32: f32 f32 -> f32
    reduce_sum in float32: f32 -> f32
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    one_hot = jax.nn.one_hot(tokens, 128)
    places = jnp.tril(jnp.ones((128, 128))) @ one_hot
    return places.sum(), one_hot @ w


@planned(TOKENS)
def closed_over_inside(tokens):
    """Weights that a function inside closes over are weights.

    jit in float32: i32 -> f32
    transpose in float32: f32 -> f32
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    rows = LOOKED_UP(tokens)
    return rows @ rows.T


@planned(X, W)
def choices(x, w):
    """What is chosen by products is counted in float32 too.

    dot_general in half: f32>f16 f32>f16 -> f16
    argmax in half: f32>f16 -> i32
    broadcast_in_dim: i32 -> i32
    iota: -> i32
    eq: i32 i32 -> bool
    convert_element_type in half: bool -> f16
    broadcast_in_dim in float32: 1 f32 -> f32
    iota: -> i32
    add: i32 i32 -> i32
    iota: -> i32
    ge: i32 i32 -> bool
    broadcast_in_dim in float32: 0 f32 -> f32
    select_n in float32: bool f32 f32 -> f32
    dot_general in float32: f32 f32 -> f32
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    chosen = jax.nn.one_hot(jnp.argmax(x @ w, -1), 128)
    return jnp.tril(jnp.ones((128, 128))) @ chosen, chosen @ w


@planned(X, W)
def made_of_constants(x, w):
    """A Fourier transform of an input, and a filterbank behind it; not of what a product gives.

    iota in float32: -> f32
    broadcast_in_dim in float32: f32 -> f32
    iota in float32: -> f32
    broadcast_in_dim in float32: f32 -> f32
    mul in float32: f32 f32 -> f32
    div in float32: f32 128 f32 -> f32
    cos in float32: f32 -> f32
    dot_general in float32: f32 f32 -> f32
    square in float32: f32 -> f32
    sin in float32: f32 -> f32
    dot_general in float32: f32 f32 -> f32
    square in float32: f32 -> f32
    add in float32: f32 f32 -> f32
    abs in float32: f32 -> f32
    sub in float32: 1 f32 f32 -> f32
    max in float32: 0 f32 f32 -> f32
    dot_general in float32: f32 f32 -> f32
    dot_general in half: f32>f16 f32>f16 -> f16
    cos in float32: f32 -> f32
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    angles = jnp.arange(128.0)[:, None] * jnp.arange(128.0) / 128
    spectrum = jnp.square(x @ jnp.cos(angles)) + jnp.square(x @ jnp.sin(angles))
    mel = jnp.maximum(0, 1 - jnp.abs(angles)) @ spectrum
    return (mel @ w) @ jnp.cos(angles)


@planned(X, W, TOKENS)
def numpy_arrays(x, w, tokens):
    """They transform an input, once: they might be weights, as those of rows looked up.

    dot_general in float32: f32 f32 -> f32
    dot_general in half: f32>f16 f32>f16 -> f16
    broadcast_in_dim: i32 -> i32
    iota: -> i32
    eq: i32 i32 -> bool
    convert_element_type in float32: bool -> f32
    dot_general in half: f32>f16 f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    return (x @ TABLE) @ TABLE, jax.nn.one_hot(tokens, 128) @ TABLE, (x @ w) @ TABLE


@planned(X, W)
def one_number(x, w):
    """A sum, or the seed of a derivative, is no table.

    broadcast_in_dim in float32: 1 f32 -> f32
    dot_general in half: f32>f16 f32>f16 -> f16
    broadcast_in_dim in float32: 1 f32 -> f32
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    return jnp.ones((128, 128)) @ x, jax.grad(lambda x: jnp.sum(x @ w))(x)


@planned(X, W)
def chosen_rows(x, table):
    """What equality chooses is no table either: an identity, buckets of distances. A window is one.

    iota: -> i32
    broadcast_in_dim: i32 -> i32
    iota: -> i32
    broadcast_in_dim: i32 -> i32
    sub: i32 i32 -> i32
    abs: i32 -> i32
    reshape: i32 -> i32
    reshape: i32 -> i32
    lt: i32 i32 -> bool
    convert_element_type in float32: bool -> f32
    iota: -> i32
    iota: -> i32
    add: i32 i32 -> i32
    eq: i32 i32 -> bool
    convert_element_type in float32: bool -> f32
    dot_general in half: f32>f16 f32>f16 -> f16
    broadcast_in_dim: i32 -> i32
    iota: -> i32
    eq: i32 i32 -> bool
    convert_element_type in float32: bool -> f32
    dot_general in half: f32>f16 f32>f16 -> f16
    dot_general in float32: f32 f32 -> f32
    """
    distances = jnp.abs(jnp.arange(128)[:, None] - jnp.arange(128)).ravel()
    band = (distances.reshape(128, 128) < 8).astype(jnp.float32)
    return jnp.eye(128) @ x, jax.nn.one_hot(distances, 128) @ table, band @ x


@planned(X)
def numbers_of_choices(x):
    """What is computed of an identity is a matrix of numbers again: centering.

    iota: -> i32
    iota: -> i32
    add: i32 i32 -> i32
    eq: i32 i32 -> bool
    convert_element_type in float32: bool -> f32
    sub in float32: f32 0.0078125 f32 -> f32
    dot_general in float32: f32 f32 -> f32
    """
    return x @ (jnp.eye(128) - 1 / 128)


@planned(X, W)
def features_of_other_levels(x, w):
    """The sines may stand outside, or in the next turn of a loop.

    remat2 inside: f32 f32 -> f32
      function
      dot_general in float32: f32 f32 -> f32
    island, recompute, apart: f32 -> f32
      sin; an operand is float32
    broadcast_in_dim in float32: 0 f32 -> f32
    broadcast_in_dim in float32: f32 -> f32
    scan inside: f32 f32 f32 -> f32 f32
      function, reads f32 - -, stores f32 f32
      dot_general in float32: f32 f32 -> f32
      island, plain: f32 f32 -> f32
        add; an operand is float32
      island, recompute: f32 -> f32
        sin; an operand is float32
    """
    outside = jnp.sin(jax.checkpoint(lambda x: x @ w)(x))

    def turn(phase, row):
        return phase + row @ w, jnp.sin(phase)

    return outside, lax.scan(turn, jnp.zeros((1, 128)), x[:, None])[1]


@planned(X, W)
def features(x, w):
    """Angles are float32, and what is behind another product is half.

    mul in float32: 6.28319 f32 f32 -> f32
    dot_general in float32: f32 f32 -> f32
    sin in float32: f32 -> f32
    dot_general in half: f32>f16 f32>f16 -> f16
    sin in half: f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    y = jnp.sin(2 * jnp.pi * x @ w)
    return jnp.sin(y @ w) @ w


@planned(X, W)
def features_of_a_complex_exponential(x, w):
    """An exponential of a complex number turns as sines do.

    dot_general in float32: f32 f32 -> f32
    convert_element_type in float32: f32 -> complex64
    mul: complex64 complex64 -> complex64
    exp: complex64 -> complex64
    real in float32: complex64 -> f32
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    y = jnp.exp(1j * (x @ w))
    return jnp.real(y) @ w


@planned(X, W)
def coordinates(x, w):
    """So do the whole numbers and the fractions of coordinates.

    dot_general in float32: f32 f32 -> f32
    floor in float32: f32 -> f32
    convert_element_type in float32: 1 f32 -> f32
    rem in float32: f32 f32 -> f32
    ne in float32: f32 0 f32 -> bool
    lt in float32: f32 0 f32 -> bool
    lt in float32: f32 0 f32 -> bool
    ne: bool bool -> bool
    and: bool bool -> bool
    add in float32: f32 f32 -> f32
    select_n in float32: bool f32 f32 -> f32
    transpose in float32: f32 -> f32
    dot_general in float32: f32 f32 -> f32
    convert_element_type in float32: f32 -> i32
    """
    cells = x @ w
    return jnp.floor(cells), cells % 1.0, (x @ w.T).astype(jnp.int32)


@planned(X, W)
def features_that_a_loop_turns(x, w):
    """The sines may stand inside.

    dot_general in float32: f32 f32 -> f32
    scan inside: f32 f32 f32 -> f32
      function, reads f32 f32 -, stores f32
      sin in float32: f32 -> f32
      island, plain: f32 f32 -> f16
        mul; an operand is float32
      dot_general in half: f32>f16 f32>f16 -> f16
    """
    angles = x @ w

    def layer(carry, _):
        return (carry * jnp.sin(angles)) @ w, None

    return lax.scan(layer, x, None, length=3)[0]


@planned(X, struct(128, 128, dtype=jnp.int32), W)
def integers(x, counts, w):
    """No tensor core multiplies them with half numbers.

    dot_general in float32: i32 f32 -> f32
    dot_general: i32 i32 -> i32
    dot_general in half: f32>f16 f32>f16 -> f16
    dot_general in half: f32>f16 f32>f16 -> f16
    """
    product = lax.dot(counts, x, preferred_element_type=jnp.float32)
    return product, lax.dot(counts, counts), (x @ w) @ w


@planned(X, INDICES, X)
def rows_of_positions_in_a_loop(w, positions, x):
    """What a loop is given row by row is known inside.

    scan inside: f32 f32 i32 -> f32
      function, reads f32 - -, stores f32
      broadcast_in_dim in float32: 1 f32 -> f32
      iota: -> i32
      add: i32 i32 -> i32
      iota: -> i32
      ge: i32 i32 -> bool
      broadcast_in_dim in float32: 0 f32 -> f32
      select_n in float32: bool f32 f32 -> f32
      broadcast_in_dim in float32: 1 f32 -> f32
      convert_element_type in float32: i32 -> f32
      mul in float32: f32 f32 -> f32
      dot_general in float32: f32 f32 -> f32
      island, plain: f32 f32 -> f16
        mul; an operand is float32
      dot_general in half: f32>f16 f32>f16 -> f16
    """

    def step(carry, row):
        angles = jnp.tril(jnp.ones((128, 128))) @ (row * jnp.ones((128, 1)))
        return (carry * angles) @ w, None

    return lax.scan(step, x, positions)[0]


test_plan = plan_test(CASES)
