"""A GAN on handwritten digits in mixed float16 with Flax nnx, ported from PyTorch: autocast around
both losses, a GradScaler for each optimizer. Written from the documentation pages alone."""

import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from sklearn.datasets import load_digits

import jmp
from jmp import diagnostics, transforms
from jmp.adapters import nnx as mixed


class Generator(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(16, 512, rngs=rngs)
        self.norm = nnx.BatchNorm(512, momentum=0.9, rngs=rngs)  # 1 - torch's momentum
        self.conv = nnx.ConvTranspose(32, 1, (4, 4), strides=2, rngs=rngs)

    def __call__(self, noise):
        x = nnx.relu(self.norm(self.dense(noise)))
        return jnp.tanh(self.conv(x.reshape(-1, 4, 4, 32)))


class Discriminator(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(1, 32, (4, 4), strides=2, rngs=rngs)
        self.norm = nnx.BatchNorm(32, momentum=0.9, rngs=rngs)
        self.head = nnx.Linear(512, 1, rngs=rngs)

    def __call__(self, images):
        x = nnx.leaky_relu(self.norm(self.conv(images)), 0.2)
        return self.head(x.reshape(-1, 512))


def d_loss_fn(discriminator, real, fake):
    return jnp.mean(nnx.softplus(-discriminator(real)) + nnx.softplus(discriminator(fake)))


def g_loss_fn(generator, discriminator, noise):
    return jnp.mean(nnx.softplus(-discriminator(generator(noise))))


def create(policy, seed):
    g = mixed.with_policy(Generator(nnx.Rngs(seed)), policy)  # torch.autocast
    d = mixed.with_policy(Discriminator(nnx.Rngs(seed + 1)), policy)
    scaler = jmp.torch_loss_scale(enabled=policy != "float32")  # GradScaler
    adam = optax.adam(3e-3, b1=0.5)
    clipped = optax.chain(optax.clip_by_global_norm(1.0), adam)
    g_tx, d_tx = (transforms.mixed_precision(tx, policy, scaler) for tx in (clipped, adam))
    return g, d, nnx.Optimizer(g, g_tx, wrt=nnx.Param), nnx.Optimizer(d, d_tx, wrt=nnx.Param)


@nnx.jit
def d_step(discriminator, optimizer, generator, real, noise):
    fake = nnx.clone(generator)(noise)  # .detach(); the generator's statistics do not move
    return mixed.train_step(d_loss_fn, discriminator, optimizer, real, fake)


@nnx.jit
def g_step(generator, optimizer, discriminator, noise):
    with mixed.atomic_step(generator, optimizer, discriminator):
        scale = mixed.loss_scale(optimizer)
        loss, grads = mixed.scaled_value_and_grad(g_loss_fn, scale)(generator, discriminator, noise)
        norm = optax.tree.norm(scale.unscale(nnx.as_pure(grads)))  # what clip_grad_norm_ returns
        optimizer.update(generator, grads)
    return loss, norm


def train(g, d, g_optimizer, d_optimizer):
    rng, log = np.random.default_rng(0), []
    for _ in range(200):
        real, z = rng.choice(images, 64, replace=False), rng.normal(size=(64, 16)).astype("f4")
        log.append((d_step(d, d_optimizer, g, real, z), *g_step(g, g_optimizer, d, z)))
    return np.array(log)


def distance(generator):
    """Returns the Fréchet distance of generated images from the digits, by their pixels."""
    generator.eval()
    some, real = (np.float64(x).reshape(-1, 64) for x in (generate(generator, noise), images))
    a, b = np.cov(some.T), np.cov(real.T)
    overlap = np.sqrt(np.linalg.eigvals(a @ b).real.clip(0)).sum()
    return np.sum((some.mean(0) - real.mean(0)) ** 2) + np.trace(a + b) - 2 * overlap


generate = nnx.jit(lambda generator, noise: generator(noise))
arrays = lambda *nodes: jax.tree.leaves(nnx.as_pure(nnx.state(nodes)))
equal = lambda some, others: [np.array_equal(*pair) for pair in zip(some, others, strict=True)]
images = np.float32(load_digits().images[..., None] / 8 - 1)
noise = np.random.default_rng(1).normal(size=(1000, 16)).astype("f4")

# Train in half and in float32. All products are half, forward and backward.
g, d, g_optimizer, d_optimizer = nodes = create("mixed_float16", seed=0)
float32_nodes, real, z, start = create("float32", seed=0), images[:64], noise[:64], arrays(g, d)
diagnostics.assert_products_in(nnx.grad(d_loss_fn), jnp.float16)(d, real, real)
diagnostics.assert_products_in(nnx.grad(g_loss_fn), jnp.float16)(g, d, z)
log, float32_log = train(*nodes), train(*float32_nodes)
assert np.allclose(log[0], float32_log[0], rtol=0.1) and (log[0] != float32_log[0]).all()
assert not any(equal(arrays(g, d), start))
skipped = diagnostics.metrics(d_optimizer)["skipped_steps"]
assert d_optimizer.step[...] == 200 - skipped > 190
assert g_optimizer.step[...] == np.isfinite(log[:, 2]).sum() > 190  # the norms of steps taken

# An infinity skips the discriminator's step: it changes the scale alone. The generator's is taken.
held = lambda: arrays(g, d, d_optimizer.step, d_optimizer.opt_state.inner_state)
before, scale, steps = held(), mixed.loss_scale(d_optimizer).loss_scale, g_optimizer.step[...]
d_step(d, d_optimizer, g, np.concatenate([real[1:], np.full((1, 8, 8, 1), np.inf, "f4")]), z)
assert all(equal(held(), before)) and mixed.loss_scale(d_optimizer).loss_scale == scale / 2
g_step(g, g_optimizer, d, z)
assert g_optimizer.step[...] == steps + 1 and not any(equal(arrays(g), before[: len(arrays(g))]))

# Save and restore both; generate in evaluation mode, in half.
restored = create("mixed_float16", seed=2)
with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(f"{folder}/gan", nnx.state(nodes))
    checkpointer.wait_until_finished()
    nnx.update(restored, checkpointer.restore(f"{folder}/gan", nnx.state(restored)))
assert all(equal(arrays(*restored), arrays(*nodes)))
in_half, in_float32 = distance(restored[0]), distance(float32_nodes[0])
diagnostics.assert_products_in(restored[0], jnp.float16)(noise)
assert in_half < 1.3 * in_float32 and in_half < 0.6 * images.var(axis=0).sum()  # mean image
losses = "loss {:.2f} and {:.2f}, norm {:.2f}".format(*log[-50:].mean(axis=0))
print(f"{losses}, {skipped} skipped, distance {in_half:.2f}, in float32 {in_float32:.2f}")
