"""What pages say of what devices send each other."""

from typing import Any

from benchmarks._tables import found_of, table, total
from benchmarks.pages.registry import figure
from benchmarks.run import BASELINE
from benchmarks.wire import CASES

MIB = 2**20
COLUMNS = ("all-gather", "reduce-scatter", "all-reduce")
LEAST = 0.05 * MIB  # what is less is left out of the columns by kind: a loss, counts of tokens


@figure("wire/table")
def sent(results: dict[str, Any]) -> str:
    rows, failures = [], []
    for case, found in found_of(results, CASES):
        recipes, title = found["recipes"], case.title
        for variant in case.variants:
            counted = recipes.get(variant.name)
            if counted is None:
                continue
            if "error" in counted:
                failures.append(f"- {case.title}, {variant.title}: not run: {counted['error']}")
                continue
            rows.append([title, variant.title, *_cells(counted, recipes.get(BASELINE, {}))])
            title = ""  # only the first row has it
    headers = ["MiB received", "program", *COLUMNS, "others", "in all", "over by hand"]
    headers += ["MiB moved", "MiB temp", "kernels"]
    lines = "\n" + "\n".join(failures) + "\n" if failures else ""
    return table(headers, rows) + lines


def _cells(counted: dict[str, Any], by_hand: dict[str, Any]) -> list[str]:
    received = counted["received"]
    base = by_hand.get("received")
    return [
        *by_kind(received),
        f"{total(received) / MIB:.1f}",
        f"{total(received) / total(base):.3f}" if base else "",
        f"{counted['bytes_moved'] / MIB:.0f}",
        f"{counted['temp_bytes'] / MIB:.1f}",
        str(counted["kernels"]),
    ]


def by_kind(received: dict[str, float]) -> list[str]:
    """Returns the cells of `COLUMNS`, and that of all other kinds."""
    kinds = {name: name.split()[0] for name in received}
    cells = [_by_dtype({n: b for n, b in received.items() if kinds[n] == k}) for k in COLUMNS]
    return [*cells, _by_dtype({n: b for n, b in received.items() if kinds[n] not in COLUMNS})]


def _by_dtype(received: dict[str, float]) -> str:
    """Returns such as "3.5 f16 + 21.0 f32"."""
    sums: dict[str, float] = {}
    for name, size in received.items():
        dtype = name.split()[1]
        sums[dtype] = sums.get(dtype, 0) + size
    return " + ".join(f"{size / MIB:.1f} {dtype}" for dtype, size in sums.items() if size >= LEAST)


POLICIES = {
    "float32": "float32",
    "autocast": "mixed_float16",
    "autocast-f32": "mixed_float16,r=f32",
}


@figure("wire/policies")
def _(results: dict[str, Any]) -> str:
    """What autocast sends by each policy."""
    rows = [
        [case.title, *(_listed(found["recipes"][way]["received"]) for way in POLICIES)]
        for case, found in found_of(results, CASES)
    ]
    return table(["MiB received", *POLICIES.values()], rows)


def _listed(received: dict[str, float]) -> str:
    """Returns such as "all-gather f16 14.0, reduce-scatter f32 28.0"."""
    return ", ".join(f"{name} {size / MIB:.1f}" for name, size in received.items() if size > LEAST)
