"""Runs a test's program as two processes of four CPU devices each."""

import os
import socket
import subprocess
import sys

from testbed import ROOT


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
