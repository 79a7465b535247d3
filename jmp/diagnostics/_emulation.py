"""A loss and its gradient, compiled once, whose scopes round by flags that it is called with.

A plan of autocast is run with numerics of its own, in the dtypes that it was traced with. Where the
plan casts to half, a value is rounded to the numbers of the half type, and so is its cotangent in
the backward pass: in the scope of the operation that reads it, or that stores it. The operands of
a float8 product are rounded once more, to float8 with `_float8`'s scales, and so is the cotangent
of its result. The flags are arrays, so that one compiled program stands for every choice of scopes.
"""

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp import _jax_compat
from jmp._array_calls import ArrayCall, vjp_at
from jmp.autocasting import _float8
from jmp.autocasting._autocast import make_program
from jmp.autocasting._casts import saturated
from jmp.autocasting._emit import Environment, Numerics, run_plan, run_steps
from jmp.autocasting._graph import Node
from jmp.autocasting._operations import NoHalfProductWarning
from jmp.autocasting._precision import with_default
from jmp.autocasting._request import module_paths
from jmp.autocasting._steps import Fused, Island, Nested, Plan, Read, Single, Write
from jmp.diagnostics._arguments import check_numbers
from jmp.diagnostics._scope_search import Errors, Scopes
from jmp.diagnostics._walk import path_in_rules, scopes_path
from jmp.dtypes import FLOAT32
from jmp.policy import Policy, get_policy
from jmp.rules import UnusedRuleWarning

CUSTOM_DERIVATIVES = ("custom_jvp_call", "custom_vjp_call")


# Given the path of a scope, and whether it is asked about float8 instead of half, returns a scalar
# bool. It is called for each rounding while a plan is traced; about float8 where there are such
# products.
Flag = Callable[[str, bool], Any]
Change = Callable[[Any], Any]  # of an array


class FlaggedProgram:
    """A loss and its gradient, whose scopes round to half or not by flags.

    Attributes:
      scopes: their paths, as rules name them, in program order.
      in_float8: those with float8 products.
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
        paths = call.floating_within(argnums, "find_float32")
        with warnings.catch_warnings():
            for told in (UnusedRuleWarning, NoHalfProductWarning):  # when it is measured
                warnings.simplefilter("ignore", told)
            traced = program.trace(tuple(args), {})
        self._plan, self._paths, self._scale = traced.plan, paths, scale
        self._constants = traced.constants
        self._of_modules = of_modules
        self._find_scopes()
        self._step = jax.jit(self._loss_and_gradients)
        self._expected = self._call(frozenset(), frozenset())
        (loss,), gradients = self._expected
        pairs = zip(paths.values(), gradients, strict=True)
        self.expected = {("result", ""): loss, **{("gradient", path): x for path, x in pairs}}
        _check_finite(self.expected)

    def _find_scopes(self) -> None:
        found: dict[str, None] = {}
        found_in_float8: dict[str, None] = {}

        def note(scope: str, is_float8: bool) -> Any:
            (found_in_float8 if is_float8 else found)[scope] = None
            return np.False_

        jax.eval_shape(lambda *arrays: self._run(arrays, note), *self._arrays)
        self.scopes, self.in_float8 = list(found), frozenset(found_in_float8)
        if not self.scopes:
            raise ValueError(
                "find_float32 got a function in which autocast puts nothing in half: it has no "
                "product, or it runs under autocast already, as what an adapter returns. Expected "
                "the function in float32: loss_fn, and not jmp.autocast(loss_fn, policy)."
            )
        if self.scopes == [""] and not self._of_modules:
            raise ValueError(
                "find_float32 got a function that opens no name scopes, so that no rule can name a "
                "part of it. Modules of Flax linen and Haiku open them, and so do those of nnx and "
                "Equinox that are arguments of it; elsewhere write with jax.named_scope('head'): "
                "around each part, such as the call of a layer."
            )

    def errors(self, in_half: Scopes, in_float8: Scopes) -> Errors:
        """Returns the errors of loss and gradient where some scopes round to half.

        Args:
          in_half: their paths.
          in_float8: of those among them whose float8 products are float8.
        """
        norms = _norms(self._call(in_half, in_float8), self._expected)
        loss, gradient = (_relative(*map(float, pair)) for pair in norms)
        return loss, gradient

    def _call(self, in_half: Scopes, in_float8: Scopes) -> Any:
        half = {scope: scope in in_half for scope in self.scopes}
        float8 = {scope: scope in in_float8 for scope in self.scopes}
        return self._step(half, float8, self._arrays)

    def _loss_and_gradients(self, half: Any, float8: Any, arrays: Any) -> Any:
        def flag(scope: str, is_float8: bool) -> Any:
            return (float8 if is_float8 else half)[scope]

        loss, vjp = vjp_at(lambda *some: self._run(some, flag), arrays, list(self._paths))
        gradients = vjp(jnp.full((), self._scale, loss.dtype))
        return [loss], [gradient / self._scale for gradient in gradients]

    def _run(self, arrays: Sequence[Any], flag: Flag) -> Any:
        numerics = _Rounding(self._plan.request.settings.compute_dtype, flag, self._of_modules)
        return run_plan(self._plan, [*self._constants, *arrays], numerics=numerics)[0]


@jax.jit
def _norms(found: Any, expected: Any) -> Any:
    """Returns for the loss and for the gradient the norm of the error, and that of the expected."""
    errors = jax.tree.map(jnp.subtract, found, expected)
    return [tuple(map(_norm, both)) for both in zip(errors, expected, strict=True)]


def _norm(leaves: Sequence[Any]) -> Any:
    """Returns the Euclidean norm of all leaves as one vector, which does not overflow by itself."""
    unit = jnp.max(jnp.stack([jnp.max(abs(x), initial=0) for x in leaves]))
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


Access = TypeVar("Access", Read, Write)


class _Rounding(Numerics):
    """Computes all in float32, and rounds where `_emit` casts."""

    def __init__(self, half: np.dtype, flag: Flag, of_modules: bool) -> None:
        self._half, self._flag, self._of_modules = half, flag, of_modules

    def operand(self, read: Read, step: Single | Nested, environment: Environment) -> Any:
        array = super().operand(self._unrounded(read), step, environment)
        scope = self._scope(step.node)
        if _is_in(self._half, read):
            return self._round(array, scope, read.saturates)
        if _is_in(FLOAT32, read) and isinstance(step, Single) and step.rounds is not None:
            # Its gradient is to be float32: it is rounded forwards alone.
            wide = jnp.asarray(array, np.float32)
            return _rounded(wide, self._flag(scope, False), self._to_half, _as_it_is)
        return array

    def output(self, read: Read, environment: Environment) -> Any:
        array = super().output(self._unrounded(read), environment)
        if not _is_in(self._half, read):
            return array
        return self._round(array, self._scope(read.value.producer))

    def arguments(self, inside: Plan, arrays: Sequence[Any]) -> Sequence[Any]:
        return arrays

    def store(self, write: Write, array: Any, environment: Environment) -> None:
        if _is_in(self._half, write):
            array = self._round(array, self._scope(write.value.producer), write.saturates)
        environment[write.value] = array

    def run_single(
        self, step: Single, operands: Sequence[Any], environment: Environment
    ) -> Sequence[Any]:
        primitive, params = step.node.equation.primitive, with_default(step.node)
        if step.in_float8 is None:
            return _jax_compat.bind(primitive, operands, params)
        flag = self._flag(self._scope(step.node), True)
        to_operand, to_gradient = map(self._rounding_to, (_float8.OPERANDS, _float8.GRADIENTS))
        operands = [_rounded(x, flag, to_operand, _as_it_is) for x in operands]
        results = _jax_compat.bind(primitive, operands, params)
        return [_rounded(x, flag, _as_it_is, to_gradient) for x in results]

    def run_nested(self, step: Nested, operands: Sequence[Any]) -> Sequence[Any]:
        if step.node.name not in CUSTOM_DERIVATIVES:
            return super().run_nested(step, operands)
        # As written, with its own derivative: what goes in and comes out is rounded alone.
        return _jax_compat.bind(step.node.equation.primitive, operands, with_default(step.node))

    def reads_of(self, step: Single | Nested) -> Sequence[Read]:
        return step.reads

    def run_loop(
        self, step: Nested, run: Callable[[Nested, Sequence[Any]], Any], operands: Sequence[Any]
    ) -> Any:
        return run(step, operands)

    def run_island(self, island: Island, environment: Environment) -> None:
        reads = tuple(map(self._unrounded, island.reads))
        writes = tuple(map(self._unrounded, island.writes))
        super().run_island(island._replace(reads=reads, writes=writes), environment)
        for write in island.writes:
            self.store(write, environment[write.value], environment)

    def run_fused(self, step: Fused, environment: Environment) -> None:
        run_steps(step.plain, environment, self)

    def _scope(self, node: Node | None) -> str:
        """Returns the path of an operation's module, or of its name scopes, as rules name it."""
        if node is None:
            return ""
        if self._of_modules:
            innermost_first = module_paths(_jax_compat.scope_names(node.scope))
            return innermost_first[0] if innermost_first else ""
        return path_in_rules(scopes_path(node.scope))

    def _unrounded(self, access: Access) -> Access:
        if not _is_in(self._half, access):
            return access
        return access._replace(dtype=FLOAT32, saturates=False)

    def _round(self, array: Any, scope: str, saturates: bool = False) -> Any:
        array, flag = jnp.asarray(array, np.float32), self._flag(scope, False)
        if saturates:
            array = jnp.where(flag, saturated(array), array)
        return _rounded(array, flag, self._to_half, self._to_half)

    def _to_half(self, x: Any) -> Any:
        return rounded_to_half(x, self._half)

    def _rounding_to(self, dtype: np.dtype) -> Change:
        def to_float8(x: Any) -> Any:
            found = _float8.as_multiplied(lax.convert_element_type(x, self._half), dtype)
            return lax.convert_element_type(found, x.dtype)

        return to_float8


def _is_in(dtype: np.dtype, access: Read | Write) -> bool:
    return access.dtype == dtype and access.value.is_float32


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


def _as_it_is(x: Any) -> Any:
    return x


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _rounded(x: Any, flag: Any, forward: Change, backward: Change) -> Any:
    """Changes an array by `forward` where a flag says so, its cotangent by `backward`."""
    return jnp.where(flag, forward(x), x)


def _rounded_forward(x: Any, flag: Any, forward: Change, backward: Change) -> tuple[Any, Any]:
    return jnp.where(flag, forward(x), x), flag


def _rounded_backward(forward: Change, backward: Change, flag: Any, cotangent: Any) -> Any:
    return jnp.where(flag, backward(cotangent), cotangent), None


_rounded.defvjp(_rounded_forward, _rounded_backward)
