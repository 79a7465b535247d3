"""The common parts of all loss scales, in this order.

  - the interface: `LossScale`;
  - the arithmetic of scaling a tree: `multiply_tree`;
  - scales as pytrees: `register_state`, `replace_leaves`;
  - checks of the arguments of constructors: `scale_bound`, and for leaves `dynamic_scale` and
    `step_count`;
  - the check of the argument of `adjust`, and of other values that should be arrays: `finite_flag`,
    `array_if_any`.

The scale is a float32 power of two in all presets: multiplying by it and by its reciprocal is then
exact, and scaling commutes with rounding. It is float32 and never half, because 2**16 is already
infinite in float16. (Micikevicius et al. 2018, "Mixed Precision Training", section 3.2.)

Two different moments need two different checks. A *constructor* looks at values and refuses bad
ones. *Unflattening* happens on every return from jit and inside every tree transformation: it must
accept placeholders of any kind, and a look at a value there would wait for the device. It only
brings arrays back to their fixed dtype. (`jmp`'s casts pass over loss scales; casting 2**16 to
float16 by hand makes an infinity before anything here can see it.)
"""

import abc
import copy
import dataclasses
import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jmp._messages import PrecisionWarning, check_number, users_stacklevel, wrong
from jmp.dtypes import at_least_float32
from jmp.trees import as_jax_array, is_array, is_complex, is_floating, register_for_export

T = TypeVar("T")

# Within these bounds a scale and its reciprocal are both normal float32 numbers. Beyond them the
# reciprocal of the scale (2**-127) is subnormal, and XLA flushes it to zero.
SMALLEST_SCALE = 2.0**-126
LARGEST_SCALE = 2.0**126


class LossScale(abc.ABC):
    """Multiplies a loss, so that small gradients do not become zero in half, and divides gradients.

    The base class of all loss scales. They are immutable pytrees: they pass through jit, scan, vmap
    and checkpoints, and `adjust` returns a new one. Unscale gradients with the scale that was in
    force when the loss was scaled, and adjust afterwards; `jmp.transforms.with_loss_scale` does
    both in that order.

    Attributes:
      loss_scale: the factor in force, a float32 scalar array or, if it never changes, a float.

    >>> scale = DynamicLossScale(8.0)
    >>> isinstance(scale, LossScale), float(scale.scale(jnp.float16(0.5)))
    (True, 4.0)
    >>> scale.unscale(jnp.ones(2, jnp.float16))  # in float32
    Array([0.125, 0.125], dtype=float32)
    >>> float(scale.adjust(grads_finite=False).loss_scale)
    4.0
    """

    keeps_its_dtypes: ClassVar[bool] = True  # casts of a whole tree pass over a loss scale
    loss_scale: Any  # the factor in force: a Python float, or a float32 scalar array

    def scale(self, tree: T) -> T:
        """Multiplies every floating or complex leaf by the scale, in at least float32.

        Half leaves and Python numbers come back as float32 (complex64) arrays, float64 stays. All
        other leaves pass unchanged: arrays of integers or booleans, True and False, None, keys.
        """
        return multiply_tree(tree, self.loss_scale)

    def unscale(self, tree: T) -> T:
        """Casts every floating leaf to at least float32 and divides it by the scale.

        The same leaves as `scale` are touched.

        Half gradients are cast *first*: divided in float16 they would flush to zero again.
        """
        # The reciprocal is taken in the leaf's own precision: exact for powers of two in any case.
        return _scaled(tree, lambda dtype: 1 / jnp.asarray(self.loss_scale, dtype))

    @abc.abstractmethod
    def adjust(self, grads_finite: ArrayLike) -> "LossScale":
        """Returns the scale for the next step.

        Args:
          grads_finite: bool scalar, array or Python: whether all gradients of this step, unscaled
            in float32, were finite (`jmp.all_finite`).

        Returns: a loss scale of the same class, dtypes and shapes.
        Raises: TypeError for a flag that is not boolean, ValueError for one that is no scalar, in
          classes that read it.
        """


# The arithmetic of scaling a tree.


def multiply_tree(tree: T, factor: ArrayLike) -> T:
    """Multiplies the floating and complex leaves of `tree` by float32 `factor`."""
    return _scaled(tree, lambda dtype: jnp.asarray(factor, dtype))


def _scaled(tree: T, factor_in: Callable[[np.dtype], jax.Array]) -> T:
    """Multiplies leaves by a factor, which `factor_in` gives in their dtype."""

    def scaled(leaf: Any) -> Any:
        # np.float64 is a float, and an array too; a bool is an int, and a flag, no number.
        if isinstance(leaf, int | float | complex) and not isinstance(leaf, bool | np.generic):
            with np.errstate(over="ignore"):
                leaf = np.asarray(leaf, np.complex64 if isinstance(leaf, complex) else np.float32)
        if is_floating(leaf):
            # Without x64 a float64 NumPy leaf becomes float32, as everywhere in JAX.
            dtype = jax.dtypes.canonicalize_dtype(at_least_float32(leaf.dtype))
            return as_jax_array(leaf).astype(dtype) * factor_in(dtype)
        # A complex parameter's gradient is scaled like any other; no complex type is half. Part by
        # part: the complex product of inf + 0j and a real number has a NaN in it.
        if is_complex(leaf):
            leaf = as_jax_array(leaf)
            factor = factor_in(leaf.real.dtype)
            return jax.lax.complex(leaf.real * factor, leaf.imag * factor)
        return leaf

    return jax.tree.map(scaled, tree)


# Scales as pytrees.


SAVED: list[type] = []  # the classes of loss scales, which Flax is taught to save


def register_state(cls: type[T]) -> type[T]:
    """Registers a frozen dataclass whose array fields are leaves and the others static.

    A field is a leaf if its metadata holds `leaf=dtype`. This is `register_dataclass` but for one
    thing: unflattening does not run the constructor's checks of values (see the module's text).
    The class can be exported and saved.
    """
    SAVED.append(cls)
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]  # T stands for dataclasses
    leaves = {field.name: field.metadata["leaf"] for field in fields if "leaf" in field.metadata}
    static = [field.name for field in fields if field.name not in leaves]

    def flatten_with_keys(node: T) -> tuple[list[Any], tuple[Any, ...]]:
        children = [(jax.tree_util.GetAttrKey(name), getattr(node, name)) for name in leaves]
        return children, tuple(getattr(node, name) for name in static)

    def unflatten(meta: tuple[Any, ...], children: Iterable[Any]) -> T:
        node = object.__new__(cls)
        vars(node).update(zip(static, meta, strict=True))
        for (name, dtype), value in zip(leaves.items(), children, strict=True):
            if is_array(value) and value.dtype != dtype and jnp.issubdtype(value.dtype, np.number):
                value = value.astype(dtype)
            vars(node)[name] = value
        return node

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten)
    return register_for_export(cls)


def replace_leaves(node: T, **leaves: Any) -> T:
    """Returns a copy of `node` with other leaves, without running the constructor's checks."""
    changed = copy.copy(node)
    vars(changed).update(leaves)
    return changed


# Checks of the arguments of constructors, beside `check_number`.


def scale_bound(value: object, name: str) -> float:
    """Returns a floor or ceiling as a Python float within the representable scales.

    Zero is accepted for a floor and means the smallest scale there is.
    """
    number = check_number(value, name, "a number that is not negative", lambda n: n >= 0)
    _warn_if_integer(value, name)
    return within_scales(number)


def within_scales(number: float) -> float:
    """Returns the nearest number between the smallest and the largest scale."""
    return float(min(max(number, SMALLEST_SCALE), LARGEST_SCALE))


def dynamic_scale(value: Any, smallest: float, largest: float) -> jax.Array:
    """Returns a starting scale, which may be traced, as a float32 array within its bounds."""
    expected = (
        "a positive finite number such as 2.0**15. To switch loss scaling off use NoOpLossScale()"
    )
    _check_leaf(value, "loss_scale", expected, lambda numbers: (numbers > 0) & (numbers < math.inf))
    _warn_if_integer(value, "loss_scale")
    if not isinstance(value, jax.core.Tracer):  # before float32 makes an infinity of it
        value = np.clip(np.asarray(value, np.float64), smallest, largest)
    return jnp.clip(jnp.asarray(value, jnp.float32), smallest, largest)


def step_count(value: Any, name: str) -> jax.Array:
    """Returns a counter, which may be traced, as an int32 array."""
    expected = "a count from 0 to 2**31 - 1"
    _check_leaf(value, name, expected, lambda numbers: (numbers >= 0) & (numbers < 2**31))
    count = int(value) if isinstance(value, float) else value  # 1e9 + 1 is no float32
    return jnp.asarray(count).astype(jnp.int32)


def _check_leaf(
    value: Any, name: str, expected: str, are_right: Callable[[np.ndarray], np.ndarray]
) -> None:
    """Raises TypeError for what is no number, or one for each member; ValueError for wrong ones."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number and not (is_array(value) and jnp.issubdtype(value.dtype, np.number)):
        raise wrong(TypeError, name, value, expected)
    if isinstance(value, jax.core.Tracer):
        return
    try:
        numbers = np.asarray(value, np.float64)
    except OverflowError:  # a Python integer beyond float64
        numbers = np.asarray(math.inf)
    if not np.all(are_right(numbers)):
        raise wrong(ValueError, name, value, expected)


def _warn_if_integer(value: object, name: str) -> None:
    dtype = value.dtype if is_array(value) else np.result_type(type(value))
    if not jnp.issubdtype(dtype, jnp.floating):
        text = f"Expected floating type for {name}, got {dtype}"
        warnings.warn(text, PrecisionWarning, stacklevel=users_stacklevel())


# The check of the argument of `adjust`, and of other values that should be arrays.


def finite_flag(grads_finite: ArrayLike, scale: ArrayLike) -> jax.Array:
    """Returns the flag of `adjust` as a bool array of the scale's shape."""
    expected = "a boolean, as jmp.all_finite(gradients) returns it"
    flag = array_if_any(grads_finite)
    if flag is None:
        raise wrong(TypeError, "adjust", grads_finite, expected)
    if flag.dtype != jnp.bool_:
        raise TypeError(f"adjust got grads_finite of dtype {flag.dtype}; expected {expected}.")
    if flag.shape != jnp.shape(scale):
        raise ValueError(
            f"adjust got grads_finite of shape {flag.shape}; expected boolean scalar: one flag for "
            "all gradients, as jmp.all_finite returns it."
        )
    return flag


def array_if_any(value: object) -> jax.Array | None:
    """Returns a value as a JAX array; None if it cannot be made one."""
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError):
        return None
