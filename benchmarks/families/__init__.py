"""Families of models that no rule was tuned on: a step under autocast over the same text by hand.

    python -m benchmarks.run --suite families --only gru physics

Each was written for this, from descriptions. A step is the loss and the gradients of float32
parameters. Counted for devices that nobody here has, without any: bytes, temporary memory and
kernels; told of H200 programs of two layers: CPU seconds of XLA and seconds of tracing; computed on
a CPU, at a small size: how far the gradients are from those in float64.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jmp
from benchmarks._names import named
from benchmarks.families import _others, _sequences  # noqa: F401 (they register)
from benchmarks.families._layers import FAMILIES, Family, Net
from benchmarks.targets import BASE, Job
from testbed.machines.tpus import TPUS
from testbed.machines.training_steps import compile_for
from testbed.passes import replaced
from testbed.relative_errors import numbers, relative_error

DEPTHS = (2, 6, 12)
TIMED = 2  # layers of the programs whose compile and trace times are told
OTHERS = (("b200", "bfloat16"), ("v5e", "bfloat16"))  # beside an H200 in float16
OTHERS_DEPTH = 6
TPU_FAMILIES = ("message-passing", "clip", "physics", "forces", "gru", "mixer", "convnext", "t5", "rwkv", "dlrm", "graph-attention", "crossed")  # fmt: skip  # noqa: E501
MOST_BYTES, MOST_TEMP = 1.03, 1.05  # over by hand: what a plan may take
ERRORS = "gradient error"
SEEDS = 20  # nine of ten ratios of Mamba: of five 0.82 to 1.14, of 20 0.89 to 1.06
SCALE = 2.0**10  # a loss scale: without one float16's small gradients are lost in both
COUNTED = ("bytes_moved", "temp_bytes", "kernels", "cycles")


def find(name: str) -> Family:
    return named("family", name, FAMILIES)


def jobs(family: Family) -> Iterator[Job]:
    """Yields what is counted of a family; each job has the step by hand and under autocast."""
    for layers in DEPTHS:
        yield Job("h200", "float16", f"{layers} layers")
    for machine, half in OTHERS:
        if machine not in TPUS or family.name in TPU_FAMILIES:
            yield Job(machine, half, f"{OTHERS_DEPTH} layers")
    yield Job("h200", "bfloat16", f"{OTHERS_DEPTH} layers", newest=True)
    for half in ("float16", "bfloat16"):
        yield Job("h200", half, ERRORS)


def loss_of(family: Family, dtype: Any, layers: int, sizes: dict[str, int]) -> Callable[..., Any]:
    """Returns `loss(params, *inputs)` of a family in a dtype."""

    def loss(params: Any, *inputs: Any) -> Any:
        return family.loss(Net(dtype, layers, params, **sizes), *inputs)

    return loss


def drawn(family: Family, layers: int, sizes: dict[str, int], seed: int = 0) -> tuple[Any, Any]:
    """Returns parameters and inputs."""
    key = jax.random.key(seed)
    inputs = []
    for place, text in enumerate(family.inputs):
        *letters, last = text.split()
        below = sizes.get(last[1:]) if last.startswith("<") else None
        letters += [] if below else [last]
        shape = [sizes.get(letter) or int(letter) for letter in letters]
        own = jax.random.fold_in(key, place)
        draw = jax.random.randint(own, shape, 0, below) if below else jax.random.normal(own, shape)
        inputs.append(draw)
    net = Net(jnp.float32, layers, **sizes)
    jax.eval_shape(lambda *given: family.loss(net, *given), *inputs)
    keys = jax.random.split(jax.random.fold_in(key, len(inputs)), len(net.weights))
    return [weight.draw(own) for weight, own in zip(net.weights, keys, strict=True)], inputs


def step_of(
    family: Family, way: str, half: str, layers: int, sizes: dict[str, int], platform: str = "gpu"
) -> Callable[..., Any]:
    """Returns loss and gradients, scaled, as `BASE`, "autocast", or in a dtype that `way` names."""
    dtype = half if way == BASE else "float32" if way == "autocast" else way
    loss = loss_of(family, jnp.dtype(dtype), layers, sizes)
    if way == "autocast":
        loss = jmp.autocast(loss, f"mixed_{half}", platform=platform)
    return jax.value_and_grad(lambda params, *inputs: SCALE * loss(params, *inputs))


def counted(row_name: str, small: bool, **of_job: Any) -> dict[str, Any]:
    """Returns what the results say of one job: of the step by hand, and of that of autocast."""
    family, job = find(row_name), Job(**of_job)
    if job.way == ERRORS:
        return errors(family, job.half, SEEDS)
    layers = int(job.way.split()[0])
    sizes = family.small if small else family.sizes
    params, inputs = jax.eval_shape(lambda: drawn(family, layers, sizes))
    platform = "tpu" if job.is_of_tpu else "gpu"
    is_timed = layers == TIMED and (job.machine, job.half) == ("h200", "float16")
    found: dict[str, dict[str, Any]] = {BASE: {}, "autocast": {}}
    for _ in range(3 if is_timed else 1):
        for way, figures in found.items():
            step = step_of(family, way, job.half, layers, sizes, platform)
            seconds = {}
            if is_timed:
                jax.clear_caches()
                begun = time.process_time()
                jax.jit(step).trace(params, *inputs)
                seconds["trace_seconds"] = time.process_time() - begun
            jax.clear_caches()
            program = compile_for(job.machine, step, params, *inputs)
            if is_timed:
                seconds["compile_seconds"] = program.compile_seconds
            figures |= {key: getattr(program, key) for key in COUNTED if hasattr(program, key)}
            figures |= {key: round(min(figures.get(key, s), s), 3) for key, s in seconds.items()}
    if job.newest or job.is_of_tpu:
        found["versions"] = {"jaxlib": jax.lib.__version__}
    return found


def errors(family: Family, half: str, seeds: int, layers: int = 2) -> dict[str, Any]:
    """Returns how far the gradients are from those in float64, in norms: the median of seeds.

    All roundings that a program asks for are made. The small sizes are planned as the full ones.
    """
    found: dict[str, list[float]] = {BASE: [], "autocast": []}
    options = {"xla_allow_excess_precision": False}
    steps = {
        way: jax.jit(step_of(family, way, half, layers, family.small), compiler_options=options)
        for way in (*found, "float64")
    }
    for seed in range(seeds):
        arguments = drawn(family, layers, family.small, seed)
        wide = jax.tree.map(
            lambda x: np.asarray(x, np.float64 if jnp.issubdtype(x.dtype, jnp.floating) else None),
            arguments,
        )
        gradients = {}
        for way, step in steps.items():
            with jax.enable_x64(way == "float64"), replaced({"_islands.SMALL": 1}):
                params, inputs = wide if way == "float64" else arguments
                gradients[way] = numbers(step(params, *inputs)[1])
        exact = gradients.pop("float64")
        for way, gradient in gradients.items():
            found[way].append(relative_error(gradient, exact))
    return {way: {"error": statistics.median(listed)} for way, listed in found.items()}
