"""Attentions of programs, what autocast makes of them, and the transformations they stand under."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jmp.autocasting._autocast import make_program
from jmp.autocasting._steps import Fused, Nested, Plan, Single
from testbed.machines.gpus import as_if_cudnn


def plans_of(plan):
    yield plan
    for step in plan.steps:
        for inside in step.insides if isinstance(step, Nested) else ():
            if isinstance(inside, Plan):
                yield from plans_of(inside)


def attentions(function, *args, policy="mixed_float16", **options):
    """Returns the forms of a function's fused attentions, and why others are not fused."""
    with as_if_cudnn():
        plan = make_program(function, policy, attention="fused", **options).trace(args, {}).plan
    plans = list(plans_of(plan))
    fused = [step for p in plans for step in p.steps if isinstance(step, Fused)]
    forms = [step.lowering.args[1] for step in fused]
    singles = [step for p in plans for step in p.steps if isinstance(step, Single)]
    return forms, [note for step in singles for note in step.notes]


def lowered(function, *args, platform):
    """A function as it is lowered for TPUs, or for GPUs ("cuda") with cuDNN."""
    with as_if_cudnn():
        traced = jax.jit(function).trace(*args)
        return traced.lower(lowering_platforms=(platform,)).as_text()


LOWEST = float(np.finfo(np.float32).min)
attention_of_jax = jax.nn.dot_product_attention


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


def scores(q, k, scale=0.25):
    return jnp.einsum("bqhd,bkhd->bhqk", q, k) * scale


def weigh(weights, v):
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def attention(change=lambda x: x, after=lambda weights: weights, scale=0.25):
    """Returns an attention with changed scores.

    Args:
      change: a function of the scores and of what the attention is given besides queries, keys and
        values.
      after: a function of the weights.
      scale: the factor of the scores.
    """

    def attend(q, k, v, *others):
        return weigh(after(jax.nn.softmax(change(scores(q, k, scale), *others))), v)

    return attend


def hidden(x, mask, fill=-1e9):
    """Returns scores with a number in place of those that a mask of keys hides."""
    return jnp.where(mask[:, None, None], x, fill)


def with_mask_of_keys(q, k, v, mask):
    return attention_of_jax(q, k, v, mask=mask[:, None, None])


def squares(run):
    return lambda *args: (run(*args) ** 2).sum()


def mesh_of_four():
    auto = (AxisType.Auto,) * 2
    return jax.make_mesh((2, 2), ("batch", "heads"), auto, devices=jax.devices("cpu")[:4])


def sharded(run, check_vma):
    axes = P("batch", None, "heads")
    places = {"in_specs": axes, "out_specs": axes, "check_vma": check_vma}
    return jax.shard_map(run, mesh=mesh_of_four(), **places)


def transformed(autocast, attend, arrays, masks, kernels, check_vma):
    """Fused attentions under JAX's transformations.

    Args:
      autocast: a function that fuses the attentions of another.
      attend: a function of queries, keys and values.
      arrays: queries, keys and values.
      masks: two masks of keys.
      kernels: how many a gradient has.
      check_vma: whether a shard_map checks along which axes values differ.

    Returns: by name a function, its arguments, and how many kernels it has.
    """
    q, k, v = arrays
    stacked = [jnp.stack([x, x]) for x in arrays]
    fused, gradient = autocast(attend), jax.grad(squares(autocast(attend)))
    width = q.shape[-1]

    def turns(x):
        body = lambda carry, w: (carry + attend(carry @ w, carry, carry), None)
        return (jax.lax.scan(body, x, jnp.ones((3, width, width)))[0] ** 2).sum()

    with_masks = jax.vmap(jax.grad(squares(autocast(with_mask_of_keys))))
    inside = autocast(jax.checkpoint(attend))
    outside_shards = sharded(autocast(attend), check_vma)
    inside_shards = autocast(sharded(attend, check_vma))
    return {
        "value": (fused, arrays, 1),
        "grad": (gradient, arrays, kernels),
        "vmap of grad": (jax.vmap(gradient), stacked, kernels),
        "vmap of queries alone": (
            jax.vmap(gradient, (0, None, None)), (stacked[0], k, v), kernels),
        "vmap of masks": (with_masks, (*stacked, jnp.stack(masks)), kernels),
        "grad of vmap": (jax.grad(squares(jax.vmap(fused))), stacked, kernels),
        "checkpoint outside": (jax.grad(jax.checkpoint(squares(fused))), arrays, kernels),
        "checkpoint inside": (jax.grad(squares(inside)), arrays, kernels + 1),
        "scan": (jax.grad(autocast(turns)), (q,), kernels),
        "shard_map outside": (jax.grad(squares(outside_shards)), arrays, kernels),
        "shard_map inside": (jax.grad(squares(inside_shards)), arrays, kernels),
    }  # fmt: skip
