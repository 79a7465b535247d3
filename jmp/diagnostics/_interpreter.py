"""Runs programs operation by operation: `replay`, and the `Interpreter` of `find_nonfinite`.

`replay` binds operations again and shows every result to a function. The `Interpreter` finds what
made each result non-finite.

Each value is *checked*: it is known to be finite, infinite or NaN. One that is not finite has a
*cause*: the operation that turned finite inputs into it, or the argument or constant that was given
so. Causes follow the data, so that an infinity that a `where` discards is no cause.

Every operation runs separately, so each result is rounded to its dtype before the next operation
reads it; inside a fusion XLA may keep more digits. A loop, a turn of it and a shard_map are
compiled, and run as a whole first. Only if they are the cause are their operations run one by one.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from jmp import _jax_compat
from jmp.autocasting._kinds import has_kind, kind_of
from jmp.autocasting._operations import is_product
from jmp.autocasting._propagation import scope_of

T = TypeVar("T")


def evaluate(
    jaxpr: Any,
    inputs: list[T],
    step: Callable[[JaxprEqn, list[T]], list[T]],
    of_constant: Callable[[Any, JaxprEqn | None], T],
) -> list[T]:
    """Returns the outputs of a jaxpr, in the form that the caller gives to values.

    Args:
      jaxpr: closed, or open without constants.
      inputs: in the caller's form. The list is emptied, so that each value is freed after its last
        use.
      step: given an equation and its operands, returns its results. It runs in the equation's
        place: source line, name scopes, mesh, compute type.
      of_constant: given an array that is written in the program, or closed over, and the equation
        that reads it, None for an output of the jaxpr.
    """
    jaxpr, constants = _jax_compat.open_jaxpr(jaxpr)
    held = dict(zip(jaxpr.constvars, constants, strict=True))
    values: dict[Any, Any] = dict(zip(jaxpr.invars, inputs, strict=True))
    inputs.clear()
    reads = [*(equation.invars for equation in jaxpr.eqns), jaxpr.outvars]
    last_use: dict[Any, int] = {}
    for index, atoms in enumerate(reads):
        last_use |= {atom: index for atom in atoms if not isinstance(atom, Literal)}

    def read(atom: Any, equation: JaxprEqn | None) -> Any:
        if isinstance(atom, Literal):
            return of_constant(literal(atom), equation)
        return of_constant(held[atom], equation) if atom in held else values[atom]

    for index, equation in enumerate(jaxpr.eqns):
        operands = [read(atom, equation) for atom in equation.invars]
        for atom in equation.invars:
            if not isinstance(atom, Literal) and last_use[atom] == index:
                values.pop(atom, None)  # gone already if it is read twice
        with _jax_compat.place_of(equation, equation.source_info.name_stack):
            results = step(equation, operands)
        pairs = zip(equation.outvars, results, strict=True)
        values |= {variable: result for variable, result in pairs if variable in last_use}
    return [read(atom, None) for atom in jaxpr.outvars]


def literal(atom: Any) -> np.ndarray:
    """Returns a literal in its dtype: a loop would take it for a Python number."""
    with np.errstate(over="ignore"):  # 1e30 is infinite in float16, as it is to JAX
        return np.asarray(atom.val, atom.aval.dtype)


OnResults = Callable[[tuple[JaxprEqn, ...], list[Any]], list[Any]]

# Equations whose inside is replayed too. All others are bound as they are.
REPLAYED_INSIDE = frozenset({*_jax_compat.JITS, *_jax_compat.REMAT, "scan", "cond"})


def replay(
    jaxpr: Any, operands: Sequence[Any], on_results: OnResults, around: tuple[JaxprEqn, ...] = ()
) -> list[Any]:
    """Returns the outputs of a jaxpr, which is closed, or open without constants.

    Its equations are bound under whatever trace is current, so that it may be differentiated,
    compiled or traced anew. Loops, branches, remat and jit are emitted as autocast emits them, with
    the inside replayed too; while loops, custom derivatives, `shard_map` and kernels are bound as
    they are.

    Args:
      on_results: called after each equation, inner levels first, with the equations that hold one
        another, of which it is the last, and its results; returns the values that replace these.
      around: the equations that hold the jaxpr, the outermost first.

    >>> def loss(x):
    ...     return jax.lax.scan(lambda total, x: (total + jnp.exp(x), None), jnp.zeros(()), x)[0]
    >>> names = []
    >>> def look(equations, results):
    ...     names.append(equations[-1].primitive.name)
    ...     return results
    >>> _ = replay(jax.make_jaxpr(loss)(jnp.ones(3)), [jnp.ones(3)], look)
    >>> names
    ['exp', 'add', 'scan']
    """

    def step(equation: JaxprEqn, operands: list[Any]) -> list[Any]:
        equations = (*around, equation)

        def inside(jaxpr: ClosedJaxpr) -> Callable[..., list[Any]]:
            return lambda *arrays: replay(jaxpr, arrays, on_results, equations)

        name, params = equation.primitive.name, equation.params
        if _jax_compat.is_plain_call(equation):
            results = inside(_jax_compat.called(params))(*operands)
        elif name in REPLAYED_INSIDE:
            kind = kind_of(name)
            results = kind.emit(equation, operands, list(map(inside, kind.functions(equation))))
        else:
            results = _jax_compat.bind(equation.primitive, operands, params)
        return on_results(equations, results)

    return evaluate(jaxpr, list(operands), step, lambda constant, _: constant)


# States.

FINITE, INFINITE, NAN = 0, 1, 2


@dataclasses.dataclass(frozen=True)
class Operand:
    """An operand of an operation: its type and the range of its elements."""

    dtype: str
    shape: tuple[int, ...]
    smallest: float  # magnitude of the finite elements that are not zero; 0.0 if there are none
    largest: float
    zeros: int  # how many elements are zero
    nonfinite: int  # how many are infinite or NaN


def has_floats(value: Any) -> bool:
    """Returns whether a value, or a type, is an array of floating or complex numbers."""
    is_array = hasattr(value, "dtype") and not _jax_compat.is_reference(value)
    return is_array and jnp.issubdtype(value.dtype, jnp.inexact)


def state_of(value: Any) -> int:
    """Returns `NAN` if an element is NaN, else `INFINITE` if one is infinite, else `FINITE`."""
    return int(_state(_jax_compat.on_all_devices(value))) if has_floats(value) else FINITE


@jax.jit
def _state(x: jax.Array) -> jax.Array:
    x = _wide(x)
    not_nan = jnp.where(jnp.isinf(x).any(), INFINITE, FINITE)
    return jnp.where(jnp.isnan(x).any(), NAN, not_nan)


def operand(value: Any) -> Operand:
    """Returns the ranges of a floating or complex array."""
    magnitudes = abs(_wide(np.asarray(_jax_compat.on_all_devices(value))))
    is_zero, is_finite = magnitudes == 0, np.isfinite(magnitudes)
    counted = magnitudes[is_finite & ~is_zero]
    smallest, largest = (counted.min(), counted.max()) if counted.size else (0.0, 0.0)
    zeros, nonfinite = int(is_zero.sum()), int((~is_finite).sum())
    shape = np.shape(value)
    return Operand(str(value.dtype), shape, float(smallest), float(largest), zeros, nonfinite)


@jax.jit
def tamed(x: jax.Array) -> jax.Array:
    """Returns the array with a one for each infinity and NaN."""
    return jnp.where(jnp.isfinite(_wide(x)), x, jnp.ones_like(x))


def _wide(x: Any) -> Any:
    """Returns halves and float8 as float32, exactly: their subnormal numbers are normal there."""
    return x.astype(np.float32) if x.dtype.itemsize <= 2 else x


# Causes.


class Location(NamedTuple):
    """The place of an operation.

    Attributes:
      equations: those that hold one another, the outermost first; the operation is the last.
      inside: labels of the levels.
    """

    equations: tuple[JaxprEqn, ...] = ()
    inside: tuple[str, ...] = ()

    @property
    def equation(self) -> JaxprEqn:
        """The innermost equation: the operation itself, or the one that holds this level."""
        return self.equations[-1]

    def at(self, equation: JaxprEqn) -> "Location":
        """The location of an equation of this level."""
        return Location((*self.equations, equation), self.inside)

    def within(self, label: str) -> "Location":
        """The level inside the equation."""
        return Location(self.equations, (*self.inside, label))

    @property
    def stack(self) -> Any:
        """The name scopes of all levels."""
        return scope_of(self.equations, _jax_compat.empty_name_stack())

    @property
    def is_backward(self) -> bool:
        """Whether it stands in a backward pass."""
        return _jax_compat.is_backward(self.stack)


class Cause(NamedTuple):
    """The operation, argument or constant that made a value non-finite."""

    # In the order of execution; `math.inf` for an infinity that was given, which is the cause only
    # if there is no other.
    order: float
    # "operation"; "whole", a loop or kernel inside which none was found; "argument", "constant".
    kind: str
    name: str  # the primitive; "argument args[0]['w']", "constant"
    dtype: str  # of what came out, and so is the state
    state: int
    location: Location
    operands: tuple[Operand, ...]  # the floating ones, or what was given itself
    given: tuple[str, ...] = ()  # arguments whose infinities it read

    @property
    def is_nan(self) -> bool:
        """Whether it made a NaN, and no infinity."""
        return self.state == NAN

    @property
    def may_be_meant(self) -> bool:
        """Whether this is an infinity that was given, such as a mask."""
        return self.order == math.inf


class Checked(NamedTuple):
    """A value, and the cause that made it non-finite: None, if it is finite."""

    value: Any
    cause: Cause | None = None


Call = Callable[..., list[Any]]
Causes = list[Cause | None]


def handed_on(call: Call | None, inputs: Sequence[Checked], makes_nan: bool) -> Cause | None:
    """Returns the earliest cause that an operation hands on; None if it is the cause itself.

    To find which of several causes counts, it is run again with the inputs of one cause left as
    they are and all others tamed: a `where` reads one side. No mask is multiplied by weights, so an
    infinity that was given and that a product reads is handed on.

    Args:
      call: runs the operation again; None if that would have effects.
      makes_nan: whether a result is NaN, and the operation no product: inf - inf, or 0 * inf.
    """
    causes = {x.cause.order: x.cause for x in inputs if x.cause is not None}
    first = earliest(causes.values())
    if first is None or call is None:
        return first
    if first.may_be_meant:
        came_as_nan = any(state_of(x.value) == NAN for x in inputs if x.cause is first)
        # An operation that is infinite without the given infinities too, as exp under a mask may
        # be, is the cause.
        if came_as_nan or (not makes_nan and is_finite_of(call, inputs)):
            return first
        return None
    if len(causes) == 1:
        return first
    counting = (x for x in causes.values() if not is_finite_of(call, inputs, kept=x.order))
    return earliest(counting) or first


def is_finite_of(call: Call, inputs: Sequence[Checked], kept: float | None = None) -> bool:
    """Returns whether results are finite if all inputs are tamed, except those with the cause
    `kept`."""
    values = (tamed(x.value) if x.cause and x.cause.order != kept else x.value for x in inputs)
    return not any(map(state_of, call(*values)))


def earliest(causes: Iterable[Cause | None]) -> Cause | None:
    """Returns the first in the order of execution; None if there is none."""
    return min(filter(None, causes), key=lambda cause: cause.order, default=None)


# The interpreter.

Look = Callable[[], Causes]


class Interpreter:
    """Runs jaxprs operation by operation; see the module.

    Args:
      follows_vanishing: whether it also looks into loops whose results are finite.

    Attributes:
      vanished: causes of infinities and NaN that an operation read and whose results are finite,
        such as a division by infinity, each with the location of that operation, in the order of
        execution.
    """

    def __init__(self, follows_vanishing: bool = False) -> None:
        self._order = itertools.count()
        self._follows_vanishing = follows_vanishing
        self.vanished: list[tuple[Cause, Location]] = []

    def given(self, value: Any, kind: str, location: Location, name: str = "") -> Checked:
        """Checks an "argument" or a "constant"; an infinity may be meant, as in a mask."""
        state = state_of(value)
        if state == FINITE:
            return Checked(value)
        order = next(self._order) if state == NAN else math.inf
        what, dtype, read = f"{kind} {name}".rstrip(), str(value.dtype), (operand(value),)
        return Checked(value, Cause(order, kind, what, dtype, state, location, read))

    def run(self, jaxpr: Any, inputs: list[Checked], here: Location) -> list[Checked]:
        """Returns what a jaxpr gives. `inputs` is emptied: each is freed after its last use."""

        def given(value: Any, reader: JaxprEqn | None) -> Checked:
            return self.given(value, "constant", here if reader is None else here.at(reader))

        step = lambda equation, operands: self._step(operands, here.at(equation))
        return evaluate(jaxpr, inputs, step, given)

    def _step(self, inputs: list[Checked], here: Location) -> list[Checked]:
        name = here.equation.primitive.name
        if name == "shard_map":
            return self._shard_map(inputs, here)
        if name in _jax_compat.CALLS:
            return self._call(inputs, here)
        followed = {"scan": self._scan, "while": self._while, "cond": self._cond}
        return followed.get(name, self._operation)(inputs, here)

    def _operation(
        self,
        inputs: list[Checked],
        here: Location,
        look: Look | None = None,
        call: Call | None = None,
    ) -> list[Checked]:
        """Runs an equation with `call`, and finds what made its results non-finite.

        That is the earliest of: an operation inside, which `look` finds if a program stands inside;
        the cause of an input, which the equation hands on; the equation itself. `look` returns the
        cause of each result. The values of the whole equation are kept: the next equations read
        them.
        """
        equation = here.equation
        call = call or _call_of(equation)
        results = call(*(x.value for x in inputs))
        states = list(map(state_of, results))
        came = earliest(x.cause for x in inputs if x.cause and not x.cause.may_be_meant)
        if not any(states):
            # A comparison is no end: `jnp.isfinite` asks about an infinity.
            if came is not None and any(map(has_floats, results)):
                self.vanished.append((came, here))
            elif look is not None and self._follows_vanishing:
                look()
            return list(map(Checked, results))

        causes: Causes = [None] * len(results)
        if look is not None and (came is None or not is_finite_of(call, inputs)):
            causes = look()
        if any(state and cause is None for state, cause in zip(states, causes, strict=True)):
            rerun = None if equation.effects and look is None else call
            makes_nan = max(states) == NAN and not is_product(equation)
            outer = handed_on(rerun, inputs, makes_nan)
            if outer is None:
                is_whole = look is not None or has_kind(equation.primitive.name)
                outer = self._made(inputs, max(states), here, is_whole)
            causes = [cause or outer for cause in causes]
        checked = zip(results, states, causes, strict=True)
        return [Checked(result, cause if state else None) for result, state, cause in checked]

    def _made(self, inputs: list[Checked], state: int, here: Location, is_whole: bool) -> Cause:
        """Returns this equation as a cause."""
        result: Any = next(v.aval for v in here.equation.outvars if has_floats(v.aval))
        read = tuple(operand(x.value) for x in inputs if has_floats(x.value))
        order, kind = next(self._order), "whole" if is_whole else "operation"
        name, dtype = here.equation.primitive.name, str(result.dtype)
        causes = [x.cause for x in inputs if x.cause is not None]
        given = tuple(dict.fromkeys(x.name for x in causes if x.kind == "argument"))
        return Cause(order, kind, name, dtype, state, here, read, given)

    def _call(self, inputs: list[Checked], here: Location) -> list[Checked]:
        equation = here.equation
        # A remat has no label: autocast puts in some that the user does not know.
        is_jit = _jax_compat.is_jit(equation)
        inner = here.within(f"jit {_jax_compat.called_name(equation)}") if is_jit else here
        return self.run(_jax_compat.called(equation.params), inputs, inner)

    def _cond(self, inputs: list[Checked], here: Location) -> list[Checked]:
        branches = _jax_compat.branches(here.equation.params)
        index = np.unique(_jax_compat.on_all_devices(inputs[0].value))
        if index.size > 1:  # devices go different ways
            return self._operation(inputs, here)
        branch = min(max(int(index[0]), 0), len(branches) - 1)
        del inputs[0]
        return self.run(branches[branch], inputs, here.within(f"cond, branch {branch}"))

    def _scan(self, inputs: list[Checked], here: Location) -> list[Checked]:
        scan = _jax_compat.Scan.of(here.equation.params)
        body = jax.jit(_jax_compat.as_function(scan.body))

        def look() -> Causes:
            constants, carry, xs = scan.split(inputs)
            stacked: Causes = [None] * (len(here.equation.outvars) - scan.n_carry)
            order = range(scan.length)
            for turn in reversed(order) if scan.reverse else order:
                operands = [*constants, *carry, *(_row(x, turn) for x in xs)]
                inner = here.within(f"scan, iteration {turn}")
                results = self._turn(body, scan.body, operands, inner)
                carry = results[: scan.n_carry]
                rows = _causes_of(results[scan.n_carry :])
                stacked = [earliest(pair) for pair in zip(stacked, rows, strict=True)]
            return [*_causes_of(carry), *stacked]

        return self._operation(inputs, here, look)

    def _while(self, inputs: list[Checked], here: Location) -> list[Checked]:
        loop = _jax_compat.While.of(here.equation.params)
        tested, constants, first = loop.split(inputs)
        condition = jax.jit(_jax_compat.as_function(loop.condition))
        body = jax.jit(_jax_compat.as_function(loop.body))

        def goes_on(carry: list[Checked]) -> np.ndarray:
            (answer,) = condition(*(x.value for x in [*tested, *carry]))
            return np.asarray(_jax_compat.on_all_devices(answer))

        def look() -> Causes:
            carry, turn = first, 0
            if goes_on(carry).size > 1:  # under vmap and shard_map each one stops when it is done
                return [None] * len(carry)
            while goes_on(carry).item():
                inner = here.within(f"while, iteration {turn}")
                carry = self._turn(body, loop.body, [*constants, *carry], inner)
                turn += 1
            return _causes_of(carry)

        return self._operation(inputs, here, look)

    def _turn(self, body: Call, jaxpr: Any, inputs: list[Checked], here: Location) -> list[Checked]:
        """Runs one turn of a loop."""
        look = lambda: _causes_of(self.run(jaxpr, list(inputs), here))
        return self._operation(inputs, here, look, body)

    def _shard_map(self, inputs: list[Checked], here: Location) -> list[Checked]:
        equation = here.equation
        options = _jax_compat.shard_map_options(equation.params)
        found: Causes = []

        def body(*shards: Any) -> list[Any]:
            # Outside of jit JAX runs shard_map operation by operation, on all devices.
            values = [x._replace(value=shard) for x, shard in zip(inputs, shards, strict=True)]
            function = _jax_compat.called(equation.params)
            results = self.run(function, values, here.within("shard_map"))
            found.extend(_causes_of(results))
            return [x.value for x in results]

        def look() -> Causes:
            if options["axis_names"] != set(options["mesh"].axis_names):  # JAX needs jit for that
                return [None] * len(equation.outvars)
            jax.shard_map(body, **options)(*(x.value for x in inputs))
            return found

        return self._operation(inputs, here, look, jax.jit(_call_of(equation)))


def _call_of(equation: JaxprEqn) -> Call:
    return lambda *operands: _jax_compat.bind(equation.primitive, operands, equation.params)


def _causes_of(values: list[Checked]) -> Causes:
    return [x.cause for x in values]


def _row(x: Checked, index: int) -> Checked:
    row = x.value[index]
    return Checked(row, x.cause if x.cause and state_of(row) else None)
