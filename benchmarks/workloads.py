"""What is measured: training steps of models people train, and the update of an optimizer alone."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from benchmarks._names import named
from benchmarks.models import GPT2, ResNet, ViT


@dataclasses.dataclass(frozen=True)
class Workload:
    """One training step of a model.

    Attributes:
      name: as in `--only`.
      title: as in the report.
      module: makes the model for the `dtype` that its layers get by hand, or None.
      inputs, targets: shapes and dtypes of a batch.
      classes: the targets are integers below it.
      optimizer: with float32 state.
    """

    name: str
    title: str
    module: Callable[..., nn.Module]
    inputs: jax.ShapeDtypeStruct
    targets: jax.ShapeDtypeStruct
    classes: int
    optimizer: optax.GradientTransformation

    @property
    def has_attention(self) -> bool:
        return hasattr(self.module(None), "attention")

    def variables(self, key: jax.Array) -> tuple[Any, Any]:
        """Returns float32 parameters and batch statistics (empty for a model without)."""
        module = self.module(None)
        variables = module.init(key, jnp.zeros(self.inputs.shape, self.inputs.dtype))
        return variables["params"], variables.get("batch_stats", {})

    def batch(self, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns random inputs and targets; speed does not depend on what is in them."""
        first, second = jax.random.split(key)
        if jnp.issubdtype(self.inputs.dtype, jnp.integer):
            inputs = jax.random.randint(first, self.inputs.shape, 0, self.classes)
        else:
            inputs = jax.random.normal(first, self.inputs.shape)
        return inputs, jax.random.randint(second, self.targets.shape, 0, self.classes)

    def loss_fn(self, apply_fn: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `loss(params, statistics, batch) -> (float32 loss, new statistics)`."""

        def loss(params: Any, statistics: Any, batch: Any) -> tuple[jax.Array, Any]:
            inputs, targets = batch
            if not statistics:
                return cross_entropy(apply_fn({"params": params}, inputs), targets), statistics
            variables = {"params": params, "batch_stats": statistics}
            logits, updated = apply_fn(variables, inputs, mutable=["batch_stats"])
            return cross_entropy(logits, targets), updated["batch_stats"]

        return loss


@dataclasses.dataclass(frozen=True)
class Update:
    """One Adam update of given float16 gradients, without a model."""

    name: str
    title: str
    shapes: tuple[tuple[int, ...], ...]
    optimizer: optax.GradientTransformation

    @property
    def parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)

    def params(self, key: jax.Array) -> list[jax.Array]:
        return [jax.random.normal(key, shape) for shape in self.shapes]

    def batch(self, key: jax.Array) -> list[jax.Array]:
        """Returns gradients."""
        return [jax.random.normal(key, shape, jnp.float16) for shape in self.shapes]


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Returns the mean loss in float32, as every recipe computes it."""
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def _images(batch: int, size: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    return (
        jax.ShapeDtypeStruct((batch, size, size, 3), jnp.float32),
        jax.ShapeDtypeStruct((batch,), jnp.int32),
    )


def _tokens(batch: int, length: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    return (jax.ShapeDtypeStruct((batch, length), jnp.int32),) * 2


def _resnet(
    name: str, title: str, images: Any, module: Any = ResNet, classes: int = 10
) -> Workload:
    optimizer = optax.sgd(0.1, momentum=0.9, nesterov=True)
    name, title = f"resnet50-{name}", f"ResNet-50, {title}"
    return Workload(name, title, module, *images, classes, optimizer)


def _resnet_of_imagenet(dtype: Any) -> ResNet:
    return ResNet(dtype, classes=1000, small_images=False)


ADAMW = optax.adamw(3e-4)
WORKLOADS = (
    Workload("gpt2", "GPT-2 124M, 8 x 1024 tokens", GPT2, *_tokens(8, 1024), 50257, ADAMW),
    _resnet("cifar-128", "CIFAR-10 shapes, batch 128", _images(128, 32)),
    _resnet("cifar-512", "CIFAR-10 shapes, batch 512", _images(512, 32)),
    _resnet("imagenet", "ImageNet shapes, batch 128", _images(128, 224), _resnet_of_imagenet, 1000),
    Workload("vit-b16", "ViT-B/16, ImageNet shapes, batch 64", ViT, *_images(64, 224), 1000, ADAMW),
)

UPDATES = (
    # The shapes of the table in the README: 40 matrices, 20 vectors.
    Update(
        "update-60",
        "Adam update of 60 tensors, 26 M parameters",
        ((640, 1024),) * 40 + ((1024,),) * 20,
        optax.adam(1e-3),
    ),
    # As many small tensors as a deep convolutional network has.
    Update(
        "update-400",
        "Adam update of 400 tensors, 13 M parameters",
        ((256, 256),) * 200 + ((256,),) * 200,
        optax.adam(1e-3),
    ),
)


def find(name: str, rehearse: bool) -> Workload | Update:
    """Returns a workload by name, at the size people train it or at that of a rehearsal."""
    return named("workload", name, rehearsal() if rehearse else (*WORKLOADS, *UPDATES))


def rehearsal() -> tuple[Workload | Update, ...]:
    """Returns every workload at a size that any machine runs in seconds."""
    small = {
        "gpt2": (lambda dtype: GPT2(dtype, 1, 32, 2, 64), _tokens(2, 16), 64),
        "vit-b16": (lambda dtype: ViT(dtype, 1, 32, 2, 8, 10), _images(2, 16), 10),
    }
    network = lambda dtype: ResNet(dtype, (1, 1), 8, 10)
    models = []
    for workload in WORKLOADS:
        module, (inputs, targets), classes = small.get(workload.name, (network, _images(4, 16), 10))
        title = f"{workload.title}: a rehearsal, tiny"
        changed = {"module": module, "inputs": inputs, "targets": targets, "classes": classes}
        models.append(dataclasses.replace(workload, title=title, **changed))
    updates = [
        dataclasses.replace(
            update,
            title=f"{update.title}: a rehearsal, tiny",
            shapes=tuple((8,) * len(s) for s in update.shapes[::10]),
        )
        for update in UPDATES
    ]
    return (*models, *updates)
