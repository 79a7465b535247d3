"""The cases that shared checks run over. A new loss scale is one row in `LOSS_SCALES`."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jmp


@dataclasses.dataclass(frozen=True)
class ScaleCase:
    """One loss scale: how it is made, and its leaves by name with their fixed dtypes."""

    name: str
    make: Callable[[], jmp.LossScale]
    leaves: dict[str, str]


_DYNAMIC = {"loss_scale": "float32", "counter": "int32"}
_HYSTERESIS = {**_DYNAMIC, "tolerance": "int32"}

# Starting scales are powers of two, so that scaling and unscaling are exact. Some start above
# float16's maximum, others below its smallest subnormal.
EVERY_OPTION = functools.partial(
    jmp.DynamicLossScale, 2.0**10, 1, 3, 2, 2.0**-3,
    growth_factor=4.0, backoff_factor=0.25, max_loss_scale=2.0**20)  # fmt: skip
FAR_BELOW_ONE = functools.partial(jmp.DynamicLossScale, 2.0**-30, period=1, min_loss_scale=0.0)
USED_UP = functools.partial(
    jmp.HysteresisLossScale, 2.0**17, period=2, hysteresis=3, tolerance=1)  # fmt: skip
LOSS_SCALES = [
    ScaleCase("no_op", jmp.NoOpLossScale, {}),
    ScaleCase("static", lambda: jmp.StaticLossScale(512.0), {}),
    ScaleCase("static_at_the_bound", lambda: jmp.StaticLossScale(2.0**100), {}),
    ScaleCase("dynamic", jmp.DynamicLossScale, _DYNAMIC),
    ScaleCase("dynamic_with_every_option", EVERY_OPTION, _DYNAMIC),
    ScaleCase("dynamic_far_below_one", FAR_BELOW_ONE, _DYNAMIC),
    ScaleCase("hysteresis", jmp.HysteresisLossScale, _HYSTERESIS),
    ScaleCase("hysteresis_used_up", USED_UP, _HYSTERESIS),
    ScaleCase("fastai", jmp.fastai_loss_scale, _DYNAMIC),
]

HALF = ("float16", "bfloat16")
CASTABLE = (*HALF, "float32", "float64")
FLOAT8 = tuple(name for name in sorted(dir(jnp)) if name.startswith("float8_"))

# Texts, and the three dtypes that each means on a CPU, whose half precision is float16.
POLICIES = [
    ("float32", ("float32", "float32", "float32")),
    ("half", ("float16", "float16", "float16")),
    ("bf16", ("bfloat16", "bfloat16", "bfloat16")),
    ("f8_e4m3fn", ("float8_e4m3fn", "float8_e4m3fn", "float8_e4m3fn")),
    ("p=f32,c=f16,o=f32", ("float32", "float16", "float32")),
    ("params=float32,compute=half,output=full", ("float32", "float16", "float32")),
    ("  p = f16 ,\to=f32,  c = bf16\n", ("float16", "bfloat16", "float32")),
    (" mixed_bfloat16\n", ("float32", "bfloat16", "float32")),
    ("c=bf16", ("float32", "bfloat16", "bfloat16")),
    ("o=f16", ("float32", "float32", "float16")),
    ("mixed_float16", ("float32", "float16", "float32")),
    ("O0", ("float32", "float32", "float32")),
    ("O1", ("float32", "float16", "float32")),
    ("O2", ("float16", "float16", "float32")),
    ("O3", ("float16", "float16", "float16")),
]

# Leaves that no cast and no loss scale may touch, and that no check of finiteness looks at. They
# come back as the very same object.
ODD_LEAVES: dict[str, Any] = {
    "none_in_a_list": [None],
    "python_int": 3,
    "python_bool": True,
    "string": "relu",
    "callable": len,
    "object": object(),
    "int_array": jnp.arange(3),
    "int8_array": jnp.ones(2, jnp.int8),
    "int4_array": jnp.ones(2, jnp.int4),
    "bool_array": jnp.array([True, False]),
    "numpy_ints": np.arange(3, dtype=np.int32),
    "numpy_int_scalar": np.int32(7),
    "numpy_bool_scalar": np.bool_(True),
    "key": jax.random.key(0),
    "keys": jax.random.split(jax.random.key(1), 3),
    "raw_key": jax.random.PRNGKey(0),
    "float0": np.zeros(2, jax.dtypes.float0),
    "shape_dtype_struct": jax.ShapeDtypeStruct((2,), jnp.float32),
    "numpy_strings": np.array(["a", "b"]),
    "numpy_objects": np.array([None, 1], object),
    "numpy_dates": np.array(["2020-01-01"], "datetime64[D]"),
    "numpy_record": np.zeros(2, [("weight", "f4")]),
    "long_double": np.longdouble(1.5),
    "complex_long_double": np.clongdouble(1.5),
    **{f"{name}_array": jnp.ones(2, name) for name in FLOAT8},
    "numpy_float8": np.ones(2, jnp.float8_e4m3fn),
}

# Leaves that casts do not touch either, but loss scales do.
COMPLEX_LEAVES: dict[str, Any] = {
    "complex64_array": jnp.array([1 + 2j, -3.5j], jnp.complex64),
    "numpy_complex64": np.array([1 + 2j], np.complex64),
    "numpy_complex_scalar": np.complex64(1 - 1j),
}


def floating_leaves(dtype: str) -> dict[str, Any]:
    """Leaves of one castable dtype: a JAX array, a NumPy array, a NumPy scalar, an empty array."""
    numbers = np.array([0.0, -0.0, 1.5, -2.0], dtype)
    return {
        "jax_array": jnp.asarray(numbers),
        "numpy_array": numbers,
        "numpy_scalar": numbers.dtype.type(1.5),
        "empty": np.zeros((0, 3), dtype),
    }


def edges(dtype: str) -> np.ndarray:
    """Zeros, the smallest subnormal and normal, one, the maximum and their negatives, in `dtype`.

    XLA flushes subnormals of float32, and with them bfloat16's, to zero; the others survive.
    """
    limits = jnp.finfo(dtype)
    smallest = limits.smallest_subnormal if dtype in ("float16", "float64") else limits.tiny
    positive = np.array([0.0, smallest, limits.tiny, 1.0, 1.5, limits.max], dtype)
    return np.concatenate([positive, -positive])
