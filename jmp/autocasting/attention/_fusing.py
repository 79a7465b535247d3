"""Masks by value: causal ones and windows need no array, and what masks nothing needs nothing.

Decides which attentions are fused, and makes their steps.

A fused attention is a step that holds the steps it replaces: they run where the program is lowered
for anything but CUDA, as they would without it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jmp.autocasting._flow import Facts
from jmp.autocasting._graph import Graph, Node, Value
from jmp.autocasting._numbers import has_symbols, shape_of
from jmp.autocasting._order import in_order
from jmp.autocasting._steps import Arithmetic, Fused, Nested, Read, Single, Step, Storage, nodes_of
from jmp.autocasting.attention._axes import (
    VALUE_WIDTH,
    WIDTH,
    Group,
    Groups,
    NotFused,
    Placed,
    Sizes,
    layout,
    spread,
)
from jmp.autocasting.attention._constants import constant_of
from jmp.autocasting.attention._cudnn import Form, why_refused
from jmp.autocasting.attention._matching import MASKED, Attention, Bias, Mask, find_attention

Booleans = np.ndarray[Any, np.dtype[np.bool_]]


class Masking(NamedTuple):
    """What is done to the scores between scale and softmax."""

    is_causal: bool
    window: int | None  # how many keys before its own a row sees, if it is causal
    biases: Sequence[Bias]  # what is not said by these two
    masks: Sequence[Mask]
    has_gradient: bool  # of a bias
    is_alive: bool  # every row is known to see a key


class _Known(NamedTuple):
    """What is known of a bias or a mask when the program is planned."""

    keeps: Booleans  # of the four groups, of length one where it does not differ
    only_masks: bool  # the scores that it keeps stay as they are


def masking_of(
    biases: Sequence[Bias], masks: Sequence[Mask], groups: Groups, sizes: Sizes
) -> Masking:
    """Returns what biases and masks do.

    Args:
      groups: the atoms of batch, heads, rows and keys.

    Raises: NotFused for what the fused kernel does not do.
    """
    terms: list[Bias | Mask] = [*biases, *masks]
    found = {id(term): _known(term, groups, sizes) for term in terms}
    known = [k for k in found.values() if k is not None]
    kept: Booleans = np.ones((1, 1, 1, 1), bool)
    for one in known:
        kept = kept & one.keeps
    pattern = _pattern(kept, [sizes[atom] for atom in (*groups[2], *groups[3])])
    if pattern is not None:
        terms = [t for t in terms if (k := found[id(t)]) is None or not k.only_masks]
    learned = [t for t in terms if isinstance(t, Bias) and t.placed.value.varies]
    of_batch = [t for t in terms if any(a in groups[0] for axis in t.placed.axes for a in axis)]
    if learned and of_batch:
        raise NotFused("cuDNN has no gradient of a bias that differs from example to example")
    unknown = [t for t in terms if found[id(t)] is None and t not in learned]
    is_alive = not unknown and bool(kept.any(-1).all())
    fills = {mask.fill for mask in masks}
    if not is_alive and -np.inf in fills:
        raise NotFused("its mask is of -inf: a row that is masked wholly is NaN")
    if not is_alive and len(fills) > 1:
        raise NotFused("its masks put in different numbers, and may mask a row wholly")
    return Masking(
        *(pattern or (False, None)),
        [term for term in terms if isinstance(term, Bias)],
        [term for term in terms if isinstance(term, Mask)],
        bool(learned),
        is_alive,
    )


def _known(term: Bias | Mask, groups: Groups, sizes: Sizes) -> _Known | None:
    value, axes = term.placed
    numbers = constant_of(value)
    if numbers is None or numbers.ndim != len(shape_of(value)):
        return None
    axes = tuple(axis if n != 1 else () for axis, n in zip(axes, numbers.shape, strict=True))
    numbers = spread(numbers, axes, groups, sizes)
    if isinstance(term, Mask):
        return _Known(numbers == term.keeps, only_masks=True)
    keeps = numbers.astype(np.float64) * term.factor > MASKED
    return _Known(keeps, only_masks=not numbers[keeps].any())


def _pattern(kept: Booleans, lengths: Sequence[int]) -> tuple[bool, int | None] | None:
    """Returns whether a mask is causal, and its window; None if it is neither that nor empty."""
    if kept.all():
        return False, None
    if kept.shape[:2] != (1, 1) or kept.shape[2:] != tuple(lengths) or len(set(lengths)) != 1:
        return None
    kept, rows = kept[0, 0], np.arange(lengths[0])
    first, last = kept.argmax(1), rows[-1] - kept[:, ::-1].argmax(1)
    window = int((rows - first).max())
    is_causal = (last == rows) & (first == np.maximum(rows - window, 0))
    if not (is_causal & (kept.sum(1) == last - first + 1)).all():
        return None
    return True, None if window == rows[-1] else window


FUSED = "attention: one fused cuDNN kernel where the program is lowered for CUDA"


def fuse_attentions(
    steps: Sequence[Step], graph: Graph, storage: Storage
) -> tuple[list[Step], dict[Node, str]]:
    """Returns the steps with fused attentions among them, and why others are left as they are.

    Args:
      steps: of one level, in any order.
      storage: of the level, decided.

    Returns: the steps; and for each last product of an attention that is not fused, the reason.
    """
    step_of = {node: step for step in steps for node in nodes_of(step)}
    fused: list[Fused] = []
    reasons: dict[Node, str] = {}
    for step in steps:
        if isinstance(step, Single) and step.arithmetic is Arithmetic.HALF:
            try:
                attention = find_attention(step.node)
                if attention is not None:
                    fused.append(_fused_step(attention, step_of, graph, storage))
            except NotFused as reason:
                reasons[step.node] = f"attention, left as it is: {reason}"
    replaced = {id(inner) for step in fused for inner in step.plain}
    return [step for step in steps if id(step) not in replaced] + list(fused), reasons


def _fused_step(
    attention: Attention,
    step_of: dict[Node, Step],
    graph: Graph,
    storage: Storage,
) -> Fused:
    facts = storage.facts
    if has_symbols(tuple(attention.sizes.values())):
        raise NotFused("a size of it is a symbol, and cuDNN's kernel is made for one size")
    group = _steps_of(attention, step_of, graph, facts)
    scores, result = step_of[attention.scores], step_of[attention.result]
    if not (_is_half(scores) and _is_half(result)):
        raise NotFused("its first product is not computed in half")
    if any(isinstance(step, Single) and step.rounds for step in (scores, result)):
        raise NotFused("its operands' gradients are to be float32, and the kernel's are half")
    inside = {value for step in group for node in nodes_of(step) for value in node.outputs}
    form, biases, masks = _form(attention, facts)
    reads = [_read_of(attention.operands.query, scores), _read_of(attention.operands.key, scores)]
    reads.append(_read_of(attention.operands.values, result))
    values = [*biases, *masks]
    if not inside.isdisjoint(values):
        raise NotFused("its bias or its mask is computed together with its scores")
    structs = [jax.ShapeDtypeStruct(r.value.aval.shape, r.dtype or r.value.dtype) for r in reads]
    types = [[jax.ShapeDtypeStruct(v.aval.shape, v.dtype) for v in vs] for vs in (biases, masks)]
    if refused := why_refused(form, *structs, *types):
        raise NotFused(f"JAX's cuDNN attention does not take it: {refused}")
    entering = dict.fromkeys(
        read.value
        for read in (
            *(read for step in group for read in step.reads),
            *reads,
            *map(_as_stored, values),
        )
        if read.value.held is None and read.value not in inside
    )
    return Fused(
        node=attention.result,
        plain=tuple(in_order(group, attention.result.outputs)),
        reads=tuple(Read(value, storage.dtype(value)) for value in entering),
        form=form,
        operands=tuple(reads),
        biases=tuple(map(_as_stored, biases)),
        masks=tuple(map(_as_stored, masks)),
        why=FUSED,
    )


def _as_stored(value: Value) -> Read:
    return Read(value, None)


def _is_half(step: Step) -> bool:
    return isinstance(step, Single) and step.arithmetic is Arithmetic.HALF


def _read_of(placed: Placed, step: Step) -> Read:
    (read,) = {read for read in step.reads if read.value is placed.value}
    return read


def _steps_of(
    attention: Attention, step_of: dict[Node, Step], graph: Graph, facts: Facts
) -> list[Step]:
    """Returns the steps that compute an attention and nothing else that is read."""
    dependent = [node for node in attention.nodes if not facts.dependent.isdisjoint(node.outputs)]
    group = list({id(step_of[node]): step_of[node] for node in dependent}.values())
    nodes = {node for step in group for node in nodes_of(step)}
    for step in group:
        if isinstance(step, (Nested, Fused)):
            raise NotFused("part of it is a function of its own")
    for value in (value for node in nodes for value in node.outputs):
        if value in attention.result.outputs:
            continue
        if value in graph.outputs or not nodes.issuperset(value.users):
            raise NotFused("its scores or its weights are read elsewhere too")
    return group


# The form.


def _form(attention: Attention, facts: Facts) -> tuple[Form, list[Value], list[Value]]:
    """Returns how cuDNN is to compute it, and the values of biases and masks."""
    sizes, keys = attention.sizes, (attention.operands.keys,)
    rows, batch, shared_heads, own_heads = _groups(attention)
    heads = (*shared_heads, *own_heads)
    groups = (batch, heads, rows, keys)
    masking = masking_of(attention.biases, attention.masks, groups, sizes)
    of_query, of_values = (batch, rows, heads), (batch, keys, shared_heads)
    form = Form(
        query=layout(attention.operands.query.axes, (*of_query, (WIDTH,)), sizes),
        key=layout(attention.operands.key.axes, (*of_values, (WIDTH,)), sizes),
        values=layout(attention.operands.values.axes, (*of_values, (VALUE_WIDTH,)), sizes),
        result=layout((*of_query, (VALUE_WIDTH,)), attention.operands.result, sizes),
        scale=attention.scale,
        is_causal=masking.is_causal,
        window=masking.window,
        biases=tuple((bias.placed.axes, bias.factor) for bias in masking.biases),
        masks=tuple((mask.placed.axes, mask.keeps) for mask in masking.masks),
        groups=groups,
        sizes=sizes,
        has_gradient=masking.has_gradient,
        is_alive=masking.is_alive,
    )
    biases = [bias.placed.value for bias in masking.biases]
    return form, biases, [mask.placed.value for mask in masking.masks]


def _groups(attention: Attention) -> tuple[Group, Group, Group, Group]:
    """Returns the atoms of rows, batch, heads shared with the keys, and heads of queries alone."""
    rows = attention.operands.rows
    if len(rows) > 2:
        raise NotFused("its queries have more than two axes that its keys have not")
    placed = [term.placed for terms in (attention.biases, attention.masks) for term in terms]
    masked = {atom for one in placed for axis in one.axes for atom in axis}
    # Of two one is the position; a mask differs along it, and not from head to head. In doubt it is
    # the longer one.
    row = min(rows, key=lambda atom: (atom not in masked, -attention.sizes[atom]), default=None)
    own_heads = tuple(atom for atom in rows if atom != row)
    batch = attention.operands.batch
    order = [atom for axis in attention.operands.query.axes for atom in axis]
    has_heads = len(batch) > 1 or (
        bool(batch) and row is not None and order.index(batch[0]) > order.index(row)
    )
    split = len(batch) - has_heads
    return (row,) if row is not None else (), batch[:split], batch[split:], own_heads
