"""Programs that are composed at random: operations of every category, and transformations.

A program is a list of steps on one array of shape (4, 8); steps are operations of every category
and whole transformations around the rest of the program. Each step maps numbers of size one to
numbers of size one and has a slope of at most about two, so that the error after n steps is
bounded: each step rounds a few times (relative error eps) and doubles what it is given at most.
"""

import contextlib
import contextvars
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jmp

WEIGHTS = jnp.linalg.qr(jax.random.normal(jax.random.key(0), (8, 8)))[0]  # keeps lengths
BIAS = jnp.linspace(-0.5, 0.5, 8)[None]
MASK = jnp.arange(8)[None] % 3 > 0
EVERY_ROW = jnp.array([3, 0, 2, 0])


@jax.custom_jvp
def halve(x):
    return x / 2


halve.defjvp(lambda primals, tangents: (halve(*primals), tangents[0] / 2))


@jax.custom_vjp
def clip_gradient(x):
    return x * 1.0


clip_gradient.defvjp(lambda x: (x * 1.0, None), lambda _, g: (jnp.clip(g, -1e3, 1e3),))

_product: contextvars.ContextVar[Callable[..., Any]] = contextvars.ContextVar(
    "product", default=jnp.matmul
)


def multiply(x, y):
    """The product of all programs, unless `multiplying_by` says another."""
    return _product.get()(x, y)


@contextlib.contextmanager
def multiplying_by(product):
    """In it programs that are traced multiply by another function."""
    token = _product.set(product)
    try:
        yield
    finally:
        _product.reset(token)


OPERATIONS = {
    "product": lambda x: multiply(x, WEIGHTS),
    "product back": lambda x: multiply(x, WEIGHTS.T),
    "product twice": lambda x: (multiply(x, WEIGHTS) + multiply(x, WEIGHTS.T)) / 2,
    "einsum": lambda x: jnp.einsum("ij,kj->ik", x, WEIGHTS),
    "bias": lambda x: x + BIAS,
    "scale": lambda x: x * (1 + BIAS),
    "residual": lambda x: (x + jnp.tanh(multiply(x, WEIGHTS))) / 2,
    "tanh": jnp.tanh,
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "softplus": jax.nn.softplus,
    "exp": lambda x: jnp.exp(-jnp.abs(x)),
    "log": lambda x: jnp.log1p(jnp.abs(x)),
    "sqrt": lambda x: jnp.sqrt(x * x + 1),
    "softmax": jax.nn.softmax,
    "masked softmax": lambda x: jax.nn.softmax(jnp.where(MASK, x, -1e9)),
    "log softmax": lambda x: jax.nn.log_softmax(x) / 4,
    "normalise": lambda x: x / jnp.sqrt((x * x).sum(1, keepdims=True) + 1),
    "centre": lambda x: x - x.mean(0, keepdims=True),
    "batch norm": lambda x: (x - x.mean(0, keepdims=True)) / jnp.sqrt(x.var(0, keepdims=True) + 1),
    "sum": lambda x: jnp.broadcast_to(x.sum(1, keepdims=True) / 8, x.shape),
    "cumsum": lambda x: jnp.cumsum(x, 1) / 8,
    "max": lambda x: x - jnp.max(x),
    "clip": lambda x: jnp.clip(x, -0.9, 0.9),
    "reverse": lambda x: x[:, ::-1],
    "reshape": lambda x: (x.reshape(8, 4) * 0.9).reshape(4, 8),
    "rows": lambda x: x[EVERY_ROW],
    "update": lambda x: x.at[1].set(0.25),
    "scatter": lambda x: x.at[EVERY_ROW].add(x) / 3,
    "apply": lambda x: x.at[EVERY_ROW].apply(jnp.tanh),
    "reduce": lambda x: x + lax.reduce(x, 0.0, lambda a, b: a + b / 8, (1,))[:, None] / 8,
    "segments": lambda x: jnp.zeros_like(x).at[EVERY_ROW].max(x),
    "concatenate": lambda x: jnp.concatenate([multiply(x[:2], WEIGHTS), jnp.tanh(x[2:])]),
    "pad": lambda x: jnp.pad(x, ((0, 0), (1, 0)))[:, :8],
    "halve": halve,
    "clip gradient": clip_gradient,
    "stop gradient": lambda x: (x + lax.stop_gradient(x)) / 2,
    "full precision": jmp.full_precision(lambda x: jnp.tanh(multiply(x, WEIGHTS))),
    "inner autocast": jmp.autocast(lambda x: jnp.tanh(multiply(x, WEIGHTS)), "mixed_bfloat16"),
    "constant": lambda x: x * 0.5 + jnp.ones((4, 8), x.dtype),
    "name": lambda x: checkpoint_name(x, "x"),
}

TRANSFORMATIONS = {
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "vmap": lambda f: lambda x: jax.vmap(lambda x: f(x))(x[None])[0],
    "scan": lambda f: lambda x: lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0],
    "scan of slices": lambda f: lambda x: lax.scan(lambda c, x: (c, f(x + c)), 0.0, x[None])[1][0],
    "closed over by a scan": lambda f: lambda x: lax.scan(
        lambda c, _: (f(x) + c / 2, None), x, None, length=2
    )[0],
    "cond": lambda f: lambda x: lax.cond(x.shape[0] == 4, f, jnp.tanh, x),
    "traced cond": lambda f: lambda x: lax.cond(jnp.isfinite(x[0, 0]), f, jnp.tanh, x),
    "loop": lambda f: lambda x: lax.fori_loop(0, 2, lambda _, x: f(x), x),
    "named": jax.named_call,
    "derivative": lambda f: lambda x: jnp.tanh(jax.grad(lambda x: f(x).sum() / 8)(x)),
}  # fmt: skip


def program(names):
    """The composition of the steps; a transformation wraps what comes after it."""
    if not names:
        return lambda x: x
    first, rest = names[0], program(names[1:])
    if first in OPERATIONS:
        return lambda x: rest(OPERATIONS[first](x))
    return TRANSFORMATIONS[first](rest)


def turns(names):
    """How often the steps run: a loop runs the rest twice."""
    if not names:
        return 0
    loops = ("scan", "loop", "closed over by a scan", "derivative")
    return 1 + turns(names[1:]) * (2 if names[0] in loops else 1)
