"""Runs a plan of autocast in float32, rounding to half and float8 where flags of scopes say so.

A plan is run as `_emit` runs it, but every value keeps the dtype that it was traced with. Where the
plan casts to half, a value is rounded to the numbers of the half type, and so is its cotangent in
the backward pass: in the scope of the operation that reads it, or that stores it. The operands of
a float8 product are rounded once more, to float8 with `_float8`'s scales, and so is the cotangent
of its result. The flags are arrays, so that one compiled program stands for every choice of scopes.

An operation inside a loop, a branch or a remat rounds only if the scopes of those around it do,
too: a rule that gives such a scope to float32 gives it all that is inside. Of float8 a rule takes
the products of its scope alone.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp import _jax_compat
from jmp.autocasting import _float8
from jmp.autocasting._casts import repeated, saturated
from jmp.autocasting._graph import Node, Value
from jmp.autocasting._kinds import kind_of
from jmp.autocasting._precision import with_default
from jmp.autocasting._regions import MODULE, modules_path
from jmp.autocasting._steps import (
    Inside,
    Island,
    Nested,
    Plan,
    Read,
    Single,
    Unplanned,
    Write,
    plain_steps,
)
from jmp.diagnostics._walk import module_path
from jmp.dtypes import FLOAT32

CUSTOM_DERIVATIVES = ("custom_jvp_call", "custom_vjp_call")


class Site(NamedTuple):
    """Whose flags say whether a value is rounded: paths of name scopes, "" outside of all."""

    path: str
    around: frozenset[str] = frozenset()  # of the loops, branches and remats around


Flag = Callable[[Site], Any]  # returns a flag, a scalar bool, for a site


class Flags(NamedTuple):
    """Whether a site rounds: called once for each rounding while a plan is traced."""

    is_half: Flag
    is_float8: Flag  # beside `is_half`; asked of sites of float8 products alone


class _Rounding(NamedTuple):
    half: np.dtype
    flags: Flags


def run_emulated(plan: Plan, arguments: Sequence[Any], flags: Flags) -> list[Any]:
    """Returns the outputs of a plan, in the dtypes that they were traced with.

    Args:
      plan: as `Program.trace` returns it.
      arguments: its inputs, constants first, in the dtypes that they were traced with.
    """
    rounding = _Rounding(plan.words.settings.compute_dtype, flags)
    return _Level(rounding, frozenset()).run(plan, arguments)


class _Level:
    """One level of nesting: the values that it has computed, and which are rounded by what."""

    def __init__(self, rounding: _Rounding, around: frozenset[str]) -> None:
        self._rounding = rounding
        self._half, (self._is_half, self._is_float8) = rounding
        self._around = around
        self._values: dict[Value, Any] = {}
        self._rounded: dict[Value, Site] = {}

    def run(self, plan: Plan, arguments: Sequence[Any]) -> list[Any]:
        self._values.update(zip(plan.graph.inputs, arguments, strict=True))
        for step in plain_steps(plan.steps):
            if isinstance(step, Island):
                self._island(step)
                continue
            with _jax_compat.place_of(step.node.equation, step.node.stack):
                results = self._single(step) if isinstance(step, Single) else self._nested(step)
            for value, result, dtype in zip(step.node.outputs, results, step.stores, strict=True):
                self._store(value, result, dtype, self._site(step.node))
        return [self._read(value) for value in plan.graph.outputs]

    def _site(self, node: Node | None) -> Site:
        return Site("" if node is None else scope_of(node), self._around)

    # The three sorts of steps.

    def _single(self, step: Single) -> list[Any]:
        site = self._site(step.node)
        operands = [self._read_as(read, site, step.rounds is not None) for read in step.reads]
        params = with_default(step.node)
        if step.in_float8 is None:
            return _jax_compat.bind(step.node.equation.primitive, operands, params)
        flag = self._is_half(site) & self._is_float8(site)
        operands = [_operand_in_float8(operand, flag, self._half) for operand in operands]
        results = _jax_compat.bind(step.node.equation.primitive, operands, params)
        return [_cotangent_in_float8(result, flag, self._half) for result in results]

    def _nested(self, step: Nested) -> Sequence[Any]:
        site, equation = self._site(step.node), step.node.equation
        operands = [
            value if isinstance(value, jax.Array) else jnp.asarray(value, read.value.dtype)
            for read in step.reads
            for value in [self._enter(read, site)]
        ]
        if step.node.name in CUSTOM_DERIVATIVES:
            # As written, with its own derivative: what goes in and comes out is rounded alone.
            params = with_default(step.node)
            return _jax_compat.bind(equation.primitive, operands, params)
        functions = [self._function(inside, site) for inside in step.insides]
        results: Sequence[Any] = kind_of(step.node.name).emit(equation, operands, functions)
        return results

    def _enter(self, read: Read, site: Site) -> Any:
        """Returns an operand of a nested equation; what is stored in half is rounded already."""
        if read.value in self._rounded:
            return self._values[read.value]
        return self._read_as(read, site)

    def _function(self, inside: Inside | Unplanned, site: Site) -> Callable[..., list[Any]]:
        around = site.around | {site.path}
        if not isinstance(inside, Inside):  # the condition of a loop
            return inside(lambda plan, arrays: _Level(self._rounding, around).run(plan, arrays))

        def function(*arrays: Any) -> list[Any]:
            level = _Level(self._rounding, around)
            level.run(inside.plan, [*inside.constants, *arrays])
            stores = inside.stores or inside.plan.stores
            for value, dtype in zip(inside.plan.graph.outputs, stores, strict=True):
                if value.held is None and value not in level._rounded:
                    level._store(value, level._values[value], dtype, level._site(value.producer))
            return [level._read(value) for value in inside.plan.graph.outputs]

        return function

    def _island(self, island: Island) -> None:
        inside = _Level(self._rounding, self._around)
        inside._values = {read.value: self._values[read.value] for read in island.reads}
        for node in (*island.clones, *island.nodes):
            with _jax_compat.place_of(node.equation, node.stack):
                operands = [inside._read(value) for value in node.inputs]
                results = _jax_compat.bind(node.equation.primitive, operands, node.params)
            inside._values.update(zip(node.outputs, results, strict=True))
        for leave in island.writes:
            self._leave(leave, inside._values[leave.value])

    def _leave(self, leave: Write, result: Any) -> None:
        site = self._site(leave.value.producer)
        self._store(leave.value, result, leave.dtype, site, leave.saturates)

    # Values.

    def _store(
        self, value: Value, result: Any, dtype: Any, site: Site, saturates: bool = False
    ) -> None:
        if dtype == self._half and value.is_float32 and value not in self._rounded:
            result = self._round(result, site, saturates)
            self._rounded[value] = site
        self._values[value] = result

    def _read(self, value: Value) -> Any:
        return self._values[value] if value.held is None else value.held

    def _read_as(self, read: Read, site: Site, rounds_inside: bool = False) -> Any:
        value, dtype, shape, saturates = read
        array = self._read(value)
        if not value.is_float32:
            return array
        if shape is not None:
            array = repeated(array, shape)
        if dtype == self._half and (self._rounded.get(value) != site or saturates):
            return self._round(array, site, saturates)
        if dtype == FLOAT32 and rounds_inside:
            return _round_forward(jnp.asarray(array, np.float32), self._is_half(site), self._half)
        return array

    def _round(self, array: Any, site: Site, saturates: bool) -> Any:
        array, flag = jnp.asarray(array, np.float32), self._is_half(site)
        if saturates:
            array = jnp.where(flag, saturated(array), array)
        return _round(array, flag, self._half)


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


def rounded(x: Any, half: np.dtype) -> Any:
    """Returns float32 numbers rounded to those of a half type, ties to even, as a cast does.

    >>> rounded(jnp.array([1 + 2.0**-11, 3e-8, 7e4]), np.dtype("float16"))
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


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _round(x: Any, flag: Any, half: np.dtype) -> Any:
    return jnp.where(flag, rounded(x, half), x)


def _forward(x: Any, flag: Any, half: np.dtype) -> tuple[Any, Any]:
    return _round(x, flag, half), flag


def _backward(half: np.dtype, flag: Any, cotangent: Any) -> tuple[Any, None]:
    return jnp.where(flag, rounded(cotangent, half), cotangent), None


_round.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _round_forward(x: Any, flag: Any, half: np.dtype) -> Any:
    return jnp.where(flag, rounded(x, half), x)


_round_forward.defvjp(_forward, lambda half, flag, cotangent: (cotangent, None))


def _in_float8(x: Any, flag: Any, half: np.dtype, dtype: np.dtype) -> Any:
    found = _float8.as_multiplied(lax.convert_element_type(x, half), dtype)
    return jnp.where(flag, lax.convert_element_type(found, x.dtype), x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _operand_in_float8(x: Any, flag: Any, half: np.dtype) -> Any:
    return _in_float8(x, flag, half, _float8.OPERANDS)


_operand_in_float8.defvjp(
    lambda x, flag, half: (_operand_in_float8(x, flag, half), None),
    lambda half, _, cotangent: (cotangent, None),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _cotangent_in_float8(x: Any, flag: Any, half: np.dtype) -> Any:
    return x


_cotangent_in_float8.defvjp(
    lambda x, flag, half: (x, flag),
    lambda half, flag, cotangent: (_in_float8(cotangent, flag, half, _float8.GRADIENTS), None),
)
