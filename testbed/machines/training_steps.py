"""A training step of a model, three ways: float32, half by hand, and float32 under autocast."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jmp
from testbed.machines.gpus import Program, compile_for_gpu
from testbed.machines.tpus import TPUS, TpuProgram, compile_for_tpu

WAYS = ("float32", "by hand", "autocast")


def compile_for(
    machine: str,
    function: Callable[..., Any],
    *arguments: Any,
    donate_argnums: int | tuple[int, ...] = (),
) -> Program | TpuProgram:
    """Compiles a function for a GPU or a TPU."""
    compile_for_it = compile_for_tpu if machine in TPUS else compile_for_gpu
    return compile_for_it(machine, function, *arguments, donate_argnums=donate_argnums)


def make_step(model, way, sizes, half="float16", **options):
    """Returns gradient and update of one step, in `half` but for `float32`, and its arguments.

    `options` are autocast's.

    Raises:
      ValueError: for a way that is not one of `WAYS`.
    """
    if way not in WAYS:
        raise ValueError(f"make_step got the way {way!r}; expected one of {', '.join(WAYS)}.")
    dtype = getattr(jnp, half) if way == "by hand" else jnp.float32
    make = functools.partial(model.make, dtype, **sizes)
    # Shapes are all that is needed: nothing is initialised.
    params, batch = jax.eval_shape(lambda: make()[1:])

    def step(params, *batch):
        loss, _, _ = make()  # made here, since a loss may close over arrays, as running statistics
        if way == "autocast":
            loss = jmp.autocast(loss, f"mixed_{half}", **options)
        gradients = jax.grad(loss, has_aux=model.has_aux)(params, *batch)
        gradients, statistics = gradients if model.has_aux else (gradients, None)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), statistics

    return step, (params, *batch)


def compile_step(
    model, way, sizes, target="h200", half="float16", **options
) -> Program | TpuProgram:
    """Compiles a step for a GPU or a TPU; autocast is told which of them."""
    options = {"platform": "tpu" if target in TPUS else "gpu", **options}
    step, arguments = make_step(model, way, sizes, half, **options)
    return compile_for(target, step, *arguments, donate_argnums=0)


def ratios(program: Program, by_hand: Program) -> tuple[float, float, float]:
    """Returns bytes moved, temporary memory and kernels, each over those of the other program."""
    return (
        program.bytes_moved / by_hand.bytes_moved,
        program.temp_bytes / by_hand.temp_bytes,
        program.kernels / by_hand.kernels,
    )
