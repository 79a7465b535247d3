"""Trains an actor and a critic in Equinox to balance a pole: two optimizers, a loss scale each.

    python examples/actor_critic.py    # about a minute on two CPU cores; --help lists options

An advantage actor-critic (Mnih et al. 2016) on the cart and pole of Barto et al. 1983, whose
physics is written in JAX and stays in float32. Actor and critic act and learn in half. The step is
written out, without the adapter's `train_step`:

- each model has an optimizer with a loss scale of its own. The critic's gradients are larger by
  orders of magnitude, so they overflow first, and lower only their own scale;
- gradients are clipped inside the wrapped optimizer, where they are unscaled;
- the norm that is logged is that of the unscaled gradients, before clipping.

It prints the return at the end, the norms and the scales in three precisions.
"""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _common import PRECISIONS, begin, finish, parse_options, print_table, rounded

from jmp import transforms
from jmp.adapters import equinox as mixed

ENVIRONMENTS, HORIZON, DISCOUNT, TRACE = 64, 32, 0.99, 0.95


def physics(state: jax.Array, action: jax.Array) -> jax.Array:
    """Returns position, speed, angle and spin of the pole 0.02 seconds later."""
    _, speed, angle, spin = state
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    push = (jnp.where(action == 1, 10.0, -10.0) + 0.05 * spin**2 * sin) / 1.1
    twist = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
    return state + 0.02 * jnp.stack([speed, push - 0.05 * twist * cos / 1.1, spin, twist])


def actor_loss(actor: Any, states: Any, actions: Any, advantages: Any) -> jax.Array:
    log_probs = jax.nn.log_softmax(jax.vmap(actor)(states))
    taken = jnp.take_along_axis(log_probs, actions[:, None], axis=1)[:, 0]
    entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, axis=1)
    return -jnp.mean(taken * advantages) - 0.01 * jnp.mean(entropy)


def critic_loss(critic: Any, states: Any, returns: Any) -> jax.Array:
    return jnp.mean((jax.vmap(critic)(states) - returns) ** 2)


def take_step(loss_fn: Any, tx: Any, model: Any, opt_state: Any, *args: Any) -> Any:
    """Returns the model and the optimizer's state after a step, and the norm of the gradients."""
    scale = opt_state.loss_scale
    _, scaled = mixed.scaled_value_and_grad(loss_fn, scale)(model, *args)
    norm = optax.tree.norm(scale.unscale(scaled))  # infinite or NaN in a step that is skipped
    params, static = eqx.partition(model, eqx.is_inexact_array)
    updates, opt_state = tx.update(scaled, opt_state, params)
    return eqx.combine(optax.apply_updates(params, updates), static), opt_state, norm


def returns_of(rewards: jax.Array, falls: jax.Array, values: jax.Array) -> jax.Array:
    """Returns the discounted rewards until the next fall, estimated by TD(lambda)."""

    def back(later: jax.Array, here: Any) -> tuple[jax.Array, jax.Array]:
        reward, fell, value = here
        later = jnp.where(fell, 0, (1 - TRACE) * value + TRACE * later)
        return reward + DISCOUNT * later, reward + DISCOUNT * later

    return jax.lax.scan(back, values[-1], (rewards, falls, values[1:]), reverse=True)[1]


def train(policy: str, arguments: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns what was logged [seeds, updates, 3]: returns and norms; and the scales [seeds, 2]."""
    rate = optax.linear_schedule(arguments.learning_rate, 0, arguments.updates)
    inner = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(rate))
    tx = transforms.mixed_precision(inner, policy)
    half = functools.partial(mixed.autocast, policy=policy)
    call = half(lambda model, states: jax.vmap(model)(states).astype(jnp.float32))

    def create(outputs: Any, key: jax.Array) -> tuple[Any, Any]:
        model = eqx.nn.MLP(4, outputs, arguments.width, 2, jnp.tanh, key=key)
        return model, tx.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def update(actor: Any, critic: Any, states: jax.Array, key: jax.Array) -> Any:
        def act(states: jax.Array, key: jax.Array) -> tuple[jax.Array, Any]:
            keys = jax.random.split(key)
            action = jax.random.categorical(keys[0], call(actor[0], states))
            after = jax.vmap(physics)(states, action)
            fell = (abs(after[:, 0]) > 2.4) | (abs(after[:, 2]) > 0.21)
            start = jax.random.uniform(keys[1], after.shape, minval=-0.05, maxval=0.05)
            reward = jnp.where(fell, 0, 1 - abs(after[:, 0]) / 2.4)  # the most in the middle
            return jnp.where(fell[:, None], start, after), (states, action, reward, fell)

        states, (seen, actions, *outcome) = jax.lax.scan(
            act, states, jax.random.split(key, HORIZON)
        )
        flat = lambda x: x.reshape(-1, *x.shape[2:])
        values = call(critic[0], flat(jnp.concatenate([seen, states[None]])))
        values = values.reshape(HORIZON + 1, ENVIRONMENTS)
        returns = returns_of(*outcome, values)
        advantages = returns - values[:-1]
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-6)
        batch = flat(seen), flat(actions), flat(advantages)
        *actor, actor_norm = take_step(half(actor_loss), tx, *actor, *batch)
        *critic, norm = take_step(half(critic_loss), tx, *critic, flat(seen), flat(returns))
        return actor, critic, states, jnp.stack([returns.mean(), actor_norm, norm])

    logged, scales = [], []
    for seed in range(arguments.seeds):
        keys = jax.random.split(jax.random.key(seed), arguments.updates + 2)
        actor, critic = create(2, keys[0]), create("scalar", keys[1])
        states, measured = jnp.zeros((ENVIRONMENTS, 4)), []
        for key in keys[2:]:
            actor, critic, states, found = update(actor, critic, states, key)
            measured.append(found)
        logged.append(measured)
        scales.append([opt_state.loss_scale.loss_scale for _, opt_state in (actor, critic)])
    return np.array(logged), np.array(scales)


def main() -> None:
    options = {"updates": 700, "seeds": 3, "width": 64, "learning_rate": 5e-3}
    arguments = parse_options(__doc__, **options, precisions=PRECISIONS)
    console = begin(arguments)
    rows: list[Any] = [["", "return", "norms: actor", "critic", "scales: actor", "critic"]]
    runs = {}
    for policy in arguments.precisions:
        logged, scales = train(policy, arguments)
        found = runs[policy] = {
            "returns": rounded(logged[..., 0].mean(axis=0)),  # of the seeds
            "final": logged[:, -50:, 0].mean(axis=1).tolist(),  # of each seed
            "norms": np.median(logged[..., 1:], axis=(0, 1)).tolist(),
            "scales": np.median(scales, axis=0).tolist(),
        }
        words = (f"2^{np.log2(scale):.0f}" for scale in found["scales"])
        finals = f"{min(found['final']):.0f} to {max(found['final']):.0f}"
        rows.append([policy, finals, *found["norms"], *words])
    print_table(console, *rows)
    finish(console, arguments, "actor_critic", runs=runs)


if __name__ == "__main__":
    main()
