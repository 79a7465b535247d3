"""bonsai: Qwen3 with its caches and its samplers, in a loop over the turns.

Its own script jits one turn, whose caches are arguments and results, and calls it from Python;
here a scan calls it, so that the loop belongs to the program. By hand, parameters are cast and
caches made in half.
"""

import functools
import os
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# Read when Flax is imported; `bonsai_models` sets it otherwise. Its jitted turn takes modules.
os.environ["FLAX_PYTREE_MODULE"] = "1"
from flax import nnx

import jmp
from benchmarks.published import Generation, Row, clone

clone("bonsai_generation")

from bonsai.models.qwen3 import modeling as qwen3  # noqa: E402
from bonsai.utils import samplers  # noqa: E402

BATCH, PROMPT, LENGTH, VOCABULARY, PAD = 4, 8, 64, 256, 0
CONFIG = qwen3.ModelConfig(
    num_layers=2,
    vocab_size=VOCABULARY,
    emb_dim=64,
    mlp_dim=128,
    num_heads=4,
    head_dim=16,
    num_kv_heads=2,
    rope_theta=1_000_000,
    rope_scaling_factor=8.0,
    local_rope_theta=1e4,
    norm_eps=1e-6,
    tie_word_embeddings=False,
)


def make(sampler: Any, dtype: str = "float32") -> Generation:
    network = qwen3.Qwen3(CONFIG, rngs=nnx.Rngs(0))
    graph, params = nnx.split(network)

    def start(params: Any, ids: Any) -> tuple[Any, Any, Any]:
        """Returns the model, and logits and caches after the prompt."""
        model = nnx.merge(graph, jmp.cast_floating(params, dtype))
        caches = qwen3.init_cache(CONFIG, BATCH, PROMPT, LENGTH - PROMPT, jnp.dtype(dtype))
        return model, *qwen3.forward(model, caches, ids, PAD)

    def generate(params: Any, ids: Any) -> Any:
        model, logits, caches = start(params, ids)

        def turn(carry: Any, key: Any) -> Any:
            logits, caches = carry
            token = sampler(logits, key=key)
            return qwen3.forward(model, caches, token, PAD), token[:, 0]

        keys = jax.random.split(jax.random.key(0), LENGTH - PROMPT)
        _, tokens = lax.scan(turn, (logits, caches), keys)
        return jnp.concatenate([ids, tokens.T], 1)

    def score(params: Any, tokens: Any, ids: Any) -> Any:
        model, first, caches = start(params, ids)

        def turn(caches: Any, token: Any) -> Any:
            logits, caches = qwen3.forward(model, caches, token[:, None], PAD)
            return caches, logits

        _, others = lax.scan(turn, caches, tokens[:, PROMPT:-1].T)
        return jnp.concatenate([first[None], others])

    ids = jax.random.randint(jax.random.key(1), (BATCH, PROMPT), 3, VOCABULARY)
    return Generation(generate, score, params, (ids,), PROMPT)


ROWS = tuple(
    Row(f"generate-qwen3{name}", title, functools.partial(make, sampler), by_hand=True)
    for name, title, sampler in (
        ("", "Qwen3, greedy", samplers.GreedySampler()),
        (
            "-top-p",
            "Qwen3, top-k and top-p",
            samplers.Sampler(temperature=1.0, top_p=0.8, top_k=10),
        ),
    )
)
