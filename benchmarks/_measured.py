"""The parts of the report that were timed, on a GPU or on a CPU."""

from typing import Any

from benchmarks._tables import BASELINE, CONTROL, TITLES, failures, table, total, versions_of
from benchmarks.workloads import UPDATES, WORKLOADS

PYTORCH = """PyTorch's rows compute attention by `F.scaled_dot_product_attention`, with fused
kernels: compare them with the row "by hand, cuDNN attention"."""


def ratio_text(measured: dict[str, Any]) -> str:
    if "interval" not in measured:
        return f"{measured['ratio']:.3f}"
    low, high = measured["interval"]
    return f"{measured['ratio']:.3f} ({low:.3f} to {high:.3f})"


def gpu(results: dict[str, Any], compiled: dict[str, Any] | None) -> str:
    machine, ceilings = results["machine"], results["ceilings"]
    bandwidth = ceilings["bytes_per_second"]
    names = {"half": "float16", "tf32": "tf32", "float32": "float32"}
    rates = {key: ceilings[f"{name}_flops_per_second"] / 1e12 for key, name in names.items()}
    all_recipes = [w["recipes"] for w in results["workloads"].values()]
    versions = {r["torch"] for recipes in all_recipes for r in recipes.values() if "torch" in r}
    pytorch = "".join(f", PyTorch {version}" for version in sorted(versions))
    text = f"""## Measured on a GPU

{machine["device"]}, driver {machine["driver"]}, {machine["platform_version"]},
{versions_of(machine)}{pytorch}. Every recipe in
a process of its own, compiled once, in shuffled rounds; the median of the ratios within a round,
with its 95 % bootstrap interval. The second process by hand says what chance makes of a ratio.
Ceilings measured on the same device: {bandwidth / 1e12:.2f} TB/s, {rates["half"]:.0f} TFLOP/s in
float16, {rates["tf32"]:.0f} in TF32, {rates["float32"]:.0f} in float32. The physical limit is the
larger of the counted bytes over that bandwidth and the model's operations over that rate; model
FLOP utilisation (MFU) is the model's operations a second over the measured rate, not the vendor's.
The modelled limit is that of the compiled programs above, of the vendor's figures. {PYTORCH}

Fewer bytes save less time than they promise: products and launches take their part too, and in
GPT-2 XLA's single kernel for a mask and a softmax takes as long as the several that it replaces.
Adam's updates are too short to time this way: see the interval of the control.

"""
    for workload in (*WORKLOADS, *UPDATES):
        found = results["workloads"].get(workload.name)
        if found is None:
            continue
        counted = (compiled or {"workloads": {}})["workloads"].get(workload.name, {"recipes": {}})
        flops, rows = found.get("flops", 0), []
        for name, measured in found["recipes"].items():
            if "error" in measured:
                continue
            rate = 1e12 * rates.get(name, rates["half"])
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


def cpu(results: dict[str, Any]) -> str:
    machine = results["machine"]
    text = f"""## Measured on a CPU

{machine["device"]}; {versions_of(machine)}.
The median of paired ratios, as on a GPU; compiled once. A CPU computes half products no faster,
mostly slower: mixed precision is for GPUs and TPUs, and these times say nothing about those. Only
the times of tracing apply to a GPU too, because tracing always runs on the CPU.

"""
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
