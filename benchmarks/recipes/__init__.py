"""The same training step, in the recipes that people use: one file a library, one row here.

A recipe's module is imported when it is asked for: the peers need not be installed, and DeepMind's
`jmp` shares our import name, so it has to run in a process of its own.
"""

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

from benchmarks._names import named
from benchmarks.recipes._training import Training

__all__ = ["RECIPES", "Recipe", "Training", "find"]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A way to train in mixed precision.

    Attributes:
      name: as in `--recipes`.
      title: as in the report.
      training: module and function that make a workload's training step.
      update: the same for an update alone; None where the recipe has no optimizer of its own.
      package: what has to be importable.
      matmul_precision: of float32 products, as in `jax.default_matmul_precision`.
      needs_peers_first: whether `package` hides behind ours unless it comes first.
      needs_cudnn: whether it runs on NVIDIA's GPUs alone, and changes models with attention alone.
    """

    name: str
    title: str
    training: str | None
    update: str | None = None
    package: str | None = None
    matmul_precision: str | None = None
    needs_peers_first: bool = False
    needs_cudnn: bool = False

    def address(self, workload: Any) -> str | None:
        """Returns the module and the function for `workload`; None if there is nothing for it."""
        from benchmarks.workloads import Update

        if isinstance(workload, Update):
            return self.update
        return None if self.needs_cudnn and not workload.has_attention else self.training

    def make(self, workload: Any) -> Training:
        """Returns the functions that train `workload` by this recipe."""
        address = self.address(workload)
        if address is None:
            raise ValueError(f"The recipe {self.name} has nothing for the workload {workload.name}")
        module, _, function = address.partition(":")
        make: Callable[..., Training] = getattr(
            importlib.import_module(f"benchmarks.recipes.{module}"), function
        )
        return make(workload)


RECIPES = (
    Recipe("float32", "float32, exact products", "_training:float32", matmul_precision="highest"),
    Recipe("tf32", "float32, TF32 products", "_training:float32", matmul_precision="tensorfloat32"),
    Recipe(
        "unscaled",
        "by hand, no loss scaling",
        "_training:half_unscaled",
        "_training:unscaled_update",
    ),
    Recipe("by-hand", "by hand, dynamic loss scaling", "by_hand:training", "by_hand:update"),
    Recipe(
        "by-hand-cudnn",
        "by hand, cuDNN attention",
        "by_hand:training_with_cudnn_attention",
        needs_cudnn=True,
    ),
    Recipe(
        "deepmind-jmp",
        "DeepMind's jmp",
        "deepmind_jmp:training",
        "deepmind_jmp:update",
        package="jmp",
        needs_peers_first=True,
    ),
    Recipe("mpx", "mpx", "mpx:training", package="mpx"),
    Recipe("dynamic-scale", "flax DynamicScale", "dynamic_scale:training"),
    Recipe(
        "apply-if-finite",
        "optax.apply_if_finite, static scale",
        "apply_if_finite:training",
        "apply_if_finite:update",
    ),
    Recipe("adapter", "ours: adapter", "ours:adapter", "ours:update"),
    Recipe("autocast", "ours: autocast of the loss", "ours:autocast"),
    Recipe(
        "autocast-fused",
        "ours: autocast of the loss, fused attention",
        "ours:autocast_fused",
        needs_cudnn=True,
    ),
    Recipe("adapter-unscaled", "ours: adapter, no loss scaling", "ours:adapter_unscaled"),
    Recipe("masters", "ours: half parameters, masters", "ours:masters", "ours:masters_update"),
)


def find(name: str) -> Recipe:
    """Returns a recipe by name."""
    return named("recipe", name, RECIPES)
