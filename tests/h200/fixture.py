"""The pytest fixture `h200`: compiles for an H200, or says why it cannot here."""

import importlib.metadata
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

from testbed.machines.gpus import Program, compile_for_h200
from tests.commands import skip_or_fail

# The counts repeat exactly for one compiler and change with another: move this pin and the figures
# in the tests together.
PINNED_JAXLIB = "0.10.2"
COMPILER_WHEEL = "jax-cuda12-pjrt"


def spec(*shape, dtype=jnp.float32, sharding=None):
    """An array that a program is compiled for."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def reason_to_skip() -> str | None:
    """Returns why H200 programs cannot be compiled in this environment, or None if they can."""
    for distribution in ("jaxlib", COMPILER_WHEEL):
        try:
            version = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            return (
                f"{distribution} is not installed; for the H200 tests: "
                f"pip install {distribution}=={PINNED_JAXLIB}"
            )
        if version != PINNED_JAXLIB:
            return f"{distribution} is {version}; the H200 figures are those of {PINNED_JAXLIB}"
    return None


@pytest.fixture(scope="session")
def h200() -> Callable[..., Program]:
    """Returns `compile_for_h200`, or skips: without the pinned compiler there are no figures.

    Where the environment says `JMP_REQUIRE_H200=1`, as on the machine that checks every change, it
    fails instead, so that the H200 tests cannot stop running unseen.
    """
    if (reason := reason_to_skip()) is not None:
        skip_or_fail(reason, "JMP_REQUIRE_H200")
    return compile_for_h200
