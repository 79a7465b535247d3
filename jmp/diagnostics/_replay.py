"""Runs a traced program again, equation by equation, with a look at every result.

`replay` binds the equations of a jaxpr under whatever trace is current, so that it may be
differentiated, compiled or traced anew. Loops, branches, remat and jit are emitted through JAX's
public functions, with the inside replayed too; while loops, custom derivatives, `shard_map` and
kernels are bound as they are. Two things can be said of the run:
  - `on_results(site, results)` sees what each equation gives and returns what stands for it;
  - `handlers` says, by the name of the primitive, how an equation is emitted. So
    `{**HANDLERS, "remat": inline}` is the program without its remat.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn

from jmp import _jax_compat
from jmp.autocasting._kinds import kind_of
from jmp.diagnostics._places import path_within


class Site(NamedTuple):
    """A place in a program."""

    equation: JaxprEqn
    path: str  # modules or name scopes from the outermost level down, joined by slashes
    # Indices of equations and branches from the outermost level down: they tell a jaxpr that is
    # called twice apart, and are the same in each replay of one program.
    position: tuple[int, ...]


Arrays = list[Any]
Replay = Callable[..., Arrays]  # (jaxpr, operands, branch=0) -> results
OnResults = Callable[[Site, Arrays], Arrays]
Handler = Callable[[JaxprEqn, Arrays, Replay], Arrays]  # (equation, operands, replay) -> results


def replay(
    jaxpr: Any,
    operands: Sequence[Any],
    on_results: OnResults = lambda site, results: results,
    handlers: Mapping[str, Handler] | None = None,
    path: str = "",
    position: tuple[int, ...] = (),
) -> list[Any]:
    """Returns the outputs of a jaxpr, which is closed, or open without constants.

    Args:
      on_results: called after each equation, those of levels inside first.
      handlers: how equations are emitted, by the names of their primitives; `HANDLERS` if left out.
        A primitive that is not there is bound as it is.
      path, position: of the level above.

    >>> def loss(x):
    ...     return jax.lax.scan(lambda total, x: (total + jnp.exp(x), None), jnp.zeros(()), x)[0]
    >>> names = []
    >>> def look(site, results):
    ...     names.append(site.equation.primitive.name)
    ...     return results
    >>> _ = replay(jax.make_jaxpr(loss)(jnp.ones(3)), [jnp.ones(3)], look)
    >>> names
    ['exp', 'add', 'scan']
    """
    inner, constants = _jax_compat.open_jaxpr(jaxpr)
    handlers = HANDLERS if handlers is None else handlers
    values = [*constants, *operands]
    environment = dict(zip((*inner.constvars, *inner.invars), values, strict=True))

    def read(atom: Any) -> Any:
        return literal(atom) if hasattr(atom, "val") else environment[atom]

    def run(equation: JaxprEqn, index: int) -> list[Any]:
        site = Site(equation, path_within(path, equation), (*position, index))

        def inside(jaxpr: Any, operands: Sequence[Any], branch: int = 0) -> list[Any]:
            below = (*site.position, branch)
            return replay(jaxpr, operands, on_results, handlers, site.path, below)

        emit = handlers.get(equation.primitive.name, bound)
        with _jax_compat.place_of(equation, equation.source_info.name_stack):
            results = emit(equation, [read(atom) for atom in equation.invars], inside)
            return on_results(site, results)

    for index, equation in enumerate(inner.eqns):
        environment.update(zip(equation.outvars, run(equation, index), strict=True))
    return [read(atom) for atom in inner.outvars]


def literal(atom: Any) -> np.ndarray:
    """Returns a literal in its dtype: where it enters a loop it would be a Python number."""
    with np.errstate(over="ignore"):  # 1e30 is infinite in float16, as it is to JAX
        return np.asarray(atom.val, atom.aval.dtype)


def bound(equation: JaxprEqn, operands: list[Any], replay: Replay) -> list[Any]:
    """Binds an equation as it is."""
    return _jax_compat.bind(equation.primitive, operands, equation.params)


def inline(equation: JaxprEqn, operands: list[Any], replay: Replay) -> list[Any]:
    """Replays what is inside a jit or a remat without the jit or the remat."""
    return replay(_jax_compat.called(equation.params), operands)


def emitted(equation: JaxprEqn, operands: list[Any], replay: Replay) -> list[Any]:
    """Emits an equation as autocast does, with what is inside replayed."""
    kind = kind_of(equation.primitive.name)
    if _jax_compat.is_plain_jit(equation):
        return inline(equation, operands, replay)

    def function(index: int, jaxpr: ClosedJaxpr) -> Callable[..., Arrays]:
        return lambda *arrays: replay(jaxpr, arrays, index)

    functions = [function(i, jaxpr) for i, jaxpr in enumerate(kind.functions(equation))]
    results: Arrays = kind.emit(equation, operands, functions)
    return results


HANDLERS: Mapping[str, Handler] = dict.fromkeys(
    (*_jax_compat.JITS, *_jax_compat.REMAT, "scan", "cond"), emitted
)
