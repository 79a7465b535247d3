"""Haiku: the networks that come with it, `hk.nets`, and its recurrent core, unrolled."""

import functools
from collections.abc import Callable
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp

from benchmarks.published import Model, Row
from benchmarks.published._losses import entropy_of_y
from jmp.adapters import haiku

KEY = jax.random.key(0)
CLASSES = 10


def make(network: Callable[[Any], Any], x: Any) -> Model:
    """Makes a model whose statistics, if it has any, come with the batch."""
    transformed = hk.transform_with_state(network)
    params, state = jax.jit(transformed.init)(KEY, x)
    labels = jax.random.randint(KEY, (len(x),), 0, CLASSES)

    def call(apply: Any, params: Any, batch: Any) -> Any:
        output, _ = apply(params, batch["state"], None, batch["x"])
        return output

    return Model(
        transformed.apply, call, entropy_of_y, params, {"x": x, "y": labels, "state": state}
    )


def adapter(apply: Callable[..., Any], policy: str) -> Callable[..., Any]:
    network = hk.TransformedWithState(init=lambda *args: None, apply=apply)
    return haiku.autocast(network, policy).apply


def images(size: int) -> jax.Array:
    return jax.random.normal(KEY, (8, size, size, 3))


def resnet(x: Any) -> Any:
    network = hk.nets.ResNet(
        blocks_per_group=(1, 1, 1, 1),
        num_classes=CLASSES,
        channels_per_group=(16, 32, 64, 128),
        logits_config={"w_init": None},
    )
    return network(x, is_training=True)


def mobilenet(x: Any) -> Any:
    network = hk.nets.MobileNetV1((1, 2, 2), (32, 64, 128), CLASSES)
    return network(x, is_training=True)


def lstm(x: Any) -> Any:
    core = hk.DeepRNN([hk.LSTM(32), jnp.tanh, hk.LSTM(32)])
    hidden, _ = hk.dynamic_unroll(core, x, core.initial_state(len(x)), time_major=False)
    return hk.Linear(CLASSES)(hidden[:, -1])


def quantized(x: Any) -> Any:
    """The middle of a VQ-VAE, its gradient straight through the rounding."""
    codes = hk.nets.VectorQuantizer(16, 32, commitment_cost=0.25)
    found = codes(hk.Linear(16)(x), is_training=True)
    logits = hk.nets.MLP([32, CLASSES])(found["quantize"].reshape(len(x), -1))
    return logits + found["loss"]


ROWS = tuple(
    Row(name, title, functools.partial(make, network, x), adapter=adapter)
    for name, title, network, x in (
        ("haiku-resnet", "hk.nets.ResNet", resnet, images(32)),
        ("haiku-mobilenet", "hk.nets.MobileNetV1", mobilenet, images(33)),
        ("haiku-lstm", "hk.LSTM, unrolled", lstm, images(16)[..., 0]),
        ("haiku-vq", "hk.nets.VectorQuantizer", quantized, images(8)),
    )
)
