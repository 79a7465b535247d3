"""`metrics` and `check_skips`: numbers of a training run, and the end of one that is dead."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jmp
from jmp import diagnostics, transforms
from jmp.adapters import nnx as nnx_adapter

SGD = optax.sgd(0.1)


def scaled(scale, inner=SGD):
    return transforms.with_loss_scale(inner, scale)


DYNAMIC = jmp.DynamicLossScale(2.0**10)
OPTIMIZERS = {
    "adam": scaled(DYNAMIC, optax.adam(0.1)),
    "chain": scaled(DYNAMIC, optax.chain(optax.clip_by_global_norm(1.0), SGD)),
    "masked": scaled(DYNAMIC, optax.masked(SGD, True)),
    "MultiSteps": scaled(DYNAMIC, optax.MultiSteps(SGD, 2)),
    "scaling in a chain": optax.chain(scaled(DYNAMIC), optax.scale(0.5)),
}


def after(gradients, tx):
    params = jnp.ones(2)
    state = tx.init(params)
    for gradient in gradients:
        _, state = tx.update(jnp.full(2, float(gradient)), state, params)
    return state


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_numbers_of_a_run_with_two_skips(name):
    state = after([1, jnp.nan, 1, jnp.inf], OPTIMIZERS[name])
    found = diagnostics.metrics(state, steps=4)
    assert {name: (value.item(), str(value.dtype)) for name, value in found.items()} == {
        "loss_scale": (2.0**8, "float32"),
        "grads_finite": (False, "bool"),
        "skipped_steps": (2, "int32"),
        "consecutive_skips": (1, "int32"),
        "skip_rate": (0.5, "float32"),
    }
    assert all(value.shape == () for value in found.values())
    assert "skip_rate" not in diagnostics.metrics(state)
    # No step is divided by nothing.
    assert diagnostics.metrics(after([], OPTIMIZERS[name]), steps=0)["skip_rate"] == 0.0


@pytest.mark.parametrize(
    ("scale", "expected", "skipped"),
    [
        (jmp.StaticLossScale(128), 128.0, 1),
        (jmp.NoOpLossScale(), 1.0, 0),  # it checks nothing, and says so
    ],
)
def test_static_and_no_scales_give_arrays_too(scale, expected, skipped):
    found = diagnostics.metrics(after([jnp.inf], scaled(scale)))
    assert found["loss_scale"].dtype == jnp.float32 and found["loss_scale"] == expected
    assert (found["skipped_steps"], found["grads_finite"]) == (skipped, not skipped)


def test_inside_jit_they_outlive_a_donated_state():
    tx = OPTIMIZERS["adam"]

    def step(state, gradient, tried):
        _, state = tx.update(gradient, state)
        return state, diagnostics.metrics(state, steps=tried)

    compiled = jax.jit(step, donate_argnums=0)
    state = tx.init(jnp.ones(2))
    logged, outside = [], []
    for i, gradient in enumerate([jnp.inf, 1.0, jnp.inf]):
        state, found = compiled(state, jnp.full(2, gradient), jnp.int32(i + 1))
        logged.append(found)
        outside.append(diagnostics.metrics(state))
    assert compiled._cache_size() == 1
    assert [int(found["skipped_steps"]) for found in logged] == [1, 1, 2]
    assert [float(found["skip_rate"]) for found in logged] == [1.0, 0.5, np.float32(2 / 3)]
    # Why the docstring says inside: the arrays of a donated state are gone.
    assert outside[0]["skipped_steps"].is_deleted()


def test_each_seed_has_its_own_numbers():
    tx = scaled(jmp.DynamicLossScale(8.0))
    params = jnp.ones(3)
    states = jax.vmap(tx.init)(params)
    _, states = jax.vmap(tx.update)(jnp.array([1.0, jnp.inf, 1.0]), states, params)
    found = diagnostics.metrics(states, steps=1)
    assert found["loss_scale"].tolist() == [8.0, 4.0, 8.0]
    assert found["skip_rate"].tolist() == [0.0, 1.0, 0.0]
    with pytest.raises(FloatingPointError, match="The last 1 steps .* loss scale is 4 "):
        diagnostics.check_skips(states, 1)


def test_the_state_of_an_nnx_optimizer_and_the_gradient_that_it_asks_about():
    network = nnx_adapter.autocast(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), "mixed_float16")
    tx = transforms.mixed_precision(optax.adam(0.1), "mixed_float16")
    optimizer = nnx.Optimizer(network, tx, wrt=nnx.Param)
    loss_fn = lambda model, x: jnp.nan * model(x).sum()
    nnx_adapter.train_step(loss_fn, network, optimizer, jnp.ones((1, 2)))
    for given in (optimizer, nnx.as_pure(optimizer.opt_state)):
        assert diagnostics.metrics(given)["skipped_steps"] == 1
        with pytest.raises(FloatingPointError, match="with nnx, nnx.grad and the model"):
            diagnostics.check_skips(given, 1)
    with pytest.raises(TypeError, match=r"got traced int32.*outside of jit"):
        nnx.jit(lambda optimizer: diagnostics.check_skips(optimizer, 1))(optimizer)


@pytest.mark.parametrize(
    ("scale", "gradients", "limit"),
    [
        (DYNAMIC, [jnp.inf] * 3, 4),
        (DYNAMIC, [*[jnp.inf] * 3, 1.0, jnp.inf], 2),  # counts anew
        (jmp.NoOpLossScale(), [jnp.nan] * 3, 1),  # counts nothing
    ],
)
def test_skips_up_to_the_limit_pass(scale, gradients, limit):
    state = after(gradients, scaled(scale))
    diagnostics.check_skips(state, limit)  # raises nothing
    assert diagnostics.metrics(state)["consecutive_skips"] < limit


def test_a_model_that_is_dead_is_said_to_be():
    tx = scaled(DYNAMIC)
    with pytest.raises(FloatingPointError) as raised:
        diagnostics.check_skips(after([jnp.nan] * 12, tx), 12)
    assert str(raised.value) == (
        "The last 12 steps were skipped, all of them: their gradients were infinite or NaN, and "
        "the loss scale is 1 by now. If so many halvings do not help, the scale is not the cause: "
        "there is an infinity or a NaN in the parameters, the batch or the loss. "
        "diagnostics.find_nonfinite(jax.grad(loss_fn))(params, *batch) names the operation behind "
        "it; with nnx, nnx.grad and the model."
    )


def test_a_static_scale_may_be_the_cause_itself():
    tx = scaled(jmp.StaticLossScale(2.0**20))
    with pytest.raises(FloatingPointError, match="Either this static scale is too high"):
        diagnostics.check_skips(after([jnp.inf] * 2, tx), 2)


def test_check_skips_refuses_a_traced_state():
    state = after([1], scaled(jmp.DynamicLossScale(8.0)))
    with pytest.raises(TypeError, match="got traced int32.*outside of jit"):
        jax.jit(lambda state: diagnostics.check_skips(state, 1))(state)
