"""A GPT for FSDP in shard_map, whose layers are gathered in a scan and computed again."""

import jax
import jax.numpy as jnp
import optax

from benchmarks.wire import attend, norm

HEADS = 4


def loss_of(params, tokens, gather):
    """The mean loss of the next tokens; `gather(tree)` gives the weights in half."""

    @jax.checkpoint
    def block(x, layer):
        w = gather(layer)
        x = x + attend(norm(x, w["norm1"]) @ w["qkv"], HEADS) @ w["out"]
        return x + jax.nn.gelu(norm(x, w["norm2"]) @ w["up"]) @ w["down"], None

    rest = gather({"table": params["table"], "norm": params["norm"]})
    x, _ = jax.lax.scan(block, rest["table"][tokens[:, :-1]], params["blocks"])
    logits = jnp.einsum("btd,vd->btv", norm(x, rest["norm"]), rest["table"]).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses.mean()
