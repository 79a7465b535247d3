"""Which attentions are fused, and their steps.

A fused attention is a step that holds the steps it replaces: they run where the program is lowered
for another platform than it was planned for, as they would without it. Its masks are told by their
values: causal ones and windows need no array, and what masks nothing needs nothing.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jmp.autocasting._emit import read_value
from jmp.autocasting._facts import Facts
from jmp.autocasting._graph import Graph, Node, Value
from jmp.autocasting._kinds import Level
from jmp.autocasting._numbers import has_symbols, shape_of
from jmp.autocasting._steps import (
    Arithmetic,
    Environment,
    Fused,
    Island,
    Read,
    Single,
    Step,
    nodes_of,
    runnable_order,
)
from jmp.autocasting.attention import _cudnn, _pallas
from jmp.autocasting.attention._axes import Axes, Labelled, Labels, Layout, Sizes, labels_of, spread
from jmp.autocasting.attention._constants import constant_of
from jmp.autocasting.attention._kernels import Booleans, Form, Masking
from jmp.autocasting.attention._matching import (
    LARGEST_FILL,
    VALUE_WIDTH,
    WIDTH,
    Attention,
    Bias,
    Mask,
    NotFused,
    find_attention,
)
from jmp.dtypes import FLOAT32


class Kernel(NamedTuple):
    """What computes attention on one platform."""

    platform: str  # as `jax.lax.platform_dependent` names it
    name: str
    attend: Callable[..., Any]
    limit_of: Callable[[Form, Value, np.dtype], str]  # what it refuses beside what tracing tells
    takes_constants: bool  # masks without inputs that are neither causal nor a window
    why: str


KERNELS = {
    "gpu": Kernel(
        "cuda", "JAX's cuDNN attention", _cudnn.attend, lambda *_: "", False,
        "attention: one fused cuDNN kernel where the program is lowered for CUDA",
    ),
    "tpu": Kernel(
        "tpu", "JAX's Pallas attention", _pallas.attend_on_tpu, _pallas.limit_of, True,
        "attention: one fused Pallas kernel where the program is lowered for a TPU",
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class FusedAttention:
    """An attention as one kernel.

    Attributes:
      attend: computes it, given the form, operands, biases and masks.
      operands: queries, keys and values.
    """

    attend: Callable[..., Any]
    form: Form
    operands: tuple[Read, ...]
    biases: tuple[Read, ...]
    masks: tuple[Read, ...]

    def bind(self, environment: Environment) -> Any:
        """Returns what the attention returns."""
        operands, biases, masks = (
            [read_value(read, environment) for read in reads]
            for reads in (self.operands, self.biases, self.masks)
        )
        return self.attend(self.form, *operands, biases, masks)


def fuse_attentions(steps: Sequence[Step], level: Level) -> list[Step]:
    """Returns the steps of a level, in any order, with fused attentions among them.

    The last product of an attention that is not fused says why.
    """
    request = level.context.request
    if request.settings.attention != "fused":
        return list(steps)
    kernel = KERNELS[request.target.platform]
    step_of = {node: step for step in steps for node in nodes_of(step)}
    fused: list[Fused] = []
    others: list[Step] = []
    for step in steps:
        if isinstance(step, Single) and step.arithmetic is Arithmetic.HALF:
            try:
                attention = find_attention(step.node)
                if attention is not None:
                    fused.append(_fused_step(attention, kernel, step_of, level))
            except NotFused as reason:
                note = f"attention, left as it is: {reason}"
                step = step._replace(notes=(*step.notes, note))
        others.append(step)
    replaced = {node for step in fused for node in nodes_of(step)}
    return [step for step in others if replaced.isdisjoint(nodes_of(step))] + list(fused)


def _fused_step(
    attention: Attention, kernel: Kernel, step_of: dict[Node, Step], level: Level
) -> Fused:
    storage = level.storage
    if has_symbols(tuple(attention.sizes.values())):
        raise NotFused("a size of it is a symbol, and a kernel is made for one size")
    group = _replaced_steps(attention, step_of, level.graph, storage.facts)
    scores, result = step_of[attention.scores], step_of[attention.result]
    if not (_is_half(scores) and _is_half(result)):
        raise NotFused("its first product is not computed in half")
    if any(read.dtype == FLOAT32 for step in (scores, result) for read in step.reads):
        raise NotFused("its operands' gradients are to be float32, and the kernel's are half")
    inside = {value for step in group for node in nodes_of(step) for value in node.outputs}
    form = _form(attention, kernel)
    query, key, values, *_ = attention.operands
    operands = _read_of(query, scores), _read_of(key, scores), _read_of(values, result)
    biases = tuple(Read(bias.source.value, None) for bias in form.masking.biases)
    masks = tuple(Read(mask.source.value, None) for mask in form.masking.masks)
    if any(read.value in inside for read in (*biases, *masks)):
        raise NotFused("its bias or its mask is computed together with its scores")
    if not all(_is_stored(read.value, step_of) for read in (*biases, *masks)):
        raise NotFused("its bias or its mask, before it is repeated, is inside of an island")
    limit = kernel.limit_of(form, query.value, storage.half)
    types = (*_types(operands), _types(biases), _types(masks))
    if refused := limit or why_refused(kernel, form, *types):
        raise NotFused(f"{kernel.name} does not take it: {refused}")
    reads = (*(read for step in group for read in step.reads), *operands, *biases, *masks)
    entering = dict.fromkeys(read.value for read in reads if read.value.held is None)
    return Fused(
        node=attention.result,
        plain=tuple(runnable_order(group, attention.result.outputs)),
        reads=tuple(Read(value, storage.dtype(value)) for value in entering if value not in inside),
        platform=kernel.platform,
        lowering=FusedAttention(kernel.attend, form, operands, biases, masks),
        why=kernel.why,
    )


def why_refused(kernel: Kernel, form: Form, *operands: Any) -> str:
    """Returns what JAX says against an attention of operands of these types; "" if nothing.

    Forward and backward pass are traced: JAX refuses some shapes only there, and all of them where
    it finds no cuDNN.
    """

    def with_gradient(query: Any, key: Any, values: Any, biases: Any, masks: Any) -> Any:
        function = functools.partial(kernel.attend, form, biases=biases, masks=masks)
        result, pull_back = jax.vjp(function, query, key, values)
        return pull_back(result)

    try:
        jax.eval_shape(with_gradient, *operands)
    except Exception as error:  # JAX raises what it finds: RuntimeError, ValueError, ...
        return " ".join(str(error).split()) or type(error).__name__
    return ""


def _is_half(step: Step) -> bool:
    return isinstance(step, Single) and step.arithmetic is Arithmetic.HALF


def _read_of(operand: Labelled, step: Step) -> Read:
    (read,) = {read for read in step.reads if read.value is operand.value}
    return read


def _is_stored(value: Value, step_of: dict[Node, Step]) -> bool:
    if value.producer is None or value.held is not None:
        return True
    step = step_of.get(value.producer)
    if isinstance(step, Island):
        return value in {write.value for write in step.writes}
    return step is not None


def _types(reads: Sequence[Read]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(r.value.aval.shape, r.dtype or r.value.dtype) for r in reads]


def _replaced_steps(
    attention: Attention, step_of: dict[Node, Step], graph: Graph, facts: Facts
) -> list[Single | Island]:
    """Returns the steps that compute an attention and nothing else that is read."""
    dependent = [node for node in attention.nodes if not facts.dependent.isdisjoint(node.outputs)]
    found = list({id(step_of[node]): step_of[node] for node in dependent}.values())
    group = [step for step in found if isinstance(step, (Single, Island))]
    nodes = {node for step in group for node in nodes_of(step)}
    if len(group) < len(found):
        raise NotFused("part of it is a function of its own")
    for value in (value for node in nodes for value in node.outputs):
        if value in attention.result.outputs:
            continue
        if value in graph.outputs or not nodes.issuperset(value.users):
            raise NotFused("its scores or its weights are read elsewhere too")
    return group


# The form.


def _form(attention: Attention, kernel: Kernel) -> Form:
    """Returns how a kernel is to compute an attention."""
    operands, sizes, keys = attention.operands, attention.sizes, (attention.operands.keys,)
    rows, batch, shared_heads, own_heads = _rows_and_heads(attention)
    heads = (*shared_heads, *own_heads)
    of_query, of_values = (batch, rows, heads), (batch, keys, shared_heads)
    bias_axes = (batch, heads, rows, keys)
    return Form(
        query=Layout.between(operands.query.axes, (*of_query, (WIDTH,)), sizes),
        key=Layout.between(operands.key.axes, (*of_values, (WIDTH,)), sizes),
        values=Layout.between(operands.values.axes, (*of_values, (VALUE_WIDTH,)), sizes),
        result=Layout.between((*of_query, (VALUE_WIDTH,)), operands.result, sizes),
        scale=attention.scale,
        masking=_masking_of(attention, bias_axes, kernel),
        bias_axes=bias_axes,
        sizes=sizes,
    )


def _rows_and_heads(attention: Attention) -> tuple[Labels, Labels, Labels, Labels]:
    """Returns the labels of rows, batch, heads shared with the keys, and heads of queries alone."""
    rows = attention.operands.rows
    if len(rows) > 2:
        raise NotFused("its queries have more than two axes that its keys have not")
    terms: list[Bias | Mask] = [*attention.biases, *attention.masks]
    masked = {label for term in terms for label in labels_of(term.source.axes)}
    # Of two one is the position; a mask differs along it, and not from head to head. In doubt it is
    # the longer one.
    row = min(rows, key=lambda label: (label not in masked, -attention.sizes[label]), default=None)
    own_heads = tuple(label for label in rows if label != row)
    batch = attention.operands.batch
    order = labels_of(attention.operands.query.axes)
    has_heads = len(batch) > 1 or (
        bool(batch) and row is not None and order.index(batch[0]) > order.index(row)
    )
    split = len(batch) - has_heads
    return (row,) if row is not None else (), batch[:split], batch[split:], own_heads


# Masks by value.


class _Known(NamedTuple):
    """What is known of a bias or a mask when the program is planned."""

    keeps: Booleans  # with the axes of a bias, of length one where it does not differ
    only_masks: bool  # the scores that it keeps stay as they are


def _masking_of(attention: Attention, bias_axes: Axes, kernel: Kernel) -> Masking:
    """Returns what the biases and masks of an attention do.

    Args:
      bias_axes: batch, heads, rows and keys.

    Raises: NotFused for what the fused kernel does not do.
    """
    terms: list[Bias | Mask] = [*attention.biases, *attention.masks]
    known = {term: _known(term, bias_axes, attention.sizes) for term in terms}
    kept: Booleans = np.ones((1, 1, 1, 1), bool)
    for found in filter(None, known.values()):
        kept = kept & found.keeps
    batch, _, rows, keys = bias_axes
    pattern = _pattern(kept, [attention.sizes[label] for label in (*rows, *keys)])
    constant = kept if pattern is None and kernel.takes_constants and len(kept) == 1 else None
    if pattern is not None or constant is not None:
        terms = [t for t in terms if (one := known[t]) is None or not one.only_masks]
    learned = [t for t in terms if isinstance(t, Bias) and t.source.value.varies]
    if learned and any(set(batch).intersection(labels_of(t.source.axes)) for t in terms):
        raise NotFused("cuDNN has no gradient of a bias that differs from example to example")
    is_known = all(known[t] is not None or t in learned for t in terms)
    sees_a_key = is_known and bool(kept.any(-1).all())
    fills = {mask.fill for mask in attention.masks}
    if not sees_a_key and -np.inf in fills:
        raise NotFused("its mask is of -inf: a row that is masked wholly is NaN")
    if not sees_a_key and len(fills) > 1:
        raise NotFused("its masks put in different numbers, and may mask a row wholly")
    is_causal, window = pattern or (False, None)
    return Masking(
        is_causal=is_causal,
        window=window,
        constant=constant,
        biases=[term for term in terms if isinstance(term, Bias)],
        masks=[term for term in terms if isinstance(term, Mask)],
        has_gradient=bool(learned),
        sees_a_key=sees_a_key,
    )


def _known(term: Bias | Mask, bias_axes: Axes, sizes: Sizes) -> _Known | None:
    value, axes = term.source
    numbers = constant_of(value)
    if numbers is None or numbers.ndim != len(shape_of(value)):
        return None
    axes = tuple(axis if n != 1 else () for axis, n in zip(axes, numbers.shape, strict=True))
    numbers = spread(numbers, axes, bias_axes, sizes)
    if isinstance(term, Mask):
        return _Known(numbers == term.keeps, only_masks=True)
    keeps = numbers.astype(np.float64) * term.factor > LARGEST_FILL
    return _Known(keeps, only_masks=not numbers[keeps].any())


def _pattern(kept: Booleans, lengths: Sequence[int]) -> tuple[bool, int | None] | None:
    """Returns whether a mask is causal, and its window; None if it is neither that nor empty."""
    if kept.all():
        return False, None
    if kept.shape[:2] != (1, 1) or kept.shape[2:] != tuple(lengths) or len(set(lengths)) != 1:
        return None
    kept, length = kept[0, 0], lengths[0]
    # How far the first key that a row sees is behind its own.
    window = int((np.arange(length) - kept.argmax(1)).max())
    seen = np.tri(length, dtype=bool) & ~np.tri(length, k=-window - 1, dtype=bool)
    if not (kept == seen).all():
        return None
    return True, None if window == length - 1 else window
