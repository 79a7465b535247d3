"""What `docs/examples.md` says of the examples of its gallery."""

from typing import Any

import numpy as np

from benchmarks._tables import table
from benchmarks.pages.registry import figure, size

PRECISIONS = {
    "float32": "float32",
    "mixed_float16": "mixed float16",
    "mixed_bfloat16": "mixed bfloat16",
}


@figure("diffusion/table")
def _(found: Any) -> str:
    rows = [
        [title, *(f"{loss:.3f}" for loss in found["runs"][name]["losses"].values())]
        for name, title in PRECISIONS.items()
    ]
    return table(["held-out loss", "parameters", "their EMA in float32", "their EMA in half"], rows)


@figure("lora/table")
def _(found: Any) -> str:
    rows = []
    for name, loss in found["losses"].items():
        parts = found["memory"][name]
        shown = ("frozen parameters", "gradients", "optimizer", "activations")
        rows.append([name, f"{loss:.4f}", *(size(parts[part]) for part in shown)])
    headers = ["what is trained", "held-out loss", "frozen", "gradients"]
    return table([*headers, "optimizer", "activations"], rows)


def _mixed(found: Any) -> Any:
    return found["memory"]["LoRA, mixed bfloat16"]


figure("lora/gradients")(lambda found: size(_mixed(found)["gradients"]))
figure("lora/all-gradients")(
    lambda found: size(_mixed(found)["gradients"] + _mixed(found)["frozen parameters"])
)


@figure("seq2seq/table")
def _(found: Any) -> str:
    rows = []
    for name, title in PRECISIONS.items():
        run = found["runs"][name]
        shares = (f"{100 * run[key]:.1f} %" for key in ("right", "as in float32"))
        rows.append([title, f"{run['loss']:.4f}", f"{run['held-out loss']:.4f}", *shares])
    headers = ["", "training loss", "held-out loss", "dates right", "written as in float32"]
    return table(headers, rows)


@figure("actor_critic/table")
def _(found: Any) -> str:
    rows = []
    for name, title in PRECISIONS.items():
        run = found["runs"][name]
        scales = (f"2^{np.log2(scale):.0f}" if scale > 1 else "none" for scale in run["scales"])
        final = f"{np.mean(run['final']):.1f} ({min(run['final']):.1f} to {max(run['final']):.1f})"
        rows.append([title, final, *(f"{x:.2g}" for x in run["norms"]), *scales])
    headers = ["", "return", "norm of gradients: actor", "critic", "loss scale: actor", "critic"]
    return table(headers, rows)


@figure("data_parallel/table")
def _(found: Any) -> str:
    rows = []
    for name, run in found["runs"].items():
        policy, way = name.split(", ")
        alone = found["runs"][f"{policy}, one device"]["losses"]
        apart = np.abs(np.subtract(run["losses"], alone)).max()
        rows.append([
            PRECISIONS[policy],
            way,
            f"{np.mean(run['losses'][-20:]):.4f}",
            f"{apart:.0e}" if apart else "",
            size(1000 * run["kB on a device"]),
        ])  # fmt: skip
    return table(["", "on", "loss", "most apart from one device", "on each device"], rows)
