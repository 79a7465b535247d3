"""Places of equations in the user's code: a path of modules or name scopes, and "file:line"."""

import functools
import itertools
import os
import re
import sysconfig
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import JaxprEqn
from jax.extend.source_info_util import NameStack

from jmp import _jax_compat
from jmp.autocasting._propagation import scope_of
from jmp.autocasting._request import joined_path

# Lines of these packages are not the user's: the line that calls a Flax layer counts.
FRAMEWORKS = ("jaxlib/", "flax/", "haiku/", "equinox/", "optax/", "chex/")


@functools.cache
def _machinery() -> tuple[str, ...]:
    """Returns the beginnings of files that say nothing of a model: JAX's, ours, Python's own."""
    own = [os.path.dirname(module.__file__ or "") + os.sep for module in (jax, _jax_compat)]
    library = sysconfig.get_paths()["stdlib"]
    return ("<", *own, *(os.path.join(library, name) for name in ("contextlib.py", "functools.py")))


def spelled(file: str) -> str:
    """Returns a file's path in the form that reads best.

    The path of an installed package starts with the package, and a path below the working directory
    is relative to it. Any other path stays: one that climbs up with ".." says less.

    >>> spelled("/opt/python/lib/python3.12/site-packages/flax/linen/linear.py")
    'flax/linen/linear.py'
    """
    return _installed(file) or file.removeprefix(os.path.join(os.getcwd(), ""))


def _installed(file: str) -> str:
    """Returns the path of an installed package's file from the package on; "" for any other."""
    found = re.match(r".*[/\\](site|dist)-packages[/\\](.*)", file)
    return found[2].replace(os.sep, "/") if found else ""


def module_and_line(found: Any) -> tuple[str, str]:
    """Returns the path of modules and the source line of what has `equation` and `around`."""
    equations = (*found.around, found.equation)
    return path_of(equations), source_line(equations)


def place_name(module: str, source: str) -> str:
    """Returns a path of modules and a source line as errors and hazards name them."""
    return (source or "?") + f" ({module})" * bool(module)


def source_line(equations: Sequence[JaxprEqn]) -> str:
    """Returns "file:line" of the user's line, or of a library's; "" if no frame is known.

    Args:
      equations: equations that hold one another, the outermost first, as in `users_line`.
    """
    if line := users_line(equations):
        return line
    frames = _jax_compat.frames_of(equations[-1])
    outside_jax = [frame for frame in frames if not frame[0].startswith(_machinery())]
    return "".join(f"{spelled(file)}:{line}" for file, line in (outside_jax or frames)[:1])


def users_line(equations: Sequence[JaxprEqn]) -> str:
    """Returns "file:line" of the innermost frame that is the user's; "" if there is none.

    JAX records the frames from the innermost trace on, so that the body of a loop, or of a jitted
    function of `jax.numpy`, need not have a line of the user's. Then the line of an equation around
    it counts.
    """
    for equation in reversed(equations):
        for file, line in _jax_compat.frames_of(equation):
            if not file.startswith(_machinery()) and not _installed(file).startswith(FRAMEWORKS):
                return f"{spelled(file)}:{line}"
    return ""


def path_of(equations: Sequence[JaxprEqn]) -> str:
    """Returns the path of modules or name scopes of the last equation."""
    return scopes_path(scope_of(equations, _jax_compat.empty_name_stack()))


def scopes_path(stack: NameStack) -> str:
    """Returns the names of a name stack joined by slashes, without JAX's marks and our own.

    The path of a module of nnx, which `ModuleScopes` writes down, is a whole path: what is around
    it does not come before it.
    """
    names = [name for name in _jax_compat.scope_names(stack) if name != _jax_compat.RECOMPUTED]
    return joined_path(names)


def path_in_rules(path: str) -> str:
    """Returns a path of name scopes up to the first scope that `jnp.einsum` opens.

    An einsum is no module: its operations belong to the scope around it.

    >>> path_in_rules("attention/bqhd,bkhd->bhqk/transpose")
    'attention'
    """
    names = path.split("/")
    return "/".join(itertools.takewhile(lambda name: "->" not in name, names))
