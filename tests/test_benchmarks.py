"""The benchmarks run, at a tiny size; nothing here asserts a time."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from benchmarks import report
from benchmarks.pairing import paired
from benchmarks.recipes import RECIPES
from benchmarks.workloads import UPDATES, Update, rehearsal

ROOT = pathlib.Path(__file__).parents[1]
# One of each kind: the others differ in sizes alone.
KINDS = ("gpt2", "resnet50-cifar-128", "update-60")
WORKLOADS = [workload for workload in rehearsal() if workload.name in KINDS]
PAIRS = [
    (recipe, workload)
    for recipe in RECIPES
    for workload in WORKLOADS
    if (recipe.update if isinstance(workload, Update) else recipe.training)
]


@pytest.mark.parametrize(
    ("recipe", "workload"), PAIRS, ids=lambda row: getattr(row, "name", "") or ""
)
def test_a_step_returns_a_state_like_the_one_it_got(recipe, workload):
    if recipe.package and (
        recipe.needs_peers_first or importlib.util.find_spec(recipe.package) is None
    ):
        pytest.skip(f"{recipe.package} of {recipe.title} is not installed, or hides behind ours")
    with jax.numpy_rank_promotion("allow"):
        training = recipe.make(workload)
        key = jax.random.key(0)
        state, batch = (jax.eval_shape(make, key) for make in (training.init, workload.batch))
        new_state, loss = jax.eval_shape(training.step, state, batch)
    # What is donated can only be reused, and the step compiled only once, if no type changes.
    assert jax.tree.structure(new_state) == jax.tree.structure(state)
    for new, old in zip(jax.tree.leaves(new_state), jax.tree.leaves(state), strict=True):
        assert (new.shape, new.dtype, new.weak_type) == (old.shape, old.dtype, old.weak_type)
    assert loss is None or loss.dtype == np.float32


def test_recipes_start_from_the_same_loss():
    (workload,) = (row for row in WORKLOADS if row.name == "gpt2")
    losses = {}
    for recipe in RECIPES:
        if recipe.training and not recipe.package:
            with jax.numpy_rank_promotion("allow"):
                training = recipe.make(workload)
                state = training.init(jax.random.key(0))
                _, loss = jax.jit(training.step)(state, workload.batch(jax.random.key(1)))
            losses[recipe.name] = float(loss)
    for name, loss in losses.items():
        assert loss == pytest.approx(losses["float32"], rel=1e-3), name


def test_ratios_are_within_a_round_and_come_with_an_interval():
    moments = iter(
        np.random.default_rng(0).uniform(1, 100, 1000)
    )  # of a machine now slow, now fast

    def candidates():
        state = {"calls": 0, "slow": 1.0}

        def timed(seconds):
            def time_steps(steps):
                if state["calls"] % 2 == 0:
                    state["slow"] = next(moments)
                state["calls"] += 1
                return steps * seconds * state["slow"]

            return time_steps

        return {"by-hand": timed(1e-3), "ours": timed(2e-3)}

    results = paired(candidates(), step_seconds=1e-3, baseline="by-hand", rounds=8)
    assert results["ours"]["ratio"] == pytest.approx(2)
    assert results["by-hand"]["ratio"] == 1
    chance = np.random.default_rng(1)
    varied = {
        "by-hand": lambda steps: steps * 1.0,
        "ours": lambda steps: steps * chance.normal(1.5, 0.1),
    }
    low, high = paired(varied, None, "by-hand", rounds=40)["ours"]["interval"]
    assert 1.3 < low < 1.5 < high < 1.7


def run(*arguments):
    environment = dict(os.environ, JAX_PLATFORMS="cpu", PYTHONPATH=str(ROOT))
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)


def test_a_rehearsal_writes_what_the_report_reads(tmp_path, monkeypatch):
    finished = run(
        "benchmarks.run", "--suite=gpu", "--rehearse", "--rounds=8", f"--output-dir={tmp_path}",
        "--only", "update-60", "--recipes", "by-hand", "adapter",
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    results = json.loads((tmp_path / "gpu_rehearsal.json").read_text())
    measured = results["workloads"]["update-60"]["recipes"]
    assert set(measured) == {"by-hand", "by-hand again", "adapter"}
    assert all(len(measured[name]["interval"]) == 2 for name in ("by-hand again", "adapter"))
    text = report.gpu_section(results, None)
    assert UPDATES[0].title in text and "ours: adapter" in text


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--suite=gpu"], "expected a GPU"),
        (["--suite=cpu", "--rounds=3"], "at least 8"),
        (["--suite=cpu", "--recipes", "adapter"], "every ratio is to it"),
    ],
)
def test_mistakes_are_refused(arguments, sentence, tmp_path):
    finished = run("benchmarks.run", *arguments, f"--output-dir={tmp_path}")
    assert finished.returncode != 0
    assert sentence in finished.stderr
    assert not list(tmp_path.iterdir())


def test_the_documentation_is_what_the_committed_results_say(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "plot_compiled", lambda *_: None)
    monkeypatch.setattr(report, "DOCS", tmp_path)
    report.main()
    assert (tmp_path / "performance.md").read_text() == (ROOT / "docs/performance.md").read_text()
