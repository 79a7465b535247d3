"""Positions, counts and features inside of a model stay float32; the network behind is half."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jmp
from jmp import _jax_compat
from testbed.position_cases import CASES, EXACT
from tests.commands import in_full
from tests.errors import relative_error
from tests.products import named

pytestmark = pytest.mark.usefixtures("users_rank_promotion")

HALVES = ("float16", "bfloat16")
SCALE = 2.0**12
LUCK = 1.05  # of the roundings
FLOOR = 1e-5  # what float32 itself rounds, in sums of a thousand terms
EXAMPLES = 6  # parameters and inputs: the more there are, the less the roundings' luck is


def in_float32(case):
    return functools.partial(case.loss, jnp.dtype("float32"))


def example(examples, i):
    return jax.tree.map(lambda x: x[i], examples)


def rounded(jaxpr, consts=()):
    """A function that computes a jaxpr, each of whose half results is rounded."""

    def run(*arguments):
        values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *arguments), strict=True))
        for equation in jaxpr.eqns:
            operands = [v.val if hasattr(v, "val") else values[v] for v in equation.invars]
            inner = equation.params.get("jaxpr")
            if equation.primitive.name in ("jit", "pjit"):
                results = rounded(inner.jaxpr, inner.consts)(*operands)
            elif equation.primitive.name in ("checkpoint", "remat2"):
                results = rounded(inner)(*operands)
            else:
                params = dict(equation.params)
                if equation.primitive.name == "scan":
                    avals = [v.aval for v in inner.jaxpr.invars]
                    structs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
                    body = rounded(inner.jaxpr, inner.consts)
                    params["jaxpr"] = jax.make_jaxpr(body)(*structs)
                results = _jax_compat.bind(equation.primitive, operands, params)
            for variable, result in zip(equation.outvars, results, strict=True):
                if result.dtype == jnp.bfloat16:
                    result = lax.reduce_precision(result.astype(jnp.float32), 8, 7)
                    result = result.astype(jnp.bfloat16)
                values[variable] = result
        return [v.val if hasattr(v, "val") else values[v] for v in jaxpr.outvars]

    return run


def jit(fun, half):
    """Compiles `fun` so that every rounding takes place: XLA leaves out some to bfloat16."""

    def run(*arguments):
        closed, shape = jax.make_jaxpr(fun, return_shape=True)(*arguments)
        results = rounded(closed.jaxpr, closed.consts)(*jax.tree.leaves(arguments))
        return jax.tree.unflatten(jax.tree.structure(shape), results)

    every = run if half == "bfloat16" else fun
    return jax.jit(every, compiler_options={"xla_allow_excess_precision": False})


def gradients(loss, dtype, examples):
    """The gradients of a function of parameters and inputs as a user of loss scaling has them."""

    scaled = lambda params, inputs: loss(params, *inputs) * SCALE
    run = jit(lambda arguments: jax.grad(scaled)(*arguments), dtype)
    each = [run(example(examples, i)) for i in range(EXAMPLES)]
    return jax.tree.map(lambda *x: np.stack(x) / SCALE, *each)


def of_vmap(loss):
    return lambda *arguments: jax.vmap(loss)(*arguments).sum()


def of_scan(loss):
    """The sum over all examples."""

    def total(*arguments):
        step = lambda total, example: (total + loss(*example), None)
        return lax.scan(step, 0.0, arguments)[0]

    return total


@functools.cache
def arguments(case):
    """Parameters and inputs of all examples, one behind the other."""
    randoms = [np.random.default_rng(seed) for seed in range(EXAMPLES)]
    examples = [(case.params(random), case.inputs(random)) for random in randoms]
    return jax.tree.map(lambda *x: np.stack(x), *examples)


@functools.cache
def of_model(loss, dtype):
    """The gradients of the model that is written in a dtype."""
    (case,) = (case for case in CASES if case.loss is loss)
    return gradients(functools.partial(loss, jnp.dtype(dtype)), dtype, arguments(case))


def products(function, *args):
    """Counts the dtypes of operands of what contracts anything, and of what contracts nothing."""
    counts, outer = collections.Counter(), collections.Counter()
    for equation in named("dot_general", function, *args):
        (contracted, _), _ = equation.params["dimension_numbers"]
        contracts = any(equation.invars[0].aval.shape[axis] > 1 for axis in contracted)
        dtypes = " ".join(sorted({str(v.aval.dtype) for v in equation.invars}))
        (counts if contracts else outer)[dtypes] += 1
    return counts, outer


def expected_products(case, half):
    counts = {half: case.half, "float32": case.full, "float32 int32": case.mixed}
    return collections.Counter({dtypes: n for dtypes, n in counts.items() if n})


@pytest.mark.parametrize("case", in_full(CASES, one_of=10), ids=lambda case: case.name)
def test_the_gradient_is_as_good_as_by_hand(case):
    half = HALVES[CASES.index(case) % 2]  # rows take turns with half types
    autocast = jmp.autocast(in_float32(case), f"mixed_{half}")
    got = gradients(autocast, half, arguments(case))
    assert {x.dtype for x in jax.tree.leaves(got)} == {np.dtype(np.float32)}
    reference = of_model(case.by_hand, "float32")
    by_hand = relative_error(of_model(case.by_hand, half), reference)
    assert relative_error(got, reference) <= LUCK * by_hand + FLOOR


@pytest.mark.parametrize("case", in_full(CASES, one_of=2), ids=lambda case: case.name)
def test_which_products_are_half(case):
    loss, every = in_float32(case), arguments(case)
    one = example(every, 0)
    for half, function, (params, inputs) in (
        ("float16", loss, one),
        ("bfloat16", jax.checkpoint(loss), one),
        ("bfloat16", of_vmap(loss), every),
        ("float16", of_scan(loss), every),
    ):
        counts, outer = products(jmp.autocast(function, f"mixed_{half}"), params, *inputs)
        assert counts == expected_products(case, half)
        assert not outer, "a product that contracts nothing is a multiplication"


@pytest.mark.filterwarnings("ignore::jmp.NoHalfProductWarning")  # only integers
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize(
    ("function", "inputs", "expected"), EXACT, ids=lambda x: getattr(x, "__name__", "")
)
def test_counts_are_exact(function, inputs, expected, half):
    got = jit(jmp.autocast(function, f"mixed_{half}"), half)(*inputs)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("mark", [jmp.full_precision, jax.custom_vjp, jax.checkpoint])
def test_a_sine_behind_a_product_in_a_region_leaves_the_layers_before_it_half(mark):
    inside = mark(lambda x, w: jnp.sin(x @ w))
    if mark is jax.custom_vjp:
        inside.defvjp(lambda x, w: (inside(x, w), (x, w)), lambda _, change: (change, change))

    network = lambda w, x: jnp.sum(inside(jnp.tanh(x @ w), w))
    lowered, ones = jmp.autocast(network, "mixed_float16"), jnp.ones((8, 8))
    first, *_ = named("dot_general", lowered, ones, ones)
    assert first.invars[0].aval.dtype == jnp.float16
