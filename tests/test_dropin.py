"""Drop-in: what DeepMind's `jmp` 0.0.4 documents holds on ours, and what was tested on it passes.

First our own tests of the lines of its README, which need nothing. Then Haiku's tests of mixed
precision, as they are installed with it, and DeepMind's own, from the package on the index. These
run in a temporary folder; of DeepMind's only the lines that import `jmp._src` are changed, to
`import jmp`. Where `JMP_REQUIRE_DEEPMIND=1` is set, an index that cannot be reached is an error.
"""

import pathlib
import re
import subprocess
import sys
import zipfile
from importlib import metadata

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp
from testbed import ROOT
from tests.commands import skip_or_fail
from tests.processes import run_python

# The README of DeepMind's jmp


def loss_fn(params, loss_scale, x):
    return loss_scale.scale(jnp.mean((x @ params["w"]) ** 2))


def apply_optimizer(params, grads):
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def train_step(params, loss_scale, x):
    """The step of the README, for dynamic and for other scales."""
    grads = jax.grad(loss_fn)(params, loss_scale, x)
    grads = loss_scale.unscale(grads)
    if isinstance(loss_scale, jmp.DynamicLossScale):
        grads_finite = jmp.all_finite(grads)
        loss_scale = loss_scale.adjust(grads_finite)
        params = jmp.select_tree(grads_finite, apply_optimizer(params, grads), params)
    else:
        params = apply_optimizer(params, grads)
    return params, loss_scale


def test_the_training_steps_of_the_readme_take_and_skip_steps():
    params = {"w": jnp.array([[1.0], [2.0]])}
    x = jnp.array([[1.0, 0.5]])
    expected = params["w"] - 0.1 * 2 * (x @ params["w"]) * x.T
    scales = (
        jmp.StaticLossScale(2**15),
        jmp.NoOpLossScale(),
        jmp.DynamicLossScale(jmp.half_dtype()(2**15)),
    )
    for scale in scales:
        stepped, after = jax.jit(train_step)(params, scale, x)
        np.testing.assert_array_equal(stepped["w"], expected)
        assert float(after.loss_scale) == float(scale.loss_scale)
    skipped, after = jax.jit(train_step)(params, scale, x * jnp.inf)
    np.testing.assert_array_equal(skipped["w"], params["w"])
    assert float(after.loss_scale) == 2**14


@pytest.mark.parametrize(
    ("number", "is_finite"),
    [
        (3, True),
        (1.5, True),
        (1 + 2j, True),
        (float("nan"), False),
        ([1.0, float("inf")], False),
        (complex("nan"), False),
        (1e300, False),  # in float32
    ],
)
def test_python_numbers_are_checked_and_scaled_as_arrays_of_jax(number, is_finite):
    assert bool(jmp.all_finite({"a": number})) is is_finite
    for scale in (jmp.StaticLossScale(8), jmp.DynamicLossScale(8.0)):
        for result, factor in ((scale.scale(number), 8), (scale.unscale(number), 1 / 8)):
            for got, leaf in zip(jax.tree.leaves(result), jax.tree.leaves(number), strict=True):
                assert got.dtype == (np.complex64 if isinstance(leaf, complex) else np.float32)
                with np.errstate(over="ignore"):
                    np.testing.assert_array_equal(got, np.asarray(leaf * factor, got.dtype))


# Tests that others wrote


def run_tests(path):
    output = "".join(run_python(path, path=ROOT))
    ran = re.search(r"^Ran (\d+) tests", output, re.MULTILINE)
    assert ran is not None and int(ran[1]) > 0
    return int(ran[1])


@pytest.mark.full
def test_haikus_mixed_precision_tests_pass(tmp_path):
    haiku = metadata.distribution("dm-haiku")
    test = pathlib.Path(haiku.locate_file("haiku/_src/mixed_precision_test.py"))
    (tmp_path / test.name).write_text(test.read_text())  # away from modules named `jax`, `random`
    assert run_tests(tmp_path / test.name) >= 13


@pytest.fixture(scope="module")
def deepminds_jmp(tmp_path_factory):
    """The package jmp 0.0.4, unzipped in a temporary folder."""
    folder = tmp_path_factory.mktemp("deepmind")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
    done = subprocess.run([*command, "jmp==0.0.4"], capture_output=True, text=True)
    if done.returncode != 0:
        reason = f"jmp==0.0.4 cannot be downloaded: {done.stderr.strip()[-300:]}"
        skip_or_fail(reason, "JMP_REQUIRE_DEEPMIND")
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder / "jmp"


@pytest.mark.full
@pytest.mark.parametrize(("module", "at_least"), [("loss_scale", 25), ("policy", 72)])
def test_deepminds_own_tests_pass(module, at_least, deepminds_jmp, tmp_path):
    source = deepminds_jmp / "_src" / f"{module}_test.py"
    imports = rf"(?m)^from jmp\._src import {module} as jmp$"
    text, changed = re.subn(imports, "import jmp", source.read_text())
    assert changed == 1
    alone = tmp_path / source.name  # away from the unzipped package, which would be imported
    alone.write_text(text)
    assert run_tests(alone) >= at_least
