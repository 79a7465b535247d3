"""Everything that differs between the JAX versions we support (0.10 to 0.12), and nothing else."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend import core, source_info_util
from jax.interpreters import ad

# The name scope of what remat computes again in a backward pass.
RECOMPUTED = "rematted_computation"


def manual_axes() -> frozenset[str]:
    """Returns the mesh axes over which the code being traced is mapped (shard_map, pmap)."""
    mesh = jax.sharding.get_abstract_mesh()
    return frozenset(mesh.manual_axes)


def tracks_varying_axes() -> bool:
    """Returns whether types say along which manual axes a value varies (`check_vma`).

    Asked of a value that certainly varies: an axis index.
    """
    axes = manual_axes()
    if not axes:
        return False
    axis = min(axes)
    return axis in varying_axes(jax.lax.axis_index(axis))


def varying_axes(value: Any) -> frozenset[str]:
    """Returns the manual axes along which `value` varies, as far as its type says so."""
    aval = jax.typeof(value)
    if hasattr(aval, "manual_axis_type"):
        return frozenset(aval.manual_axis_type.varying)
    return frozenset(getattr(aval, "vma", ()))  # its name in earlier releases of JAX


def may_be_sharded(value: Any) -> bool:
    """Returns whether jit may have sharded `value` over several devices.

    Its type names the mesh of whatever it was computed from, but for the parts that shard_map and
    pmap hand to each device whole. Without a mesh one device is certain only if there is no other.
    """
    mesh = jax.typeof(value).sharding.mesh
    if mesh.empty:
        return jax.device_count() > 1
    return any(
        size > 1 and name not in mesh.manual_axes
        for name, size in zip(mesh.axis_names, mesh.axis_sizes, strict=True)
    )


# The precision of products that name none.


def without_default_precision() -> contextlib.AbstractContextManager[Any]:
    """Traces with the global default switched off: a product that names no precision has None."""
    return jax.default_matmul_precision(None)


def default_precision_setting() -> str | None:
    """Returns the global default as the user wrote it."""
    config: Any = jax.config  # its attributes are not typed
    return config.jax_default_matmul_precision


def default_precision() -> Any:
    """Returns what the global default puts into a product that names no precision; or None."""
    if default_precision_setting() is None:
        return None
    vector = jax.ShapeDtypeStruct((1,), np.float32)
    (equation,) = open_jaxpr(jax.make_jaxpr(jax.lax.dot)(vector, vector))[0].eqns
    return equation.params["precision"]


# Jaxprs. From 0.11 on one class stands for open and closed jaxprs.


def open_jaxpr(jaxpr: Any) -> tuple[Any, list[Any]]:
    """Returns the open jaxpr and the constants of a closed or an open one."""
    constants = list(getattr(jaxpr, "consts", ()))
    return getattr(jaxpr, "jaxpr", jaxpr), constants


def inner_jaxprs(equation: core.JaxprEqn) -> Iterator[Any]:
    """Yields the open jaxprs among an equation's parameters."""
    for parameter in equation.params.values():
        for item in parameter if isinstance(parameter, (tuple, list)) else (parameter,):
            inner = getattr(item, "jaxpr", item)
            if hasattr(inner, "eqns"):
                yield inner


def is_jit(equation: core.JaxprEqn) -> bool:
    """Returns whether an equation calls a jitted function."""
    return equation.primitive.name in ("jit", "pjit")


def is_plain_jit(equation: core.JaxprEqn) -> bool:
    """Returns whether an equation is a jit that may be inlined: it pins nothing down."""
    params = equation.params
    return (
        is_jit(equation)
        and not equation.effects
        and not any(params["donated_invars"])
        and not params["compiler_options_kvs"]
        and all(layout is None for layout in (*params["in_layouts"], *params["out_layouts"]))
        and all(
            type(sharding).__name__ == "UnspecifiedValue"
            for sharding in (*params["in_shardings"], *params["out_shardings"])
        )
    )


def sum_over_own_axes(equation: core.JaxprEqn) -> core.JaxprEqn:
    """Returns a psum over axes of the array itself, as vmap makes it, as the plain sum it is."""
    params = equation.params
    axes = params.get("axes", ())
    is_plain = (
        equation.primitive.name in ("psum", "psum2", "psum_invariant")
        and len(equation.invars) == 1
        and all(isinstance(axis, int) for axis in axes)
        and params.get("axis_index_groups") is None
    )
    if not is_plain:
        return equation
    operand: Any = equation.invars[0].aval
    struct = jax.ShapeDtypeStruct(operand.shape, operand.dtype)
    plain = jax.make_jaxpr(lambda x: jax.lax.reduce_sum(x, axes))(struct).eqns[-1]
    return equation.replace(primitive=plain.primitive, params=plain.params)


def with_inner_params(params: Mapping[str, Any], change: Callable[..., Any]) -> dict[str, Any]:
    """Returns an equation's parameters, changed in the equations of its jaxprs, at any depth.

    Args:
      change: given a primitive's name and its parameters, the parameters to put there.
    """

    def of(parameter: Any) -> Any:
        if type(parameter) in (tuple, list):
            return type(parameter)(map(of, parameter))
        inner = getattr(parameter, "jaxpr", parameter)
        if not hasattr(inner, "eqns"):
            return parameter
        equations = [
            equation.replace(
                params=change(equation.primitive.name, with_inner_params(equation.params, change))
            )
            for equation in inner.eqns
        ]
        changed = inner.replace(eqns=equations)
        return changed if inner is parameter else parameter.replace(jaxpr=changed)

    return {name: of(parameter) for name, parameter in params.items()}


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """Returns how many inputs of a scan are constants and how many are carried."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    constants, carries, _ = params["ft_in"].unpack()
    return len(constants), len(carries)


def is_concrete(value: Any) -> bool:
    """Returns whether `value` holds numbers now, rather than standing for some."""
    return not isinstance(value, jax.core.Tracer)


def on_all_devices(value: Any) -> Any:
    """Returns the numbers of all devices, on the host, of a value inside an uncompiled shard_map.

    They may have an axis more. Every other value is returned as it is.
    """
    is_shard = isinstance(value, jax.core.Tracer) and hasattr(value, "val")
    return np.asarray(value.val) if is_shard else value


def is_reference(value: Any) -> bool:
    """Returns whether a value, or a type, is a reference to an array that can be written to."""
    return hasattr(getattr(value, "aval", value), "inner_aval")


def typeof(value: Any) -> Any:
    """Returns the type JAX traces `value` with."""
    return jax.typeof(value)


def with_weak_type(value: Any, weak_type: bool) -> Any:
    """Returns `value` with a weak or a strong type, which no public function of JAX says."""
    if getattr(typeof(value), "weak_type", False) == weak_type:
        return value
    return jax.lax.convert_element_type_p.bind(
        value, new_dtype=value.dtype, weak_type=weak_type, sharding=None
    )


def scope_names(stack: Any) -> list[str]:
    """Returns the names of a name stack, outermost first, without those of transformations."""
    return [item.name for item in stack.stack if type(item).__name__ == "Scope"]


def is_backward(stack: Any) -> bool:
    """Returns whether a name stack stands in a backward pass; what remat recomputes there does not.

    JAX marks what it transposes, and within that what it computes again.
    """
    is_transposed = False
    for item in stack.stack:
        is_transposed |= type(item).__name__ == "Transform" and item.name == "transpose"
        is_transposed &= item.name != RECOMPUTED
    return is_transposed


def is_differentiated(stack: Any) -> bool:
    """Returns whether derivatives are computed under a name stack, in either pass."""
    names = {item.name for item in stack.stack if type(item).__name__ == "Transform"}
    return bool(names & {"jvp", "transpose"})


def empty_name_stack() -> Any:
    """Returns the name stack of no scope at all."""
    return source_info_util.new_name_stack()


def bind(primitive: Any, operands: Any, params: Any) -> list[Any]:
    """Binds a primitive as a jaxpr's interpreter does; returns a list of results."""
    results = primitive.bind(*operands, **primitive.get_bind_params(params))
    return list(results) if primitive.multiple_results else [results]


def zero_cotangent(zero: SymbolicZero) -> Any:
    """Returns a zero that `jax.vjp` takes as a cotangent, of one that a rule was given."""
    return ad.Zero(zero.aval)


def as_function(jaxpr: Any) -> Any:
    """Returns the function of flat arguments that a jaxpr without open constants stands for."""
    return core.jaxpr_as_fun(core.ClosedJaxpr(*open_jaxpr(jaxpr)))


@contextlib.contextmanager
def place_of(equation: core.JaxprEqn, stack: Any) -> Iterator[None]:
    """Binds under an equation's source line, name scopes (`stack`) and context (mesh, compute)."""
    names = source_info_util.current_name_stack() + stack
    traceback = equation.source_info.traceback
    with source_info_util.user_context(traceback, name_stack=names), equation.ctx.manager:
        yield


def frames_of(equation: core.JaxprEqn) -> list[tuple[str, int]]:
    """Returns file and line of the Python frames an equation was traced in, innermost first."""
    traceback = equation.source_info.traceback
    frames: Any = traceback.frames if traceback is not None else ()
    return [(frame.file_name, frame.line_num) for frame in frames]
