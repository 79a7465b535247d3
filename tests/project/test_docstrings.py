"""Every public name says what it is for and what it raises, with an example, which pytest runs."""

import ast
import builtins
import doctest
import functools
import importlib
import inspect
import re
import textwrap

import pytest

from testbed import ROOT, mistakes
from tests.project.prose import habits_in

ADAPTERS = ("linen", "nnx", "equinox", "haiku")
MODULES = ["jmp", "jmp.transforms", "jmp.diagnostics", "jmp.autocasting"]
MODULES += [f"jmp.adapters.{name}" for name in ADAPTERS]
REFERENCE = ROOT / "docs" / "reference"


def public_names():
    """Yields each public class and function once, with the address under which users find it."""
    seen = set()
    for address in MODULES:
        module = importlib.import_module(address)
        for name in module.__all__:
            value = getattr(module, name)
            if callable(value) and id(value) not in seen:
                seen.add(id(value))
                yield pytest.param(value, id=f"{address}.{name}")


NAMES = list(public_names())


@pytest.mark.parametrize("value", NAMES)
def test_a_public_name_has_an_example_that_compares_a_result(value):
    examples = doctest.DocTestParser().get_examples(inspect.getdoc(value) or "")
    # An assertion or a check returns nothing, or raises.
    returns = not value.__name__.startswith(("assert_", "check_"))
    assert any(example.want or not returns for example in examples), "no example with a result"


def public_members():
    """Yields the public methods and properties of public classes, with their addresses."""
    for name in NAMES:
        value = name.values[0]
        if inspect.isclass(value):
            own = {k: v for k, v in vars(value).items() if not k.startswith("_")}
            for key in own.keys() - getattr(value, "__annotations__", {}).keys():
                if inspect.isroutine(own[key]) or isinstance(own[key], property):
                    yield pytest.param(getattr(value, key), id=f"{name.id}.{key}")


MEMBERS = sorted(public_members(), key=lambda param: param.id)


@pytest.mark.parametrize("value", MEMBERS)
def test_a_method_or_property_of_a_public_class_has_a_docstring(value):
    assert inspect.getdoc(value)


def is_function(value):
    return inspect.isroutine(value) and not isinstance(value, functools.cached_property)


@pytest.mark.parametrize("value", [p for p in NAMES + MEMBERS if is_function(p.values[0])])
def test_a_public_function_names_its_arguments_and_has_types_for_all(value):
    function = inspect.unwrap(value)
    signature = inspect.signature(function)
    parameters = {name: p for name, p in signature.parameters.items() if name != "self"}
    untyped = [n for n, p in parameters.items() if p.annotation is inspect.Parameter.empty]
    assert not untyped
    # One that has few says them in its sentences; one with several lists them.
    if len(parameters) > 2:
        assert "Args:" in inspect.getdoc(function)
    assert signature.return_annotation is not inspect.Signature.empty


def raises_section(words, followed=()):
    """Returns what a docstring says after "Raises", and what the names it refers to say there."""
    pattern = r"\bRaises\b.*?(?=\n\s*\n|\n?\s*Warns:|\Z)"
    section = " ".join(re.findall(pattern, words or "", re.DOTALL))
    for other in set(re.findall(r"\b[Aa]s\s+`([\w.]+)`", section)) - set(followed):
        for name in NAMES + MEMBERS:
            if f".{name.id}".endswith(f".{other}"):
                section += raises_section(inspect.getdoc(name.values[0]), (*followed, other))
    return section


def statements(function):
    """Returns the syntax of a function or property, or of the construction of a class."""
    function = inspect.unwrap(getattr(function, "fget", function))
    if inspect.isclass(function):
        makers = ("__init__", "__post_init__", "_missing_")
        parts = [getattr(function, name) for name in makers if name in vars(function)]
    else:
        parts = [function]
    for part in parts:
        try:
            yield ast.parse(textwrap.dedent(inspect.getsource(part)))
        except (OSError, TypeError):  # made by dataclasses or NamedTuple
            continue


def raised_in(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            error = getattr(builtins, getattr(node.exc.func, "id", ""), None)
            if error is not None:
                yield error.__name__


def errors_in_source(function, depth=1):
    """Returns the errors that a function, or a function of the library that it calls, raises."""
    module = inspect.getmodule(inspect.unwrap(getattr(function, "fget", function)))
    errors = set()
    for tree in statements(function):
        errors.update(raised_in(tree))
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)] if depth else []
        for call in calls:
            called = resolved(call.func, module)
            if inspect.isfunction(called) and called.__module__.startswith("jmp"):
                errors |= errors_in_source(called, depth - 1)
    return errors


def resolved(node, module):
    """Returns what a name, or an attribute of a module, stands for; else None."""
    if isinstance(node, ast.Name):
        return getattr(module, node.id, None)
    if isinstance(node, ast.Attribute):
        owner = resolved(node.value, module)
        return getattr(owner, node.attr, None) if inspect.ismodule(owner) else None
    return None


def function_called(node, own):
    """Returns the public name whose call a row of the mistakes is, or None: `tx.update` has none.

    In `autocast(fun, policy)(x)` and `with_loss_scale(tx, scale).init(x)` it is the first call's.
    """
    while isinstance(node, ast.Call):
        is_made = any(isinstance(part, ast.Call) for part in ast.walk(node.func))
        if not is_made or isinstance(node.func, ast.Attribute):
            value = eval(ast.unparse(node.func), dict(own))
            known = ADDRESSES.get(id(getattr(value, "__func__", value)))
            if known is not None:
                return known
        node = node.func
        while isinstance(node, ast.Attribute):
            node = node.value
    return None


ADDRESSES = {id(getattr(p.values[0], "__func__", p.values[0])): p.id for p in NAMES + MEMBERS}


@functools.cache
def errors_of_mistakes():
    """Returns the errors that real mistakes raise, by the public name that was called."""
    own, errors = mistakes.names(), {}
    for row in mistakes.MISTAKES:
        name = function_called(ast.parse(row.code, mode="eval").body, own)
        errors.setdefault(name, set()).add(row.error)
    return errors


@pytest.mark.parametrize("value", NAMES + MEMBERS)
def test_a_docstring_names_every_error_that_is_raised(value, request):
    address = request.node.callspec.id
    errors = errors_in_source(value) | errors_of_mistakes().get(address, set())
    section = raises_section(inspect.getdoc(value))
    assert not {error for error in errors if error not in section}, "no Raises section names it"


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_star_import_of_an_adapter_gives_the_names_of_its_reference_page(name):
    found = {}
    exec(f"from jmp.adapters.{name} import *", found)
    page = (REFERENCE / "adapters.md").read_text()
    shown = re.findall(rf"^::: jmp\.adapters\.{name}\.(\w+)", page, re.MULTILINE)
    assert found.keys() - {"__builtins__"} == set(shown)


PACKAGE = ROOT / "jmp"
HABITS = {
    # It may say that nothing else is there: behind "tried alone", nothing else is tried.
    "alone, for only": r"(?<!tried)(?<!runs)(?<!stand)(?<=[\w`'\")]) alone\b",
    "a training, for a run": r"\btrainings\b|\ba training[.,;:]",
    "a chain of those of and that of": r"\b(those|that) of (\w+ ){0,4}(those|that) of\b",
    "of in front of the subject": r"(^|[.:;] )Of (an?|the|several|its) ",
    "a subject that is a clause": r"(^|[.:;] )What \w[^?]*([.:;]|$)",
}


def prose_in(path):
    """Yields each paragraph of text in a file on one line: docstrings, messages and comments."""
    source = path.read_text()
    tree = ast.parse(source)
    formatted = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    for node in formatted:
        parts = [part.value if isinstance(part, ast.Constant) else "_" for part in node.values]
        yield "".join(parts)
    inside = {id(part) for node in formatted for part in node.values}
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if id(node) not in inside:
                text = re.sub(r"^ *(>>>|\.\.\.).*$", "", text, flags=re.MULTILINE)
                yield from (" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text))
    comments = re.findall(r"^ *# .*(?:\n *# .*)*|  # .*", source, re.MULTILINE)
    yield from (re.sub(r"\s*# ", " ", comment).strip() for comment in comments)


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_sentences_have_a_subject_and_the_common_word(path):
    assert habits_in(prose_in(path), HABITS) == []


def test_habits_are_found_in_docstrings_messages_and_comments(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(
        '''"""One line.

What selects is found.

>>> print("What is an example is left out.")
"""
x = 1  # of parameters alone
# Those of the model, and that
# of those of a view.
raise ValueError(f"{x} got two. Of a module "
                 "it is the trainings.")
y = "tried alone"
'''
    )
    assert sorted(habit for habit, _ in habits_in(prose_in(path), HABITS)) == sorted(HABITS)
