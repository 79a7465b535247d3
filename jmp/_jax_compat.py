"""Everything that differs between the JAX versions we support (0.10 to 0.12), and nothing else."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self, TypeVar

import jax
import numpy as np
from jax.extend import core, source_info_util

Params = Mapping[str, Any]
T = TypeVar("T")

JITS = ("jit", "pjit")
REMAT = ("checkpoint", "remat", "remat2")
# They say nothing but which function. JAX 0.12 binds one for a call of `jax.jit(f).trace(x)`.
PLAIN_CALLS = ("closed_call", "core_call", "eval_jaxpr")
# Equations that call one function once, with their operands as its arguments.
OTHER_CALLS = ("custom_jvp_call", "custom_vjp_call", "shard_map")
CALLS = frozenset((*JITS, *REMAT, *PLAIN_CALLS, *OTHER_CALLS))
# Kernels that run as they were written, with their products.
OPAQUE = ("pallas_call",)
PSUMS = ("psum", "psum2", "psum_invariant")
# The name scope of what remat computes again in a backward pass.
RECOMPUTED = "rematted_computation"


def varying_axes(value: Any) -> frozenset[str]:
    """Returns the manual axes along which a value, or one of a type, varies, if its type says."""
    kind = getattr(getattr(value, "aval", value), "manual_axis_type", None)
    return frozenset() if kind is None else frozenset(kind.varying)


def is_of_tpus(mesh: Any) -> bool:
    """Returns whether the devices of an abstract mesh are TPUs, if that is known."""
    return getattr(getattr(mesh, "abstract_device", None), "platform", None) == "tpu"


def is_divided(value: Any) -> bool:
    """Returns whether XLA itself divides a value among devices, as far as the type says."""
    mesh = value.aval.sharding.mesh
    automatic = set(mesh.axis_names) - set(mesh.manual_axes)
    return bool(automatic) and (mesh.size > 1 or bool(mesh.manual_axes))


def has_named_axes(value: Any) -> bool:
    """Returns whether the type of a value says how devices divide it: explicit or manual axes."""
    mesh = value.aval.sharding.mesh
    return bool(mesh.explicit_axes or mesh.manual_axes)


# The precision of products that name none.


def default_precision_setting() -> str | None:
    """Returns the global default as the user wrote it."""
    config: Any = jax.config  # its attributes are not typed
    return config.jax_default_matmul_precision


# Jaxprs. From 0.11 on one class stands for open and closed jaxprs.


def open_jaxpr(jaxpr: Any) -> tuple[Any, list[Any]]:
    """Returns the open jaxpr and the constants of a closed or an open one."""
    constants = list(getattr(jaxpr, "consts", ()))
    return getattr(jaxpr, "jaxpr", jaxpr), constants


def inner_jaxprs(equation: core.JaxprEqn) -> Iterator[Any]:
    """Yields the open jaxprs among an equation's parameters."""
    held = equation.params.get("_prim")  # what JAX traces under flags such as `jax_scan3`
    for parameter in (equation.params if held is None else held.params).values():
        for item in parameter if isinstance(parameter, (tuple, list)) else (parameter,):
            inner = getattr(item, "jaxpr", item)
            if hasattr(inner, "eqns"):
                yield inner


def holds_functions(equation: core.JaxprEqn) -> bool:
    """Returns whether a jaxpr is among an equation's parameters."""
    return next(inner_jaxprs(equation), None) is not None


def is_jit(equation: core.JaxprEqn) -> bool:
    """Returns whether an equation calls a jitted function."""
    return equation.primitive.name in JITS


def is_plain_call(equation: core.JaxprEqn) -> bool:
    """Returns whether an equation calls a function that may be inlined: it pins nothing down."""
    if equation.effects:
        return False
    if equation.primitive.name in PLAIN_CALLS:
        return True
    if not is_jit(equation):
        return False
    params = equation.params
    layouts = (*params["in_layouts"], *params["out_layouts"])
    shardings = {*map(type, params["in_shardings"]), *map(type, params["out_shardings"])}
    is_placed = any(sharding.__name__ != "UnspecifiedValue" for sharding in shardings)
    is_laid_out = any(layout is not None for layout in layouts)
    options = any(params["donated_invars"]) or params["compiler_options_kvs"]
    return not (is_placed or is_laid_out or options)


# The parameters of equations that hold functions. No other file reads them, except for the rules of
# custom derivatives, which `_precision` names. Those of plain operations, such as `axes`, are read
# where they are used: `git grep "params\["` finds them. The arguments of `lax.scan` and its like
# stand in `kinds/loops.py` and `targets/_weight_sums.py`, which call them.


class Scan(NamedTuple):
    """A scan calls its body with constants, carries and one row of each array, `length` times."""

    body: core.ClosedJaxpr
    n_consts: int
    n_carry: int
    length: Any  # an integer, or the symbol of a dimension
    reverse: bool
    unroll: int | bool

    @classmethod
    def of(cls, params: Params) -> Self:
        """Reads the parameters of a scan."""
        if "num_consts" in params:
            counts = params["num_consts"], params["num_carry"]
        else:
            constants, carries, _ = params["ft_in"].unpack()
            counts = len(constants), len(carries)
        names = ("length", "reverse", "unroll")
        return cls(params["jaxpr"], *counts, *(params[name] for name in names))

    def split(self, operands: Sequence[T]) -> tuple[list[T], list[T], list[T]]:
        """Returns the constants, the carries and the arrays among a scan's operands."""
        first, end = self.n_consts, self.n_consts + self.n_carry
        return list(operands[:first]), list(operands[first:end]), list(operands[end:])


def with_length(params: Params, length: int) -> Params:
    """Returns the parameters of a scan of another number of turns."""
    unroll = params["unroll"]
    is_number = not isinstance(unroll, bool)
    return {**params, "length": length, "unroll": min(unroll, length) if is_number else unroll}


class While(NamedTuple):
    """A while loop calls each of its two functions with constants of its own and the carries."""

    condition: core.ClosedJaxpr
    n_condition: int
    body: core.ClosedJaxpr
    n_body: int

    @classmethod
    def of(cls, params: Params) -> Self:
        """Reads the parameters of a while loop."""
        names = ("cond_jaxpr", "cond_nconsts", "body_jaxpr", "body_nconsts")
        return cls(*(params[name] for name in names))

    def split(self, operands: Sequence[T]) -> tuple[list[T], list[T], list[T]]:
        """Returns the condition's constants, the body's, and the carries among the operands."""
        first, end = self.n_condition, self.n_condition + self.n_body
        return list(operands[:first]), list(operands[first:end]), list(operands[end:])


def branches(params: Params) -> tuple[core.ClosedJaxpr, ...]:
    """Returns the functions of a cond, each called with all operands but the first."""
    return params["branches"]


def branches_platforms(params: Params) -> list[tuple[str, ...]] | None:
    """Returns the platforms that each function of a cond is for; None if a number chooses.

    The last may be for all others: "default", as `jax.lax.platform_dependent` calls it.
    """
    platforms = params.get("branches_platforms")
    return None if platforms is None else [names or ("default",) for names in platforms]


def called(params: Params) -> core.ClosedJaxpr:
    """Returns the function that a jit, remat, shard_map or custom derivative calls."""
    return params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"]


def called_name(equation: core.JaxprEqn) -> str:
    """Returns the name of what a jit, a custom derivative or a kernel calls, else the primitive."""
    if "_prim" in equation.params:
        return type(equation.params["_prim"]).__name__
    return str(equation.params.get("name", equation.primitive.name))


def jit_options(params: Params) -> dict[str, Any]:
    """Returns what to give `jax.jit` for the same shardings, donation and compiler options."""
    return {
        "in_shardings": tuple(params["in_shardings"]),
        "out_shardings": list(params["out_shardings"]),
        "donate_argnums": [i for i, donate in enumerate(params["donated_invars"]) if donate],
        "keep_unused": params["keep_unused"],
        "compiler_options": dict(params["compiler_options_kvs"]) or None,
    }


def shard_map_options(params: Params) -> dict[str, Any]:
    """Returns what to give `jax.shard_map` for the same mesh axes."""
    return {
        "mesh": params["mesh"],
        "in_specs": tuple(params["in_specs"]),
        "out_specs": list(params["out_specs"]),
        "check_vma": params["check_vma"],
        "axis_names": set(params["newly_manual_axes"]),
    }


def recomputes(params: Params) -> bool:
    """Returns whether a remat stands in a gradient already, as what is computed again there."""
    return bool(params["differentiated"])


def with_function(params: Params, jaxpr: Any) -> Params:
    """Returns the parameters of a remat that calls another function."""
    return {**params, "jaxpr": jaxpr}


def remat_options(params: Params) -> dict[str, Any]:
    """Returns what to give `jax.checkpoint`."""
    return {"prevent_cse": params["prevent_cse"], "policy": params["policy"]}


def is_concrete(value: Any) -> bool:
    """Returns whether `value` holds numbers now, rather than standing for some."""
    return not isinstance(value, jax.core.Tracer)


def on_all_devices(value: Any) -> Any:
    """Returns the numbers of all devices, on the host, of a value inside an uncompiled shard_map.

    They may have an axis more. Every other value is returned as it is.
    """
    is_shard = isinstance(value, jax.core.Tracer) and hasattr(value, "val")
    return np.asarray(value.val) if is_shard else value


def is_jax_array(value: Any) -> bool:
    """Returns whether `value` is an array of JAX's, a tracer of one, or a reference to one."""
    return isinstance(value, jax.Array) or is_reference(value)


def is_reference(value: Any) -> bool:
    """Returns whether a value, or a type, is a reference to an array that can be written to."""
    return hasattr(getattr(value, "aval", value), "inner_aval")


def with_weak_type(value: Any, weak_type: bool) -> Any:
    """Returns `value` with a weak or a strong type, which no public function of JAX says."""
    if getattr(jax.typeof(value), "weak_type", False) == weak_type:
        return value
    return convert(value, value.dtype, weak_type)


def convert(array: Any, dtype: Any, weak_type: bool = False) -> Any:
    """Casts an array as `jax.lax.convert_element_type` does, without its checks."""
    params = {"new_dtype": np.dtype(dtype), "weak_type": weak_type, "sharding": None}
    return jax.lax.convert_element_type_p.bind(array, **params)


def scope_names(stack: Any) -> list[str]:
    """Returns the names of a name stack, the outermost first, without transformations.

    JAX repeats the names of a remat in its transpose, behind a second "jvp": they count once.
    """
    names, starts = [], []
    for item in stack.stack:
        if type(item).__name__ == "Scope":
            names.append(item.name)
        elif item.name == "jvp":
            starts.append(len(names))
    repeated = (start for start in starts if start and names[:start] == names[start : 2 * start])
    return names[next(repeated, 0) :]


def is_backward(stack: Any) -> bool:
    """Returns whether a name stack is of a backward pass, and not of what remat recomputes there.

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


def nested_stack(outer: Any, inner: Any) -> Any:
    """Returns the name stack of `inner` within `outer`; one of them, if the other is empty."""
    if not outer.stack:
        return inner
    return outer + inner if inner.stack else outer


def bind(primitive: Any, operands: Any, params: Any) -> list[Any]:
    """Binds a primitive as a jaxpr's interpreter does; returns a list of results."""
    results = primitive.bind(*operands, **primitive.get_bind_params(params))
    return list(results) if primitive.multiple_results else [results]


def as_function(jaxpr: Any) -> Callable[..., list[Any]]:
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
