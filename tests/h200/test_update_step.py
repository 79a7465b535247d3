"""What loss scaling, masters and small states cost: one Adam update of 60 tensors on an H200.

Counted, not timed. A parameter's floor is 26 bytes without a check (float32 parameters, float16
gradients), 28 with it (the check reads gradients before the update can), 32 with masters through
`optax.apply_updates`, which reads the half parameter again. One percent above is allowed.
"""

import jax
import jax.numpy as jnp
import optax
import pytest

import jmp
from benchmarks.recipes._training import update_of
from jmp import transforms
from tests.commands import in_full
from tests.products import convolved

SHAPES = [(640, 1024)] * 40 + [(1024,)] * 20
NUMBER_OF_PARAMETERS = sum(jnp.zeros(shape).size for shape in SHAPES)


def compiled_update(h200, tx, param_dtype, shapes=SHAPES, half=jnp.float16):
    params = [jax.ShapeDtypeStruct(shape, param_dtype) for shape in shapes]
    gradients = [jax.ShapeDtypeStruct(shape, half) for shape in shapes]
    opt_state = jax.eval_shape(tx.init, params)
    return h200(update_of(tx), params, opt_state, gradients, donate_argnums=(0, 1))


ADAM, SCALE = optax.adam(1e-3), jmp.torch_loss_scale()
# Optimizers, the dtype of parameters; bytes moved a parameter and kernels, at most.
UPDATES = {
    "float32 parameters, dynamic scale": (
        transforms.with_loss_scale(ADAM, SCALE), jnp.float32, 28.28, 58),
    "half parameters, float32 masters, dynamic scale": (
        transforms.mixed_precision(ADAM, "O2", SCALE), jnp.float16, 32.32, 58),
    "float32 parameters, no scale": (
        transforms.with_loss_scale(ADAM, jmp.NoOpLossScale()), jnp.float32, 26.26, 63),
}  # fmt: skip


@pytest.mark.parametrize("name", in_full(UPDATES.keys(), first=1))
def test_an_update_stays_on_its_floor(h200, name):
    tx, param_dtype, bytes_per_parameter, kernels = UPDATES[name]
    program = compiled_update(h200, tx, param_dtype)
    measured = program.bytes_moved / NUMBER_OF_PARAMETERS
    temp = program.temp_bytes / NUMBER_OF_PARAMETERS
    print(
        f"\n{name}: {measured:.2f} bytes a parameter, {program.kernels} kernels, "
        f"{program.copies} copies, {temp:.3f} bytes a parameter of temp, "
        f"{program.conditionals} conditionals"
    )
    assert measured <= bytes_per_parameter
    assert program.copies <= 2
    assert program.kernels <= kernels
    assert temp <= 0.2
    assert program.conditionals == 0


SPLIT, STOCHASTIC = transforms.with_split_masters, transforms.with_stochastic_rounding
STORED = transforms.with_stored_state
# Bytes moved and held a parameter, and kernels, of 20 tensors, or of 6 if XLA compiles slowly: one
# for each tensor, and a few for counts and checks. Scales of rows are found first, four
# matrices in a kernel.
SMALL_STATES = {
    "split": (SPLIT(ADAM), 26.0, 12.0, 22),
    "split, checked": (transforms.with_loss_scale(SPLIT(ADAM), SCALE), 28.0, 12.0, 26),
    "stochastic": (STOCHASTIC(ADAM), 22.0, 10.0, 20),
    "kahan": (transforms.with_kahan_summation(ADAM), 26.0, 12.0, 22),
    "split, bfloat16 moments": (SPLIT(STORED(ADAM, "bfloat16")), 18.0, 8.0, 10),
    "stochastic, float8 moments": (STOCHASTIC(STORED(ADAM, "float8_e4m3fn")), 14.1, 4.1, 13),
    "stochastic, int8 moments": (STOCHASTIC(STORED(ADAM, "int8")), 14.1, 4.1, 13),
}


@pytest.mark.parametrize("name", in_full([*SMALL_STATES], but=["stochastic, int8 moments"]))
def test_small_states_move_and_hold_what_they_say(h200, name):
    tx, moved, held, kernels = SMALL_STATES[name]
    shapes = SHAPES[:: 10 if name.endswith("moments") else 3]
    numbers = sum(jnp.zeros(shape).size for shape in shapes)
    program = compiled_update(h200, tx, jnp.bfloat16, shapes, jnp.bfloat16)
    measured = program.bytes_moved / numbers
    state = jax.eval_shape(tx.init, [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes])
    in_state = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    print(f"\n{name}: {measured:.2f} bytes a parameter, {program.kernels} kernels")
    assert measured <= 1.02 * moved
    assert 2 + in_state / numbers <= held + 0.001
    assert program.kernels <= kernels
    assert program.copies <= 1
    assert program.temp_bytes <= 0.1 * numbers


def test_matrices_of_many_shapes_take_one_kernel_each_to_check(h200):
    shapes = [(640 + 16 * i, 1024) for i in range(12)]
    tx = transforms.with_loss_scale(optax.sgd(0.1), jmp.torch_loss_scale())
    program = compiled_update(h200, tx, jnp.float32, shapes)
    measured = program.bytes_moved / sum(rows * columns for rows, columns in shapes)
    print(f"\nmany shapes: {measured:.3f} bytes a parameter, {program.kernels} kernels")
    # One each for the update, one each for the check, six more; with two each for the check 40.
    assert program.kernels <= 30
    assert measured <= 12.02


@pytest.mark.full
def test_masters_of_convolutions_are_updated_in_one_kernel_each(h200):
    kernels = [jax.ShapeDtypeStruct((3, 3, 128, 128), jnp.float16)] * 4
    tx = transforms.mixed_precision(optax.sgd(0.1, momentum=0.9), "O2", jmp.torch_loss_scale())
    images = jax.ShapeDtypeStruct((32, 8, 8, 128), jnp.float16)

    def loss(kernels, images):
        for kernel in kernels:
            images = convolved(jax.nn.relu(images), kernel)
        return (images.astype(jnp.float32) ** 2).mean()

    def step(kernels, opt_state, images):
        return update_of(tx)(kernels, opt_state, jax.grad(loss)(kernels, images))

    opt_state = jax.eval_shape(tx.init, kernels)
    program = h200(step, kernels, opt_state, images, donate_argnums=(0, 1))
    print(f"\n{program.bytes_moved / 1e6:.1f} MB, {program.kernels} kernels")
    assert program.bytes_moved <= 44.8e6  # 68.4e6 in 57 kernels if gradients are not put in order
    assert program.kernels <= 39


def test_a_window_of_eight_micro_batches_adds_ten_bytes_a_parameter_for_each(h200):
    # For a micro-batch the half gradient, here an array of the batch, is read once, and the sum is
    # read and written. Of a window: zeros, and the update on its floor with float32 gradients.
    steps = 8
    tx = transforms.with_loss_scale(optax.adam(1e-3), jmp.torch_loss_scale())
    params = [jax.ShapeDtypeStruct((640, 1024), jnp.float32)] * 8
    batch = [jax.ShapeDtypeStruct((steps, 640, 1024), jnp.float16)] * 8
    opt_state = jax.eval_shape(tx.init, params)

    def loss(params, batch):
        pairs = zip(params, batch, strict=True)
        return jnp.float32(sum((p.astype(jnp.float16) * rows[0]).sum() for p, rows in pairs))

    def window(params, opt_state, batch):
        accumulated = jmp.accumulated_value_and_grad(loss, opt_state.loss_scale, steps)
        return update_of(tx)(params, opt_state, accumulated(params, batch)[1])

    whole = h200(window, params, opt_state, batch, donate_argnums=(0, 1))
    in_window = whole.bytes_moved / sum(p.size for p in params)
    print(f"\n{in_window:.2f} bytes a parameter and window")
    assert in_window <= 116.1  # 4 + 8 * 10 + 32
    assert whole.copies <= 2
