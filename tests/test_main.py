"""`python -m jmp`: what it prints, and that its checks can fail."""

import importlib.metadata
import shutil
import sys
import types

import jax
import numpy as np
import optax
import pytest

import jmp
from jmp import __main__ as command
from jmp import transforms
from testbed import ROOT
from tests.processes import run_python


def test_it_prints_versions_devices_and_checks_and_exits_with_zero():
    printed, _ = run_python("-m", "jmp", path=ROOT)
    words = printed.split()
    assert jmp.__version__ in words and jax.__version__ in words
    assert "start with" in printed and "mixed_bfloat16" in printed
    assert printed.count("\nok ") == len(command.CHECKS)
    assert "2 of 2 checks passed on cpu" in printed


def test_the_report_names_every_setting_that_changes_results(monkeypatch, capsys):
    jax.devices()  # before they could start without the flags of conftest.py
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_deterministic_ops=true")
    with jax.default_matmul_precision("highest"):
        command.main([], [])
    printed = capsys.readouterr().out
    rows = dict(line.split(maxsplit=1) for line in printed.splitlines() if len(line.split()) > 1)
    assert rows["jax_default_matmul_precision"].strip() == "highest"
    assert rows["jax_numpy_rank_promotion"].strip() == "raise"  # of conftest.py
    assert rows["XLA_FLAGS"].strip() == "--xla_gpu_deterministic_ops=true"
    for package in ("jax", "jaxlib", "optax", "flax", "equinox", "dm-haiku"):
        assert rows[package].strip() == importlib.metadata.version(package)
    assert "unknown" not in [value.strip() for _, value in command.settings()]


def test_the_report_says_where_another_jmp_is_installed(monkeypatch):
    monkeypatch.setattr(command, "installed", lambda name: "0.0.4")
    assert ("jmp", f"{jmp.__version__} (as installed: 0.0.4)") in command.versions()


def installed_into(folder, name, version):
    """Writes what says that a distribution installs `jmp`."""
    (info := folder / f"{name.replace('-', '_')}-{version}.dist-info").mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "top_level.txt").write_text("jmp\n")


@pytest.mark.parametrize("name", ["jmp", "another-name"])
def test_two_distributions_that_install_jmp_are_named_with_the_command_to_repair(
    name, monkeypatch, tmp_path
):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert command.check_installation() == "jmp is not installed"
    installed_into(tmp_path, "jmp", "0.0.4")
    assert command.check_installation() == "one distribution installs jmp: jmp 0.0.4"
    installed_into(tmp_path / "lower", "jmp", "0.0.4")  # one can be found in two folders
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(tmp_path / "lower")])
    assert command.check_installation() == "one distribution installs jmp: jmp 0.0.4"
    installed_into(tmp_path, name, jmp.__version__)
    with pytest.raises(AssertionError) as error:
        command.check_installation()
    names = " ".join(sorted({"jmp", name}))
    assert f"{name} {jmp.__version__}" in str(error.value) and "jmp 0.0.4" in str(error.value)
    assert f"`pip uninstall --yes {names}`" in str(error.value)


def test_an_import_warns_where_deepminds_files_lie_among_ours(tmp_path):
    shutil.copytree(ROOT / "jmp", tmp_path / "jmp", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "user.py").write_text("import jmp\n")

    def errors():
        return run_python(tmp_path / "user.py", path=tmp_path, JAX_PLATFORMS="cpu")[1]

    assert "DeepMind" not in errors()
    (tmp_path / "jmp" / "_src").mkdir()
    (tmp_path / "jmp" / "_src" / "policy.py").touch()
    assert "PrecisionWarning: Files of DeepMind's jmp lie among" in errors()


def test_a_failed_check_is_named_the_others_run_and_the_status_is_one(capsys):
    def broken():
        """Two and two are five."""
        np.testing.assert_equal(2 + 2, 5)

    assert command.main([], [broken, lambda: "fine"]) == 1
    printed = capsys.readouterr().out
    assert "FAILED  Two and two are five.\n        AssertionError" in printed
    assert "ok      fine" in printed
    assert "1 of 2 checks passed" in printed


def test_an_unknown_option_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        command.main(["--fast"])
    assert "unrecognized arguments: --fast" in capsys.readouterr().err


BROKEN = {
    "a constant scale": (
        transforms,
        "with_loss_scale",
        lambda tx, scale, real=transforms.with_loss_scale: real(tx, jmp.StaticLossScale(2.0**15)),
        "the loss scale is 32768.0 after an overflow, not 16384",
    ),
    "no cast": (jmp, "autocast", lambda fun, policy: fun, "are not in float16"),
    "no skip": (
        optax,
        "apply_updates",
        lambda params, updates: params - 1,
        "a step after an overflow moved the parameters",
    ),
    "a longer step": (
        optax,
        "apply_updates",
        lambda params, updates: params + 1.5 * updates,
        "a step in float16 is off by",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_step_that_is_broken_is_seen(what, monkeypatch):
    module, name, broken, words = BROKEN[what]
    monkeypatch.setattr(module, name, broken)
    with pytest.raises(AssertionError, match=words):
        command.check_steps()


def test_devices_of_one_kind_are_counted():
    first = "none, as a rule", "mixed_bfloat16, to try it out"
    assert command.devices() == [(str(jax.device_count()), "cpu", "cpu", *first)]


@pytest.mark.parametrize(
    ("platform", "capability", "expected"),
    [
        ("tpu", None, ("bfloat16", "mixed_bfloat16, without")),
        ("gpu", "9.0", ("bfloat16, float16", "mixed_bfloat16, without")),
        ("gpu", "12.0", ("bfloat16, float16", "mixed_bfloat16, without")),
        ("gpu", "7.5", ("float16", "mixed_float16, with a dynamic")),
        ("gpu", "6.1", ("none", "mixed_float16, with a dynamic")),
        ("gpu", "gfx90a", ("unknown", "mixed_bfloat16, without")),
        ("cpu", None, ("none", "mixed_bfloat16, to try")),
    ],
)
def test_what_to_start_with(platform, capability, expected):
    device = types.SimpleNamespace(platform=platform)
    if capability is not None:
        device.compute_capability = capability
    for found, start in zip(command.advice(device), expected, strict=True):
        assert found.startswith(start)
