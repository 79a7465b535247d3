"""Casts, and the lowerings that the planner attaches to steps.

A lowering is a function (`_steps.Lowering`). Passes define others beside themselves.

Most of these are equations in half whose gradients are float32. The gradient of a parameter is a
sum: over the rows of a product, over repeated rows of a table, over devices. Here an operand that
comes in as float32 is rounded inside, and its gradient is not: that of a product is a product of
half operands with a float32 result, which XLA then adds up between devices in float32.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Literal, Primitive
from jax.interpreters import ad, batching, mlir

from jmp import _jax_compat
from jmp._array_calls import replaced
from jmp._jax_compat import Params
from jmp.autocasting._steps import Environment, Single
from jmp.dtypes import FLOAT32

# Casts of real floating arrays, which pass any other object unchanged; masks and repetitions.


def cast(value: Any, dtype: np.dtype | None) -> Any:
    """Casts an array to a real floating dtype; None leaves it, and so does any other object."""
    if dtype is None or getattr(value, "dtype", dtype) == dtype:
        return value
    if isinstance(value, np.ndarray | np.generic):
        return value.astype(dtype)
    current = jax.sharding.get_abstract_mesh()
    if current.empty or (mesh := jax.typeof(value).sharding.mesh) == current:
        return _jax_compat.convert(value, dtype)
    # On the mesh of the array, not of the equation that the cast stands around: what `auto_axes`
    # and a lookup with `out_sharding=` change is how its axes are read.
    with jax.sharding.use_abstract_mesh(mesh):
        return _jax_compat.convert(value, dtype)


def cast_all(values: Sequence[Any], dtypes: Sequence[np.dtype | None]) -> list[Any]:
    """Casts each array to the dtype beside it."""
    return [cast(value, dtype) for value, dtype in zip(values, dtypes, strict=True)]


def repeated(array: Any, shape: Sequence[Any]) -> Any:
    """Returns an array in float32, repeated to `shape`, whose last axes are its own."""
    if not _jax_compat.is_jax_array(array):
        array = np.asarray(array, np.float32)
    array = cast(array, FLOAT32)
    axes = range(len(shape) - array.ndim, len(shape))
    return lax.broadcast_in_dim(array, shape, tuple(axes))


# A mask adds a number at least as large: exp(-1e4) is zero in any dtype.
LEAST_CARRIED = 1e4


@jax.custom_jvp
def saturated(array: Any) -> Any:
    """Holds finite numbers within float16's range: a row masked throughout stays finite.

    Its derivative is that of the identity, so that it costs the backward pass nothing.
    """
    limit = float(jnp.finfo(np.float16).max)
    return jnp.where(jnp.isinf(array), array, jnp.clip(array, -limit, limit))


saturated.defjvp(lambda primals, tangents: (saturated(*primals), *tangents))


@jax.custom_jvp
def masked(result: Any, mask: Any, *others: Any) -> Any:
    """Holds a half sum above -inf where a mask, beside finite operands, carried it there.

    So the sum of two masks of -1e9 stays finite, as in float32, and any other overflow is seen.
    Its derivative is that of the identity.
    """
    is_carried = jnp.abs(mask) >= LEAST_CARRIED
    for operand in (mask, *others):
        is_carried &= jnp.isfinite(operand)
    return jnp.where(is_carried, jnp.maximum(result, jnp.finfo(result.dtype).min), result)


masked.defjvp(lambda primals, tangents: (masked(*primals), tangents[0]))


# Lowerings.


def as_it_is(step: Single) -> Callable[..., list[Any]]:
    """Returns a function of operands that binds a step's primitive."""
    primitive, params = step.node.equation.primitive, step.params
    return lambda operands, params=params: _jax_compat.bind(primitive, operands, params)


def add_masks(
    masks: Sequence[int], step: Single, operands: Sequence[Any], _: Environment
) -> list[Any]:
    """Returns a sum on its way to a softmax, held above -inf where a mask carried it there.

    Args:
      masks: which operands may be one.
    """
    results = as_it_is(step)(operands)
    for mask in masks:
        others = [x for i, x in enumerate(operands) if i != mask]
        results = [masked(result, operands[mask], *others) for result in results]
    return results


def send_in_half(step: Single, operands: Sequence[Any], _: Environment) -> list[Any]:
    """Moves an array between devices that is rounded before, from behind a barrier.

    Without it XLA may round what was sent: under jit it reads a constraint on the rounded parameter
    as one on the parameter, and gathers that.
    """
    return as_it_is(step)(lax.optimization_barrier(operands))


def multiply_in_half(step: Single, operands: Sequence[Any], _: Environment) -> list[Any]:
    """Returns a `dot_general` in half, with float32 gradients for operands that are float32.

    A float32 result is what tensor cores have added up. Products of the backward pass have half
    operands in any case.
    """
    half: Any = step.params["preferred_element_type"]
    result: Any = step.stores[0]
    wide = [i for i in (0, 1) if operands[i].dtype == FLOAT32]
    narrow = [i for i in (0, 1) if i not in wide]

    def forward(left: Any, right: Any, *_: Any) -> list[Any]:
        return [product_as(result, (left, right), step.params)]

    def derivative(primals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
        # An operand rounded outside changes as the operand does, which comes in float32 too.
        of_halves = [(i, tangents[i]) for i in narrow]
        changes = []
        for position, change in (*of_halves, *zip(wide, tangents[2:], strict=True)):
            if isinstance(change, SymbolicZero):
                continue
            factors = [change if i == position else primals[i] for i in (0, 1)]
            if position in wide:
                changes.append(weight_product_p.bind(*factors, weight=position, **step.params))
            else:
                changes.append(lax.dot_general_p.bind(*factors, **step.params))
        return [reduce(lax.add, cast_all(changes, [result] * len(changes)))]

    halves = [cast(x, half) for x in operands]
    return with_derivative(forward, derivative)(*halves, *(operands[i] for i in wide))


def multiply_to_float32(step: Single, operands: Sequence[Any], _: Environment) -> list[Any]:
    """Returns any other product of half operands, in float32; gradients are those of a half one."""
    run = as_it_is(step)

    def forward(*operands: Any) -> list[Any]:
        return run(operands, params={**step.params, "preferred_element_type": FLOAT32})

    def derivative(primals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
        _, changes = jvp(lambda *arrays: run(arrays), primals, tangents)
        return cast_all(changes, [FLOAT32])

    return with_derivative(forward, derivative)(*operands)


# Derivatives that are chosen.


def jvp(function: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    """Returns what `jax.jvp` does, given tangents that may be symbols for zeros."""
    moving = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, SymbolicZero)]
    of_moving = lambda *arrays: function(*replaced(primals, moving, arrays))
    return jax.jvp(of_moving, [primals[i] for i in moving], [tangents[i] for i in moving])


def with_derivative(
    forward: Callable[..., list[Any]],
    derivative: Callable[[Sequence[Any], Sequence[Any]], list[Any]],
) -> Callable[..., list[Any]]:
    """Returns `forward` with tangents that `derivative` computes, from operands and theirs.

    Differentiated, it computes its results outside any custom derivative: inside, the policy of a
    `jax.checkpoint` would not see them, and one that keeps products would keep none.
    """

    @jax.custom_jvp
    def undifferentiated(*operands: Any) -> list[Any]:
        return forward(*operands)

    @jax.custom_jvp
    def computed(results: list[Any], *operands: Any) -> list[Any]:
        return results

    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        return computed(forward(*primals), *primals), derivative(primals, tangents)

    # The results bring tangents of their own, in half: those that JAX takes where it leaves out
    # custom derivatives, as in the second derivative of a scan.
    def rule_again(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        return computed(*primals), derivative(primals[1:], tangents[1:])

    undifferentiated.defjvp(rule, symbolic_zeros=True)
    computed.defjvp(rule_again, symbolic_zeros=True)
    return undifferentiated


def without_symbols(tangent: Any) -> Any:
    """Returns a tangent as an array, of zeros if it is a symbol for these."""
    aval: Any = tangent.aval
    return jnp.zeros(aval.shape, aval.dtype) if isinstance(tangent, SymbolicZero) else tangent


def bilinear(
    name: str,
    run: Callable[..., Any],
    transposes: Sequence[Callable[..., Any] | None],
    batched: Any,
) -> Primitive:
    """Returns a primitive for a function of two operands, for the sake of its transposes.

    No public function of JAX lets one choose these.

    Args:
      run: computes the result from the operands and `**params`.
      transposes: return the gradient of the left and of the right operand; None for an integer one.
      batched: the rule for `jax.vmap`.
    """

    def type_of_result(*types: Any, **params: Any) -> Any:
        (result,) = jax.make_jaxpr(partial(run, **params))(*types).out_avals
        return result

    primitive = Primitive(name)
    primitive.def_impl(run)
    primitive.def_abstract_eval(lru_cache(type_of_result))
    mlir.register_lowering(primitive, mlir.lower_fun(run, multiple_results=False))
    ad.defbilinear(primitive, *transposes)
    batching.primitive_batchers[primitive] = batched
    return primitive


# A product of half operands as a linear function of one of them, which comes in as float32.


def _product(*operands: Any, weight: int, **params: Any) -> Any:
    half = operands[1 - weight].dtype
    return lax.dot_general_p.bind(*(cast(x, half) for x in operands), **params)


def _transpose(position: int, cotangent: Any, *operands: Any, weight: int, **params: Any) -> Any:
    """Returns the gradient of the operand at `position`, in the dtype that it came in."""
    other = cast(operands[1 - position], cotangent.dtype)
    return gradient_of_operand(operands[position].aval, position, (cotangent, other), params)


def product_as(result: np.dtype, factors: Sequence[Any], params: Params) -> Any:
    """Returns a `dot_general` of half operands with a result of this dtype."""
    run = partial(lax.dot_general_p.bind, **{**params, "preferred_element_type": result})
    if result != FLOAT32 or factors[0].dtype != jnp.bfloat16:
        return run(*factors)
    # XLA of 0.10 and 0.12 does not run all of these on a CPU: some are UNIMPLEMENTED.
    widened = lambda *factors: run(*(cast(x, FLOAT32) for x in factors))  # the same numbers
    return lax.platform_dependent(*factors, cpu=widened, default=run)


def gradient_of_operand(aval: Any, position: int, factors: Sequence[Any], params: Params) -> Any:
    """Returns the gradient of an operand of a `dot_general`, as one product.

    Args:
      aval: the operand's type, in which the gradient comes out.
      position: 0 for the left operand, 1 for the right one.
      factors: the cotangent of the result, and the other operand, of one dtype.
      params: of the `dot_general`, for a result of that dtype.
    """
    cotangent, other = factors

    def product(change: Any) -> Any:
        pair = (change, other) if position == 0 else (other, change)
        return lax.dot_general_p.bind(*pair, **params)

    def typed_product(*factors: Any, **params: Any) -> Any:
        return product_as(aval.dtype, factors, params)

    transposed = jax.linear_transpose(product, aval.update(dtype=cotangent.dtype))
    closed = jax.make_jaxpr(lambda cotangent: transposed(cotangent)[0])(cotangent)
    return run_with_product(typed_product, closed, [cotangent])


def _batched_product(
    operands: Sequence[Any], axes: Sequence[Any], weight: int, **params: Any
) -> Any:
    half = operands[1 - weight].dtype
    product = jax.vmap(partial(_product, weight=weight, **params), axes)
    closed = jax.make_jaxpr(product)(*(cast(x, half) for x in operands))
    return run_with_product(partial(weight_product_p.bind, weight=weight), closed, operands), 0


def run_with(
    primitive: Primitive, other: Callable[..., Any], closed: Any, operands: Sequence[Any]
) -> Any:
    """Runs the jaxpr of one equation, and of what moves its operands, with another function."""
    jaxpr, constants = _jax_compat.open_jaxpr(closed)
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *operands), strict=True))
    for equation in jaxpr.eqns:
        read = [x.val if isinstance(x, Literal) else values[x] for x in equation.invars]
        if equation.primitive is primitive:
            results = [other(*read, **equation.params)]
        else:
            results = _jax_compat.bind(equation.primitive, read, equation.params)
        values.update(zip(equation.outvars, results, strict=True))
    return values[jaxpr.outvars[0]]


run_with_product = partial(run_with, lax.dot_general_p)

weight_product_p = bilinear(
    "weight_product", _product, (partial(_transpose, 0), partial(_transpose, 1)), _batched_product
)
