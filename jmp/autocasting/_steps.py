"""A plan: the steps of one level, with every decision and its reason. `_emit` runs it as it says.

There are four sorts of steps: a `Single` equation, a `Nested` one that is planned inside, an
`Island` of equations computed in float32 as one, and steps that are `Fused` to one kernel. A step
says how it is lowered by a function that the rule or pass that wants it so attaches; nothing else
knows that function.
"""

import collections
import enum
import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple, TypeVar

import numpy as np

from jmp._jax_compat import Params
from jmp.autocasting._facts import Info
from jmp.autocasting._graph import Graph, Node, Value, reached
from jmp.autocasting._propagation import turns_of
from jmp.autocasting._request import Request

Function = Callable[..., Any]  # of flat arrays; returns a list of them
Dtypes = tuple[np.dtype | None, ...]  # None for what has no dtype, or keeps its own
# The arrays of one level so far, by their values; lowerings keep others under keys of their own.
Environment = dict[Any, Any]


class Arithmetic(enum.Enum):
    """The dtypes that a single equation is computed in."""

    HALF = "half"
    FLOAT32 = "float32"  # or other dtypes that it was traced with
    ROUNDED = "float32, rounded"


class Read(NamedTuple):
    """How an operand is read: repeated to `shape` in float32, saturated, cast to `dtype`."""

    value: Value
    dtype: np.dtype | None
    shape: tuple[Any, ...] | None = None
    saturates: bool = False  # finite numbers are held within float16's range
    # Reads an array, given it, the shape and the dtype; None: `_lowerings.repeated`, then a cast.
    repeat: Callable[[Any, Any, Any], Any] | None = None


class Write(NamedTuple):
    """How a result is stored: saturated, cast to `dtype`."""

    value: Value
    dtype: np.dtype | None
    saturates: bool = False


class Rewrite(NamedTuple):
    """How one equation of an island is lowered: the same up to rounding, and leaner."""

    why: str  # one sentence, for reports
    reads: tuple[Value, ...]  # instead of the equation's operands
    run: Callable[..., Any]  # of these in float32; returns the equation's result
    keeps: str = ""  # the name under which it keeps a value where the island is recomputed
    as_stored: bool = False  # what enters the island is read with the rounding it is stored with


class Context(NamedTuple):
    """Facts that hold all over a level, and on the levels inside if nothing else is said."""

    request: Request
    # How often the level runs, as far as known; each loop counts one turn more, so that one means
    # outside of loops.
    times: int = 1
    # Whether a recomputation must be kept apart from the forward pass it repeats: XLA would merge
    # the two and keep the float32 values. In a loop the two stand in different loops anyway,
    # unless the body is itself recomputed.
    prevent_cse: bool = True
    # Whether it is a rule whose tangents JAX transposes, or must agree with one.
    is_transposed: bool = False
    # Whether devices may not come by here together; see `_sending.may_part`.
    devices_part: bool = False
    # Whether it may be differentiated backwards: not the body of a while loop, nor a loop whose
    # buffers are half, which has another form for that.
    has_gradient: bool = True


# Binds an equation, if not as it stands; whoever attaches it to a step defines it. Given the step,
# its operands as `step.reads` says, and the environment of the level, it returns the results. Those
# that compare equal read nothing of the environment: steps that are alike share a function.
Lowering = Callable[["Single", Sequence[Any], Environment], Sequence[Any]]


class Single(NamedTuple):
    """One equation, and what its primitive is bound with."""

    node: Node
    arithmetic: Arithmetic
    why: str
    reads: tuple[Read, ...]
    params: Params
    stores: Dtypes
    lowering: Lowering | None = None  # None: the primitive is bound as it is
    notes: tuple[str, ...] = ()  # sentences for reports, beside `why`
    reads_offset: bool = False  # beside an offset, few digits of an operand are left
    # Of steps that are alike (`_shared_traces`), with their function, by its lowering, once one of
    # them has run: the one part of a plan that changes.
    shared: dict[Any, Function] | None = None

    @property
    def is_half(self) -> bool:
        """Whether operands are read in half."""
        return self.arithmetic is Arithmetic.HALF


RunPlan = Callable[["Plan", Sequence[Any]], list[Any]]
# Stands for a function inside that is not planned: it is run as it was written, or traced and
# planned when it is called, as the rule of a custom derivative is.
Unplanned = Callable[[RunPlan], Function]


class Nested(NamedTuple):
    """One equation that is planned inside; its kind emits it (`_kinds`)."""

    node: Node
    insides: tuple["Plan | Unplanned", ...]  # what stands for each of its functions
    reads: tuple[Read, ...]
    stores: Dtypes
    # The same loop as it runs where it is differentiated, if that differs: its weights come in as
    # float32, and its buffers are float32; see `kinds.loops`.
    differentiated: "Nested | None" = None
    lowering: "NestedLowering | None" = None  # None: its kind emits it

    def rounding(self, weights: Sequence[bool], half: np.dtype) -> "Nested":
        """Returns a loop in two forms: this one to differentiate, one with weights that are rounded
        before it.

        Args:
          weights: of each operand whether it is one.
        """
        # JAX takes no effects in a custom derivative, which chooses the form.
        if self.node.equation.effects or not any(weights):
            return self
        pairs = zip(self.reads, weights, strict=True)
        reads = tuple(read._replace(dtype=half) if weight else read for read, weight in pairs)
        return self._replace(reads=reads, differentiated=self)


# Binds a nested equation, if its kind is not to. Given the step, its operands as `step.reads` says,
# and what stands for each function inside, it returns the results.
NestedLowering = Callable[[Nested, Sequence[Any], Sequence[Function]], Sequence[Any]]


class Island(NamedTuple):
    """A set of nodes computed in float32 as one; see `_islands`."""

    nodes: tuple[Node, ...]  # in program order
    why: Mapping[Node, str]  # of nodes that require float32; others are there between them
    reads: tuple[Read, ...]  # values from outside, each once
    writes: tuple[Write, ...]  # values read outside
    is_recomputed: bool  # in the backward pass; see `_islands`
    shares_casts: bool  # all readers of an input share one cast
    common_scopes: int  # how many name scopes its nodes stand in together
    numbers: tuple[Value, ...] = ()  # arrays of one number, which it makes
    rewrites: Mapping[Node, Rewrite] = {}
    prevent_cse: bool = False  # XLA must not merge its recomputation with its forward pass
    shared: dict[Any, Function] | None = None  # as of single steps

    def written_in(self, dtype: np.dtype) -> Set[Value]:
        """Returns the results that leave in a dtype."""
        return {write.value for write in self.writes if write.dtype == dtype}

    def rewritten(self, forms: Mapping[Node, Rewrite]) -> "Island":
        """Returns the island with other forms of its nodes; one that it has already stays."""
        as_written = (node for node in self.nodes if node not in self.rewrites)
        found = {node: forms[node] for node in as_written if node in forms}
        return self._replace(rewrites={**self.rewrites, **found})


class Fused(NamedTuple):
    """Several steps as one kernel on one platform; elsewhere they run one by one."""

    node: Node  # the last of those it stands for
    plain: tuple[Single | Island, ...]  # the steps that run elsewhere, in order
    reads: tuple[Read, ...]  # values from outside, as they are stored
    platform: str  # as `lax.platform_dependent` names it
    lowering: Callable[[Environment], Any]  # computes the result from what enters
    why: str


Step = Single | Nested | Island | Fused
S = TypeVar("S", bound=Step)


class Plan(NamedTuple):
    """Steps in an order that can be run: all that the outputs and the effects of a level need."""

    graph: Graph
    reads: Dtypes  # what the inputs of the graph are cast to
    steps: tuple[Step, ...]
    infos: tuple[Info, ...]  # what is known of each output, the dtype it comes out in among it
    request: Request

    @property
    def stores(self) -> Dtypes:
        """The dtypes in which the outputs come out."""
        return tuple(info.dtype for info in self.infos)

    def storing(self, dtypes: Sequence[np.dtype | None]) -> "Plan":
        """Returns the plan with outputs that come out in other dtypes; None leaves one."""
        pairs = zip(self.infos, dtypes, strict=True)
        infos = (info._replace(dtype=dtype or info.dtype) for info, dtype in pairs)
        return self._replace(infos=tuple(infos))

    def taking_as_is(self, values: Set[Value]) -> "Plan":
        """Returns the plan with some inputs that are not cast when they come in."""
        pairs = zip(self.graph.inputs, self.reads, strict=True)
        return self._replace(reads=tuple(None if v in values else dtype for v, dtype in pairs))


class Ran(NamedTuple):
    """A step of a plan at any depth."""

    step: Single | Island | Fused
    level: Plan  # that it stands in
    times: int  # how often it runs: once for each turn of the scans around it


def steps_of(plan: Plan, times: int = 1) -> Iterator[Ran]:
    """Yields the steps of all levels, in order.

    The steps inside a nested one stand in its place; after a fused attention come those that run
    where it is not fused.
    """
    for step in plan.steps:
        if isinstance(step, Nested):
            turns = turns_of(step.node.equation)
            for inside in step.insides:
                if isinstance(inside, Plan):
                    yield from steps_of(inside, times * turns)
        else:
            yield Ran(step, plan, times)
        if isinstance(step, Fused):
            yield from (Ran(plain, plan, times) for plain in step.plain)


def nodes_of(step: Step) -> tuple[Node, ...]:
    """Returns the nodes that a step computes."""
    if isinstance(step, Fused):
        return tuple(node for plain in step.plain for node in nodes_of(plain))
    return step.nodes if isinstance(step, Island) else (step.node,)


def on(sort: type[S]) -> Callable[[Callable[[S, Any], Step]], Callable[..., list[Step]]]:
    """Returns a decorator: of a function of one sort of steps, and their level, it makes a pass."""

    def as_pass(change: Callable[[S, Any], Step]) -> Callable[..., list[Step]]:
        return lambda steps, level: [change(s, level) if isinstance(s, sort) else s for s in steps]

    return as_pass


def runnable_order(steps: Sequence[S], outputs: Iterable[Value]) -> list[S]:
    """Sorts steps; those that neither an output nor a marker needs are left out."""
    nodes = list(map(nodes_of, steps))
    producers = {v: index for index, own in enumerate(nodes) for n in own for v in n.outputs}
    place = [own[-1].index for own in nodes]
    needs = [
        {producers.get(read.value, index) for read in step.reads} - {index}
        for index, step in enumerate(steps)
    ]
    with_effects = [i for i, own in enumerate(nodes) if own[-1].equation.effects]
    for before, after in itertools.pairwise(sorted(with_effects, key=place.__getitem__)):
        needs[after].add(before)
    ends = {producers[value] for value in outputs if value in producers}
    ends.update(index for index, own in enumerate(nodes) for n in own if n.is_marker)
    needed = set(reached(ends, needs.__getitem__))
    waits = {index: len(needs[index]) for index in needed}
    readers: dict[int, list[int]] = collections.defaultdict(list)
    for index in needed:
        for before in needs[index]:
            readers[before].append(index)
    ready = [(place[index], index) for index in needed if not waits[index]]
    heapq.heapify(ready)
    order = []
    while ready:  # no step waits for ever: islands are convex, because of depths
        _, first = heapq.heappop(ready)
        order.append(steps[first])
        for reader in readers[first]:
            waits[reader] -= 1
            if not waits[reader]:
                heapq.heappush(ready, (place[reader], reader))
    assert len(order) == len(needed)
    return order
