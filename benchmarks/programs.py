"""Programs for an H200 whose figures stand on pages of the documentation, beside those of recipes.

`python -m benchmarks.run --suite programs` counts them into `results/benchmarks/programs.json`, and
`python -m benchmarks.report` writes the tables of the pages anew. Counted, not timed, without a
GPU. A group is a table; its rows are compiled each in a process of its own.
"""

import contextlib
import dataclasses
import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks._names import named
from benchmarks.processes import ROOT
from testbed.machines import attentions, float8_steps
from testbed.machines.gpus import compile_for_h200, one_gpu
from testbed.machines.training_steps import WAYS, compile_step
from testbed.models import MODELS
from testbed.passes import replaced, without_pass

MODEL_TITLES = {
    "resnet": "ResNet, batch 256, 32 x 32",
    "unet": "U-Net with GroupNorm, batch 64, 64 x 64",
    "gpt": "GPT, 4 layers, width 512, 8 x 512 tokens",
    "scanned_gpt": "the same, scanned with remat",
    "lstm": "LSTM, 2 x 512, 64 x 128 tokens",
    "plain_transformer": "RMSNorm, rotary, SwiGLU in plain JAX, 4 layers",
}
ATTENTIONS = {
    "rotary positions, 8 heads over 2 of the keys, causal and padded": attentions.Llama,
    "BERT's, with a bias of its padding": attentions.Bert,
    "an odd number of patches, no mask": attentions.ViT,
}
FLOAT8_RULES: dict[str, tuple[str, Callable[[], contextlib.AbstractContextManager[None]]]] = {
    "bounds in place of maxima": (
        "2 MLPs 1024-4096 and a head, 8192 tokens",
        lambda: without_pass("float8 bounds"),
    ),
    "a barrier before a shared factor": (
        "GPT, 4 layers of width 512, 8 x 512 tokens",
        lambda: replaced({"float8._passes._shared_factors": lambda _: set()}),
    ),
}
GPT2_SMALL = ["--layers=12", "--width=768", "--heads=12", "--length=1024", "--vocabulary=50257"]


@dataclasses.dataclass(frozen=True)
class Group:
    """A table: `rows` has what counts each of its rows, by the row's title."""

    name: str
    title: str
    rows: dict[str, Callable[[], Any]]


COST = ("bytes_moved", "temp_bytes", "kernels")


def autocast_step(name: str) -> dict[str, Any]:
    """Counts a training step in float32, in float16 by hand, and in float16 by autocast."""
    (model,) = (row for row in MODELS if row.name == name)
    return {way: compile_step(model, way, {}).figures(*COST) for way in WAYS}


def attention(module: Any) -> dict[str, Any]:
    """Counts the gradient of one attention: in float16 by hand, and fused by autocast."""
    x, padding = attentions.X, attentions.PADDING
    params = jax.eval_shape(module().init, jax.random.key(0), x, padding)
    steps = {
        "by hand": attentions.step(module(jnp.float16)),
        "fused": attentions.step(module(), attention="fused"),
    }
    programs = {way: compile_for_h200(step, params, x, padding) for way, step in steps.items()}
    return {way: program.figures(*COST) for way, program in programs.items()}


def float8_step(title: str) -> dict[str, Any]:
    """Counts an SGD step under "mixed_float8" and under "mixed_bfloat16"."""
    loss, *arguments = float8_steps.FULL_SIZES[title]()
    found: dict[str, Any] = {}
    with jax.numpy_rank_promotion("allow"):
        for policy in ("mixed_float8", "mixed_bfloat16"):
            step = float8_steps.step(loss, policy)
            program = compile_for_h200(step, *arguments, donate_argnums=0)
            float8, others = float8_steps.products(program)
            found[policy] = program.figures(*COST) | {"float8": float8, "products": float8 + others}
    return found


def float8_rule(rule: str) -> dict[str, Any]:
    """Counts the float8 step that shows a rule best: with it, without it, and in bfloat16."""
    title, off = FLOAT8_RULES[rule]
    counted = float8_step(title)
    with off():
        counted["without the rule"] = float8_step(title)["mixed_float8"]
    return {"program": title, **counted}


def odd_columns(columns: int) -> dict[str, int]:
    """Counts a float16 product of so many columns."""
    rows, kernel = (jax.ShapeDtypeStruct((4096, n), jnp.float16) for n in (4096, columns))
    return compile_for_h200(jnp.matmul, rows, kernel).figures(*COST)


def gpt2_memory(run: str) -> dict[str, Any]:
    """Counts what a step of GPT-2 small holds: by JAX's count, and by XLA's for an H200."""
    sys.path.insert(0, str(ROOT / "examples"))
    example = importlib.import_module("memory")
    arguments = example.argument_parser().parse_args(GPT2_SMALL)
    (policy,) = (row[1:] for row in example.RUNS if row[0] == run)
    return example.to_dict(example.count(*policy, arguments, sharding=one_gpu()), arguments)


def rows(count: Callable[[Any], Any], names: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """Returns `{title: count of what stands under it}`."""
    return {title: functools.partial(count, given) for title, given in names.items()}


def same(names: Any) -> dict[str, str]:
    return {name: name for name in names}


MEMORY_RUNS = {  # of `examples/memory.py`, and what tables call them
    "float32": "float32",
    "mixed float16": "mixed float16",
    "mixed float16, checkpoint": "the same, blocks under `jax.checkpoint`",
}
GROUPS = (
    Group("autocast", "Training steps by autocast", rows(autocast_step, same(MODEL_TITLES))),
    Group("attention", "One attention, fused", rows(attention, ATTENTIONS)),
    Group("float8", "Steps in float8", rows(float8_step, same(float8_steps.FULL_SIZES))),
    Group("float8-rules", "Rules of float8", rows(float8_rule, same(FLOAT8_RULES))),
    Group("columns", "Columns of a product", rows(odd_columns, {"4096": 4096, "4095": 4095})),
    Group("memory", "GPT-2 124M, 8 x 1024 tokens", rows(gpt2_memory, same(MEMORY_RUNS))),
)


def find(name: str) -> Group:
    return named("group", name, GROUPS)


def counted(group: str, row: str) -> dict[str, Any]:
    """Returns what a row of a group says."""
    return find(group).rows[row]()
