"""What `docs/performance.md` says of recipes that were timed, on a GPU or on a CPU."""

from typing import Any

from benchmarks._tables import BASELINE, CONTROL, TITLES, failures, table, total, versions_of
from benchmarks.pages.registry import figure, read
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


figure("cpu/machine")(
    lambda found: f"{found['machine']['device']}; {versions_of(found['machine'])}"
)


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
    for workload in (*WORKLOADS, *UPDATES):
        found = results["workloads"].get(workload.name)
        if found is None:
            continue
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
            # The program of float32 was compiled for exact products, not for those of TF32.
            is_modelled = "model_ms" in compiled_here and name != "tf32"
            peak = measured.get("peak_bytes")
            rows.append(
                [
                    TITLES[name],
                    f"{1e3 * measured['seconds']:.2f}",
                    ratio_text(measured),
                    f"{1e3 * limit:.2f}" if limit else "",
                    f"{total(compiled_here['model_ms']):.2f}" if is_modelled else "",
                    f"{100 * flops / measured['seconds'] / rate:.0f} %" if flops else "",
                    f"{measured['compiler_bytes'] / 1e9:.2f}"
                    if "compiler_bytes" in measured
                    else "",
                    f"{peak / 1e9:.2f}" if peak else "",
                ]
            )
        headers = ["recipe", "ms", "over by hand", "limit ms", "modelled limit, model ms", "MFU"]
        headers += ["GB planned", "GB peak"]
        text += f"### {found['title']}\n\n{table(headers, rows)}{failures(found['recipes'])}\n"
    return text


@figure("cpu/tables")
def cpu(results: dict[str, Any]) -> str:
    """Returns a table for each update, and one of tracing and compilation."""
    text = ""
    for update in UPDATES:
        if found := results["workloads"].get(update.name):
            rows = [
                [
                    TITLES[name],
                    f"{1e3 * measured['seconds']:.1f}",
                    ratio_text(measured),
                    compilation_text(name, found["recipes"]),
                ]
                for name, measured in found["recipes"].items()
                if "error" not in measured
            ]
            headers = ["recipe", "ms", "over by hand", "compilation over by hand"]
            text += f"### {found['title']}\n\n{table(headers, rows)}{failures(found['recipes'])}\n"
    models = [w for w in WORKLOADS if w.name in results["workloads"]]
    if not models:
        return text
    rows = []
    for name, title in TITLES.items():
        row = [title]
        for model in models:
            recipes = results["workloads"][model.name]["recipes"]
            measured = recipes.get(name, {"error": "not asked for"})
            failed = "error" in measured
            row += ["", ""] if failed else [ratio_text(measured), compilation_text(name, recipes)]
        if any(row[1:]):
            rows.append(row)
    not_run = [failures(results["workloads"][model.name]["recipes"]) for model in models]
    headers = ["over by hand"]
    for model in models:
        headers += [f"{model.title}: tracing", "compilation"]
    return f"""{text}### Tracing and compiling a step

{table(headers, rows)}{"".join(not_run)}
"""


def compilation_text(name: str, recipes: dict[str, Any]) -> str:
    seconds, by_hand = (recipes.get(n, {}).get("compile_seconds") for n in (name, BASELINE))
    return f"{seconds / by_hand:.2f}" if seconds and by_hand else ""
