"""What the backward pass keeps of the forward pass: the residuals of a linearisation.

`jax.vjp` returns a function whose leaves are the arrays that it holds. Traced, each of them is a
variable of a jaxpr: an argument, which is there anyway, or the result of an equation, which is kept
for the backward pass alone. So the bytes are exact, and each array can be followed to the equation
that made it, into jits, loops, branches and rematerialised regions.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax

from jmp import _jax_compat
from jmp._array_calls import vjp_at
from jmp.autocasting._numbers import size_of
from jmp.diagnostics._walk import path_within, users_line


@dataclasses.dataclass(frozen=True)
class Residual:
    """An array kept for the backward pass, or several that agree in everything but their number.

    Attributes:
      module: path of modules or name scopes, "" at the top.
      source: "file:line" of the user's code.
      operation: the primitive that made it; "literal" for a number that stands in the program, and
        "argument" for a second copy of one.
      dtype, shape: of one array; what a loop keeps of each iteration is one array.
      of_parameters: whether it is computed from parameters alone, as their half copies are, so that
        it does not grow with the batch.
      times: how many there are.
      bytes: of all of them together.

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


class Origin(NamedTuple):
    """Where a value comes from."""

    module: str = ""
    source: str = ""
    operation: str = "literal"
    made_of: frozenset[str] = frozenset()  # "parameters", "data", both or neither


LITERAL = Origin()
# What a branch fills in for a residual of another platform's: XLA keeps no room for it.
ELSEWHERE = Origin(operation="platform")


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
    inputs = [Origin("", "", "argument", frozenset([name])) for name in names]
    held = {*jaxpr.invars, *jaxpr.constvars}
    found: collections.Counter[tuple[Any, ...]] = collections.Counter()
    for atom, origin in zip(jaxpr.outvars, _origins(jaxpr, inputs, LITERAL), strict=True):
        if atom.aval.shape if hasattr(atom, "val") else atom in held:
            continue  # an argument, or an array that the function closes over
        if origin is ELSEWHERE:
            continue
        found[origin, atom.aval.dtype, tuple(atom.aval.shape)] += 1
    rows = []
    for (origin, dtype, shape), times in found.items():
        module, source, operation, made_of = origin
        is_copy = made_of == {"parameters"}
        size = times * size_of(shape) * dtype.itemsize
        rows.append(Residual(module, source, operation, str(dtype), shape, is_copy, times, size))
    return rows


def _origins(jaxpr: Any, inputs: Sequence[Origin], outer: Origin) -> list[Origin]:
    """Returns the origin of each output of an open jaxpr that stands at the place of `outer`."""
    known = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> Origin:
        return LITERAL if hasattr(atom, "val") else known.get(atom, LITERAL)

    for equation in jaxpr.eqns:
        origins = _results(equation, [read(atom) for atom in equation.invars], outer)
        known.update(zip(equation.outvars, origins, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _results(equation: Any, operands: list[Origin], outer: Origin) -> list[Origin]:
    """Returns the origin of each result: an equation inside, where there is one."""
    here = outer._replace(
        module=path_within(outer.module, equation),
        source=users_line(equation) or outer.source,
        operation=equation.primitive.name,
    )
    inner = list(_jax_compat.inner_jaxprs(equation))
    if here.operation == "platform_index":  # known when the program is compiled
        return [ELSEWHERE]
    if here.operation == "scan":
        return _scan(equation, inner[0], operands, here)
    if here.operation == "cond":
        if (chosen := _branch_here(equation)) is not None:
            return _without_fillings(inner[chosen], _origins(inner[chosen], operands[1:], here))
        return _cond(inner, operands, here)
    counts = [len(jaxpr.invars) for jaxpr in inner]
    if here.operation in _jax_compat.CALLS and counts == [len(operands)]:
        return _origins(inner[0], operands, here)
    if not (here.module or here.source):
        # A cast of ours, for one: it stands where its operand does.
        near = next((o for o in operands if o.module or o.source), here)
        here = here._replace(module=near.module, source=near.source)
    return [_joined(here, operands)] * len(equation.outvars)


def _scan(equation: Any, body: Any, operands: list[Origin], here: Origin) -> list[Origin]:
    constants, carried, rows = _jax_compat.Scan.of(equation.params).split(operands)
    before = None
    while before != [origin.made_of for origin in carried]:
        before = [origin.made_of for origin in carried]
        # What is carried was made in the turn before, of what any turn carries.
        results = _origins(body, [*constants, *carried, *rows], here)
        carried = [_joined(new, [old]) for new, old in zip(results, carried, strict=False)]
    return _origins(body, [*constants, *carried, *rows], here)


def _cond(branches: list[Any], operands: list[Origin], here: Origin) -> list[Origin]:
    """Names what several branches keep after the first.

    What a branch does not keep it fills in, with something made of nothing.
    """
    found = []
    for choices in zip(*(_origins(b, operands[1:], here) for b in branches), strict=True):
        made = [origin for origin in choices if origin.made_of]
        found.append(_joined((made or choices)[0], [*choices, operands[0]]))
    return found


def _branch_here(equation: Any) -> int | None:
    """Returns which branch of `lax.platform_dependent` runs here; None for another conditional."""
    here = "cuda" if jax.default_backend() == "gpu" else jax.default_backend()
    platforms = equation.params.get("branches_platforms") or ()
    return next((i for i, names in enumerate(platforms) if names is None or here in names), None)


def _without_fillings(branch: Any, origins: list[Origin]) -> list[Origin]:
    """Marks what a branch returns, without a value, in the place of what other platforms keep."""
    empty: set[Any] = set()

    def is_empty(atom: Any) -> bool:
        return not hasattr(atom, "val") and atom in empty

    for equation in branch.eqns:
        made_of_nothing = equation.invars and all(map(is_empty, equation.invars))
        if made_of_nothing or equation.primitive.name.startswith("empty"):
            empty.update(equation.outvars)
    atoms = zip(branch.outvars, origins, strict=True)
    return [ELSEWHERE if is_empty(atom) else origin for atom, origin in atoms]


def _joined(origin: Origin, others: Sequence[Origin]) -> Origin:
    return origin._replace(made_of=origin.made_of.union(*(o.made_of for o in others)))
