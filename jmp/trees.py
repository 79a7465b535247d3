"""Functions of whole pytrees: cast the leaves, check them, select between two trees.

*Floating leaves* are arrays (JAX, NumPy, NumPy scalars) of a real floating dtype of at least 16
bits. Every other leaf (integers, booleans, PRNG keys, float0, None, strings, callables, Python
numbers, float8) passes a cast unchanged.
"""

import json
from collections.abc import Callable
from typing import Any, TypeAlias, TypeGuard, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.typing import ArrayLike, DTypeLike

from jmp._messages import shape_text, where_trees_differ
from jmp.dtypes import FLOAT32, at_least_float32, floating_dtype, half_dtype, is_castable

T = TypeVar("T")
C = TypeVar("C", bound=type)
# Containers in containers, with leaves of any kind: more than a type can say.
PyTree: TypeAlias = Any
AnyArray = jax.Array | np.ndarray | np.generic


def is_array(leaf: object) -> TypeGuard[AnyArray]:
    """Returns whether `leaf` is a JAX array (or tracer), a NumPy array or a NumPy scalar."""
    return isinstance(leaf, AnyArray)


def holds_numbers(leaf: object) -> TypeGuard[AnyArray]:
    """Returns whether `leaf` is an array that JAX takes; one of strings or objects is not."""
    return is_array(leaf) and not (isinstance(leaf, np.ndarray) and leaf.dtype.kind in "OSUMm")


def stands_for_numbers(leaf: Any) -> bool:
    """Returns whether a leaf is an array, or a `jax.ShapeDtypeStruct` in the place of one."""
    return isinstance(leaf, jax.ShapeDtypeStruct) or holds_numbers(leaf)


def is_complex(leaf: object) -> TypeGuard[AnyArray]:
    """Returns whether `leaf` is an array of complex numbers that JAX knows."""
    return is_array(leaf) and leaf.dtype.type in (np.complex64, np.complex128)


def is_floating(leaf: object) -> TypeGuard[AnyArray]:
    """Returns whether `leaf` is an array of real floats of at least 16 bits."""
    return is_array(leaf) and is_castable(leaf.dtype)


def is_inexact_array(leaf: object) -> bool:
    """Returns whether `leaf` is an array of what can be differentiated: real floats, or complex."""
    return is_floating(leaf) or is_complex(leaf)


def as_jax_array(leaf: AnyArray | complex) -> jax.Array:
    """Returns an array leaf as a JAX array, in the machine's byte order."""
    if isinstance(leaf, np.ndarray):
        leaf = leaf.astype(leaf.dtype.newbyteorder("="), copy=False)
    return jnp.asarray(leaf)


def cast_leaf(leaf: Any, dtype: DTypeLike) -> Any:
    """Casts one leaf if it is floating; a leaf that has the dtype already is returned as it is."""
    if not is_floating(leaf) or leaf.dtype == dtype:
        return leaf
    with np.errstate(over="ignore"):  # NumPy leaves: 1e6 becomes inf in float16, as it does in JAX
        return leaf.astype(dtype)


def cast_floating(tree: T, dtype: DTypeLike) -> T:
    """Casts the floating leaves of `tree` to `dtype`.

    Args:
      tree: any pytree. Integer, bool, key, float0, float8 and non-array leaves pass unchanged, and
        so do loss scales.
      dtype: a real floating dtype or its name, such as "bfloat16".

    Returns: the same structure and shapes.
    Raises: ValueError if `dtype` is not real floating, TypeError if it is no dtype.

    >>> cast_floating({"w": jnp.ones(2), "step": 3}, "bfloat16")["w"].dtype
    dtype(bfloat16)
    """
    target = floating_dtype(dtype, "dtype")
    # Its class may refuse casts: a loss scale of 2**16 would be infinite in float16.
    keeps_its_dtypes = lambda node: getattr(type(node), "keeps_its_dtypes", False)
    return jax.tree.map(lambda x: cast_leaf(x, target), tree, is_leaf=keeps_its_dtypes)


def cast_to_full(tree: T) -> T:
    """Casts the floating leaves of `tree` to float32, float64 included.

    It is `cast_floating(tree, "float32")`: structure and shapes stay, other leaves pass unchanged.

    >>> cast_to_full(jnp.ones(2, jnp.float16)).dtype
    dtype('float32')
    """
    return cast_floating(tree, FLOAT32)


def cast_to_half(tree: T) -> T:
    """Casts the floating leaves of `tree` to `half_dtype()`: bfloat16 on a TPU, else float16.

    It is `cast_floating(tree, half_dtype())`: structure and shapes stay, other leaves pass
    unchanged.

    >>> cast_to_half({"w": jnp.ones(2), "step": 3})["step"]
    3
    """
    return cast_floating(tree, half_dtype())


def all_finite(tree: PyTree) -> jax.Array:
    """Returns a bool scalar: no floating or complex leaf of `tree` holds an infinity or a NaN.

    A Python number counts as an array of JAX's default dtype.

    Each element is checked, because a sum of finite values may be infinite, as 6e4 + 6e4 is in
    float16. A tree without such leaves is finite.

    Args:
      tree: any pytree. Leaves that hold no numbers (None, strings, callables, keys), integers and
        float8 leaves are passed over.

    Returns: a bool scalar array; under jit a traced one.

    >>> bool(all_finite({"w": jnp.array([6e4, 6e4], jnp.float16), "step": 3}))
    True
    """
    with np.errstate(over="ignore"):  # 1e300 is infinite in float32
        checks = [
            jnp.isfinite(as_jax_array(leaf)).all()
            for leaf in jax.tree.leaves(tree)
            if is_inexact_array(leaf) or isinstance(leaf, float | complex)
        ]
    return jnp.stack(checks).all() if checks else jnp.array(True)


def select_tree(pred: ArrayLike, on_true: T, on_false: T) -> T:
    """Selects one of two trees by a scalar flag, leaf by leaf, with `jnp.where`.

    Every array leaf is selected: floats, integers, booleans and PRNG keys alike, and Python numbers
    as arrays, of the other side's dtype or JAX's default one (float32, int32). A select keeps
    donated buffers in place; `lax.cond` would copy them.

    Args:
      pred: bool scalar (array, NumPy or Python).
      on_true, on_false: trees of one structure, leaves of equal shapes and dtypes. Leaves that hold
        no numbers (float0, None, strings, callables) are taken from `on_true`.

    Returns: `on_true` where `pred` holds, else `on_false`.

    Raises:
      AssertionError: `pred` is not a bool scalar (an AssertionError as in DeepMind's `jmp`).
      ValueError: structures, shapes or dtypes differ; or integers of NumPy are beyond JAX's dtype.

    >>> int(select_tree(False, {"step": 3}, {"step": 2})["step"])
    2
    """
    pred = jnp.asarray(pred)
    if pred.ndim != 0 or pred.dtype != jnp.bool_:
        raise AssertionError(
            f"select_tree: expected boolean scalar, got {pred.dtype} of shape {pred.shape}."
        )
    return select_leaves(lambda leaf: pred, on_true, on_false)


def select_leaves(flag_of: Callable[[Any], jax.Array], on_true: T, on_false: T) -> T:
    """Selects as `select_tree` does, each leaf that holds numbers by the flag `flag_of(leaf)`."""
    first: Any = jax.tree.structure(on_true)
    if first != jax.tree.structure(on_false):
        raise ValueError(
            "select_tree got trees of different structure: "
            f"{where_trees_differ(on_true, on_false)}. An optimizer state must keep its structure "
            "from step to step."
        )
    select = lambda path, a, b: _select_leaf(flag_of, a, b, path)
    return jax.tree_util.tree_map_with_path(select, on_true, on_false)


def _select_leaf(flag_of: Callable[[Any], jax.Array], a: Any, b: Any, path: tuple[Any, ...]) -> Any:
    if not (_can_be_selected(a) and _can_be_selected(b)):
        return a
    where = jax.tree_util.keystr(path)[:200] or "the root"
    given = (a, b)
    # Python numbers have no dtype of their own and take the other side's; the rest must agree.
    a, b = (as_jax_array(leaf) if is_array(leaf) else leaf for leaf in given)
    for leaf, taken in zip(given, (a, b), strict=True):
        of_numpy = isinstance(leaf, (np.ndarray, np.generic)) and leaf.dtype.kind in "iu"
        if of_numpy and (leaf.astype(taken.dtype) != leaf).any():  # JAX wraps in silence
            raise ValueError(
                f"select_tree got integers that {taken.dtype} does not hold at {where}: "
                f"{shape_text(leaf)}. Keep them out of the tree, or set jax_enable_x64."
            )
    if len({(leaf.dtype, leaf.shape) for leaf in (a, b) if is_array(leaf)}) > 1:
        raise ValueError(
            f"select_tree got leaves that differ at {where}: {shape_text(a)} and {shape_text(b)}. "
            "Cast them to one dtype and shape first: a state must keep its types from step to step."
        )
    return jnp.where(flag_of(a), a, b)


def _can_be_selected(leaf: Any) -> bool:
    if not is_array(leaf):
        return isinstance(leaf, (bool, int, float, complex))
    if isinstance(leaf, jax.Array):
        return leaf.dtype != jax.dtypes.float0  # the gradient of an integer
    # NumPy's strings, objects, dates and long doubles cannot be put on a device.
    on_device = jnp.issubdtype(leaf.dtype, np.number) or leaf.dtype == np.bool_
    return on_device and leaf.dtype not in (np.dtype(np.longdouble), np.dtype(np.clongdouble))


def path_string(path: tuple[Any, ...]) -> str:
    """Returns a key path as names joined by slashes, as rules match it: "encoder/Dense_0/kernel".

    >>> [path_string(p) for p, _ in jax.tree_util.tree_leaves_with_path({"a": {"b": [1]}})]
    ['a/b/0']
    """
    return jax.tree_util.keystr(path, simple=True, separator="/")


def leaves_by_path(tree: PyTree) -> dict[str, Any]:
    """Returns the leaves of a tree by their paths, as `jax.tree_util.keystr` writes them.

    Such a path tells apart what `path_string` spells alike: {"a/b": 1} and {"a": {"b": 1}}.

    >>> leaves_by_path({"a": {"b": 1}})
    {"['a']['b']": 1}
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def cast_to_at_least_float32(tree: T) -> T:
    """Casts half leaves to float32; float32 and float64 leaves stay as they are."""
    wide = lambda leaf: cast_leaf(leaf, at_least_float32(leaf.dtype)) if is_floating(leaf) else leaf
    return jax.tree.map(wide, tree)


# What `jax.export` writes: exported programs take and return classes of this package.

_exported: set[str] = set()


def register_for_export(cls: C) -> C:
    """Tells `jax.export` how to write a pytree class; returns the class.

    It writes the class's name and its static parts: numbers, strings and tuples of them. A second
    class of the same name, as when a cell of a notebook runs again, is left out.
    """
    # A file of this package may move, and what was written before is still read.
    module = "jmp" if cls.__module__.startswith("jmp.") else cls.__module__
    name = f"{module}.{cls.__qualname__}"
    if name in _exported:
        return cls
    _exported.add(name)
    if issubclass(cls, tuple):
        export.register_namedtuple_serialization(cls, serialized_name=name)
    else:
        left_out = lambda value: {"left out": getattr(value, "__name__", type(value).__name__)}
        write = lambda static: json.dumps(static, default=left_out).encode()
        read = lambda written: _as_tuples(json.loads(bytes(written)))
        export.register_pytree_node_serialization(
            cls, serialized_name=name, serialize_auxdata=write, deserialize_auxdata=read
        )
    return cls


class LeftOut:
    """A placeholder for a function in an exported tree: it equals any function, and cannot be
    called."""

    def __eq__(self, other: object) -> bool:
        return callable(other)

    __hash__ = object.__hash__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            "This function was left out when the program was exported. Put it back into the state "
            "that the program returned: state.replace(apply_fn=..., tx=...)."
        )


def _as_tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return LeftOut()
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value
