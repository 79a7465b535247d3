"""What every loss scale must do, run over every row of `cases.LOSS_SCALES`."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import jmp
from tests.cases import HALF_DTYPES, LOSS_SCALES, bits, odd_leaves


@pytest.fixture(params=LOSS_SCALES.values(), ids=LOSS_SCALES.keys())
def loss_scale(request):
    return request.param()


def test_it_survives_jit_tree_map_pickle_and_copy(loss_scale):
    for other in (
        jax.jit(lambda scale: scale)(loss_scale),
        jax.tree.map(lambda leaf: leaf, loss_scale),
        pickle.loads(pickle.dumps(loss_scale)),
        copy.deepcopy(loss_scale),
    ):
        assert other == loss_scale
        assert jax.tree.structure(other) == jax.tree.structure(loss_scale)


def test_its_leaves_may_become_anything(loss_scale):
    for value in (None, "text", PartitionSpec("x"), jnp.float16):
        mapped = jax.tree.map(lambda leaf, value=value: value, loss_scale)
        assert type(mapped) is type(loss_scale)


def test_its_leaves_have_names(loss_scale):
    for path, _ in jax.tree_util.tree_leaves_with_path(loss_scale):
        assert hasattr(loss_scale, path[0].name)


def test_casting_a_whole_state_to_half_leaves_its_dtypes(loss_scale):
    before = [leaf.dtype for leaf in jax.tree.leaves(loss_scale)]
    for cast in (jmp.cast_to_half(loss_scale), jmp.Policy("bf16", "bf16", "bf16").cast_to_param):
        tree = cast(loss_scale) if callable(cast) else cast
        assert [leaf.dtype for leaf in jax.tree.leaves(tree)] == before


def test_it_compiles_once_over_many_steps(loss_scale):
    traces = []

    @jax.jit
    def step(scale, finite):
        traces.append(1)
        return scale.adjust(finite)

    for i in range(8):
        loss_scale = step(loss_scale, jnp.array(i % 3 != 0))
    assert len(traces) == 1
    assert step._cache_size() == 1


def test_scan_and_a_python_loop_agree(loss_scale):
    flags = jnp.array([True, True, False, True, True, True, False, False])
    scanned, _ = jax.lax.scan(lambda s, finite: (s.adjust(finite), None), loss_scale, flags)
    for finite in flags:
        loss_scale = loss_scale.adjust(bool(finite))
    assert scanned == loss_scale


def test_under_vmap_each_member_adjusts_on_its_own(loss_scale):
    flags = jnp.array([True, False, True])
    stacked = jax.vmap(lambda _: loss_scale)(jnp.arange(3))
    adjusted = jax.vmap(lambda scale, finite: scale.adjust(finite))(stacked, flags)
    for i, finite in enumerate(flags):
        alone = loss_scale.adjust(bool(finite))
        assert bits(jax.tree.map(lambda leaf, i=i: leaf[i], adjusted)) == bits(alone)


@pytest.mark.parametrize("dtype", [*HALF_DTYPES, jnp.float32])
def test_unscale_undoes_scale_in_at_least_float32(loss_scale, dtype):
    values = jnp.array([0.0, -0.0, 1.0, -2.5, jnp.finfo(dtype).tiny], dtype)
    if isinstance(loss_scale, jmp.NoOpLossScale):
        assert loss_scale.scale(values) is values
        return
    scaled = loss_scale.scale({"x": values})["x"]
    assert scaled.dtype == jnp.float32
    restored = loss_scale.unscale({"x": scaled})["x"]
    np.testing.assert_allclose(restored, values.astype(jnp.float32), rtol=2e-7)
    assert bool(jnp.signbit(restored[1]))


def test_float64_stays_float64(loss_scale):
    with jax.enable_x64(True):
        value = jnp.array(1 / 3, jnp.float64)
        restored = loss_scale.unscale(loss_scale.scale(value))
        assert restored.dtype == jnp.float64
        np.testing.assert_allclose(restored, 1 / 3, rtol=4e-16)


def test_a_python_float_becomes_float32(loss_scale):
    scaled = loss_scale.scale(1.0)
    assert isinstance(loss_scale, jmp.NoOpLossScale) or scaled.dtype == jnp.float32


def test_odd_leaves_pass(loss_scale):
    leaves = odd_leaves()
    for tree in (loss_scale.scale(leaves), loss_scale.unscale(leaves)):
        for name, leaf in leaves.items():
            assert tree[name] is leaf


def test_complex_gradients_are_unscaled(loss_scale):
    value = jnp.array(1 + 2j, jnp.complex64)
    restored = loss_scale.unscale(loss_scale.scale(value))
    assert restored.dtype == jnp.complex64
    np.testing.assert_allclose(restored, value, rtol=1e-6)


@pytest.mark.parametrize("finite", [True, np.True_, np.array(True), jnp.array(True)])
def test_adjust_takes_any_boolean(loss_scale, finite):
    assert jax.tree.structure(loss_scale.adjust(finite)) == jax.tree.structure(loss_scale)


def test_adjust_refuses_what_is_no_flag(loss_scale):
    if not jax.tree.leaves(loss_scale):
        return
    with pytest.raises(TypeError, match="expected a boolean"):
        loss_scale.adjust(jnp.array(1))
    with pytest.raises(ValueError, match="expected boolean scalar"):
        loss_scale.adjust(jnp.array([True]))
