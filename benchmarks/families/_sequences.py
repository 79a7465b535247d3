"""Families over sequences: transformers, recurrences, long convolutions."""

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.families._layers import causal, cross_entropy, family, full, mean_square

TRANSFORMER, RECURRENCE, CONVOLUTION = "transformer", "recurrence", "convolution"
TOKENS = {"b": 16, "t": 512, "d": 512, "h": 8, "v": 8192}


def language_loss(net, x, words):
    return cross_entropy(net.dense(x, net.v, bias=False), words)


@family("T5: relative bias, GEGLU", TRANSFORMER, "b t <v", "b t <v", **TOKENS)
def t5(net, words, targets):
    x = net.table(net.v, net.d)[words]
    distance = jnp.clip(jnp.arange(net.t) - jnp.arange(net.t)[:, None], -16, 15) + 16
    bias = net.master(32, net.h)[distance].transpose(2, 0, 1)
    for _ in range(net.layers):
        x = x + net.attention(net.rms_norm(x), change=lambda scores: scores + bias)
        y = net.rms_norm(x)
        x = x + net.dense(jax.nn.gelu(net.dense(y, 2 * net.d)) * net.dense(y, 2 * net.d), net.d)
    return language_loss(net, net.rms_norm(x), targets)


def rotary(heads):
    """Turns pairs of channels by angles that grow with the place, in float32."""
    rates = 1e4 ** -jnp.linspace(0, 1, heads.shape[-1] // 2)
    angles = (jnp.arange(heads.shape[1])[:, None] * rates)[:, None]
    a, b = jnp.split(full(heads), 2, -1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(heads.dtype)


@family("Gemma 2: caps, norms on both sides", TRANSFORMER, "b t <v", "b t <v", **TOKENS)
def gemma_2(net, words, targets):
    cap = lambda scores, most: most * jnp.tanh(scores / most)
    table = net.table(net.v, net.d)
    x = table[words]
    for _ in range(net.layers):
        change = lambda scores: causal(cap(scores, 50.0))
        y = net.attention(net.rms_norm(x), change=change, turn=rotary)
        x = x + net.rms_norm(y)
        y = net.rms_norm(x)
        y = net.dense(jax.nn.gelu(net.dense(y, 2 * net.d)) * net.dense(y, 2 * net.d), net.d)
        x = x + net.rms_norm(y)
    return cross_entropy(cap(full(net.rms_norm(x) @ table.T), 30.0), targets)


@family("Swin v2: windows, cosines", TRANSFORMER, "b s s d", "b <v", b=32, s=28, w=7, d=384, h=12, v=1000)  # fmt: skip  # noqa: E501
def swin_2(net, x, labels):
    x, b, s, w = net.half(x), net.b, net.s, net.w
    side = s // w

    def unit(heads):
        y = full(heads)
        return net.half(y * lax.rsqrt(jnp.sum(y * y, -1, keepdims=True) + 1e-6))

    for layer in range(net.layers):
        y = jnp.roll(x, (-(w // 2) * (layer % 2),) * 2, (1, 2))
        y = y.reshape(b, side, w, side, w, net.d).transpose(0, 1, 3, 2, 4, 5)
        bias = net.master(net.h, w * w, w * w)
        change = lambda scores, bias=bias: 10 * net.d**0.5 * scores + bias
        y = net.attention(y.reshape(b * side * side, w * w, net.d), change=change, turn=unit)
        y = y.reshape(b, side, side, w, w, net.d).transpose(0, 1, 3, 2, 4, 5)
        y = jnp.roll(y.reshape(x.shape), (w // 2 * (layer % 2),) * 2, (1, 2))
        x = x + net.norm(y)
        x = x + net.norm(net.mlp(x, 4 * net.d, net.d))
    return cross_entropy(net.dense(jnp.mean(full(x), (1, 2)).astype(x.dtype), net.v), labels)


@family("DiT: modulated norms", TRANSFORMER, "b t d", "b d", "b t d", b=32, t=256, d=512, h=8)
def dit(net, x, condition, noise):
    x, c = net.half(x), jax.nn.silu(net.half(condition))
    modulated = lambda x, shift, scale: net.norm(x, affine=False) * (1 + scale) + shift
    for _ in range(net.layers):
        a, b, gate, c_, d, last = jnp.split(net.dense(c, 6 * net.d)[:, None], 6, -1)
        x = x + gate * net.attention(modulated(x, a, b))
        x = x + last * net.mlp(modulated(x, c_, d), 4 * net.d, net.d)
    return mean_square(full(net.dense(net.norm(x), net.d)) - noise)


@family("Mixture of experts, top 1", TRANSFORMER, "b t <v", "b t <v", experts=8, **TOKENS)
def experts(net, words, targets):
    x, room = net.table(net.v, net.d)[words], net.t // net.experts
    for _ in range(net.layers):
        x = x + net.attention(net.norm(x), change=causal)
        y = net.norm(x)
        chances = jax.nn.softmax(full(net.dense(y, net.experts, bias=False)), -1)
        chosen = jax.nn.one_hot(jnp.argmax(chances, -1), net.experts)
        places = jnp.cumsum(chosen, 1) * chosen - 1
        sent = jax.nn.one_hot(places.astype(jnp.int32), room) * chosen[..., None]
        weights = net.half(sent * jnp.max(chances, -1)[..., None, None])
        y = jnp.einsum("btec,btd->ebcd", net.half(sent), y)
        y = jax.nn.gelu(jnp.einsum("ebcd,edf->ebcf", y, net.kernel(net.experts, net.d, 4 * net.d)))
        y = jnp.einsum("ebcf,efd->ebcd", y, net.kernel(net.experts, 4 * net.d, net.d))
        x = x + jnp.einsum("btec,ebcd->btd", weights, y)
    return language_loss(net, net.norm(x), targets)


@family("BERT: dropout, norms after", TRANSFORMER, "b t <v", "b t <v", **TOKENS)
def bert(net, words, targets):
    keys = iter(jax.random.split(jax.random.key(0), 3 * net.layers))

    def dropout(x):
        # A float32 probability: with a float64 one the reference would draw other masks.
        kept = jax.random.bernoulli(next(keys), jnp.float32(0.9), x.shape)
        return jnp.where(kept, x / 0.9, 0)

    x = net.norm(net.table(net.v, net.d)[words] + net.table(net.t, net.d))
    for _ in range(net.layers):
        x = net.norm(x + dropout(net.attention(x, change=dropout)))
        x = net.norm(x + dropout(net.mlp(x, 4 * net.d, net.d)))
    return language_loss(net, x, targets)


@family("CLIP: two towers, two softmaxes", TRANSFORMER, "b t d", "b t <v", b=256, t=64, d=512, h=8, v=8192)  # fmt: skip  # noqa: E501
def clip(net, patches, words):
    towers = []
    for x in (net.dense(net.half(patches), net.d), net.table(net.v, net.d)[words]):
        x = x + net.table(net.t, net.d)
        for _ in range(net.layers):
            x = net.block(x)
        y = full(net.dense(net.norm(x[:, 0]), net.d, bias=False))
        towers.append(net.half(y * lax.rsqrt(jnp.sum(y * y, -1, keepdims=True))))
    scores = 14.0 * full(towers[0] @ towers[1].T)
    labels = jnp.arange(net.b)
    return (cross_entropy(scores, labels) + cross_entropy(scores.T, labels)) / 2


@family("Perceiver: latent array", TRANSFORMER, "b n d", "b <v", b=16, n=2048, t=256, d=512, h=8, v=1000)  # fmt: skip  # noqa: E501
def perceiver(net, inputs, labels):
    inputs = net.norm(net.half(inputs))
    x = jnp.broadcast_to(net.table(net.t, net.d), (net.b, net.t, net.d))
    for _ in range(net.layers):
        x = net.block(net.block(x, others=inputs))
    return cross_entropy(net.dense(jnp.mean(full(x), 1).astype(x.dtype), net.v), labels)


# Recurrences. Weights are cast before the loop, as Flax's `dtype=` does.

STEPS = {"b": 64, "t": 128, "d": 512}


def over_time(turn, state, *inputs):
    """Scans the second axis of the inputs."""
    state, ys = lax.scan(turn, state, tuple(jnp.moveaxis(x, 1, 0) for x in inputs))
    return jnp.moveaxis(ys, 0, 1)


@family("GRU", RECURRENCE, "b t d", "b t d", **STEPS)
def gru(net, x, targets):
    x = net.half(x)
    for _ in range(net.layers):
        recurrent, bias = net.kernel(net.d, 3 * net.d), net.bias(3 * net.d)

        def turn(h, inputs, recurrent=recurrent, bias=bias):
            r, z, n = jnp.split(inputs[0], 3, -1)
            of_r, of_z, of_n = jnp.split(h @ recurrent + bias, 3, -1)
            z = jax.nn.sigmoid(z + of_z)
            h = (1 - z) * jnp.tanh(n + jax.nn.sigmoid(r + of_r) * of_n) + z * h
            return h, h

        x = over_time(turn, jnp.zeros_like(x[:, 0]), net.dense(x, 3 * net.d))
    return mean_square(full(x) - targets)


@family("sLSTM: exponential gates", RECURRENCE, "b t d", "b t d", **STEPS)
def slstm(net, x, targets):
    x = net.half(x)
    for _ in range(net.layers):
        recurrent, y = net.kernel(net.d, 4 * net.d), net.dense(net.norm(x), 4 * net.d)

        def turn(state, inputs, recurrent=recurrent):
            h, c, n, m = state
            z, i, f, o = jnp.split(full(inputs[0] + h @ recurrent), 4, -1)
            f = jax.nn.log_sigmoid(f)
            top = jnp.maximum(f + m, i)
            i, f = jnp.exp(i - top), jnp.exp(f + m - top)
            c, n = f * c + i * jnp.tanh(z), f * n + i
            h = net.half(jax.nn.sigmoid(o) * c / jnp.maximum(n, 1e-6))
            return (h, c, n, top), h

        zeros = jnp.zeros_like(full(x[:, 0]))
        x = x + net.dense(over_time(turn, (zeros.astype(x.dtype), *[zeros] * 3), y), net.d)
    return mean_square(full(x) - targets)


@family("Linear recurrent unit", RECURRENCE, "b t d", "b t d", b=32, t=256, d=512)
def linear_recurrent_unit(net, x, targets):
    x = net.half(x)
    for _ in range(net.layers):
        y = full(net.dense(net.norm(x), 2 * net.d))
        decay = jnp.exp(-jnp.exp(net.master(net.d, mean=-2.0)))
        rates = jnp.broadcast_to(decay * jnp.exp(1j * net.master(net.d)), (net.b, net.t, net.d))
        inputs = lax.complex(*jnp.split(y, 2, -1)) * jnp.sqrt(1 - decay**2)
        join = lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1])
        states = lax.associative_scan(join, (rates, inputs), axis=1)[1]
        y = net.half(jnp.concatenate([jnp.real(states), jnp.imag(states)], -1))
        x = x + net.dense(jax.nn.gelu(net.dense(y, net.d)), net.d)
    return mean_square(full(x) - targets)


@family("Mamba: selective scan", RECURRENCE, "b t d", "b t d", b=16, t=128, d=512, states=16)
def mamba(net, x, targets):
    x = net.half(x)
    for _ in range(net.layers):
        y, gate = jnp.split(net.dense(net.norm(x), 4 * net.d), 2, -1)
        y = jax.nn.silu(net.conv(y, 2 * net.d, 4, groups=2 * net.d, padding="CAUSAL"))
        steps = jax.nn.softplus(full(net.dense(net.dense(y, net.d // 16), 2 * net.d)))
        into, out = jnp.split(full(net.dense(y, 2 * net.states)), 2, -1)
        rates = -jnp.exp(net.master(2 * net.d, net.states))

        def turn(h, inputs, rates=rates):
            step, into, out, y = inputs
            h = jnp.exp(step[..., None] * rates) * h + (step * y)[..., None] * into[:, None]
            return h, jnp.einsum("bds,bs->bd", h, out)

        zeros = jnp.zeros((net.b, 2 * net.d, net.states), steps.dtype)
        y = net.half(over_time(turn, zeros, steps, into, out, full(y)))
        x = x + net.dense(y * jax.nn.silu(gate), net.d)
    return mean_square(full(net.norm(x)) - targets)


@family("RWKV", RECURRENCE, "b t <v", "b t <v", b=16, t=256, d=512, v=8192)
def rwkv(net, words, targets):
    def mixed(x):
        share = net.half(net.master(net.d, mean=0.5))
        return x * share + jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1] * (1 - share)

    def turn(state, inputs):
        (a, b, top), (k, v, bonus, decay) = state, inputs
        here = jnp.maximum(top, k + bonus)
        old, new = jnp.exp(top - here), jnp.exp(k + bonus - here)
        y = (old * a + new * v) / (old * b + new)
        after = jnp.maximum(top - decay, k)
        old, new = jnp.exp(top - decay - after), jnp.exp(k - after)
        return (old * a + new * v, old * b + new, after), y

    x = net.table(net.v, net.d)[words]
    for _ in range(net.layers):
        y = net.norm(x)
        r, k, v = (net.dense(mixed(y), net.d, bias=False) for _ in range(3))
        bonus, decay = net.master(net.d), jnp.exp(net.master(net.d))
        zeros = jnp.zeros_like(full(k[:, 0]))
        body = lambda s, i, bonus=bonus, decay=decay: turn(s, (*i, bonus, decay))
        y = over_time(body, (zeros, zeros, zeros - 1e30), full(k), full(v))
        x = x + net.dense(jax.nn.sigmoid(r) * net.half(y), net.d, bias=False)
        y = net.norm(x)
        gate = jax.nn.sigmoid(net.dense(mixed(y), net.d, bias=False))
        y = jnp.square(jax.nn.relu(net.dense(mixed(y), 4 * net.d, bias=False)))
        x = x + gate * net.dense(y, net.d, bias=False)
    return language_loss(net, net.norm(x), targets)


@family("Neural ODE, Runge-Kutta", RECURRENCE, "n d", "n d", n=8192, d=512)
def neural_ode(net, x, targets):
    weights = [(net.kernel(net.d, net.d), net.bias(net.d)) for _ in range(net.layers)]

    def slope(x):
        for kernel, bias in weights:
            x = jnp.tanh(x @ kernel + bias)
        return x

    def turn(x, _):
        step = 1 / 8
        a = slope(x)
        b = slope(x + step / 2 * a)
        c = slope(x + step / 2 * b)
        return x + step / 6 * (a + 2 * b + 2 * c + slope(x + step * c)), None

    return mean_square(full(lax.scan(turn, net.half(x), None, length=8)[0]) - targets)


# Convolutions over time.


@family("WaveNet: gated, dilated", CONVOLUTION, "b t d", "b t <v", b=16, t=2048, d=128, v=256)
def wavenet(net, x, labels):
    x, skipped = net.dense(net.half(x), net.d), 0
    for layer in range(net.layers):
        y = net.conv(x, 2 * net.d, 2, dilation=2 ** (layer % 6), padding="CAUSAL")
        a, b = jnp.split(y + net.bias(2 * net.d), 2, -1)
        y = jnp.tanh(a) * jax.nn.sigmoid(b)
        skipped = skipped + net.dense(y, net.d)
        x = x + net.dense(y, net.d)
    return cross_entropy(net.mlp(jax.nn.relu(skipped), net.d, net.v, act=jax.nn.relu), labels)


@family("Hyena: long filters by FFT", CONVOLUTION, "b t d", "b t d", b=16, t=1024, d=256)
def hyena(net, x, targets):
    x = net.half(x)
    times = jnp.linspace(0, 1, net.t)[:, None]
    features = net.half(jnp.concatenate([times, jnp.sin(8 * times), jnp.cos(8 * times)], -1))
    for _ in range(net.layers):
        y = net.dense(net.norm(x), 3 * net.d)
        q, k, v = jnp.split(net.conv(y, 3 * net.d, 3, groups=3 * net.d, padding="CAUSAL"), 3, -1)
        kernel = full(net.mlp(features, 64, 64, net.d, act=jnp.sin)) * jnp.exp(-4 * times)
        waves = [jnp.fft.rfft(y, 2 * net.t, axis=-2) for y in (full(k * v), kernel)]
        y = jnp.fft.irfft(waves[0] * waves[1], axis=-2)[:, : net.t] / net.t**0.5
        x = x + net.dense(q * net.half(y), net.d)
    return mean_square(full(net.norm(x)) - targets)
