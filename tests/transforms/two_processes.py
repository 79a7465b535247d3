"""One of two processes, of four CPU devices each, that train three steps and save by Orbax.

Then the gradients of one process overflow: both skip.

JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=4
python -m tests.transforms.two_processes PROCESS PORT FOLDER, with a PROCESS of 0 and 1.
"""

import pathlib
import sys

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp
from jmp import transforms

KERNEL = np.arange(128, dtype=np.float16).reshape(16, 8) / 64
SHAPES = {"kernel": ((16, 8), np.float16), "bias": ((8,), np.float32)}
SPECS = {"kernel": P("data"), "bias": P()}


def optimizer():
    masters = transforms.with_master_params(optax.adam(1e-2))
    return transforms.with_loss_scale(masters, jmp.DynamicLossScale(16.0, period=2))


def small_optimizer():
    """Half parameters without masters, and a momentum in one byte: exact, but for rounding."""
    inner = optax.chain(optax.trace(0.5), optax.scale(-(2.0**-6)))
    return transforms.with_stochastic_rounding(transforms.with_stored_state(inner, "int8", seed=1))


def step(params, state, tx=None):
    gradients = params  # whatever they are
    updates, state = (tx or optimizer()).update(gradients, state, params)
    return optax.apply_updates(params, updates), state


def three_small_steps(params):
    state = small_optimizer().init(params)
    run = jax.jit(lambda params, state: step(params, state, small_optimizer()))
    for _ in range(3):
        params, state = run(params, state)
    assert run._cache_size() == 1
    return {"params": params, "state": state}


def check_both_skip(params, state, process):
    """Gradients with an infinity only on the second process: neither moves, both scales halve."""
    rows = KERNEL.copy()
    rows[12] = np.inf
    place = params["kernel"].sharding
    bad = jax.make_array_from_callback(rows.shape, place, rows.__getitem__)
    is_finite = all(np.isfinite(shard.data).all() for shard in bad.addressable_shards)
    assert is_finite == (process == 0)
    updates, after = jax.jit(optimizer().update)({**params, "kernel": bad}, state, params)
    for leaf in jax.tree.leaves(updates):
        assert all((shard.data == 0).all() for shard in leaf.addressable_shards)
    assert after.loss_scale.loss_scale.addressable_data(0) == 16
    assert after.skipped_steps.addressable_data(0) == 1
    for old, new in zip(*map(jax.tree.leaves, (state.inner_state, after.inner_state)), strict=True):
        for before, now in zip(old.addressable_shards, new.addressable_shards, strict=True):
            np.testing.assert_array_equal(before.data, now.data)


def main(process, port, folder):
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(process))
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    whole = {"kernel": KERNEL, "bias": np.ones(8, np.float32)}
    params = {
        name: jax.make_array_from_callback(
            leaf.shape, NamedSharding(mesh, SPECS[name]), leaf.__getitem__
        )
        for name, leaf in whole.items()
    }
    small = three_small_steps(params)
    state = optimizer().init(params)
    under_jit = jax.jit(optimizer().init)(params)
    for of_jit, leaf in zip(*map(jax.tree.leaves, (under_jit, state)), strict=True):
        assert of_jit.sharding == leaf.sharding, (of_jit.sharding, leaf.sharding)
        assert len(leaf.sharding.device_set) == 8
    train = jax.jit(step)
    for _ in range(3):
        params, state = train(params, state)
    assert train._cache_size() == 1

    saved = {"params": params, "state": state}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(pathlib.Path(folder) / "saved", saved)
        checkpointer.wait_until_finished()
        checkpointer.save(pathlib.Path(folder) / "small", small)
        checkpointer.wait_until_finished()
    check_both_skip(params, state, int(process))
    numbers = multihost_utils.process_allgather(saved, tiled=True)
    if process == "0":
        np.savez(pathlib.Path(folder) / "numbers.npz", *jax.tree.leaves(numbers))


if __name__ == "__main__":
    main(*sys.argv[1:])
