"""A plan: the steps of one level, with every decision and its reason. `_emit` runs it as it says.

There are three sorts of steps: a `Single` equation, a `Nested` one that is planned inside, and an
`Island` of equations computed in float32 as one.
"""

import enum
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np

from jmp.autocasting._flow import Info
from jmp.autocasting._graph import Graph, Node, Value
from jmp.autocasting._regions import Words
from jmp.autocasting._registry import Params


class Arithmetic(enum.Enum):
    """What a single equation is computed in."""

    HALF = "half"
    FLOAT32 = "float32"
    ROUNDED = "float32, rounded"


class Recompute(enum.Enum):
    """What an island keeps for the backward pass; see `_islands`."""

    PLAIN = "plain"
    RECOMPUTE = "recompute"
    RECOMPUTE_BUT_SUMS = "recompute but sums"


class Read(NamedTuple):
    """How an operand is read.

    Attributes:
      value: what is read.
      dtype: what it is handed over in; None for what is no real floating array, which passes.
      shape: what it is repeated to in float32, before it is rounded; None leaves it.
      saturates: whether finite numbers are held within float16's range before they are rounded.
    """

    value: Value
    dtype: np.dtype | None
    shape: tuple[Any, ...] | None = None
    saturates: bool = False


class Leave(NamedTuple):
    """How a value leaves an island: what it is stored in, and whether it is saturated before."""

    value: Value
    dtype: np.dtype | None
    saturates: bool = False


class Rewrite(NamedTuple):
    """A leaner form of one equation of an island, which gives the same; see `rewrites`.

    Attributes:
      why: one sentence, for reports.
      reads: the values that it reads instead of the equation's operands.
      run: a function of these, in float32, that returns the equation's result.
      keeps: the name under which it keeps a value where the island is recomputed; "" for none.
    """

    why: str
    reads: tuple[Value, ...]
    run: Callable[..., Any]
    keeps: str = ""


class Surroundings(NamedTuple):
    """What a rewrite may ask of the island that an equation stands in.

    Attributes:
      inside: the nodes of the island.
      recompute: what it keeps for the backward pass.
      half: the half type of those results that are stored in it.
      in_half: values stored in it.
    """

    inside: Set[Node]
    recompute: Recompute
    half: np.dtype
    in_half: Set[Value]


class Single(NamedTuple):
    """One equation.

    Attributes:
      node: the graph's.
      arithmetic: what it is computed in.
      why: for reports.
      reads: its operands.
      params: what its primitive is bound with.
      stores: the dtype of each result.
    """

    node: Node
    arithmetic: Arithmetic
    why: str
    reads: tuple[Read, ...]
    params: Params
    stores: tuple[np.dtype | None, ...]

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The node."""
        return (self.node,)


class Inside(NamedTuple):
    """A planned function inside an equation.

    Attributes:
      plan: of its jaxpr.
      constants: the arrays that the jaxpr holds by itself, its first inputs.
      reads: the dtypes that its arguments are cast to inside; an empty tuple casts none.
      stores: the dtypes that its results are cast to; an empty tuple casts none.
    """

    plan: "Plan"
    constants: Sequence[Any]
    reads: tuple[np.dtype | None, ...] = ()
    stores: tuple[np.dtype | None, ...] = ()


# Of flat arrays; returns a list of them.
Function = Callable[..., Any]
# The graph of a function inside, and the arrays that it holds by itself, its first inputs.
Opened = tuple[Graph, list[Any]]

# What stands for a function inside that is not planned: it is run as it was written, or traced and
# planned when it is called, as the rule of a custom derivative is. Given what runs a plan, it
# returns a function of flat arrays.
RunPlan = Callable[["Plan", Sequence[Any]], list[Any]]
Unplanned = Callable[[RunPlan], Function]


class Nested(NamedTuple):
    """One equation that is planned inside; its kind emits it (`_kinds`).

    Attributes:
      insides: what stands for each of its functions.
      reads: its operands, and `stores` the dtypes of its results.
    """

    node: Node
    insides: tuple[Inside | Unplanned, ...]
    reads: tuple[Read, ...]
    stores: tuple[np.dtype | None, ...]

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The node."""
        return (self.node,)


class Island(NamedTuple):
    """A set of nodes computed in float32 as one; see `_islands`.

    Attributes:
      nodes: in program order.
      clones: neutral nodes that it computes for itself, before its own; they may stand outside too.
      rewrites: of nodes that run in a leaner form.
      why: why nodes of it require float32, for reports; the others are there between them.
      reads: values from outside, each once.
      leaves: values read outside.
      recompute: what it keeps for the backward pass.
      prevent_cse: whether XLA must not merge its recomputation with its forward pass.
      shares_casts: whether all readers of an input share one cast.
    """

    nodes: tuple[Node, ...]
    clones: tuple[Node, ...]
    rewrites: Mapping[Node, Rewrite]
    why: Mapping[Node, str]
    reads: tuple[Read, ...]
    leaves: tuple[Leave, ...]
    recompute: Recompute
    prevent_cse: bool
    shares_casts: bool


Step = Single | Nested | Island


class Plan(NamedTuple):
    """Steps in an order that can be run.

    Attributes:
      graph: the level.
      steps: all that its outputs and its effects need.
      infos: what is known of each output, the dtype in which it comes out among it.
      words: what the user said.
    """

    graph: Graph
    steps: tuple[Step, ...]
    infos: tuple[Info, ...]
    words: Words

    @property
    def stores(self) -> tuple[np.dtype | None, ...]:
        """The dtypes in which the outputs come out."""
        return tuple(info.dtype for info in self.infos)
