"""The adapters, one row a framework: the same small network in each, and how to use it.

The network is Conv, BatchNorm, relu, Conv, mean, head. A row says how to initialise it, how to
store its parameters, how to compute with it by a policy, and how to train it with atomic steps. A
new framework is a new row.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
from flax import nnx as flax_nnx

import jmp
from jmp import transforms
from jmp.adapters import equinox, haiku, linen, nnx

IMAGES = jax.random.normal(jax.random.key(3), (4, 6, 6, 3))
PRODUCTS = 3  # in the forward pass


def all_but_scaling(state):
    """Returns a state without its loss scales, flags and counts of skips."""
    is_scaling = lambda node: isinstance(node, transforms.WithLossScaleState)
    inner = lambda node: node.inner_state if is_scaling(node) else node
    return jax.tree.map(inner, state, is_leaf=is_scaling)


@dataclasses.dataclass(frozen=True)
class Adapter:
    """One framework.

    Attributes:
      init: returns parameters and statistics, float32.
      cast_params: `(params, policy, rules)` to the parameters as the policy stores them.
      forward: `(policy, rules, **options)` to a function of `(params, statistics, images)` that
        returns `(output, statistics)`.
      trainer: `(policy, tx)` to `(state, step)`: `step(state, images)` is compiled and returns the
        next state; `everything(state)` is what a skipped step must not move, and
        `opt_state(state)` the optimizer's part of it.
      convolution: a class, as the target of a rule. The path of the head is "head".
      casts_output: whether the policy's output dtype is applied.
    """

    name: str
    init: Callable[[], tuple[Any, Any]]
    cast_params: Callable[..., Any]
    forward: Callable[..., Any]
    trainer: Callable[..., Any]
    convolution: type
    everything: Callable[[Any], Any] = all_but_scaling
    opt_state: Callable[[Any], Any] = operator.itemgetter(2)
    casts_output: bool = True


def mean_square(output):
    return jnp.mean((output.astype(jnp.float32) - 1.0) ** 2)


# Flax linen.


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.BatchNorm(use_running_average=False)(nn.Conv(8, (3, 3))(x)))
        return nn.Dense(3, name="head")(nn.Conv(8, (3, 3))(x).mean((1, 2)))


@functools.cache
def linen_init():
    variables = LinenNet().init(jax.random.key(0), IMAGES)
    return variables["params"], variables["batch_stats"]


def linen_forward(policy, rules=None, **options):
    apply_fn = linen.autocast(LinenNet().apply, policy, rules=rules, **options)

    def forward(params, statistics, x):
        variables = {"params": params, "batch_stats": statistics}
        output, updated = apply_fn(variables, x, mutable=["batch_stats"])
        return output, updated["batch_stats"]

    return forward


def linen_trainer(policy, tx):
    params, statistics = linen_init()
    params = linen.cast_params(params, policy)
    forward = linen_forward(policy)
    state = linen.TrainState.create(apply_fn=forward, params=params, tx=tx, batch_stats=statistics)

    @jax.jit
    def step(state, x):
        def loss_fn(params):
            output, statistics = state.apply_fn(params, state.batch_stats, x)
            return mean_square(output), statistics

        grad_fn = jmp.scaled_value_and_grad(loss_fn, state.loss_scale, has_aux=True)
        (_, statistics), grads = grad_fn(state.params)
        return state.apply_gradients(grads=grads, batch_stats=statistics)

    return state, step


# Flax nnx.


class NnxNet(flax_nnx.Module):
    def __init__(self, rngs):
        self.first = flax_nnx.Conv(3, 8, (3, 3), rngs=rngs)
        self.norm = flax_nnx.BatchNorm(8, rngs=rngs)
        self.second = flax_nnx.Conv(8, 8, (3, 3), rngs=rngs)
        self.head = flax_nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        x = flax_nnx.relu(self.norm(self.first(x)))
        return self.head(self.second(x).mean((1, 2)))


@functools.cache
def nnx_init():
    return nnx_split(NnxNet(flax_nnx.Rngs(0)))[1:]


def nnx_split(model):
    graph, params, statistics = flax_nnx.split(model, flax_nnx.Param, flax_nnx.BatchStat)
    return graph, flax_nnx.as_pure(params), flax_nnx.as_pure(statistics)


def nnx_merge(params, statistics):
    model = NnxNet(flax_nnx.Rngs(0))
    flax_nnx.update(model, params)
    flax_nnx.update(model, statistics)
    return model


def nnx_cast_params(params, policy, rules=None):
    model = nnx_merge(params, nnx_init()[1])
    return nnx_split(nnx.cast_params(model, policy, rules))[1]


def nnx_view_forward(policy, rules=None, **options):
    def forward(params, statistics, x):
        view = nnx.autocast(nnx_merge(params, statistics), policy, rules=rules, **options)
        return view(x), nnx_split(view)[2]

    return forward


def nnx_lifted_forward(policy, rules=None, **options):
    lowered = nnx.autocast(lambda model, x: model(x), policy, rules=rules or (), **options)

    def forward(params, statistics, x):
        model = nnx_merge(params, jmp.cast_to_full(statistics))
        return lowered(model, x), nnx_split(model)[2]

    return forward


def nnx_view_trainer(policy, tx):
    model = nnx.autocast(nnx.cast_params(NnxNet(flax_nnx.Rngs(0)), policy), policy)
    return nnx_trainer(model, tx, lambda model, x: mean_square(model(x)))


def nnx_lifted_trainer(policy, tx):
    model = nnx.cast_params(NnxNet(flax_nnx.Rngs(0)), policy)
    loss_fn = lambda model, x: mean_square(model(x))
    return nnx_trainer(model, tx, nnx.autocast(loss_fn, policy))


def nnx_trainer(model, tx, loss_fn):
    optimizer = flax_nnx.Optimizer(model, tx, wrt=flax_nnx.Param)

    @jax.jit
    def step(both, x):
        model, optimizer = flax_nnx.merge(*both, copy=True)
        nnx.train_step(loss_fn, model, optimizer, x)
        return flax_nnx.split((model, optimizer))

    return flax_nnx.split((model, optimizer)), step


def nnx_everything(both):
    model, optimizer = flax_nnx.merge(*both, copy=True)
    parameters_and_statistics = flax_nnx.as_pure(flax_nnx.state(model))
    return parameters_and_statistics, optimizer.step[...], all_but_scaling(nnx_opt_state(both))


def nnx_opt_state(both):
    return flax_nnx.as_pure(flax_nnx.merge(*both, copy=True)[1].opt_state)


# Equinox.


class EquinoxNet(eqx.Module):
    first: eqx.nn.Conv2d
    norm: eqx.nn.BatchNorm
    second: eqx.nn.Conv2d
    head: eqx.nn.Linear

    def __init__(self):
        keys = jax.random.split(jax.random.key(0), 3)
        self.first = eqx.nn.Conv2d(3, 8, 3, key=keys[0])
        self.norm = eqx.nn.BatchNorm(8, axis_name="batch", mode="batch")
        self.second = eqx.nn.Conv2d(8, 8, 3, key=keys[1])
        self.head = eqx.nn.Linear(8, 3, key=keys[2])

    def __call__(self, x, state):
        x, state = self.norm(self.first(x.transpose(2, 0, 1)), state)
        return self.head(self.second(jax.nn.relu(x)).mean((1, 2))), state


def equinox_batched(model, state, x):
    batched = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    return batched(x, state)


@functools.cache
def equinox_init():
    model, state = eqx.nn.make_with_state(EquinoxNet)()
    return eqx.filter(model, eqx.is_inexact_array), jax.tree.map(jnp.asarray, state)


def equinox_forward(policy, rules=None, **options):
    model, _ = eqx.nn.make_with_state(EquinoxNet)()
    static = eqx.filter(model, eqx.is_inexact_array, inverse=True)
    lowered = equinox.autocast(equinox_batched, policy, rules=rules or (), **options)

    def forward(params, state, x):
        state = jmp.cast_to_full(state)
        return lowered(eqx.combine(params, static), state, x)

    return forward


def equinox_trainer(policy, tx):
    model, state = eqx.nn.make_with_state(EquinoxNet)()
    params, static = eqx.partition(equinox.cast_params(model, policy), eqx.is_inexact_array)

    @equinox.autocast(policy=policy)
    def loss_fn(model, state, x):
        output, state = equinox_batched(model, state, x)
        return mean_square(output), state

    def train_step(params, opt_state, x, state):
        model = eqx.combine(params, static)
        taken = equinox.train_step(loss_fn, model, opt_state, tx, x, state=state)
        return taken._replace(model=eqx.filter(taken.model, eqx.is_inexact_array))

    # The counters of a fresh State are of weak types, which the first step makes strong.
    state = jax.tree.map(lambda x: jnp.asarray(x, x.dtype), state)
    return functional_trainer(train_step, params, state, tx)


def functional_trainer(train_step, params, statistics, tx):
    @jax.jit
    def step(state, x):
        params, statistics, opt_state = state
        taken = train_step(params, opt_state, x, statistics)
        return taken.model, taken.state, taken.opt_state

    return (params, statistics, tx.init(params)), step


# Haiku.


def haiku_net(x):
    x = hk.BatchNorm(True, True, 0.9)(hk.Conv2D(8, 3)(x), is_training=True)
    x = hk.Conv2D(8, 3)(jax.nn.relu(x)).mean((1, 2))
    return hk.Linear(3, name="head")(x)


HAIKU_NET = hk.without_apply_rng(hk.transform_with_state(haiku_net))


@functools.cache
def haiku_init():
    return HAIKU_NET.init(jax.random.key(0), IMAGES)


def haiku_forward(policy, rules=None, **options):
    return haiku.autocast(HAIKU_NET, policy, rules=rules, **options).apply


def haiku_trainer(policy, tx):
    forward = haiku_forward(policy)
    params, state = haiku_init()

    def loss_fn(params, state, x):
        output, state = forward(params, state, x)
        return mean_square(output), state

    def train_step(params, opt_state, x, state):
        return haiku.train_step(loss_fn, params, opt_state, tx, x, state=state)

    return functional_trainer(train_step, haiku.cast_params(params, policy), state, tx)


NNX_VIEW = Adapter(
    name="nnx view",
    init=nnx_init,
    cast_params=nnx_cast_params,
    forward=nnx_view_forward,
    trainer=nnx_view_trainer,
    everything=nnx_everything,
    opt_state=nnx_opt_state,
    convolution=flax_nnx.Conv,
)
ADAPTERS = [
    Adapter(
        name="linen",
        init=linen_init,
        cast_params=linen.cast_params,
        forward=linen_forward,
        trainer=linen_trainer,
        opt_state=operator.attrgetter("opt_state"),
        convolution=nn.Conv,
    ),
    NNX_VIEW,
    dataclasses.replace(
        NNX_VIEW,
        name="nnx lifted",
        forward=nnx_lifted_forward,
        trainer=nnx_lifted_trainer,
        casts_output=False,
    ),
    Adapter(
        name="equinox",
        init=equinox_init,
        cast_params=equinox.cast_params,
        forward=equinox_forward,
        trainer=equinox_trainer,
        convolution=eqx.nn.Conv,
        casts_output=False,
    ),
    Adapter(
        name="haiku",
        init=haiku_init,
        cast_params=haiku.cast_params,
        forward=haiku_forward,
        trainer=haiku_trainer,
        convolution=hk.Conv2D,
    ),
]
