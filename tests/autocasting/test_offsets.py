"""Offsets that are added and taken away again: between the two half types have few digits left."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jmp
from jmp import diagnostics
from tests.commands import in_full
from tests.errors import errors_beside_half_products

HALVES = (jnp.float16, jnp.bfloat16)
ROWS, WIDTH = 256, 16
MEANS = np.linspace(250, 350, WIDTH, dtype=np.float32)[None]
GRID = jnp.linspace(990, 1010, 41)
ORDER = jnp.asarray(np.random.default_rng(0).permutation(ROWS))

# Each makes of numbers near zero, through numbers that lie beside an offset, numbers of that size.
OF_CONSTANTS = {
    "kelvin": lambda h: ((h * 10 + 288) - 288) / 10,
    "fahrenheit": lambda h: ((h + 273.15) * 1.8 - 491.67) / 2,
    "before": lambda h: (1000 - h) - 1000,
    "twice": lambda h: ((h + 300) + 700) - 1000,
    "sine": lambda h: jnp.sin(h + 1000),
    "cosine": lambda h: jnp.cos(400 - h),
    "interpolation": lambda h: jnp.interp(h + 1000, GRID, jnp.sin(GRID)),
    "logarithm": lambda h: 300 * (jnp.log(h + 300) - np.log(300)),
    "root": lambda h: 40 * (jnp.sqrt(h + 500) - 500**0.5),
    "square": lambda h: ((h + 300) ** 2 - 300**2) / 600,
    "magnitude": lambda h: jnp.abs(h + 128) - 128,
    "larger": lambda h: jnp.maximum(h + 256, 256) - 256,
    "clipped": lambda h: jnp.clip(h + 512, 511.5, 512.5) - 512,
    "chosen": lambda h: jnp.where(h > 0, h + 512, 512 + h / 2) - 512,
    "moved": lambda h: ((h + 1000).T.reshape(-1) - 1000).reshape(h.shape[::-1]).T,
    "joined": lambda h: jnp.concatenate([h + 1000, h + 2000])[: h.shape[0]] - 1000,
    "looked up": lambda h: (h + 1000)[ORDER] - 1000,
    "in a jit": lambda h: jax.jit(lambda h: h + 1000)(h) - 1000,
    "in a remat": lambda h: jax.checkpoint(lambda h: jnp.sin(h + 1000))(h),
    "into a scan": lambda h: lax.scan(lambda c, row: (c, row - 1000), 0.0, h + 1000)[1],
    "in a scan": lambda h: lax.scan(lambda c, row: (c, jnp.sin(row + 1000)), 0.0, h)[1],
    "in a branch": lambda h: lax.cond(h[0, 0] > 9, jnp.cos, lambda h: jnp.sin(h + 1000), h),
    "an array of the program": lambda h: jnp.sin(h + MEANS),
}
OF_ARGUMENTS = {
    "by row": lambda h, mean, std: ((h * std + mean) - mean) / std,
    "by number": lambda h, mean, std: ((h * 90 + mean[0, 0]) - mean[0, 0]) / 90,
    "repeated": lambda h, mean, std: (h + jnp.tile(mean, (ROWS, 1))) - mean,
    "with a square between": lambda h, mean, std: jnp.sqrt((h + mean) ** 2) - mean,
}
WAYS = {**OF_CONSTANTS, **OF_ARGUMENTS}


def program(way, product, weights, x, *more):
    h = jnp.tanh(product(x, weights[0])) / 2
    v = OF_CONSTANTS[way](h) if way in OF_CONSTANTS else OF_ARGUMENTS[way](h, *more)
    return jnp.mean(product(v, weights[1]) ** 2)


def arguments():
    keys = jax.random.split(jax.random.key(1), 3)
    weights = [jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5 for key in keys[:2]]
    x, std = jax.random.normal(keys[2], (ROWS, WIDTH)), jnp.full((1, WIDTH), 90.0)
    return weights, x, 300 * jnp.asarray(MEANS), std


CASES = [(way, half) for way in WAYS for half in HALVES]


@pytest.mark.usefixtures("users_rank_promotion")
@pytest.mark.parametrize(("way", "half"), in_full(CASES, one_of=4))
def test_what_is_added_and_taken_away_again_keeps_its_digits(way, half):
    this = functools.partial(program, way)
    found, reference = errors_beside_half_products(this, half, arguments())
    # Below half a unit in the last place: one addition of half values, as that of two table rows.
    limit = max(1.05 * reference, 0.4 * jnp.finfo(half).eps)
    assert reference < 0.1 and found <= limit, (found, reference)


@pytest.mark.parametrize("half", HALVES)
def test_a_bias_and_a_small_constant_are_added_in_half(half):
    def network(weights, bias, x):
        h = jax.nn.relu(x @ weights[0] + bias)
        return ((h + 1) * (2 - h)) @ weights[1] + bias - 0.5

    weights, bias, x = jnp.ones((2, 8, 8)), jnp.ones((1, 8)), jnp.ones((4, 8))
    program = jax.make_jaxpr(jmp.autocast(network, f"p=f32,c={half.__name__},o=f32"))
    sums = [e for e in program(weights, bias, x).eqns if e.primitive.name in ("add", "sub")]
    assert [str(e.outvars[0].aval.dtype) for e in sums[:3]] == 3 * [half.__name__]


READ = {
    "computed": lambda w, x: (jnp.tanh(x @ w) + 1000) @ w,
    "an input": lambda w, x: (2 * x + 288) @ w,
    "in a scan": lambda w, x: lax.scan(lambda c, _: ((c + 500) @ w / 900, None), x, None, 2)[0],
    "of a convolution": lambda w, x: lax.conv((x[None, None] + 300), w[None, None], (1, 1), "SAME"),
}
NOT_READ = {
    "taken away": lambda w, x: (((x @ w) + 1000) - 1000) @ w,
    "small": lambda w, x: (jax.nn.relu(x @ w) + 3) @ w,
    "beside large numbers": lambda w, x: (4000 * x + 1000) @ w,
    "a mask": lambda w, x: jax.nn.softmax(x @ w - 1e9 * (x > 0)) @ w,
    "in float32": lambda w, x: jmp.full_precision(jnp.matmul)(x + 1000, w) @ w,
}


@pytest.mark.parametrize("half", HALVES)
def test_a_product_that_reads_numbers_beside_an_offset_is_a_hazard(half):
    def hazards(fun):
        report = diagnostics.precision_report(fun, f"p=f32,c={half.__name__},o=f32")
        return [sentence for sentence in report(weight, x).hazards if "larger one" in sentence]

    weight, x = jnp.ones((WIDTH, WIDTH)), jnp.ones((ROWS, WIDTH))
    assert {name: len(hazards(fun)) for name, fun in READ.items()} == dict.fromkeys(READ, 1)
    assert [name for name, fun in NOT_READ.items() if hazards(fun)] == []
    known = {jnp.float16: "0.5", jnp.bfloat16: "4"}[half]
    assert f"{half.__name__} knows 1000 to {known}" in hazards(READ["computed"])[0]
