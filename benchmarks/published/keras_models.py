"""Keras 3 on JAX: networks of `keras.applications`, and layers as the examples of keras.io put
them together.

Called as in its guide to custom training loops in JAX, `model.stateless_call(trainable, other, x)`.
By hand is Keras's own mixed precision, the dtype policy "mixed_float16".
"""

import functools
import os
from typing import Any

import jax

os.environ["KERAS_BACKEND"] = "jax"  # read when Keras is imported
import keras

from benchmarks.published import Model, Row
from benchmarks.published._losses import entropy_of_y

CLASSES = 10
IMAGE = (32, 32, 3)
TOKENS = (32,)
WAVE = (4096,)
VOCABULARY = 256


def make(build: Any, inputs: str = "images", dtype: str = "float32") -> Model:
    """Makes a model whose BatchNorms take their running statistics.

    At this size they would read eight numbers: float32's own gradient would be mostly noise.
    """
    keras.config.set_dtype_policy("float32" if dtype == "float32" else f"mixed_{dtype}")
    keras.utils.set_random_seed(0)
    model = build()
    keys = jax.random.split(jax.random.key(0), 3)
    x = {
        "tokens": lambda: jax.random.randint(keys[0], (8, *TOKENS), 0, VOCABULARY),
        "images": lambda: jax.random.normal(keys[1], (8, *IMAGE)),
        "waves": lambda: 0.1 * jax.random.normal(keys[1], (8, *WAVE)),
    }
    batch = {
        "x": x[inputs](),
        "y": jax.random.randint(keys[2], (8,), 0, CLASSES),
        "state": [variable.value for variable in model.non_trainable_variables],
    }

    def call(apply: Any, params: Any, batch: Any) -> Any:
        output, _ = apply(params, batch["state"], batch["x"], training=False)
        return output

    params = [variable.value for variable in model.trainable_variables]
    return Model(model.stateless_call, call, entropy_of_y, params, batch)


def application(name: str, **options: Any) -> Any:
    return getattr(keras.applications, name)(
        weights=None, input_shape=IMAGE, classes=CLASSES, classifier_activation=None, **options
    )


def transformer() -> Any:
    """The block of keras.io's "Text classification with Transformer"."""
    layers = keras.layers
    ids = keras.Input(TOKENS, dtype="int32")
    positions = layers.Embedding(TOKENS[0], 64)(keras.ops.arange(TOKENS[0]))
    x = layers.Embedding(VOCABULARY, 64)(ids) + positions
    x = layers.LayerNormalization(epsilon=1e-6)(x + layers.MultiHeadAttention(4, 16)(x, x))
    hidden = layers.Dense(64)(layers.Dense(128, activation="relu")(x))
    x = layers.LayerNormalization(epsilon=1e-6)(x + hidden)
    x = layers.GlobalAveragePooling1D()(x)
    return keras.Model(ids, layers.Dense(CLASSES)(layers.Dense(32, activation="relu")(x)))


def recurrent(layer: str) -> Any:
    """keras.io's "Bidirectional LSTM on IMDB", with any recurrent layer."""
    layers = keras.layers
    make_layer = getattr(layers, layer)
    ids = keras.Input(TOKENS, dtype="int32")
    x = layers.Embedding(VOCABULARY, 64)(ids)
    x = layers.Bidirectional(make_layer(32, return_sequences=True))(x)
    x = layers.Bidirectional(make_layer(32))(x)
    return keras.Model(ids, layers.Dense(CLASSES)(x))


def listener() -> Any:
    """A network that makes its own spectrogram, by `keras.layers.MelSpectrogram`."""
    layers = keras.layers
    wave = keras.Input(WAVE)
    options = {"fft_length": 256, "sequence_stride": 128, "num_mel_bins": 32}
    x = layers.MelSpectrogram(**options, min_freq=20.0)(wave)
    x = layers.LayerNormalization(axis=(1, 2))(x)[..., None]
    for width in (16, 32):
        x = layers.MaxPooling2D()(layers.Conv2D(width, 3, activation="gelu")(x))
    return keras.Model(wave, layers.Dense(CLASSES)(layers.GlobalAveragePooling2D()(x)))


def row(name: str, title: str, build: Any, *arguments: Any) -> Row:
    return Row(name, title, functools.partial(make, build, *arguments), by_hand=True)


ROWS = (
    row(
        "keras-mobilenet-v2",
        "keras.applications.MobileNetV2",
        functools.partial(application, "MobileNetV2", alpha=0.35),
    ),
    row(
        "keras-mobilenet-v3",
        "keras.applications.MobileNetV3Small",
        functools.partial(application, "MobileNetV3Small", dropout_rate=0.0),
    ),
    row(
        "keras-efficientnet",
        "keras.applications.EfficientNetB0",
        functools.partial(application, "EfficientNetB0"),
    ),
    row(
        "keras-convnext",
        "keras.applications.ConvNeXtTiny",
        functools.partial(application, "ConvNeXtTiny"),
    ),
    row("keras-transformer", "Transformer of keras.layers", transformer, "tokens"),
    row("keras-lstm", "Bidirectional LSTM", functools.partial(recurrent, "LSTM"), "tokens"),
    row("keras-gru", "Bidirectional GRU", functools.partial(recurrent, "GRU"), "tokens"),
    row("keras-mel", "Mel spectrogram of keras.layers", listener, "waves"),
)
