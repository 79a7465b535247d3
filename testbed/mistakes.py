"""The mistakes that are refused, as a table: a line of code, its error, and words of its message.

`tests/project/test_mistakes.py` makes every one of them; `docs/mistakes.py` prints the page. A row
is a line of Python in the names of `names()`, and `docs/mistakes.md` says what they stand for. Rows
must be cheap: a mistake that is found before anything compiles.
"""

import functools
import types
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
    """A row: `code` raises `error` with a message that has `words`, the way out, in it."""

    code: str
    error: type[Exception]
    words: str


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
        "torch": types.SimpleNamespace(state_dict=jmp.to_torch_state_dict(jmp.torch_loss_scale())),
    }


def _rows(error, *pairs):
    return [Mistake(code, error, words) for code, words in pairs]


MISTAKES: dict[str, list[Mistake]] = {
    "Policies": [
        *_rows(
            ValueError,
            ("jmp.get_policy('fp16')", "Did you mean 'mixed_float16' or 'float16'?"),
            ("jmp.get_policy('16-mixed')", "Did you mean 'mixed_float16'?"),
            ("jmp.get_policy('bf16-mixed')", "Did you mean 'mixed_bfloat16'?"),
            ("jmp.get_policy('mixed_fp16')", "Did you mean 'mixed_float16'?"),
            ("jmp.get_policy('mixed_bf16')", "Did you mean 'mixed_bfloat16'?"),
            ("jmp.get_policy('amp')", "Did you mean 'mixed_float16' or 'mixed_bfloat16'?"),
            ("jmp.get_policy('o1')", "Did you mean 'O1'?"),
            ("jmp.get_policy('O4')", "Did you mean 'mixed_bfloat16'?"),
            ("jmp.get_policy('float 16')", "Did you mean 'float16'?"),
            ("jmp.get_policy('torch.float16')", "Did you mean 'float16'?"),
            ("jmp.get_policy('tf32')", "Did you mean 'float32'?"),
            ("jmp.get_policy('no')", "Did you mean 'float32'?"),
            ("jmp.get_policy('mixed_float9')", "Did you mean 'mixed_float8'?"),
            ("jmp.get_policy('fp8')", "Did you mean 'mixed_float8' or 'f8_e4m3fn'?"),
            ("jmp.get_policy('mixed_fp8')", "Did you mean 'mixed_float8'?"),
            ("jmp.get_policy('mixed_float32')", "Did you mean 'float32'?"),
            ("jmp.get_policy('mixed_bfloat16,m=fp8')", "Did you mean 'f8_e4m3fn'?"),
            (
                "jmp.Policy('f32', 'bf16', 'f32', product_dtype='bf16')",
                "expected 'f8' (float8_e4m3fn), or None",
            ),
            (
                "jmp.Policy('f32', 'bf16', 'f32', result_dtype='bf16')",
                "expected 'f32' (float32), in which half products are added up, or None",
            ),
            (
                "jmp.autocast(loss_fn, 'mixed_float8,result=f32')",
                "rules=[('head', 'mixed_bfloat16,result=f32')]",
            ),
            (
                "jmp.autocast(loss_fn, 'mixed_float16,m=f8')",
                "expected bfloat16, which holds their scales",
            ),
            (
                "jmp.autocast(loss_fn, 'mixed_float8', float8='attention')",
                "expected one of ('weights', 'all')",
            ),
            ("jmp.get_policy('int8')", "Expected 'half' (the platform's half precision) or one of"),
            ("jmp.get_policy('')", "Named policies are mixed_float16"),
            ("jmp.get_policy('p=f32,c=fp16')", "Did you mean 'float16'?"),
            (
                "jmp.get_policy('p=f32,c=int8')",
                "Expected 'half' (the platform's half precision) or one of",
            ),
            ("jmp.get_policy('p=f32,x=f16')", "one of p, params, c, compute, o, output, r, reduce"),
            ("jmp.get_policy('param_dtype=f32')", "Did you mean 'params'?"),
            ("jmp.get_policy('p=f32,f16')", "written 'p=f32,c=f16,o=f32'"),
            (
                "jmp.get_policy('p=f32,params=f16')",
                "give each of param, compute, output, reduce, product and result",
            ),
            ("jmp.get_policy('mixed_float16,c=bf16')", "gives compute_dtype twice"),
            ("jmp.get_policy('mixed_float16,r=f8_e5m2')", "in which nothing can be added up"),
            ("jmp.get_policy(long_text)", "(1,200,000 characters)"),
        ),
        *_rows(
            TypeError,
            ("jmp.get_policy(jnp.float16)", "expected a Policy or text such as 'mixed_float16'"),
            ("jmp.get_policy(16)", "get_policy got 16; expected a Policy or text"),
            ("jmp.get_policy(None)", "expected a Policy or text"),
            ("jmp.get_policy(('f32', 'f16', 'f32'))", "expected a Policy or text"),
            ("jmp.get_policy({'compute': 'f16'})", "{'compute': 'f16'}; expected a Policy or text"),
            ("jmp.get_policy(many)", "and 996 more}; expected a Policy or text"),
        ),
    ],
    "Dtypes and casts": [
        *_rows(
            TypeError,
            ("jmp.Policy(None, 'f16', 'f32')", "param_dtype got None; expected a real floating"),
            ("jmp.Policy('f32', 3.5, 'f32')", "compute_dtype got 3.5; expected a real floating"),
            ("jmp.Policy('f32', 16, 'f32')", "compute_dtype got 16; expected a real floating"),
            ("jmp.Policy('f32', ['f16'], 'f32')", "compute_dtype got ['f16']; expected"),
            ("jmp.Policy('f32', x, 'f32')", "compute_dtype got float32[2,2]; expected"),
            ("jmp.cast_floating('bfloat16', params)", "{'w': float32[2,2]}; expected a real"),
            ("jmp.cast_floating(params, None)", "dtype got None; expected a real floating dtype"),
        ),
        *_rows(
            ValueError,
            ("jmp.Policy('f32', jnp.int8, 'f32')", "compute_dtype got the class int8; expected"),
            ("jmp.Policy('f32', bool, 'f32')", "compute_dtype got the class bool; expected"),
            ("jmp.Policy('f32', complex, 'f32')", "expected a real floating dtype or its name"),
            ("jmp.Policy('f32', 'fp16', 'f32')", "Did you mean 'float16'?"),
            (
                "jmp.Policy('f32', 'mixed_float16', 'f32')",
                "Expected 'half' (the platform's half precision) or one of",
            ),
            ("jmp.Policy('f32', 'f16', 'f32', reduce_dtype=int)", "reduce_dtype got the class int"),
            ("jmp.get_policy('f16').with_output_dtype(int)", "output_dtype got the class int"),
            (
                "jmp.cast_floating(params, 'half_precision')",
                "Expected 'half' (the platform's half precision) or one of",
            ),
            ("jmp.cast_floating(params, 'double')", "Did you mean 'float64'?"),
            ("jmp.cast_floating(params, jnp.int32)", "expected a real floating dtype"),
        ),
    ],
    "Several devices": [
        *_rows(
            TypeError,
            (
                "jmp.gather_params(params, 'data', None)",
                "dtype got None; expected a real floating dtype",
            ),
            ("jmp.gather_params(params, 3, 'f16')", "got 3 for a spec; expected an axis' name"),
        ),
        *_rows(
            ValueError,
            (
                "jmp.gather_params(params, 'data', 'f16')",
                "jmp.autocast(fun, 'mixed_float16,r=f32')",
            ),
            ("jmp.gather_params(params, 'data', 'f8_e5m2')", "expected float16, bfloat16, float32"),
            (
                "jmp.gather_params(params, 'data', 'f16', int)",
                "reduce_dtype got the class int; expected",
            ),
            ("jmp.gather_params(params, {'v': 'data'}, 'f16')", "with the parameters' structure"),
        ),
    ],
    "select_tree": [
        *_rows(
            AssertionError,
            ("jmp.select_tree(1, params, params)", "expected boolean scalar, got int32"),
            ("jmp.select_tree(np.ones(2, bool), params, params)", "got bool of shape (2,)"),
        ),
        *_rows(
            ValueError,
            ("jmp.select_tree(True, {'a': x}, {'b': x})", "only the first has ['a']"),
            ("jmp.select_tree(True, many, params)", "and 997 more; only the second has ['w']"),
            ("jmp.select_tree(True, (x, x), [x, x])", "same paths, other containers"),
            ("jmp.select_tree(True, x, x[0])", "differ at the root: float32[2,2] and float32[2]"),
            ("jmp.select_tree(True, params, half_params)", "Cast them to one dtype and shape"),
        ),
    ],
    "Rules": [
        *_rows(
            TypeError,
            ("jmp.PolicyRules('head*', 'f32')", "Got rules='head*'; expected a list of pairs"),
            ("jmp.PolicyRules(('head*', 'f32'), F16)", "rules=[('head*', 'float32')]"),
            (
                "jmp.PolicyRules({'head*': 'f32'}, F16)",
                "Got rules={'head*': 'f32'}; expected a list",
            ),
            ("jmp.PolicyRules([['head*', 'f32']], F16)", "expected a pair (target, policy)"),
            ("jmp.PolicyRules([('head', 'f32', 'f16')], F16)", "expected a pair (target, policy)"),
            ("jmp.PolicyRules(3, F16)", "Got rules=3; expected a list of pairs"),
            ("jmp.PolicyRules([(3, 'f32')], F16)", "expected a glob such as 'head*'"),
            ("jmp.PolicyRules([(nn.Dense(3), 'f32')], F16)", "a Dense; expected a glob"),
            ("jmp.PolicyRules([('head', None)], F16)", "get_policy got None; expected a Policy"),
            (
                "jmp.autocast(loss_fn, F16, rules='head')",
                "Got rules='head'; expected a list of pairs",
            ),
            ("jmp.autocast(loss_fn, F16, rules=[(nn.Dense, 'f32')])", "name scopes, not classes"),
            ("jmp.autocast(loss_fn, F16, rules=3)", "Got rules=3; expected a list of pairs"),
        ),
        *_rows(
            ValueError,
            ("jmp.PolicyRules([('head', 'fp32')], F16)", "Did you mean 'float32'?"),
            ("jmp.PolicyRules([], 'mixed_fp16')", "Did you mean 'mixed_float16'?"),
            (
                "linen.autocast(linen_model.apply, F16, rules=[('*', 'bf16')])",
                "one half dtype a model",
            ),
            (
                "linen.autocast(linen_model.apply, F16, rules=[('*', 'f32,r=f32')])",
                "expected one reduce_dtype a model",
            ),
        ),
    ],
    "Loss scales": [
        *_rows(
            ValueError,
            ("jmp.StaticLossScale(-8)", "expected a finite number that is not negative"),
            ("jmp.StaticLossScale(np.inf)", "such as 512"),
            ("jmp.StaticLossScale(np.nan)", "got nan; expected a finite number"),
            ("jmp.StaticLossScale(10**400)", "an int of 1,329 bits; expected a finite number"),
            ("jmp.StaticLossScale(0).scale(1.0)", "To switch loss scaling off use NoOpLossScale()"),
            ("jmp.StaticLossScale(0).unscale(params)", "expected a positive number such as 512"),
            ("jmp.DynamicLossScale(0.0)", "To switch loss scaling off use NoOpLossScale()"),
            ("jmp.DynamicLossScale(-2.0**15)", "expected a positive finite number"),
            ("jmp.DynamicLossScale(np.float32('nan'))", "float32[] of value nan; expected a pos"),
            ("jmp.DynamicLossScale(period=0)", "expected a number of steps of at least 1"),
            ("jmp.DynamicLossScale(period=np.nan)", "period got nan; expected a number of steps"),
            ("jmp.DynamicLossScale(factor=0.5)", "expected a finite number above 1, such as 2"),
            ("jmp.DynamicLossScale(growth_factor=1.0)", "growth_factor got 1.0; expected"),
            ("jmp.DynamicLossScale(backoff_factor=2.0)", "expected a number between 0 and 1"),
            ("jmp.DynamicLossScale(min_loss_scale=-1.0)", "expected a number that is not negative"),
            ("jmp.DynamicLossScale(max_loss_scale=0.0)", "expected a ceiling above zero"),
            (
                "jmp.DynamicLossScale(min_loss_scale=32.0, max_loss_scale=8.0)",
                "expected a floor below the ceiling",
            ),
            ("jmp.DynamicLossScale(8.0, counter=-1)", "expected a count from 0 to 2**31 - 1"),
            ("jmp.DynamicLossScale(8.0, counter=2**31)", "expected a count from 0 to 2**31 - 1"),
            ("jmp.HysteresisLossScale(hysteresis=0)", "expected a whole number of"),
            ("jmp.HysteresisLossScale(hysteresis=2**31)", "fewer than 2**31"),
            ("jmp.HysteresisLossScale(hysteresis=1.5)", "expected a whole number"),
            ("scale.adjust(np.ones(3, bool))", "one flag for all gradients"),
        ),
        *_rows(
            TypeError,
            ("jmp.StaticLossScale('512')", "StaticLossScale got '512'; expected one number"),
            ("jmp.StaticLossScale(x)", "float32[2,2]; expected one number"),
            ("jmp.StaticLossScale(None)", "expected one number"),
            ("jmp.DynamicLossScale('dynamic')", "expected a number such as 2.0**15"),
            ("jmp.DynamicLossScale([2.0**15])", "expected a number such as 2.0**15"),
            ("jmp.DynamicLossScale(scale)", "expected a number such as 2.0**15"),
            ("jmp.DynamicLossScale(8.0, many)", "expected a count from 0 to 2**31 - 1"),
            ("jmp.DynamicLossScale(8.0, '2000')", "expected a count from 0 to 2**31 - 1"),
            ("jmp.DynamicLossScale(True)", "loss_scale got True; expected a number"),
            ("jmp.DynamicLossScale(8.0, period='2000')", "period got '2000'; expected one number"),
            ("jmp.DynamicLossScale(8.0, factor=params)", "expected one number"),
            ("scale.adjust(1)", "expected a boolean, as jmp.all_finite(gradients) returns it"),
            ("scale.adjust(None)", "adjust got None; expected a boolean"),
            ("scale.adjust(params)", "adjust got {'w': float32[2,2]}; expected a boolean"),
            ("jmp.torch_loss_scale(2.0**16)", "write torch_loss_scale(init_scale=2.0**16)"),
            ("jmp.torch_loss_scale('cuda')", "enabled='cuda'; expected True or False"),
            ("jmp.apex_loss_scale('dynamic')", "write jmp.DynamicLossScale(2.0**16)"),
            ("jmp.fastai_loss_scale(512)", "enabled=512; expected True or False"),
            ("jmp.deepmind_loss_scale(None)", "enabled=None; expected True or False"),
        ),
        *_rows(
            ValueError,
            ("jmp.torch_loss_scale(growth_factor=0.5)", "growth_factor got 0.5; expected"),
            ("jmp.torch_loss_scale(backoff_factor=2.0)", "backoff_factor got 2.0; expected"),
            ("jmp.torch_loss_scale(init_scale=0.0, enabled=False)", "expected a positive finite"),
        ),
    ],
    "torch's state dictionaries": [
        *_rows(
            TypeError,
            ("jmp.to_torch_state_dict(jmp.StaticLossScale(8))", "GradScaler has no static one"),
            ("jmp.to_torch_state_dict(torch.state_dict)", "expected a dynamic or no-op scale"),
            ("jmp.to_torch_state_dict(opt_state)", "expected a dynamic or no-op scale"),
            ("jmp.from_torch_state_dict(torch)", "GradScaler's state_dict() returns"),
            ("jmp.from_torch_state_dict(None)", "GradScaler's state_dict() returns"),
            (
                "jmp.from_torch_state_dict(torch.state_dict, like=jmp.StaticLossScale(8))",
                "expected a dynamic or no-op scale, or no `like`",
            ),
            ("jmp.from_torch_state_dict(torch.state_dict, like='hysteresis')", "or no `like`"),
        ),
        *_rows(
            ValueError,
            ("jmp.from_torch_state_dict({'scale': 8.0})", "expected torch GradScaler's"),
            ("jmp.from_torch_state_dict(many)", "expected torch GradScaler's"),
            (
                "jmp.from_torch_state_dict({**torch.state_dict, 'scale': 0.0})",
                "expected a positive finite number",
            ),
            (
                "jmp.from_torch_state_dict({**torch.state_dict, 'growth_interval': 0})",
                "expected a number of steps of at least 1",
            ),
        ),
    ],
    "scaled_value_and_grad": [
        *_rows(
            TypeError,
            ("jmp.scaled_value_and_grad(loss_fn, opt_state)", "loss_scale_state(opt_state).loss_s"),
            ("jmp.scaled_value_and_grad(loss_fn, state)", "loss_scale_state(opt_state).loss_scale"),
            ("jmp.scaled_value_and_grad(loss_fn, chain_state)", "state(opt_state).loss_scale"),
            ("jmp.scaled_value_and_grad(loss_fn, flax_state)", "state(opt_state).loss_scale"),
            ("jmp.scaled_value_and_grad(loss_fn, optimizer)", "jmp.adapters.nnx.loss_scale(opt"),
            ("jmp.scaled_value_and_grad(loss_fn, tx)", "(opt_state).loss_scale"),
            ("jmp.scaled_value_and_grad(loss_fn, scale.scale)", "got loss_scale=the method scale"),
            ("jmp.scaled_value_and_grad(loss_fn, scale.loss_scale)", "expected a loss scale: "),
            ("jmp.scaled_value_and_grad(loss_fn, 512.0)", "jmp.StaticLossScale(512)"),
            ("jmp.scaled_value_and_grad(loss_fn, None)", "jmp.NoOpLossScale() for none"),
            ("jmp.scaled_value_and_grad(loss_fn, 'dynamic')", "jmp.torch_loss_scale(), wh"),
            ("jmp.scaled_value_and_grad(loss_fn, jmp.torch_loss_scale)", "torch_loss_scale(), wh"),
            ("jmp.scaled_value_and_grad(loss_fn, jmp.DynamicLossScale)", "torch_loss_scale(), wh"),
            (
                "jmp.scaled_value_and_grad(loss_fn, dynamic_scale.DynamicScale())",
                "jmp.torch_loss_scale(), which",
            ),
            ("jmp.scaled_value_and_grad(loss_fn, many)", "expected a loss scale: "),
            ("jmp.scaled_value_and_grad(scale, loss_fn)", "expected a function"),
            ("jmp.scaled_value_and_grad(loss_fn(params, x), scale)", "expected a function"),
            ("jmp.scaled_value_and_grad(pair_fn, scale)(params, x)", "pass has_aux=True"),
            (
                "jmp.scaled_value_and_grad(loss_fn, scale, has_aux=True)(params, x)",
                "expected the pair (loss, aux)",
            ),
            (
                "jmp.scaled_value_and_grad(lambda p: (p, p, p), scale, has_aux=True)(1.0)",
                "expected the pair (loss, aux)",
            ),
            (
                "jmp.scaled_value_and_grad(model_loss, scale)(nnx_model, x)",
                "Train with jmp.adapters.nnx.train_step(loss_fn, model, optimizer, *batch)",
            ),
            (
                "jmp.scaled_value_and_grad(lambda m: 1.0, scale)(eqx.nn.Lambda(jnp.tanh))",
                "Pass it to jmp.adapters.equinox.scaled_value_and_grad",
            ),
            ("jmp.scaled_value_and_grad(model_loss, scale)(linen_model, x)", "Pass the variables"),
            ("jmp.scaled_value_and_grad(lambda p: p['w'], scale)(params)", "a mean over the batch"),
            ("jmp.scaled_value_and_grad(lambda p: p, scale)(params)", "{'w': traced float32[2,2]}"),
            (
                "jmp.scaled_value_and_grad(lambda p: None, scale)(params)",
                "a loss of None; expected",
            ),
            (
                "jmp.scaled_value_and_grad(lambda p: 3, scale)(params)",
                "expected a real floating sc",
            ),
        ),
        *_rows(
            ValueError,
            ("jmp.scaled_value_and_grad(loss_fn, jmp.StaticLossScale(0))", "NoOpLossScale()"),
        ),
    ],
    "accumulated_value_and_grad": [
        *_rows(
            TypeError,
            ("jmp.accumulated_value_and_grad(loss_fn, opt_state, 4)", "(opt_state).loss_scale."),
            (
                "jmp.accumulated_value_and_grad(model_loss, scale, 2)(nnx_model, x)",
                "transforms.mixed_precision(optax.MultiSteps(tx, 4), policy)",
            ),
            ("jmp.accumulated_value_and_grad(loss_fn, 4, scale)", "expected a loss scale: "),
            ("jmp.accumulated_value_and_grad(loss_fn, scale, 4.0)", "expected a Python int such"),
            ("jmp.accumulated_value_and_grad(loss_fn, scale, True)", "expected a Python int such"),
            ("jmp.accumulated_value_and_grad(loss_fn, scale, jnp.array(4))", "a Python int such"),
            (
                "jmp.accumulated_value_and_grad(loss_fn, scale, 2, batch_argnums='x')(params, x)",
                "got batch_argnums='x'; expected the number of an argument",
            ),
            (
                "jmp.accumulated_value_and_grad(loss_fn, scale, 2, weight=2.0)",
                "expected a function",
            ),
            (
                "jmp.accumulated_value_and_grad(loss_fn, scale, 2, weight=lambda x: x)(params, x)",
                "expected a float32 or integer scalar",
            ),
            (
                "jmp.accumulated_value_and_grad(loss_fn, scale, 2, skip=True)",
                "expected 'window' or 'micro_batch'",
            ),
            (
                "jmp.accumulated_value_and_grad(loss_fn, scale, 2, accumulate_dtype=None)",
                "expected a real floating dtype",
            ),
            (
                "jmp.accumulated_value_and_grad(loss_fn, scale, 2, reduce_axes=0)",
                "expected names of axes",
            ),
            (
                "jmp.accumulated_value_and_grad(loss_fn, scale, 2)(params, [x, 'train'])",
                "belong in another argument",
            ),
        ),
        *_rows(
            ValueError,
            ("jmp.accumulated_value_and_grad(loss_fn, scale, 0)", "expected an int of at least 1"),
            ("jmp.accumulated_value_and_grad(loss_fn, scale, 4)(params, x)", "a multiple of 4"),
            (
                "jmp.accumulated_value_and_grad(loss_fn, scale, 2)(params, {'key': jnp.array(0)})",
                "jax.random.split(key, 2)",
            ),
            (
                "jmp.accumulated_value_and_grad(loss_fn, scale, 2)(params, x=x)",
                "give them by position",
            ),
            (
                "jmp.accumulated_value_and_grad(loss_fn, scale, 2, (0, 1))(params, x)",
                "which share argument 1",
            ),
            ("jmp.accumulated_value_and_grad(loss_fn, scale, 2)(params, None)", "found no array"),
            (
                "jmp.accumulated_value_and_grad(loss_fn, scale, 2, skip='micro-batch')",
                "Did you mean 'micro_batch'?",
            ),
            (
                "jmp.accumulated_value_and_grad(loss_fn, scale, 2, accumulate_dtype='f8_e4m3fn')",
                "at least 16 bits",
            ),
            (
                "jmp.accumulated_value_and_grad(loss_fn, scale, 2, accumulate_dtype='float64')",
                "needs jax_enable_x64",
            ),
            (
                "jmp.accumulated_value_and_grad(loss_fn, scale, 2, reduce_axes='data')(params, x)",
                "Call it inside jax.shard_map",
            ),
            (
                "jax.shard_map(jmp.accumulated_value_and_grad(loss_fn, scale, 1, reduce_axes='i'), "
                "mesh=jax.make_mesh((1,), ('i',), axis_types=(jax.sharding.AxisType.Auto,)), "
                "in_specs=jax.P('i'), out_specs=jax.P('i'))(params, x)",
                "in the loss gather each, jmp.gather_params(shard, axis, dtype)",
            ),
        ),
    ],
    "Optimizers": [
        *_rows(
            TypeError,
            ("tx.init(eqx_mlp)", "eqx.filter(model, eqx.is_inexact_array)"),
            (
                "transforms.mixed_precision(adam, 'O2').init([eqx_mlp, params])",
                "For a model of equinox it is eqx.filter(model, eqx.is_inexact_array)",
            ),
            ("tx.init(linen_model)", "it is variables['params']"),
            (
                "tx.init({'w': x, 'function': jnp.tanh})",
                "the function tanh as the parameter at ['f",
            ),
            ("transforms.with_loss_scale(adam, 512.0)", "jmp.StaticLossScale(512)"),
            ("transforms.with_loss_scale(adam, None)", "jmp.NoOpLossScale() for none"),
            ("transforms.with_loss_scale(scale, adam)", "inner=a DynamicLossScale; expected an op"),
            ("transforms.with_loss_scale(optax.adam, scale)", "Did you forget to call it?"),
            ("transforms.with_loss_scale('adam', scale)", "expected an optax transformation"),
            ("transforms.with_loss_scale(opt_state, scale)", "expected an optax transformation"),
            ("transforms.with_master_params(params)", "expected an optax transformation"),
            ("transforms.with_master_params(adam, 32)", "master_dtype got 32; expected a real"),
            ("transforms.with_stochastic_rounding(adam, 0.5)", "expected an integer such as 0"),
            (
                "transforms.with_stochastic_rounding(adam, specs={'w': 'data'})",
                "expected a tree of PartitionSpecs like the parameters",
            ),
            (
                "transforms.with_stored_state(adam, [('*mu*', 'int8')])",
                "(glob of the state's path, glob of the parameter's path, dtype)",
            ),
            ("transforms.mixed_precision(F16, adam)", "expected a Policy or text such as"),
            ("transforms.mixed_precision(optax.adam, F16)", "Did you forget to call it?"),
            ("transforms.mixed_precision(adam, F16, 'dynamic')", "jmp.torch_loss_scale(), wh"),
            ("transforms.loss_scale_state(tx)", "not the optimizer itself"),
            ("transforms.check_optimizer_state(adam)", "not the optimizer itself"),
            ("transforms.masters(tx, params)", "not the optimizer itself"),
            (
                "tx.update(params, params, opt_state)",
                "The order is tx.update(gradients, state, par",
            ),
            (
                "tx.update(params, (opt_state,), params)",
                "expected what tx.init(params) or tx.update",
            ),
            (
                "masters_tx.update(params, params, params)",
                "The order is tx.update(gradients, state",
            ),
            ("transforms.reset_masters(tx, params)", "not the optimizer itself"),
            ("transforms.state_shardings(params, tx)", "expected an optax transformation"),
            ("transforms.masters(params, opt_state)", "The order is masters(opt_state, params)"),
            (
                "transforms.masters(half_params, masters_tx.init(half_params))",
                "The order is masters(opt_state, params)",
            ),
            (
                "transforms.reset_masters(half_params, masters_tx.init(half_params))",
                "The order is reset_masters(opt_state, params)",
            ),
            ("transforms.reset_masters(params, state)", "The order is reset_masters(opt_state, pa"),
            (
                "tx.update(None, opt_state, params)",
                "expected a tree like the parameters, as jmp.sc",
            ),
            ("transforms.clip_by_global_norm('1')", "expected a number such as 1.0"),
            (
                "transforms.clip_by_global_norm(True)",
                "got max_norm=True; expected a number such as",
            ),
            ("transforms.clip_by_global_norm(1.0, axis_name=3)", "expected names of axes, such as"),
            (
                "transforms.with_loss_scale(adam, scale, axis_name=3)",
                "expected names of axes, such",
            ),
            ("transforms.mixed_precision(adam, F16, axis_name=None)", "names of axes, such as ("),
        ),
        *_rows(
            ValueError,
            (
                "transforms.state_shardings(tx, {'w': jax.ShapeDtypeStruct((2,), jnp.float32)})",
                "expected an array, or a jax.ShapeDtypeStruct(shape, dtype, sharding=...)",
            ),
            (
                "transforms.mixed_precision(adam, 'fp16')",
                "Did you mean 'mixed_float16' or 'float16'",
            ),
            ("transforms.with_loss_scale(adam, jmp.StaticLossScale(0))", "NoOpLossScale()"),
            ("transforms.with_loss_scale(tx, scale).init(params)", "Use it once, outermost"),
            (
                "transforms.with_master_params(masters_tx).init(half_params)",
                "Use it once, outermost",
            ),
            ("transforms.with_master_params(adam, 'bf16')", "expected float32 or float64"),
            (
                "transforms.check_optimizer_state(optax.MultiSteps(tx, 4).init(params))",
                "Swap the two: with_loss_scale(optax.MultiSteps(adam, 4), loss_scale)",
            ),
            (
                "transforms.check_optimizer_state(optax.chain(tx, tx).init(params))",
                "Use it once, outermost",
            ),
            (
                "transforms.loss_scale_state(optax.chain(optax.clip(1.0), tx).init(params))",
                "Move it inside: with_loss_scale(optax.chain(clip_by_global_norm, adam), loss",
            ),
            (
                "transforms.loss_scale_state(optax.chain(tx, adam).init(params))",
                "Move it inside: with_loss_scale(optax.chain(clip, adam), loss_scale)",
            ),
            (
                "transforms.check_optimizer_state(optax.apply_if_finite(tx, 3).init(params))",
                "Put it around: with_loss_scale(optax.apply_if_finite(...), loss_scale)",
            ),
            (
                "transforms.masters(optax.chain(masters_tx, optax.scale(2)).init(half_params), x)",
                "Move it inside: with_master_params(optax.chain(adam, scale))",
            ),
            (
                "transforms.with_loss_scale(optax.chain(masters_tx, adam), scale).init(x)",
                "Move it inside: with_master_params(optax.chain(adam, scale))",
            ),
            ("transforms.clip_by_global_norm(-1.0)", "expected a number above zero, such as 1.0"),
            ("transforms.clip_by_global_norm(np.nan)", "got max_norm=nan; expected a number above"),
            ("transforms.clip_by_global_norm(0)", "with zero nothing trains"),
            (
                "transforms.mixed_precision(adam, 'mixed_bfloat16').init(half_params)",
                "jmp.cast_to_full(params); or, to store them in half, a policy with half",
            ),
            (
                "transforms.mixed_precision(adam, F16).init({'w': x.astype('float8_e5m2')})",
                "leaf.astype('float32') of each float8_e5m2 leaf",
            ),
            (
                "transforms.masters(masters_tx.init(half_params), None)",
                "got nothing for params['w']",
            ),
            (
                "transforms.reset_masters(masters_tx.init(half_params), None)",
                "Pass the parameters that the optimizer was initialised with",
            ),
            (
                "transforms.masters(optax.flatten(masters_tx).init(half_params), half_params)",
                "put it inside, with_master_params(optax.flatten(adam))",
            ),
            ("tx.update({'b': x}, opt_state, params)", "Differentiate with respect to the param"),
            ("tx.update(many, opt_state, params)", "and 997 more; only the second has ['w']"),
            (
                "masters_tx.update(half_params, masters_tx.init(half_params))",
                "call update(gradients, state, params)",
            ),
            (
                "transforms.with_master_params(adam, flat_master=True).init(params)",
                "expected half ones of a single dtype",
            ),
            (
                "transforms.with_split_masters(adam).init(half_params)",
                "expected bfloat16, which is the higher half of a float32 number",
            ),
            (
                "transforms.with_kahan_summation(masters_tx).init(half_params)",
                "Use one of the two, around the optimizer",
            ),
            (
                "transforms.with_stored_state(masters_tx, 'bfloat16').init(half_params)",
                "Swap the two: with_master_params(with_stored_state(adam, 'bfloat16'))",
            ),
            (
                "transforms.with_stored_state(tx, 'int8').init(params)",
                "Swap the two: with_loss_scale(with_stored_state(adam, 'bfloat16'), loss_scale)",
            ),
            (
                "transforms.with_stored_state(adam, 'float64')",
                "expected one of 'bfloat16', 'float16', 'float8_e4m3fn', 'int8', 'float32'",
            ),
            (
                "transforms.with_stored_state(adam, 'int8', rounding='up')",
                "expected 'stochastic' or 'nearest'",
            ),
            (
                "transforms.mixed_precision(adam, 'mixed_bfloat16', masters='half')",
                "wraps an optimizer, or one of 'full', 'split', 'stochastic', 'kahan', 'none'",
            ),
            (
                "transforms.reset_masters(transforms.with_kahan_summation(adam).init(half_params),"
                " params)",
                "params, opt_state = transforms.set_masters(opt_state, params, values)",
            ),
        ),
    ],
    "autocast": [
        *_rows(
            TypeError,
            ("jmp.autocast(loss_fn)", "write autocast(fun, 'mixed_float16')"),
            ("jmp.autocast(F16)", "got the policy 'mixed_float16' in the place of the function"),
            (
                "jmp.autocast(F16, loss_fn)",
                "the place of the function; write autocast(fun, policy)",
            ),
            ("jmp.autocast(loss_fn(params, x), F16)", "expected a function, such as a loss"),
            ("jmp.autocast(params, F16)", "{'w': float32[2,2]}; expected a function"),
            ("jmp.autocast(many, F16)", "and 996 more}; expected a function"),
            ("jmp.autocast(linen_model, F16)", "adapters.linen.autocast(model.apply, pol"),
            ("jmp.autocast(network, F16)", "jmp.adapters.haiku.autocast(network, policy)"),
            ("jmp.autocast(loss_fn, jnp.float16)", "expected a Policy or text such as"),
            ("jmp.autocast(loss_fn, True)", "get_policy got True; expected a Policy or text"),
            ("jmp.autocast(coroutine, F16)", "wrap the functions that the body calls"),
            ("jmp.full_precision(coroutine)", "wrap the functions that the body calls"),
            ("jmp.autocast(loss_fn, F16, apply_to='x')", "such as apply_to=['x']"),
            ("jmp.autocast(loss_fn, F16, apply_to=[1])", "such as apply_to=['x']"),
            ("jmp.autocast(loss_fn, F16, apply_to=1)", "such as apply_to=['x']"),
            ("jmp.autocast(loss_fn, F16, full='exp')", "such as full=['exp']"),
            ("jmp.autocast(loss_fn, F16, full=[jnp.exp])", "such as lax.exp_p or 'exp'"),
            ("jmp.autocast(loss_fn, F16, low=lax.dot_general_p)", "expected a sequence of prim"),
            ("jmp.autocast(loss_fn, F16, low=3)", "such as low=['exp']"),
            (
                "jmp.autocast(loss_fn, F16, recompute=True)",
                "expected one of ('auto', 'none', 'all'",
            ),
            ("jmp.full_precision(params)", "full_precision(fun)(*args), or @full_precision"),
            ("autocasting.register_rule([3], 'low', 'why')", "such as lax.exp_p or 'exp'"),
        ),
        *_rows(
            ValueError,
            ("jmp.autocast(loss_fn, 'fp16')", "Did you mean 'mixed_float16' or 'float16'?"),
            ("jmp.autocast(loss_fn, 'float64')", "or float32 to switch it off"),
            ("jmp.autocast(loss_fn, 'f8_e4m3fn')", "Expected float16, bfloat16 or float32"),
            ("jmp.autocast(loss_fn, F16, apply_to=['y'])", "has no argument 'y'; it has params, x"),
            ("jmp.autocast(loss_fn, F16, low=['exp'], full=['exp'])", "give it one category"),
            ("jmp.autocast(loss_fn, F16, recompute='some')", "one of ('auto', 'none', 'all')"),
            ("jmp.autocast(loss_fn, F16, attention='flash')", "one of ('plain', 'fused')"),
            ("jmp.autocast(changes_its_batch, F16)(params, {'x': x})", "Work on a copy"),
            ("autocasting.register_rule('exp', 'low', 'why')", "pass `low=`, `full=` or `follow=`"),
            ("autocasting.register_rule('new', 'folow', 'why')", "expected one of 'low', 'full'"),
            ("autocasting.register_rule('new', 'low', 'why', 'fusable')", "there are fusible"),
        ),
    ],
    "Flax linen": [
        *_rows(
            TypeError,
            ("linen.autocast(linen_model.__call__, F16)", "give method= in its call"),
            ("linen.autocast(nnx_model, F16)", "jmp.adapters.nnx.autocast(model, policy)"),
            ("linen.autocast(nnx_model.encode, F16)", "jmp.adapters.nnx.autocast(model, pol"),
            ("linen.autocast(eqx_model, F16)", "jmp.adapters.equinox.autocast(loss_fn, policy)"),
            ("linen.autocast(network, F16)", "jmp.adapters.haiku.autocast(network, policy)"),
            ("linen.autocast(params, F16)", "Write autocast(model.apply, policy)"),
            ("linen.autocast(linen_model.apply, None)", "expected a Policy or text"),
            ("linen.cast_params(linen_model, 'O2')", "expected what model.init returned"),
            ("linen.cast_params('O2', params)", "expected a Policy or text"),
            (
                "linen.TrainState.create(apply_fn=linen_model.apply, params=params, tx=optax.adam)",
                "expected an optax transformation, such as transforms.mixed_precision",
            ),
            (
                "linen.TrainState.create(apply_fn=linen_model.apply, params=None, tx=tx)",
                "such as model.init(key, x)['params']",
            ),
            (
                "state.apply_gradients(grads=None)",
                "got None as gradients; expected a tree like the",
            ),
        ),
        *_rows(
            ValueError,
            ("linen.autocast(linen_model.apply, 'fp16')", "Did you mean 'mixed_float16'"),
            (
                "linen.autocast(linen_model.apply, F16, recompute='some')",
                "expected one of ('auto', 'none', 'all')",
            ),
            ("state.apply_gradients(grads={'b': x})", "Differentiate with respect to the param"),
            (
                "state.apply_gradients(grads={})",
                "Differentiate with respect to the parameters that",
            ),
            (
                "state.apply_gradients(grads=state)",
                "Differentiate with respect to the parameters th",
            ),
            (
                "linen.TrainState.create(apply_fn=None, params=half_params, "
                "tx=transforms.mixed_precision(adam, F16))",
                "a policy with half parameters, 'p=f16,c=f16,o=full'",
            ),
            (
                "linen.TrainState.create(apply_fn=None, params=half_params, "
                "tx=optax.flatten(masters_tx)).replace(params=half_params)",
                "put it inside, with_master_params(optax.flatten(adam))",
            ),
        ),
    ],
    "Flax nnx": [
        *_rows(
            TypeError,
            ("nnx_adapter.autocast(eqx_model, F16)", "jmp.adapters.equinox.autocast(loss_fn"),
            ("nnx_adapter.autocast(optimizer, F16)", "an Optimizer; expected a function"),
            ("nnx_adapter.autocast(F16, nnx_model)", "in the place of the function"),
            ("nnx_adapter.autocast(nnx_model.encode, F16)", "autocast(NnxModel.encode, policy)"),
            ("nnx_adapter.autocast(model_loss)", "autocast got no policy"),
            ("nnx_adapter.autocast(linen_model, F16)", "jmp.adapters.linen.autocast(model.apply"),
            ("nnx_adapter.autocast(params, F16)", "autocast(model, policy) or autocast(loss_fn"),
            ("nnx_adapter.cast_params(params, 'O2')", "expected an nnx.Module"),
            ("nnx_adapter.loss_scale(opt_state)", "expected an nnx.Optimizer"),
            (
                "nnx_adapter.scaled_value_and_grad(nnx_model, scale)",
                "scaled_value_and_grad(loss_fn, scale)(model)",
            ),
            ("nnx_adapter.scaled_value_and_grad(model_loss, 8.0)", "expected a loss scale"),
            ("nnx_adapter.atomic_step(optimizer, nnx_model)", "expected an nnx.Module"),
            ("nnx_adapter.atomic_step(nnx_model, optimizer, optimizer)", "expected an nnx.Module"),
            ("nnx_adapter.reset_masters(nnx_model, tx)", "expected an nnx.Optimizer"),
            ("nnx_adapter.reset_masters(optimizer, nnx_model)", "expected an nnx.Module"),
            (
                "nnx_adapter.train_step(nnx_model, model_loss, optimizer, x)",
                "The order is train_st",
            ),
            (
                "nnx_adapter.train_step(model_loss, optimizer, nnx_model, x)",
                "The order is train_st",
            ),
            ("nnx_adapter.train_step(model_loss, nnx_model, tx, x)", "expected an nnx.Optimizer"),
            (
                "nnx_adapter.train_step(model_loss, linen_model, optimizer, x)",
                "expected an nnx.Mod",
            ),
            (
                "nnx_adapter.train_step(model_loss, nnx_model, optimizer, x, has_aux=True)",
                "expected the pair (loss, aux)",
            ),
            ("nnx_adapter.train_step(model_pair, nnx_model, optimizer, x)", "pass has_aux=True"),
            (
                "nnx_adapter.train_step(lambda m, x: m(x), nnx_model, optimizer, x)",
                "such as a mean over the batch",
            ),
        ),
        *_rows(
            ValueError,
            ("nnx_adapter.autocast(nnx_model, 'bf16-mixed')", "Did you mean 'mixed_bfloat16'?"),
        ),
    ],
    "Equinox": [
        *_rows(
            TypeError,
            ("equinox.autocast(linen_model, F16)", "jmp.adapters.linen.autocast(model.apply"),
            ("equinox.autocast(nnx_model, F16)", "jmp.adapters.nnx.autocast(model, policy)"),
            ("equinox.autocast(model_loss)", "autocast got no policy"),
            ("equinox.autocast(params, F16)", "autocast(loss_fn, policy)(model, *args)"),
            ("equinox.cast_params(linen_model, 'O2')", "jmp.adapters.linen.autocast(model.apply"),
            ("equinox.scaled_value_and_grad(model_loss, eqx_state)", "(opt_state).loss_scale."),
            ("equinox.scaled_value_and_grad(eqx_model(x), scale)", "expected a function"),
            (
                "equinox.train_step(model_loss, linen_model, eqx_state, tx, x)",
                "linen.autocast(model.ap",
            ),
            (
                "equinox.train_step(model_loss, nnx_model, eqx_state, tx, x)",
                "nnx.autocast(model",
            ),
            (
                "equinox.train_step(eqx_model, model_loss, eqx_state, tx, x)",
                "The order is train_st",
            ),
            (
                "equinox.train_step(model_loss, eqx_model, tx, eqx_state, x)",
                "The order is train_st",
            ),
            ("equinox.train_step(model_loss, eqx_model, tx, tx, x)", "what tx.init returned"),
            (
                "equinox.train_step(model_loss, eqx_model, eqx_state, tx, x, has_aux=True)",
                "expected the pair (loss, aux)",
            ),
            ("equinox.train_step(model_pair, eqx_model, eqx_state, tx, x)", "given as state="),
            (
                "equinox.train_step(lambda m, s, x: 1.0, eqx_model, eqx_state, tx, x, state=x)",
                "expected the pair (loss, aux)",
            ),
        ),
        *_rows(
            ValueError,
            ("equinox.train_step(model_loss, 3, eqx_state, tx, x)", "with a floating array"),
        ),
    ],
    "Haiku": [
        *_rows(
            TypeError,
            ("haiku.autocast(linen_model, F16)", "jmp.adapters.linen.autocast(model.apply"),
            ("haiku.autocast(nnx_model, F16)", "jmp.adapters.nnx.autocast(model, policy)"),
            ("haiku.autocast(network.apply, F16)", "expected what hk.transform or"),
            ("haiku.autocast(params, F16)", "expected what hk.transform or"),
            ("haiku.cast_params(params, 'O2')", "{module: {name: array}}"),
            ("haiku.cast_params(network, 'O2')", "expected what network.init returned"),
            (
                "haiku.train_step(loss_fn, network, opt_state, tx, x)",
                "such as network.init returned",
            ),
            (
                "haiku.train_step(params, loss_fn, opt_state, tx, x)",
                "expected a function of the mo",
            ),
            (
                "haiku.train_step(loss_fn, params, tx, opt_state, x)",
                "The order is train_step(loss_",
            ),
            (
                "haiku.train_step(loss_fn, params, opt_state, tx, x, has_aux=True)",
                "expected the pair (loss, aux)",
            ),
            ("haiku.train_step(pair_fn, params, opt_state, tx, x)", "pass has_aux=True"),
            (
                "haiku.train_step(loss_fn, params, params, tx, x)",
                "expected what tx.init(params) or",
            ),
        ),
        *_rows(
            ValueError,
            ("haiku.train_step(loss_fn, long_text, opt_state, tx, x)", "such as network.init"),
            ("haiku.cast_params({'linear': params}, 'fp16')", "Did you mean 'mixed_float16'"),
        ),
    ],
    "Diagnostics": [
        *_rows(
            TypeError,
            ("diagnostics.find_nonfinite(loss_fn(params, x))", "find_nonfinite(fun)(*args)"),
            ("diagnostics.find_nonfinite(loss_fn, params, x)", "in a call of their own: find_non"),
            (
                "diagnostics.find_nonfinite(loss_fn)(params, jax.ShapeDtypeStruct((2, 2), 'f4'))",
                "expected the arrays of the step that failed",
            ),
            (
                "diagnostics.find_float32(loss_fn(params, x), F16)(params, x)",
                "expected a function: find_float32(loss_fn, policy)(*args)",
            ),
            (
                "diagnostics.find_float32(loss_fn, F16, params, x)",
                "in a call of their own: find_float32(loss_fn, policy)(*args)",
            ),
            (
                "diagnostics.find_float32(loss_fn, F16, x=x)(params)",
                "the arguments of the loss in a call of their own",
            ),
            (
                "diagnostics.find_float32(loss_fn, F16, tolerance='1%')(params, x)",
                "expected a relative error, above zero, such as 0.01",
            ),
            ("diagnostics.find_float32(pair_fn, F16)(params, x)", "pass has_aux=True"),
            ("diagnostics.compare(pair_fn, F16)(params, x)", "write has_aux=True"),
            (
                "diagnostics.find_float32(loss_fn, F16)(params, jax.ShapeDtypeStruct((2,), 'f4'))",
                "outside of jax.jit",
            ),
            ("diagnostics.precision_report(params, F16)", "precision_report(fun, policy)(*args)"),
            (
                "diagnostics.precision_report(loss_fn, F16, params, x)",
                "in a call of their own: prec",
            ),
            ("diagnostics.precision_report(loss_fn, params)", "{'w': float32[2,2]} too early"),
            ("diagnostics.gradient_report(many)", "gradient_report(loss_fn, policy)(*args)"),
            (
                "diagnostics.gradient_report(loss_fn, F16, params, x)",
                "in a call of their own: grad",
            ),
            ("diagnostics.gradient_report(loss_fn, params, x)", "in a call of their own: gradient"),
            (
                "diagnostics.gradient_report(loss_fn, full=['exp'])",
                "expected one too: gradient_rep",
            ),
            ("diagnostics.gradient_report(lambda w: w)(x)", "such as a mean over the batch"),
            ("diagnostics.gradient_report(loss_fn, has_aux=True)(params, x)", "pair (loss, aux)"),
            (
                "diagnostics.memory_report(loss_fn, params, x)",
                "memory_report(fun, policy=policy)(*",
            ),
            (
                "diagnostics.memory_report(loss_fn, F16, params, x)",
                "in a call of their own: memory",
            ),
            (
                "diagnostics.memory_report(params)",
                "expected a function: memory_report(fun, policy=",
            ),
            ("diagnostics.memory_report(loss_fn, optimizer=0.1)", "such as optax.adam(1e-3)"),
            ("diagnostics.memory_report(loss_fn, has_aux=True)(params, x)", "pair (loss, aux)"),
            ("diagnostics.memory_report(loss_fn, argnums='params')(params, x)", "not its name"),
            (
                "diagnostics.compare(loss_fn, F16, params, x)",
                "their own: compare(fun, policy)(*args",
            ),
            ("diagnostics.compare(loss_fn, params, x)", "their own: compare(fun, policy)(*args)"),
            (
                "diagnostics.compare(loss_fn(params, x), F16)",
                "expected a function: compare(fun, po",
            ),
            ("diagnostics.assert_products_in(x, 'f16')", "assert_products_in(fun, dtype)(*args)"),
            (
                "diagnostics.assert_products_in(loss_fn, 'f16', params)",
                "in a call of their own: as",
            ),
            ("diagnostics.assert_products_in(loss_fn, 16)", "expected a real floating dtype"),
            ("diagnostics.range_report(loss_fn)", "gradient_report(loss_fn)(*args)"),
            ("diagnostics.compare_memory([report])", "{'float32': report, 'mixed_float16': other}"),
            ("diagnostics.metrics(tx)", "not the optimizer itself"),
            ("diagnostics.check_skips(opt_state, limit='25')", "such as 25"),
            ("diagnostics.check_skips(opt_state, limit=2.5)", "expected a whole number of steps"),
        ),
        *_rows(
            ValueError,
            (
                "diagnostics.find_float32(loss_fn, F16)(params, x)",
                "with jax.named_scope('head'): around each part",
            ),
            (
                "diagnostics.find_float32(jmp.autocast(loss_fn, F16), F16)(params, x)",
                "Expected the function in float32: loss_fn",
            ),
            (
                "diagnostics.find_float32(model_loss, F16, rules=[('a', 'float32')])(nnx_model, x)",
                "expected none: it asks about all modules",
            ),
            (
                "diagnostics.find_float32(loss_fn, 'float32')(params, x)",
                "Ask with 'mixed_float16' or",
            ),
            (
                "diagnostics.find_float32(loss_fn, F16, tolerance=0)(params, x)",
                "a relative error, above zero",
            ),
            (
                "diagnostics.find_float32(loss_fn, F16, scale=0.0)(params, x)",
                "expected a loss scale, above zero",
            ),
            (
                "diagnostics.find_float32(loss_fn, F16, argnums=2)(params, x)",
                "numbers of its 2 args",
            ),
            (
                "diagnostics.find_float32(loss_fn, F16, argnums=1)(params, 3)",
                "expected the parameters",
            ),
            ("diagnostics.precision_report(loss_fn, 'float32')", "Ask with 'mixed_float16' or"),
            ("diagnostics.precision_report(loss_fn, 'fp16')", "Did you mean 'mixed_float16'"),
            ("diagnostics.gradient_report(loss_fn, scale=1000)", "expected a power of two between"),
            (
                "diagnostics.gradient_report(loss_fn, argnums=1)(params, 3)",
                "expected the parameters",
            ),
            ("diagnostics.gradient_report(loss_fn, argnums=2)(params, x)", "numbers of its 2 args"),
            (
                "diagnostics.memory_report(loss_fn, 'amp')",
                "Did you mean 'mixed_float16' or 'mixed_b",
            ),
            ("diagnostics.memory_report(loss_fn, argnums=2)(params, x)", "numbers of its 2 args"),
            (
                "diagnostics.memory_report(loss_fn, argnums=1)(params, 3)",
                "no floating array to differentiate there; expected the parameters",
            ),
            ("diagnostics.compare(loss_fn, F16, scale=0.0)", "expected a loss scale, above zero"),
            ("diagnostics.compare(loss_fn, F16, argnums=2)(params, x)", "numbers of its 2 args"),
            ("diagnostics.assert_products_in(loss_fn, 'fp16')", "Did you mean 'float16'?"),
            ("diagnostics.assert_products_in(loss_fn, int)", "expected a real floating dtype"),
            (
                "diagnostics.metrics(adam.init(params))",
                "expected one of transforms.with_loss_scale(",
            ),
            (
                "diagnostics.check_skips(adam.init(params), 25)",
                "expected one of transforms.with_loss",
            ),
            ("diagnostics.metrics(many)", "expected one of transforms.with_loss_scale("),
            ("diagnostics.check_skips(opt_state, limit=0)", "expected at least 1 step"),
            ("report.total('gradient')", "it has 'value'"),
            ("report.best_scale('float32')", "expected 'float16' or 'bfloat16'"),
            ("report.rows[0].shares('float32')", "expected 'float16' or 'bfloat16'"),
            ("report.rows[0].shares(scale=1000)", "expected a power of two between"),
        ),
        *_rows(
            AssertionError,
            ("diagnostics.assert_products_in(jnp.sum, 'f16')(x)", "has no product whose dtype"),
        ),
    ],
}
