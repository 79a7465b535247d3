"""What the memory report counts, and that it is what the compiled program hands on."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax._src import stages

import jmp
from jmp import transforms
from jmp.diagnostics import compare_memory, memory_report
from tests.commands import in_full

F16 = "mixed_float16"
W, X = jnp.ones((8, 8)), jnp.ones((4, 8))


def report(function, *args, **options):
    return memory_report(function, **{"compiled": False, **options})(*args)


def kept_bytes(found):
    return sum(row.bytes for row in found.residuals)


def mlp(params, x):
    for w in params["layers"]:
        with jax.named_scope("layer"):
            x = jnp.tanh(x @ w)
    return jnp.mean(jax.nn.softmax(x) ** 2)


MLP = {"layers": [jnp.ones((8, 8)), jnp.ones((8, 8)), jnp.ones((8, 3))]}


# Programs whose residuals are compared with what XLA's program puts out.


def scanned(w, x):
    return jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), h.sum()), x, None, length=5)[0].sum()


def rematerialised(w, x):
    block = jax.checkpoint(lambda w, h: jnp.tanh(jax.nn.sigmoid(h @ w)))
    return block(w, jax.lax.scan(lambda h, _: (block(w, h), None), x, None, length=3)[0]).sum()


def branching(w, x):
    return jax.lax.cond(x.sum() > 0, lambda w: jnp.sin(w).sum(), lambda w: (w * w).sum(), w)


@jax.custom_vjp
def doubled(x):
    return jnp.sin(x)


# Residuals that are results, occur twice, are numbers and are integers.
doubled.defvjp(
    lambda x: (jnp.sin(x), (x, x, jnp.cos(x), 2.0, jnp.arange(4))),
    lambda kept, g: (g * kept[2] * kept[3],),
)


def with_custom_vjp(w, x):
    return doubled(x @ w @ w).sum()  # behind one product of inputs, sin keeps it float32


def with_aux(w, x):
    y = jnp.tanh(x @ w)
    return y.sum(), {"mean": y.mean(0)}


def dropout(w, x, key):
    keep = jax.random.bernoulli(key, 0.5, x.shape)
    inner = jax.checkpoint(lambda x, key: x * jnp.sin(jax.random.normal(key, x.shape)))
    return inner(jnp.where(keep, x @ w, 0), jax.random.split(key)[0]).sum()


def integers(w, x, rows):
    return jnp.tanh(w[rows] + x.sum()).sum()


def empty(w, x):
    return jnp.tanh(x[:0] @ w).sum() + jnp.sin(w).sum()


def with_constants(w, x):
    return jnp.sum(jnp.tanh(w * CONSTANT) * CONSTANT * 3.0)


CONSTANT = np.arange(64, dtype=np.float32).reshape(8, 8)


PROGRAMS = {
    "mlp": (mlp, (MLP, X), False),
    "scan": (scanned, (W, X), False),
    "remat": (rematerialised, (W, X), False),
    "cond": (branching, (W, X), False),
    "custom_vjp": (with_custom_vjp, (W, X), False),
    "dropout keys": (dropout, (W, X, jax.random.key(0)), False),
    "integers": (integers, (W, X, jnp.array([1, 2])), False),
    "empty": (empty, (W, X), False),
    "constants": (with_constants, (W, X), False),
    "something beside the loss": (with_aux, (W, X), True),
}


def compiled_bytes(function, args, has_aux):
    """Bytes that the compiled linearisation puts out besides results and arguments."""

    def program(params, *rest):
        return jax.vjp(lambda params: function(params, *rest), params, has_aux=has_aux)

    def kept(*args):
        return jax.tree.leaves(program(*args)[1])

    quickly = {"xla_backend_optimization_level": 0}
    compiled = jax.jit(program).lower(*args).compile(quickly)
    results, vjp, *aux = jax.eval_shape(program, *args)
    n_leaves = len(jax.tree.leaves((results, vjp, aux)))
    jaxpr = jax.make_jaxpr(kept)(*args).jaxpr
    arguments = {*jaxpr.invars, *jaxpr.constvars}
    is_argument = [not hasattr(v, "val") and v in arguments for v in jaxpr.outvars]
    passed = [x for x, own in zip(jax.tree.leaves(vjp), is_argument, strict=True) if own]
    known = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((results, aux, passed)))
    # A tuple of several results holds a pointer to each.
    pointers = 8 * n_leaves if n_leaves > 1 else 0
    return compiled.memory_analysis().output_size_in_bytes - pointers - known


@pytest.mark.parametrize("policy", ["float32", F16])
@pytest.mark.parametrize("name", in_full(PROGRAMS.keys(), one_of=2))
def test_residuals_are_the_bytes_that_the_compiled_linearisation_puts_out(name, policy):
    function, args, has_aux = PROGRAMS[name]
    found = report(function, *args, policy=policy, has_aux=has_aux)
    expected = compiled_bytes(jmp.autocast(function, policy), args, has_aux)
    assert kept_bytes(found) == expected


def test_residuals_in_float64():
    args = np.ones((8, 8)), np.ones((4, 8))
    with jax.enable_x64(True):
        found = report(scanned, *args)
        assert kept_bytes(found) == compiled_bytes(scanned, args, False)
        assert found.parameter_bytes == {"float64": 512}
        assert {row.dtype for row in found.residuals} == {"float64"}
    assert report(scanned, *args).parameter_bytes == {"float32": 256}  # as JAX takes them


# Where residuals come from.


def line(function, offset):
    return f"test_memory_report.py:{function.__code__.co_firstlineno + offset}"


def test_rows_name_module_line_and_operation():
    found = report(mlp, MLP, X).residuals
    assert {row.module for row in found if row.operation == "tanh"} == {"layer"}
    row = next(row for row in found if row.operation == "tanh" and row.shape == (4, 8))
    assert row.source.endswith(line(mlp, 3))
    assert (row.dtype, row.times, row.bytes) == ("float32", 2, 256)
    assert any(row.module == "" and row.source.endswith(line(mlp, 4)) for row in found)


def test_carries_that_change_places_are_followed():
    def loss(w, x):
        def body(carry, _):
            a, b = carry
            return (b, jnp.exp(a @ w)), a

        return jax.lax.scan(body, (x, 2 * x), None, length=4)[1].sum()

    found = report(loss, W, X)
    assert kept_bytes(found) == compiled_bytes(loss, (W, X), False)
    assert {row.operation for row in found.residuals if row.shape[0] == 4} >= {"exp"}
    assert not any(row.of_parameters for row in found.residuals)


def test_what_stands_in_loops_jit_remat_branches_and_custom_rules_is_followed():
    def inner(x):
        with jax.named_scope("inner"):
            return jnp.sin(x)

    def loss(w, x):
        saved = jax.checkpoint_policies.everything_saveable
        y = jax.checkpoint(inner, policy=saved)(jax.jit(inner)(x @ w))
        y = jax.lax.cond(x.sum() > 0, inner, jnp.negative, y)
        return jax.lax.scan(lambda h, _: (inner(h @ w), None), y, None, length=5)[0].sum()

    found = [row for row in report(loss, W, X).residuals if row.operation == "cos"]
    assert sorted((row.shape, row.times) for row in found) == [((4, 8), 3), ((5, 4, 8), 1)]
    assert all(row.module == "inner" and row.source.endswith(line(inner, 2)) for row in found)
    (row,) = (row for row in report(with_custom_vjp, W, X).residuals if row.operation == "cos")
    assert row.source.endswith(line(with_custom_vjp, -5))


def test_options_of_autocast_hold():
    half = report(mlp, MLP, X, policy=F16).activation_bytes
    wide = report(mlp, MLP, X, policy=F16, rules=[("layer", "float32")]).activation_bytes
    assert wide["float32"] > half["float32"] and half["float16"] > wide.get("float16", 0)


def test_half_copies_of_parameters_are_no_activations():
    params = {"layers": [jnp.ones((64, 64))] * 3}
    small, large = (report(mlp, params, jnp.ones((b, 64)), policy=F16) for b in (32, 64))
    # The first layer keeps none: x needs no gradient.
    assert small.copy_bytes == large.copy_bytes == {"float16": 2 * 2 * 64 * 64}
    assert large.parts["activations"] == 2 * small.parts["activations"] > 0
    assert large.activations == 2 * small.activations
    both = small.parts["activations"] + small.parts["copies of parameters"]
    assert both == kept_bytes(small)


def test_copies_made_inside_a_loop_are_copies():
    def loss(stacked, x):
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, stacked)[0].sum()

    found = report(loss, jnp.ones((6, 8, 8)), X, policy=F16)
    assert found.copy_bytes == {"float16": 6 * 8 * 8 * 2}
    assert found.activation_bytes
    assert {row.shape[1:] for row in found.residuals if row.of_parameters} <= {(8, 8)}


def test_frozen_weights_have_a_row_of_their_own_and_their_copies_are_no_activations():
    def loss(adapters, backbone, x):
        for w, (a, b) in zip(backbone, adapters, strict=True):
            x = jnp.tanh(x @ w.astype(jnp.float32) + x @ a @ b)
        return x.sum()

    adapters = [(jnp.ones((64, 2)), jnp.ones((2, 64)))] * 3
    backbone = [jnp.ones((64, 64), jnp.bfloat16)] * 3
    counted = lambda rows, **more: report(
        loss, adapters, backbone, jnp.ones((rows, 64)), policy=F16, **more
    )
    small, large = counted(32, frozen=1), counted(64, frozen=1)
    assert small.frozen_bytes == {"bfloat16": 3 * 64 * 64 * 2}
    assert small.parts["frozen parameters"] == 3 * 64 * 64 * 2
    assert small.parameter_bytes == small.gradient_bytes == {"float32": 3 * 2 * 64 * 2 * 4}
    # The backbone of the first layer needs no copy: x needs no gradient.
    copies = 2 * 64 * 64 * 2
    assert small.copy_bytes["float16"] == large.copy_bytes["float16"] >= copies
    assert large.parts["activations"] == 2 * small.parts["activations"] > 0
    assert small.total_bytes == sum(small.parts.values())
    assert re.search("frozen parameters +24.6 kB", compare_memory({"lora": small}))
    assert "frozen" not in str(report(mlp, MLP, X))
    # Not named, they are data: their copies look like activations.
    unnamed = counted(32)
    assert unnamed.parts["frozen parameters"] == 0
    assert unnamed.parts["activations"] >= small.parts["activations"] + copies


def test_frozen_arguments_that_are_trained_are_refused():
    with pytest.raises(ValueError, match="a trained one is not frozen"):
        report(mlp, MLP, X, frozen=(1, -2))


# State.


def test_parameters_and_gradients_by_dtype():
    params = {"w": W, "half": jnp.ones(3, jnp.bfloat16), "steps": jnp.arange(5), "none": None}
    found = report(lambda p, x: (x @ p["w"]).sum() + p["half"].sum(), params, X)
    assert found.parameter_bytes == {"bfloat16": 6, "float32": 256, "int32": 20}
    assert found.gradient_bytes == {"bfloat16": 6, "float32": 256}
    assert found.parameters == 64 + 3


@pytest.mark.parametrize("optimizer", [None, optax.adam(1e-3)])
def test_parameters_in_the_other_byte_order_are_counted_as_jax_takes_them(optimizer):
    found, expected = (
        report(lambda w, x: (x @ w).sum(), w, X, policy=F16, optimizer=optimizer)
        for w in (np.ones((8, 8), ">f4"), W)
    )
    assert found.parts == expected.parts and found.optimizer_bytes == expected.optimizer_bytes


def test_the_optimizers_state_and_its_masters():
    count = {"int32": 4}
    found = report(mlp, MLP, X, optimizer=optax.adam(1e-3))
    assert found.optimizer_bytes == {"float32": 8 * found.parameters, **count}
    half = jmp.cast_to_half(MLP)
    tx = transforms.with_master_params(optax.adam(1e-3))
    found = report(mlp, half, X, optimizer=tx)
    # Two moments, and masters of 4 bytes.
    assert found.optimizer_bytes == {"float32": 12 * found.parameters, **count}
    tx = transforms.with_loss_scale(optax.chain(tx), jmp.DynamicLossScale(2.0**15))
    scaled = report(mlp, half, X, optimizer=tx).optimizer_bytes
    assert 0 < scaled["float32"] - 12 * found.parameters < 100  # the scale


def test_argnums_choose_the_parameters():
    loss = lambda x, w, b: jnp.tanh(x @ w * b[None]).sum()
    momentum = optax.sgd(0.1, momentum=0.9)
    found = report(loss, X, W, jnp.ones(8), argnums=(1, -1), optimizer=momentum)
    assert found.parameters == 64 + 8
    assert found.optimizer_bytes == {"float32": 4 * 72}


# XLA, shapes, other forms.


def test_xla_figures_stand_beside_what_was_counted():
    args = {"layers": [jnp.ones((64, 64))] * 4}, jnp.ones((256, 64))
    found = memory_report(mlp)(*args)
    expected = jax.jit(jax.value_and_grad(mlp)).lower(*args).compile().memory_analysis()
    assert found.xla_temp_bytes == expected.temp_size_in_bytes > 0
    held = expected.argument_size_in_bytes + expected.output_size_in_bytes
    assert found.xla_peak_bytes == held + found.xla_temp_bytes
    without = report(mlp, *args)
    assert (without.xla_temp_bytes, without.xla_peak_bytes) == (None, None)
    assert without.residuals == found.residuals
    # Results need be no scalars to be compiled.
    several = lambda w, x: ({"y": jnp.tanh(x @ w), "rows": jnp.arange(3)}, "words")
    found = memory_report(several, has_aux=True)(W, X)
    assert found.xla_peak_bytes > found.xla_temp_bytes >= 0


def test_a_backend_that_does_not_say_leaves_xlas_figures_out(monkeypatch):
    def memory_analysis(self):
        raise NotImplementedError  # so the backend says it to JAX, which returns None

    monkeypatch.setattr(stages.Executable, "memory_analysis", memory_analysis)
    found = memory_report(scanned)(W, X)
    assert (found.xla_temp_bytes, found.xla_peak_bytes) == (None, None)
    assert "XLA" not in str(found)


def test_nothing_is_run_and_bytes_are_exact_beyond_any_memory():
    size = 10**7
    w = jax.ShapeDtypeStruct((size, size), jnp.float32)
    x = jax.ShapeDtypeStruct((size,), jnp.float32)
    found = report(lambda w, x: jnp.sum(jnp.sin(w) * x[None]), w, x, optimizer=optax.adam(1e-3))
    assert found.parameters == 10**14
    assert found.optimizer_bytes["float32"] == 8 * 10**14
    assert found.copy_bytes["float32"] >= 4 * 10**14  # computed only from parameters
    assert "4e+14" not in str(found) and "400 TB" in str(found)


# How it is shown.
