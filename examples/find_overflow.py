"""A training that goes wrong in float16, the operation that did it, and the cure.

    python examples/find_overflow.py            # half a minute on two CPU cores
    python examples/find_overflow.py --help

A small attention network, written in half by hand, reads scikit-learn's handwritten digits, eight
rows of eight pixels each. Its softmax is written out, as exp(x) / sum(exp(x)), which float32
forgives: exp overflows there above 88, in float16 above 11. It goes well until the scores have
grown. From then on every step is skipped, `check_skips` raises, `find_nonfinite` names the line,
and its cure is one other line in this file: the same network without its casts, under
`linen.autocast`, which keeps exponentials and sums in float32. Parameters and optimizer stay as
they are, and training goes on.

Writes `find_overflow.json` and `find_overflow.svg` into the output folder.
"""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _common import (
    COLORS,
    begin,
    finish,
    legend_above,
    load_images,
    parse_options,
    plot_run,
    rounded,
)
from sklearn.model_selection import train_test_split

import jmp
from jmp import diagnostics, transforms
from jmp.adapters import linen

LIMIT = 25  # skipped steps in a row that are too many


class Attention(nn.Module):
    """One head of attention over the rows of an image."""

    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        dense = functools.partial(nn.Dense, x.shape[-1], dtype=self.dtype)
        query, key, value = (dense(name=name)(x) for name in ("q", "k", "v"))
        scores = query @ key.swapaxes(-1, -2) * x.shape[-1] ** -0.5
        weights = jnp.exp(scores)
        weights = weights / weights.sum(-1, keepdims=True)
        return x + weights @ value


class Network(nn.Module):
    width: int
    dtype: Any = None

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = nn.Dense(self.width, dtype=self.dtype, name="embedding")(images)
        x = x + self.param("positions", nn.initializers.normal(0.1), x.shape[-2:]).astype(x.dtype)
        x = Attention(self.dtype, name="attention")(x)
        return nn.Dense(10, dtype=self.dtype, name="classes")(nn.relu(x).reshape(x.shape[0], -1))


def loss_fn(params: Any, apply_fn: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
    logits = apply_fn({"params": params}, images).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@jax.jit
def train_step(state: linen.TrainState, batch: Any) -> tuple[linen.TrainState, dict[str, Any]]:
    grad_fn = jmp.scaled_value_and_grad(loss_fn, state.loss_scale)
    loss, grads = grad_fn(state.params, state.apply_fn, *batch)
    state = state.apply_gradients(grads=grads)
    return state, {"loss": loss, **diagnostics.metrics(state.opt_state)}


def train(state: linen.TrainState, batches: Any, history: list[Any]) -> linen.TrainState:
    """Returns the state after all batches, or that in which too many steps were skipped.

    Appends to `history` what each step measured.
    """
    for batch in batches:
        state, measured = train_step(state, batch)
        history.append(jax.tree.map(float, measured))
        try:
            diagnostics.check_skips(state.opt_state, LIMIT)
        except FloatingPointError as error:
            print(f"Step {len(history)}: {error}\n")
            break
    return state


def plot(report: dict[str, Any]) -> Any:
    """Draws what `find_overflow.json` holds: loss, loss scale, skipped steps, and the cure."""
    cured = report["cured_at_step"]
    figure, panels = plot_run(report["history"])
    label = f"step {cured}: float32 network under linen.autocast from here on"
    for axes in panels:
        axes.axvline(cured - 0.5, color=COLORS[4], linestyle="--", label=label)
    legend_above(panels[0], ncols=2)
    return figure


def main() -> None:
    options = {"steps": 500, "batch_size": 64, "width": 32, "learning_rate": 3e-3}
    arguments = parse_options(__doc__, **options)
    console = begin(arguments)
    images, test_images, labels, test_labels = train_test_split(
        *load_images(), test_size=0.2, random_state=0
    )
    size = (arguments.steps, arguments.batch_size)
    picks = np.random.default_rng(0).integers(0, len(images), size)
    batches = ((images[pick], labels[pick]) for pick in picks)

    def accuracy(state: linen.TrainState) -> float:
        logits = state.apply_fn({"params": state.params}, test_images)
        return float((logits.argmax(-1) == test_labels).mean())

    model = Network(arguments.width)
    state = linen.TrainState.create(
        apply_fn=Network(arguments.width, jnp.float16).apply,
        params=model.init(jax.random.key(0), images[:1])["params"],
        # A floor of 1: with no end of skips the scale would sink until gradients underflow.
        tx=transforms.with_loss_scale(
            optax.adam(arguments.learning_rate),
            jmp.DynamicLossScale(2.0**12, period=100, min_loss_scale=1.0),
        ),
    )
    history: list[Any] = []
    state = train(state, batches, history)
    cured, before = len(history), accuracy(state)
    if cured == arguments.steps:
        raise SystemExit("Nothing overflowed for good; give it more --steps.")

    # What made it? The gradient function is asked, on the batch that failed.
    batch = (images[picks[cured - 1]], labels[picks[cured - 1]])
    grad_fn = jmp.scaled_value_and_grad(loss_fn, state.loss_scale)
    found = diagnostics.find_nonfinite(grad_fn)(state.params, state.apply_fn, *batch)
    print(f"{found}\n")

    apply_fn = linen.autocast(model.apply, "mixed_float16")  # the cure
    state = state.replace(apply_fn=apply_fn)
    state = train(state, batches, history)
    after = accuracy(state)
    console.print(
        f"Test accuracy in float16: {100 * before:.1f} % at step {cured}, where it stood still; "
        f"{100 * after:.1f} % after {len(history) - cured} steps more."
    )
    names = ("loss", "loss_scale", "grads_finite")
    finish(
        console,
        arguments,
        "find_overflow",
        plot,
        found=dataclasses.asdict(found),
        cured_at_step=cured,
        accuracy={"at the cure": before, "at the end": after},
        skipped_for_good_from=cured - LIMIT + 1,
        history={name: rounded([row[name] for row in history]) for name in names},
    )


if __name__ == "__main__":
    main()
