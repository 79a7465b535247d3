"""Public reports of mixed-precision trouble; each test says whose."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp
from jmp import transforms
from tests.commands import in_full

OPTIMIZERS = "adam adabelief yogi amsgrad radam adan novograd adamax rmsprop lamb adafactor".split()
WAYS = [("float16", "full"), ("bfloat16", "full"), ("bfloat16", "split")]
WAYS += [(half, way) for half in ("float16", "bfloat16") for way in ("stochastic", "kahan", "none")]


@pytest.mark.parametrize("name", in_full(OPTIMIZERS, first=1))
def test_zero_gradients_of_half_parameters_change_nothing(name):
    """optax 1754, 1768 and 1789: an eps below a half type's range made them not finite."""
    for half, masters in WAYS:
        policy = jmp.Policy(half, half, "float32")
        optimizer = transforms.mixed_precision(getattr(optax, name)(1e-3), policy, masters=masters)
        params = {"w": jnp.array([1.0, -2.0, 0.5], half)}
        state = optimizer.init(params)
        step = jax.jit(optimizer.update)
        for _ in range(3):
            updates, state = step(jax.tree.map(jnp.zeros_like, params), state, params)
            params = optax.apply_updates(params, updates)
        np.testing.assert_array_equal(params["w"].astype(float), [1.0, -2.0, 0.5], err_msg=masters)
