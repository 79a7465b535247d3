"""Random attentions: what a kernel may compute, in forms that programs have, and what it may not.

An attention has a number, and all that it is depends on it. Scores, weights and what is between are
drawn step by step. Nothing is meant to be run: some softmaxes have rows without a key.
"""

import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = Any
AXES = "bhqk"
HEADS, WIDTH = 2, 16
LOWEST = float(np.finfo(np.float32).min)
FILLS = (*[-1e9] * 6, *[LOWEST] * 3, -np.inf, -1e4, -3.0)


def arrays(length: int) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """Returns queries, keys, values and three biases; and a mask of keys."""
    shapes = [(2, length, HEADS, WIDTH)] * 3
    shapes += [(1, HEADS, length, length), (2, 1, 1, length), (1, HEADS, 1, 1)]
    draws = ((np.random.default_rng(seed), shape) for seed, shape in enumerate(shapes))
    floats = (draw.standard_normal(shape, np.float32) for draw, shape in draws)
    keys = jnp.arange(length)[None] < jnp.array([[length], [9]])
    return tuple(map(jnp.asarray, floats)), (keys,)


def attention(number: int) -> Callable[..., Array]:
    """Returns a function of what `arrays` returns."""
    draw = random.Random(number)
    order = draw.choice([AXES, AXES, AXES, "hbqk", "bqhk", "bhkq"])
    operands = draw.choice(["bqhd,bkhd", "bqhd,bkhd", "bkhd,bqhd"])
    kinds = [draw.choice(STEPS) for _ in range(draw.choice([0, 1, 1, 2, 2, 3]))]
    seeds = [draw.random() for _ in kinds]
    by, after = draw.choice(SOFTMAXES), draw.choice(AFTER)
    last = draw.choice([f"{order},bkhd->bqhd", f"{order},bkhd->bqhd", f"bkhd,{order}->bhdq"])
    moves_back = draw.random() < 0.3

    def function(q: Array, k: Array, v: Array, *others: Array) -> Array:
        left, right = (q, k) if operands.startswith("bq") else (k, q)
        x = jnp.einsum(f"{operands}->{order}", left, right)

        def ordered(array: Array) -> Array:
            return jnp.transpose(array, [AXES.index(axis) for axis in order])

        for kind, seed in zip(kinds, seeds, strict=True):
            x = kind(x, [ordered(each) for each in masks_and_biases(*others)], random.Random(seed))
        axis = order.index("k")
        weights = after(by(x, axis), ordered(others[0]))
        if moves_back:
            weights = jnp.swapaxes(jnp.swapaxes(weights, 1, 2), 1, 2)
        return jnp.einsum(last, weights, v) if last.startswith(order) else jnp.einsum(
            last, v, weights)  # fmt: skip

    return function


def masks_and_biases(*others: Array) -> list[Array]:
    """Returns three biases, a mask of keys, and three that the program holds, along all axes."""
    *biases, keys = others
    length = keys.shape[-1]
    causal = np.tril(np.ones((length, length), bool))[None, None]
    held = [causal, causal & ~np.tril(causal, -4), causal | (np.arange(length) < 5)]
    return [*biases, keys[:, None, None], *map(jnp.asarray, held)]


# A step of scores, of which most keep an attention one that kernels compute.


def biased(x: Array, others: list[Array], draw: random.Random) -> Array:
    bias = draw.choice([others[0], others[0], *others[:3]])
    usual = [lambda: x + bias, lambda: x - bias, lambda: bias + x] * 3
    return draw.choice([*usual, lambda: bias - x])()


def scaled(x: Array, others: list[Array], draw: random.Random) -> Array:
    usual = [lambda: x * 0.25, lambda: x / 4, lambda: 0.3 * x] * 3
    return draw.choice([*usual, lambda: x * others[2], lambda: x * -0.5])()


def masked(x: Array, others: list[Array], draw: random.Random) -> Array:
    mask, fill = draw.choice([others[3], others[3], *others[3:]]), draw.choice(FILLS)
    return draw.choice([
        lambda: jnp.where(mask, x, fill),
        lambda: jnp.where(~mask, fill, x),
        lambda: jnp.where(mask.astype(jnp.float32) != 0, x, fill),
        lambda: jnp.where(mask & others[4], x, fill),
        lambda: jnp.where(~mask | ~others[4], fill, x),
        lambda: x + (1 - mask.astype(jnp.float32)) * max(fill, LOWEST),
        lambda: x + jnp.where(mask, 0.0, fill),
    ])()  # fmt: skip


def changed(x: Array, others: list[Array], draw: random.Random) -> Array:
    return draw.choice([jnp.tanh, lambda x: x + x, jax.lax.stop_gradient, lambda x: x - 3.0])(x)


STEPS = [biased] * 4 + [scaled] * 3 + [masked] * 9 + [changed]


def by_hand(x: Array, axis: int) -> Array:
    powers = jnp.exp(x - x.max(axis, keepdims=True))
    return powers / powers.sum(axis, keepdims=True)


def without_maximum(x: Array, axis: int) -> Array:
    powers = jnp.exp(x - 2.0)
    return powers / powers.sum(axis, keepdims=True)


SOFTMAXES = [*[jax.nn.softmax] * 8, *[by_hand] * 4, *[without_maximum] * 2] + [
    lambda x, axis: jax.nn.softmax(x, axis - 1),
    lambda x, axis: jnp.exp(jax.nn.log_softmax(x, axis)),
]
AFTER = [lambda weights, _: weights] * 16 + [
    *[lambda weights, _: weights * jnp.ones_like(weights)] * 4,
    lambda weights, bias: weights * bias,
    lambda weights, _: weights * 2.0,
    lambda weights, _: weights.astype(jnp.bfloat16).astype(jnp.float32),
]
