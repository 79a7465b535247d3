"""`jmp.gather_params`: sharded parameters whole, rounded before they move, sums as asked."""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp
from benchmarks.wire import FSDP, gpt_shapes
from jmp import transforms
from jmp.sharding import _gather
from tests.sharding import gpt

DATA, BOTH, TENSOR = {"data": 8}, {"replica": 2, "data": 4}, {"data": 4, "model": 2}
NAMES = ("replica", "data")


def make_mesh(axes, kind=AxisType.Auto):
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes))


def mapped(function, axes, in_specs, out_specs, check_vma=True):
    options = {"in_specs": in_specs, "out_specs": out_specs, "check_vma": check_vma}
    return jax.shard_map(function, mesh=make_mesh(axes), **options)


def placed(mesh, array, spec):
    return jax.device_put(array, NamedSharding(mesh, spec))


@pytest.fixture
def every_size_is_exchanged(monkeypatch):
    monkeypatch.setattr(_gather, "_FEWEST_EXCHANGED", 1)


# Sums


IN_FLOAT32, OF_HALF = ("float32", None), ("float16", "float32")  # gathered, added up
every_dtype = pytest.mark.parametrize("dtypes", [IN_FLOAT32, OF_HALF], ids=["float32", "half"])


def summed(parts, axes, spec, by, check_vma=True, part=None, by_hand=None, **dtypes):
    """Returns the gradient of a parameter that is gathered, of which each device has its own part.

    Args:
      parts: an array of the whole parameter for each device, exact in the gathered dtype.
      axes, spec, by: the mesh, how the parameter lies, and what it is gathered by.
      part: how the parts lie; by default along all axes.
      by_hand: an axis that gradients are added up over besides.
    """
    dtypes = {"dtype": "float16", "reduce_dtype": "float32"} | dtypes

    def loss(w, part):
        whole = jmp.gather_params(w, by, **dtypes).astype(jnp.float32)
        return jnp.sum(whole * part[0].astype(jnp.float32))

    def gradient(w, part):
        own = jax.grad(loss)(w, part)
        return jax.lax.psum(own, by_hand) if by_hand else own

    specs = (spec, part or P(tuple(axes)))
    compiled = jax.jit(mapped(gradient, axes, specs, spec, check_vma))
    return compiled(jnp.zeros(parts.shape[1:], jnp.float32), parts)


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
}


@every_dtype
@pytest.mark.usefixtures("every_size_is_exchanged")
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gradient_is_the_float32_sum_of_the_devices_gradients(layout, check_vma, dtypes):
    shape, axes, spec, by = LAYOUTS[layout]
    if not check_vma and spec == P():  # nothing says that it is the same on all devices
        by = P(reduced={"data"})
    parts = draw("random", shape)[: np.prod(list(axes.values()))]
    dtype, reduce_dtype = dtypes
    found = summed(parts, axes, spec, by, check_vma, dtype=dtype, reduce_dtype=reduce_dtype)
    assert_sum_of(parts, found)
    assert found.sharding.is_equivalent_to(NamedSharding(make_mesh(axes), spec), found.ndim)


BESIDES = {  # the mesh, how the parameter lies; its devices along "data" are 4
    "JAX adds up": (BOTH, P("data"), {}),
    "the user adds up": (BOTH, P("data"), {"check_vma": False, "by_hand": "replica"}),
    "nothing differs": ({"idle": 2, "data": 4}, P("data"), {"part": P("data")}),
    "columns of its own": (TENSOR, P("data", "model"), {"part": P("data", None, "model")}),
    "rows of its own": (TENSOR, P(("model", "data")), {"part": P("data", "model")}),
}


@pytest.mark.parametrize("name", BESIDES)
def test_an_axis_that_is_not_named_is_left_to_others(name):
    axes, spec, options = BESIDES[name]
    parts = draw("random", (16, 6))[: 4 if "part" in options else 8]
    dtypes = {"dtype": "float32", "reduce_dtype": None}
    assert_sum_of(parts, summed(parts, axes, spec, "data", **options, **dtypes))


@pytest.mark.usefixtures("every_size_is_exchanged")
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


@pytest.mark.parametrize("fewest", [1, 2**16], ids=["exchanged", "small"])
def test_a_sum_returns_to_replicas_in_the_dtype_asked(fewest, monkeypatch):
    monkeypatch.setattr(_gather, "_FEWEST_EXCHANGED", fewest)
    parts = draw("random", (16, 3))
    found = summed(parts, DATA, P(), "data", return_dtype="float16")
    exact = np.asarray(parts, np.float64).sum(0)
    np.testing.assert_array_equal(found, np.float32(exact.astype(np.float16)))


def test_small_gradients_add_up_in_float32_as_they_are():
    parts = draw("one large", (16, 5))
    assert_sum_of(parts, summed(parts, DATA, P("data"), "data"))
    wide = np.random.default_rng(0).normal(size=(8, 16, 3)).astype(np.float32)
    options = {"dtype": "float32", "send_dtype": "float16"}
    assert_sum_of(wide, summed(wide, DATA, P("data"), "data", **options))


@pytest.mark.usefixtures("every_size_is_exchanged")
def test_float32_gradients_are_rounded_once_if_half_is_sent():
    parts = np.random.default_rng(0).normal(size=(8, 16, 3)).astype(np.float32)
    options = {"dtype": "float32", "send_dtype": "float16"}
    assert_sum_of(parts.astype(np.float16), summed(parts, DATA, P("data"), "data", **options))


def test_half_parameters_get_half_gradients():
    loss = lambda w: jmp.gather_params(w, "data", "f16", "f32").astype(jnp.float32).sum()
    gradient = mapped(jax.grad(loss), DATA, P("data"), P("data"))
    assert jax.eval_shape(gradient, jnp.ones((8, 2), jnp.float16)).dtype == np.float16


EXPLICIT = {  # the mesh, how the weight lies, what it is gathered by, whether parts are exchanged
    "rows": (TENSOR, P("data"), P(reduced={"data"}), True),
    "columns": (TENSOR, P(None, "data"), P(reduced={"data"}), True),
    "a name": (TENSOR, P("data"), "data", True),
    "replicas": (BOTH, P("data"), P(), True),
    # Its shards are such as no device has together.
    "across": (TENSOR, P(("data", "model")), P("model"), False),
    "tensor parallel": (TENSOR, P("data", "model"), P(None, "model"), True),
}


@every_dtype
@pytest.mark.usefixtures("every_size_is_exchanged")
@pytest.mark.parametrize("layout", EXPLICIT)
def test_along_explicit_axes_sums_are_as_in_shard_map(layout, dtypes):
    axes, own, by, exchanges = EXPLICIT[layout]
    rows = P(NAMES) if axes == BOTH else P("data")
    columns = "model" if layout == "tensor parallel" else None
    random = np.random.default_rng(1)
    x = np.float16(random.integers(0, 2, size=(8, 16)))  # the products are exact
    factor = np.float16(random.normal(size=(8, 8)))
    exact = np.einsum("ri,ro->rio", np.float64(x), np.float64(factor))

    def loss(w, x, factor):
        w = jmp.gather_params(w, by, *dtypes)
        product = jnp.einsum("bi,io->bo", x, w, out_sharding=P(*rows, columns))
        return jnp.sum(product.astype(jnp.float32) * factor)

    mesh = make_mesh(axes, AxisType.Explicit)
    with jax.set_mesh(mesh):
        w = placed(mesh, jnp.zeros((16, 8)), own)
        arguments = w, placed(mesh, x, rows), placed(mesh, factor, P(*rows, columns))
        gradient = jax.jit(jax.grad(loss))(*arguments)
        text = str(jax.make_jaxpr(jax.grad(loss))(*arguments))
    assert gradient.sharding.is_equivalent_to(w.sharding, 2)
    assert ("all_to_all" in text) == (exchanges and dtypes == OF_HALF)
    # One or two rows a device, whose gradient is a half number.
    np.testing.assert_allclose(gradient, exact.sum(0), rtol=2e-3, atol=2e-3)


def test_along_explicit_axes_the_arrays_may_say_which_mesh_it_is():
    mesh = make_mesh(DATA, AxisType.Explicit)
    w = placed(mesh, jnp.ones((16, 8)), P("data"))
    x = placed(mesh, jnp.ones((8, 16), jnp.float16), P("data"))
    loss = lambda w, x: jnp.sum((x @ jmp.gather_params(w, P(), "float16", "float32")).astype("f4"))
    assert (jax.jit(jax.grad(loss))(w, x) == 8).all()  # not under jax.set_mesh


def test_a_gpt_has_the_sums_of_the_half_gradients_of_its_devices():
    random = np.random.default_rng(0)
    weight = lambda shape: random.normal(0, 0.3, shape).astype(np.float32)
    shapes = gpt_shapes(layers=2, width=32, vocabulary=64)
    params = jax.tree.map(weight, shapes, is_leaf=lambda node: isinstance(node, tuple))
    tokens = random.integers(0, 64, (16, 33)).astype(np.int32)

    def gradient(params, tokens):
        gather = lambda tree: jmp.gather_params(tree, "data", "float16", "float32")
        return jax.grad(gpt.loss_of)(params, tokens, gather)

    def own_gradient(params, tokens):
        half = jmp.cast_floating(jax.lax.pcast(params, "data", to="varying"), jnp.float16)
        return jax.tree.map(lambda g: g[None], jax.grad(gpt.loss_of)(half, tokens, lambda w: w))

    found = jax.jit(mapped(gradient, DATA, (FSDP, P("data")), FSDP))(params, tokens)
    # For eight devices too: XLA's CPU compiler leaves out other roundings in a program for one.
    parts = jax.jit(mapped(own_gradient, DATA, (P(), P("data")), P("data")))(params, tokens)
    jax.tree.map(assert_sum_of, parts, found)


# What is sent

COLLECTIVE = re.compile(r":(\w+)\[[\d,]*\]\S* = (all_to_all|all_gather|reduce_scatter|psum)\w*\[")
REPLICAS = {"axes": BOTH, "by": P("data", reduced={"replica"})}


def collectives(function, *arguments):
    """Returns how often each kind of collective sends each dtype, in the program as traced."""
    found = COLLECTIVE.findall(str(jax.make_jaxpr(function)(*arguments)))
    return dict(collections.Counter((kind, dtype) for dtype, kind in found))


def gradients_of(shapes, spec, by="data", axes=DATA, wrap=lambda loss: loss, **dtypes):
    """Returns the gradients of a loss of gathered parameters, and its arguments."""
    dtypes = {"dtype": "bfloat16", "reduce_dtype": "float32"} | dtypes

    def loss(params, x):
        return sum(jnp.sum(w) * x[0] for w in jmp.gather_params(params, by, **dtypes))

    specs = [spec] * len(shapes)
    gradients = mapped(jax.grad(wrap(loss)), axes, (specs, P(tuple(axes))), specs)
    params = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return gradients, params, jax.ShapeDtypeStruct((8,), jnp.float32)


def test_small_arrays_are_sent_as_they_add_up_and_large_ones_exchanged():
    small = [(8, 3), (16,), (8, 2, 2)]
    found = collectives(*gradients_of([*small, (512, 256)], P("data")))
    sums = {("reduce_scatter", "f32"): 3, ("all_to_all", "bf16"): 1}
    assert found == {("all_gather", "bf16"): 4, **sums}
    found = collectives(*gradients_of([*small, (), (512, 256)], P()))
    sums = {("psum", "f32"): 4, ("all_to_all", "bf16"): 1}
    assert found == {("all_gather", "f32"): 1, **sums}  # the large one goes back to the replicas


def test_replicas_that_divide_no_dimension_add_up_in_float32():
    found = collectives(*gradients_of([(255, 1025)], P()))
    assert found == {("psum", "f32"): 1}


@pytest.mark.parametrize("wrapped", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize(
    ("options", "sent"),
    [
        ({"reduce_dtype": None}, {("reduce_scatter", "bf16")}),
        ({"reduce_dtype": "float16"}, {("reduce_scatter", "f16")}),
        ({"send_dtype": "float32"}, {("reduce_scatter", "f32")}),
        ({"dtype": "float32"}, {("reduce_scatter", "f32")}),
        ({"dtype": "float32", "send_dtype": "bfloat16"}, {("all_to_all", "bf16")}),
        ({}, {("all_to_all", "bf16")}),
        (REPLICAS | {"reduce_dtype": None}, {("reduce_scatter", "bf16"), ("psum", "bf16")}),
        (REPLICAS | {"reduce_dtype": "float16"}, {("reduce_scatter", "f16"), ("psum", "f16")}),
        (REPLICAS, {("all_to_all", "bf16"), ("all_gather", "f32")}),
    ],
)
def test_each_collective_has_the_dtype_asked(options, sent, wrapped):
    """In the program as traced: a CPU adds up bfloat16 in float32."""
    wrap = (
        functools.partial(jmp.autocast, policy="mixed_bfloat16") if wrapped else lambda loss: loss
    )
    found = collectives(*gradients_of([(512, 256)], P("data"), wrap=wrap, **options))
    gathered = {"bfloat16": "bf16", "float32": "f32"}[options.get("dtype", "bfloat16")]
    assert found == dict.fromkeys({("all_gather", gathered), *sent}, 1)


def test_a_tpu_adds_up_while_it_sends(monkeypatch):
    monkeypatch.setattr(_gather, "is_of_tpus", lambda mesh: True)
    found = collectives(*gradients_of([(512, 256)], P("data")))
    assert found == {("all_gather", "bf16"): 1, ("reduce_scatter", "f32"): 1}
    found = collectives(*gradients_of([(512, 256)], P("data"), send_dtype="bfloat16"))
    assert found == {("all_gather", "bf16"): 1, ("all_to_all", "bf16"): 1}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_what_is_no_floating_array_comes_back_as_it_is(kind):
    others = {"step": jnp.int32(3), "none": None, "name": "w", "ids": np.arange(8)}
    others["float0"] = np.zeros(2, jax.dtypes.float0)
    found = {}

    def gathered(w):
        found.update(jmp.gather_params({"w": w, **others}, "data", "f16"))
        return found["w"]

    w = placed(make_mesh(DATA, kind), jnp.ones((8, 2)), P("data"))
    call = gathered if kind == AxisType.Explicit else mapped(gathered, DATA, P("data"), P("data"))
    assert jax.eval_shape(call, w).dtype == np.float16 and found["w"].shape == (8, 2)
    assert all(found[name] is others[name] for name in others)


# Loss scaling


@pytest.mark.parametrize(
    ("part", "of", "reduce_dtype"),
    [
        (np.inf, (3, 9, 1), "float32"),  # of one device, in the shard of another
        (np.nan, (3, 9, 1), "float32"),
        (6e4, ..., "float16"),  # finite parts, whose half sum is not
    ],
    ids=["infinity", "NaN", "sum"],
)
def test_an_overflow_skips_the_step_on_all_devices(part, of, reduce_dtype):
    tx = transforms.with_loss_scale(optax.sgd(1.0), jmp.DynamicLossScale(16.0))
    parts = np.zeros((8, 16, 4), np.float16)
    parts[of] = part

    def step(w, state, part):
        def loss(w):
            whole = jmp.gather_params(w, "data", "float16", reduce_dtype)
            return jnp.sum(whole.astype(jnp.float32) * part[0].astype(jnp.float32))

        updates, state = tx.update(jax.grad(loss)(w), state, w)
        return optax.apply_updates(w, updates), state

    w = jnp.ones((16, 4))
    places = (P("data"), P(), P("data")), (P("data"), P())
    after, state = mapped(step, DATA, *places)(w, tx.init(w), parts)
    assert (after == w).all() and state.loss_scale.loss_scale == 8.0
    assert state.skipped_steps == 1


# Mistakes


@pytest.mark.parametrize(("sent", "added"), [("float16", "bfloat16"), ("float64", "float32")])
def test_a_sum_that_does_not_hold_what_is_sent_is_refused(sent, added):
    gradients, *arguments = gradients_of([(8, 2)], P("data"), reduce_dtype=added, send_dtype=sent)
    with pytest.raises(ValueError, match=f"send_dtype='{sent}'; .* reduce_dtype={added} holds"):
        jax.eval_shape(gradients, *arguments)


def test_vectors_along_explicit_axes_are_added_up_as_they_are_and_a_warning_says_so():
    mesh = make_mesh(DATA, AxisType.Explicit)
    params = {name: placed(mesh, jnp.ones(8), P()) for name in ("bias", "scale")}
    words = "'bias', 'scale' are added up in float32 as they are, not sent in float16"
    with pytest.warns(jmp.PrecisionWarning, match=words):
        jmp.gather_params(params, P(), "float32", "float32", send_dtype="float16")
    with pytest.warns(jmp.PrecisionWarning, match="in float16 as they are.*added up in float32"):
        jmp.gather_params(params, P(), "float16", "float32")
    # Without a dtype of sums there is no warning, which would be an error in tests.
    jmp.gather_params(params, P(), "float16")


@pytest.mark.parametrize(
    ("specs_or_axis", "words"),
    [
        ("model", "got the axis 'model' for w; expected one of the mapped axes: 'data'"),
        (P("model"), "got the axis 'model' for w"),
        (P(None, None, "data"), "which is float32[1,2]; expected the names of axes"),
        (P(P.UNCONSTRAINED), "or None, for each of at most 2 dimensions"),
        ({"w": P(), "y": P()}, "specs that do not fit the parameters"),
        ({"w": P("data"), "z": P("data")}, "the same on all devices along 'data'"),
    ],
    ids=str,
)
def test_specs_that_do_not_fit_are_refused_in_shard_map(specs_or_axis, words):
    def gathered(w):
        return jmp.gather_params({"w": w, "z": jnp.ones(2)}, specs_or_axis, "f16")["w"]

    on_devices = mapped(gathered, DATA, P("data"), P("data"))
    with pytest.raises(ValueError, match=re.escape(words)):
        jax.eval_shape(on_devices, jnp.ones((8, 2)))


def test_an_axis_that_the_mesh_does_not_have_is_refused_along_explicit_axes():
    w = placed(make_mesh(DATA, AxisType.Explicit), jnp.ones((8, 2)), P("data"))
    with pytest.raises(ValueError, match="'model' .*; expected one of the explicit axes: 'data'"):
        jmp.gather_params(w, "model", "f16")


def test_under_jit_with_auto_axes_xla_gathers():
    w = placed(make_mesh(DATA), jnp.ones((8, 2)), P("data"))
    way_out = r"leave the call out and write jmp\.autocast\(fun, 'mixed_float16,r=f32'\)"
    with pytest.raises(ValueError, match=way_out):
        jax.jit(lambda w: jmp.gather_params(w, "data", "f16"))(w)
