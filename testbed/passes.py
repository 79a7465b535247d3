"""Autocast with other passes, or other parts: contexts in which programs are planned with them."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from jmp.autocasting import _passes
from jmp.autocasting._passes import HardwareTarget, Pass


def targets() -> tuple[HardwareTarget, ...]:
    """Returns the targets, each once."""
    return tuple(dict.fromkeys(_passes._TARGETS.values()))


@contextlib.contextmanager
def changed_targets(change: Callable[[HardwareTarget], HardwareTarget]) -> Iterator[None]:
    """In it each target is what `change` makes of it."""
    changed = {platform: change(target) for platform, target in _passes._TARGETS.items()}
    with mock.patch.dict(_passes._TARGETS, changed):
        yield


def without_pass(name: str) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which no target has the pass called `name`."""

    def without(target: HardwareTarget) -> HardwareTarget:
        return target._replace(passes=tuple(one for one in target.passes if one.name != name))

    return changed_targets(without)


def with_first(first: Pass) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which every target has one pass more, before its own."""
    return changed_targets(lambda target: target._replace(passes=(first, *target.passes)))


@contextlib.contextmanager
def replaced(instead: dict[str, Any]) -> Iterator[None]:
    """Puts other objects in place of those at some addresses in `jmp.autocasting`."""
    with contextlib.ExitStack() as stack:
        for address, value in instead.items():
            stack.enter_context(mock.patch(f"jmp.autocasting.{address}", value))
        yield
