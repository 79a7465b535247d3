"""Checkpoints of examples that can be resumed: a state on the device, a history, the options."""

import json
import pathlib
from typing import Any

import orbax.checkpoint as ocp

RECORD = "training.json"  # among checkpoints: what they were made with


class Checkpoints:
    """The last checkpoint of one training.

    Args:
      folder: of this training.
      record: written to `record_folder / RECORD` with every checkpoint; see `check_checkpoints`.
    """

    def __init__(
        self, folder: pathlib.Path, record_folder: pathlib.Path, record: dict[str, Any]
    ) -> None:
        # Not in the background, where it would slow the next steps down, which are timed.
        options = ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)
        self._record_file, self._record = record_folder / RECORD, record

    def restore(self, state: Any, history: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Returns what was saved last, or `state` and `history` if nothing was."""
        latest = self._manager.latest_step()
        if latest is None:
            return state, history
        items = {"state": ocp.args.StandardRestore(state), "history": ocp.args.JsonRestore()}
        restored = self._manager.restore(latest, args=ocp.args.Composite(**items))
        return restored["state"], restored["history"]

    def save(self, number: int, state: Any, history: dict[str, Any]) -> None:
        self._record_file.write_text(json.dumps(self._record, indent=1) + "\n")
        items = {"state": ocp.args.StandardSave(state), "history": ocp.args.JsonSave(history)}
        self._manager.save(number, args=ocp.args.Composite(**items))

    def close(self) -> None:
        self._manager.close()


def check_checkpoints(folder: pathlib.Path, wanted: dict[str, Any], resume: bool) -> None:
    """Raises ValueError where resuming would mix two trainings, or starting would lose one.

    Args:
      folder: of the checkpoints; there may be none yet.
      wanted: what decides what is computed, as it is written to `folder / RECORD`.
      resume: whether the training there is to go on.
    """
    record = folder / RECORD
    found = json.loads(record.read_text()) if record.exists() else {}
    others = [name for name in wanted if found.get(name) != wanted[name]]
    if resume and others:
        expected = {name: found.get(name) for name in others} if found else "a training there"
        raise ValueError(
            f"--resume: for {folder} got { {name: wanted[name] for name in others} }; expected "
            f"{expected}. Give the options and the data it began with, or leave out --resume and "
            "give another --checkpoint-dir."
        )
    if found and not resume:
        raise ValueError(
            f"{folder} holds a training; expected none, or --resume to go on with it. To "
            "start anew delete it, or give another --checkpoint-dir."
        )
