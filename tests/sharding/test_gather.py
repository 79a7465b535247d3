"""`jmp.gather_params`: sharded parameters whole, rounded before they move, sums as asked."""

import collections
import contextlib
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

ROWS = 16
WAYS = ["tracked", "untracked", "explicit"]


DATA, REPLICAS = {"data": 8}, {"replica": 2, "data": 4}
BOTH = ("replica", "data")
ROWS_OF_ALL = P(BOTH)
FSDP = {"first": P("data"), "bias": P("data"), "second": P(None, "data"), "scale": P()}
HSDP = jax.tree.map(lambda spec: P(*spec, reduced={"replica"}), FSDP)


def make_mesh(axes, way="tracked"):
    kind = AxisType.Explicit if way == "explicit" else AxisType.Auto
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes))


def mapped(function, mesh, in_specs, out_specs, way="tracked"):
    options = {"in_specs": in_specs, "out_specs": out_specs, "check_vma": way == "tracked"}
    return jax.shard_map(function, mesh=mesh, **options)


def parameters():
    random = np.random.default_rng(0)
    shapes = {"first": (8, 16), "bias": (16,), "second": (16, 8), "scale": (8,)}
    return {n: random.normal(0, 0.25, shape).astype(np.float32) for n, shape in shapes.items()}


def rows():
    return np.random.default_rng(1).normal(size=(ROWS, 8)).astype(np.float32)


def loss_of(params, x):
    """The sum over rows: nothing has to know how many there are elsewhere."""
    x = x.astype(params["first"].dtype)
    hidden = jnp.tanh(x @ params["first"] + params["bias"][None])
    return jnp.sum(((hidden @ params["second"]) * params["scale"][None]).astype(jnp.float32) ** 2)


def gradients_on(mesh, way, specs, rows_spec, gathered_by, dtype="f32", reduce_dtype=None, dp=()):
    """Returns the gradients that a mesh computes, of parameters that lie as `specs` say.

    Args:
      gathered_by: the second argument of `gather`.
      dp: mapped axes that an untracked gradient is added up over by hand.
    """

    def gradients(params, x):
        def loss(params):
            return loss_of(jmp.gather_params(params, gathered_by, dtype, reduce_dtype), x)

        own = jax.grad(loss)(params)
        return jax.lax.psum(own, dp) if way == "untracked" and dp else own

    params, x = parameters(), rows()
    place = lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec))
    if way == "explicit":
        with jax.set_mesh(mesh):
            return jax.jit(gradients)(jax.tree.map(place, params, specs), place(x, rows_spec))
    return jax.jit(mapped(gradients, mesh, (specs, rows_spec), specs, way))(params, x)


def assert_gradients_of_one_device(gradients):
    expected = jax.jit(jax.grad(loss_of))(parameters(), rows())
    for name, gradient in gradients.items():
        assert gradient.dtype == np.float32
        np.testing.assert_allclose(gradient, expected[name], rtol=2e-5, atol=2e-5, err_msg=name)


NAMED = {"first": P("data"), "bias": P(), "second": P("data"), "scale": P("data")}
TWO = {"first": P(BOTH), "bias": P(BOTH), "second": P("data", "replica"), "scale": P()}
LAYOUTS = {  # how axes are mapped, the mesh, the parameters, by what they are gathered
    "FSDP": ("tracked", DATA, FSDP, FSDP),
    "FSDP, untracked": ("untracked", DATA, FSDP, FSDP),
    "FSDP, explicit": ("explicit", DATA, FSDP, P()),
    "replicas of shards": ("tracked", REPLICAS, FSDP, HSDP),
    "replicas of shards, untracked": ("untracked", REPLICAS, FSDP, HSDP),
    "replicas that are not named": ("tracked", REPLICAS, FSDP, FSDP),
    "replicas that are added up by hand": ("untracked", REPLICAS, FSDP, FSDP),
    "replicas of shards, explicit": ("explicit", REPLICAS, FSDP, P()),
    "an axis along which nothing differs": ("tracked", {"idle": 2, "data": 4}, FSDP, FSDP),
    "a name": ("tracked", DATA, NAMED, "data"),  # adds up what is not sharded along it
    "a name, explicit": ("explicit", DATA, NAMED, "data"),
    "a dimension along two axes": ("tracked", REPLICAS, TWO, TWO),
    "a dimension along two axes, untracked": ("untracked", REPLICAS, TWO, TWO),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_those_of_one_device(layout):
    way, axes, specs, by = LAYOUTS[layout]
    mesh = make_mesh(axes, way)
    rows_spec = ROWS_OF_ALL if axes == REPLICAS else P("data")
    by_hand = ("replica",) if "by hand" in layout else ()
    gradients = gradients_on(mesh, way, specs, rows_spec, by, dp=by_hand)
    assert_gradients_of_one_device(gradients)
    for name, spec in specs.items():
        own = NamedSharding(mesh, spec)
        assert gradients[name].sharding.is_equivalent_to(own, gradients[name].ndim), name


def test_over_an_axis_of_tensor_parallelism_jax_adds_up():
    mesh = make_mesh({"data": 4, "model": 2})
    specs = FSDP | {"first": P("data", "model"), "bias": P("model"), "second": P(("model", "data"))}

    def loss(params, x):
        params = jmp.gather_params(params, "data", "f32")
        assert params["first"].shape == (8, 8) and params["second"].shape == (8, 8)
        hidden = jnp.tanh(x @ params["first"] + params["bias"][None])
        out = jax.lax.psum(hidden @ params["second"], "model") * params["scale"][None]
        return jnp.sum(out**2)

    gradients = mapped(jax.grad(loss), mesh, (specs, P("data")), specs)
    assert_gradients_of_one_device(jax.jit(gradients)(parameters(), rows()))


@pytest.mark.parametrize("way", WAYS)
def test_float32_sums_of_half_gradients_have_the_error_of_one_device(way):
    mesh = make_mesh(REPLICAS, way)
    by = P() if way == "explicit" else HSDP
    warns = pytest.warns(UserWarning) if way == "explicit" else contextlib.nullcontext()
    with warns:
        gradients = gradients_on(mesh, way, FSDP, ROWS_OF_ALL, by, "f16", "f32")
    half = jax.jit(jax.grad(lambda p, x: loss_of(jmp.cast_floating(p, "f16"), x)))
    expected = jax.jit(jax.grad(loss_of))(parameters(), rows())
    on_one = half(parameters(), rows())
    for name in ("first", "second"):
        error, allowed = (jnp.linalg.norm(g[name] - expected[name]) for g in (gradients, on_one))
        assert error < 1.3 * allowed, name  # about 1e-3 of the norm


def partials_on(way, partials, reduce_dtype):
    """Returns the gradient of a row of parameters, of which each device's part is given."""
    mesh = make_mesh(DATA, way)
    w = jax.device_put(jnp.zeros((8, 4)), NamedSharding(mesh, P("data")))
    x = jnp.tile(jnp.array(partials, jnp.float16)[:, None], (1, 8))
    x = jax.device_put(x, NamedSharding(mesh, P("data")))

    def loss(w, x):
        by = P() if way == "explicit" else "data"
        product = x @ jmp.gather_params(w, by, "f16", reduce_dtype)
        return jnp.sum(product.astype(jnp.float32))

    if way == "explicit":
        with jax.set_mesh(mesh):
            return jax.jit(jax.grad(loss))(w, x)
    return jax.jit(mapped(jax.grad(loss), mesh, P("data"), P("data"), way))(w, x)


@pytest.mark.parametrize("way", WAYS)
def test_partial_sums_that_cancel_are_finite_only_in_float32(way):
    partials = [5e4] * 4 + [-5e4] * 4
    assert jnp.all(partials_on(way, partials, "f32") == 0)
    assert not jnp.isfinite(partials_on(way, partials, None)).any()


@pytest.mark.parametrize("way", WAYS)
def test_a_half_sum_that_overflows_is_skipped_and_halves_the_scale(way):
    tx = transforms.with_loss_scale(optax.sgd(1.0), jmp.DynamicLossScale(2.0**4))
    w = jnp.ones((8, 4))
    gradient = partials_on(way, [6e4] * 8, "f16")
    updates, state = jax.jit(tx.update)(gradient, tx.init(w), w)
    assert not state.grads_finite and state.skipped_steps == 1
    assert state.loss_scale.loss_scale == 8.0 and jnp.all(updates == 0)


COLLECTIVE = re.compile(r":(\w+)\[[^\]]*\]\S* = (all_gather|all_to_all|reduce_scatter|psum)\w*\[")
EXCHANGED = {("all_to_all", "bf16"): 2, ("all_gather", "f32"): 4}  # shards, and what has none


@pytest.mark.parametrize("wrapped", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize(
    ("reduce_dtype", "sums"),
    [
        (None, {("reduce_scatter", "bf16"): 3, ("psum", "bf16"): 4}),
        (jnp.float16, {("reduce_scatter", "f16"): 3, ("psum", "f16"): 4}),
        ("float32", EXCHANGED),
    ],
)
def test_each_collective_has_the_dtype_asked(reduce_dtype, sums, wrapped):
    """In the program as traced: a CPU adds up bfloat16 in float32."""
    mesh = make_mesh(REPLICAS)

    def loss(params, x):
        return loss_of(jmp.gather_params(params, HSDP, "bf16", reduce_dtype), x)

    if wrapped:
        loss = jmp.autocast(loss, "mixed_bfloat16")
    gradients = mapped(jax.grad(loss), mesh, (FSDP, ROWS_OF_ALL), FSDP)
    found = COLLECTIVE.findall(str(jax.make_jaxpr(gradients)(parameters(), rows())))
    by_kind = collections.Counter((kind, dtype) for dtype, kind in found)
    assert by_kind == {("all_gather", "bf16"): 3} | sums


@pytest.mark.parametrize("way", WAYS)
def test_what_is_no_floating_array_comes_back_as_it_is(way):
    mesh = make_mesh(DATA, way)
    others = {"step": jnp.int32(3), "none": None, "name": "w", "ids": np.arange(8)}
    others["float0"] = np.zeros(2, jax.dtypes.float0)
    found = {}

    def gathered(w):
        found.update(jmp.gather_params({"w": w, **others}, "data", "f16"))
        return found["w"]

    w = jax.device_put(jnp.ones((8, 2)), NamedSharding(mesh, P("data")))
    if way == "explicit":
        shape = jax.eval_shape(gathered, w)
    else:
        shape = jax.eval_shape(mapped(gathered, mesh, P("data"), P("data"), way), w)
    assert shape.dtype == np.float16 and found["w"].shape == (8, 2)
    assert all(found[name] is others[name] for name in others)


def test_half_parameters_get_half_gradients():
    loss = lambda w: jmp.gather_params(w, "data", "f16", "f32").astype(jnp.float32).sum()
    gradient = mapped(jax.grad(loss), make_mesh(DATA), P("data"), P("data"))
    assert jax.eval_shape(gradient, jnp.ones((8, 2), jnp.float16)).dtype == np.float16


def test_a_layer_may_be_gathered_inside_a_scan_and_again_in_its_backward_pass():
    layers = np.stack([parameters()["first"][:, :8]] * 3)

    def loss(layers, x, gathered=lambda w: w):
        layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ gathered(w)), None))
        return jnp.sum(jax.lax.scan(layer, x, layers)[0] ** 2)

    gathered = lambda layers, x: loss(layers, x, lambda w: jmp.gather_params(w, "data", "f32"))
    specs = P(None, "data"), P("data")
    gradient = mapped(jax.grad(gathered), make_mesh(DATA), specs, specs[0])
    expected = jax.jit(jax.grad(loss))(layers, rows())
    np.testing.assert_allclose(jax.jit(gradient)(layers, rows()), expected, rtol=2e-5, atol=2e-5)


# Mistakes


def test_vectors_add_up_in_the_gathered_dtype_along_explicit_axes_and_a_warning_says_so():
    mesh = make_mesh(DATA, "explicit")
    place = lambda leaf: jax.device_put(leaf, NamedSharding(mesh, P()))
    params = jax.tree.map(place, parameters())
    with pytest.warns(UserWarning, match="'bias', 'scale' are added up in float16 as they are"):
        jax.eval_shape(lambda p: jmp.gather_params(p, P(), "f16", "f32"), params)
    # Without a dtype of sums there is no warning, which would be an error in tests.
    jax.eval_shape(lambda p: jmp.gather_params(p, P(), "f16"), params)


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

    on_devices = mapped(gathered, make_mesh(DATA), P("data"), P("data"))
    with pytest.raises(ValueError, match=re.escape(words)):
        jax.eval_shape(on_devices, jnp.ones((8, 2)))


def test_an_axis_that_the_mesh_does_not_have_is_refused_along_explicit_axes():
    mesh = make_mesh(DATA, "explicit")
    w = jax.device_put(jnp.ones((8, 2)), NamedSharding(mesh, P("data")))
    with pytest.raises(ValueError, match="'model' .*; expected one of the explicit axes: 'data'"):
        jmp.gather_params(w, "model", "f16")


def test_under_jit_with_auto_axes_xla_gathers():
    w = jax.device_put(jnp.ones((8, 2)), NamedSharding(make_mesh(DATA), P("data")))
    way_out = r"leave the call out and write jmp\.autocast\(fun, 'mixed_float16,r=f32'\)"
    with pytest.raises(ValueError, match=way_out):
        jax.jit(lambda w: jmp.gather_params(w, "data", "f16"))(w)
