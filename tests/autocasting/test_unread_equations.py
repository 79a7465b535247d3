"""Equations whose results nobody reads: which stay, and in which order effects run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.interpreters import ad

import jmp
from jmp.autocasting import register_rule
from tests.primitives import elementwise
from tests.products import named

X = jax.random.normal(jax.random.key(0), (4, 8))
W = jax.random.normal(jax.random.key(1), (8, 8)) * 0.3
HALVES = ("mixed_float16", "mixed_bfloat16")


def marker(name):
    """A primitive that a program is searched for, as kfac-jax searches for layers and losses."""
    primitive = elementwise(name, lambda x: x)
    ad.deflinear2(primitive, lambda cotangent, _: [cotangent])
    return primitive


FOUND = marker("found_by_its_name")


def in_an_island(x, w):
    powers = jnp.exp(x @ w)
    FOUND.bind(powers)
    return (powers / powers.sum(-1, keepdims=True)) @ w


def in_a_custom_derivative(x, w):
    function = jax.custom_jvp(lambda y: FOUND.bind(y @ w))
    function.defjvp(lambda primals, tangents: (function(*primals), tangents[0] @ w))
    return function(x)


# What stands beside a product, which is all that is returned.
PLACES = {
    "at the top": lambda x, w: FOUND.bind(x @ w),
    "in a jit": lambda x, w: jax.jit(FOUND.bind)(x @ w),
    "in a scan": lambda x, w: lax.scan(lambda c, row: (c, FOUND.bind(row[None] @ w)), 0.0, x),
    "in a branch": lambda x, w: lax.cond(x.sum() > 0, FOUND.bind, jnp.sin, x @ w),
    "in a custom derivative": in_a_custom_derivative,
    "of one that is read": lambda x, w: FOUND.bind(jnp.tanh(FOUND.bind(x @ w))),
}


def beside_a_product(place):
    return lambda x, w: (PLACES[place](x, w), x @ w)[1]


FUNCTIONS = {"in an island": in_an_island, **{name: beside_a_product(name) for name in PLACES}}


def count(function, name=FOUND.name):
    return len(named(name, function, X, W))


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_a_primitive_of_others_stays_where_nothing_reads_it(function):
    for policy in HALVES:
        ours = jmp.autocast(function, policy)
        assert count(ours) == count(function) > 0
        batched = jax.vmap(ours, (0, None))
        assert count(lambda x, w, run=batched: run(x[None], w)) == count(function)
        got, expected = jax.jit(ours)(X, W), function(X, W)
        np.testing.assert_allclose(got, expected, rtol=0.02, atol=0.02)


def test_what_jax_alone_would_find_is_left_out():
    def function(x, w):
        _ = jnp.exp(x @ w) @ w
        lax.scan(lambda carry, row: (carry @ w, row @ w), w, x)
        return x @ w

    assert count(jmp.autocast(function, HALVES[0]), "dot_general") == 1


def test_a_primitive_of_others_stays_though_the_user_has_given_it_a_rule():
    found = marker("found_with_a_rule")
    register_rule(found, "follow", "a marker", "fusible")

    def function(x, w):
        found.bind(jnp.exp(x @ w))
        return jnp.exp(x @ w).sum()

    assert count(jmp.autocast(function, HALVES[0]), found.name) == 1


def test_what_is_marked_is_marked_as_it_was_traced():
    for policy in HALVES:
        (mark,) = named(FOUND.name, jmp.autocast(in_an_island, policy), X, W)
        assert mark.invars[0].aval.dtype == jnp.float32


def test_effects_run_in_order_though_an_island_reads_what_comes_before_and_after_them():
    seen = []

    def note(text):
        return lambda x: (seen.append(text), np.asarray(x))[1]

    def function(x, w):
        powers = jnp.exp(x @ w)
        like = jax.ShapeDtypeStruct(powers.shape, powers.dtype)
        io_callback(note("first"), like, powers, ordered=True)
        neutral = io_callback(note("second"), like, jnp.cos(x), ordered=True)
        return (powers * jnp.tanh(neutral)) @ w

    found = jmp.autocast(function, HALVES[0])(X, W)
    np.testing.assert_allclose(found, function(X, W), rtol=0.02, atol=0.02)
    jax.effects_barrier()
    assert seen == ["first", "second"] * 2
