"""A training step of a model, three ways: float32, half by hand, and float32 under autocast."""

import functools

import jax
import jax.numpy as jnp

import jmp
from testbed.machines.gpus import Program, compile_for_h200

WAYS = ("float32", "by hand", "autocast")


def make_step(model, way, sizes):
    """Returns gradient and update of one step, in float16 but for `float32`, and its arguments."""
    make = functools.partial(model.make, jnp.float16 if way == "by hand" else jnp.float32, **sizes)
    # Shapes are all that is needed: nothing is initialised.
    params, batch = jax.eval_shape(lambda: make()[1:])

    def step(params, *batch):
        loss, _, _ = make()  # made here, since a loss may close over arrays, as running statistics
        if way == "autocast":
            loss = jmp.autocast(loss, "mixed_float16")
        gradients = jax.grad(loss, has_aux=model.has_aux)(params, *batch)
        gradients, statistics = gradients if model.has_aux else (gradients, None)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), statistics

    return step, (params, *batch)


def compile_step(model, way, sizes) -> Program:
    """Compiles a step for an H200."""
    step, arguments = make_step(model, way, sizes)
    return compile_for_h200(step, *arguments, donate_argnums=0)


def ratios(program: Program, by_hand: Program) -> tuple[float, float, float]:
    """Returns bytes moved, temporary memory and kernels, each over those of the other program."""
    return (
        program.bytes_moved / by_hand.bytes_moved,
        program.temp_bytes / by_hand.temp_bytes,
        program.kernels / by_hand.kernels,
    )
