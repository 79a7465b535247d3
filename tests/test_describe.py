"""Short texts for messages: nothing that a user gives makes one long."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp
from jmp import transforms
from jmp._messages import described, did_you_mean, listed, where_trees_differ

TREE = {f"layer_{i}": {"kernel": np.ones((2, 3)), "bias": [1.0] * 50} for i in range(1000)}
STATE = transforms.with_loss_scale(optax.adam(1e-3), jmp.DynamicLossScale(8.0)).init(
    {name: {"kernel": np.ones((2, 3))} for name in list(TREE)[:100]}
)
NESTED = functools.reduce(lambda tree, _: [tree, tree], range(30), 1.0)


@pytest.mark.parametrize(
    "value",
    [
        "p=" * 5_000_000,
        b"0" * 10_000_000,
        10**6000,
        np.ones(10**6),
        TREE,
        NESTED,
        list(TREE),
        set(TREE),
        {"k" * 10_000: TREE},
        range(10**9),
        STATE,
        functools.partial(print, np.ones(10**6)),
        type("C" * 10_000, (), {}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_description_is_short_whatever_it_describes(value):
    assert len(described(value)) <= 240
    assert "\n" not in described(value)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "None"),
        (np.float32(2), "float32[] of value 2.0"),
        (jnp.ones((2, 3), jnp.bfloat16), "bfloat16[2,3]"),
        (jax.random.key(0), "key<fry>[]"),
        ((jnp.ones(3),), "(float32[3],)"),
        ({"a": [1, {"b": 2}]}, "{'a': [1, {...}]}"),
        (optax.EmptyState(), "an EmptyState"),
        (jmp.StaticLossScale, "the class StaticLossScale"),
        (jmp.StaticLossScale(8).scale, "the method scale"),
        (functools.partial(len), "a partial"),
        (jax.ShapeDtypeStruct((2,), "float32"), "ShapeDtypeStruct float32[2]"),
        (np, "a module"),
        (object(), "an object"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,  # no addresses
)
def test_a_description_says_kind_dtype_shape_and_structure(value, text):
    assert described(value) == text


def test_a_traced_value_is_described_without_waiting_for_it():
    seen = []
    jax.eval_shape(lambda x: seen.append(described({"x": x})), jnp.ones(2))
    assert seen == ["{'x': traced float32[2]}"]


def test_a_donated_array_is_described():
    x = jnp.ones(())
    x.delete()
    assert described(x) == "deleted float32[]"


def test_differences_of_trees_name_a_few_paths():
    assert where_trees_differ(TREE, {}).endswith("and 50,997 more")
    assert where_trees_differ({"a": {}}, {"a": ()}).startswith("same paths, other containers")
    assert len(where_trees_differ(TREE, {"x" * 1000: 1.0})) < 400
    assert listed(TREE, most=2) == "'layer_0', 'layer_1' and 998 more"


def test_every_name_that_is_suggested_is_known():
    known = ["mixed_float16", "mixed_bfloat16", "O1", "f16", "float16", "bfloat16", "float32"]
    for text in ("fp16", "bf16-mixed", "o1", "Float16", "float 16", "mixed_f16", "np.float32"):
        hint = did_you_mean(text, known)
        for name in hint.removeprefix(" Did you mean ").removesuffix("?").split(" or "):
            jmp.get_policy(name.strip("'"))
    assert did_you_mean("int8", ["float16"]) == ""
    assert did_you_mean("O5", known) == ""  # of Apex: half parameters with masters
    assert did_you_mean("X" + " " * 10**6, ["x"]) == " Did you mean 'x'?"
