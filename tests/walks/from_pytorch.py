"""A training script ported from PyTorch, written from the pages of `docs/` alone.

It has what such a script has: gradients clipped and accumulated, an optimizer for the body and
another for the head, a frozen encoder, an average of the parameters, a checkpoint, an evaluation,
two devices. Without two devices, a CPU counts as eight:

    XLA_FLAGS=--xla_force_host_platform_device_count=8 JAX_PLATFORMS=cpu python from_pytorch.py
"""

import pathlib
import tempfile

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp
from jmp import diagnostics, transforms
from jmp.adapters import linen

POLICY = "mixed_float16"
GROUPS = {"encoder": "frozen", "body": "body", "norm": "body", "head": "head"}


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(16, name="encoder")(x))
        x = nn.relu(nn.LayerNorm(name="norm")(nn.Dense(16, name="body")(x)))
        return nn.Dense(2, name="head")(x)


def make_optimizer():
    groups = {
        "frozen": optax.set_to_zero(),
        "body": optax.adamw(1e-2),
        "head": optax.sgd(0.1, momentum=0.9),
    }
    by_group = optax.partition(
        groups,
        lambda params: jax.tree_util.tree_map_with_path(
            lambda path, _: GROUPS[path[0].key], params
        ),
    )
    # scaler.unscale_, then clip_grad_norm_: clipping stands inside the loss scaling.
    clipped = optax.chain(optax.clip_by_global_norm(1.0), by_group)
    return transforms.mixed_precision(clipped, POLICY)


def main():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    whole, by_rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    random = np.random.default_rng(0)
    x = random.normal(size=(32, 8)).astype(np.float32)
    batch = {"x": x, "labels": (x[:, 0] > 0).astype(np.int32)}
    batch = jax.device_put(batch, by_rows)

    model = Net()
    params = jax.device_put(model.init(jax.random.key(0), x)["params"], whole)
    apply_fn = linen.wrap_apply(model.apply, POLICY)
    diagnostics.assert_products_in(apply_fn, jnp.float16)({"params": params}, x)  # is it on?
    tx = make_optimizer()

    def create():
        return linen.TrainState.create(apply_fn=apply_fn, params=params, tx=tx)

    def loss_fn(params, batch):
        logits = apply_fn({"params": params}, batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    @jax.jit
    def train_step(state, average, batch):
        grad_fn = jmp.accumulated_value_and_grad(loss_fn, state.loss_scale, steps=4)
        loss, grads = grad_fn(state.params, batch)
        state = state.apply_gradients(grads=grads)
        average = optax.incremental_update(state.params, average, step_size=0.1)
        return state, average, {"loss": loss, **diagnostics.metrics(state.opt_state)}

    @jax.jit
    def evaluate(params, batch):
        logits = apply_fn({"params": params}, batch["x"])
        return (logits.argmax(axis=-1) == batch["labels"]).mean()

    state, average = create(), params
    losses = []
    for _ in range(20):
        state, average, logged = train_step(state, average, batch)
        losses.append(float(logged["loss"]))
    diagnostics.check_skips(state.opt_state, limit=10)

    assert losses[-1] < 0.5 * losses[0]
    assert jax.tree.all(jax.tree.map(jnp.array_equal, state.params["encoder"], params["encoder"]))
    assert not jnp.array_equal(state.params["body"]["kernel"], params["body"]["kernel"])
    assert evaluate(average, batch) > 0.8
    assert jax.tree.leaves(average)[0].dtype == jnp.float32
    assert state.params["head"]["kernel"].sharding.is_fully_replicated

    with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
        path = pathlib.Path(folder) / "20"
        checkpointer.save(path, {"state": state, "average": average})
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(path, {"state": create(), "average": params})
    gone_on, _, _ = train_step(state, average, batch)
    resumed, _, _ = train_step(restored["state"], restored["average"], batch)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, gone_on.params, resumed.params))

    # An overflow on one of the devices skips the step on both.
    spoilt = {**batch, "x": batch["x"].at[0, 0].set(jnp.inf)}
    skipped, _, _ = train_step(state, average, spoilt)
    assert skipped.loss_scale.loss_scale == state.loss_scale.loss_scale / 2
    assert skipped.step == state.step
    assert jax.tree.all(jax.tree.map(jnp.array_equal, skipped.params, state.params))
    print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}, accuracy {evaluate(average, batch):.2f}")


if __name__ == "__main__":
    main()
