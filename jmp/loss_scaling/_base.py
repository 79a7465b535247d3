"""What every loss scale shares: the interface, and the arithmetic of scaling a tree.

The scale is a float32 power of two in all presets: multiplying by it and by its reciprocal is then
exact, and scaling commutes with rounding. It is float32 and never half, because 2**16 is already
infinite in float16. (Micikevicius et al. 2018, "Mixed Precision Training", section 3.2.)
"""

import abc
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jmp.dtypes import at_least_float32
from jmp.trees import as_jax_array, is_array, is_complex, is_floating

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
      loss_scale: the factor in force, a float32 scalar array or, where it never changes, a float.

    >>> scale = DynamicLossScale(8.0)
    >>> isinstance(scale, LossScale), float(scale.scale(jnp.float16(0.5)))
    (True, 4.0)
    >>> scale.unscale(jnp.ones(2, jnp.float16))  # in float32
    Array([0.125, 0.125], dtype=float32)
    >>> float(scale.adjust(grads_finite=False).loss_scale)
    4.0
    """

    keeps_its_dtypes: ClassVar[bool] = True  # casts of a whole tree leave a loss scale alone
    loss_scale: Any  # the factor in force: a Python float, or a float32 scalar array

    @abc.abstractmethod
    def scale(self, tree: T) -> T:
        """Multiplies every floating or complex leaf by the scale, in at least float32.

        Half leaves and Python numbers come back as float32 (complex64) arrays, float64 stays. All
        other leaves pass unchanged: arrays of integers or booleans, True and False, None, keys.
        """

    @abc.abstractmethod
    def unscale(self, tree: T) -> T:
        """Casts every floating leaf to at least float32 and divides it by the scale.

        The same leaves as `scale` are touched.

        Half gradients are cast *first*: divided in float16 they would flush to zero again.
        """

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


def multiply_tree(tree: T, factor: ArrayLike) -> T:
    """Multiplies the floating and complex leaves of `tree` by float32 `factor`."""
    factor_in = lambda dtype: jnp.asarray(factor, dtype)
    scaled: T = jax.tree.map(lambda leaf: _scaled_leaf(leaf, factor_in), tree)
    return scaled


def divide_tree(tree: T, divisor: ArrayLike) -> T:
    """Multiplies the floating and complex leaves of `tree` by the reciprocal of `divisor`."""
    # The reciprocal is taken in the leaf's own precision: exact for powers of two in any case.
    factor_in = lambda dtype: 1 / jnp.asarray(divisor, dtype)
    scaled: T = jax.tree.map(lambda leaf: _scaled_leaf(leaf, factor_in), tree)
    return scaled


def _scaled_leaf(leaf: Any, factor_in: Callable[[np.dtype], jax.Array]) -> Any:
    # np.float64 is a float, and an array too; a bool is an int, and a flag rather than a number.
    if isinstance(leaf, int | float | complex) and not (is_array(leaf) or isinstance(leaf, bool)):
        with np.errstate(over="ignore"):
            dtype = jnp.complex64 if isinstance(leaf, complex) else jnp.float32
            leaf = jnp.asarray(float(leaf) if isinstance(leaf, int) else leaf, dtype)
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
