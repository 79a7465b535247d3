"""What somebody wrote from the pages alone trains, and ends with its own assertions."""

import os
import subprocess
import sys

import pytest

from testbed import ROOT

# But for JAX's, where another process is still writing to the cache of compiled programs.
WARNINGS = ("-W", "error::UserWarning", "-W", "ignore:Error reading persistent compilation cache")
STEPS = {"vit": 20, "checkpoint": 10, "vae": 20, "fsdp_gpt": 4}


@pytest.mark.full
@pytest.mark.parametrize("walk", STEPS)
def test_a_port_from_the_pages_alone_trains(walk, tmp_path):
    program = ROOT / "tests/walks" / f"{walk}.py"
    done = subprocess.run(
        [sys.executable, *WARNINGS, str(program), f"--steps={STEPS[walk]}"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
