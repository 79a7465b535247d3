"""The programs that the README and the pages of docs/ print.

`python -m tests.project.printed_programs` checks their types, as mypy does for whoever copies one.
"""

import pathlib
import re
import subprocess
import sys
import tempfile

from testbed import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

# What packages declare wrongly themselves, by the program that meets it.
NOT_OURS = {
    "adapters_haiku": "attr-defined",  # Haiku's init returns a type that mypy finds nowhere
    "cheat_sheet_haiku": "attr-defined",  # likewise
    # nnx.split returns a tuple whose length mypy does not know
    "checks_the_ranges_of_an_nnx_model": "misc",
    "generation_flax_nnx": "misc",
}


def code_blocks():
    """Yields the page and the heading of every Python block of every page, and the block."""
    for page in PAGES:
        heading = ""
        for part in re.split(
            r"(^#+ [^\n]*$|^```python\n.*?^```$)", page.read_text(), flags=re.M | re.S
        ):
            if part.startswith("#"):
                heading = part.lstrip("# ")
            elif part.startswith("```python"):
                yield page, heading, part.removeprefix("```python\n").removesuffix("```")


def check_types():
    """Runs mypy once on all programs, outside of the clone; returns its exit status."""
    settings = "[mypy]\ndisable_error_code = import-untyped\n"
    settings += "".join(f"[mypy-{n}]\ndisable_error_code = {c}\n" for n, c in NOT_OURS.items())
    programs = {}
    for page, heading, code in code_blocks():
        name = re.sub(r"\W+", "_", f"{page.stem} {heading}").strip("_").lower()
        while name in programs:
            name += "_next"
        programs[name] = code
    with tempfile.TemporaryDirectory() as folder:
        for name, code in programs.items():
            pathlib.Path(folder, f"{name}.py").write_text(code)
        pathlib.Path(folder, "mypy.ini").write_text(settings)
        cache = ROOT / ".mypy_cache" / "printed_programs"  # it has settings of its own
        command = [sys.executable, "-m", "mypy", "--cache-dir", str(cache), "."]
        return subprocess.run(command, cwd=folder, check=False).returncode


if __name__ == "__main__":
    sys.exit(check_types())
