"""Splits and joins every float32 number: all 2**32 patterns.

`jmp.transforms.with_split_masters` keeps a master as a bfloat16 parameter and 16 bits. What it
promises: each number, zeros and infinities included, comes back bit for bit, each NaN as a NaN, and
the parameter is the nearest bfloat16 number, of two the one farther from zero.
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from rich.console import Console
from rich.progress import track

from jmp.transforms._half_parameters import join_master, split_master

AT_ONCE = 24  # bits: patterns of one call


def add_options(parser: argparse.ArgumentParser) -> None:
    pass


def run(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    names = ("numbers", "lost numbers", "lost NaNs", "parameters that are not the nearest")
    totals = [0] * len(names)
    blocks = track(range(2 ** (32 - AT_ONCE)), "patterns", console=console)
    for block in blocks:
        found = counted(jnp.uint32(block << AT_ONCE))
        totals = [total + int(each) for total, each in zip(totals, found, strict=True)]
    results: dict[str, Any] = dict(zip(names, totals, strict=True))
    return results | {"passed": totals[1:] == [0, 0, 0] and totals[0] == 2**32 - 2 * (2**23 - 1)}


@jax.jit
def counted(first: jax.Array) -> tuple[jax.Array, ...]:
    patterns = first + lax.iota(jnp.uint32, 2**AT_ONCE)
    master = lax.bitcast_convert_type(patterns, jnp.float32)
    high, low = split_master(master)
    again = lax.bitcast_convert_type(join_master(high, low), jnp.uint32)
    magnitude = patterns & 0x7FFFFFFF
    is_nan = magnitude > 0x7F800000
    lost_nan = is_nan & ~(again & 0x7FFFFFFF > 0x7F800000)
    # Distances are counted in patterns: from the parameter, and between parameters.
    shown = lax.bitcast_convert_type(high, jnp.uint16).astype(jnp.uint32) << 16
    beyond = (patterns + 0x8000) - shown  # 0 to 2**16 - 1 where it is the nearest
    sums = (~is_nan, ~is_nan & (again != patterns), lost_nan, ~is_nan & (beyond >= 2**16))
    return tuple(jnp.sum(each) for each in sums)
