"""Runs the examples at a tiny size."""

import contextlib
import importlib
import io
import os
import re
import runpy
import subprocess
import sys
import warnings

import jax
import pytest

from testbed import ROOT

TINY = {
    "digits": ["--epochs=1", "--seeds=2", "--batch-size=256", "--width=4"],
    "char_lm": [
        "--steps=3",
        "--seeds=2",
        "--batch-size=2",
        "--length=8",
        "--width=8",
        "--characters=20000",
    ],  # fmt: skip
    "memory": ["--layers=1", "--batch-size=2", "--length=8", "--width=8", "--vocabulary=16"],
    "autoencoder": ["--steps=3", "--seeds=2", "--batch-size=2"],
    "inspect_ranges": ["--batch-size=2"],
    "log_metrics": ["--steps=25", "--batch-size=8"],
    "grpo": ["--digits=1", "--width=16", "--steps=3", "--batch-size=8", "--pretrain-to=0.05"],
    "find_overflow": ["--steps=45", "--learning-rate=0.3", "--batch-size=16", "--width=8"],
}


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
    return subprocess.CompletedProcess(path, code, output.getvalue(), errors.getvalue())


def run_example_alone(name):
    """Runs an example as a user does, in a process of its own."""
    environment = dict(os.environ, PYTHONPATH=str(ROOT), COLUMNS="140")
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py")]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def words_and_numbers(printed):
    """Returns the words that a program printed, and its numbers: their last digits may differ."""
    number = r"-?\d+(?:\.\d+)?"
    return re.sub(number, "#", " ".join(printed.split())), [
        *map(float, re.findall(number, printed))
    ]
