"""Two processes of four CPU devices each train, skip a step together, and save what one restores.

As a program it is one of them: python -m tests.transforms.test_two_processes PROCESS PORT FOLDER
"""

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp
from jmp import transforms
from tests.bits import bits
from tests.processes import run_two

# All of it exact but for the rounding of parameters, so that no order of operations shows.
INNER = optax.chain(optax.trace(0.5), optax.scale(-(2.0**-6)))
PARAMS = {"kernel": np.arange(128, dtype=np.float16).reshape(16, 8) / 64, "bias": np.ones(8, "f4")}
SPECS = {"kernel": P("data"), "bias": P()}


def trained(params):
    """Takes three steps, and skips one: row 12, of the second process, overflows."""
    tx = transforms.mixed_precision(INNER, "O2", jmp.DynamicLossScale(16.0, period=2))

    @jax.jit
    def step(params, state, factor):
        gradients = {**params, "kernel": params["kernel"] * factor}
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for bad in (False, False, False, True):
        factor = np.where(bad & (np.arange(16) == 12), np.inf, 1)[:, None].astype(np.float16)
        params, state = step(params, state, factor)
    assert step._cache_size() == 1
    return {"params": params, "state": state}


@pytest.mark.full
def test_two_processes_skip_together_and_save_what_one_restores(tmp_path):
    run_two("tests.transforms.test_two_processes", tmp_path)
    expected = trained(jax.tree.map(jnp.asarray, PARAMS))
    with ocp.StandardCheckpointer() as checkpointer:
        found = checkpointer.restore(tmp_path / "saved", expected)
    assert bits(found) == bits(expected)
    assert found["state"].loss_scale.loss_scale == 16.0 and found["state"].skipped_steps == 1


def main(process, port, folder):
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(process))
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    placed = lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec))
    with ocp.StandardCheckpointer() as checkpointer:
        saved = trained(jax.tree.map(placed, PARAMS, SPECS))
        checkpointer.save(pathlib.Path(folder) / "saved", saved)
        checkpointer.wait_until_finished()


if __name__ == "__main__":
    main(*sys.argv[1:])
