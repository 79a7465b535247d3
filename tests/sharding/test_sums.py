"""Sums of half gradients over devices: sent in half, added up in float32."""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp
from jmp import transforms
from jmp.sharding import _gather

DATA, BOTH = {"data": 8}, {"replica": 2, "data": 4}
NAMES = ("replica", "data")
COLLECTIVE = re.compile(r":(\w+)\[([\d,]*)\]\S* = (all_to_all|all_gather|reduce_scatter|psum)\w*\[")


def make_mesh(axes, kind=AxisType.Auto):
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes))


def summed(parts, axes, spec, by, check_vma=True, **dtypes):
    """Returns the gradient of a parameter that is gathered, of which each device has its own part.

    Args:
      parts: an array of the whole parameter for each device, exact in the gathered dtype.
      axes, spec, by: the mesh, how the parameter lies, and what it is gathered by.
    """
    dtypes = {"dtype": "float16", "reduce_dtype": "float32"} | dtypes

    def loss(w, part):
        whole = jmp.gather_params(w, by, **dtypes).astype(jnp.float32)
        return jnp.sum(whole * part[0].astype(jnp.float32))

    specs = (spec, P(tuple(axes)))
    options = {"in_specs": specs, "out_specs": spec, "check_vma": check_vma}
    gradient = jax.shard_map(jax.grad(loss), mesh=make_mesh(axes), **options)
    return jax.jit(gradient)(jnp.zeros(parts.shape[1:], jnp.float32), parts)


def assert_sum_of(parts, found):
    """Compares with a sum in float64, to the last digits of float32."""
    exact = np.asarray(parts, np.float64)
    allowed = 8 * 2.0**-24 * np.abs(exact).sum(0) + 1e-45
    assert found.dtype == np.float32
    assert (np.abs(np.asarray(found, np.float64) - exact.sum(0)) <= allowed).all()


def draw(kind, shape, dtype=np.float16):
    random = np.random.default_rng(3)
    parts = random.normal(size=(8, *shape))
    if kind == "one large":  # in half each of the others would vanish beside it
        parts[5] *= 3e4
        parts[5] = np.clip(parts[5], -6e4, 6e4)
    elif kind == "cancel":
        parts[4:] = -parts[:4] * (1 + 2.0**-8)
        parts *= 1e4
    elif kind == "subnormal":
        parts *= 2.0**-22
    return np.asarray(jnp.asarray(parts, jnp.float32).astype(dtype))


LAYOUTS = {  # the shape, the mesh, how it lies, and what it is gathered by
    "rows": ((16, 5), DATA, P("data"), "data"),
    "columns": ((3, 16), DATA, P(None, "data"), P(None, "data")),
    "a kernel": ((3, 3, 2, 8), DATA, P(None, None, None, "data"), P(None, None, None, "data")),
    "a vector": ((8,), DATA, P("data"), "data"),
    "two dimensions": ((8, 12), BOTH, P("replica", "data"), P("replica", "data")),
    "two dimensions, across": ((8, 12), BOTH, P("data", "replica"), P("data", "replica")),
    "a dimension along two axes": ((16, 3), BOTH, P(NAMES), P(NAMES)),
    "replicas": ((16, 6), BOTH, P("data"), P("data", reduced={"replica"})),
    "replicas that divide no dimension": ((4, 3), BOTH, P("data"), P("data", reduced={"replica"})),
    "everywhere": ((16, 3), DATA, P(), "data"),
    "everywhere, divided by no dimension": ((3, 5), DATA, P(), "data"),
    "a scalar": ((), DATA, P(), "data"),
    "nothing": ((0, 4), DATA, P(), "data"),
    "one device": ((4, 2), {"data": 1}, P("data"), "data"),
    "two devices": ((4, 2), {"data": 2}, P("data"), "data"),
}


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sum_is_the_float32_sum_of_half_gradients(layout, check_vma):
    shape, axes, spec, by = LAYOUTS[layout]
    if not check_vma and spec == P():  # nothing says that it is the same on all devices
        by = P(reduced={"data"})
    parts = draw("random", shape)[: np.prod(list(axes.values()))]
    assert_sum_of(parts, summed(parts, axes, spec, by, check_vma))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", ["one large", "cancel", "subnormal"])
def test_adversarial_gradients_add_up_as_in_float32_in_any_order(kind, dtype):
    parts = draw(kind, (16, 32), dtype)
    for order in (range(8), [5, 0, 7, 2, 1, 6, 3, 4]):
        found = summed(parts[list(order)], DATA, P("data"), "data", dtype=dtype)
        assert_sum_of(parts, found)
    in_half = summed(parts, DATA, P("data"), "data", dtype=dtype, reduce_dtype=dtype)
    if dtype == "float16" and kind != "subnormal":  # a CPU adds up bfloat16 in float32
        exact = np.asarray(parts, np.float64).sum(0)
        assert np.abs(in_half - exact).max() > 100 * np.abs(np.asarray(found) - exact).max()


def test_a_sum_returns_to_replicas_in_the_dtype_asked():
    parts = draw("random", (16, 3))
    found = summed(parts, DATA, P(), "data", return_dtype="float16")
    exact = np.asarray(parts, np.float64).sum(0)
    np.testing.assert_array_equal(found, np.float32(exact.astype(np.float16)))


def test_float32_gradients_are_rounded_once_if_half_is_sent():
    parts = np.random.default_rng(0).normal(size=(8, 16, 3)).astype(np.float32)
    options = {"dtype": "float32", "send_dtype": "float16"}
    assert_sum_of(parts.astype(np.float16), summed(parts, DATA, P("data"), "data", **options))


@pytest.mark.parametrize("by", ["rows", "columns", "replicas", "across", "tensor parallel"])
def test_along_explicit_axes_sums_are_as_in_shard_map(by):
    axes = {"replica": 2, "data": 4} if by == "replicas" else {"data": 4, "model": 2}
    own, whole = {
        "rows": (P("data"), P()),
        "columns": (P(None, "data"), P()),
        "replicas": (P("data"), P()),
        "across": (P(("data", "model")), P("model")),  # shards that no device has together
        "tensor parallel": (P("data", "model"), P(None, "model")),
    }[by]
    rows = P(NAMES) if by == "replicas" else P("data")
    options = {} if by in ("replicas", "tensor parallel", "across") else {"reduced": {"data"}}
    random = np.random.default_rng(1)
    x = np.float16(random.integers(0, 2, size=(8, 16)))  # the products are exact
    factor = np.float16(random.normal(size=(8, 8)))
    exact = np.einsum("ri,ro->rio", np.float64(x), np.float64(factor))

    def loss(w, x, factor):
        w = jmp.gather_params(w, P(*whole, **options), "float16", "float32")
        columns = "model" if by == "tensor parallel" else None
        product = jnp.einsum("bi,io->bo", x, w, out_sharding=P(*rows, columns))
        return jnp.sum(product.astype(jnp.float32) * factor)

    mesh = make_mesh(axes, AxisType.Explicit)
    with jax.set_mesh(mesh):
        place = lambda array, spec: jax.device_put(array, NamedSharding(mesh, spec))
        w = place(jnp.zeros((16, 8)), own)
        columns = P(*rows, "model") if by == "tensor parallel" else rows
        arguments = w, place(x, rows), place(factor, columns)
        gradient = jax.jit(jax.grad(loss))(*arguments)
        text = str(jax.make_jaxpr(jax.grad(loss))(*arguments))
    assert gradient.sharding.is_equivalent_to(w.sharding, 2)
    assert ("all_to_all" in text) == (by != "across")
    # One or two rows a device, whose gradient is a half number.
    np.testing.assert_allclose(gradient, exact.sum(0), rtol=2e-3, atol=2e-3)


def test_along_explicit_axes_the_arrays_may_say_which_mesh_it_is():
    mesh = make_mesh(DATA, AxisType.Explicit)
    w = jax.device_put(jnp.ones((16, 8)), NamedSharding(mesh, P("data")))
    x = jax.device_put(jnp.ones((8, 16), jnp.float16), NamedSharding(mesh, P("data")))
    loss = lambda w, x: jnp.sum((x @ jmp.gather_params(w, P(), "float16", "float32")).astype("f4"))
    assert (jax.jit(jax.grad(loss))(w, x) == 8).all()  # not under jax.set_mesh


# What is sent


def collectives(function, *arguments):
    """Returns how often each kind of collective sends each dtype, in the program as traced."""
    found = COLLECTIVE.findall(str(jax.make_jaxpr(function)(*arguments)))
    return dict(collections.Counter((kind, dtype) for dtype, _, kind in found))


def gradients_of(shapes, spec, by="data", **dtypes):
    dtypes = {"dtype": "bfloat16", "reduce_dtype": "float32"} | dtypes

    def loss(params, x):
        return sum(jnp.sum(w) * x[0] for w in jmp.gather_params(params, by, **dtypes))

    specs = [spec] * len(shapes)
    options = {"in_specs": (specs, P("data")), "out_specs": specs}
    gradients = jax.shard_map(jax.grad(loss), mesh=make_mesh(DATA), **options)
    params = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return gradients, params, jax.ShapeDtypeStruct((8,), jnp.float32)


def test_small_arrays_share_one_exchange():
    small = [(8, 3), (16,), (8, 2, 2)]
    found = collectives(*gradients_of([*small, (512, 256)], P("data")))
    assert found == {("all_gather", "bf16"): 4, ("all_to_all", "bf16"): 2}
    found = collectives(*gradients_of([*small, ()], P()))
    assert found == {("all_to_all", "bf16"): 1, ("all_gather", "f32"): 4}
    # 2**18 elements of them together: they are kept until the last is computed.
    found = collectives(*gradients_of([(255, 256)] * 9, P()))
    assert found == {("all_to_all", "bf16"): 3, ("all_gather", "f32"): 9}


@pytest.mark.parametrize(
    ("dtypes", "sent"),
    [
        ({"reduce_dtype": None}, ("reduce_scatter", "bf16")),
        ({"reduce_dtype": "float16"}, ("reduce_scatter", "f16")),
        ({"send_dtype": "float32"}, ("reduce_scatter", "f32")),
        ({"dtype": "float32"}, ("reduce_scatter", "f32")),
        ({"dtype": "float32", "send_dtype": "bfloat16"}, ("all_to_all", "bf16")),
        ({}, ("all_to_all", "bf16")),
    ],
)
def test_gradients_are_sent_in_the_dtype_asked(dtypes, sent):
    found = collectives(*gradients_of([(512, 256)], P("data"), **dtypes))
    gathered = {"bfloat16": "bf16", "float32": "f32"}[dtypes.get("dtype", "bfloat16")]
    assert found == {("all_gather", gathered): 1, sent: 1}


def test_a_tpu_adds_up_while_it_sends(monkeypatch):
    monkeypatch.setattr(_gather, "is_of_tpus", lambda mesh: True)
    found = collectives(*gradients_of([(512, 256)], P("data")))
    assert found == {("all_gather", "bf16"): 1, ("reduce_scatter", "f32"): 1}
    found = collectives(*gradients_of([(512, 256)], P("data"), send_dtype="bfloat16"))
    assert found == {("all_gather", "bf16"): 1, ("all_to_all", "bf16"): 1}


@pytest.mark.parametrize("check_vma", [True, False])
def test_an_exchange_in_a_scan_and_in_remat_has_the_gradients_of_one_device(check_vma):
    random = np.random.default_rng(0)
    layers = np.float32(random.normal(0, 0.3, size=(3, 8, 8)))
    x = np.float32(random.normal(size=(16, 8)))

    def loss(layers, x, gathered):
        layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ gathered(w)), None))
        x = x.astype(jnp.float16)
        return jnp.sum(jax.lax.scan(layer, x, layers)[0].astype(jnp.float32) ** 2)

    gathered = lambda w: jmp.gather_params(w, "data", "float16", "float32")
    specs = P(None, "data"), P("data")
    options = {"in_specs": specs, "out_specs": specs[0], "check_vma": check_vma}
    own = jax.grad(lambda layers, x: loss(layers, x, gathered))
    found = jax.jit(jax.shard_map(own, mesh=make_mesh(DATA), **options))(layers, x)
    plain = lambda layers, x: loss(layers, x, lambda w: w.astype(jnp.float16))
    parts = [jax.grad(plain)(layers, rows) for rows in np.split(x, 8)]
    assert_sum_of(np.asarray(parts), np.asarray(found))


# Loss scaling


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_an_overflow_of_one_device_skips_the_step_on_all(bad):
    tx = transforms.with_loss_scale(optax.sgd(1.0), jmp.DynamicLossScale(16.0))
    parts = np.zeros((8, 16, 4), np.float16)
    parts[3, 9, 1] = bad  # in the shard of another device

    def step(w, state, part):
        def loss(w):
            whole = jmp.gather_params(w, "data", "float16", "float32")
            return jnp.sum(whole.astype(jnp.float32) * part[0].astype(jnp.float32))

        updates, state = tx.update(jax.grad(loss)(w), state, w)
        return optax.apply_updates(w, updates), state

    w = jnp.ones((16, 4))
    options = {"in_specs": (P("data"), P(), P("data")), "out_specs": (P("data"), P())}
    after, state = jax.shard_map(step, mesh=make_mesh(DATA), **options)(w, tx.init(w), parts)
    assert (after == w).all() and state.loss_scale.loss_scale == 8.0
    assert state.skipped_steps == 1


# Mistakes


def test_a_sum_that_does_not_hold_what_is_sent_is_refused():
    for sent, added in [("float32", "float16"), ("float16", "bfloat16"), ("float64", "float32")]:
        dtypes = {"reduce_dtype": added, "send_dtype": sent}
        gradients, *arguments = gradients_of([(8, 2)], P("data"), **dtypes)
        with pytest.raises(ValueError, match=f"send_dtype='{sent}'; .* reduce_dtype={added} holds"):
            jax.eval_shape(gradients, *arguments)


def test_vectors_along_explicit_axes_are_sent_as_they_are_and_a_warning_says_so():
    mesh = make_mesh(DATA, AxisType.Explicit)
    vector = jax.device_put(jnp.ones(8), NamedSharding(mesh, P()))
    gather = lambda w: jmp.gather_params(w, P(), "float32", "float32", send_dtype="float16")
    words = "added up in float32 as they are, not sent in float16 and added up in float32"
    with pytest.warns(jmp.PrecisionWarning, match=words):
        jax.eval_shape(gather, vector)
