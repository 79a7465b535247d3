"""A new op rule, a new rewrite and a new kind of nested equation: one row, or one class, each."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import ad

import jmp
from jmp import diagnostics
from jmp.autocasting import register_rule
from jmp.autocasting._kinds import Kind, register_kind
from jmp.autocasting._passes import Pass
from jmp.autocasting._steps import Island, Rewrite, on
from testbed.passes import with_first
from tests.primitives import elementwise
from tests.products import named

W = jnp.eye(128)
X = jnp.linspace(-2, 2, 128 * 128).reshape(128, 128)


@pytest.fixture
def softsign():
    """A primitive of a user's: x / (1 + |x|), with its derivative."""
    primitive = elementwise("softsign_for_the_test", lambda x: x / (1 + abs(x)))
    ad.defjvp(primitive, lambda tangent, x: tangent / (1 + abs(x)) ** 2)
    return primitive


def dtypes_read_by(name, fun, *args):
    """The dtypes that the equations of one primitive read, at any depth."""
    return {str(atom.aval.dtype) for e in named(name, fun, *args) for atom in e.invars}


def test_a_new_rule_is_one_row(softsign):
    layers = lambda x: jnp.sum(softsign.bind(x @ W) @ W)
    autocast = jmp.autocast(layers, "mixed_float16")
    assert dtypes_read_by(softsign.name, autocast, X) == {"float32"}

    register_rule(softsign, "follow", "bounded by one, with bounded slope", "fusible bounded")

    autocast = jmp.autocast(layers, "mixed_float16")
    assert dtypes_read_by(softsign.name, autocast, X) == {"float16"}
    np.testing.assert_allclose(jax.grad(autocast)(X), jax.grad(layers)(X), atol=2e-3)


def test_the_parameter_of_a_new_product_says_its_dtype():
    product = Primitive("product_for_the_test")
    product.def_abstract_eval(lambda x, w, dtype: x.update(dtype=dtype))
    register_rule(product, "low", "runs on the tensor cores")

    autocast = jmp.autocast(lambda x: product.bind(x, W, dtype=X.dtype), "mixed_float16")
    (equation,) = named(product.name, autocast, X)
    assert equation.params["dtype"] == equation.invars[0].aval.dtype == jnp.float16


def test_a_new_rewrite_is_one_function():
    @on(Island)
    def reciprocal_root(island, level):
        """1 / sqrt(x) as rsqrt(x)."""
        found = {}
        for node in island.nodes:
            if node.name == "div" and node.inputs[0].constant == 1:
                root = node.inputs[1].producer
                if root in island.nodes and root.name == "sqrt":
                    why = "one over a root, in one operation"
                    found[node] = Rewrite(why, root.inputs, jax.lax.rsqrt)
        return island.rewritten(found)

    def layers(x):
        y = x @ W
        return jnp.sum((y * (1 / jnp.sqrt(1 + y**2))) @ W)

    before = jmp.autocast(layers, "mixed_float16")
    assert dtypes_read_by("rsqrt", before, X) == set()
    with with_first(Pass("reciprocal root", "roots", reciprocal_root)):
        after = jmp.autocast(layers, "mixed_float16")
        assert dtypes_read_by("rsqrt", after, X) == {"float32"}
        np.testing.assert_allclose(jax.grad(after)(X), jax.grad(before)(X), atol=1e-3)


class CustomVmap(Kind):
    """`jax.custom_batching.custom_vmap`, without its rule."""

    def functions(self, equation):
        return [equation.params["call"]]

    def emit(self, equation, operands, functions):
        return functions[0](*operands)


def test_a_new_kind_of_nested_equation_is_one_class():
    @jax.custom_batching.custom_vmap
    def layer(x):
        return jnp.tanh(x @ W)

    @layer.def_vmap
    def rule(axis_size, in_batched, x):
        return jax.vmap(lambda x: jnp.tanh(x @ W))(x), True

    layers = lambda x: jnp.mean(layer(x @ W) ** 2)
    report = lambda: diagnostics.precision_report(layers, "mixed_float16")(X)
    assert report().half_flops_share == 0.5

    register_kind(["custom_vmap_call"], CustomVmap())

    assert report().half_flops_share == 1
    autocast = jmp.autocast(layers, "mixed_float16")
    diagnostics.assert_products_in(autocast, jnp.float16)(X)
    np.testing.assert_allclose(autocast(X), layers(X), rtol=2e-3)


def test_a_second_kind_for_a_primitive_is_refused():
    with pytest.raises(ValueError, match="'scan' has a kind already, Scan"):
        register_kind(["my_loop", "scan"], CustomVmap())
