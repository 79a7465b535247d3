"""Drop-in: the tests of DeepMind's `jmp`, and of Haiku on top of it, pass on ours.

They come from the wheels of the package index, unzipped into a temporary folder; nothing of them is
installed or kept. Only lines that import `jmp._src` are changed, to `import jmp`.
"""

import os
import pathlib
import re
import subprocess
import sys
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parents[1]


def unzipped(requirement, folder):
    """Downloads a wheel and unzips it, or skips where the index cannot be reached."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
    done = subprocess.run([*command, requirement], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"cannot download {requirement}: {done.stderr.strip()[-300:]}")
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def run_tests(path, *import_path):
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(map(str, import_path)))
    finished = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, env=environment
    )
    output = finished.stdout + finished.stderr
    assert finished.returncode == 0, output[-4000:]
    ran = re.search(r"^Ran (\d+) tests", output, re.MULTILINE)
    assert ran is not None and int(ran[1]) > 0
    return int(ran[1])


@pytest.mark.parametrize(("module", "at_least"), [("loss_scale", 25), ("policy", 72)])
def test_deepminds_own_tests_pass(module, at_least, tmp_path):
    source = unzipped("jmp==0.0.4", tmp_path) / "jmp" / "_src" / f"{module}_test.py"
    text, changed = re.subn(
        rf"^from jmp\._src import {module} as jmp$",
        "import jmp",
        source.read_text(),
        flags=re.MULTILINE,
    )
    assert changed == 1
    alone = tmp_path / "alone"  # away from the unzipped package, which would be imported
    alone.mkdir()
    (alone / source.name).write_text(text)
    assert run_tests(alone / source.name, ROOT) >= at_least


def test_haikus_mixed_precision_tests_pass(tmp_path):
    folder = unzipped("dm-haiku==0.0.17", tmp_path)
    test = folder / "haiku" / "_src" / "mixed_precision_test.py"
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / test.name).write_text(test.read_text())
    assert run_tests(alone / test.name, ROOT, folder) >= 13
