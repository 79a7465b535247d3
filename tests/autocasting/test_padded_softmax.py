"""Attention over odd lengths, on GPUs: its products are padded once, and its softmax with them."""

import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp
from jmp.autocasting.targets import _softmax
from testbed.machines.gpus import as_if_cudnn
from tests.autocasting.attentions import attention, scores, weigh
from tests.commands import in_full
from tests.errors import assert_near, relative_error

pytestmark = pytest.mark.usefixtures("users_rank_promotion")

ODD, EVEN = 61, 64


def tokens(length=ODD, keys=None, heads=2, batch=4, shared=None):
    """Queries, keys and values: (batch, length, heads, 16)."""
    rng = np.random.default_rng(0)
    shapes = [(length, heads)] + [(keys or length, shared or heads)] * 2
    return [jnp.asarray(rng.normal(size=(batch, *s, 16)), jnp.float32) for s in shapes]


einsums = attention()


def head_by_head(q, k, v):
    def one(q, k, v):
        scores = q @ k.T / 4
        powers = jnp.exp(scores - scores.max(-1, keepdims=True))
        return (powers / powers.sum(-1, keepdims=True)) @ v

    return jax.vmap(jax.vmap(one, in_axes=1, out_axes=1))(q, k, v)


WAYS = {
    "einsums": (einsums, tokens()),
    "jax.nn": (jax.nn.dot_product_attention, tokens()),
    "queries in groups": (jax.nn.dot_product_attention, tokens(heads=4, shared=2)),
    "eight queries in a group": (jax.nn.dot_product_attention, tokens(heads=8, shared=1)),
    "head by head": (head_by_head, tokens()),
    "odd keys alone": (einsums, tokens(EVEN, ODD)),
    "odd queries alone": (einsums, tokens(ODD, EVEN)),
    "few queries": (einsums, tokens(3, 611)),
}


def mixed(function, half="bfloat16", **options):
    return jmp.autocast(function, f"mixed_{half}", platform="gpu", recompute="all", **options)


def unpadded(function):
    def as_elsewhere(*args):
        with mock.patch.object(_softmax, "MULTIPLE", 1):
            return mixed(function, "float16")(*args)

    return as_elsewhere


def pads(function, *args):
    """The arrays that a program pads, by their shapes afterwards."""
    return re.findall(r":\w+\[([\d,]+)\] = pad\[", str(jax.make_jaxpr(function)(*args)))


def with_gradients(function, args):
    """A result and its gradients."""

    def both(*args):
        result, pull_back = jax.vjp(function, *args)
        return result, *pull_back(jnp.cos(result))

    return jax.jit(both)(*args)


def errors(found, exact):
    return list(map(relative_error, found, exact))


@pytest.mark.parametrize(("function", "args"), in_full(WAYS, one_of=3))
def test_results_and_gradients_are_as_exact_as_without_it(function, args):
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x, np.float64)) for x in args]
        exact = [np.asarray(x) for x in with_gradients(function, wide)]

    errors_of = lambda call: errors(with_gradients(call, args), exact)
    assert pads(mixed(function), *args)
    padded, as_written = errors_of(mixed(function, "float16")), errors_of(unpadded(function))
    assert not pads(unpadded(function), *args)
    np.testing.assert_allclose(padded, as_written, rtol=0.02)
    assert max(padded) <= 1e-3
    # In bfloat16 a CPU leaves out some roundings of the unpadded program.
    assert max(errors_of(mixed(function))) <= 1.3e-2


def test_what_is_padded_is_small():
    """Queries, keys and values, and the cotangent of the result; not scores and weights."""
    args = tokens()
    assert pads(mixed(einsums), *args) == ["4,64,2,16"] * 3
    gradient = jax.grad(lambda *args: jnp.sin(mixed(einsums)(*args)).sum(), (0, 1, 2))
    shapes = pads(gradient, *args)
    assert shapes[:4] == ["4,64,2,16"] * 3 + ["4,2,16,64"]
    # The derivative of a padding cuts.
    assert shapes[4:] == ["4,61,2,16"] * 3


def test_low_scores_are_not_lost_beside_padding():
    """Padded keys have scores of zero: far larger than the others of these rows."""
    q, k, v = tokens()
    far = q + 30, k - 30, v
    assert scores(*far[:2]).max() < -1000
    ways = mixed(einsums, "float16"), unpadded(einsums)
    found, exact = (with_gradients(way, far) for way in ways)
    assert_near(found, exact, 1e-3)


def test_overflow_stays_in_the_rows_where_it_is():
    q, k, v = tokens(batch=1)
    q = q.at[0, 5].set(6e4)
    found, exact = (call(q, k, v) for call in (mixed(einsums, "float16"), unpadded(einsums)))
    assert not jnp.isfinite(exact[0, 5]).any()
    np.testing.assert_array_equal(jnp.isfinite(found), jnp.isfinite(exact))
    np.testing.assert_allclose(found, exact, atol=2e-3)


# Where nothing is padded.


def masked(q, k, v):
    kept = jnp.tril(jnp.ones((q.shape[1], k.shape[1]), bool))
    return jax.nn.dot_product_attention(q, k, v, mask=kept[None, None])


def with_scores(q, k, v):
    found = scores(q, k)
    return weigh(jax.nn.softmax(found), v), found


def with_weights(q, k, v):
    weights = jax.nn.softmax(scores(q, k))
    return weigh(weights, v), jnp.einsum("bhqk,bhqk->bhq", weights, weights)


def colder(q, k, v):
    """Behind the end of a row -inf would become +inf."""
    found = scores(q, k)
    powers = jnp.exp(-0.5 * (found - found.max(-1, keepdims=True)))
    return weigh(powers / powers.sum(-1, keepdims=True), v)


def by_one_query(q, k, v):
    weights = jax.nn.softmax(jnp.einsum("bhd,bkhd->bhk", q[:, 0], k))
    return jnp.einsum("bhk,bkhd->bhd", weights, v)


NOT_PADDED = {
    "even": (einsums, tokens(EVEN)),
    "one query": (einsums, tokens(1, 611)),
    "no axis of queries": (by_one_query, tokens(1, 611)),
    "one key": (einsums, tokens(611, 1)),
    "a mask": (masked, tokens()),
    "scores that leave": (with_scores, tokens()),
    "weights that are read twice": (with_weights, tokens()),
    "another sum over the keys": (attention(lambda x: x - x.mean(-1, keepdims=True)), tokens()),
    "another function of the differences": (colder, tokens()),
    "a region in float32": (jmp.full_precision(einsums), tokens()),
    "zeros whose logarithm is infinite": (attention(lambda x: jnp.log(x * x)), tokens()),
    "zeros whose reciprocal is infinite": (attention(lambda x: 1 / x), tokens()),
}


@pytest.mark.parametrize(("function", "args"), NOT_PADDED.values(), ids=NOT_PADDED)
def test_what_is_left_as_it_is(function, args):
    assert pads(mixed(function), *args) == []


@pytest.mark.parametrize(
    ("options", "length", "is_padded"),
    [
        ({"platform": "tpu", "recompute": "all"}, ODD, False),
        ({"platform": "gpu", "recompute": "none"}, ODD, False),
        ({"platform": "gpu"}, 9, False),  # small arrays
        ({"platform": "gpu"}, ODD, True),
        ({"platform": "gpu", "recompute": "all", "full": ["dot_general"]}, ODD, False),
    ],
)
def test_only_large_half_arrays_of_gpus_are_padded(options, length, is_padded):
    lowered = jmp.autocast(einsums, "mixed_bfloat16", **options)
    assert bool(pads(lowered, *tokens(length))) is is_padded


# Beside other transformations.


def layers(args, number=3):
    x, *_ = args
    return jax.lax.scan(lambda x, _: (jax.checkpoint(einsums)(x, x, x), None), x, None, number)[0]


def test_inside_of_loops_and_recomputed_functions():
    args = tokens()
    assert pads(mixed(layers), args)
    found, exact = (
        jax.jit(jax.grad(lambda x, f=function: jnp.sin(f((x,))).sum()))(args[0])
        for function in (mixed(layers, "float16"), layers)
    )
    assert relative_error(found, exact) <= 2e-3


def test_a_batch_that_is_a_symbol():
    batch, length = export.symbolic_shape("b, n")
    for shape, is_padded in (((batch, ODD, 2, 16), True), ((4, length, 2, 16), False)):
        arrays = [jax.ShapeDtypeStruct(shape, jnp.float32)] * 3
        exported = export.export(jax.jit(mixed(einsums, "float16")))(*arrays)
        assert ("stablehlo.pad" in exported.mlir_module()) is is_padded
        np.testing.assert_allclose(exported.call(*tokens()), einsums(*tokens()), atol=3e-3)


@pytest.mark.parametrize(
    ("kind", "devices", "length", "is_padded"),
    [
        (AxisType.Auto, 1, ODD, True),
        (AxisType.Auto, 4, ODD, True),  # it cannot lie along four devices
        (AxisType.Auto, 2, 62, False),
        (AxisType.Explicit, 4, ODD, False),
    ],
)
def test_on_a_mesh(kind, devices, length, is_padded):
    mesh = jax.make_mesh((devices,), ("data",), axis_types=(kind,), devices=jax.devices()[:devices])
    placed = jax.device_put(tokens(length), NamedSharding(mesh, P("data")))
    with jax.set_mesh(mesh):
        half = mixed(jax.nn.dot_product_attention if is_padded else einsums, "float16")
        assert bool(pads(half, *placed)) == is_padded
        found = jax.jit(half)(*placed)
    np.testing.assert_allclose(found, einsums(*tokens(length)), atol=3e-3)


def test_inside_of_shard_map_it_is_left_as_it_is():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    mapped = jax.shard_map(mixed(einsums), mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    assert pads(mapped, *tokens()) == []
    np.testing.assert_allclose(mapped(*tokens()), einsums(*tokens()), atol=3e-2)


def test_a_fused_attention_is_fused():
    fused = jmp.autocast(einsums, "mixed_bfloat16", platform="gpu", attention="fused")
    with as_if_cudnn():
        text = str(jax.make_jaxpr(fused)(*tokens()))
    assert "platform_index" in text
    assert ",64,64] = pad" not in text


def test_a_product_between_two_softmaxes_is_padded_for_one_of_them():
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = (4, 61, 16), (4, 61, 16), (4, 61, 53), (4, 53, 16)
    args = [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]

    def attend(q, k, v, w):
        return jax.nn.softmax(jax.nn.softmax(q @ k.mT) @ v) @ w

    assert pads(mixed(attend), *args)
    exact, padded, as_written = (
        with_gradients(call, args) for call in (attend, mixed(attend, "float16"), unpadded(attend))
    )
    np.testing.assert_allclose(errors(padded, exact), errors(as_written, exact), rtol=0.02)
