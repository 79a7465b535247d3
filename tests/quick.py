"""Runs the tests that belong to a few files, in half a minute: `make quick FILE=jmp/trees.py`.

    python -m tests.quick FILE ...     # a file of the package, or of the tests
    python -m tests.quick              # the files that differ from the last commit
    python -m tests.quick --write      # measures again which tests belong to which file; 10 minutes

What belongs to a file of the package: its doctests, what the house asks of it, and tests that
`tests/quick.txt` lists. The list is made from a run of the suite that notes which test runs which
lines. For each file it takes, test by test, the one that runs most lines in its time that no test
before it ran, until `SECONDS` are used up. So what passes here may still fail in `make test`.
"""

import argparse
import collections
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence

import pytest

ROOT = pathlib.Path(__file__).parents[1]
LIST = pathlib.Path(__file__).with_suffix(".txt")
SECONDS = 18.0  # of tests, on two cores: with the start of two processes, half a minute
LONGEST = 4.0  # seconds of a single test
MOST = 60  # tests of a file
NOT_MEASURED = ("tests/project", "tests/h200")  # other programs, and compiled ones, of seconds each
SELECTED, TIMES = "JMP_QUICK_SELECTED", "JMP_QUICK_TIMES"  # files, for the hooks below
PROCESSES = ("-n", "2", "--dist", "worksteal")

# Hooks of pytest, when it runs with `-p tests.quick`.

seconds: dict[str, float] = collections.defaultdict(float)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if SELECTED not in os.environ:
        return
    wanted = set(pathlib.Path(os.environ[SELECTED]).read_text().splitlines())

    def is_wanted(item: pytest.Item) -> bool:
        return bool(wanted.intersection((item.nodeid, item.nodeid.partition("::")[0])))

    config.hook.pytest_deselected(items=[item for item in items if not is_wanted(item)])
    items[:] = filter(is_wanted, items)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    seconds[report.nodeid] += report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    if TIMES in os.environ and not hasattr(session.config, "workerinput"):
        pathlib.Path(os.environ[TIMES]).write_text(json.dumps(seconds))


# The list.


def listed() -> dict[str, list[str]]:
    """Returns the tests that belong to each file of the package, most useful first."""
    if not LIST.exists():
        return {}
    parts = LIST.read_text().removesuffix("\n").split("\n\n")
    return {file: tests for file, *tests in (part.split("\n") for part in parts)}


def most_lines(lines: dict[str, set[int]], took: dict[str, float]) -> list[str]:
    """Chooses tests that together run most lines in `SECONDS`.

    A line that two chosen tests run counts for less in a third, and never for nothing: a mistake
    in a line may show in one result and not in another.

    Args:
      lines: the lines of one file that each test runs.
      took: seconds of each test.
    """
    left = {test for test in lines if took.get(test, LONGEST) < LONGEST}
    chosen, times_run, used = [], collections.Counter[int](), 0.0

    def worth(test: str) -> tuple[float, str]:
        new = sum(4.0 ** -times_run[line] for line in lines[test])
        return new / (took[test] + 0.02), test

    while left and len(chosen) < MOST:
        best = max(left, key=worth)
        left.remove(best)
        if used + took[best] <= SECONDS:
            chosen.append(best)
            used += took[best]
            times_run.update(lines[best])
    return chosen


def write() -> None:
    """Runs the suite, notes which test runs which lines, and writes the list."""
    import coverage  # only the list needs it

    with tempfile.TemporaryDirectory() as folder:
        data, times = pathlib.Path(folder, "coverage"), pathlib.Path(folder, "times")
        run = [sys.executable, "-m", "pytest", "--core", "-q", "-p", "tests.quick", "-n", "2"]
        run += ["--dist", "loadfile", "--no-loadscope-reorder", "--cov=jmp", "--cov-report="]
        run += ["--cov-context=test", *(f"--ignore={folder}" for folder in NOT_MEASURED)]
        environment = os.environ | {"COVERAGE_FILE": str(data), TIMES: str(times)}
        status = subprocess.run(run, cwd=ROOT, env=environment).returncode
        if status > 1:  # one says that a test failed; the others were measured all the same
            raise SystemExit(status)
        took = json.loads(times.read_text())
        measured = coverage.CoverageData(str(data))
        measured.read()
        text = []
        for path in sorted(measured.measured_files()):
            lines: dict[str, set[int]] = collections.defaultdict(set)
            for line, contexts in measured.contexts_by_lineno(path).items():
                for context in filter(None, contexts):
                    test, _, stage = context.rpartition("|")
                    if stage == "run":
                        lines[test].add(line)
            file = str(pathlib.Path(path).relative_to(ROOT))
            own = [test for test in lines if test.startswith(f"{file}::")]  # doctests: always run
            for test in own:
                del lines[test]
            text.append("\n".join([file, *most_lines(lines, took)]))
    LIST.write_text("\n\n".join(text) + "\n")


# A run.


def changed() -> list[str]:
    """Returns the files that differ from the last commit, and new ones."""
    commands = (["diff", "--name-only", "HEAD"], ["ls-files", "--others", "--exclude-standard"])
    found = [
        subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=True)
        for command in commands
    ]
    return sorted({name for output in found for name in output.stdout.splitlines()})


def tests_of(files: Sequence[str]) -> list[str]:
    """Returns what belongs to `files`: ids of tests, and whole files of tests.

    Of several files of the package, each has its share of the tests of one.
    """
    known = listed()
    package = [file for file in files if file in known or file.startswith("jmp/")]
    share = -(-MOST // max(1, len(package)))
    selected = dict.fromkeys(file for file in files if is_test_file(file))
    for file in package:
        selected |= dict.fromkeys([file, *known.get(file, ())[:share], *house_of(file)])
    return list(selected)


def is_test_file(file: str) -> bool:
    return file.startswith("tests/") and pathlib.Path(file).name.startswith("test_")


def house_of(file: str) -> Iterable[str]:
    """Yields what the house asks of one file of the package."""
    house = "tests/project/test_house.py"
    inside = file.removeprefix("jmp/")
    for test in (
        "a_file_imports_only_from_lower_layers_or_its_own_folder",
        "a_file_can_be_read_whole",
        "a_message_holds_no_representation_but_a_description",
    ):
        yield f"{house}::test_{test}[{inside}]"
    yield f"{house}::test_no_modules_import_one_another_in_a_cycle"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.quick",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", nargs="*", metavar="FILE", help="a file of the package or tests")
    parser.add_argument("--first-failure", action="store_true", help="stop at it; one process")
    parser.add_argument("--whole", action="store_true", help="whole files of tests, in minutes")
    parser.add_argument("--core", action="store_true", help="of these what `make test` runs")
    parser.add_argument("--write", action="store_true", help="measure again, and write the list")
    arguments = parser.parse_args()
    if arguments.write:
        write()
        return
    for file in arguments.files:
        if not (ROOT / file).is_file():
            parser.error(f"there is no file {file}; expected one such as jmp/trees.py")
    files = arguments.files or changed()
    tests = tests_of([file for file in files if (ROOT / file).is_file()])
    if arguments.whole:
        tests = sorted({test.partition("::")[0] for test in tests})
    if not tests:
        what = ", ".join(files) or "nothing differs from the last commit"
        parser.error(f"no tests belong to the files: {what}. Name a file, or run make test.")
    for file in files:
        if file.startswith("jmp/") and file not in listed():
            print(f"{file} is not in {LIST.name} yet: only its doctests run. Run make quick-list.")
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        selected = pathlib.Path(folder, "selected")
        selected.write_text("\n".join(tests))
        places = sorted({test.partition("::")[0] for test in tests})
        run = [sys.executable, "-m", "pytest", "-q", "-p", "tests.quick"]
        run += ["-x", "-p", "no:xdist"] if arguments.first_failure else PROCESSES
        run += ["--core"] * arguments.core
        run += [place for place in places if (ROOT / place).is_file()]
        status = subprocess.run(run, cwd=ROOT, env=os.environ | {SELECTED: str(selected)})
    print(f"{len(places)} files in {time.perf_counter() - started:.0f} s.")
    raise SystemExit(status.returncode)


if __name__ == "__main__":
    main()
