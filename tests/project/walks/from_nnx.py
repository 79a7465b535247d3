"""A Flax nnx training made half precision, from `docs/` alone.

BatchNorm and Dropout, accumulation, two optimizers with clipping, a frozen stem, an average of the
parameters, a bad batch, a checkpoint, an overflow that is found.
"""

import pathlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx

import jmp
from jmp import diagnostics, transforms
from jmp.adapters import nnx as mixed

POLICY = "mixed_float16"
RULES = [("head", "float32")]  # logits in float32
TRAINED = nnx.All(nnx.Param, nnx.Not(nnx.PathContains("stem")))  # the stem is frozen


class Net(nnx.Module):
    def __init__(self, rngs):
        self.stem = nnx.Conv(1, 4, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.side = nnx.Linear(4, 4, rngs=rngs)
        self.head = nnx.Linear(8, 2, rngs=rngs)
        self.sharpness = nnx.Variable(jnp.ones(()))  # a buffer

    def __call__(self, images):
        x = nnx.relu(self.norm(self.stem(images)))
        x = self.dropout(x.mean(axis=(1, 2)))
        weights = jnp.exp(self.sharpness * self.side(x))  # a softmax by hand
        return self.head(jnp.concatenate([x, weights / weights.sum(-1, keepdims=True)], -1))


def loss_fn(model, images, labels):
    return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()


def group_of(path, param):
    return "head" if "head" in str(path) else "body"


groups = optax.partition(
    {"body": optax.adamw(3e-2), "head": optax.sgd(0.5, momentum=0.9)},
    lambda params: jax.tree.map_with_path(group_of, params),
)
clipped = optax.chain(optax.clip_by_global_norm(1.0), groups)


@nnx.jit
def net(key):
    return Net(nnx.Rngs(key))


@nnx.jit
def train_step(view, optimizer, average, images, labels):
    loss = mixed.train_step(loss_fn, view, optimizer, images, labels)
    opt_state = nnx.as_pure(optimizer.opt_state)
    has_stepped = opt_state.grads_finite & (optax.tree.get(opt_state, "mini_step") == 0)
    new, old = nnx.state(view, TRAINED), nnx.state(average, TRAINED)
    moved = optax.incremental_update(new, old, step_size=0.3)
    nnx.update(average, jmp.select_tree(has_stepped, moved, old))
    return loss


@nnx.jit
def evaluate(model, images):
    return model(images)


def create(seed):
    view = mixed.with_policy(net(jax.random.key(seed)), POLICY, RULES)
    tx = transforms.mixed_precision(optax.MultiSteps(clipped, 2), POLICY)
    return view, nnx.Optimizer(view, tx, wrt=TRAINED), nnx.clone(view)  # the clone: the average


def train(run, images, labels, epochs):
    view, optimizer, _ = run
    view.train()
    halves = np.s_[::2], np.s_[1::2]  # the micro-batches of an update
    losses = [
        float(train_step(*run, images[rows], labels[rows]))
        for _ in range(epochs)
        for rows in halves
    ]
    diagnostics.check_skips(optimizer, limit=10)
    return losses


def contents(run):
    """Returns what a skipped step leaves as it is: all but the loss scale and random counts."""
    view, optimizer, average = run
    variables = nnx.state((view, average), nnx.Any(nnx.Param, nnx.BatchStat))
    inner_state = nnx.as_pure(optimizer.opt_state).inner_state
    return jax.tree.map(np.asarray, (nnx.to_pure_dict(variables), inner_state))


def main():
    random = np.random.default_rng(0)
    labels = np.arange(32) // 2 % 2
    images = random.normal(size=(32, 6, 6, 1)).astype(np.float32)
    images[labels == 1] += 0.7

    # Is it on? Without the rule for the head every product is half.
    model = net(jax.random.key(0))
    half_loss = mixed.autocast(loss_fn, POLICY)
    diagnostics.assert_products_in(half_loss, jnp.float16)(model, images, labels)

    run = view, optimizer, average = create(0)
    report = diagnostics.precision_report(loss_fn, POLICY)(view, images, labels)
    products = {row.module: row.dtype_in for row in report.rows if row.kind == "product"}
    assert products == {"stem": "float16", "side": "float16", "head": "float32"}
    losses = train(run, images, labels, epochs=20)
    assert losses[-1] < 0.5 * losses[0]
    assert view.side.kernel[...].dtype == view.norm.mean[...].dtype == jnp.float32
    np.testing.assert_array_equal(view.stem.kernel[...], model.stem.kernel[...])  # frozen
    assert (view.side.kernel[...] != model.side.kernel[...]).any()

    averaged = nnx.clone(average)
    nnx.update(averaged, nnx.state(view, nnx.BatchStat))  # it is an average of parameters alone
    averaged.eval()
    logits = evaluate(averaged, images)
    assert logits.dtype == jnp.float32
    accuracy = float((logits.argmax(axis=-1) == labels).mean())
    np.testing.assert_array_equal(logits, evaluate(averaged, images))  # no dropout, no statistics

    resumed = create(1)
    with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(pathlib.Path(folder) / "40", nnx.state(run))
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(pathlib.Path(folder) / "40", nnx.state(resumed))
    nnx.update(resumed, restored)
    assert train(resumed, images, labels, epochs=1) == train(run, images, labels, epochs=1)
    jax.tree.map(np.testing.assert_array_equal, contents(resumed), contents(run))

    scale, before = mixed.loss_scale(optimizer).loss_scale, contents(run)
    train_step(*run, images[::2] * np.inf, labels[::2])
    jax.tree.map(np.testing.assert_array_equal, contents(run), before)
    assert mixed.loss_scale(optimizer).loss_scale == scale / 2

    view.sharpness[...] = 1e3  # now the exponential overflows, and each step is skipped
    assert not jnp.isfinite(train_step(*run, images[::2], labels[::2]))
    view.eval()  # the search takes less time without Dropout
    found = diagnostics.find_nonfinite(loss_fn)(view, images, labels)
    assert found is not None and (found.operation, found.direction) == ("exp", "forward")
    print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}, accuracy of the average {accuracy:.2f}")
    assert accuracy > 0.8


if __name__ == "__main__":
    main()
