"""Training steps compiled for GPUs and TPUs that nobody here has, each in several ways.

    make targets    # an environment with the compiler for TPUs
    python -m benchmarks.run --suite targets --only gpt lstm --machines b200 v5e

Counted, not timed: bytes, memory, kernels of a GPU, and the cycles that XLA estimates for a TPU. A
row is a model, an update of an optimizer, or a model on eight TPUs; its jobs are programs, which
are compiled each in a process of its own, those for TPUs by the interpreter that the environment
variable `JMP_TPU_PYTHON` names, else by that of `.venv-targets`; and those of families also by a
second compiler, that of the newest JAX (`JMP_NEWEST_PYTHON`, else `.venv-jax-0.12`).
"""

import dataclasses
import functools
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import jmp
from benchmarks import wire
from benchmarks._names import named
from benchmarks.models import ViT
from benchmarks.processes import ROOT
from benchmarks.recipes import by_hand
from benchmarks.recipes._training import update_of
from benchmarks.workloads import UPDATES, Update
from jmp import transforms
from testbed.decoding import LOOPS, SMALL, Decoder
from testbed.machines.gpus import GPUS
from testbed.machines.tpus import TPUS, TpuProgram, compile_placed_for_tpus
from testbed.machines.training_steps import compile_for, compile_step
from testbed.machines.wire import v5es
from testbed.models import MODELS, Model, gru, linen_model

MACHINES = (*GPUS, *TPUS)
GPU_HALVES = ("float16", "bfloat16")
TPU_HALVES = ("bfloat16",)  # no TPU multiplies float16
BASE = "by hand"


@dataclasses.dataclass(frozen=True)
class Job:
    """One program; `name` is its key in the results.

    `newest` programs are made by the compiler of the newest JAX, to compare the two.
    """

    machine: str
    half: str
    way: str
    newest: bool = False

    @property
    def name(self) -> str:
        return f"{self.machine} {self.half} {self.way}" + self.newest * " newest"

    @property
    def is_of_tpu(self) -> bool:
        return self.machine in TPUS


@dataclasses.dataclass(frozen=True)
class Row:
    """What is compiled for every machine.

    Attributes:
      name, title: as in `--only`, and as on the page.
      program: returns the compiled program of a job; at a small size if so asked.
      ways: those it is written in.
      machines: those it is compiled for.
    """

    name: str
    title: str
    program: Callable[[Job, bool], Any]
    ways: tuple[str, ...] = ("float32", BASE, "autocast")
    machines: tuple[str, ...] = MACHINES

    def jobs(self) -> Iterator[Job]:
        for machine in self.machines:
            halves = TPU_HALVES if machine in TPUS else GPU_HALVES
            for way in self.ways:
                # A step in float32 has no half dtype: one program for all.
                for half in ("float32",) if way == "float32" else halves:
                    yield Job(machine, half, way)


# Models.

WITH_ATTENTION = ("float32", BASE, "autocast", "fused")


def vit(dtype: Any = jnp.float32, batch: int = 64, size: int = 224, **sizes: Any) -> Any:
    """ViT-B/16's layers, of width 512: 197 tokens, which is no multiple of eight."""
    images = jax.random.normal(jax.random.key(1), (batch, size, size, 3))
    labels = jax.random.randint(jax.random.key(2), (batch,), 0, 1000)
    return linen_model(ViT(dtype, **sizes), images, labels)


TINY = {"batch": 4, "length": 256, "layers": 2, "width": 256, "vocabulary": 1024}


def _model(
    name: str,
    title: str,
    ways: tuple[str, ...] = ("float32", BASE, "autocast"),
    sizes: dict[str, Any] | None = None,
    small: dict[str, Any] | None = None,
    model: Model | None = None,
    machines: tuple[str, ...] = MACHINES,
) -> Row:
    if model is None:
        (model,) = (row for row in MODELS if row.name == name)

    def program(job: Job, is_small: bool) -> Any:
        chosen = (small if small is not None else model.small) if is_small else sizes or {}
        if job.is_of_tpu and not is_small and "layers" in chosen:
            chosen = chosen | {"layers": 1}  # two that are not scanned compile for 75 CPU seconds
        options = {"attention": "fused"} if job.way == "fused" else {}
        way = "autocast" if job.way == "fused" else job.way
        half = "float16" if job.half == "float32" else job.half
        return compile_step(model, way, chosen, job.machine, half, **options)

    return Row(name, title, program, ways, machines)


# An update.


def adam(job: Job, is_small: bool) -> Any:
    """Half parameters, float32 masters, dynamic loss scaling: 60 tensors at full size."""
    half = getattr(jnp, job.half)
    update = dataclasses.replace(UPDATES[0], shapes=UPDATES[0].shapes[:: 20 if is_small else 1])
    make = _adam_by_hand if job.way == BASE else _adam_of_jmp
    step, state = make(update, half)
    arrays = [jax.ShapeDtypeStruct(shape, half) for shape in update.shapes]
    return compile_for(job.machine, step, arrays, state, arrays, donate_argnums=(0, 1))


def _adam_by_hand(update: Update, half: Any) -> tuple[Any, Any]:
    training = by_hand.update(update)

    def step(params: Any, state: Any, gradients: Any) -> Any:
        state, _ = training.step(state, gradients)  # the masters are its parameters
        return [master.astype(half) for master in state.params], state

    return step, jax.eval_shape(training.init, jax.random.key(0))


def _adam_of_jmp(update: Update, half: Any) -> tuple[Any, Any]:
    policy = jmp.Policy(half, half, jnp.float32)
    tx = transforms.mixed_precision(update.optimizer, policy, jmp.torch_loss_scale())
    params = [jax.ShapeDtypeStruct(shape, half) for shape in update.shapes]
    return update_of(tx), jax.eval_shape(tx.init, params)


SPLIT, STOCHASTIC = transforms.with_split_masters, transforms.with_stochastic_rounding
STATE_IN = transforms.with_stored_state
STORED = {
    "split": SPLIT,
    "split-scaled": lambda tx: transforms.with_loss_scale(SPLIT(tx), jmp.torch_loss_scale()),
    "stochastic": STOCHASTIC,
    "split-bfloat16": lambda tx: SPLIT(STATE_IN(tx, "bfloat16")),
    "stochastic-float8": lambda tx: STOCHASTIC(STATE_IN(tx, "float8_e4m3fn")),
    "stochastic-int8": lambda tx: STOCHASTIC(STATE_IN(tx, "int8")),
}


SMALL_PART = 20  # of the tensors each twentieth, at small size: two matrices and a vector


def small_adam(name: str, job: Job, is_small: bool) -> Any:
    """Half parameters with small states and bfloat16 gradients, checked only if they are scaled."""
    shapes = UPDATES[0].shapes[:: SMALL_PART if is_small else 1]
    params = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    tx = STORED[name](UPDATES[0].optimizer)
    state, step = jax.eval_shape(tx.init, params), update_of(tx)
    return compile_for(job.machine, step, params, state, params, donate_argnums=(0, 1))


# Generation.


def decode(loop: str, cache: str, job: Job, is_small: bool) -> Any:
    """Greedy generation: 32 sequences of 1024 tokens, two layers of width 1024."""
    half = getattr(jnp, job.half)
    decoder = Decoder(half if job.way == BASE else jnp.float32, loop, cache)
    if is_small:
        decoder = dataclasses.replace(decoder, **SMALL)
    function: Any = decoder
    if job.way == "autocast":
        platform = "tpu" if job.is_of_tpu else "gpu"
        function = jmp.autocast(decoder, f"mixed_{job.half}", platform=platform)
    return compile_for(job.machine, function, *decoder.arguments())


# Eight TPUs.


def _variant(row: wire.Variant) -> wire.Variant:
    policy = row.policy and row.policy.replace("float16", "bfloat16")
    return dataclasses.replace(row, policy=policy, dtype=jnp.bfloat16, platform="tpu")


VARIANTS = {row.title: _variant(row) for row in wire.VARIANTS}
BY_HAND_ON_TPUS = wire.BY_HAND.title


def _eight(name: str, title: str, places: Any) -> Row:
    def program(job: Job, is_small: bool) -> TpuProgram:
        mesh_of = functools.partial(v5es, {wire.DATA: 8})
        step = wire.language_model(mesh_of, places, VARIANTS[job.way], is_small)
        return compile_placed_for_tpus(step.function, *step.arguments, **step.options)

    return Row(name, title, program, tuple(VARIANTS), ("v5e",))


GENERATION = {
    "filled": "a cache that fills",
    "window": "a sliding window",
    "beams": "beams",
    "pages": "pages",
    "stacked": "layers by a scan",
}
VIT_SMALL = {"batch": 2, "size": 32, "layers": 1, "width": 64, "heads": 1}
TWO_LAYERS = {"layers": 2}
GRU_SMALL = {"batch": 8, "length": 16, "width": 64, "vocabulary": 64}
ODD_ROWS = {"batch": 8, "length": 509, "width": 512}
MODEL_ROWS = (
    _model("gpt", "GPT, Flax", WITH_ATTENTION, TWO_LAYERS, TINY),
    _model("scanned_gpt", "GPT, Flax, scanned", WITH_ATTENTION, {}, TINY),
    _model("checkpointed_gpt", "GPT, plain JAX, scanned", WITH_ATTENTION, {}, TINY),
    _model("plain_transformer", "RMSNorm, SwiGLU", WITH_ATTENTION, TWO_LAYERS, TINY),
    _model(
        "vit",
        "ViT, Flax",
        WITH_ATTENTION,
        {"layers": 2, "width": 512, "heads": 8},
        VIT_SMALL,
        Model("vit", vit, VIT_SMALL),
    ),
    _model("resnet", "ResNet"),
    _model("unet", "U-Net, GroupNorm", small={"batch": 8, "size": 16, "widths": (16, 32)}),
    _model("lstm", "LSTM"),
    _model("gru", "GRU", small=GRU_SMALL, model=Model("gru", gru, GRU_SMALL)),
    _model("equinox_attention", "Attention, Equinox", sizes=ODD_ROWS, machines=GPUS),
)
ADAM = Row("adam", "Adam with float32 masters", adam, (BASE, "ours"))
SMALL_UPDATE_ROWS = tuple(
    Row(f"adam-{name}", f"Adam, {name}", functools.partial(small_adam, name), ("ours",), ("v5e",))
    for name in STORED
)
GENERATION_ROWS = tuple(
    Row(f"decode-{loop}-{cache}", f"{title}, {loop}", functools.partial(decode, loop, cache))
    for cache, title in GENERATION.items()
    for loop in (LOOPS if cache == "filled" else LOOPS[:1])
)
WIRE_ROWS = (
    _eight("tpu-dp", "data parallel", wire.REPLICATED),
    _eight("tpu-fsdp", "FSDP", wire.FSDP),
)
ROWS = (*MODEL_ROWS, ADAM, *GENERATION_ROWS)
GATED_ROWS = (*SMALL_UPDATE_ROWS, *WIRE_ROWS)  # only tests compile them


def find(name: str) -> Row:
    return named("row", name, (*ROWS, *GATED_ROWS))


def counted(row_name: str, small: bool, **of_job: Any) -> dict[str, Any]:
    """Returns what the results say of one program."""
    row, job = find(row_name), Job(**of_job)
    jax.clear_caches()  # of the programs before in this process
    program = row.program(job, small)
    found = {
        "bytes_moved": program.bytes_moved,
        "temp_bytes": program.temp_bytes,
        "compile_seconds": round(program.compile_seconds, 2),
        "loops_of_unknown_turns": program.loops_of_unknown_turns,
    }
    if not isinstance(program, TpuProgram):
        return found | {"kernels": program.kernels}
    found |= {"cycles": program.cycles, "libtpu": importlib.metadata.version("libtpu")}
    return found | ({"received": wire.received_of(program.text)} if row in WIRE_ROWS else {})


def python_of(job: Job) -> str | None:
    """Returns the interpreter that has the compiler for a job; None where there is none."""
    if job.newest:
        return _python("JMP_NEWEST_PYTHON", ".venv-jax-0.12")
    return tpu_python() if job.is_of_tpu else sys.executable


def tpu_python() -> str | None:
    """Returns the interpreter that compiles for TPUs; None where there is none."""
    here = sys.executable if importlib.util.find_spec("libtpu") else None
    return _python("JMP_TPU_PYTHON", ".venv-targets") or here


def _python(variable: str, folder: str) -> str | None:
    made = ROOT / folder / "bin" / "python"
    return os.environ.get(variable) or (str(made) if made.exists() else None)
