"""`accumulated_value_and_grad`: micro-batches in one loop, against one large batch."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jmp
from jmp import _jax_compat, transforms
from jmp.loss_scaling import _accumulating

RANDOM = np.random.default_rng(0)
X, Y, W = RANDOM.standard_normal((24, 4)), RANDOM.standard_normal(24), RANDOM.standard_normal(4)
SCALE = 2.0**10
STATIC = jmp.StaticLossScale(SCALE)
accumulated = jmp.accumulated_value_and_grad


def mean_loss(w, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ w) - batch["y"]) ** 2)


def rows(dtype="float32"):
    return {"x": jnp.asarray(X, dtype), "y": jnp.asarray(Y, dtype)}


def same(first, second):
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-14), ("float32", 1e-6)])
def test_it_is_one_large_batch(dtype, tolerance):
    with jax.enable_x64(True):
        value, gradient = jax.value_and_grad(mean_loss)(jnp.asarray(W), rows("float64"))
    with jax.enable_x64(dtype == "float64"):
        grad_fn = accumulated(mean_loss, STATIC, 4)
        got, scaled = grad_fn(jnp.asarray(W, dtype), rows(dtype))
    assert got.dtype == scaled.dtype == dtype
    np.testing.assert_allclose(got, value, rtol=tolerance)
    np.testing.assert_allclose(np.asarray(scaled) / SCALE, gradient, rtol=tolerance, atol=tolerance)


def test_row_i_belongs_to_micro_batch_i_mod_steps():
    def loss(w, batch, twice):
        return w * 2.0, (batch["ids"], batch["key"], batch["none"], twice)

    keys = jax.random.split(jax.random.key(0), 3)
    batch = {"ids": np.arange(12, dtype=np.int8).reshape(6, 2), "key": keys, "none": None}
    grad_fn = accumulated(loss, STATIC, 3, has_aux=True)
    (value, (ids, key, none, twice)), gradient = grad_fn(1.0, batch, jnp.arange(2.0))
    assert ids.dtype == np.int8 and none is None
    np.testing.assert_array_equal(ids[1], [[2, 3], [8, 9]])
    assert (key.shape, twice.shape) == ((3, 1), (3, 2))  # rows are cut, other arguments are not
    same(jax.random.key_data(key[:, 0]), jax.random.key_data(keys))
    assert (float(value), float(gradient)) == (2.0, 2 * SCALE)


def test_several_arguments_of_either_kind_may_be_named_from_the_end_and_by_keyword_passed():
    def loss(x, w, y, b, *, power):
        return jnp.mean((x @ w + b - y) ** power)

    def count(y, x):  # in the order of batch_argnums, a micro-batch of each
        assert (y.shape, x.shape) == ((12,), (12, 4))
        return 0.5

    arguments = rows()["x"], jnp.asarray(W, jnp.float32), rows()["y"], jnp.float32(0.5)
    grad_fn = accumulated(loss, STATIC, np.int64(2), [1, -1], (-2, 0), weight=count)
    _, gradients = grad_fn(*arguments, power=2)
    expected = jax.grad(loss, argnums=(1, 3))(*arguments, power=2)
    assert isinstance(gradients, tuple)
    gradients = jax.tree.map(lambda leaf: leaf / 2, gradients)
    for gradient, truth in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(gradient / SCALE, truth, rtol=1e-5)


def masked_sum(w, batch):
    rest = (jnp.tanh(batch["x"] @ w) - batch["y"]) ** 2
    return jnp.sum(rest * batch["mask"])


def count(batch):
    return batch["mask"].sum()


def masked(dtype="float32"):
    mask = np.arange(24) % 4 == 1  # the second of four micro-batches has most
    mask[::2] |= RANDOM.random(12) < 0.3
    mask[2::4] = False  # the third has none
    return {**rows(dtype), "mask": jnp.asarray(mask)}


@pytest.mark.parametrize("skip", ["window", "micro_batch"])
@pytest.mark.parametrize("steps", [4, 1])
def test_weights_give_the_mean_over_unequal_counts(steps, skip):
    batch = masked()
    grad_fn = accumulated(masked_sum, STATIC, steps, weight=count, skip=skip)
    w = jnp.asarray(W, jnp.float32)
    assert ("scan" in str(jax.make_jaxpr(grad_fn)(w, batch))) == (steps > 1)
    value, gradient = grad_fn(w, batch)
    expected, truth = jax.value_and_grad(lambda w: masked_sum(w, batch) / count(batch))(w)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(gradient / SCALE, truth, rtol=1e-5)
    nothing = {**batch, "mask": jnp.zeros(24, bool)}
    value, gradient = grad_fn(w, nothing)
    assert np.isnan(value) and np.isnan(gradient).all()


def test_half_gradients_of_a_weighted_sum_have_the_range_of_a_mean():
    total = lambda w, x: jnp.sum((x * w).astype(jnp.float32))
    scale = jmp.StaticLossScale(2.0**14)
    x, w = jnp.ones(2048, jnp.float16), jnp.float16(1.0)
    grad_fn = accumulated(total, scale, 2, weight=lambda x: np.int32(x.size))
    _, gradient = grad_fn(w, x)
    assert float(gradient) == 2.0**14  # of the sum itself it is 2**24: infinite in float16
    assert float(_accumulating._power_of_two_up_to(jnp.float32(np.inf))) == 1


BAD = {0: np.inf, 1: np.nan}


def linear(w, x):
    return jnp.mean(w * x)


@pytest.mark.parametrize("bad", [[], [0], [1], [0, 1, 2, 3]])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_bad_micro_batch_spoils_the_window_or_only_itself(bad, weighted):
    x = np.arange(8, dtype=np.float32)
    for i in bad:
        x[i + 4] = BAD.get(i, -np.inf)
    good = [i for i in range(4) if i not in bad]
    truth = np.mean([[i, i + 4] for i in good]) if good else np.nan
    fun, weight = (lambda w, x: jnp.sum(w * x), lambda x: x.size) if weighted else (linear, None)
    value, gradient = accumulated(fun, STATIC, 4, weight=weight)(1.0, x)
    assert bool(np.isfinite(gradient)) == bool(np.isfinite(value)) == (not bad)
    value, gradient = accumulated(fun, STATIC, 4, weight=weight, skip="micro_batch")(1.0, x)
    np.testing.assert_allclose([value, gradient / SCALE], [truth, truth])


def with_aux(w, batch):
    return mean_loss(w.astype(jnp.float32), batch), {"w": w, "n": jnp.int32(3)}


@pytest.mark.parametrize("skip", ["window", "micro_batch"])
@pytest.mark.parametrize("scale", [STATIC, jmp.NoOpLossScale(), jmp.DynamicLossScale(3.0)])
def test_one_step_is_scaled_value_and_grad_in_float32_without_a_loop(scale, skip):
    arguments = jnp.asarray(W, jnp.float16).at[0].set(-0.0), rows()
    single = jmp.scaled_value_and_grad(with_aux, scale, has_aux=True)
    grad_fn = accumulated(with_aux, scale, 1, has_aux=True, skip=skip)
    assert "scan" not in str(jax.make_jaxpr(grad_fn)(*arguments))
    for transform in (jax.jit, lambda fun: fun):
        (value, aux), gradient = transform(grad_fn)(*arguments)
        (expected, other), truth = transform(single)(*arguments)
        same((value, gradient), (expected, truth.astype(jnp.float32)))
        same(aux, jax.tree.map(lambda leaf: leaf[None], other))  # the same rank as with more steps


def test_half_gradients_add_up_in_float32():
    loss = lambda w, x: linear(w, x).astype(jnp.float32)
    grad_fn = accumulated(loss, jmp.NoOpLossScale(), 4096)
    x, w = jnp.ones(4096, jnp.float16), jnp.float16(1.0)
    _, gradient = grad_fn(w, x)
    assert gradient.dtype == np.float32
    assert float(gradient) == 1.0  # a float16 sum of ones stays at 2048
    half = accumulated(loss, jmp.NoOpLossScale(), 4096, accumulate_dtype="float16")
    _, gradient = half(w, x)
    assert gradient.dtype == np.float32
    assert float(gradient) == 0.5


def test_complex_parameters_accumulate_in_their_own_dtype():
    z = jnp.asarray([1 + 2j, 3 - 1j], jnp.complex64)
    loss = lambda z, x: jnp.mean(jnp.abs(z.sum() * x) ** 2)
    weighted = lambda z, x: jnp.sum(jnp.abs(z.sum() * x) ** 2)
    x = jnp.arange(1.0, 7.0)
    truth = jax.grad(loss)(z, x)
    for fun, weight in ((loss, None), (weighted, lambda x: x.size)):
        grad_fn = accumulated(fun, STATIC, 3, weight=weight)
        _, gradient = grad_fn(z, x)
        assert gradient.dtype == np.complex64
        np.testing.assert_allclose(gradient / SCALE, truth, rtol=1e-6)


@pytest.mark.filterwarnings("ignore:The function returned a float16 loss")
def test_nothing_is_promoted_implicitly_and_the_scale_is_not_a_constant(strict_promotion):
    grad_fn = lambda w, x, scale: accumulated(
        lambda w, x: jnp.sum(w * x), scale, 2, weight=lambda x: x.size, skip="micro_batch"
    )(w, x)
    scale = jmp.DynamicLossScale(8.0)
    value, gradient = jax.jit(grad_fn)(jnp.float16(2.0), jnp.ones(4, jnp.float16), scale)
    assert (float(value), float(gradient)) == (2.0, 8.0)


def test_vmap_gives_each_member_its_own_window():
    x = jnp.asarray([[1.0, 2.0, 3.0, 4.0], [1.0, jnp.inf, 3.0, 4.0]])
    w, scales = jnp.asarray([2.0, 3.0]), jmp.DynamicLossScale(jnp.asarray([4.0, 8.0]), jnp.zeros(2))

    member = lambda w, x, scale: accumulated(linear, scale, 2, skip="micro_batch")(w, x)
    values, gradients = jax.vmap(member)(w, x, scales)
    assert values.tolist() == [5.0, 6.0]
    assert gradients.tolist() == [10.0, 16.0]
    for axes in ("v", ("v", "v")):
        grad_fn = accumulated(linear, STATIC, 2, reduce_axes=axes)
        together = jax.vmap(lambda x, grad_fn=grad_fn: grad_fn(2.0, x), axis_name="v")
        _, reduced = together(jnp.arange(8.0).reshape(2, 4))
        assert reduced.tolist() == [3.5 * SCALE] * 2


# Eight devices, of which each has rows of its own.


@pytest.fixture(scope="module")
def mesh():
    auto = jax.sharding.AxisType.Auto
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(auto, auto))


def reductions(jaxpr, inside_a_scan=False):
    """Yields for each all-reduce of arrays whether it stands inside of a scan."""
    for equation in jaxpr.eqns:
        if equation.primitive.name in (*_jax_compat.PSUMS, "pmin"):
            yield inside_a_scan
        for inner in _jax_compat.inner_jaxprs(equation):
            yield from reductions(inner, inside_a_scan or equation.primitive.name == "scan")


def on_devices(mesh, check_vma, grad_fn):
    specs = {"in_specs": (P(), P("data")), "out_specs": P()}
    return jax.shard_map(grad_fn, mesh=mesh, check_vma=check_vma, **specs)


@pytest.mark.filterwarnings("ignore:The function returned a float16 loss")
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("steps", [1, 3])
def test_devices_reduce_once_a_window(mesh, steps, weighted, check_vma):
    fun, weight = (masked_sum, count) if weighted else (mean_loss, None)
    grad_fn = accumulated(fun, STATIC, steps, weight=weight, reduce_axes=("data",))
    w, batch = jnp.asarray(W, jnp.float16), masked("float16")
    mapped = on_devices(mesh, check_vma, grad_fn)
    jaxpr = jax.make_jaxpr(mapped)(w, batch).jaxpr
    found = list(reductions(jaxpr))
    assert found and not any(found)
    if steps == 3:
        value, gradient = jax.jit(mapped)(w, batch)
        assert gradient.dtype == np.float32
        mean = (lambda w, b: masked_sum(w, b) / count(b)) if weighted else mean_loss
        wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), (w, batch))
        expected, truth = jax.value_and_grad(mean)(*wide)
        np.testing.assert_allclose(value, expected, rtol=2e-3)
        np.testing.assert_allclose(gradient / SCALE, truth, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("steps", [1, 2])
def test_parameters_in_shards_are_refused_and_trained_as_the_error_says(mesh, steps):
    w, x = jnp.arange(4.0)[:, None], jnp.cos(jnp.arange(64.0)).reshape(16, 4)
    params, specs = {"w": w, "b": jnp.float32(0.5)}, {"w": P("data"), "b": P()}
    plain = lambda params, x: jnp.mean((x @ params["w"] + params["b"]) ** 2)

    def over_devices(params, x):
        whole = jmp.gather_params(params["w"], "data", "float32")
        return jax.lax.pmean(plain({**params, "w": whole}, x), "data")

    def step(axes):
        grad_fn = accumulated(over_devices, STATIC, steps, reduce_axes=axes)
        options = {"in_specs": (specs, P("data")), "out_specs": (P(), specs)}
        return jax.jit(jax.shard_map(grad_fn, mesh=mesh, **options))(params, x)

    with pytest.raises(ValueError, match=r"argument 0\['w'\], which differs along 'data'"):
        step(("model", "data"))
    found, gradients = step(())
    value, truth = jax.value_and_grad(plain)(params, x)
    np.testing.assert_allclose(found, value, rtol=1e-6)
    for name in params:
        np.testing.assert_allclose(gradients[name] / SCALE, truth[name], rtol=1e-5)


def test_a_parameter_in_shards_along_another_axis_than_that_of_the_sum_is_taken(mesh):
    def loss(own, x):  # tensor parallel: each device of "model" has a part of the products
        return jax.lax.psum(jnp.mean(own * x), "model")

    grad_fn = accumulated(loss, STATIC, 2, reduce_axes="data")
    specs = {"in_specs": (P("model"), P("data")), "out_specs": (P(), P("model"))}
    x = jnp.arange(16.0)
    value, gradient = jax.shard_map(grad_fn, mesh=mesh, **specs)(jnp.float32([1.0, 2.0]), x)
    assert value == 3 * x.mean()
    assert (gradient / SCALE).tolist() == [x.mean()] * 2


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_bad_micro_batch_of_one_device_is_one_of_all(mesh, check_vma):
    x = jnp.arange(16.0).at[9].set(jnp.inf)  # the second micro-batch of the third device
    kept = np.arange(16.0)[[i for i in range(16) if i not in (9, 11)]]
    for skip, truth in (("window", np.inf), ("micro_batch", kept.mean())):
        grad_fn = accumulated(linear, STATIC, 2, skip=skip, reduce_axes="data", has_aux=False)
        step = jax.jit(on_devices(mesh, check_vma, grad_fn))
        value, gradient = step(jnp.float32(1.0), x)
        np.testing.assert_allclose([value, gradient / SCALE], [truth, truth], rtol=1e-6)


@pytest.mark.parametrize("check_vma", [True, False])
def test_devices_that_share_rows_agree_which_micro_batch_is_bad(mesh, check_vma):
    """A tensor-parallel parameter: one device's part overflows, and all of them leave it out."""

    def loss(params, x):
        return jnp.mean(params["own"] * x) + jnp.mean(params["all"] * x)

    grad_fn = accumulated(loss, STATIC, 2, skip="micro_batch")

    def step(params, x):
        # On one device of two the first micro-batch is bad.
        spoilt = jnp.where(jax.lax.axis_index("model") == 1, jnp.inf, 0.0)
        shift = spoilt * jnp.asarray([1.0, 0.0])
        return grad_fn(params, jnp.where(jnp.isnan(shift), x, x + shift))[1]["own"][None]

    specs = {"in_specs": ({"own": P("model"), "all": P()}, P()), "out_specs": P("model")}
    mapped = jax.shard_map(step, mesh=mesh, check_vma=check_vma, **specs)
    params = {"own": jnp.ones(2), "all": jnp.float32(1.0)}
    gradients = jax.jit(mapped)(params, jnp.asarray([3.0, 5.0]))
    np.testing.assert_array_equal(np.ravel(gradients), [5.0 * SCALE] * 2)


# Steps of an optimizer with accumulated gradients.


@pytest.mark.parametrize("skip", ["window", "micro_batch"])
def test_a_window_is_one_step_of_loss_scaling_and_masters(skip):
    scale = jmp.DynamicLossScale(8.0, period=2)
    tx = transforms.mixed_precision(optax.sgd(2.0**-13), "p=f16,c=f16,o=f32", scale)

    @jax.jit
    def step(w, state, x):
        mean = lambda w, x: jnp.mean((w * x).astype(jnp.float32))
        _, scaled = accumulated(mean, state.loss_scale, 4, skip=skip)(w, x)
        updates, state = tx.update(scaled, state, w)
        return optax.apply_updates(w, updates), state

    w = jnp.ones((1, 1), jnp.float16)
    state, scales = tx.init(w), []
    good = jnp.ones((4, 1), jnp.float16)
    for x in (good, good, good.at[2].set(jnp.inf), good.at[:].set(jnp.nan)):
        w, state = step(w, state, x)
        scales.append(float(state.loss_scale.loss_scale))
    each = skip == "micro_batch"
    assert scales == ([8, 16, 16, 8] if each else [8, 16, 8, 4])
    assert int(state.skipped_steps) == (1 if each else 2)
    # A half parameter would stay at one: the master moved by 2**-13 a window.
    (master,) = jax.tree.leaves(transforms.masters(state, w))
    assert float(master[0, 0]) == 1 - (3 if each else 2) * 2.0**-13


def test_a_batch_without_rows_is_found_before_the_function_is_called():
    def never(*args):
        raise AssertionError("called")

    with pytest.raises(ValueError, match=r"got float32\[0\] as argument 1"):
        accumulated(never, STATIC, 2)(1.0, jnp.ones(0))
    with pytest.raises(ValueError, match="found no array in the batch"):
        accumulated(never, STATIC, 1, batch_argnums=())(1.0, jnp.ones(2))
    with pytest.raises(ValueError, match="share argument 0"):
        accumulated(never, STATIC, 1, (0, 1), (2, -3))(1.0, 1.0, jnp.ones(2))


def test_counts_are_summed_in_float32_and_refused_in_a_dtype_that_cannot_count():
    for dtype in ("bool", "uint8", "int32", "float32"):
        counted = _accumulating._weight_of(lambda x: x, [jnp.ones((), dtype)])
        assert counted.dtype == np.float32  # a uint8 sum over devices would wrap around
    for dtype in ("float16", "bfloat16", "complex64"):
        weight = lambda x, dtype=dtype: jnp.ones_like(x, dtype).sum()
        grad_fn = accumulated(linear, STATIC, 2, weight=weight)
        with pytest.raises(TypeError, match=rf"weight returned {dtype}\[\]; .*float16 counts to"):
            grad_fn(1.0, jnp.ones(4))
