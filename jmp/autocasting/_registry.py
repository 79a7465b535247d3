"""The op table: for each primitive the category it belongs to, and why.

Five categories, decided per primitive and looked up by its name:
  - LOW: products, computed in the compute dtype, on the tensor cores.
  - FULL: float32, because the range or the precision of a half type would not do.
  - WIDEST: operands must agree; half if an operand is half and none insists on float32.
  - FOLLOW: exact or bounded; computed in whatever dtype comes in.
  - AS_WRITTEN: the dtypes the program was traced with. A primitive without a rule is here too.

`jmp/autocasting/rules/` fills the table, one file per category; `register_rule` adds a user's own.
"""

import dataclasses
import enum
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np


class Category(enum.Enum):
    """Which dtype a primitive is computed in; see the module's docstring."""

    LOW = "low"
    FULL = "full"
    WIDEST = "widest"
    FOLLOW = "follow"
    AS_WRITTEN = "as written"


Params = Mapping[str, Any]


def _same_params(params: Params, dtype: np.dtype) -> Params:
    return params


@dataclasses.dataclass(frozen=True)
class Rule:
    """What autocast knows of one primitive.

    Attributes:
      category: see `Category`.
      reason: one sentence, printed in the op table and in reports.
      fusible: XLA fuses it into its neighbours (elementwise, data movement, reductions), so that it
        may be part of an island. Products, sorts, scatters and loops are not.
      expensive: an elementwise function whose derivative keeps float32 values; an island that holds
        one is worth recomputing.
      exact: rounding its float32 result changes nothing, but its *derivative* adds up: it runs in
        float32 between two casts, which cost nothing inside a fusion.
      params_in_half: given the parameters and a half dtype, the parameters to bind there.
      owner: the module that registered it.
    """

    category: Category
    reason: str
    fusible: bool = True
    expensive: bool = False
    exact: bool = False
    params_in_half: Callable[[Params, np.dtype], Params] = _same_params
    owner: str = "jmp"


NO_RULE = Rule(Category.AS_WRITTEN, "no rule: computed in the dtypes it was traced with", False)

_RULES: dict[str, Rule] = {}


def register_rule(
    primitives: Any,
    category: Category | str,
    reason: str,
    *,
    fusible: bool = False,
    expensive: bool = False,
    exact: bool = False,
    params_in_half: Callable[[Params, np.dtype], Params] = _same_params,
) -> None:
    """Tells autocast how to compute one or more primitives.

    Args:
      primitives: a primitive, its name, or a sequence of either.
      category: a `Category` or its name: "low", "full", "widest", "follow", "as written".
      reason: one sentence for the op table.
      fusible, expensive, exact, params_in_half: see `Rule`. A rule for a primitive that names a
        dtype in its parameters gives `params_in_half`.

    Raises: ValueError if a primitive has a rule already; the message names who registered it.

    >>> register_rule("my_product", "low", "runs on the tensor cores")
    >>> rule_for("my_product").category
    <Category.LOW: 'low'>
    """
    frame = inspect.currentframe()
    caller = frame.f_back if frame else None
    owner = caller.f_globals.get("__name__", "?") if caller else "?"
    rule = Rule(Category(category), reason, fusible, expensive, exact, params_in_half, owner=owner)
    names = [primitive_name(primitive) for primitive in _as_sequence(primitives)]
    for name in names:
        if name in _RULES:
            raise ValueError(
                f"A rule for {name!r} was registered by {_RULES[name].owner} already "
                f"(category {_RULES[name].category.value!r}). To change a category for one call, "
                "pass `low=`, `full=` or `follow=` to autocast."
            )
    _RULES.update(dict.fromkeys(names, rule))


def rule_for(name: str) -> Rule:
    """Returns the rule of the primitive called `name`; `NO_RULE` where there is none."""
    return _RULES.get(name, NO_RULE)


def all_rules() -> dict[str, Rule]:
    """Returns the whole table, sorted by category and name."""
    order = list(Category)
    return dict(sorted(_RULES.items(), key=lambda item: (order.index(item[1].category), item[0])))


def primitive_name(primitive: Any) -> str:
    """Returns the name of a primitive given as itself or by name."""
    name = primitive if isinstance(primitive, str) else getattr(primitive, "name", None)
    if not isinstance(name, str):
        raise TypeError(
            f"Got {primitive!r}; expected a JAX primitive or its name, such as lax.exp_p or 'exp'."
        )
    return name


def _as_sequence(primitives: Any) -> Iterable[Any]:
    if isinstance(primitives, (list, tuple, set, frozenset)):
        return primitives
    return [primitives]
