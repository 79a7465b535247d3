"""The pytest fixture `h200`: compiles for an H200, or says why it cannot here."""

import importlib.metadata
import os
from collections.abc import Callable

import pytest

from testbed.machines.gpus import Program, compile_for_h200

# The counts repeat exactly for one compiler and change with another: move this pin and the figures
# in the tests together.
PINNED_JAXLIB = "0.10.2"
COMPILER_WHEEL = "jax-cuda12-pjrt"


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
    reason = reason_to_skip()
    if reason is not None and os.environ.get("JMP_REQUIRE_H200") == "1":
        pytest.fail(f"JMP_REQUIRE_H200=1, but {reason}")
    if reason is not None:
        pytest.skip(reason)
    return compile_for_h200
