"""The part of the report that says what devices send each other."""

from typing import Any

from benchmarks._tables import BASELINE, table, total, versions_of
from benchmarks.wire import CASES

MIB = 2**20
COLUMNS = ("all-gather", "reduce-scatter", "all-reduce")
LEAST = 0.05 * MIB  # what is less is left out of the columns by kind: a loss, counts of tokens


def section(results: dict[str, Any]) -> str:
    rows, failures = [], []
    for case in CASES:
        found = results["workloads"].get(case.name)
        if found is None:
            continue
        recipes, title = found["recipes"], case.title
        for variant in case.variants:
            counted = recipes.get(variant.name)
            if counted is None:
                continue
            if "error" in counted:
                failures.append(f"- {case.title}, {variant.title}: not run: {counted['error']}")
                continue
            rows.append([title, variant.title, *_cells(counted, recipes.get(BASELINE, {}))])
            title = ""  # of the first row alone
    headers = ["MiB received", "program", *COLUMNS, "others", "in all", "over by hand"]
    headers += ["MiB moved", "MiB temp", "kernels"]
    lines = "\n" + "\n".join(failures) + "\n" if failures else ""
    return f"""## The wire: programs compiled for eight H200s

Loss and gradients of one step, compiled for eight H200s without a device
({versions_of(results["machine"])}): MiB that each device
receives from others, by collective and dtype, with ring algorithms
(`testbed/machines/wire.py` says how they are counted); also the MiB that its kernels read and
write, and those of intermediate values. No time was measured.
`python -m benchmarks.run --suite wire` counts them; `benchmarks/wire.py` has the programs.
The first eight have four layers, 32 MiB of float32
parameters. The GPT has 16.8 M parameters, one table for embedding and head, and blocks that are
scanned and computed again in the backward pass. By hand, arrays are cast before they are sent;
without a barrier XLA moves a sharding constraint in front of the cast. Under autocast in
shard_map, gradients of replicated parameters are float32, and so are their sums, by AD or by the
user.

{table(headers, rows)}{lines}
"""


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
