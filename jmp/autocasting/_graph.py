"""The dataflow graph of one level of nesting: values, and the nodes that compute them.

`_flatten` makes it of a jaxpr, and graphs of the functions inside with it; nothing of it changes
afterwards. The facts that analyses find (`_facts`) and the planner's decisions (`_level`, `_steps`)
stand in records of their own.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from jax.extend.core import JaxprEqn

from jmp._jax_compat import Params
from jmp.autocasting._numbers import (
    NOTHING,
    Known,
    ValueProvenance,
    dtype_of,
    is_inexact,
    shape_of,
    size_of,
)
from jmp.autocasting._registry import Category, Rule, is_low
from jmp.autocasting._request import Region
from jmp.dtypes import FLOAT32

T = TypeVar("T")


@dataclasses.dataclass(eq=False, repr=False)
class Value:
    """One array of the program."""

    aval: Any  # its nominal type, as traced
    producer: "Node | None" = None  # None for inputs, constants and literals
    known: Known = NOTHING
    literal: Any = None  # the number or array that the program holds in its place; or None
    outside: "Value | None" = None  # of an input, what comes in from the level outside, if known
    users: list["Node"] = dataclasses.field(default_factory=list)  # that read it, once each

    def __post_init__(self) -> None:
        self.dtype, shape = dtype_of(self), shape_of(self)
        self.is_inexact = is_inexact(self)
        self.is_float32 = self.dtype == FLOAT32  # as traced; `Level` says what it is stored in
        made_of = self.known.provenance  # as if it were floating
        self.provenance = made_of if self.is_inexact else min(made_of, ValueProvenance.INTEGERS)
        # The value of the outermost level that comes in here; the value itself if it is no input.
        self.origin: Value = self if self.outside is None else self.outside.origin
        self.constant, self.fits_half, self.is_extreme, source, *_ = self.known
        self.source = shape if source is None else source  # the shape of what it repeats
        self.size = size_of(shape)  # how many elements it has
        self.source_size = self.size if source is None else min(self.size, size_of(source))

    @property
    def is_vector(self) -> bool:
        """Whether it repeats an array of one axis at most, such as a bias. A mask has more."""
        return len(self.source) <= 1 and not self.is_extreme

    @property
    def varies(self) -> bool:
        """Whether a gradient may flow into it; not into masks, nor into tables of sines."""
        return self.provenance > ValueProvenance.TABLES

    @property
    def root(self) -> "Value":
        """The value before it was only moved: reshaped, transposed, broadcast."""
        return source_through(self, lambda node: node.rule.moves)

    def moved(self) -> Iterator["Value"]:
        """Yields the value, and all values that are only it moved."""
        return downstream(self, lambda node: node.rule.moves)


class RowOf(NamedTuple):
    """One row of a value, at each turn of a loop another one."""

    value: Value


class Carry(NamedTuple):
    """The carry of a loop: first a value, after each turn the body's result of that number."""

    value: Value
    number: int


# An argument of a function inside a node.
Argument = Value | RowOf | Carry


def value_of(argument: Argument) -> Value:
    """Returns the operand that an argument comes from."""
    return argument if isinstance(argument, Value) else argument.value


class Inside(NamedTuple):
    """A function inside a node, as a level of its own."""

    graph: "Graph"
    arguments: Sequence[Argument]  # of the node's operands
    results: Sequence[Value]  # which results of the node its own become, in order

    @property
    def inputs(self) -> Sequence[Value]:
        """The inputs that the arguments come in as."""
        return self.graph.inputs[len(self.graph.constants) :]

    @property
    def carries(self) -> dict[int, Value]:
        """The inputs that are carries of a loop, by their numbers, in order."""
        pairs = zip(self.arguments, self.inputs, strict=True)
        return {argument.number: own for argument, own in pairs if isinstance(argument, Carry)}

    def turns(self) -> Iterator[tuple[Value, Value]]:
        """Yields the floating carries of a loop's body, and what each is after a turn."""
        if self.results:  # else it is a condition
            for number, own in self.carries.items():
                if own.is_inexact:
                    yield own, self.graph.outputs[number]

    def crossings(self) -> Iterator[tuple[Value, Value]]:
        """Yields results of the node and floating inputs, and what each is on the other level."""
        yield from zip(self.results, self.graph.outputs, strict=False)
        for argument, own in zip(self.arguments, self.inputs, strict=True):
            if own.is_inexact:
                yield own, value_of(argument)


@dataclasses.dataclass(eq=False, repr=False)
class Node:
    """One equation."""

    equation: JaxprEqn  # its own variables are not to be read
    inputs: tuple[Value, ...]
    known: dataclasses.InitVar[Known]  # of its results
    stack: Any  # its name scopes within this level
    scope: Any  # and from the outermost level down
    around: tuple[JaxprEqn, ...]  # the equations that hold it, the outermost first
    rule: Rule  # what the op table says, as the equation's parameters change it
    region: Region  # what the user said of its scope
    index: int  # its place in the program
    inner: Sequence[JaxprEqn] | None  # the equations, at any depth, of functions that it holds
    is_marker: bool  # it stays where nothing reads its results; see `_equations`
    # A barrier that is planned as a level of its own; so are fusible nodes that have a kind.
    goes_inside: bool = False
    # A product that autocast may lower, or a node that is planned inside and holds one.
    has_products: bool = False
    is_in_full: bool = False  # the user named its primitive in `full=`
    insides: tuple["Inside", ...] = ()  # its functions, if it has a kind, planned or not

    def __post_init__(self, known: Known) -> None:
        # Its operands without indices, masks and sizes, which carry no precision.
        self.inexact = [value for value in self.inputs if value.is_inexact]
        self.name: str = self.equation.primitive.name
        self.params: Params = self.equation.params  # what it is bound with, where it is as written
        self.outputs = tuple([Value(v.aval, self, known) for v in self.equation.outvars])
        self.holds_functions = self.inner is not None
        self.multiplies = is_low(self.equation)  # whether it is a product, in whatever dtype
        # Whether autocast may lower it.
        self.is_product = self.rule.category is Category.LOW and not self.region.in_float32
        # It may stand in an island.
        self.is_fusible = self.rule.fusible and not self.region.is_decided

    @property
    def reduces_rows(self) -> bool:
        """Whether it, a reduction, is over trailing axes, as in softmax and LayerNorm."""
        rank, axes = len(shape_of(self.inputs[0])), sorted(self.params["axes"])
        return axes == list(range(rank - len(axes), rank)) and len(axes) < rank

    @property
    def is_square(self) -> bool:
        """Whether it multiplies a value by itself."""
        return self.name == "one_minus_square" or (self.name == "mul" and are_same(*self.inputs))

    @property
    def reads_float32(self) -> bool:
        """Whether it reads float32 whatever its operands are stored in."""
        if self.region.in_float32:
            return True
        if self.is_fusible or self.has_products:
            return self.is_in_full
        return self.rule.category in (Category.FULL, Category.AS_WRITTEN)

    @property
    def equations(self) -> Sequence[JaxprEqn]:
        """Its equation, and those inside it where no level stands for them."""
        return (self.equation, *(() if self.insides else self.inner or ()))


@dataclasses.dataclass(eq=False, repr=False)
class Graph:
    """One level."""

    inputs: Sequence[Value]
    nodes: Sequence[Node]  # in program order
    outputs: Sequence[Value]
    # The arrays that its first inputs stand for; none at the outermost level, where they are given.
    constants: Sequence[Any]

    def all_nodes(self) -> Iterator[Node]:
        """Yields its nodes, each before those of the levels inside it."""
        for node in self.nodes:
            yield node
            for inside in node.insides:
                yield from inside.graph.all_nodes()


# Walks.


def reached(starts: Iterable[T], following: Callable[[T], Iterable[T]]) -> Iterator[T]:
    """Yields `starts`, what follows them, what follows that and so on, each once, in any order."""
    seen = set(starts)
    stack = list(seen)
    while stack:
        current = stack.pop()
        yield current
        for each in following(current):
            if each not in seen:
                seen.add(each)
                stack.append(each)


def upstream(*values: Value) -> Iterator[Value]:
    """Yields values and all that they are computed from."""
    return reached(values, lambda v: () if v.producer is None else v.producer.inputs)


def downstream(value: Value, through: Callable[[Node], bool]) -> Iterator[Value]:
    """Yields a value and all that is computed from it only through some nodes."""

    def results(value: Value) -> Iterator[Value]:
        return (result for user in value.users if through(user) for result in user.outputs)

    return reached([value], results)


def source_through(value: Value, through: Callable[[Node], bool]) -> Value:
    """Returns what a value was before nodes that `through` holds for, first operand by first."""
    while value.producer is not None and through(value.producer):
        value = value.producer.inputs[0]
    return value


def are_same(left: Value, right: Value) -> bool:
    """Returns whether two values are one, or the same numbers of one: `x[0] * x[0]`."""
    while left is not right:
        first, second = left.producer, right.producer
        if first is None or second is None or not (first.rule.moves and second.rule.moves):
            return False
        if (first.name, first.params) != (second.name, second.params):
            return False
        if first.outputs.index(left) != second.outputs.index(right):  # two results of one split
            return False
        left, right = first.inputs[0], second.inputs[0]
    return True
