"""The optimizer that an `update` is part of, read off the stack of calls.

A transformation is handed its own part of the optimizer's state, and cannot see what stands before,
behind or around it: `optax.chain(clip_by_global_norm(1.0), with_loss_scale(...))` would clip scaled
gradients without an error. The functions of optax that are calling hold the whole state. They are
looked at whenever `update` is traced, which costs a compiled step nothing. Where none is calling,
as of an `update` that was jitted and traced by itself, `transforms.check_optimizer_state` still
checks.
"""

import contextlib
import contextvars
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import optax

_undoes_skips = contextvars.ContextVar("undoes_skips", default=False)


def is_of_optax(module: str) -> bool:
    """Returns whether a module of this name belongs to optax."""
    return module.partition(".")[0] == "optax"


def calling_states() -> list[optax.OptState]:
    """Returns the states that every `update` of optax on the stack was given, innermost first."""
    return list(_given_to_callers("update", "state"))


def calling_params() -> list[optax.Params]:
    """Returns the parameters that every `init` of optax on the stack was given, innermost first."""
    return list(_given_to_callers("init", "params"))


def _given_to_callers(function: str, argument: str) -> Iterator[Any]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        of_optax = is_of_optax(frame.f_globals.get("__name__", ""))
        if of_optax and function in frame.f_code.co_name and argument in frame.f_locals:
            yield frame.f_locals[argument]
        frame = frame.f_back


@contextlib.contextmanager
def skips_undone() -> Iterator[None]:
    """Says that the step around an `update` undoes all that a skipped step has moved."""
    token = _undoes_skips.set(True)
    try:
        yield
    finally:
        _undoes_skips.reset(token)


def are_skips_undone() -> bool:
    """Returns whether `update` is called inside `skips_undone`."""
    return _undoes_skips.get()
