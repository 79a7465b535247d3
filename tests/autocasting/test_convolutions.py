"""Convolutions with more positions in the result than in the input: the gradient of a kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp
from tests.commands import in_full
from tests.errors import assert_all_derivatives, assert_near, relative_error
from tests.products import convolved, named

IMAGES = ("NHWC", "HWIO", "NHWC")
FIRST = ("NCHW", "OIHW", "NCHW")
# Shapes of input and kernel; strides, padding, dilation of input and of kernel; dimensions.
SPREAD = {
    "transposed": ((2, 5, 7, 3), (2, 2, 3, 4), (1, 1), ((1, 1), (1, 1)), (2, 2), (1, 1), IMAGES),
    "uneven": ((2, 5, 7, 3), (3, 2, 3, 4), (1, 1), ((2, 2), (1, 3)), (2, 3), (1, 1), IMAGES),
    "dilated": ((2, 5, 7, 3), (3, 2, 3, 4), (1, 1), ((3, 4), (2, 0)), (2, 3), (2, 3), IMAGES),
    "strided": ((2, 5, 7, 3), (3, 2, 3, 4), (1, 2), ((2, 0), (4, 1)), (4, 3), (2, 1), IMAGES),
    "cut off": ((2, 5, 7, 3), (3, 2, 3, 4), (2, 1), ((-1, 5), (4, -1)), (3, 3), (1, 3), IMAGES),
    "padded": ((2, 3, 5, 7), (4, 3, 3, 2), (1, 1), ((4, 4), (1, 3)), (1, 1), (2, 1), FIRST),
    "1 axis": ((2, 9, 3), (4, 3, 2), (1,), ((3, 3),), (4,), (1,), ("NHC", "HIO", "NHC")),
}  # fmt: skip
OTHERS = {
    "as large": ((2, 5, 7, 3), (3, 3, 3, 4), (1, 1), ((1, 1), (1, 1)), (1, 1), (1, 1), IMAGES),
    "smaller": ((2, 5, 7, 3), (3, 3, 3, 4), (2, 2), ((1, 1), (1, 1)), (1, 1), (1, 1), IMAGES),
}


def drawn(*shapes, draw=lambda rng, shape: rng.normal(size=shape)):
    rng = np.random.default_rng(0)
    return [jnp.asarray(draw(rng, shape), jnp.float32) for shape in shapes]


def made(shape, kernel, *settings, groups=1):
    """Returns a loss of one convolution, and its kernel and input."""

    def loss(w, x):
        y = lax.conv_general_dilated(x, w, *settings, feature_group_count=groups)
        return jnp.sum(jnp.tanh(y / 4) * jnp.cos(jnp.arange(y.size).reshape(y.shape)))

    return loss, *drawn(kernel, shape)


def gradients(loss, platform):
    return jax.jit(jax.grad(jmp.autocast(loss, "mixed_bfloat16", platform=platform), (0, 1)))


def program(loss, platform, *arguments):
    return str(jax.make_jaxpr(gradients(loss, platform))(*arguments))


@pytest.mark.parametrize("case", in_full(SPREAD.keys(), one_of=4))
def test_on_a_tpu_the_gradient_of_its_kernel_is_the_same_and_reverses_no_image(case):
    loss, w, x = made(*SPREAD[case])
    exact = jax.grad(loss, (0, 1))(w, x)
    on_gpu, on_tpu = (gradients(loss, platform)(w, x) for platform in ("gpu", "tpu"))
    assert [g.dtype for g in on_tpu] == [jnp.float32] * 2
    for ours, others, reference in zip(on_tpu, on_gpu, exact, strict=True):
        # Both are rounded to half; on a CPU XLA leaves that out before a cast to float32.
        assert relative_error(ours, reference) <= relative_error(others, reference) + 2.0**-9
        assert relative_error(ours, reference) <= 2.0**-7
    assert program(loss, "tpu", w, x) != program(loss, "gpu", w, x)


@pytest.mark.parametrize("case", OTHERS)
def test_others_are_on_a_tpu_as_on_a_gpu(case):
    loss, w, x = made(*OTHERS[case])
    assert program(loss, "tpu", w, x) == program(loss, "gpu", w, x)


def test_so_are_those_in_groups_and_those_of_nothing():
    shape, kernel, *settings = SPREAD["transposed"]
    for loss, w, x in (
        made((2, 5, 7, 6), kernel, *settings, groups=2),
        made((0, 5, 7, 3), kernel, *settings),
    ):
        assert program(loss, "tpu", w, x) == program(loss, "gpu", w, x)
        assert gradients(loss, "tpu")(w, x)[0].shape == w.shape


def test_so_are_those_whose_gradients_need_a_sharding():
    loss, w, x = made(*SPREAD["transposed"])
    for kind, is_same in ((AxisType.Explicit, True), (AxisType.Auto, False)):
        placed = NamedSharding(jax.make_mesh((1,), ("data",), axis_types=(kind,)), P())
        arguments = jax.device_put((w, x), placed)
        on_gpu, on_tpu = (program(loss, platform, *arguments) for platform in ("gpu", "tpu"))
        assert (on_tpu == on_gpu) is is_same


@pytest.mark.parametrize("argnums", [(0,), (1,), (0, 1)])
def test_derivatives_of_integers_are_exact_alone_and_mapped(argnums):
    plain = lambda w, x: lax.conv_transpose(x, w, (2,), "SAME")
    shapes = (3, 3, 2, 4), (3, 1, 5, 2)
    numbers = drawn(*shapes, *shapes, draw=lambda rng, shape: rng.integers(-3, 4, size=shape))
    arguments, tangents = numbers[:2], numbers[2:]

    def derivatives(function):
        def of_one(arguments, tangents):
            given = lambda *some: function(
                *(some[argnums.index(i)] if i in argnums else arguments[i] for i in (0, 1))
            )
            primals, changes = ([x[i] for i in argnums] for x in (arguments, tangents))
            result, change = jax.jvp(given, primals, changes)
            return result, change, jax.vjp(given, *primals)[1](jnp.cos(result).round())

        alone = of_one(*jax.tree.map(lambda x: x[1], (arguments, tangents)))
        return alone, jax.jit(jax.vmap(of_one))(arguments, tangents)

    found = derivatives(jmp.autocast(plain, "mixed_bfloat16", platform="tpu"))
    jax.tree.map(np.testing.assert_array_equal, found, derivatives(plain))


@pytest.mark.full
def test_it_has_all_derivatives():
    loss = lambda w, x: jnp.sum(jnp.tanh(lax.conv_transpose(x, w, (2,), "SAME")))
    w, x = (array / 2 for array in drawn((2, 2, 2), (2, 4, 2)))
    mixed = jmp.autocast(loss, "mixed_bfloat16", platform="tpu")
    for argument in (0, 1):
        assert_all_derivatives(mixed, loss, 0.03, w, x, argnums=argument)

    of_both = lambda function: jax.jacrev(jax.jacrev(function, 1))(w, x)
    assert_near(of_both(mixed), of_both(loss), 0.03)


@pytest.mark.full
def test_it_maps_over_kernels_and_runs_in_a_loop():
    layer = lambda x, w: jnp.tanh(lax.conv_transpose(x, w, (2,), "SAME"))[:, ::2]
    alone = lambda w, x: jnp.sum(layer(x, w))

    def looped(ws, x):
        return jnp.sum(lax.scan(lambda x, w: (layer(x, w), None), x, ws)[0])

    ws, x = (array / 2 for array in drawn((3, 2, 2, 2), (3, 4, 2)))
    for loss, mapped in ((alone, (0, None)), (alone, (None, 0)), (looped, None)):
        arguments = ws if mapped != (None, 0) else ws[0], x if mapped != (None, 0) else x[:, None]
        found, exact = (
            (jax.grad(f) if mapped is None else jax.vmap(jax.grad(f), mapped))(*arguments)
            for f in (jmp.autocast(loss, "mixed_bfloat16", platform="tpu"), loss)
        )
        assert relative_error(found, exact) < 0.02


def slope(kernel, images):
    """The derivative of a convolution inside a loss, as that of a gradient penalty."""
    return jax.grad(lambda x: jnp.sum(jnp.sin(convolved(x, kernel))))(images)


def test_a_kernel_is_rounded_before_it_is_reversed():
    """XLA calls cuDNN's derivative where it sees the kernel reversed, and not behind a cast."""
    kernel, images = jnp.ones((3, 3, 4, 8)), jnp.ones((2, 8, 8, 4))
    (reverse,) = named("rev", jmp.autocast(slope, "mixed_float16"), kernel, images)
    assert reverse.outvars[0].aval.dtype == jnp.float16


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_the_gradient_of_a_kernel_adds_up_over_devices_in_float32(half):
    """JAX casts the kernel to one that varies over devices; the transpose of that is a sum."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def loss(kernel, images):
        return jax.lax.psum(jnp.sum(convolved(images, kernel)), "data")

    divided = jax.shard_map(loss, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    gradient = jax.jit(jax.grad(jmp.autocast(divided, f"mixed_{half}")))
    found = gradient(jnp.ones((1, 1, 4, 4)), jnp.ones((32, 64, 64, 4)))
    np.testing.assert_array_equal(found, 131072.0)  # more than float16 holds
