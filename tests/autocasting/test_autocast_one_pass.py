"""Losses of classifiers: sums of powers in one pass with the maxima of their rows, and kept.

The pass that only GPUs take runs here on the CPU, and short rows count as long.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import jmp
from jmp.autocasting.targets import _cross_entropy
from testbed.passes import replaced
from tests.autocasting.plans import listing, plan_of
from tests.commands import in_full
from tests.errors import assert_close, relative_error
from tests.saved import printed_residuals

ROWS, WIDTH, CLASSES, LONG = 8, 4, 65, 64
LOWEST = float(jnp.finfo(jnp.float32).min)


@pytest.fixture(autouse=True)
def small():
    """Small islands are recomputed, and rows of 65 numbers are long."""
    instead = {
        "_islands.SMALL": 256,
        "targets._cross_entropy.LARGE": 256,
        "targets._cross_entropy.LONG": LONG,
        "targets._cross_entropy.GPUS": ("cpu",),
    }
    with replaced(instead):
        yield


def in_one_and_in_two_passes(function, policy="mixed_float16"):
    """Under autocast, and without rewrites: they belong to what is recomputed."""
    return (jmp.autocast(function, policy, recompute=what) for what in ("auto", "none"))


# One reduction of pairs.

INF, NAN = np.inf, np.nan
EDGES = {
    "ties": [3, 3, 1, 3, -2, 3],
    "one dominates": [1e4, 3, -1e4, 0, 2, 1],
    "masked": [-1e9, 2, -1e9, 1, -1e9, 0],
    "masked throughout": [-1e9] * 6,
    "lowest numbers": [LOWEST, 0, LOWEST, 1, LOWEST, -1],
    "lowest throughout": [LOWEST] * 6,
    "some -inf": [-INF, 0, -INF, 1, -INF, -INF],
    "-inf alone": [-INF] * 6,
    "+inf": [0, INF, 1, -INF, 2, 3],
    "+inf twice": [0, INF, 1, INF, -INF, 3],
    "NaN": [0, 1, NAN, 2, -INF, INF],
    "one number": [LOWEST, -INF, 7, -INF, LOWEST, -INF],
}


@pytest.mark.parametrize("row", EDGES.values(), ids=EDGES)
def test_maxima_and_sums_are_those_of_float64_and_of_parts_of_the_row(row):
    exact = np.asarray(row, np.float32).astype(np.float64)
    largest = exact.max()
    with np.errstate(invalid="ignore"):
        powers = np.where(exact == largest, 1, np.exp(exact - largest))
    maxima, sums = _cross_entropy.maxima_and_sums((1,), jnp.asarray([row, row[::-1]], jnp.float32))
    np.testing.assert_array_equal(maxima, [largest] * 2)
    np.testing.assert_allclose(sums, [powers.sum()] * 2, rtol=1e-6)
    # Half of a row may be reduced before the rest; a part that is empty has these.
    starts = jnp.float32(-INF), jnp.float32(0)
    parts = _cross_entropy.maxima_and_sums((1,), jnp.asarray(row, jnp.float32).reshape(3, 2))
    parts = [jnp.append(part, start)[::-1] for part, start in zip(parts, starts, strict=True)]
    together = lax.reduce(tuple(parts), starts, _cross_entropy._together, (0,))
    np.testing.assert_allclose(together, [largest, powers.sum()], rtol=1e-6)


# Whole programs.


def picked(rows, labels):
    return jnp.take_along_axis(rows, labels[:, None], 1)[:, 0]


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def of_log_softmax(logits, labels):
    return -picked(jax.nn.log_softmax(logits), labels)


def of_softmax(logits, labels):
    return -jnp.log(picked(jax.nn.softmax(logits), labels) + 1e-30)


def of_logsumexp(logits, labels):
    return jax.nn.logsumexp(logits, -1, keepdims=True)[:, 0] - picked(logits, labels)


def by_hand(logits, labels):
    shifted = logits - logits.max(-1, keepdims=True)
    return jnp.log(jnp.exp(shifted).sum(-1)) - picked(shifted, labels)


def with_repeated_maxima(logits, labels):
    maxima = lax.broadcast_in_dim(lax.stop_gradient(logits.max(-1)), logits.shape, (0,))
    return jnp.log(jnp.exp(logits - maxima).sum(-1)) - picked(logits - maxima, labels)


LOSSES = [cross_entropy, of_log_softmax, of_softmax, of_logsumexp, by_hand, with_repeated_maxima]


def arguments(classes=CLASSES):
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (ROWS, WIDTH))
    w = jax.random.normal(keys[1], (WIDTH, classes))
    return x, w, jax.random.randint(keys[2], (ROWS,), 0, classes)


def head(loss, change=lambda logits: logits):
    return lambda x, w, labels: loss(change(x @ w), labels).mean()


def with_gradients(function):
    return jax.jit(jax.value_and_grad(function, argnums=(0, 1)))


def in_float64(function, x, w, labels):
    with jax.enable_x64(True):
        x, w = (jnp.asarray(np.asarray(array, np.float64)) for array in (x, w))
        return jax.tree.map(np.asarray, with_gradients(function)(x, w, labels))


def sums_of(function, *args, **options):
    """How many sums of a program are taken in one pass with maxima."""
    return "\n".join(listing(plan_of(function, *args, **options))).count("in one pass")


@pytest.mark.parametrize(
    ("loss", "dtype"), in_full(zip(LOSSES, ["float16", "bfloat16"] * 3, strict=True), one_of=3)
)
def test_gradients_are_as_exact_as_in_two_passes(loss, dtype):
    args, function = arguments(), head(loss)
    policy = f"mixed_{dtype}"
    exact_value, exact = in_float64(function, *args)
    assert sums_of(function, *args, policy=policy) == 1

    def errors(autocast):
        value, found = with_gradients(autocast)(*args)
        np.testing.assert_allclose(value, exact_value, rtol=1e-3)
        return list(map(relative_error, found, exact))

    one, two = map(errors, in_one_and_in_two_passes(function, policy))
    np.testing.assert_array_less(one, 1.02 * np.asarray(two))


@pytest.mark.parametrize("loss", [cross_entropy, of_log_softmax], ids=lambda loss: loss.__name__)
def test_edges_are_those_of_two_passes_and_of_the_plain_program(loss):
    x, w, labels = arguments()
    columns = jnp.arange(CLASSES)[None]
    some, throughout, one = columns % 3 == 1, columns >= 0, columns == 5
    edges = [(some, -1e9), (some, -INF), (some, LOWEST), (throughout, -1e9), (throughout, -INF)]
    edges += [(one, INF), (one, NAN), (one, 3e4)]
    masks = jnp.concatenate([jnp.broadcast_to(mask, (1, CLASSES)) for mask, _ in edges])
    numbers = jnp.asarray([number for _, number in edges])[:, None]
    labels = labels // 3 * 3  # a class that is not masked

    losses = lambda x: loss(jnp.where(masks, numbers, x @ w), labels)

    def results(function):
        values, pull_back = jax.vjp(function, x)
        return values, pull_back(jnp.ones_like(values))[0]  # row by row

    assert sums_of(losses, x) == 1
    ways = (*in_one_and_in_two_passes(losses), losses)
    for found, two, plain in zip(*(jax.jit(lambda f=f: results(f))() for f in ways), strict=True):
        np.testing.assert_allclose(found, two, rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(found, plain, rtol=5e-3, atol=2e-2)


def remat(function):
    return jax.grad(jax.checkpoint(function), argnums=(0, 1))


def forward(function):
    return lambda x, w, labels: jax.jvp(lambda x: function(x, w, labels), (x,), (x,))


def curvature(function):
    def along(x, w, labels):
        return jax.jvp(jax.grad(lambda x: function(x, w, labels)), (x,), (jnp.cos(x),))[1]

    return along


def mapped(function):
    gradient = jax.vmap(jax.grad(function), (0, None, 0))
    return lambda x, w, labels: gradient(x.reshape(2, -1, WIDTH), w, labels.reshape(2, -1))


def scanned(function):
    def total(x, w, labels):
        step = lambda carry, batch: (carry + function(batch[0], w, batch[1]), None)
        return lax.scan(step, 0.0, (x.reshape(2, -1, WIDTH), labels.reshape(2, -1)))[0]

    return jax.grad(total, argnums=(0, 1))


TRANSFORMED = [remat, forward, curvature, mapped, scanned]


@pytest.mark.parametrize("transformed", TRANSFORMED, ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    "loss", in_full({"cross_entropy": cross_entropy, "by_hand": by_hand}, first=1)
)
def test_transformed_losses_are_those_of_two_passes(transformed, loss):
    args = arguments()
    one, two = map(transformed, in_one_and_in_two_passes(head(loss)))
    assert "reduce[" in str(jax.make_jaxpr(one)(*args))
    assert_close(jax.jit(one)(*args), jax.jit(two)(*args), rtol=4e-3, atol=1e-3)


def test_one_half_array_and_two_numbers_a_row_are_kept():
    x, w, labels = arguments()
    loss = jmp.autocast(lambda x: head(cross_entropy)(x, w, labels), "mixed_float16")
    text = printed_residuals(loss, x)
    kept = re.findall(r"^(f\d+\[\d.*?\]) (output of dot_general|named)", text, re.M)
    assert [array for array, _ in kept] == [f"f16[{ROWS},{CLASSES}]", *[f"f32[{ROWS}]"] * 2]
    assert text.count(f",{CLASSES}]") == 2  # with the table, in half


# Where it applies.


def planned(function, rows=512, classes=CLASSES):
    return sums_of(function, *(jnp.zeros(s) for s in ((rows, 8), (8, classes))))


@pytest.mark.parametrize(
    ("rows", "classes", "of_softmax", "of_logsumexp"),
    [(512, 31, 0, 0), (512, 32, 0, 1), (512, LONG, 0, 1), (512, LONG + 1, 1, 1), (2, 65, 0, 0)],
)
def test_what_lengths_it_takes(rows, classes, of_softmax, of_logsumexp):
    assert planned(lambda x, w: jax.nn.softmax(x @ w) @ w.T, rows, classes) == of_softmax
    assert planned(lambda x, w: jax.nn.logsumexp(x @ w, -1), rows, classes) == of_logsumexp


NEARLY = {
    "other maxima": lambda y: jnp.exp(y - jnp.tanh(y).max(-1, keepdims=True)).sum(-1),
    "maxima of columns": lambda y: jnp.exp(y - y.max(0)[None]).sum(-1),
    "maxima of columns, by rows": lambda y: jnp.exp(y - y.max(0)[:, None]).sum(-1),
    "sums of columns": lambda y: jnp.exp(y - y.max(-1, keepdims=True)).sum(0),
    "the largest of all": lambda y: jnp.exp(y - y.max()).sum(-1),
    "minima": lambda y: jnp.exp(y - y.min(-1, keepdims=True)).sum(-1),
    "means": lambda y: jnp.exp(y - y.mean(-1, keepdims=True)).sum(-1),
    "maxima less rows": lambda y: jnp.exp(y.max(-1, keepdims=True) - y).sum(-1),
    "maxima plus rows": lambda y: jnp.exp(y + y.max(-1, keepdims=True)).sum(-1),
    "largest powers": lambda y: jnp.exp(y - y.max(-1, keepdims=True)).max(-1),
    "squares of powers": lambda y: (jnp.exp(y - y.max(-1, keepdims=True)) ** 2).sum(-1),
    "shifts that differ in a row": lambda y: jnp.exp(y - (y.max(-1, keepdims=True) + y)).sum(-1),
}


@pytest.mark.parametrize("function", NEARLY.values(), ids=NEARLY)
def test_what_looks_like_sums_of_powers_is_left(function):
    assert planned(lambda x, w: function(x @ w), classes=512) == 0


def test_short_rows_whose_sums_make_rows_are_left():
    def loss(x, w):
        logits = x @ w
        entropy = -(jax.nn.softmax(logits) * jax.nn.log_softmax(logits)).sum(-1)
        return entropy + jax.nn.logsumexp(logits, -1)

    assert planned(loss, classes=LONG) == 0
    assert planned(loss, classes=LONG + 1) == 3


def test_none_is_taken_where_nothing_is_recomputed():
    assert sums_of(head(cross_entropy), *arguments(), recompute="none") == 0


def test_other_reductions_of_long_rows_are_kept():
    def smoothed(x, w, labels):
        rows = jax.nn.log_softmax(x @ w, where=jnp.arange(CLASSES)[None] > 3)
        return -jnp.where(jnp.arange(CLASSES)[None] > 3, rows, 0).mean()

    plan = plan_of(smoothed, *arguments())
    (island,) = [step for step in plan.steps if hasattr(step, "rewrites")]
    kept = [node.name for node, rewrite in island.rewrites.items() if rewrite.keeps]
    assert sorted(kept) == ["reduce_max", "reduce_sum"]
    args = arguments()
    found = jax.grad(jmp.autocast(smoothed, "mixed_float16"))(*args)
    np.testing.assert_allclose(found, jax.grad(smoothed)(*args), rtol=1e-2, atol=1e-3)


# Over devices.


def test_classes_spread_over_devices_are_not_gathered():
    mesh = jax.make_mesh((4,), ("classes",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = jax.sharding.NamedSharding(mesh, PartitionSpec(None, "classes"))
    x, w, labels = arguments(classes=68)
    gradient = with_gradients(jmp.autocast(head(cross_entropy), "mixed_float16"))
    compiled = gradient.lower(x, jax.device_put(w, spread), labels).compile()
    gathered = re.findall(r"(\w+\[[\d,]*\])\S* all-gather", compiled.as_text())
    assert set(gathered) <= {f"f32[{ROWS},4]"}  # maxima and sums of the parts
    found = compiled(x, jax.device_put(w, spread), labels)
    exact = with_gradients(head(cross_entropy))(x, w, labels)
    assert_close(found, exact, rtol=1e-2, atol=1e-3)


def test_inside_shard_map():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec("data")

    def loss(x, w, labels):
        part = lambda x, labels: lax.pmean(head(cross_entropy)(x, w, labels), "data")
        places = {"in_specs": (spec, spec), "out_specs": PartitionSpec()}
        return jax.shard_map(part, mesh=mesh, **places)(x, labels)

    args = arguments()
    found = with_gradients(jmp.autocast(loss, "mixed_float16"))(*args)
    assert_close(found, with_gradients(loss)(*args), rtol=1e-2, atol=1e-3)
