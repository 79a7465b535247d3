"""What a kill leaves of an example that trains for hours, and what it may not write into."""

import json
import os
import pathlib
import shutil

import jax.numpy as jnp
import pytest

from testbed.example_data import write_text
from tests.project.running import TINY, imported_example, refusal

RECORD = {"width": 16, "seed": 0}
STATE = {"w": jnp.arange(3.0)}


@pytest.fixture(scope="module")
def module():
    """The examples' checkpoints, in this process."""
    with imported_example("_checkpoints") as module:
        yield module


class Killed(BaseException):
    """Stands for a kill: nothing below catches it."""


def opened(module, folder):
    return module.Checkpoints(folder / "training", folder, RECORD)


def trained(module, folder, *numbers):
    """A training that has saved these checkpoints and then ended."""
    folder.mkdir(parents=True, exist_ok=True)
    checkpoints = opened(module, folder)
    for number in numbers:
        checkpoints.save(number, {"w": STATE["w"] + number}, {"loss": [1.0] * number})
    checkpoints.close()
    return folder


def resumed(module, folder):
    """What --resume goes on from: the number of steps and the first weight."""
    module.check_checkpoints(folder, RECORD, resume=True)
    checkpoints = opened(module, folder)
    state, history = checkpoints.restore(STATE, {"loss": []})
    checkpoints.close()
    return len(history["loss"]), float(state["w"][0])


def refused(module, folder, resume, record=RECORD):
    with pytest.raises(ValueError) as error:
        module.check_checkpoints(folder, record, resume)
    return str(error.value)


def kill(*args, **options):
    raise Killed


def test_a_kill_while_the_record_is_written_leaves_none_or_the_one_before(module, tmp_path):
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(os, "replace", kill)  # written, but not in its place yet
        trained(module, tmp_path, 1)
    assert not (tmp_path / "training.json").exists()
    module.check_checkpoints(tmp_path, RECORD, resume=False)
    assert "expected a training there" in refused(module, tmp_path, resume=True)
    # Begun anew over what was left; the record is whole.
    trained(module, tmp_path, 1)
    assert json.loads((tmp_path / "training.json").read_text()) == RECORD
    assert sorted(path.name for path in tmp_path.iterdir()) == ["training", "training.json"]


def test_half_a_checkpoint_and_half_a_deletion_are_passed_over(module, tmp_path):
    folder = trained(module, tmp_path, 4, 8) / "training"
    # Killed while 12 was written, and while 4 was deleted.
    shutil.copytree(folder / "8", folder / "12.orbax-checkpoint-tmp")
    (folder / "12.orbax-checkpoint-tmp" / "_CHECKPOINT_METADATA").unlink()
    shutil.copytree(folder / "8", folder / "4")
    shutil.rmtree(folder / "4" / "state")
    assert resumed(module, tmp_path) == (8, 8.0)
    trained(module, tmp_path, 12)
    assert resumed(module, tmp_path) == (12, 12.0)
    assert [path.name for path in folder.iterdir()] == ["12"]


def test_a_training_there_is_neither_overwritten_nor_resumed_without_its_record(module, tmp_path):
    trained(module, tmp_path, 1)
    (tmp_path / "training.json").unlink()
    assert "holds a training" in refused(module, tmp_path, resume=False)
    message = refused(module, tmp_path, resume=True)
    assert "holds checkpoints, but no training.json" in message
    assert "give another --checkpoint-dir" in message


@pytest.mark.parametrize("content", ["", '{"width": 1', "[1, 2]"])
def test_a_record_that_cannot_be_read_is_named_with_what_to_do(module, tmp_path, content):
    record = trained(module, tmp_path, 1) / "training.json"
    record.write_text(content)
    message = refused(module, tmp_path, resume=True)
    assert str(record) in message
    assert "delete the folder, or give another --checkpoint-dir" in message


def test_a_damaged_checkpoint_is_named_with_what_to_do(module, tmp_path, capsys):
    folder = trained(module, tmp_path, 3) / "training" / "3"
    shutil.rmtree(folder / "state")
    with pytest.raises(SystemExit) as exit:
        resumed(module, tmp_path)
    assert exit.value.code == 2
    message = capsys.readouterr().err
    assert f"{folder} cannot be read" in message and "another --checkpoint-dir" in message


@pytest.mark.parametrize("name", ["log_metrics", "gpt"])
def test_a_folder_that_cannot_be_written_into_is_refused_before_anything_is_trained(name, tmp_path):
    (tmp_path / "file").write_text("in the way")
    options = TINY.get(name, [f"--data-dir={write_text(tmp_path / 'text')}", "--pattern=*.txt"])
    for folder in (tmp_path / "file", tmp_path / "file" / "below", pathlib.Path("/proc/none")):
        message = refusal(name, *options, f"--output-dir={folder}")
        assert f"--output-dir {folder} cannot be written into" in message
        assert "Give another --output-dir" in message
    if name == "gpt":  # which has a folder of checkpoints among its options
        folders = [f"--output-dir={tmp_path / 'out'}", f"--checkpoint-dir={tmp_path / 'file'}"]
        message = refusal(name, *options, *folders)
        assert f"--checkpoint-dir {tmp_path / 'file'} cannot be written into" in message
