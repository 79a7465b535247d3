"""`python -m jmp`: what is installed, which half type the devices have, and whether jmp works here.

Prints versions, the settings of JAX that change results, devices and the policy to start with. Then
it checks that only one distribution installs `jmp`, and compares with NumPy whether mixed precision
works on this machine. The exit status is 1 if a check fails. Paste the whole output into a bug
report.
"""

import argparse
import collections
import functools
import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jmp
from jmp import diagnostics, transforms
from jmp.diagnostics._reports import table

SIZE = 64  # of matrices: much smaller ones are no matrix products to XLA on a GPU

PACKAGES = ("jax", "jaxlib", "ml_dtypes", "numpy", "optax", "flax", "equinox", "dm-haiku")
# Settings that change numbers or errors. No path and no other environment variable is printed.
CONFIG = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_threefry_partitionable",
    "jax_disable_jit",
    "jax_debug_nans",
)
VARIABLES = ("JAX_PLATFORMS", "XLA_FLAGS", "NVIDIA_TF32_OVERRIDE")


def installed(name: str) -> str:
    """Returns the version of a distribution, or "not installed"."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def versions() -> list[tuple[str, str]]:
    """Returns names and versions of Python, of jmp and of what it stands on.

    The installed version differs if the package index' `jmp` was installed over this one, or if
    this one is imported from a folder. Then both are named.
    """
    own = jmp.__version__
    if installed("jmp") != own:
        own += f" (as installed: {installed('jmp')})"
    rest = [(name, installed(name)) for name in PACKAGES]
    return [("python", platform.python_version()), ("jmp", own), *rest]


def settings() -> list[tuple[str, str]]:
    """Returns the operating system, and the settings of JAX that change results."""
    found = [("platform", f"{platform.platform()}, {os.cpu_count()} cores")]
    found += [(name, str(getattr(jax.config, name, "unknown"))) for name in CONFIG]
    return found + [(name, os.environ.get(name) or "not set") for name in VARIABLES]


def devices() -> list[tuple[str, str, str, str, str]]:
    """Returns number, kind, platform, half types and first policy of each kind of device."""
    kinds = collections.Counter((d.device_kind, d.platform, *advice(d)) for d in jax.devices())
    return [(str(number), *kind) for kind, number in kinds.items()]


def advice(device: jax.Device) -> tuple[str, str]:
    """Returns the half types that a device multiplies fast, and the policy to start with."""
    unscaled = "mixed_bfloat16, without a loss scale"
    if device.platform == "tpu":
        return "bfloat16", unscaled
    if device.platform == "cpu":
        return "none, as a rule", "mixed_bfloat16, to try it out"
    major = str(getattr(device, "compute_capability", "")).partition(".")[0]
    if not major.isdigit():  # NVIDIA's are numbers, such as "9.0"
        return "unknown to jmp", unscaled
    if int(major) >= 8:  # Ampere
        return "bfloat16, float16", unscaled
    fast = "float16" if int(major) >= 7 else "none: no tensor cores"  # Volta
    return fast, "mixed_float16, with a dynamic loss scale"


# The checks. Each raises AssertionError, or whatever goes wrong, and returns what it found.


def check_installation() -> str:
    """One distribution installs the package `jmp`."""
    names = sorted(set(importlib.metadata.packages_distributions().get("jmp", ())))
    found = {f"{d.name} {d.version}" for d in importlib.metadata.distributions() if d.name in names}
    assert len(found) < 2, (
        f"{' and '.join(sorted(found))} are installed, and each is imported as jmp; now it is "
        f"{jmp.__version__}. Run `pip uninstall --yes {' '.join(names)}` until nothing is left to "
        "uninstall, then install one of them"
    )
    return f"one distribution installs jmp: {found.pop()}" if found else "jmp is not installed"


def check_steps() -> str:
    """A step in half skips an overflow, and the next one moves parameters as NumPy computes it."""
    generator = np.random.default_rng(1)
    w, x = (generator.standard_normal((SIZE, SIZE)) / 8 for _ in range(2))
    expected = x.T @ np.exp(x @ w) / w.size
    start, batch = jnp.asarray(w, jnp.float32), jnp.asarray(x, jnp.float32)
    tx = transforms.with_loss_scale(optax.sgd(1.0), jmp.DynamicLossScale(2.0**15))
    errors = []
    for dtype in (jnp.float16, jnp.bfloat16):
        loss = jmp.autocast(lambda w, x: jnp.mean(jnp.exp(x @ w)), f"mixed_{np.dtype(dtype)}")
        diagnostics.assert_products_in(jax.grad(loss), dtype)(start, batch)
        kept, state = step(loss, tx, start, tx.init(start), 1e6 * batch)
        scale = state.loss_scale.loss_scale
        assert (kept == start).all(), "a step after an overflow moved the parameters"
        assert scale == 2.0**14, f"the loss scale is {scale} after an overflow, not 16384"
        moved, _ = step(loss, tx, kept, state, batch)
        error = np.linalg.norm(start - moved - expected) / np.linalg.norm(expected)
        errors.append(f"{error:.1e}")
        unit = float(jnp.finfo(dtype).eps)
        assert unit / 100 < error < 2 * unit, f"a step in {np.dtype(dtype)} is off by {error}"
    return f"steps in half skip an overflow, then move as in NumPy (off by {' and '.join(errors)})"


@functools.partial(jax.jit, static_argnums=(0, 1))
def step(loss: Any, tx: Any, params: jax.Array, state: Any, x: jax.Array) -> tuple[jax.Array, Any]:
    """Returns the parameters and the optimizer's state after a training step."""
    _, gradients = jmp.scaled_value_and_grad(loss, state.loss_scale)(params, x)
    updates, state = tx.update(gradients, state, params)
    return optax.apply_updates(params, updates), state


CHECKS = (check_installation, check_steps)


def main(
    arguments: Sequence[str] | None = None, checks: Sequence[Callable[[], str]] = CHECKS
) -> int:
    """Prints the tables, runs the checks, and returns the exit status."""
    argparse.ArgumentParser("python -m jmp", description=__doc__).parse_args(arguments)
    print("For a bug report paste all of this.")
    print(table(["package", "version"], versions()))
    print(table(["setting", "value"], settings()))
    print(table(["", "device", "platform", "fast half types", "start with"], devices()))
    failed = 0
    for check in checks:
        try:
            print(f"ok      {check()}", flush=True)
        except Exception as error:  # a check may fail in any way; the others run
            failed += 1
            print(f"FAILED  {check.__doc__}\n        {type(error).__name__}: {error}", flush=True)
    passed, device = len(checks) - failed, jax.devices()[0].device_kind
    print(f"{passed} of {len(checks)} checks passed on {device}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
