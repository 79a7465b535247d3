"""How a kernel computes an attention: the arrays that it takes, and what it does to the scores.

`form_of` says it of an attention that was found, `attend` runs it. Masks are recognised by their
values: a causal mask and a window need no array, and a mask that masks nothing is dropped. Kernels
have one derivative: others raise an error when they are asked for (`differentiated_once`).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jmp.autocasting._emit import read_value
from jmp.autocasting._graph import Value
from jmp.autocasting._numbers import shape_of
from jmp.autocasting._steps import Environment, Read
from jmp.autocasting.attention._axes import Axes, Label, Labels, Layout, spread
from jmp.autocasting.attention._constants import constant_of
from jmp.autocasting.attention._matching import Attention, Bias, Mask, NotFused

Booleans = np.ndarray[Any, np.dtype[np.bool_]]

ONE_DIRECTION = (
    "autocast(attention='fused') got {what}: the fused kernel has only a first derivative in "
    "reverse mode (jax.grad, jax.vjp). Use attention='plain' for this function."
)


class Masking(NamedTuple):
    """How scores change between scale and softmax."""

    is_causal: bool
    window: int | None  # how many keys before its own a row sees, if it is causal
    terms: Sequence[Bias | Mask]  # what these two do not express; a kernel reads them
    has_gradient: bool  # a bias has one
    sees_a_key: bool  # each row is known to

    @property
    def has_bias(self) -> bool:
        """Whether a kernel reads a bias."""
        return any(isinstance(term, Bias) for term in self.terms)

    def kept(self, rows: int, keys: int) -> Any:
        """Returns which scores the causal mask keeps: (batch, heads, rows, keys)."""
        behind = jnp.arange(rows)[None, None, :, None] - jnp.arange(keys)[None, None, None]
        if not self.is_causal:
            return jnp.ones_like(behind, bool)
        return (behind >= 0) & (self.window is None or behind <= self.window)


class KernelForm(NamedTuple):
    """The arrays of one attention as a kernel takes them, and what it does to the scores.

    Queries have the shape (batch, rows, heads, width), keys and values (batch, keys, groups of
    heads, width), a bias or a mask (batch, heads, rows, keys).
    """

    query: Layout
    key: Layout
    values: Layout
    result: Layout
    scale: float
    masking: Masking
    bias_axes: Axes

    def kept_by(self, mask: Mask, array: Any) -> Any:
        """Returns which scores a mask keeps, of length one along axes that do not matter to it."""
        return spread(mask.kept(jnp.asarray(array)), mask.source.axes, self.bias_axes)


class Kernel(NamedTuple):
    """A kernel that computes attention on one platform."""

    platform: str  # as `jax.lax.platform_dependent` names it
    name: str
    # Given a form, its queries, keys and values, and the values of its terms. Returns the result,
    # and which rows see a key: (batch, heads, rows, 1). None if each is known to.
    attend: Callable[[KernelForm, Any, Any, Any, list[Any]], tuple[Any, Any]]
    why: str
    # Says why it does not take a form, given the queries and the dtype; "" if it may.
    limit_of: Callable[[KernelForm, Value, np.dtype], str] = lambda form, query, half: ""


# How it runs.


def attend_by(
    kernel: Kernel, form: KernelForm, reads: Sequence[Read], environment: Environment
) -> Any:
    """Returns the result of an attention.

    Args:
      reads: queries, keys, values, and the values of the form's terms.
    """
    return attend(kernel, form, [read_value(read, environment) for read in reads])


def attend(kernel: Kernel, form: KernelForm, arrays: Sequence[Any]) -> Any:
    """Returns the attention of half queries, keys and values, in their dtype.

    The result of a row whose keys are all masked is the average of the values, as in the plain
    program, whose scores are all equal there. Its gradient with respect to queries and keys is
    zero.

    Args:
      arrays: these three, and the values of the form's terms.
    """
    query, key, values, *terms = arrays
    query, key, values = form.query(query), form.key(key), form.values(values)
    result, sees_a_key = kernel.attend(form, query, key, values, terms)
    if sees_a_key is not None:
        sees_a_key = sees_a_key.swapaxes(1, 2)
        average = values.mean(1, keepdims=True, dtype=jnp.float32)
        average = jnp.repeat(average, result.shape[2] // values.shape[2], axis=2)
        # Rounded after it is repeated: so its gradient, a term for each row, adds up in float32.
        average = jnp.broadcast_to(average, result.shape).astype(result.dtype)
        result = jnp.where(sees_a_key, result, average)
    return form.result(result)


# The form of an attention.


def form_of(attention: Attention) -> KernelForm:
    """Returns how a kernel is to compute an attention."""
    row, batch, shared_heads, own_heads = _rows_and_heads(attention)
    heads, keys = (*shared_heads, *own_heads), (attention.keys,)
    of_query, of_key = (batch, row, heads), (batch, keys, shared_heads)
    (width,) = {*attention.query.labels} - {*attention.batch, *attention.rows}
    (value_width,) = {*attention.values.labels} - {*attention.batch, attention.keys}
    bias_axes = (batch, heads, row, keys)
    return KernelForm(
        query=Layout.between(attention.query.axes, (*of_query, (width,))),
        key=Layout.between(attention.key.axes, (*of_key, (width,))),
        values=Layout.between(attention.values.axes, (*of_key, (value_width,))),
        result=Layout.between((*of_query, (value_width,)), attention.result_axes),
        scale=attention.scale,
        masking=_masking_of(attention, bias_axes),
        bias_axes=bias_axes,
    )


def _rows_and_heads(attention: Attention) -> tuple[Labels, Labels, Labels, Labels]:
    """Returns the labels of rows, batch, heads shared with the keys, and heads of queries only."""
    rows, batch = attention.rows, attention.batch
    if len(rows) > 2:
        raise NotFused("its queries have more than two axes that its keys have not")
    masked = {label for term in attention.terms for label in term.source.labels}
    # One of two is the position: a mask differs along it, and not from head to head. Without a mask
    # the longer one is taken.
    row = min(rows, key=lambda label: (label not in masked, -label.length), default=None)
    own_heads = tuple(label for label in rows if label != row)
    order = attention.query.labels
    has_heads = len(batch) > 1 or (
        bool(batch) and row is not None and order.index(batch[0]) > order.index(row)
    )
    split = len(batch) - has_heads
    return (row,) if row is not None else (), batch[:split], batch[split:], own_heads


# Masks by value.


class _Known(NamedTuple):
    """The effect of a bias or a mask, if it is known when the program is planned."""

    keeps: Booleans  # with the axes of a bias, of length one along which it does not differ
    only_masks: bool  # the scores that it keeps stay as they are


def _masking_of(attention: Attention, bias_axes: Axes) -> Masking:
    """Returns how the biases and masks of an attention are applied.

    Args:
      bias_axes: batch, heads, rows and keys.

    Raises: NotFused if no kernel applies them so.
    """
    terms = attention.terms
    known = {term: _known(term, bias_axes) for term in terms}
    keeps = (found.keeps for found in known.values() if found is not None)
    kept: Booleans = functools.reduce(np.logical_and, keeps, np.ones((1, 1, 1, 1), bool))
    batch, _, rows, keys = bias_axes
    pattern = _pattern(kept, (*rows, *keys))
    if pattern is not None:
        terms = tuple(t for t in terms if (one := known[t]) is None or not one.only_masks)
    learned = [t for t in terms if isinstance(t, Bias) and t.source.value.varies]
    if learned and any(set(batch).intersection(t.source.labels) for t in terms):
        raise NotFused("a bias has a gradient, and the sum of all is not the same for each example")
    is_known = all(known[t] is not None or t in learned for t in terms)
    sees_a_key = is_known and bool(kept.any(-1).all())
    fills = {term.fill for term in attention.terms if isinstance(term, Mask)}
    if not sees_a_key and -np.inf in fills:
        raise NotFused("its mask is of -inf: a row that is masked wholly is NaN")
    if not sees_a_key and len(fills) > 1:
        raise NotFused("its masks put in different numbers, and may mask a row wholly")
    is_causal, window = pattern or (False, None)
    return Masking(is_causal, window, terms, bool(learned), sees_a_key)


def _known(term: Bias | Mask, bias_axes: Axes) -> _Known | None:
    """Returns the effect of a bias or a mask; None if it depends on an argument."""
    value, axes = term.source
    numbers = constant_of(value)
    if numbers is None or numbers.ndim != len(shape_of(value)):
        return None
    axes = tuple(axis if n != 1 else () for axis, n in zip(axes, numbers.shape, strict=True))
    numbers = spread(numbers, axes, bias_axes)
    keeps = term.kept(numbers)
    return _Known(keeps, only_masks=isinstance(term, Mask) or not numbers[keeps].any())


def _pattern(kept: Booleans, labels: Sequence[Label]) -> tuple[bool, int | None] | None:
    """Returns whether a mask is causal, and its window; None if it is neither that nor empty.

    Args:
      labels: of rows and keys.
    """
    if kept.all():
        return False, None
    lengths = tuple(label.length for label in labels)
    if kept.shape[:2] != (1, 1) or kept.shape[2:] != lengths or len(set(lengths)) != 1:
        return None
    kept, length = kept[0, 0], lengths[0]
    # How far the first key that a row sees is behind its own.
    window = int((np.arange(length) - kept.argmax(1)).max())
    seen = np.tri(length, dtype=bool) & ~np.tri(length, k=-window - 1, dtype=bool)
    if not (kept == seen).all():
        return None
    return True, None if window == length - 1 else window


# Derivatives that the kernels lack raise an error when they are asked for.


def differentiated_once(
    function: Callable[..., Any], forward: Callable[..., Any], backward: Callable[..., Any]
) -> Callable[..., Any]:
    """Returns a function with one derivative, in reverse mode; others raise.

    Args:
      forward, backward: as `jax.custom_vjp` takes them.
    """
    attention = jax.custom_vjp(function)
    attention.defvjp(_without_derivative(forward), _without_derivative(backward))
    return lambda *operands: attention(*jax.tree.map(_in_reverse_mode, operands))


def _without_derivative(function: Callable[..., Any]) -> Callable[..., Any]:
    wrapped = jax.custom_jvp(function)

    def refuse(primals: Any, tangents: Any) -> Any:
        raise NotImplementedError(ONE_DIRECTION.format(what="a second derivative"))

    wrapped.defjvp(refuse)
    return lambda *operands: wrapped(*operands)


@jax.custom_jvp
def _in_reverse_mode(array: Any) -> Any:
    """Returns the array; forward mode raises.

    A primitive returns its tangent that can be transposed and not run. Only forward mode leaves it
    in the program.
    """
    return array


@_in_reverse_mode.defjvp
def _hand_on(primals: Any, tangents: Any) -> Any:
    return primals[0], _tangent.bind(tangents[0])


def _refuse_forward_mode(*_: Any, **__: Any) -> Any:
    raise NotImplementedError(ONE_DIRECTION.format(what="forward-mode differentiation (jax.jvp)"))


_tangent = Primitive("reverse_mode_only")
_tangent.def_impl(_refuse_forward_mode)
_tangent.def_abstract_eval(lambda aval: aval)
ad.deflinear2(_tangent, lambda cotangent, _: [cotangent])
batching.defvectorized(_tangent)
mlir.register_lowering(_tangent, _refuse_forward_mode)
