"""Every mistake of `testbed/mistakes.py` is refused: by type, with the way out, in few words."""

import jax
import numpy as np
import pytest
from flax import nnx

from docs import mistakes as page
from jmp.autocasting import all_rules
from testbed.mistakes import MISTAKES, names

ROWS = [row for rows in MISTAKES.values() for row in rows]
# A mistake could have changed these.
STATEFUL = ("params", "half_params", "x", "scale", "opt_state", "state", "eqx_model", "eqx_state")


def contents():
    """Returns the bits of all state that the lines of code can reach."""
    own = names()
    trees = [own[name] for name in STATEFUL]
    trees += [nnx.as_pure(nnx.state(own[name])) for name in ("nnx_model", "optimizer")]
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(trees) if hasattr(leaf, "dtype")]
    return [(leaf.dtype, leaf.shape, leaf.tobytes()) for leaf in leaves], list(all_rules())


@pytest.mark.parametrize("row", ROWS, ids=[row.code[:90] for row in ROWS])
def test_a_mistake_is_refused_with_the_way_out_and_changes_nothing(row):
    before = contents()
    with pytest.raises(Exception) as raised:  # its type is compared below
        eval(row.code, dict(names()))
    message = page.message(raised.value)
    assert type(raised.value) is row.error, message
    assert row.words in message
    assert len(message) <= 1500 and message.count("\n") < 20, message
    assert contents() == before


def test_no_mistake_stands_twice():
    assert len({row.code for row in ROWS}) == len(ROWS)


def test_the_page_is_up_to_date():
    assert page.PAGE.read_text() == page.page(), "run python -m docs.mistakes"
