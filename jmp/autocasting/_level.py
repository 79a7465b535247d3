"""A level while it is planned: its facts, and the decisions on its values.

Dtypes of values are written down here and nowhere else. A `Level` also knows how large values may
be, and so which of them may be rounded.
"""

import functools
from collections.abc import Iterable, Sequence, Set

import numpy as np

from jmp.autocasting._facts import Destination, Info, exposed_values, facts_of
from jmp.autocasting._graph import Graph, Node, Value
from jmp.autocasting._magnitudes import Magnitudes, hull
from jmp.autocasting._steps import Context, Nested, Plan, Read, Step, Unplanned, Write


class Dtypes(dict[Value, np.dtype | None]):
    """The dtypes in which values are stored; where nobody decided, as it was traced."""

    def __missing__(self, value: Value) -> np.dtype | None:
        return value.dtype


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
        self.dtypes = Dtypes()  # what each value is stored in
        self.magnitudes = Magnitudes()  # and what bounds it
        for value, info in zip(graph.inputs, infos, strict=True):
            self.dtypes[value] = info.dtype
            if info.magnitude is not None:
                self.magnitudes[value] = info.magnitude

    # Decisions on values.

    def store(self, values: Iterable[Value], dtypes: Iterable[np.dtype | None]) -> None:
        """Decides what values are stored in."""
        self.dtypes.update(zip(values, dtypes, strict=True))

    def is_half(self, value: Value) -> bool:
        """Returns whether a value is stored in the compute dtype."""
        return self.dtypes[value] == self.half

    def info(self, value: Value) -> Info:
        """Returns what another level needs to know of a value."""
        return Info(self.dtypes[value], value not in self.facts.dependent, self.magnitudes[value])

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
        magnitude = self.magnitudes[value]
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

    def write_of(self, value: Value, inside: Set[Node]) -> Write:
        """Decides how a result of an island is stored, and returns that.

        Half where a rule or a product asks for it. If a mask may have made it half, finite numbers
        stay finite; any other infinity is to be seen.
        """
        if self.rounded_by_rule(value) or self.leaves_half(value, inside):
            self.store([value], [self.half])
        node = value.producer
        masked = node is not None and any(self.is_mask_of(node, read) for read in node.inputs)
        return Write(value, self.dtypes[value], saturates=masked and self.is_half(value))

    def is_mask_of(self, node: Node, value: Value) -> bool:
        """Returns whether a node may apply a value as a mask to what reaches a maximum."""
        is_compared = not self.facts.compared.isdisjoint(node.outputs)
        return node.rule.masks and is_compared and self.may_be_mask(value)

    def may_be_mask(self, value: Value) -> bool:
        """Returns whether a value may hold -1e9: it is known to, or is an input that is no bias."""
        if not value.is_float32 or self.half != np.float16:  # bfloat16 holds what float32 holds
            return False
        if value.constant is not None:
            return value.is_extreme
        is_input = value not in self.facts.dependent and not self.facts.is_bias(value)
        return value.is_extreme or (is_input and not value.fits_half)

    # Steps, and levels inside.

    def by_itself(self, node: Node) -> Step:
        """Returns the step of a node that is no barrier and stands in no island; stores its dtypes.

        `Planner.by_itself` does it; declared here, so that `_islands` need not import the planner.
        """
        raise NotImplementedError

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
        dtypes = (self.dtypes[value] for value in node.inputs) if reads is None else reads
        self.store(node.outputs, stores)
        plans = [plan for plan in insides if isinstance(plan, Plan)]  # nothing is known of others
        for value, *infos in zip(node.outputs, *(plan.infos for plan in plans), strict=False):
            if found := [info.magnitude for info in infos if info.magnitude is not None]:
                self.magnitudes[value] = hull(found)
        return Nested(node, tuple(insides), tuple(map(Read, node.inputs, dtypes)), tuple(stores))
