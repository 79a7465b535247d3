"""A level while it is planned: its facts, the decisions on its values, and the reasons for float32.

Dtypes of values are decided here and nowhere else. A `Level` also knows how large values may be,
and so which of them may be rounded. Reasons of products are in `_precision`, `_products` and
`_equations`.
"""

import functools
from collections.abc import Iterable, Sequence, Set

import numpy as np

from jmp.autocasting._facts import Destination, Info, exposed_values, facts_of
from jmp.autocasting._graph import Graph, Node, Value, are_same, downstream, root
from jmp.autocasting._magnitudes import (
    Magnitude,
    hull,
    magnitude_of_source,
    magnitudes_of_results,
)
from jmp.autocasting._numbers import fits
from jmp.autocasting._precision import NEVER_HALF
from jmp.autocasting._registry import Category
from jmp.autocasting._steps import Context, Nested, Plan, Read, Unplanned, Write
from jmp.dtypes import FLOAT32


class Level:
    """A level that is planned: what kinds, and the passes over its steps, may ask of it.

    The planner is one; kinds need not import it, which imports them.

    Args:
      graph: the level, as flattened.
      infos: what comes in, input by input.
      outputs: where each output goes.
      context: see `Context`.
    """

    def __init__(
        self, graph: Graph, infos: Sequence[Info], outputs: Sequence[Destination], context: Context
    ) -> None:
        self.graph = graph
        self.context = context
        self.half = context.request.settings.compute_dtype
        self.recompute = context.request.settings.recompute  # what the user said of it
        self.outputs = outputs
        self.facts = facts_of(graph, infos, outputs)
        self._dtypes: dict[Value, np.dtype | None] = {}
        self._magnitudes: dict[Value, Magnitude | None] = {}
        self.store(graph.inputs, (info.dtype for info in infos))
        self.bound(graph.inputs, (info.magnitude for info in infos))

    # Decisions on values.

    def store(self, values: Iterable[Value], dtypes: Iterable[np.dtype | None]) -> None:
        """Decides what values are stored in."""
        self._dtypes.update(zip(values, dtypes, strict=True))

    def dtype(self, value: Value) -> np.dtype | None:
        """Returns what a value is stored in; None for what has no dtype."""
        return self._dtypes.get(value, value.dtype)

    def is_half(self, value: Value) -> bool:
        """Returns whether a value is stored in the compute dtype."""
        return self.dtype(value) == self.half

    def info(self, value: Value) -> Info:
        """Returns what another level needs to know of a value."""
        return Info(self.dtype(value), value not in self.facts.dependent, self.magnitude(value))

    def magnitude(self, value: Value) -> Magnitude:
        """Returns what bounds a value."""
        return self._magnitudes.get(value) or magnitude_of_source(value)

    def bound(self, values: Iterable[Value], magnitudes: Iterable[Magnitude | None]) -> None:
        """Says what bounds values; None for what their dtypes say."""
        self._magnitudes.update(zip(values, magnitudes, strict=True))

    def measure(self, node: Node) -> None:
        """Finds what bounds the results of a node, given what bounds its operands."""
        operands = list(map(self.magnitude, node.inputs))
        self.bound(node.outputs, magnitudes_of_results(node, operands))

    def rounded_by_rule(self, value: Value) -> np.dtype | None:
        """Returns the dtype that a rule rounds a value to, where it leaves the rule's region."""
        node = value.producer
        if node is None or node.region.output_dtype is None or not value.is_float32:
            return None
        leaves = all(user.region != node.region for user in value.users)
        return self.half if leaves and not self.is_out_of_range(value, value.users) else None

    def is_multiplied(self, value: Value, readers: Sequence[Node]) -> bool:
        """Returns whether only products read a value, of these readers and of those outside."""
        others = self.facts.read_otherwise
        return value not in self.facts.kept and all(
            reader.is_product or (reader.rule.moves and others.isdisjoint(reader.outputs))
            for reader in readers
        )

    def is_out_of_range(self, value: Value, readers: Sequence[Node]) -> bool:
        """Returns whether rounding a value may give an infinity or a zero that its readers hide.

        Or whether it leaves few digits beside an offset. A value that only products read is
        rounded: they have no other form, and an infinity is seen.
        """
        magnitude = self.magnitude(value)
        is_lost = magnitude.exceeds_half or magnitude.is_coarse(self.half)
        return is_lost and not self.is_multiplied(value, readers)

    def leaves_half(self, value: Value, inside: Set[Node]) -> bool:
        """Returns whether a float32 value leaves an island in half: where a product follows.

        Not if it reaches the float32 carry of a loop, nor if all that read it read float32, nor if
        nothing bounds it.
        """
        readers = [user for user in value.users if user not in inside]
        read_wide = readers and all(user.reads_float32 for user in readers)
        feeds = value in self.facts.feeds and value not in self.facts.carried
        may_be_half = value.is_float32 and feeds and not read_wide
        return may_be_half and not self.is_out_of_range(value, readers)

    def leaving(self, value: Value, inside: Set[Node]) -> Write:
        """Decides how a result of an island is stored, and returns that.

        Half where a rule or a product asks for it. If a mask may have made it half, finite numbers
        stay finite; any other infinity is to be seen.
        """
        if self.rounded_by_rule(value) or self.leaves_half(value, inside):
            self.store([value], [self.half])
        node = value.producer
        masked = node is not None and any(self.is_mask_of(node, read) for read in node.inputs)
        return Write(value, self.dtype(value), saturates=masked and self.is_half(value))

    def is_mask_of(self, node: Node, value: Value) -> bool:
        """Returns whether a node may apply a value as a mask to what reaches a maximum."""
        is_compared = not self.facts.compared.isdisjoint(node.outputs)
        return node.rule.masks and is_compared and self.may_be_mask(value)

    def may_be_mask(self, value: Value) -> bool:
        """Returns whether a value may hold -1e9: it is known to, or is an input that is no bias."""
        if not value.is_float32 or self.half != np.float16:  # bfloat16 holds what float32 holds
            return False
        if value.constant is not None:
            return value.exceeds(self.half)
        is_input = value not in self.facts.dependent and not self.facts.is_bias(value)
        return value.is_extreme or (is_input and not value.fits_half)

    # Levels inside.

    def plan_level(self) -> Plan:
        """Returns the plan."""
        raise NotImplementedError

    @functools.cached_property
    def exposed(self) -> Set[Value]:
        """The values that more than half products read; see `kinds.loops`."""
        pairs = zip(self.graph.outputs, self.outputs, strict=True)
        return exposed_values(self.graph, [v for v, where in pairs if where.exposed], self.half)

    def plan_graph(
        self, graph: Graph, infos: Sequence[Info], outputs: Sequence[Destination], context: Context
    ) -> Plan:
        """Plans a function inside.

        Args:
          infos: of its arguments.
          outputs: where its results go.
          context: what holds inside.
        """
        own = [Info(value.dtype, True) for value in graph.inputs[: len(graph.constants)]]
        return type(self)(graph, [*own, *infos], outputs, context).plan_level()

    def destinations(self, node: Node) -> list[Destination]:
        """Returns where the results of a node that is planned inside go."""
        holds_loop = any(each.primitive.name in ("scan", "while") for each in node.inner or ())
        return [
            Destination(
                feeds=value in self.facts.feeds,
                carried=value in self.facts.carried,
                rounded=self.is_multiplied(value, value.users),
                exposed=holds_loop and value in self.exposed,
            )
            for value in node.outputs
        ]

    def nested(
        self,
        node: Node,
        insides: Sequence[Plan | Unplanned],
        stores: Sequence[np.dtype | None],
        reads: Sequence[np.dtype | None] | None = None,
    ) -> Nested:
        """Returns the step of an equation that is planned inside.

        Args:
          insides: what stands for its functions.
          stores: the dtypes of its results.
          reads: the dtypes that its operands go in with; left out, those that they are stored in.
        """
        dtypes = map(self.dtype, node.inputs) if reads is None else reads
        self.store(node.outputs, stores)
        plans = [plan for plan in insides if isinstance(plan, Plan)]
        for value, *infos in zip(node.outputs, *(plan.infos for plan in plans), strict=False):
            if found := [info.magnitude for info in infos if info.magnitude is not None]:
                self.bound([value], [hull(found)])
        return Nested(node, tuple(insides), tuple(map(Read, node.inputs, dtypes)), tuple(stores))


# Why an operation that is no product is computed in float32, in words.


OFFSET = "beside the number that is added a half type has few digits left"
TAKEN_AWAY = "what is added is taken away again"
LARGE_INPUT = "an operand is a float32 input as large as the result"
UNBOUNDED = "nothing bounds the size of an operand: a half type may not hold it"


def why_region(node: Node) -> str:
    """Returns what the user said of the place a node stands in."""
    if node.region.is_decided:
        return "an inner autocast decided here"
    return "the user asked for float32 here" if node.region.in_float32 else ""


def reasons_for(nodes: Sequence[Node], level: Level) -> dict[Node, str]:
    """Returns the nodes of a component that require float32, each with the reason."""
    inside = set(nodes)
    return {node: why for node in nodes if (why := why_float32(node, inside, level))}


def why_float32(node: Node, inside: Set[Node], level: Level) -> str:
    """Returns why a node requires float32.

    Args:
      inside: the nodes of its component, whose results are not decided yet.
      level: what is decided of values from outside.
    """
    rule = node.rule
    if node.region.in_float32:
        return why_region(node)
    if rule.category is Category.FULL:
        return rule.reason
    if rule.category is Category.AS_WRITTEN:
        return rule.reason if node.outputs[0].is_float32 else ""
    if rule.category is Category.WIDEST:  # else the user said otherwise
        if node.name == "mul" and are_same(*node.inputs):
            return "a square, whose range a half type does not hold"
        if _cancels(node):
            return "near its bound, 1 minus a bounded function has few digits left"
    for value in node.inputs:
        if why := _why_operand(value, node, inside, level):
            return why
    return why_digits(node, inside, level)


def why_digits(node: Node, inside: Set[Node], level: Level) -> str:
    """Returns why a sum or difference has few digits in half, beside an offset; "" if it has all.

    Args:
      inside: the component of the node.
    """
    rule = node.rule
    if rule.category is not Category.WIDEST or not rule.linear:
        return ""
    if level.magnitude(node.outputs[0]).has_large_offset:
        return OFFSET
    return TAKEN_AWAY if _is_taken_away(node, inside, level) else ""


def _why_operand(value: Value, node: Node, inside: Set[Node], level: Level) -> str:
    """Returns why an operand makes a node float32."""
    half, facts = level.half, level.facts
    if not value.is_float32:
        has_no_half = str(value.dtype) in NEVER_HALF and any(v.is_float32 for v in node.outputs)
        return f"an operand is {value.dtype}" if has_no_half else ""
    if value.producer in inside:
        return ""
    if value.is_extreme:
        return f"{half} does not hold an array of the program"
    if value.constant is not None:
        is_held = fits(value.constant, half)
        return "" if is_held else f"{half} does not hold the constant {value.constant:g}"
    if value in facts.dependent:
        return "an operand is float32" if level.dtype(value) == FLOAT32 else ""
    if value.fits_half:
        return ""
    magnitude = level.magnitude(value)
    if magnitude.exceeds_half or magnitude.degree < 0:
        return UNBOUNDED
    if node.name == "div" and value is node.inputs[1] and magnitude.degree > 0:
        return "it divides by an input, whose size nothing bounds"
    # A callback has no result.
    if value.source_size >= max((result.size for result in node.outputs), default=0):
        return LARGE_INPUT
    if facts.feeds.isdisjoint(node.outputs):
        return "an operand is a float32 input, and no product reads the result"
    return ""


def _cancels(node: Node) -> bool:
    """Returns whether a bounded function's result is added to one, or subtracted.

    Near the end of its range nothing is left of that: float16's 1 - tanh(4) is off by a quarter,
    bfloat16's is zero. So are derivatives written, such as s * (1 - s).
    """
    is_one = [value.constant in (1, -1) for value in node.inputs]
    made_by = (root(value).producer for value in node.inputs)
    is_bounded = (n is not None and n.rule.bounded and n.is_fusible for n in made_by)
    return node.rule.linear and any(is_one) and any(is_bounded)


def _is_taken_away(node: Node, inside: Set[Node], level: Level) -> bool:
    """Returns whether an input that a node adds is subtracted elsewhere in its component.

    So data are denormalised and normalised again. Nobody subtracts a bias.
    """
    dependent = level.facts.dependent
    added = node.inputs if node.name == "add" and not dependent.isdisjoint(node.inputs) else ()
    return any(
        reader.name == "sub" and reader.inputs[1] is moved and reader in inside
        for value in added
        if value not in dependent and value.constant is None
        for moved in downstream(root(value), lambda node: node.rule.moves)
        for reader in moved.users
    )
