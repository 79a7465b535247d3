"""Programs and reports as text that does not depend on where jmp's own functions lie.

A line is an equation: what it gives, its primitive with its parameters in the order of their
names, what it reads, and its name stack. Functions inside of it stand below. Variables are numbered
on each level by themselves, so that two texts differ where the programs do.

What may change without a change of the program has no place in a text: addresses in memory, jmp's
own functions, its marks in name stacks, paths of files and lines of jmp's. The names that jmp gives
to what it emits are left out when two texts are compared, by `without_names`: the text of one state
of the package does not say which names are jmp's in the other.
"""

import ast
import collections
import enum
import functools
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.extend import core

import jmp

OURS = "<jmp>"
PACKAGE = pathlib.Path(jmp.__file__).parent
ROOT = pathlib.Path(__file__).parents[1]

_REPLACED = [
    (re.compile(r"\b0x[0-9a-f]+"), "0x"),
    # A line of ours in a message; then files of the checkout that the programs are of.
    (re.compile(re.escape(f"{PACKAGE}{os.sep}") + r"[\w/]+\.py(:\d+)*( \([^()\s]*\))?"), OURS),
    (re.compile(r"(?<![\w/])jmp/[\w/]+\.py(:\d+)*( \([^()\s]*\))?"), OURS),
    (re.compile(r"\bjmp(\.[A-Za-z_]\w*)*\._\w+(\.\w+)*"), OURS),  # a private address
    (re.compile(re.escape(f"{ROOT}{os.sep}")), ""),
]
_MARK = re.compile(r"jmp\.[\w.]+")  # in a name stack
_LINES = re.compile(r"[\w./-]+\.py:\d+(, [\w./-]+\.py:\d+)*")
_NAME = re.compile(r"\bname=([\w.<>]+)")


def normal(text: str) -> str:
    """Returns a text without addresses in memory, paths of the machine, and private names of jmp.

    >>> normal("raised at jmp/autocasting/_emit.py:12 (run_plan) by <function f at 0x7f01>")
    'raised at <jmp> by <function f at 0x>'
    """
    for pattern, replacement in _REPLACED:
        text = pattern.sub(replacement, text)
    return text


def without_names(text: str, names: Collection[str]) -> str:
    """Returns a program's text with a mark in the place of these names of functions and arrays.

    >>> without_names("jit[name=together] v0", {"together"})
    'jit[name=<jmp>] v0'
    """
    return _NAME.sub(lambda found: f"name={OURS}" if found[1] in names else found[0], text)


def without_lines(text: str) -> str:
    """Returns a text without files and lines, for programs that lay elsewhere.

    >>> without_lines("a product at testbed/models.py:12, testbed/gpt2.py:3 is half")
    'a product at a line is half'
    """
    return _LINES.sub("a line", text)


@functools.cache
def names_of_package() -> list[str]:
    """Returns the names that jmp may give to what it emits: of its functions, and its constants."""
    names = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                names.add(node.name)
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                names.add(str(node.value.value))
    return sorted(name for name in names if name.isidentifier())


def program_text(closed: Any) -> str:
    """Returns a closed jaxpr as text."""
    return "\n".join(_Writer().closed(closed, ""))


def report_text(data: Mapping[str, Any]) -> str:
    """Returns what a precision report has as a dictionary: a line each row."""
    lines = []
    for key, value in sorted(data.items()):
        rows = value if isinstance(value, list) else [value]
        lines += [f"{key}: {normal(json.dumps(row, sort_keys=True))}" for row in rows]
    return "\n".join(lines)


def error_text(error: BaseException) -> str:
    """Returns the type and the message of an error, with its notes."""
    notes = "".join(f"\nnote: {note}" for note in getattr(error, "__notes__", ()))
    return normal(f"raised {type(error).__name__}: {error}{notes}")


def _jaxprs(value: Any) -> Iterator[Any]:
    if isinstance(value, core.Jaxpr | core.ClosedJaxpr):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _jaxprs(item)


class _Writer:
    """Writes jaxprs; what it says of an array is computed once."""

    def __init__(self) -> None:
        self.written: dict[int, tuple[Any, list[str]]] = {}

    def closed(self, closed: Any, indent: str) -> Iterator[str]:
        """Yields the lines of a jaxpr, closed or open."""
        found = self.written.get(id(closed))
        if found is None:  # what is traced once stands in many places
            constants = getattr(closed, "consts", ())
            lines = list(self._jaxpr(getattr(closed, "jaxpr", closed), constants))
            found = self.written[id(closed)] = closed, lines
        return (indent + line for line in found[1])

    def _jaxpr(self, jaxpr: Any, constants: Any) -> Iterator[str]:
        names: dict[Any, str] = collections.defaultdict(lambda: f"v{len(names)}")
        for var, constant in zip(jaxpr.constvars, constants, strict=False):
            yield f"constant {names[var]}:{type_of(var.aval)} = {value_of(constant)}"
        for var in jaxpr.constvars[len(constants) :]:
            yield f"constant {names[var]}:{type_of(var.aval)}"
        yield "of " + " ".join(f"{names[var]}:{type_of(var.aval)}" for var in jaxpr.invars)
        for equation in jaxpr.eqns:
            yield from self._equation(equation, names)
        yield "gives " + " ".join(self._read(atom, names) for atom in jaxpr.outvars)

    def _equation(self, equation: Any, names: dict[Any, str]) -> Iterator[str]:
        reads = [self._read(atom, names) for atom in equation.invars]
        results = [f"{names[var]}:{type_of(var.aval)}" for var in equation.outvars]
        inner: list[tuple[str, Any]] = []
        params = []
        for key, value in sorted(equation.params.items()):
            functions = list(_jaxprs(value))
            inner += [(key, function) for function in functions]
            if not functions and not _says_nothing(value):
                is_name = key == "name" and isinstance(value, str)
                params.append(f"{key}={value if is_name else param_text(value)}")
        stack = _MARK.sub(OURS, str(equation.source_info.name_stack))
        line = f"{' '.join(results)} = {equation.primitive.name}[{' '.join(params)}]"
        yield " ".join([line, *reads]) + f"  @ {stack}" * bool(stack)
        for key, function in inner:
            yield f"  {key}:"
            yield from self.closed(function, "    ")

    def _read(self, atom: Any, names: dict[Any, str]) -> str:
        if isinstance(atom, core.Literal):
            return f"{value_of(atom.val)}:{type_of(atom.aval)}"
        return names[atom]


def type_of(aval: Any) -> str:
    """Returns dtype and shape, with a star where the type is weak."""
    return aval.str_short() + "*" * bool(getattr(aval, "weak_type", False))


def value_of(value: Any) -> str:
    """Returns a number, or a digest of an array's bytes."""
    if isinstance(value, jax.core.Tracer):
        return "traced"
    if isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    if not isinstance(value, jax.Array | np.ndarray | np.generic):
        return param_text(value)
    array = np.asarray(value)
    if array.ndim == 0:
        return str(array)
    digest = hashlib.sha256(array.tobytes()).hexdigest()[:12]
    return f"{array.dtype}{list(array.shape)}#{digest}"


def _says_nothing(value: Any) -> bool:
    """Returns whether a parameter is None, an empty mesh, or a tuple of what says nothing."""
    if isinstance(value, tuple):
        return all(map(_says_nothing, value))
    return value is None or type(value).__name__ == "UnspecifiedValue" or str(value) == "Mesh()"


def param_text(value: Any) -> str:
    """Returns a parameter of an equation as text."""
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, np.dtype):
        return str(value)
    if isinstance(value, np.ndarray | jax.Array | np.generic):
        return value_of(value)
    if isinstance(value, enum.Enum):
        return str(value)
    if isinstance(value, frozenset | set):
        return "{" + " ".join(sorted(map(param_text, value))) + "}"
    if isinstance(value, Mapping):
        items = sorted((str(key), param_text(item)) for key, item in value.items())
        return "{" + " ".join(f"{key}:{item}" for key, item in items) + "}"
    if isinstance(value, tuple | list):
        named = type(value).__name__ if hasattr(value, "_fields") else ""
        return f"{named}({' '.join(map(param_text, value))})"
    if hasattr(value, "saveable_names"):  # a policy of remat
        names = " ".join(f"name={name}" for name in sorted(value.saveable_names))
        return f"{type(value).__name__}({names})"
    if isinstance(value, type):
        return _address(value)
    if callable(value) or type(value).__name__ == "WrappedFun":
        return function_text(value)
    return normal(str(value))


def function_text(function: Callable[..., Any]) -> str:
    """Returns what a function is called; one of jmp's has no name."""
    inner: Any = function
    while True:
        following = [getattr(inner, name, None) for name in ("__wrapped__", "func", "f")]
        following = [x for x in following if callable(x)]
        if _is_ours(inner) or not following:
            break
        inner = following[0]
    return OURS if _is_ours(inner) else _address(inner)


def _is_ours(function: Any) -> bool:
    module = getattr(function, "__module__", None) or type(function).__module__
    return module.partition(".")[0] == "jmp"


def _address(value: Any) -> str:
    if _is_ours(value):
        return OURS
    name = getattr(value, "__qualname__", None)
    return name if isinstance(name, str) else normal(str(value))
