"""Programs of public reports of mixed-precision trouble; each name says whose."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jmp
from jmp import transforms
from tests.commands import in_full
from tests.errors import relative_error

SIZE = 64
KEYS = jax.random.split(jax.random.key(0), 4)
W = jax.random.normal(KEYS[0], (SIZE, SIZE)) / SIZE**0.5
X = jax.random.normal(KEYS[1], (SIZE // 2, SIZE))


def penalty(w, x):
    """The norm of a critic's gradient, differentiated once more."""
    critic = lambda x: jnp.sum(jnp.tanh(x @ w) @ w[:, :1])
    return jnp.mean((jnp.sqrt(jnp.sum(jax.grad(critic)(x) ** 2, -1) + 1e-12) - 1) ** 2)


def decays(w, x):
    """A linear attention whose state decays by a gate, token by token."""

    def step(state, token):
        read, key, value, decay = token
        state = decay[:, None] * state + key[:, None] * value[None]
        return state, read @ state

    tokens = x @ w, x @ w.T, x @ (w + w.T), jnp.exp(-jnp.exp(x @ w / 2))
    return jnp.mean((lax.scan(step, jnp.zeros((SIZE, SIZE)), tokens)[1] @ w / SIZE) ** 2)


def large_rms(w, x):
    """An RMSNorm of activations of 2000, whose squares float16 does not hold."""
    h = 2000 * (x @ w)
    return jnp.mean(jnp.tanh((h * lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6)) @ w))


def large_variance(w, x):
    h = 300 * (x @ w)
    return jnp.mean((((h - jnp.mean(h)) / jnp.sqrt(jnp.var(h))) @ w) ** 2)


def large_offset(w, x):
    return jnp.mean((((x @ w * 2000 + 1_048_580.0) - 1_048_580.0) / 2000 @ w) ** 2)


def rotations(w, x):
    """Rotary positions up to 100,000."""
    return jnp.mean((((x @ w) * jnp.cos(3e3 * jnp.arange(len(x)))[:, None]) @ w) ** 2)


def counted_positions(w, x):
    """Positions by the sum of a mask, to 32,000."""
    table = jnp.sin(jnp.arange(40_000.0))[:, None]
    return jnp.mean(((x @ w + table[jnp.cumsum(1000 * jnp.ones(len(x))).astype(int)]) @ w) ** 2)


def many_blocks(w, x):
    block = lambda x, _: (x + 0.1 * jax.nn.gelu(x @ w) @ w, None)
    return jnp.mean(lax.scan(block, x, None, length=48)[0] ** 2)


def many_classes(w, x):
    head = jnp.sin(jnp.arange(SIZE * 50_000.0)).reshape(SIZE, -1) / SIZE**0.5
    return -jnp.mean(jax.nn.log_softmax((x @ w) @ head)[:, 7])


def cross_entropy_by_hand(w, x):
    p = jax.nn.sigmoid(jnp.tanh(x[:1] @ w[:, :1]))
    return -jnp.mean(jnp.log(jnp.clip(p, 1e-7, 1 - 1e-7)))


def many_zeros(w, x):
    """A sum of 65,536 exponentials, as of a semiring of logarithms."""
    return jax.nn.logsumexp(jnp.zeros(65_536) * (x[0] @ w)[0] + w[0, 0])


REPORTS = {
    "EasyLM 50": large_rms,
    "FLA 29": decays,
    "google-research/last 43": many_zeros,
    "jax 29058": rotations,
    "jax 29323": counted_positions,
    "keras-core 410": large_variance,
    "lightning 12600": cross_entropy_by_hand,
    "TF 38457": large_offset,
    "gradient penalty": penalty,
    "many blocks": many_blocks,
    "many classes": many_classes,
}


@pytest.mark.usefixtures("users_rank_promotion")
@pytest.mark.parametrize("half", ["float16", "bfloat16"])
@pytest.mark.parametrize("fun", in_full(REPORTS, one_of=2))
def test_a_program_of_a_report_keeps_its_value_and_gradient(fun, half):
    scale = 2.0**10
    lowered = jmp.autocast(lambda w, x: scale * fun(w, x), f"mixed_{half}")
    found = jax.jit(jax.value_and_grad(lowered, (0, 1)))(W, X)
    exact = jax.jit(jax.value_and_grad(fun, (0, 1)))(W, X)
    for ours, right in zip(found, exact, strict=True):
        assert relative_error(jax.tree.map(lambda leaf: leaf / scale, ours), right) < 0.02


OPTIMIZERS = "adam adabelief yogi amsgrad radam adan novograd adamax rmsprop lamb adafactor".split()
WAYS = [("float16", "full"), ("bfloat16", "full"), ("bfloat16", "split")]
WAYS += [(half, way) for half in ("float16", "bfloat16") for way in ("stochastic", "kahan", "none")]


@pytest.mark.parametrize("name", in_full(OPTIMIZERS, first=1))
def test_zero_gradients_of_half_parameters_change_nothing(name):
    """optax 1754, 1768 and 1789: an eps below a half type's range made them not finite."""
    for half, masters in WAYS:
        policy = jmp.Policy(half, half, "float32")
        optimizer = transforms.mixed_precision(getattr(optax, name)(1e-3), policy, masters=masters)
        params = {"w": jnp.array([1.0, -2.0, 0.5], half)}
        state = optimizer.init(params)
        step = jax.jit(optimizer.update)
        for _ in range(3):
            updates, state = step(jax.tree.map(jnp.zeros_like, params), state, params)
            params = optax.apply_updates(params, updates)
        np.testing.assert_array_equal(params["w"].astype(float), [1.0, -2.0, 0.5], err_msg=masters)
