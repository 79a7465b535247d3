"""Positions, counts and features inside of a model stay float32; the network behind is half."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp
from tests.position_cases import CASES
from tests.products import equations

HALVES = ("float16", "bfloat16")
SCALE = 2.0**12
LUCK = 1.05  # of the roundings
FLOOR = 1e-5  # what float32 itself rounds, in sums of a thousand terms


def both(random_inputs):
    """Two examples, one behind the other."""
    examples = [random_inputs(np.random.default_rng(seed)) for seed in (1, 2)]
    return tuple(np.stack(arrays) for arrays in zip(*examples, strict=True))


def of_vmap(loss):
    return lambda params, *batch: jax.vmap(functools.partial(loss, params))(*batch).mean()


def of_scan(loss):
    def total(params, *batch):
        def step(total, example):
            return total + loss(params, *example), None

        return jax.lax.scan(step, 0.0, batch)[0] / len(batch[0])

    return total


def of_remat(loss):
    loss = jax.checkpoint(loss)
    return lambda params, *batch: (
        sum(loss(params, *(x[i] for x in batch)) for i in range(2)) / 2
    )


TRANSFORMATIONS = {"vmap": of_vmap, "scan": of_scan, "remat": of_remat}


def gradient(loss):
    """The gradient as a user of loss scaling has it."""
    scaled = jax.grad(lambda *args: loss(*args) * SCALE)
    return lambda *args: jax.tree.map(lambda g: g / SCALE, scaled(*args))


def jit(fun):
    # Each rounding that the program says takes place: XLA may leave some out on a CPU.
    return jax.jit(fun, compiler_options={"xla_allow_excess_precision": False})


@functools.cache
def arguments(case):
    return case.params(), both(case.inputs)


@functools.cache
def of_model(case, dtype):
    """The gradient over both examples of the model that is written in a dtype."""
    params, batch = arguments(case)
    compiled = jit(gradient(functools.partial(case.loss, jnp.dtype(dtype))))
    examples = [compiled(params, *(x[i] for x in batch)) for i in range(2)]
    return jax.tree.map(lambda x, y: (np.float64(x) + np.float64(y)) / 2, *examples)


def in_float32(case):
    return functools.partial(case.loss, jnp.dtype("float32"))


def error(gradients, reference):
    """The relative L2 error over the whole gradient."""
    a, b = (
        np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)])
        for tree in (gradients, reference)
    )
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def bound(case, half):
    return LUCK * error(of_model(case, half), of_model(case, "float32")) + FLOOR


def products(function, *args):
    """Counts the dtypes of operands of what contracts anything, and of what contracts nothing."""
    counts, outer = collections.Counter(), collections.Counter()
    for equation in equations(jax.make_jaxpr(function)(*args).jaxpr):
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            contracts = any(shape[axis] > 1 for axis in contracted)
            dtypes = " ".join(sorted({str(v.aval.dtype) for v in equation.invars}))
            (counts if contracts else outer)[dtypes] += 1
    return counts, outer


def expected_products(case, half):
    counts = {half: case.half, "float32": case.full, "float32 int32": case.mixed}
    return collections.Counter({dtypes: n for dtypes, n in counts.items() if n})


each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@each_case
@pytest.mark.parametrize("half", HALVES)
def test_the_gradient_is_as_good_as_by_hand(case, half):
    params, batch = arguments(case)
    ours = jit(gradient(jmp.autocast(in_float32(case), f"mixed_{half}")))
    examples = [ours(params, *(x[i] for x in batch)) for i in range(2)]
    got = jax.tree.map(lambda x, y: (x + y) / 2, *examples)
    assert {x.dtype for x in jax.tree.leaves(got)} == {np.dtype(np.float32)}
    assert error(got, of_model(case, "float32")) <= bound(case, half)


@each_case
@pytest.mark.parametrize("transformation", TRANSFORMATIONS)
def test_so_it_is_under_transformations(case, transformation):
    params, batch = arguments(case)
    loss = TRANSFORMATIONS[transformation](in_float32(case))
    got = jit(gradient(jmp.autocast(loss, "mixed_bfloat16")))(params, *batch)
    assert error(got, of_model(case, "float32")) <= bound(case, "bfloat16")


@each_case
def test_which_products_are_half(case):
    params, batch = arguments(case)
    for half in HALVES:
        autocast = jmp.autocast(in_float32(case), f"mixed_{half}")
        counts, outer = products(autocast, params, *(x[0] for x in batch))
        assert counts == expected_products(case, half)
        assert not outer, "a product that contracts nothing is a multiplication"
