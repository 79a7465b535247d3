"""The residuals of a linearisation: arrays of the forward pass that the backward pass needs.

`jax.vjp` returns a function whose leaves are the arrays that it holds. In a trace, each of them is
a variable of a jaxpr: an argument, which is there anyway, or the result of an equation, which is
kept only for the backward pass. So the bytes are exact, and each array can be followed to the
equation that made it, into jits, loops, branches and rematerialised regions.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import JaxprEqn, Literal

from jmp import _jax_compat
from jmp._array_calls import vjp_at
from jmp.autocasting._numbers import shape_of, size_of
from jmp.autocasting._propagation import Propagation, WayInside
from jmp.diagnostics._walk import path_of, users_line


@dataclasses.dataclass(frozen=True)
class Residual:
    """An array kept for the backward pass, or several that agree in everything but their number.

    Attributes:
      module: path of modules or name scopes, "" at the top.
      source: "file:line" of the user's code.
      operation: the primitive that made it; "literal" for a number in the program, and "argument"
        for a second copy of an argument.
      dtype, shape: of one array; a loop keeps the values of all iterations in one array.
      of_parameters: whether it is computed only from parameters, as their half copies are, so that
        it does not grow with the batch.
      times: how many there are.
      bytes: the bytes of all of them together.

    >>> row = Residual("mlp", "model.py:7", "tanh", "float16", (8, 4), False, times=3, bytes=192)
    >>> row.numbers
    96
    """

    module: str
    source: str
    operation: str
    dtype: str
    shape: tuple[int, ...]
    of_parameters: bool
    times: int
    bytes: int

    @property
    def numbers(self) -> int:
        """The number of elements of all of them together."""
        return self.times * size_of(self.shape)


class Provenance(NamedTuple):
    """Where a value comes from."""

    module: str = ""
    source: str = ""
    operation: str = "literal"
    made_of: frozenset[str] = frozenset()  # "parameters", "data", both or neither
    depth: int = 0  # how many equations are around the one that made it

    def also_of(self, others: Iterable["Provenance"]) -> "Provenance":
        """Returns the provenance of a value that was computed from others, too."""
        return self._replace(made_of=self.made_of.union(*(other.made_of for other in others)))


LITERAL = Provenance()
# A branch fills in something for a residual of another platform: XLA keeps no room for it.
ELSEWHERE = Provenance(operation="platform")
FOLLOWED = {*_jax_compat.CALLS, "scan", "cond"}


def residuals(
    function: Callable[..., Any], arguments: Sequence[Any], parameters: Iterable[int]
) -> list[Residual]:
    """Returns what `jax.vjp` of `function` keeps, besides arguments and closed-over arrays.

    The function returns a pair, of which the first is differentiated, with respect to the arguments
    at the positions `parameters`. `jax.ShapeDtypeStruct` may stand for arrays.
    """
    positions = list(parameters)

    def leaves(*arrays: Any) -> list[Any]:
        return jax.tree.leaves(vjp_at(function, arrays, positions, has_aux=True)[1])

    jaxpr, _ = _jax_compat.open_jaxpr(jax.make_jaxpr(leaves)(*arguments))
    names = ["parameters" if i in positions else "data" for i in range(len(jaxpr.invars))]
    inputs = [Provenance("", "", "argument", frozenset([name])) for name in names]
    held = {*jaxpr.invars, *jaxpr.constvars}
    found: collections.Counter[Residual] = collections.Counter()
    for atom, made in zip(jaxpr.outvars, PROVENANCES.through(jaxpr, inputs), strict=True):
        is_given = bool(shape_of(atom)) if isinstance(atom, Literal) else atom in held
        if is_given:
            continue  # an argument, or an array that the function closes over
        if made != ELSEWHERE:
            dtype, shape = atom.aval.dtype, tuple(atom.aval.shape)
            is_copy = made.made_of == {"parameters"}
            size = size_of(shape) * dtype.itemsize
            place = made.module, made.source, made.operation
            found[Residual(*place, str(dtype), shape, is_copy, times=1, bytes=size)] += 1
    return [
        dataclasses.replace(row, times=times, bytes=times * row.bytes)
        for row, times in found.items()
    ]


def _of_results(
    equation: JaxprEqn,
    around: tuple[JaxprEqn, ...],
    operands: list[Provenance],
    inside: WayInside[Provenance],
) -> Sequence[Provenance]:
    """Returns the provenance of each result: an equation inside, if there is one."""
    name = equation.primitive.name
    if (branch := _branch_here(equation)) is not None:
        return PROVENANCES.through(branch, operands[1:], (*around, equation))
    # The index of a platform is known when the program is compiled.
    is_filling = name.startswith(("empty", "platform_index"))
    if is_filling or (operands and all(operand == ELSEWHERE for operand in operands)):
        return [ELSEWHERE] * len(equation.outvars)
    if name in FOLLOWED and (found := inside()):
        return found
    module, source = path_of(equation, around), users_line(equation, around)
    if not (module or source):
        # Such as a cast of ours, which has the place of its operand.
        near = next((operand for operand in operands if operand.module or operand.source), LITERAL)
        module, source = near.module, near.source
    made = Provenance(module, source, name, depth=len(around)).also_of(operands)
    return [made] * len(equation.outvars)


def _one_of(choices: Sequence[Provenance], deciding: Sequence[Provenance]) -> Provenance:
    """Returns the provenance of a value that is one of several: see `Join` of `_propagation`."""
    if deciding:
        # A branch fills in values that it does not keep, which are computed from nothing.
        chosen = next((choice for choice in choices if choice.made_of), choices[0])
    else:
        # The turn before made the carries of a loop; among equal depths any order would do.
        chosen = max(
            choices, key=lambda made: (made.depth, made.module, made.source, made.operation)
        )
    return chosen.also_of((*choices, *deciding))


PROVENANCES = Propagation(_of_results, _one_of, lambda _: LITERAL)


def _branch_here(equation: JaxprEqn) -> Any:
    """Returns the branch of `lax.platform_dependent` that runs here; None for what is no such."""
    here = "cuda" if jax.default_backend() == "gpu" else jax.default_backend()
    platforms = equation.params.get("branches_platforms") or ()
    pairs = zip(platforms, _jax_compat.inner_jaxprs(equation), strict=False)
    return next((branch for names, branch in pairs if names is None or here in names), None)
