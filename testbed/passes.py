"""Autocast with other passes: what is planned in these contexts is planned without some."""

import contextlib
from collections.abc import Callable, Iterator
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
