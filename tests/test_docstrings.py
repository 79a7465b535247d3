"""Every public name says what it is for, and shows it in an example, which pytest runs."""

import doctest
import importlib
import inspect

import pytest

import jmp

MODULES = [
    "jmp",
    "jmp.transforms",
    "jmp.diagnostics",
    "jmp.autocasting",
    "jmp.adapters.linen",
    "jmp.adapters.nnx",
    "jmp.adapters.equinox",
    "jmp.adapters.haiku",
]
INTERNAL = {"jmp.adapters.equinox.lift"}  # of another file of the adapters


def public_names():
    """Yields each public class and function once, with the address under which users find it."""
    seen = set()
    for address in MODULES:
        module = importlib.import_module(address)
        own = [name for name, value in vars(module).items() if is_of(value, address)]
        for name in getattr(module, "__all__", own):
            value, whole = getattr(module, name), f"{address}.{name}"
            known = id(value) in seen or whole in INTERNAL or name.startswith("_")
            if callable(value) and not known:
                seen.add(id(value))
                yield pytest.param(value, id=whole)


def is_of(value, address):
    return getattr(value, "__module__", "") == address


NAMES = list(public_names())


@pytest.mark.parametrize("value", NAMES)
def test_a_public_name_has_an_example_that_compares_a_result(value):
    examples = doctest.DocTestParser().get_examples(inspect.getdoc(value) or "")
    # What asserts and checks returns nothing, or raises.
    returns = not value.__name__.startswith(("assert_", "check_"))
    assert any(example.want or not returns for example in examples), "no example with a result"


@pytest.mark.parametrize("value", [p for p in NAMES if inspect.isfunction(p.values[0])])
def test_a_public_function_names_its_arguments_and_has_types_for_all(value):
    function = inspect.unwrap(value)
    untyped = [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.annotation is inspect.Parameter.empty
    ]
    assert not untyped
    words = inspect.getdoc(function)
    # One that has few says them in its sentences; one with several lists them.
    if len(inspect.signature(function).parameters) > 2:
        assert "Args:" in words
    assert inspect.signature(function).return_annotation is not inspect.Signature.empty


@pytest.mark.parametrize(
    "value", [p for p in NAMES if inspect.isclass(p.values[0])], ids=lambda v: v.__name__
)
def test_methods_and_properties_of_a_public_class_have_a_docstring(value):
    fields = getattr(value, "__annotations__", {})  # whose defaults may be functions
    own = [
        name
        for name, member in vars(value).items()
        if (inspect.isfunction(member) or isinstance(member, property))
        and not name.startswith("_")
        and name not in fields
    ]
    missing = [name for name in own if not inspect.getdoc(getattr(value, name))]
    assert not missing


def test_there_are_as_many_names_as_the_front_doors_have():
    assert len(NAMES) >= 84
    assert set(jmp.__all__) <= {p.id.removeprefix("jmp.") for p in NAMES}
