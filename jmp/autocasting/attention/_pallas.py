"""Attention as JAX's Pallas kernels for TPUs compute it: one kernel forward, two backward.

Scores are computed tile by tile, in float32, and are never in memory. The splash kernel groups
heads and leaves out tiles that a causal mask or a window hides. It scales nothing: the queries are
multiplied by a scale that is a power of two, which is exact. For other scales the flash kernel is
used, which multiplies the float32 scores.
"""

import functools
import importlib
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp import _jax_compat
from jmp.autocasting._graph import Value
from jmp.autocasting.attention._kernels import Kernel, KernelForm, differentiated_once
from jmp.autocasting.attention._matching import Mask

LANES = 128  # a tile is a multiple of it
LARGEST_TILE = 512

IN_SHARD_MAP = "put `jax.shard_map(..., check_vma=False)` around the attention"

OfHeads = Callable[..., Any]  # of queries, keys, values and segments, heads before positions


def attend_on_tpu(form: KernelForm, query: Any, key: Any, values: Any, terms: list[Any]) -> Any:
    """Returns the result of an attention, and which rows see a key; see `Kernel.attend`.

    Args:
      terms: the values of the masks. There are no biases.
    """
    (batch, rows), keys = query.shape[:2], key.shape[1]
    pairs = zip(form.masking.terms, terms, strict=True)
    kept = [form.kept_by(mask, array) for mask, array in pairs if isinstance(mask, Mask)]
    # Queries are in one segment, and so are the keys that they may see.
    segments = None
    of_keys = [one for one in kept if one.shape[2] == 1]
    if of_keys:
        seen = jnp.broadcast_to(_all(of_keys), (batch, 1, 1, keys))[:, 0, 0]
        segments = jnp.ones((batch, rows), jnp.int32), seen.astype(jnp.int32)
    kernel = _splash(form, query, key) if _is_exact(form.scale) else _flash(form, query, key)
    heads = (array.swapaxes(1, 2) for array in (query, key, values))
    result = _with_one_derivative(kernel)(*heads, segments).swapaxes(1, 2)
    if not kept:
        return result, None
    return result, _all([form.masking.kept(rows, keys), *kept]).any(-1, keepdims=True)


def _all(masks: list[Any]) -> Any:
    return functools.reduce(jnp.logical_and, masks)


def _is_exact(scale: float) -> bool:
    return math.frexp(scale)[0] == 0.5


# The kernels. Their modules are imported when one is used, because that takes a while.


def _splash(form: KernelForm, query: Any, key: Any) -> OfHeads:
    kernels = _module("splash_attention.splash_attention_kernel")
    masks = _module("splash_attention.splash_attention_mask")
    shape = rows, keys = query.shape[1], key.shape[1]
    q, k = _tile(rows), _tile(keys)
    # A narrow head that is the last axis is padded to a whole lane, in memory too.
    is_narrow = query.shape[3] < LANES
    minor = kernels.QKVLayout.SEQ_MINOR if is_narrow else kernels.QKVLayout.HEAD_DIM_MINOR
    tiles = kernels.BlockSizes(
        block_q=q, block_kv=k, block_q_dkv=q, block_kv_dkv=k, block_q_dq=q, block_kv_dq=k,
        q_layout=minor, k_layout=minor, v_layout=minor,
    )  # fmt: skip
    local = masks.LocalMask(shape, (form.masking.window, 0), offset=0)
    of_a_head = local if form.masking.is_causal else masks.FullMask(shape)
    mask = masks.MultiHeadMask([of_a_head] * query.shape[2])
    with jax.ensure_compile_time_eval():  # which tiles of the mask are empty, and which are full
        kernel = kernels.make_splash_mha(mask, head_shards=1, q_seq_shards=1, block_sizes=tiles)

    def run(q: Any, k: Any, v: Any, segments: Any) -> Any:
        ids = None if segments is None else kernels.SegmentIds(*segments)
        return jax.vmap(kernel)(q * form.scale, k, v, ids)

    return run


def _flash(form: KernelForm, query: Any, key: Any) -> OfHeads:
    kernels = _module("flash_attention")
    q, k = _tile(query.shape[1]), _tile(key.shape[1])
    tiles = kernels.BlockSizes(
        block_q=q, block_k_major=k, block_k=k, block_b=1,
        block_q_major_dkv=q, block_k_major_dkv=k, block_k_dkv=k, block_q_dkv=q,
        block_k_major_dq=k, block_k_dq=k, block_q_dq=q,
    )  # fmt: skip
    times = query.shape[2] // key.shape[2]

    def repeated(array: Any) -> Any:  # in float32, so that gradients add up in it
        return jnp.repeat(array.astype(jnp.float32), times, axis=1).astype(array.dtype)

    def run(q: Any, k: Any, v: Any, segments: Any) -> Any:
        ids = None if segments is None else kernels.SegmentIds(*segments)
        return kernels.flash_attention(
            q, repeated(k), repeated(v), segment_ids=ids,
            causal=form.masking.is_causal, sm_scale=form.scale, block_sizes=tiles,
        )  # fmt: skip

    return run


def _module(name: str) -> Any:
    return importlib.import_module(f"jax.experimental.pallas.ops.tpu.{name}")


def _tile(length: int) -> int:
    return next(n for n in range(LARGEST_TILE, 0, -LANES) if length % n == 0)


def _with_one_derivative(kernel: OfHeads) -> OfHeads:
    """Returns a kernel with one derivative, in reverse mode.

    It is traced without a default precision, because Mosaic takes none above the lowest for half
    operands.
    """

    def traced(function: OfHeads) -> OfHeads:
        def run(*operands: Any) -> Any:
            with jax.default_matmul_precision(None):
                return function(*operands)

        return run

    forward = traced(lambda *operands: jax.vjp(kernel, *operands))
    backward = traced(lambda pull_back, cotangent: pull_back(cotangent))
    return differentiated_once(traced(kernel), forward, backward)


# Forms that the kernels do not compute.


def limit_of(form: KernelForm, query: Value, half: np.dtype) -> str:
    """Returns why the kernels do not take an attention computed in `half`; "" if they may."""
    masking = form.masking
    rows, keys = form.query.shape[1], form.key.shape[1]
    if half != jnp.bfloat16:
        return "a TPU multiplies bfloat16, and no float16"
    if rows % LANES or keys % LANES:
        return f"it has {rows} queries and {keys} keys; both have to be multiples of {LANES}"
    if masking.has_bias:
        return "it reads a bias as an array as large as the scores"
    of_heads, of_rows, of_keys = (set(axis) for axis in form.bias_axes[1:])
    for mask in masking.terms:
        labels = set(mask.source.labels)
        if labels & of_heads or (labels & of_rows and labels & of_keys):
            return "its mask is neither causal, nor a window, nor one of keys or queries"
    if not _is_exact(form.scale) and masking.window is not None:
        return "the kernel for scales that are no powers of two has only causal and padding masks"
    if _jax_compat.is_divided(query):
        return f"XLA cannot divide it among devices; {IN_SHARD_MAP}"
    if _jax_compat.varying_axes(query):
        return f"it does not say what varies along a mesh; {IN_SHARD_MAP}"
    return ""


PALLAS = Kernel(
    platform="tpu",
    name="JAX's Pallas attention",
    attend=attend_on_tpu,
    limit_of=limit_of,
    why="attention: one fused Pallas kernel where the program is lowered for a TPU",
)
