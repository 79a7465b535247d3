"""A variational autoencoder of scikit-learn's digits, in Equinox and mixed precision.

The loss has two parts, reconstruction and divergence, which are reported beside their
sum. The training step is written out, so that it can return the norm of the gradients.
"""

import argparse

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import jmp
from jmp import diagnostics, transforms
from jmp.adapters import equinox as mixed

LATENT = 8
BATCH_SIZE = 128


class VAE(eqx.Module):
    encoder: eqx.nn.MLP
    decoder: eqx.nn.MLP

    def __init__(self, key):
        encoder_key, decoder_key = jax.random.split(key)
        self.encoder = eqx.nn.MLP(64, 2 * LATENT, 128, 1, key=encoder_key)
        self.decoder = eqx.nn.MLP(LATENT, 64, 128, 1, key=decoder_key)

    def __call__(self, image, noise):
        mean, log_variance = jnp.split(self.encoder(image), 2)
        code = mean + jnp.exp(0.5 * log_variance) * noise
        return self.decoder(code), mean, log_variance


def loss_fn(model, images, noise):
    """Returns the sum of both losses, and each of them, as means over images."""
    logits, mean, log_variance = jax.vmap(model)(images, noise)
    errors = optax.sigmoid_binary_cross_entropy(logits, images)
    divergence = 0.5 * (jnp.exp(log_variance) + mean**2 - 1 - log_variance)
    losses = {
        "reconstruction": errors.sum(axis=1).mean(),
        "kl": divergence.sum(axis=1).mean(),
    }
    return losses["reconstruction"] + losses["kl"], losses


def batches(steps):
    images = np.float32(load_digits().data / 16)
    random = np.random.default_rng(0)
    for _ in range(steps):
        rows = random.choice(len(images), BATCH_SIZE, replace=False)
        yield images[rows], np.float32(random.normal(size=(BATCH_SIZE, LATENT)))


def train(policy, steps, log=lambda *args: None):
    """Returns the model, the optimizer's state, and the metrics of each step."""
    model = VAE(jax.random.key(0))
    half_loss_fn = mixed.autocast(loss_fn, policy)
    tx = transforms.mixed_precision(optax.adam(1e-3), policy)
    opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def train_step(model, opt_state, images, noise):
        scale = opt_state.loss_scale
        grad_fn = mixed.scaled_value_and_grad(half_loss_fn, scale, has_aux=True)
        (loss, losses), grads = grad_fn(model, images, noise)
        norm = optax.tree.norm(scale.unscale(grads))
        params, static = eqx.partition(model, eqx.is_inexact_array)
        updates, opt_state = tx.update(grads, opt_state, params)
        model = eqx.combine(optax.apply_updates(params, updates), static)
        return model, opt_state, {"loss": loss, **losses, "norm": norm}

    history = []
    for number, (images, noise) in enumerate(batches(steps)):
        model, opt_state, metrics = train_step(model, opt_state, images, noise)
        diagnostics.check_skips(opt_state, limit=25)
        history.append(jax.device_get(metrics))
        if number % 20 == 0 or number == steps - 1:
            log(number, {name: f"{value:.3f}" for name, value in metrics.items()})
    return model, opt_state, history


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--policy", default="mixed_float16")
    args = parser.parse_args()

    # What is computed in half: every product, forward and backward.
    model, batch = VAE(jax.random.key(0)), next(batches(1))
    print(diagnostics.precision_report(loss_fn, args.policy)(model, *batch))
    half = jmp.get_policy(args.policy).compute_dtype
    grad_fn = eqx.filter_grad(mixed.autocast(loss_fn, args.policy), has_aux=True)
    diagnostics.assert_products_in(grad_fn, half)(model, *batch)

    model, opt_state, history = train(args.policy, args.steps, log=print)
    print(diagnostics.metrics(opt_state))
    _, _, in_float32 = train("float32", args.steps)

    # Parameters and moments are float32, and the scale is the one of torch.
    for tree in (eqx.filter(model, eqx.is_inexact_array), opt_state.inner_state[0].mu):
        assert {leaf.dtype for leaf in jax.tree.leaves(tree)} == {np.dtype("float32")}
    if half == jnp.float16:
        assert opt_state.loss_scale.loss_scale >= 1024
    # No more than the first steps were skipped, while the scale came down.
    assert diagnostics.metrics(opt_state)["skipped_steps"] <= 6

    for name in ("loss", "reconstruction", "kl", "norm"):
        assert history[0][name].dtype == np.float32
    last, last_float32 = history[-1], in_float32[-1]
    assert last["loss"] < history[0]["loss"]
    assert np.isclose(last["loss"], last["reconstruction"] + last["kl"], rtol=1e-5)
    for name, rtol in (("loss", 0.01), ("reconstruction", 0.01), ("kl", 0.05)):
        assert np.isclose(last[name], last_float32[name], rtol=rtol), name
    assert np.isfinite(last["norm"])


if __name__ == "__main__":
    main()
