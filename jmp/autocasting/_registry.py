"""The op table: for each primitive the category it belongs to, and why.

Five categories, decided per primitive and looked up by its name:
  - LOW: products, computed in the compute dtype, on the tensor cores.
  - FULL: float32, because the range or the precision of a half type would not do.
  - WIDEST: operands must agree; half if an operand is half and none requires float32.
  - FOLLOW: exact or bounded; computed in whatever dtype comes in.
  - AS_WRITTEN: the dtypes the program was traced with. A primitive without a rule is here too.

The rows are at the end of this file, by category. A row has the names of primitives, why they are
in the category, and their traits (`Rule`). `register_rule` adds a user's own.
"""

import dataclasses
import enum
import functools
import sys
from typing import Any

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
      owner: the module that registered it.

    >>> rule = Rule(Category.FOLLOW, "moves numbers", reshapes=True)
    >>> rule.hands_on, rule.repeats, rule.owner
    (True, False, 'jmp')
    """

    category: Category
    reason: str
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
    rounds: bool = False  # float32 for want of a half kernel, not for its numbers (fft)
    chooses: bool = False  # integers among its results say which entry, and not how large it is
    draws_bits: bool = False  # it makes or uses random bits
    casts: bool = False  # it changes the dtype and nothing else

    # Each is asked of a rule for every node.

    @functools.cached_property
    def hands_on(self) -> bool:
        """Whether it moves all or some numbers of its first operand, each once."""
        return self.reshapes or self.permutes or self.selects

    @functools.cached_property
    def moves(self) -> bool:
        """Whether the numbers of its result are those of its first operand."""
        return self.hands_on or self.repeats

    @functools.cached_property
    def holds_operands(self) -> bool:
        """Whether its result holds numbers of its floating operands, and no others."""
        return self.moves or self.rearranges


# The parameters of primitives that say the dtype of the result.
DTYPE_PARAMS = ("preferred_element_type", "new_dtype", "dtype")

TRAITS = tuple(field.name for field in dataclasses.fields(Rule) if field.type is bool)

NO_RULE = Rule(Category.AS_WRITTEN, "no rule: computed in the dtypes it was traced with")

_RULES: dict[str, Rule] = {}


def register_rule(primitives: Any, category: Category | str, reason: str, traits: str = "") -> None:
    """Adds a rule of how autocast computes one or more primitives.

    Args:
      primitives: a primitive, its name, or a sequence of either.
      category: a `Category` or its name: "low", "full", "widest", "follow", "as written".
      reason: one sentence for the op table.
      traits: names of traits with spaces between, such as "fusible expensive"; see `Rule`.

    If an equation of the primitive is computed in half, its parameter "preferred_element_type",
    "new_dtype" or "dtype" becomes the half type.

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
    rule = Rule(Category(category), reason, owner, **flags)
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


# The rows by category: names of primitives, then why they are in it and their traits.
#
# LOW: products. Operands and result in the compute dtype.
#
# The hardware multiplies half operands and adds up in float32 whatever the result's dtype (cuBLAS,
# cuDNN). A float32 result would save nothing and make both products of the backward pass float32.

LOW = {
    "dot_general ragged_dot_general ragged_dot conv_general_dilated": (
        "tensor cores multiply in half and add up in float32",
        "",
    ),
}

# FULL: float32, for range, for cancellation, or because many terms are added up. A softmax or a
# LayerNorm is made of these and of what stands between them: one float32 island (`_islands.py`).

STEEP = "steep, or cancels, near the ends of its domain"
SERIES = "a series or a continued fraction: no half kernel"
ACCUMULATES = "accumulates: in a half type small terms are lost"
NO_HALF_KERNEL = "no half kernel"

FULL = {
    "exp exp2 expm1 sinh cosh": (
        "grows exponentially: exp(12) overflows float16",
        "fusible expensive",
    ),
    "log log1p log2": (
        "log of a half probability loses all digits near 1; log(0) where float16 flushes",
        "fusible expensive",
    ),
    "pow integer_pow square polynomial": (
        "300 squared overflows float16; squares of small values become zero",
        "fusible expensive",
    ),
    "sqrt rsqrt cbrt": (
        "usually follows a sum of squares, whose range a half type does not hold",
        "fusible expensive",
    ),
    "tan": (STEEP, "fusible expensive wraps"),
    "acos asin atan acosh asinh atanh": (STEEP, "fusible expensive"),
    "erfc erf_inv lgamma digamma": (STEEP, "fusible expensive"),
    "bessel_i0e bessel_i1e igamma igammac igamma_grad_a": (SERIES, "fusible expensive"),
    "random_gamma_grad polygamma zeta regularized_incomplete_beta": (SERIES, "fusible expensive"),
    "reduce_sum reduce_prod": (
        "a sum of ones stops growing at 2048 in float16 and at 256 in bfloat16",
        "fusible reduces sums",
    ),
    "cumsum cumprod cumlogsumexp reduce_window_sum reduce": (ACCUMULATES, "sums"),
    "scatter-add scatter-sub scatter-mul": (ACCUMULATES, "sums joins"),
    "scatter_add scatter_sub scatter_mul": (ACCUMULATES, "sums joins"),
    "reduce_window select_and_scatter_add select_and_gather_add": (ACCUMULATES, ""),
    "psum psum2 psum_invariant reduce_scatter unreduced_psum unreduced_reduce_scatter": (
        "adds up over devices, in the dtype it is given",
        "sums sums_devices",
    ),
    "cholesky lu svd qr eigh eig triangular_solve geqrf householder_product": (NO_HALF_KERNEL, ""),
    "hessenberg schur tridiagonal tridiagonal_solve custom_linear_solve": (NO_HALF_KERNEL, ""),
    "lu_pivots_to_permutation": (NO_HALF_KERNEL, ""),
    "complex conj": ("no half type is complex", "fusible"),
    "fft": (NO_HALF_KERNEL, "rounds"),
}

# WIDEST: operands must share a dtype. Half, if an operand is half and none requires float32.
#
# Parameters and constants do not decide: a float32 bias joins a half activation in half. The
# float32 result of another computation requires float32, and so does a constant that a half type
# does not hold.

ONE_DTYPE = "operands must share a dtype"
MOVES = "operands must share a dtype; moves data"
TIES = "exact; its derivative counts ties, so it runs in float32 between two casts"

WIDEST = {
    "add sub add_any": (ONE_DTYPE, "fusible elementwise linear affine masks cheap"),
    "mul": (ONE_DTYPE, "fusible elementwise affine cheap keeps_range"),
    "div": (ONE_DTYPE, "fusible elementwise affine"),
    "max min": (ONE_DTYPE, "fusible elementwise masks"),
    "one_minus_square": ("float32, but for the slope of a half tanh", "fusible expensive"),
    "rem": (ONE_DTYPE, "fusible elementwise wraps"),
    "atan2": (ONE_DTYPE, "fusible elementwise"),
    "eq ne lt le gt ge": (ONE_DTYPE, "fusible elementwise compares cheap"),
    "select_n": (ONE_DTYPE, "fusible masks cheap keeps_range rearranges"),
    "clamp": (ONE_DTYPE, "fusible"),
    "concatenate": (MOVES, "fusible masks keeps_range joins rearranges"),
    "pad": (MOVES, "fusible joins rearranges"),
    "dynamic_update_slice scatter": (
        "writes into an operand of the same dtype",
        "joins rearranges writes",
    ),
    "scatter-min scatter-max scatter_min scatter_max": (TIES, "sums_backward"),
}

# FOLLOW: exact or bounded, or data movement: computed in whatever dtype comes in.

BOUNDED = "bounded by one, with bounded slope"
REPEATS = "moves data; its derivative is a sum, so it repeats a float32 value and rounds afterwards"
SUMS = "moves data; its derivative adds up repeated rows, so it reads float32 and rounds afterwards"

FOLLOW = {
    "is_finite abs sign real imag optimization_barrier": ("exact", "fusible"),
    "floor ceil round": ("exact", "fusible wraps"),
    "copy copy_p": ("exact", "fusible reshapes"),
    "stop_gradient": ("exact", "fusible permutes"),
    "tanh logistic erf": (BOUNDED, "fusible expensive bounded"),
    "sin cos": (BOUNDED, "fusible expensive bounded wraps"),
    "reshape squeeze expand_dims": ("moves data", "fusible reshapes"),
    "transpose rev pvary": ("moves data", "fusible permutes"),
    # In an island it would name a float32 number, and a remat that keeps the name would keep that.
    "name": ("moves data; what a remat keeps by its name is half where it was", "permutes"),
    "slice split": ("moves data", "fusible selects"),
    "dynamic_slice": ("moves data", "fusible rearranges looks_up"),
    "stack unstack": ("moves data", "fusible rearranges"),
    "device_put pcast layout_constraint": ("moves data", "fusible rearranges"),
    "sharding_constraint reshard": ("moves data", "fusible sends rearranges"),
    "broadcast_in_dim": (REPEATS, "fusible sums_backward repeats"),
    "tile": (REPEATS, "fusible sums_backward rearranges"),
    "reduce_max reduce_min": (TIES, "fusible sums_backward reduces"),
    "argmax argmin": ("exact", "fusible chooses"),
    "neg and or not": ("exact", "fusible cheap"),
    "reduce_and reduce_or reduce_xor xor population_count clz": ("exact", "fusible"),
    "shift_left shift_right_logical shift_right_arithmetic": ("exact", "fusible"),
    "gather": (SUMS, "fusible sums_backward rearranges looks_up"),
    "sort top_k approx_top_k": ("exact; moves or compares data", "chooses"),
    "cummax cummin reduce_window_max reduce_window_min pmax pmin": (
        "exact; moves or compares data",
        "",
    ),
    "all_gather all_gather_invariant all_gather_reduced ppermute all_to_all pbroadcast": (
        "moves data",
        "sends rearranges",
    ),
    "convert_element_type": (
        "float32 to float32 and from booleans: exact; every other cast is kept as the user wrote "
        "it",
        "fusible casts cheap",
    ),
}

# AS_WRITTEN: bits, keys, counts and spacings as the user wrote them; also what has no rule.

NO_HALF_FORM = "bits, keys and counts have no half form"

AS_WRITTEN = {
    "reduce_precision": (NO_HALF_FORM, "casts"),
    "iota": (NO_HALF_FORM, "cheap"),
    "bitcast_convert_type random_gamma shift": (NO_HALF_FORM, ""),
    "random_seed random_wrap random_unwrap random_bits random_split": (NO_HALF_FORM, "draws_bits"),
    "random_fold_in threefry2x32 rng_bit_generator rng_uniform": (NO_HALF_FORM, "draws_bits"),
    "nextafter": ("the next number, and so the spacing, is that of a dtype", ""),
}

for category, rows in zip(Category, (LOW, FULL, WIDEST, FOLLOW, AS_WRITTEN), strict=True):
    for primitives, (why, traits) in rows.items():
        register_rule(primitives.split(), category, why, traits)
