"""Plans of products that are no matrix products of a network; see `autocasting/_products`."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from testbed.planned.cases import INDICES, ROW, W, X, new_cases, struct

CASES, planned = new_cases()

TABLE = np.float32(np.random.default_rng(0).normal(size=(128, 128)))
TOKENS = struct(128, dtype=jnp.int32)
WEIGHTS = jnp.ones((128, 128)) / 3
LOOKED_UP = jax.jit(lambda tokens: WEIGHTS[tokens], donate_argnums=0, keep_unused=True)


@planned(X, W, ROW, ROW)
def outer_products(x, w, positions, frequencies):
    """A product that contracts nothing, or one column with one row, is a multiplication."""
    angles = jnp.einsum("i,j->ij", positions, frequencies)
    others = positions[:, None] @ frequencies[None]
    return (x @ w) * angles * others


@planned(struct(4, 128), struct(128, 4), W)
def batches_of_outer_products(a, b, w):
    """Axes of batches come first; between half values it is half."""
    y, z = a @ w, w @ b
    return jnp.einsum("bi,jb->bij", y, z) @ w


@planned(X, struct(128, 1), struct(1, 128), W)
def rank_one(x, a, b, w):
    """Parameters of rank one: the first product is one, the second a half multiplication."""
    return ((x @ a) @ b) @ w


@planned(X, TOKENS)
def counts(w, tokens):
    """What has no gradient is counted in float32; a table that is looked up so is half."""
    one_hot = jax.nn.one_hot(tokens, 128)
    places = jnp.tril(jnp.ones((128, 128))) @ one_hot
    return places.sum(), one_hot @ w


@planned(TOKENS)
def closed_over_inside(tokens):
    """Weights that a function inside closes over are weights."""
    rows = LOOKED_UP(tokens)
    return rows @ rows.T


@planned(X, W)
def choices(x, w):
    """What is chosen by products is counted in float32 too."""
    chosen = jax.nn.one_hot(jnp.argmax(x @ w, -1), 128)
    return jnp.tril(jnp.ones((128, 128))) @ chosen, chosen @ w


@planned(X, W)
def made_of_constants(x, w):
    """A Fourier transform of an input, and a filterbank behind it; not of what a product gives."""
    angles = jnp.arange(128.0)[:, None] * jnp.arange(128.0) / 128
    spectrum = jnp.square(x @ jnp.cos(angles)) + jnp.square(x @ jnp.sin(angles))
    mel = jnp.maximum(0, 1 - jnp.abs(angles)) @ spectrum
    return (mel @ w) @ jnp.cos(angles)


@planned(X, W, TOKENS)
def numpy_arrays(x, w, tokens):
    """They transform an input, once: they might be weights, as those of rows looked up."""
    return (x @ TABLE) @ TABLE, jax.nn.one_hot(tokens, 128) @ TABLE, (x @ w) @ TABLE


@planned(X, W)
def one_number(x, w):
    """A sum, or the seed of a derivative, is no table."""
    return jnp.ones((128, 128)) @ x, jax.grad(lambda x: jnp.sum(x @ w))(x)


@planned(X, W)
def chosen_rows(x, table):
    """What equality chooses is no table either: an identity, buckets of distances.

    A window is one.
    """
    distances = jnp.abs(jnp.arange(128)[:, None] - jnp.arange(128)).ravel()
    band = (distances.reshape(128, 128) < 8).astype(jnp.float32)
    return jnp.eye(128) @ x, jax.nn.one_hot(distances, 128) @ table, band @ x


@planned(X)
def numbers_of_choices(x):
    """What is computed of an identity is a matrix of numbers again: centering."""
    return x @ (jnp.eye(128) - 1 / 128)


@planned(X, W)
def features_of_other_levels(x, w):
    """The sines may stand outside, or in the next turn of a loop."""
    outside = jnp.sin(jax.checkpoint(lambda x: x @ w)(x))

    def turn(phase, row):
        return phase + row @ w, jnp.sin(phase)

    return outside, lax.scan(turn, jnp.zeros((1, 128)), x[:, None])[1]


@planned(X, W)
def features(x, w):
    """Angles are float32, and what is behind another product is half."""
    y = jnp.sin(2 * jnp.pi * x @ w)
    return jnp.sin(y @ w) @ w


@planned(X, W)
def features_of_a_complex_exponential(x, w):
    """An exponential of a complex number turns as sines do."""
    y = jnp.exp(1j * (x @ w))
    return jnp.real(y) @ w


@planned(X, W)
def coordinates(x, w):
    """So do the whole numbers and the fractions of coordinates."""
    cells = x @ w
    return jnp.floor(cells), cells % 1.0, (x @ w.T).astype(jnp.int32)


@planned(X, W)
def features_that_a_loop_turns(x, w):
    """The sines may stand inside."""
    angles = x @ w

    def layer(carry, _):
        return (carry * jnp.sin(angles)) @ w, None

    return lax.scan(layer, x, None, length=3)[0]


@planned(X, struct(128, 128, dtype=jnp.int32), W)
def integers(x, counts, w):
    """No tensor core multiplies them with half numbers."""
    product = lax.dot(counts, x, preferred_element_type=jnp.float32)
    return product, lax.dot(counts, counts), (x @ w) @ w


@planned(X, INDICES, X)
def rows_of_positions_in_a_loop(w, positions, x):
    """What a loop is given row by row is known inside."""

    def step(carry, row):
        angles = jnp.tril(jnp.ones((128, 128))) @ (row * jnp.ones((128, 1)))
        return (carry * angles) @ w, None

    return lax.scan(step, x, positions)[0]


@planned(X, W)
def a_table_that_a_loop_makes(x, w):
    """A matrix that a loop makes of constants, with functions inside of it, is a table too."""
    rows = jnp.arange(128.0)[:, None]
    turn = lambda i, table: jnp.where(rows < i, table, jnp.cos(rows * table + i))
    return (x @ lax.fori_loop(0, 3, turn, jnp.ones((128, 128)))) @ w


@planned(X, W)
def derivatives_of_one_output(x, w):
    """One number among zeros is no table: where forces begin, and the direction of a derivative."""
    outputs = lambda x: jnp.tanh(x @ w) @ w
    direction = jnp.zeros_like(x).at[:, 0].set(1)
    along = jax.jvp(outputs, (x,), (direction,))[1]
    return along, jax.grad(lambda x: outputs(x)[:, 0].sum())(x)


@planned(X, W)
def sums_of_blocks(x, w):
    """Ones at several places of what is added up are a table, and so are other numbers."""
    sums = jnp.concatenate([jnp.ones((128, 64)), jnp.zeros((128, 64))], 1)
    thirds = jnp.zeros((128, 128)).at[:, 0].set(1 / 3)
    return (sums @ x) @ w, (jnp.zeros((128, 128)).at[0].set(1) @ x) @ w, (thirds @ x) @ w
