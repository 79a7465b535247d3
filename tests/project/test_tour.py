"""The notebook runs from top to bottom and prints what is stored in it, but for the last digits.

`python -m tests.project.test_tour` runs it and stores what it prints and draws.
"""

import base64
import contextlib
import io
import json

import jax
import matplotlib
import matplotlib.pyplot as plt
import pytest

from testbed import ROOT
from tests.project.running import words_and_numbers

pytestmark = pytest.mark.full

NOTEBOOK = ROOT / "examples" / "tour.ipynb"


def run(notebook):
    """Yields each cell of code, and what it prints."""
    matplotlib.use("Agg")
    plt.close("all")
    names = {"__name__": "__main__"}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile("".join(cell["source"]), "tour.ipynb", "exec"), names)
            yield cell, printed.getvalue()


def test_the_notebook_prints_what_is_stored_in_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with jax.numpy_rank_promotion("allow"):  # as a user's program runs
        for cell, printed in run(json.loads(NOTEBOOK.read_text())):
            stored = "".join("".join(output.get("text", "")) for output in cell["outputs"])
            (words, numbers), (others, digits) = map(words_and_numbers, (printed, stored))
            assert words == others, "run: python -m tests.project.test_tour"
            assert numbers == pytest.approx(digits, rel=0.05)
            drawn = [output for output in cell["outputs"] if "image/png" in output.get("data", {})]
            assert len(drawn) == len(plt.get_fignums())
            plt.close("all")


if __name__ == "__main__":
    notebook = json.loads(NOTEBOOK.read_text())
    for cell, printed in run(notebook):
        text = printed.splitlines(keepends=True)
        cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": text}] * bool(text)
        for number in plt.get_fignums():
            png = io.BytesIO()
            plt.figure(number).savefig(png, dpi=80)
            data = {"image/png": base64.b64encode(png.getvalue()).decode()}
            cell["outputs"].append({"data": data, "metadata": {}, "output_type": "display_data"})
        plt.close("all")
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
