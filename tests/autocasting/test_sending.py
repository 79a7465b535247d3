"""Parameters that devices send each other, and gradients that they add up, under autocast."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp
from tests.errors import relative_error
from tests.products import named

AUTO = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
EXPLICIT = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Explicit,))
BY_TWO = jax.make_mesh((4, 2), ("d", "m"), axis_types=(AxisType.Auto,) * 2)
ROWS = NamedSharding(AUTO, P("d"))
WHOLE = NamedSharding(AUTO, P())

W = jax.random.normal(jax.random.key(0), (16, 16)) / 4
X = jax.random.normal(jax.random.key(1), (24, 16))


HALF, WIDE = "mixed_float16", "mixed_float16,r=f32"
both_policies = pytest.mark.parametrize("policy", [HALF, WIDE])


def gather(w):
    return lax.all_gather(w, "d", tiled=True)


def loss(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def dtypes_sent(fun, *args):
    """The dtypes of the arrays of more than one axis that a program sends, at any depth."""
    sent = named(("all_gather", "ppermute", "all_to_all", "reshard"), fun, *args)
    return {str(v.aval.dtype) for e in sent for v in e.invars if v.aval.ndim > 1}


def in_shard_map(fun):
    mean = lambda w, x: lax.pmean(fun(w, x), "d")
    places = {"in_specs": (P("d"), P("d")), "out_specs": P()}
    return jax.shard_map(mean, mesh=AUTO, **places)


def scanned(w, x):
    turn = lambda x, w: (jnp.tanh(x @ w), None)
    return jnp.mean(lax.scan(turn, x, jnp.stack([w, w]))[0])


TO_PRODUCTS = {
    "a product": loss,
    "a transpose": lambda w, x: jnp.mean(x @ w.T),
    "two products": lambda w, x: jnp.mean((x @ w) @ w),
    "remat": lambda w, x: jax.checkpoint(loss)(w, x),
    "what a loop closes over": lambda w, x: lax.fori_loop(0, 2, lambda _, x: x @ w, x).mean(),
    "both branches": lambda w, x: lax.cond(x[0, 0] > 0, loss, lambda w, x: loss(w.T, x), w, x),
}
OTHERS = {
    "a sum": lambda w, x: loss(w, x) + w.sum(),
    "a product in full precision": lambda w, x: jmp.full_precision(loss)(w, x @ x.T @ x),
    "rows that no product reads": lambda w, x: loss(w, x) + w[jnp.arange(3)].sum(),
    "a product with precision": lambda w, x: jnp.dot(x @ x.T @ x, w, precision="highest").mean(),
    "a repetition, whose derivative is a sum": lambda w, x: jnp.mean(
        jnp.broadcast_to(w, (3, *w.shape)) @ x.T
    ),
    "a row in each turn": lambda w, x: lax.scan(
        lambda _, i: (None, lax.dynamic_slice_in_dim(w, i, 1) @ x.T), None, jnp.arange(3)
    )[1].mean(),
    "the carry of a loop": lambda w, x: loss(lax.fori_loop(0, 2, lambda _, w: w * 2, w), x),
}
READERS = [(name, "float16") for name in TO_PRODUCTS] + [(name, "float32") for name in OTHERS]


@pytest.mark.parametrize(("name", "dtype"), READERS)
def test_what_products_alone_read_is_rounded_before_it_is_sent(name, dtype):
    fun = (TO_PRODUCTS | OTHERS)[name]
    gathered = in_shard_map(lambda w, x: fun(gather(w), x))
    assert dtypes_sent(jmp.autocast(gathered, HALF), W, X) == {dtype}


@pytest.mark.parametrize("name", ["all_gather", "transpose"])
def test_what_the_user_asks_for_in_float32_is_sent_in_float32(name):
    fun = in_shard_map(lambda w, x: loss(gather(w).T, x))
    assert dtypes_sent(jmp.autocast(fun, HALF, full=[name]), W, X) == {"float32"}


# The error over one device's. Seven half sums more round; with float32 sums nothing does.
ALLOWED = {HALF: 1.4, WIDE: 1.0001}

SENDERS = {
    "all_gather": gather,
    "ppermute": lambda w: lax.ppermute(gather(w), "d", [(i, (i + 1) % 8) for i in range(8)]),
    "all_to_all": lambda w: lax.all_to_all(gather(w), "d", 1, 0, tiled=True).reshape(16, 16),
}


@pytest.mark.parametrize("send", SENDERS.values(), ids=SENDERS)
def test_whatever_sends_it(send):
    fun = in_shard_map(lambda w, x: loss(send(w), x))
    autocast = jmp.autocast(fun, HALF)
    assert dtypes_sent(autocast, W, X) == {"float16"}
    gradient, true = (jax.jit(jax.grad(f))(W, X) for f in (autocast, fun))
    assert relative_error(gradient, true) < 3e-3


@both_policies
@pytest.mark.parametrize("check_vma", [True, False])
def test_eight_devices_compute_what_one_computes(policy, check_vma):
    whole = jax.jit(jax.value_and_grad(jmp.autocast(loss, policy)))(W, X)
    true = jax.grad(loss)(W, X)

    def step(w, x):
        lowered = jmp.autocast(lambda w, x: loss(gather(w), x), policy)
        value, gradient = jax.value_and_grad(lowered)(w, x)
        return lax.pmean(value, "d"), gradient / 8  # a gather's transpose is a sum

    places = {"in_specs": (P("d"), P("d")), "out_specs": (P(), P("d"))}
    parts = jax.shard_map(step, mesh=AUTO, check_vma=check_vma, **places)
    value, gradient = jax.jit(parts)(W, X)
    np.testing.assert_allclose(value, whole[0], rtol=1e-6)
    assert relative_error(gradient, true) < ALLOWED[policy] * relative_error(whole[1], true)


@both_policies
def test_explicit_axes_compute_what_one_device_computes(policy):
    fun = lambda w, x: loss(jax.sharding.reshard(w, P()), x)
    true = jax.grad(loss)(W, X)
    error = relative_error(jax.grad(jmp.autocast(loss, policy))(W, X), true)
    with jax.set_mesh(EXPLICIT):
        w, x = (jax.device_put(a, NamedSharding(EXPLICIT, P("d"))) for a in (W, X))
        autocast = jmp.autocast(fun, policy)
        gradient = jax.jit(jax.grad(autocast))(w, x)
        assert dtypes_sent(autocast, w, x) == {"float16"}
    assert gradient.sharding.spec == P("d", None)
    assert relative_error(np.asarray(gradient), true) < ALLOWED[policy] * error


def test_a_table_on_a_mesh_is_rounded_before_the_lookup_and_its_gradient_adds_up_in_float32():
    tied = lambda table, tokens: jnp.mean(jnp.tanh(table[tokens] @ table.T) ** 2)
    table = jax.random.normal(jax.random.key(0), (16, 8))
    tokens = jnp.zeros(16384, int)  # so many equal rows: a half sum stops at 2048 ones
    autocast = jmp.autocast(tied, HALF)
    lookups = []
    for place in (None, NamedSharding(AUTO, P())):
        given = jax.device_put(table, place), jax.device_put(tokens, place)
        text = str(jax.make_jaxpr(lambda *args: autocast(*args))(*given))
        lookups.append("custom_jvp_call" in text)
        counted = jax.grad(jmp.autocast(lambda t: 1e-3 * (t[tokens] @ t[1]).sum(), HALF))
        np.testing.assert_allclose(counted(given[0])[0], 16.384 * table[1], rtol=2e-3)
    assert lookups == [False, True]


def kept(*where, mesh=AUTO):
    return lambda x: lax.with_sharding_constraint(x, NamedSharding(mesh, P(*where)))


def rows_of(table, tokens):
    return table[tokens]


# How rows are looked up, what stands behind, and into how many parts the rows are divided.
IN_PARTS = {
    "a constraint": (rows_of, kept("d"), 8),
    "after a product and a sum": (rows_of, lambda x: kept("d")(x * 2 + 1), 8),
    "two axes": (rows_of, kept(("d", "m"), mesh=BY_TWO), 8),
    "columns too": (rows_of, kept("d", None, "m", mesh=BY_TWO), 4),
    "nothing": (rows_of, lambda x: x, None),
    "unconstrained": (rows_of, kept(P.UNCONSTRAINED), None),
    "a second axis": (rows_of, kept(None, "d"), None),
    "not even": (lambda table, tokens: table[tokens[:12]], kept("d"), None),
    "a table each": (lambda t, i: jax.vmap(rows_of)(jnp.stack([t] * 16), i), kept("d"), None),
    "columns": (lambda table, tokens: table.T[:, tokens].T, kept(None, "d"), None),
}


def of_lookup(case, policy):
    rows, keep, _ = IN_PARTS[case]
    return jmp.autocast(lambda t, w, tokens: 1e-3 * jnp.sum(keep(rows(t, tokens)) @ w), policy)


TABLE, COLUMN = jax.random.normal(jax.random.key(0), (32, 8)), jnp.linspace(0.5, 1, 8)[:, None]
PLACED = jax.device_put((TABLE, COLUMN), WHOLE)


@both_policies
@pytest.mark.parametrize("case", IN_PARTS)
def test_rows_that_a_constraint_divides_are_added_up_by_each_device_on_its_own(case, policy):
    tokens = jax.device_put(jnp.zeros((16, 32), int), ROWS)
    added = named("scatter-add", jax.grad(of_lookup(case, policy)), *PLACED, tokens)
    sums = [equation.outvars[0].aval for equation in added]
    assert {v.dtype for v in sums} == {jnp.dtype(jnp.float32)}
    count = IN_PARTS[case][-1] if policy == HALF else None
    assert {v.shape[0] for v in sums if v.shape[0] in (4, 8) and v.ndim == 3} == {count} - {None}


@pytest.mark.parametrize("case", ["a constraint", "columns too", "nothing"])
def test_equal_rows_of_eight_devices_add_up(case):
    tokens = jax.device_put(jnp.zeros((16, 8192), int), ROWS)  # 16384 on each; in half 2048 count
    gradient = jax.jit(jax.grad(of_lookup(case, HALF)))(*PLACED, tokens)
    np.testing.assert_allclose(gradient[0], 131.072 * COLUMN[:, 0], rtol=2e-3)
    assert not gradient[1:].any()


def test_a_constraint_on_a_parameter_that_was_not_placed_yet_sends_it_in_half():
    def also_returned(w, x):
        w = lax.with_sharding_constraint(w, WHOLE)
        return loss(w, x), w

    sent = jmp.autocast(lambda w, x: also_returned(w, x)[0], HALF)
    (constraint,) = named("sharding_constraint", sent, W, X)
    assert constraint.invars[0].aval.dtype == jnp.float16
    w = W + 2.0**-20  # which float16 does not hold
    np.testing.assert_array_equal(jmp.autocast(also_returned, HALF)(w, X)[1], w)


# reduce_dtype: gradients in float32.


def test_partial_sums_that_cancel_between_devices_are_finite_with_float32_reduction():
    # Each device's part of the gradient is 5e4 or -5e4, times 8: beyond float16, their sum is 0.
    x = jnp.tile(jnp.repeat(jnp.asarray([5e4, -5e4]), 1)[:, None], (16, 1)) * jnp.ones((1, 8))
    x = jax.device_put(x[jnp.argsort(jnp.arange(32) % 2)], ROWS)
    w = jax.device_put(jnp.ones((8, 4)), WHOLE)
    fun = lambda w, x: (x @ w).sum()
    plain = jax.jit(jax.grad(jmp.autocast(fun, HALF)))(w, x)
    wide = jax.jit(jax.grad(jmp.autocast(fun, WIDE)))(w, x)
    assert not np.isfinite(plain).all()
    np.testing.assert_array_equal(wide, 0)


def test_float32_gradients_come_from_half_operands():
    wide = jax.grad(jmp.autocast(loss, WIDE), (0, 1))
    products = named("dot_general", wide, W, X)
    assert {str(v.aval.dtype) for e in products for v in e.invars} == {"float16"}
    found = sorted(str(e.params["preferred_element_type"]) for e in products)
    assert found == ["float16", "float32", "float32"]


def test_float32_gradients_of_bfloat16_products_run_on_a_cpu():
    per_row = lambda w, x: jnp.mean(jax.nn.relu(jax.vmap(lambda x: w @ x)(x)) ** 2)
    w = jax.random.normal(jax.random.key(0), (128, 32)) / 8  # smaller ones XLA writes out
    x = jax.random.normal(jax.random.key(1), (64, 32))
    gradient = jax.jit(jax.grad(jmp.autocast(per_row, "mixed_bfloat16,r=f32")))(w, x)
    assert relative_error(gradient, jax.grad(per_row)(w, x)) < 0.01


@pytest.mark.parametrize("fun", [scanned, TO_PRODUCTS["remat"]], ids=["scan", "remat"])
def test_float32_gradients_inside_loops_and_remat(fun):
    # Gradients of 2**-26 each, below float16: half ones are zero.
    small = lambda w, x: 2.0**-20 * fun(w, x)
    true = jax.grad(small)(W, X)
    wide = jax.jit(jax.grad(jmp.autocast(lambda w, x: 2.0**20 * small(w, x), WIDE)))
    assert relative_error(2.0**-20 * wide(W, X), true) < 3e-3


def test_the_gradient_report_counts_activations_with_float32_reduction():
    report = jmp.diagnostics.gradient_report(loss, WIDE)(W, X)
    assert {row.role for row in report.rows} >= {"activation", "activation gradient"}


def test_a_convolution_keeps_half_gradients_and_one_warning_says_so():
    fun = lambda kernel, x: lax.conv_general_dilated(x, kernel, (1, 1), "SAME").mean()
    kernel, x = jnp.ones((2, 1, 3, 3)), jnp.ones((1, 1, 8, 8))
    autocast = jmp.autocast(fun, WIDE)
    with pytest.warns(jmp.HalfReductionWarning, match="1 conv_general_dilated"):
        autocast(kernel, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        autocast(kernel, x[..., :4])
        fixed = lambda w, x: fun(jnp.ones((2, 1, 3, 3)), x @ w)  # no parameter of this convolution
        jmp.autocast(fixed, WIDE)(jnp.ones((8, 8)), x)


def test_a_rule_asks_for_float32_gradients_of_one_part():
    def fun(w, x):
        x = x @ w["body"]
        with jax.named_scope("head"):
            return jnp.mean(x @ w["head"])

    def count(policy, rules=()):
        gradient = jax.grad(jmp.autocast(fun, policy, rules=rules))
        products = named("dot_general", gradient, {"body": W, "head": W}, X)
        return sum(e.params["preferred_element_type"] == jnp.float32 for e in products)

    assert (count(HALF), count(HALF, [("head", WIDE)]), count(WIDE)) == (0, 1, 2)


def looked_up(table, w):
    rows = table.at[jnp.arange(8)].get(out_sharding=P("d"))
    return jnp.sum(jnp.tanh(rows * lax.rsqrt(jnp.mean(rows**2, -1, keepdims=True)) @ w))


def in_an_automatic_region(table, w):
    def inside(x, w):
        hidden = x @ w
        return jnp.tanh(hidden - jnp.mean(hidden, -1, keepdims=True)) + w[:1]

    inside = jax.sharding.auto_axes(inside, axes="d", out_sharding=P("d"))
    return jnp.sum(jnp.exp(inside(table @ w, w)) @ w)


@pytest.mark.parametrize("policy", [HALF, WIDE, "mixed_bfloat16"])
@pytest.mark.parametrize("fun", [looked_up, in_an_automatic_region])
def test_what_is_read_on_another_mesh_than_its_equation_is_cast_on_its_own(fun, policy):
    with jax.sharding.set_mesh(EXPLICIT):
        expected = jax.jit(jax.grad(fun))(X, W)
        found = jax.jit(jax.grad(jmp.autocast(fun, policy)))(X, W)
    assert found.dtype == jnp.float32
    assert relative_error(found, expected) < (0.03 if policy == "mixed_bfloat16" else 0.003)


@both_policies
def test_rows_of_a_table_along_explicit_axes_are_looked_up_along_automatic_ones(policy):
    def tied(table, tokens):
        table = jax.sharding.reshard(table, P())
        rows = table.at[tokens].get(out_sharding=P("d"))  # JAX reads the mesh as an automatic one
        return jnp.mean(jnp.tanh(rows @ table.T) ** 2)

    tokens = jnp.arange(24) % 16
    with jax.set_mesh(EXPLICIT):
        given = (jax.device_put(a, NamedSharding(EXPLICIT, P("d"))) for a in (W, tokens))
        gradient = jax.jit(jax.grad(jmp.autocast(tied, policy)))(*given)
    true = jax.grad(lambda w: jnp.mean(jnp.tanh(w[tokens] @ w.T) ** 2))(W)
    assert relative_error(np.asarray(gradient), true) < 3e-3


POLICIES = {
    "products": jax.checkpoint_policies.dots_saveable,
    "what is gathered": lambda primitive, *_, **__: primitive is lax.all_gather_p,
}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_the_policy_of_a_remat_sees_what_it_keeps_with_float32_reduction(policy):
    def count(reduction):
        remat = in_shard_map(jax.checkpoint(lambda w, x: loss(gather(w), x), policy=policy))
        text = str(jax.make_jaxpr(jax.grad(jmp.autocast(remat, reduction), (0, 1)))(W, X))
        return text.count("= dot_general["), text.count("= all_gather[")

    assert count(WIDE) == count(HALF)
