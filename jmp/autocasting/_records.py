"""Which while loops iterate nothing, although floating numbers decide when they end.

A loop iterates if a turn computes numbers anew from those of the last one, such as the steps of a
solver: there it may wait for a tolerance that half steps never reach. A text is generated
otherwise, by beam search for instance. What a turn computes goes into the next ones as tokens, as
scores that no product reads, and as *records*: arrays such as the keys and values of an attention,
where a turn writes at a place that a counter names, and which products alone read. What is written
there stays as it is, so no number comes closer to anything from turn to turn.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

from jax.extend.core import JaxprEqn

from jmp import _jax_compat
from jmp.autocasting._carries import reads_numbers
from jmp.autocasting._numbers import is_inexact
from jmp.autocasting._propagation import (
    Propagation,
    WayInside,
    inner_equations,
    reaching_inputs,
    reaching_results,
)
from jmp.autocasting._registry import is_low, rule_for
from jmp.autocasting._request import Settings

NOTHING: frozenset[int] = frozenset()


class _Traced(NamedTuple):
    """What is known of a value.

    Attributes:
      kept: the carries, by number, that it holds as before the turn, but for what was written at
        places that counters name.
      counts: whether it depends on an integer carry.
      is_computed: whether it depends on floating numbers, or is one.
      ends: whether it is false after some turns, whatever the floating numbers are.
    """

    kept: frozenset[int] = NOTHING
    counts: bool = False
    is_computed: bool = False
    ends: bool = False

    @property
    def is_counter(self) -> bool:
        return self.counts and not self.is_computed


def iterates_nothing(equation: JaxprEqn, settings: Settings) -> bool:
    """Returns whether a while loop with products ends by a counter at last and iterates nothing.

    Of the floating numbers that earlier turns computed, its products then read records alone.
    """
    if not any(map(is_low, inner_equations(equation))):
        return False
    loop = _jax_compat.While.of(equation.params)
    asked, closed, carries = loop.split(equation.invars)
    outside = [_Traced(is_computed=is_inexact(atom)) for atom in (*asked, *closed)]
    inside = [
        _Traced(frozenset({number}), not is_inexact(atom), is_inexact(atom))
        for number, atom in enumerate(carries)
    ]
    propagation = Propagation(_trace, _join, lambda atom: _Traced(is_computed=is_inexact(atom)))
    decides, after = propagation.through_while(equation, [*outside, *inside])
    if not decides.ends:
        return False
    body, _ = _jax_compat.open_jaxpr(loop.body)
    condition, _ = _jax_compat.open_jaxpr(loop.condition)
    reads = functools.partial(reads_numbers, settings=settings)
    none = [False] * len(carries)
    multiplied = reaching_results(equation, body, none, is_low)
    exposed = reaching_results(equation, body, none, reads)
    compared = reaching_inputs(condition, reads, [True])[len(asked) :]
    return all(
        number in after[number].kept and not exposed[number] and not compared[number]
        for number, is_multiplied in enumerate(multiplied)
        if is_multiplied
    )


def _trace(
    equation: JaxprEqn,
    _: tuple[JaxprEqn, ...],
    operands: list[_Traced],
    inside: WayInside[_Traced],
) -> Sequence[_Traced]:
    found = inside()
    if found is not None:
        return found
    counts = any(operand.counts for operand in operands)
    # Which of several counters is no number: each beam has its own, and all go on.
    is_chosen = equation.primitive.name in ("gather", "dynamic_slice") and operands[0].is_counter
    is_computed = not is_chosen and any(operand.is_computed for operand in operands)
    is_both = equation.primitive.name == "and"
    ends = is_both and any(operand.ends or operand.is_counter for operand in operands)
    kept = _kept(equation, operands)
    return [
        _Traced(kept, counts, is_computed or is_inexact(variable), ends)
        for variable in equation.outvars
    ]


def _kept(equation: JaxprEqn, operands: list[_Traced]) -> frozenset[int]:
    """Returns the carries that the results of an equation hold; see `_Traced`."""
    name = equation.primitive.name
    if name == "select_n":
        return frozenset.intersection(*(case.kept for case in operands[1:]))
    if name in ("dynamic_update_slice", "scatter"):
        array, *rest = operands
        written, *places = rest if name == "dynamic_update_slice" else reversed(rest)
        is_counted = any(place.is_counter for place in places)
        return array.kept if is_counted else array.kept & written.kept
    rule = rule_for(name)
    if name != "concatenate" and (rule.holds_operands or rule.casts):
        return NOTHING.union(*(operand.kept for operand in operands))
    return NOTHING


def _join(choices: Sequence[_Traced], deciding: Sequence[_Traced]) -> _Traced:
    every = [*choices, *deciding]
    return _Traced(
        frozenset.intersection(*(choice.kept for choice in choices)),
        any(known.counts for known in every),
        any(known.is_computed for known in every),
    )
