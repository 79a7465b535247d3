"""A loss and its gradient, compiled once, whose scopes round by flags that it is called with.

A plan of autocast is run with numerics of its own, in the dtypes that it was traced with. Where the
plan casts to half, a value is rounded to the numbers of the half type, and so is its cotangent in
the backward pass: in the scope of the operation that reads it, or that stores it. The operands of
a float8 product are rounded once more, to float8 with `_float8`'s scales, and so is the cotangent
of its result. The flags are arrays, so that one compiled program stands for every choice of scopes.

An operation inside a loop, a branch or a remat rounds only if the scopes of those around it do,
too: a rule that gives such a scope to float32 gives it all that is inside. Of float8 a rule takes
the products of its scope alone.
"""

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp import _jax_compat
from jmp._array_calls import ArrayCall, vjp_at
from jmp._messages import described
from jmp.autocasting import _float8
from jmp.autocasting._autocast import make_program
from jmp.autocasting._casts import repeated, saturated
from jmp.autocasting._emit import Environment, Numerics, run_plan, run_steps
from jmp.autocasting._graph import Node, Value
from jmp.autocasting._operations import NoHalfProductWarning
from jmp.autocasting._precision import with_default
from jmp.autocasting._request import MODULE, modules_path
from jmp.autocasting._steps import Fused, Island, Nested, Plan, Read, Single, Write
from jmp.diagnostics._arguments import check_numbers
from jmp.diagnostics._scope_search import Errors, in_groups
from jmp.diagnostics._walk import module_path
from jmp.dtypes import FLOAT32
from jmp.policy import Policy, get_policy
from jmp.rules import UnusedRuleWarning

CUSTOM_DERIVATIVES = ("custom_jvp_call", "custom_vjp_call")


class Scope(NamedTuple):
    """What flags stand for."""

    path: str  # name scopes joined by slashes, "" outside of all
    around: frozenset[str] = frozenset()  # the paths of loops, branches and remats around


# Given a scope, and whether it is asked about float8 instead of half, returns a scalar bool. It is
# called once for each rounding while a plan is traced; about float8 in scopes of such products.
Flag = Callable[[Scope, bool], Any]


class FlaggedProgram:
    """A loss and its gradient, whose scopes round to half or not by flags.

    Attributes:
      scopes: their paths.
      in_float8: the numbers of those with float8 products.
      expected: loss and gradients in float32, by kind and path as `compare` has them.
    """

    def __init__(
        self,
        loss: Callable[..., Any],
        policy: str | Policy,
        args: Sequence[Any],
        argnums: int | Sequence[int],
        scale: float,
        options: dict[str, Any],
        of_modules: bool = False,
    ) -> None:
        program = make_program(loss, policy, **options)
        if program is None:
            raise ValueError(
                f"find_float32 got the policy {get_policy(policy)}, which computes in float32: "
                "nothing is in half. Ask with 'mixed_float16' or 'mixed_bfloat16'."
            )
        call = ArrayCall(loss, args)
        check_numbers(
            call.arrays, "find_float32", "the arrays of a training step, outside of jax.jit"
        )
        self._arrays = call.arrays
        within = call.within(argnums, "find_float32").items()
        paths = {i: p for i, p in within if jnp.issubdtype(self._arrays[i].dtype, jnp.inexact)}
        if not paths:
            raise ValueError(
                f"find_float32 got argnums={described(argnums)} and {len(args)} arguments, with no "
                "floating array to differentiate there; expected the parameters."
            )
        with warnings.catch_warnings():
            for told in (UnusedRuleWarning, NoHalfProductWarning):  # when it is measured
                warnings.simplefilter("ignore", told)
            traced = program.trace(tuple(args), {})
        self._plan, self._positions, self._scale = traced.plan, list(paths), scale
        self._constants = _jax_compat.open_jaxpr(traced.closed)[1]
        self._find_scopes(of_modules)
        self._compile(list(paths.values()))

    def _find_scopes(self, of_modules: bool) -> None:
        """Notes all scopes that round, in program order, in groups if there are many."""
        found: dict[str, None] = {}
        found_in_float8: dict[str, None] = {}

        def note(scope: Scope, is_float8: bool) -> Any:
            (found_in_float8 if is_float8 else found)[scope.path] = None
            return np.False_

        jax.eval_shape(lambda *arrays: self._run(arrays, note), *self._arrays)
        named = {path: _name_in_rules(path, of_modules) for path in found}
        groups = in_groups(named.values())
        group_of = {path: groups[name] for path, name in named.items()}
        self.scopes = list(dict.fromkeys(group_of.values()))
        numbers = {scope: number for number, scope in enumerate(self.scopes)}
        self._number_of = {path: numbers[group] for path, group in group_of.items()}
        self.in_float8 = frozenset(self._number_of[path] for path in found_in_float8)
        if not self.scopes:
            raise ValueError(
                "find_float32 got a function in which autocast puts nothing in half: it has no "
                "product, or it runs under autocast already, as what an adapter returns. Expected "
                "the function in float32: loss_fn, and not jmp.autocast(loss_fn, policy)."
            )
        if self.scopes == [""] and not of_modules:
            raise ValueError(
                "find_float32 got a function that opens no name scopes, so that no rule can name a "
                "part of it. Modules of Flax linen and Haiku open them, and so do those of nnx and "
                "Equinox that are arguments of it; elsewhere write with jax.named_scope('head'): "
                "around each part, such as the call of a layer."
            )

    def _compile(self, paths: list[str]) -> None:
        """Compiles the program, and runs it without any rounding for what is expected."""
        # A gradient stays where its parameter lies. A reference that lay elsewhere than the zeros
        # of the first call would make another program.
        some = [self._arrays[i] for i in self._positions]
        placed = [x.sharding if getattr(x, "committed", False) else None for x in some]
        self._step = jax.jit(self._loss_and_errors, out_shardings=((None, placed), None))
        zeros = [np.zeros(x.shape, x.dtype) for x in some]
        self._reference: Any = (
            np.zeros((), np.float32),
            [x if p is None else jax.device_put(x, p) for x, p in zip(zeros, placed, strict=True)],
        )
        loss, gradients = self._call((), (), False)[0]
        self.expected = {("result", ""): loss}
        self.expected |= {("gradient", p): x for p, x in zip(paths, gradients, strict=True)}
        _check_finite(self.expected)
        self._reference = (
            np.asarray(loss),
            [
                np.asarray(x) if p is None and len(x.sharding.device_set) > 1 else x
                for x, p in zip(gradients, placed, strict=True)
            ],
        )

    def errors(self, in_half: Iterable[int], in_float8: Iterable[int], is_alone: bool) -> Errors:
        """Returns the errors of loss and gradient where some scopes round to half.

        Args:
          in_half: their numbers.
          in_float8: the numbers of those among them whose float8 products are float8.
          is_alone: loops and branches do not take what is inside to float32 with them.
        """
        norms = self._call(in_half, in_float8, is_alone)[1]
        loss, gradient = (_relative(*map(float, pair)) for pair in norms)
        return loss, gradient

    def _call(self, in_half: Iterable[int], in_float8: Iterable[int], is_alone: bool) -> Any:
        own, float8 = np.zeros((2, len(self.scopes)), bool)
        own[list(in_half)] = True
        float8[list(in_float8)] = True
        inside = np.ones_like(own) if is_alone else own
        return self._step((own, inside, float8), self._arrays, self._reference)

    def _run(self, arrays: Sequence[Any], flag: Flag) -> Any:
        numerics = _Rounding(self._plan.request.settings.compute_dtype, flag)
        return run_plan(self._plan, [*self._constants, *arrays], numerics=numerics)[0]

    def _loss_and_errors(self, flags: Any, arrays: Any, reference: Any) -> Any:
        own, inside, float8 = ([array[i] for i in range(len(self.scopes))] for array in flags)

        def flag(scope: Scope, is_float8: bool) -> Any:
            number = self._number_of[scope.path]
            if is_float8:
                return float8[number]
            around = (inside[self._number_of[p]] for p in scope.around if p in self._number_of)
            return functools.reduce(jnp.logical_and, around, own[number])

        loss, vjp = vjp_at(lambda *some: self._run(some, flag), arrays, self._positions)
        gradients = [g / self._scale for g in vjp(jnp.full((), self._scale, loss.dtype))]
        expected, expected_gradients = reference
        return (loss, gradients), (
            (_norm([loss - expected]), _norm([expected])),
            (
                _norm([a - b for a, b in zip(gradients, expected_gradients, strict=True)]),
                _norm(expected_gradients),
            ),
        )


def _name_in_rules(path: str, of_modules: bool) -> str:
    """Returns what a rule calls a scope: where it calls modules, "" for what is in none."""
    if not of_modules:
        return path
    return path.removeprefix(MODULE) if path.startswith(MODULE) else ""


def _norm(leaves: Sequence[Any]) -> Any:
    """Returns the Euclidean norm of all leaves as one vector, which does not overflow by itself."""
    largest = [jnp.max(abs(x), initial=0) for x in leaves]
    unit = jnp.max(jnp.stack(largest))
    unit = jnp.where(unit > 0, unit, 1)
    return unit * jnp.sqrt(sum(jnp.sum(abs(x / unit) ** 2) for x in leaves))


def _relative(error: float, reference: float) -> float:
    if error == 0:
        return 0.0
    return error / reference if math.isfinite(error) and reference > 0 else math.inf


def _check_finite(expected: dict[tuple[str, str], Any]) -> None:
    wrong = [
        f"the gradient of {path or 'the argument'}" if kind == "gradient" else "the loss"
        for (kind, path), x in expected.items()
        if not np.all(np.isfinite(np.asarray(x)))
    ]
    if wrong:
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise ValueError(
            f"find_float32 found {wrong[0]}{more} infinite or NaN in float32, so that there is "
            "nothing to compare with. diagnostics.find_nonfinite(jax.grad(loss_fn))(*args) names "
            "the operation behind it."
        )


# Running a plan.


@dataclasses.dataclass(frozen=True)
class RoundedIn:
    """The key, among the values of a level, of the scope that a value was rounded in."""

    value: Value


class _Rounding(Numerics):
    """Computes all in float32, and rounds where `_emit` casts."""

    def __init__(self, half: np.dtype, flag: Flag, around: frozenset[str] = frozenset()) -> None:
        self._half, self._flag, self._around = half, flag, around

    def _scope(self, node: Node | None) -> Scope:
        return Scope("" if node is None else scope_of(node), self._around)

    def operand(self, read: Read, step: Single | Nested, environment: Environment) -> Any:
        value, dtype, shape, saturates = read
        array = _held_or_computed(value, environment)
        is_nested, scope = isinstance(step, Nested), self._scope(step.node)
        rounded_in = environment.get(RoundedIn(value))
        if value.is_float32 and not (is_nested and rounded_in):
            if shape is not None:
                array = repeated(array, shape)
            if dtype == self._half and (rounded_in != scope or saturates):
                array = self._round(array, scope, saturates)
            elif dtype == FLOAT32 and isinstance(step, Single) and step.rounds is not None:
                wide = jnp.asarray(array, np.float32)
                array = _rounded(wide, self._flag(scope, False), self._to_half, None)
        is_number = is_nested and not isinstance(array, jax.Array)
        return jnp.asarray(array, value.dtype) if is_number else array

    def output(self, read: Read, environment: Environment) -> Any:
        value = read.value
        array = _held_or_computed(value, environment)
        is_rounded = value.held is not None or RoundedIn(value) in environment
        if is_rounded or read.dtype != self._half or not value.is_float32:
            return array
        return self._round(array, self._scope(value.producer))

    def arguments(self, inside: Plan, arrays: Sequence[Any]) -> Sequence[Any]:
        return arrays

    def inside(self, step: Nested) -> Numerics:
        return _Rounding(self._half, self._flag, self._around | {scope_of(step.node)})

    def store(self, write: Write, array: Any, environment: Environment) -> None:
        value = write.value
        if write.dtype == self._half and value.is_float32:
            scope = self._scope(value.producer)
            array = self._round(array, scope, write.saturates)
            environment[RoundedIn(value)] = scope
        environment[value] = array

    def run_single(
        self, step: Single, operands: Sequence[Any], environment: Environment
    ) -> Sequence[Any]:
        primitive, params = step.node.equation.primitive, with_default(step.node)
        if step.in_float8 is None:
            return _jax_compat.bind(primitive, operands, params)
        scope = self._scope(step.node)
        flag = self._flag(scope, False) & self._flag(scope, True)
        operands = [_rounded(x, flag, self._to_operand, None) for x in operands]
        results = _jax_compat.bind(primitive, operands, params)
        return [_rounded(x, flag, None, self._to_gradient) for x in results]

    def run_nested(self, step: Nested, operands: Sequence[Any]) -> Sequence[Any]:
        if step.node.name not in CUSTOM_DERIVATIVES:
            return super().run_nested(step, operands)
        # As written, with its own derivative: what goes in and comes out is rounded alone.
        params = with_default(step.node)
        return _jax_compat.bind(step.node.equation.primitive, operands, params)

    def run_island(self, island: Island, environment: Environment) -> None:
        inside = {read.value: environment[read.value] for read in island.reads}
        for node in (*island.clones, *island.nodes):
            with _jax_compat.place_of(node.equation, node.stack):
                operands = [_held_or_computed(value, inside) for value in node.inputs]
                results = _jax_compat.bind(node.equation.primitive, operands, node.params)
            inside.update(zip(node.outputs, results, strict=True))
        for write in island.writes:
            self.store(write, inside[write.value], environment)

    def run_fused(self, step: Fused, environment: Environment) -> None:
        run_steps(step.plain, environment, self)

    def _round(self, array: Any, scope: Scope, saturates: bool = False) -> Any:
        array, flag = jnp.asarray(array, np.float32), self._flag(scope, False)
        if saturates:
            array = jnp.where(flag, saturated(array), array)
        return _rounded(array, flag, self._to_half, self._to_half)

    def _to_half(self, x: Any) -> Any:
        return rounded_to_half(x, self._half)

    def _to_operand(self, x: Any) -> Any:
        return self._to_float8(x, _float8.OPERANDS)

    def _to_gradient(self, x: Any) -> Any:
        return self._to_float8(x, _float8.GRADIENTS)

    def _to_float8(self, x: Any, dtype: np.dtype) -> Any:
        found = _float8.as_multiplied(lax.convert_element_type(x, self._half), dtype)
        return lax.convert_element_type(found, x.dtype)


def _held_or_computed(value: Value, environment: Environment) -> Any:
    return environment[value] if value.held is None else value.held


def scope_of(node: Node) -> str:
    """Returns the path of an operation's name scopes, without those that `jnp.einsum` opens.

    An einsum is no module: what stands in it belongs to the scope around it. Inside a module whose
    scope `ModuleScopes` opened it is the name of that scope alone.
    """
    path = modules_path(_jax_compat.scope_names(node.scope))
    if path is not None:
        return MODULE + path
    names = module_path(node.scope).split("/")
    spelled = next((i for i, name in enumerate(names) if "->" in name), len(names))
    return "/".join(names[:spelled])


# Rounding, without a cast: XLA may take a pair of casts away.


def rounded_to_half(x: Any, half: np.dtype) -> Any:
    """Returns float32 numbers rounded to those of a half type, ties to even, as a cast does.

    >>> rounded_to_half(jnp.array([1 + 2.0**-11, 3e-8, 7e4]), np.dtype("float16"))
    Array([1.0000000e+00, 5.9604645e-08,           inf], dtype=float32)
    """
    limits = jnp.finfo(half)
    near = lax.reduce_precision(x, limits.nexp, limits.nmant)
    if limits.minexp == jnp.finfo(np.float32).minexp:  # bfloat16: the range of float32
        return near
    # `reduce_precision` flushes subnormal numbers; a cast rounds to multiples of the smallest.
    smallest = float(limits.smallest_subnormal)
    subnormal = lax.round(x * (1 / smallest), lax.RoundingMethod.TO_NEAREST_EVEN) * smallest
    return lax.select(abs(x) < float(limits.smallest_normal), subnormal, near)


Change = Callable[[Any], Any] | None  # of an array; None: it stays as it is


def _where(flag: Any, change: Change, x: Any) -> Any:
    return x if change is None else jnp.where(flag, change(x), x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _rounded(x: Any, flag: Any, forward: Change, backward: Change) -> Any:
    """Changes an array by `forward` where a flag says so, its cotangent by `backward`."""
    return _where(flag, forward, x)


_rounded.defvjp(
    lambda x, flag, forward, backward: (_where(flag, forward, x), flag),
    lambda forward, backward, flag, cotangent: (_where(flag, backward, cotangent), None),
)
