"""Autocast: op-level mixed precision of any JAX function, by a transformation of its jaxpr.

The way of a program, and the files that it comes through:

  - what each primitive requires: the op table (`_registry`); what the user asks for:
    `_request`, `_precision`;
  - `_autocast` traces the function at its nominal (float32) types;
  - `_flatten` makes a dataflow graph (`_graph`) of the jaxpr, and of the functions inside, with
    what is known of each value's numbers and the rule of each equation (`_equations`,
    `_products`); `_propagation` follows what is known through jaxprs;
  - `_facts` finds the facts of the graph, by pure functions, `_magnitudes` how large values are;
  - `_planner` decides every dtype on a level (`_level`) and makes steps (`_steps`), with the help
    of `_islands` and `_sending`; what nests is planned by its kind (`_kinds`, `kinds/`), as a level
    of its own;
  - passes (`_passes`) change steps: `targets/` has a tuple of them for each kind of hardware, some
    of which are those of `attention/` and `float8/`;
  - `_emit` runs the steps and decides nothing, with `_lowerings`;
    `_operations` reads the steps, for reports.
"""

from jmp.autocasting import kinds, targets
from jmp.autocasting._autocast import autocast, full_precision
from jmp.autocasting._operations import (
    Float16OnTpuWarning,
    HalfReductionWarning,
    NoHalfProductWarning,
)
from jmp.autocasting._registry import Category, Rule, all_rules, register_rule

__all__ = [
    "Category",
    "Float16OnTpuWarning",
    "HalfReductionWarning",
    "NoHalfProductWarning",
    "Rule",
    "all_rules",
    "autocast",
    "full_precision",
    "kinds",
    "register_rule",
    "targets",
]
