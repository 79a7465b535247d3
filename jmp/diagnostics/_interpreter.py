"""Runs a program operation by operation and finds who made each result non-finite.

Every operation runs by itself, so each result is rounded to its dtype before the next one reads it;
inside a fusion XLA may keep more. What holds a program runs as a whole first, compiled: a loop, one
turn of it, a shard_map. It is looked into only if it is the origin.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn

from jmp import _jax_compat
from jmp.autocasting._kinds import has_kind
from jmp.autocasting._operations import is_product
from jmp.diagnostics._origins import Call, Held, Origin, Place, earliest, handed_on, is_finite_of
from jmp.diagnostics._replay import literal
from jmp.diagnostics._states import FINITE, NAN, is_inexact, operand, state_of

Origins = list[Origin | None]
Look = Callable[[], Origins]
Step = Callable[[JaxprEqn, list[Held], Place], list[Held]]


class Interpreter:
    """Runs jaxprs operation by operation; see the module."""

    def __init__(self) -> None:
        self._order = itertools.count()

    def given(self, value: Any, kind: str, name: str, place: Place) -> Held:
        """Holds an "argument" or a "constant"; an infinity may be meant, as in a mask."""
        state = state_of(value)
        if state == FINITE:
            return Held(value)
        order = next(self._order) if state == NAN else math.inf
        dtype, read = str(value.dtype), (operand(value),)
        return Held(value, state, Origin(order, kind, name, dtype, state, {}, place, read))

    def run(self, jaxpr: Any, operands: list[Held], place: Place) -> list[Held]:
        """Returns what a jaxpr gives. `operands` is emptied: each is freed after its last use."""
        jaxpr, constants = _jax_compat.open_jaxpr(jaxpr)
        values: dict[Any, Held] = dict(zip(jaxpr.invars, operands, strict=True))
        operands.clear()
        for variable, constant in zip(jaxpr.constvars, constants, strict=True):
            readers = (e for e in jaxpr.eqns if any(atom is variable for atom in e.invars))
            here = next(map(place.at, readers), place)
            values[variable] = self.given(constant, "constant", "", here)
        variables = [_variables(e.invars) for e in jaxpr.eqns] + [_variables(jaxpr.outvars)]
        last_use = {v: index for index, found in enumerate(variables) for v in found}

        def read(atom: Any, place: Place) -> Held:
            if not hasattr(atom, "val"):
                return values[atom]
            return self.given(literal(atom), "constant", "", place)

        for index, equation in enumerate(jaxpr.eqns):
            here = place.at(equation)
            inputs = [read(atom, here) for atom in equation.invars]
            for variable in variables[index]:
                if last_use[variable] == index:
                    values.pop(variable, None)  # gone already if it is read twice
            # In the equation's context: mesh, compute type.
            with _jax_compat.place_of(equation, equation.source_info.name_stack):
                outputs = self._step(equation, inputs, here)
            pairs = zip(equation.outvars, outputs, strict=True)
            values |= {variable: output for variable, output in pairs if variable in last_use}
        return [read(atom, place) for atom in jaxpr.outvars]

    def _step(self, equation: JaxprEqn, inputs: list[Held], here: Place) -> list[Held]:
        name = equation.primitive.name
        named: dict[str, Step] = {"scan": self._scan, "cond": self._cond, "while": self._while}
        named["shard_map"] = self._shard_map
        other: Step = self._call if name in _jax_compat.CALLS else self._operation
        return named.get(name, other)(equation, inputs, here)

    def _operation(
        self,
        equation: JaxprEqn,
        inputs: list[Held],
        here: Place,
        look: Look | None = None,
        call: Call | None = None,
    ) -> list[Held]:
        """Runs an equation by `call`, and finds who made what is not finite.

        Values are those of the whole: what it gave is what is read next. `look` finds the origins
        of its results inside; it says whether the origin is inside.
        """
        call = call or _call_of(equation)
        results = call(*(x.value for x in inputs))
        states = list(map(state_of, results))
        origins: Origins = [None] * len(results)
        if any(states) and look is not None:
            origin = earliest(x.origin for x in inputs)
            if origin is None or origin.may_be_meant or not is_finite_of(call, inputs):
                origins = look()
        if any(state and origin is None for state, origin in zip(states, origins, strict=True)):
            rerun = None if equation.effects and look is None else call
            blamed = handed_on(rerun, inputs, max(states), is_product(equation))
            if blamed is None:
                is_whole = look is not None or _holds_a_program(equation)
                blamed = self._culprit(equation, inputs, max(states), here, is_whole)
            origins = [origin or blamed for origin in origins]
        return [
            Held(result, state, origin) if state else Held(result)
            for result, state, origin in zip(results, states, origins, strict=True)
        ]

    def _culprit(
        self, equation: JaxprEqn, inputs: list[Held], state: int, here: Place, is_whole: bool
    ) -> Origin:
        result: Any = next(v.aval for v in equation.outvars if is_inexact(v.aval))
        read = tuple(operand(x.value) for x in inputs if is_inexact(x.value))
        order, kind = next(self._order), "whole" if is_whole else "operation"
        name, dtype = equation.primitive.name, str(result.dtype)
        meant = [x.origin for x in inputs if x.origin is not None and x.origin.may_be_meant]
        given = tuple(dict.fromkeys(o.name for o in meant if o.kind == "argument"))
        return Origin(order, kind, name, dtype, state, equation.params, here, read, given)

    def _call(self, equation: JaxprEqn, inputs: list[Held], here: Place) -> list[Held]:
        name = equation.primitive.name
        if _jax_compat.is_jit(equation):
            name = f"jit {_jax_compat.name_of(equation)}"
        elif name in _jax_compat.REMAT:
            name = "" if _is_autocasts(equation) else "remat"
        inner = here.within(name) if name else here
        return self.run(_jax_compat.called(equation.params), inputs, inner)

    def _cond(self, equation: JaxprEqn, inputs: list[Held], here: Place) -> list[Held]:
        branches = _jax_compat.branches(equation.params)
        index = np.unique(_jax_compat.on_all_devices(inputs[0].value))
        if index.size > 1:  # devices go different ways
            return self._operation(equation, inputs, here)
        branch = min(max(int(index[0]), 0), len(branches) - 1)
        del inputs[0]
        return self.run(branches[branch], inputs, here.within(f"cond, branch {branch}"))

    def _scan(self, equation: JaxprEqn, inputs: list[Held], here: Place) -> list[Held]:
        scan = _jax_compat.Scan.of(equation.params)
        # A turn is the same scan with a length of one: JAX keeps what it compiled for that.
        one = _jax_compat.one_turn(equation.params)

        def body(*operands: Any) -> list[Any]:
            constants, carry, row = scan.split(operands)
            rows = (x[None] for x in row)
            results = _jax_compat.bind(equation.primitive, [*constants, *carry, *rows], one)
            return [*results[: scan.n_carry], *(y[0] for y in results[scan.n_carry :])]

        def look() -> Origins:
            constants, carry, xs = scan.split(inputs)
            stacked: Origins = [None] * (len(equation.outvars) - scan.n_carry)
            order = range(scan.length)
            for turn in reversed(order) if scan.reverse else order:
                operands = [*constants, *carry, *(_row(x, turn) for x in xs)]
                place = here.within(f"scan, iteration {turn}")
                results = self._turn(equation, body, scan.body, operands, place)
                carry = results[: scan.n_carry]
                rows = _origins_of(results[scan.n_carry :])
                stacked = [earliest(pair) for pair in zip(stacked, rows, strict=True)]
            return [*_origins_of(carry), *stacked]

        return self._operation(equation, inputs, here, look)

    def _while(self, equation: JaxprEqn, inputs: list[Held], here: Place) -> list[Held]:
        loop = _jax_compat.While.of(equation.params)
        tested, constants, first = loop.split(inputs)
        condition = jax.jit(_jax_compat.as_function(loop.condition))
        body = jax.jit(_jax_compat.as_function(loop.body))

        def goes_on(carry: list[Held]) -> np.ndarray:
            (answer,) = condition(*(x.value for x in [*tested, *carry]))
            return np.asarray(_jax_compat.on_all_devices(answer))

        def look() -> Origins:
            carry, turn = first, 0
            if goes_on(carry).size > 1:  # under vmap and shard_map each one stops by itself
                return [None] * len(carry)
            while goes_on(carry).item():
                place = here.within(f"while, iteration {turn}")
                carry = self._turn(equation, body, loop.body, [*constants, *carry], place)
                turn += 1
            return _origins_of(carry)

        return self._operation(equation, inputs, here, look)

    def _turn(
        self, equation: JaxprEqn, body: Call, jaxpr: Any, inputs: list[Held], here: Place
    ) -> list[Held]:
        """Runs one turn of a loop."""
        look = lambda: _origins_of(self.run(jaxpr, list(inputs), here))
        return self._operation(equation, inputs, here, look, body)

    def _shard_map(self, equation: JaxprEqn, inputs: list[Held], here: Place) -> list[Held]:
        options = _jax_compat.shard_map_options(equation.params)
        found: Origins = []

        def body(*shards: Any) -> list[Any]:
            # Outside of jit JAX runs shard_map operation by operation, on all devices.
            values = [x._replace(value=shard) for x, shard in zip(inputs, shards, strict=True)]
            function = _jax_compat.called(equation.params)
            results = self.run(function, values, here.within("shard_map"))
            found.extend(_origins_of(results))
            return [x.value for x in results]

        def look() -> Origins:
            if options["axis_names"] != set(options["mesh"].axis_names):  # JAX needs jit for that
                return [None] * len(equation.outvars)
            jax.shard_map(body, **options)(*(x.value for x in inputs))
            return found

        return self._operation(equation, inputs, here, look, jax.jit(_call_of(equation)))


def _holds_a_program(equation: JaxprEqn) -> bool:
    """Returns whether a program stands inside. A scatter's operator is none: it takes scalars."""
    inner = _jax_compat.inner_jaxprs(equation)
    takes_arrays = any(getattr(v.aval, "shape", ()) for jaxpr in inner for v in jaxpr.invars)
    return takes_arrays or has_kind(equation.primitive.name)


def _is_autocasts(remat: JaxprEqn) -> bool:
    """Returns whether autocast put in a remat, of which the user's program says nothing."""
    traced = getattr(_jax_compat.called(remat.params), "debug_info", None)
    return str(getattr(traced, "func_src_info", "")).startswith("run_island at ")


def _call_of(equation: JaxprEqn) -> Call:
    return lambda *operands: _jax_compat.bind(equation.primitive, operands, equation.params)


def _origins_of(values: list[Held]) -> Origins:
    return [x.origin for x in values]


def _row(x: Held, index: int) -> Held:
    row = x.value[index]
    state = state_of(row) if x.state else FINITE
    return Held(row, state, x.origin if state else None)


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [atom for atom in atoms if not hasattr(atom, "val")]
