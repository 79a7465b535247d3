"""Random programs: autocast never crashes if float32 does not, and is right up to roundings."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp
from testbed.random_programs import OPERATIONS, TRANSFORMATIONS, program, turns
from tests.commands import in_full

steps = st.lists(
    st.one_of(st.sampled_from(sorted(OPERATIONS)), st.sampled_from(sorted(TRANSFORMATIONS))),
    min_size=1,
    max_size=7,
)


def in_float32(function, x):
    """What the program gives by itself; programs that JAX refuses are left out.

    Jitted, since an operation at a time takes longer.
    """
    try:
        return jax.jit(function)(x)
    except (TypeError, ValueError, NotImplementedError):  # a loop has no reverse derivative
        hypothesis.reject()


@pytest.mark.parametrize(
    ("policy", "half"),
    in_full([("mixed_float16", jnp.float16), ("mixed_bfloat16", jnp.bfloat16)], first=1),
)
@hypothesis.given(names=steps, seed=st.integers(0, 9))
@hypothesis.settings(max_examples=20)
def test_random_programs(policy, half, names, seed):
    function = program(names)
    x = jax.random.normal(jax.random.key(seed), (4, 8))
    expected = in_float32(function, x)
    got = jmp.autocast(function, policy)(x)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    # Any inner bfloat16 counts for the whole.
    eps = float(jnp.finfo(jnp.bfloat16 if "inner autocast" in names else half).eps)
    bound = min(4 * eps * 2 ** turns(names), 0.25)
    assert np.max(np.abs(got - expected)) <= bound * max(1, np.abs(expected).max())


@hypothesis.given(names=steps, seed=st.integers(0, 9))
@hypothesis.settings(max_examples=20)
def test_gradients_of_random_programs(names, seed):
    x = jax.random.normal(jax.random.key(seed), (4, 8))
    total = lambda f: jax.grad(lambda x: (f(x) * jnp.linspace(0, 1, 8)[None]).sum())
    expected = in_float32(total(program(names)), x)
    got = total(jmp.autocast(program(names), "mixed_float16"))(x)
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    assert np.isfinite(got).all() == np.isfinite(expected).all()
    # A maximum, relu or clip may go the other way at a near tie: most entries agree.
    eps = float(jnp.finfo(jnp.bfloat16 if "inner autocast" in names else jnp.float16).eps)
    bound = min(4 * eps * 2 ** turns(names), 0.25) * max(1, np.abs(expected).max())
    assert np.quantile(np.abs(got - expected), 0.75) <= bound
