"""The benchmarks run, at a tiny size; nothing here asserts a time."""

import contextlib
import json
import os
import sys
from importlib.util import find_spec

import jax
import numpy as np
import pytest

import benchmarks.run
from benchmarks import gpu_parts, models, pairing, programs, targets, worker
from benchmarks.pages import measured as measured_page
from benchmarks.pages import wire as wire_page
from benchmarks.pages.registry import FIGURES
from benchmarks.pairing import paired
from benchmarks.planner_rules import RULES
from benchmarks.processes import ROOT
from benchmarks.recipes import RECIPES
from benchmarks.workloads import rehearsal
from testbed.machines.gpus import as_if_cudnn
from testbed.passes import replaced

# One of each kind: the others differ only in sizes.
KINDS = ("gpt2", "resnet50-cifar-128", "update-60")
WORKLOADS = [workload for workload in rehearsal() if workload.name in KINDS]
PAIRS = [
    (recipe, workload)
    for recipe in RECIPES
    for workload in WORKLOADS
    if recipe.address(workload) is not None
]


@pytest.mark.full
@pytest.mark.parametrize(
    ("recipe", "workload"), PAIRS, ids=lambda row: getattr(row, "name", "") or ""
)
def test_a_step_returns_a_state_like_the_one_it_got(recipe, workload):
    if recipe.package and (recipe.needs_peers_first or find_spec(recipe.package) is None):
        pytest.skip(f"{recipe.package} of {recipe.title} is not installed, or hides behind ours")
    with jax.numpy_rank_promotion("allow"):
        training = recipe.make(workload)
        key = jax.random.key(0)
        state, batch = (jax.eval_shape(make, key) for make in (training.init, workload.batch))
        with as_if_cudnn() if recipe.needs_cudnn else contextlib.nullcontext():
            new_state, loss = jax.eval_shape(training.step, state, batch)
    # What is donated can only be reused, and the step compiled only once, if no type changes.
    assert jax.tree.structure(new_state) == jax.tree.structure(state)
    for new, old in zip(jax.tree.leaves(new_state), jax.tree.leaves(state), strict=True):
        assert (new.shape, new.dtype, new.weak_type) == (old.shape, old.dtype, old.weak_type)
    assert loss is None or loss.dtype == np.float32


def test_the_models_attend_alike_with_cudnn(monkeypatch):
    attend = jax.nn.dot_product_attention
    by_xla = lambda *heads, implementation, **masks: attend(*heads, **masks)
    monkeypatch.setattr(jax.nn, "dot_product_attention", by_xla)  # there is no cuDNN here

    @jax.jit
    def both(heads):
        # Causal and even as GPT-2, the first four; not causal and odd as ViT-B/16, all five.
        return [
            [attention(*parts, causal) for attention in (models.attention, models.cudnn_attention)]
            for parts, causal in ((heads[:, :, :4], True), (heads, False))
        ]

    heads = jax.random.normal(jax.random.key(0), (3, 2, 5, 2, 8))
    with jax.numpy_rank_promotion("allow"):
        pairs = both(heads)
    for expected, attended in pairs:
        np.testing.assert_allclose(attended, expected, rtol=1e-4, atol=1e-5)


def test_ratios_are_within_a_round_and_come_with_an_interval():
    # The machine is slow at one moment and fast at the next.
    moments = iter(np.random.default_rng(0).uniform(1, 100, 1000))

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
    varied = {"by-hand": lambda steps: steps, "ours": lambda steps: steps * chance.normal(1.5, 0.1)}
    low, high = paired(varied, None, "by-hand", rounds=40)["ours"]["interval"]
    assert 1.3 < low < 1.5 < high < 1.7


def test_a_candidate_that_fails_is_named_and_the_others_go_on():
    def failing_at(call):
        calls = iter(range(100))

        def failing(steps):
            if next(calls) == call:
                raise RuntimeError("out of memory")
            return 1.0

        return failing

    error, steady = {"error": "out of memory"}, lambda steps: 2.0
    results = paired({"by-hand": steady, "ours": failing_at(3)}, None, "by-hand", rounds=8)
    assert results["ours"] == error and results["by-hand"]["seconds"] == 2
    # Every ratio is to the baseline: without it there is none.
    results = paired({"by-hand": failing_at(3), "ours": steady}, None, "by-hand", rounds=8)
    assert results["ours"] == results["by-hand"] == error


def test_a_rehearsal_of_the_parts_writes_what_their_page_reads(results_of, monkeypatch):
    monkeypatch.setattr(pairing, "SLICE_SECONDS", 0)  # one step at a time: no time is asserted
    (family,) = (row for row in gpu_parts.FAMILY_PARTS if row.name == "family-physics")
    parts = [*gpu_parts.ATTENTIONS[:1], family, *gpu_parts.OTHERS[:2], gpu_parts.OTHERS[-1]]
    names = [part.name for part in parts]
    results = results_of("gpu", *names, "--rehearse", "--rounds=8")
    for part in parts:
        ways = results["workloads"][part.name]["recipes"]
        assert ways[part.baseline]["ratio"] == 1
        assert not [way for way, found in ways.items() if "error" in found]
        if gpu_parts.EXACT in ways:
            deviations = {way: found["deviation"] for way, found in ways.items()}
            assert deviations.pop(gpu_parts.EXACT) == 0
            assert all(0 < deviation < 0.01 for deviation in deviations.values())
        assert part.title in measured_page.gpu_parts(results)
    # Another process, or another day: what the file has is left, and the rest goes on.
    again = results_of("gpu", *names, "--rehearse", "--rounds=8", "--resume", "--minutes=-1")
    assert again == results


class InThisProcess:
    """Answers as a worker does, but for one recipe in a process of its own."""

    def ask(self, do, **options):
        return getattr(worker.Worker("by-hand"), do)(**options)


@pytest.fixture
def results_of(tmp_path, monkeypatch):
    """Returns what runs a suite in this process and reads the file that it has written."""
    workers = lambda names, *_: contextlib.nullcontext({name: InThisProcess() for name in names})
    monkeypatch.setattr(benchmarks.run, "workers", workers)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)  # threads of one process: one at a time

    def run(suite, only, *options):
        command = [f"--suite={suite}", f"--output-dir={tmp_path}", "--only", only, *options]
        monkeypatch.setattr(sys, "argv", ["run.py", *command])
        benchmarks.run.main()
        (file,) = tmp_path.glob("*.json")
        return json.loads(file.read_text())

    return run


def test_a_rehearsal_of_the_wire_writes_what_the_report_reads(h200, results_of):
    results = results_of("wire", "fsdp", "--rehearse", "--recipes", "by-hand", "autocast")
    assert set(results["workloads"]) == {"fsdp"}
    counted = results["workloads"]["fsdp"]["recipes"]
    assert set(counted) == {"by-hand", "autocast"}
    counted["autocast"]["received"] = {"all-gather f16": 2**20, "all-gather f32": 2**21, "x s8": 9}
    counted["by-hand"]["received"] = {"all-reduce f32": 2**21, "all-to-all f16": 2**20}
    rows = [[c.strip() for c in r.split("|")] for r in wire_page.sent(results).splitlines()]
    (by_hand,), (ours,) = (
        [r[1:8] for r in rows if r[2:3] == [n]] for n in ("by hand, half", "autocast")
    )
    assert by_hand == ["FSDP, jit", "by hand, half", "", "", "2.0 f32", "1.0 f16", "3.0"]
    assert ours == ["", "autocast", "1.0 f16 + 2.0 f32", "", "", "", "3.0"]
    counted["autocast"] = {"error": "out of memory"}
    assert "- FSDP, jit, autocast: not run: out of memory" in wire_page.sent(results)


@pytest.mark.full
def test_a_rehearsal_of_the_targets_writes_what_their_page_reads(h200, results_of, monkeypatch):
    monkeypatch.setattr(targets, "tpu_python", lambda: None)
    results = results_of("targets", "adam", "--rehearse", "--machines", "l40s", "v5e")
    counted = results["workloads"]["adam"]["recipes"]
    halves, ways = ("float16", "bfloat16"), ("by hand", "ours")
    assert set(counted) == {f"l40s {half} {way}" for half in halves for way in ways}
    ours, by_hand = (counted[f"l40s float16 {way}"] for way in ("ours", "by hand"))
    # By hand half parameters are only written, ours are read too; all others are in both.
    assert 1 < ours["bytes_moved"] / by_hand["bytes_moved"] < 1.08

    def ratios():
        (row,) = (r for r in FIGURES["targets/update"](results).splitlines() if "L40S" in r)
        return [cell.strip() for cell in row.split("|")[3:5]]

    assert ratios() == [f"{ours[key] / by_hand[key]:.3f}" for key in ("bytes_moved", "kernels")]
    counted["l40s float16 ours"] = {"error": "does not compile"}
    assert ratios() == ["–", "–"]


@pytest.mark.full
def test_a_rehearsal_of_the_families_writes_what_their_page_reads(h200, results_of, monkeypatch):
    monkeypatch.setattr(targets, "_python", lambda *_: None)  # no other compiler
    results = results_of("families", "score-matching", "--rehearse", "--machines", "h200")
    counted = results["workloads"]["score-matching"]["recipes"]
    depths = [f"h200 float16 {layers} layers" for layers in (2, 6, 12)]
    errors = [f"h200 {half} gradient error" for half in ("float16", "bfloat16")]
    assert [*counted] == [*depths, *errors]
    assert {"trace_seconds", "compile_seconds"} <= counted[depths[0]]["autocast"].keys()
    assert all(0 < counted[name][way]["error"] < 0.1 for name in errors for way in counted[name])
    by_hand, ours = (counted[depths[2]][way]["bytes_moved"] for way in ("by hand", "autocast"))
    assert FIGURES["families/count"](results) == "1"
    assert f"/ {ours / by_hand:.3f}" in FIGURES["families/table"](results)
    counted[depths[2]] = {"error": "does not compile"}
    assert "/ –" in FIGURES["families/table"](results)


def test_programs_of_pages_are_counted_row_by_row(results_of, monkeypatch):
    def failing():
        raise RuntimeError("does not compile")

    rows = {"one": lambda: {"kernels": 3}, "two": failing}
    monkeypatch.setattr(programs, "GROUPS", (programs.Group("float8", "A table", rows),))
    with pytest.raises(RuntimeError, match="does not compile"):  # workers hand it on as words
        results_of("programs", "float8")
    del rows["two"]
    found = results_of("programs", "float8")["workloads"]
    assert found == {"float8": {"title": "A table", "recipes": {"one": {"kernels": 3}}}}
    rows["one"] = None  # is not run again
    assert results_of("programs", "float8", "--resume")["workloads"] == found
    assert results_of("programs", "float8", "--minutes=-1")["workloads"] == found


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--suite=gpu"], "expected a GPU"),
        (["--suite=gpu", "--rounds=3"], "at least 8"),
        (["--suite=gpu", "--recipes", "adapter"], "every ratio is to it"),
        (["--suite=wire", "--only", "gpt2"], "expected one of fsdp, "),
        (["--suite=compiled", "--only", "fsdp"], "expected one of gpt2, "),
    ],
)
def test_a_suite_that_makes_no_sense_is_refused(arguments, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["run.py", *arguments, f"--output-dir={tmp_path}"])
    with pytest.raises(SystemExit) as exit:
        benchmarks.run.main()
    # A sentence is a status too: Python prints it and ends with 1.
    assert exit.value.code not in (None, 0)
    assert sentence in capsys.readouterr().err + str(exit.value.code)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_what_switches_off_a_rule_of_the_planner_stands_where_it_says(rule):
    with replaced(rule.off):  # an AttributeError names what is not there
        pass
    page = (ROOT / "docs" / "internals.md").read_text().lower()
    assert f"**{rule.name}" in page, f"no paragraph of docs/internals.md begins with {rule.name}"
