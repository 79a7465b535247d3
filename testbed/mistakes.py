"""The mistakes that are refused: the rows of `docs/mistakes.md`, and the names that they use.

A row of the page is a line of Python in the names of `names()`, the error that it raises, and the
message. `tests/project/test_mistakes.py` makes every mistake; `python -m docs.mistakes` writes the
errors and the messages again. Rows must be cheap: a mistake that is found before anything compiles.
"""

import functools
import re
from typing import NamedTuple

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training import dynamic_scale, train_state
from jax import lax

import jmp
from jmp import adapters, autocasting, diagnostics, transforms
from jmp.adapters import equinox, haiku, linen
from jmp.adapters import nnx as nnx_adapter
from testbed import ROOT

MODULES = {
    "adapters": adapters,
    "autocasting": autocasting,
    "diagnostics": diagnostics,
    "dynamic_scale": dynamic_scale,
    "eqx": eqx,
    "equinox": equinox,
    "haiku": haiku,
    "jax": jax,
    "jmp": jmp,
    "jnp": jnp,
    "lax": lax,
    "linen": linen,
    "nn": nn,
    "nnx_adapter": nnx_adapter,
    "np": np,
    "optax": optax,
    "transforms": transforms,
}


class Mistake(NamedTuple):
    """A row of the page: `code` raises `error`, with a message as `message` has it in Markdown."""

    code: str
    error: str
    message: str


class LinenModel(nn.Module):
    def setup(self):
        self.w = self.param("w", lambda key: jnp.ones((2, 2)))

    def __call__(self, x):
        return x @ self.w


class NnxModel(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones((2, 2)))

    def __call__(self, x):
        return x @ self.w

    def encode(self, x):
        return self(x)


class EquinoxModel(eqx.Module):
    w: jax.Array

    def __call__(self, x):
        return x @ self.w


class HaikuModel(hk.Module):
    def __call__(self, x):
        return x


def loss_fn(params, x):
    return jnp.mean(x @ params["w"])


def pair_fn(params, x):
    return loss_fn(params, x), x


def model_loss(model, x):
    return jnp.mean(model(x))


def model_pair(model, x):
    return jnp.mean(model(x)), x


async def coroutine(params, x):
    return loss_fn(params, x)


def changes_its_batch(params, batch):
    batch["x"] = batch["x"] * 2
    return loss_fn(params, batch["x"])


FUNCTIONS = {
    function.__name__: function
    for function in (loss_fn, pair_fn, model_loss, model_pair, coroutine, changes_its_batch)
}


@functools.cache
def names():
    """Returns what the lines of code may name."""
    params, x = {"w": np.ones((2, 2), np.float32)}, np.ones((2, 2), np.float32)
    scale = jmp.DynamicLossScale(8.0)
    adam = optax.adam(1e-3)
    tx = transforms.with_loss_scale(adam, scale)
    masters_tx = transforms.with_master_params(optax.sgd(0.1))
    nnx_model, eqx_model = NnxModel(), EquinoxModel(jnp.ones((2, 2)))
    opt_state = tx.init(params)
    report = diagnostics.range_report(x)
    return {
        **MODULES,
        **FUNCTIONS,
        "F16": "mixed_float16",
        "params": params,
        "half_params": {"w": np.ones((2, 2), np.float16)},
        "x": x,
        "scale": scale,
        "tx": tx,
        "masters_tx": masters_tx,
        "opt_state": opt_state,
        "chain_state": optax.chain(tx, optax.identity()).init(params),
        "adam": adam,
        "linen_model": LinenModel(),
        "nnx_model": nnx_model,
        "optimizer": nnx.Optimizer(nnx_model, tx, wrt=nnx.Param),
        "eqx_model": eqx_model,
        "eqx_state": tx.init(eqx.filter(eqx_model, eqx.is_inexact_array)),
        "network": hk.transform(lambda x: HaikuModel()(x)),
        "flax_state": train_state.TrainState.create(apply_fn=None, params=params, tx=tx),
        "eqx_mlp": eqx.nn.MLP(2, 2, 2, 1, key=jax.random.key(0)),
        "state": linen.TrainState.create(apply_fn=LinenModel().apply, params=params, tx=tx),
        "report": report,
        "long_text": "p=f32," * 200_000,
        "many": {f"layer_{i}": np.ones((2, 3), np.float32) for i in range(1000)},
    }


# The first tables of the page are of warnings and names: errors have sections of level three.
FIRST_ERROR = "\n### "
ROW = re.compile(r"^\| `([^`\n]+)` \| *(\w*) *\| *(.*?) *\|$", re.M)
PAGE = ROOT / "docs" / "mistakes.md"
_, _, _errors = PAGE.read_text().partition(FIRST_ERROR)
MISTAKES = [Mistake(*cells) for cells in ROW.findall(_errors)]
