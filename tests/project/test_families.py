"""The families: each traces, its half text has half products, and its gradients are right."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import families
from benchmarks.families import FAMILIES, step_of
from tests.commands import in_full
from tests.products import product_dtypes

# By hand these too have products of float32: sums over Mamba's states, complex waves.
OTHER_PRODUCTS = {"mamba": {"float32"}, "fourier-operator": {"complex64"}}
# In float16 their gradients have lost more digits by hand: of small cotangents, or of ReLUs and
# maxima that another number decides.
TOLERANCE = 0.03
OTHER_TOLERANCES = {"densenet": 0.04, "forces": 0.15, "gradient-penalty": 0.06}

pytestmark = pytest.mark.usefixtures("users_rank_promotion", "quick_compilation")


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_the_text_of_a_family_has_half_products_in_half_and_float32_ones_in_float32(family):
    params, inputs = jax.eval_shape(lambda: families.drawn(family, 2, family.small))
    others = OTHER_PRODUCTS.get(family.name, set())
    for dtype in ("float16", "float32"):
        step = step_of(family, dtype, "", 2, family.small)
        found = product_dtypes(step, params, *inputs)
        assert dtype in found
        assert not found.keys() - {dtype} - others


@pytest.mark.parametrize("family", in_full(FAMILIES, but=("gru", "physics", "message-passing")))
def test_gradients_are_finite_and_those_of_float32_to_a_few_percent(family):
    params, inputs = families.drawn(family, 2, family.small)
    ways = ("float32", families.BASE, "autocast")

    @jax.jit
    def gradients(params, inputs):
        return [step_of(family, way, "float16", 2, family.small)(params, *inputs) for way in ways]

    exact, *halves = (jnp.concatenate(list(map(jnp.ravel, found)))
                      for _, found in gradients(params, inputs))  # fmt: skip
    assert np.linalg.norm(exact) > 0
    for half in halves:
        error = np.linalg.norm(half - exact) / np.linalg.norm(exact)
        assert error <= OTHER_TOLERANCES.get(family.name, TOLERANCE)  # nor is NaN
