"""Where an equation comes from: the user's line, and the path of modules or name scopes."""

import functools
import os
import sysconfig
from collections.abc import Iterator
from typing import Any

import jax

from jmp import _jax_compat

# Lines of these packages are nobody's own: behind a Flax layer stands the model that calls it.
FRAMEWORKS = ("jaxlib", "flax", "haiku", "equinox", "optax", "chex")


@functools.cache
def _hidden() -> tuple[str, ...]:
    packages = sysconfig.get_paths()["purelib"]
    own = [os.path.dirname(module.__file__ or "") for module in (jax, _jax_compat)]
    standard_library = sysconfig.get_paths()["stdlib"]
    hidden = [*own, *(os.path.join(packages, name) for name in FRAMEWORKS)]
    lines = [path + os.sep for path in hidden]
    lines += [os.path.join(standard_library, name) for name in ("contextlib.py", "functools.py")]
    return tuple(lines)


def source_line(equation: Any) -> str:
    """Returns "file:line" of the innermost frame that is the user's, or of any; "" without one."""
    frames = _jax_compat.frames_of(equation)
    return users_line(equation) or (f"{frames[0][0]}:{frames[0][1]}" if frames else "")


def users_line(equation: Any) -> str:
    """Returns "file:line" of the innermost frame that is the user's; "" if there is none."""
    for file, line in _jax_compat.frames_of(equation):
        if not file.startswith(_hidden()) and not file.startswith("<"):
            return f"{os.path.relpath(file)}:{line}"
    return ""


def with_paths(jaxpr: Any, outer: str = "") -> Iterator[tuple[Any, str]]:
    """Yields the equations of a jaxpr at any depth, each with its path from the outermost level."""
    for equation in jaxpr.eqns:
        path = "/".join(filter(None, (outer, module_path(equation.source_info.name_stack))))
        yield equation, path
        for inner in _jax_compat.inner_jaxprs(equation):
            yield from with_paths(inner, path)


def module_path(stack: Any) -> str:
    """Returns the names of a name stack joined by slashes, without JAX's marks and our own."""
    names = (name for name in _jax_compat.scope_names(stack) if name != _jax_compat.RECOMPUTED)
    return "/".join(name for name in names if not name.startswith("jmp."))
