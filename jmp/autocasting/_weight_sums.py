"""Gradients of a loop's weights as one product after its turns.

The gradient of a weight that a scan multiplies by at each turn is a sum over turns. In the loop it
is a float32 array as large as the weight, which each turn reads, adds to and writes. But it is one
product, over turns and rows at once, of what was multiplied and the cotangents of the results. So
these are stacked, and multiplied behind the loop.

In the tangent of the loop each such product has a *probe*, an addend of which only the tangent is
used. Its tangent is the product of what was multiplied, stacked, and the tangent of the weight,
computed before the loop of tangents. The transpose of that is the product behind the turns.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from jmp import _jax_compat
from jmp._array_calls import replaced
from jmp.autocasting._facts import Info
from jmp.autocasting._graph import Value, reached
from jmp.autocasting._lowerings import as_it_is, cast, jvp, weight_product_p
from jmp.autocasting._numbers import has_symbols
from jmp.autocasting._steps import Environment, Plan, Probe, Probed, Single, nodes_of

# How many numbers the products of a turn may have for each number of their weights. With 2, a GRU
# of width 256 and batch 512 holds 37 % more memory to move 6 % fewer bytes.
MOST_RESULTS = 1
# Turns that are stacked, at most; a longer loop is run in parts. A derivative in forward mode holds
# what so many turns keep. A derivative of the gradient adds up so many numbers in half: if all have
# one sign, its error in bfloat16 is 0.09 for 256 turns, and 0.9 for 4096.
MOST_TURNS = 256


def multiply_with_addend(
    addend: Value, step: Single, operands: Sequence[Any], environment: Environment
) -> list[Any]:
    """Returns a half product whose tangent has an addend, a value of the body."""
    (result,) = as_it_is(step)(operands)
    return [_with_addend(result, environment[addend])]


@jax.custom_jvp
def _with_addend(result: Any, addend: Any) -> Any:
    return result


_with_addend.defjvp(lambda primals, tangents: (_with_addend(*primals), lax.add(*tangents)))


def probed(
    plan: Plan,
    weights: Sequence[Value | None],
    carries: Sequence[Value],
    rows: Sequence[Value],
    turns: Any,
) -> Probed | None:
    """Returns the plan of a scan's body with a probe for each product by a weight.

    Args:
      plan: of the body.
      weights: for each constant of the scan its value in the body if it is a weight, else None.
      carries, rows: the values that carries and rows of arrays come in as.
      turns: of the scan, an integer or a symbol.

    Returns: None if no weight has only such products, or if the weights are small beside their
      results.
    """
    half = plan.request.settings.compute_dtype
    # A factor that is the same at each turn, such as another weight, is not stacked.
    results = lambda value: [result for user in value.users for result in user.outputs]
    moving = set(reached([*carries, *rows], results))
    probes: list[Probe] = []
    for position, weight in enumerate(weights):
        if weight is None:
            continue
        found = []
        for step in (s for s in plan.steps if any(read.value is weight for read in s.reads)):
            if not (isinstance(step, Single) and _is_plain_product(step, half)):
                break
            other = step.node.inputs[1 - step.node.inputs.index(weight)]
            if other not in moving:
                break
            row = rows.index(other) if other in rows else None
            addend = Value(step.node.outputs[0].aval)
            found.append(Probe(position, weight, step, addend, other, row))
        else:
            probes += found
    together = _turns_together(turns)
    of_weights = sum({probe.position: probe.weight.size for probe in probes}.values())
    if together is None or sum(p.addend.size for p in probes) > MOST_RESULTS * of_weights:
        return None
    stacked = _multiplied_values(probes)
    graph = dataclasses.replace(
        plan.graph,
        inputs=[*plan.graph.inputs, *(probe.addend for probe in probes)],
        outputs=[*plan.graph.outputs, *stacked],
    )
    lowered = {
        probe.step.node: probe.step._replace(lowering=partial(multiply_with_addend, probe.addend))
        for probe in probes
    }
    return Probed(
        plan._replace(
            graph=graph,
            reads=(*plan.reads, *(None for _ in probes)),
            steps=tuple(lowered.get(nodes_of(step)[0], step) for step in plan.steps),
            infos=(*plan.infos, *(Info(None, False) for _ in stacked)),
        ),
        tuple(probes),
        together,
    )


def _multiplied_values(probes: Sequence[Probe]) -> list[Value]:
    """Returns what is multiplied and is no row, each once."""
    return list(dict.fromkeys(probe.other for probe in probes if probe.row is None))


def _is_plain_product(step: Single, half: np.dtype) -> bool:
    """Returns whether a step is a half product of two values, bound as it stands."""
    left, right, *_ = step.node.inputs if len(step.node.inputs) == 2 else (None, None)
    is_plain = step.node.name == "dot_general" and step.is_half and step.lowering is None
    return is_plain and left is not right and step.stores == (half,)


def _turns_together(turns: Any) -> int | None:
    """Returns how many turns are stacked: all, or a divisor; None if there is none."""
    if has_symbols((turns,)):
        return None
    if turns <= MOST_TURNS:
        return int(turns)
    return next((n for n in range(MOST_TURNS, 1, -1) if turns % n == 0), None)


def run_probed(
    run: Callable[[Sequence[Any]], list[Any]],
    scan: _jax_compat.Scan,
    body: Probed,
    operands: Sequence[Any],
) -> list[Any]:
    """Runs a scan whose weights have their gradients after every `body.turns` turns.

    Args:
      run: so many turns with probes, given the operands and the probes' addends. It returns also
        what was multiplied and is no row, stacked.
      scan: the parameters.
      body: of it.
      operands: of the scan.
    """
    if body.turns == scan.length:
        return _some_turns(run, scan, body, operands)
    constants, carries, arrays = scan.split(operands)

    def part(carry: list[Any], rows: list[Any]) -> tuple[list[Any], list[Any]]:
        results = _some_turns(run, scan, body, [*constants, *carry, *rows])
        return results[: scan.n_carry], results[scan.n_carry :]

    count = scan.length // body.turns
    parts = [x.reshape(count, body.turns, *x.shape[1:]) for x in arrays]
    carry, stacked = lax.scan(part, carries, parts, length=count, reverse=scan.reverse)
    return [*carry, *(x.reshape(scan.length, *x.shape[2:]) for x in stacked)]


def _some_turns(
    run: Callable[[Sequence[Any]], list[Any]],
    scan: _jax_compat.Scan,
    body: Probed,
    operands: Sequence[Any],
) -> list[Any]:
    half, probes = body.plan.request.settings.compute_dtype, body.probes
    weights = {probe.position for probe in probes}
    others = _multiplied_values(probes)
    count = len(body.plan.stores) - len(others)

    def zeros() -> list[Any]:
        return [jnp.zeros((body.turns, *probe.addend.aval.shape), half) for probe in probes]

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
        arrays, stacked = scan.split(primals)[2], dict(zip(others, results[count:], strict=True))
        changes = []
        for probe, zero in zip(probes, addends, strict=True):
            row = probe.row
            other = cast(stacked[probe.other] if row is None else arrays[row], half)
            weight = tangents[probe.position]
            is_moving = not is_zero[probe.position]
            changes.append(_stacked_product(probe, other, weight) if is_moving else zero)
        return results[:count], tangents_of([tangents[i] for i in moving], changes)[:count]

    turns = jax.custom_jvp(without_addends)
    turns.defjvp(rule, symbolic_zeros=True)
    results: list[Any] = turns(*operands)
    return results


def _stacked_product(probe: Probe, stacked: Any, change: Any) -> Any:
    """Returns the products of what was multiplied at each turn and the change of a weight.

    In float16 the gradient of the weight comes out in float32: the sum of all turns may be beyond
    its range. In bfloat16 it is rounded, as all gradients of weights are.
    """
    step, position = probe.step, probe.step.node.inputs.index(probe.weight)
    is_float16 = stacked.dtype == np.float16
    weight = change if is_float16 else cast(change, stacked.dtype)

    def product(other: Any) -> Any:
        factors = (other, weight) if position == 1 else (weight, other)
        if is_float16:
            return weight_product_p.bind(*factors, weight=position, **step.params)
        return as_it_is(step)(factors)[0]

    return jax.vmap(product)(stacked)
