"""Gradients of a loop's weights as one product after its turns.

The gradient of a weight that a scan multiplies by at each turn is a sum over turns. In the loop it
is a float32 array as large as the weight, which each turn reads, adds to and writes. But it is one
product, over turns and rows at once, of what was multiplied and the cotangents of the results. So
these are stacked, and multiplied behind the loop.

With y_t = x_t W in turn t, the gradient of W is the sum over t of x_t^T times the cotangent of y_t.
In the tangent of the loop, dy_t = dx_t W + dz_t, where dz_t = x_t dW is computed for all turns
before the loop, from the stacked x_t. Its transpose is the one product behind the turns. The z_t,
*probes*, are zeros: only their tangents are used, so that they never change a result.

Where results of two products are added up, or parts of them, as in the gates of an LSTM, both have
the cotangent of the sum: they share one addend, whose cotangents are stacked once.
"""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from jmp import _jax_compat
from jmp._array_calls import replaced
from jmp.autocasting._facts import Info
from jmp.autocasting._graph import Node, Value, reached
from jmp.autocasting._kinds import kind_of
from jmp.autocasting._level import Level
from jmp.autocasting._lowerings import as_it_is, cast, jvp, weight_product_p
from jmp.autocasting._numbers import has_symbols
from jmp.autocasting._steps import (
    Environment,
    Function,
    Lowering,
    Nested,
    Plan,
    Single,
    Step,
    on,
)
from jmp.dtypes import FLOAT32

# How many numbers the products of a turn may have for each number of their weights. With 2, a GRU
# of width 256 and batch 512 holds 37 % more memory to move 6 % fewer bytes.
MOST_RESULTS = 1
# Turns that are stacked, at most; a longer loop is run in parts. A derivative in forward mode holds
# what so many turns keep. A derivative of the gradient adds up so many numbers in half: if all have
# one sign, its error in bfloat16 is 0.09 for 256 turns, and 0.9 for 4096.
MOST_TURNS = 256


def run_with_addends(
    addends: Sequence[Value | None],
    lowering: Lowering | None,
    step: Single,
    operands: Sequence[Any],
    environment: Environment,
) -> list[Any]:
    """Returns the results of a half step, whose tangents have addends: values of the body."""
    run = lowering or (lambda step, operands, _: as_it_is(step)(operands))
    return [
        result if addend is None else _with_tangent_of(result, environment[addend])
        for result, addend in zip(run(step, operands, environment), addends, strict=True)
    ]


@jax.custom_jvp
def _with_tangent_of(result: Any, addend: Any) -> Any:
    """Returns the result; the tangent of the addend is added to its tangent."""
    return result


_with_tangent_of.defjvp(lambda primals, tangents: (_with_tangent_of(*primals), lax.add(*tangents)))


class Part(NamedTuple):
    """Columns of a product's result, and the value whose cotangent is theirs: perhaps a sum."""

    columns: slice
    end: Value


class Probe(NamedTuple):
    """A product by a weight in a loop, whose tangent has addends."""

    position: int  # of the weight, among the constants of the loop
    weight: Value
    step: Single  # the product
    other: Value  # the other operand
    array: int | None  # the operand of the loop that the other one is a row of; None for no row
    parts: Sequence[Part] = ()


@on(Nested)
def sum_weights_after_turns(loop: Nested, level: Level) -> Nested:
    """Returns a loop; if it is a scan, its weights have their gradients after its turns."""
    form = loop.differentiated
    if form is None or form.node.name != "scan" or not level.context.has_gradient:
        return loop
    if any(map(_jax_compat.has_named_axes, form.node.inputs)):
        return loop
    return loop._replace(differentiated=_probed(form))


def _probed(loop: Nested) -> Nested:
    """Returns a scan with a probe for each product by a weight.

    It stays as it is if no weight has only such products, or if the weights are small beside the
    results of these.
    """
    (plan,), (inside,) = loop.insides, loop.node.insides
    assert isinstance(plan, Plan)
    scan = _jax_compat.Scan.of(loop.node.params)
    constants, carries, arrays = scan.split(inside.inputs)
    first_row = len(constants) + len(carries)
    rows = {value: first_row + index for index, value in enumerate(arrays)}
    probes: list[Probe] = []
    # A factor that is the same at each turn, such as another weight, is not stacked.
    results = lambda value: [result for user in value.users for result in user.outputs]
    moving = set(reached([*carries, *arrays], results))
    for position, (weight, read) in enumerate(zip(constants, loop.reads, strict=False)):
        if weight.is_float32 and read.dtype is None:  # a weight comes in as it is
            probes += _probes_of(weight, position, plan, moving, rows)
    turns = _turns_together(scan.length)
    probes = _with_parts(probes, plan)
    addends = {part.end: Value(part.end.aval) for probe in probes for part in probe.parts}
    of_weights = sum({probe.position: probe.weight.size for probe in probes}.values())
    is_large = sum(addend.size for addend in addends.values()) > MOST_RESULTS * of_weights
    if not probes or turns is None or is_large:
        return loop
    stacked = _stacked_values(probes)
    graph = dataclasses.replace(
        plan.graph,
        inputs=[*plan.graph.inputs, *addends.values()],
        outputs=[*plan.graph.outputs, *stacked],
    )
    body = plan._replace(
        graph=graph,
        reads=(*plan.reads, *(None for _ in addends)),
        steps=tuple(_with_addends(step, addends) for step in plan.steps),
        infos=(*plan.infos, *(Info(None, False) for _ in stacked)),
    )
    return loop._replace(insides=(body,), lowering=partial(run_in_parts, probes, turns))


def _with_addends(step: Step, addends: Mapping[Value, Value]) -> Step:
    """Returns a step; the tangents of its results have these addends."""
    if not isinstance(step, Single) or addends.keys().isdisjoint(step.node.outputs):
        return step
    own = [addends.get(value) for value in step.node.outputs]
    # It reads more than its operands: it has no function that steps alike could share.
    return step._replace(lowering=partial(run_with_addends, own, step.lowering), shared=None)


def _probes_of(
    weight: Value, position: int, plan: Plan, moving: Set[Value], rows: Mapping[Value, int]
) -> list[Probe]:
    """Returns a probe for each step that reads a weight; none unless all are plain products.

    Args:
      position: of the weight, among the constants of the loop.
      plan: of the body.
      moving: what differs from turn to turn.
      rows: the rows of arrays, and the places of these among the operands of the loop.
    """
    found = []
    for step in plan.steps:
        if all(read.value is not weight for read in step.reads):
            continue
        if not (isinstance(step, Single) and _is_plain_product(step)):
            return []
        other = step.node.inputs[1 - step.node.inputs.index(weight)]
        if other not in moving:
            return []
        found.append(Probe(position, weight, step, other, rows.get(other)))
    return found


def _with_parts(probes: Sequence[Probe], plan: Plan) -> list[Probe]:
    """Returns probes; one that shares no cotangent is not split, nor does it follow sums."""
    singles = (step for step in plan.steps if isinstance(step, Single) and step.is_half)
    # Saturated sums have another derivative.
    halves = {step.node for step in singles if not any(read.saturates for read in step.reads)}
    parts = [_parts_of(probe, halves, plan.graph.outputs) for probe in probes]
    counts = collections.Counter(part.end for own in parts for part in own)
    return [
        probe._replace(
            parts=own
            if any(counts[part.end] > 1 for part in own)
            else [Part(slice(None), probe.step.node.outputs[0])]
        )
        for probe, own in zip(probes, parts, strict=True)
    ]


def _parts_of(probe: Probe, halves: Set[Node], outputs: Sequence[Value]) -> list[Part]:
    """Returns the parts of a product's result, each with the last sum that has its cotangent.

    Args:
      halves: the half operations of the body.
      outputs: the results of the body.
    """
    product = probe.step.node
    (result,), left = product.outputs, product.inputs[0]

    def sum_of(value: Value) -> Value:
        """Returns the last of the sums that are the only reader of a value."""
        while len(value.users) == 1 and value not in outputs:
            (user,) = value.users
            is_sum = user.name in ("add", "add_any") and value.size == user.outputs[0].size
            if user not in halves or not is_sum or user.inputs[0] is user.inputs[1]:
                break
            (value,) = user.outputs
        return value

    whole = [Part(slice(None), sum_of(result))]
    axis = len(result.aval.shape) - 1
    is_matrix = product.params["dimension_numbers"] == (((axis,), (0,)), ((), ()))
    if left is probe.weight or not is_matrix or len(result.users) != 1 or result in outputs:
        return whole
    (user,) = result.users
    if user not in halves or user.name != "split" or user.params["axis"] != axis:
        return whole
    ends = list(itertools.accumulate(value.aval.shape[axis] for value in user.outputs))
    columns = (slice(first, last) for first, last in zip([0, *ends], ends, strict=False))
    return [Part(own, sum_of(value)) for own, value in zip(columns, user.outputs, strict=True)]


def _stacked_values(probes: Sequence[Probe]) -> list[Value]:
    """Returns what is multiplied and is no row, each once."""
    return list(dict.fromkeys(probe.other for probe in probes if probe.array is None))


def _is_plain_product(step: Single) -> bool:
    """Returns whether a step is a half product of two values, bound as it stands."""
    left, right, *_ = step.node.inputs if len(step.node.inputs) == 2 else (None, None)
    is_plain = step.node.name == "dot_general" and step.is_half and step.lowering is None
    return is_plain and left is not right and step.stores != (FLOAT32,)


def _turns_together(turns: Any) -> int | None:
    """Returns how many turns are stacked: all, or a divisor; None if there is none."""
    if has_symbols((turns,)):
        return None
    if turns <= MOST_TURNS:
        return int(turns)
    return next((n for n in range(MOST_TURNS, 1, -1) if turns % n == 0), None)


def run_in_parts(
    probes: Sequence[Probe],
    turns: int,
    loop: Nested,
    operands: Sequence[Any],
    functions: Sequence[Function],
) -> list[Any]:
    """Runs a scan whose weights have their gradients after every `turns` turns."""
    scan, equation = _jax_compat.Scan.of(loop.node.params), loop.node.equation
    shorter = equation.replace(params=dict(_jax_compat.with_length(equation.params, turns)))

    def some_turns(operands: Sequence[Any]) -> list[Any]:
        run = lambda operands: kind_of("scan").emit(shorter, operands, functions)
        return _turns_with_probes(run, probes, turns, len(loop.stores), operands)

    if turns == scan.length:
        return some_turns(operands)
    constants, carries, arrays = scan.split(operands)

    def part(carry: list[Any], rows: list[Any]) -> tuple[list[Any], list[Any]]:
        results = some_turns([*constants, *carry, *rows])
        return results[: scan.n_carry], results[scan.n_carry :]

    count = scan.length // turns
    parts = [x.reshape(count, turns, *x.shape[1:]) for x in arrays]
    carry, stacked = lax.scan(part, carries, parts, length=count, reverse=scan.reverse)
    return [*carry, *(x.reshape(scan.length, *x.shape[2:]) for x in stacked)]


def _turns_with_probes(
    run: Callable[[Sequence[Any]], list[Any]],
    probes: Sequence[Probe],
    turns: int,
    count: int,
    operands: Sequence[Any],
) -> list[Any]:
    """Runs so many turns, with the gradients of their weights as products after them.

    Args:
      run: the turns with probes, given the operands and the probes' addends. It returns also what
        was multiplied and is no row, stacked.
      count: how many results the loop has.
    """
    half = probes[0].step.stores[0]
    weights = {probe.position for probe in probes}
    others = _stacked_values(probes)
    ends = dict.fromkeys(part.end for probe in probes for part in probe.parts)

    def zeros() -> list[Any]:
        return [jnp.zeros((turns, *end.aval.shape), half) for end in ends]

    def without_addends(*operands: Any) -> list[Any]:
        return run([*operands, *zeros()])[:count]

    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        is_zero = [type(tangent) is SymbolicZero for tangent in tangents]
        if all(is_zero[i] for i in weights):
            # A gradient of these tangents in a weight adds up turn by turn, in float32.
            return jvp(without_addends, primals, tangents)
        moving = [i for i, zero in enumerate(is_zero) if not zero and i not in weights]

        def of_moving(arrays: Sequence[Any], addends: Sequence[Any]) -> list[Any]:
            return run([*replaced(primals, moving, arrays), *addends])

        addends = zeros()
        results, tangents_of = jax.linearize(of_moving, [primals[i] for i in moving], addends)
        stacked = dict(zip(others, results[count:], strict=True))
        changes = dict(zip(ends, addends, strict=True))
        for probe in probes:
            rows = stacked[probe.other] if probe.array is None else primals[probe.array]
            for part in () if is_zero[probe.position] else probe.parts:
                change = tangents[probe.position][..., part.columns]
                changes[part.end] += _stacked_product(probe, cast(rows, half), change)
        moved = tangents_of([tangents[i] for i in moving], list(changes.values()))
        return results[:count], moved[:count]

    differentiable = jax.custom_jvp(without_addends)
    differentiable.defjvp(rule, symbolic_zeros=True)
    results: list[Any] = differentiable(*operands)
    return results


def _stacked_product(probe: Probe, stacked: Any, change: Any) -> Any:
    """Returns the products of what was multiplied at each turn and the change of a weight.

    The gradient of the weight comes out in the float32 that it is added up in: the sum of all turns
    may be beyond float16's range, and has more digits than bfloat16 holds.
    """
    position = probe.step.node.inputs.index(probe.weight)

    def product(other: Any) -> Any:
        factors = (other, change) if position == 1 else (change, other)
        return weight_product_p.bind(*factors, weight=position, **probe.step.params)

    return jax.vmap(product)(stacked)
