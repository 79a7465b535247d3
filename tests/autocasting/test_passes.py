"""Passes: each acts where it should, and changes no other numbers than it claims."""

import ast
import pathlib
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jmp
from jmp.autocasting._passes import HardwareTarget, register_target
from jmp.autocasting.targets.gpu import GPU
from jmp.autocasting.targets.tpu import TPU
from jmp.diagnostics import precision_report
from testbed.machines.gpus import as_if_cudnn
from testbed.passes import replaced, targets, without_pass
from testbed.small_products import small_is_float8
from tests.errors import assert_near

CORE = pathlib.Path(jmp.autocasting.__file__).parent
ADDED = ("attention", "float8", "targets")
PASSES = [(target, one) for target in targets() for one in target.passes]
NAMES = [f"{target.platform}: {one.name}" for target, one in PASSES]
SMALL = {"_islands.SMALL": 256, "targets._cross_entropy.LARGE": 1, "targets._zeros.LARGE": 1}


def normal(key, *shape):
    return jax.random.normal(jax.random.key(key), shape)


W, V, U = normal(0, 64, 64) / 8, normal(1, 64, 64) / 8, normal(2, 64, 64) / 8
X = normal(3, 32, 64)
LABELS = jnp.arange(32) % 64


def classes(w, x):
    log_p = jax.nn.log_softmax(jnp.tanh(x @ w) @ V)
    return -jnp.take_along_axis(log_p, LABELS[:, None], 1).mean()


gelu = lambda w, x: jnp.mean((jax.nn.gelu(x @ w) @ V) ** 2)


def three_products(w, x):
    x = jnp.tile(x, (8, 1))  # so that results are larger than weights
    return jnp.mean((jax.nn.gelu(x @ w + jnp.linspace(-1, 1, 64)[None]) @ V @ U) ** 2)


def attention(length):
    def loss(w, x):
        q, k, v = jnp.split(x[:length] @ jnp.concatenate([w, V, U], 1), 3, -1)
        return jnp.mean((jax.nn.softmax(q @ k.T / 8) @ v) ** 2)

    return loss


def long_attention(w, x):
    k = jnp.tile(x, (4, 1))  # 128 keys, as long as the vectors of a TPU
    return jnp.mean((jax.nn.softmax(x @ w @ k.T / 8) @ k) ** 2)


def heads(w, x):
    x = jnp.tile(x, (4, 2))  # 128 tokens of width 128, as a TPU's kernel asks for
    q, k, v = (jnp.stack([x @ jnp.tile(m, (2, 2))] * 2)[..., None, :] for m in (w, V, U))
    return jnp.mean(jax.nn.dot_product_attention(q, k, v) ** 2)


biased = lambda w, x: jnp.mean((jnp.tanh(x @ V + w[:1]) @ U) ** 2)


def spreading(w, x):
    image, kernel = x.reshape(2, 16, 16, 4), w[:6, :6].reshape(3, 3, 2, 2).repeat(2, 2)
    return jnp.mean(lax.conv_transpose(image, kernel, (2, 2), "SAME") ** 2)


def differentiated(w, x):
    image, kernel = x.reshape(2, 4, 16, 16), w[:12, :12].reshape(4, 4, 3, 3)
    total = lambda image: jnp.sum(jnp.sin(lax.conv(image, kernel, (1, 1), "SAME")))
    return jnp.mean(jax.grad(total)(image) ** 2)


def gathered(w, x):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec

    def layer(w, x):
        w = lax.all_gather(w, "d", axis=0, tiled=True)
        return jnp.tanh(x @ w) @ V

    map_over = jax.shard_map(layer, mesh=mesh, in_specs=(spec("d"), spec("d")), out_specs=spec("d"))
    return jnp.mean((map_over(w, x) @ U) ** 2)


def biased_turns(w, x):
    bias = w.mean(0)
    turn = lambda y, _: (jnp.tanh(y @ V + bias[None]), None)
    return jnp.mean((lax.scan(turn, x, None, length=3)[0] @ U) ** 2)


looked_up = lambda w, x: jnp.mean((jnp.tanh(x @ w)[jnp.arange(0, 32, 2)] @ U) ** 2)


def pooled(w, x):
    return jnp.mean((jnp.max(jnp.minimum(x @ w, 0.25), 0, keepdims=True) @ U) ** 2)  # with ties


def pushed(w, x):
    energy = lambda x: jnp.sum(jax.nn.softplus(x @ w) @ U)
    return jnp.mean(jax.grad(energy)(x) ** 2)


def curved(w, x):
    energy = lambda x: jnp.sum(jax.nn.gelu(x @ w) @ U)
    return jnp.mean(jax.grad(energy)(x) ** 2)


def messages(w, x):
    rows = (x @ w)[LABELS] * 0.5
    return jnp.mean((jax.ops.segment_sum(rows, LABELS, 32) @ V) ** 2)


def spectral(w, x):
    y = jax.nn.gelu(x @ w)
    return jnp.mean((jax.nn.gelu(y @ V + jnp.fft.irfft(jnp.fft.rfft(y.T)).T) @ U) ** 2)


def recurrent(w, x):
    turn = lambda state, row: (jnp.tanh(state @ w + row), None)
    return jnp.mean((lax.scan(turn, x, jnp.stack([x, -x, x]))[0] @ U) ** 2)


# Where each pass acts, and the options of autocast that it takes.
PROGRAMS = {
    "float32 gradients": (biased, {}),
    "float8 products": (three_products, {}),
    "float8 is sent": (gathered, {}),
    "float8 bounds": (three_products, {"float8": "all"}),
    "scaled scores": (attention(32), {}),
    "maxima are compared in half": (pooled, {}),
    "rows that repeat few times": (looked_up, {}),
    "slopes of softplus": (pushed, {}),
    "slopes of bounded functions": (biased_turns, {}),
    "moves behind islands": (spectral, {}),
    "weights are summed after turns": (recurrent, {}),
    "pick as a sum": (classes, {}),
    "rows in one pass": (lambda w, x: jax.nn.logsumexp(jnp.tanh(x @ w) @ V, axis=1).mean(), {}),
    "softmax from its half result": (attention(32), {}),
    "padded softmax": (attention(29), {}),
    "prevent_cse": (gelu, {}),
    "biases are added in loops": (biased_turns, {}),
    "fused attention": (heads, {"attention": "fused"}),
    "softmax of half scores": (long_attention, {}),
    "biases add up by products": (biased, {}),
    "zeros of their own": (messages, {}),
    "bfloat16 is read by its bits": (curved, {}),
    "kernels are rounded before they are reversed": (differentiated, {}),
    "kernels of convolutions that spread": (spreading, {}),
}


@pytest.fixture(autouse=True)
def small():
    """What is small counts as large."""
    with replaced(SMALL), small_is_float8(), as_if_cudnn():
        yield


def numbers_and_program(target, name):
    """The loss of the program for a pass, its gradient, and the program as text."""
    fun, options = PROGRAMS[name]
    half = "mixed_bfloat16" if target is TPU or "bfloat16" in name else "mixed_float16"
    policies = {"float32 gradients": f"{half},r=f32", "scaled scores": "mixed_float16"}
    policy = policies.get(name, "mixed_float8" if "float8" in name else half)
    mixed = jmp.autocast(fun, policy, platform=target.platform, **options)
    gradient = jax.value_and_grad(mixed, argnums=(0, 1))
    gpus = ("cpu",) if target is GPU else ("cuda",)
    with mock.patch("jmp.autocasting.targets._cross_entropy.GPUS", gpus):
        # On a CPU XLA leaves out roundings of bfloat16 that it may leave out.
        run = jax.jit(gradient, compiler_options={"xla_allow_excess_precision": False})
        return run(W, X), str(jax.make_jaxpr(gradient)(W, X))


@pytest.mark.filterwarnings("ignore::jmp.Float16OnTpuWarning")
@pytest.mark.parametrize(("target", "one"), PASSES, ids=NAMES)
def test_a_pass_acts_and_changes_no_more_than_it_claims(target, one):
    found, program = numbers_and_program(target, one.name)
    with without_pass(one.name):
        expected, other_program = numbers_and_program(target, one.name)
    assert program != other_program
    assert_near(found, expected, 0.1 if one.changes else 0)


@pytest.mark.parametrize("name", ["pick as a sum", "softmax from its half result", "prevent_cse"])
def test_a_report_shows_the_program_after_each_pass(name):
    fun, _ = PROGRAMS[name]
    policy = "mixed_float16"
    report = precision_report(fun, policy, platform="gpu")(W, X)
    before = report.passes[report.passes.index(name) - 1]
    assert str(report.after(before)) != str(report.after(name))
    last = jax.make_jaxpr(jmp.autocast(fun, policy, platform="gpu"))(W, X)
    assert len(report.after(report.passes[-1]).eqns) == len(last.eqns)


def test_a_pass_that_a_target_does_not_have_is_named():
    report = precision_report(gelu, "mixed_float16", platform="gpu")(W, X)
    with pytest.raises(ValueError, match="no pass 'biases add up by products' for platform='gpu'"):
        report.after("biases add up by products")


@pytest.mark.parametrize(("names", "taken"), [(["gpu"], "'gpu'"), (["ascend"], "'neural'")])
def test_a_target_takes_no_other_name_and_no_name_of_another(names, taken):
    with pytest.raises(ValueError, match=f"register_target got.*{taken}"):
        register_target(names, HardwareTarget("gpu" if "gpu" in names else "neural", ()))


def test_the_core_imports_no_pass():
    """What a user asks for, and what one kind of hardware needs, can be left out or added."""
    for path in (*CORE.glob("*.py"), *CORE.glob("kinds/*.py")):
        if path.name == "__init__.py":  # it imports all, so that they are registered
            continue
        nodes = ast.walk(ast.parse(path.read_text()))
        imported = [node for node in nodes if isinstance(node, ast.ImportFrom)]
        folders = {str(x.module).removeprefix("jmp.autocasting.").split(".")[0] for x in imported}
        assert folders.isdisjoint(ADDED), path.name
