"""What random programs in float8 say: where bfloat16 is right, float8 is near, and nothing is NaN.

The programs are those of `testbed/float8_programs.py`, some of them on two devices. Gradients of
the whole tree are compared with those of float32. Arrays are small: small products
must count as large.
"""

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jmp
from jmp.autocasting.float8 import _arithmetic
from testbed.float8_programs import program
from testbed.relative_errors import numbers, relative_error

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
