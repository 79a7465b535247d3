"""Checkpoints of examples that can be resumed: a state on the device, a history, the options.

A process may be killed at any moment. In the order in which they come into the folder:

1. `training.json`, the record, whole or not at all: what the training was begun with.
2. A checkpoint. Orbax writes it under another name, and renames it once it is whole.
3. The checkpoint before it goes away.

A record without a checkpoint is a training of no steps: --resume begins it, and so does a start
without. A checkpoint without its record is refused: nobody knows what made it.
"""

import json
import pathlib
from typing import Any

import jax
import orbax.checkpoint as ocp
from _common import stop, written_whole

RECORD = "training.json"  # among checkpoints: what they were made with
ANEW = "To start anew delete the folder, or give another --checkpoint-dir."
EXPECTED_RECORD = f"expected the options that the training began with, as JSON. {ANEW}"


class Checkpoints:
    """The last checkpoint of one training.

    Args:
      folder: of this training, called "training".
      record: written to `record_folder / RECORD` before the first checkpoint; `record_folder` is
        `folder`'s parent or the parent of that. See `check_checkpoints`.
    """

    def __init__(
        self, folder: pathlib.Path, record_folder: pathlib.Path, record: dict[str, Any]
    ) -> None:
        # Not in the background, where it would slow the next steps down, which are timed.
        options = ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)
        self._folder, self._record_file, self._record = folder, record_folder / RECORD, record
        self._is_recorded = False

    def restore(self, state: Any, history: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Returns what was saved last, or `state` and `history` if nothing was."""
        latest = self._manager.latest_step()
        if latest is None:
            return state, history
        items = {"state": ocp.args.StandardRestore(state), "history": ocp.args.JsonRestore()}
        try:
            restored = self._manager.restore(latest, args=ocp.args.Composite(**items))
        except Exception as error:  # files that are missing or damaged raise nearly anything
            stop(
                f"{self._folder / str(latest)} cannot be read ({type(error).__name__}: "
                f"{str(error)[:200]}); expected the checkpoint that was written there. {ANEW}"
            )
        return restored["state"], restored["history"]

    def save(self, number: int, state: Any, history: dict[str, Any]) -> None:
        # Once; the same is there already if the training was resumed. Of several processes each
        # saves its own part of the state, and the first one writes all else.
        if not self._is_recorded and jax.process_index() == 0:
            with written_whole(self._record_file) as file:
                file.write_text(json.dumps(self._record, indent=1) + "\n")
        self._is_recorded = True
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
    trainings = (*folder.glob("training"), *folder.glob("*/training"))
    # Orbax gives a checkpoint its number as a name once it is whole.
    checkpoints = [path for kept in trainings for path in kept.glob("*") if path.name.isdigit()]
    if not resume:
        if checkpoints:
            raise ValueError(
                f"{folder} holds a training; expected none, or --resume to go on with it. {ANEW}"
            )
        return

    found = read_record(folder / RECORD)
    if checkpoints and not found:
        raise ValueError(
            f"--resume: {folder} holds checkpoints, but no {RECORD}, which says what they were "
            f"made with; expected both. {ANEW}"
        )
    others = [name for name in wanted if found.get(name) != wanted[name]]
    if others:
        expected = {name: found.get(name) for name in others} if found else "a training there"
        raise ValueError(
            f"--resume: for {folder} got { {name: wanted[name] for name in others} }; expected "
            f"{expected}. Give the options and the data it began with, or leave out --resume and "
            "give another --checkpoint-dir."
        )


def read_record(path: pathlib.Path) -> dict[str, Any]:
    """Returns what was written to `path`; {} where there is no such file."""
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}); {EXPECTED_RECORD}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__}; {EXPECTED_RECORD}")
    return found
