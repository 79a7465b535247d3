"""What the precision report says, and that it is what runs."""

import re

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import jmp
from jmp import diagnostics
from jmp.diagnostics import _rows
from jmp.diagnostics._places import spelled
from jmp.diagnostics._rows import Row, with_repeated
from testbed.gpt2 import gpt2
from testbed.models import MODELS
from tests.commands import in_full
from tests.products import equations, product_dtypes

F16 = "mixed_float16"
W, X = jnp.ones((8, 8)), jnp.ones((4, 8))


def loss(w, x):
    with jax.named_scope("block"):
        y = jnp.tanh(x @ w)
    return jnp.mean(jnp.exp(y @ w))


def report(function=loss, *args, **options):
    return diagnostics.precision_report(function, F16, **options)(*(args or (W, X)))


def test_a_row_for_each_product_reduction_and_exponential_names_the_users_line():
    rows = report().rows
    assert [(row.kind, row.operation, row.module, row.dtype_in) for row in rows] == [
        ("product", "dot_general", "block", "float16"),
        ("product", "dot_general", "", "float16"),
        ("exponential", "exp", "", "float32"),
        ("reduction", "reduce_sum", "", "float32"),
    ]
    assert all(row.dtype_out == row.dtype_in and row.why for row in rows)
    first = loss.__code__.co_firstlineno
    assert rows[0].source.endswith(f"test_precision_report.py:{first + 2}")
    assert rows[1].source.endswith(f"test_precision_report.py:{first + 3}")


def masked(q, k):
    with jax.named_scope("attention"):
        scores = jnp.where(jnp.tri(len(q), len(k), dtype=bool), q @ k.T, -1e9)
    return jax.checkpoint(lambda scores, k: jax.nn.softmax(scores) @ k)(scores, k)


def picked(w, x, labels):
    logits = jax.nn.log_softmax(x @ w)
    return -jnp.mean(jnp.take_along_axis(logits, labels[:, None], 1))


ODD = jnp.ones((197, 8))


@pytest.mark.parametrize(
    "function, args, what",
    [
        (
            picked,
            (jnp.ones((8, 4096)), X, jnp.zeros(4, int)),
            "one element of each row, as a masked sum",
        ),
        (lambda q, k: jax.nn.softmax(q @ k.T) @ k, (ODD, ODD), "a softmax before a product"),
        (masked, (W, W), "an array that is added or selected is held within float16's range"),
    ],
)
def test_what_is_decided_besides_dtypes_is_said(function, args, what):
    found = report(function, *args)
    ((decision, times),) = found.decisions.items()
    assert decision.startswith(what) and times == 1
    assert found.to_dict()["decisions"] == found.decisions
    assert f"besides dtypes:\n  1 x {what}" in str(found)


def test_decisions_count_turns_and_have_no_section_where_there_are_none():
    assert report().decisions == {} and "besides dtypes" not in str(report())

    def twice(x):
        layer = lambda x, _: (x + jax.nn.softmax(x @ x.T) @ x, None)
        with jax.named_scope("first"):
            x = jax.nn.softmax(x @ x.T) @ x
        return jax.lax.scan(layer, x, length=3)[0]

    found = report(twice, ODD)
    assert list(found.decisions.values()) == [4]
    assert "  4 x a softmax before a product" in str(found)


def test_floating_point_operations():
    by_operation = {row.source: row.flops for row in report().rows if row.kind == "product"}
    assert list(by_operation.values()) == [2 * 4 * 8 * 8] * 2

    strided = convolution(strides=(2, 2))
    (row,) = report(strided, jnp.ones((1, 8, 8, 3)), jnp.ones((5, 5, 3, 7))).rows
    assert row.flops == 2 * (4 * 4 * 7) * (5 * 5 * 3)

    # Its input's gradient is a convolution of the cotangent with zeros put between: not counted.
    gradient = jax.grad(lambda image, kernel: strided(image, kernel).sum(), argnums=(0, 1))
    rows = report(gradient, jnp.ones((1, 8, 8, 3)), jnp.ones((5, 5, 3, 7))).rows
    assert sum(r.flops for r in rows) == 2 * row.flops

    def grouped(x, w):
        return jax.lax.ragged_dot(x, w, jnp.array([1, 3]))

    (row,) = report(grouped, jnp.ones((4, 8)), jnp.ones((2, 8, 5))).rows
    assert row.flops == 2 * 4 * 8 * 5


def test_an_argument_that_is_cast_on_entry_comes_in_half_into_the_program():
    found = report(apply_to=["x"])
    _, x = found.after(found.passes[-1]).in_avals
    assert x.dtype == jnp.float16


def test_an_inner_product_is_a_reduction():
    (row,) = report(lambda w, x: jnp.vdot(w, w)).rows
    assert (row.kind, row.dtype_in) == ("reduction", "float32")
    half = jmp.autocast(lambda w, x: jnp.vdot(x @ w, x @ w), F16)
    diagnostics.assert_products_in(half, jnp.float16)(W, X)


def convolution(strides=(1, 1)):
    numbers = ("NHWC", "HWIO", "NHWC")
    return lambda image, kernel: jax.lax.conv_general_dilated(
        image, kernel, strides, "SAME", dimension_numbers=numbers
    )


def product(w, x):
    return x @ w


def body_and_head(w, v, x):
    with jax.named_scope("body"):
        x = x @ w
    with jax.named_scope("head"):
        return x @ v


def head_behind_a_loop(w, v, x):
    return jax.lax.scan(lambda h, _: (h @ w, None), x, None, length=2)[0] @ v


def repeated(w, x, times=3):
    for i in range(times):
        with jax.named_scope(f"layer_{i}"):
            x = x @ w
    return x


def two_sizes(w, x):
    x = repeated(w, x, 2)
    return jnp.einsum("bnd,bmd->bnm", x, x)


def shapes_of(sizes):
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in sizes]


TOKENS = [(64, 64), (5, 197, 64)]
ODD_SIZES = [  # a function, shapes of its arguments, and what its hazards say
    (
        body_and_head,
        [(256, 256), (256, 100), (128, 256)],
        r"\(head\) .* in float16 with 100 columns, no multiple of 8: .* \(28% of the operations",
    ),
    # Rows and summed elements count as well: the backward pass exchanges the roles.
    (product, [(197, 256), (123, 197)], "with 123 rows, 197 summed elements, no multiple"),
    # XLA multiplies 5 x 197 rows by one matrix. Modules that repeat make one sentence.
    (repeated, TOKENS, r"\(layer_\*\) multiplies .* with 985 rows, no"),
    (two_sizes, TOKENS, r"\(layer_\*\) .* 985 rows, no .*\n.* 197 rows, 197 columns"),
    (body_and_head, [(512, 512), (512, 10), (256, 512)], "10 columns"),
]


@pytest.mark.parametrize(("function", "sizes", "words"), ODD_SIZES)
def test_sizes_that_are_no_multiples_of_8_are_named_with_their_share(function, sizes, words):
    hazards = report(function, *shapes_of(sizes)).hazards
    assert re.search(words, "\n".join(hazards))
    assert len(hazards) == 1 + (function is two_sizes)


NO_HAZARDS = {
    "even": (body_and_head, [(256, 256), (256, 104), (128, 256)]),
    "below 1 % of all operations": (head_behind_a_loop, [(512, 512), (512, 10), (256, 512)]),
    "tiny": (product, [(100, 100), (4, 100)]),
    "a vector": (product, [(1001, 1001), (1, 1001)]),
    "a convolution": (convolution(), [(4, 32, 32, 12), (3, 3, 12, 60)]),
}


@pytest.mark.parametrize("name", NO_HAZARDS)
def test_sizes_that_are_even_or_hardly_count_are_no_hazard(name):
    function, sizes = NO_HAZARDS[name]
    assert report(function, *shapes_of(sizes)).hazards == []


def test_in_float32_there_is_nothing_to_pad():
    _, sizes, _ = ODD_SIZES[0]
    (hazard,) = report(body_and_head, *shapes_of(sizes), rules=[("head", "float32")]).hazards
    assert "no multiple" not in hazard


def test_padding_is_what_a_gpu_does_with_such_sizes(h200):
    def moved(columns, dtype):
        operands = (jax.ShapeDtypeStruct(s, dtype) for s in ((4096, 4096), (4096, columns)))
        return h200(jnp.matmul, *operands)

    even, odd = moved(4096, jnp.float16), moved(4095, jnp.float16)
    assert odd.bytes_moved == pytest.approx(2.33 * even.bytes_moved, rel=0.01)
    assert (even.kernels, odd.kernels) == (1, 3)
    assert moved(4095, jnp.float32).kernels == 1


def test_turns_of_a_scan_and_a_region_that_was_asked_for_count_in_the_share():
    @jmp.full_precision
    def body(w, x):
        return jax.lax.scan(lambda h, _: (h @ w, None), x, None, length=10)[0]

    found = report(lambda w, x: body(w, x @ w))
    flops = 2 * 4 * 8 * 8
    assert [(row.dtype_in, row.times) for row in found.rows] == [("float16", 1), ("float32", 10)]
    assert [row.flops for row in found.rows] == [flops, 10 * flops]
    assert found.half_flops_share == 1 / 11
    assert found.rows[1].why == "the user asked for float32 here"
    assert report(lambda w, x: x.sum()).half_flops_share is None


def test_what_was_asked_for_is_no_hazard():
    (sentence,) = report(full=["dot_general"]).hazards
    assert "multiplies float32 with HIGHEST precision" in sentence  # only its price
    inner = jmp.autocast(loss, "float32")
    found = report(inner)
    assert found.hazards == []
    assert found.rows[0].why == "an inner autocast decided here"
    preset = jax.lax.DotAlgorithmPreset.F32_F32_F32
    found = report(lambda w, x: jnp.dot(x, w, precision=preset))
    assert found.hazards == []
    assert found.rows[0].why == "the user named the algorithm"


def test_a_gpt2_is_printed_in_40_lines_whatever_its_layers():
    texts = {}
    for layers in (2, 3):
        loss_fn, *shapes = gpt2(layers)
        found = diagnostics.precision_report(loss_fn, F16)(*shapes)
        texts[layers] = str(found)
        (head,) = re.findall(r"^  GPT2/transformer/h/\*/attn/c_attn .*", texts[layers], re.M)
        assert re.search(rf"dot_general x {layers} \[\d\]", head)
        assert f"{len(found.rows)} rows; repeated modules" in texts[layers]
    assert len(texts[2].splitlines()) == len(texts[3].splitlines()) <= 40
    assert "\nproducts: 19 in float16 (100.0% of the operations)\n" in texts[3]
    assert re.search(
        r"ln_1 .*square x 6 \[\d\], reduce_sum x 6 .* testbed/gpt2.py:\d+$", texts[3], re.M
    )


def test_the_place_of_an_operation_is_looked_up_once(monkeypatch):
    def place_of(found):
        asked.append(found)
        return "", "model.py:1"

    asked = []
    monkeypatch.setattr(_rows, "module_and_line", place_of)
    found = report()
    assert len(asked) == sum(row.times for row in found.rows) == 4


def row(module, source="model.py:1", **fields):
    fields = {"dtype_in": "float16", "dtype_out": "float16", "why": "because", **fields}
    return Row("product", "dot_general", module, source, flops=2, **fields)


LAYERS = [row(f"net/h/{i}/mlp") for i in range(12)]
BLOCKS = [(f"Block_{i}/Dense_{j}", f"model.py:{j}") for i in range(3) for j in range(2)]
REPEATED = [
    (LAYERS, [("net/h/*/mlp", 12)]),
    # Another reason or dtype is another row, and a single one says whose it is.
    ([*LAYERS, row("net/h/12/mlp", why="a rule")], [("net/h/*/mlp", 12), ("net/h/12/mlp", 1)]),
    ([*LAYERS, row("net/h/9/mlp", dtype_in="f4")], [("net/h/*/mlp", 12), ("net/h/9/mlp", 1)]),
    # A number that all have stays.
    ([row("conv2d_1"), row("conv2d_2"), row("conv")], [("conv2d_*", 2), ("conv", 1)]),
    # Modules that repeat inside others, from two lines and from one.
    ([row(*each) for each in BLOCKS], [("Block_*/Dense_0", 3), ("Block_*/Dense_1", 3)]),
    ([row(name) for name, _ in BLOCKS], [("Block_*/Dense_*", 6)]),
    # Two lines of one module, or of none, stay two rows.
    ([row(f"h/{i}", f"model.py:{j}") for i in range(3) for j in (5, 7)], [("h/*", 3), ("h/*", 3)]),
    ([row("", "model.py:5"), row("", "model.py:7")], [("", 1), ("", 1)]),
    ([], []),
]


@pytest.mark.parametrize(("rows", "expected"), REPEATED)
def test_modules_that_repeat_make_one_row(rows, expected):
    found = with_repeated(rows)
    assert [(row.module, row.times) for row in found] == expected
    assert all(row.flops == 2 * row.times for row in found)


def test_hazards_of_modules_that_repeat_are_printed_once():
    def function(w, x):
        for i in range(3):
            with jax.named_scope(f"layer_{i}"):
                x = (x + 0j) @ (w + 0j)
        return jnp.abs(x)

    found = report(function, rules=[("haed", "float32")])
    assert len(found.hazards) == 2
    printed = str(found)
    assert printed.count(" multiplies in complex64: the user chose complex64") == 1
    assert "(layer_*) multiplies in complex64" in printed
    assert "  the rule 'haed' matched no scope" in printed
    assert [row.module for row in found.rows if row.kind == "product"] == [
        "layer_0", "layer_1", "layer_2",
    ]  # fmt: skip


def test_places_are_spelled_from_the_package_or_the_working_directory_on(monkeypatch, tmp_path):
    assert spelled("/opt/v/lib/python3.12/site-packages/flax/linen/x.py") == "flax/linen/x.py"
    assert spelled("/usr/lib/python3/dist-packages/jax/a.py") == "jax/a.py"
    monkeypatch.chdir(tmp_path)
    assert spelled(f"{tmp_path}/src/model.py") == "src/model.py"
    assert spelled("/elsewhere/model.py") == "/elsewhere/model.py"
    line = loss.__code__.co_firstlineno + 2
    assert report().rows[0].source == f"{__file__}:{line}"
    # A program of libraries has their line, not one of JAX's machinery.
    layer = nn.Dense(8)
    variables = jax.eval_shape(layer.init, jax.random.key(0), X)
    source = report(layer.apply, variables, X).rows[0].source
    assert re.fullmatch(r"flax/linen/linear.py:\d+", source)


def test_bodies_that_jax_traces_apart_have_the_line_of_their_caller():
    def function(w, x):
        y = jax.lax.map(jnp.exp, x @ w)
        once = jnp.var(y, axis=0)
        again = jnp.var(x, axis=0)
        return jax.lax.scan(lambda c, v: (c * jnp.var(v), None), once, y - again[None])[0]

    first = function.__code__.co_firstlineno
    lines = {}
    for found in report(function).rows:
        assert all(re.fullmatch(r"tests/.*:\d+", place) for place in found.source.split(", "))
        places = [int(place.rpartition(":")[2]) - first for place in found.source.split(", ")]
        lines.setdefault(found.operation, []).append(places)
    assert lines["exp"] == [[1]]
    # JAX traced the variance of four by eight numbers once: each of its callers has a row.
    assert lines["square"] == [[2], [3], [4]]


def test_a_loss_of_parts_of_an_equinox_module_runs_as_it_is_and_raises_its_own_error():
    model = eqx.nn.MLP(8, 8, 8, 1, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def of_parts(params, x):
        return jax.vmap(eqx.combine(params, static))(x).sum()

    whole = report(lambda model, x: jax.vmap(model)(x).sum(), model, X).rows
    assert whole[0].module.startswith("layers/0")
    parts = report(of_parts, params, X).rows
    in_half = [sum(r.times for r in rows if r.dtype_in == "float16") for rows in (whole, parts)]
    assert in_half == [2, 2]
    assert not parts[0].module.startswith("layers/0")

    def wrong(model, x):
        raise TypeError("the loss's own")

    with pytest.raises(TypeError, match="the loss's own") as caught:
        report(wrong, model, X)
    assert caught.value.__context__ is None


@pytest.mark.parametrize(
    "model", in_full(MODELS, but=["scanned_gpt"]), ids=lambda model: model.name
)
def test_models_have_no_hazards_and_the_report_is_what_runs(model, quick_compilation):
    with jax.numpy_rank_promotion("allow"):
        function, params, batch = model.make(jnp.float32, **model.small)
        found = report(function, params, *batch)
        emitted = product_dtypes(jmp.autocast(function, F16), params, *batch)
        plain = jax.make_jaxpr(function)(params, *batch).jaxpr
    assert found.hazards == []
    assert found.half_flops_share == 1.0
    products = [row for row in found.rows if row.kind == "product"]
    assert {row.dtype_in for row in products} == {name.split()[0] for name in emitted}
    if not any(equation.primitive.name == "scan" for equation in equations(plain)):
        assert sum(row.times for row in products) == sum(emitted.values())


def test_assert_products_in_passes_and_names_what_does_not():
    gradient = jax.grad(jmp.autocast(loss, F16))
    diagnostics.assert_products_in(gradient, jnp.float16)(W, X)
    line = loss.__code__.co_firstlineno + 2
    words = rf"2 of 2 products of loss(.|\n)*float32 at .*:{line} \(block\)"
    with pytest.raises(AssertionError, match=words):
        diagnostics.assert_products_in(loss, jnp.float16)(W, X)
    with pytest.raises(AssertionError, match="has no product"):
        diagnostics.assert_products_in(jnp.exp, jnp.float16)(X)


@pytest.mark.parametrize("inside", [False, True])
def test_a_report_of_a_step_says_what_devices_send(inside):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    shards = jax.P("data")

    def loss(w, x):
        return jnp.mean((x @ jmp.gather_params(w, "data", "float16", "float32")) ** 2)

    gradient = jax.grad(loss)
    if inside:  # of a function that runs as a whole
        gradient = jmp.autocast(gradient, F16)
    step = jax.shard_map(gradient, mesh=mesh, in_specs=(shards, shards), out_specs=shards)
    rows = report(step, *shapes_of([(512, 256), (8, 512)])).rows
    sent = {row.operation: row.dtype_in for row in rows if row.kind == "transfer"}
    assert sent == {"all_gather": "float16", "all_to_all": "float16"}


def test_products_in_the_other_half_type_are_no_half_products_and_a_hazard():
    half = lambda x: x.astype("bfloat16")
    text = str(report(lambda w, x: half(x) @ half(w) @ half(w)))
    assert "products: 2 in bfloat16 (100.0% of the operations)" in text
    assert "multiplies in bfloat16: the user chose" in text
