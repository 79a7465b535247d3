"""Hugging Face transformers: every architecture whose Flax version can be made without a download.

Called as in its documentation, `model(input_ids=..., attention_mask=..., params=params)`; half of
the sequences of a batch end in padding. By hand is the models' own `dtype=jnp.float16`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import transformers

from benchmarks.published import Model, Row
from jmp.adapters import linen

BATCH, LENGTH, VOCABULARY, WIDTH, LABELS = 4, 32, 256, 64, 16
PAD = 1

SIZE = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 2 * WIDTH,
    "max_position_embeddings": 2 * LENGTH,
}
LLAMA = {**SIZE, "num_key_value_heads": 2, "head_dim": 16}
SIZE_OF_BART = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 2 * WIDTH,
    "decoder_ffn_dim": 2 * WIDTH,
    "max_position_embeddings": 2 * LENGTH,
    "pad_token_id": PAD,
    "eos_token_id": 2,
    "bos_token_id": 0,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
SIZE_OF_T5 = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "d_kv": 16,
    "d_ff": 2 * WIDTH,
    "num_layers": 2,
    "num_heads": 4,
}
SIZE_OF_GPT = {
    "vocab_size": VOCABULARY,
    "n_embd": WIDTH,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 2 * LENGTH,
}
SIZE_OF_VIT = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 2 * WIDTH,
    "image_size": 32,
    "patch_size": 8,
}
SIZE_OF_RESNET = {
    "embedding_size": 16,
    "hidden_sizes": [16, 32],
    "depths": [2, 2],
    "num_labels": LABELS,
}
NO_DROPOUT = {
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "num_labels": LABELS,
}


def tokens(numbers: np.random.Generator) -> dict[str, Any]:
    ids = numbers.integers(3, VOCABULARY, (BATCH, LENGTH))
    mask = np.ones((BATCH, LENGTH), np.int32)
    mask[::2, -LENGTH // 4 :] = 0
    return {"input_ids": np.where(mask, ids, PAD).astype(np.int32), "attention_mask": mask}


def image(numbers: np.random.Generator) -> dict[str, Any]:
    return {"pixel_values": numbers.normal(size=(BATCH, 3, 32, 32)).astype(np.float32)}


def pair_of_texts(numbers: np.random.Generator) -> dict[str, Any]:
    source, target = tokens(numbers), tokens(numbers)
    return source | {f"decoder_{name}": value for name, value in target.items()}


def text_and_image(numbers: np.random.Generator) -> dict[str, Any]:
    return tokens(numbers) | image(numbers)


def speech(numbers: np.random.Generator) -> dict[str, Any]:
    return {"input_values": numbers.normal(size=(2, 800)).astype(np.float32)}


def spectrum(numbers: np.random.Generator) -> dict[str, Any]:
    features = numbers.normal(size=(BATCH, 80, 2 * LENGTH)).astype(np.float32)
    return {"input_features": features, "decoder_input_ids": tokens(numbers)["input_ids"]}


def tokens_score(logits: Any, labels: Any, mask: Any) -> Any:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.sum(losses * mask) / jnp.sum(mask)


def masked_language(output: Any, batch: Any) -> Any:
    return tokens_score(output.logits, batch["labels"], batch["attention_mask"])


def causal_language(output: Any, batch: Any) -> Any:
    labels, mask = batch["input_ids"][:, 1:], batch["attention_mask"][:, 1:]
    return tokens_score(output.logits[:, :-1], labels, mask)


def translation(output: Any, batch: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(output.logits, batch["labels"]).mean()


def classification(output: Any, batch: Any) -> Any:
    labels = batch["labels"][:, 0] % LABELS
    return optax.softmax_cross_entropy_with_integer_labels(output.logits, labels).mean()


def contrast(output: Any, batch: Any) -> Any:
    logits = output.logits_per_text
    labels = jnp.arange(len(logits))
    entropy = optax.softmax_cross_entropy_with_integer_labels
    return (entropy(logits, labels) + entropy(logits.T, labels)).mean() / 2


def transcription(output: Any, batch: Any) -> Any:
    logits = output.logits
    labels = batch["labels"][: len(logits), :4] % 30 + 1
    return optax.ctc_loss(
        logits, jnp.zeros(logits.shape[:2]), labels, jnp.zeros(labels.shape)
    ).mean()


def features(output: Any, batch: Any) -> Any:
    return jnp.mean(jnp.square(output.last_hidden_state - 1))


CLIP = jnp.clip


def clip(x: Any, min: Any = None, max: Any = None, a_max: Any = None) -> Any:
    """`jnp.clip` with the name of an argument that T5's code uses and JAX has removed."""
    return CLIP(x, min, max if a_max is None else a_max)


def make(
    model_class: str,
    config_class: str,
    config: dict[str, Any],
    inputs: Any,
    score: Any,
    dtype: str = "float32",
    train: bool = False,
    **arguments: Any,
) -> Model:
    """Makes a model by the names of its classes; `arguments` go to the constructor.

    Args:
      train: whether norms read the batch, which returns the new statistics beside the output.
    """
    jnp.clip = clip  # in a process that measures one model
    config = getattr(transformers, config_class)(**config)
    model = getattr(transformers, model_class)(
        config, dtype=jnp.dtype(dtype), _do_init=False, **arguments
    )
    # Compiled: an initialization one operation at a time takes longer than everything else.
    initialize = jax.jit(functools.partial(model.init_weights, input_shape=model.input_shape))
    params = initialize(jax.random.key(0)) if dtype == "float32" else None
    numbers = np.random.default_rng(0)
    batch = inputs(numbers)
    names = tuple(batch)
    training = {"train": True} if train else {}  # OPT has no such argument
    labels = numbers.integers(3, VOCABULARY, (BATCH, LENGTH)).astype(np.int32)

    def call(apply: Any, params: Any, batch: Any) -> Any:
        output = apply(**{name: batch[name] for name in names}, params=params, **training)
        return output[0] if train else output

    batch = jax.tree.map(jnp.asarray, batch | {"labels": labels})
    return Model(model.__call__, call, score, params, batch)


def row(title: str, model: str, config: str, *arguments: Any, **options: Any) -> Row:
    name = title.lower().replace(" ", "-")
    made = functools.partial(make, f"Flax{model}", f"{config}Config", *arguments, **options)
    return Row(name, title, made, by_hand=True, adapter=linen.autocast)


MASKED = ({**SIZE, **NO_DROPOUT, "pad_token_id": PAD}, tokens, masked_language)
CAUSAL_LLAMA = ({**LLAMA, "pad_token_id": PAD}, tokens, causal_language)
TRANSLATION = (SIZE_OF_BART, pair_of_texts, translation)
VISION = ({**SIZE_OF_VIT, **NO_DROPOUT}, image, classification)

ROWS = (
    row("BERT", "BertForMaskedLM", "Bert", *MASKED),
    row("RoBERTa", "RobertaForMaskedLM", "Roberta", *MASKED),
    row(
        "DistilBERT",
        "DistilBertForMaskedLM",
        "DistilBert",
        {
            "vocab_size": VOCABULARY,
            "dim": WIDTH,
            "hidden_dim": 2 * WIDTH,
            "n_layers": 2,
            "n_heads": 4,
            "max_position_embeddings": 2 * LENGTH,
        },
        tokens,
        masked_language,
    ),
    row(
        "ALBERT",
        "AlbertForMaskedLM",
        "Albert",
        {**MASKED[0], "embedding_size": 32},
        *MASKED[1:],
    ),
    row(
        "ELECTRA",
        "ElectraForMaskedLM",
        "Electra",
        {**MASKED[0], "embedding_size": 32},
        *MASKED[1:],
    ),
    row("RoFormer", "RoFormerForMaskedLM", "RoFormer", *MASKED),
    row(
        "BigBird",
        "BigBirdForMaskedLM",
        "BigBird",
        {
            **MASKED[0],
            "max_position_embeddings": 128,
            "block_size": 4,
            "num_random_blocks": 1,
            "attention_type": "block_sparse",
        },
        *MASKED[1:],
    ),
    row("GPT-2", "GPT2LMHeadModel", "GPT2", SIZE_OF_GPT, tokens, causal_language),
    row(
        "GPT-Neo",
        "GPTNeoForCausalLM",
        "GPTNeo",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": WIDTH,
            "num_layers": 2,
            "attention_types": [[["global", "local"], 1]],
            "num_heads": 4,
            "max_position_embeddings": 2 * LENGTH,
            "window_size": 8,
        },
        tokens,
        causal_language,
    ),
    row(
        "GPT-J",
        "GPTJForCausalLM",
        "GPTJ",
        {**SIZE_OF_GPT, "rotary_dim": 8},
        tokens,
        causal_language,
    ),
    row(
        "OPT",
        "OPTForCausalLM",
        "OPT",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": WIDTH,
            "num_hidden_layers": 2,
            "ffn_dim": 2 * WIDTH,
            "num_attention_heads": 4,
            "max_position_embeddings": 2 * LENGTH,
            "word_embed_proj_dim": WIDTH,
        },
        tokens,
        causal_language,
    ),
    row(
        "Bloom",
        "BloomForCausalLM",
        "Bloom",
        {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "n_layer": 2, "n_head": 4},
        tokens,
        causal_language,
    ),
    row(
        "XGLM",
        "XGLMForCausalLM",
        "XGLM",
        {
            "vocab_size": VOCABULARY,
            "d_model": WIDTH,
            "num_layers": 2,
            "attention_heads": 4,
            "ffn_dim": 2 * WIDTH,
            "max_position_embeddings": 2 * LENGTH,
        },
        tokens,
        causal_language,
    ),
    row("Llama", "LlamaForCausalLM", "Llama", *CAUSAL_LLAMA),
    row("Mistral", "MistralForCausalLM", "Mistral", *CAUSAL_LLAMA),
    row("Gemma", "GemmaForCausalLM", "Gemma", *CAUSAL_LLAMA),
    row("T5", "T5ForConditionalGeneration", "T5", SIZE_OF_T5, pair_of_texts, translation),
    row(
        "LongT5",
        "LongT5ForConditionalGeneration",
        "LongT5",
        {**SIZE_OF_T5, "local_radius": 7, "encoder_attention_type": "local"},
        pair_of_texts,
        translation,
    ),
    row("BART", "BartForConditionalGeneration", "Bart", *TRANSLATION),
    row("mBART", "MBartForConditionalGeneration", "MBart", *TRANSLATION),
    row("Marian", "MarianMTModel", "Marian", *TRANSLATION),
    row("ViT", "ViTForImageClassification", "ViT", *VISION),
    row("BEiT", "BeitForImageClassification", "Beit", *VISION),
    row("DINOv2", "Dinov2ForImageClassification", "Dinov2", *VISION),
    row(
        "ResNet",
        "ResNetForImageClassification",
        "ResNet",
        SIZE_OF_RESNET,
        image,
        classification,
        train=True,
        input_shape=(1, 32, 32, 3),
    ),
    row(
        "RegNet",
        "RegNetForImageClassification",
        "RegNet",
        {**SIZE_OF_RESNET, "groups_width": 8},
        image,
        classification,
        train=True,
        input_shape=(1, 32, 32, 3),
    ),
    row(
        "CLIP",
        "CLIPModel",
        "CLIP",
        {
            "text_config": {**SIZE, "eos_token_id": 2},
            "vision_config": SIZE_OF_VIT,
            "projection_dim": 32,
        },
        text_and_image,
        contrast,
    ),
    row(
        "Whisper",
        "WhisperForConditionalGeneration",
        "Whisper",
        {
            **{n: v for n, v in SIZE_OF_BART.items() if n != "max_position_embeddings"},
            "max_source_positions": LENGTH,
            "max_target_positions": 2 * LENGTH,
        },
        spectrum,
        translation,
        input_shape=(1, 80, 2 * LENGTH),
    ),
    row(
        "wav2vec2",
        "Wav2Vec2ForCTC",
        "Wav2Vec2",
        {
            "vocab_size": 32,
            "hidden_size": WIDTH,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 2 * WIDTH,
            "conv_dim": (32, 32, 32),
            "conv_stride": (5, 4, 2),
            "conv_kernel": (10, 8, 4),
            "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 2,
            "do_stable_layer_norm": True,
            "feat_extract_norm": "layer",
        },
        speech,
        transcription,
    ),
)
