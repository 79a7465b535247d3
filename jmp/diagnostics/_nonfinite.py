"""`find_nonfinite`: what made the NaN."""

import dataclasses
import textwrap
from collections.abc import Callable
from typing import Any

import jax

from jmp import _jax_compat
from jmp._calls import ArrayCall
from jmp._describe import described
from jmp.diagnostics._asked import check_asked
from jmp.diagnostics._cures import cure_for
from jmp.diagnostics._interpreter import Interpreter
from jmp.diagnostics._origins import Origin, Place, earliest
from jmp.diagnostics._scoped_modules import apart, of_modules
from jmp.diagnostics._states import Operand
from jmp.trees import as_jax_array


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
