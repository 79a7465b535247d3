"""The operations of a plan, as reports and the warning of no half product read them."""

import jax
import jax.numpy as jnp
from jax import lax

import jmp
from jmp import _jax_compat
from jmp.autocasting._operations import SATURATED, decisions_of, operations_of
from jmp.autocasting._steps import steps_of
from tests.autocasting.plans import plan_of

X = W = jnp.zeros((128, 128))
PRODUCT = "tensor cores multiply in half and add up in float32"
EXP = "grows exponentially: exp(12) overflows float16"


def lines(fun, *args, **options):
    """One line an operation: place, name, how often it runs, dtypes, reason."""
    return [
        f"{'/'.join(_jax_compat.scope_names(operation.scope))} {operation.equation.primitive.name} "
        f"x{operation.times}: {' '.join(operation.dtypes_in)} -> {' '.join(operation.dtypes_out)}; "
        f"{operation.why}"
        for operation in operations_of(steps_of(plan_of(fun, *args, **options)))
    ]


def loops(x):
    def step(x, _):
        with jax.named_scope("inner"):
            x = lax.scan(lambda x, _: (jnp.exp(x @ W), None), x, None, length=3)[0]
        return jax.checkpoint(lambda x: x @ W)(x), None

    with jax.named_scope("outer"):
        return lax.scan(step, x, None, length=2)[0]


def test_turns_multiply_and_scopes_join():
    assert lines(loops, X) == [
        f"outer/inner dot_general x6: float16 -> float16; {PRODUCT}",
        f"outer/inner exp x6: float32 -> float16; {EXP}",
        f"outer dot_general x2: float16 -> float16; {PRODUCT}",
    ]


def test_what_is_bound_as_a_whole_has_the_dtypes_it_was_traced_with():
    why = "the user asked for float32 here"
    region = "outer/jmp.full_precision/outer"

    def fun(x):
        with jax.named_scope("outer"):
            return jmp.full_precision(loops)(x)

    assert lines(fun, X) == [
        f"{region}/inner dot_general x6: float32 -> float32; {why}",
        f"{region}/inner exp x6: float32 -> float32; {why}",
        f"{region} dot_general x2: float32 -> float32; {why}",
    ]


def test_dtypes_are_those_read_and_stored_of_floating_values_alone():
    def fun(x, keep):
        y = x @ W
        z = jnp.exp(y)
        values, places = lax.top_k(y, 2)
        return z @ W, z.sum(), jnp.where(keep, y, 0.0) @ W, places, y * 1j

    plan = plan_of(fun, X, X > 0)
    operations = operations_of(steps_of(plan))
    found = [(o.equation.primitive.name, o.dtypes_in, o.dtypes_out) for o in operations]
    half, full = ["float16"], ["float32"]
    assert found == [
        ("dot_general", half, half),
        ("top_k", half, half),
        ("exp", full, half),
        ("reduce_sum", full, full),
        ("dot_general", half, half),
        ("convert_element_type", full, full),
        ("broadcast_in_dim", full, full),
        ("select_n", half, half),
        ("dot_general", half, half),
        ("convert_element_type", full, ["complex64"]),
        ("mul", ["complex64"], ["complex64"]),
    ]


def test_what_a_plan_does_besides_choosing_dtypes_counts_turns():
    def fun(x, mask, other):
        def step(x, _):
            y = (x @ W)[None] + mask
            return y[0], None

        x = lax.scan(step, x, None, length=3)[0]
        x = ((x @ W)[None] + mask)[0]
        return (jnp.exp(x @ W) + other) @ W

    found = list(decisions_of(steps_of(plan_of(fun, X, jnp.zeros((1, 128, 1)), X))))
    # Outside the loop none reaches a maximum.
    assert [(node.name, times) for _, node, times in found] == [("add", 3)]
    assert {why for why, *_ in found} == {SATURATED}
