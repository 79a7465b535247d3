"""The kernels of all platforms share this: the form of an attention, and derivatives they lack.

`Kernel` says how the pass uses one.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jmp.autocasting._graph import Value
from jmp.autocasting.attention._axes import Axes, Layout, spread
from jmp.autocasting.attention._matching import Bias, Mask

Booleans = np.ndarray[Any, np.dtype[np.bool_]]

ONE_DIRECTION = (
    "autocast(attention='fused') got {what}: the fused kernel has only a first derivative in "
    "reverse mode (jax.grad, jax.vjp). Use attention='plain' for this function."
)


class Masking(NamedTuple):
    """How scores change between scale and softmax."""

    is_causal: bool
    window: int | None  # how many keys before its own a row sees, if it is causal
    constant: Booleans | None  # another mask without inputs, if the kernel takes one; see `kept`
    biases: Sequence[Bias]  # those that the first three do not express
    masks: Sequence[Mask]
    has_gradient: bool  # a bias has one
    sees_a_key: bool  # each row is known to

    @property
    def terms(self) -> Sequence[Bias | Mask]:
        """The biases and masks whose values a kernel reads, in the order in which it gets them."""
        return [*self.biases, *self.masks]

    def kept(self, rows: int, keys: int) -> Any:
        """Returns which scores the first three keep: (batch, heads, rows, keys)."""
        if self.constant is not None:
            return self.constant
        behind = jnp.arange(rows)[None, None, :, None] - jnp.arange(keys)[None, None, None]
        if not self.is_causal:
            return jnp.ones_like(behind, bool)
        return (behind >= 0) & (self.window is None or behind <= self.window)


class KernelForm(NamedTuple):
    """The arrays of one attention as a kernel takes them, and what it does to the scores.

    Queries have the shape (batch, rows, heads, width), keys and values (batch, keys, groups of
    heads, width), a bias or a mask (batch, heads, rows, keys).
    """

    query: Layout
    key: Layout
    values: Layout
    result: Layout
    scale: float
    masking: Masking
    bias_axes: Axes

    def kept_by(self, mask: Mask, array: Any) -> Any:
        """Returns which scores a mask keeps, of length one along axes that do not matter to it."""
        return spread(jnp.asarray(array) == mask.keeps, mask.source.axes, self.bias_axes)


class Kernel(NamedTuple):
    """A kernel that computes attention on one platform."""

    platform: str  # as `jax.lax.platform_dependent` names it
    name: str
    # Given a form, queries, keys, values, and the values of the form's terms.
    attend: Callable[[KernelForm, Any, Any, Any, list[Any]], Any]
    # Says why it does not take a form, given the queries and the dtype; "" if it may.
    limit_of: Callable[[KernelForm, Value, np.dtype], str]
    takes_constants: bool  # masks without inputs that are neither causal nor a window
    why: str


def or_average(result: Any, sees_a_key: Any, values: Any) -> Any:
    """Returns a kernel's result, and for rows that see no key the average of the values.

    The plain program returns that average too, because all scores of such a row are equal.
    """
    average = values.mean(1, keepdims=True, dtype=jnp.float32)
    average = jnp.repeat(average, result.shape[2] // values.shape[2], axis=2)
    # Rounded after it is repeated: so its gradient, a term for each row, adds up in float32.
    average = jnp.broadcast_to(average, result.shape).astype(result.dtype)
    return jnp.where(sees_a_key, result, average)


# Derivatives that the kernels lack raise an error when they are asked for.


def differentiated_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns one pass of a kernel's derivative, which raises if it is differentiated itself."""
    wrapped = jax.custom_jvp(function)

    def refuse(primals: Any, tangents: Any) -> Any:
        raise NotImplementedError(ONE_DIRECTION.format(what="a second derivative"))

    wrapped.defjvp(refuse)
    return lambda *operands: wrapped(*operands)


@jax.custom_jvp
def in_reverse_mode(array: Any) -> Any:
    """Returns the array; forward mode raises.

    A primitive returns its tangent that can be transposed and not run. Only forward mode leaves it
    in the program.
    """
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
