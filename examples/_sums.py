"""Sums of two numbers, digit by digit, and a small GPT in plain JAX that learns them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

SYMBOLS = "0123456789+="


@dataclasses.dataclass(frozen=True)
class Sums:
    """The task: numbers of so many digits, and their sum, with one digit more."""

    digits: int

    @property
    def question(self) -> int:
        """How many tokens a question has, with its "="."""
        return 2 * self.digits + 2

    @property
    def length(self) -> int:
        return self.question + self.digits + 1

    def texts(self, pairs: Any) -> np.ndarray:
        """Returns int32[count, length] of questions and right answers.

        Args:
          pairs: whole numbers below the square of 10**digits, one for each pair of numbers.
        """
        first, second = np.divmod(pairs, 10**self.digits)
        columns = [self._digits_of(number, self.digits) for number in (first, second)]
        columns += [self._digits_of(first + second, self.digits + 1)]
        signs = [np.full((len(pairs), 1), SYMBOLS.index(sign)) for sign in "+="]
        joined = [columns[0], signs[0], columns[1], signs[1], columns[2]]
        return np.concatenate(joined, axis=1).astype(np.int32)

    def _digits_of(self, numbers: Any, count: int) -> Any:
        return numbers[:, None] // 10 ** np.arange(count)[::-1] % 10


@dataclasses.dataclass(frozen=True)
class GPT:
    """A decoder-only transformer that knows nothing of precision, the head tied to the embedding.

    It computes in the dtype of its parameters, and softmax in float32.
    """

    layers: int
    width: int
    heads: int
    length: int

    def init(self, key: jax.Array) -> Any:
        keys = iter(jax.random.split(key, 2 + 4 * self.layers))
        width = self.width

        def normal(*shape: int, scale: float = 1.0) -> jax.Array:
            return scale * jax.random.normal(next(keys), shape) * shape[0] ** -0.5

        smaller = (2 * self.layers) ** -0.5  # what adds to the stream
        blocks = [
            {
                "attention_scale": jnp.ones(width),
                "attention_in": normal(width, 3 * width),
                "attention_out": normal(width, width, scale=smaller),
                "mlp_scale": jnp.ones(width),
                "mlp_in": normal(width, 4 * width),
                "mlp_out": normal(4 * width, width, scale=smaller),
            }
            for _ in range(self.layers)
        ]
        embeddings = [0.1 * normal(count, width) for count in (len(SYMBOLS), self.length)]
        names = ("symbols", "places")
        return dict(zip(names, embeddings, strict=True)) | {
            "blocks": blocks,
            "scale": jnp.ones(width),
        }

    def empty_caches(self, params: Any, rows: int) -> list[tuple[jax.Array, jax.Array]]:
        """Returns keys and values of each layer, in the dtype of the parameters."""
        shape = (rows, self.length, self.heads, self.width // self.heads)
        empty = jnp.zeros(shape, params["scale"].dtype)
        return [(empty, empty) for _ in range(self.layers)]

    def __call__(self, params: Any, text: jax.Array, first: Any = 0, caches: Any = None) -> Any:
        """Returns [rows, tokens, 12] logits of what follows each token, and the caches.

        Args:
          text: int32[rows, tokens].
          first: the place of its first token; those before are in `caches`.
          caches: None if the text is whole.
        """
        places = first + jnp.arange(text.shape[1])
        x = params["symbols"][text] + params["places"][places][None]
        filled = []
        for index, weights in enumerate(params["blocks"]):
            joint = norm(x, weights["attention_scale"]) @ weights["attention_in"]
            query, key, value = (
                part.reshape(*text.shape, self.heads, -1) for part in jnp.split(joint, 3, axis=-1)
            )
            if caches is not None:
                key, value = (
                    jax.lax.dynamic_update_slice(cache, new, (0, first, 0, 0))
                    for cache, new in zip(caches[index], (key, value), strict=True)
                )
            filled.append((key, value))
            mixed = attend(query, key, value, places)
            x = x + mixed.reshape(x.shape) @ weights["attention_out"]
            hidden = jax.nn.gelu(norm(x, weights["mlp_scale"]) @ weights["mlp_in"])
            x = x + hidden @ weights["mlp_out"]
        return norm(x, params["scale"]) @ params["symbols"].T, filled


def attend(query: jax.Array, key: jax.Array, value: jax.Array, places: jax.Array) -> jax.Array:
    """Returns the causal attention of [rows, tokens, heads, size], the softmax in float32."""
    scores = jnp.einsum("rqhs,rkhs->rhqk", query, key).astype(jnp.float32)
    is_seen = places[:, None] >= jnp.arange(key.shape[1])[None]
    scores = jnp.where(is_seen[None, None], scores * query.shape[-1] ** -0.5, -jnp.inf)
    return jnp.einsum("rhqk,rkhs->rqhs", jax.nn.softmax(scores).astype(value.dtype), value)


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale[None, None]


def chosen(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns the log-probabilities of tokens, in float32."""
    scores = jax.nn.log_softmax(logits.astype(jnp.float32))
    return jnp.take_along_axis(scores, tokens[..., None], axis=-1)[..., 0]
