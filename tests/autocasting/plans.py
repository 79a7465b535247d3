"""Plans as text: one line a step, what is inside below it; and programs that have theirs beside.

`python -m tests.autocasting.plans` writes the plans that are made now into
`tests/autocasting/test_plans*.py`.
"""

import ast
import importlib
import inspect
import pathlib
import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jmp.autocasting._autocast import make_program
from jmp.autocasting._steps import Inside, Island, Nested

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
    """Adds a program to `cases`; its docstring has its plan below the first blank line."""

    def add(fun):
        cases.append(Case(fun, args, options))
        return fun

    return add


def conv(x, kernel):
    """A convolution over images."""
    layout = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=layout)


def plan_test(cases):
    """The test that each program has the plan that its docstring says."""

    @pytest.mark.skipif(not HAS_THESE_TRACES, reason="the traces of JAX 0.10")
    @pytest.mark.parametrize("case", cases, ids=lambda case: case.fun.__name__)
    def test_plan(case):
        assert "\n".join(listing_of(case)) == expected(case)

    return test_plan


def expected(case):
    """The plan in a program's docstring."""
    return inspect.getdoc(case.fun).partition("\n\n")[2]


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
    leaves = (_short(x.dtype) + " saturated" * x.saturates for x in island.leaves)
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


def rewrite(path, cases):
    """Writes the plans that are made now into the docstrings of the programs in a file."""
    text = path.read_text()
    lines = text.splitlines()
    programs = {node.name: node for node in ast.parse(text).body if hasattr(node, "name")}
    # From the last to the first: the numbers of the lines above stay as they are.
    for case in sorted(cases, key=lambda case: -programs[case.fun.__name__].lineno):
        docstring = programs[case.fun.__name__].body[0]
        what = docstring.value.value.partition("\n\n")[0].rstrip()
        indent = " " * docstring.col_offset
        plan = textwrap.indent("\n".join(listing_of(case)), indent)
        rest = lines[docstring.end_lineno - 1][docstring.end_col_offset :]
        new = f'{indent}"""{what}\n\n{plan}\n{indent}"""{rest}'
        lines[docstring.lineno - 1 : docstring.end_lineno] = new.splitlines()
    path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    assert HAS_THESE_TRACES, f"the plans are those of JAX 0.10, and not of {jax.__version__}"
    for path in sorted(pathlib.Path(__file__).parent.glob("test_plans*.py")):
        rewrite(path, importlib.import_module(f"tests.autocasting.{path.stem}").CASES)
