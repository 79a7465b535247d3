"""Master parameters as one flat vector, for models with hundreds of small tensors.

An optimizer on one vector launches a few kernels where one on a tree launches one a tensor. The
price is bytes: gradients are gathered into the vector, and parameters are cut out of it.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import keystr, tree_leaves_with_path
from jax.typing import DTypeLike

from jmp.dtypes import is_half
from jmp.trees import PyTree, is_floating, path_string


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FlatMasters:
    """The masters of a tree of half parameters, one after the other, in the order of its leaves.

    A pytree with one leaf, the vector; the layout is static.

    Attributes:
      vector: float32 or float64, of as many elements as the parameters have.
      paths: the parameters' paths, as `jax.tree_util.keystr` writes them.
      shapes: the parameters' shapes.

    >>> flat = FlatMasters.from_tree({"b": jnp.ones(2, jnp.float16)}, "float32")
    >>> flat.vector.shape, flat.leaves()["['b']"].dtype
    ((2,), dtype('float32'))
    """

    vector: jax.Array
    paths: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    shapes: tuple[tuple[int, ...], ...] = dataclasses.field(metadata={"static": True})

    @classmethod
    def from_tree(cls, params: optax.Params, dtype: DTypeLike) -> "FlatMasters":
        """Returns masters in `dtype` of parameters that are all of one half dtype.

        Raises: ValueError for no parameters at all, more than one dtype, or one that is not half.
        """
        found = tree_leaves_with_path(params)
        _check_one_half_dtype(found)
        return cls(
            vector=flatten([leaf for _, leaf in found], dtype),
            paths=tuple(keystr(path) for path, _ in found),
            shapes=tuple(leaf.shape for _, leaf in found),
        )

    def leaves(self) -> dict[str, jax.Array]:
        """Returns every master, in the vector's dtype and its parameter's shape, by path."""
        return dict(zip(self.paths, split(self.vector, self.shapes), strict=True))


def flatten(tree: PyTree, dtype: DTypeLike) -> jax.Array:
    """Returns the leaves of `tree` in `dtype`, one after the other in a vector."""
    return jnp.concatenate([jnp.ravel(leaf).astype(dtype) for leaf in jax.tree.leaves(tree)])


def split(vector: jax.Array, shapes: Sequence[tuple[int, ...]]) -> list[jax.Array]:
    """Returns the arrays of these shapes that follow one another in `vector`."""
    ends = list(itertools.accumulate(math.prod(shape) for shape in shapes))
    parts = jnp.split(vector, ends[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def map_vectors(
    function: Callable[[jax.Array], jax.Array], tree: PyTree
) -> tuple[PyTree, list[jax.Array]]:
    """Maps a pointwise function over the leaves of `tree`, all floating ones of a dtype at a time.

    Returns: the mapped tree, and the vectors that its leaves were cut from beside the leaves that
      are not floating. XLA puts the leaves of a vector together again at no cost.
    """
    leaves, structure = jax.tree.flatten(tree)
    vectors = []
    groups: dict[np.dtype, list[int]] = {}
    for position, leaf in enumerate(leaves):
        if is_floating(leaf):
            groups.setdefault(leaf.dtype, []).append(position)
        else:
            leaves[position] = function(leaf)
            vectors.append(leaves[position])
    for dtype, positions in groups.items():
        group = [leaves[position] for position in positions]
        vectors.append(function(flatten(group, dtype)))
        parts = split(vectors[-1], [leaf.shape for leaf in group])
        for position, part in zip(positions, parts, strict=True):
            leaves[position] = part
    return jax.tree.unflatten(structure, leaves), vectors


def _check_one_half_dtype(found: list[tuple[tuple[Any, ...], Any]]) -> None:
    examples: dict[str, str] = {}
    for path, leaf in found:
        dtype = str(np.dtype(getattr(leaf, "dtype", type(leaf))))
        examples.setdefault(dtype, path_string(path))
    if len(examples) == 1 and is_floating(found[0][1]) and is_half(found[0][1].dtype):
        return
    got = ", ".join(f"{dtype} ({path or 'the root'})" for dtype, path in examples.items())
    raise ValueError(
        f"with_master_params(..., flat_master=True) got parameters of {got or 'no dtype at all'}; "
        "expected half ones of a single dtype. Give every dtype a group of its own with "
        "optax.partition, and float32 parameters an optimizer without masters."
    )
