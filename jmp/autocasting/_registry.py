"""The op table: for each primitive the category it belongs to, and why.

Five categories, decided per primitive and looked up by its name:
  - LOW: products, computed in the compute dtype, on the tensor cores.
  - FULL: float32, because the range or the precision of a half type would not do.
  - WIDEST: operands must agree; half if an operand is half and none requires float32.
  - FOLLOW: exact or bounded; computed in whatever dtype comes in.
  - AS_WRITTEN: the dtypes the program was traced with. A primitive without a rule is here too.

`jmp/autocasting/rules.py` fills the table; `register_rule` adds a user's own.
"""

import dataclasses
import enum
import sys
from typing import Any

import numpy as np

from jmp._jax_compat import Params
from jmp._messages import described, listed, wrong


class Category(enum.Enum):
    """Which dtype a primitive is computed in: one of five, which text names too.

    LOW: the compute dtype. FULL: float32. WIDEST: half if an operand is half and none requires
    float32. FOLLOW: whatever dtype comes in. AS_WRITTEN: the dtypes that the program was traced
    with.

    Raises: ValueError for any other text.

    >>> Category("low"), Category("as written")
    (<Category.LOW: 'low'>, <Category.AS_WRITTEN: 'as written'>)
    """

    LOW = "low"
    FULL = "full"
    WIDEST = "widest"
    FOLLOW = "follow"
    AS_WRITTEN = "as written"

    @classmethod
    def _missing_(cls, value: object) -> None:
        names = ", ".join(repr(category.value) for category in cls)
        raise ValueError(f"Got the category {described(value)}; expected one of {names}.")


@dataclasses.dataclass(frozen=True)
class Rule:
    """How autocast computes one primitive, and what reports say of it.

    The flags are called traits: planner and diagnostics take every set of primitives from them.
    `register_rule` makes rules; `all_rules` returns them.

    Attributes:
      category: the `Category`.
      reason: one sentence, printed in the op table, and by reports for what they have rows of.
      dtype_param: the parameter that says the result's dtype: half where it is computed in half.
      owner: the module that registered it.

    >>> rule = Rule(Category.FOLLOW, "moves numbers", reshapes=True)
    >>> rule.hands_on, rule.repeats, rule.owner
    (True, False, 'jmp')
    """

    category: Category
    reason: str
    dtype_param: str | None = None
    owner: str = "jmp"

    # XLA fuses it into its neighbours (elementwise, data movement, reductions), so that it may be
    # part of an island. Products, sorts, scatters and loops are not.
    fusible: bool = False
    # An elementwise function whose derivative keeps float32 values: worth recomputing.
    expensive: bool = False
    # Rounding its float32 result changes nothing, but its derivative adds up: it runs in float32
    # between two casts, which cost nothing inside a fusion.
    sums_backward: bool = False
    cheap: bool = False  # an island computes it again rather than read its result from memory
    # Its result has of the numbers of its first operand:
    reshapes: bool = False  # the same in the same order (reshape)
    permutes: bool = False  # the same in another order (transpose)
    repeats: bool = False  # each several times (broadcast_in_dim)
    selects: bool = False  # some of them (slice)
    looks_up: bool = False  # some of them; its other operands say which (gather)
    writes: bool = False  # all, but for some from an operand; integers say where (scatter)
    sends: bool = False  # the same, on other devices (all_gather)
    joins: bool = False  # all, and some of another operand beside or among them (pad, scatter)
    rearranges: bool = False  # numbers of all its operands, arranged in another way (concatenate)
    sums_devices: bool = False  # it adds up what devices hold (psum)
    linear: bool = False  # it adds or subtracts
    affine: bool = False  # it adds, subtracts, multiplies or divides
    elementwise: bool = False  # of two operands, the smaller of which JAX repeats
    compares: bool = False  # it asks how two operands differ
    masks: bool = False  # it is how masks are applied; not `mul`: its overflow must be seen
    keeps_range: bool = False  # its result goes beyond a half type where an operand does
    bounded: bool = False  # its result lies between minus one and one
    wraps: bool = False  # it depends on the fraction of its argument, or of its turns
    reduces: bool = False  # it reduces over `axes`
    sums: bool = False  # it adds up or multiplies many terms: in reports, a reduction
    chooses: bool = False  # its result says which entry, and not how large it is
    draws_bits: bool = False  # it makes or uses random bits
    casts: bool = False  # it changes the dtype and nothing else

    def params_in_half(self, params: Params, half: np.dtype) -> Params:
        """Returns what an equation with these parameters is bound with in half."""
        return {**params, self.dtype_param: half} if self.dtype_param else params

    @property
    def hands_on(self) -> bool:
        """Whether it moves all or some numbers of its first operand, each once."""
        return self.reshapes or self.permutes or self.selects

    @property
    def moves(self) -> bool:
        """Whether the numbers of its result are those of its first operand."""
        return self.hands_on or self.repeats

    @property
    def holds_operands(self) -> bool:
        """Whether its result holds numbers of its floating operands, and no others."""
        return self.moves or self.rearranges


TRAITS = tuple(field.name for field in dataclasses.fields(Rule) if field.type is bool)

NO_RULE = Rule(Category.AS_WRITTEN, "no rule: computed in the dtypes it was traced with")

_RULES: dict[str, Rule] = {}


def register_rule(
    primitives: Any,
    category: Category | str,
    reason: str,
    traits: str = "",
    *,
    dtype_param: str | None = None,
) -> None:
    """Adds a rule of how autocast computes one or more primitives.

    Args:
      primitives: a primitive, its name, or a sequence of either.
      category: a `Category` or its name: "low", "full", "widest", "follow", "as written".
      reason: one sentence for the op table.
      traits: names of traits with spaces between, such as "fusible expensive"; see `Rule`.
      dtype_param: the name of the parameter that says the dtype of the result, if there is one,
        such as "preferred_element_type".

    Raises:
      TypeError: `primitives` is, or holds, neither a primitive nor a name; `traits` is no text.
      ValueError: a primitive has a rule already (the message names the module that registered it);
        an unknown category or trait.

    >>> register_rule("my_product", "low", "runs on the tensor cores")
    >>> rule_for("my_product").category
    <Category.LOW: 'low'>
    """
    if not isinstance(traits, str):
        expected = "names of traits with spaces between, such as 'fusible expensive'"
        raise wrong(TypeError, "register_rule", traits, expected, name="traits")
    if unknown := set(traits.split()) - set(TRAITS):
        raise ValueError(
            f"register_rule got the traits {listed(sorted(unknown))}; there are "
            f"{', '.join(TRAITS)}."
        )
    owner = sys._getframe(1).f_globals.get("__name__", "?")  # who calls
    flags = dict.fromkeys(traits.split(), True)
    rule = Rule(Category(category), reason, dtype_param, owner, **flags)
    is_one = not isinstance(primitives, (list, tuple, set, frozenset))
    names = [primitive_name(primitive) for primitive in ([primitives] if is_one else primitives)]
    for name in names:
        if name in _RULES:
            raise ValueError(
                f"A rule for {described(name)} was registered by {_RULES[name].owner} already "
                f"(category '{_RULES[name].category.value}'). To change a category for one call, "
                "pass `low=`, `full=` or `follow=` to autocast."
            )
    _RULES.update(dict.fromkeys(names, rule))


def rule_for(name: str) -> Rule:
    """Returns the rule of the primitive called `name`; `NO_RULE` where there is none."""
    return _RULES.get(name, NO_RULE)


def is_low(equation: Any) -> bool:
    """Returns whether an equation multiplies matrices, in whatever dtypes."""
    return rule_for(equation.primitive.name).category is Category.LOW


def is_foreign(name: str) -> bool:
    """Returns whether this package has no rule for a primitive: others may look for it."""
    return name not in _RULES or not _RULES[name].owner.startswith("jmp.")


def all_rules() -> dict[str, Rule]:
    """Returns the whole table, sorted by category and name: a new dictionary, name to `Rule`.

    >>> all_rules()["dot_general"].category, all_rules()["exp"].category
    (<Category.LOW: 'low'>, <Category.FULL: 'full'>)
    """
    order = list(Category)
    return dict(sorted(_RULES.items(), key=lambda item: (order.index(item[1].category), item[0])))


def primitive_name(primitive: Any) -> str:
    """Returns the name of a primitive given as itself or by name."""
    name = primitive if isinstance(primitive, str) else getattr(primitive, "name", None)
    if not isinstance(name, str):
        raise TypeError(
            f"Got {described(primitive)}; expected a JAX primitive or its name, such as lax.exp_p "
            "or 'exp'."
        )
    return name
