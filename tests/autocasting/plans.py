"""Writes plans as text, one line a step, and reads the files that hold the plans of the tests.

A line is a step. `f32>f16` is a float32 operand that is read in half, `->` what is stored.
`python -m tests.autocasting.plans` writes the plans that are made now of the programs in
`testbed/planned/` into `plan_listings/`, a file for each module of that folder.
"""

import functools
import pathlib
import textwrap

import jax
import jax.numpy as jnp

from jmp.autocasting._autocast import make_program
from jmp.autocasting._steps import Island, Nested, Plan
from testbed.planned import MODULES

SHORT = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "int32": "i32", "None": "-"}


# Traces, and so plans, change with JAX's version.
HAS_THESE_TRACES = jax.__version__.startswith("0.10.")


@functools.cache
def written_plans(name):
    """The plans that are written down for a module's programs, by the program's name."""
    parts = _listing_file(name).read_text().rstrip("\n").split("\n\n")
    return {name: textwrap.dedent(plan) for name, _, plan in (x.partition("\n") for x in parts)}


def write_plans(name):
    """Writes down the plans that are made now for a module's programs."""
    parts = (
        f"{case.fun.__name__}\n" + textwrap.indent("\n".join(listing_of(case)), "  ")
        for case in MODULES[name].CASES
    )
    _listing_file(name).write_text("\n\n".join(parts) + "\n")


def _listing_file(name):
    return pathlib.Path(__file__).parent / "plan_listings" / f"{name}.txt"


def listing_of(case):
    """The lines of the plan that is made for a program."""
    arrays = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), case.args)
    with jax.numpy_rank_promotion("allow"):
        return listing(plan_of(case.fun, *arrays, **case.options))


def plan_of(fun, *args, policy="mixed_float16", **options):
    """The plan of `jmp.autocast(fun, policy, **options)` for some arguments."""
    return make_program(fun, policy, **options).trace(args, {}).plan


def listing(plan):
    """The lines of a plan. A reason is left out if the op table gives it."""
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
    if not isinstance(inside, Plan):
        return ["function, not planned"]
    casts = f"reads {_dtypes(inside.reads)}, stores {_dtypes(inside.stores)}"
    return [f"function, {casts}", *listing(inside)]


def _island(island):
    how = ["recompute" if island.is_recomputed else "plain"]
    how += ["apart"] * island.prevent_cse + ["shared casts"] * island.shares_casts
    leaves = (_short(x.dtype) + " saturated" * x.saturates for x in island.writes)
    yield f"island, {', '.join(how)}: {' '.join(map(_read, island.reads))} -> {' '.join(leaves)}"
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
    text = "" if value.literal is None or value.constant is None else f"{value.constant:g} "
    text += _short(value.dtype)
    text += f">{_short(read.dtype)}" * (read.dtype not in (None, value.dtype))
    return text + " repeated" * (read.shape is not None) + " saturated" * read.saturates


def _dtypes(dtypes):
    return " ".join(map(_short, dtypes))


def _short(dtype):
    return SHORT.get(str(dtype), str(dtype))


if __name__ == "__main__":
    assert HAS_THESE_TRACES, f"the plans are those of JAX 0.10, and not of {jax.__version__}"
    for name in MODULES:
        write_plans(name)
