"""The modelled limit against operations and bytes worked out by hand."""

import functools
import math

import jax
import jax.numpy as jnp
import pytest

from benchmarks import _roofline
from benchmarks._roofline import modelled_limit
from testbed.machines.hlo import kernels
from tests.h200.fixture import spec
from tests.products import convolved

half = functools.partial(spec, dtype=jnp.float16)


def operations(program):
    """Returns the operations of every library call of a program, in order."""
    return [count for count in map(_roofline.operations, kernels(program.text)) if count]


def value_and_gradients(function):
    """Returns a function of arguments and the cotangent of the result."""

    def both(*arguments):
        *inputs, outputs = arguments
        value, vjp = jax.vjp(function, *inputs)
        return value, vjp(outputs)

    return both


# model ms of one launch; of bytes; of operations in half, TF32 and float32 products
LAUNCH, BYTE, HALF, TF32, FLOAT32 = (
    1e3 * s for s in (1e-6, 1 / 4.8e12, 1 / 989e12, 1 / 494e12, 1 / 67e12)
)


def test_of_a_large_product_the_operations_decide(h200):
    program = h200(jnp.matmul, half(2048, 4096), half(4096, 8192))
    limit = {"bytes": 0, "operations": 2 * 2048 * 4096 * 8192 * HALF, "launches": LAUNCH}
    assert modelled_limit(program.text) == pytest.approx(limit)


def test_of_a_product_with_few_rows_the_bytes_decide(h200):
    program = h200(jnp.matmul, half(8, 4096), half(4096, 8192))
    moved = 2 * (8 * 4096 + 4096 * 8192 + 8 * 8192)
    assert moved * BYTE > 2 * 8 * 4096 * 8192 * HALF
    assert modelled_limit(program.text)["bytes"] == pytest.approx(moved * BYTE)
    assert operations(program) == [2 * 8 * 4096 * 8192]


def test_of_a_fusion_the_bytes_decide_and_each_kernel_is_launched(h200):
    program = h200(lambda a, b: (jnp.tanh(a), jnp.tanh(b)), half(1000), half(10, 10))
    limit = modelled_limit(program.text)
    assert limit["operations"] == 0
    assert limit["bytes"] == pytest.approx(2 * 2 * (1000 + 100) * BYTE)
    assert limit["launches"] == pytest.approx(program.kernels * LAUNCH)


@pytest.mark.parametrize(("precision", "rate"), [("default", TF32), ("highest", FLOAT32)])
def test_float32_products_are_those_of_tf32_unless_they_are_exact(h200, precision, rate):
    product = lambda a, b: jnp.matmul(a, b, precision=precision)
    matrix = spec(4096, 4096)
    limit = modelled_limit(h200(product, matrix, matrix).text)
    assert limit["operations"] == pytest.approx(2 * 4096**3 * rate)


def test_a_batch_of_products_is_as_many_products(h200):
    products = lambda a, b: jnp.einsum("bmk,bnk->bmn", a, b)
    program = h200(products, half(6, 128, 64), half(6, 256, 64))
    assert operations(program) == [2 * 6 * 128 * 256 * 64]


def test_a_strided_convolution_and_its_gradients_take_as_many_operations(h200):
    gradients = value_and_gradients(functools.partial(convolved, strides=(2, 2)))
    program = h200(gradients, half(8, 32, 32, 64), half(3, 3, 64, 128), half(8, 16, 16, 128))
    # For each output a filter of nine places and 64 channels.
    assert operations(program) == [2 * (8 * 16 * 16 * 128) * (9 * 64)] * 3


@pytest.mark.parametrize(("causal", "keys"), [(False, 256), (True, 128)])
def test_attention_takes_two_products_and_its_gradient_five(h200, causal, keys):
    batch, queries, heads, width = 2, 128, 4, 32

    attend = functools.partial(
        jax.nn.dot_product_attention, is_causal=causal, implementation="cudnn"
    )
    of_queries, of_keys = (half(batch, length, heads, width) for length in (queries, keys))
    program = h200(value_and_gradients(attend), of_queries, of_keys, of_keys, of_queries)
    product = 2 * math.prod((batch, heads, queries, keys, width)) // (2 if causal else 1)
    assert operations(program) == [2 * product, 5 * product]


CALL = """
ENTRY %main (a: f16[8,8]) -> f16[8,8] {{
  %a = {dtype}[8,8]{{1,0}} parameter(0)
  ROOT %call = f16[8,8]{{1,0}} custom-call(%a, %a), custom_call_target="{target}", \
backend_config={{"gemm_backend_config":{{"dot_dimension_numbers":\
{{"lhs_contracting_dimensions":["1"]}}}}}}
}}
"""


def test_a_library_call_that_nobody_counted_is_refused():
    with pytest.raises(ValueError, match=r"'__cudnn\$norm'; expected one .*__cublas"):
        modelled_limit(CALL.format(dtype="f16", target="__cudnn$norm"))
    with pytest.raises(ValueError, match="a library call on f8e4m3fn; expected one of f16"):
        modelled_limit(CALL.format(dtype="f8e4m3fn", target="__cublas$lt$matmul$f8"))
