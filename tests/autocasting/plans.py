"""Plans as text: one line a step, what is inside below it; and the files that have those of tests.

A line is a step. `f32>f16` is a float32 operand that is read in half, `->` what is stored.
`python -m tests.autocasting.plans` writes the plans that are made now of the programs in
`test_plans*.py` into `plan_listings/`, a file for each of these modules.
"""

import functools
import importlib
import pathlib
import textwrap
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jmp.autocasting._autocast import make_program
from jmp.autocasting._steps import Inside, Island, Nested

FOLDER = pathlib.Path(__file__).parent
SHORT = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "int32": "i32", "None": "-"}


# Traces, and so plans, change with JAX's version.
HAS_THESE_TRACES = jax.__version__.startswith("0.10.")


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


def add_case(cases, *args, **options):
    """Adds a program to `cases`; its plan is in the file of its module, under its name."""

    def add(fun):
        cases.append(Case(fun, args, options))
        return fun

    return add


def conv(x, kernel):
    """A convolution over images."""
    layout = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=layout)


def plan_test(cases):
    """The test that each program has the plan that is written down under its name."""

    @pytest.mark.skipif(not HAS_THESE_TRACES, reason="the traces of JAX 0.10")
    @pytest.mark.parametrize("case", cases, ids=lambda case: case.fun.__name__)
    def test_plan(case):
        plans = written_plans(case.fun.__module__)
        assert case.fun.__name__ in plans, "run: python -m tests.autocasting.plans"
        assert "\n".join(listing_of(case)) == plans[case.fun.__name__]

    return test_plan


def planned_modules() -> Iterator[ModuleType]:
    """The modules whose `CASES` have plans that are written down."""
    for path in sorted(FOLDER.glob("test_plans*.py")):
        yield importlib.import_module(f"{__package__}.{path.stem}")


def listing_file(module_name):
    """The file with the plans of a module's programs."""
    stem = module_name.rpartition(".")[2].removeprefix("test_")
    return FOLDER / "plan_listings" / f"{stem}.txt"


@functools.cache
def written_plans(module_name):
    """The plans that are written down for a module's programs, by the program's name."""
    parts = listing_file(module_name).read_text().rstrip("\n").split("\n\n")
    return {name: textwrap.dedent(plan) for name, _, plan in (x.partition("\n") for x in parts)}


def write_plans(module):
    """Writes down the plans that are made now for a module's programs."""
    parts = (
        f"{case.fun.__name__}\n" + textwrap.indent("\n".join(listing_of(case)), "  ")
        for case in module.CASES
    )
    listing_file(module.__name__).write_text("\n\n".join(parts) + "\n")


def listing_of(case):
    """The lines of the plan that is made for a program."""
    arrays = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), case.args)
    with jax.numpy_rank_promotion("allow"):
        return listing(plan_of(case.fun, *arrays, **case.options))


def plan_of(fun, *args, policy="mixed_float16", **options):
    """The plan of `jmp.autocast(fun, policy, **options)` for some arguments."""
    return make_program(fun, policy, **options).trace(args, {}).plan


def listing(plan):
    """The lines of a plan. A reason is left out where it is that of the op table."""
    lines = []
    for step in plan.steps:
        if isinstance(step, Island):
            lines += _island(step)
        elif isinstance(step, Nested):
            lines.append(f"{step.node.name} inside: {_signature(step)}")
            for inside in step.insides:
                lines += [f"  {line}" for line in _inside(inside)]
        else:
            floats = [v for v in (*step.node.inputs, *step.node.outputs) if v.is_float32]
            how = f" in {step.arithmetic.value}" * bool(floats)
            why = f"; {step.why}" * (step.why != step.node.rule.reason)
            lines.append(f"{step.node.name}{how}: {_signature(step)}{why}")
    return lines


def _inside(inside):
    if not isinstance(inside, Inside):
        return ["function, not planned"]
    casts = [f"reads {_dtypes(inside.reads)}"] * bool(inside.reads)
    casts += [f"stores {_dtypes(inside.stores)}"] * bool(inside.stores)
    return [", ".join(["function", *casts]), *listing(inside.plan)]


def _island(island):
    how = [island.recompute.value]
    how += ["apart"] * island.prevent_cse + ["shared casts"] * island.shares_casts
    leaves = (_short(x.dtype) + " saturated" * x.saturates for x in island.writes)
    yield f"island, {', '.join(how)}: {' '.join(map(_read, island.reads))} -> {' '.join(leaves)}"
    for node in island.clones:
        yield f"  clone {node.name}"
    for node in island.nodes:
        why = island.why.get(node, "")
        reason = "full" if why == node.rule.reason else why
        rewrite = island.rewrites.get(node)
        form = f" [{rewrite.why}]" if rewrite is not None else ""
        yield f"  {node.name}" + f"; {reason}" * bool(why) + form


def _signature(step):
    return f"{' '.join(map(_read, step.reads))} -> {_dtypes(step.stores)}".strip()


def _read(read):
    value = read.value
    text = "" if value.held is None or value.constant is None else f"{value.constant:g} "
    text += _short(value.dtype)
    text += f">{_short(read.dtype)}" * (read.dtype not in (None, value.dtype))
    return text + " repeated" * (read.shape is not None) + " saturated" * read.saturates


def _dtypes(dtypes):
    return " ".join(map(_short, dtypes))


def _short(dtype):
    return SHORT.get(str(dtype), str(dtype))


if __name__ == "__main__":
    assert HAS_THESE_TRACES, f"the plans are those of JAX 0.10, and not of {jax.__version__}"
    for module in planned_modules():
        write_plans(module)
