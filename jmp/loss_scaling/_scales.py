"""Loss scales: the interface `LossScale`, one that does nothing, a constant one, two dynamic ones.

A dynamic scale backs off on overflow and grows after a period of finite steps. The presets behind
them have the defaults of other libraries. Each of these functions takes `enabled`: False gives a
`NoOpLossScale`, so that one switch turns scaling off and the rest of the script stays.

The scale is a float32 power of two in all presets: multiplying by it and by its reciprocal is then
exact, and scaling commutes with rounding. It is float32 and never half, because 2**16 is already
infinite in float16. (Micikevicius et al. 2018, "Mixed Precision Training", section 3.2.)

Two different moments need two different checks. A *constructor* looks at values and refuses bad
ones. *Unflattening* happens on every return from jit and inside every tree transformation: it must
accept placeholders of any kind, and a look at a value there would wait for the device. It only
brings arrays back to their fixed dtype. (`jmp`'s casts pass over loss scales; casting 2**16 to
float16 by hand makes an infinity before anything here can see it.)
"""

import copy
import dataclasses
import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Self, TypeVar

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


class LossScale:
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

    def adjust(self, grads_finite: ArrayLike) -> Self:
        """Returns the scale for the next step: itself, unless a class says otherwise.

        Args:
          grads_finite: bool scalar, array or Python: whether all gradients of this step, unscaled
            in float32, were finite (`jmp.all_finite`).

        Returns: a loss scale of the same class, dtypes and shapes.
        Raises: TypeError for a flag that is not boolean, ValueError for one that is no scalar, in
          classes that read it.
        """
        return self


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


def _replace_leaves(node: T, **leaves: Any) -> T:
    """Returns a copy of `node` with other leaves, without running the constructor's checks."""
    changed = copy.copy(node)
    vars(changed).update(leaves)
    return changed


# The loss scales.


@register_state
@dataclasses.dataclass(frozen=True)
class NoOpLossScale(LossScale):
    """Scales by one: trees come back as the very same object. A pytree without leaves.

    Attributes:
      loss_scale: always 1.0.

    >>> NoOpLossScale().scale(3.0)
    3.0
    """

    loss_scale = 1.0  # no field

    def scale(self, tree: T) -> T:
        """Returns `tree` itself."""
        return tree

    def unscale(self, tree: T) -> T:
        """Returns `tree` itself."""
        return tree


@register_state
@dataclasses.dataclass(frozen=True)
class StaticLossScale(LossScale):
    """Scales by a constant, such as 8, 32, 128 or 512 (Micikevicius et al. 2018, section 3.2).

    A pytree without leaves: the constant is part of the compiled program, and a scale that jit
    returns equals the one that it was given.

    Attributes:
      loss_scale: the constant, a Python float, brought into [2**-126, 2**126], where its float32
        reciprocal exists. Zero is accepted here, as in DeepMind's class, and refused by all that
        take a loss scale: it would make every gradient zero, and unscaling divides by it.

    Raises:
      TypeError: not one number, or a tracer (its value must be known when the step is compiled).
      ValueError: negative, infinite or NaN.

    >>> scale = StaticLossScale(512)
    >>> float(scale.unscale(scale.scale(jnp.float16(3.0))))
    3.0
    """

    loss_scale: float

    def __post_init__(self) -> None:
        expected = (
            "a finite number that is not negative, such as 512. A scale that changes from step to "
            "step is a DynamicLossScale"
        )
        is_right = lambda number: 0 <= number < math.inf
        number = check_number(self.loss_scale, "StaticLossScale", expected, is_right)
        in_float32 = float(np.float32(_within_scales(number)))  # it multiplies in float32
        object.__setattr__(self, "loss_scale", in_float32 if number else 0.0)


# Dynamic scales.

_LARGEST_FACTOR = 2.0**127  # the largest power of two that float32 has
_LARGEST_COUNT = 2**31 - 1  # of int32
_COUNT = {"leaf": jnp.dtype("int32")}
# A scale that a checkpoint brought as NaN, zero or the like goes on from here: if it is too large,
# a few steps are skipped; if it is too small, gradients underflow for thousands of steps.
_RESTART = 2.0**15


@register_state
@dataclasses.dataclass(frozen=True)
class DynamicLossScale(LossScale):
    """A loss scale that comes down after an overflow and grows after `period` finite steps.

    After an overflow the scale is multiplied by the backoff factor and the count restarts; after
    `period` finite steps in a row it is multiplied by the growth factor and the count restarts::

        finite and count + 1 == period:   scale = min(scale * growth, ceiling);  count = 0
        finite:                           count = count + 1
        not finite:                       scale = max(scale * backoff, floor);   count = 0

    (Micikevicius et al. 2018, section 3.2; arguments in the order of DeepMind's `jmp`.)

    The scale is float32. With factors that are powers of two it is exact; with others it is rounded
    at each change, and drifts by units in the last place from torch's, which is computed in double.

    Values that were restored from a checkpoint are checked by the next `adjust`. It sets a scale
    beyond the floor or the ceiling to that bound; one that is NaN, infinite, zero or negative to
    2**15, the start of a new scale; and a negative count to zero. The count stops at 2**31 - 1.

    Attributes:
      loss_scale: float32 scalar, a leaf. Brought into [min_loss_scale, max_loss_scale].
      counter: int32 scalar, a leaf: finite steps since the last change.
      period: finite steps between two growths, at least 1; above 2**31 - 1, such as infinity, the
        scale never grows.
      factor: growth, and the inverse of the backoff, unless these are given on their own. Above 1.
      min_loss_scale: floor; 0 means the smallest there is, 2**-126.
      growth_factor: replaces `factor` for growth; above 1.
      backoff_factor: replaces 1 / `factor` for backoff; between 0 and 1.
      max_loss_scale: ceiling, at most 2**126.

    Raises:
      ValueError: a scale that is zero, negative or not finite; a period below 1; a factor not above
        1; a backoff not between 0 and 1; a floor above the ceiling.
      TypeError: a tracer instead of a plain number (only the two leaves may be traced).

    >>> scale = DynamicLossScale(2.0**15)
    >>> float(scale.adjust(False).loss_scale), float(scale.adjust(True).loss_scale)
    (16384.0, 32768.0)
    """

    loss_scale: Any = dataclasses.field(default=2.0**15, metadata={"leaf": jnp.dtype("float32")})
    counter: Any = dataclasses.field(default=0, metadata=_COUNT)
    period: float = 2000
    factor: float = 2
    min_loss_scale: float = 1.0
    growth_factor: float | None = dataclasses.field(default=None, kw_only=True)
    backoff_factor: float | None = dataclasses.field(default=None, kw_only=True)
    max_loss_scale: float = dataclasses.field(default=LARGEST_SCALE, kw_only=True)

    def __post_init__(self) -> None:
        own = vars(self)  # the fields of a frozen class
        expected = "a number of steps of at least 1"
        own["period"] = check_number(self.period, "period", expected, lambda n: n >= 1)
        own["factor"] = _growth(self.factor, "factor")
        floor = own["min_loss_scale"] = _scale_bound(self.min_loss_scale, "min_loss_scale")
        ceiling = _scale_bound(self.max_loss_scale, "max_loss_scale")
        if self.max_loss_scale == 0:
            raise ValueError("max_loss_scale got 0; expected a ceiling above zero.")
        if floor > ceiling:
            raise ValueError(
                f"min_loss_scale {floor} lies above max_loss_scale {ceiling}; expected a floor "
                "below the ceiling."
            )
        own["max_loss_scale"] = ceiling
        if self.growth_factor is not None:
            own["growth_factor"] = _growth(self.growth_factor, "growth_factor")
        if self.backoff_factor is not None:
            expected = (
                "a number between 0 and 1, such as 0.5: the scale is multiplied by it after an "
                "overflow"
            )
            own["backoff_factor"] = check_number(
                self.backoff_factor, "backoff_factor", expected, lambda n: 0 < n < 1
            )
        own["loss_scale"] = _dynamic_scale(self.loss_scale, floor, ceiling)
        own["counter"] = _step_count(self.counter, "counter")

    def adjust(self, grads_finite: ArrayLike) -> Self:
        """Returns the scale for the next step: grown, backed off or unchanged.

        Args:
          grads_finite: bool scalar; under vmap one for each scale.

        Raises: TypeError for a flag that is not boolean, ValueError for one of another shape.
        """
        finite = _finite_flag(grads_finite, self.loss_scale)
        scale, counter = self._next(finite, ~finite)
        return _replace_leaves(self, loss_scale=scale, counter=counter)

    def _next(self, finite: jax.Array, backs_off: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the next scale and count.

        A step that is not finite starts the count again; with hysteresis not each backs off.
        """
        counted = jnp.clip(self.counter, 0, _LARGEST_COUNT - 1) + 1
        whole_period = math.ceil(min(self.period, _LARGEST_COUNT))
        grows = finite & (counted >= whole_period) & (self.period <= _LARGEST_COUNT)

        is_valid = jnp.isfinite(self.loss_scale) & (self.loss_scale > 0)
        scale = jnp.where(is_valid, self.loss_scale, _RESTART)
        growth = self.factor if self.growth_factor is None else self.growth_factor
        grown = scale * min(growth, _LARGEST_FACTOR)
        if self.backoff_factor is None:
            backed_off = scale / min(self.factor, _LARGEST_FACTOR)
        else:
            backed_off = scale * self.backoff_factor
        changed = jnp.where(grows, grown, jnp.where(backs_off, backed_off, scale))
        # Infinity, from growing near float32's maximum, comes back to the ceiling.
        within_bounds = jnp.clip(changed, self.min_loss_scale, self.max_loss_scale)
        return within_bounds, jnp.where(finite & ~grows, counted, 0)


def _growth(value: Any, name: str) -> float:
    expected = (
        "a finite number above 1, such as 2: the scale is multiplied by it after enough finite "
        "steps"
    )
    return check_number(value, name, expected, lambda n: 1 < n < math.inf)


@register_state
@dataclasses.dataclass(frozen=True)
class HysteresisLossScale(DynamicLossScale):
    """A dynamic loss scale that backs off only after `hysteresis` overflows since it last grew.

    Follows Megatron-LM's `DynamicGradScaler`: each overflow lowers `tolerance` by one and restarts
    the count of finite steps; at zero, each further overflow backs off; growth after `period`
    finite steps restores it. DeepSpeed's `DynamicLossScaler` does so by default, and grows one step
    later; with `consecutive_hysteresis` it restores the tolerance after every finite step, which
    this class does not.
    The step itself is skipped on every overflow.

    Attributes, in addition to `DynamicLossScale`'s:
      hysteresis: overflows until the scale backs off, at least 1; with 1 this is
        `DynamicLossScale`.
      tolerance: int32 scalar, a leaf: how many of them are left. A value from a checkpoint that
        is not between 0 and `hysteresis` counts as the nearer of the two.

    Raises: as `DynamicLossScale`; ValueError for a hysteresis below 1.

    >>> scale = HysteresisLossScale(1024.0, hysteresis=2)
    >>> once = scale.adjust(False)
    >>> float(once.loss_scale), float(once.adjust(False).loss_scale)
    (1024.0, 512.0)
    """

    hysteresis: int = dataclasses.field(default=2, kw_only=True)
    tolerance: Any = dataclasses.field(default=None, kw_only=True, metadata=_COUNT)

    def __post_init__(self) -> None:
        super().__post_init__()
        expected = "a whole number of overflows, at least 1 and fewer than 2**31"
        is_right = lambda n: 1 <= n < 2**31 and n % 1 == 0
        hysteresis = check_number(self.hysteresis, "hysteresis", expected, is_right)
        left = hysteresis if self.tolerance is None else self.tolerance
        vars(self).update(hysteresis=int(hysteresis), tolerance=_step_count(left, "tolerance"))

    def adjust(self, grads_finite: ArrayLike) -> Self:
        """Returns the scale for the next step; an overflow may leave it unchanged.

        Raises: as `DynamicLossScale.adjust`.
        """
        finite = _finite_flag(grads_finite, self.loss_scale)
        tolerance = jnp.clip(self.tolerance, 0, self.hysteresis)
        left = jnp.where(finite, tolerance, jnp.maximum(tolerance - 1, 0))
        scale, counter = self._next(finite, ~finite & (left == 0))
        grew = finite & (counter == 0)  # after a finite step the count is at least one
        tolerance = jnp.where(grew, self.hysteresis, left)
        return _replace_leaves(self, loss_scale=scale, counter=counter, tolerance=tolerance)


# The defaults of other libraries.


def deepmind_loss_scale(enabled: bool = True) -> LossScale:
    """DeepMind jmp's defaults: start at 2**15, factor 2, period 2000, floor 1.

    Returns: a `DynamicLossScale`, or a `NoOpLossScale` if it is not enabled.
    Raises: TypeError if `enabled` is no bool.

    >>> deepmind_loss_scale().period
    2000
    """
    return _if_enabled(DynamicLossScale(2.0**15), enabled, "deepmind_loss_scale")


def torch_loss_scale(
    enabled: bool = True,
    *,
    init_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
) -> LossScale:
    """`torch.amp.GradScaler`'s defaults: start at 2**16, growth 2, backoff 0.5, interval 2000.

    torch has no floor; here it is 2**-126, the smallest scale with a float32 reciprocal.

    Args:
      enabled: whether to scale at all; the others are checked with False too.
      init_scale: the first scale.
      growth_factor: the factor of the scale after `growth_interval` finite steps.
      backoff_factor: the factor of the scale after an overflow.
      growth_interval: a number of finite steps in a row.

    Returns: a `DynamicLossScale`, or a `NoOpLossScale` if it is not enabled.
    Raises: TypeError if `enabled` is no bool; otherwise as `DynamicLossScale`.

    >>> float(torch_loss_scale().loss_scale)
    65536.0
    >>> torch_loss_scale(init_scale=2.0**10, growth_interval=100).period
    100
    """
    scale = DynamicLossScale(
        init_scale,
        period=growth_interval,
        min_loss_scale=0.0,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
    )
    return _if_enabled(scale, enabled, "torch_loss_scale", "init_scale=2.0**16")


def apex_loss_scale(enabled: bool = True) -> LossScale:
    """Apex amp's defaults: as torch's, with a ceiling of 2**24.

    Returns: a `DynamicLossScale`, or a `NoOpLossScale` if it is not enabled.
    Raises: TypeError if `enabled` is no bool.

    >>> apex_loss_scale().max_loss_scale == 2.0**24
    True
    """
    scale = DynamicLossScale(2.0**16, min_loss_scale=0.0, max_loss_scale=2.0**24)
    return _if_enabled(scale, enabled, "apex_loss_scale")


def fastai_loss_scale(enabled: bool = True) -> LossScale:
    """The defaults of fastai's `NonNativeMixedPrecision`: start at 2**24, factor 2, period 500.

    Its parameter is called `max_loss_scale`, yet it *starts* at 2**24: the first steps are expected
    to overflow until the scale has come down, and nothing stops it from growing past that start
    later. Here an overflow resets the count of finite steps, so that growth needs 500 finite steps
    in a row; fastai's count is not reset by a skipped step.

    Returns: a `DynamicLossScale`, or a `NoOpLossScale` if it is not enabled.
    Raises: TypeError if `enabled` is no bool.

    >>> float(fastai_loss_scale().loss_scale) == 2.0**24, fastai_loss_scale().period
    (True, 500)
    """
    scale = DynamicLossScale(2.0**24, period=500, min_loss_scale=0.0)
    return _if_enabled(scale, enabled, "fastai_loss_scale")


def _if_enabled(scale: LossScale, enabled: object, caller: str, keywords: str = "") -> LossScale:
    """Returns the scale, or one that does nothing if it is not enabled.

    Refuses what torch's GradScaler takes first: a device, or a scale.
    """
    if not isinstance(enabled, bool):
        way_out = f"{caller}({keywords})" if keywords else "jmp.DynamicLossScale(2.0**16)"
        expected = f"True or False. For a scale that starts elsewhere write {way_out}"
        raise wrong(TypeError, caller, enabled, expected, name="enabled")
    return scale if enabled else NoOpLossScale()


# How a tree is scaled.


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


# Checks of the arguments of constructors and of `adjust`.


def _scale_bound(value: object, name: str) -> float:
    """Returns a floor or ceiling as a Python float within the representable scales.

    Zero is accepted for a floor and means the smallest scale there is.
    """
    number = check_number(value, name, "a number that is not negative", lambda n: n >= 0)
    _warn_if_integer(value, name)
    return _within_scales(number)


def _within_scales(number: float) -> float:
    """Returns the nearest number between the smallest and the largest scale."""
    return float(min(max(number, SMALLEST_SCALE), LARGEST_SCALE))


def _dynamic_scale(value: Any, smallest: float, largest: float) -> jax.Array:
    """Returns a starting scale, which may be traced, as a float32 array within its bounds."""
    expected = (
        "a positive finite number such as 2.0**15. To switch loss scaling off use NoOpLossScale()"
    )
    _check_leaf(value, "loss_scale", expected, lambda numbers: (numbers > 0) & (numbers < math.inf))
    _warn_if_integer(value, "loss_scale")
    if not isinstance(value, jax.core.Tracer):  # before float32 makes an infinity of it
        value = np.clip(np.asarray(value, np.float64), smallest, largest)
    return jnp.clip(jnp.asarray(value, jnp.float32), smallest, largest)


def _step_count(value: Any, name: str) -> jax.Array:
    """Returns a counter, which may be traced, as an int32 array."""
    expected = "a count from 0 to 2**31 - 1"
    _check_leaf(value, name, expected, lambda numbers: (numbers >= 0) & (numbers < 2**31))
    count = int(value) if isinstance(value, float) else value  # 1e9 + 1 is no float32
    return jnp.asarray(count).astype(jnp.int32)


def _check_leaf(value: Any, name: str, expected: str, are_right: Callable[[Any], Any]) -> None:
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


def _finite_flag(grads_finite: ArrayLike, scale: ArrayLike) -> jax.Array:
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
