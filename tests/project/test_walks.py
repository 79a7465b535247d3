"""Scripts that a new reader wrote from the pages of `docs/` alone run, in a folder of their own.

Whoever changes a page or an interface so that one of them fails has changed what readers were told:
mend the page and the script together.
"""

import pathlib
import runpy

import jax
import pytest

pytestmark = pytest.mark.full

WALKS = sorted((pathlib.Path(__file__).parent / "walks").glob("*.py"))


def test_each_reader_has_a_script():
    assert [path.stem for path in WALKS] == [
        "batchnorm_on_two_devices",
        "from_deepmind_jmp",
        "from_nnx",
        "from_pytorch",
        "frozen_equinox",
        "gan_in_nnx",
        "half_checkpoint",
    ]


@pytest.mark.parametrize("path", WALKS, ids=lambda path: path.stem)
def test_a_script_written_from_the_pages_runs_in_another_folder(
    path, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    with jax.numpy_rank_promotion("allow"):  # as a user's program runs
        runpy.run_path(str(path), run_name="__main__")
    assert "loss " in capsys.readouterr().out
    assert not list(tmp_path.iterdir())  # nothing is written but where the script says
