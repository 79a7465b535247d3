"""The whole optimizer that an `update` is part of, read off the stack of calls.

A transformation is handed its own part of the optimizer's state, and cannot see what stands before,
behind or around it: `optax.chain(clip_by_global_norm(1.0), with_loss_scale(...))` would clip scaled
gradients in silence. The functions of optax that are calling hold the whole state. They are looked
at whenever `update` is traced, which costs a compiled step nothing. Where they tell nothing,
`transforms.check_optimizer_state` still does.
"""

import sys
from collections.abc import Iterator
from types import FrameType

import optax


def calling_optimizer() -> optax.OptState | None:
    """Returns the state that the outermost `update` of optax on the stack was given, if any."""
    whole = None
    for frame in _callers():
        if _module(frame).startswith("optax.") and "update" in frame.f_code.co_name:
            whole = frame.f_locals.get("state", whole)
    return whole


def is_called_by_an_adapter() -> bool:
    """Returns whether a step of `jmp.adapters` is calling, which undoes all of a skipped step."""
    return any(_module(frame).startswith("jmp.adapters.") for frame in _callers())


def _callers() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _module(frame: FrameType) -> str:
    name: str = frame.f_globals.get("__name__", "")
    return name
