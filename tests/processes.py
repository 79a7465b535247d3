"""Runs a test's program in a process of its own, or in two of four CPU devices each."""

import os
import socket
import subprocess
import sys

from testbed import ROOT


def run_python(*arguments, path, **variables):
    """Runs Python to its end, which must be well, with `path` to import from.

    Returns: what it printed, and its errors.
    """
    environment = os.environ | {"PYTHONPATH": str(path)} | variables
    command = [sys.executable, *map(str, arguments)]
    finished = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert finished.returncode == 0, (finished.stdout + finished.stderr)[-4000:]
    return finished.stdout, finished.stderr


def run_two(module, folder):
    """Runs `python -m module PROCESS PORT FOLDER`, with a PROCESS of 0 and 1, to their ends."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    running = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(process), str(port), str(folder)],
            cwd=ROOT,
            env=os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(2)
    ]
    for process in running:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
