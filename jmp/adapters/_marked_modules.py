"""Modules whose methods open the name scopes of their policies, for nnx and Equinox.

These frameworks do not let method calls be intercepted. `mark` gives a module that a rule names a
subclass of its class, whose methods run in the scope that `ModulePolicies.scope_of` says.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from jmp.adapters._module_policies import ModulePolicies, opened

Names: TypeAlias = tuple[Any, ...]  # that lead to a module, such as of attributes

_PLAIN = "_jmp_plain_class"  # the attribute of a subclass that has the class of its author


@functools.cache  # one class for all models: a structure that holds it must compare equal
def marked_class(module_type: type, base: type, policies: ModulePolicies, scope: str) -> type:
    """Returns a subclass of `module_type` whose methods run in a name scope.

    Args:
      base: the framework's class of all modules, whose own methods stay as they are.
      scope: what `ModulePolicies.scope_of` returned.
    """

    def in_scope(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method, updated=())
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            with opened(scope if policies.are_in_force else ""):
                return method(self, *args, **kwargs)

        return call

    body = {
        name: in_scope(getattr(module_type, name))
        for name in dir(module_type)
        if name == "__call__" or not (name.startswith("_") or hasattr(base, name))
        if _is_method(module_type, name)
    }
    return subclass(module_type, body)


def subclass(module_type: type, body: Mapping[str, Any]) -> type:
    """Returns a subclass of `module_type` with its name; `plain_class` undoes it."""
    named = {name: getattr(module_type, name) for name in ("__module__", "__qualname__", "__doc__")}
    marks = {_PLAIN: plain_class(module_type), **body}
    return type(module_type.__name__, (module_type,), {**named, **marks})


def plain_class(module_type: type) -> type:
    """Returns the class as its author wrote it."""
    return getattr(module_type, _PLAIN, module_type)


def classes_around(names: Names, classes: Mapping[Names, type]) -> tuple[type, ...]:
    """Returns the classes of the modules around what is at the end of names, innermost first.

    Args:
      classes: the class of each module of a model, by the names that lead to it.
    """
    ancestors = [names[:end] for end in range(len(names), -1, -1)]
    return tuple(classes[ancestor] for ancestor in ancestors if ancestor in classes)


def mark(modules: Iterable[tuple[Names, Any]], base: type, policies: ModulePolicies) -> None:
    """Gives each module that a rule names the class that `marked_class` makes of its own.

    Args:
      modules: the modules of a model, each behind the names that lead to it.
    """
    found = dict(modules)
    classes: dict[Any, Any] = {names: type(module) for names, module in found.items()}
    for names, module in found.items():
        path = "/".join(map(str, names))
        if scope := policies.scope_of(module, path, classes_around(names, classes)):
            set_class(module, marked_class(classes[names], base, policies, scope))


def set_class(module: object, module_type: type) -> None:
    """Gives a module another class, although its framework keeps watch on its attributes."""
    object.__setattr__(module, "__class__", module_type)


def _is_method(module_type: type, name: str) -> bool:
    """Returns whether an attribute takes the module first, decorated or not (`jax.jit`)."""
    attribute = inspect.getattr_static(module_type, name)
    binds = hasattr(attribute, "__get__") and not isinstance(attribute, staticmethod | classmethod)
    return binds and callable(getattr(module_type, name))
