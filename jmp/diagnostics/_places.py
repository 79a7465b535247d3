"""Where an equation comes from: the user's line, and the path of modules or name scopes."""

import functools
import os
import sysconfig
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from jax.extend import core
from jax.extend.source_info_util import NameStack

from jmp import _jax_compat
from jmp.autocasting._module_paths import joined_path
from jmp.autocasting.kinds.scan import turns_of

# Lines of these packages are not the user's: what counts is the line that calls a Flax layer.
FRAMEWORKS = ("jaxlib/", "flax/", "haiku/", "equinox/", "optax/", "chex/")


@functools.cache
def _machinery() -> tuple[str, ...]:
    """Returns how the files begin that say nothing of a model: JAX's, ours, Python's own."""
    own = [os.path.dirname(module.__file__ or "") + os.sep for module in (jax, _jax_compat)]
    library = sysconfig.get_paths()["stdlib"]
    return ("<", *own, *(os.path.join(library, name) for name in ("contextlib.py", "functools.py")))


def spelled(file: str) -> str:
    """Returns a file's path as it is read best.

    Installed packages from their own name on, files below the working directory from there, and
    any other as it is: a path that climbs up with ".." says less than all of it.

    >>> spelled("/opt/python/lib/python3.12/site-packages/flax/linen/linear.py")
    'flax/linen/linear.py'
    """
    return _installed(file) or file.removeprefix(os.path.join(os.getcwd(), ""))


def _installed(file: str) -> str:
    """Returns the path of an installed package's file from the package on; "" for any other."""
    for folder in ("site-packages", "dist-packages"):
        _, found, inside = file.rpartition(f"{os.sep}{folder}{os.sep}")
        if found:
            return inside.replace(os.sep, "/")
    return ""


def source_line(equation: core.JaxprEqn, outer: str = "") -> str:
    """Returns "file:line" of the user's line, or of a library's; "" if no frame is known.

    JAX records the frames from the innermost trace on, so that the body of a loop, or of a jitted
    function of `jax.numpy`, need not have a line of the user's. Then it is `outer`, the user's line
    of the equation around it.
    """
    return users_line(equation) or outer or _librarys_line(equation)


def users_line(equation: core.JaxprEqn) -> str:
    """Returns "file:line" of the innermost frame that is the user's; "" if there is none."""
    for file, line in _jax_compat.frames_of(equation):
        if not file.startswith(_machinery()) and not _installed(file).startswith(FRAMEWORKS):
            return f"{spelled(file)}:{line}"
    return ""


def _librarys_line(equation: core.JaxprEqn) -> str:
    frames = _jax_compat.frames_of(equation)
    outside_jax = [frame for frame in frames if not frame[0].startswith(_machinery())]
    return "".join(f"{spelled(file)}:{line}" for file, line in (outside_jax or frames)[:1])


class Placed(NamedTuple):
    """An equation, its path of modules from the outermost level, its line, how often it runs."""

    equation: Any  # core.JaxprEqn, whose types of values name no dtype
    path: str
    source: str
    times: int


def place_name(source: str, path: str) -> str:
    """Returns a source line and a path of modules as errors and hazards name them."""
    return (source or "?") + f" ({path})" * bool(path)


def with_places(
    jaxpr: core.Jaxpr, outer: str = "", outer_line: str = "", times: int = 1
) -> Iterator[Placed]:
    """Yields the equations of an open jaxpr at any depth with their places.

    Path, user's line and times of the equation that holds it are given; the turns of scans count.
    """
    for equation in jaxpr.eqns:
        path = path_within(outer, equation)
        line = users_line(equation) or outer_line
        yield Placed(equation, path, line or _librarys_line(equation), times)
        for inner in _jax_compat.inner_jaxprs(equation):
            yield from with_places(inner, path, line, times * turns_of(equation))


def lines_of_callers(jaxpr: core.Jaxpr) -> dict[tuple[int, str], str]:
    """Returns source lines of the equations that have none of the user's, by identity and path.

    What JAX traced once stands at all its places in the program: such an equation has all lines.
    """
    found: dict[tuple[int, str], dict[str, None]] = {}
    for equation, path, source, _ in with_places(jaxpr):
        if not users_line(equation):
            found.setdefault((id(equation), path), {})[source] = None
    return {place: ", ".join(lines) for place, lines in found.items()}


def path_within(outer: str, equation: core.JaxprEqn) -> str:
    """Returns the path of an equation's modules below `outer`, that of the equation around it."""
    return module_path(equation.source_info.name_stack, outer)


def module_path(stack: NameStack, outer: str = "") -> str:
    """Returns the names of a name stack joined by slashes, without JAX's marks and our own.

    The path of a module of nnx, which `ModuleScopes` writes down, is a whole path: what is around
    it does not come before it.
    """
    names = [name for name in _jax_compat.scope_names(stack) if name != _jax_compat.RECOMPUTED]
    return joined_path(names, outer)
