"""bonsai: its models in Flax nnx, made from their configurations at small sizes.

Called as in its tests, `model(...)`; by hand its parameters and inputs are cast, as its users do
for models without an option.
"""

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

# Read when Flax is imported. SAM 2 keeps modules in lists, which Flax 0.12 refuses in pytrees.
os.environ["FLAX_PYTREE_MODULE"] = "0"
from flax import nnx

from benchmarks.published import Model, Row, clone
from benchmarks.published._losses import entropy, entropy_of_y, masked_entropy
from jmp.adapters import nnx as adapter

clone("bonsai_models")

from bonsai.models.dinov3 import modeling as dinov3  # noqa: E402
from bonsai.models.llada import modeling as llada  # noqa: E402
from bonsai.models.sam2.model_mask_decoder import MaskDecoder  # noqa: E402
from bonsai.models.sam2.model_prompt_encoder import PromptEncoder  # noqa: E402
from bonsai.models.sam2.model_transformer import TwoWayTransformer  # noqa: E402
from bonsai.models.umt5 import modeling as umt5  # noqa: E402
from bonsai.models.unet import modeling as unet  # noqa: E402
from bonsai.models.vae import modeling as vae  # noqa: E402
from bonsai.models.vjepa2 import modeling as vjepa2  # noqa: E402
from bonsai.models.whisper import modeling as whisper  # noqa: E402

KEY = jax.random.key(0)
BATCH, LENGTH, VOCABULARY, CLASSES = 4, 32, 256, 10


@dataclasses.dataclass(frozen=True)
class Apply:
    """A model as a function of its parameters, with or without a policy of ours."""

    graph: Any
    rest: Any
    view: Callable[[Any], Any] = lambda model: model

    def __call__(self, params: Any, *args: Any, **kwargs: Any) -> Any:
        return self.view(nnx.merge(self.graph, params, self.rest))(*args, **kwargs)


def make(network: Any, call: Any, score: Any, batch: Any) -> Model:
    """Makes a model whose dropout, if it has any, does nothing."""
    network.eval()
    graph, params, rest = nnx.split(network, nnx.Param, ...)
    return Model(Apply(graph, rest), call, score, nnx.to_pure_dict(params), batch)


def with_policy(apply: Apply, policy: str) -> Apply:
    return dataclasses.replace(apply, view=lambda model: adapter.autocast(model, policy))


def reading(*names: str, part: str | None = None) -> Any:
    """Returns what calls a model with arrays of the batch, and takes a part of what it returns."""

    def call(apply: Any, params: Any, batch: Any) -> Any:
        output = apply(params, *(batch[name] for name in names))
        return output if part is None else output[part]

    return call


def entropy_of_labels(logits: Any, batch: Any) -> Any:
    return entropy(logits, batch["labels"])


def tokens(seed: int = 0) -> jax.Array:
    return jax.random.randint(jax.random.key(seed), (BATCH, LENGTH), 3, VOCABULARY)


def padding() -> jax.Array:
    """Returns a mask of which every other row ends early."""
    lengths = jnp.where(jnp.arange(BATCH) % 2, LENGTH, LENGTH // 2)
    return (jnp.arange(LENGTH) < lengths[:, None]).astype(jnp.int32)


class Translation(nnx.Module):
    """UMT5 with its head, as its `generate` puts them together."""

    def __init__(self, config: umt5.ModelConfig, rngs: nnx.Rngs) -> None:
        self.model = umt5.UMT5Model(config, rngs=rngs)

    def __call__(self, **inputs: Any) -> Any:
        return self.model.lm_head(self.model(**inputs))


def translation() -> Model:
    config = umt5.ModelConfig(
        vocab_size=VOCABULARY, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4
    )
    batch = {
        "input_ids": tokens(),
        "attention_mask": padding(),
        "decoder_input_ids": tokens(1),
        "labels": tokens(2),
    }

    def call(apply: Any, params: Any, batch: Any) -> Any:
        return apply(params, **{name: batch[name] for name in batch if name != "labels"})

    return make(Translation(config, nnx.Rngs(0)), call, entropy_of_labels, batch)


def video() -> Model:
    config = vjepa2.ModelConfig.standard_test()
    network = vjepa2.VJEPA2ForVideoClassification(config, nnx.Rngs(0))
    x = jax.random.normal(KEY, (2, config.frames_per_clip, config.crop_size, config.crop_size, 3))
    batch = {"x": x, "y": jnp.array([3, 7])}
    return make(network, reading("x", part="logits"), entropy_of_y, batch)


def features(**changes: Any) -> Model:
    config = dinov3.ModelConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=64,
        **changes,
    )
    network = dinov3.Dinov3ViTModel(config, rngs=nnx.Rngs(0))
    batch = {"x": jax.random.normal(KEY, (BATCH, 3, 64, 64))}

    def score(hidden: Any, batch: Any) -> Any:
        target = jax.random.normal(jax.random.key(1), hidden.shape)
        return jnp.mean(jnp.square(hidden - target))

    return make(network, reading("x", part="last_hidden_state"), score, batch)


def diffusion_of_text() -> Model:
    # Its layers name the axes of a mesh even where nothing is divided: a mesh of one device.
    jax.set_mesh(jax.make_mesh((1, 1), ("fsdp", "tp")))  # in a process that measures one model
    config = dataclasses.replace(
        llada.ModelConfig.llada_8b_it(False, False, dtype=jnp.float32),
        d_model=64,
        n_heads=4,
        n_kv_heads=4,
        n_layers=2,
        vocab_size=VOCABULARY,
        embedding_size=VOCABULARY,
        mlp_hidden_size=128,
    )
    network = llada.LLaDAModel(config, rngs=nnx.Rngs(0))
    batch = {"input_ids": tokens(), "attention_mask": padding(), "labels": tokens(2)}

    def call(apply: Any, params: Any, batch: Any) -> Any:
        logits, _, _ = apply(params, batch["input_ids"], batch["attention_mask"] > 0, KEY)
        return logits

    def score(logits: Any, batch: Any) -> Any:
        return masked_entropy(logits, batch["labels"], batch["attention_mask"])

    return make(network, call, score, batch)


def segmentation() -> Model:
    network = unet.UNet(unet.ModelConfig(features=(8, 16, 32, 64, 128)), rngs=nnx.Rngs(0))
    batch = {
        "x": jax.random.normal(KEY, (2, 32, 32, 1)),
        "y": jax.random.randint(jax.random.key(1), (2, 32, 32), 0, 2),
    }
    return make(network, reading("x"), entropy_of_y, batch)


def autoencoder() -> Model:
    config = vae.ModelConfig(block_out_channels=(16, 32), norm_num_groups=8)
    network = vae.VAE(config, nnx.Rngs(0))

    def score(output: Any, batch: Any) -> Any:
        return jnp.mean(jnp.square(output - batch["x"]))

    return make(network, reading("x"), score, {"x": jax.random.normal(KEY, (2, 16, 16, 3))})


class Transcription(nnx.Module):
    """Whisper's encoder and decoder, which its class does not yet call, with tied logits."""

    def __init__(self, config: whisper.ModelConfig, rngs: nnx.Rngs) -> None:
        self.model = whisper.Whisper(config, rngs=rngs)

    def __call__(self, spectrum: Any, ids: Any, mask: Any) -> Any:
        hidden = self.model.encoder(spectrum)
        hidden = self.model.decoder(ids, mask, hidden, None, decode=False)
        return self.model.decoder.embed_tokens.attend(hidden)


def transcription() -> Model:
    config = dataclasses.replace(
        whisper.ModelConfig.whisper_tiny(),
        d_model=64,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        encoder_layers=2,
        decoder_layers=2,
        max_source_positions=LENGTH,
        max_length=LENGTH,
        vocab_size=VOCABULARY,
    )
    batch = {
        "x": jax.random.normal(KEY, (BATCH, 2 * LENGTH, config.num_mel_bins)),
        "ids": tokens(),
        "labels": tokens(2),
    }

    def call(apply: Any, params: Any, batch: Any) -> Any:
        return apply(params, batch["x"], batch["ids"], nnx.make_causal_mask(batch["ids"]))

    return make(Transcription(config, nnx.Rngs(0)), call, entropy_of_labels, batch)


def segment_anything() -> Model:
    """SAM 2's prompt encoder and mask decoder: what is trained when its image encoder is frozen."""
    width, size = 32, 8

    class Heads(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.prompt = PromptEncoder(width, (size, size), (128, 128), 16, rngs=rngs)
            transformer = TwoWayTransformer(2, width, 4, 64, rngs=rngs)
            self.decoder = MaskDecoder(width, transformer, iou_head_hidden_dim=32, rngs=rngs)

        def __call__(self, features: Any, points: Any, labels: Any) -> Any:
            sparse, dense = self.prompt((points, labels), None, None)
            places = self.prompt.get_dense_pe()
            return self.decoder(features, places, sparse, dense, True, False)[:2]

    keys = jax.random.split(KEY, 4)
    batch = {
        "features": jax.random.normal(keys[0], (BATCH, width, size, size)),
        "points": 128 * jax.random.uniform(keys[1], (BATCH, 3, 2)),
        "labels": jax.random.randint(keys[2], (BATCH, 3), 0, 2),
        "masks": jax.random.bernoulli(keys[3], 0.3, (BATCH, 3, 4 * size, 4 * size)),
    }

    def score(output: Any, batch: Any) -> Any:
        masks, quality = output
        losses = optax.sigmoid_binary_cross_entropy(masks, batch["masks"].astype(jnp.float32))
        return losses.mean() + jnp.mean(jnp.square(quality - 0.5))

    call = reading("features", "points", "labels")
    return make(Heads(nnx.Rngs(0)), call, score, batch)


ROWS = tuple(
    Row(f"bonsai-{name}", title, made, by_hand="cast", adapter=with_policy)
    for name, title, made in (
        ("umt5", "UMT5", translation),
        ("vjepa2", "V-JEPA2, classification", video),
        ("dinov3", "DINOv3", features),
        (
            "dinov3-gated",
            "DINOv3, gated",
            functools.partial(features, use_gated_mlp=True, hidden_act="silu"),
        ),
        ("llada", "LLaDA", diffusion_of_text),
        ("unet", "U-Net", segmentation),
        ("vae", "Stable Diffusion's autoencoder", autoencoder),
        ("whisper", "Whisper", transcription),
        ("sam2", "SAM 2, prompts and masks", segment_anything),
    )
)
