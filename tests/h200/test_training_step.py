"""Training steps of GPT-2, compiled for an H200: ours against the same step by hand.

Three layers, which compile in seconds. All twelve, the other workloads and the other libraries are
counted by `benchmarks/run.py --suite compiled`.
"""

import dataclasses

import jax
import pytest

from benchmarks.models import GPT2
from benchmarks.recipes import RECIPES
from benchmarks.workloads import find


@pytest.fixture(scope="module")
def gpt2(h200):
    workload = dataclasses.replace(
        find("gpt2", rehearse=False), module=lambda dtype: GPT2(dtype, layers=3)
    )

    def compiled(name):
        (recipe,) = (row for row in RECIPES if row.name == name)
        training = recipe.make(workload)
        key = jax.random.key(0)
        arguments = (jax.eval_shape(training.init, key), jax.eval_shape(workload.batch, key))
        return h200(training.step, *arguments, donate_argnums=0)

    with jax.numpy_rank_promotion("allow"):
        names = ("by-hand", "adapter", "adapter-unscaled", "autocast")
        programs = {name: compiled(name) for name in names}
    for name, program in programs.items():
        print(
            f"\n{name}: {program.bytes_moved / 1e9:.3f} GB, {program.kernels} kernels, "
            f"{program.temp_bytes / 1e9:.3f} GB temp"
        )
    return programs


@pytest.mark.parametrize(("name", "at_most"), [("adapter", 1.005), ("autocast", 1.02)])
def test_a_step_is_as_lean_as_by_hand(gpt2, name, at_most):
    ours, by_hand = gpt2[name], gpt2["by-hand"]
    assert ours.bytes_moved <= at_most * by_hand.bytes_moved
    assert ours.kernels <= at_most * by_hand.kernels
    assert ours.temp_bytes <= at_most * by_hand.temp_bytes


def test_loss_scaling_adds_few_kernels_and_no_byte_that_the_check_by_tensor_does_not(gpt2):
    # 20 are added here, 33 with all twelve layers; one for each tensor would be 40.
    assert gpt2["adapter"].kernels <= gpt2["adapter-unscaled"].kernels + 25
    assert gpt2["adapter"].bytes_moved <= gpt2["by-hand"].bytes_moved
    assert gpt2["adapter"].conditionals == 0
