"""A convolutional network with SyncBatchNorm, in float16 on two devices, against float32.

What PyTorch does by convert_sync_batchnorm, DistributedDataParallel, torch.autocast and GradScaler,
with four micro-batches a step, clipping and SGD with momentum. Written from the pages alone.
"""

import os
import tempfile
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import AxisType, NamedSharding
from sklearn.datasets import load_digits

import jmp
from jmp import diagnostics, transforms
from jmp.adapters import linen

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
whole, by_rows = NamedSharding(mesh, jax.P()), NamedSharding(mesh, jax.P("data"))


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        for features in (8, 16):
            x = nn.Conv(features, (3, 3), use_bias=False)(x)
            # torch: momentum=0.1, once for each of four micro-batches.
            x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9**4)(x))
        return nn.Dense(10)(x.reshape(len(x), -1))


model = Net()
apply_fn = linen.wrap_apply(model.apply, "mixed_float16")  # torch.autocast
sgd = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9))
# GradScaler. From 2.0**16, its default, the first steps may overflow and be skipped.
tx = transforms.mixed_precision(sgd, "mixed_float16", jmp.torch_loss_scale(init_scale=2.0**12))


@partial(jax.jit, out_shardings=whole)
def create(seed):
    variables = model.init(jax.random.key(seed, impl="rbg"), jnp.ones((1, 8, 8, 1)), train=False)
    return linen.TrainState.create(apply_fn=apply_fn, tx=tx, **variables)


def loss_of(apply, params, batch_stats, batch, train=True):
    variables = {"params": params, "batch_stats": batch_stats}
    logits, updated = apply(variables, batch["x"], train=train, mutable=["batch_stats"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return losses.mean(), updated["batch_stats"]


@partial(jax.jit, in_shardings=(whole, by_rows))
def train_step(state, batch):
    loss_fn = lambda params, rows: loss_of(apply_fn, params, state.batch_stats, rows)
    grad_fn = jmp.accumulated_value_and_grad(loss_fn, state.loss_scale, steps=4, has_aux=True)
    (loss, stacked), grads = grad_fn(state.params, batch)
    new = state.apply_gradients(grads=grads, batch_stats=mean(stacked))
    return new, loss, state.loss_scale.unscale(grads)  # they are for the checks


@partial(jax.jit, static_argnames="steps")
def step32(params, stats, opt_state, batch, steps=4):
    """In float32 on one device; with `steps=1` BatchNorm too sees the whole batch."""
    micro = jax.tree.map(lambda a: a.reshape(-1, steps, *a.shape[1:]).swapaxes(0, 1), batch)
    loss_fn = lambda params: mean(jax.vmap(partial(loss_of, model.apply, params, stats))(micro))
    (loss, stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
    updates, opt_state = sgd.update(grads, opt_state)
    return (optax.apply_updates(params, updates), stats, opt_state), loss, grads


mean = partial(jax.tree.map, lambda leaf: leaf.mean(axis=0))  # over micro-batches
minus = lambda tree, other: jax.tree.map(np.subtract, *jax.device_get((tree, other)))
norm = lambda tree: np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(tree)))
error = lambda tree, exact: norm(minus(tree, exact)) / norm(exact)
same = lambda *trees: jax.tree.all(jax.tree.map(np.array_equal, *jax.device_get(trees)))
x, y = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(x))
x, y = np.float32(x[order] / 16).reshape(-1, 8, 8, 1), np.int32(y[order])
batches = [{"x": x[i : i + 64], "y": y[i : i + 64]} for i in range(0, 1536, 64)]
state = create(0)
params, stats = jax.device_get((state.params, state.batch_stats))
state32 = params, stats, sgd.init(params)
diagnostics.assert_products_in(train_step, jnp.float16)(state, batches[0])

# Row i is in micro-batch i mod 4. BatchNorm sees the 16 rows of one, eight from each device. If all
# four micro-batches are equal, the whole step is that of one large batch; else only the means are.
equal = jax.tree.map(lambda rows: np.repeat(rows[:16], 4, axis=0), batches[0])
for batch, steps in ((batches[0], 4), (equal, 1)):
    new, loss, grads = train_step(state, batch)
    exact, loss32, grads32 = step32(*state32, batch, steps=steps)
    large, _, large_grads = step32(*state32, batch, steps=1)
    assert new.grads_finite and abs(loss - loss32) < 1e-3 and norm(grads32) > 2  # it is clipped
    assert error(grads, grads32) < 0.015 and (error(grads, large_grads) < 0.015) == (steps == 1)
    assert error(minus(new.params, params), minus(exact[0], params)) < 0.015
    assert error(new.batch_stats, exact[1]) < 1e-3
    for name, running in new.batch_stats.items():
        assert error(running["mean"], large[1][name]["mean"]) < 1e-3
for batch in batches * 2:
    state, loss, _ = train_step(state, batch)
    state32, loss32, _ = step32(*state32, batch)
shards = [leaf.addressable_shards for leaf in jax.tree.leaves(state)]
assert all(np.array_equal(one.data, other.data) for one, other in shards)
test = {"x": x[1536:], "y": y[1536:]}
half, _ = jax.jit(partial(loss_of, apply_fn, train=False))(state.params, state.batch_stats, test)
full, _ = jax.jit(partial(loss_of, model.apply, train=False))(*state32[:2], test)
assert half < 0.2 and abs(half - full) < 0.03

# An infinity on the second device, in one micro-batch: only the scale changes.
bad = jax.tree.map(np.copy, batches[0])
bad["x"][33, 0, 0, 0] = np.inf
skipped, _, _ = train_step(state, bad)
kept = lambda state: (state.params, state.batch_stats, state.opt_state.inner_state, state.step)
assert same(kept(skipped), kept(state)) and not skipped.grads_finite
assert skipped.loss_scale.loss_scale == state.loss_scale.loss_scale / 2
with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(f"{folder}/state", skipped)
    checkpointer.wait_until_finished()
    resumed = checkpointer.restore(f"{folder}/state", create(1))  # on both devices
for batch in batches[:3]:
    resumed, skipped = train_step(resumed, batch)[0], train_step(skipped, batch)[0]
assert same(resumed, skipped) and not same(skipped.params, state.params)
print(f"loss {loss:.3f}, of the test {half:.3f}; in float32 {loss32:.3f} and {full:.3f}")
