"""Families over images, graphs, sets and tables, and those with a derivative in their loss."""

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.families._layers import cross_entropy, family, full, mean_square

IMAGE, GRAPH, DERIVATIVE, OTHER = "image", "graph or set", "derivative in the loss", "other"


def pooled(x):
    """Returns the mean over places, in the dtype of the argument."""
    return jnp.mean(full(x), tuple(range(1, x.ndim - 1))).astype(x.dtype)


# Images.


@family("ConvNeXt", IMAGE, "b s s d", "b <v", b=32, s=28, d=192, v=1000)
def convnext(net, x, labels):
    x = net.half(x)
    for _ in range(net.layers):
        y = net.norm(net.conv(x, net.d, 7, groups=net.d))
        x = x + net.half(net.scale(net.d)) * net.mlp(y, 4 * net.d, net.d)
    return cross_entropy(net.dense(net.norm(pooled(x)), net.v), labels)


@family("EfficientNet: squeeze and excite", IMAGE, "b s s d", "b <v", b=32, s=28, d=96, v=1000)
def efficientnet(net, x, labels):
    x = net.half(x)
    for _ in range(net.layers):
        y = jax.nn.silu(net.batch_norm(net.dense(x, 4 * net.d, bias=False)))
        y = jax.nn.silu(net.batch_norm(net.conv(y, 4 * net.d, 3, groups=4 * net.d)))
        gate = net.mlp(pooled(y), net.d // 4, 4 * net.d, act=jax.nn.silu)
        y = y * jax.nn.sigmoid(gate)[:, None, None]
        x = x + net.batch_norm(net.dense(y, net.d, bias=False))
    return cross_entropy(net.dense(pooled(x), net.v), labels)


@family("DenseNet", IMAGE, "b s s 3", "b <v", b=32, s=28, d=64, v=1000)
def densenet(net, images, labels):
    x = net.conv(net.half(images), net.d, 3)
    for _ in range(net.layers):
        y = net.dense(jax.nn.relu(net.batch_norm(x)), 128, bias=False)
        y = net.conv(jax.nn.relu(net.batch_norm(y)), 32, 3)
        x = jnp.concatenate([x, y], -1)
    return cross_entropy(net.dense(pooled(jax.nn.relu(net.batch_norm(x))), net.v), labels)


@family("MLP-Mixer", IMAGE, "b t d", "b <v", b=64, t=196, d=512, v=1000)
def mixer(net, x, labels):
    x = net.half(x)
    for _ in range(net.layers):
        y = jnp.swapaxes(net.norm(x), 1, 2)
        x = x + jnp.swapaxes(net.mlp(y, net.d // 2, net.t), 1, 2)
        x = x + net.mlp(net.norm(x), 4 * net.d, net.d)
    return cross_entropy(net.dense(pooled(net.norm(x)), net.v), labels)


@family("VQ-VAE", IMAGE, "b s s d", b=16, s=64, d=128, words=512)
def vq_vae(net, images):
    def residual(x):
        for _ in range(net.layers // 2):
            x = x + net.conv(jax.nn.relu(net.conv(jax.nn.relu(x), net.d, 3)), net.d, 1)
        return x

    z = residual(net.conv(net.half(images), net.d, 4, strides=2))
    table = net.master(net.words, net.d, deviation=1.0)
    wide = full(z)
    distances = jnp.sum(table**2, -1) - 2 * full(z @ net.half(table).T)
    found = table[jnp.argmin(distances, -1)]
    kept = mean_square(wide - lax.stop_gradient(found)) / 4
    kept += mean_square(lax.stop_gradient(wide) - found)
    x = residual(net.half(wide + lax.stop_gradient(found - wide)))
    x = jax.image.resize(x, (net.b, net.s, net.s, net.d), "nearest")
    return mean_square(full(net.conv(jax.nn.relu(x), net.d, 3)) - images) + kept


@family("Capsules, routed thrice", IMAGE, "b n 8", "b <v", b=32, n=512, v=16)
def capsules(net, x, labels):
    def squash(x):
        size = jnp.sum(x * x, -1, keepdims=True) + 1e-6
        return x * jnp.sqrt(size) / (1 + size)

    x = net.half(x)
    for count in [32] * (net.layers - 1) + [net.v]:
        kernel = net.half(net.master(x.shape[1], count, x.shape[2], 16, deviation=0.3))
        votes, scores = jnp.einsum("bic,iocd->biod", x, kernel), 0.0
        for turn in range(3):
            zeros = jnp.zeros(votes.shape[:-1], full(votes).dtype)
            weights = net.half(jax.nn.softmax(zeros + scores, -1))
            y = net.half(squash(full(jnp.einsum("bio,biod->bod", weights, votes))))
            if turn < 2:
                scores = scores + full(jnp.einsum("biod,bod->bio", votes, y))
        x = y
    lengths = jnp.sqrt(jnp.sum(jnp.square(full(x)), -1) + 1e-6)
    wanted = jax.nn.one_hot(labels, net.v)
    missed = wanted * jax.nn.relu(0.9 - lengths) ** 2
    return jnp.mean(missed + 0.5 * (1 - wanted) * jax.nn.relu(lengths - 0.1) ** 2)


@family("Fourier neural operator", IMAGE, "b s s d", "b s s d", b=16, s=64, d=64, modes=12)
def fourier_operator(net, x, targets):
    x, modes = net.half(x), min(net.modes, net.s // 2)
    for _ in range(net.layers):
        waves = jnp.fft.rfft2(full(x), axes=(1, 2))[:, :modes, :modes]
        parts = [net.master(modes, modes, net.d, net.d, deviation=0.1) for _ in range(2)]
        waves = jnp.einsum("bijc,ijcd->bijd", waves, lax.complex(*parts))
        y = net.half(jnp.fft.irfft2(waves, (net.s, net.s), axes=(1, 2)))
        x = jax.nn.gelu(y + net.dense(x, net.d))
    return mean_square(full(net.dense(x, net.d)) - targets)


# Graphs and sets. Sums over edges are float32, as by hand.


@family("Message passing", GRAPH, "n d", "e <n", "e <n", "n d", n=8192, e=32768, d=256)
def message_passing(net, x, sources, targets, wanted):
    x = net.half(x)
    for _ in range(net.layers):
        y = net.norm(x)
        pairs = jnp.concatenate([y[sources], y[targets]], -1)
        messages = full(net.mlp(pairs, net.d, net.d, act=jax.nn.silu))
        sums = net.half(jax.ops.segment_sum(messages, targets, net.n))
        x = x + net.mlp(jnp.concatenate([y, sums], -1), net.d, net.d, act=jax.nn.silu)
    return mean_square(full(x) - wanted)


@family("Graph attention", GRAPH, "n d", "e <n", "e <n", "n <v", n=8192, e=32768, d=256, v=64)
def graph_attention(net, x, sources, targets, labels):
    x = net.half(x)
    for _ in range(net.layers):
        y = net.dense(x, net.d)
        a, b = jnp.split(net.dense(y, 2), 2, -1)
        scores = full(jax.nn.leaky_relu(a[sources, 0] + b[targets, 0]))
        top = jax.ops.segment_max(scores, targets, net.n)
        powers = jnp.exp(scores - lax.stop_gradient(top)[targets])
        weights = powers / jax.ops.segment_sum(powers, targets, net.n)[targets]
        messages = full(y)[sources] * weights[:, None]
        x = x + net.half(jax.nn.elu(jax.ops.segment_sum(messages, targets, net.n)))
    return cross_entropy(net.dense(x, net.v), labels)


@family("PointNet", GRAPH, "b n 3", "b <v", b=32, n=1024, d=256, v=40)
def pointnet(net, points, labels):
    x = net.half(points)
    for layer in range(net.layers):
        x = jax.nn.relu(net.batch_norm(net.dense(x, net.d, bias=False)))
        if layer % 2:
            best = jnp.broadcast_to(jnp.max(x, 1, keepdims=True), x.shape)
            x = jnp.concatenate([x, best], -1)
    return cross_entropy(net.mlp(jnp.max(x, 1), net.d, net.v, act=jax.nn.relu), labels)


# Derivatives in the loss.


@family("Physics-informed network", DERIVATIVE, "n 2", "n", n=16384, d=512)
def physics(net, points, source):
    @net.again
    def u(x):
        return net.mlp(net.half(x), *[net.d] * net.layers, 1, act=jnp.tanh)[:, 0]

    def second(axis):
        direction = jnp.zeros_like(points).at[:, axis].set(1)
        along = lambda f: lambda x: jax.jvp(f, (x,), (direction,))[1]
        return full(along(along(u))(points))

    return mean_square(second(0) + second(1) - source) + mean_square(u(points))


@family("Forces of atoms", DERIVATIVE, "b n 3", "b", "b n 3", b=16, n=32, d=128)
def forces(net, places, energies, wanted):
    act = lambda x: jax.nn.softplus(x) - 0.6931

    @net.again
    def energy(places):
        steps = places[:, :, None] - places[:, None]
        distances = jnp.sqrt(jnp.sum(steps * steps, -1, keepdims=True) + 1e-3)
        waves = net.half(jnp.exp(-4 * (distances - jnp.linspace(0, 5, 32)) ** 2))
        x = jnp.broadcast_to(net.bias(net.d), (net.b, net.n, net.d))
        for _ in range(net.layers):
            kernels = net.mlp(waves, net.d, net.d, act=act)
            y = full(net.dense(x, net.d))[:, None] * full(kernels)
            x = x + net.mlp(net.half(jnp.sum(y, 2) / net.n), net.d, net.d, act=act)
        return jnp.sum(full(net.mlp(x, net.d, 1, act=act)), (1, 2))

    found, slopes = energy(places), jax.grad(lambda p: jnp.sum(energy(p)))(places)
    return jnp.mean((found - energies) ** 2) + 10 * jnp.mean((slopes + wanted) ** 2)


@family("Gradient penalty", DERIVATIVE, "b s s d", "b s s d", b=32, s=32, d=128)
def gradient_penalty(net, real, fake):
    @net.again
    def critic(x):
        x = net.half(x)
        for layer in range(net.layers):
            x = jax.nn.leaky_relu(net.conv(x, net.d, 3, strides=1 + (layer == 0)), 0.2)
        return full(net.dense(x.reshape(net.b, -1), 1))[:, 0]

    slopes = full(jax.grad(lambda x: jnp.sum(critic(x)))((real + fake) / 2))
    sizes = jnp.sqrt(jnp.sum(slopes**2, (1, 2, 3)) + 1e-6)
    return jnp.mean(critic(fake) - critic(real)) + 10 * jnp.mean((sizes - 1) ** 2)


@family("Sliced score matching", DERIVATIVE, "n d", "n d", n=8192, d=512)
def score_matching(net, x, directions):
    score = net.again(lambda x: net.mlp(net.half(x), *[net.d] * net.layers, net.d, act=jax.nn.silu))
    found, along = jax.jvp(score, (x,), (directions,))
    return jnp.mean(jnp.sum(full(along) * directions, -1)) + net.d * mean_square(found) / 2


@family("MAML: a step inside", DERIVATIVE, "n d", "n d", "n d", "n d", n=8192, d=512)
def maml(net, near, wanted, far, expected):
    deviation = net.d**-0.5
    weights = [net.master(net.d, net.d, deviation=deviation) for _ in range(net.layers)]

    def error(weights, x, wanted):
        x = net.half(x)
        for weight in weights:
            x = jax.nn.silu(x @ net.half(weight))
        return mean_square(full(x) - wanted)

    slopes = jax.grad(error)(weights, near, wanted)
    moved = jax.tree.map(lambda w, slope: w - 0.1 * slope, weights, slopes)
    return error(moved, far, expected)


# Tables, flows, fields, networks of networks.


@family("DLRM: embeddings, pairs", OTHER, "n d", "n 26 <v", "n", n=4096, d=64, v=65536)
def dlrm(net, numbers, places, clicks):
    rows = net.half(net.master(net.v, net.d, deviation=0.1))[places]
    bottom = net.mlp(net.half(numbers), *[512] * net.layers, net.d, act=jax.nn.relu)
    every = jnp.concatenate([bottom[:, None], rows], 1)
    pairs = jnp.einsum("nid,njd->nij", every, every)[:, *jnp.triu_indices(27, 1)]
    x = jnp.concatenate([bottom, pairs], -1)
    logits = full(net.mlp(x, *[512] * net.layers, 1, act=jax.nn.relu))[:, 0]
    return jnp.mean(jax.nn.softplus(logits) - logits * clicks)


@family("DCN v2: crossed features", OTHER, "n 16 <v", "n", n=8192, d=32, v=65536)
def crossed(net, places, clicks):
    first = x = net.table(net.v, net.d)[places].reshape(net.n, 16 * net.d)
    for _ in range(net.layers):
        x = first * net.dense(x, 16 * net.d) + x
    logits = full(net.mlp(net.norm(x), 512, 1, act=jax.nn.relu))[:, 0]
    return jnp.mean(jax.nn.softplus(logits) - logits * clicks)


@family("RealNVP", OTHER, "n d", n=8192, d=512)
def realnvp(net, x):
    volume = 0.0
    for _ in range(net.layers):
        a, b = jnp.split(x, 2, -1)  # in float32, as what is inverted must be
        scale, shift = jnp.split(full(net.mlp(net.half(a), net.d, net.d, net.d, act=jax.nn.relu)), 2, -1)  # fmt: skip  # noqa: E501
        scale = jnp.tanh(scale)
        x = jnp.concatenate([b * jnp.exp(scale) + shift, a], -1)
        volume = volume + jnp.mean(scale)
    return mean_square(x) / 2 - volume / 2


@family("NeRF: rays", OTHER, "n 3", "n 3", "n 3", n=1024, d=256)
def nerf(net, origins, directions, colours):
    depths = jnp.linspace(2, 6, 32)
    points = origins[:, None] + depths[:, None] * directions[:, None]
    angles = (points[..., None] * 2.0 ** jnp.arange(6)).reshape(net.n, 32, 18)
    features = net.half(jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1))
    x = features
    for layer in range(net.layers):
        x = jnp.concatenate([x, features], -1) if layer == net.layers // 2 else x
        x = jax.nn.relu(net.dense(x, net.d))
    y = full(net.dense(x, 4))
    passed = jnp.exp(-jax.nn.softplus(y[..., 3]) / 8)
    reached = jnp.cumprod(jnp.concatenate([jnp.ones_like(passed[:, :1]), passed[:, :-1]], 1), 1)
    found = jnp.sum((reached * (1 - passed))[..., None] * jax.nn.sigmoid(y[..., :3]), 1)
    return jnp.mean((found - colours) ** 2)


@family("Hypernetwork", OTHER, "b t d", "b d", "b t d", b=32, t=512, d=256)
def hypernetwork(net, x, condition, targets):
    x, condition = net.half(x), net.half(condition)
    for _ in range(net.layers):
        parts = net.mlp(condition, 64, 16 * net.d, act=jax.nn.silu).reshape(2, net.b, 8, net.d)
        kernels = jnp.einsum("bki,bkj->bij", *parts) * net.d**-0.5
        x = x + jax.nn.silu(jnp.einsum("bti,bij->btj", net.norm(x), kernels))
    return mean_square(full(net.dense(x, net.d)) - targets)
