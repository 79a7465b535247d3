"""What users say to autocast: arguments, regions, rules, overrides, mistakes."""

import functools
import re
import warnings

import cloudpickle
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jmp
from tests.products import named, product_dtypes

F16 = "mixed_float16"
X = jax.random.normal(jax.random.key(0), (4, 8))
W = jax.random.normal(jax.random.key(1), (8, 8)) * 0.3


def loss(w, x):
    return (jnp.tanh(x @ w) @ w).sum()


def dtypes_of(primitive, function, *args):
    """The dtypes in which a primitive is bound, in the order of the program."""
    return [str(e.invars[0].aval.dtype) for e in named(primitive, function, *args)]


# Ways to call it.


def test_as_a_call_and_as_a_decorator():
    @jmp.autocast(policy=F16)
    def decorated(w, x):
        """Says what it does."""
        return loss(w, x)

    assert decorated(W, X) == jmp.autocast(loss, F16)(W, X)
    assert decorated.__name__ == "decorated"
    assert decorated.__doc__ == "Says what it does."


def test_a_builtin_without_a_signature():
    autocast = jmp.autocast(functools.reduce, F16)
    assert product_dtypes(lambda x: autocast(jnp.matmul, [x, W, W]), X) == {"float16": 2}


@pytest.mark.parametrize(
    "policy",
    ["O1", "params=f32,compute=f16,output=f16", jmp.Policy(jnp.float32, jnp.float16, jnp.float32)],
)
def test_any_policy_is_read_for_its_compute_dtype(policy):
    result = jmp.autocast(loss, policy)(W, X)
    assert result.dtype == jnp.float32
    assert result == jmp.autocast(loss, F16)(W, X)


def test_half_means_the_half_type_of_the_machine():
    half = jmp.half_dtype().__name__
    assert dtypes_of("dot_general", jmp.autocast(loss, "half"), W, X)[0] == half


def test_arguments_that_are_not_arrays_reach_the_function_as_they_are():
    seen = []

    def function(x, *, flag, name, callable_, number, nothing):
        seen.append((flag, name, callable_, number, nothing))
        return callable_(x @ W) if flag else x

    arguments = dict(flag=True, name="a", callable_=jnp.exp, number=2.5, nothing=None)
    jmp.autocast(function, F16)(X, **arguments)
    assert seen == [tuple(arguments.values())]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jnp.asarray(2.0),
        lambda x: jnp.asarray(3),
        lambda x: jnp.float32(2.0),
        lambda x: jnp.asarray(2.0) * 3.0,
        lambda x: (x @ W).sum(),
    ],
    ids=["weak", "weak integer", "strong", "computed", "product"],
)
def test_results_keep_weak_types(function):
    def weak(around, function):
        return [x.weak_type for x in jax.tree.leaves(jax.eval_shape(around(function), X))]

    autocast = jmp.autocast(function, F16)
    assert weak(jax.jit, autocast) == weak(jax.jit, function)
    assert autocast(X).weak_type == jax.jit(function)(X).weak_type
    if autocast(X).dtype == jnp.float32:
        for around in (jax.value_and_grad, lambda f: lambda x: jax.jvp(f, (x,), (x,))[0]):
            assert weak(around, autocast) == weak(around, function)


def test_constants_are_arrays_under_a_trace():
    seen = []

    def outer(x):
        seen.extend(jmp.autocast(lambda x: (jnp.array(True), jnp.zeros(()), 3), F16)(x))
        return x

    jax.jit(outer)(X)
    assert isinstance(seen[0], jax.Array) and isinstance(seen[1], jax.Array)
    assert seen[2] == 3


def test_numpy_arrays_and_keys_are_arrays_and_all_else_comes_back_as_it_is():
    key, names = jax.random.key(0), np.array(["a"])
    function = lambda x, key, names: (x @ W, key, names, {"name": "a", "n": 3, "f": jnp.exp})
    got = jmp.autocast(function, F16)(np.asarray(X), key, names)
    assert got[0].dtype == jnp.float32
    assert got[1] == key
    assert got[2] is names
    assert got[3] == {"name": "a", "n": 3, "f": jnp.exp}


# Sending it elsewhere.


def scoped(w, x):
    with jax.named_scope("tail"):
        return jnp.tanh(x @ w).sum()


OPTIONS = {"rules": [(re.compile("t.il"), "p=f32,c=f32,o=f16")], "full": ["tanh"]}


@pytest.mark.parametrize("policy", [F16, "mixed_bfloat16", "float32"])
def test_a_wrapped_function_can_be_pickled_after_a_call(policy):
    autocast = jmp.autocast(lambda w, x: scoped(w, x @ w), policy, apply_to=["w"], **OPTIONS)
    expected = autocast(W, X)
    restored = cloudpickle.loads(cloudpickle.dumps(autocast))
    assert restored(W, X) == expected
    assert dtypes_of("dot_general", restored, W, X) == dtypes_of("dot_general", autocast, W, X)


# Caching.


def test_an_eager_call_traces_once():
    traces = []

    def function(x, flag=True):
        traces.append(x.shape)
        return x @ W

    autocast = jmp.autocast(function, F16)
    for _ in range(3):
        autocast(X)
    assert len(traces) == 1
    autocast(X[:2])
    autocast(X, flag=False)
    assert len(traces) == 3
    autocast(X)
    assert len(traces) == 3


def test_under_a_trace_the_plan_is_bound_without_a_jit_around_it():
    found = named(("dot_general", "jit"), jmp.autocast(loss, F16), W, X)
    assert [e.primitive.name for e in found] == ["dot_general"] * 2


def test_a_gradient_taken_twice_traces_once():
    traces = []
    gradient = jax.grad(jmp.autocast(lambda w: (traces.append(1), (X @ w).sum())[1], F16))
    gradient(W)
    gradient(W)
    assert len(traces) == 1


def test_the_zeros_of_either_sign_are_two_arguments():
    autocast = jmp.autocast(lambda x, s: 1 / (x * s), F16)
    assert autocast(jnp.ones(()), 0.0) == jnp.inf
    assert autocast(jnp.ones(()), -0.0) == -jnp.inf


# Nothing to do, and more than once.


def test_float32_is_the_identity():
    autocast = jmp.autocast(loss, "float32")
    assert product_dtypes(autocast, W, X) == {"float32": 2}
    np.testing.assert_array_equal(autocast(W, X), loss(W, X))


def test_autocast_of_autocast_changes_nothing():
    once = jmp.autocast(loss, F16)
    twice = jmp.autocast(once, F16)
    assert product_dtypes(twice, W, X) == {"float16": 2}
    casts = [dtypes_of("convert_element_type", function, W, X) for function in (once, twice)]
    assert casts[0] == casts[1]
    np.testing.assert_array_equal(twice(W, X), once(W, X))


# Rules and overrides.


def test_a_rule_that_matched_nothing_warns():
    with pytest.warns(jmp.UnusedRuleWarning, match="'haed'"):
        jmp.autocast(loss, F16, rules=[("haed", "float32")])(W, X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jmp.autocast(loss, F16)(W, X)


def test_an_override_that_names_no_primitive_of_the_program_warns():
    words = "full= names 'softmax', which is no primitive"
    with pytest.warns(jmp.UnusedRuleWarning, match=words) as caught:
        jmp.autocast(loss, F16, full=["softmax"])(W, X)
    assert caught[0].filename == __file__


def blocks(x):
    with jax.named_scope("block"):
        x = x @ W
        with jax.named_scope("head"):
            return x @ W


def squared(x):
    y = x @ W
    return y * y @ W


def powers(x):
    return jnp.exp(jnp.tanh(x @ W)) @ W


def rounded(x):
    return jnp.tanh(x) @ W


def normed(x):
    return jax.nn.standardize(x @ W + x @ W.T) @ W


# A function, options, a primitive, and the dtypes in which it is bound.
ASKED = [
    (blocks, {"rules": [("head*", "float32")]}, "dot_general", ["float16", "float32"]),
    (squared, {}, "mul", ["float32"]),
    (squared, {"follow": ["mul"]}, "mul", ["float16"]),
    (powers, {"low": ["exp"]}, "exp", ["float16"]),
    (powers, {"follow": [jax.lax.exp_p]}, "exp", ["float16"]),
    (powers, {"full": ["dot_general"]}, "dot_general", ["float32", "float32"]),
    (powers, {}, "exp", ["float32"]),  # an override is that of one call
    # A sum in full is not moved in front of a norm.
    (normed, {"full": ["add"], "recompute": "all"}, "add", ["float32"] * 2),
    (rounded, {"apply_to": []}, "tanh", ["float32"]),
    (rounded, {"apply_to": ["x"]}, "tanh", ["float16"]),  # half from there on
]


@pytest.mark.parametrize(("function", "options", "primitive", "dtypes"), ASKED)
def test_rules_overrides_and_apply_to_decide_the_dtype(function, options, primitive, dtypes):
    assert dtypes_of(primitive, jmp.autocast(function, F16, **options), X) == dtypes


def test_what_holds_a_function_keeps_its_dtypes_whatever_is_asked_for():
    function = lambda x: (x @ W).at[jnp.array([0, 0])].add(1.0) @ W
    low = jmp.autocast(function, F16, low=["scatter-add"])
    assert dtypes_of("scatter-add", low, X) == ["float32"]
    np.testing.assert_allclose(low(X), function(X), atol=0.05)


def normalised(x):
    return jax.nn.softmax(x @ W) @ W


@pytest.mark.parametrize(("recompute", "kept"), [("auto", 0), ("none", 1)])
def test_recompute_auto_keeps_nothing_in_float32(recompute, kept):
    _, vjp = jax.vjp(jmp.autocast(normalised, F16, recompute=recompute), jnp.ones((4096, 8)))
    float32 = [x for x in jax.tree.leaves(vjp) if x.size == 4096 * 8 and x.dtype == jnp.float32]
    assert len(float32) >= kept if kept else not float32


# apply_to.


def test_apply_to_rounds_once_and_on_entry():
    autocast = jmp.autocast(lambda x: (x @ W) * (x @ W.T), F16, apply_to=["x"])
    jaxpr = jax.make_jaxpr(autocast)(X).jaxpr
    (cast,) = (equation for equation in jaxpr.eqns if jaxpr.invars[0] in equation.invars)
    assert (cast.primitive.name, cast.outvars[0].aval.dtype) == ("convert_element_type", "float16")


TENTH = jnp.float32(0.1)


def any_arguments(a, /, *rest, b, **others):
    return a, rest, b, others


@pytest.mark.parametrize(
    ("function", "name", "arguments", "keywords", "is_rounded"),
    [
        (any_arguments, "a", [TENTH] * 3, {"b": TENTH, "c": TENTH}, [1, 0, 0, 0, 0]),
        (any_arguments, "rest", [TENTH] * 3, {"b": TENTH, "c": TENTH}, [0, 1, 1, 0, 0]),
        (any_arguments, "b", [TENTH] * 3, {"b": TENTH, "c": TENTH}, [0, 0, 0, 1, 0]),
        (any_arguments, "others", [TENTH], {"b": TENTH, "c": TENTH, "d": "text"}, [0, 0, 1]),
        (lambda a, b: (a, b), "b", [TENTH, TENTH], {}, [0, 1]),
        (lambda a, b: (a, b), "b", [TENTH], {"b": TENTH}, [0, 1]),
        (lambda a, b: (a, b), "b", [], {"b": TENTH, "a": TENTH}, [0, 1]),
    ],
)
def test_apply_to_rounds_the_arguments_it_names(function, name, arguments, keywords, is_rounded):
    result = jmp.autocast(function, F16, apply_to=[name])(*arguments, **keywords)
    leaves = [leaf for leaf in jax.tree.leaves(result) if leaf != "text"]
    assert [leaf == jnp.float16(0.1) for leaf in leaves] == is_rounded
    assert [leaf != TENTH for leaf in leaves] == is_rounded


def test_apply_to_leaves_other_dtypes_alone():
    autocast = jmp.autocast(lambda x: x, F16, apply_to=["x"])
    x = {"i": jnp.arange(3), "b": jnp.ones(2, jnp.bfloat16), "f": jnp.full(2, 0.1), "s": "text"}
    result = autocast(x)
    assert result["b"].dtype == jnp.bfloat16
    assert result["i"].dtype == jnp.int32
    np.testing.assert_array_equal(result["f"], jnp.float16(0.1))


# Mistakes.


def test_rules_and_names_may_come_from_iterators():
    def program(given):
        options = {"rules": given([("head", "float32")]), "apply_to": given(["x"])}
        function = jmp.autocast(jax.named_call(loss, name="head"), F16, **options)
        return str(jax.make_jaxpr(function)(W, X))

    assert program(iter) == program(list)


def generator(x):
    yield x @ W


async def coroutine(x):
    return x @ W


async def asynchronous_generator(x):
    yield x @ W


@pytest.mark.parametrize("policy", [F16, "float32"])
@pytest.mark.parametrize("function", [generator, coroutine, asynchronous_generator])
def test_what_runs_later_than_it_is_called_is_refused(function, policy):
    kind = function.__name__.replace("_", " ")
    autocast = functools.partial(jmp.autocast, policy=policy)
    for name, wrap in (("autocast", autocast), ("full_precision", jmp.full_precision)):
        for given in (function, functools.partial(function)):
            with pytest.raises(TypeError, match=f"{name} got .*, an? {kind}: its body"):
                wrap(given)
        words = f"{name} got a function that returned an? .*: its body(.|\n)*wrap the f"
        for late in (lambda x: function(x), lambda x: {"results": function(x)}):
            with pytest.raises(TypeError, match=words):
                wrap(late)(X)


def test_an_nnx_module_whose_statistics_change_is_refused_and_left_as_it_was():
    module = nnx.BatchNorm(8, rngs=nnx.Rngs(0))
    before = np.asarray(module.mean[...])
    with pytest.raises(ValueError, match="changes one of its arguments(.|\n)*nnx.autocast"):
        jmp.autocast(lambda module, x: module(x).sum(), F16)(module, X)
    np.testing.assert_array_equal(module.mean[...], before)


def test_an_nnx_module_that_does_not_change_is_an_argument_like_any_other():
    module = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    autocast = jmp.autocast(lambda module, x: module(x).sum(), F16)
    assert nnx.grad(autocast)(module, X).kernel[...].dtype == jnp.float32
    np.testing.assert_allclose(autocast(module, X), module(X).sum(), rtol=0.02)


def test_a_state_of_equinox_that_may_be_used_once_is_an_argument():
    class Counter(eqx.Module):
        index: eqx.nn.StateIndex

        def __init__(self):
            self.index = eqx.nn.StateIndex(jnp.zeros(()))

        def __call__(self, x, state):
            return x @ W, state.set(self.index, state.get(self.index) + 1.0)

    counter, state = eqx.nn.make_with_state(Counter)()
    _, new = jmp.autocast(counter, F16)(X, state)
    assert new.get(counter.index) == 1.0


def test_an_error_of_the_function_itself_reaches_the_user():
    with pytest.raises(TypeError, match="dot_general requires contracting dimensions"):
        jmp.autocast(loss, F16)(W[:3], X)


def test_apply_to_takes_a_function_whose_decorator_fills_in_an_argument():
    def inner(w, x, shift):
        return x @ w + shift

    @functools.wraps(inner)
    def outer(w, x):
        return inner(w, x, 1.0)

    half = jmp.autocast(outer, "mixed_float16", apply_to=["x"])
    assert half(jnp.eye(2), jnp.full((1, 2), 1 + 2**-12)).tolist() == [[2.0, 2.0]]


def test_a_callback_may_follow_its_operands():
    def product(w, x):
        y = x @ w
        jax.debug.callback(lambda a: None, y)
        jax.debug.callback(lambda a, b: None, y, w)
        return y

    w = jnp.eye(2)
    half = jmp.autocast(product, "mixed_float16", follow=["debug_callback"])
    assert half(w, w).tolist() == [[1.0, 0.0], [0.0, 1.0]]
