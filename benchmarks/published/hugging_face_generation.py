"""Hugging Face transformers: `generate` of its Flax models, greedy, by sampling and by beam search.

Called as in its documentation, `model.generate(input_ids, attention_mask=..., max_length=...)`;
every other prompt is padded on the left. By hand is the models' own `dtype=jnp.bfloat16`, which
their caches follow.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import transformers
from jax import lax

from benchmarks.published import Generation, Row
from benchmarks.published.hugging_face import BATCH, PAD, SIZE_OF_GPT, VOCABULARY, first_params
from benchmarks.published.hugging_face import LLAMA as SIZE_OF_LLAMA

PROMPT, LENGTH = 8, 64
# No token ends a text: random parameters would choose it too early.
NEVER_ENDS = {"pad_token_id": PAD, "bos_token_id": 0, "eos_token_id": VOCABULARY}

GREEDY: dict[str, Any] = {"do_sample": False}
SAMPLING = {"do_sample": True, "top_k": 20, "temperature": 0.8}
BEAMS = {"do_sample": False, "num_beams": 4}


def make(
    model_class: Any,
    config_class: Any,
    config: dict[str, Any],
    options: dict[str, Any],
    dtype: str = "float32",
) -> Generation:
    """Makes a model; `options` go to `generate`."""
    config = config_class(**config, **NEVER_ENDS)
    model = model_class(config, dtype=jnp.dtype(dtype), _do_init=False)
    params = first_params(model) if dtype == "float32" else None
    numbers = np.random.default_rng(0)
    mask = np.ones((BATCH, PROMPT), np.int32)
    mask[::2, : PROMPT // 4] = 0
    ids = np.where(mask, numbers.integers(3, VOCABULARY, mask.shape), PAD)
    key = {"prng_key": jax.random.key(0)} if options["do_sample"] else {}

    def generate(params: Any, ids: Any, mask: Any) -> Any:
        found = model.generate(
            ids, attention_mask=mask, params=params, max_length=LENGTH, **options, **key
        )
        return found.sequences

    def score(params: Any, tokens: Any, ids: Any, mask: Any) -> Any:
        def turn(state: Any, ids: Any) -> Any:
            output = model(ids, params=params, **state)
            return model.update_inputs_for_generation(output, dict(state)), output.logits[:, -1]

        state = model.prepare_inputs_for_generation(ids, LENGTH, attention_mask=mask)
        state, first = turn(state, ids)
        step = lambda state, ids: turn(state, ids[:, None])
        _, others = lax.scan(step, state, tokens[:, PROMPT:-1].T)
        return jnp.concatenate([first[None], others])

    inputs = jnp.asarray(ids, jnp.int32), jnp.asarray(mask)
    return Generation(generate, score, params, inputs, PROMPT)


def row(name: str, title: str, *arguments: Any) -> Row:
    return Row(f"generate-{name}", title, functools.partial(make, *arguments), by_hand=True)


GPT2 = transformers.FlaxGPT2LMHeadModel, transformers.GPT2Config, SIZE_OF_GPT
LLAMA = transformers.FlaxLlamaForCausalLM, transformers.LlamaConfig, SIZE_OF_LLAMA

ROWS = (
    row("gpt-2", "GPT-2, greedy", *GPT2, GREEDY),
    row("gpt-2-sampling", "GPT-2, sampling", *GPT2, SAMPLING),
    row("gpt-2-beams", "GPT-2, beam search", *GPT2, BEAMS),
    row("llama-beams", "Llama, beam search", *LLAMA, BEAMS),
)
