"""A sample of the sweep over code that nobody here wrote; `benchmarks/op_sweep.py` runs it all."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks import op_sweep

pytestmark = pytest.mark.full

# Functions of every module, and JAX's own harnesses, by what a primitive does.
FUNCTIONS = """
jax.numpy.abs jax.numpy.argsort jax.numpy.average jax.numpy.concatenate jax.numpy.convolve
jax.numpy.cov jax.numpy.cumsum jax.numpy.diff jax.numpy.einsum jax.numpy.gradient
jax.numpy.digitize jax.numpy.hypot jax.numpy.clip jax.numpy.kron jax.numpy.logaddexp
jax.numpy.median jax.numpy.nanstd jax.numpy.outer jax.numpy.polyval jax.numpy.searchsorted
jax.numpy.select jax.numpy.sinc jax.numpy.spacing jax.numpy.trapezoid jax.numpy.var
jax.numpy.linalg.norm jax.numpy.fft.irfft jax.nn.celu jax.nn.gelu jax.nn.glu
jax.nn.logsumexp jax.nn.standardize jax.lax.erf jax.lax.integer_pow jax.lax.scatter_apply
jax.lax.cond jax.lax.reduce jax.scipy.special.entr jax.scipy.special.xlog1py
jax.scipy.linalg.solve_triangular jax.scipy.signal.detrend jax.scipy.stats.norm.logcdf
jax.scipy.stats.t.logpdf
""".split()
HARNESSES = """
add_any argmax clamp conv_general_dilated cumprod dot_general dynamic_update_slice gather
logistic nextafter pad reduce_max reduce_prod rem scatter_add scatter_max select_n sort tanh
""".split()


@pytest.fixture(scope="module")
def cases():
    found = {name: make for name, make in op_sweep.function_cases() if name in FUNCTIONS}
    for name, make in op_sweep.harness_cases(1):
        for group in HARNESSES:
            if name.startswith(f"harness {group}_"):
                found.setdefault(group, make)
    return found


@pytest.mark.parametrize("number", range(len(FUNCTIONS + HARNESSES)))
def test_between_two_products(cases, number, quick_compilation):
    name = (FUNCTIONS + HARNESSES)[number]
    policy = ("mixed_float16", "mixed_bfloat16")[number % 2]
    with jax.numpy_rank_promotion("allow"):
        report = op_sweep.check(cases[name](), [policy], ["between"])
    assert report.get("failures") == [], (name, report)


def test_the_sweep_sees_what_cannot_be_right(quick_compilation):
    def loses_everything(x):
        return jnp.maximum(x * 1e-4 + jnp.cos(0 * x), 0.0) - 1.0  # nobody knows that it adds one

    case = op_sweep.case_of("", "", loses_everything, [op_sweep.MATRIX])
    failure, *_ = op_sweep.check(case, ["mixed_float16"], ["between"])["failures"]
    assert failure.startswith("mixed_float16 between: result 0: off by")


def test_the_sweep_says_why_it_cannot_try(quick_compilation):
    def fails(x):
        raise RuntimeError

    case = op_sweep.case_of("", "", fails, [op_sweep.MATRIX])
    assert op_sweep.check(case)["untried"] == "float32 fails: RuntimeError"
    assert op_sweep.case_of("", "", fails, [3]).untried == "no float32 operand"
