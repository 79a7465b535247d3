"""States in one or two bytes a number: how exact, of which arrays, and what they cure."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jmp
from jmp import transforms
from jmp.transforms._encodings import encoded
from tests.bits import bits
from tests.commands import in_full

KINDS = ["bfloat16", "float16", "float8_e4m3fn", "int8"]
every_kind = pytest.mark.parametrize("kind", KINDS)
every_other_kind = pytest.mark.parametrize("kind", in_full(KINDS, but=("float16", "int8")))
SHAPES = (3, 1), (2, 257), (4, 16), (2, 255), (3, 256), (2, 3, 1000)
# Half a spacing, of a number's size: the largest error of rounding to the nearest.
ERROR = {"bfloat16": 2**-8, "float16": 2**-11, "float8_e4m3fn": 2**-4, "int8": 2**-4}


def rows(shape, key=0):
    return jax.random.normal(jax.random.key(key), shape)


# Of an array.


@every_kind
@pytest.mark.parametrize("shape", in_full(map(pytest.param, SHAPES), first=2))
@pytest.mark.parametrize("size", in_full([1e-30, 1e30, 1.0], first=2))
def test_what_is_decoded_is_near(kind, shape, size):
    value = size * rows(shape)
    stored = encoded(value, kind)
    assert stored.codes.shape == shape
    near = jnp.abs(stored.decoded() - value) <= ERROR[kind] * jnp.abs(value)
    # Beside the largest number of a row small ones are subnormal.
    tiny = jnp.abs(value) < 2.0**-13 * jnp.max(jnp.abs(value), axis=-1, keepdims=True)
    assert (near | tiny).all()


@every_other_kind
def test_what_is_decoded_is_stored_again_as_it_was(kind):
    for value in (rows((4, 300)), rows((4, 300)) ** 2):
        stored = encoded(value, kind)
        again = encoded(stored.decoded(), kind)
        assert bits(again.decoded()) == bits(stored.decoded())


@every_kind
def test_no_finite_value_becomes_infinite_and_none_that_is_not_is_lost(kind):
    largest = float(jnp.finfo(jnp.float32).max)
    value = jnp.float32([[largest, -largest, 1.0], [largest, 0.0, 1e-45], [0.0, 0.0, 0.0]])
    assert jnp.isfinite(encoded(value, kind).decoded()).all()
    for bad in (jnp.inf, -jnp.inf, jnp.nan):
        found = encoded(value.at[0, 1].set(bad), kind).decoded()
        assert not jnp.isfinite(found[0, 1])
        assert jnp.isfinite(found[1:]).all()  # other rows know nothing of it


@pytest.mark.parametrize("length", in_full([1, 700, 255, 256, 4096], first=2))
def test_a_tpu_finds_the_same_codes_and_numbers_of_blocks(monkeypatch, length):
    signed = rows((3, length)) * 2.0 ** rows((3, length), 1)
    values = jnp.concatenate([signed, signed**2])
    expected = encoded(values, "int8")
    number = expected.decoded()
    calls = []

    def as_on_a_tpu(*operands, tpu, default):
        calls.append(default)
        return tpu(*operands)

    monkeypatch.setattr(jax.lax, "platform_dependent", as_on_a_tpu)
    found = encoded(values, "int8")
    assert calls
    assert bits(found.codes) == bits(expected.codes)
    assert bits(found.scales) == bits(expected.scales)
    assert bits(found.decoded()) == bits(number)


def test_small_numbers_beside_large_ones_are_no_zeros_in_second_moments():
    value = jnp.logspace(-8.5, 0, 256)[None]  # of gradients, a factor of 2e4
    linear = jnp.round(value / value.max() * 127) / 127
    assert int(jnp.sum(linear == 0)) > 100  # an even code
    found = encoded(value, "int8").decoded()
    assert (jnp.abs(found - value) <= 2**-4 * value).all()
    signed = encoded(value.at[0, 0].set(-1e-9), "int8").decoded()
    reached = value >= 2**-14
    assert (jnp.abs(signed - value) <= 2**-4 * value)[reached].all()


@pytest.mark.parametrize("kind", ["float16", "float8_e4m3fn", "int8"])
def test_a_positive_number_becomes_zero_only_beside_negative_ones(kind):
    down = jnp.zeros((1, 256), jnp.uint32)  # the bits that round the farthest towards zero
    value = jnp.logspace(-30, 0, 256)[None]
    assert (encoded(value, kind, down).decoded() > 0).all()
    assert (encoded(value.at[0, 7].set(0.0), kind, down).decoded() == 0).sum() == 1
    # Of a first moment each number is right on average, also those that become zero.
    signed = encoded(value.at[0, ::128].set(-1.0), kind, down).decoded()
    assert (signed[0, 1:32] == 0).all()


# Of a state.


def shapes_and_dtypes(state):
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): (leaf.shape, str(leaf.dtype)) for path, leaf in leaves}


PARAMS = {"embed": jnp.ones((8, 16)), "w": jnp.ones((16, 4)), "b": jnp.ones(4)}


def test_arrays_of_the_shape_of_a_parameter_are_stored_and_others_are_not():
    tx = transforms.with_stored_state(optax.adam(1e-3), "bfloat16")
    found = shapes_and_dtypes(tx.init(PARAMS).inner_state[0])
    assert found == {
        ".count": ((), "int32"),
        **{
            f".{moment}['{name}'].codes": (param.shape, "bfloat16")
            for moment in ("mu", "nu")
            for name, param in PARAMS.items()
        },
    }


@pytest.mark.parametrize(
    ("kind", "dtype"), in_full([("int8", "uint8"), ("float8_e4m3fn", "float8_e4m3fn")], first=1)
)
def test_of_8_bits_vectors_and_embeddings_stay_float32_unless_a_rule_says_otherwise(kind, dtype):
    def dtypes(stored):
        state = transforms.with_stored_state(optax.trace(0.9), stored).init(PARAMS)
        of = {n: x if hasattr(x, "dtype") else x.codes for n, x in state.inner_state.trace.items()}
        return {name: str(x.dtype) for name, x in of.items()}

    assert dtypes(kind) == {"embed": "float32", "w": dtype, "b": "float32"}
    assert dtypes([("*", "*", kind)]) == {"embed": dtype, "w": dtype, "b": dtype}
    rules = [("trace", "w", "float32"), ("*", "[bw]", kind)]
    assert dtypes(rules) == {"embed": "float32", "w": "float32", "b": dtype}


def test_a_rule_that_matches_nothing_is_named():
    tx = transforms.with_stored_state(optax.adam(1e-3), [("*mv*", "*", "bfloat16")])
    with pytest.warns(jmp.UnusedRuleWarning, match=r"'\*mv\*'.*paths here are '0/mu, "):
        tx.init(PARAMS)


# What it cures.

FALLS = {"bfloat16": 0.03, "float16": 0.02, "float8_e4m3fn": 0.10, "int8": 0.10}


def after_a_peak(tx, dtype=jnp.float32):
    """Returns the last update of a 16 x 16 parameter whose gradient was 1 once, then 0.05."""
    params = jnp.zeros((16, 16), dtype)
    first = tx.init(params)
    _, state = tx.update(jnp.ones((16, 16), dtype), first, params)

    def step(carry, _):
        _, state = carry
        return tx.update(jnp.full((16, 16), 0.05, dtype), state, params), None

    state = jax.tree.map(jnp.asarray, state)
    updates = jnp.zeros((16, 16), jnp.result_type(tx.update(params, first, params)[0]))
    (updates, _), _ = jax.jit(lambda c: jax.lax.scan(step, c, length=1500))((updates, state))
    return float(jnp.mean(updates.astype(jnp.float32)))


@pytest.fixture(scope="module")
def exact():
    return after_a_peak(optax.scale_by_adam(b2=0.999))


@every_other_kind
def test_a_second_moment_falls(kind, exact):
    tx = transforms.with_stored_state(optax.scale_by_adam(b2=0.999), kind)
    assert abs(after_a_peak(tx) / exact - 1) <= FALLS[kind]


def test_half_parameters_have_a_second_moment_that_falls_too(exact):
    tx = transforms.with_stored_state(optax.scale_by_adam(b2=0.999), "bfloat16")
    assert abs(after_a_peak(tx, dtype=jnp.bfloat16) / exact - 1) <= FALLS["bfloat16"]


@every_other_kind
def test_no_step_is_large_where_gradients_of_a_row_differ_by_many_orders(kind):
    scales = jnp.logspace(-7, 0, 256)[None, None]
    gradients = scales * jax.random.normal(jax.random.key(0), (300, 2, 256))
    tx = transforms.with_stored_state(optax.adam(1.0), kind)
    params = jnp.zeros((2, 256))

    def step(state, gradient):
        updates, state = tx.update(gradient, state, params)
        return state, jnp.max(jnp.abs(updates))

    _, largest = jax.jit(lambda state: jax.lax.scan(step, state, gradients))(tx.init(params))
    assert largest.max() < 1.5  # of float32 it is 1.0; by a second moment of zero 1e4


def test_eps_is_no_zero_over_zero_in_float16():
    tx = transforms.with_stored_state(optax.adam(1e-3), "float16")
    zero = jnp.zeros((4, 4), jnp.float16)
    assert (tx.update(zero, tx.init(zero), zero)[0] == 0).all()  # of optax's own it is NaN
