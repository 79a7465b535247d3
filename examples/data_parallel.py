"""Trains on eight devices, data parallel and FSDP, in plain JAX: the same losses as on one device.

    python examples/data_parallel.py    # half a minute on two CPU cores; --help lists options

The devices are parts of the CPU, which the script asks for before JAX starts: it runs anywhere, and
is no faster than one. On a machine with GPUs or TPUs leave that line out. The training step is
written once, for one device. The shardings of the arrays say the rest:

- data parallel: parameters and optimizer lie on every device as a whole, the batch is divided;
- FSDP: each device holds an eighth of the parameters and of the optimizer's state, too.

`jax.jit` compiles the step for all devices. The check of the gradients is one, so an overflow on
one device skips the step on all of them. It prints losses, how far apart those of a step are from
one device's, the bytes on a device, and whether a batch with an infinity on one device changed
nothing.
"""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 " + os.environ.get(
    "XLA_FLAGS", ""
)

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _common import PRECISIONS, begin, finish, load_images, parse_options, print_table
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp
from jmp import transforms


def loss_fn(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Three layers with norms; it knows nothing of precision or devices."""
    x = images
    for layer in params["hidden"]:
        x = jax.nn.gelu(x @ layer["kernel"] + layer["bias"])
        x = layer["scale"] * (x - x.mean(-1, keepdims=True)) / (x.std(-1, keepdims=True) + 1e-5)
    logits = x @ params["out"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def init(key: jax.Array, width: int) -> Any:
    hidden = []
    for inputs, own in zip((64, width), jax.random.split(key), strict=True):
        kernel = jax.random.normal(own, (inputs, width)) * (2 / inputs) ** 0.5
        hidden.append({"kernel": kernel, "bias": jnp.zeros(width), "scale": jnp.ones(width)})
    return {"hidden": hidden, "out": jnp.zeros((width, 10))}


def train(mesh: Any, is_sharded: bool, policy: str, data: Any, arguments: Any) -> dict[str, Any]:
    """Trains on the devices of a mesh; returns losses, and what each device holds."""
    half_loss_fn = jmp.autocast(loss_fn, policy)
    # A scale of one checks gradients, and skips steps, as float16's scale does.
    is_float16 = policy == "mixed_float16"
    loss_scale = jmp.torch_loss_scale() if is_float16 else jmp.StaticLossScale(1.0)
    tx = transforms.mixed_precision(optax.adam(3e-3), policy, loss_scale)
    place = functools.partial(NamedSharding, mesh)

    # Along its first axis, as far as the devices divide it.
    def placed(leaf: jax.Array) -> NamedSharding:
        return place(P("data") if is_sharded and leaf.shape[0] % mesh.size == 0 else P())

    params = init(jax.random.key(0), arguments.width)
    params = jax.device_put(params, jax.tree.map(placed, params))
    opt_state = tx.init(params)  # it lies where the parameters lie
    places = jax.tree.map(lambda leaf: leaf.sharding, (params, opt_state))

    @functools.partial(jax.jit, donate_argnums=(0, 1), out_shardings=(*places, None))
    def train_step(params: Any, opt_state: Any, images: jax.Array, labels: jax.Array) -> Any:
        grad_fn = jmp.scaled_value_and_grad(half_loss_fn, opt_state.loss_scale)
        loss, grads = grad_fn(params, images, labels)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    images, labels = data
    drawn, losses = np.random.default_rng(0), []
    for _ in range(arguments.steps):
        rows = drawn.integers(0, len(images), arguments.batch_size)
        batch = jax.device_put((images[rows], labels[rows]), place(P("data")))
        params, opt_state, loss = train_step(params, opt_state, *batch)
        losses.append(float(loss))
    on_one = [
        leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves((params, opt_state))
    ]

    before = jax.tree.map(np.array, params)  # a copy: the step takes the buffers
    bad = images[rows].copy()
    bad[-1] = np.inf  # a row of the last device
    bad, labels = jax.device_put((bad, labels[rows]), place(P("data")))
    params, opt_state, _ = train_step(params, opt_state, bad, labels)
    kept = jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), before, params))
    return {"losses": losses, "kB on a device": sum(on_one) / 1000, "skipped whole": kept}


def main() -> None:
    options = {"steps": 100, "batch_size": 128, "width": 256}
    arguments = parse_options(__doc__, **options, precisions=PRECISIONS)
    console = begin(arguments)
    images, labels = load_images()
    data = images.reshape(-1, 64), labels
    one, eight = (
        jax.make_mesh(
            (count,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:count]
        )
        for count in (1, 8)
    )
    ways = {"one device": (one, False), "data parallel": (eight, False), "FSDP": (eight, True)}
    runs: dict[str, Any] = {}
    rows = []
    for policy in arguments.precisions:
        for way, (mesh, is_sharded) in ways.items():
            run = runs[f"{policy}, {way}"] = train(mesh, is_sharded, policy, data, arguments)
            alone = runs[f"{policy}, one device"]["losses"]
            apart = np.max(np.abs(np.subtract(run["losses"], alone)))
            cells = f"{apart:.1e}", f"{run['kB on a device']:.0f}", run["skipped whole"]
            rows.append([policy, way, float(np.mean(run["losses"][-20:])), *cells])
    print_table(console, ["", "", "loss", "apart", "kB a device", "skipped whole"], *rows)
    finish(console, arguments, "data_parallel", runs=runs)


if __name__ == "__main__":
    main()
