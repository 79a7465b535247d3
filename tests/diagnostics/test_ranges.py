"""Ranges: counts by powers of two agree with NumPy's, through every kind of program."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp
from jmp import diagnostics
from jmp.diagnostics._gradient_report import counting_step
from jmp.diagnostics._interpreter import replay
from jmp.diagnostics._ranges import exponents

F16 = "mixed_float16"
FLOAT8 = sorted(name for name in dir(jnp) if name.startswith("float8_"))
DTYPES = ["float16", "bfloat16", "float32", *FLOAT8]


def counted(values):
    """What a report must say of values: {exponent: number}, zeros, infinities, NaNs; by NumPy."""
    with np.errstate(invalid="ignore"):  # NaNs that signal
        values = np.abs(np.asarray(values).astype(np.float64).ravel())
    finite = values[np.isfinite(values) & (values > 0)]
    # frexp is exact, for subnormal numbers too; its fractions lie in [1/2, 1).
    found, numbers = np.unique(np.frexp(finite)[1] - 1, return_counts=True)
    special = ((values == 0).sum(), np.isinf(values).sum(), np.isnan(values).sum())
    by_exponent = dict(zip(found.tolist(), numbers.tolist(), strict=True))
    return by_exponent, *map(int, special)


def said(row):
    assert all(row.counts.values())
    return row.counts, row.zeros, row.infinities, row.nans


def any_bits(dtype, size):
    """Numbers of every kind: all bit patterns are alike probable, and the edges are there."""
    unsigned = np.dtype(f"uint{8 * jnp.dtype(dtype).itemsize}")
    bits = np.random.default_rng(0).integers(0, 2 ** (8 * unsigned.itemsize), size, unsigned)
    info = jnp.finfo(dtype)
    values = [info.max, info.smallest_normal, info.smallest_subnormal, -info.max]
    edges = np.array([0.0, *map(float, values)]).astype(dtype)
    return np.concatenate([bits.view(dtype), edges, -edges])


# Trees.


@pytest.mark.parametrize("dtype", DTYPES)
def test_counts_agree_with_numpy_for_all_bit_patterns(dtype):
    values = any_bits(dtype, 4000)
    (row,) = diagnostics.range_report([jnp.asarray(values)]).rows
    assert said(row) == counted(values)
    assert row.size == values.size and row.dtype == dtype


def test_float64_leaves_have_a_longer_row_with_and_without_x64(x64):
    values = any_bits("float64", 2000)
    rows = diagnostics.range_report({"a": jnp.asarray(values), "b": jnp.ones(3)})
    with jax.enable_x64(False):
        (row,) = diagnostics.range_report(values).rows
    assert said(rows.rows[0]) == said(row) == counted(values) and row.exponents == (-1074, 1023)
    assert said(rows.total("value")) == counted(np.concatenate([values, np.ones(3)]))


def test_only_floating_leaves_are_counted_whatever_else_there_is():
    tree = {
        "half": np.float16(2.0),
        "scalar": jnp.float32(-4.0),
        "empty": jnp.ones((0, 3)),
        "complex": jnp.array([3 + 0.25j]),
        "swapped": np.array([8.0], ">f4"),
        "steps": jnp.arange(3),
        "mask": np.array([True]),
        "key": jax.random.key(0),
        "nothing": None,
        "name": "adam",
        "rate": 0.1,
        "float0": np.zeros(2, jax.dtypes.float0),
    }
    rows = {row.path: row for row in diagnostics.range_report(tree).rows}
    assert rows.keys() == {"half", "scalar", "empty", "complex", "swapped"}
    assert {path: said(row)[0] for path, row in rows.items()} == {
        "half": {1: 1}, "scalar": {2: 1}, "empty": {}, "complex": {1: 1, -2: 1}, "swapped": {3: 1},
    }  # fmt: skip
    assert rows["empty"].shares().zero == 0 and rows["empty"].exponents is None
    assert diagnostics.range_report({}).rows == ()


def collectives(function, *args):
    text = jax.jit(function).lower(*args).compile().as_text()
    kinds = "all-gather|all-to-all|collective-permute|all-reduce|reduce-scatter"
    return set(re.findall(rf" ({kinds})(?:-start)?\(", text))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded_leaves_are_never_gathered(kind):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(kind, kind))
    values = any_bits("float32", 64 * 32 - 10).reshape(64, 32)
    for spec in (P("x", "y"), P(None, ("x", "y"))):
        array = jax.device_put(values, NamedSharding(mesh, spec))
        assert collectives(exponents, array) == {"all-reduce"}  # of the counts
        (row,) = diagnostics.range_report([array]).rows
        assert said(row) == counted(values)


# Shares and scales.


def assert_shares(shares, scaled, dtype):
    """Compares with what NumPy's casts make of numbers."""
    with np.errstate(over="ignore"):
        cast = scaled.astype(dtype).astype(np.float64)
    assert shares.zero == np.mean(scaled == 0)
    assert shares.zero + shares.underflow == pytest.approx(np.mean(cast == 0))
    assert shares.overflow + shares.infinite == pytest.approx(np.mean(np.isinf(cast)))
    small = (cast != 0) & (np.abs(scaled) < float(jnp.finfo(dtype).smallest_normal))
    assert shares.subnormal == pytest.approx(np.mean(small))
    assert sum(vars(shares).values()) == pytest.approx(1)
    assert shares.lost == pytest.approx(1 - shares.zero - shares.normal - shares.subnormal)


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
@pytest.mark.parametrize("exponent", [-20, 0, 13, 30])
def test_shares_agree_with_casts_by_numpy(half, exponent):
    # A mantissa below 1.9: what is nearly a power of two may round up to it, and overflow.
    random = np.random.default_rng(1)
    values = random.uniform(1.01, 1.9, 3000) * 2.0 ** random.integers(-149, 127, 3000)
    values = np.concatenate([values, [0, 0, np.inf, np.nan]])
    (row,) = diagnostics.range_report(values).rows
    assert_shares(row.shares(half, scale=2.0**exponent), values * 2.0**exponent, half)


def test_shares_at_the_edges_of_float16():
    def shares(value):
        found = diagnostics.range_report(np.float32(value)).rows[0].shares("float16")
        (name,) = (name for name, share in vars(found).items() if share)
        return name

    below = lambda x: np.nextafter(np.float32(x), np.float32(0))
    assert shares(below(2.0**-25)) == "underflow"
    assert np.float16(below(2.0**-25)) == 0
    assert shares(np.nextafter(np.float32(2.0**-25), np.float32(1))) == "subnormal"
    assert shares(below(2.0**-14)) == "subnormal"
    assert shares(2.0**-14) == shares(65504) == "normal"
    assert shares(65536) == "overflow"


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_shares_of_float8_are_those_of_casts_after_scaling_by_the_largest_number(dtype):
    random = np.random.default_rng(3)
    largest = 1.75 * 2.0**20  # the digits of the largest numbers of both types
    values = random.uniform(1.01, 1.7, 3000) * 2.0 ** random.integers(-40, 20, 3000)
    values = np.array([*values, largest, 0], np.float32)
    shares = diagnostics.range_report(values).rows[0].shares(dtype)
    assert_shares(shares, np.float64(values) * float(jnp.finfo(dtype).max) / largest, dtype)
    assert shares.overflow == 0 < shares.underflow
    # By that number all of it becomes NaN, or no number is left to scale by.
    spoilt, zeros = diagnostics.range_report([np.float32([np.inf, 1]), np.zeros(3, "f4")]).rows
    assert spoilt.shares(dtype).nan == zeros.shares(dtype).zero == 1


@pytest.mark.parametrize(
    ("tree", "scale"),
    [
        ({"bias": jnp.zeros(3), "kernel": jnp.ones(3)}, 2.0**14),
        (jnp.array([0.0, 1.0], jnp.float16), 2.0**14),  # its zero may have been something
        (jnp.array([1e-15, 1.0]), 2.0**14),  # which is wider than float16
        (jnp.array([jnp.inf, 1.0]), None),
        (jnp.array([jnp.nan, 1.0]), None),
        (jnp.array([0.0, -0.0]), None),
    ],
)
def test_the_best_scale_is_the_largest_with_a_margin_if_the_numbers_are_known(tree, scale):
    report = diagnostics.range_report(tree)
    assert report.best_scale() == scale  # brings 1 below 2**15
    said = "unknown" if scale is None else "2^14"
    assert f"best static scale: {said}" in str(report)


# Programs.

W = {"a": jax.random.normal(jax.random.key(0), (8, 8)), "b": jnp.full((8, 4), 1e-5)}
X = jax.random.normal(jax.random.key(1), (16, 8))


def loss(w, x, shifts=(0.0, 0.0, 0.0, 0.0)):
    """A loss whose activations can be shifted: its gradients by the shifts are their gradients."""
    h = x @ w["a"] + shifts[0]
    y = jnp.tanh(h) @ w["b"] + shifts[1]
    e = jnp.exp(y) + shifts[2]
    return 1e-4 * (e.sum() + shifts[3]), (h, y, e, e.sum())


@functools.cache
def by_hand(scale):
    return diagnostics.gradient_report(loss, has_aux=True, scale=scale)(W, X)


def rows_by_role(report):
    return {role: [row for row in report.rows if row.role == role] for role in report.roles}


def test_a_report_agrees_with_numpy_on_the_values_of_a_model_by_hand():
    _, activations = loss(W, X)
    zeros = [jnp.zeros_like(value) for value in activations]
    gradients, cotangents = jax.grad(loss, (0, 2), has_aux=True)(W, X, zeros)[0]
    rows = rows_by_role(by_hand(2.0**10))
    assert [row.path for row in rows["gradient"]] == ["a", "b"]
    assert [row.operation for row in rows["activation"]] == [
        "dot_general", "dot_general", "exp", "reduce_sum",
    ]  # fmt: skip
    first = loss.__code__.co_firstlineno
    assert [row.source for row in rows["activation gradient"]] == [
        f"tests/diagnostics/test_ranges.py:{first + line}" for line in (2, 3, 4, 5)
    ]
    for role, values, scale in (
        ("parameter", W.values(), 1),
        ("gradient", gradients.values(), 1024),
        ("activation", activations, 1),
        ("activation gradient", cotangents, 1024),
    ):
        assert [said(row) for row in rows[role]] == [counted(scale * v) for v in values], role
        assert {row.scale for row in rows[role]} == {scale}


def test_scales_are_absolute_and_apply_only_to_gradients():
    plain, scaled = by_hand(1.0), by_hand(2.0**10)
    assert plain.best_scale() == scaled.best_scale()
    for before, after in zip(plain.rows, scaled.rows, strict=True):
        assert before.shares("float16", 2.0**10) == after.shares("float16")
        if before.role in ("parameter", "activation"):
            assert before.shares("float16", 2.0**10) == before.shares("float16")


@pytest.mark.parametrize("scale", [2.0**-126, 0.5, 1, 2.0**126])
def test_a_power_of_two_is_a_scale(scale):
    report = diagnostics.gradient_report(lambda w: w.sum() ** 2, scale=scale)(jnp.ones(2))
    assert {row.scale for row in report.rows if row.role == "gradient"} == {scale}


@pytest.mark.parametrize("scale", [2.0**-127, 2.0**127, 3, 0, -2, np.inf, np.nan])
def test_what_would_round_is_no_scale(scale):
    with pytest.raises(ValueError, match="power of two"):
        diagnostics.gradient_report(lambda w: w.sum() ** 2, scale=scale)


def unrolled(w, x):
    for _ in range(3):
        x = jnp.tanh(x @ w)
    return 1e-4 * jnp.mean(x)


def scanned(w, x):
    x, _ = jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=3)
    return 1e-4 * jnp.mean(x)


def scanned_and_rematerialised(w, x):
    policy = jax.checkpoint_policies.dots_saveable
    layer = jax.checkpoint(lambda x: jnp.tanh(x @ w), policy=policy, prevent_cse=False)
    x, _ = jax.lax.scan(lambda x, _: (layer(x), None), x, None, length=3, reverse=True)
    return 1e-4 * jax.checkpoint(jnp.mean)(x)


def branching_and_jitted(w, x):
    layer = jax.jit(lambda x: jnp.tanh(x @ w), donate_argnums=0)

    def turn(i, x):
        return jax.lax.cond(i < 3, layer, lambda x: x @ w @ w, x)

    return 1e-4 * jax.jit(jnp.mean)(jax.lax.fori_loop(0, 3, turn, x))


@functools.cache
def measured(program, policy=None, scale=1.0):
    return diagnostics.gradient_report(program, policy, scale=scale)(W["a"], X)


def assert_alike(report, expected):
    assert report.roles == expected.roles
    for role in expected.roles:
        total, other = report.total(role), expected.total(role)
        assert total.size == other.size, role
        # Last digits may differ, and move a number across a power of two.
        places = {*total.counts, *other.counts}
        moved = sum(abs(total.counts.get(i, 0) - other.counts.get(i, 0)) for i in places)
        assert moved <= 0.02 * total.size, role


@pytest.mark.parametrize("program", [scanned_and_rematerialised, branching_and_jitted])
def test_loops_remat_branches_and_jit_count_what_the_unrolled_program_counts(program):
    report = measured(program)
    assert_alike(report, measured(unrolled))
    assert {row.size for row in report.rows if row.operation == "dot_general"} == {3 * X.size}


@jax.custom_vjp
def product_with_a_rule(x, w):
    return jnp.tanh(x @ w)


product_with_a_rule.defvjp(
    lambda x, w: (product_with_a_rule(x, w), (x, w)),
    lambda kept, ct: jax.vjp(lambda x, w: jnp.tanh(x @ w), *kept)[1](ct),
)


def test_what_is_bound_as_a_whole_is_counted_at_its_outputs():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    sine = lambda x, w: jnp.sin(x @ w)
    mapped = jax.shard_map(sine, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"))
    function = lambda w, x: product_with_a_rule(mapped(x, w), w).sum()
    report = diagnostics.gradient_report(function)(W["a"], X)
    found = {row.operation: said(row) for row in report.rows if row.role == "activation"}
    value = jnp.sin(X @ W["a"])
    assert found["shard_map"] == counted(value)
    assert found["custom_vjp_call"] == counted(jnp.tanh(value @ W["a"]))
    assert found.keys() == {"shard_map", "custom_vjp_call", "reduce_sum"}


def elementwise(w, x):
    # JAX asks for the sharding of a sharded product's gradient if types name shardings.
    return 1e-4 * jnp.mean(jnp.exp(x * w))


def test_a_step_along_explicit_axes_counts_what_one_device_counts():
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    sharded = jax.device_put(X, NamedSharding(mesh, P("x")))
    found, expected = (diagnostics.gradient_report(elementwise)(x, x) for x in (sharded, X))
    assert_alike(found, expected)


def test_a_sharded_step_gathers_nothing_to_count_it():
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto, AxisType.Auto))
    put = lambda spec, *shape: jax.device_put(jnp.ones(shape), NamedSharding(mesh, spec))
    parameters = [put(P(None, "y"), 64, 128), put(P("y"), 128, 64)]

    def function(up, down, x):
        return (jnp.tanh(x @ up) @ down).sum()

    arrays, counts = [*parameters, put(P("x"), 32, 64)], {}
    step = counting_step(jax.make_jaxpr(function)(*arrays), [0, 1], counts)
    assert collectives(step, *arrays) == {"all-reduce"}
    assert len(counts) == 2  # both products stand on one line


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_a_mixed_program_is_judged_by_what_it_stores_in_half(half):
    report = measured(scanned, f"mixed_{half}")
    total = report.total("activation gradient")
    assert report.dtype == total.dtype == half
    assert report.total("gradient").dtype == "float32"
    assert total.size == 3 * X.size
    # The loss's own, in float32, lose nothing and are not counted.
    assert all(row.dtype == half for row in report.rows[2:])


def test_what_would_underflow_in_float32_is_zero_in_float16_and_a_scale_brings_it_back():
    would, does = measured(unrolled), measured(scanned, F16)
    lost = does.total("activation gradient")
    assert lost.zeros > 0.3 * lost.size
    expected = would.total("activation gradient").shares("float16")
    assert lost.shares().zero == pytest.approx(expected.zero + expected.underflow, abs=0.1)

    saved = measured(scanned, F16, would.best_scale()).total("activation gradient")
    assert saved.zeros < 0.2 * lost.zeros and saved.infinities == saved.nans == 0
    too_much = measured(scanned, F16, 2.0**60)
    assert too_much.total("activation gradient").shares().lost > 0
    assert too_much.best_scale() is None


def test_what_does_not_depend_on_the_parameters_is_left_alone():
    def function(w, x):
        teacher = jnp.exp(x @ x.T)
        # There is no derivative of a while loop: a tap in front of it must not ask for one.
        scale = jax.lax.while_loop(lambda s: s < 10, lambda s: 2 * s, teacher.sum())
        target = jax.lax.stop_gradient(jnp.exp(x @ w))
        return jnp.mean((x @ w - target) ** 2) / scale, {"accuracy": jnp.exp(x @ w).mean()}

    report = diagnostics.gradient_report(function, has_aux=True)(W["a"], X)
    found = [(row.role, row.operation) for row in report.rows[2:]]
    kinds = ["dot_general", "square", "reduce_sum"]
    assert [operation for _, operation in found if operation != "integer_pow"] in (
        [k for k in kinds if k != "square"] * 2, kinds * 2,
    )  # fmt: skip


def test_complex_arguments_have_gradients():
    complex_loss = lambda x, z: jnp.real(x * z).sum()
    report = diagnostics.gradient_report(complex_loss, argnums=(0, -1))
    both = report(jnp.ones(()), jnp.ones(2) * 1j)
    gradients = [row for row in both.rows if row.role == "gradient"]
    assert [(row.path, row.dtype, row.size) for row in gradients] == [
        ("0", "float32", 1), ("1", "complex64", 4),
    ]  # fmt: skip


def test_the_turns_of_a_long_loop_are_added_up():
    def long(w, x):
        return jax.lax.scan(lambda s, _: (s + jnp.exp(w * x), None), x, None, length=3000)[0]

    report = diagnostics.gradient_report(lambda w, x: long(w, x).sum())
    row = report(W["a"][0, 0], jnp.zeros(3)).rows[2]
    assert (row.operation, said(row)[0]) == ("exp", {0: 3 * 3000})


def test_a_jitted_loop_rounds_its_weight_before_it_also_after_a_report():
    turn = lambda w: lambda h, x: (jnp.tanh(h @ w + x), None)
    loss = lambda w, x: jnp.mean(jax.lax.scan(turn(w), x[0], x)[0] ** 2)
    jitted = jax.jit(jmp.autocast(loss, F16))
    diagnostics.gradient_report(lambda *arrays: jitted(*arrays))(W["a"], X)
    closed = jax.make_jaxpr(jitted)(W["a"], X)
    assert str(closed) == str(jax.make_jaxpr(jax.jit(jmp.autocast(loss, F16)))(W["a"], X))


# Replay.


def test_a_replayed_program_is_the_program():
    def function(w, x):
        jax.debug.callback(seen.append, x.shape[0], ordered=True)
        y = scanned_and_rematerialised(w, x) + branching_and_jitted(w, x)
        return y + jax.lax.scan(lambda c, x: (c + x.sum(), None), 0, x, unroll=2)[0]

    seen = []
    closed = jax.make_jaxpr(function)(W["a"], X)
    run = lambda w, x: replay(closed, [w, x], lambda equations, results: results)[0]
    value = jax.jit(run)(W["a"], X)
    jax.effects_barrier()
    assert seen == [16]
    assert value == jax.jit(function)(W["a"], X)
    again = str(jax.make_jaxpr(run)(W["a"], X))
    for words in ("unroll=2", "reverse=True", "prevent_cse=False", "policy", "donated_invars"):
        assert words in str(closed) and str(closed).count(words) == again.count(words)
