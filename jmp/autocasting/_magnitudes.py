"""How large a value may be beside the half values that it is computed from.

A sum of a thousand numbers, a square and a count may lie beyond 65504, the largest number of
float16. As float32 they are right. Rounded on their way to a division they would be infinities, the
quotient zero and every gradient too, without a sign of it in the results. So a float32 value whose
size nothing bounds is not rounded where another operation than a product reads it.

A `Magnitude` says what bounds a value. It follows four things from the inputs on:

- the interval that its numbers lie in, if one is known: that of a sine, or of a count of booleans;
- its degree: 1 for half values, 2 for their squares, -1 for their reciprocals, 0 for a ratio;
- how many terms it adds up, divided by what it is divided by: 1 for a mean;
- the constant that was added to it, and the constant that it was multiplied by before: beside an
  offset of 288 bfloat16 knows no number between 0 and 2, and what takes the offset away again finds
  nothing left.

The product of two different values has the degree of the larger one: it overflows where a model
written in half overflows too, and that is seen.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jmp.autocasting._graph import Carry, Node, Value, are_same, value_of
from jmp.autocasting._numbers import UNKNOWN, has_symbols, length_of, shape_of

LARGEST_HALF = float(jnp.finfo(np.float16).max)
SMALLEST_HALF = float(jnp.finfo(np.float16).smallest_normal)

# A sum of so few half values counts as a half value: a residual stream, or the heads of a layer.
FEW = 16.0

# Beside an offset 8 times as large as what it was added to, a half type has three bits less for
# that: bfloat16 five of eight, float16 eight of eleven.
LARGE_OFFSET = 8.0
# Where neighbours are a sixteenth of what was added to apart, a product finds little left.
COARSE = 1 / 16


class Magnitude(NamedTuple):
    """The bounds of a value; see the module."""

    low: float = -math.inf
    high: float = math.inf
    degree: float = 1.0
    terms: float = 1.0
    offset: float = 0.0
    scale: float = 1.0  # of what the offset was added to, beside a half value

    @property
    def has_large_offset(self) -> bool:
        """Whether a half type has few digits left beside an offset."""
        return math.isfinite(self.offset) and abs(self.offset) > LARGE_OFFSET * self.scale

    def is_coarse(self, half: np.dtype) -> bool:
        """Returns whether next to no digits of a half type are left beside an offset."""
        spacing = float(jnp.finfo(half).eps) * abs(self.offset)
        return math.isfinite(self.offset) and spacing > COARSE * self.scale

    @property
    def exceeds_half(self) -> bool:
        """Whether nothing keeps it within float16's range."""
        if self.degree < 0:  # a reciprocal may lie below its smallest number
            return self.degree < -1 or self.terms < 1 / FEW
        near, far = sorted((abs(self.low), abs(self.high)))
        is_small = near < SMALLEST_HALF and not self.low <= 0 <= self.high
        if math.isfinite(self.high - self.low):
            return far > LARGEST_HALF or is_small
        return self.degree > 1 or self.terms > FEW or (self.degree == 0 and is_small)

    @property
    def opposite(self) -> "Magnitude":
        return self._replace(low=-self.high, high=-self.low, offset=-self.offset)

    @property
    def number(self) -> float | None:
        """The number that it is, if it is one."""
        return self.low if self.low == self.high else None


ORDINARY = Magnitude()  # of a half value, and of what may have been one
STEEP, FLAT = Magnitude(degree=math.inf), Magnitude(degree=0.0)
TINY = float(jnp.finfo(np.float32).tiny)
ZERO, MINUS_ONE = Magnitude(0, 0, 0), Magnitude(-1, -1, 0)
LOG_OF_2 = Magnitude(math.log(2), math.log(2), 0)
LOWEST, HIGHEST = Magnitude(-math.inf, -math.inf), Magnitude(math.inf, math.inf)


def magnitude_of_source(value: Value) -> Magnitude:
    """Returns the magnitude of a value of which no more is known than its dtype or its number."""
    dtype, number = value.dtype, value.constant
    if number is None and isinstance(value.literal, (bool, int, np.integer)):
        number = float(value.literal)
    if number is not None:
        return Magnitude(number, number, 0)
    if dtype == np.bool_:
        return Magnitude(0, 1, 0)
    if dtype is not None and jnp.issubdtype(dtype, jnp.integer):
        limits = jnp.iinfo(dtype)
        return Magnitude(float(limits.min), float(limits.max), 0)
    return ORDINARY._replace(offset=value.known.smallest)


class Magnitudes(dict[Value, Magnitude]):
    """The magnitudes of values; those of which no more is known included."""

    def __missing__(self, value: Value) -> Magnitude:
        self[value] = found = magnitude_of_source(value)
        return found

    def measure(self, node: Node) -> None:
        """Finds what bounds the results of a node, given what bounds its operands."""
        operands = [self[value] for value in node.inputs]
        self.update(zip(node.outputs, magnitudes_of_results(node, operands), strict=True))


def magnitudes_of_results(node: Node, operands: Sequence[Magnitude]) -> list[Magnitude]:
    """Returns the magnitudes of a node's results, given those of its operands."""
    if node.insides and (inside := _of_results_inside(node, operands)):
        return inside
    found = _of_result(node, operands) if node.outputs else None
    if found is None:
        return list(map(magnitude_of_source, node.outputs))
    found = _of_dtype(found, node.outputs[0])
    if found.degree > 0 and max(-found.low, found.high) <= LARGEST_HALF:
        found = found._replace(degree=0.0)
    first = node.outputs[0]
    return [found if v.dtype == first.dtype else magnitude_of_source(v) for v in node.outputs]


def _of_dtype(found: Magnitude, value: Value) -> Magnitude:
    """Returns a magnitude as far as the dtype of a value keeps it: integers wrap and truncate."""
    dtype = value.dtype
    if value.is_float32 or dtype is None or jnp.issubdtype(dtype, jnp.floating):
        is_known = not math.isnan(found.low + found.high)
        return found if is_known else found._replace(low=-math.inf, high=math.inf)
    limits = magnitude_of_source(value)
    if dtype == np.bool_ or not limits.low <= found.low <= found.high <= limits.high:
        return limits
    if jnp.issubdtype(dtype, jnp.integer):
        return found._replace(low=float(math.floor(found.low)), high=float(math.ceil(found.high)))
    return found._replace(low=-math.inf, high=math.inf)  # a complex number


def magnitude_of_sums(product: Node, left: Magnitude, right: Magnitude) -> Magnitude:
    """Returns the magnitude of the float32 result of a `dot_general`."""
    (contracted, _), _ = product.params["dimension_numbers"]
    count = math.prod(length_of(shape_of(product.inputs[0])[axis]) for axis in contracted)
    return Magnitude(degree=left.degree + right.degree, terms=left.terms * right.terms * count)


def hull(magnitudes: Sequence[Magnitude]) -> Magnitude:
    """Returns the magnitude of a value that may be any of several."""
    largest = max(magnitudes, key=lambda x: (x.degree, x.terms))
    low, high = min(x.low for x in magnitudes), max(x.high for x in magnitudes)
    return largest._replace(low=low, high=high)


def _of_results_inside(node: Node, operands: Sequence[Magnitude]) -> list[Magnitude]:
    """Returns what bounds the results of a node, from its functions inside.

    The list is empty if it has none, or if they carry values from turn to turn.
    """
    of_operands = dict(zip(node.inputs, operands, strict=True))
    found: dict[Value, list[Magnitude]] = {}
    for inside in node.insides:
        if any(isinstance(argument, Carry) for argument in inside.arguments):
            return []
        given = [of_operands[value_of(argument)] for argument in inside.arguments]
        known = Magnitudes(zip(inside.inputs, given, strict=True))
        for inner in inside.graph.nodes:
            known.measure(inner)
        # The condition of a while loop returns no result of the node.
        for result, value in zip(inside.results, inside.graph.outputs, strict=False):
            found.setdefault(result, []).append(known[value])
    return [_of_dtype(hull(found[value]), value) for value in node.outputs] if found else []


def _of_result(node: Node, operands: Sequence[Magnitude]) -> Magnitude | None:
    """Returns the magnitude of a node's first result; None if no more is known than its dtype."""
    rule = node.rule
    if node.name in TRANSFERS:
        result = TRANSFERS[node.name](node, *operands)
        shapes = map(shape_of, (*node.inputs, *node.outputs))
        if node.name in COUNTING and any(map(has_symbols, shapes)):
            return result._replace(
                low=-math.inf, high=math.inf, terms=max(result.terms, float(UNKNOWN))
            )
        return result
    if rule.bounded:
        return Magnitude(-1, 1)
    if rule.sums_devices:
        return operands[0]._replace(low=-math.inf, high=math.inf)
    if rule.moves or rule.reduces or rule.casts:
        return operands[0]
    if rule.holds_operands or node.holds_functions:
        held = [
            magnitude
            for value, magnitude in zip(node.inputs, operands, strict=True)
            if value.dtype == node.outputs[0].dtype
        ]
        if (fill := node.params.get("fill_value")) is not None:  # of a lookup
            held.append(Magnitude(float(fill), float(fill), 0))
        if node.name == "ppermute":  # a device that nobody sends to has zeros
            held.append(ZERO)
        # A function that is not gone through may make anything of them.
        found = hull(held) if held else None
        if rule.holds_operands or found is None:
            return found
        return found._replace(low=-math.inf, high=math.inf)
    return None


# Magnitudes of results.


def _added(node: Node, x: Magnitude, y: Magnitude) -> Magnitude:
    found = _add(x, y)
    left, right = (value.root for value in node.inputs)
    # Two parts of one array count as two terms: a prefix sum adds them up by halves.
    return found._replace(terms=x.terms + y.terms) if left is right else found


def _add(x: Magnitude, y: Magnitude) -> Magnitude:
    degree = max(x.degree, y.degree)
    terms = max(each.terms for each in (x, y) if each.degree == degree)
    offset = sum(each.offset if each.number is None else each.number for each in (x, y))
    scale = max((each.scale for each in (x, y) if each.number is None), default=1.0)
    return Magnitude(x.low + y.low, x.high + y.high, degree, terms, offset, scale)


def _multiply(x: Magnitude, y: Magnitude) -> Magnitude:
    products = [0.0 if 0 in (a, b) else a * b for a in (x.low, x.high) for b in (y.low, y.high)]
    found = Magnitude(min(products), max(products), terms=x.terms * y.terms)
    for one, other in ((x, y), (y, x)):
        if one.number is not None:  # a constant divides a sum, as in a mean
            terms = other.terms * min(1.0, abs(one.number))
            offset, scale = other.offset * one.number, other.scale * abs(one.number)
            return found._replace(degree=other.degree, terms=terms, offset=offset, scale=scale)
        if one.degree == -math.inf and max(-one.low, one.high) <= 1:  # as in x / (1 + exp(-x))
            return other._replace(low=found.low, high=found.high)
    if x.degree > 0 and y.degree > 0:
        return found._replace(degree=max(x.degree, y.degree))
    are_opposite = x.degree == -y.degree  # both may be infinite
    return found._replace(degree=0.0 if are_opposite else x.degree + y.degree)


def _reciprocal(x: Magnitude) -> Magnitude:
    low, high = -math.inf, math.inf
    if x.low > 0 or x.high < 0:
        low, high = 1 / x.high, 1 / x.low
    elif x.low == 0 < x.high:
        low = 1 / x.high
    return Magnitude(low, high, -x.degree, 1 / max(x.terms, TINY))


def _raised(x: Magnitude, power: float) -> Magnitude:
    """Returns the magnitude of a power, which may be a fraction or negative."""
    if power < 0:
        return _reciprocal(_raised(x, -power))
    low, high = (_bounded_power(end, power) for end in (x.low, x.high))
    if power % 2 == 0:
        low, high = (0.0 if x.low <= 0 <= x.high else min(low, high)), max(low, high)
    degree = power * x.degree if power and x.degree else 0.0  # either may be infinite
    return Magnitude(low, high, degree, abs(_bounded_power(x.terms, power)))


def _bounded_power(base: float, power: float) -> float:
    """Returns a power; infinity beyond float32, and zero where it has no real value."""
    if base < 0 and power % 1:
        return 0.0
    if abs(base) > 1 and power * math.log2(abs(base)) > 127:
        return math.inf if base > 0 or power % 2 == 0 else -math.inf
    return float(base**power)


def _product_of_several(x: Magnitude, count: float) -> Magnitude:
    """Returns the magnitude of a product of `count` numbers of a value."""
    found = _raised(x, count)
    if x.low >= 0:
        return found
    largest = _bounded_power(max(-x.low, x.high), count)
    return found._replace(low=-largest, high=largest)


def _exp(x: Magnitude) -> Magnitude:
    high = math.exp(x.high) if x.high < 88 else math.inf  # beyond float32
    return Magnitude(math.exp(min(x.low, 88.0)), high, math.inf)


def _absolute(x: Magnitude) -> Magnitude:
    near = 0.0 if x.low <= 0 <= x.high else min(abs(x.low), abs(x.high))
    return x._replace(low=near, high=max(-x.low, x.high))


def _sum(x: Magnitude, count: float) -> Magnitude:
    low, high = (0.0 if end == 0 else end * count for end in (x.low, x.high))
    return Magnitude(low, high, x.degree, x.terms * count)


def _partial_sums(x: Magnitude, count: float) -> Magnitude:
    return hull([x, _sum(x, count)])


def _clamp(low: Magnitude, x: Magnitude, high: Magnitude) -> Magnitude:
    lowest, highest = min(max(x.low, low.low), high.low), min(max(x.high, low.high), high.high)
    return x._replace(low=lowest, high=highest)


def _chosen(node: Node, which: Magnitude, *cases: Magnitude) -> Magnitude:
    """A choice, by the sign of one of two values perhaps, as in elu."""
    chosen, test = list(cases), node.inputs[0].producer
    if test is not None and test.rule.compares and len(cases) == 2:
        value, zero = test.inputs
        for holds, case in enumerate(node.inputs[1:]):
            is_tested = are_same(case, value) and zero.root.constant == 0
            if is_tested and test.name[0] in "gl":  # greater, less
                is_positive = (test.name[0] == "g") == bool(holds)
                low, high = (ZERO, HIGHEST) if is_positive else (LOWEST, ZERO)
                chosen[holds] = _clamp(low, chosen[holds], high)
    return hull(chosen)


def _scattered(node: Node, added: Magnitude) -> Magnitude:
    """Returns the magnitude of what is added to one number: none of the addends, or up to all."""
    places = node.inputs[1]
    everything = _sum(added, max(1, places.size // max(1, shape_of(places)[-1])))
    return hull([ZERO, added, everything])._replace(terms=added.terms * _ratio(node, 2))


def _ratio(node: Node, operand: int = 0, least: float = 1.0) -> float:
    """Returns how many numbers of an operand there are to one of the result."""
    return max(least, node.inputs[operand].size / max(1, node.outputs[0].size))


def _length_along(node: Node, parameter: str) -> int:
    return max(1, length_of(shape_of(node.outputs[0])[node.params[parameter]]))


# For each primitive, a function of the node and of its operands' magnitudes.
TRANSFERS: dict[str, Callable[..., Magnitude]] = {
    "add": _added,
    "add_any": _added,
    "sub": lambda node, x, y: _add(x, y.opposite),
    "neg": lambda node, x: x.opposite,
    "mul": lambda node, x, y: _raised(x, 2) if node.is_square else _multiply(x, y),
    "div": lambda node, x, y: _multiply(x, _reciprocal(y)),
    "square": lambda node, x: _raised(x, 2),
    "integer_pow": lambda node, x: _raised(x, node.params["y"]),
    "pow": lambda node, x, y: STEEP if y.number is None else _raised(x, y.number),
    "sqrt": lambda node, x: _raised(x, 0.5),
    "rsqrt": lambda node, x: _raised(x, -0.5),
    "cbrt": lambda node, x: _raised(x, 1 / 3)._replace(
        low=math.cbrt(x.low), high=math.cbrt(x.high)
    ),
    "exp": lambda node, x: _exp(x),
    "exp2": lambda node, x: _exp(_multiply(x, LOG_OF_2)),
    "expm1": lambda node, x: _add(_exp(x), MINUS_ONE),
    "abs": lambda node, x: _absolute(x),
    "max": lambda node, x, y: hull([x, y])._replace(low=max(x.low, y.low)),
    "min": lambda node, x, y: hull([x, y])._replace(high=min(x.high, y.high)),
    "clamp": lambda node, low, x, high: _clamp(low, x, high),
    "select_n": _chosen,
    "reduce_sum": lambda node, x: _sum(x, _ratio(node, least=0.0)),
    "reduce_prod": lambda node, x: _product_of_several(x, _ratio(node, least=0.0)),
    "cumsum": lambda node, x: _partial_sums(x, _length_along(node, "axis")),
    "cumprod": lambda node, x: hull(
        [x, *(_product_of_several(x, n) for n in (1, _length_along(node, "axis")))]
    ),
    "scatter-add": lambda node, x, _, added: _add(x, _scattered(node, added)),
    # Only an inverse transform has real results: it divides what it adds up.
    "fft": lambda node, x: x._replace(low=-math.inf, high=math.inf),
    "iota": lambda node: Magnitude(0, _length_along(node, "dimension")),
    "argmax": lambda node, x: Magnitude(0, node.inputs[0].size),
    "argmin": lambda node, x: Magnitude(0, node.inputs[0].size),
}
STEEP_ONES = "sinh cosh tan lgamma polynomial"
TRANSFERS |= dict.fromkeys(STEEP_ONES.split(), lambda node, *operands: STEEP)
LEVEL = "log log1p log2 asinh acosh atanh erf_inv asin acos atan atan2 erfc sign"
TRANSFERS |= dict.fromkeys(LEVEL.split(), lambda node, *operands: FLAT)
# Of these the length of an axis is part of the bounds.
COUNTING = {*"reduce_sum reduce_prod cumsum cumprod scatter-add iota argmax argmin".split()}
