"""Masks by value: causal ones and windows need no array, and what masks nothing needs nothing."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jmp.autocasting._numbers import shape_of
from jmp.autocasting.attention._axes import Groups, Sizes, spread
from jmp.autocasting.attention._constants import constant_of
from jmp.autocasting.attention._matching import MASKED, Bias, Mask
from jmp.autocasting.attention._operands import NotFused

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
