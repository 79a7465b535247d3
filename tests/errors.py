"""Errors of numbers that were computed in half precision."""

import jax
import numpy as np


def relative_error(got, expected):
    """The L2 error over all arrays of a tree, over the norm of what is expected; in float64."""
    a, b = (
        np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)])
        for tree in (got, expected)
    )
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def largest_error(got, expected):
    """The largest relative error of any array of a tree."""
    return max(jax.tree.leaves(jax.tree.map(relative_error, got, expected)))
