"""Lists the shared checks run over. A new loss scale is one row in LOSS_SCALES."""

import jax
import jax.numpy as jnp
import numpy as np

import jmp

LOSS_SCALES = {
    "no-op": jmp.NoOpLossScale,
    "static": lambda: jmp.StaticLossScale(512),
    "static, no power of two": lambda: jmp.StaticLossScale(3.0),
    "dynamic": lambda: jmp.DynamicLossScale(2.0**15),
    "dynamic, short period": lambda: jmp.DynamicLossScale(4.0, period=2, min_loss_scale=0.0),
    "dynamic, own factors": lambda: jmp.DynamicLossScale(
        8.0, period=3, growth_factor=4, backoff_factor=0.25, max_loss_scale=64.0
    ),
    "hysteresis": lambda: jmp.HysteresisLossScale(1024.0, period=3, hysteresis=2),
    "deepmind": jmp.deepmind_loss_scale,
    "torch": jmp.torch_loss_scale,
    "apex": jmp.apex_loss_scale,
    "fastai": jmp.fastai_loss_scale,
}

HALF_DTYPES = (jnp.float16, jnp.bfloat16)


def odd_leaves():
    """Leaves that no cast, scale or check may touch."""
    return {
        "int": jnp.arange(3),
        "small int": jnp.ones(2, jnp.int4),
        "bool": jnp.array([True, False]),
        "key": jax.random.key(0),
        "raw key": jax.random.PRNGKey(0),
        "float0": np.zeros(2, jax.dtypes.float0),
        "none": None,
        "string": "text",
        "callable": len,
        "python int": 3,
        "python bool": True,
        "float8": jnp.ones(2, jnp.float8_e4m3fn),
        "shape": jax.ShapeDtypeStruct((2,), jnp.float16),
        "numpy strings": np.array(["a"]),
        "numpy objects": np.array([object()]),
        "long double": np.longdouble(2),
    }


def bits(tree):
    """The bytes of every array in `tree`, for comparisons that see -0.0 and NaN."""

    def leaf_bytes(leaf):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            leaf = jax.random.key_data(leaf)
        return (leaf.shape, str(leaf.dtype), np.asarray(leaf).tobytes())

    return [leaf_bytes(leaf) for leaf in jax.tree.leaves(tree)]
