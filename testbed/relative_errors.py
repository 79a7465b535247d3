"""How far numbers are from exact ones."""

from typing import Any

import jax
import numpy as np


def numbers(tree: Any) -> np.ndarray:
    """Returns all numbers of a tree, in float64."""
    return np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)])


def relative_error(found: Any, exact: Any) -> float:
    """Returns the norm of the difference of two trees, over the norm of the exact one."""
    wide = numbers(exact)
    return float(np.linalg.norm(numbers(found) - wide) / np.linalg.norm(wide))
