"""The pass that fuses attentions: which ones, and the step that runs each.

A fused attention is a step that contains the steps it replaces. They run if the program is lowered
for another platform than it was planned for. `_kernels` says how a kernel is to compute it;
`_cudnn` and `_pallas` have the kernels.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jmp.autocasting._graph import Node, Value
from jmp.autocasting._level import Level
from jmp.autocasting._numbers import has_symbols
from jmp.autocasting._steps import Fused, Island, Read, Single, Step, nodes_of, runnable_order
from jmp.autocasting.attention._kernels import Kernel, KernelForm, attend, attend_by, form_of
from jmp.autocasting.attention._matching import Attention, NotFused, find_attention
from jmp.dtypes import FLOAT32

StepOf = Mapping[Node, Step]  # the step that a node belongs to


def fuse_attentions(kernel: Kernel, steps: Sequence[Step], level: Level) -> list[Step]:
    """Returns the steps of a level, in any order, with fused attentions among them.

    The last product of an attention that is not fused says why.
    """
    if level.context.request.settings.attention != "fused":
        return list(steps)
    step_of = {node: step for step in steps for node in nodes_of(step)}
    fused: list[Fused] = []
    others: list[Step] = []
    for step in steps:
        if isinstance(step, Single) and step.is_half:
            try:
                if attention := find_attention(step.node, level.facts.softmaxes):
                    fused.append(_fused_step(attention, kernel, step_of, level))
            except NotFused as reason:
                note = f"attention, left as it is: {reason}"
                step = step._replace(notes=(*step.notes, note))
        others.append(step)
    replaced = {node for step in fused for node in nodes_of(step)}
    return [step for step in others if replaced.isdisjoint(nodes_of(step))] + list(fused)


def _fused_step(attention: Attention, kernel: Kernel, step_of: StepOf, level: Level) -> Fused:
    """Returns the step that replaces the steps of an attention.

    Raises: NotFused if the kernel would compute something else, or not at all.
    """
    of_operands = (*attention.query.labels, *attention.key.labels, *attention.values.labels)
    if has_symbols(tuple(label.length for label in of_operands)):
        raise NotFused("a size of it is a symbol, and a kernel is made for one size")
    group = replaced_steps(attention, step_of, level)
    scores, result = step_of[attention.scores], step_of[attention.result]
    if not (isinstance(scores, Single) and scores.is_half):
        raise NotFused("its first product is not computed in half")
    if any(read.dtype == FLOAT32 for step in (scores, result) for read in step.reads):
        raise NotFused("its operands' gradients are to be float32, and the kernel's are half")
    form = form_of(attention)
    operands = {read.value: read for step in (scores, result) for read in step.reads}
    reads = [operands[x.value] for x in (attention.query, attention.key, attention.values)]
    terms = [Read(term.source.value, None) for term in form.masking.terms]
    inside = {value for step in group for node in nodes_of(step) for value in node.outputs}
    if any(read.value in inside for read in (*reads, *terms)):
        raise NotFused("its values, its bias or its mask are computed together with its scores")
    if not all(_is_stored(read.value, step_of) for read in terms):
        raise NotFused("its bias or its mask, before it is repeated, is inside of an island")
    limit = kernel.limit_of(form, attention.query.value, level.half)
    if refused := limit or why_refused(kernel, form, [*reads, *terms]):
        raise NotFused(f"{kernel.name} does not take it: {refused}")
    all_reads = (*(read for step in group for read in step.reads), *reads, *terms)
    entering = dict.fromkeys(read.value for read in all_reads if read.value.literal is None)
    return Fused(
        node=attention.result,
        plain=tuple(runnable_order(group, attention.result.outputs)),
        reads=tuple(Read(v, level.dtypes[v]) for v in entering if v not in inside),
        platform=kernel.platform,
        lowering=functools.partial(attend_by, kernel, form, (*reads, *terms)),
        why=kernel.why,
    )


def replaced_steps(attention: Attention, step_of: StepOf, level: Level) -> list[Single | Island]:
    """Returns the steps that compute an attention and nothing else that is read."""
    dependent = level.facts.dependent
    computed = [node for node in attention.nodes if not dependent.isdisjoint(node.outputs)]
    found = list({id(step_of[node]): step_of[node] for node in computed}.values())
    group = [step for step in found if isinstance(step, (Single, Island))]
    if len(group) < len(found):
        raise NotFused("part of it is a function of its own")
    nodes = {node for step in group for node in nodes_of(step)}
    for value in (value for node in nodes for value in node.outputs):
        is_read_elsewhere = value in level.graph.outputs or not nodes.issuperset(value.users)
        if is_read_elsewhere and value not in attention.result.outputs:
            raise NotFused("its scores or its weights are read elsewhere too")
    return group


def _is_stored(value: Value, step_of: StepOf) -> bool:
    """Returns whether a value of the level is there for other steps to read."""
    if value.producer is None or value.literal is not None:
        return True
    step = step_of.get(value.producer)
    if isinstance(step, Island):
        return value in {write.value for write in step.writes}
    return step is not None


def why_refused(kernel: Kernel, form: KernelForm, reads: Sequence[Read]) -> str:
    """Returns why JAX refuses an attention that reads these values; "" if it does not.

    Forward and backward pass are traced: JAX refuses some shapes only there, and all of them if it
    finds no cuDNN.
    """

    def with_gradient(*arrays: Any) -> Any:
        of_heads = lambda *heads: attend(kernel, form, [*heads, *arrays[3:]])
        result, pull_back = jax.vjp(of_heads, *arrays[:3])
        return pull_back(result)

    types = [jax.ShapeDtypeStruct(r.value.aval.shape, r.dtype or r.value.dtype) for r in reads]
    try:
        jax.eval_shape(with_gradient, *types)
    except Exception as error:  # JAX raises what it finds: RuntimeError, ValueError, ...
        return " ".join(str(error).split()) or type(error).__name__
    return ""
