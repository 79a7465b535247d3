"""Autocast: op-level mixed precision of any JAX function, by a transformation of its jaxpr.

The way of a program: `_autocast` traces it at its nominal (float32) types; `_graph` flattens the
jaxpr; `_flow`, `_islands` and `_plan` decide every dtype without tracing again; `_emit` binds the
result. What nests (`_nesting`, `_loops`, `_custom_derivatives`) is planned level by level. What
each primitive wants is said in the op table (`_registry`, `rules/`), what the user wants in
`_settings`, `_regions` and `_precision`. `_operations` reads a finished plan, for reports.
"""

from jmp.autocasting._autocast import autocast, full_precision
from jmp.autocasting._operations import NoHalfProductWarning
from jmp.autocasting._registry import Category, Rule, all_rules, register_rule

__all__ = [
    "Category",
    "NoHalfProductWarning",
    "Rule",
    "all_rules",
    "autocast",
    "full_precision",
    "register_rule",
]
