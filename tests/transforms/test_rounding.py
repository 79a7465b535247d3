"""Rounding by bits: exhaustive over intervals, and the random bits that decide."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jmp.transforms._rounding import HALFWAY, RandomBits, code_of, global_index, rounded_by
from tests.commands import in_full


def by(bits, values, dtype):
    return rounded_by(jnp.full(np.shape(values), bits, jnp.uint32), jnp.asarray(values), dtype)


def from_pattern(pattern):
    return np.asarray(pattern, np.uint32).view(np.float32)


@jax.jit
def rounded_by_each(bits, values):
    """Returns bfloat16 numbers, as float32, of all values (columns) by each of some bits (rows)."""
    return jax.vmap(lambda one: rounded_by(jnp.full(values.shape, one), values, jnp.bfloat16))(bits)


NORMAL = np.arange(0x0080, 0x7F7F, dtype=np.uint32)  # higher halves, without the last


@pytest.mark.parametrize("sign", [0, 0x80000000])
def test_the_chance_is_the_fraction_of_the_way_in_every_interval(sign):
    """Bits in rising order: the last that round towards zero, and the first that do not."""
    for low in [1, 2, 0x1234, 0x7FFF, 0x8000, 0x8001, 0xFFFF]:
        values = from_pattern(sign | NORMAL << 16 | low)
        ends = np.uint32([0, 2**16 - low - 1, 2**16 - low, 2**16 - 1]) << 16
        results = np.asarray(rounded_by_each(ends, values)).view(np.uint32) >> 16
        expected = (sign >> 16 | NORMAL) + np.uint32([[0], [0], [1], [1]])
        assert (results == expected).all()


def test_every_bfloat16_number_stays_whatever_the_bits():
    numbers = from_pattern(np.arange(2**16, dtype=np.uint32) << 16)
    numbers = numbers[np.isfinite(numbers)]
    for bits in (0, 1, HALFWAY, 2**32 - 1):
        found = by(bits, numbers, jnp.bfloat16)
        assert (np.asarray(found).view(np.uint32) == numbers.view(np.uint32)).all()


@pytest.mark.parametrize("dtype", in_full(["float8_e4m3fn", "float16"], first=1))
def test_every_number_of_narrower_types_stays_and_between_them_the_mean_is_the_value(dtype):
    facts = jnp.finfo(dtype)
    patterns = np.arange(2**facts.bits, dtype=f"uint{facts.bits}").view(jnp.dtype(dtype))
    numbers = np.unique(patterns.astype(np.float32)[np.isfinite(patterns.astype(np.float32))])
    for bits in (0, HALFWAY, 2**32 - 1):
        found = np.asarray(by(bits, numbers, dtype))
        assert (found == numbers).all()
    # At a quarter and at three fifths of each interval, by 2**6 bits spread evenly.
    bits = (np.arange(2**6, dtype=np.uint32) << 26) + 2**25
    low, high = numbers[:-1], numbers[1:]
    for part in (0.25, 0.6):
        values = np.float32(low + part * (high - low))
        each = jax.vmap(by, in_axes=(0, None, None))
        results = np.asarray(each(jnp.uint32(bits), values, dtype), np.float64)
        assert ((results == low) | (results == high)).all()
        error = np.abs(results.mean(axis=0) - values) / (high - low)
        assert error.max() <= 2**-6


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn"])
def test_no_infinity_comes_of_a_finite_number_and_nan_stays(dtype):
    largest = float(jnp.finfo(dtype).max)
    values = jnp.float32([largest * 1.001, -largest * 1.001, 3.4e38, jnp.inf, -jnp.inf, jnp.nan])
    for bits in (0, HALFWAY, 2**32 - 1):
        found = by(bits, values, dtype).tolist()
        assert found[:5] == [largest, -largest, largest, largest, -largest]
        assert np.isnan(found[5])
        quiet = by(bits, from_pattern([0x7F800001, 0xFFFFFFFF]), dtype)
        assert jnp.isnan(quiet).all()


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float16])
def test_codes_are_the_patterns_of_rounded_numbers(dtype):
    facts = jnp.finfo(dtype)
    pattern = np.uint8 if facts.bits == 8 else np.uint16
    # From where all is rounded to zero to near the largest number, with 12 bits that decide.
    patterns = np.arange(0x30000000, 0x43D00000, 12345, dtype=np.uint32)
    values = from_pattern(patterns & np.uint32(0xFFFFF000))
    given = jax.random.bits(jax.random.key(0), values.shape) & jnp.uint32(0xFFF00000)
    rounded = np.asarray(rounded_by(given, values, dtype)).astype(dtype)
    codes = np.asarray(code_of(given, values, facts.nmant, int(facts.minexp)))
    assert (codes == rounded.view(pattern)).all()
    assert (codes == np.asarray(code_of(given, -values, facts.nmant, int(facts.minexp)))).all()


# The bits.


def bits_of(seed=0, step=0, path="['w']", shape=(512, 512)):
    return np.asarray(RandomBits("test", seed).at(path, jnp.zeros(shape), jnp.int32(step))).ravel()


def bits_in_step(step):
    return RandomBits("test", 0).at("['w']", jnp.zeros(4), step)


STREAMS = {
    "elements": lambda: bits_of(),
    "steps": lambda: np.asarray(jax.vmap(bits_in_step)(jnp.arange(8192))).ravel(),
    "seeds": lambda: np.concatenate([bits_of(seed=i, shape=(16,)) for i in range(512)]),
    "paths": lambda: np.concatenate([bits_of(path=f"[{i}]", shape=(16,)) for i in range(512)]),
}


@pytest.mark.parametrize("name", in_full(STREAMS.keys(), but=("elements", "steps")))
def test_bits_are_even_and_know_nothing_of_their_neighbours(name):
    stream = STREAMS[name]()
    count = len(stream)
    for shift in (0, 8, 16, 24):
        bins = np.bincount(stream >> shift & 255, minlength=256)
        chi = ((bins - count / 256) ** 2 / (count / 256)).sum()
        assert 160 < chi < 370  # 255 +- 23: five spreads
    uniform = stream / 2.0**32
    for lag in (1, 2, 3, 4, 7, 64, 512):
        correlation = np.corrcoef(uniform[:-lag], uniform[lag:])[0, 1]
        assert abs(correlation) < 5 / np.sqrt(count)
        flips = np.unpackbits((stream[:-lag] ^ stream[lag:]).view(np.uint8)).mean()
        assert abs(flips - 0.5) < 5 * 0.5 / np.sqrt(32 * count)


def test_bits_differ_between_seeds_steps_and_paths_and_repeat():
    first = bits_of()
    assert (first == bits_of()).all()
    for other in (bits_of(seed=1), bits_of(step=1), bits_of(path="['v']"), bits_of(seed=-1)):
        assert (first == other).mean() < 1e-3
        assert abs(np.corrcoef(first / 2.0**32, other / 2.0**32)[0, 1]) < 0.01


def test_an_element_is_counted_in_the_order_of_rows():
    for shape in ((48,), (8, 6), (2, 4, 6)):
        index = global_index(jnp.zeros(shape), "", None, jnp.uint32(0))
        assert (np.ravel(index) == np.arange(48)).all()


def test_specs_without_an_entry_for_an_array_are_refused():
    """A tree of fewer, as shard_map takes, would give each device the same bits."""
    bits = RandomBits("test", 0, {"block": PartitionSpec("data")})
    with pytest.raises(ValueError, match=r"without an entry for \['block'\]\['w'\]"):
        bits.at("['block']['w']", jnp.zeros(4), jnp.int32(0))
