"""What to do about an infinity or a NaN, in words.

A rule looks at the facts and returns what to say, or None if it does not apply; the first that
applies counts.
"""

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp

from jmp.autocasting._registry import Category, rule_for
from jmp.diagnostics._states import Operand

# The function whose inverse says where each one overflows.
EXPONENTIALS = {
    "exp": math.log, "expm1": math.log, "exp2": math.log2, "sinh": math.asinh, "cosh": math.acosh,
}  # fmt: skip
DOMAINS = {
    "log": "positive numbers", "log1p": "numbers above -1", "sqrt": "numbers from zero on",
    "rsqrt": "positive numbers", "pow": "positive numbers, or whole exponents",
    "acos": "numbers from -1 to 1", "asin": "numbers from -1 to 1",
    "acosh": "numbers from 1 on", "atanh": "numbers between -1 and 1",
    "erf_inv": "numbers between -1 and 1", "lgamma": "numbers other than 0, -1, -2, ...",
    "digamma": "numbers other than 0, -1, -2, ...",
}  # fmt: skip
# Infinite at an end of their domain other than zero.
STEEP = ("log1p", "atanh", "erf_inv", "lgamma", "digamma")


class Facts(NamedTuple):
    """What a cure depends on.

    Attributes:
      kind: "operation", "whole", "argument" or "constant".
      name: the primitive.
      dtype: of its result.
      is_nan: it became NaN, not infinite.
      operands: the floating ones.
      exponent: of a power, if that is a whole number.
      is_backward, is_differentiated: it stands in a backward pass; near any derivative.
      is_autocast: `jmp.autocast` put it there.
      module: path of modules or name scopes.
    """

    kind: str
    name: str
    dtype: str
    is_nan: bool
    operands: tuple[Operand, ...]
    exponent: int | None
    is_backward: bool
    is_differentiated: bool
    is_autocast: bool
    module: str

    @property
    def limit(self) -> str:
        """The largest number of the dtype."""
        return f"{float(jnp.finfo(self.dtype).max):.5g}"

    @property
    def is_narrow(self) -> bool:
        """Whether the dtype ends long before float32 does; bfloat16 does not."""
        return float(jnp.finfo(self.dtype).max) < 1e30

    @property
    def divides_by(self) -> Operand | None:
        """What the operation divides by, or takes the logarithm of."""
        if self.name in ("div", "rem"):
            return self.operands[1]
        is_inverse = self.name == "integer_pow" and (self.exponent or 0) < 0
        return self.operands[0] if is_inverse or self.name in ("log", "rsqrt", "pow") else None

    @property
    def has_zeros(self) -> bool:
        """Whether it divides by zero."""
        return self.divides_by is not None and self.divides_by.zeros > 0


def cure_for(facts: Facts) -> str:
    """Returns what to do."""
    return next(filter(None, (rule(facts) for rule in RULES)))


def _argument(facts: Facts) -> str | None:
    if facts.kind != "argument":
        return None
    return (
        "It came in like this: nothing in this function made it. Look at the data, or at the step "
        "before; jmp.transforms.with_loss_scale skips an update that is not finite."
    )


def _constant(facts: Facts) -> str | None:
    if facts.kind != "constant":
        return None
    return "It is written in the program, or closed over, and reaches a result: look at this line."


def _whole(facts: Facts) -> str | None:
    if facts.kind != "whole":
        return None
    return (
        f"{facts.name} is blamed as a whole: the operations inside were not looked into, or stay "
        "finite when each runs by itself. Look at the magnitudes that go in."
    )


def _gather(facts: Facts) -> str | None:
    if facts.name != "gather":
        return None
    return (
        "An index is out of bounds, and what is not there is read as NaN. Correct the index, or "
        'say what is meant: jnp.take(..., mode="clip").'
    )


def _factorisation(facts: Facts) -> str | None:
    if not rule_for(facts.name).factorises:
        return None
    return (
        f"{facts.name} failed: the matrix is singular, or not positive definite as stored. Add a "
        "multiple of the identity, or compute the matrix in float32 or float64."
    )


def _infinities_that_were_given(facts: Facts) -> str | None:
    if not facts.is_nan or not any(operand.nonfinite for operand in facts.operands):
        return None
    return (
        "inf - inf, or 0 * inf, of infinities that were put in on purpose. A softmax over a row "
        "that is masked throughout does this: leave one entry in each row, or mask with a finite "
        "number (jnp.finfo(dtype).min). Choose by jnp.where instead of multiplying with a mask."
    )


def _derivative_by_zero(facts: Facts) -> str | None:
    if not (facts.has_zeros and facts.is_backward):
        return None
    raised = " If the zero is a flushed gradient, raise the loss scale." if facts.is_narrow else ""
    return (
        "A derivative divides by zero. A jnp.where around the function does not help: its "
        "derivative is 0 / 0 there. Guard the operand, inside: "
        f"jnp.where(ok, f(jnp.where(ok, x, 1)), 0).{_flushed(facts)}{raised}"
    )


def _log_of_zero(facts: Facts) -> str | None:
    if facts.name != "log" or facts.is_nan or not facts.has_zeros:
        return None
    full = f"{_flushed(facts)} {_keep_full(facts)}" if facts.is_narrow else ""
    return (
        f"The logarithm of zero.{full} jax.nn.log_softmax and optax's losses take logits, and "
        "never see the zero; else add an epsilon, or guard the operand with jnp.where."
    )


def _outside_of_a_domain(facts: Facts) -> str | None:
    if facts.name not in DOMAINS or not (facts.is_nan or facts.name in STEEP):
        return None
    return (
        f"{facts.name} is finite for {DOMAINS[facts.name]} alone. Rounding may carry an operand "
        "over the edge: clip it (jnp.maximum, jnp.clip), and subtract in float32."
    )


def _division(facts: Facts) -> str | None:
    divisor = facts.divides_by
    if divisor is None or (facts.name == "pow" and not divisor.zeros):
        return None
    if divisor.zeros:
        text = f"The divisor is zero.{_flushed(facts)}"
    else:
        text = f"It divides by as little as {divisor.smallest:.2g}, and goes beyond {facts.limit}."
    if facts.is_narrow:
        text += " " + _keep_full(facts)
    else:
        text += " Add an epsilon to the divisor, or choose it by jnp.where."
    if facts.is_differentiated:
        text += (
            " If the line does not do this, its derivative does: that of a / b divides by b * b, "
            "that of sqrt(x), and so of a norm, by sqrt(x)."
        )
    return text


def _scaled_gradient(facts: Facts) -> str | None:
    if not (facts.is_backward and facts.is_narrow):
        return None
    return (
        f"A gradient went beyond {facts.limit} in {facts.dtype}. If the loss is scaled, lower the "
        "scale. A jmp.DynamicLossScale does so by itself, and the step is skipped: harmless if it "
        "happens rarely. If it happens at any scale, clip or normalise what is differentiated."
    )


def _cast(facts: Facts) -> str | None:
    if not rule_for(facts.name).casts or not facts.is_narrow:
        return None
    return (
        f"The cast meets numbers beyond {facts.limit}, {facts.dtype}'s largest. Make them smaller "
        "before the cast, or leave them in float32. A sum or mean of half numbers ends in such a "
        "cast: dtype=jnp.float32 leaves it out. A mask of -1e9: jnp.finfo(dtype).min is its like."
    )


def _exponential(facts: Facts) -> str | None:
    if facts.name not in EXPONENTIALS:
        return None
    edge = EXPONENTIALS[facts.name](float(jnp.finfo(facts.dtype).max))
    return (
        f"{facts.name} overflows {facts.dtype} above {edge:.4g}. "
        + (_keep_full(facts) + " " if facts.is_narrow else "")
        + "Subtract the maximum first, as jax.nn.softmax and jax.nn.logsumexp do."
    )


def _product(facts: Facts) -> str | None:
    if not facts.is_narrow or rule_for(facts.name).category is not Category.LOW:
        return None
    return (
        f"A sum of products went beyond {facts.limit}. Scale the operands before they are "
        f"multiplied (a query by 1 / sqrt(d)), or normalise them. {_keep_full(facts)}"
    )


def _narrow(facts: Facts) -> str | None:
    if not facts.is_narrow:
        return None
    what = "sum" if rule_for(facts.name).sums else "result"
    return f"The {what} went beyond {facts.limit}, {facts.dtype}'s largest. {_keep_full(facts)}"


def _wide(facts: Facts) -> str | None:
    return (
        f"{facts.dtype} reaches to {facts.limit}, so this is no matter of precision: something "
        "grows. Lower the learning rate or warm it up, clip gradients (optax.clip_by_global_norm), "
        "and look at the data and the initial values."
    )


RULES: tuple[Callable[[Facts], str | None], ...] = (
    _argument,
    _constant,
    _whole,
    _gather,
    _factorisation,
    _infinities_that_were_given,
    _derivative_by_zero,
    _log_of_zero,
    _outside_of_a_domain,
    _division,
    _scaled_gradient,
    _cast,
    _exponential,
    _product,
    _narrow,
    _wide,
)


def _keep_full(facts: Facts) -> str:
    """How to compute it in float32."""
    if facts.is_autocast:
        # The scopes that einsum opens are no names to write down.
        scope = "/".join(
            itertools.takewhile(lambda name: "->" not in name, facts.module.split("/"))
        )
        place = f'rules=[("{scope}*", "float32")]' if scope else "jmp.full_precision"
        return f'Keep it in float32: full=["{facts.name}"] in autocast, or this place by {place}.'
    if rule_for(facts.name).category is Category.FULL:
        return "Keep it in float32, as jmp.autocast of the float32 function does."
    return "Keep it in float32, or use bfloat16, which has float32's range."


def _flushed(facts: Facts) -> str:
    """Where a zero may come from that was none in float32."""
    if facts.dtype == "float16":
        return (
            " float16's smallest number is 6e-8: an epsilon of 1e-8 is zero in it, and so is the "
            "square of 1e-4."
        )
    smallest = float(jnp.finfo(facts.dtype).smallest_subnormal)
    return f" {facts.dtype}'s smallest number is {smallest:.2g}." if facts.is_narrow else ""
