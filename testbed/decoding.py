"""Generation in plain JAX: one token a turn, with the keys and values of those before in a cache.

In half a decoder is written by hand: weights and caches in that dtype, norms and softmax in
float32. In float32 it is the one that `jmp.autocast` takes.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

LOOPS = ("scan", "while")
CACHES = ("filled", "window", "beams", "pages", "stacked")
SMALL = {"width": 64, "heads": 4, "batch": 2, "length": 32, "vocabulary": 64}
PAGE = 16

Caches = Any  # pairs of keys and values, one for each layer; for "stacked" one pair


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A transformer that generates `length` tokens after a first one, greedily.

    Attributes:
      dtype: of weights and caches.
      loop: "scan" or "while".
      cache: how keys and values are kept. "filled": written at the turn's place. "window": the last
        ones, moved on by one place each turn. "beams": as filled, and sequences are chosen anew
        each turn. "pages": of 16 places, found by a table. "stacked": as filled, of all layers in
        one array that a loop over the layers runs through.
    """

    dtype: Any = jnp.float32
    loop: str = "scan"
    cache: str = "filled"
    layers: int = 2
    width: int = 1024
    heads: int = 16
    batch: int = 32
    length: int = 1024
    vocabulary: int = 1024

    def example(self) -> tuple[Any, jax.Array]:
        """Returns parameters of about unit gain, and first tokens."""
        shapes, token = self.arguments()
        leaves, structure = jax.tree.flatten(shapes)
        keys = jax.random.split(jax.random.key(0), len(leaves))
        gains = [x.shape[-2] ** -0.5 if len(x.shape) > 1 else 1 for x in leaves]
        arrays = [
            gain * jax.random.normal(key, x.shape)
            for key, x, gain in zip(keys, leaves, gains, strict=True)
        ]
        params = jax.tree.unflatten(structure, arrays)
        params["embedding"] = 0.1 * jax.random.normal(keys[0], shapes["embedding"].shape)
        params["blocks"]["scales"] = jnp.ones(shapes["blocks"]["scales"].shape)
        params["scale"] = jnp.ones(self.width)
        return params, jnp.arange(token.shape[0]) % self.vocabulary

    def arguments(self) -> tuple[Any, Any]:
        """Returns shapes of float32 parameters, those of layers stacked, and of first tokens."""
        shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
        layers, width = self.layers, self.width
        blocks = {
            "qkv": shape(layers, width, 3 * width),
            "out": shape(layers, width, width),
            "up": shape(layers, width, 4 * width),
            "down": shape(layers, 4 * width, width),
            "scales": shape(layers, 2, width),
        }
        embedding = shape(self.vocabulary, width)
        params = {"embedding": embedding, "blocks": blocks, "scale": shape(width)}
        return params, jax.ShapeDtypeStruct((self.batch,), jnp.int32)

    def __call__(self, params: Any, token: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns tokens, and the log-probability of each, turn by turn."""
        return self.start(params, token, self.turn)

    def score(self, params: Any, tokens: jax.Array) -> jax.Array:
        """Returns the log-probabilities of tokens, one turn after another.

        Args:
          tokens: (length + 1, batch); the first ones are given.
        """

        def turn(params: Any, number: Any, token: Any, caches: Caches) -> Any:
            logits, caches = self.logits(params, number, token, caches)
            following = tokens[number + 1]
            return following, caches, chosen(logits, following)

        return self.start(params, tokens[0], turn)[1]

    def score_at_once(self, params: Any, tokens: jax.Array) -> jax.Array:
        """Returns what `score` does of a decoder with all keys, without a loop over time."""
        size = self.width // self.heads
        params = self.weights(params)
        x = params["embedding"][tokens[:-1]]
        for index in range(self.layers):
            weights = {name: array[index] for name, array in params["blocks"].items()}
            rows = self.norm(x, weights["scales"][0]) @ weights["qkv"]
            query, key, value = (
                part.reshape(self.length, self.batch, self.heads, size)
                for part in jnp.split(rows, 3, -1)
            )
            scores = jnp.einsum("qbhd,kbhd->bhqk", query, key).astype(jnp.float32) / size**0.5
            is_seen = jnp.tril(jnp.ones((self.length, self.length), bool))
            probabilities = jax.nn.softmax(jnp.where(is_seen[None, None], scores, -1e30), -1)
            mixed = jnp.einsum("bhqk,kbhd->qbhd", self.rounded(probabilities), value)
            x = x + mixed.reshape(x.shape) @ weights["out"]
            hidden = jax.nn.gelu(self.norm(x, weights["scales"][1]) @ weights["up"])
            x = x + hidden @ weights["down"]
        return chosen(self.norm(x, params["scale"]) @ params["embedding"].T, tokens[1:])

    def weights(self, params: Any) -> Any:
        """Returns parameters in `dtype`, but the scales of norms."""
        scales = params["scale"], params["blocks"]["scales"]
        params = jax.tree.map(self.rounded, params)
        params["scale"], params["blocks"]["scales"] = scales
        return params

    def start(self, params: Any, token: jax.Array, turn: Any) -> tuple[jax.Array, jax.Array]:
        """Runs the loop."""
        params = self.weights(params)
        caches = self.empty()
        if self.loop == "scan":

            def step(carry: Any, number: Any) -> Any:
                token, caches, scored = turn(params, number, *carry)
                return (token, caches), (token, scored)

            return lax.scan(step, (token, caches), jnp.arange(self.length))[1]

        def step(carry: Any) -> Any:
            number, token, caches, tokens, scores = carry
            token, caches, scored = turn(params, number, token, caches)
            return (
                number + 1,
                token,
                caches,
                tokens.at[number].set(token),
                scores.at[number].set(scored),
            )

        shape = self.length, self.batch
        records = jnp.zeros(shape, token.dtype), jnp.zeros(shape)
        is_on = lambda carry: (carry[0] < self.length) & jnp.any(carry[1] >= 0)
        return lax.while_loop(is_on, step, (0, token, caches, *records))[3:]

    def empty(self) -> Caches:
        """Returns caches before the first turn."""
        shape = (self.batch, self.length, self.width)
        if self.cache == "pages":
            shape = (self.length // PAGE, self.batch, PAGE, self.width)
        if self.cache == "stacked":
            return (jnp.zeros((self.layers, *shape), self.dtype),) * 2
        return [(jnp.zeros(shape, self.dtype),) * 2 for _ in range(self.layers)]

    def turn(self, params: Any, number: Any, token: Any, caches: Caches) -> Any:
        """Returns the next tokens, the caches and the tokens' log-probabilities."""
        logits, caches = self.logits(params, number, token, caches)
        token = jnp.argmax(logits, -1)
        scores = chosen(logits, token)
        if self.cache == "beams":
            # Which sequence goes on in each place: here the one of the neighbour.
            parents = (jnp.arange(self.batch) + token) % self.batch
            token, scores, caches = jax.tree.map(lambda x: x[parents], (token, scores, caches))
        return token, caches, scores

    def logits(self, params: Any, number: Any, token: Any, caches: Caches) -> Any:
        """Returns logits for the token after `token`, and the caches."""
        x = params["embedding"][token]
        if self.cache == "stacked":

            def layer(x: Any, rows: Any) -> Any:
                return self.block(x, *rows, number)

            x, caches = lax.scan(layer, x, (params["blocks"], caches))
        else:
            caches = list(caches)
            for index in range(self.layers):
                weights = {name: array[index] for name, array in params["blocks"].items()}
                x, caches[index] = self.block(x, weights, caches[index], number)
        return self.norm(x, params["scale"]) @ params["embedding"].T, caches

    def block(self, x: Any, weights: Any, cache: Any, number: Any) -> Any:
        """Returns a layer's activations and its cache."""
        rows = self.norm(x, weights["scales"][0]) @ weights["qkv"]
        query, *new = jnp.split(rows, 3, -1)
        (keys, all_keys), (values, all_values) = (
            self.keep(*pair, number) for pair in zip(cache, new, strict=True)
        )
        x = x + self.attend(query, all_keys, all_values, number) @ weights["out"]
        hidden = jax.nn.gelu(self.norm(x, weights["scales"][1]) @ weights["up"])
        return x + hidden @ weights["down"], (keys, values)

    def keep(self, cached: Any, new: Any, number: Any) -> tuple[Any, Any]:
        """Returns a cache with a turn's rows, and what is in it in order of time."""
        if self.cache == "window":
            moved = jnp.concatenate([cached[:, 1:], new[:, None]], 1)
            return moved, moved
        if self.cache == "pages":
            table = jnp.arange(self.length // PAGE)[::-1]
            filled = cached.at[table[number // PAGE], :, number % PAGE].set(new)
            ordered = jnp.swapaxes(filled[table], 0, 1)
            return filled, ordered.reshape(self.batch, self.length, self.width)
        filled = lax.dynamic_update_slice(cached, new[:, None], (0, number, 0))
        return filled, filled

    def attend(self, query: Any, keys: Any, values: Any, number: Any) -> Any:
        """Returns the attention of one query each to what was seen."""
        places, size = jnp.arange(self.length), self.width // self.heads
        is_seen = places <= number
        if self.cache == "window":
            is_seen = places >= self.length - 1 - number
        query = query.reshape(self.batch, self.heads, size)
        keys, values = (x.reshape(self.batch, -1, self.heads, size) for x in (keys, values))
        scores = jnp.einsum("bhd,blhd->bhl", query, keys).astype(jnp.float32) / size**0.5
        scores = jnp.where(is_seen[None, None], scores, -1e30)
        weights = self.rounded(jax.nn.softmax(scores, -1))
        return jnp.einsum("bhl,blhd->bhd", weights, values).reshape(self.batch, self.width)

    def norm(self, x: Any, scale: Any) -> Any:
        """RMSNorm (Zhang and Sennrich 2019), computed in float32."""
        wide = x.astype(jnp.float32)
        wide = wide * lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
        return self.rounded(wide * jnp.expand_dims(scale, range(x.ndim - 1)))

    def rounded(self, x: Any) -> Any:
        """Returns an array in `dtype`."""
        return x.astype(self.dtype)


def chosen(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns log-probabilities of tokens, in float32."""
    scores = jax.nn.log_softmax(logits.astype(jnp.float32))
    return jnp.take_along_axis(scores, tokens[..., None], -1)[..., 0]
