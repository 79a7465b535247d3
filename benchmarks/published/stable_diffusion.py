"""Hugging Face diffusers: the networks of Stable Diffusion; diffusers 0.35 has them for Flax.

Called as in its training examples, `unet.apply({"params": params}, noisy_latents, timesteps,
encoder_hidden_states)`. By hand is the models' own `dtype=jnp.float16`.
"""

import functools
from typing import Any

import diffusers
import jax
import jax.numpy as jnp

from benchmarks.published import Model, Row
from jmp.adapters import linen

UNET = {
    "sample_size": 8,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "block_out_channels": (32, 64),
    "layers_per_block": 1,
    "attention_head_dim": 4,
    "cross_attention_dim": 32,
}
VAE = {
    "sample_size": 16,
    "down_block_types": ("DownEncoderBlock2D", "DownEncoderBlock2D"),
    "up_block_types": ("UpDecoderBlock2D", "UpDecoderBlock2D"),
    "block_out_channels": (32, 64),
}


def make(model_class: Any, config: dict[str, Any], call: Any, dtype: str = "float32") -> Model:
    network = model_class(**config, dtype=jnp.dtype(dtype))
    params = jax.jit(network.init_weights)(jax.random.key(0)) if dtype == "float32" else None
    keys = jax.random.split(jax.random.key(1), 5)
    batch = {
        "latents": jax.random.normal(keys[0], (4, 4, 8, 8)),
        "timesteps": jnp.array([1, 100, 500, 999]),
        "text": jax.random.normal(keys[1], (4, 16, 32)),
        "images": jax.random.normal(keys[2], (4, 3, 16, 16)),
        "condition": jax.random.normal(keys[3], (4, 3, 64, 64)),
        "noise": jax.random.normal(keys[4], (4, 4, 8, 8)),
    }
    return Model(network.apply, call, squared_error, params, batch)


def unet(apply: Any, params: Any, batch: Any) -> Any:
    prediction = apply({"params": params}, batch["latents"], batch["timesteps"], batch["text"])
    return prediction.sample, batch["noise"]


def autoencoder(apply: Any, params: Any, batch: Any) -> Any:
    return apply({"params": params}, batch["images"]).sample, batch["images"]


def controlnet(apply: Any, params: Any, batch: Any) -> Any:
    arguments = (batch[name] for name in ("latents", "timesteps", "text", "condition"))
    output = apply({"params": params}, *arguments)
    residuals = (*output.down_block_res_samples, output.mid_block_res_sample)
    # A ControlNet's last convolutions begin at zero: without a target all gradients would be zero.
    return jnp.concatenate([residual.ravel() for residual in residuals]), 1


def squared_error(output: Any, batch: Any) -> Any:
    prediction, target = output
    return jnp.mean(jnp.square(prediction - target))


ROWS = tuple(
    Row(name, title, functools.partial(make, *arguments), by_hand=True, adapter=linen.autocast)
    for name, title, *arguments in (
        (
            "sd-unet",
            "Stable Diffusion's U-Net",
            diffusers.FlaxUNet2DConditionModel,
            UNET | {"up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")},
            unet,
        ),
        ("sd-vae", "Stable Diffusion's autoencoder", diffusers.FlaxAutoencoderKL, VAE, autoencoder),
        (
            "controlnet",
            "ControlNet",
            diffusers.FlaxControlNetModel,
            UNET | {"conditioning_embedding_out_channels": (16, 16, 32, 32)},
            controlnet,
        ),
    )
)
