"""Fine-tune a checkpoint that was published in bfloat16, and publish it in bfloat16 again.

The updates are too small for bfloat16 parameters alone: they go to float32 parameters, or to split
masters. Attention, LayerNorm and MLP, on rotated digits. Written from the pages alone.
"""

import pathlib
import tempfile
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from scipy import ndimage
from sklearn.datasets import load_digits

import jmp
from jmp import diagnostics, transforms
from jmp.adapters import linen


class Classifier(nn.Module):
    @nn.compact
    def __call__(self, images):
        x = nn.Dense(32)(images)  # the eight rows of an image are the tokens
        x = x + nn.MultiHeadDotProductAttention(4)(nn.LayerNorm()(x))
        x = x + nn.Dense(32)(nn.relu(nn.Dense(64)(nn.LayerNorm()(x))))
        return nn.Dense(10, name="head")(x.reshape(-1, 8 * 32))


def loss_of(apply_fn, params, images, labels):
    logits = apply_fn({"params": params}, images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@jax.jit
def plain_step(params, opt_state, rate, batch):
    grads = jax.grad(lambda params: loss_of(model.apply, params, *batch))(params)
    updates, opt_state = optax.scale_by_adam().update(grads, opt_state)
    updates = jax.tree.map(lambda u: (-rate * u).astype(u.dtype), updates)
    return optax.apply_updates(params, updates), opt_state


def train_plainly(params, rate, batches):
    opt_state = optax.scale_by_adam().init(params)
    for batch in batches:
        params, opt_state = plain_step(params, opt_state, rate, batch)
    return params


@jax.jit
def train_step(state, images, labels):
    loss_fn = lambda params: loss_of(state.apply_fn, params, images, labels)
    loss, grads = jmp.scaled_value_and_grad(loss_fn, state.loss_scale)(state.params)
    return state.apply_gradients(grads=grads)


@jax.jit
def evaluate(params):
    hits = model.apply({"params": params}, rotated[test]).argmax(-1) == labels[test]
    return loss_of(model.apply, params, rotated[test], labels[test]), hits.mean()


def batches_of(images, epochs):
    shuffle = np.random.default_rng(1)
    for rows in np.split(np.concatenate([shuffle.permutation(train)] * epochs), 22 * epochs):
        yield images[rows], labels[rows]


def save_and_restore(name, tree, like=None):
    checkpointer.save(path / name, tree)
    checkpointer.wait_until_finished()
    return jax.device_get(checkpointer.restore(path / name, like))  # not tied to a device


same = lambda *trees: jax.tree.all(jax.tree.map(equal_bits, *jax.device_get(trees)))
equal_bits = lambda a, b: a.dtype == b.dtype and a.tobytes() == b.tobytes()
layout = lambda tree: jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)
to_half = lambda tree: jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), tree)
flat = lambda tree: np.concatenate([np.ravel(x).astype("f4") for x in jax.tree.leaves(tree)])
upright, labels = load_digits(return_X_y=True)
upright = np.asarray(upright / 16, np.float32).reshape(-1, 8, 8)
rotated = ndimage.rotate(upright, 25, axes=(1, 2), reshape=False, order=1)
train, test = np.split(np.random.default_rng(0).permutation(len(labels)), [1408])
model, rate, epochs = Classifier(), 1e-4, 4
with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
    path = pathlib.Path(folder)
    params = jax.jit(model.init)(jax.random.key(0, impl="rbg"), upright[:1])["params"]
    params = train_plainly(params, 3e-3, batches_of(upright, 5))  # the publisher, without jmp
    published = save_and_restore("published", to_half(params))
    full = train_plainly(jmp.cast_to_full(published), rate, batches_of(rotated, epochs))
    stalled = train_plainly(published, rate, batches_of(rotated, epochs))
    before, reference, lost = evaluate(published), evaluate(full), evaluate(stalled)
    changed = lambda new: np.mean(flat(new) != flat(published))
    assert changed(stalled) < 0.25 and changed(full) > 0.95
    assert reference[0] < before[0] - 0.5 and lost[0] > reference[0] + 0.2
    for policy, masters in (("mixed_bfloat16", None), ("p=bf16,c=bf16,o=f32", "split")):
        one = jmp.StaticLossScale(1.0)  # scales nothing, but checks: bad steps are skipped
        tx = transforms.mixed_precision(optax.adam(rate), policy, one, masters=masters)
        apply_fn = linen.wrap_apply(model.apply, policy)
        params = linen.cast_params(published, policy)  # the parameters of norms become float32
        create = partial(linen.TrainState.create, apply_fn=apply_fn, tx=tx)
        state = start = jax.jit(create)(params=params)
        kernel, norm = params["head"]["kernel"], params["LayerNorm_0"]["scale"]
        half = jnp.bfloat16 if masters else jnp.float32
        assert (kernel.dtype, norm.dtype) == (half, jnp.float32)
        grad_fn = jax.grad(partial(loss_of, apply_fn))
        diagnostics.assert_products_in(grad_fn, "bfloat16")(params, rotated[:64], labels[:64])
        report = diagnostics.precision_report(model.apply, policy)({"params": params}, rotated)
        assert {r.dtype_in for r in report.rows if "LayerNorm" in r.module} == {"float32"}
        for batch in batches_of(rotated, epochs):
            state = train_step(state, *batch)
        skipped = train_step(state, np.full_like(batch[0], np.inf), batch[1])
        assert (state.opt_state.skipped_steps, skipped.opt_state.skipped_steps) == (0, 1)
        kept = lambda s: (s.params, s.opt_state.inner_state, s.step, s.loss_scale)
        assert same(kept(skipped), kept(state))
        restored = save_and_restore(f"state_{masters}", state, start)
        resumed = train_step(restored, *batch)
        assert same(resumed, train_step(state, *batch)) and not same(resumed, restored)
        exact = jax.jit(transforms.masters)(state.opt_state, state.params)
        export = save_and_restore(f"export_{masters}", to_half(exact))
        assert layout(export) == layout(published) and changed(exact) > 0.95
        ours, rounded = evaluate(exact), evaluate(export)
        assert abs(ours[0] - reference[0]) < 0.02 and abs(ours[1] - reference[1]) < 0.01
        assert abs(rounded[0] - ours[0]) < 0.02 and abs(rounded[1] - ours[1]) < 0.01
print(f"loss {rounded[0]:.3f}, {reference[0]:.3f} in float32, {lost[0]:.3f} in bfloat16 alone")
