"""Small trainings in float16 with and without loss scaling: where it matters, and where not.

    JAX_PLATFORMS=cpu python -m benchmarks.scaling_cases       # about ten minutes on two CPU cores

Each case is a training as it is usually written: the loss has no factor, the optimizer is Adam. The
data is on every machine: scikit-learn's digits and its two photographs, the source of Python's
standard library, and a differential equation. Sizes and steps are chosen so that a CPU trains them.

Each is trained in float32, in float16 without and in float16 with a dynamic loss scale, from the
same initial parameters and with the same batches. A final loss is the mean over the last twentieth
of the steps. Writes `results/scaling_cases.json`.
"""

import argparse
import itertools
import json
import pathlib
import time
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from sklearn.datasets import load_digits, load_sample_images
from sklearn.linear_model import LogisticRegression

import jmp
from benchmarks.figures import example
from benchmarks.processes import ROOT
from jmp import transforms

RUNS = {
    "float32": ("float32", jmp.NoOpLossScale()),
    "unscaled": ("mixed_float16", jmp.NoOpLossScale()),
    "scaled": ("mixed_float16", jmp.torch_loss_scale()),
}

TURNS = 10  # steps in one call of the compiled program


class Case(NamedTuple):
    """A training.

    Attributes:
      first: makes parameters from a key.
      loss_fn: of parameters and a batch.
      batches: draws a batch from a random generator.
      steps: how many.
      learning_rate: of Adam.
    """

    first: Callable[[jax.Array], Any]
    loss_fn: Callable[[Any, Any], jax.Array]
    batches: Callable[[np.random.Generator], Any]
    steps: int
    learning_rate: float = 1e-3


class Layers(nn.Module):
    """Dense layers; the last has no activation."""

    widths: Sequence[int]
    activation: Callable[[jax.Array], jax.Array] = nn.relu

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for width in self.widths[:-1]:
            x = self.activation(nn.Dense(width)(x))
        return nn.Dense(self.widths[-1])(x)


def digits() -> tuple[np.ndarray, np.ndarray]:
    images, labels = load_digits(return_X_y=True)
    return (images / 16).astype(np.float32), labels.astype(np.int32)


def photographs() -> list[np.ndarray]:
    return [(image / 255).astype(np.float32) for image in load_sample_images().images]


def rows_of(*arrays: np.ndarray, size: int) -> Callable[[np.random.Generator], Any]:
    def batches(drawn: np.random.Generator) -> Any:
        chosen = drawn.integers(0, len(arrays[0]), size)
        return tuple(array[chosen] for array in arrays)

    return batches


def classifier(model: nn.Module, images: np.ndarray, **options: Any) -> Case:
    """Cross-entropy, mean over the batch."""

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        logits = model.apply(params, batch[0])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()

    batches = rows_of(images, digits()[1], size=128)
    return Case(lambda key: model.init(key, images[:2]), loss_fn, batches, **options)


def sigmoid_autoencoder() -> Case:
    """Of `examples/autoencoder.py`."""
    autoencoder = example("autoencoder")
    model, images = autoencoder.Autoencoder(), digits()[0]
    first = lambda key: model.init(key, images[:2])["params"]
    loss_fn = lambda params, batch: autoencoder.loss_fn(params, model.apply, batch[0])
    return Case(first, loss_fn, rows_of(images, size=256), 2000)


def tanh_autoencoder() -> Case:
    model, images = Layers((128, 64, 32, 16, 32, 64, 128, 64), jnp.tanh), digits()[0]
    first = lambda key: model.init(key, images[:2])
    loss_fn = lambda params, batch: jnp.mean((model.apply(params, batch[0]) - batch[0]) ** 2)
    return Case(first, loss_fn, rows_of(images, size=256), 1000)


def deep_tanh() -> Case:
    return classifier(Layers((64,) * 20 + (10,), jnp.tanh), digits()[0], steps=600,
                      learning_rate=3e-4)  # fmt: skip


def deep_relu() -> Case:
    return classifier(Layers((64,) * 30 + (10,)), digits()[0], steps=1000, learning_rate=3e-4)


class PixelGRU(nn.Module):
    """A GRU over the pixels, one after the other, and a classifier of its last state."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(10)(nn.RNN(nn.GRUCell(64))(x[..., None])[:, -1])


def pixel_gru() -> Case:
    return classifier(PixelGRU(), digits()[0], steps=300, learning_rate=3e-3)


def character_lstm() -> Case:
    """Of `examples/char_lm.py`, of half its width."""
    char_lm = example("char_lm")
    text, vocabulary = char_lm.load_text()
    model, options = char_lm.CharLM(vocabulary, 64), types.SimpleNamespace(
        steps=1, batch_size=32, length=64
    )  # fmt: skip

    def batches(drawn: np.random.Generator) -> np.ndarray:
        return char_lm.batches(text, options, int(drawn.integers(2**31)))[0]

    first = lambda key: model.init(key, jnp.zeros((1, 64), jnp.int32))["params"]
    loss_fn = lambda params, batch: char_lm.loss_fn(params, model.apply, batch)
    return Case(first, loss_fn, batches, 200, 5e-3)


class Siren(nn.Module):
    """Sitzmann et al. 2020: sines of 30 times a dense layer."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for width, limit in ((128, 1 / 2), (128, 0.0072), (128, 0.0072)):
            x = jnp.sin(30 * nn.Dense(width, kernel_init=symmetric(limit))(x))
        return nn.Dense(3, kernel_init=symmetric(0.0072))(x)


def symmetric(limit: float) -> Any:
    return lambda key, shape, dtype=jnp.float32: jax.random.uniform(
        key, shape, dtype, -limit, limit
    )


def siren() -> Case:
    """One photograph of 64 x 64 pixels; each step has all of them."""
    photograph = photographs()[0][:384, :384].reshape(64, 6, 64, 6, 3).mean((1, 3))
    line = np.linspace(-1, 1, 64, dtype=np.float32)
    places = np.stack(np.meshgrid(line, line, indexing="ij"), -1).reshape(-1, 2)
    model, colors = Siren(), 2 * photograph.reshape(-1, 3) - 1
    loss_fn = lambda params, _: jnp.mean((model.apply(params, places) - colors) ** 2)
    return Case(lambda key: model.init(key, places[:2]), loss_fn, lambda _: None, 300, 1e-4)


class SubPixel(nn.Module):
    """Shi et al. 2016: convolutions of a small image, whose channels are the large one's pixels."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(nn.Conv(32, (5, 5))(x))
        x = nn.Conv(48, (3, 3))(nn.relu(nn.Conv(16, (3, 3))(x)))
        batch, rows, columns, _ = x.shape
        pixels = x.reshape(batch, rows, columns, 4, 4, 3).transpose(0, 1, 3, 2, 4, 5)
        return pixels.reshape(batch, 4 * rows, 4 * columns, 3)


def super_resolution() -> Case:
    """Mean squared error over 16 images, their pixels and colors: 3.1 million numbers."""
    model, images, size = SubPixel(), photographs(), 256

    def batches(drawn: np.random.Generator) -> Any:
        large = np.empty((16, size, size, 3), np.float32)
        for i in range(16):
            image = images[drawn.integers(2)]
            top, left = (drawn.integers(length - size) for length in image.shape[:2])
            large[i] = image[top : top + size, left : left + size]
        return large.reshape(16, size // 4, 4, size // 4, 4, 3).mean((2, 4)), large

    loss_fn = lambda params, batch: jnp.mean((model.apply(params, batch[0]) - batch[1]) ** 2)
    return Case(lambda key: model.init(key, jnp.zeros((1, 8, 8, 3))), loss_fn, batches, 150)


class Denoiser(nn.Module):
    """Residual blocks that see the time as sines and cosines."""

    @nn.compact
    def __call__(self, x: jax.Array, time: jax.Array) -> jax.Array:
        angles = time[:, None] * jnp.exp(-jnp.arange(16) * np.log(1e4) / 16)
        features = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
        x = nn.Dense(256)(x)
        for _ in range(4):
            x = x + nn.Dense(256)(nn.silu(nn.Dense(256)(x) + nn.Dense(256)(features)))
        return nn.Dense(64)(x)


def diffusion() -> Case:
    """Ho et al. 2020: mean squared error of the noise, mean over batch and pixels."""
    kept = np.cumprod(1 - np.linspace(1e-4, 0.1, 200)).astype(np.float32)
    model, images = Denoiser(), 2 * digits()[0] - 1

    def batches(drawn: np.random.Generator) -> Any:
        clean = images[drawn.integers(0, len(images), 256)]
        times, noise = drawn.integers(0, 200, 256), drawn.normal(size=clean.shape)
        share = kept[times][:, None]
        noisy = np.sqrt(share) * clean + np.sqrt(1 - share) * noise
        return noisy.astype(np.float32), times.astype(np.float32), noise.astype(np.float32)

    loss_fn = lambda params, batch: jnp.mean((model.apply(params, *batch[:2]) - batch[2]) ** 2)
    first = lambda key: model.init(key, images[:2], jnp.zeros(2))
    return Case(first, loss_fn, batches, 400)


def distillation() -> Case:
    """Divergence from a linear classifier at temperature 4, mean over batch and classes."""
    images, labels = digits()
    teacher = LogisticRegression(max_iter=500).fit(images, labels).predict_log_proba(images)
    soft = np.array(jax.nn.softmax(teacher.astype(np.float32) / 4))
    model = Layers((64, 64, 10))

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        logarithms = jax.nn.log_softmax(model.apply(params, batch[0]) / 4)
        return jnp.mean(batch[1] * (jnp.log(batch[1]) - logarithms))

    first = lambda key: model.init(key, images[:2])
    return Case(first, loss_fn, rows_of(images, soft, size=256), 1000)


def contrastive() -> Case:
    """Chen et al. 2020, NT-Xent: two noisy views of each of 256 images, temperature 0.1."""
    model, images = Layers((128, 128, 32)), digits()[0]

    def batches(drawn: np.random.Generator) -> np.ndarray:
        chosen = images[drawn.integers(0, len(images), 256)]
        return np.concatenate([chosen, chosen]) + drawn.normal(0, 0.2, (512, 64)).astype(np.float32)

    def loss_fn(params: Any, batch: jax.Array) -> jax.Array:
        found = model.apply(params, batch)
        found = found / jnp.linalg.norm(found, axis=-1, keepdims=True)
        likeness = jnp.where(jnp.eye(512, dtype=bool), -1e4, found @ found.T / 0.1)
        other = (jnp.arange(512) + 256) % 512
        return optax.softmax_cross_entropy_with_integer_labels(likeness, other).mean()

    return Case(lambda key: model.init(key, images[:2]), loss_fn, batches, 400)


def physics_informed() -> Case:
    """Raissi et al. 2019: squared residuals of Poisson's equation on a square, and of its edge."""
    model = Layers((64, 64, 64, 64, 1), jnp.tanh)

    def batches(drawn: np.random.Generator) -> Any:
        edge = drawn.uniform(size=(128, 2))
        edge[np.arange(128), drawn.integers(0, 2, 128)] = drawn.integers(0, 2, 128)
        return drawn.uniform(size=(256, 2)).astype(np.float32), edge.astype(np.float32)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        value = lambda place: model.apply(params, place[None])[0, 0]
        laplacian = jax.vmap(lambda place: jnp.trace(jax.hessian(value)(place)))(batch[0])
        source = -2 * np.pi**2 * jnp.prod(jnp.sin(np.pi * batch[0]), -1)
        return jnp.mean((laplacian - source) ** 2) + jnp.mean(model.apply(params, batch[1]) ** 2)

    return Case(lambda key: model.init(key, jnp.zeros((2, 2))), loss_fn, batches, 500)


CASES: dict[str, Callable[[], Case]] = {
    "autoencoder, 8 sigmoid layers": sigmoid_autoencoder,
    "super-resolution, 3 convolutions": super_resolution,
    "autoencoder, 8 tanh layers": tanh_autoencoder,
    "classifier, 20 tanh layers": deep_tanh,
    "classifier, 30 ReLU layers": deep_relu,
    "GRU over 64 pixels": pixel_gru,
    "character LSTM": character_lstm,
    "sine network of a photograph": siren,
    "denoising diffusion": diffusion,
    "distillation": distillation,
    "contrastive learning": contrastive,
    "Poisson's equation": physics_informed,
}


def losses_of(case: Case, run: str, seed: int, steps: int) -> np.ndarray:
    """Trains; returns of each step the loss, and the share of gradients that are zero."""
    policy, loss_scale = RUNS[run]
    loss_fn = jmp.autocast(case.loss_fn, policy)
    tx = transforms.with_loss_scale(optax.adam(case.learning_rate), loss_scale)
    params = case.first(jax.random.key(seed))
    size = sum(leaf.size for leaf in jax.tree.leaves(params))

    def train_step(carry: Any, batch: Any) -> tuple[Any, jax.Array]:
        params, state = carry
        loss, grads = jmp.scaled_value_and_grad(loss_fn, state.loss_scale)(params, batch)
        zeros = sum(jnp.sum(leaf == 0) for leaf in jax.tree.leaves(grads)) / size
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), jnp.stack([loss, zeros])

    train = jax.jit(lambda carry, batches: jax.lax.scan(train_step, carry, batches, length=TURNS))
    drawn, carry, measured = np.random.default_rng(seed), (params, tx.init(params)), []
    for _ in range(0, steps, TURNS):
        batches = jax.tree.map(
            lambda *each: np.stack(each), *(case.batches(drawn) for _ in range(TURNS))
        )
        carry, found = train(carry, batches)
        measured.append(np.asarray(found))
    return np.concatenate(measured)[:steps].T


def measure(case: Case, seeds: int, steps: int) -> dict[str, Any]:
    """Returns of each run the final losses and the mean shares of zero gradients, by seed."""
    found: dict[str, Any] = {"steps": steps}
    for run in RUNS:
        finals, shares = [], []
        for seed in range(seeds):
            losses, zeros = losses_of(case, run, seed, steps)
            finals.append(float(losses[-max(1, steps // 20) :].mean()))
            shares.append(float(zeros.mean()))
        found[run] = {"final_losses": finals, "zero_gradients": shares}
    return found


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scaling_cases", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--output", type=pathlib.Path, default=ROOT / "results" / "scaling_cases.json")
    add("--only", choices=CASES, nargs="+", default=list(CASES), help="the others are kept")
    add("--seeds", type=int, default=3)
    add("--steps", type=int, help="of each case; default: its own")
    arguments, console = parser.parse_args(given), Console()
    output = arguments.output
    report = json.loads(output.read_text()) if output.exists() else {"cases": {}}
    report |= {"jax": jax.__version__, "device": jax.devices()[0].device_kind}
    report["seeds"] = arguments.seeds
    warnings.simplefilter("ignore", jmp.UnscaledLossWarning)  # two of three runs are without
    for name in arguments.only:
        started, case = time.perf_counter(), CASES[name]()
        found = measure(case, arguments.seeds, arguments.steps or case.steps)
        found["seconds"] = round(time.perf_counter() - started)
        report["cases"] = {
            each: {**report["cases"], name: found}[each]
            for each in CASES
            if each in {*report["cases"], name}
        }
        words = (f"{run} {np.mean(found[run]['final_losses']):.4g}" for run in RUNS)
        console.print(name, *itertools.chain(words), f"in {found['seconds']} s", sep=", ")
        output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
