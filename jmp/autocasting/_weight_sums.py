"""Gradients of a loop's weights as one product after the loop.

The gradient of a weight that a scan multiplies by at each turn is a sum over turns. In the loop it
is a float32 array as large as the weight, which each turn reads, adds to and writes. But it is one
product, over turns and rows at once, of what was multiplied and the cotangents of the results. So
these are stacked, and multiplied after the loop: the same sum, in float32 inside the product.

In the tangent of the loop each such product has a *probe*, an addend of which only the tangent is
used. Its tangent is the product of what was multiplied, stacked, and the tangent of the weight,
computed before the loop of tangents. The transpose of that is the product after the loop.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from jmp import _jax_compat
from jmp._array_calls import replaced
from jmp.autocasting._casts import cast
from jmp.autocasting._facts import Info
from jmp.autocasting._graph import Node, Value
from jmp.autocasting._lowerings import as_it_is
from jmp.autocasting._numbers import has_symbols
from jmp.autocasting._steps import Environment, Plan, Probe, Probed, Single, Step, nodes_of
from jmp.autocasting._wide_gradients import weight_product_p


class Multiplied(NamedTuple):
    """A half product of which the result's tangent gets an addend."""

    addend: Value

    def bind(self, step: Single, operands: Sequence[Any], environment: Environment) -> list[Any]:
        """Returns the product."""
        (result,) = as_it_is(step)(operands)
        return [_with_addend(result, environment[self.addend])]


@jax.custom_jvp
def _with_addend(result: Any, addend: Any) -> Any:
    """Returns the result; its tangent is the sum of both."""
    return result


_with_addend.defjvp(lambda primals, tangents: (_with_addend(*primals), lax.add(*tangents)))


def probed(
    plan: Plan, weights: Sequence[Value | None], rows: Sequence[Value], turns: Any, half: np.dtype
) -> Probed | None:
    """Returns the plan of a scan's body with a probe for each product by a weight.

    Args:
      plan: of the body.
      weights: for each constant of the scan its value in the body if it is a weight, else None.
      rows: the values that the rows of its arrays come in as.
      turns: of the scan, an integer or a symbol.
      half: the compute dtype.

    Returns: None if no weight has only such products, or if the weights are small beside their
      results.
    """
    probes: list[Probe] = []
    lowered: dict[Node, Step] = {}
    for position, weight in enumerate(weights):
        readers = [] if weight is None else [s for s in plan.steps if _reads(s, weight)]
        products = [s for s in readers if isinstance(s, Single) and _is_plain_product(s, half)]
        if weight is None or len(products) < len(readers):
            continue
        for step in products:
            other = step.node.inputs[1 - step.node.inputs.index(weight)]
            row = rows.index(other) if other in rows else None
            addend = Value(step.node.outputs[0].aval)
            probes.append(Probe(position, weight, step, addend, other, row))
            lowered[step.node] = step._replace(lowering=Multiplied(addend))
    together = _turns_together(probes, turns) if probes else 1
    if together == 1:
        return None
    graph = plan.graph
    stacked = [probe.other for probe in probes if probe.row is None]
    graph = type(graph)(
        [*graph.inputs, *(probe.addend for probe in probes)],
        graph.nodes,
        [*graph.outputs, *stacked],
        graph.constants,
    )
    return Probed(
        plan._replace(
            graph=graph,
            reads=(*plan.reads, *(None for _ in probes)),
            steps=tuple(lowered.get(nodes_of(step)[0], step) for step in plan.steps),
            infos=(*plan.infos, *(Info(half, False) for _ in stacked)),
        ),
        tuple(probes),
        together,
    )


def _reads(step: Step, value: Value) -> bool:
    return any(read.value is value for read in step.reads)


def _is_plain_product(step: Single, half: np.dtype) -> bool:
    """Returns whether a step is a half product of two values, bound as it stands."""
    left, right, *_ = step.node.inputs if len(step.node.inputs) == 2 else (None, None)
    is_plain = step.node.name == "dot_general" and step.is_half and step.lowering is None
    return is_plain and left is not right and step.stores == (half,)


def _turns_together(probes: Sequence[Probe], turns: Any) -> int:
    """Returns how many turns are stacked for one product: a divisor of the turns of the scan.

    What is stacked takes no more bytes than float32 gradients of the weights.
    """
    results = sum(probe.addend.size for probe in probes)
    weights = {probe.position: probe.weight.size for probe in probes}
    most = 2 * sum(weights.values()) // results
    if has_symbols((turns,)):
        return 1
    return max((n for n in range(2, turns + 1) if turns % n == 0 and n <= most), default=1)


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

    parts = [x.reshape(-1, body.turns, *x.shape[1:]) for x in arrays]
    count = scan.length // body.turns
    carry, stacked = lax.scan(part, carries, parts, length=count, reverse=scan.reverse)
    return [*carry, *(x.reshape(-1, *x.shape[2:]) for x in stacked)]


def _some_turns(
    run: Callable[[Sequence[Any]], list[Any]],
    scan: _jax_compat.Scan,
    body: Probed,
    operands: Sequence[Any],
) -> list[Any]:
    half, probes = body.plan.request.settings.compute_dtype, body.probes
    weights = {probe.position for probe in probes}
    count = len(body.plan.stores) - sum(probe.row is None for probe in probes)

    def zeros() -> list[Any]:
        return [jnp.zeros((body.turns, *probe.addend.aval.shape), half) for probe in probes]

    def of_rounded(operands: Sequence[Any], addends: Sequence[Any]) -> list[Any]:
        rounded = (cast(x, half) if i in weights else x for i, x in enumerate(operands))
        return run([*rounded, *addends])

    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        is_zero = [type(tangent) is SymbolicZero for tangent in tangents]
        moving = [i for i, zero in enumerate(is_zero) if not zero and i not in weights]

        def of_moving(arrays: Sequence[Any], addends: Sequence[Any]) -> list[Any]:
            return of_rounded(replaced(primals, moving, arrays), addends)

        addends = zeros()
        results, tangents_of = jax.linearize(of_moving, [primals[i] for i in moving], addends)
        arrays, stacked = scan.split(primals)[2], iter(results[count:])
        changes = []
        for probe, zero in zip(probes, addends, strict=True):
            other = next(stacked) if probe.row is None else cast(arrays[probe.row], half)
            weight = tangents[probe.position]
            is_moving = not is_zero[probe.position]
            changes.append(_product(probe, other, weight) if is_moving else zero)
        return results[:count], tangents_of([tangents[i] for i in moving], changes)[:count]

    turns = jax.custom_jvp(lambda *operands: of_rounded(operands, zeros())[:count])
    turns.defjvp(rule, symbolic_zeros=True)
    results: list[Any] = turns(*operands)
    return results


def _product(probe: Probe, stacked: Any, change: Any) -> Any:
    """Returns the products of what was multiplied at each turn and the change of a weight.

    The gradient of that comes out in the float32 that the product adds up in.
    """
    side = probe.step.node.inputs.index(probe.weight)

    def product(other: Any) -> Any:
        factors = (other, change) if side == 1 else (change, other)
        return weight_product_p.bind(*factors, weight=side, **probe.step.params)

    return jax.vmap(product)(stacked)
