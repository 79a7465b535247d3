"""The examples run end to end at a tiny size, and refuse what makes no sense."""

import functools
import json
import os
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
import pytest
from flax import nnx

from benchmarks.figures import example
from jmp import transforms
from jmp.adapters import nnx as mixed
from testbed import ROOT
from tests.commands import in_full
from tests.project.running import GALLERY, TINY, completed, imported_example, refusal

matplotlib.use("Agg")


@pytest.mark.parametrize("name", in_full(TINY.keys(), but=["log_metrics"]))
def test_an_example_writes_its_table_its_numbers_and_its_picture(name, tmp_path):
    printed = completed(name, *TINY[name], f"--output-dir={tmp_path}")
    assert "on cpu" in printed and "float16" in printed
    report = json.loads((tmp_path / f"{name}.json").read_text())
    assert report["device"] == "cpu"
    assert "</svg>" in (tmp_path / f"{name}.svg").read_text()
    if name == "digits":
        assert set(report["precisions"]) >= {"float32", "naive float16", "mixed float16"}
        half, naive = (report["precisions"][f"{kind} float16"] for kind in ("mixed", "naive"))
        assert len(half["test_accuracy"]) == 2
        assert half["parameter_bytes"] == 2 * naive["parameter_bytes"]
    elif name == "log_metrics":
        header, *lines = (tmp_path / "log_metrics.csv").read_text().splitlines()
        assert header.startswith("step,loss,loss_scale,grads_finite,skipped_steps")
        assert len(lines) == 25
        assert 0 < report["last_line"]["skipped_steps"] < 25
    elif name == "inspect_ranges":
        zeros = {
            name: sum(row["zeros"] for row in program["rows"] if row["operation"])
            for name, program in report["programs"].items()
        }
        assert len(zeros) == 3
        assert zeros["float16 without loss scaling"] == max(zeros.values())
    elif name == "find_overflow":
        assert report["found"]["operation"] in ("exp", "integer_pow")
        assert report["found"]["module"] == "Network/attention"
        assert 25 < report["cured_at_step"] < 45
    elif name == "memory":
        kept = {run: found["activations"] for run, found in report["reports"].items()}
        assert kept["mixed float16, checkpoint"] < kept["mixed float16"] <= kept["float32"]
        assert all(found["transformer_factors"] for found in report["reports"].values())
    elif name == "autoencoder":
        assert len(report["runs"]) == 3
        for run in report["runs"].values():
            assert [len(losses) for losses in run["losses"]] == [3, 3]  # a curve a seed
        lost, kept = (report["runs"][f"float16 {way} loss scaling"] for way in ("without", "with"))
        assert np.mean(lost["zero_gradients"]) > 2 * np.mean(kept["zero_gradients"])
    elif name == "char_lm":
        assert set(report["runs"]) == {"float32", "float16", "bfloat16"}
        for run in report["runs"].values():
            assert [len(losses) for losses in run["losses"]] == [3, 3]  # a curve a seed
        assert report["sizes"]["held_out"] > 1000
    elif name == "grpo":
        run = report["runs"]["float16"]
        assert run["skipped_steps"] == run["applied_nonfinite"] == [0]
        assert run["final_scales"] == [2.0**16]
        assert len(run["reward_curves"][0]) == len(run["gap_curves"][0]) == 3
        assert 0 < run["last_sample_sizes"][0] <= run["sample_sizes"][0] <= 1 + 1e-6


def test_an_example_writes_where_git_looks_away_unless_it_is_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    completed("memory", *TINY["memory"], "--no-xla")
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"memory.json", "memory.svg"}
    assert "runs/" in (ROOT / ".gitignore").read_text().splitlines()


@pytest.mark.full
def test_the_quickstart_trains_alike_before_and_after():
    before, after = re.findall(r"loss (\S+)", completed("quickstart"))
    assert float(after) == pytest.approx(float(before), rel=0.1)


@pytest.fixture
def written(tmp_path):
    """Returns what runs an example of the gallery at a tiny size, and what it wrote and printed."""

    def run(name):
        printed = completed(name, *GALLERY[name], f"--output-dir={tmp_path}")
        assert "on cpu" in printed
        return json.loads((tmp_path / f"{name}.json").read_text()), printed

    return run


def test_the_diffusion_example_draws_digits_and_moves_no_average_in_a_skipped_step(
    written, tmp_path
):
    (run,) = written("diffusion")[0]["runs"].values()
    samples = np.array(run["samples"])
    assert samples.shape == (20, 8, 8) and samples.min() >= 0 and samples.max() <= 16
    assert len(np.unique(samples)) > 5
    assert "</svg>" in (tmp_path / "diffusion.svg").read_text()
    assert all(0.1 < loss < 10 for loss in run["losses"].values())

    with imported_example("diffusion") as diffusion:
        view = mixed.autocast(diffusion.Denoiser(4, nnx.Rngs(0)), "mixed_float16")
        tx = transforms.mixed_precision(optax.adam(1e-2), "mixed_float16")
        optimizer = nnx.Optimizer(view, tx, wrt=nnx.Param)
        average = nnx.clone(view)
        images, labels, key = jnp.ones((4, 8, 8, 1)), jnp.arange(4), jax.random.key(0)
        step = lambda images: diffusion.train_step(view, optimizer, (average,), images, labels, key)
        found = []
        for batch in (images, images, images * jnp.inf):
            step(batch)
            found.append(np.asarray(average.head.kernel[...]))
        assert found[0].dtype == np.float32 and (found[0] != found[1]).any()
        np.testing.assert_array_equal(found[1], found[2])


def test_the_lora_example_keeps_nothing_for_its_frozen_backbone(written):
    report, printed = written("lora")
    memory, losses = report["memory"], report["losses"]
    assert losses["everything, float32"] < 5.4  # of bytes drawn alike it is 5.55
    np.testing.assert_allclose(losses["LoRA, mixed bfloat16"], losses["LoRA, float32"], rtol=1e-3)
    whole, half = memory["LoRA, float32"], memory["LoRA, mixed bfloat16"]
    # All but the norms are half.
    assert 0.5 < half["frozen parameters"] / whole["frozen parameters"] < 0.52
    for found in (whole, half):
        # Two moments, the count of Adam and of the schedule, and the loss scale.
        assert found["gradients"] == found["parameters"]
        assert 0 <= found["optimizer"] - 2 * found["parameters"] < 50
    everything = memory["everything, float32"]
    assert everything["gradients"] == whole["frozen parameters"] > 2 * whole["gradients"]
    assert "frozen parameters" in printed


def test_the_actor_and_the_critic_have_a_scale_each(written):
    (run,) = written("actor_critic")[0]["runs"].values()
    assert len(run["returns"]) == 2 and min(run["returns"]) > 0
    # A norm is null if most steps were skipped: the first scale is too large for the critic.
    assert all(norm is None or norm > 0 for norm in run["norms"])
    assert run["scales"][0] >= run["scales"][1]

    with imported_example("actor_critic") as example:
        tx = transforms.mixed_precision(optax.sgd(1.0), "mixed_float16")
        model = eqx.nn.MLP(4, "scalar", 8, 1, jnp.tanh, key=jax.random.key(0))
        before = eqx.filter(model, eqx.is_array)
        opt_state, states = tx.init(before), jnp.ones((3, 4))
        take = functools.partial(example.take_step, example.critic_loss, tx)
        skipped, opt_state, norm = take(model, opt_state, states, jnp.full(3, jnp.inf))
        assert not np.isfinite(norm) and opt_state.loss_scale.loss_scale == 2.0**15
        jax.tree.map(np.testing.assert_array_equal, eqx.filter(skipped, eqx.is_array), before)
        taken, opt_state, norm = take(model, opt_state, states, jnp.zeros(3))
        true = eqx.filter_grad(example.critic_loss)(model, states, jnp.zeros(3))
        np.testing.assert_allclose(norm, optax.tree.norm(true), rtol=1e-5)  # unscaled
        moved = jax.tree.map(jnp.subtract, before, eqx.filter(taken, eqx.is_array))
        np.testing.assert_allclose(optax.tree.norm(moved), norm, rtol=1e-4)


def test_the_sequence_example_decodes_what_teacher_forcing_would_write(written):
    (run,) = written("seq2seq")[0]["runs"].values()
    assert run["loss"] < 4.8  # of 128 characters alike it is 4.85
    assert 0 <= run["right"] <= 1 and run["as in float32"] > 0.5

    with imported_example("seq2seq") as example:
        texts, dates = example.draw_dates(8, seed=0)
        assert {len(text.tobytes()) for text in texts} == {4 * example.LONGEST}
        assert all(bytes(date.tolist())[4:5] == b"-" for date in dates)
        model = example.Translator(8)
        variables = model.init(jax.random.key(0), texts, dates)
        written = example.greedy(model, variables, texts)
        given = jnp.pad(written[:, :-1], ((0, 0), (1, 0)))
        logits = model.apply(variables, texts, given)
        np.testing.assert_array_equal(written, logits.argmax(-1))


def test_eight_devices_have_the_losses_of_one(written, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])  # the example sets it
    runs = written("data_parallel")[0]["runs"]
    one, parallel, sharded = (
        runs[f"float32, {way}"] for way in ("one device", "data parallel", "FSDP")
    )
    np.testing.assert_allclose(parallel["losses"], one["losses"], rtol=1e-5)
    np.testing.assert_allclose(sharded["losses"], one["losses"], rtol=1e-5)
    assert one["losses"][-1] < one["losses"][0]
    assert parallel["kB on a device"] == one["kB on a device"] > 7 * sharded["kB on a device"]
    assert one["skipped whole"] and parallel["skipped whole"] and sharded["skipped whole"]


@pytest.mark.parametrize("name", [*TINY, *GALLERY])
def test_a_mistake_is_refused(name):
    option = "--updates" if name == "actor_critic" else "--batch-size"
    assert "expected a number above zero" in refusal(name, f"{option}=-1")


def test_the_page_lists_every_example():
    examples = {path.name for path in (ROOT / "examples").glob("[!_]*.py")}
    page = (ROOT / "docs" / "examples.md").read_text()
    assert set(re.findall(r"^\|.*\(\.\./examples/(\w+\.py)\)", page, re.M)) == examples


def test_a_paired_difference_has_students_interval():
    paired = example("char_lm").paired
    reference = np.array([1.0, 2.0, 4.0])
    found = paired(reference + [0.0, 1.0, 2.0], reference, margin=3.6)
    # Of 0, 1, 2: mean 1, standard deviation 1; t of two degrees of freedom at 0.975 is 4.3027.
    assert found["mean"] == 1
    np.testing.assert_allclose(found["interval"], 1 + np.array([-1, 1]) * 4.3027 / 3**0.5, 1e-4)
    assert found["equivalent"]
    assert not paired(reference + [0.0, 1.0, 2.0], reference, margin=3.4)["equivalent"]
    assert not paired([1.0], [1.0], margin=1.0)["equivalent"]  # one seed tells nothing
