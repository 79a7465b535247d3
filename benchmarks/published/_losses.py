"""Losses by which several sources train."""

from typing import Any

import jax.numpy as jnp
import optax


def entropy(logits: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def masked_entropy(logits: Any, labels: Any, mask: Any) -> Any:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.sum(losses * mask) / jnp.sum(mask)


def entropy_of_y(logits: Any, batch: Any) -> Any:
    return entropy(logits, batch["y"])
