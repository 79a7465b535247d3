"""Every public name says what it is for and what it raises, with an example, which pytest runs."""

import ast
import doctest
import functools
import importlib
import inspect
import re

import pytest

from testbed import mistakes

MODULES = ["jmp", "jmp.transforms", "jmp.diagnostics", "jmp.autocasting"]
MODULES += [f"jmp.adapters.{name}" for name in ("linen", "nnx", "equinox", "haiku")]


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


def raises_section(words, followed=()):
    """Returns what a docstring says after "Raises", and what the names it refers to say there."""
    pattern = r"\bRaises\b.*?(?=\n\s*\n|\n?\s*Warns:|\Z)"
    section = " ".join(re.findall(pattern, words or "", re.DOTALL))
    for other in set(re.findall(r"\b[Aa]s\s+`([\w.]+)`", section)) - set(followed):
        for name in NAMES + MEMBERS:
            if f".{name.id}".endswith(f".{other}"):
                section += raises_section(inspect.getdoc(name.values[0]), (*followed, other))
    return section


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
def test_a_docstring_names_every_error_that_a_mistake_raises(value, request):
    errors = errors_of_mistakes().get(request.node.callspec.id, set())
    section = raises_section(inspect.getdoc(value))
    assert not {error for error in errors if error not in section}, "no Raises section names it"
