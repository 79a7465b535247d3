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

NO_CARRIES: frozenset[int] = frozenset()


class _Kept(NamedTuple):
    """What is known of a value.

    Attributes:
      kept: the carries, by number, that it holds as before the turn, but for what was written at
        places that counters name.
      counts: whether it depends on an integer carry.
      is_computed: whether it depends on floating numbers, or is one.
      ends: whether it is false after some turns, whatever the floating numbers are.
    """

    kept: frozenset[int] = NO_CARRIES
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
    outside = [_Kept(is_computed=is_inexact(atom)) for atom in (*asked, *closed)]
    inside = [
        _Kept(frozenset({number}), not is_inexact(atom), is_inexact(atom))
        for number, atom in enumerate(carries)
    ]
    propagation = Propagation(_through, _join, lambda atom: _Kept(is_computed=is_inexact(atom)))
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


def _through(
    equation: JaxprEqn,
    _: tuple[JaxprEqn, ...],
    operands: list[_Kept],
    inside: WayInside[_Kept],
) -> Sequence[_Kept]:
    found = inside()
    if found is not None:
        return found
    counts = any(operand.counts for operand in operands)
    # Which of several counters is no number: each beam has its own, and all go on.
    is_chosen = rule_for(equation.primitive.name).looks_up and operands[0].is_counter
    is_computed = not is_chosen and any(operand.is_computed for operand in operands)
    is_both = equation.primitive.name == "and"
    ends = is_both and any(operand.ends or operand.is_counter for operand in operands)
    kept = _carries_kept(equation, operands)
    return [
        _Kept(kept, counts, is_computed or is_inexact(variable), ends)
        for variable in equation.outvars
    ]


def _carries_kept(equation: JaxprEqn, operands: list[_Kept]) -> frozenset[int]:
    """Returns the carries that the results of an equation hold; see `_Kept`."""
    name = equation.primitive.name
    rule = rule_for(name)
    if name == "select_n":
        return frozenset.intersection(*(case.kept for case in operands[1:]))
    if rule.writes:
        array, *others = operands
        pairs = list(zip(equation.invars[1:], others, strict=True))
        if any(place.is_counter for atom, place in pairs if not is_inexact(atom)):
            return array.kept
        return array.kept.intersection(*(new.kept for atom, new in pairs if is_inexact(atom)))
    if name != "concatenate" and (rule.holds_operands or rule.casts):
        return NO_CARRIES.union(*(operand.kept for operand in operands))
    return NO_CARRIES


def _join(choices: Sequence[_Kept], deciding: Sequence[_Kept]) -> _Kept:
    every = [*choices, *deciding]
    return _Kept(
        frozenset.intersection(*(choice.kept for choice in choices)),
        any(known.counts for known in every),
        any(known.is_computed for known in every),
    )
