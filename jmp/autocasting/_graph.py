"""The dataflow graph of one level of nesting: values, and the nodes that compute them.

`_flatten` makes it of a jaxpr; nothing of it changes afterwards. What the analyses find (`_flow`)
and what the planner decides (`_steps`) stands in records of their own.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
from jax.extend.core import JaxprEqn

from jmp.autocasting._numbers import NOTHING, Known, MadeOf, fits, size_of
from jmp.autocasting._registry import Category, Params, Rule
from jmp.autocasting._request import Region
from jmp.dtypes import FLOAT32

T = TypeVar("T")


class Value:
    """One array of the program."""

    __slots__ = (
        "aval", "dtype", "producer", "users", "held", "origin", "known", "constant", "fits_half",
        "is_hard", "size", "source_size", "is_vector", "is_row", "is_float32", "made_of",
    )  # fmt: skip

    def __init__(
        self,
        aval: Any,
        producer: "Node | None" = None,
        known: Known = NOTHING,
        held: Any = None,
        outside: "Value | None" = None,
        made_of: MadeOf = MadeOf.CONSTANTS,
    ) -> None:
        self.aval = aval  # its nominal type, as traced
        self.dtype: np.dtype | None = getattr(aval, "dtype", None)
        self.is_float32 = self.dtype == FLOAT32  # as traced; `Storage` says what it is stored in
        self.producer = producer  # None for inputs, constants and literals
        self.users: tuple[Node, ...] = ()  # the nodes that read it, once each
        self.held = held  # the number or array that the program holds in its place; or None
        self.made_of = made_of.of(self)
        # Of an input, what comes in from the outermost level that knows it; of all others itself.
        self.origin: Value = self if outside is None else outside.origin
        self.known = known
        self.constant, self.fits_half, self.is_hard, source, _ = known
        shape = getattr(aval, "shape", ())
        self.size = size_of(shape)  # how many elements it has
        # How many it had before it was repeated.
        self.source_size = self.size if source is None else min(self.size, size_of(source))
        # It repeats an array of one axis at most, such as a bias. A mask has more.
        source = shape if source is None else source
        self.is_vector = len(source) <= 1 and not self.is_hard
        # Of one axis but for axes of length one: a bias of shape (1, 16), or a mask over the keys.
        self.is_row = sum(n != 1 for n in source) <= 1 and not self.is_hard

    @property
    def varies(self) -> bool:
        """Whether a gradient may flow into it; not into masks, nor into tables of sines."""
        return self.made_of > MadeOf.TABLES

    def exceeds(self, half: np.dtype) -> bool:
        """Returns whether it is known to hold a number that a half type does not."""
        return self.is_hard or (self.constant is not None and not fits(self.constant, half))


# A value of the outer level that comes into one; what it is made of, if it is not one value (a row
# of one); None for what may be anything (the carry of a loop).
Given = Value | MadeOf | None


class Node:
    """One equation."""

    __slots__ = (
        "equation", "name", "params", "inputs", "outputs", "stack", "scope", "around", "rule",
        "region", "index", "goes_inside", "has_products", "is_fusible", "is_marker",
    )  # fmt: skip

    def __init__(
        self,
        equation: JaxprEqn,
        inputs: Sequence[Value],
        known: Known,
        stack: Any,
        scope: Any,
        around: tuple[JaxprEqn, ...],
        rule: Rule,
        region: Region,
        index: int,
        is_marker: bool,
    ) -> None:
        self.equation = equation  # its own variables are not to be read
        self.name: str = equation.primitive.name
        self.params: Params = equation.params  # what it is bound with, where it is as written
        self.inputs = tuple(inputs)
        self.outputs = tuple(Value(v.aval, self, known) for v in equation.outvars)
        self.stack = stack  # its name scopes within this level
        self.scope = scope  # and from the outermost level down
        self.around = around  # the equations that hold it, the outermost first
        self.rule = rule  # what the op table says, as the equation's parameters change it
        self.region = region  # what the user said of its scope
        self.index = index  # its place in the program
        self.is_marker = is_marker  # it stays where nothing reads its results; see `_equations`
        self.is_fusible = rule.fusible and not region.is_decided  # it may stand in an island
        # A barrier that is planned as a level of its own; so are light nodes that have a kind.
        self.goes_inside = False
        # A product that autocast may lower, or a node that is planned inside and holds one.
        self.has_products = False

    @property
    def reads_float32(self) -> bool:
        """Whether it reads float32 whatever its operands are stored in."""
        if self.is_fusible or self.has_products or self.region.in_float32:
            return self.region.in_float32
        return self.rule.category in (Category.FULL, Category.AS_WRITTEN)

    @property
    def is_product(self) -> bool:
        """Whether it is a product that autocast may lower."""
        return self.rule.category is Category.LOW and not self.region.in_float32


def nowhere() -> Sequence[bool]:
    """Says of no output that it goes anywhere."""
    return ()


class Graph:
    """Inputs, nodes in program order, and outputs of one level."""

    def __init__(
        self,
        inputs: Sequence[Value],
        nodes: Sequence[Node],
        outputs: Sequence[Value],
        outputs_wrap: Callable[[], Sequence[bool]] = nowhere,
    ) -> None:
        self.inputs = tuple(inputs)
        self.nodes = tuple(nodes)
        self.outputs = tuple(outputs)
        # Which of them go to a function that wraps (`_exact_products`) outside; asked for rarely.
        self.outputs_wrap = outputs_wrap


# Walks.


def reached(starts: Iterable[T], following: Callable[[T], Iterable[T]]) -> Iterator[T]:
    """Yields `starts`, what follows them, what follows that and so on, each once, in any order."""
    seen = set(starts)
    stack = list(seen)
    while stack:
        current = stack.pop()
        yield current
        new = {*following(current)} - seen
        seen |= new
        stack += new


def downstream(value: Value, through: Callable[[Node], bool]) -> Iterator[Value]:
    """Yields a value and all that is computed from it through some nodes alone."""

    def results(value: Value) -> Iterator[Value]:
        return (result for user in value.users if through(user) for result in user.outputs)

    return reached([value], results)
