"""`compare`: the errors of a policy, leaf by leaf, against float32."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp import diagnostics
from jmp.diagnostics import _comparison
from tests.products import eye, half

F16, BF16 = "mixed_float16", "mixed_bfloat16"


def normal(*shapes):
    """Random arrays, one of each shape."""
    generator = np.random.default_rng(0)
    return [jnp.asarray(generator.normal(size=shape), jnp.float32) for shape in shapes]


def product(w, x):
    return x @ w


def row_of(comparison, kind, path=""):
    (row,) = (row for row in comparison.rows if (row.kind, row.path) == (kind, path))
    return row


def test_errors_of_a_product_worked_out_by_hand():
    # 1 + 2^-11 lies half way between two float16 numbers and is rounded to the even one, 1; in
    # float32 everything here is exact.
    w = jnp.array([[1 + 2.0**-11], [1.0]])
    x = jnp.array([[1.0, 2.0], [3.0, 4.0]])
    found = diagnostics.compare(product, F16, argnums=(0, 1))(w, x)
    result = row_of(found, "result")
    a, b = np.array([3.0, 7.0]), np.array([3 + 2.0**-11, 7 + 3 * 2.0**-11])
    assert result.elements == 2
    assert result.error_norm == np.linalg.norm(a - b)
    assert result.relative_error == np.linalg.norm(a - b) / np.linalg.norm(b)
    assert result.largest_error == 3 * 2.0**-11
    # The mean of two results: half the sums of x's columns, exact; and w^T / 2 in each row.
    assert row_of(found, "gradient", "0").relative_error == 0.0
    assert row_of(found, "gradient", "0").reference_norm == np.hypot(4 / 2, 6 / 2)
    gradient = row_of(found, "gradient", "1")
    assert gradient.largest_error == 2.0**-12
    assert gradient.error_norm == pytest.approx(2**0.5 * 2.0**-12, rel=1e-15)


def test_a_scalar_is_differentiated_as_it_is_and_anything_else_by_its_mean():
    w, x = jnp.full((4, 4), 0.5), jnp.ones((2, 4))

    def norm(fun, *args):
        return row_of(diagnostics.compare(fun, BF16)(*args), "gradient").reference_norm

    def expected(loss):
        return float(jnp.linalg.norm(jax.grad(loss)(w, x)))

    assert norm(lambda w, x: product(w, x).sum(), w, x) == expected(lambda *a: product(*a).sum())
    product_mean = lambda w, x: product(w, x).mean()
    assert norm(product, w, x) == expected(product_mean)
    several = lambda w, x: {"y": product(w, x), "aux": (w**2, jnp.arange(3), None)}
    total = lambda w, x: product(w, x).mean() + (w**2).mean()
    assert norm(several, w, x) == pytest.approx(expected(total), rel=1e-6)
    # A pair whose first is no scalar is no loss with something beside it.
    pair = lambda w, x: (product(w, x), product(w, x).mean())
    assert norm(pair, w, x) == pytest.approx(2 * expected(product_mean), rel=1e-6)


def two_heads(params, x, targets):
    with jax.named_scope("trunk"):
        h = jnp.tanh(x @ params["trunk"]["w"])
    with jax.named_scope("classifier"):
        logits = h @ params["classifier"]["w"] + params["classifier"]["b"]
    with jax.named_scope("unsafe"):
        # The large part cancels, and in half it took the digits of the small one with it.
        w = params["unsafe"]["w"]
        y = (h + 100) @ w - 100 * w.sum(0, keepdims=True) + params["unsafe"]["b"]
    return jnp.mean(logits**2) + jnp.mean(y * targets)


def test_the_module_with_a_half_unsafe_operation_is_named():
    square, wide = (64, 64), (32, 64)
    classifier, unsafe, trunk, x, targets = normal(square, square, square, wide, wide)
    params = {
        "classifier": {"w": classifier / 8, "b": jnp.zeros((1, 64))},
        "unsafe": {"w": unsafe / 8, "b": jnp.zeros((1, 64))},
        "trunk": {"w": trunk / 8},
    }
    args = (params, x, targets)
    found = diagnostics.compare(two_heads, F16)(*args)
    worst, second, *_ = found.by_module()
    assert (worst.path, worst.elements) == ("unsafe", 64 * 65)
    assert worst.relative_error > 5 * second.relative_error
    # A module is its leaves as one vector.
    leaves = [row for row in found.rows if row.path.startswith("unsafe/")]
    error = np.linalg.norm([row.error_norm for row in leaves])
    reference = np.linalg.norm([row.reference_norm for row in leaves])
    assert worst.error_norm == pytest.approx(error, rel=1e-12)
    assert worst.relative_error == pytest.approx(error / reference, rel=1e-12)
    assert worst.largest_error == max(row.largest_error for row in leaves)
    assert [row.path for row in found.worst(1)] == ["unsafe/w"]
    assert [row.path for row in found.rows] == [
        "", "classifier/b", "classifier/w", "trunk/w", "unsafe/b", "unsafe/w",
    ]  # fmt: skip
    # The rule that the report suggests is the cure.
    cured = diagnostics.compare(two_heads, F16, rules=[("unsafe", "float32")])(*args)
    assert cured.worst(1)[0].relative_error < worst.relative_error / 5


NAN, INF = math.nan, math.inf
EDGES = {
    # a, b: relative error, largest error
    "equal": ([3, 4], [3, 4], 0, 0),
    "both zero": ([0, 0], [0, 0], 0, 0),
    "reference zero": ([1, 0], [0, 0], INF, 1),
    "flushed to zero": ([0, 0], [0, 2], 1, 2),
    "empty": ([], [], 0, 0),
    "the same NaN": ([NAN, 3], [NAN, 3], NAN, NAN),
    "the same infinity": ([-INF, 3], [-INF, 4], 0.25, 1),
    "NaN in the policy": ([NAN, 3], [1, 3], INF, INF),
    "overflow": ([INF, 3], [1e6, 3], INF, INF),
    "NaN in the reference": ([1, 3], [NAN, 3], NAN, NAN),
    "a NaN for an infinity": ([INF, 3], [NAN, 3], NAN, NAN),
    "other infinities": ([INF, 3], [-INF, 3], INF, INF),
    "subnormal float16": ([0, 2.0**-24], [2.0**-24] * 2, 0.5**0.5, 2.0**-24),
    "tiny": ([1e-38, 0], [1e-38, 0], 0, 0),
}


@pytest.mark.parametrize("name", EDGES)
def test_edges(name):
    a, b, relative, largest = EDGES[name]
    row = _comparison.error_of("result", "", np.array(a), np.array(b), 1.0)
    assert row.relative_error == pytest.approx(relative, nan_ok=True)
    assert row.largest_error == pytest.approx(largest, nan_ok=True)


@pytest.mark.parametrize(
    "dtype", [np.int32, np.bool_, jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, np.complex64]
)
def test_every_dtype_of_numbers_is_compared(dtype):
    a, b = np.array([0, 1, 1]).astype(dtype), np.array([0, 1, 0]).astype(dtype)
    row = _comparison.error_of("result", "", a, b, 1.0)
    assert (row.relative_error, row.largest_error) == (1.0, 1.0)


def test_what_is_nan_in_both_has_no_known_error_and_comes_first():
    def loss(params):
        lost, kept = params["lost"], params["kept"]
        lost = jnp.log(-jnp.sum(lost @ lost)) + 0.0 * jnp.sum(kept)
        return {"a": lost, "b": jnp.sum(kept @ kept)}

    params = {"lost": jnp.ones((4, 4)), "kept": jnp.ones((4, 4))}
    found = diagnostics.compare(loss, F16)(params)
    result = found.rows[0]
    assert math.isnan(result.relative_error) and math.isnan(result.largest_error)
    assert math.isnan(found.worst()[0].relative_error)
    assert math.isnan(found.by_module(depth=0)[0].relative_error)


def test_a_loss_scale_takes_underflow_out_of_the_error():
    loss = lambda w: 2.0**-26 * jnp.sum(eye(4) @ w)
    w = jnp.full((4, 4), 1 / 3)
    without = row_of(diagnostics.compare(loss, F16)(w), "gradient")
    assert without.relative_error == 1.0  # all of it is zero
    scaled = diagnostics.compare(loss, F16, scale=2.0**16)(w)
    assert row_of(scaled, "gradient").relative_error == 0.0
    assert row_of(scaled, "gradient").reference_norm == 2.0**-26 * 4
    assert "loss scale 65536" in str(scaled)


def test_a_policy_in_float32_is_compared_with_itself():
    (w,) = normal((16, 16))
    found = diagnostics.compare(lambda w: jnp.tanh(w @ w), "float32")(w)
    assert [row.relative_error for row in found.rows] == [0.0, 0.0]


def test_half_arguments_are_widened_in_the_reference():
    w = jnp.full((8, 8), 0.1, jnp.bfloat16)
    found = diagnostics.compare(lambda w: w @ w @ w, BF16)(w)
    exact = np.linalg.multi_dot([np.asarray(w, np.float64)] * 3)
    assert row_of(found, "result").reference_norm == pytest.approx(np.linalg.norm(exact), rel=1e-6)
    assert row_of(found, "gradient").relative_error > 0


def test_products_of_the_reference_run_at_the_highest_precision():
    seen = []

    def fun(w):
        seen.append(jax.config.jax_default_matmul_precision)
        return w @ w

    diagnostics.compare(fun, F16)(jnp.ones((4, 4)))
    assert seen == [None, "highest"]


def test_complex_arguments_have_errors_too():
    w = jnp.array([[1 + 1j, 0.5], [0.3j, 2.0]], jnp.complex64)
    x = jnp.full((2, 2), 1 / 3)
    fun = lambda w, x: jnp.abs(w @ (x @ x)).sum()
    found = diagnostics.compare(fun, F16)(w, x)
    assert 0 < row_of(found, "gradient").relative_error < 1e-2


def attention(params, x):
    queries, keys = x @ params["q"], x @ params["k"] + params["key_bias"]
    return jnp.mean((jax.nn.softmax(queries @ keys.T) @ x) ** 2)


@pytest.mark.parametrize("level", [0.0, 1e6])  # of the loss, which gradients do not depend on
def test_a_gradient_below_the_rounding_of_the_others_comes_last(level):
    q, k, bias, x = normal((8, 8), (8, 8), (1, 8), (16, 8))
    params = {"q": q, "k": k, "key_bias": bias}
    found = diagnostics.compare(lambda *args: attention(*args) + level, F16)(params, x)
    # A bias of the keys moves every score of a row alike, and softmax does not see it.
    assert row_of(found, "gradient", "key_bias").relative_error > 1
    assert found.worst()[-1].path == "key_bias"
    assert found.by_module()[-1].path == "key_bias"
    assert str(found).count("below rounding") == 1


def test_a_leak_into_a_true_zero_comes_first():
    # In float32 relu cuts this gradient off; in float16 1 - 2^-12 is 1, and it is there.
    def loss(params):
        first = half(params["x"])
        return jnp.sum(jnp.where(first >= 1, 1.0, 0.0) * params["y"]) + jnp.sum(params["x"])

    params = {"x": jnp.full((2, 2), 1 - 2.0**-12), "y": jnp.ones((2, 2))}
    found = diagnostics.compare(loss, F16)(params)
    assert found.worst(1)[0].relative_error == INF
    assert found.worst(1)[0].path == "y"


def test_which_arguments_are_differentiated():
    args = ({"w": jnp.ones((4, 4)), "n": jnp.int32(1)}, jnp.ones((2, 4)))
    fun = lambda params, x: x @ params["w"]

    def paths(argnums):
        rows = diagnostics.compare(fun, F16, argnums=argnums)(*args).rows
        return [row.path for row in rows if row.kind == "gradient"]

    assert paths(0) == ["w"]
    assert paths(-1) == paths(1) == [""]
    assert paths((0, 1)) == ["0/w", "1"]
    assert paths(()) == []


def test_printed_and_as_data():
    params = {"a": {"w": jnp.ones((4, 4)), "b": jnp.ones((1, 4))}}
    found = diagnostics.compare(lambda p: eye(4) @ p["a"]["w"] + p["a"]["b"], F16)(params)
    text = str(found)
    assert text.startswith("p=full,c=f16,o=full against float32:")
    assert all(column in text for column in _comparison.COLUMNS)
    assert "the worst 3 of 3 leaves" in text and "a/w" in text
    assert "the worst" not in str(diagnostics.compare(product, F16)(jnp.eye(2), jnp.eye(2)))
    data = json.loads(json.dumps(found.to_dict()))
    assert [row["path"] for row in data["rows"]] == ["", "a/b", "a/w"]
    assert data["rows"][2]["relative_error"] == 0.0


def test_a_float16_result_that_no_loss_scale_fits_has_infinite_gradients():
    loss = lambda params, x: jnp.mean(x @ params["w"])
    params, x = {"w": jnp.ones((8, 4), jnp.float16)}, jnp.ones((4, 8), jnp.float16)
    found = diagnostics.compare(loss, "O2", scale=2.0**16)(params, x)
    result, gradient = found.rows
    assert result.relative_error < 1 and gradient.relative_error == INF


def test_of_a_loss_with_something_beside_the_loss_alone_is_differentiated():
    def with_aux(w, x):
        y = x @ w
        return jnp.mean(jnp.tanh(y)), {"mean": y.mean(), "largest": y.max(0), "count": 3}

    w, x = jnp.eye(4) / 3, jnp.linspace(0, 1, 32).reshape(8, 4)
    found = diagnostics.compare(with_aux, F16, has_aux=True)(w, x)
    alone = diagnostics.compare(lambda w, x: with_aux(w, x)[0], F16)(w, x)
    assert row_of(found, "gradient") == row_of(alone, "gradient")
    assert {row.path for row in found.rows if row.kind == "result"} >= {"0", "1/mean", "1/largest"}
    assert max(row.relative_error for row in found.rows) < 0.01
