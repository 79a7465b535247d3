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


def gradient(function):
    return jax.grad(lambda x: (function(x) * jnp.linspace(0, 1, 8)[None]).sum())


# A maximum, relu or clip may go the other way at a near tie: most entries of a gradient agree.
@pytest.mark.parametrize(
    ("half", "transform", "share"),
    in_full(
        [("float16", lambda f: f, 1), ("float16", gradient, 0.75), ("bfloat16", lambda f: f, 1)],
        first=2,
    ),
)
@hypothesis.given(names=steps, seed=st.integers(0, 9))
@hypothesis.example(["closed over by a scan", "scan"], 0)  # a loop without a result in a loop
@hypothesis.settings(max_examples=20)
def test_random_programs_and_their_gradients(half, transform, share, names, seed):
    x = jax.random.normal(jax.random.key(seed), (4, 8))
    expected = in_float32(transform(program(names)), x)
    got = transform(jmp.autocast(program(names), f"mixed_{half}"))(x)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    assert np.isfinite(got).all() == np.isfinite(expected).all()
    # Any inner bfloat16 counts for the whole.
    eps = float(jnp.finfo("bfloat16" if "inner autocast" in names else half).eps)
    bound = min(4 * eps * 2 ** turns(names), 0.25) * max(1, np.abs(expected).max())
    assert np.quantile(np.abs(got - expected), share) <= bound
