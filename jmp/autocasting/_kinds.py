"""Kinds: what autocast goes inside, and how it does.

A kind is a class for one sort of equation that holds functions (jit, remat, shard_map, loops,
branches, custom derivatives): `kinds/` has one file each, and `register_kind` adds another. Where a
kind says nothing, the equation calls one function once, with all the operands.

  - `rule` says how the equation counts as a whole, where the op table cannot know.
  - `functions` and `calls` say which functions are inside, and what each is called with.
  - `context_inside` says what holds inside and not around.
  - `plan` plans what is inside, each function as a level of its own, and decides in which dtypes
    operands go in and results come out.
  - `emit` binds the equation anew through JAX's public function for it, which sees to effects,
    shardings and caches; it is told what stands for each function inside. The diagnostics emit
    programs with it too.
"""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, JaxprEqn

from jmp import _jax_compat
from jmp._messages import described
from jmp.autocasting._graph import Argument, Node, Value, value_of
from jmp.autocasting._level import Level
from jmp.autocasting._registry import Rule, primitive_name
from jmp.autocasting._request import Settings
from jmp.autocasting._steps import Context, Function, Nested

Arrays = Sequence[Any]
InnerCall = tuple[Sequence[Argument], Sequence[Value]]  # arguments, and results of the node


class Kind:
    """An equation that calls one function once, with all its operands."""

    runs_as_written = False  # bound as it was traced, and not planned inside

    def rule(self, equation: JaxprEqn, rule: Rule, settings: Settings) -> Rule:
        """Returns the rule of the equation, given that of the op table."""
        return rule

    def functions(self, equation: JaxprEqn) -> Sequence[ClosedJaxpr]:
        """Returns the functions inside, in the order in which `emit` takes what stands for them."""
        return [_jax_compat.called(equation.params)]

    def calls(self, node: Node) -> Sequence[InnerCall]:
        """Returns for each function what it is called with, and which results its own become."""
        return [(node.inputs, node.outputs) for _ in self.functions(node.equation)]

    def context_inside(self, node: Node, level: Level) -> Context:
        """Returns what holds inside, given the level that the node stands on."""
        return level.context

    def plan(self, node: Node, level: Level) -> Nested:
        """Plans the node's functions; a result is half if every function leaves it in half."""
        goes, context = level.destinations(node), self.context_inside(node, level)
        plans = []
        for inside in node.insides:
            infos = [level.info(value_of(argument)) for argument in inside.arguments]
            plans.append(level.plan_graph(inside.graph, infos, goes, context))
        stored = zip(*(plan.stores for plan in plans), strict=True)
        stores = [
            level.half if value.is_float32 and set(dtypes) == {level.half} else value.dtype
            for value, dtypes in zip(node.outputs, stored, strict=True)
        ]
        return level.nested(node, [plan.storing(stores) for plan in plans], stores)

    def emit(self, equation: JaxprEqn, operands: Arrays, functions: Sequence[Function]) -> Any:
        """Binds the equation anew; returns a list of results."""
        raise NotImplementedError


_KINDS: dict[str, Kind] = {}


def register_kind(primitives: Sequence[Any], kind: Kind) -> None:
    """Tells autocast how to go inside the equations of some primitives.

    Args:
      primitives: primitives or their names.
      kind: see the module.

    Raises: ValueError if a primitive has a kind already.
    """
    names = list(map(primitive_name, primitives))
    for name in names:
        if name in _KINDS:
            raise ValueError(
                f"{described(name)} has a kind already, {type(_KINDS[name]).__name__}."
            )
    _KINDS.update(dict.fromkeys(names, kind))


def has_kind(name: str) -> bool:
    """Returns whether the primitive called `name` has a kind; else it is bound as a whole."""
    return name in _KINDS


def kind_of(name: str) -> Kind:
    """Returns the kind of the primitive called `name`."""
    return _KINDS[name]
