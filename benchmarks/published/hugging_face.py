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
from benchmarks.published._losses import entropy, masked_entropy
from jmp.adapters import linen

BATCH, LENGTH, VOCABULARY, WIDTH, LABELS = 4, 32, 256, 64, 16
PAD = 1

WORDS = {"vocab_size": VOCABULARY}
POSITIONS = {"max_position_embeddings": 2 * LENGTH}
PADDED = {"pad_token_id": PAD}
BLOCKS = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZE = {**WORDS, **BLOCKS, "intermediate_size": 2 * WIDTH, **POSITIONS}
LLAMA = {**SIZE, "num_key_value_heads": 2, "head_dim": 16}
SIDES_OF_BART = {
    f"{side}_{name}": size
    for side in ("encoder", "decoder")
    for name, size in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 2 * WIDTH))
}
TOKENS_OF_BART = {
    **PADDED,
    "eos_token_id": 2,
    "bos_token_id": 0,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
BART = {**WORDS, "d_model": WIDTH, **SIDES_OF_BART, **TOKENS_OF_BART}
SIZE_OF_T5 = {**WORDS, "d_model": WIDTH, "d_kv": 16, "d_ff": 2 * WIDTH}
SIZE_OF_T5 |= {"num_layers": 2, "num_heads": 4}
SIZE_OF_GPT = {**WORDS, "n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": 2 * LENGTH}
SIZE_OF_VIT = {**BLOCKS, "intermediate_size": 2 * WIDTH, "image_size": 32, "patch_size": 8}
CLASSES = {"num_labels": LABELS}
SIZE_OF_RESNET = {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [2, 2], **CLASSES}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, **CLASSES}


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


def masked_language(output: Any, batch: Any) -> Any:
    return masked_entropy(output.logits, batch["labels"], batch["attention_mask"])


def causal_language(output: Any, batch: Any) -> Any:
    labels, mask = batch["input_ids"][:, 1:], batch["attention_mask"][:, 1:]
    return masked_entropy(output.logits[:, :-1], labels, mask)


def translation(output: Any, batch: Any) -> Any:
    return entropy(output.logits, batch["labels"])


def classification(output: Any, batch: Any) -> Any:
    return entropy(output.logits, batch["labels"][:, 0] % LABELS)


def contrast(output: Any, batch: Any) -> Any:
    logits = output.logits_per_text
    labels = jnp.arange(len(logits))
    losses = optax.softmax_cross_entropy_with_integer_labels
    return (losses(logits, labels) + losses(logits.T, labels)).mean() / 2


def transcription(output: Any, batch: Any) -> Any:
    logits = output.logits
    labels = batch["labels"][: len(logits), :4] % 30 + 1
    losses = optax.ctc_loss(logits, jnp.zeros(logits.shape[:2]), labels, jnp.zeros(labels.shape))
    return losses.mean()


CLIP = jnp.clip


def clip(x: Any, min: Any = None, max: Any = None, a_max: Any = None) -> Any:
    """`jnp.clip` with the name of an argument that T5's code uses and JAX has removed."""
    return CLIP(x, min, max if a_max is None else a_max)


def first_params(model: Any) -> Any:
    # Compiled: an initialization one operation at a time takes longer than everything else.
    initialize = jax.jit(functools.partial(model.init_weights, input_shape=model.input_shape))
    return initialize(jax.random.key(0))


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
    params = first_params(model) if dtype == "float32" else None
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


# Tasks: how the names of their classes end, what they read and what is minimised.
Task = tuple[str, Any, Any]
MASKED: Task = ("ForMaskedLM", tokens, masked_language)
CAUSAL: Task = ("ForCausalLM", tokens, causal_language)
TRANSLATION: Task = ("ForConditionalGeneration", pair_of_texts, translation)
IMAGES: Task = ("ForImageClassification", image, classification)


def row(title: str, family: str, task: Task, config: dict[str, Any], **options: Any) -> Row:
    end, *task_functions = task
    names = f"Flax{family}{end}", f"{family}Config"
    made = functools.partial(make, *names, config, *task_functions, **options)
    return Row(title.lower().replace(" ", "-"), title, made, by_hand=True, adapter=linen.autocast)


OF_BERT = {**SIZE, **NO_DROPOUT, **PADDED}
SHORT_EMBEDDINGS = {**OF_BERT, "embedding_size": 32}
OF_DISTILBERT = {**WORDS, "dim": WIDTH, "hidden_dim": 2 * WIDTH, "n_layers": 2, "n_heads": 4}
SPARSE = {"block_size": 4, "num_random_blocks": 1, "attention_type": "block_sparse"}
OF_GPT_NEO = {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "num_heads": 4}
OF_OPT = {"ffn_dim": 2 * WIDTH, "word_embed_proj_dim": WIDTH}
OF_XGLM = {"d_model": WIDTH, "num_layers": 2, "attention_heads": 4, "ffn_dim": 2 * WIDTH}
OF_LLAMA = {**LLAMA, **PADDED}
OF_VIT = {**SIZE_OF_VIT, **NO_DROPOUT}
STATISTICS: dict[str, Any] = {"train": True, "input_shape": (1, 32, 32, 3)}
OF_WAV2VEC2 = {
    **BLOCKS,
    "vocab_size": 32,
    "intermediate_size": 2 * WIDTH,
    "conv_dim": (32, 32, 32),
    "conv_stride": (5, 4, 2),
    "conv_kernel": (10, 8, 4),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "do_stable_layer_norm": True,
    "feat_extract_norm": "layer",
}

ROWS = (
    row("BERT", "Bert", MASKED, OF_BERT),
    row("RoBERTa", "Roberta", MASKED, OF_BERT),
    row("DistilBERT", "DistilBert", MASKED, {**OF_DISTILBERT, **POSITIONS}),
    row("ALBERT", "Albert", MASKED, SHORT_EMBEDDINGS),
    row("ELECTRA", "Electra", MASKED, SHORT_EMBEDDINGS),
    row("RoFormer", "RoFormer", MASKED, OF_BERT),
    row("BigBird", "BigBird", MASKED, {**OF_BERT, **SPARSE, "max_position_embeddings": 128}),
    row("GPT-2", "GPT2", ("LMHeadModel", *CAUSAL[1:]), SIZE_OF_GPT),
    row(
        "GPT-Neo",
        "GPTNeo",
        CAUSAL,
        {**WORDS, **OF_GPT_NEO, **POSITIONS, "hidden_size": WIDTH, "window_size": 8},
    ),
    row("GPT-J", "GPTJ", CAUSAL, {**SIZE_OF_GPT, "rotary_dim": 8}),
    row("OPT", "OPT", CAUSAL, {**WORDS, **BLOCKS, **OF_OPT, **POSITIONS}),
    row("Bloom", "Bloom", CAUSAL, {**WORDS, "hidden_size": WIDTH, "n_layer": 2, "n_head": 4}),
    row("XGLM", "XGLM", CAUSAL, {**WORDS, **OF_XGLM, **POSITIONS}),
    row("Llama", "Llama", CAUSAL, OF_LLAMA),
    row("Mistral", "Mistral", CAUSAL, OF_LLAMA),
    row("Gemma", "Gemma", CAUSAL, OF_LLAMA),
    row("T5", "T5", TRANSLATION, SIZE_OF_T5),
    row(
        "LongT5",
        "LongT5",
        TRANSLATION,
        {**SIZE_OF_T5, "local_radius": 7, "encoder_attention_type": "local"},
    ),
    row("BART", "Bart", TRANSLATION, {**BART, **POSITIONS}),
    row("mBART", "MBart", TRANSLATION, {**BART, **POSITIONS}),
    row("Marian", "Marian", ("MTModel", *TRANSLATION[1:]), {**BART, **POSITIONS}),
    row("ViT", "ViT", IMAGES, OF_VIT),
    row("BEiT", "Beit", IMAGES, OF_VIT),
    row("DINOv2", "Dinov2", IMAGES, OF_VIT),
    row("ResNet", "ResNet", IMAGES, SIZE_OF_RESNET, **STATISTICS),
    row("RegNet", "RegNet", IMAGES, {**SIZE_OF_RESNET, "groups_width": 8}, **STATISTICS),
    row(
        "CLIP",
        "CLIP",
        ("Model", text_and_image, contrast),
        {
            "text_config": {**SIZE, "eos_token_id": 2},
            "vision_config": SIZE_OF_VIT,
            "projection_dim": 32,
        },
    ),
    row(
        "Whisper",
        "Whisper",
        (TRANSLATION[0], spectrum, translation),
        {**BART, "max_source_positions": LENGTH, "max_target_positions": 2 * LENGTH},
        input_shape=(1, 80, 2 * LENGTH),
    ),
    row("wav2vec2", "Wav2Vec2", ("ForCTC", speech, transcription), OF_WAV2VEC2),
)
