"""Ground rules of tests and doctests: a CPU with eight devices, and no silent rank promotion."""

import os

# Before JAX starts: the compiler for CUDA programs must not be taken for a GPU, and agreement
# between devices needs more than one of them.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp
from tests.h200.fixture import h200 as h200

jax.config.update("jax_numpy_rank_promotion", "raise")

hypothesis.settings.register_profile("suite", deadline=None, derandomize=True, max_examples=60)
hypothesis.settings.load_profile("suite")


@pytest.fixture(autouse=True)
def names_for_doctests(doctest_namespace):
    """Adds the names that every docstring's example may use without importing them."""
    doctest_namespace.update({name: getattr(jmp, name) for name in jmp.__all__})
    doctest_namespace.update(jax=jax, jnp=jnp, np=np)


@pytest.fixture
def quick_compilation():
    """Lets LLVM optimise less: for tests that compile much and run little."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def strict_promotion():
    """Refuses every implicit promotion between dtypes."""
    with jax.numpy_dtype_promotion("strict"):
        yield
