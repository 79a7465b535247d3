"""What is followed through a jaxpr: which results depend on which inputs, worked out by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jmp.autocasting._propagation import Propagation, walk

X = jnp.ones(())


def depends(equation, around, operands, inside):
    return inside() or [any(operands)] * len(equation.outvars)


def either(choices, deciding):
    return any((*choices, *deciding))


DEPENDENT = Propagation(depends, either, lambda atom: False)


def dependent(function, *inputs):
    """Which results of a function of scalars depend on the inputs that are marked."""
    closed = jax.make_jaxpr(function)(*[X] * len(inputs))
    return DEPENDENT.through(closed, list(inputs))


def swapped(a, b, c):
    """After any number of turns `a` is in each of the first two."""
    return lax.fori_loop(0, 5, lambda _, carry: (carry[1], carry[0], carry[2]), (a, b, c))


def shifted(a, b, c):
    """It takes two turns until `a` is in the last."""
    return lax.scan(lambda carry, _: ((carry[0], *carry[:2]), carry[2]), (a, b, c), None, length=3)


def stacked(a, b):
    def body(carry, row):
        return carry + 1, row * b

    return lax.scan(body, X, jnp.stack([a, a]))


def chosen(a, b, c):
    return lax.cond(a > 0, lambda b, c: (b, c), lambda b, c: (c, -c), b, c)


def counted(a, b):
    """`a` says how often."""
    return lax.while_loop(lambda carry: carry[0] < a, lambda carry: (carry[0] + 1, b), (X, X))


@jax.custom_jvp
def first(a, b):
    return a


first.defjvp(lambda primals, tangents: (primals[0], tangents[0]))


@pytest.mark.parametrize(
    ("function", "inputs", "expected"),
    [
        (swapped, (True, False, False), [True, True, False]),
        (shifted, (True, False, False), [True, True, True, True]),
        (shifted, (False, False, True), [False, False, True, True]),
        (stacked, (True, False), [False, True]),
        (stacked, (False, True), [False, True]),
        (chosen, (True, False, False), [True, True]),
        (chosen, (False, True, False), [True, False]),
        (chosen, (False, False, True), [True, True]),
        (counted, (True, False), [True, True]),
        (counted, (False, True), [False, True]),
        (first, (True, False), [True]),
        (first, (False, True), [False]),
        (jax.checkpoint(lambda a, b: (b, a)), (True, False), [False, True]),
        (jax.jit(lambda a, b: (b, 3.0)), (True, True), [True, False]),
    ],
)
def test_what_depends_on_an_input_is_followed_through_functions(function, inputs, expected):
    assert dependent(function, *inputs) == expected


def test_an_equation_is_given_with_those_around_it():
    def named(equation, around, operands, inside):
        names = [each.primitive.name for each in (*around, equation)]
        return inside() or ["/".join(names)] * len(equation.outvars)

    inner = jax.jit(lambda x: lax.fori_loop(0, 2, lambda _, x: jnp.sin(x), x))
    closed = jax.make_jaxpr(lambda x: (inner(x), jnp.cos(x)))(X)
    names = Propagation(named, lambda choices, _: choices[0], lambda atom: "constant")
    assert names.through(closed, ["input"]) == ["jit/scan/sin", "cos"]


def test_the_condition_of_a_loop_is_told_apart_from_its_carries():
    closed = jax.make_jaxpr(counted)(X, X)
    (loop,) = closed.eqns
    for reads_limit in (True, False):
        operands = [reads_limit, *[False] * (len(loop.invars) - 1)]
        decides, carries = DEPENDENT.through_while(loop, operands)
        assert decides == reads_limit
        assert carries == [False, False]


def test_a_walk_says_what_is_around_an_equation_and_how_often_it_runs():
    def inner(x):
        return lax.scan(lambda x, _: (jnp.sin(x), None), x, None, length=3)[0]

    def outer(x):
        return lax.scan(lambda x, _: (inner(x), None), x, None, length=5)[0] + 1

    visits = list(walk(jax.make_jaxpr(jax.checkpoint(outer))(X).jaxpr))
    found = [(v.equation.primitive.name, len(v.around), v.times) for v in visits]
    (remat,) = {name for name, depth, _ in found if depth == 0}
    assert found == [(remat, 0, 1), ("scan", 1, 1), ("scan", 2, 5), ("sin", 3, 15), ("add", 1, 1)]
    assert visits[3].around == tuple(visit.equation for visit in visits[:3])
