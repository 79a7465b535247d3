"""Facts of a graph, found by pure functions of it and written down in `Facts`.

- A value *feeds* if it reaches a product, or an output that does. Any other value is on the way
  to the loss (or is a statistic) and stays float32. So does what reaches a product only through a
  barrier that reads float32 anyway (a linear solver, a product with precision HIGHEST).
- A value is *carried* if it reaches the float32 carry of a loop, and no product lies between.
  Rounded on the way, it would be rounded at every turn: the carry would lose what small steps add
  to it.
- A value is *neutral* if no product lies before it: parameters, inputs, constants, and what is
  computed only from them. Neutral values do not decide the dtype of an operation: they stay as
  they are and are cast at each use, so that gradients add up in float32.
- An *embedding* is a gather that looks rows up in a neutral table on their way to a product.
- A *cut* is the end of a batch or group normalisation. There the normalised value goes back to
  half, and what follows (relu, the residual addition) is half too: the backward pass of such a norm
  reads its cotangent twice, and would store it in float32 otherwise.
- The *depth* of a node is the largest number of barriers on a path to it. A barrier is anything
  XLA does not fuse (a product, a sort, a loop), an embedding, and a cut. Nodes of one depth that
  touch each other can be computed as one: a path that leaves such a set and comes back would cross
  a barrier, and so end deeper.
- A *softmax*, or a log-sum-exp, adds up powers along some axes. Mostly their maximum is subtracted
  before, and the powers are divided by their sum afterwards. All powers that are added up together
  are a row here; mostly rows are along the last axis.
"""

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import NamedTuple

import numpy as np

from jmp.autocasting._graph import (
    Graph,
    Inside,
    Node,
    Value,
    downstream,
    reached,
    source_through,
    upstream,
)
from jmp.autocasting._magnitudes import Magnitude
from jmp.autocasting._precision import HOLD_RULES, why_not_lowered
from jmp.autocasting._registry import is_low
from jmp.dtypes import FLOAT32


class Info(NamedTuple):
    """A value, as another level knows it."""

    dtype: np.dtype | None  # that it is stored in
    neutral: bool
    magnitude: Magnitude | None = None  # None: what its dtype says


class Destination(NamedTuple):
    """Where an output goes outside: to a product, to the float32 carry of a loop, elsewhere."""

    feeds: bool
    carried: bool
    rounded: bool = False  # whatever it is: only products read it, or a half carry holds it
    exposed: bool = False  # more than half products read it; asked only by loops


class Facts(NamedTuple):
    """The facts of a level; see the module."""

    feeds: Set[Value]
    carried: Set[Value]
    dependent: Set[Value]  # not neutral: they depend on a product
    embeddings: Set[Node]
    cuts: Set[Node]
    depths: Mapping[Node, int]  # of all but those whose results are neutral, which are free
    compared: Set[Value]  # they reach a maximum, such as that of a softmax, or may reach one
    read_otherwise: Set[Value]  # other operations than products read them, moved or as they are
    kept: Set[Value]  # outputs whose `Destination` is not `rounded`
    softmaxes: "Sequence[Softmax]"

    def is_bias(self, value: Value) -> bool:
        """Returns whether a value is taken for a bias rather than for a mask, by its shape.

        An array of shape (1, 16) is a bias, such as that of `hk.BatchNorm`, unless it reaches the
        maximum of a softmax before a product: there it may be a mask over the keys of a batch of
        one. An array of one axis is a bias everywhere.
        """
        axes = len(value.source) - value.source.count(1)
        is_row = axes <= 1 and not value.is_extreme and value not in self.compared
        return value.is_vector or is_row


def facts_of(graph: Graph, infos: Sequence[Info], outputs: Sequence[Destination]) -> Facts:
    """Returns the facts of a level, given what is known of its inputs and outputs outside."""
    goes = list(zip(graph.outputs, outputs, strict=True))
    feeds = feeding_values(graph, [value for value, where in goes if where.feeds])
    carried = carried_values(graph, [value for value, where in goes if where.carried])
    embeddings, dependent = find_dependent(graph, infos, feeds - carried)
    cuts = find_cuts(graph, dependent, embeddings)
    kept = {value for value, where in goes if not where.rounded}
    return Facts(
        feeds,
        carried,
        dependent,
        embeddings,
        cuts,
        depths=find_depths(graph, dependent, embeddings | cuts),
        compared=compared_values(graph, graph.outputs),  # an output may reach a maximum outside
        read_otherwise=read_otherwise_values(graph, kept),
        kept=kept,
        softmaxes=softmaxes_of(graph.nodes),
    )


def reaching(
    level: Graph | Inside,
    outputs: Iterable[Value],
    starts: Callable[[Node], bool],
    stops: Callable[[Node], bool],
) -> set[Value]:
    """Returns the values of a level, and of those inside, that reach an output or a node.

    It is the backward analysis: what is inside is gone through as well, also in further turns of a
    loop.

    Args:
      level: given as a function inside, what reaches an output in a later turn counts too.
      outputs: of the level.
      starts: the nodes that are to be reached, also those inside.
      stops: the nodes that nothing is followed through.
    """
    found = set(outputs)
    # The sources of a value on another level, or in the turn before.
    across: dict[Value, list[Value]] = collections.defaultdict(list)

    def link(pairs: Iterable[tuple[Value, Value]]) -> None:
        for value, source in pairs:
            across[value].append(source)

    def made_of(value: Value) -> Sequence[Value]:
        node = value.producer
        if node is None or node.insides:
            return across.get(value, ())
        return () if stops(node) else node.inexact

    if isinstance(level, Inside):
        link(level.turns())
        level = level.graph
    graphs = [level]
    for graph in graphs:  # others follow; a function inside that calls itself would be a cycle
        for node in graph.nodes:
            if starts(node):
                found.update(node.inexact)
            elif node.insides and not stops(node):
                for inside in node.insides:
                    link(inside.crossings())
                    link(inside.turns())
                    graphs.append(inside.graph)
    return set(reached(found, made_of))


def holds_product(node: Node) -> bool:
    """Returns whether a node is, or holds where it is not opened, a product in whatever dtype."""
    return any(map(is_low, node.equations))


def feeding_values(graph: Graph, outputs: Iterable[Value]) -> set[Value]:
    """Returns the values that reach a product, or one of the outputs that feed one outside."""
    ends_here = lambda node: node.reads_float32 and not node.is_fusible
    return reaching(graph, outputs, lambda node: node.has_products, ends_here)


def carried_values(graph: Graph, outputs: Iterable[Value]) -> set[Value]:
    """Returns the values that reach the float32 carry of a loop without a product between.

    Args:
      outputs: those that reach one outside.
    """
    floating = [value for value in outputs if value.is_inexact]
    if not floating:  # nothing else is searched for
        return set()
    return reaching(graph, floating, lambda _: False, lambda node: node.is_product)


def compared_values(graph: Graph, outputs: Iterable[Value]) -> set[Value]:
    """Returns the values that reach a maximum, such as that of a softmax.

    One number that adds values up holds no scores any more.
    """

    def ends_here(node: Node) -> bool:
        return node.multiplies or (node.name == "reduce_sum" and node.outputs[0].size == 1)

    return reaching(graph, outputs, _takes_maximum, ends_here)


def _takes_maximum(node: Node) -> bool:
    if node.name == "reduce_max":
        return True
    return node.holds_functions and any(e.primitive.name == "reduce_max" for e in node.equations)


def exposed_values(
    graph: Graph, outputs: Iterable[Value], half: np.dtype, lookups: Set[Node] = frozenset()
) -> set[Value]:
    """Returns the values of a level that more than half products read, moved or as they are.

    Args:
      outputs: those of the level that are so read outside.
      lookups: nodes that count as half products.
    """
    starts = lambda node: node not in lookups and reads_numbers(node, half)
    is_product = lambda node: node.is_product or node in lookups
    return reaching(graph, outputs, starts, is_product)


def reads_numbers(node: Node, half: np.dtype) -> bool:
    """Returns whether a node is neither a half product, nor only moves what it reads."""
    if node.region.in_float32:
        return True
    if is_low(node.equation):
        return not node.is_product or bool(why_not_lowered(node, half))
    if node.holds_functions:
        # The rule of a custom derivative may read what the function does not.
        return not node.goes_inside or (node.has_products and node.name in HOLD_RULES)
    if node.rule.casts:
        return node.outputs[0].dtype not in (FLOAT32, half)
    return not node.rule.holds_operands


def read_otherwise_values(graph: Graph, outputs: Iterable[Value]) -> set[Value]:
    """Returns the values that not only products read in the end, moved or as they are.

    Args:
      outputs: those that are not rounded whatever they are.
    """
    is_product = lambda node: node.is_product
    starts = lambda node: not (node.is_product or node.rule.moves)
    return reaching(graph, outputs, starts, is_product)


def find_dependent(
    graph: Graph, infos: Sequence[Info], rounded: Set[Value]
) -> tuple[set[Node], set[Value]]:
    """Returns embeddings, and the values that are not neutral.

    Args:
      rounded: values that may be rounded, because they feed and are not carried.
    """
    embeddings: set[Node] = set()
    found = {v for v, info in zip(graph.inputs, infos, strict=True) if not info.neutral}
    for node in graph.nodes:
        if _is_embedding(node, found, rounded):
            embeddings.add(node)
        if (
            node in embeddings
            or node.has_products
            or node.region.is_decided
            or node.region.output_dtype is not None
            or not found.isdisjoint(node.inputs)
        ):
            found.update(node.outputs)
    return embeddings, found


def find_depths(graph: Graph, dependent: Set[Value], ends: Set[Node]) -> dict[Node, int]:
    """Counts barriers on the way to each node, also on the way over the effects before its own.

    Effects run in the order of the program, as if each read what the one before it returns.

    Args:
      ends: nodes that are barriers though they are fusible.
    """
    depths: dict[Node, int] = {}
    after: dict[Value, int] = {}
    last_effect = 0
    for node in graph.nodes:
        depth = max((after.get(value, 0) for value in node.inputs), default=0)
        if node.equation.effects:
            depth = last_effect = max(depth, last_effect)
        is_free = node.outputs and dependent.isdisjoint(node.outputs)
        if not is_free:
            depths[node] = depth
        is_barrier = node in ends or node.equation.effects or not (node.is_fusible or is_free)
        after.update(dict.fromkeys(node.outputs, depth + bool(is_barrier)))
    return depths


def only_read_by(value: Value, graph: Graph, accepts: Callable[[Node], bool]) -> bool:
    """Returns whether all that reads a value are nodes of some sort; a level's output is not so."""
    return value not in graph.outputs and all(map(accepts, value.users))


# Embeddings.


def _is_embedding(node: Node, dependent: Set[Value], rounded: Set[Value]) -> bool:
    if node.name != "gather" or node.region.in_float32:
        return False
    table, (rows,) = node.inputs[0], node.outputs
    is_table = table not in dependent and table.constant is None
    return is_table and rows.is_float32 and rows in rounded and not _is_coordinate(rows)


def _is_coordinate(value: Value) -> bool:
    """Returns whether a value is subtracted from, or compared with, one that is not computed of it.

    The difference of two coordinates has the error of both.
    """
    for moved in value.moved():
        for user in moved.users:
            if user.name == "sub" or user.rule.compares:
                others = [other for other in user.inputs if other is not moved]
                if any(o.constant is None and moved not in upstream(o) for o in others):
                    return True
    return False


# Normalisation over leading or spatial axes.


def find_cuts(graph: Graph, dependent: Set[Value], embeddings: Set[Node]) -> set[Node]:
    """Returns the end of each normalisation over leading or spatial axes."""
    statistics: set[Value] = set()
    normalised: dict[Value, Node] = {}  # and what computes it
    for node in graph.nodes:
        if not node.is_fusible or node in embeddings or len(node.outputs) != 1:
            continue
        (output,) = node.outputs
        if output not in dependent:
            continue
        if node.name == "reduce_sum" and output.size > 1 and not node.reduces_rows:
            statistics.add(output)
        elif all(v in statistics or v not in dependent for v in node.inputs):
            statistics.add(output)
        elif node.rule.affine and _is_normalising(node, dependent, statistics, normalised):
            normalised[output] = node
    return {
        node
        for value, node in normalised.items()
        if not any(user.rule.affine and user.outputs[0] in normalised for user in value.users)
    }


def _is_normalising(
    node: Node, dependent: Set[Value], statistics: Set[Value], normalised: Mapping[Value, Node]
) -> bool:
    """An affine step whose other operand is a statistic, or a parameter after such a step."""
    large = [v for v in node.inputs if v in dependent and v not in statistics]
    others = [v for v in node.inputs if v not in dependent or v in statistics]
    if [len(large), len(others)] != [1, 1]:
        return False
    is_parameter = others[0].source_size < node.outputs[0].size
    return others[0] in statistics or (large[0] in normalised and is_parameter)


# Softmaxes.


class Shift(NamedTuple):
    """A number that is subtracted from each row before its powers are taken."""

    sub: Node
    rows: Value
    maxima: Node  # of the rows; the number subtracted is made of them
    number: Value  # one a row


class Softmax(NamedTuple):
    """Sums of powers of rows, and what stands around them."""

    exp: Node
    total: Node  # the sums of the rows
    shift: Shift | None  # None where the maxima are not subtracted
    division: Node | None  # of the powers by their sums

    @property
    def argument(self) -> Value:
        """The operand of `exp`."""
        return self.exp.inputs[0]


def softmaxes_of(nodes: Iterable[Node]) -> list[Softmax]:
    """Returns the softmaxes among the nodes of a level, over any axes."""
    found = []
    for total in nodes:
        if total.name == "reduce_sum":
            exp = total.inputs[0].producer
            if exp is not None and exp.name == "exp":
                found.append(Softmax(exp, total, _shift(exp, total), _division(exp, total)))
    return found


def softmaxes_within(softmaxes: Iterable[Softmax], nodes: Set[Node]) -> Iterator[Softmax]:
    """Yields what of each softmax is computed by some nodes that are fused.

    One whose sums are not among these, or not of float32 rows along the last axes, is left out.
    """
    for softmax in softmaxes:
        total, shift, division = softmax.total, softmax.shift, softmax.division
        is_of_rows = total.inputs[0].is_float32 and total.reduces_rows
        if is_of_rows and {total, softmax.exp} <= nodes:
            is_shifted = shift is not None and {shift.sub, shift.maxima} <= nodes
            yield softmax._replace(
                shift=shift if is_shifted else None,
                division=division if division in nodes else None,
            )


def _division(exp: Node, total: Node) -> Node | None:
    """Returns the node that divides the powers by the sums of their rows."""
    (powers,), (sums,) = exp.outputs, total.outputs
    for node in powers.users:
        if node.name == "div" and node.inputs[0] is powers:
            number = _one_a_row(node.inputs[1], powers, total.params["axes"])
            if number is None:
                continue
            if source_through(number, lambda n: n.rule.reshapes or n.rule.repeats) is sums:
                return node
    return None


def _shift(exp: Node, total: Node) -> Shift | None:
    sub = exp.inputs[0].producer
    if sub is None or sub.name != "sub":
        return None
    rows, subtracted = sub.inputs
    axes = sorted(total.params["axes"])
    shift = _one_a_row(subtracted, rows, axes)
    if shift is None:
        return None
    is_small = lambda n: n.is_fusible and len(n.outputs) == 1 and n.outputs[0].size <= shift.size
    for node in rows.users:
        if node.name == "reduce_max" and sorted(node.params["axes"]) == axes:
            if shift in downstream(node.outputs[0], is_small):
                return Shift(sub, rows, node, shift)
    return None


def _one_a_row(value: Value, rows: Value, axes: Sequence[int]) -> Value | None:
    """Returns what `value` repeats along the rows of an array, if it has one number for each.

    Args:
      rows: the array.
      axes: along which a row lies.
    """
    shape = rows.aval.shape
    left = [axis for axis in range(len(shape)) if axis not in axes]
    of_rows = tuple(n if axis in left else 1 for axis, n in enumerate(shape))
    if value.aval.shape == of_rows:
        return value
    node = value.producer
    if value.aval.shape != shape or node is None or node.name != "broadcast_in_dim":
        return None
    source, places = node.inputs[0], tuple(node.params["broadcast_dimensions"])
    with_axes = {tuple(range(len(shape))): of_rows, tuple(left): tuple(shape[i] for i in left)}
    return source if source.aval.shape == with_axes.get(places) else None
