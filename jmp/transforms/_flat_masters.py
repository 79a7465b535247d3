"""Master parameters as one flat vector, for models with hundreds of small tensors.

An optimizer on one vector launches a few kernels, one on a tree launches a kernel for each tensor.
The price is bytes: gradients are gathered into the vector, and parameters are cut out of it.
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

from jmp._messages import described
from jmp.dtypes import is_half
from jmp.transforms._rounding import difference_to, rounded
from jmp.trees import (
    PyTree,
    cast_to_at_least_float32,
    is_floating,
    leaves_by_path,
    path_string,
    register_for_export,
)


@register_for_export
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
            vector=as_one_vector([leaf for _, leaf in found], dtype),
            paths=tuple(keystr(path) for path, _ in found),
            shapes=tuple(leaf.shape for _, leaf in found),
        )

    def leaves(self) -> dict[str, jax.Array]:
        """Returns every master, in the vector's dtype and its parameter's shape, by path."""
        return dict(zip(self.paths, split(self.vector, self.shapes), strict=True))


@dataclasses.dataclass(frozen=True)
class InOneVector:
    """Masters as `FlatMasters`, for `with_master_params`; the methods are those of `InTree`."""

    dtype: DTypeLike

    def first(
        self, params: optax.Params, init: Callable[[optax.Params], optax.OptState]
    ) -> FlatMasters:
        masters = FlatMasters.from_tree(params, self.dtype)
        _check_takes_a_vector(init, params, self.dtype)
        return masters

    def seen_by_inner(self, masters: FlatMasters, params: optax.Params) -> jax.Array:
        return masters.vector

    def gradients_for_inner(self, updates: optax.Updates, params: optax.Params) -> jax.Array:
        _check_gradients(updates, params)
        return as_one_vector(cast_to_at_least_float32(updates), self.dtype)

    def after(
        self,
        masters: FlatMasters,
        params: optax.Params,
        new: jax.Array,
        updates: jax.Array,
        count: jax.Array | None,
    ) -> tuple[FlatMasters, optax.Updates]:
        masters = dataclasses.replace(masters, vector=new)
        leaves, structure = jax.tree.flatten(params)
        pairs = zip(leaves, masters.leaves().values(), strict=True)
        follow = [difference_to(rounded(master, p.dtype), p) for p, master in pairs]
        return masters, jax.tree.unflatten(structure, follow)


def as_one_vector(tree: PyTree, dtype: DTypeLike) -> jax.Array:
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

    Returns: the mapped tree, and a list of the vectors that its leaves were cut from and of the
      leaves that are not floating. XLA puts the leaves of a vector together again at no cost.
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
        vectors.append(function(as_one_vector(group, dtype)))
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


def _check_gradients(gradients: optax.Updates, params: optax.Params) -> None:
    """Raises ValueError if gradients would land beside their parameters in the vector."""
    got, expected = (
        {path: jnp.shape(leaf) for path, leaf in leaves_by_path(tree).items()}
        for tree in (gradients, params)
    )
    if got != expected:
        raise ValueError(
            "with_master_params(..., flat_master=True) got gradients of the shapes "
            f"{described(got)}; expected those of the parameters, {described(expected)}. "
            "Differentiate with respect to the parameters that the optimizer holds."
        )


def _check_takes_a_vector(
    init: Callable[[optax.Params], optax.OptState], params: optax.Params, dtype: DTypeLike
) -> None:
    """Raises ValueError if an optimizer keeps more or fewer numbers of a vector than of `params`.

    That is true of Adafactor, Muon, masks and labels by path. LAMB and others that take the norm of
    each tensor keep as many: what they compute is not compared.
    """
    masters = jax.tree.map(lambda param: jax.ShapeDtypeStruct(param.shape, dtype), params)
    vector = jax.eval_shape(lambda tree: as_one_vector(tree, dtype), masters)
    kept, cause = [], None
    for tree in (masters, vector):
        try:
            state = jax.eval_shape(init, tree)
        except Exception as error:  # whatever an optimizer raises
            cause = error
        else:
            kept.append(sum(leaf.size for leaf in jax.tree.leaves(state)))
    if cause is None and kept[0] == kept[1]:
        return
    reason = f"its init raised {type(cause).__name__}" if cause else "its state has other sizes"
    raise ValueError(
        "with_master_params(..., flat_master=True) got an optimizer that does not treat one vector "
        f"as the tensors it is made of ({reason}). Leave flat_master=True out; or put masks, "
        "labels and what looks at the shapes of tensors around it with optax.partition."
    ) from cause
