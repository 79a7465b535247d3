"""Derivatives that fused kernels have not: refused where they are asked for."""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

ONE_DIRECTION = (
    "autocast(attention='fused') got {what}: the fused kernel has a first derivative in reverse "
    "mode alone (jax.grad, jax.vjp). Use attention='plain' for this function."
)


def differentiated_once(function: Callable[..., Any]) -> Callable[..., Any]:
    wrapped = jax.custom_jvp(function)

    def refuse(primals: Any, tangents: Any) -> Any:
        raise NotImplementedError(ONE_DIRECTION.format(what="a second derivative"))

    wrapped.defjvp(refuse)
    return lambda *operands: wrapped(*operands)


# The identity, whose tangent is handed on by a primitive that can be transposed and not run: it is
# left over in forward mode alone.
@jax.custom_jvp
def in_reverse_mode(array: Any) -> Any:
    return array


@in_reverse_mode.defjvp
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
