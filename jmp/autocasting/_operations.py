"""Plans, as reports and autocast's own warnings read them.

All of it comes from `steps_of`, the one walk over a plan: the operations with their dtypes, what is
decided besides dtypes, and the warnings of no half product and of half gradients.
"""

import collections
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp

from jmp import _jax_compat
from jmp._jax_compat import Params
from jmp._messages import PrecisionWarning, described
from jmp.autocasting._equations import contracts_nothing, is_inner_product
from jmp.autocasting._graph import Node
from jmp.autocasting._kinds import has_kind
from jmp.autocasting._numbers import dtype_of
from jmp.autocasting._precision import asked_for
from jmp.autocasting._products import WHY_EXACT
from jmp.autocasting._propagation import scope_of, walk_inside
from jmp.autocasting._registry import NO_RULE, is_low
from jmp.autocasting._steps import Fused, Island, Plan, Ran, Single, nodes_of, steps_of

SATURATED = (
    "an array that is added or selected is held within float16's range, in case it is a mask: a "
    "row that is masked throughout stays finite"
)

# A pass says it of products (`targets/_wide_gradients`).
WHY_NOT_WIDE = "float32 gradients were asked for, which this product cannot give"

NOT_HALF = frozenset({"float32", "float64", "complex64", "complex128"})


class NoHalfProductWarning(PrecisionWarning):
    """A function has products, and a half policy lowered none of them, or none that some hold.

    The warning counts the reasons. `diagnostics.precision_report` names each product with its own.

    >>> import warnings
    >>> def loss(w, x):
    ...     return jnp.sum(jnp.dot(x, w, precision="highest"))
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     _ = jax.eval_shape(autocast(loss, "mixed_float16"), jnp.eye(2), jnp.eye(2))
    >>> caught[0].category.__name__
    'NoHalfProductWarning'
    """


class HalfReductionWarning(PrecisionWarning):
    """Gradients that were to be added up between devices in float32 are half.

    `autocast` warns where the policy has `reduce_dtype`, such as "mixed_float16,r=f32", and a
    product of a parameter has no float32 gradient: a convolution, or a product in a custom
    derivative. Keep it in float32 by a rule. In tests turn the warning into an error:

    >>> import warnings
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("error", HalfReductionWarning)
    ...     gradient = jax.grad(autocast(jnp.sum, "mixed_float16,r=f32"))(jnp.ones(2))
    >>> gradient.dtype
    dtype('float32')
    """


class Float16OnTpuWarning(PrecisionWarning):
    """A program for a TPU is to compute in float16, for which a TPU has no matrix unit.

    "mixed_bfloat16" is the policy for TPUs, without a loss scale. "p=f32,c=half,o=f32" is that on a
    TPU and "mixed_float16" elsewhere.

    >>> import warnings
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     _ = autocast(jnp.sum, "mixed_float16", platform="tpu")(jnp.ones(2))
    >>> caught[0].category.__name__
    'Float16OnTpuWarning'
    """


class Operation(NamedTuple):
    """One equation that stands in a plan, or inside a node that is bound as a whole."""

    equation: Any
    around: tuple[Any, ...]  # the equations that hold it, the outermost first
    node: Node  # of the plan: `equation` is its own, or stands inside it
    why: str  # the reason of its dtypes
    times: int  # how often it runs, turns of loops included
    params: Params  # what it is bound with
    dtypes_in: list[str]  # of its floating operands, as they are read
    dtypes_out: list[str]  # of its floating results, as they are stored

    @property
    def scope(self) -> Any:
        """The name stack from the outermost level down."""
        return scope_of((*self.around, self.equation), _jax_compat.empty_name_stack())


def operations_of(steps: Iterable[Ran]) -> Iterator[Operation]:
    """Yields the operations of the steps of a plan, those inside nodes bound as a whole too."""
    for step, level, times in steps:
        if isinstance(step, Island):
            stored = {write.value: write.dtype for write in step.writes}
            for node in step.nodes:
                why = step.why.get(node, node.rule.reason)
                reads = [value.dtype for value in node.inputs]
                stores = [stored.get(value, value.dtype) for value in node.outputs]
                yield from _operations_of_node(node, node.params, why, times, reads, stores)
        elif isinstance(step, Single):
            node, half = step.node, level.request.settings.compute_dtype
            reads = [half if step.is_half and v.is_float32 else v.dtype for v in node.inputs]
            if dtype := getattr(step.lowering, "dtype_in", None):
                reads = [dtype]
            yield from _operations_of_node(node, step.params, step.why, times, reads, step.stores)


def _operations_of_node(
    node: Node, params: Params, why: str, times: int, reads: Iterable[Any], stores: Iterable[Any]
) -> Iterator[Operation]:
    """Yields a node, or what stands inside it, given the dtypes that it reads and stores."""
    traced: Any = node.equation
    if not _jax_compat.holds_functions(traced):
        dtypes_in, dtypes_out = _inexact_names(reads), _inexact_names(stores)
        yield Operation(traced, node.around, node, why, times, params, dtypes_in, dtypes_out)
    # Bound as a whole, in the dtypes it was traced with: a region, a custom derivative.
    as_bound = walk_inside(traced.replace(params=params))
    for visit, changed in zip(walk_inside(traced, node.around, times), as_bound, strict=True):
        if visit.is_innermost:
            equation, around, turns = visit
            dtypes_in = _inexact_names(map(dtype_of, equation.invars))
            dtypes_out = _inexact_names(map(dtype_of, equation.outvars))
            own_params = changed.equation.params
            yield Operation(equation, around, node, why, turns, own_params, dtypes_in, dtypes_out)


def _inexact_names(dtypes: Iterable[Any]) -> list[str]:
    """Returns the names of the floating and complex dtypes, once each."""
    found = (d for d in dtypes if d is not None and jnp.issubdtype(d, jnp.inexact))
    return list(dict.fromkeys(map(str, found)))


def decisions_of(steps: Iterable[Ran]) -> Iterator[tuple[str, Node, int]]:
    """Yields what a plan does besides choosing dtypes: a sentence, the node, how often it runs."""
    for step, _, times in steps:
        if isinstance(step, Fused):
            yield step.why, step.node, times
        elif isinstance(step, Island):
            for node, rewrite in step.rewrites.items():
                yield rewrite.why, node, times
            masked = (write.value.producer for write in step.writes if write.saturates)
            for node in filter(None, masked):
                yield SATURATED, node, times
        else:
            for note in step.notes:
                yield note, step.node, times
            if any(read.saturates for read in step.reads):
                yield SATURATED, step.node, times


def is_product(equation: Any) -> bool:
    """Returns whether an equation is a product by the op table; an inner product is a sum."""
    return is_low(equation) and not is_inner_product(equation)


def _no_product_is_half(plan: Plan, name: str) -> str:
    """Says that all products of a plan are float32, unless autocast's caller asked for it.

    The caller asks with `rules=`, `full=`, `full_precision` and an autocast inside.
    """
    reasons: collections.Counter[str] = collections.Counter()
    is_surprise = False
    # The other half type is that of a checkpoint's parameters, or a model's own `dtype`.
    not_half = NOT_HALF | {"float16", "bfloat16"} - {str(plan.request.settings.compute_dtype)}
    may_multiply = lambda ran: any(n.multiplies or n.holds_functions for n in nodes_of(ran.step))
    for operation in operations_of(filter(may_multiply, steps_of(plan))):
        if is_product(operation.equation) and operation.dtypes_in:
            if not not_half.issuperset(operation.dtypes_in):
                return ""
            # As written inside a loop, an outer product may stand where it is no multiplication.
            if operation.why in WHY_EXACT or contracts_nothing(operation.equation):
                continue
            reasons[_reason(operation)] += 1
            is_surprise |= not is_callers_wish(operation, plan)
    if not is_surprise:
        return ""
    (why, first), *others = reasons.most_common()
    listed = [f"{first} product{'s' * (first > 1)}: {why}"]
    listed += [f"{count}: {why}" for why, count in others]
    return (
        f"autocast computes no product of {described(name)} in "
        f"{plan.request.settings.compute_dtype}. {'; '.join(listed)}. "
        "jmp.diagnostics.precision_report says where each one stands."
    )


def _gradients_stay_half(plan: Plan, name: str) -> str:
    """Says which parameters have gradients that were to be float32, and cannot be."""
    names = collections.Counter(
        step.node.name
        for step, *_ in steps_of(plan)
        if isinstance(step, Single) and step.why.startswith(WHY_NOT_WIDE)
    )
    if not names:
        return ""
    found = ", ".join(f"{count} {name}" for name, count in names.items())
    return (
        f"autocast of {described(name)} was asked for reduce_dtype=float32, but gradients of "
        f"parameters in these products stay half, between devices too: {found}. (For a "
        "convolution cuDNN has no half kernel with a float32 gradient.) Compute them in "
        "float32 by a rule, or ignore this: a sum that overflows is seen, its step skipped."
    )


def _products_out_of_sight(plan: Plan, name: str) -> str:
    """Says which primitives hold float32 products that stay so because nothing plans them."""
    found: collections.Counter[str] = collections.Counter()
    for operation in operations_of(filter(_is_unplanned, steps_of(plan))):
        is_float32 = is_product(operation.equation) and NOT_HALF.issuperset(operation.dtypes_in)
        if is_float32 and not is_callers_wish(operation, plan):
            found[_jax_compat.called_name(operation.node.equation)] += 1
    if not found.total() or _no_product_is_half(plan, name):
        return ""
    listed = ", ".join(f"{count} in {holder}" for holder, count in found.items())
    return (
        f"autocast of {described(name)} does not plan what holds these products, which stay "
        f"float32: {listed}. Wrap the functions inside by an autocast of their own, or mark them "
        "by jmp.full_precision if they are to be float32."
    )


def _is_unplanned(ran: Ran) -> bool:
    """Returns whether a step holds functions that are no kernel, and that nothing plans."""
    if not (isinstance(ran.step, Single) and ran.step.node.holds_functions):
        return False
    node = ran.step.node
    return node.rule == NO_RULE and not has_kind(node.name) and node.name not in _jax_compat.OPAQUE


def _is_float16_on_tpu(plan: Plan, name: str) -> str:
    """Says that a program for a TPU, or another target without a matrix unit, is in float16."""
    request = plan.request
    if request.target.multiplies_float16 or request.settings.compute_dtype != jnp.float16:
        return ""
    return (
        f"autocast of {described(name)} computes in float16 for platform="
        f"{described(request.target.platform)}, which has no matrix unit for it. Use "
        "'mixed_bfloat16' there, which needs no loss scale ('p=f32,c=half,o=f32' chooses by the "
        "device)."
    )


# Sentences on a plan, given the name of its function, and their warnings; "" for nothing.
WARNINGS: tuple[tuple[Callable[[Plan, str], str], type[UserWarning]], ...] = (
    (_no_product_is_half, NoHalfProductWarning),
    (_products_out_of_sight, NoHalfProductWarning),
    (_gradients_stay_half, HalfReductionWarning),
    (_is_float16_on_tpu, Float16OnTpuWarning),
)


def _reason(operation: Operation) -> str:
    node = operation.node
    if node.region.in_float32:
        return operation.why
    if asked := asked_for(operation.equation):
        return asked
    if node.rule != NO_RULE:
        return operation.why
    return f"inside {node.name.removesuffix('_call')}, which runs as written"


def is_callers_wish(operation: Operation, plan: Plan) -> bool:
    """Returns whether the caller of autocast asked for the dtype, with an option or a region."""
    is_named = operation.equation.primitive.name in plan.request.settings.overrides
    regions = operation.node.region, plan.request.region(operation.scope)
    return is_named or any(region.in_float32 for region in regions)
