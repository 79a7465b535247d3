"""Convolutions in float8: what XLA makes of them for an H200, and what training steps would cost.

Autocast leaves convolutions in bfloat16. `docs/float8.md` says why, with the tables of this file,
which `python -m benchmarks.run --suite programs` counts.

Counted in compiled programs, without a GPU. That a program calls cuDNN with float8 arrays shows
that XLA knows the form. It does not show that cuDNN has a kernel for the sizes, nor how fast it is:
XLA asks cuDNN on the device alone.
"""

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax import lax

import jmp
from jmp.autocasting.float8 import _arithmetic, _passes
from testbed.machines.gpus import Program, compile_for_h200
from testbed.machines.hlo import kernels
from testbed.passes import without_pass

HALF = jnp.bfloat16
NHWC, NCHW = ("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW")
DTYPE = re.compile(r"(\w+)\[")
CONVOLUTION = re.compile(r'custom_call_target="__cudnn\$(conv\w+)"')
# Which products of a convolution are float8, where XLA makes them: its own, and its gradients'.
FORMS = {
    "forward": {"forward"},
    "forward, gradient of the input": {"forward", "input"},
    "all three asked for": {"forward", "input", "kernel"},
}


def float32(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def convolve(x: Any, kernel: Any, stride: int = 1, layout: tuple[str, str, str] = NHWC) -> Any:
    """Convolves images with a kernel `[height, width, channels, results]`, if both are as NHWC."""
    return lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=layout)


def gradient_of_input(shape: Any, change: Any, kernel: Any, stride: int = 1) -> Any:
    x = jax.ShapeDtypeStruct(shape, change.dtype)
    return jax.linear_transpose(lambda x: convolve(x, kernel, stride), x)(change)[0]


def gradient_of_kernel(shape: Any, x: Any, change: Any, stride: int = 1) -> Any:
    kernel = jax.ShapeDtypeStruct(shape, change.dtype)
    return jax.linear_transpose(lambda kernel: convolve(x, kernel, stride), kernel)(change)[0]


def turned(numbers: Any) -> Any:
    """Returns the kernel with which a convolution is the gradient of the input of one of stride 1.

    Behind a barrier, since XLA computes in bfloat16 where it sees the kernel turned.
    """
    return lax.optimization_barrier(jnp.swapaxes(numbers[::-1, ::-1], 2, 3))


def widened(held: _arithmetic.Float8) -> Any:
    return held.numbers.astype(held.scale.dtype) * held.scale


def convolution_in_float8(parts: set[str]) -> Callable[..., Any]:
    """Returns a convolution of stride 1 of arrays that are given in float8 as well."""

    @jax.custom_vjp
    def run(x: Any, kernel: Any, *held: _arithmetic.Float8) -> Any:
        return convolve(*map(widened, held))

    def forward(x: Any, kernel: Any, *held: _arithmetic.Float8) -> Any:
        kept = held if "kernel" in parts else (x.astype(HALF), kernel.astype(HALF))
        return run(x, kernel, *held), (kept, held[1], (x[:0], kernel[:0]))

    def backward(residuals: Any, change: Any) -> Any:
        kept, (numbers, scale), like = residuals
        x, kernel = map(widened, kept) if "kernel" in parts else kept
        rounded = _arithmetic.hold(change)
        if "input" in parts:
            of_input = convolve(
                widened(rounded), widened(_arithmetic.Float8(turned(numbers), scale))
            )
        else:
            of_input = gradient_of_input(x.shape, change, kernel)
        change = widened(rounded) if "kernel" in parts else change
        of_kernel = gradient_of_kernel(kernel.shape, x, change)
        return of_input.astype(like[0].dtype), of_kernel.astype(like[1].dtype), None, None

    run.defvjp(forward, backward)
    return run


@contextlib.contextmanager
def autocast_takes_convolutions(parts: set[str]) -> Iterator[None]:
    """Lets "mixed_float8" make convolutions float8 that feed another product."""
    why_not_float8, multiply = _passes.why_not_float8, _arithmetic.multiply

    def why(node: Any, level: Any) -> str:
        if node.name != "conv_general_dilated":
            return why_not_float8(node, level)
        return "a head" if level.facts.feeds.isdisjoint(node.outputs) else ""

    def run(operands: Sequence[Any], held: Sequence[Any], params: Any, *options: Any) -> Any:
        if "window_strides" not in params:
            return multiply(operands, held, params, *options)
        return convolution_in_float8(parts)(*operands, *held), None

    with (
        mock.patch.object(_passes, "why_not_float8", why),
        mock.patch.object(_arithmetic, "multiply", run),
        without_pass("float8 bounds"),
    ):
        yield


def convolutions(program: Program) -> list[tuple[str, str]]:
    """Returns cuDNN's convolutions of a program, each with the dtype of its first operand."""
    found = []
    for kernel in kernels(program.text):
        for call in CONVOLUTION.findall(kernel.instruction.attributes):
            found.append((call, DTYPE.findall(kernel.operands[0])[0]))
    return found


# Single products, of 64 images of 28 x 28 with 256 channels.

IMAGES = (64, 28, 28, 256)
KERNELS = {  # and strides
    "3 x 3": ((3, 3, 256, 256), 1),
    "3 x 3, stride 2": ((3, 3, 256, 256), 2),
    "1 x 1": ((1, 1, 256, 256), 1),
}


def single_products(title: str) -> list[list[str]]:
    """Returns rows: a product, how XLA calls cuDNN for it, MB moved, also in bfloat16."""
    kernel, stride = KERNELS[title]
    results = (64, 28 // stride, 28 // stride, 256)
    forward = partial(convolve, stride=stride)
    of_input = partial(gradient_of_input, IMAGES, stride=stride)
    of_kernel = partial(gradient_of_kernel, kernel, stride=stride)
    rows = [
        _row(f"{title}, forward", forward, IMAGES, kernel),
        _row(f"{title}, gradient of the input", of_input, results, kernel),
        _row(f"{title}, gradient of the kernel", of_kernel, IMAGES, results),
    ]
    if title == "3 x 3":
        form = f"{title}, gradient of the input, kernel turned before"
        rows.insert(2, _row(form, forward, results, kernel, turned))
        shapes = (64, 256, 28, 28), (256, 256, 3, 3)
        rows.append(_row(f"{title}, NCHW, forward", partial(convolve, layout=NCHW), *shapes))
    return rows


def _row(title: str, run: Callable[..., Any], left: Any, right: Any, turn: Any = None) -> list[str]:
    half = compile_for_h200(run, *(jax.ShapeDtypeStruct(shape, HALF) for shape in (left, right)))
    numbers = [jax.ShapeDtypeStruct(shape, _arithmetic.E4M3) for shape in (left, right)]
    scale = jax.ShapeDtypeStruct((), HALF)

    def in_float8(left: Any, right: Any, *scales: Any) -> Any:
        pair = (left, turn(right) if turn else right)
        return run(*map(widened, map(_arithmetic.Float8, pair, scales)))

    float8 = compile_for_h200(in_float8, *numbers, scale, scale)
    ((call, dtype),) = convolutions(float8)
    return [title, dtype, call, *(f"{p.bytes_moved / 1e6:.0f}" for p in (float8, half))]


# Training steps of three residual blocks, with batch normalisation.


def normalised(x: Any, scale: Any, shift: Any) -> Any:
    mean = jnp.mean(x, (0, 1, 2))
    variance = jnp.mean(x**2, (0, 1, 2)) - mean**2
    return (x - mean) * lax.rsqrt(variance + 1e-5) * scale + shift


def pointwise(x: Any, kernel: Any) -> Any:
    return x @ kernel[0, 0] if kernel.shape[:2] == (1, 1) else convolve(x, kernel)


def loss_with(convolution: Callable[..., Any]) -> Callable[..., Any]:
    def block(x: Any, layers: Any) -> Any:
        y = x
        for i, (kernel, *affine) in enumerate(layers):
            y = normalised(convolution(jax.nn.relu(y) if i else y, kernel), *affine)
        return jax.nn.relu(x + y)

    def loss(params: Any, x: Any) -> Any:
        *blocks, head = params
        for layers in blocks:
            x = block(x, layers)
        return jnp.mean((jnp.mean(x, (1, 2)) @ head) ** 2)

    return loss


def network(*kernels: tuple[int, ...]) -> Any:
    layers = [(float32(*kernel), float32(kernel[-1]), float32(kernel[-1])) for kernel in kernels]
    return *[layers] * 3, float32(kernels[-1][-1], 256)


STEPS = {
    "3 x 3, 512 channels, 64 x 28 x 28": (network(*[(3, 3, 512, 512)] * 2), (64, 28, 28, 512)),
    "bottlenecks 1024-256, 256 x 14 x 14": (
        network((1, 1, 1024, 256), (3, 3, 256, 256), (1, 1, 256, 1024)),
        (256, 14, 14, 1024),
    ),
}


def compiled(policy: str, params: Any, images: Any, convolution: Any = convolve) -> Program:
    """Compiles the gradient and an SGD update of a network under a policy."""

    def step(params: Any, x: Any) -> Any:
        gradients = jax.grad(jmp.autocast(loss_with(convolution), policy))(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)

    with jax.numpy_rank_promotion("allow"):
        return compile_for_h200(step, params, float32(*images), donate_argnums=0)


def training_steps(title: str) -> list[list[Any]]:
    """Returns rows: a network, a form, and figures over those under "mixed_bfloat16"."""
    rows, sizes = [], STEPS[title]
    half = compiled("mixed_bfloat16", *sizes)
    for form, parts in FORMS.items():
        with autocast_takes_convolutions(parts):
            rows.append([title, form, *_figures(compiled("mixed_float8", *sizes), half)])
    if "bottlenecks" in title:
        products = compiled("mixed_float8", *sizes, pointwise)
        rows.append([title, "1 x 1 written as x @ kernel", *_figures(products, half)])
    return rows


def _figures(program: Program, half: Program) -> list[str]:
    names = ("bytes_moved", "temp_bytes", "kernels")
    ratios = [f"{getattr(program, name) / getattr(half, name):.2f}" for name in names]
    calls = Counter(dtype for _, dtype in convolutions(program))
    products = program.text.count('custom_call_target="__cublas$lt$matmul$f8"')
    total = len(convolutions(half))
    return [*ratios, f"{calls['f8e4m3fn'] + products} of {total}"]
