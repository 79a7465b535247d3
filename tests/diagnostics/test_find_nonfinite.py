"""`find_nonfinite` names the planted culprit, blames no benign infinity, and costs nothing before.

The line of a culprit carries the word `planted`, and its case says what else must be found.
"""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

import jmp
from jmp import transforms
from jmp.diagnostics import find_nonfinite

F16 = jnp.float16
LINES = pathlib.Path(__file__).read_text().splitlines()


def half(*numbers):
    return jnp.array(numbers, F16)


# Forward, at the top.


def exponential(x):
    return jnp.exp(x)  # planted


def masked_throughout(x):
    mask = jnp.array([[True, True], [False, False]])
    scores = jnp.where(mask, x, -jnp.inf)
    return jax.nn.softmax(scores)  # planted


def two_sides_of_a_where(x):
    unread = jnp.log(jnp.zeros_like(x))
    read = jnp.exp(x)  # planted
    return jnp.where(x < 0, unread, read)


# Nested.


def scanned(x, reverse=False):
    def body(carry, row):
        with jax.named_scope("cell"):
            return carry + 1, jnp.exp(row)  # planted

    return lax.scan(body, 0, x, reverse=reverse)


def loop(x):
    def body(state):
        count, value = state
        return count + 1, value * value  # planted

    return lax.while_loop(lambda state: state[0] < 10, body, (0, x))[1]


def loop_under_vmap(x):
    return jax.vmap(lambda y: lax.while_loop(lambda z: z < 6e4, lambda z: z * z, y))(x)  # planted


def running_maximum(x):
    """As attention in blocks: the maximum starts at -inf, which is meant."""

    def body(state, row):
        largest, total = state
        largest = jnp.maximum(largest, row.max())
        return (largest, total + jnp.exp(row).sum()), None  # planted

    return lax.scan(body, (-jnp.inf, 0.0), x)[0][1]


def sharded(x, **options):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def body(shard):
        shard = lax.scan(lambda carry, _: (carry * 10, None), shard, None, length=4)[0]  # planted
        return shard / lax.psum(shard.sum(), "data")

    specs = {"in_specs": P("data"), "out_specs": P("data")}
    return jax.shard_map(body, mesh=mesh, **specs, **options)(x)  # planted, if not looked into


# Derivatives.


def trap(x, function=jnp.log):
    return jnp.where(x > 0, function(x), 0).sum()  # planted


@jax.custom_vjp
def with_a_vjp(x):
    return x


with_a_vjp.defvjp(lambda x: (x, x), lambda residuals, cotangent: (cotangent / residuals,))


def custom_backward(x):
    return with_a_vjp(x)  # planted: JAX gives the rule's operations the line of the call


@jax.custom_jvp
def with_a_jvp(x):
    return jnp.sqrt(x)


@with_a_jvp.defjvp
def its_jvp(primals, tangents):
    (x,), (t,) = primals, tangents
    return with_a_jvp(x), t / x  # planted


def scanned_backward(x):
    def body(carry, row):
        return carry + jnp.where(row > 0, jnp.log(row), 0), None  # planted

    return lax.scan(body, 0.0, x)[0]


# Libraries.


def scaled_loss(x):
    loss_scale = jmp.StaticLossScale(2.0**17)
    loss = jmp.autocast(lambda x: jnp.tanh(x @ x).sum(), "mixed_float16")  # planted
    return jmp.scaled_value_and_grad(loss, loss_scale)(x)


@dataclasses.dataclass(frozen=True)
class Case:
    """What is called with what, and what must be found."""

    function: object
    args: tuple
    operation: str
    cure: str
    became: str = "infinity"
    direction: str = "forward"
    inside: tuple = ()
    dtype: str = "float16"
    module: str = ""
    name: str = ""


ONES = jnp.ones((2, 2))
PROBABLE = half(1, 1, 1, 1, 1, 1, 1, 12, 1)
AUTO = {"axis_names": {"data"}}
CASES = [
    Case(exponential, (half(12),), "exp", "exp overflows float16 above 11.09"),
    Case(exponential, (jnp.array([89.0]),), "exp", "above 88.7", dtype="float32", name="exp f32"),
    Case(lambda x: lax.square(x) + 1, (half(300),), "square",  # planted
         "as jmp.autocast of the float32 function does", name="square"),
    Case(lambda x: x @ x, (half(300, 300),), "dot_general",  # planted
         "The result went beyond 65504", name="product"),
    Case(lambda x: x.astype(F16), (jnp.array([7e4]),), "convert_element_type",  # planted
         "Make the numbers smaller before the cast, or cast to bfloat16", name="cast"),
    Case(lambda x: x.astype(jnp.float8_e4m3fn), (jnp.array([1e3]),),  # planted
         "convert_element_type", "beyond 448", "NaN", dtype="float8_e4m3fn", name="float8"),
    Case(lambda x: jnp.log(jnp.exp(x)), (half(-20),), "log",  # planted
         "The logarithm of zero. float16's smallest", name="probability"),
    Case(lambda x: lax.rsqrt(x), (half(0),), "rsqrt", "It divides by zero", name="root"),  # planted
    Case(lambda x: lax.rsqrt(x), (-half(1),), "rsqrt",  # planted
         "outside of its domain, an index out of bounds", "NaN", name="rsqrt(-1)"),
    Case(lambda x: 1 / x, (half(6e-8),), "div",  # planted
         "divides by as little as 6e-08. float16's smallest number is 6e-08: an epsilon of 1e-8 is",
         name="divisor"),
    Case(masked_throughout, (ONES,), "sub", "masked throughout", "NaN", dtype="float32"),
    Case(two_sides_of_a_where, (half(12),), "exp", "exp overflows"),
    Case(lambda x: jnp.take(x, jnp.array([0, 7])), (jnp.ones(3),), "gather",  # planted
         "out of bounds", "NaN", dtype="float32", name="gather"),
    Case(lambda x: jnp.where(x > 0, x, jnp.nan), (-jnp.ones(1),), "constant",  # planted
         "written in the program", "NaN", dtype="float32", name="constant"),
    Case(lambda x: x * 1e38 * 1e38, (jnp.bfloat16(1),), "mul", "is not the cause",  # planted
         dtype="bfloat16", name="bfloat16"),
    # Nested.
    Case(scanned, (PROBABLE,), "exp", "", inside=("scan, iteration 7",), module="cell"),
    Case(functools.partial(scanned, reverse=True), (PROBABLE,), "exp", "",
         inside=("scan, iteration 7",), module="cell", name="reverse scan"),
    Case(loop, (half(10),), "mul", "", inside=("while, iteration 2",)),
    Case(loop_under_vmap, (half(10, 20),), "while", "reported as a whole"),
    Case(lambda x: lax.switch(2, [jnp.tanh, jnp.sin, exponential], x), (half(12),), "exp", "",
         inside=("cond, branch 2",), name="experts"),
    Case(jax.jit(jax.jit(exponential)), (half(12),), "exp", "",
         inside=("jit exponential", "jit exponential"), name="jits"),
    Case(running_maximum, (jnp.full((3, 2), 89.0),), "exp", "", inside=("scan, iteration 0",),
         dtype="float32"),
    Case(sharded, (half(1, 1, 7, 1),), "mul", "", inside=("shard_map", "scan, iteration 3")),
    Case(functools.partial(sharded, **AUTO), (half(1, 1, 7, 1),), "shard_map", "as a whole",
         "NaN", name="shard_map of some axes"),
    # Derivatives.
    Case(jax.grad(trap), (jnp.array([1.0, 0.0]),), "div", "derivative divides by zero", "NaN",
         "backward", dtype="float32"),
    Case(lambda x: jax.grad(trap)(x, jnp.sqrt), (jnp.array([1.0, 0.0]),), "div",
         "derivative of sqrt", dtype="float32", name="root in a trap"),
    Case(jax.grad(custom_backward), (0.0,), "div", "", direction="backward", dtype="float32",
         name="custom_vjp"),
    Case(lambda x: jax.jvp(with_a_jvp, (x,), (1.0,)), (jnp.zeros(()),), "div", "", dtype="float32",
         name="custom_jvp"),
    Case(jax.grad(with_a_jvp), (0.0,), "div", "", direction="backward", dtype="float32",
         name="custom_jvp transposed"),
    Case(jax.grad(scanned_backward), (jnp.ones(9).at[7].set(0),), "div", "", "NaN", "backward",
         ("scan, iteration 7",), "float32"),
    Case(jax.grad(jax.checkpoint(trap)), (jnp.zeros(1),), "div", "", "NaN", "backward", (),
         "float32", name="remat"),
    # Libraries.
    Case(scaled_loss, (0.01 * ONES,), "convert_element_type", "lower the scale",
         direction="backward"),
]  # fmt: skip


def name_of(case):
    return case.name or getattr(case.function, "__name__", "")


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_the_planted_culprit_is_named(case):
    found = find_nonfinite(case.function)(*case.args)
    for name in ("operation", "became", "direction", "dtype", "module"):
        assert getattr(found, name) == getattr(case, name)
    assert found.inside[: len(case.inside)] == case.inside
    assert case.cure in found.cure
    file, line = found.source.split(":")
    assert file.endswith("test_find_nonfinite.py")
    assert "planted" in LINES[int(line) - 1]


# Programs of which nothing must be reported.


def safe_logarithm(x):
    return jnp.where(x > 0, jnp.log(x), 0)


def masked_attention(x):
    scores = jnp.where(jnp.tril(jnp.ones((4, 4), bool)), x, -jnp.inf)
    return jax.nn.softmax(scores) @ x


def skipped_step(x):
    tx = transforms.with_loss_scale(optax.sgd(1.0), jmp.DynamicLossScale())
    updates, _ = tx.update(jnp.exp(x), tx.init(x), x)
    return updates


def keys_and_integers(x):
    key = jax.random.key(0)
    return key, jax.random.split(key), jnp.arange(3) // 2, x > 0, jax.random.normal(key, (3,))


BENIGN = [
    (safe_logarithm, jnp.zeros(2)),
    (masked_attention, jnp.ones((4, 4))),
    (jax.grad(lambda x: masked_attention(x).sum()), jnp.ones((4, 4))),
    (lambda x: jnp.clip(jnp.exp(x), 0, 10), jnp.array([100.0])),
    (lambda x: x / jnp.inf + jnp.max(x, initial=-jnp.inf), jnp.ones(2)),
    (jax.nn.logsumexp, jnp.full(3, -1e30)),
    (running_maximum, jnp.ones((3, 2))),
    (loop, jnp.float32(0.5)),
    (skipped_step, jnp.array([100.0])),
    (keys_and_integers, jnp.ones(2)),
    (jnp.exp, jnp.ones((0, 3))),
    (jnp.sin, jnp.array([1j, 2.0])),
    (lambda x: x.astype(jnp.float8_e4m3fn), jnp.ones(2)),
    (lambda x: (3.0, "text", x), 2.0),
]


@pytest.mark.parametrize("function, x", BENIGN)
def test_a_finite_result_is_nobodys_fault(function, x):
    assert find_nonfinite(function)(x) is None


def several(x):
    unused = jnp.log(x)  # reaches nothing
    second = jnp.exp(x + 100)
    return second * 2, x / x, jnp.where(x > 0, unused, 0)


def in_another_order(x):
    return (lax.rsqrt(x), jnp.log(x))[::-1]


@pytest.mark.parametrize(("fun", "operation"), [(several, "exp"), (in_another_order, "rsqrt")])
def test_of_several_that_reach_a_result_the_first_to_run_is_named(fun, operation):
    assert find_nonfinite(fun)(jnp.zeros(2)).operation == operation


def test_arguments_are_named_by_their_path():
    def loss(params, batch, *, scale):
        return (params["w"] @ batch[0]).sum() * scale

    find, ones = find_nonfinite(loss), jnp.ones((2, 2))
    bad = ones.at[0, 1].set(jnp.nan)
    found = find({"w": ones, "b": bad}, (ones, bad), scale=1.0)
    assert found is None  # they reach no result
    found = find({"w": bad}, (ones,), scale=1.0)
    assert (found.operation, found.became) == ("argument args[0]['w']", "NaN")
    assert found.operands[0].nonfinite == 1
    assert "at the step before" in found.cure
    assert find({"w": ones}, (bad,), scale=1.0).operation == "argument args[1][0]"
    assert find({"w": ones}, (ones,), scale=bad[0]).operation == "argument kwargs['scale']"


def test_an_infinity_that_was_given_is_named_if_nobody_else_is_to_blame():
    mask = jnp.array([0.0, -jnp.inf])
    found = find_nonfinite(lambda x: x + mask)(jnp.ones(2))
    assert (found.operation, found.became) == ("constant", "infinity")
    assert found.source.startswith("tests/diagnostics/test_find_nonfinite.py:")  # of its reader
    found = find_nonfinite(lambda x, mask: x + mask)(jnp.ones(2), mask)
    assert (found.operation, found.became) == ("argument args[1]", "infinity")
    found = find_nonfinite(lambda x, mask: jnp.exp(x + mask))(jnp.array([89.0, 0]), mask)
    assert found.operation == "exp"
    # An operation that makes a NaN of it says which argument held it.
    found = find_nonfinite(lambda x: x - jnp.mean(x))(jnp.array([1.0, jnp.inf]))
    assert found.operation == "sub"
    assert "came in with argument args[0]. If they are data, look there" in found.cure
    # So is one that a product reads.
    loss = lambda w, batch: jnp.sum(jnp.tanh(batch["x"].astype(jnp.float16) @ w))
    batch = {"x": jnp.ones((2, 4)).at[0].set(jnp.inf)}
    found = find_nonfinite(jax.grad(loss))(jnp.array([[1.0, 0.0]] * 4, jnp.float16), batch)
    assert str(found).startswith("argument args[1]['x'] holds an infinity")
    assert "came in like this" in found.cure


def test_a_loop_whose_operations_stay_finite_one_by_one_is_reported_as_a_whole():
    # Fused, XLA may keep more digits, and so go wrong otherwise; here a callback plays that part:
    # infinite in the whole loop, and in one turn of it, but not when it runs by itself.
    answers = iter([np.inf, np.inf])

    def answer():
        return np.float32(next(answers, 1.0))

    def function(x):
        number = jax.ShapeDtypeStruct((), jnp.float32)
        body = lambda carry, _: (carry + jax.pure_callback(answer, number), None)
        return lax.scan(body, x, None, length=1)[0]

    found = find_nonfinite(function)(jnp.zeros(()))
    assert (found.operation, found.inside) == ("scan", ("scan, iteration 0",))
    assert "reported as a whole" in found.cure


def test_in_float64():
    with jax.enable_x64(True):
        found = find_nonfinite(jnp.exp)(np.array([710.0]))
    assert (found.operation, found.dtype) == ("exp", "float64")
    assert "exp overflows float64 above 709.8" in found.cure
    assert found.operands[0].largest == 710.0


def test_a_jitted_step_with_donated_and_static_arguments():
    step = jax.jit(lambda x, n: jnp.exp(x * n), donate_argnums=0, static_argnums=1)
    x = jnp.ones(3)
    assert find_nonfinite(step)(x, 2) is None
    assert find_nonfinite(step)(x, 100).inside == ("jit <lambda>",)
    assert x.sum() == 3  # not donated


def test_what_autocast_recomputes_is_inside_nothing():
    fun = lambda x: jnp.tanh(jnp.exp(x @ x) - jnp.exp(2 * x @ x)) @ x
    lowered = jmp.autocast(fun, "mixed_float16", recompute="all")
    assert "remat" in str(jax.make_jaxpr(lowered)(10 * ONES))
    found = find_nonfinite(lowered)(10 * ONES)
    assert (found.operation, found.inside) == ("exp", ())


def test_callbacks_are_called_and_not_again_for_the_search():
    seen, runs = [], []

    def count():
        runs.append(1)
        return np.float32(1.0)

    def function(x, mask):
        jax.debug.callback(lambda y: seen.append(float(y.max())), x)
        number = jax.ShapeDtypeStruct((), jnp.float32)
        body = lambda x, _: (jax.pure_callback(count, number) * jnp.exp(x + mask), None)
        return lax.scan(body, x, None, length=1)[0]

    found = find_nonfinite(function)(jnp.full(2, 100.0), jnp.array([0, -jnp.inf]))
    jax.effects_barrier()
    assert found.operation == "exp"
    assert seen == [100.0]
    assert len(runs) == 3  # the loop, its turn, and the operation by itself


def test_a_function_is_traced_once_and_only_when_it_is_asked_about():
    calls = []
    find = find_nonfinite(lambda x: (calls.append(x), jnp.exp(x))[1])
    assert not calls
    find(jnp.float32(1.0))
    assert len(calls) == 1


def test_the_cure_under_autocast_cures():
    def network(x):
        with jax.named_scope("head"), jax.named_scope("ij,jk->ik"):
            return jnp.sum(jnp.abs(x @ x))

    find = lambda **options: find_nonfinite(jmp.autocast(network, "mixed_float16", **options))
    found = find()(300 * ONES)
    cure = found.cure
    assert (found.operation, found.module) == ("dot_general", "head/ij,jk->ik")
    assert 'full=["dot_general"] in autocast' in cure and '[("head*", "float32")]' in cure
    first, *rest = str(found).partition("  cure    ")[2].splitlines()
    assert " ".join([first, *(line.removeprefix(" " * 10) for line in rest)]) == cure and rest
    assert find(full=["dot_general"])(300 * ONES) is None
    assert find(rules=[("head*", "float32")])(300 * ONES) is None


def test_ranges_of_the_operands():
    found = find_nonfinite(lambda x, y: x / y)(half(0, 3, 6e4, 1), half(1, 2, 6e-8, 0))
    first, second = found.operands
    assert (first.dtype, first.shape, first.zeros, first.nonfinite) == ("float16", (4,), 1, 0)
    assert (first.smallest, first.largest) == (1.0, 6e4)
    assert (second.smallest, second.largest, second.zeros) == (2.0**-24, 2.0, 1)
    assert find_nonfinite(lambda x: x * jnp.nan)(jnp.ones(2)).became == "NaN"
    assert find_nonfinite(safe_logarithm)(jnp.zeros(2)) is None


def test_what_is_written_to_a_reference_is_named_where_it_is_read():
    def function(x):
        reference = jax.new_ref(x)
        reference[...] = jnp.log(x)
        return reference[...]

    assert find_nonfinite(function)(jnp.ones(2)) is None
    assert find_nonfinite(function)(jnp.zeros(2)).operation == "get"


def test_values_are_freed_after_their_last_use():
    alive = []

    def count(x):
        alive.append(sum(array.shape == (7, 11, 13) for array in jax.live_arrays()))
        return np.zeros((), np.float32)

    def function(x):
        y = jnp.broadcast_to(x, (7, 11, 13))
        for _ in range(20):
            y = jax.jit(jnp.sin)(y) + 1
        number = jax.pure_callback(count, jax.ShapeDtypeStruct((), jnp.float32), y[0, 0, 0])
        return y.sum() + number

    assert find_nonfinite(function)(jnp.ones(())) is None
    assert alive[0] <= 3


def test_tracers_hold_no_numbers():
    with pytest.raises(TypeError, match="holds no numbers.*outside of jax.jit"):
        jax.jit(find_nonfinite(jnp.exp))(jnp.ones(2))


def test_printed_in_a_few_lines():
    text = str(find_nonfinite(scanned)(PROBABLE))
    assert text.startswith("exp makes an infinity in float16\n  where   tests/diagnostics/test_fi")
    assert ", module cell\n  inside  scan, iteration 7\n  read    float16[], magnitudes" in text
    assert all(len(line) <= 100 for line in text.splitlines())
    text = str(find_nonfinite(jax.grad(trap))(jnp.array([1.0, 0.0])))
    assert text.startswith("div makes a NaN in float32, in the backward pass")
    assert text.count("  read    float32[2], magnitudes 1, zeros: 1") == 1  # not twice the same
    text = str(find_nonfinite(lambda x: x)(jnp.array([jnp.nan, 0.0])))
    assert "argument args[0] holds a NaN\n  read    float32[2], zeros: 1, infinite or NaN" in text


def test_a_module_that_is_computed_again_is_named_once():
    def loss(x):
        with jax.named_scope("encoder"):
            return jax.checkpoint(lambda x: jnp.sum(jnp.sqrt(x)))(x)

    found = find_nonfinite(jax.grad(loss))(jnp.zeros(3))
    assert found.module == "encoder"


class CountsCalls(nnx.Module):
    def __init__(self):
        self.calls = nnx.BatchStat(jnp.zeros(()))

    @nnx.jit  # which binds the method in an object of its own
    def __call__(self, x):
        self.calls[...] += 1
        return x


def test_of_an_nnx_module_whose_call_is_jitted_a_copy_is_called():
    model = CountsCalls()
    assert find_nonfinite(model)(jnp.ones(2)) is None
    assert model.calls[...] == 0


# Infinities that vanish before the result.

LARGE = jnp.full((4,), 300, F16)


def divided_away(x):
    return x / jnp.square(x)


def not_chosen(x):
    return jnp.where(x < 0, jnp.square(x), x)


def in_a_scan(x):
    return lax.scan(lambda carry, row: (carry + divided_away(row), row), jnp.zeros_like(x), x[None])


@pytest.mark.parametrize(
    ("fun", "end"),
    [
        (divided_away, "div"),
        (jax.jit(divided_away), "div"),
        (not_chosen, "select_n"),
        (in_a_scan, "div"),
        (lambda x: jnp.minimum(jnp.square(x), 1), "min"),
    ],
)
def test_an_infinity_that_vanishes_is_named_where_it_is_asked_for(fun, end):
    assert find_nonfinite(fun)(LARGE) is None
    found = find_nonfinite(fun, vanished=True)(LARGE)
    assert (found.operation, found.became, found.vanished) == ("square", "infinity", end)
    assert f"then    {end} read it and returned finite numbers" in str(found)


def test_what_reaches_a_result_comes_first_and_vanishes_nowhere():
    both = lambda x: divided_away(x) + jnp.exp(x)
    found = find_nonfinite(both, vanished=True)(LARGE)
    assert (found.operation, found.vanished) == ("exp", "")


@pytest.mark.parametrize(
    "fun",
    [
        lambda x: x / 2,
        lambda x: jnp.isfinite(jnp.square(x)),  # it asks, as a check of gradients does
        lambda x: jnp.where(x > 0, x, -jnp.inf),  # given, as a mask is
        lambda x: jnp.exp(jnp.where(x > 301, x, -jnp.inf)),
    ],
)
def test_what_is_asked_about_or_was_given_does_not_vanish(fun):
    assert find_nonfinite(fun, vanished=True)(LARGE) is None
