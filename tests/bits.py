"""Comparison of trees bit by bit, which sees -0.0 and NaN."""

import jax
import jax.numpy as jnp
import numpy as np


def bits(tree):
    """The shape, dtype and bytes of every array in `tree`."""

    def leaf_bits(leaf):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            leaf = jax.random.key_data(leaf)
        return (leaf.shape, str(leaf.dtype), np.asarray(leaf).tobytes())

    return [leaf_bits(leaf) for leaf in jax.tree.leaves(tree)]
