"""Passes, and targets, which are tuples of them.

When every dtype of a level is decided, passes change its steps: each maps steps to steps. A pass
has a name, by which `precision_report(...).after(name)` shows the program that it leaves, and a
claim: which numbers may differ from those of the program without it. `benchmarks/planner_rules.py`
measures what each pass is worth.

A target registers the passes for some platforms: `targets/` has one file for each. A pass of one
platform stands in its file, or in a file of its own beside it; `attention/` and `float8/` have the
passes that a user asks for. The planner imports none of these folders.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jmp._messages import described


class Pass(NamedTuple):
    """A function that changes the steps of a level.

    Attributes:
      name: one of its own.
      changes: which numbers may differ from those without it, in a few words; "" for none.
      run: given the steps of a level, in any order, and the `Level`, returns the steps.
    """

    name: str
    changes: str
    run: Callable[[Sequence[Any], Any], Sequence[Any]]


class HardwareTarget(NamedTuple):
    """Programs for a kind of hardware."""

    platform: str  # "gpu", "tpu": what reports and kernels know it by
    passes: tuple[Pass, ...]  # in this order
    multiplies_float16: bool = True

    def until(self, name: str) -> "HardwareTarget":
        """Returns the target with the passes up to the one called `name`.

        Raises: ValueError if it has none of that name.
        """
        names = [each.name for each in self.passes]
        if name not in names:
            raise ValueError(
                f"There is no pass {described(name)} for platform={described(self.platform)}; "
                f"expected one of {names}."
            )
        return self._replace(passes=self.passes[: names.index(name) + 1])


_TARGETS: dict[str, HardwareTarget] = {}


def register_target(platforms: Sequence[str], target: HardwareTarget) -> None:
    """Tells autocast how to change steps for some platforms, which `platform=` then takes.

    Raises: ValueError if the target's own platform is not among them, or one has a target already.
    """
    taken = [name for name in platforms if name in _TARGETS]
    if taken or target.platform not in platforms:
        raise ValueError(
            f"register_target got {described(list(platforms))} for the target "
            f"{described(target.platform)}; expected its name among them, and none of "
            f"{described(taken or list(_TARGETS))}, which have a target."
        )
    _TARGETS.update(dict.fromkeys(platforms, target))


def platforms() -> tuple[str, ...]:
    """Returns the platforms that have a target."""
    return tuple(_TARGETS)


def target_of(platform: str) -> HardwareTarget:
    """Returns the target of a platform; that of GPUs for one that nobody registered."""
    return _TARGETS.get(platform, _TARGETS["gpu"])
