"""The figures of families that no rule was tuned on: the worst come first in every table."""

import math
import statistics
from collections.abc import Callable, Iterable
from typing import Any

from benchmarks._tables import table
from benchmarks.families import (
    DEPTHS,
    ERRORS,
    FAMILIES,
    MOST_BYTES,
    MOST_TEMP,
    OTHERS_DEPTH,
    TIMED,
    Family,
)
from benchmarks.pages.registry import figure
from benchmarks.targets import BASE, Job

NOTHING = "–"  # not counted
BYTES, TEMP, KERNELS = "bytes_moved", "temp_bytes", "kernels"
MAIN = ("h200", "float16")
LOOKUPS = "the derivative of a lookup adds up repeated rows in float32, by hand in half"
CAUSES = dict.fromkeys(("dlrm", "message-passing", "crossed"), LOOKUPS)  # of those over a bound


def ratio(found: Any, family: Family, job: Job, key: str) -> float | None:
    """Returns what a job counted under autocast over by hand; None where it was not counted."""
    recipes = found["workloads"].get(family.name, {"recipes": {}})["recipes"]
    counted = recipes.get(job.name, {"error": ""})
    if "error" in counted or not counted[BASE].get(key):
        return None
    return counted["autocast"][key] / counted[BASE][key]


def at(layers: int, machine: str = MAIN[0], half: str = MAIN[1], newest: bool = False) -> Job:
    return Job(machine, half, f"{layers} layers", newest)


def most(found: Any, family: Family, key: str) -> float:
    """Returns the largest ratio of all depths on the first machine."""
    ratios = [ratio(found, family, at(layers), key) for layers in DEPTHS]
    return max((each for each in ratios if each is not None), default=0)


def counted(found: Any) -> list[Family]:
    """Returns the families that were counted, those that move the most bytes first."""
    families = [family for family in FAMILIES if most(found, family, BYTES)]
    return sorted(families, key=lambda family: -most(found, family, BYTES))


def cell(ratios: Iterable[float | None]) -> str:
    return " / ".join(NOTHING if each is None else f"{each:.3f}" for each in ratios)


def is_over(found: Any, family: Family) -> bool:
    return most(found, family, BYTES) > MOST_BYTES or most(found, family, TEMP) > MOST_TEMP


@figure("families/count")
def _(found: Any) -> str:
    return str(len(counted(found)))


@figure("families/lean")
def _(found: Any) -> str:
    """How many families move at most `MOST_BYTES` of the bytes at all depths."""
    return str(sum(most(found, family, BYTES) <= MOST_BYTES for family in counted(found)))


@figure("families/lean-temp")
def _(found: Any) -> str:
    return str(sum(most(found, family, TEMP) <= MOST_TEMP for family in counted(found)))


for _name, _most in (("bytes", MOST_BYTES), ("temp", MOST_TEMP)):
    figure(f"families/most-{_name}")(lambda _, most=_most: f"{most:.2f}")


@figure("families/worst")
def _(found: Any) -> str:
    family, *_ = counted(found)
    return f"{most(found, family, BYTES):.2f} ({family.title})"


@figure("families/best")
def _(found: Any) -> str:
    *_, family = counted(found)
    return f"{most(found, family, BYTES):.2f} ({family.title})"


def _mean(key: str) -> Callable[[Any], str]:
    def make(found: Any) -> str:
        """Returns the geometric mean of the families, each the mean of its depths."""
        means = [
            statistics.geometric_mean(filter(None, (ratio(found, f, at(n), key) for n in DEPTHS)))
            for f in counted(found)
        ]
        return f"{statistics.geometric_mean(means):.2f}"

    return make


for _name, _key in (("bytes", BYTES), ("temp", TEMP), ("kernels", KERNELS)):
    figure(f"families/mean-{_name}")(_mean(_key))


@figure("families/over")
def _(found: Any) -> str:
    """The families over a bound, and why."""
    rows = [
        [
            family.title,
            f"{most(found, family, BYTES):.3f}",
            f"{most(found, family, TEMP):.3f}",
            CAUSES.get(family.name, "not found yet"),
        ]
        for family in counted(found)
        if is_over(found, family)
    ]
    return table(["family", "bytes", "temp", "why"], rows)


@figure("families/table")
def _(found: Any) -> str:
    rows = []
    for family in counted(found):
        cells = [
            cell(ratio(found, family, at(layers), key) for layers in DEPTHS)
            for key in (BYTES, TEMP, KERNELS)
        ]
        rows.append([family.title, family.kind, *cells])
    return table(["family", "kind", "bytes", "temp", "kernels"], rows)


@figure("families/others")
def _(found: Any) -> str:
    """The same step on other machines, by another compiler."""
    jobs = {
        "B200": (at(OTHERS_DEPTH, "b200", "bfloat16"), (BYTES, TEMP)),
        "TPU v5e": (at(OTHERS_DEPTH, "v5e", "bfloat16"), ("cycles", TEMP)),
        "H200, newest jaxlib": (at(OTHERS_DEPTH, "h200", "bfloat16", newest=True), (BYTES, TEMP)),
    }
    rows = [
        [f.title, *(cell(ratio(found, f, job, key) for key in keys) for job, keys in jobs.values())]
        for f in counted(found)
    ]
    nothing = cell([None, None])
    shown = [row for row in rows if any(each != nothing for each in row[1:])]
    return table(["family", *jobs], sorted(shown, key=lambda row: row[1], reverse=True))


@figure("families/errors")
def _(found: Any) -> str:
    rows = []
    for family in FAMILIES:
        cells, ratios = [], []
        for half in ("float16", "bfloat16"):
            job = Job(MAIN[0], half, ERRORS)
            over = ratio(found, family, job, "error")
            ratios.append(over or 0)
            if over is None:
                cells += [NOTHING, NOTHING]
                continue
            by_hand = found["workloads"][family.name]["recipes"][job.name][BASE]["error"]
            cells += [f"{by_hand:.1e}", f"{over:.2f}"]
        rows.append((max(ratios), [family.title, *cells]))
    headers = ["family", "float16, by hand", "ratio", "bfloat16, by hand", "ratio"]
    return table(headers, [row for most, row in sorted(rows, reverse=True) if most])


@figure("families/worst-error")
def _(found: Any) -> str:
    ratios = [
        (over, family.title, half)
        for family in FAMILIES
        for half in ("float16", "bfloat16")
        if (over := ratio(found, family, Job(MAIN[0], half, ERRORS), "error"))
    ]
    over, title, half = max(ratios)
    return f"{over:.2f} ({title}, {half})"


@figure("families/times")
def _(found: Any) -> str:
    rows = []
    for family in FAMILIES:
        times = [ratio(found, family, at(TIMED), f"{key}_seconds") for key in ("compile", "trace")]
        if all(times):
            rows.append([family.title, *(f"{each:.2f}" for each in times if each)])
    rows.sort(key=lambda row: -math.prod(map(float, row[1:2])))
    return table(["family", "compile", "trace"], rows)
