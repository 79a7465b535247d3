"""Every row of the op table: against float64, and bit by bit against the casts it stands for."""

import runpy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jmp
from jmp.autocasting import Category, all_rules, register_rule
from jmp.autocasting._kinds import has_kind
from jmp.autocasting._registry import NO_RULE, rule_for
from testbed import ROOT
from testbed.op_cases import OP_CASES, OTHERS
from tests.commands import in_full
from tests.primitives import elementwise
from tests.products import equations_of, eye, named

NAMES = [name for name, _, _ in OP_CASES]
CASES = pytest.mark.parametrize(("name", "call", "inputs"), OP_CASES, ids=NAMES)
HALVES = (jnp.float16, jnp.bfloat16)
# Each case with a half type in turn, and then with the other one.
EVERY_OTHER_HALF, THE_OTHER_HALF = (
    {
        f"{name}-{half.__name__}": (*case, half)
        for place, (name, case) in enumerate(zip(NAMES, OP_CASES, strict=True))
        for half in [HALVES[(place + turned) % 2]]
    }
    for turned in (0, 1)
)


def rounded_by_a_product(x, half=None, dtype=None):
    """The same numbers as two products leave them: half, under autocast. Each sum has one term.

    By hand, products in `half` of what is read in `dtype`, with casts where autocast puts them.
    Two, because a product of only inputs stays float32 if a sine or `floor` reads it.
    """
    flat = jnp.reshape(x, (1, -1))
    assert flat.size > 1, "this would be a multiplication"
    weight = eye(flat.size).astype(half or x.dtype)
    product = flat.astype(half or x.dtype) @ weight @ weight
    return jnp.reshape(product.astype(dtype or x.dtype), x.shape)


def as_float32(results):
    cast = lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x
    return jax.tree.map(cast, results)


def with_casts(name, call, half):
    """The casts that a category stands for, written by hand behind the same product."""
    rule = rule_for(name)

    # The same product in front, so that both programs are compiled alike: a compiler may round the
    # last bit of an exponential one way in a vectorised loop, and the other way in its remainder.
    full = lambda *xs: call(*(rounded_by_a_product(x, half, jnp.float32) for x in xs))

    def product(*xs):
        return as_float32(call(*(rounded_by_a_product(x, half, half) for x in xs)))

    def rounded(*xs):
        return as_float32(jax.tree.map(lambda x: x.astype(half), full(*xs)))

    if rule.category in (Category.FULL, Category.AS_WRITTEN):
        return full
    return rounded if rule.sums_backward else product


@pytest.mark.parametrize(
    ("name", "call", "inputs", "half"), in_full(EVERY_OTHER_HALF | THE_OTHER_HALF, one_of=5)
)
def test_right_to_the_last_bit(name, call, inputs, half):
    policy = jmp.Policy(jnp.float32, half, jnp.float32)
    autocast = jmp.autocast(lambda *xs: call(*map(rounded_by_a_product, xs)), policy)
    got = jax.tree.leaves(jax.jit(autocast)(*inputs))
    by_hand = jax.tree.leaves(jax.jit(with_casts(name, call, half))(*inputs))
    for x, y in zip(got, by_hand, strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)
    if name == "bitcast_convert_type":
        return  # the bits of a float64 are others
    # A float32 computation on half inputs loses a few float32 roundings; a half one a few half
    # roundings (of operands, result and constants).
    in_float32 = rule_for(name).category in (Category.FULL, Category.AS_WRITTEN)
    bound = 2.0**-17 if in_float32 else 8 * float(jnp.finfo(half).eps)
    halves = [jnp.asarray(x, half) for x in inputs]
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x.astype(jnp.float32)), jnp.float64) for x in halves]
        oracle = jax.tree.map(np.asarray, jax.tree.leaves(call(*wide)))
    for x, y in zip(got, oracle, strict=True):
        error = np.abs(np.asarray(x).astype(y.dtype) - y) if y.dtype != bool else x != y
        assert np.max(error) <= bound * max(1.0, np.abs(y).max())


@CASES
def test_a_case_binds_the_primitive_it_names(name, call, inputs):
    bound = {e.primitive.name for e in equations_of(call, *inputs)}
    assert bound & {name, name.replace("-", "_")}, bound


def test_every_row_of_the_table_has_a_case_or_says_why_not():
    others = {name for names in OTHERS.values() for name in names.split()}
    ours = {name for name, rule in all_rules().items() if rule.owner.startswith("jmp.")}
    assert ours == {*NAMES, *others}
    assert not others & set(NAMES)


# JAX's own that run as they were traced. A new version of JAX may bring others: give them a rule.
AS_TRACED = {
    "of integers": "mulhi",
    "compare the keys of a sort": "eq_to le_to lt_to",
    "of no numbers": "after_all axis_index create_token dce_sink stage",
    "reached by no public function": "select_and_scatter",
    "sends rows of different lengths": "ragged_all_to_all",
}


def test_every_primitive_of_jax_has_a_rule_or_runs_as_traced_for_a_reason():
    named = {value.name for name, value in vars(lax).items() if name.endswith("_p")}
    ruled = {name for name in named if has_kind(name) or rule_for(name) is not NO_RULE}
    assert len(ruled) > 130
    assert named - ruled <= {name for names in AS_TRACED.values() for name in names.split()}


def test_the_page_with_the_op_table_is_what_is_registered():
    script = runpy.run_path(str(ROOT / "docs" / "op_table.py"))
    assert script["PAGE"].read_text() == script["page"](), "run: python docs/op_table.py"


def test_every_rule_gives_its_reason():
    for rule in all_rules().values():
        assert rule.reason and not rule.reason.endswith(".")


@pytest.fixture
def cube():
    """A primitive of a user's own."""
    return elementwise("cube_for_tests", lambda x: x * x * x)


def operand_dtype(function, primitive, *args):
    (equation,) = named(primitive.name, function, *args)
    return equation.invars[0].aval.dtype


def test_a_primitive_without_a_rule_runs_as_it_was_traced(cube):
    function = lambda x: cube.bind(x @ x)
    x = jnp.eye(4)
    assert operand_dtype(jmp.autocast(function, "mixed_float16"), cube, x) == jnp.float32


@pytest.mark.parametrize(
    ("category", "dtype"),
    [("low", "float16"), ("full", "float32"), ("follow", "float16"), ("widest", "float16")],
)
def test_users_register_rules_for_their_primitives(cube, category, dtype):
    register_rule(cube, category, "for the test")
    function = lambda x: cube.bind(x @ x)
    assert operand_dtype(jmp.autocast(function, "mixed_float16"), cube, jnp.eye(4)) == dtype
    np.testing.assert_array_equal(jmp.autocast(function, "mixed_float16")(jnp.eye(4)), jnp.eye(4))
