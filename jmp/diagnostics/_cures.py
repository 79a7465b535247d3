"""What to do about an infinity or a NaN, in words.

A cure is a row of a table: when it applies, and what to say. The first that applies counts.
"""

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp

from jmp import _jax_compat
from jmp.autocasting._regions import AUTOCAST
from jmp.autocasting._registry import Category, rule_for
from jmp.diagnostics._origins import Origin
from jmp.diagnostics._states import Operand


class Function(NamedTuple):
    """Where a function is finite."""

    domain: str = ""  # for all numbers that are not too large
    is_steep: bool = False  # infinite at an end of its domain other than zero
    inverse: Callable[[float], float] | None = None  # says where it overflows
    divisor: int | None = None  # which operand it divides by, or takes the logarithm of


FUNCTIONS = {
    "exp": Function(inverse=math.log),
    "expm1": Function(inverse=math.log),
    "exp2": Function(inverse=math.log2),
    "sinh": Function(inverse=math.asinh),
    "cosh": Function(inverse=math.acosh),
    "div": Function(divisor=1),
    "rem": Function(divisor=1),
    "log": Function("positive numbers", divisor=0),
    "log1p": Function("numbers above -1", is_steep=True),
    "sqrt": Function("numbers from zero on"),
    "rsqrt": Function("positive numbers", divisor=0),
    "pow": Function("positive numbers, or whole exponents", divisor=0),
    "acos": Function("numbers from -1 to 1"),
    "asin": Function("numbers from -1 to 1"),
    "acosh": Function("numbers from 1 on"),
    "atanh": Function("numbers between -1 and 1", is_steep=True),
    "erf_inv": Function("numbers between -1 and 1", is_steep=True),
    "lgamma": Function("numbers other than 0, -1, -2, ...", is_steep=True),
    "digamma": Function("numbers other than 0, -1, -2, ...", is_steep=True),
}


class Findings(Origin):
    """An origin, with what follows from it. Sentences that may follow others begin with a space."""

    @property
    def largest(self) -> float:
        """The largest number of the dtype."""
        return float(jnp.finfo(self.dtype).max)

    @property
    def is_narrow(self) -> bool:
        """Whether the dtype ends long before float32 does; bfloat16 does not."""
        return self.largest < 1e30

    @property
    def function(self) -> Function:
        """What is known of the primitive as a function of real numbers."""
        return FUNCTIONS.get(self.name, Function())

    @property
    def overflows_above(self) -> float:
        """From where on a function that grows exponentially is infinite."""
        return self.function.inverse(self.largest) if self.function.inverse else math.inf

    @property
    def divisor(self) -> Operand | None:
        """What the operation divides by, or takes the logarithm of."""
        if self.name == "integer_pow" and self.params["y"] < 0:
            return self.operands[0]
        position = self.function.divisor
        return None if position is None else self.operands[position]

    @property
    def came_from(self) -> str:
        """Where the infinities come from that it read."""
        if not self.given:
            return "are written in the program, or closed over"
        return f"came in with {', '.join(self.given)}. If they are data, look there"

    @property
    def has_zeros(self) -> bool:
        """Whether it divides by zero."""
        return self.divisor is not None and self.divisor.zeros > 0

    @property
    def was_flushed(self) -> str:
        """Where a zero may come from that was none in float32; "" if the dtype is not narrow."""
        small = ": an epsilon of 1e-8 is zero in it, and so is the square of 1e-4"
        smallest = float(jnp.finfo(self.dtype).smallest_subnormal)
        words = f"6e-8{small}" if self.dtype == "float16" else f"{smallest:.2g}"
        return f" {self.dtype}'s smallest number is {words}." if self.is_narrow else ""

    @property
    def keep(self) -> str:
        """How to compute it in float32; "" if the dtype is not narrow."""
        if not self.is_narrow:
            return ""
        if AUTOCAST in _jax_compat.scope_names(self.place.stack):
            # The scopes that einsum opens are no names to write down.
            names = itertools.takewhile(lambda x: "->" not in x, self.place.module.split("/"))
            scope = "/".join(names)
            where = f'rules=[("{scope}*", "float32")]' if scope else "jmp.full_precision"
            ways = f'full=["{self.name}"] in autocast, or this place by {where}'
            return f" Keep it in float32: {ways}."
        if rule_for(self.name).category is Category.FULL:
            return " Keep it in float32, as jmp.autocast of the float32 function does."
        return " Keep it in float32, or use bfloat16, which has float32's range."


def cure_for(origin: Origin) -> str:
    """Returns what to do."""
    findings = Findings(*origin)
    text = next(text for applies, text in CURES if applies(findings))
    return text.format(it=findings) if isinstance(text, str) else text(findings)


def _of_a_division(it: Findings) -> str:
    assert it.divisor is not None
    smallest = (
        f"It divides by as little as {it.divisor.smallest:.2g}, and goes beyond {it.largest:.5g}."
    )
    text = f"The divisor is zero.{it.was_flushed}" if it.has_zeros else smallest
    text += it.keep or " Add an epsilon to the divisor, or choose it by jnp.where."
    if _jax_compat.is_differentiated(it.place.stack):
        text += (
            " If the line does not do this, its derivative does: that of a / b divides by b * b, "
            "that of sqrt(x), and so of a norm, by sqrt(x)."
        )
    return text


# When each applies, and what to say: text with findings, or a function of them.
CURES: tuple[tuple[Callable[[Findings], bool], str | Callable[[Findings], str]], ...] = (
    (
        lambda it: it.kind == "argument",
        "It came in like this: nothing in this function made it. Look at the data, or at the step "
        "before; jmp.transforms.with_loss_scale skips an update that is not finite.",
    ),
    (
        lambda it: it.kind == "constant",
        "It is written in the program, or closed over, and reaches a result: look at this line.",
    ),
    (
        lambda it: it.kind == "whole",
        "{it.name} is reported as a whole: the operations inside were not looked into, or stay "
        "finite when each runs by itself. Look at the magnitudes that go in.",
    ),
    (
        lambda it: it.name == "gather",
        "An index is out of bounds, and what is not there is read as NaN. Correct the index, or "
        'say what is meant: jnp.take(..., mode="clip").',
    ),
    (
        lambda it: rule_for(it.name).factorises,
        "{it.name} failed: the matrix is singular, or not positive definite as stored. Add a "
        "multiple of the identity, or compute the matrix in float32 or float64.",
    ),
    (
        lambda it: it.is_nan and any(operand.nonfinite for operand in it.operands),
        "It computes inf - inf, or 0 * inf, of infinities that {it.came_from}. If they are a mask: "
        "a softmax over a row that is masked throughout does this, so leave one entry in each row, "
        "or mask with a finite number (jnp.finfo(dtype).min); choose by jnp.where instead of "
        "multiplying with a mask.",
    ),
    (
        lambda it: it.has_zeros and it.place.is_backward,
        lambda it: (
            "A derivative divides by zero. A jnp.where around the function does not help: its "
            "derivative is 0 / 0 there. Guard the operand, inside: "
            f"jnp.where(ok, f(jnp.where(ok, x, 1)), 0).{it.was_flushed}"
            + " If the zero is a flushed gradient, raise the loss scale."
            * it.is_narrow
        ),
    ),
    (
        lambda it: it.name == "log" and not it.is_nan and it.has_zeros,
        "The logarithm of zero.{it.was_flushed}{it.keep} jax.nn.log_softmax and optax's losses "
        "take logits, and never see the zero; else add an epsilon, or guard the operand with "
        "jnp.where.",
    ),
    (
        lambda it: it.function.domain != "" and (it.is_nan or it.function.is_steep),
        "{it.name} is finite for {it.function.domain} alone. Rounding may carry an operand over "
        "the edge: clip it (jnp.maximum, jnp.clip), and subtract in float32.",
    ),
    (
        # A power overflows without a zero as well.
        lambda it: it.divisor is not None and (it.name != "pow" or it.has_zeros),
        _of_a_division,
    ),
    (
        lambda it: it.place.is_backward and it.is_narrow,
        "A gradient went beyond {it.largest:.5g} in {it.dtype}. If the loss is scaled, lower the "
        "scale. A jmp.DynamicLossScale does so by itself, and the step is skipped: harmless if it "
        "happens rarely. If it happens at any scale, clip or normalise what is differentiated.",
    ),
    (
        lambda it: rule_for(it.name).casts and it.is_narrow,
        "The cast meets numbers beyond {it.largest:.5g}, {it.dtype}'s largest. Make them "
        "smaller before the cast, or leave them in float32. A sum or mean of half numbers ends in "
        "such a cast: dtype=jnp.float32 leaves it out. A mask of -1e9: jnp.finfo(dtype).min is its "
        "like.",
    ),
    (
        lambda it: it.function.inverse is not None,
        "{it.name} overflows {it.dtype} above {it.overflows_above:.4g}.{it.keep} Subtract the "
        "maximum first, as jax.nn.softmax and jax.nn.logsumexp do.",
    ),
    (
        lambda it: it.is_narrow and rule_for(it.name).category is Category.LOW,
        "A sum of products went beyond {it.largest:.5g}. Scale the operands before they are "
        "multiplied (a query by 1 / sqrt(d)), or normalise them.{it.keep}",
    ),
    (
        lambda it: it.is_narrow,
        lambda it: (
            f"The {'sum' if rule_for(it.name).sums else 'result'} went beyond {it.largest:.5g}, "
            f"{it.dtype}'s largest.{it.keep}"
        ),
    ),
    (
        lambda it: True,
        "{it.dtype} reaches to {it.largest:.5g}, so precision is not the cause: something "
        "grows. Lower the learning rate or warm it up, clip gradients (optax.clip_by_global_norm), "
        "and look at the data and the initial values.",
    ),
)
