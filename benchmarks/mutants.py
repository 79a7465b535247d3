"""Changes the package in one place at a time, and counts the changes that no test finds.

    python -m benchmarks.mutants --mutants 20 --seed 1

Counted are those that `make test` finds, and those that only `make test-all` finds.

Each mutant is one small change of one line of code that a test can notice: a comparison, a
constant, a sign, a condition, a statement that is left out. First the tests that belong to the
file run (`python -m tests.quick`); if all of them pass, those of the messages, the whole test files
that the first ones are from, and those of compiled programs.
A mutant that still passes has survived. Some survivors change nothing that a program could see: the
results list every survivor, so that a reader can judge.
"""

import argparse
import ast
import collections
import concurrent.futures
import copy
import dataclasses
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from benchmarks.processes import ROOT

ENOUGH, ENOUGH_IN_ALL = 0.92, 0.94  # of the mutants are to be found: by `make test`, by both
SURVIVES = "survives"
LONGEST = 900  # seconds for the tests of one mutant; a loop without end is found too
MESSAGES = "tests/project/test_mistakes.py"  # is of no file, and seconds long
COMPILED = ("-m", "pytest", "-q", "-x", "-p", "no:xdist", "tests/h200", "tests/targets")
LEFT_OUT = ("__main__.py", "_jax_compat.py")  # a command; code for versions that are not installed
PAIRS = (
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq)),
    *((ast.Is, ast.IsNot), (ast.In, ast.NotIn)),
)
COMPARISONS = {a: b for pair in PAIRS for a, b in (pair, pair[::-1])}
NOTHING = ("None", "False", "''")  # one is as good as another where the answer is no
ARITHMETIC = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult}


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """Yields what may stand in a node's place."""
    new: Any = copy.deepcopy(node)
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in COMPARISONS:
            new.ops = [COMPARISONS[type(operator)]()]
        case ast.BoolOp(op=operator):
            new.op = ast.Or() if isinstance(operator, ast.And) else ast.And()
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            new = operand
        case ast.BinOp(op=operator) if type(operator) in ARITHMETIC:
            new.op = ARITHMETIC[type(operator)]()
        case ast.Constant(value=bool() as value):
            new.value = not value
        case ast.Constant(value=int() | float() as value):
            new.value = value + 1
        case ast.IfExp():
            new.body, new.orelse = node.orelse, node.body
        case ast.If(test=test):
            new.test = ast.UnaryOp(ast.Not(), test)
        case ast.Expr(value=ast.Call()):
            new = ast.Pass()
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) not in NOTHING:
            new.value = ast.Constant(None)
        case _:
            return
    yield new


def is_code(node: ast.AST) -> bool:
    """Returns whether a node is computed: not a type, a text, a decorator, or a declaration."""
    decorators = {getattr(decorator, "id", "") for decorator in getattr(node, "decorator_list", ())}
    if decorators & {"overload"} or getattr(node, "arg", "") == "strict":
        return False
    return not isinstance(node, ast.Import | ast.ImportFrom | ast.JoinedStr | ast.Raise)


def places(tree: ast.AST) -> Iterator[tuple[ast.AST, str, int | None]]:
    """Yields (parent, field, index) of each node that can be changed."""
    for field, value in ast.iter_fields(tree):
        if field in ("annotation", "returns", "decorator_list", "bases", "type_params"):
            continue
        if field == "keywords" and isinstance(tree, ast.ClassDef):  # `total=False`: only types
            continue
        items = enumerate(value) if isinstance(value, list) else [(None, value)]
        for index, item in items:
            if isinstance(item, ast.AST) and is_code(item):
                if any(True for _ in changes(item)):
                    yield tree, field, index
                yield from places(item)


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A file with one change: the line, the change in words, and the whole changed text."""

    file: str
    line: int
    change: str
    text: str


def mutant_of(path: pathlib.Path, number: int) -> Mutant:
    """Makes the change at the place of this number in a file."""
    tree = ast.parse(path.read_text())
    parent, field, index = list(places(tree))[number]
    old = getattr(parent, field) if index is None else getattr(parent, field)[index]
    (new,) = changes(old)
    change = " -> ".join(ast.unparse(part).partition("\n")[0] for part in (old, new))
    if index is None:
        setattr(parent, field, new)
    else:
        getattr(parent, field)[index] = new
    text = ast.unparse(ast.fix_missing_locations(tree)) + "\n"
    return Mutant(str(path.relative_to(ROOT)), old.lineno, change, text)


def drawn(count: int, seed: int) -> list[Mutant]:
    """Draws mutants; each place of the package is as likely as every other."""
    files = [path for path in sorted((ROOT / "jmp").rglob("*.py")) if path.name not in LEFT_OUT]
    every = [
        (path, number)
        for path in files
        for number in range(sum(1 for _ in places(ast.parse(path.read_text()))))
    ]
    return [mutant_of(*place) for place in random.Random(seed).sample(every, count)]


def passes(folder: pathlib.Path, *arguments: str) -> bool:
    """Runs tests in a folder, and returns whether all of them pass."""
    try:
        finished = subprocess.run(
            [sys.executable, *arguments],
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=LONGEST,
        )
    except subprocess.TimeoutExpired:
        return False
    return finished.returncode == 0


def found_by(mutant: Mutant, folder: pathlib.Path) -> str:
    """Returns which command finds a mutant that is written into a copy of the project, if any."""
    path = folder / mutant.file
    before = path.read_text()
    path.write_text(mutant.text)
    quick = ("-m", "tests.quick", "--first-failure")
    whole = ((*quick, "--whole", mutant.file), COMPILED)
    parts = ((*quick, mutant.file), (*quick, MESSAGES), *whole)
    try:
        if not all(passes(folder, *part, "--core") for part in parts):
            return "make test"
        return SURVIVES if all(passes(folder, *part) for part in whole) else "make test-all"
    finally:
        path.write_text(before)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutants", description=__doc__)
    parser.add_argument("--mutants", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    mutants = drawn(arguments.mutants, arguments.seed)
    found: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        copies = [pathlib.Path(folder, str(number)) for number in range(2)]
        kept_out = shutil.ignore_patterns(".*", "build", "site", "peers", "runs", "__pycache__")
        for one in copies:
            shutil.copytree(ROOT, one, ignore=kept_out)

        waiting = iter(mutants)

        def in_one_copy(folder: pathlib.Path) -> None:
            for mutant in waiting:
                command = found_by(mutant, folder)
                found[command] += 1
                print(f"{command:14}{mutant.file}:{mutant.line}: {mutant.change}", flush=True)

        with concurrent.futures.ThreadPoolExecutor(len(copies)) as pool:
            list(pool.map(in_one_copy, copies))
    by_test, by_all = (found[command] / len(mutants) for command in ("make test", "make test-all"))
    print(f"`make test` finds {by_test:.0%}, and `make test-all` {by_test + by_all:.0%}.")
    if by_test < ENOUGH or by_test + by_all < ENOUGH_IN_ALL:
        raise SystemExit(f"Expected at least {ENOUGH:.0%} and {ENOUGH_IN_ALL:.0%}.")


if __name__ == "__main__":
    main()
