"""Runs the examples at a tiny size."""

import contextlib
import importlib
import io
import re
import runpy
import subprocess
import sys
import warnings

import jax
import matplotlib.pyplot as plt
import numpy as np
import orbax.checkpoint as ocp
import pytest

from testbed import ROOT

TINY = {
    "digits": ["--epochs=1", "--seeds=2", "--batch-size=256", "--width=4"],
    "char_lm": ["--steps=3", "--seeds=2", "--batch-size=2", "--length=8", "--width=8"],
    "memory": ["--layers=1", "--batch-size=2", "--length=8", "--width=8", "--vocabulary=16"],
    "autoencoder": ["--steps=3", "--seeds=2", "--batch-size=2"],
    "inspect_ranges": ["--batch-size=2"],
    "log_metrics": ["--steps=25", "--batch-size=8"],
    "grpo": ["--digits=1", "--width=16", "--steps=3", "--batch-size=8", "--pretrain-to=0.05"],
    "find_overflow": ["--steps=45", "--learning-rate=0.3", "--batch-size=16", "--width=8"],
}

TINY["char_lm"] += ["--characters=20000"]

GALLERY = {
    "diffusion": ["--steps=2", "--batch-size=4", "--width=4", "--precisions=mixed_bfloat16"],
    "lora": ["--steps=8", "--pretrain-steps=20", "--batch-size=4", "--length=16", "--width=16"],
    "actor_critic": ["--updates=2", "--seeds=1", "--width=8", "--precisions=mixed_float16"],
    "seq2seq": ["--steps=12", "--batch-size=16", "--width=8", "--precisions=mixed_float16"],
    "data_parallel": ["--steps=8", "--batch-size=16", "--width=16", "--precisions=float32"],
}
GALLERY["lora"] += ["--runs", "everything, float32", "LoRA, float32", "LoRA, mixed bfloat16"]


@contextlib.contextmanager
def imported_example(name):
    """Gives a file of `examples/` as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "examples")
        yield importlib.import_module(name)


def run_example(name, *arguments):
    """Runs an example in this process, which has imported what takes seconds.

    Returns: its exit status, what it printed and its errors. An exception comes through.
    """
    path = ROOT / "examples" / f"{name}.py"
    code, output, errors = 0, io.StringIO(), io.StringIO()
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.syspath_prepend(path.parent)
        patch.setenv("COLUMNS", "140")
        patch.setattr(sys, "argv", [str(path), *map(str, arguments)])
        # As a user's program runs, which knows nothing of the rules of our tests.
        stack.enter_context(jax.numpy_rank_promotion("allow"))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("default")
        stack.enter_context(contextlib.redirect_stdout(output))
        stack.enter_context(contextlib.redirect_stderr(errors))
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as exit:
            code = exit.code or 0
        finally:
            plt.close("all")  # each example ends with its figures
    return subprocess.CompletedProcess(path, code, output.getvalue(), errors.getvalue())


def completed(name, *arguments):
    """Runs an example that must succeed; returns what it printed."""
    process = run_example(name, *arguments)
    assert process.returncode == 0, process.stderr
    return process.stdout


def refusal(name, *arguments):
    """Returns what an example says as it refuses, before it trains."""
    process = run_example(name, *arguments)
    assert process.returncode == 2
    assert "Traceback" not in process.stderr and "Training on" not in process.stdout
    return process.stderr


def saved(folder, step):
    """Returns the arrays of a checkpoint by their paths, and its history without the times."""
    (kept,) = folder.glob("checkpoints/*/**/training")
    with ocp.CheckpointManager(kept) as manager:
        items = {"state": ocp.args.StandardRestore(), "history": ocp.args.JsonRestore()}
        found = manager.restore(step, args=ocp.args.Composite(**items))
    leaves = jax.tree.leaves_with_path(found["state"])
    arrays = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}
    return arrays, {name: x for name, x in found["history"].items() if name != "seconds"}


def assert_saved_alike(folder, other, step):
    """Holds two checkpoints and their histories equal, bit by bit."""
    (got, history), (expected, other_history) = saved(folder, step), saved(other, step)
    assert history == other_history
    assert got.keys() == expected.keys()
    for name, array in expected.items():
        assert got[name].dtype == array.dtype, name
        assert got[name].tobytes() == array.tobytes(), name


def words_and_numbers(printed):
    """Returns the words that a program printed, and its numbers: their last digits may differ."""
    number = r"-?\d+(?:\.\d+)?"
    words = re.sub(number, "#", " ".join(printed.split()))
    return words, [*map(float, re.findall(number, printed))]
