"""MaxText: its decoders with their own attention, mixtures of experts, scan and remat, made small.

Called as in its trainer, `model.apply(variables, tokens, positions, segments, ...)`; by hand is its
option `dtype=`.
"""

import functools
import logging
import pathlib
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.published import Model, Row, clone
from benchmarks.published._losses import entropy
from jmp.adapters import linen

clone("maxtext_layers", "src")
logging.disable(logging.WARNING)  # it warns of options for pipelines of data

import maxtext  # noqa: E402
from maxtext.configs import pyconfig  # noqa: E402
from maxtext.models import models  # noqa: E402
from maxtext.utils import maxtext_utils  # noqa: E402

KEY = jax.random.key(0)
BATCH, LENGTH, VOCABULARY = 4, 32, 256

SIZE = {
    "per_device_batch_size": BATCH,
    "max_target_length": LENGTH,
    "vocab_size": VOCABULARY,
    "base_emb_dim": 64,
    "base_mlp_dim": 128,
    "base_num_decoder_layers": 2,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 2,
    "head_dim": 16,
}
PLAIN = {
    "run_name": "walk",
    "enable_checkpointing": False,
    "skip_jax_distributed_system": True,
    "log_config": False,
    "override_model_config": True,
    "attention": "dot_product",
    "dropout_rate": 0.0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "base_moe_mlp_dim": 128, "megablox": False}


def make(decoder: str, dtype: str = "float32", **options: Any) -> Model:
    base = pathlib.Path(maxtext.__file__).parent / "configs" / "base.yml"
    config = pyconfig.initialize(
        [None, str(base)],
        decoder_block=decoder,
        dtype=dtype,
        weight_dtype="float32",
        **PLAIN,
        **SIZE | options,
    )
    mesh = jax.sharding.Mesh(maxtext_utils.create_device_mesh(config), config.mesh_axes)
    network = models.transformer_as_linen(config, mesh, None)
    inputs = {
        "tokens": jax.random.randint(KEY, (BATCH, LENGTH), 0, VOCABULARY),
        "positions": jnp.tile(jnp.arange(LENGTH), (BATCH, 1)),
        "segments": jnp.ones((BATCH, LENGTH), jnp.int32),
    }

    def call(apply: Any, params: Any, batch: Any) -> Any:
        with mesh:
            return apply(
                {"params": params},
                batch["tokens"],
                batch["positions"],
                batch["segments"],
                enable_dropout=False,
            )

    def score(logits: Any, batch: Any) -> Any:
        return entropy(logits[:, :-1], batch["tokens"][:, 1:])

    params = None
    if dtype == "float32":
        keys = {"params": KEY, "dropout": KEY, "aqt": KEY}
        with mesh:
            params = jax.jit(network.init)(keys, *inputs.values())["params"]
    return Model(network.apply, call, score, nn.meta.unbox(params), inputs)


ROWS = tuple(
    Row(
        f"maxtext-{name}",
        title,
        functools.partial(make, decoder, **options),
        by_hand=True,
        adapter=linen.autocast,
    )
    for name, title, decoder, options in (
        ("llama", "Llama", "llama2", {}),
        ("gemma2", "Gemma 2", "gemma2", {"remat_policy": "minimal"}),
        (
            "mixtral-einsum",
            "Mixtral, dispatch by einsum",
            "mixtral",
            {**EXPERTS, "sparse_matmul": False, "capacity_factor": 2.0},
        ),
        (
            "mixtral-dense",
            "Mixtral, all experts",
            "mixtral",
            {**EXPERTS, "sparse_matmul": False, "capacity_factor": -1.0},
        ),
        (
            "mixtral-ragged",
            "Mixtral, ragged products",
            "mixtral",
            EXPERTS | {"sparse_matmul": True},
        ),
    )
)
