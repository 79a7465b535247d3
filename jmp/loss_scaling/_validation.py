"""Checks of what a user gives to a loss scale's constructor, and of what its leaves hold.

Two different moments need two different checks. A *constructor* looks at values and refuses bad
ones. *Unflattening* happens on every return from jit and inside every tree transformation: it must
accept placeholders of any kind, and a look at a value there would wait for the device. It only
brings arrays back to their fixed dtype. (`jmp`'s casts pass over loss scales; casting 2**16 to
float16 by hand makes an infinity before anything here can see it.)
"""

import dataclasses
import math
import warnings
from collections.abc import Iterable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jmp._describe import described
from jmp.loss_scaling._base import LARGEST_SCALE, SMALLEST_SCALE, LossScale
from jmp.trees import is_array

T = TypeVar("T")


def scale_bound(value: object, name: str) -> float:
    """Returns a floor or ceiling as a Python float within the representable scales.

    Zero is accepted for a floor and means the smallest scale there is.
    """
    number = _concrete_number(value, name)
    _warn_if_integer(value, name)
    if np.isnan(number) or number < 0:
        raise ValueError(f"{name} got {number}; expected a number that is not negative.")
    return float(np.clip(number, SMALLEST_SCALE, LARGEST_SCALE))


def static_scale(value: object) -> float:
    """Returns the constant of a static scale as a Python float; zero can be held, not used."""
    number = _concrete_number(value, "StaticLossScale")
    if not np.isfinite(number) or number < 0:
        raise ValueError(
            f"StaticLossScale got {described(value)}; expected a finite number that is not "
            "negative, such as 512."
        )
    # Float32 is what it multiplies in.
    clipped = np.float32(np.clip(number, SMALLEST_SCALE, LARGEST_SCALE))
    return 0.0 if number == 0 else float(clipped)


def dynamic_scale(value: Any, smallest: float, largest: float) -> Any:
    """Returns a starting scale as a float32 array within its bounds.

    Anything that is neither a number nor an array (None, a sharding) is returned as it is.
    """
    if not (is_array(value) or isinstance(value, (int, float))):
        return _placeholder(value, "loss_scale", "a number such as 2.0**15")
    if isinstance(value, bool) or (is_array(value) and not _is_number_dtype(value.dtype)):
        raise TypeError(f"loss_scale got {described(value)}; expected a number such as 2.0**15.")
    _warn_if_integer(value, "loss_scale")
    if not isinstance(value, jax.core.Tracer):
        numbers = _as_float64(value)
        if not np.all(np.isfinite(numbers) & (numbers > 0)):
            raise ValueError(
                f"loss_scale got {described(value)}; expected a positive finite number such as "
                "2.0**15. To switch loss scaling off use NoOpLossScale()."
            )
        value = np.clip(numbers, smallest, largest)  # before float32 makes an infinity of it
    return jnp.clip(jnp.asarray(value, jnp.float32), smallest, largest)


def step_count(value: Any, name: str) -> Any:
    """Returns a counter as an int32 array; placeholders pass."""
    if not (is_array(value) or isinstance(value, (int, float))):
        return _placeholder(value, name, "a count from 0 to 2**31 - 1")
    if not isinstance(value, jax.core.Tracer):
        numbers = _as_float64(value)
        if not np.all((numbers >= 0) & (numbers < 2**31)):
            raise ValueError(
                f"{name} got {described(value)}; expected a count from 0 to 2**31 - 1."
            )
    return jnp.asarray(value).astype(jnp.int32)


def _placeholder(value: Any, name: str, expected: str) -> Any:
    """Returns what stands for an array, such as None or a sharding; refuses what cannot."""
    containers = (str, bytes, list, tuple, dict, LossScale)
    if isinstance(value, containers) or callable(value):
        raise TypeError(f"{name} got {described(value)}; expected {expected}.")
    return value


def period(value: Any) -> float:
    """Returns `value` if it is a number of steps of at least one; floats are accepted."""
    number = _concrete_number(value, "period")
    if not number >= 1:
        raise ValueError(
            f"period got {described(value)}; expected a number of steps of at least 1."
        )
    return value if isinstance(value, (int, float)) else value.item()


def growth(value: Any, name: str) -> float:
    """Returns `value` if it is a finite number above one."""
    number = _concrete_number(value, name)
    if not (number > 1 and np.isfinite(number)):
        raise ValueError(
            f"{name} got {described(value)}; expected a finite number above 1, such as 2: the "
            "scale is multiplied by it after enough finite steps."
        )
    return value if isinstance(value, (int, float)) else value.item()


def backoff(value: Any) -> float:
    """Returns `value` if it lies strictly between zero and one."""
    number = _concrete_number(value, "backoff_factor")
    if not 0 < number < 1:
        raise ValueError(
            f"backoff_factor got {described(value)}; expected a number between 0 and 1, such as "
            "0.5: the scale is multiplied by it after an overflow."
        )
    return value if isinstance(value, (int, float)) else value.item()


def finite_flag(grads_finite: ArrayLike, scale: ArrayLike) -> jax.Array:
    """Returns the flag of `adjust` as a bool array of the scale's shape."""
    try:
        flag = jnp.asarray(grads_finite)
    except (TypeError, ValueError):
        raise TypeError(
            f"adjust got {described(grads_finite)}; expected a boolean, as "
            "jmp.all_finite(gradients) returns it."
        ) from None
    if flag.dtype != jnp.bool_:
        raise TypeError(
            f"adjust got grads_finite of dtype {flag.dtype}; expected a boolean, as "
            "jmp.all_finite(gradients) returns it."
        )
    if flag.shape != jnp.shape(scale):
        raise ValueError(
            f"adjust got grads_finite of shape {flag.shape}; expected boolean scalar: one flag for "
            "all gradients, as jmp.all_finite returns it."
        )
    return flag


def register_state(cls: type[T]) -> type[T]:
    """Registers a frozen dataclass whose array fields are leaves and the others static.

    A field is a leaf if its metadata holds `leaf=dtype`. This is `register_dataclass` but for one
    thing: unflattening does not run the constructor's checks of values (see the module's text).
    """
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]  # T stands for dataclasses
    leaves = {field.name: field.metadata["leaf"] for field in fields if "leaf" in field.metadata}
    static = [field.name for field in fields if field.name not in leaves]

    def flatten_with_keys(node: T) -> tuple[list[Any], tuple[Any, ...]]:
        children = [(jax.tree_util.GetAttrKey(name), getattr(node, name)) for name in leaves]
        return children, tuple(getattr(node, name) for name in static)

    def unflatten(meta: tuple[Any, ...], children: Iterable[Any]) -> T:
        node = object.__new__(cls)
        for name, value in zip(static, meta, strict=True):
            object.__setattr__(node, name, value)
        for (name, dtype), value in zip(leaves.items(), children, strict=True):
            if is_array(value) and value.dtype != dtype and _is_number_dtype(value.dtype):
                value = value.astype(dtype)
            object.__setattr__(node, name, value)
        return node

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten)
    return cls


def replace_leaves(node: T, **leaves: Any) -> T:
    """Returns a copy of `node` with other leaves, without running the constructor's checks."""
    copy = object.__new__(type(node))
    for field in dataclasses.fields(node):  # type: ignore[arg-type]  # likewise
        value = leaves.get(field.name, getattr(node, field.name))
        object.__setattr__(copy, field.name, value)
    return copy


def _is_number_dtype(dtype: np.dtype) -> bool:
    return dtype != jax.dtypes.float0 and jnp.issubdtype(dtype, np.number)


def _concrete_number(value: Any, name: str) -> float:
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"{name} got a traced value; it is part of the compiled program and must be a plain "
            "number. A scale that changes from step to step is a DynamicLossScale."
        )
    if isinstance(value, bool) or not (
        isinstance(value, (int, float)) or (is_array(value) and value.ndim == 0)
    ):
        raise TypeError(f"{name} got {described(value)}; expected one number.")
    return float(_as_float64(value))


def _as_float64(value: Any) -> np.ndarray:
    try:
        return np.asarray(value, np.float64)
    except OverflowError:  # a Python integer beyond float64
        return np.asarray(math.inf if value > 0 else -math.inf)


def _warn_if_integer(value: object, name: str) -> None:
    dtype = value.dtype if is_array(value) else np.result_type(type(value))
    if not jnp.issubdtype(dtype, jnp.floating):
        warnings.warn(f"Expected floating type for {name}, got {dtype}", stacklevel=5)
