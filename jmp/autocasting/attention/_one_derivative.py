"""Functions with one derivative: those that the kernels lack raise an error when asked for."""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

ONE_DIRECTION = (
    "autocast(attention='fused') got {what}: the fused kernel has only a first derivative in "
    "reverse mode (jax.grad, jax.vjp). Use attention='plain' for this function."
)


def differentiated_once(
    function: Callable[..., Any], forward: Callable[..., Any], backward: Callable[..., Any]
) -> Callable[..., Any]:
    """Returns a function with one derivative, in reverse mode; others raise.

    Args:
      forward, backward: as `jax.custom_vjp` takes them.
    """
    attention = jax.custom_vjp(function)
    attention.defvjp(_without_derivative(forward), _without_derivative(backward))
    return lambda *operands: attention(*jax.tree.map(_in_reverse_mode, operands))


def _without_derivative(function: Callable[..., Any]) -> Callable[..., Any]:
    wrapped = jax.custom_jvp(function)

    def refuse(primals: Any, tangents: Any) -> Any:
        raise NotImplementedError(ONE_DIRECTION.format(what="a second derivative"))

    wrapped.defjvp(refuse)
    return lambda *operands: wrapped(*operands)


@jax.custom_jvp
def _in_reverse_mode(array: Any) -> Any:
    """Returns the array; forward mode raises.

    A primitive returns its tangent that can be transposed and not run. Only forward mode leaves it
    in the program.
    """
    return array


@_in_reverse_mode.defjvp
def _hand_on(primals: Any, tangents: Any) -> Any:
    return primals[0], _tangent.bind(tangents[0])


def _refuse_forward_mode(*_: Any, **__: Any) -> Any:
    raise NotImplementedError(ONE_DIRECTION.format(what="forward-mode differentiation (jax.jvp)"))


_tangent = Primitive("reverse_mode_only")
_tangent.def_impl(_refuse_forward_mode)
_tangent.def_abstract_eval(lambda aval: aval)
ad.deflinear2(_tangent, lambda cotangent, _: [cotangent])
batching.defvectorized(_tangent)
mlir.register_lowering(_tangent, _refuse_forward_mode)
