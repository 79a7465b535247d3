"""brax: the losses of its agents, with its networks, its observations' statistics and one random
batch of transitions.

Called as in its trainers, `loss(params, normalizer_params, data, key)`; there is no option for
half, so by hand parameters and inputs are cast.
"""

from typing import Any

import jax
import jax.numpy as jnp
from brax.training import types
from brax.training.acme import running_statistics
from brax.training.agents.ppo import losses as ppo_losses
from brax.training.agents.ppo import networks as ppo_networks
from brax.training.agents.sac import losses as sac_losses
from brax.training.agents.sac import networks as sac_networks

from benchmarks.published import Model, Row
from benchmarks.published._losses import model_of_loss

KEY = jax.random.key(0)
BATCH, UNROLL, OBSERVATION, ACTION = 32, 8, 24, 6
SHAPE = (BATCH, UNROLL)


def transitions(shape: tuple[int, ...], extras: dict[str, Any]) -> types.Transition:
    keys = jax.random.split(KEY, 4)
    state = {"truncation": jnp.zeros(shape)}
    return types.Transition(
        observation=3 * jax.random.normal(keys[0], (*shape, OBSERVATION)),
        action=jax.random.uniform(keys[1], (*shape, ACTION), minval=-0.9, maxval=0.9),
        reward=jax.random.normal(keys[2], shape),
        discount=jnp.ones(shape),
        next_observation=3 * jax.random.normal(keys[3], (*shape, OBSERVATION)),
        extras={"state_extras": state, **extras},
    )


def statistics(data: types.Transition) -> Any:
    state = running_statistics.init_state(jax.ShapeDtypeStruct((OBSERVATION,), jnp.float32))
    return running_statistics.update(state, data.observation)


def ppo() -> Model:
    networks = ppo_networks.make_ppo_networks(
        OBSERVATION,
        ACTION,
        preprocess_observations_fn=running_statistics.normalize,
        policy_hidden_layer_sizes=(64, 64),
        value_hidden_layer_sizes=(64, 64),
    )
    params = ppo_losses.PPONetworkParams(
        policy=networks.policy_network.init(jax.random.key(1)),
        value=networks.value_network.init(jax.random.key(2)),
    )
    raw = jax.random.normal(jax.random.key(3), (*SHAPE, ACTION))
    policy = {
        "raw_action": raw,
        "log_prob": -6.0 * jnp.ones(SHAPE),
        "distribution_params": jnp.zeros((*SHAPE, 2 * ACTION)),
    }
    data = transitions(SHAPE, {"policy_extras": policy})

    def loss(params: Any, batch: Any) -> Any:
        return ppo_losses.compute_ppo_loss(
            params, batch["normalizer"], batch["data"], KEY, ppo_network=networks
        )[0]

    return model_of_loss(loss, params, {"data": data, "normalizer": statistics(data)})


def sac() -> Model:
    networks = sac_networks.make_sac_networks(
        OBSERVATION,
        ACTION,
        preprocess_observations_fn=running_statistics.normalize,
        hidden_layer_sizes=(64, 64),
    )
    _, critic, actor = sac_losses.make_losses(networks, 1.0, 0.99, ACTION)
    params = {
        "policy": networks.policy_network.init(jax.random.key(1)),
        "q": networks.q_network.init(jax.random.key(2)),
    }
    target = networks.q_network.init(jax.random.key(3))
    data = transitions((8 * BATCH,), {})

    def loss(params: Any, batch: Any) -> Any:
        normalizer, data = batch["normalizer"], batch["data"]
        policy, q = params["policy"], params["q"]
        of_critic = critic(q, policy, normalizer, batch["target"], 0.1, data, KEY)
        return of_critic + actor(policy, normalizer, q, 0.1, data, KEY)

    batch = {"data": data, "normalizer": statistics(data), "target": target}
    return model_of_loss(loss, params, batch)


ROWS = (
    Row("brax-ppo", "brax, loss of PPO", ppo, by_hand="cast"),
    Row("brax-sac", "brax, losses of SAC", sac, by_hand="cast"),
)
