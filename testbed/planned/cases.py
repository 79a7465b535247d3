"""What the programs of this folder have in common: shapes, and how a program becomes a case."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


def struct(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


X = W = struct(128, 128)
ROW = struct(128)
IMAGE, KERNEL = struct(8, 16, 16, 16), struct(3, 3, 16, 16)
SMALL = struct(8, 8)
INDICES = struct(128, dtype=jnp.int32)


class Case(NamedTuple):
    """A program, what it is planned for, and the options of autocast."""

    fun: Callable[..., Any]
    args: tuple[Any, ...]
    options: dict[str, Any]


def new_cases():
    """Returns an empty list, and a decorator that adds programs for some arguments to it."""
    cases: list[Case] = []

    def planned(*args, **options):
        def add(fun):
            cases.append(Case(fun, args, options))
            return fun

        return add

    return cases, planned


def conv(x, kernel):
    """A convolution over images."""
    layout = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=layout)
