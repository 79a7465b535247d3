"""Equations whose results nobody reads: which stay, and in which order effects run."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

import jmp
from jmp.autocasting import _registry, register_rule
from tests.products import equations

X = jax.random.normal(jax.random.key(0), (4, 8))
W = jax.random.normal(jax.random.key(1), (8, 8)) * 0.3
HALVES = ("mixed_float16", "mixed_bfloat16")


def marker(name):
    """A primitive that a program is searched for, as kfac-jax searches for layers and losses."""
    primitive = Primitive(name)
    primitive.def_impl(lambda x: x)
    primitive.def_abstract_eval(lambda aval: aval)
    ad.deflinear2(primitive, lambda cotangent, _: [cotangent])
    batching.defvectorized(primitive)
    mlir.register_lowering(primitive, lambda _, operand: [operand])
    return primitive


FOUND = marker("found_by_its_name")


def at_the_top(x, w):
    FOUND.bind(x @ w)
    return x @ w


def of_a_neutral_value(x, w):
    FOUND.bind(jnp.tanh(x))
    return x @ w


def in_an_island(x, w):
    powers = jnp.exp(x @ w)
    FOUND.bind(powers)
    return (powers / powers.sum(-1, keepdims=True)) @ w


def in_a_jit(x, w):
    jax.jit(FOUND.bind)(x @ w)
    return x @ w


def in_a_scan(x, w):
    lax.scan(lambda carry, row: (carry, FOUND.bind(row[None] @ w)), 0.0, x)
    return x @ w


def in_a_remat(x, w):
    jax.checkpoint(lambda y: FOUND.bind(jnp.sin(y @ w)) * 2)(x)
    return x @ w


def in_a_branch(x, w):
    lax.cond(x.sum() > 0, FOUND.bind, jnp.sin, x @ w)
    return x @ w


def in_a_custom_derivative(x, w):
    function = jax.custom_jvp(lambda y: FOUND.bind(y @ w))
    function.defjvp(lambda primals, tangents: (function(*primals), tangents[0] @ w))
    function(x)
    return x @ w


def of_a_read_one(x, w):
    FOUND.bind(jnp.tanh(FOUND.bind(x @ w)))
    return x @ w


PLACES = (
    at_the_top, of_a_neutral_value, in_an_island, in_a_jit, in_a_scan, in_a_remat, in_a_branch,
    in_a_custom_derivative, of_a_read_one,
)  # fmt: skip


def count(function, name=FOUND.name):
    jaxpr = jax.make_jaxpr(function)(X, W).jaxpr
    return sum(equation.primitive.name == name for equation in equations(jaxpr))


def _one_example(batched, x, w):
    return batched(x[None], w)


@pytest.mark.parametrize("function", PLACES)
def test_a_primitive_of_others_stays_where_nothing_reads_it(function):
    for policy in HALVES:
        ours = jmp.autocast(function, policy)
        assert count(ours) == count(function) > 0
        batched = jax.vmap(ours, (0, None))
        assert count(functools.partial(_one_example, batched)) == count(function)
        got, expected = jax.jit(ours)(X, W), function(X, W)
        np.testing.assert_allclose(got, expected, rtol=0.02, atol=0.02)


def test_what_jax_alone_would_find_is_left_out():
    def function(x, w):
        _ = jnp.exp(x @ w) @ w
        lax.scan(lambda carry, row: (carry @ w, row @ w), w, x)
        return x @ w

    assert count(jmp.autocast(function, HALVES[0]), "dot_general") == 1


def test_a_primitive_of_others_stays_though_the_user_has_given_it_a_rule():
    name = "found_with_a_rule"
    with contextlib.ExitStack() as stack:
        register_rule(name, "follow", "a marker", "fusible")
        stack.callback(_registry._RULES.pop, name)
        found = marker(name)

        def function(x, w):
            found.bind(jnp.exp(x @ w))
            return jnp.exp(x @ w).sum()

        assert count(jmp.autocast(function, HALVES[0]), name) == 1


def test_what_is_marked_is_marked_as_it_was_traced():
    for policy in HALVES:
        jaxpr = jax.make_jaxpr(jmp.autocast(in_an_island, policy))(X, W).jaxpr
        (mark,) = (e for e in equations(jaxpr) if e.primitive.name == FOUND.name)
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

    np.testing.assert_allclose(
        jmp.autocast(function, HALVES[0])(X, W), function(X, W), rtol=0.02, atol=0.02
    )
    jax.effects_barrier()
    assert seen == ["first", "second"] * 2
