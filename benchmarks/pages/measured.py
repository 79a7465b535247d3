"""What `docs/performance.md` says of recipes and of parts that were timed on a GPU."""

from typing import Any

from benchmarks._tables import TITLES, found_of, section, versions_of
from benchmarks.gpu_parts import PARTS
from benchmarks.pages.registry import figure, read
from benchmarks.run import BASELINE, CONTROL
from benchmarks.workloads import UPDATES, WORKLOADS


def ratio_text(measured: dict[str, Any]) -> str:
    if "interval" not in measured:
        return f"{measured['ratio']:.3f}"
    low, high = measured["interval"]
    return f"{measured['ratio']:.3f} ({low:.3f} to {high:.3f})"


@figure("gpu/machine")
def _(results: dict[str, Any]) -> str:
    machine = results["machine"]
    all_recipes = [w["recipes"] for w in results["workloads"].values()]
    versions = {r["torch"] for recipes in all_recipes for r in recipes.values() if "torch" in r}
    names = [f"{machine['device']}, driver {machine['driver']}", machine["platform_version"]]
    names += [versions_of(machine), *(f"PyTorch {version}" for version in sorted(versions))]
    return ", ".join(names)


def _rates(results: dict[str, Any]) -> dict[str, float]:
    """Returns the operations a second that were measured, by dtype."""
    names = {"half": "float16", "tf32": "tf32", "float32": "float32"}
    return {key: results["ceilings"][f"{name}_flops_per_second"] for key, name in names.items()}


@figure("gpu/bandwidth")
def _(results: dict[str, Any]) -> str:
    return f"{results['ceilings']['bytes_per_second'] / 1e12:.2f} TB/s"


for _name in ("half", "tf32", "float32"):
    figure(f"gpu/{_name}")(lambda found, name=_name: f"{_rates(found)[name] / 1e12:.0f}")


@figure("gpu/tables")
def gpu(results: dict[str, Any]) -> str:
    """Returns a table for each workload, with limits of the programs that were counted."""
    compiled, rates = read("recipes"), _rates(results)
    bandwidth = results["ceilings"]["bytes_per_second"]
    text = ""
    for workload, found in found_of(results, (*WORKLOADS, *UPDATES)):
        counted = compiled["workloads"].get(workload.name, {"recipes": {}})
        flops, rows = found.get("flops", 0), []
        for name, measured in found["recipes"].items():
            if "error" in measured:
                continue
            rate = rates.get(name, rates["half"])
            program = "float32" if name == "tf32" else BASELINE if name == CONTROL else name
            compiled_here = counted["recipes"].get(program, {})
            moved = compiled_here.get("bytes_moved")
            limit = max(moved / bandwidth, flops / rate) if moved else None
            planned, peak = (measured.get(f"{name}_bytes") for name in ("compiler", "peak"))
            rows.append(
                [
                    TITLES[name],
                    f"{1e3 * measured['seconds']:.2f}",
                    ratio_text(measured),
                    f"{1e3 * limit:.2f}" if limit else "",
                    f"{100 * flops / measured['seconds'] / rate:.0f} %" if flops else "",
                    *(f"{held / 1e9:.2f}" if held else "" for held in (planned, peak)),
                ]
            )
        headers = ["recipe", "ms", "over by hand", "limit ms", "MFU"]
        headers += ["GB planned", "GB peak"]
        text += section(found, headers, rows)
    return text


@figure("gpu/parts")
def gpu_parts(results: dict[str, Any]) -> str:
    """Returns a table for each part that was timed, and a sentence if none was."""
    text = ""
    for part, found in found_of(results, PARTS):
        rows = [
            [
                way,
                f"{1e3 * measured['seconds']:.2f}",
                ratio_text(measured),
                f"{measured['deviation']:.2g}" if "deviation" in measured else "",
            ]
            for way, measured in found["recipes"].items()
            if "error" not in measured
        ]
        text += section(found, ["way", "ms", f"over {part.baseline}", "deviation"], rows)
    return text or "None of these parts was timed so far.\n"
