"""Gradients that AD has added up over devices, and users who add them up again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jmp
from jmp import diagnostics


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


W, X = jnp.ones(4), np.arange(64.0, dtype=np.float32).reshape(16, 4)


def mapped(mesh, step, check_vma=True):
    options = dict(mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=check_vma)
    return jax.shard_map(step, **options)


def gradient(w, x):
    return jax.grad(lambda w: jnp.mean(x @ w))(w)


def scaled_gradient(w, x):
    loss = jax.checkpoint(lambda w: jnp.mean(x @ w))
    return jmp.scaled_value_and_grad(loss, jmp.StaticLossScale(8))(w)[1] / jnp.float32(8)


@pytest.mark.parametrize("reduce", [lax.pmean, lax.psum])
@pytest.mark.parametrize("gradient_of", [gradient, scaled_gradient, jax.jit(gradient)])
def test_a_sum_of_ads_sum_is_as_many_times_too_large_as_there_are_devices(
    mesh, gradient_of, reduce
):
    def step_of(w, x):
        return reduce(gradient_of(w, x).astype(jnp.float32), "data")

    step = mapped(mesh, step_of)
    if gradient_of is gradient:
        both = mapped(mesh, lambda w, x: (step_of(w, x), gradient_of(w, x)))
        added_up, own = jax.jit(both)(W, X)
        np.testing.assert_allclose(added_up, (1 if reduce is lax.pmean else 4) * own)
        np.testing.assert_allclose(own, 4 * X.mean(0))  # AD's sum of four means
    words = r"psum over 'data' at .*, of what was added up at .*: 4 times too large\. Leave it out"
    with pytest.raises(AssertionError, match=words) as raised:
        diagnostics.assert_summed_once(step)(W, X)
    assert str(raised.value).count("test_summed_once.py:") == 2


def right_in_place(w, x):
    return gradient(w, x) / 4


def right_by_hand(w, x):
    w = lax.pcast(w, "data", to="varying")
    return lax.pmean(gradient(w, x), "data")


def right_in_the_loss(w, x):
    return jax.grad(lambda w: lax.pmean(jnp.mean(x @ w), "data"))(w)


def right_by_gather(w, x):
    return jax.grad(lambda w: jnp.mean(x @ jmp.gather(w, "data", "f32")))(w) / 4


@pytest.mark.parametrize(
    "step", [right_in_place, right_by_hand, right_in_the_loss, right_by_gather]
)
def test_the_right_ways_pass_and_give_the_gradient_of_one_device(mesh, step):
    step_on = mapped(mesh, step)
    diagnostics.assert_summed_once(step_on)(W, X)
    np.testing.assert_allclose(jax.jit(step_on)(W, X), X.mean(0))


@pytest.mark.parametrize(
    "step",
    [
        lambda w, x: lax.pmean(lax.pmean(jnp.mean(x @ w), "data"), "data"),
        lambda w, x: lax.psum(lax.psum(jnp.mean(x @ w), "data") * w, "model"),
        lambda w, x: lax.psum(x @ w * lax.psum(x @ w, "data"), "data"),
        lambda w, x: lax.psum(w, "data"),
    ],
    ids=["means", "another-axis", "a-varying-factor", "a-count"],
)
def test_sums_that_are_meant_pass(mesh, step):
    diagnostics.assert_summed_once(mapped(mesh, step))(W, X)


def test_a_sum_in_a_loop_is_seen(mesh):
    def step(w, x):
        return lax.scan(lambda w, _: (w - lax.pmean(gradient(w, x), "data"), None), w, None, 2)[0]

    with pytest.raises(AssertionError, match="4 times too large"):
        diagnostics.assert_summed_once(mapped(mesh, step))(W, X)


def test_where_types_do_not_tell_ad_adds_nothing_up_and_a_mean_is_right(mesh):
    step = mapped(mesh, lambda w, x: lax.pmean(gradient(w, x), "data"), check_vma=False)
    diagnostics.assert_summed_once(step)(W, X)
    np.testing.assert_allclose(jax.jit(step)(W, X), X.mean(0))
