"""Draws programs, and compares what autocast makes of them between two states of the package.

    python -m benchmarks.plan_sample compare --base main    # the clone against a revision

Of each program are written: the jaxpr that `jmp.autocast` emits, equation by equation; that of its
gradient with respect to all floating arguments; the precision report, with the reason of each
operation; warnings of jmp, and errors where there is no program. Nothing is compiled or run.
`_program_texts.py` says what is left out of the texts, so that private functions may be renamed and
moved; `_plan_sources.py` has the sources, of which a seed draws a fixed share each.

`compare` takes the package `jmp` alone out of the revision and draws the programs of the clone with
both: it runs `write` once with each package. The exit status is 1 if any program differs.
"""

import argparse
import collections
import contextlib
import difflib
import gc
import gzip
import hashlib
import io
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before JAX starts
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # of what draws parameters

import jax
import jax.numpy as jnp

import jmp
from benchmarks._plan_sources import SOURCES, Drawn, drawn_programs
from benchmarks._program_texts import (
    error_text,
    names_of_package,
    normal,
    program_text,
    report_text,
    without_names,
)
from benchmarks.processes import ROOT
from jmp.diagnostics import precision_report
from testbed.machines.gpus import as_if_cudnn

COUNT, SEED = 3000, 0
PARTS = ("forward", "gradient", "report", "warnings")
AT_ONCE = 100  # programs after which JAX forgets what it traced: memory
SHOWN, LINES = 3, 60  # differences that are printed, and lines of each
PACKAGE = pathlib.Path(jmp.__file__).parent


# Writing.


def record(drawn: Drawn) -> dict[str, str]:
    """Returns what autocast makes of a program: its parts as text."""
    program, options = drawn.program, drawn.options
    leaves, structure = jax.tree.flatten(program.args)
    is_given = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves]
    floats = [leaf for leaf, given in zip(leaves, is_given, strict=True) if given]
    others = [leaf for leaf, given in zip(leaves, is_given, strict=True) if not given]

    def taking(function: Callable[..., Any]) -> Callable[..., Any]:
        def of_leaves(floats: list[Any], others: list[Any]) -> Any:
            left, right = iter(floats), iter(others)
            merged = [next(left) if given else next(right) for given in is_given]
            return function(*jax.tree.unflatten(structure, merged))

        return of_leaves

    def report() -> str:
        asked = precision_report(program.fun, drawn.policy, **options)
        return report_text(asked(*program.args).to_dict())

    told: list[str] = []
    parts: dict[str, str] = {}
    with _as_drawn(options), _warnings_of_jmp(told):
        try:
            function = taking(jmp.autocast(program.fun, drawn.policy, **options))
        except Exception as error:  # of the options
            parts["forward"] = error_text(error)
        else:
            parts["forward"] = _text_of(function, floats, others)
            parts["gradient"] = _gradient_text(function, floats, others)
        try:
            parts["report"] = report() if drawn.has_report else ""
        except Exception as error:
            parts["report"] = error_text(error)
    parts["warnings"] = "\n".join(told)
    return {key: parts.get(key, "") for key in PARTS}


@contextlib.contextmanager
def _as_drawn(options: dict[str, Any]) -> Iterator[None]:
    """Ranks may be promoted, and cuDNN's attention traced, as its users trace it."""
    is_fused = options.get("attention") == "fused"
    with jax.numpy_rank_promotion("allow"), as_if_cudnn() if is_fused else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def _warnings_of_jmp(told: list[str]) -> Iterator[None]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield
    for warning in found:
        if warning.category.__module__.partition(".")[0] == "jmp":
            told.append(normal(f"{warning.category.__name__}: {warning.message}"))


def _total(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the sum of all floating results of a function, in float32."""

    def total(floats: list[Any], others: list[Any]) -> Any:
        leaves = map(jnp.asarray, jax.tree.leaves(function(floats, others)))
        given = [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)]
        return sum((jnp.sum(leaf.astype(jnp.float32)) for leaf in given), jnp.float32(0))

    return total


def _text_of(function: Callable[..., Any], floats: list[Any], others: list[Any]) -> str:
    try:
        closed = jax.make_jaxpr(function)(floats, others)
    except Exception as error:
        return error_text(error)
    return program_text(closed)


def _gradient_text(function: Callable[..., Any], floats: list[Any], others: list[Any]) -> str:
    """Returns the gradient as text; where there is none, the error and the forward derivative."""
    text = _text_of(jax.grad(_total(function)), floats, others)
    if not text.startswith("raised"):
        return text

    def derivative(floats: list[Any], others: list[Any]) -> Any:
        of_floats = lambda floats: _total(function)(floats, others)
        return jax.jvp(of_floats, (floats,), (jax.tree.map(jnp.ones_like, floats),))

    return f"{text}\n{_text_of(derivative, floats, others)}"


def write(
    path: pathlib.Path,
    count: int = COUNT,
    seed: int = SEED,
    only: Sequence[str] = (),
    tell: Any = None,
) -> None:
    """Draws programs, and writes what autocast makes of them: a line of JSON each, compressed.

    Args:
      only: names of sources; all if there are none.
      tell: is called with a sentence now and then, such as `print`.
    """
    tell = tell or (lambda sentence: None)
    # Now: the files may be edited meanwhile.
    state = {"jmp": _digest(PACKAGE), "names": names_of_package()}
    seconds: collections.Counter[str] = collections.Counter()  # of the processor
    with _opened(path) as file:
        for number, drawn in enumerate(drawn_programs(count, seed, only)):
            if number % AT_ONCE == 0:
                tell(f"{number} programs in {seconds.total():.0f} s; {drawn.source} follow")
                jax.clear_caches()
                gc.collect()
            options = {key: normal(str(value)) for key, value in sorted(drawn.options.items())}
            named = {"source": drawn.source, "name": drawn.name, "policy": drawn.policy}
            file.write(json.dumps({**named, "options": options, **record(drawn)}) + "\n")
            seconds[drawn.source] += time.process_time() - seconds.total()
        file.write(json.dumps(state) + "\n")
    each = ", ".join(f"{source} {taken:.0f}" for source, taken in seconds.items())
    tell(f"all programs in {seconds.total():.0f} s of the processor: {each}")


@contextlib.contextmanager
def _opened(path: pathlib.Path) -> Iterator[io.TextIOBase]:
    """Opens a compressed file that has no date, so that equal contents are equal files."""
    with path.open("wb") as raw, gzip.GzipFile("", "wb", 6, raw, mtime=0) as packed:
        with io.TextIOWrapper(packed, encoding="utf-8") as file:
            yield file


def _digest(package: pathlib.Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


# Comparing.


def read(path: pathlib.Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Returns the records of a file, and which package made them."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        *rows, state = map(json.loads, file)
    return rows, state


def compare(first: pathlib.Path, second: pathlib.Path, tell: Any = print) -> bool:
    """Prints how many programs are equal and how the first others differ; returns if all are."""
    (before, state), (after, other_state) = read(first), read(second)
    names = {*state["names"], *other_state["names"]}
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    shown = 0
    for row, other in zip(before, after, strict=True):
        texts = {part: [without_names(of[part], names) for of in (row, other)] for part in PARTS}
        found = [part for part, (text, other_text) in texts.items() if text != other_text]
        count = counts[row["source"]]
        count.update(["programs", *(found or ["equal"])])
        count["raised"] += row["forward"].startswith("raised")
        if found and shown < SHOWN:
            shown += 1
            title = f"\n{row['source']}: {row['name']}\n{row['policy']} {row['options']}"
            lines = _unified(*texts[found[0]])
            tell("\n".join([f"{title}; differs in: {', '.join(found)}", *lines]))
    tell("\n" * bool(shown) + _summary(counts))
    return all(count["equal"] == count["programs"] for count in counts.values())


def _summary(counts: dict[str, collections.Counter[str]]) -> str:
    counts = {source: counts[source] for source in SOURCES if source in counts}
    lines = []
    for source, count in (*counts.items(), ("all", sum(counts.values(), collections.Counter()))):
        differ = [f"{part} {count[part]}" for part in PARTS if count[part]]
        others = f"; others differ in: {', '.join(differ)}" * bool(differ)
        raised = f"; {count['raised']} raise an error" * bool(count["raised"])
        equal = f"{count['equal']} of {count['programs']} programs are equal"
        lines.append(f"{source}: {equal}{others}{raised}")
    return "\n".join(lines)


def _unified(before: str, after: str) -> Iterator[str]:
    """Yields the first lines of the difference between two texts."""
    texts = before.splitlines(), after.splitlines()
    difference = list(difflib.unified_diff(*texts, "before", "after", lineterm="", n=2))
    yield from difference[:LINES]
    if len(difference) > LINES:
        yield f"... and {len(difference) - LINES} lines more"


def write_with_both(
    revision: str, folder: pathlib.Path, drawing: Sequence[str]
) -> tuple[pathlib.Path, pathlib.Path]:
    """Writes the clone's programs with the package of a revision and with the clone's.

    Args:
      folder: where the files are written, and the revision's package.
      drawing: the options of `write` that say which programs.
    """
    command = ["git", "archive", revision, PACKAGE.name]
    archive = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    subprocess.run(["tar", "x", "-C", folder], input=archive, check=True)
    before, after = folder / "before.jsonl.gz", folder / "after.jsonl.gz"
    processes = [_writing(folder, before, drawing), _writing(ROOT, after, drawing)]
    for process in processes:
        if process.wait():
            raise subprocess.CalledProcessError(process.returncode, process.args)
    if read(before)[1]["jmp"] != _digest(folder / PACKAGE.name):
        raise RuntimeError(f"the package of {revision} was not the one that was imported")
    return before, after


def _writing(
    package: pathlib.Path, path: pathlib.Path, drawing: Sequence[str]
) -> "subprocess.Popen[bytes]":
    """Starts to write the clone's programs with the package of a folder."""
    environment = dict(
        os.environ,
        PYTHONPATH=os.pathsep.join(map(str, (package, ROOT))),
        PYTHONSAFEPATH="1",  # `-m` would put this project before everything
    )
    command = [sys.executable, "-m", "benchmarks.plan_sample", "write", "--output", str(path)]
    return subprocess.Popen([*command, *drawing], cwd=ROOT, env=environment)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    drawing = argparse.ArgumentParser(add_help=False)
    drawing.add_argument("--count", type=int, default=COUNT, help="about so many programs")
    drawing.add_argument("--seed", type=int, default=SEED)
    drawing.add_argument("--only", nargs="+", default=[], choices=list(SOURCES), help="sources")
    writing = commands.add_parser("write", parents=[drawing])
    writing.add_argument("--output", type=pathlib.Path, required=True)
    comparing = commands.add_parser("compare", parents=[drawing])
    comparing.add_argument("--base", required=True, help="a revision, compared with the clone")
    given = parser.parse_args(arguments)
    if given.command == "write":
        tell = lambda sentence: print(sentence, file=sys.stderr)
        write(given.output, given.count, given.seed, given.only, tell)
        return 0
    options = ["--count", str(given.count), "--seed", str(given.seed)]
    options += ["--only", *given.only] if given.only else []
    with tempfile.TemporaryDirectory() as folder:
        files = write_with_both(given.base, pathlib.Path(folder), options)
        return int(not compare(*files))


if __name__ == "__main__":
    sys.exit(main())
