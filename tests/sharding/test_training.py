"""A small GPT in shards: its half gradients are exchanged, and added up in float32."""

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jmp import transforms
from tests.processes import run_two
from tests.sharding import gpt


def assert_near(found, expected, allowed):
    for leaf, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        leaf, other = np.asarray(leaf, np.float64), np.asarray(other, np.float64)
        assert np.linalg.norm(leaf - other) <= allowed * np.linalg.norm(other)


def test_eight_devices_train_as_one_that_adds_up_their_half_gradients_in_float32():
    mesh = gpt.make_mesh(jax.devices())
    params = gpt.placed(mesh, gpt.parameters())
    found = gpt.trained(mesh, params, gpt.optimizer().init(params), range(gpt.STEPS))
    assert_near(found, gpt.without_gathering(), 1e-6)
    assert found[1].loss_scale.loss_scale == 2048.0 and found[1].skipped_steps == 0


@pytest.mark.full
def test_two_processes_train_alike_and_four_devices_continue(tmp_path):
    run_two("tests.sharding.gpt", tmp_path)
    numbers = np.load(tmp_path / "numbers.npz")
    numbers = [numbers[name] for name in numbers.files]
    saved, later = numbers[: len(numbers) // 2], numbers[len(numbers) // 2 :]
    assert_near(saved, gpt.without_gathering()[0], 1e-6)

    mesh = gpt.make_mesh(jax.devices()[:4])
    params = gpt.placed(mesh, gpt.parameters())
    like = {"params": params, "state": gpt.optimizer().init(params)}
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "saved", like)
    assert_near(restored["params"], saved, 0)
    assert restored["params"]["table"].sharding == params["table"].sharding
    more = range(gpt.STEPS, gpt.STEPS + 2)
    params, state = gpt.trained(mesh, restored["params"], restored["state"], more)
    # Four devices round the gradients of twice as many rows.
    assert_near(params, later, 1e-3)
    places = jax.tree.map(lambda leaf: leaf.sharding, state)
    assert places == transforms.state_shardings(gpt.optimizer(), params)
