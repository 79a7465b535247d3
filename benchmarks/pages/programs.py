"""The figures of programs: what they move and hold, what devices send, times on a GPU."""

from typing import Any

import numpy as np

from benchmarks import programs
from benchmarks._drawing import FONT, narrow
from benchmarks._tables import table
from benchmarks.pages.registry import digits, figure, numbers, percent, size
from benchmarks.pages.wire import MIB

# Programs for an H200.


def _over(program: Any, base: Any, digits: int = 3) -> list[str]:
    return [f"{program[name] / base[name]:.{digits}f}" for name in programs.COST]


@figure("programs/autocast-table")
def _(found: Any) -> str:
    rows = []
    for name, title in programs.MODEL_TITLES.items():
        ways = found["workloads"]["autocast"]["recipes"][name]
        base = ways["by hand"]
        absolute = f"{base['bytes_moved'] / 1e9:.2f} GB, {base['temp_bytes'] / 1e6:.0f} MB, "
        absolute += str(base["kernels"])
        full = _over(ways["float32"], base)[:2]
        rows.append([title, *_over(ways["autocast"], base), *full, absolute])
    headers = ["one training step", "bytes moved", "temp memory", "kernels", "float32: bytes"]
    return table([*headers, "float32: temp", "by hand"], rows)


@figure("programs/attention-table")
def _(found: Any) -> str:
    recipes = found["workloads"]["attention"]["recipes"]
    rows = [[name, *_over(ways["fused"], ways["by hand"])] for name, ways in recipes.items()]
    return table(["module", "bytes moved", "temporary memory", "kernels"], rows)


FLOAT8_TITLES = ("bytes", "temp memory", "kernels", "products in float8")


def _float8_cells(counted: Any, kind: str) -> list[str]:
    """Returns the cells of `FLOAT8_TITLES` for a program that was counted in bfloat16 too."""
    float8 = counted[kind]
    share = f"{float8['float8']} of {float8['products']}"
    return [*_over(float8, counted["mixed_bfloat16"], 2), share]


@figure("programs/float8-table")
def _(found: Any) -> str:
    recipes = found["workloads"]["float8"]["recipes"]
    rows = [[name, *_float8_cells(counted, "mixed_float8")] for name, counted in recipes.items()]
    return table(["", *FLOAT8_TITLES], rows)


@figure("programs/float8-rules")
def _(found: Any) -> str:
    rows = [
        [rule, counted["program"], title, *_float8_cells(counted, kind)]
        for rule, counted in found["workloads"]["float8-rules"]["recipes"].items()
        for kind, title in (("mixed_float8", "with it"), ("without the rule", "without it"))
    ]
    return table(["rule", "step", "variant", *FLOAT8_TITLES], rows)


def _columns(found: Any, name: str) -> list[int]:
    recipes = found["workloads"]["columns"]["recipes"]
    return [recipes[columns][name] for columns in ("4095", "4096")]


@figure("programs/columns-bytes")
def _(found: Any) -> str:
    odd, even = _columns(found, "bytes_moved")
    return f"{odd / even:.1f}"


@figure("programs/columns-kernels")
def _(found: Any) -> str:
    odd, even = _columns(found, "kernels")
    return f"{odd} kernels instead of {even}"


@figure("wire/float8-table")
def _(found: Any) -> str:
    """Gathers and sums of FSDP in half and in float8; cases that send the same are one row."""
    titles = {
        "fsdp-shard-map": "`all_gather` in `shard_map`",
        "fsdp-explicit": "`reshard`",
        "fsdp-constraint": "`with_sharding_constraint`",
        "fsdp": "only jit",
    }
    rows: dict[tuple[str, ...], list[str]] = {}
    for case, title in titles.items():
        recipes = found["workloads"][case]["recipes"]
        if "error" in recipes["autocast-f8"]:
            continue
        half, float8 = recipes["autocast"]["received"], recipes["autocast-f8"]["received"]
        names = (("float8", "all-gather f8e4m3fn"), ("bfloat16", "all-gather bf16"))
        gathers = ", ".join(f"{float8[kind] / MIB:.1f} {name}" for name, kind in names)
        sums = float8["reduce-scatter bf16"]
        cells = f"{half['all-gather f16'] / MIB:.1f}", gathers, f"{sums / MIB:.1f}"
        rows.setdefault(cells, []).append(title)
    headers = ["FSDP", "half: gathers", "float8: gathers", "sums of gradients"]
    return table(headers, [[", ".join(same), *cells] for cells, same in rows.items()])


_, MIXED, _ = programs.MEMORY_RUNS


def _gpt2(found: Any, kind: str) -> Any:
    return found["workloads"]["memory"]["recipes"][kind]


def _kept(report: Any) -> int:
    return sum(report["parts"][part] for part in ("activations", "copies of parameters"))


@figure("programs/memory-table")
def _(found: Any) -> str:
    reports = [_gpt2(found, kind) for kind in programs.MEMORY_RUNS]
    kept = list(map(_kept, reports))
    temps, peaks = ([r[f"xla_{name}_bytes"] for r in reports] for name in ("temp", "peak"))
    rows = [
        ["activations and copies, JAX", *map(size, kept)],
        ["XLA: temp", *map(size, temps)],
        ["XLA: temp, of what JAX keeps", *map(digits, np.divide(temps, kept))],
        ["XLA: peak", *map(size, peaks)],
        ["XLA: peak, of float32", "", *(digits(peak / peaks[0]) for peak in peaks[1:])],
    ]
    return table(["", *programs.MEMORY_RUNS.values()], rows)


@figure("programs/memory-within")
def _(found: Any) -> str:
    """How far XLA's temp in mixed precision is from what JAX keeps."""
    report = _gpt2(found, MIXED)
    return percent(abs(report["xla_temp_bytes"] / _kept(report) - 1))


for _name, _part in (("factor", "within the blocks"), ("scores", "of it attention scores")):
    figure(f"programs/memory-{_name}")(
        lambda found, part=_part: f"{_gpt2(found, MIXED)['transformer_factors'][part]:.1f}"
    )


# Times on a GPU.

TIMED = {
    "float32": "in float32",
    "tf32": "with TF32 products",
    "by-hand": "in half by hand",
    "autocast": "under autocast",
    "autocast-fused": "with fused attention",
}


@figure("gpu/gpt2")
def _(found: Any) -> str:
    recipes = found["workloads"]["gpt2"]["recipes"]
    times = [f"{1e3 * recipes[name]['seconds']:.1f} ms {what}" for name, what in TIMED.items()]
    return f"{', '.join(times)} ({found['machine']['device']})"


def plot_times(found: Any) -> Any:
    """Draws the time of a training step of GPT-2, a bar a precision."""
    recipes = found["workloads"]["gpt2"]["recipes"]
    drawing, axes = narrow(1.8, "")
    drawing.set_figwidth(3.6)  # letters of 11 pixels on a phone
    for place, name in enumerate(TIMED):
        milliseconds = 1e3 * recipes[name]["seconds"]
        color = "#D55E00" if name.startswith("autocast") else "#0072B2"
        axes.barh(place, milliseconds, color=color, height=0.7)
        label = f" {milliseconds:.1f} ms"
        axes.annotate(label, (milliseconds, place), va="center", fontsize=FONT)
    labels = ["float32", "TF32 products", "half by hand", "autocast", "and fused attention"]
    axes.set_yticks(range(len(TIMED)), labels)
    axes.invert_yaxis()
    axes.margins(x=0.35)
    axes.set_xlim(left=0)
    axes.set_xticks([])
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
    return drawing


numbers({
    "gpu/gpt2-fused": "{[workloads][gpt2][recipes][autocast-fused][ratio]:.2f}",
    "gpu/vit-b16-fused": "{[workloads][vit-b16][recipes][autocast-fused][ratio]:.2f}",
})  # fmt: skip
