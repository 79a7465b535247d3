"""Attention as cuDNN computes it: one kernel forward, two backward, and no scores in memory.

T. Dao, FlashAttention-2 (2023): scores are made tile by tile, in float32, and made again in the
backward pass from the rows' log-sum-exp.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jmp.autocasting.attention._axes import spread
from jmp.autocasting.attention._kernels import Kernel, KernelForm, differentiated_once
from jmp.autocasting.attention._matching import Mask

# This stands for minus infinity in a bias whose largest number in each row is zero. Its exponential
# is zero, and it stays finite in cuDNN, which multiplies by log2(e).
LOWEST = -(2.0**15)
# A row is masked wholly if no bias is above this: a score that is added to it is lost.
SEEN = -1e8


def attend_on_cuda(form: KernelForm, query: Any, key: Any, values: Any, terms: list[Any]) -> Any:
    """Returns the result of an attention, and which rows see a key; see `Kernel.attend`."""
    rows, keys, masking = query.shape[1], key.shape[1], form.masking
    bias, highest = _half_bias(form, terms, query, keys)
    # JAX refuses odd lengths in the backward pass. A key that is added comes after the last one, so
    # that a causal mask hides it; without one its bias does, or the number of keys that count.
    lengths = None
    if keys % 2 and not masking.is_causal and bias is None:
        lengths = tuple(jnp.full(len(query), n, jnp.int32) for n in (rows + rows % 2, keys))
    fused = _fused(form.scale, masking.is_causal, masking.window, bias is not None)
    even = (_evened(array, (1,)) for array in (query, key, values))
    result = fused(*even, bias, lengths)[:, :rows]
    return result, None if masking.sees_a_key or highest is None else highest > SEEN


def _evened(array: Any, axes: tuple[int, ...], fill: float = 0.0) -> Any:
    """Returns an array whose lengths along some axes are even."""
    added = [(0, array.shape[i] % 2 if i in axes else 0) for i in range(array.ndim)]
    return jnp.pad(array, added, constant_values=fill) if any(n for _, n in added) else array


def _total_bias(form: KernelForm, terms: list[Any]) -> Any:
    """Returns the float32 sum of biases, -inf for scores that a mask hides; None without either."""
    total = None
    for term, array in zip(form.masking.terms, terms, strict=True):
        if isinstance(term, Mask):
            unmasked = 0.0 if total is None else total
            total = jnp.where(form.kept_by(term, array), unmasked, -jnp.inf)
        else:
            scaled = jnp.asarray(array, jnp.float32) * term.factor
            bias = spread(scaled, term.source.axes, form.bias_axes)
            total = bias if total is None else total + bias
    return total


def _half_bias(form: KernelForm, terms: list[Any], query: Any, keys: int) -> tuple[Any, Any]:
    """Returns a bias as cuDNN takes it, and the largest number of each row that is not masked.

    cuDNN takes rows and keys in full, and heads if the bias has a gradient. The largest number of
    each row becomes zero, which changes no weight. The numbers that matter are then near zero,
    where a half type is exact.

    Returns: None twice without biases and masks.
    """
    bias, masking, rows = _total_bias(form, terms), form.masking, query.shape[1]
    if bias is None:
        return None, None
    seen = jax.lax.stop_gradient(bias)
    if masking.is_causal:
        seen = jnp.where(masking.kept(rows, keys), seen, -jnp.inf)
    highest = seen.max(-1, keepdims=True)
    if masking.has_bias:
        bias = bias - jnp.where(highest > SEEN, highest, 0)
    heads = query.shape[2] if masking.has_gradient else bias.shape[1]
    shape = (bias.shape[0], heads, rows, keys)
    half = jnp.broadcast_to(_within_range(bias), shape).astype(query.dtype)
    return _evened(half, (2, 3), LOWEST), highest


@jax.custom_jvp
def _within_range(bias: Any) -> Any:
    """Clips a bias to the range of any half type. Weights whose bias changes are zero."""
    return jnp.clip(bias, LOWEST, 0)


_within_range.defjvp(lambda primals, tangents: (_within_range(*primals), *tangents))


# The call, and how it is batched.


@functools.cache
def _fused(scale: float, is_causal: bool, window: int | None, has_bias: bool) -> Callable[..., Any]:
    def call(q: Any, k: Any, v: Any, bias: Any, lengths: Any) -> Any:
        of_rows, of_keys = lengths or (None, None)
        return jax.nn.dot_product_attention(
            q, k, v, bias, scale=scale, is_causal=is_causal,
            query_seq_lengths=of_rows, key_value_seq_lengths=of_keys,
            local_window_size=None if window is None else (window, 0), implementation="cudnn",
        )  # fmt: skip

    def forward(*operands: Any) -> Any:
        # The result of a batched function must have the same structure with and without the axis.
        # The function that `vjp` returns has not, so its leaves are returned, and joined here.
        def kept(*operands: Any) -> Any:
            result, pull_back = jax.vjp(call, *operands)
            return result, jax.tree.leaves(pull_back)

        _, pull_back = jax.eval_shape(lambda *operands: jax.vjp(call, *operands), *operands)
        result, leaves = _with_batching(kept, has_bias)(*operands)
        return result, jax.tree.unflatten(jax.tree.structure(pull_back), leaves)

    backward = _with_batching(lambda pull_back, cotangent: pull_back(cotangent), has_bias)
    return differentiated_once(_with_batching(call, has_bias), forward, backward)


def _with_batching(function: Callable[..., Any], has_bias: bool) -> Callable[..., Any]:
    """Returns a function that `jax.vmap` may batch along any of its operands.

    JAX batches its cuDNN attention only if queries, keys, values and lengths all have the axis. It
    does not batch one with a bias (it refuses most shapes, and adds up the gradients of all
    examples), so then examples are computed one after another.
    """
    if has_bias:
        return jax.custom_batching.sequential_vmap(function)
    batched = jax.custom_batching.custom_vmap(function)

    @batched.def_vmap
    def rule(size: int, has_axis: Any, *operands: Any) -> Any:
        with_axis = lambda x, has: x if has else jnp.broadcast_to(x, (size, *x.shape))
        operands = jax.tree.map(with_axis, operands, tuple(has_axis))
        results = _with_batching(jax.vmap(function), has_bias)(*operands)
        return results, jax.tree.map(lambda _: True, results)

    return batched


CUDNN = Kernel(
    platform="cuda",
    name="JAX's cuDNN attention",
    attend=attend_on_cuda,
    why="attention: one fused cuDNN kernel where the program is lowered for CUDA",
)
