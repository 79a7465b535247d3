"""Runs random programs in float8: where bfloat16 is right, float8 is near, and nothing is NaN.

A program is a chain of random steps between products: what moves numbers (reshapes, slices, copies,
jits), biases, functions, gates, and blocks that hold a chain of their own (remat, scan, vmap, a
branch, two devices). Gradients of the whole tree are compared with those of float32. Arrays are
small, and small products count as large. Programs are numbered: the same number is the same
program, with the same arrays.
"""

import argparse
import collections
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from rich.console import Console

import jmp
from benchmarks.processes import ROOT
from jmp.autocasting import _float8
from testbed.small_products import small_is_float8

Array = Any
Step = Callable[[Sequence[Array], Array], Array]  # of the parameters and an activation

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
SHAPE = (4, 16, 16)  # of the input; axes before the last are moved, the last is multiplied
WIDTHS = (16, 32)


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


# Steps. Each maker draws what it needs and returns a function of the parameters and the activation.


class Drawing:
    """A program that is being drawn: its random numbers and its parameters so far."""

    def __init__(self, number: int) -> None:
        self.random = np.random.default_rng(number)
        self.params: list[np.ndarray] = []
        self.names: list[str] = []
        self.products = 0

    def choice(self, among: Sequence[Any]) -> Any:
        return among[self.random.integers(len(among))]

    def param(self, *shape: int, scale: float = 1.0) -> int:
        """Adds a parameter, and returns its place among them."""
        self.params.append(self.random.normal(size=shape, scale=scale).astype(np.float32))
        return len(self.params) - 1

    def matrix(self, rows: int, columns: int) -> int:
        self.products += 1
        return self.param(rows, columns, scale=rows**-0.5)


def product(draw: Drawing, shape: tuple[int, ...]) -> Step:
    rows, columns = shape[-1], draw.choice(WIDTHS)
    form = draw.choice(["matmul", "transposed", "einsum", "heads", "reshaped"])
    if form == "transposed":
        i = draw.matrix(columns, rows)
        draw.params[i] *= (columns / rows) ** 0.5
        return lambda ws, h: h @ ws[i].T
    i = draw.matrix(rows, columns)
    if form == "einsum":
        return lambda ws, h: jnp.einsum("...i,io->...o", h, ws[i])
    if form == "heads":
        split = lambda w: w.reshape(rows, 2, columns // 2)
        return lambda ws, h: jnp.einsum("...i,ihd->...hd", h, split(ws[i])).reshape(
            *h.shape[:-1], columns
        )
    if form == "reshaped":
        return lambda ws, h: (h.reshape(-1, rows) @ ws[i]).reshape(*h.shape[:-1], columns)
    return lambda ws, h: h @ ws[i]


def flattened(h: Array) -> Array:
    return h.reshape(-1, h.shape[-1])


def split_rows(h: Array) -> Array:
    h = flattened(h)
    return h.reshape(2, -1, h.shape[-1]) if h.shape[0] % 2 == 0 else h[None]


def halved(h: Array) -> Array:
    return h[: max(8, h.shape[0] // 2)] if h.ndim == 2 else h[:, : max(1, h.shape[1] // 2)]


@jax.custom_jvp
def doubled(h: Array) -> Array:
    return 2.0 * h


doubled.defjvp(lambda primals, tangents: (doubled(*primals), 2.0 * tangents[0]))


@jax.custom_vjp
def clipped(h: Array) -> Array:
    return h * 1.0


clipped.defvjp(lambda h: (h * 1.0, None), lambda _, g: (jnp.clip(g, -1e3, 1e3),))

MOVES: dict[str, Callable[[Array], Array]] = {
    "flatten": flattened,
    "split rows": split_rows,
    "squeeze": lambda h: h[None].squeeze(0),
    "expand": lambda h: jnp.expand_dims(h, 0) if h.ndim < 4 else flattened(h),
    "swap": lambda h: jnp.swapaxes(h, 0, h.ndim - 2),
    "swap twice": lambda h: jnp.swapaxes(jnp.swapaxes(h, -1, -2), -1, -2),
    "index": lambda h: h[0] if h.ndim > 2 and h[0].size >= 256 else h,
    "index at the front of a new axis": lambda h: h[None][0],
    "halve": halved,
    "dynamic slice": lambda h: lax.dynamic_slice_in_dim(h, h.shape[0] // 2, h.shape[0] // 2 or 1),
    "take": lambda h: h[jnp.arange(h.shape[0])[::-1]],
    "reverse": lambda h: h[::-1],
    "roll": lambda h: jnp.roll(h, 1, 0),
    "roll features": lambda h: jnp.roll(h, 1, -1),
    "copy": lambda h: jnp.array(h, copy=True),
    "jit": lambda h: jax.jit(lambda h: h)(h),
    "jit of a reshape": lambda h: jax.jit(flattened)(h),
    "jit that stays": lambda h: jax.jit(flattened, donate_argnums=0)(h),
    "remat of a reshape": lambda h: jax.checkpoint(flattened)(h),
    "concatenate": lambda h: jnp.concatenate([h, 0.5 * h]),
    "concatenate halves": lambda h: jnp.concatenate(jnp.split(h, 2, -1)[::-1], -1),
    "stack": lambda h: jnp.stack([h, h]) if h.size <= 2**11 else h,
    "pad": lambda h: jnp.pad(h, [(0, 1)] + [(0, 0)] * (h.ndim - 1)),
    "repeat": lambda h: jnp.broadcast_to(h[None], (2, *h.shape)) if h.size <= 2**11 else h,
    "name": lambda h: checkpoint_name(h, "h"),
    "barrier": lax.optimization_barrier,
    "device": jax.device_put,
    "cast": lambda h: h.astype(jnp.bfloat16).astype(jnp.float32),
    "stop": lambda h: h + lax.stop_gradient(0.5 * h),
    "named call": lambda h: jax.named_call(flattened)(h),
    "nothing": lambda h: h,
}
FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": jax.nn.gelu,
    "exact gelu": lambda h: jax.nn.gelu(h, approximate=False),
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
    "relu": jax.nn.relu,
    "leaky": lambda h: jnp.where(h > 0, h, 0.1 * h),
    "maximum": lambda h: jnp.maximum(h, -0.5),
    "softplus": jax.nn.softplus,
    "sine": jnp.sin,
    "scale": lambda h: 0.5 * h,
    "shift": lambda h: h + 1.0,
    "from one": lambda h: 1.0 - h,
    "absolute": jnp.abs,
    "exponential": lambda h: jnp.exp(-jnp.abs(h)),
    "square": lambda h: 0.25 * h * h,
    "clip": lambda h: jnp.clip(h, -2.0, 2.0),
    "custom jvp": doubled,
    "custom vjp": clipped,
    "softmax": lambda h: h.shape[-1] ** 0.5 * jax.nn.softmax(h),
    "norm": lambda h: h * lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-3),
    "jit of gelu": jax.jit(lambda h: jax.nn.gelu(flattened(h))),
    "remat of gelu": jax.checkpoint(jax.nn.gelu),
    "full precision": jmp.full_precision(lambda h: jnp.tanh(h) + h),
}


def move(draw: Drawing, shape: tuple[int, ...]) -> Step:
    name = draw.choice(sorted(MOVES))
    draw.names.append(name)
    return lambda ws, h: MOVES[name](h)


def function(draw: Drawing, shape: tuple[int, ...]) -> Step:
    name = draw.choice(sorted(FUNCTIONS))
    draw.names.append(name)
    return lambda ws, h: FUNCTIONS[name](h)


def bias(draw: Drawing, shape: tuple[int, ...]) -> Step:
    i = draw.param(shape[-1], scale=0.5)
    row = lambda b, h: b.reshape((1,) * (h.ndim - 1) + b.shape)
    return draw.choice(
        [
            lambda ws, h: h + row(ws[i], h),
            lambda ws, h: h - row(ws[i], h),
            lambda ws, h: row(ws[i], h) - h,
            lambda ws, h: h + row(jnp.tanh(ws[i]), h),
            lambda ws, h: h + row(ws[i], h) + row(2.0 * ws[i][::-1], h),
            lambda ws, h: h * row(1.0 + 0.1 * ws[i], h),
            lambda ws, h: (flattened(h) + row(ws[i], flattened(h))).reshape(h.shape),
        ]
    )


def gate(draw: Drawing, shape: tuple[int, ...]) -> Step:
    columns = draw.choice(WIDTHS)
    i, j = (draw.matrix(shape[-1], columns) for _ in range(2))
    moved = MOVES[draw.choice(["nothing", "flatten", "copy", "jit of a reshape", "swap twice"])]
    form = draw.choice([jax.nn.silu, jax.nn.gelu, jnp.tanh, lambda h: h])
    return draw.choice(
        [
            lambda ws, h: moved(form(h @ ws[i])) * moved(h @ ws[j]),
            lambda ws, h: moved(form(h @ ws[i]) * (h @ ws[j])),
            lambda ws, h: form(moved(h @ ws[i])) * moved(h @ ws[j]),
        ]
    )


def attention(h: Array, queries: Array, keys: Array) -> Array:
    return jax.nn.softmax((h @ queries) @ (h @ keys).T / h.shape[-1] ** 0.5) @ h


def two_readers(draw: Drawing, shape: tuple[int, ...]) -> Step:
    """Of one value: two products, or a product and something else; by different ways."""
    i, j = (draw.matrix(shape[-1], shape[-1]) for _ in range(2))
    first, second = (MOVES[draw.choice(["nothing", "flatten", "copy", "jit"])] for _ in range(2))
    back = lambda x, h: x.reshape(h.shape)
    return draw.choice(
        [
            lambda ws, h: (back(first(h) @ ws[i], h) + back(second(h) @ ws[j], h)) / 2,
            lambda ws, h: h + back(jnp.tanh(first(h) @ ws[i]) @ ws[j], h) / 2,
            lambda ws, h: (back(first(h) @ ws[i], h) + jnp.tanh(h)) / 2,
            lambda ws, h: back(first(h) @ ws[i], h) * (1 + jnp.mean(second(h))),
            lambda ws, h: back(attention(flattened(h), ws[i], ws[j]), h),
        ]
    )


# Each as often as it stands here.
STEPS = (*[product] * 5, *[move] * 4, *[function] * 2, bias, gate, two_readers)


def chain(draw: Drawing, shape: tuple[int, ...], length: int, depth: int) -> Step:
    """Draws steps until there are `length`, blocks among them; at most six products or so."""
    steps: list[Step] = []
    for _ in range(length):
        is_block = depth < 2 and draw.random.random() < 0.15
        makers = STEPS if draw.products < 5 else (move, function, bias)
        step = block(draw, shape, depth) if is_block else draw.choice(makers)(draw, shape)
        steps.append(step)
        shape = jax.eval_shape(step, draw.params, jax.ShapeDtypeStruct(shape, jnp.float32)).shape

    def run(ws: Sequence[Array], h: Array) -> Array:
        for step in steps:
            h = step(ws, h)
        return h

    return run


def block(draw: Drawing, shape: tuple[int, ...], depth: int) -> Step:
    """Draws a chain inside a transformation."""
    name = draw.choice(["remat", "remat dots", "scan", "vmap", "cond", "jit", "jit that stays"])
    draw.names.append(name)
    if name == "vmap" and len(shape) < 3:
        name = "remat"
    inner = chain(draw, shape[1:] if name == "vmap" else shape, 2, depth + 1)
    if name == "vmap":
        return lambda ws, h: jax.vmap(lambda h: inner(ws, h))(h)
    if name == "scan":

        def turns(ws: Sequence[Array], h: Array) -> Array:
            def turn(carry: Array, _: None) -> tuple[Array, None]:
                change = inner(ws, carry)
                same = change.shape == carry.shape
                return carry + (change if same else jnp.mean(change)) / 2, None

            return lax.scan(turn, h, None, length=2)[0]

        return turns
    if name == "cond":
        other = lambda ws, h: 0.5 * inner(ws, h)
        return lambda ws, h: lax.cond(jnp.max(h) > -1e3, inner, other, ws, h)
    policy = jax.checkpoint_policies.dots_saveable if name == "remat dots" else None
    if name.startswith("remat"):
        return lambda ws, h: jax.checkpoint(inner, policy=policy)(ws, h)
    donated = {"donate_argnums": 1} if name == "jit that stays" else {}
    return lambda ws, h: jax.jit(inner, **donated)(ws, h)


# Programs.


class Program(NamedTuple):
    """A loss, its parameters and its input; what stands in it, for a report."""

    loss: Callable[..., Array]
    params: list[np.ndarray]
    x: np.ndarray
    names: list[str]


def program(number: int) -> Program:
    """Returns the program of a number."""
    draw = Drawing(number)
    first = product(draw, SHAPE)
    opened = jax.eval_shape(first, draw.params, jax.ShapeDtypeStruct(SHAPE, jnp.float32))
    middle = chain(draw, opened.shape, int(draw.random.integers(2, 7)), 0)
    closed = jax.eval_shape(middle, draw.params, opened)
    last, head = (draw.matrix(closed.shape[-1], closed.shape[-1]) for _ in range(2))
    x = draw.random.normal(size=SHAPE).astype(np.float32)
    weights = draw.random.normal(size=closed.shape).astype(np.float32)

    def loss(ws: Sequence[Array], x: Array) -> Array:
        h = middle(ws, first(ws, x))
        y = (h @ ws[last]) @ ws[head]
        return jnp.mean(y * y) + jnp.mean(y * weights[: y.shape[0]])

    return Program(loss, draw.params, x, draw.names)


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
        leaves = jax.jit(jax.grad(given))([*map(rounds, params)], rounds(x))
        return np.concatenate([np.ravel(leaf).astype(np.float64) for leaf in leaves])

    exact = gradient(None)
    error = lambda got: float(np.linalg.norm(got - exact) / np.linalg.norm(exact))
    multiplied = _float8.multiply
    with mock.patch.object(_float8, "multiply", multiply):
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
    """Returns what the errors say where float8's is large; `rounded`: of inputs rounded alone."""
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
