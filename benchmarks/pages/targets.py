"""The figures of programs for several GPUs and TPUs, and the drawing of `docs/performance.md`."""

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import targets
from benchmarks._drawing import FONT, narrow
from benchmarks._tables import table
from benchmarks.pages.registry import figure
from benchmarks.targets import BASE, GPU_HALVES
from testbed.machines.gpus import GPUS
from testbed.machines.tpus import TPUS

TPU_HALF = "bfloat16"
OF_GPU = ("bytes_moved", "temp_bytes", "kernels")
OF_TPU = ("bytes_moved", "cycles", "temp_bytes")
NAMES = {"bytes_moved": "bytes", "temp_bytes": "temp", "kernels": "kernels", "cycles": "cycles"}
NOTHING = "–"  # not counted, or the compiler refused it


def _counts(found: Any, row: targets.Row, machine: str, half: str, way: str) -> Any:
    """Returns what was counted of one program; None where nothing was. Float32 has no half."""
    half = "float32" if way == "float32" else half
    recipes = found["workloads"].get(row.name, {"recipes": {}})["recipes"]
    counted = recipes.get(targets.Job(machine, half, way).name)
    return None if counted is None or "error" in counted else counted


def _ratio(counted: Any, base: Any, key: str) -> str:
    if not (counted and base and base.get(key) and key in counted):
        return NOTHING  # what fits into a TPU's own memory takes no bytes of the other
    return f"{counted[key] / base[key]:.3f}"


def _cell(
    found: Any, row: targets.Row, machine: str, half: str, way: str, keys: tuple[str, ...]
) -> str:
    """Returns the ratios to the program by hand, such as "0.861 / 0.786 / 1.024"."""
    counted = _counts(found, row, machine, half, way)
    base = _counts(found, row, machine, half, BASE)
    ratios = [_ratio(counted, base, key) for key in keys]
    return NOTHING if counted is None or base is None else " / ".join(ratios)


def _over_machines(machines: Any, half: str, way: str, keys: tuple[str, ...]) -> Callable[..., str]:
    def make(found: Any) -> str:
        rows = [
            [row.title, *(_cell(found, row, machine, half, way, keys) for machine in machines)]
            for row in targets.MODEL_ROWS
            if way in row.ways
        ]
        return table(["", *map(_title, machines)], rows)

    return make


def _title(machine: str) -> str:
    return machine.upper() if machine in GPUS else f"TPU {machine}"


for _half in GPU_HALVES:
    figure(f"targets/gpus-{_half}")(_over_machines(GPUS, _half, "autocast", OF_GPU))
figure("targets/gpus-fused")(_over_machines(GPUS, TPU_HALF, "fused", OF_GPU))
figure("targets/gpus-float32")(_over_machines(GPUS, TPU_HALF, "float32", ("bytes_moved",)))
figure("targets/tpus")(_over_machines(TPUS, TPU_HALF, "autocast", OF_TPU))
figure("targets/tpus-fused")(_over_machines(TPUS, TPU_HALF, "fused", OF_TPU))
figure("targets/tpus-float32")(_over_machines(TPUS, TPU_HALF, "float32", OF_TPU))


@figure("targets/generation")
def _(found: Any) -> str:
    machines = ("h200", "b200", "v5e")
    keys = OF_GPU[:2], OF_TPU
    rows = []
    for row in targets.GENERATION_ROWS:
        for way in ("float32", "autocast"):
            cells = [
                _cell(found, row, machine, TPU_HALF, way, keys[machine in TPUS])
                for machine in machines
            ]
            rows.append([row.title if way == "float32" else "", way, *cells])
    return table(["", "", *map(_title, machines)], rows)


@figure("targets/update")
def _(found: Any) -> str:
    row = targets.ADAM
    rows = []
    for machine in targets.MACHINES:
        half, keys = (TPU_HALF, OF_TPU[:2]) if machine in TPUS else (GPU_HALVES[0], OF_GPU[::2])
        cells = _cell(found, row, machine, half, "ours", keys).split(" / ")
        bytes_, other = cells if len(cells) == 2 else (NOTHING, NOTHING)
        kernels, cycles = (NOTHING, other) if machine in TPUS else (other, NOTHING)
        rows.append([_title(machine), half, bytes_, kernels, cycles])
    return table(["", "half", "bytes", "kernels", "cycles"], rows)


# Ranges over the models.


def _ranges(
    found: Any, key: str, way: str = "autocast", over: str = BASE
) -> Iterator[tuple[str, str, dict[str, float]]]:
    """Yields machine, half dtype and the models' ratios by title, over by hand or another way."""
    for machine in targets.MACHINES:
        for half in targets.TPU_HALVES if machine in TPUS else GPU_HALVES:
            ratios = {}
            for row in targets.MODEL_ROWS:
                ours, base = (_counts(found, row, machine, half, w) for w in (way, over))
                if ours and base and key in ours.keys() & base.keys():
                    ratios[row.title] = ours[key] / base[key]
            if ratios:
                yield machine, half, ratios


def _ratios(
    found: Any, kinds: Any, key: str, way: str = "autocast", over: str = BASE
) -> list[tuple[float, str]]:
    """Returns the ratios on some machines, the least first, and where they are."""
    return sorted(
        (ratio, f"{title}, {_title(machine)}, {half}")
        for machine, half, ratios in _ranges(found, key, way, over)
        if machine in kinds
        for title, ratio in ratios.items()
    )


def _range(kinds: Any, key: str, way: str = "autocast", over: str = BASE) -> Callable[[Any], str]:
    """Returns what writes the least and the most ratio, and where they are."""

    def make(found: Any) -> str:
        ratios = _ratios(found, kinds, key, way, over)
        ends = ratios[:1] + ratios[-1:]
        return " to ".join(f"{ratio:.2f} ({where})" for ratio, where in ends) or NOTHING

    return make


def _factor(kinds: Any, digits: int, way: str, over: str) -> Callable[[Any], str]:
    """Returns what writes the least and the most ratio of the bytes, in few digits."""

    def make(found: Any) -> str:
        (least, _), *_, (most, _) = _ratios(found, kinds, "bytes_moved", way, over)
        return f"{least:.{digits}f} to {most:.{digits}f}"

    return make


@figure("targets/models")
def _(found: Any) -> str:
    """How many models were counted on GPUs."""
    return str(len({title for _, _, ratios in _ranges(found, "bytes_moved") for title in ratios}))


for _kinds, _name, _other in ((GPUS, "gpu", "kernels"), (TPUS, "tpu", "cycles")):
    figure(f"targets/{_name}-bytes")(_range(_kinds, "bytes_moved"))
    figure(f"targets/{_name}-{_other}")(_range(_kinds, _other))
    figure(f"targets/{_name}-float32")(_range(_kinds, "bytes_moved", "float32"))
    figure(f"targets/{_name}-factor")(_factor(_kinds, 1, "float32", "autocast"))
    figure(f"targets/{_name}-share")(_factor(_kinds, 2, "autocast", BASE))


@figure("targets/worst")
def _(found: Any) -> str:
    """The three worst ratios over the step by hand of each count, and the best."""
    rows = []
    for kinds, name, keys in ((GPUS, "GPUs", OF_GPU), (TPUS, "TPUs", OF_TPU)):
        for key in keys:
            numbers = _ratios(found, kinds, key)
            ends = [*reversed(numbers[-3:]), numbers[0]]
            rows.append([f"{name}: {NAMES[key]}", *(f"{r:.2f} ({where})" for r, where in ends)])
    return table(["counted", "worst", "second", "third", "best"], rows)


COLOURS = {"float16": "#0072B2", "bfloat16": "#D55E00"}  # Okabe and Ito's


def plot(found: Any) -> Any:
    """Draws for every machine the models' bytes over by hand; least and most are named."""
    ranges = list(_ranges(found, "bytes_moved"))
    what = (
        "bytes moved under autocast, over the step by hand:\ncounted in programs, a point a model"
    )
    drawing, axes = narrow(0.36 * len(ranges) + 0.7, what)
    for place, (_, half, ratios) in enumerate(ranges):
        least, most = min(ratios, key=ratios.get), max(ratios, key=ratios.get)
        color = COLOURS[half]
        axes.hlines(place, ratios[least], ratios[most], color=color, linewidth=1.5)
        axes.plot(list(ratios.values()), [place] * len(ratios), "o", color=color, markersize=4)
        look = {"fontsize": FONT, "textcoords": "offset points"}
        look["bbox"] = {"facecolor": "white", "edgecolor": "none", "pad": 0}
        axes.annotate(least, (ratios[least], place), (-4, 0), ha="right", va="center", **look)
        if most != least:
            axes.annotate(most, (ratios[most], place), (3, 6), ha="right", **look)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlim(left=axes.get_xlim()[0] - 0.1)  # room for the name of the least
    labels = [f"{_title(machine)}, {half}" for machine, half, _ in ranges]
    axes.set_yticks(range(len(ranges)), labels)
    axes.set_ylim(len(ranges) - 0.5, -0.8)
    return drawing
