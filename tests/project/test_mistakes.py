"""Every mistake of `docs/mistakes.md` is refused: by type, with the way out, in few words."""

import jax
import numpy as np
import pytest
from flax import nnx

from docs import mistakes as page
from jmp.autocasting import all_rules
from testbed.mistakes import MISTAKES, names

# A mistake could have changed these.
STATEFUL = ("params", "half_params", "x", "scale", "opt_state", "state", "eqx_model", "eqx_state")


def contents():
    """Returns the bits of all state that the lines of code can reach."""
    own = names()
    trees = [own[name] for name in STATEFUL]
    trees += [nnx.as_pure(nnx.state(own[name])) for name in ("nnx_model", "optimizer")]
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(trees) if hasattr(leaf, "dtype")]
    return [(leaf.dtype, leaf.shape, leaf.tobytes()) for leaf in leaves], list(all_rules())


@pytest.mark.parametrize("row", MISTAKES, ids=[row.code[:90] for row in MISTAKES])
def test_a_mistake_is_refused_with_the_way_out_and_changes_nothing(row):
    before = contents()
    error = page.error_of(row.code)
    message = str(error)
    found = type(error).__name__, page.in_markdown(message)
    assert found == (row.error, row.message), "run python -m docs.mistakes"
    assert len(message) <= 1500 and message.count("\n") < 20, message
    assert contents() == before


def test_a_new_row_of_the_page_needs_its_line_of_code_alone():
    row = MISTAKES[0]
    table = "\n### Policies\n\n| the mistake | the error | the message |\n|---|---|---|\n"
    written = page.rewritten(f"{table}| `{row.code}` | | |\n")
    assert written == f"{table}| `{row.code}` | {row.error} | {row.message} |\n"
