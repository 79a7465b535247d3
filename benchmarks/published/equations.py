"""Diffrax: the networks of its documentation's examples."""

from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp

from benchmarks.published import Model, Row
from jmp.adapters import equinox

KEY = jax.random.key(0)


def make(network: Any, batch: Any) -> Model:
    """Makes a model of an Equinox module: its arrays are the parameters."""
    params, static = eqx.partition(network, eqx.is_inexact_array)

    def apply(params: Any, *arguments: Any) -> Any:
        return jax.vmap(eqx.combine(params, static))(*arguments)

    def call(apply: Any, params: Any, batch: Any) -> Any:
        return apply(params, *batch["inputs"])

    def score(output: Any, batch: Any) -> Any:
        return jnp.mean(jnp.square(output - batch["targets"]))

    return Model(apply, call, score, params, batch)


class Field(eqx.Module):
    """The vector field of an ordinary differential equation."""

    network: eqx.nn.MLP

    def __call__(self, t: Any, y: Any, args: Any) -> Any:
        return self.network(y)


class NeuralODE(eqx.Module):
    """Diffrax's "Neural ODE": steps of a chosen size, a checkpointed loop."""

    field: Field
    times: tuple[float, ...] = eqx.field(static=True)

    def __call__(self, start: Any) -> Any:
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(self.field),
            diffrax.Tsit5(),
            t0=self.times[0],
            t1=self.times[-1],
            dt0=0.1,
            y0=start,
            stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-6),
            saveat=diffrax.SaveAt(ts=jnp.array(self.times)),
        )
        return solution.ys


def neural_ode() -> Model:
    field = Field(eqx.nn.MLP(8, 8, 64, 2, activation=jax.nn.softplus, key=KEY))
    start = jax.random.normal(KEY, (16, 8))
    batch = {"inputs": (start,), "targets": jnp.ones((16, 8, 8))}
    return make(NeuralODE(field, tuple(i / 7 for i in range(8))), batch)


class NeuralCDE(eqx.Module):
    """Diffrax's "Neural CDE": a field that a path drives, read out at its end."""

    initial: eqx.nn.MLP
    field: eqx.nn.MLP
    readout: eqx.nn.Linear

    def __call__(self, times: Any, coefficients: Any) -> Any:
        control = diffrax.CubicInterpolation(times, coefficients)

        def field(t: Any, y: Any, args: Any) -> Any:
            return self.field(y).reshape(32, 4)

        solution = diffrax.diffeqsolve(
            diffrax.ControlTerm(field, control).to_ode(),
            diffrax.Tsit5(),
            t0=times[0],
            t1=times[-1],
            dt0=None,
            y0=self.initial(control.evaluate(times[0])),
            stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-6),
        )
        return self.readout(solution.ys[-1])


def neural_cde() -> Model:
    keys = jax.random.split(KEY, 4)
    network = NeuralCDE(
        eqx.nn.MLP(4, 32, 64, 1, key=keys[0]),
        eqx.nn.MLP(
            32, 32 * 4, 64, 1, activation=jax.nn.softplus, final_activation=jnp.tanh, key=keys[1]
        ),
        eqx.nn.Linear(32, 1, key=keys[2]),
    )
    times = jnp.broadcast_to(jnp.linspace(0.0, 1.0, 16), (8, 16))
    path = jnp.concatenate([times[..., None], jax.random.normal(keys[3], (8, 16, 3))], axis=-1)
    coefficients = jax.vmap(diffrax.backward_hermite_coefficients)(times, path)
    return make(network, {"inputs": (times, coefficients), "targets": jnp.ones((8, 1))})


ROWS = tuple(
    Row(name, title, make_model, adapter=equinox.autocast)
    for name, title, make_model in (
        ("diffrax-neural-ode", "Diffrax, neural ODE", neural_ode),
        ("diffrax-neural-cde", "Diffrax, neural CDE", neural_cde),
    )
)
