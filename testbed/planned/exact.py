"""Plans of products that are no matrix products of a network; see `autocasting/_products`."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from testbed.planned.cases import W, X, new_cases, struct

CASES, planned = new_cases()

TABLE = np.float32(np.random.default_rng(0).normal(size=(128, 128)))
TOKENS = struct(128, dtype=jnp.int32)
WEIGHTS = jnp.ones((128, 128)) / 3
LOOKED_UP = jax.jit(lambda tokens: WEIGHTS[tokens], donate_argnums=0, keep_unused=True)


@planned(TOKENS)
def closed_over_inside(tokens):
    """Weights that a function inside closes over are weights."""
    rows = LOOKED_UP(tokens)
    return rows @ rows.T


@planned(X, W, TOKENS)
def numpy_arrays(x, w, tokens):
    """They transform an input, once: they might be weights, as those of rows looked up."""
    return (x @ TABLE) @ TABLE, jax.nn.one_hot(tokens, 128) @ TABLE, (x @ w) @ TABLE


@planned(X, W)
def chosen_rows(x, table):
    """What equality chooses is no table: an identity, buckets of distances.

    A window is one.
    """
    distances = jnp.abs(jnp.arange(128)[:, None] - jnp.arange(128)).ravel()
    band = (distances.reshape(128, 128) < 8).astype(jnp.float32)
    return jnp.eye(128) @ x, jax.nn.one_hot(distances, 128) @ table, band @ x


@planned(X, W)
def features_of_other_levels(x, w):
    """Angles are float32, and their sines may stand outside, or in the next turn of a loop."""
    outside = jnp.sin(jax.checkpoint(lambda x: x @ w)(x))

    def turn(phase, row):
        return phase + row @ w, jnp.sin(phase)

    return outside, lax.scan(turn, jnp.zeros((1, 128)), x[:, None])[1]


@planned(X, W)
def features_of_a_complex_exponential(x, w):
    """An exponential of a complex number turns as sines do."""
    y = jnp.exp(1j * (x @ w))
    return jnp.real(y) @ w


@planned(X, W)
def a_table_that_a_loop_makes(x, w):
    """A matrix that a loop makes of constants, with functions inside of it, is a table."""
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
