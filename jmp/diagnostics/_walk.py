"""Equations of a traced program: their places in the user's code, and how they are run again.

`with_places` walks over them, and gives each a path of modules or name scopes, and the user's line.
`replay` binds them again, and shows every result to a function; `evaluate` is its loop.
"""

import functools
import itertools
import os
import re
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.extend import core
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal
from jax.extend.source_info_util import NameStack

from jmp import _jax_compat
from jmp.autocasting._kinds import kind_of
from jmp.autocasting._propagation import walk
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


def with_places(jaxpr: Any) -> Iterator[tuple[Any, str, str]]:
    """Yields the equations of a jaxpr, open or closed, with their paths of modules and their lines.

    It yields equations at any depth, each before the equations inside it.
    """
    for visit in walk(_jax_compat.open_jaxpr(jaxpr)[0]):
        yield visit.equation, *module_and_line(visit)


def module_and_line(found: Any) -> tuple[str, str]:
    """Returns the path of modules and the source line of what has `equation` and `around`."""
    return path_of(found.equation, found.around), source_line(found.equation, found.around)


def place_name(module: str, source: str) -> str:
    """Returns a path of modules and a source line as errors and hazards name them."""
    return (source or "?") + f" ({module})" * bool(module)


def source_line(equation: core.JaxprEqn, around: Sequence[core.JaxprEqn]) -> str:
    """Returns "file:line" of the user's line, or of a library's; "" if no frame is known."""
    if line := users_line(equation, around):
        return line
    frames = _jax_compat.frames_of(equation)
    outside_jax = [frame for frame in frames if not frame[0].startswith(_machinery())]
    return "".join(f"{spelled(file)}:{line}" for file, line in (outside_jax or frames)[:1])


def users_line(equation: core.JaxprEqn, around: Sequence[core.JaxprEqn] = ()) -> str:
    """Returns "file:line" of the innermost frame that is the user's; "" if there is none.

    JAX records the frames from the innermost trace on, so that the body of a loop, or of a jitted
    function of `jax.numpy`, need not have a line of the user's. Then the line of an equation around
    it counts; `around` has these, the outermost first.
    """
    for each in (equation, *reversed(around)):
        for file, line in _jax_compat.frames_of(each):
            if not file.startswith(_machinery()) and not _installed(file).startswith(FRAMEWORKS):
                return f"{spelled(file)}:{line}"
    return ""


def path_of(equation: core.JaxprEqn, around: Sequence[core.JaxprEqn]) -> str:
    """Returns the path of an equation's modules, from the outermost equation around it on."""
    path = ""
    for each in (*around, equation):
        path = scopes_path(each.source_info.name_stack, path)
    return path


def scopes_path(stack: NameStack, outer: str = "") -> str:
    """Returns the names of a name stack joined by slashes, without JAX's marks and our own.

    The path of a module of nnx, which `ModuleScopes` writes down, is a whole path: what is around
    it does not come before it.
    """
    names = [name for name in _jax_compat.scope_names(stack) if name != _jax_compat.RECOMPUTED]
    return joined_path(names, outer)


def path_in_rules(path: str) -> str:
    """Returns a path of name scopes up to the first scope that `jnp.einsum` opens.

    An einsum is no module: its operations belong to the scope around it.

    >>> path_in_rules("attention/bqhd,bkhd->bhqk/transpose")
    'attention'
    """
    names = path.split("/")
    return "/".join(itertools.takewhile(lambda name: "->" not in name, names))


T = TypeVar("T")
OnResults = Callable[[JaxprEqn, str, list[Any]], list[Any]]

# Equations whose inside is replayed too. All others are bound as they are.
REPLAYED_INSIDE = frozenset({*_jax_compat.JITS, *_jax_compat.REMAT, "scan", "cond"})


def replay(jaxpr: Any, operands: Sequence[Any], on_results: OnResults, path: str = "") -> list[Any]:
    """Returns the outputs of a jaxpr, which is closed, or open without constants.

    Its equations are bound under whatever trace is current, so that it may be differentiated,
    compiled or traced anew. Loops, branches, remat and jit are emitted through JAX's public
    functions, with the inside replayed too; while loops, custom derivatives, `shard_map` and
    kernels are bound as they are.

    Args:
      on_results: called after each equation, inner levels first, with the equation, its path of
        modules or name scopes, and its results; returns the values that replace the results.
      path: the path of the level above.

    >>> def loss(x):
    ...     return jax.lax.scan(lambda total, x: (total + jnp.exp(x), None), jnp.zeros(()), x)[0]
    >>> names = []
    >>> def look(equation, path, results):
    ...     names.append(equation.primitive.name)
    ...     return results
    >>> _ = replay(jax.make_jaxpr(loss)(jnp.ones(3)), [jnp.ones(3)], look)
    >>> names
    ['exp', 'add', 'scan']
    """
    inner, constants = _jax_compat.open_jaxpr(jaxpr)

    def step(equation: JaxprEqn, _: int, operands: list[Any]) -> list[Any]:
        own_path = scopes_path(equation.source_info.name_stack, path)

        def inside(jaxpr: ClosedJaxpr) -> Callable[..., list[Any]]:
            return lambda *arrays: replay(jaxpr, arrays, on_results, own_path)

        name, params = equation.primitive.name, equation.params
        if _jax_compat.is_plain_call(equation):
            results = inside(_jax_compat.called(params))(*operands)
            return on_results(equation, own_path, results)
        if name not in REPLAYED_INSIDE:
            results = _jax_compat.bind(equation.primitive, operands, params)
            return on_results(equation, own_path, results)
        kind = kind_of(name)
        functions = list(map(inside, kind.functions(equation)))
        # As autocast emits it.
        return on_results(equation, own_path, kind.emit(equation, operands, functions))

    return evaluate(inner, [*constants, *operands], step, lambda atom, _: literal(atom))


def evaluate(
    jaxpr: core.Jaxpr,
    inputs: list[T],
    step: Callable[[JaxprEqn, int, list[T]], list[T]],
    of_literal: Callable[[Any, JaxprEqn | None], T],
) -> list[T]:
    """Returns the outputs of an open jaxpr, in the form that the caller gives to values.

    Args:
      inputs: its constants, then its inputs, in the caller's form. The list is emptied, so that
        each value is freed after its last use.
      step: given an equation, its index and its operands, returns its results. It runs in the
        equation's place: source line, name scopes, mesh, compute type.
      of_literal: given a literal and the equation that reads it, None for an output of the jaxpr.
    """
    values: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), inputs, strict=True))
    inputs.clear()
    reads = [*(equation.invars for equation in jaxpr.eqns), jaxpr.outvars]
    last_use = {
        atom: index
        for index, atoms in enumerate(reads)
        for atom in atoms
        if not isinstance(atom, Literal)
    }

    def read(atom: Any, equation: JaxprEqn | None) -> Any:
        return of_literal(atom, equation) if isinstance(atom, Literal) else values[atom]

    for index, equation in enumerate(jaxpr.eqns):
        operands = [read(atom, equation) for atom in equation.invars]
        for atom in equation.invars:
            if not isinstance(atom, Literal) and last_use[atom] == index:
                values.pop(atom, None)  # gone already if it is read twice
        with _jax_compat.place_of(equation, equation.source_info.name_stack):
            results = step(equation, index, operands)
        pairs = zip(equation.outvars, results, strict=True)
        values |= {variable: result for variable, result in pairs if variable in last_use}
    return [read(atom, None) for atom in jaxpr.outvars]


def literal(atom: Any) -> np.ndarray:
    """Returns a literal in its dtype: a loop would take it for a Python number."""
    with np.errstate(over="ignore"):  # 1e30 is infinite in float16, as it is to JAX
        return np.asarray(atom.val, atom.aval.dtype)
