"""NumPyro and FlowJAX: densities, by their own functions, of models from their examples."""

import functools
from typing import Any

import equinox as eqx
import flax.linen as nn
import flowjax.bijections
import flowjax.distributions
import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from flowjax import flows
from numpyro.contrib.module import flax_module
from numpyro.infer import Trace_ELBO
from numpyro.infer.util import log_density

from benchmarks.published import Model, Row
from benchmarks.published._losses import model_of_loss

KEY = jax.random.key(0)


def bayesian_network(x: Any, y: Any) -> None:
    """NumPyro's "Bayesian Neural Network"."""
    sizes = (x.shape[1], 32, 32, 1)
    for layer, (before, after) in enumerate(zip(sizes, sizes[1:], strict=False)):
        shape = (before, after)
        w = numpyro.sample(f"w{layer}", dist.Normal(jnp.zeros(shape), jnp.ones(shape)))
        x = x @ w
        x = jnp.tanh(x) if after > 1 else x
    precision = numpyro.sample("precision", dist.Gamma(3.0, 1.0))
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", dist.Normal(x, 1 / jnp.sqrt(precision)).to_event(1), obs=y)


def bayesian() -> Model:
    x = jax.random.normal(KEY, (64, 4))
    batch = {"x": x, "y": jnp.sin(x.sum(1, keepdims=True))}
    trace = numpyro.handlers.trace(numpyro.handlers.seed(bayesian_network, KEY)).get_trace(**batch)
    params = {name: site["value"] for name, site in trace.items() if name != "y" and name != "data"}

    def potential(params: Any, batch: Any) -> Any:
        density, _ = log_density(bayesian_network, (), batch, params)
        return -density / len(batch["x"])

    return model_of_loss(potential, params, batch)


def gaussian_process(x: Any, y: Any) -> None:
    """NumPyro's "Gaussian Process": a Cholesky factor and no network."""
    variance, length, noise = (
        numpyro.sample(name, dist.LogNormal(0.0, 1.0)) for name in ("variance", "length", "noise")
    )
    distances = jnp.square((x[:, None] - x) / length)
    covariance = variance * jnp.exp(-0.5 * distances) + (noise + 1e-6) * jnp.eye(len(x))
    numpyro.sample("y", dist.MultivariateNormal(jnp.zeros(len(x)), covariance), obs=y)


def process() -> Model:
    x = jnp.linspace(-1.0, 1.0, 32)
    params = {"variance": jnp.array(1.0), "length": jnp.array(0.5), "noise": jnp.array(0.3)}

    def potential(params: Any, batch: Any) -> Any:
        return -log_density(gaussian_process, (), batch, params)[0] / len(x)

    return model_of_loss(potential, params, {"x": x, "y": jnp.sin(3 * x)})


class Decoder(nn.Module):
    @nn.compact
    def __call__(self, z: Any) -> Any:
        return nn.Dense(64)(nn.softplus(nn.Dense(128)(z)))


class Encoder(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        hidden = nn.softplus(nn.Dense(128)(x))
        return nn.Dense(16)(hidden), jnp.exp(nn.Dense(16)(hidden))


def decode(x: Any) -> None:
    """NumPyro's "Variational Autoencoder", by `flax_module`."""
    decoder = flax_module("decoder", Decoder(), input_shape=(1, 16))
    with numpyro.plate("batch", len(x)):
        z = numpyro.sample("z", dist.Normal(jnp.zeros(16), 1).to_event(1))
        numpyro.sample("x", dist.Bernoulli(logits=decoder(z)).to_event(1), obs=x)


def encode(x: Any) -> None:
    encoder = flax_module("encoder", Encoder(), input_shape=(1, 64))
    with numpyro.plate("batch", len(x)):
        numpyro.sample("z", dist.Normal(*encoder(x)).to_event(1))


def autoencoder() -> Model:
    x = jax.random.bernoulli(KEY, 0.4, (32, 64)).astype(jnp.float32)
    params = {}
    for function in (decode, encode):
        trace = numpyro.handlers.trace(numpyro.handlers.seed(function, KEY)).get_trace(x)
        params |= {n: site["value"] for n, site in trace.items() if site["type"] == "param"}

    def loss(params: Any, batch: Any) -> Any:
        return Trace_ELBO().loss(KEY, params, decode, encode, batch["x"]) / len(x)

    return model_of_loss(loss, params, {"x": x})


def flow(build: Any, **options: Any) -> Model:
    base = flowjax.distributions.Normal(jnp.zeros(8))
    made = build(KEY, base_dist=base, flow_layers=2, **options)
    params, static = eqx.partition(made, eqx.is_inexact_array)

    def loss(params: Any, batch: Any) -> Any:
        return -eqx.combine(params, static).log_prob(batch["x"]).mean()

    return model_of_loss(loss, params, {"x": jax.random.normal(jax.random.key(1), (32, 8))})


SPLINE = flowjax.bijections.RationalQuadraticSpline(knots=8, interval=4)
ROWS = (
    Row("numpyro-bnn", "NumPyro, Bayesian network", bayesian),
    Row("numpyro-vae", "NumPyro, variational autoencoder", autoencoder),
    Row("numpyro-gp", "NumPyro, Gaussian process", process),
    *(
        Row(f"flowjax-{name}", f"FlowJAX, {title}", functools.partial(flow, build, **options))
        for name, title, build, options in (
            ("maf", "masked autoregressive flow", flows.masked_autoregressive_flow, {}),
            ("coupling", "coupling flow of splines", flows.coupling_flow, {"transformer": SPLINE}),
            ("bnaf", "block neural flow", flows.block_neural_autoregressive_flow, {}),
        )
    ),
)
