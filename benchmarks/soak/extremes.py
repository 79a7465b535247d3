"""Looks for random programs that autocast to float16 gets wrong, and finite, at inputs of any size.

Inputs are multiplied by 2^-12 to 2^12, the loss by 2^16; `testbed.extreme_values` says what counts
as wrong.
"""

import argparse
import math
from typing import Any

import jax
from rich.console import Console
from rich.progress import track

from testbed import extreme_values

AT_ONCE = 50  # programs, after which what was compiled is forgotten


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--programs", type=int, default=3000)
    parser.add_argument("--first", type=int, default=0, help="the number of the first program")


def run(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    counts = dict.fromkeys(
        ("no gradient", "the reference is far", "right", "as by hand", "skipped"), 0
    )
    faults = []
    numbers = range(arguments.first, arguments.first + arguments.programs)
    with jax.numpy_rank_promotion("allow"):
        for number in track(numbers, "programs", console=console):
            case = extreme_values.case(number)
            errors = extreme_values.errors(case)
            if errors is None:
                counts["no gradient"] += 1
            elif extreme_values.is_fault(case, errors):
                faults.append({"number": number, **case._asdict(), **errors._asdict()})
            elif errors.reference >= extreme_values.NEAR:
                counts["the reference is far"] += 1
            elif errors.autocast <= extreme_values.FAR:
                counts["right"] += 1
            else:
                counts["as by hand" if math.isfinite(errors.autocast) else "skipped"] += 1
            if number % AT_ONCE == 0:
                jax.clear_caches()
    for fault in faults:
        console.print(fault)
    first = arguments.first
    return {"first": first, "programs": len(numbers), "counts": counts, "faults": faults} | {
        "passed": not faults
    }
