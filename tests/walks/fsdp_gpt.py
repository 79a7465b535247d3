"""FSDP of a small GPT over eight devices, with accumulation, in mixed precision.

Plain JAX, in `shard_map`. Parameters and moments are float32 shards. Devices gather the
parameters and exchange gradients in half, and add gradients up in float32. The losses
are those of a float32 program on one device. The text is Python's standard library.
"""

import argparse
import os
import pathlib
import re

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp
from jmp import diagnostics, transforms

WIDTH, HEADS, LAYERS, CONTEXT, VOCABULARY = 64, 4, 2, 64, 128
ROWS, MICRO_BATCHES = 32, 2


def create(key):
    keys = iter(jax.random.split(key, 3 + 4 * LAYERS))
    matrix = lambda *shape: jax.random.normal(next(keys), shape) * shape[0] ** -0.5
    layer = lambda: {
        "norm_1": jnp.ones(WIDTH),
        "qkv": matrix(WIDTH, 3 * WIDTH),
        "out": matrix(WIDTH, WIDTH),
        "norm_2": jnp.ones(WIDTH),
        "up": matrix(WIDTH, 4 * WIDTH),
        "down": matrix(4 * WIDTH, WIDTH),
    }
    return {
        "tokens": matrix(VOCABULARY, WIDTH),
        "positions": matrix(CONTEXT, WIDTH),
        "layers": [layer() for _ in range(LAYERS)],
        "norm": jnp.ones(WIDTH),
        "head": matrix(WIDTH, VOCABULARY),
    }


def attention(qkv):
    split = lambda x: x.reshape(*x.shape[:2], HEADS, -1)
    query, key, value = map(split, jnp.split(qkv, 3, axis=-1))
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / query.shape[-1] ** 0.5
    is_seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(is_seen, scores, -jnp.inf))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value).reshape(*qkv.shape[:2], WIDTH)


def loss_fn(params, text):
    norm = lambda x, scale: jax.nn.standardize(x) * scale
    x = params["tokens"][text[:, :-1]] + params["positions"]
    for layer in params["layers"]:
        x += attention(norm(x, layer["norm_1"]) @ layer["qkv"]) @ layer["out"]
        x += jax.nn.gelu(norm(x, layer["norm_2"]) @ layer["up"]) @ layer["down"]
    # Gathered parameters are half: without this cast the loss would be half too.
    logits = (norm(x, params["norm"]) @ params["head"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean()


def batches(steps):
    folder = pathlib.Path(argparse.__file__).parent
    files = ("argparse.py", "ast.py", "inspect.py")
    text = b"".join((folder / name).read_bytes() for name in files)
    text = np.frombuffer(text, np.uint8).astype(np.int32) % VOCABULARY
    random = np.random.default_rng(0)
    for _ in range(steps):
        starts = random.integers(0, len(text) - CONTEXT - 1, ROWS)
        yield np.stack([text[i : i + CONTEXT + 1] for i in starts])


def train(grad_fn, policy, params, text_sharding, steps):
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(3e-3))
    tx = transforms.mixed_precision(inner, policy)

    @jax.jit
    def step(params, opt_state, text):
        loss, grads = grad_fn(params, text, opt_state.loss_scale)
        norm = optax.tree.norm(opt_state.loss_scale.unscale(grads))
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, (loss, norm)

    opt_state, history = tx.init(params), []
    texts = [jax.device_put(text, text_sharding) for text in batches(steps)]
    step = step.lower(params, opt_state, texts[0]).compile()
    for text in texts:
        params, opt_state, loss_and_norm = step(params, opt_state, text)
        history.append(jax.device_get(loss_and_norm))
    return params, opt_state, np.array(history).T, step.as_text()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--policy", default="mixed_float16")
    args = parser.parse_args()
    half = jmp.get_policy(args.policy).compute_dtype
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    params, rows = create(jax.random.key(0)), NamedSharding(mesh, P("data"))
    # Matrices are sharded by their rows; vectors are on every device.
    specs = jax.tree.map(lambda p: P("data") if p.ndim == 2 else P(), params)

    @jmp.autocast(policy=args.policy)
    def sharded_loss_fn(shards, text):
        whole = jmp.gather_params(shards, specs, half, reduce_dtype="float32")
        return jax.lax.pmean(loss_fn(whole, text), "data")

    @jax.shard_map(mesh=mesh, in_specs=(specs, P("data"), P()), out_specs=(P(), specs))
    def grad_fn(shards, text, scale):
        summed = jmp.accumulated_value_and_grad(sharded_loss_fn, scale, MICRO_BATCHES)
        return summed(shards, text)

    place = lambda p, spec: jax.device_put(p, NamedSharding(mesh, spec))
    placed = jax.tree.map(place, params, specs)
    trained = train(grad_fn, args.policy, placed, rows, args.steps)
    shards, opt_state, (losses, norms), program = trained
    on_one = lambda params, text, scale: jax.value_and_grad(loss_fn)(params, text)
    exact = train(on_one, "float32", params, jax.devices()[0], args.steps)[2]
    print("losses", losses[::5], "in float32 on one device", exact[0][::5], sep="\n")

    # All products are half; parameters and moments are float32 shards.
    text = jax.device_put(next(batches(1)), rows)
    diagnostics.assert_products_in(grad_fn, half)(shards, text, opt_state.loss_scale)
    for tree in (shards, opt_state.inner_state[1][0].mu):
        assert {leaf.dtype for leaf in jax.tree.leaves(tree)} == {np.dtype("float32")}
        up = tree["layers"][0]["up"].addressable_shards
        assert len(up) == 8 and up[0].data.shape == (WIDTH // 8, 4 * WIDTH)
    # Devices send half numbers, and no collective adds up more than scalars.
    sent = re.findall(r"= \(?(\w+)\[([\d,]*)\].*? (all-[a-z-]+)\(", program)
    assert "reduce-scatter(" not in program
    wire = "f16" if half == jnp.float16 else "f32"  # a CPU sends bfloat16 as float32
    assert {dtype for dtype, _, kind in sent if kind == "all-to-all"} == {wire}
    assert (wire, f"{WIDTH},{4 * WIDTH}", "all-gather") in sent
    assert all(shape == "" for _, shape, kind in sent if kind == "all-reduce")
    # Nothing was skipped, and losses and norms are near the ones of float32.
    assert opt_state.skipped_steps == 0 and losses[-1] < losses[0]
    rtol = 2e-3 if half == jnp.float16 else 1e-2
    assert np.allclose((losses, norms), exact, rtol=[[rtol], [10 * rtol]])


if __name__ == "__main__":
    main()
