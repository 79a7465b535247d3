"""Functions that are called once: jit with shardings, remat, shard_map; and branches.

Branches are those of `lax.cond`, `lax.switch` and `lax.platform_dependent`; they join to the widest
dtype.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from jmp import _jax_compat
from jmp.autocasting._graph import Node
from jmp.autocasting._kinds import Arrays, InnerCall, Kind, register_kind
from jmp.autocasting._level import Level
from jmp.autocasting._sending import may_part
from jmp.autocasting._steps import Context, Function


class JitKind(Kind):
    """A jit that pins something down: shardings, donation, compiler options."""

    def emit(self, equation: JaxprEqn, operands: Arrays, functions: Sequence[Function]) -> Any:
        """Emits `jax.jit` with the same shardings, donation and options."""
        (function,) = functions

        def call(*args: Any) -> Any:
            return function(*args)

        call.__name__ = _jax_compat.called_name(equation)
        return jax.jit(call, **_jax_compat.jit_options(equation.params))(*operands)


class RematKind(Kind):
    """`jax.checkpoint` of the user's, with its policy and names."""

    def context_inside(self, node: Node, level: Level) -> Context:
        """Islands inside are kept apart from the forward pass they repeat."""
        return level.context._replace(prevent_cse=True)

    def emit(self, equation: JaxprEqn, operands: Arrays, functions: Sequence[Function]) -> Any:
        """Emits `jax.checkpoint`; a recomputation that stands in a gradient already is rebound."""
        (function,) = functions
        params = equation.params
        if _jax_compat.recomputes(params):
            jaxpr, constants = _jax_compat.open_jaxpr(jax.make_jaxpr(function)(*operands))
            if not constants:
                anew = _jax_compat.with_function(params, jaxpr)
                return _jax_compat.bind(equation.primitive, operands, anew)
        return jax.checkpoint(function, **_jax_compat.remat_options(params))(*operands)


class ShardMapKind(Kind):
    """`jax.shard_map`: the inside is planned on the shards."""

    def emit(self, equation: JaxprEqn, operands: Arrays, functions: Sequence[Function]) -> Any:
        """Emits `jax.shard_map` over the same mesh axes."""
        (function,) = functions
        options = _jax_compat.shard_map_options(equation.params)
        return jax.shard_map(function, **options)(*operands)


class CondKind(Kind):
    """One of several functions runs."""

    def functions(self, equation: JaxprEqn) -> Sequence[ClosedJaxpr]:
        """The branches."""
        return _jax_compat.branches(equation.params)

    def calls(self, node: Node) -> Sequence[InnerCall]:
        """With all operands but the number of the branch."""
        return [(node.inputs[1:], node.outputs) for _ in self.functions(node.equation)]

    def context_inside(self, node: Node, level: Level) -> Context:
        """Devices may take different branches."""
        parts = level.context.devices_part or may_part(node, node.inputs[0].aval)
        return level.context._replace(devices_part=parts)

    def emit(self, equation: JaxprEqn, operands: Arrays, functions: Sequence[Function]) -> Any:
        """Emits `lax.switch`, or what chooses by the platform when the program is lowered."""
        index, *rest = operands
        platforms = _jax_compat.branches_platforms(equation.params)
        if platforms is None:
            return lax.switch(index, list(functions), *rest)
        choices: dict[str, Function] = {}
        for names, function in zip(platforms, functions, strict=True):
            choices |= dict.fromkeys(names, function)
        return lax.platform_dependent(*rest, **choices)


register_kind(["jit", "pjit"], JitKind())
register_kind(_jax_compat.REMAT, RematKind())
register_kind(["shard_map"], ShardMapKind())
register_kind(["cond"], CondKind())
