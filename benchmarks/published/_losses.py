"""Losses by which several sources train, and models that return their loss."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import optax

from benchmarks.published import Model


def entropy(logits: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def masked_entropy(logits: Any, labels: Any, mask: Any) -> Any:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.sum(losses * mask) / jnp.sum(mask)


def entropy_of_y(logits: Any, batch: Any) -> Any:
    return entropy(logits, batch["y"])


def model_of_loss(apply: Callable[[Any, Any], Any], params: Any, batch: Any) -> Model:
    """Makes a model whose `apply(params, batch)` is the loss."""

    def call(apply: Any, params: Any, batch: Any) -> Any:
        return apply(params, batch)

    return Model(apply, call, lambda loss, batch: loss, params, batch)
