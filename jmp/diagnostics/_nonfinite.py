"""`find_nonfinite`: which operation made the NaN, and what to do about it.

`_interpreter` finds the cause; `cure_for` says in words what to do.
"""

import dataclasses
import math
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jmp import _jax_compat
from jmp._array_calls import ArrayCall, check_numbers
from jmp.autocasting._registry import Category, rule_for
from jmp.autocasting._request import AUTOCAST
from jmp.diagnostics._asked import asked_function, split_arguments
from jmp.diagnostics._interpreter import Cause, Interpreter, Location, Operand, earliest
from jmp.diagnostics._places import path_in_rules, scopes_path, users_line
from jmp.diagnostics._reports import Report


def find_nonfinite(
    fun: Callable[..., Any], *early: Any, vanished: bool = False
) -> Callable[..., "NonFinite | None"]:
    """Returns a function that finds the operation that made the first infinity or NaN of `fun`.

    Called with `fun`'s arguments it traces `fun` and runs it at once, operation by operation. It
    finds the first operation, in the order of execution, that turned finite numbers into an
    infinity or a NaN that reaches a result. An infinity that `jnp.where` discards is not reported;
    nor is one that was given, such as a mask of -inf, unless it reaches a result itself. Where
    -inf - (-inf) makes a NaN, the subtraction is found.

    Each operation runs alone, so each result is rounded to its dtype. XLA may fuse several and keep
    more digits and range between them, so that in rare cases an operation overflows only here. See
    docs/checks.md.

    An infinity may also vanish on the way: a number over infinity is zero, and so may be every
    gradient behind it. If results are wrong and finite, ask with `vanished=True`.

    Args:
      fun: any function that JAX can trace, such as `jax.grad(loss)`. Arguments that are not arrays
        reach it as they are.
      vanished: whether to name, if all results are finite, the first infinity or NaN that was made
        on the way and did not reach them, because a division or `jnp.where` removed it. Many
        correct functions make such infinities.

    Returns: a function that returns a `NonFinite`; or None if all results are finite, and with
      `vanished` all intermediate values too.

    Raises: TypeError if `fun` is no function, or its arguments were given in the first call; when
      called, for arrays without numbers, such as under jit: call it outside of jit.

    >>> def loss(x):
    ...     return jnp.sum(jnp.log(x) / 2)
    >>> found = find_nonfinite(loss)(jnp.array([1.0, 0.0]))
    >>> found.operation, found.became, found.operands[0].zeros
    ('log', 'infinity', 1)
    >>> def share(x):
    ...     return x / jnp.sum(jnp.square(x))
    >>> found = find_nonfinite(share, vanished=True)(jnp.full(4, 300, jnp.float16))
    >>> found.operation, found.vanished
    ('square', 'div')
    """
    function = asked_function("find_nonfinite(fun)(*args)", fun, early)

    def find(*args: Any, **kwargs: Any) -> NonFinite | None:
        call = ArrayCall(function, *split_arguments(*args, **kwargs))
        expected = "the arrays of the step that failed, outside of jax.jit"
        check_numbers(call.arrays, "find_nonfinite", expected)
        interpreter = Interpreter(follows_vanishing=vanished)
        operands = []
        for array, (first, *path) in zip(call.arrays, call.paths, strict=True):
            name = ("args", "kwargs")[first.idx] + jax.tree_util.keystr(tuple(path))
            operands.append(interpreter.given(array, "argument", Location(), name))
        results = interpreter.run(jax.make_jaxpr(call.results)(*call.arrays), operands, Location())
        cause = earliest(x.cause for x in results)
        if cause is not None:
            return NonFinite.of(cause)
        if not vanished or not interpreter.vanished:
            return None
        cause, end = min(interpreter.vanished, key=lambda found: found[0].order)
        return NonFinite.of(cause, vanished=end.equation.primitive.name)

    return find


@dataclasses.dataclass(frozen=True)
class NonFinite(Report):
    """What `find_nonfinite` found; `print` says it in a few lines, `to_dict` gives the data.

    Attributes:
      operation: the primitive; "argument args[0]['w']" for an argument, "constant" for a number
        that is written in the program or closed over.
      dtype: the dtype of its result.
      became: "infinity" or "NaN".
      direction: "forward" or "backward"; the part that `jax.checkpoint` computes again is forward.
      module: path of modules or name scopes, "" at the top.
      source: "file:line" of the user's code.
      inside: loops, branches and calls around it, outermost first: ("jit train_step", "scan,
        iteration 7"). Iterations count from zero along what is scanned over, also in reverse.
      operands: the floating arrays that it read.
      cure: what to do.
      vanished: the primitive that read the infinity or NaN and returned finite numbers, if none
        reached a result; else "".

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
    vanished: str = ""

    @classmethod
    def of(cls, cause: Cause, vanished: str = "") -> "NonFinite":
        """Returns the report of a cause."""
        return cls(
            operation=cause.name,
            dtype=cause.dtype,
            became="NaN" if cause.is_nan else "infinity",
            direction="backward" if cause.location.is_backward else "forward",
            module=scopes_path(cause.location.stack),
            source=users_line(cause.location.equations),
            inside=cause.location.inside,
            operands=cause.operands,
            cure=" ".join(cure_for(cause)),
            vanished=vanished,
        )

    def __str__(self) -> str:
        what = "a NaN" if self.became == "NaN" else "an infinity"
        if self.operation.startswith(("argument", "constant")):
            lines = [f"{self.operation} holds {what}"]
        else:
            backward = ", in the backward pass" * (self.direction == "backward")
            lines = [f"{self.operation} makes {what} in {self.dtype}{backward}"]
        where = ", module ".join(filter(None, (self.source, self.module)))
        rows = [("where", where), ("inside", " > ".join(self.inside))]
        rows += [("read", _range_of(operand)) for operand in self.operands]
        if self.vanished:
            rows.append(("then", f"{self.vanished} read it and returned finite numbers"))
        rows.append(("cure", self.cure))
        for name, text in dict.fromkeys(rows):  # x * x reads the same twice
            if text:
                lines += textwrap.wrap(
                    text, 100, initial_indent=f"  {name:<8}", subsequent_indent=" " * 10,
                    break_long_words=False, break_on_hyphens=False,
                )  # fmt: skip
        return "\n".join(lines)


def _range_of(operand: Operand) -> str:
    found = [f"{operand.dtype}[{','.join(map(str, operand.shape))}]"]
    if operand.largest:
        ends = dict.fromkeys((f"{operand.smallest:.3g}", f"{operand.largest:.3g}"))
        found.append(f"magnitudes {' to '.join(ends)}")
    if operand.zeros:
        found.append(f"zeros: {operand.zeros}")
    if operand.nonfinite:
        found.append(f"infinite or NaN: {operand.nonfinite}")
    return ", ".join(found)


# Cures.

# Primitives that are infinite or NaN if one operand is zero, with the number of that operand.
DIVISORS = {"div": 1, "log": 0, "rsqrt": 0}
# By the kind of a cause that is no operation.
CURES = {
    "argument": "It came in like this: nothing in this function made it. Look at the data, or at "
    "the step before; jmp.transforms.with_loss_scale skips an update that is not finite.",
    "constant": "It is written in the program, or closed over, and reaches a result: look at this "
    "line.",
    "whole": "It is reported as a whole: the operations inside were not looked into, or stay "
    "finite when each runs alone. Look at the magnitudes that go in.",
}


def cure_for(cause: Cause) -> Iterator[str]:
    """Yields sentences on what was computed, and what to do."""
    rule = rule_for(cause.name)
    divisor = cause.operands[DIVISORS[cause.name]] if cause.name in DIVISORS else None
    if cause.kind != "operation":
        yield CURES[cause.kind]
    elif cause.is_nan and any(operand.nonfinite for operand in cause.operands):
        came_in = "are written in the program, or closed over"
        if cause.given:
            came_in = f"came in with {', '.join(cause.given)}. If they are data, look there"
        yield (
            f"It computes inf - inf, or 0 * inf, of infinities that {came_in}. If they are a mask: "
            "a softmax over a row that is masked throughout does this, so leave one entry in each "
            "row, or mask with a finite number (jnp.finfo(dtype).min); choose with jnp.where "
            "instead of multiplying by a mask."
        )
    elif divisor is not None and (cause.name == "div" or not cause.is_nan):
        yield from _cure_of_a_divisor(cause, divisor)
    elif cause.is_nan and not (rule.category is Category.LOW or rule.sums or rule.casts):
        yield (
            f"{cause.name} has no number for what it read. An operand is outside of its domain, an "
            "index out of bounds, or a matrix singular or not positive definite. Rounding may "
            "carry an operand over the edge: clip it (jnp.maximum, jnp.clip), and subtract in "
            "float32."
        )
    else:
        yield from _cure_of_an_overflow(cause)


def _cure_of_a_divisor(cause: Cause, divisor: Operand) -> Iterator[str]:
    if cause.location.is_backward and divisor.zeros:
        yield (
            "A derivative divides by zero. A jnp.where around the function does not help: its "
            "derivative is 0 / 0 there. Guard the operand, inside: "
            "jnp.where(ok, f(jnp.where(ok, x, 1)), 0)."
        )
        return
    smallest = "zero" if divisor.zeros else f"as little as {divisor.smallest:.2g}"
    is_log = cause.name == "log"
    yield f"The logarithm of {smallest}." if is_log else f"It divides by {smallest}."
    if _ends_early(cause):
        epsilon = float(jnp.finfo(cause.dtype).smallest_subnormal)
        yield (
            f"{cause.dtype}'s smallest number is {epsilon:.2g}: an epsilon of 1e-8 is zero in it, "
            "and so is the square of 1e-4."
        )
        yield _keep_in_float32(cause)
    yield "Add an epsilon, or choose the operand with jnp.where."
    if is_log:
        yield "jax.nn.log_softmax and optax's losses take logits, and never see the zero."
    elif _jax_compat.is_differentiated(cause.location.stack):
        yield (
            "If the line does not do this, its derivative does: the derivative of a / b divides by "
            "b * b, the derivative of sqrt(x), and so of a norm, by sqrt(x)."
        )


def _cure_of_an_overflow(cause: Cause) -> Iterator[str]:
    largest, rule = float(jnp.finfo(cause.dtype).max), rule_for(cause.name)
    if cause.name == "exp":
        yield f"exp overflows {cause.dtype} above {math.log(largest):.4g}."
        if _ends_early(cause):
            yield _keep_in_float32(cause)
        yield "Subtract the maximum first, as jax.nn.softmax and jax.nn.logsumexp do."
        return
    yield f"The result went beyond {largest:.5g}, {cause.dtype}'s largest number."
    if not _ends_early(cause):
        yield (
            "Precision is not the cause: something grows, or a power of zero is negative. Lower "
            "the learning rate or warm it up, clip gradients (optax.clip_by_global_norm), and look "
            "at the data and the initial values."
        )
    elif cause.location.is_backward:
        yield (
            "If the loss is scaled, lower the scale. A jmp.DynamicLossScale does so by itself, and "
            "the step is skipped: harmless if it happens rarely. If it happens at any scale, clip "
            "or normalise what is differentiated."
        )
    elif rule.casts:  # which autocast leaves as the user wrote it
        yield (
            "Make the numbers smaller before the cast, or cast to bfloat16, which has float32's "
            "range. A sum or mean of half numbers ends in such a cast: dtype=jnp.float32 leaves it "
            "out."
        )
    else:
        yield _keep_in_float32(cause)
        if rule.category is Category.LOW:
            yield "Scale the operands (a query by 1 / sqrt(d)), or normalise them."


def _ends_early(cause: Cause) -> bool:
    """Returns whether the dtype ends long before float32 does; bfloat16 does not."""
    return float(jnp.finfo(cause.dtype).max) < 1e30


def _keep_in_float32(cause: Cause) -> str:
    if AUTOCAST not in _jax_compat.scope_names(cause.location.stack):
        return (
            "Keep it in float32, as jmp.autocast of the float32 function does of all but products, "
            "or use bfloat16, which has float32's range."
        )
    scope = path_in_rules(scopes_path(cause.location.stack))
    where = f'rules=[("{scope}*", "float32")]' if scope else "jmp.full_precision"
    return f'Keep it in float32: full=["{cause.name}"] in autocast, or this place with {where}.'
