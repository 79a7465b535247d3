"""Runs random programs in float8: where bfloat16 is right, float8 is near, and nothing is NaN.

The programs are those of `testbed/float8_programs.py`, some of them on two devices. Gradients of
the whole tree are compared with those of float32. Arrays are small, and small products count as
large.
"""

import argparse
import collections
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from rich.console import Console

import jmp
from benchmarks.processes import ROOT
from jmp.autocasting.float8 import _arithmetic
from testbed.float8_programs import program
from testbed.relative_errors import numbers, relative_error
from testbed.small_products import small_is_float8

Array = Any

# Errors of the gradient: where bfloat16's is below the first, float8's is below the second.
RIGHT, NEAR = 0.02, 0.3
# But for programs that enlarge every rounding, as one with a steep function behind products of
# products: float8_e4m3 has five bits fewer than bfloat16, with a maximum as with a bound. And it is
# float8 itself that is far where the float32 program is nearly as far once its input and its
# matrices are rounded to e4m3, and nothing else is.
ROUNDOFFS, NEARLY = 2.0**5, 3.0
BEYOND = "enlarges roundings"
WAYS = ("whole", "jit inside", "two devices, checked", "whole", "jit inside", "two devices")
POLICIES = (*["mixed_float8"] * 4, "mixed_float8,r=f32")
FLOAT8 = (*["weights"] * 6, "all")
AT_ONCE = 100  # programs of one process: what they compiled is not given back


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="the number of the first program")


def run(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for start in range(arguments.first, arguments.first + arguments.programs, AT_ONCE):
        end = min(start + AT_ONCE, arguments.first + arguments.programs)
        rows += _in_a_process(start, end)
        counts = collections.Counter(row["verdict"] for row in rows)
        console.print(f"{len(rows)} programs: {dict(counts)}")
    faults = [row for row in rows if row["verdict"] not in ("near", BEYOND)]
    return {
        "passed": not faults,
        "first": arguments.first,
        "programs": len(rows),
        "float8_products": sum(row.get("float8_products", 0) for row in rows),
        "bounded_products": sum(row.get("bounded_products", 0) for row in rows),
        "verdicts": dict(collections.Counter(row["verdict"] for row in rows)),
        "faults": faults,
    }


def _in_a_process(start: int, end: int) -> list[dict[str, Any]]:
    flags = "--xla_force_host_platform_device_count=2"
    if version("jaxlib").startswith("0.10."):  # as in conftest.py: what is compiled runs once
        flags += " --xla_cpu_use_fusion_emitters=false"
    environment = dict(
        os.environ,
        JAX_PLATFORMS="cpu",
        XLA_FLAGS=f"{flags} --xla_cpu_parallel_codegen_split_count=1",
        JAX_DISABLE_MOST_OPTIMIZATIONS="1",
    )
    of_these = f"from benchmarks.soak import float8_programs as f; f.main({start}, {end})"
    command = [sys.executable, "-c", of_these]
    ended = subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE)
    return json.loads(ended.stdout)


def on_devices(loss: Callable[..., Array], check_vma: bool, gathers: bool) -> Callable[..., Any]:
    """Returns a loss over two devices, given how autocast is applied to what each computes.

    They hold the parameters whole, or in halves, which are gathered.
    """
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def of_shards(ws: Sequence[Array], x: Array) -> Array:
        return loss([lax.all_gather(w, "d", tiled=True) if gathers else w for w in ws], x)

    def mapped(autocast: Callable[..., Any]) -> Callable[..., Array]:
        return jax.shard_map(
            lambda ws, x: lax.pmean(autocast(of_shards)(ws, x), "d"),
            mesh=mesh,
            in_specs=(P("d") if gathers else P(), P("d")),
            out_specs=P(),
            check_vma=check_vma,
        )

    return mapped


def compare(number: int) -> dict[str, Any]:
    """Returns the errors of a program's gradient in bfloat16 and in float8, and what they say."""
    loss, params, x, names = program(number)
    way = WAYS[number % len(WAYS)]
    if way == "jit inside":
        around = lambda autocast: jax.jit(autocast(loss))
    elif way == "whole":
        around = lambda autocast: autocast(loss)
    else:
        turn = number // len(WAYS)
        around = on_devices(loss, way == "two devices, checked", gathers=turn % 2 == 1)
        x = np.concatenate([x, 2 * x[::-1]])  # its scales differ
    policy, options = POLICIES[number % len(POLICIES)], {"float8": FLOAT8[number % len(FLOAT8)]}
    forms = []

    def multiply(operands: Any, held: Any, params: Any, form: Any, bounds: Any) -> Any:
        forms.append(form)
        return multiplied(operands, held, params, form, bounds)

    def gradient(policy: str | None, rounds: Callable[[Any], Any] = lambda x: x) -> np.ndarray:
        given = around(lambda f: jmp.autocast(f, policy, **options) if policy else f)
        return numbers(jax.jit(jax.grad(given))([*map(rounds, params)], rounds(x)))

    exact = gradient(None)
    error = lambda got: relative_error(got, exact)
    multiplied = _arithmetic.multiply
    with mock.patch.object(_arithmetic, "multiply", multiply):
        float8 = error(gradient(policy))
    found = "near"
    if not float8 < NEAR:  # or it does not matter what bfloat16 does
        found = verdict(error(gradient("mixed_bfloat16")), float8, error(gradient(None, in_e4m3)))
    return {
        "number": number,
        "way": [way, policy, options["float8"]],
        "verdict": found,
        "error": float8,
        "float8_products": len(forms),
        "bounded_products": sum(form.is_bounded for form in forms),
        "steps": names,
    }


def in_e4m3(array: np.ndarray) -> Array:
    """Returns a matrix rounded to float8_e4m3, with its largest number at the end of the range."""
    if array.ndim < 2:
        return array
    scale = np.abs(array).max() / 448
    return jnp.asarray(array / scale).astype(jnp.float8_e4m3fn).astype(jnp.float32) * scale


def verdict(bfloat16: float, float8: float, rounded: float) -> str:
    """Returns what the errors say if float8's is large; `rounded` is of rounded inputs."""
    if not np.isfinite(float8) and np.isfinite(bfloat16):
        return "not finite"
    is_far = bfloat16 < RIGHT and float8 > max(ROUNDOFFS * bfloat16, NEARLY * rounded)
    return "far" if is_far else BEYOND


def main(first: int, end: int) -> None:
    rows = []
    for number in range(first, end):
        try:
            with small_is_float8(), jax.numpy_rank_promotion("allow"):
                rows.append(compare(number))
        except Exception as error:  # a finding: the others run on
            rows.append({"number": number, "verdict": "raised", "why": repr(error)[:300]})
    print(json.dumps(rows))
