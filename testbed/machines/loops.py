"""Loops of a known number of turns, to see that compiled programs count each of them.

`python -m testbed.machines.loops v5e` prints what is counted on a machine, as JSON.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from testbed.machines.tpus import TPUS
from testbed.machines.training_steps import compile_for

TURNS = (8, 16, 40)
NUMBERS = 2**25  # more than a TPU's vector memory holds


def turn(x, w):
    return jnp.sin(x) * w, None


def scanned(x, stack):
    return lax.scan(turn, x, stack)[0]


def nested(x, stack):
    inner = lambda x, w: (lax.fori_loop(0, 3, lambda _, x: turn(x, w)[0], x), None)
    return lax.scan(inner, x, stack)[0]


def remat(x, stack):
    body = jax.checkpoint(lambda x, w: (jnp.sin(jnp.sin(x) * w), None))
    return jax.grad(lambda x: lax.scan(body, x, stack)[0].sum())(x)


def branching(x, stack):
    longer = lambda x, w: turn_of(lax.optimization_barrier(jnp.cos(x)), w)
    return lax.scan(lambda x, w: (lax.cond(w[0] > 0, turn_of, longer, x, w), None), x, stack)[0]


def turn_of(x, w):
    return turn(x, w)[0]


LOOPS = {"scan": scanned, "nested": nested, "remat": remat, "branching": branching}


def counted(machine, name, turns):
    """Returns bytes, and kernels or a TPU's cycles, of a loop."""
    shapes = [jax.ShapeDtypeStruct((*rows, NUMBERS), jnp.float32) for rows in ((), (turns,))]
    program = compile_for(machine, LOOPS[name], *shapes)
    assert program.loops_of_unknown_turns == 0
    return program.bytes_moved, getattr(program, "cycles" if machine in TPUS else "kernels")


def check(figures):
    """Asserts that each further turn adds as much as the one before, to a few bytes."""
    few, more, many = np.array(figures)
    expected = (TURNS[2] - TURNS[1]) / (TURNS[1] - TURNS[0]) * (more - few)
    np.testing.assert_allclose(many - more, expected, rtol=0.001)
    assert more[0] - few[0] >= (TURNS[1] - TURNS[0]) * 3 * 4 * NUMBERS


if __name__ == "__main__":
    found = {name: [counted(sys.argv[1], name, turns) for turns in TURNS] for name in LOOPS}
    print(json.dumps(found))
