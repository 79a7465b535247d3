"""Fine-tunes an Equinox model in float16: a frozen encoder in eval mode, BatchNorm and Dropout.

A port of a PyTorch script, written from the pages of the documentation alone. The checkpoint is
trained shortly on scikit-learn's digits in float32. The new data are the same digits, rotated.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

from jmp import diagnostics, transforms
from jmp.adapters import equinox as mixed


class Net(eqx.Module):
    encoder: eqx.nn.Sequential
    body: eqx.nn.Sequential
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        norm = lambda size: eqx.nn.BatchNorm(size, "batch", momentum=0.9, mode="batch")
        relu, dropout = eqx.nn.Lambda(jax.nn.relu), eqx.nn.Dropout(0.2)
        conv = eqx.nn.Conv2d(1, 16, 3, padding=1, key=keys[0])
        self.encoder = eqx.nn.Sequential([conv, norm(16), relu])
        conv = eqx.nn.Conv2d(16, 32, 3, stride=2, padding=1, key=keys[1])
        self.body = eqx.nn.Sequential([conv, norm(32), relu, dropout])
        self.head = eqx.nn.Linear(32 * 4 * 4, 10, key=keys[2])

    def __call__(self, x, state, key):
        x, state = self.encoder(x, state)
        x, state = self.body(x, state, key=key)
        return self.head(x.ravel()), state


def logits_of(model, state, x, keys=None):
    return jax.vmap(model, (0, None, 0), (0, None), axis_name="batch")(x, state, keys)


def loss_fn(trained, state, frozen, x, labels, keys):
    logits, state = logits_of(eqx.combine(trained, frozen), state, x, keys)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), state


predict = lambda model, state, x: logits_of(eqx.nn.inference_mode(model), state, x)[0]
policy, rules = "mixed_float16", [("head", "float32")]
adamw = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(2e-3, weight_decay=0.01))
tx = transforms.mixed_precision(adamw, policy)
half_loss_fn = mixed.autocast(loss_fn, policy, rules=rules)
half_predict = mixed.autocast(predict, policy, rules=rules)


@eqx.filter_jit
def plain_step(trained, frozen, opt_state, state, *batch):
    grad_fn = eqx.filter_value_and_grad(loss_fn, has_aux=True)
    (loss, state), grads = grad_fn(trained, state, frozen, *batch)
    updates, opt_state = adamw.update(grads, opt_state, eqx.filter(trained, eqx.is_inexact_array))
    return eqx.apply_updates(trained, updates), opt_state, state, loss


@eqx.filter_jit
def half_step(trained, frozen, opt_state, state, *batch):
    taken = mixed.train_step(half_loss_fn, trained, opt_state, tx, frozen, *batch, state=state)
    return taken.model, taken.opt_state, taken.state, taken.loss


def fit(step, optimizer, trained, frozen, state, images):
    opt_state = optimizer.init(eqx.filter(trained, eqx.is_inexact_array))
    for seed, rows in enumerate(np.random.default_rng(1).choice(train, (60, 64))):
        batch = images[rows], labels[rows], jax.random.split(jax.random.key(seed), 64)
        trained, opt_state, state, loss = step(trained, frozen, opt_state, state, *batch)
    return eqx.combine(trained, frozen), state, trained, opt_state, loss, *batch


images, labels = load_digits(return_X_y=True)
images = jnp.asarray(images / 16, jnp.float32).reshape(-1, 1, 8, 8)
images, rotated = np.array(images), np.array(jnp.rot90(images, axes=(2, 3)))
train, test = np.split(np.random.default_rng(0).permutation(len(images)), [1408])

# The checkpoint, in float32. Then encoder.eval() and encoder.requires_grad_(False).
model, state = eqx.nn.make_with_state(Net)(jax.random.key(0))
parts = eqx.partition(model, eqx.is_inexact_array)
model, state, *_ = fit(plain_step, adamw, *parts, state, images)
model = eqx.tree_at(lambda net: net.encoder, model, replace_fn=eqx.nn.inference_mode)
is_trained = jax.tree.map(eqx.is_inexact_array, model)
is_trained = eqx.tree_at(lambda spec: spec.encoder, is_trained, replace=False)
parts = start, frozen = eqx.partition(model, is_trained)

# The fine-tuning is as good in half as in float32.
plain, plain_state, *_ = fit(plain_step, adamw, *parts, state, rotated)
tuned, new_state, trained, opt_state, loss, x, y, keys = fit(half_step, tx, *parts, state, rotated)
calls = (predict, model, state), (predict, plain, plain_state), (half_predict, tuned, new_state)
logits = [eqx.filter_jit(fun)(*inputs, rotated[test]) for fun, *inputs in calls]
before, in_float32, in_half = ((np.argmax(z, -1) == labels[test]).mean() for z in logits)
assert before < 0.5 and in_float32 > 0.95 and in_half > in_float32 - 0.02

# The encoder is as it was, and the optimizer has no moments for it. All of the rest has moved.
bits = lambda tree: [np.asarray(x).tobytes() for x in jax.tree.leaves(tree) if eqx.is_array(x)]
statistics = lambda part, state: bits(state.get(part.layers[1].batch_state_index))
assert bits(tuned.encoder) == bits(model.encoder)
assert statistics(model.encoder, new_state) == statistics(model.encoder, state)
assert statistics(model.body, new_state) != statistics(model.body, state)
assert all(a != b for a, b in zip(bits(trained), bits(start), strict=True))
for moments in optax.tree.get(opt_state, "mu"), optax.tree.get(opt_state, "nu"):
    assert not bits(moments.encoder) and len(bits(moments)) == len(bits(trained))

# Products are half but for the head's: in training, in evaluation, and in the backward pass.
args, test_args = (trained, new_state, frozen, x, y, keys), (tuned, new_state, rotated[test])
for fun, inputs in (half_loss_fn, args), (half_predict, test_args):
    rows = diagnostics.precision_report(fun, policy)(*inputs).rows
    rows = [row for row in rows if row.operation in ("conv_general_dilated", "dot_general")]
    dtypes = {row.module.split("/")[0]: row.dtype_in for row in rows}
    assert dtypes == {"encoder": "float16", "body": "float16", "head": "float32"}
grad_fn = eqx.filter_grad(mixed.autocast(loss_fn, policy), has_aux=True)  # without the rule
diagnostics.assert_products_in(grad_fn, jnp.float16)(*args)

# Dropout drops other units by other keys. A batch with an infinity changes nothing but the scale.
step = lambda x, keys: half_step(trained, frozen, opt_state, new_state, x, y, keys)
assert step(x, keys)[3] == step(x, keys)[3] != step(x, keys[::-1])[3]
x[0, 0, 0, 0] = np.inf
kept, kept_opt, kept_state, bad_loss = step(x, keys)
assert not np.isfinite(bad_loss) and not kept_opt.grads_finite
assert bits((kept, kept_state)) == bits((trained, new_state))
assert bits(kept_opt.inner_state) == bits(opt_state.inner_state)
assert kept_opt.loss_scale.loss_scale == opt_state.loss_scale.loss_scale / 2
print(f"loss {loss:.3f}, accuracy {before:.3f}, {in_float32:.3f} in float32, {in_half:.3f} in half")
