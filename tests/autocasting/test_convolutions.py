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
from tests.errors import relative_error
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
SAME = ((2, 5, 7, 3), (3, 3, 3, 4), (1, 1), ((1, 1), (1, 1)), (1, 1), (1, 1), IMAGES)
OTHERS = {
    "as large": (SAME, {}),
    "smaller": ((*SAME[:2], (2, 2), *SAME[3:]), {}),
    "in groups": (((2, 5, 7, 6), *SPREAD["transposed"][1:]), {"groups": 2}),
    "of nothing": (((0, 5, 7, 3), *SPREAD["transposed"][1:]), {}),
}


def made(shape, kernel, *settings, groups=1):
    """Returns a loss of one convolution, and its kernel and input."""

    def loss(w, x):
        y = lax.conv_general_dilated(x, w, *settings, feature_group_count=groups)
        return jnp.sum(jnp.tanh(y / 4) * jnp.cos(jnp.arange(y.size).reshape(y.shape)))

    rng = np.random.default_rng(0)
    return loss, *(jnp.asarray(rng.normal(size=size), jnp.float32) for size in (kernel, shape))


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
    settings, options = OTHERS[case]
    loss, w, x = made(*settings, **options)
    assert program(loss, "tpu", w, x) == program(loss, "gpu", w, x)
    assert gradients(loss, "tpu")(w, x)[0].shape == w.shape


def test_so_are_those_whose_gradients_need_a_sharding():
    loss, w, x = made(*SPREAD["transposed"])
    for kind, is_same in ((AxisType.Explicit, True), (AxisType.Auto, False)):
        placed = NamedSharding(jax.make_mesh((1,), ("data",), axis_types=(kind,)), P())
        arguments = jax.device_put((w, x), placed)
        on_gpu, on_tpu = (program(loss, platform, *arguments) for platform in ("gpu", "tpu"))
        assert (on_tpu == on_gpu) is is_same


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
