"""big_vision: models in Flax linen, with the options of its configurations at small sizes.

Called as in its trainers, `model.apply({"params": params}, image)`; they have no option for half,
so by hand parameters and inputs are cast.
"""

import functools
from typing import Any

import jax

from benchmarks.published import Model, Row, clone
from benchmarks.published._losses import entropy, entropy_of_y
from jmp.adapters import linen

clone("big_vision_models")

from big_vision.models import mlp_mixer  # noqa: E402
from big_vision.models.ppp import gemma  # noqa: E402

KEY = jax.random.key(0)
BATCH, LENGTH, VOCABULARY, CLASSES = 4, 32, 256, 10


def make(network: Any, call: Any, score: Any, batch: Any, *inputs: str) -> Model:
    params = jax.jit(network.init)(KEY, *(batch[name] for name in inputs))["params"]
    # Heads begin at zero: no gradient would reach what stands before them.
    params = jax.tree.map(filled, params)
    return Model(network.apply, call, score, params, batch)


def filled(leaf: jax.Array) -> jax.Array:
    return leaf if leaf.ndim < 2 or leaf.any() else 0.1 * jax.random.normal(KEY, leaf.shape)


def reading(name: str) -> Any:
    """Returns what calls a model with an array of the batch, and takes its logits."""
    return lambda apply, params, batch: apply({"params": params}, batch[name])[0]


def images(network: Any) -> Model:
    batch = {
        "x": jax.random.normal(KEY, (BATCH, 32, 32, 3)),
        "y": jax.random.randint(jax.random.key(1), (BATCH,), 0, CLASSES),
    }
    return make(network, reading("x"), entropy_of_y, batch, "x")


def mixer() -> Model:
    sizes = {"hidden_dim": 64, "num_blocks": 2, "channels_mlp_dim": 128, "tokens_mlp_dim": 32}
    return images(mlp_mixer.Model(CLASSES, patch_size=(8, 8), **sizes))


def language(variant: str) -> Model:
    options = gemma.get_config(variant).to_dict()
    sizes = {"width": 64, "depth": 2, "mlp_dim": 128, "num_heads": 4, "head_dim": 16}
    options |= sizes | {"num_kv_heads": 1 if variant == "gemma_2b" else 2}
    network = gemma.Model(**options | {"vocab_size": VOCABULARY})
    ids = jax.random.randint(KEY, (BATCH, LENGTH), 0, VOCABULARY)

    def score(logits: Any, batch: Any) -> Any:
        return entropy(logits[:, :-1], batch["ids"][:, 1:])

    return make(network, reading("ids"), score, {"ids": ids}, "ids")


ROWS = tuple(
    Row(f"bv-{name}", title, made, by_hand="cast", adapter=linen.autocast)
    for name, title, made in (
        ("mixer", "MLP-Mixer", mixer),
        ("gemma", "Gemma", functools.partial(language, "gemma_2b")),
        ("gemma2", "Gemma 2", functools.partial(language, "gemma2_2b")),
    )
)
