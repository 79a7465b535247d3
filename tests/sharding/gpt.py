"""A small GPT for FSDP in shard_map, whose layers are gathered in a scan and computed again.

As a program it is one of two processes of four CPU devices each: they train three steps, save by
Orbax, and continue for two.

JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=4
python -m tests.sharding.gpt PROCESS PORT FOLDER, with a PROCESS of 0 and 1.
"""

import functools
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp
from benchmarks.wire import attend, gpt_shapes, norm
from jmp import transforms

HEADS, STEPS, ROWS, TOKENS = 4, 3, 16, 32
SPECS = {
    "table": P("data"),
    "norm": P(),
    "blocks": {name: P(None, "data") for name in ("qkv", "out", "up", "down")}
    | {"norm1": P(), "norm2": P()},
}


def shapes(layers=2, width=32, words=64):
    return gpt_shapes(layers, width, words)


def parameters():
    random = np.random.default_rng(0)
    is_shape = lambda node: isinstance(node, tuple)
    draw = lambda shape: random.normal(0, 0.3, shape).astype(np.float32)
    return jax.tree.map(draw, shapes(), is_leaf=is_shape)


def rows(step):
    return np.random.default_rng(step).integers(0, 64, (ROWS, TOKENS + 1)).astype(np.int32)


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


def gathered(**dtypes):
    options = {"dtype": "float16", "reduce_dtype": "float32"} | dtypes
    return functools.partial(jmp.gather_params, specs_or_axis="data", **options)


def optimizer():
    return transforms.with_loss_scale(optax.adam(1e-2), jmp.DynamicLossScale(2.0**10, period=2))


def update(params, state, gradients):
    updates, state = optimizer().update(gradients, state, params)
    return optax.apply_updates(params, updates), state


def train_step(params, state, tokens):
    """A step of one device, in shard_map."""
    loss = lambda params: loss_of(params, tokens, gathered())
    _, gradients = jmp.scaled_value_and_grad(loss, state.loss_scale)(params)
    return update(params, state, jax.tree.map(lambda g: g / jax.lax.axis_size("data"), gradients))


def placed(mesh, tree, specs=SPECS):
    def place(leaf, spec):
        sharding = NamedSharding(mesh, spec)
        return jax.make_array_from_callback(leaf.shape, sharding, leaf.__getitem__)

    return jax.tree.map(place, tree, specs)


def trained(mesh, params, state, steps):
    places = transforms.state_shardings(optimizer(), params)
    specs = jax.tree.map(lambda sharding: sharding.spec, places)
    options = {"in_specs": (SPECS, specs, P("data")), "out_specs": (SPECS, specs)}
    step = jax.jit(jax.shard_map(train_step, mesh=mesh, **options))
    for number in steps:
        params, state = step(params, state, placed(mesh, rows(number), P("data")))
    return params, state


def make_mesh(devices):
    return jax.make_mesh((len(devices),), ("data",), (AxisType.Auto,), devices=devices)


def without_gathering():
    """Returns what one device makes of eight shards' half gradients, added up in float32.

    Each device computes the half gradients of its rows, as compiled for eight: XLA's CPU compiler
    leaves out other roundings in a program for one. The rest is NumPy and one device.
    """
    mesh = make_mesh(jax.devices()[:8])

    def own_gradients(half, scale, tokens):
        half = jax.lax.pcast(half, "data", to="varying")
        loss = lambda half: loss_of(half, tokens, lambda tree: tree)
        return jax.tree.map(lambda g: g[None], jmp.scaled_value_and_grad(loss, scale)(half)[1])

    options = {"in_specs": (P(), P(), P("data")), "out_specs": P("data")}
    gradients_of = jax.jit(jax.shard_map(own_gradients, mesh=mesh, **options))
    params = parameters()
    state = optimizer().init(params)
    for number in range(STEPS):
        half = jmp.cast_floating(params, jnp.float16)
        parts = gradients_of(half, jax.device_get(state.loss_scale), rows(number))
        total = jax.tree.map(lambda g: np.asarray(g).astype(np.float32).sum(0) / 8, parts)
        params, state = jax.device_get(jax.jit(update)(params, state, total))
    return params, state


def main(process, port, folder):
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(process))
    mesh = make_mesh(jax.devices())
    params = placed(mesh, parameters())
    params, state = trained(mesh, params, optimizer().init(params), range(STEPS))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(pathlib.Path(folder) / "saved", {"params": params, "state": state})
        checkpointer.wait_until_finished()
    later, _ = trained(mesh, params, state, range(STEPS, STEPS + 2))
    numbers = multihost_utils.process_allgather((params, later), tiled=True)
    if process == "0":
        np.savez(pathlib.Path(folder) / "numbers.npz", *jax.tree.leaves(numbers))


if __name__ == "__main__":
    main(*sys.argv[1:])
