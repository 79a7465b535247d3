"""Programs: a function, how to lower it, and the plans made for the types it was called with.

A call traces, or finds the trace in JAX's own cache; plans, or finds the plan; and runs it: an
eager call through `jax.jit`, a call under a transformation by binding the plan's steps.
"""

import dataclasses
import functools
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jmp import _jax_compat
from jmp._array_calls import StaticPart, take_arrays
from jmp._messages import described, function_name, listed, users_stacklevel, wrong
from jmp.autocasting._casts import cast_all
from jmp.autocasting._emit import run_plan
from jmp.autocasting._facts import Destination, Info
from jmp.autocasting._flatten import graph_of
from jmp.autocasting._numbers import ValueProvenance
from jmp.autocasting._operations import WARNINGS
from jmp.autocasting._planner import Planner
from jmp.autocasting._propagation import walk
from jmp.autocasting._request import AUTOCAST, Request, Settings
from jmp.autocasting._steps import Context, Plan
from jmp.rules import UnusedRuleWarning
from jmp.trees import as_jax_array, cast_leaf, holds_numbers

# Functions that run later than they are called: what they are, how they and their results are told.
LATE = (
    ("a generator", inspect.isgeneratorfunction, inspect.isgenerator),
    ("a coroutine", inspect.iscoroutinefunction, inspect.iscoroutine),
    ("an asynchronous generator", inspect.isasyncgenfunction, inspect.isasyncgen),
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Packed:
    """A result whose arrays are leaves and whose other objects are part of the structure."""

    arrays: list[Any]
    held: StaticPart = dataclasses.field(metadata={"static": True})


class Traced(NamedTuple):
    """One call of a program: what was traced, planned, and what to run it on."""

    closed: Any
    plan: Plan
    emit: Callable[..., list[Any]]  # of constants and arrays, cast to the dtypes of `plan.reads`
    emit_until: Callable[[str], Callable[..., list[Any]]]  # the same, after the pass of a name
    run: Callable[..., list[Any]]
    constants: list[Any]  # the arrays that the function closes over
    arrays: list[Any]  # those among the arguments
    result: Any


class Program:
    """A function, how to lower it, and the plans made for the types it was called with."""

    def __init__(
        self, fun: Callable[..., Any], settings: Settings, apply_to: tuple[str, ...]
    ) -> None:
        self.fun = fun
        self.settings = settings
        self.apply_to = apply_to
        # JAX caches traces by function; so each structure of arguments keeps its own function.
        self._flat_function = functools.lru_cache(self._make_flat_function)
        self._has_warned = False
        self._plans: Any = weakref.WeakKeyDictionary()

    def __reduce__(self) -> Any:
        """Pickles and copies what the program was made from; traces and plans are made anew."""
        return Program, (self.fun, self.settings, self.apply_to)

    def call(self, args: Any, kwargs: Any) -> Any:
        """Runs the function on these arguments."""
        traced = self.trace(args, kwargs)
        operands = cast_all([*traced.constants, *traced.arrays], traced.plan.reads)
        if all(map(_jax_compat.is_concrete, operands)):
            results = traced.run(*operands)  # compiled once: an eager call does not retrace
        else:
            results = traced.emit(*operands)
        leaves, structure = jax.tree.flatten(traced.result)
        results = [_of_type(x, leaf) for x, leaf in zip(results, leaves, strict=True)]
        packed = jax.tree.unflatten(structure, results)
        return packed.held.filled(packed.arrays)

    def trace(
        self, args: Any, kwargs: Any, is_taken: Callable[[Any], bool] = holds_numbers
    ) -> Traced:
        """Traces and plans, or finds what was traced and planned before.

        Args:
          is_taken: which leaves are arrays; a `jax.ShapeDtypeStruct` may stand for one.
        """
        taken, held = take_arrays((args, kwargs), is_taken)
        arrays = [x if isinstance(x, jax.ShapeDtypeStruct) else as_jax_array(x) for x in taken]
        types = tuple(map(_type_and_sign, held.leaves))
        default = _jax_compat.default_precision_setting()
        try:
            flat = self._flat_function(held, types, default)
        except TypeError:  # an argument that cannot be hashed
            flat = self._make_flat_function(held, types, default)
        with jax.default_matmul_precision(None):  # a product that names none has none
            closed, result = jax.make_jaxpr(flat, return_shape=True)(*arrays)
        jaxpr, constants = _jax_compat.open_jaxpr(closed)
        if jaxpr not in self._plans:
            plan = self._plan(jaxpr, constants, self._in_half(held))
            self._warn(plan, jaxpr)
            emit = functools.partial(_run_marked, plan)
            self._plans[jaxpr] = plan, emit, jax.jit(emit)
        plan, emit, run = self._plans[jaxpr]

        def emit_until(last_pass: str) -> Callable[..., list[Any]]:
            again = self._plan(jaxpr, constants, self._in_half(held), last_pass)
            return functools.partial(_run_marked, again)

        return Traced(closed, plan, emit, emit_until, run, constants, arrays, result)

    def _in_half(self, held: StaticPart) -> list[bool]:
        """For each array among the arguments, whether `apply_to` names it."""
        named: set[int] = set()
        if self.apply_to:
            # Leaves are counted, bound to the names of arguments, and counted there again.
            args, kwargs = jax.tree.unflatten(held.structure, range(len(held.leaves)))
            # Partially: a decorator may fill in the rest, and a call that is wrong fails by itself.
            bound = inspect.signature(self.fun).bind_partial(*args, **kwargs).arguments
            named = set(jax.tree.leaves([bound.get(name) for name in self.apply_to]))
        return [i in named for i, leaf in enumerate(held.leaves) if leaf is None]

    def _plan(
        self,
        jaxpr: Any,
        constants: Sequence[Any],
        in_half: Sequence[bool],
        last_pass: str | None = None,
    ) -> Plan:
        request = Request(self.settings, last_pass)
        graph = graph_of(
            jaxpr, constants, [ValueProvenance.INPUTS] * len(jaxpr.invars), None, request
        )
        infos = [Info(value.dtype, True) for value in graph.inputs]
        first = len(infos) - len(in_half)
        for position, half in enumerate(in_half):
            if half and graph.inputs[first + position].is_float32:
                infos[first + position] = Info(self.settings.compute_dtype, False)
        nowhere = [Destination(feeds=False, carried=False)] * len(graph.outputs)
        return Planner(graph, infos, nowhere, Context(request)).plan_level()

    def _warn(self, plan: Plan, jaxpr: Any) -> None:
        plan.request.policy_rules.warn_unused()
        if not self._has_warned:
            for text_of, kind in WARNINGS:
                if text := text_of(plan, function_name(self.fun)):
                    warnings.warn(text, kind, stacklevel=users_stacklevel())
                    self._has_warned = True
        overrides = self.settings.overrides
        names = {visit.equation.primitive.name for visit in walk(jaxpr)} if overrides else ()
        for name, category in overrides.items():
            if name not in names:
                warnings.warn(
                    f"{category.value}= names {described(name)}, which is no primitive of this "
                    "program. Functions such as softmax or matmul are made of primitives (exp, "
                    "dot_general; jax.make_jaxpr shows them); to name a layer, use rules=.",
                    UnusedRuleWarning,
                    stacklevel=users_stacklevel(),
                )

    def _make_flat_function(
        self, held: StaticPart, types: tuple[Any, ...], default: Any
    ) -> Callable[..., Any]:
        # Each default precision has a trace of its own, because a trace holds the rules of custom
        # derivatives, which JAX traces once, under the default of that moment.
        def flat(*arrays: Any) -> Packed:
            args, kwargs = held.filled(arrays)
            result = self.fun(*args, **kwargs)
            _check_unchanged((args, kwargs), held, arrays)
            results, rest = take_arrays(result, is_leaf=inspect.isgenerator)
            for leaf in rest.leaves:
                check_runs_when_called(leaf)
            return Packed(results, rest)

        flat.__name__ = getattr(self.fun, "__name__", "autocast")
        return flat


def _of_type(result: Any, struct: Any) -> Any:
    """Returns a result in the dtype that it was traced with, weak if it was weak."""
    array = result if isinstance(result, jax.Array) else jnp.asarray(result, struct.dtype)
    return _jax_compat.with_weak_type(cast_leaf(array, struct.dtype), struct.weak_type)


def _run_marked(plan: Plan, *operands: Any) -> list[Any]:
    with jax.named_scope(AUTOCAST):
        return run_plan(plan, operands)


def _type_and_sign(leaf: Any) -> tuple[type, str]:
    """Returns what tells a leaf that is no array from its equals: 1 == True, and 0.0 == -0.0."""
    return type(leaf), repr(leaf) if isinstance(leaf, float | complex) else ""


def runs_late(fun: Any) -> bool:
    """Returns whether a function computes after the call of it has returned."""
    return any(is_function(fun) for _, is_function, _ in LATE)


def check_runs_when_called(fun: Any, caller: str = "autocast") -> None:
    """Refuses what computes after the call has returned: a function, or a result of one.

    Raises: TypeError for generators and coroutines, asynchronous ones too.
    """
    for what, is_function, is_result in LATE:
        if not (is_function(fun) or is_result(fun)):
            continue
        if inspect.iscoroutine(fun):
            fun.close()  # or Python warns that it was never awaited
        late = (
            f"{described(fun)}, {what}" if is_function(fun) else f"a function that returned {what}"
        )
        raise TypeError(
            f"{caller} got {late}: its body runs after the call has returned, out of its sight. "
            "Expected a function that computes its results and returns them; wrap the "
            "functions that the body calls, and leave the body outside."
        )


def checked_names(fun: Callable[..., Any], apply_to: Iterable[str]) -> tuple[str, ...]:
    """Returns what `apply_to=` names; refuses what names no arguments of the function."""
    is_text = isinstance(apply_to, str)
    names = tuple(apply_to) if isinstance(apply_to, Iterable) else (apply_to,)
    if is_text or not all(isinstance(name, str) for name in names):
        example = described(apply_to) if is_text else "'x'"
        expected = f"a list of names of arguments, such as apply_to=[{example}]"
        raise wrong(TypeError, "autocast", apply_to, expected, name="apply_to")
    parameters = inspect.signature(fun).parameters if names else {}
    unknown = [name for name in names if name not in parameters]
    if unknown:
        raise ValueError(
            f"autocast got apply_to={described(list(names))}, but '{function_name(fun)}' has no "
            f"argument {listed(unknown)}; it has {', '.join(list(parameters)[:16])}."
        )
    return names


def _check_unchanged(arguments: Any, held: StaticPart, arrays: Sequence[Any]) -> None:
    try:
        after, structure_after = jax.tree.flatten(arguments)
    except ValueError:  # an argument that may be used once, such as Equinox's State
        return
    pairs = zip(after, held.leaves_with(arrays), strict=True)
    if structure_after != held.structure or not all(a is b for a, b in pairs):
        raise ValueError(
            "The function changes one of its arguments; the change would be lost, because autocast "
            "traces a copy. Work on a copy of a dictionary or list (batch = {**batch, ...}), and "
            "return what changes. For nnx modules, whose state changes, use "
            "jmp.adapters.nnx.autocast, which writes their state back."
        )
