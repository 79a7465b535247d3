"""The long checks: how they are run and written down, and that a fault would be seen."""

import json

import numpy as np
import orbax.checkpoint as ocp
import pytest

from benchmarks.processes import ROOT
from benchmarks.soak import faults, kills
from testbed.mistakes import MISTAKES
from tests.transforms.every_optimizer import TRANSFORMATIONS
from tests.transforms.orders import REFUSED

pytestmark = pytest.mark.full

GPT, CIFAR10 = kills.EXAMPLES["gpt"], kills.EXAMPLES["cifar10"]


def save_ended(example, output, weight=1.0, loss=0.5):
    """What a training leaves that has ended."""
    for training in example.trainings:
        folder = kills.checkpoint_folder(example, output) / training
        with ocp.CheckpointManager(folder) as manager:
            state = {"w": np.float32([0.0, weight])}
            manager.save(example.last, args=ocp.args.Composite(state=ocp.args.StandardSave(state)))
        (folder.parent / "model.msgpack").write_bytes(b"%f" % weight)
    history = {"loss": [1.0, loss], "seconds": float(weight)}
    report = {"runs": [{"epochs": history}]} if example is CIFAR10 else {"history": history}
    (output / f"{example.name}.json").write_text(json.dumps(report))
    return output


@pytest.mark.parametrize("example", [GPT, CIFAR10], ids=["gpt", "cifar10"])
def test_a_training_that_ends_elsewhere_in_one_bit_is_a_fault(example, tmp_path):
    expected = save_ended(example, tmp_path / "expected")
    other = save_ended(example, tmp_path / "bit", weight=np.nextafter(np.float32(1), np.float32(2)))
    losses = save_ended(example, tmp_path / "losses", loss=0.5 + 2**-53)

    def faults(output):
        return kills.faults(example, output, expected)

    assert faults(expected) == []
    assert faults(other) == [f"{training}['w']" for training in example.trainings]
    assert faults(losses) == ["0: loss"]


def test_no_kill_left_a_training_that_ends_elsewhere():
    found = json.loads((ROOT / "results" / "soak.json").read_text())["kills"]
    assert found["passed"] and found["kills"] >= 30
    assert found["bit_equal"] == found["trainings"]


def test_float8_trained_as_bfloat16_did_wherever_it_could_run():
    found = json.loads((ROOT / "results" / "soak.json").read_text())["float8"]
    gpt, digits = found["gpt"], found["digits"]
    assert gpt["passed"] and len(gpt["rows"]) >= 3 and gpt["options"]["steps"] >= 200
    assert all(abs(row["difference"]) <= 0.04 for row in gpt["rows"])
    assert digits["passed"] and len(digits["seeds"]) >= 10
    assert abs(digits["difference"]) <= 2 * digits["standard_error"]
    # All products that could be float8 were.
    reasons = {why.split(":")[0] for why in gpt["not_float8"]}
    assert len(reasons) == 2 and not any("small" in why for why in reasons)


PAIRS = [*zip(["hysteresis", "dynamic", "static"], faults.STORAGES, strict=True)]


@pytest.mark.parametrize(("scale", "storage"), PAIRS)
def test_spoilt_steps_are_those_of_numpy_bit_by_bit(scale, storage):
    found = faults.compare(scale, storage, steps=400, seed=1)
    assert found["different"] == []
    assert found["faults"] > 100 and found["skipped"] >= found["faults"]


def test_the_examination_counts_what_the_tests_have():
    """Its other figures are marked and come from files."""
    page = " ".join((ROOT / "docs" / "claims.md").read_text().split())
    for sentence in (
        f"{len(TRANSFORMATIONS)} optimizers and transformations of optax",
        f"{len(MISTAKES)} mistakes of users",
        f"{sum(map(len, REFUSED))} orders of transformations",
    ):
        assert sentence in page
