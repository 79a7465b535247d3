"""What to do about an infinity or a NaN, in words.

A cure is a row of a table: when it applies, and what to say. The first that applies counts.

`find_nonfinite`: what made the NaN.
"""

import dataclasses
import itertools
import math
import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jmp import _jax_compat
from jmp._calls import ArrayCall
from jmp._messages import described
from jmp.autocasting._regions import AUTOCAST
from jmp.autocasting._registry import Category, rule_for
from jmp.diagnostics._arguments import apart, check_asked, of_modules
from jmp.diagnostics._interpreter import Interpreter, Operand, Origin, Place, earliest
from jmp.trees import as_jax_array


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


def find_nonfinite(fun: Callable[..., Any], *early: Any) -> Callable[..., "NonFinite | None"]:
    """Returns a function that finds the operation that made the first infinity or NaN of `fun`.

    Called with `fun`'s arguments it traces `fun` and runs it at once, operation by operation. It
    finds the first operation, in the order of execution, that turned finite numbers into an
    infinity or a NaN that reaches a result. An infinity that `jnp.where` discards is not reported;
    nor is one that was given, such as a mask of -inf, unless it reaches a result itself. Where
    -inf - (-inf) makes a NaN, the subtraction is found.

    Each operation runs alone, so each result is rounded to its dtype. XLA may fuse several and keep
    more digits and range between them: in rare cases what overflows here does not overflow there.
    See docs/nonfinite.md.

    Args:
      fun: any function that JAX can trace, such as `jax.grad(loss)`: what is asked about is its
        result. Arguments that are not arrays reach it as they are.

    Returns: a function that returns a `NonFinite`, or None if all results are finite.

    Raises: TypeError if `fun` is no function, or its arguments were given in the first call; when
      called, for arrays without numbers, such as under jit: call it outside of jit.

    >>> def loss(x):
    ...     return jnp.sum(jnp.log(x) / 2)
    >>> found = find_nonfinite(loss)(jnp.array([1.0, 0.0]))
    >>> found.operation, found.became, found.operands[0].zeros
    ('log', 'infinity', 1)
    """

    check_asked("find_nonfinite", "find_nonfinite(fun)(*args)", fun, early, None)

    def find(*args: Any, **kwargs: Any) -> NonFinite | None:
        call = ArrayCall(of_modules(fun), *apart(*args, **kwargs))
        _check_numbers(call.arrays)
        arrays = list(map(as_jax_array, call.arrays))
        interpreter = Interpreter()
        operands = []
        for array, (first, *path) in zip(arrays, call.paths, strict=True):
            name = ("args", "kwargs")[first.idx] + jax.tree_util.keystr(tuple(path))
            operands.append(interpreter.given(array, "argument", name, Place()))
        results = interpreter.run(jax.make_jaxpr(call.results)(*arrays), operands, Place())
        origin = earliest(x.origin for x in results)
        return None if origin is None else _non_finite(origin)

    return find


@dataclasses.dataclass(frozen=True)
class NonFinite:
    """What `find_nonfinite` found; `print` says it in a few lines.

    Attributes:
      operation: the primitive; "argument args[0]['w']" for an argument, "constant" for a number
        that is written in the program or closed over.
      dtype: of its result.
      became: "infinity" or "NaN".
      direction: "forward" or "backward"; what `jax.checkpoint` computes again is forward.
      module: path of modules or name scopes, "" at the top.
      source: "file:line" of the user's code.
      inside: loops, branches and calls around it, outermost first: ("jit train_step", "scan,
        iteration 7"). Iterations count from zero along what is scanned over, also in reverse.
      operands: what it read, the floating arrays alone.
      cure: what to do.

    >>> found = find_nonfinite(lambda x: x * x)(jnp.full(2, 300, jnp.float16))
    >>> found.operation, found.dtype, found.became, found.direction
    ('mul', 'float16', 'infinity', 'forward')
    """

    operation: str
    dtype: str
    became: str
    direction: str
    module: str
    source: str
    inside: tuple[str, ...]
    operands: tuple[Operand, ...]
    cure: str

    def __str__(self) -> str:
        what = "a NaN" if self.became == "NaN" else "an infinity"
        if self.operation.startswith(("argument", "constant")):
            lines = [f"{self.operation} holds {what}"]
        else:
            backward = ", in the backward pass" * (self.direction == "backward")
            lines = [f"{self.operation} makes {what} in {self.dtype}{backward}"]
        where = ", ".join(filter(None, (self.source, f"module {self.module}" * bool(self.module))))
        rows = [("where", where), ("inside", " > ".join(self.inside))]
        rows += [("read", _range_of(operand)) for operand in self.operands]
        rows.append(("cure", self.cure))
        for name, text in dict.fromkeys(rows):  # x * x reads the same twice
            if text:
                lines += textwrap.wrap(
                    text, 100, initial_indent=f"  {name:<8}", subsequent_indent=" " * 10,
                    break_long_words=False, break_on_hyphens=False,
                )  # fmt: skip
        return "\n".join(lines)


def _range_of(operand: Operand) -> str:
    kind = f"{operand.dtype}[{','.join(map(str, operand.shape))}]"
    zeros = f"{operand.zeros} zeros" if operand.zeros > 1 else "1 zero"
    counts = {zeros: operand.zeros, f"{operand.nonfinite} infinite or NaN": operand.nonfinite}
    counted = [text for text, n in counts.items() if n]
    smallest, largest = f"{operand.smallest:.3g}", f"{operand.largest:.3g}"
    if operand.largest:
        both = f"magnitudes {smallest} to {largest}"
        counted.insert(0, both if smallest != largest else f"magnitude {largest}")
    return ", ".join([kind, *counted])


def _non_finite(origin: Origin) -> NonFinite:
    what = {"argument": f"argument {origin.name}", "constant": "constant"}
    return NonFinite(
        operation=what.get(origin.kind, origin.name),
        dtype=origin.dtype,
        became="NaN" if origin.is_nan else "infinity",
        direction="backward" if origin.place.is_backward else "forward",
        module=origin.place.module,
        source=origin.place.source,
        inside=origin.place.inside,
        operands=origin.operands,
        cure=cure_for(origin),
    )


def _check_numbers(arrays: list[Any]) -> None:
    for array in arrays:
        if isinstance(array, jax.ShapeDtypeStruct) or not _jax_compat.is_concrete(array):
            raise TypeError(
                f"find_nonfinite got {described(array)}, which holds no numbers; expected the "
                "arrays of the step that failed. Call it outside of jax.jit, on what the jitted "
                "function was called with."
            )
