"""The files that the figures of pages come from, and what makes each figure from its file."""

import functools
import json
from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks.processes import ROOT


class Source(NamedTuple):
    """A file of `results/`, and what makes it."""

    file: str
    command: str


SOURCES = {
    "char_lm": Source("results/char_lm.json", "python examples/char_lm.py --output-dir results"),
    "autoencoder": Source(
        "results/autoencoder.json", "python examples/autoencoder.py --output-dir results"
    ),
    "scaling": Source("results/scaling_cases.json", "python -m benchmarks.scaling_cases"),
    "digits": Source("results/digits.json", "python examples/digits.py --output-dir results"),
    "grpo": Source(
        "results/grpo.json",
        "python examples/grpo.py --compare --seeds 5 --output-dir results --checkpoint-dir runs/g",
    ),
    "overflow": Source(
        "results/find_overflow.json", "python examples/find_overflow.py --output-dir results"
    ),
    "ranges": Source(
        "results/inspect_ranges.json", "python examples/inspect_ranges.py --output-dir results"
    ),
    "gallery": Source("results/gallery.json", "python -m benchmarks.gallery"),
    "diffusion": Source(
        "results/diffusion.json", "python examples/diffusion.py --output-dir results"
    ),
    "lora": Source("results/lora.json", "python examples/lora.py --output-dir results"),
    "seq2seq": Source("results/seq2seq.json", "python examples/seq2seq.py --output-dir results"),
    "actor_critic": Source(
        "results/actor_critic.json", "python examples/actor_critic.py --output-dir results"
    ),
    "data_parallel": Source(
        "results/data_parallel.json", "python examples/data_parallel.py --output-dir results"
    ),
    "memory": Source("results/memory.json", "python examples/memory.py --output-dir results"),
    "recipes": Source(
        "results/benchmarks/compiled.json", "python -m benchmarks.run --suite compiled"
    ),
    "programs": Source(
        "results/benchmarks/programs.json", "python -m benchmarks.run --suite programs"
    ),
    "targets": Source(
        "results/benchmarks/targets.json", "python -m benchmarks.run --suite targets"
    ),
    "families": Source(
        "results/benchmarks/families.json", "python -m benchmarks.run --suite families"
    ),
    "published": Source("results/benchmarks/public_models", "make public-models"),
    "checks": Source("results/benchmarks/checks.json", "python -m benchmarks.run --suite checks"),
    "cpu": Source("results/benchmarks/cpu.json", "python -m benchmarks.run --suite cpu"),
    "gpu": Source("results/benchmarks/gpu.json", "python -m benchmarks.run --suite gpu"),
    "wire": Source("results/benchmarks/wire.json", "python -m benchmarks.run --suite wire"),
    "device_sums": Source("results/device_sums.json", "python -m benchmarks.device_sums"),
    "rules": Source("results/planner_rules.json", "python benchmarks/planner_rules.py"),
    "soak": Source("results/soak.json", "make soak"),
    "migrations": Source("results/migrations.json", "python -m benchmarks.migrations"),
    "small_states": Source("results/small_states.json", "python -m benchmarks.small_states"),
}

FIGURES: dict[str, Callable[[Any], str]] = {}


@functools.cache
def read(source: str) -> Any:
    """Returns the contents of a file of `SOURCES`; of a folder, those of all files in it."""
    path = ROOT / SOURCES[source].file
    if path.is_dir():
        return [json.loads(file.read_text()) for file in sorted(path.glob("*.json"))]
    return json.loads(path.read_text())


def figure(name: str) -> Callable[[Callable[[Any], str]], Callable[[Any], str]]:
    """Registers what makes a figure from the contents of the file that the name begins with."""

    def register(make: Callable[[Any], str]) -> Callable[[Any], str]:
        if name in FIGURES or name.split("/")[0] not in SOURCES:
            raise ValueError(
                f"The figure {name!r} is there already, or its file is not in SOURCES."
            )
        FIGURES[name] = make
        return make

    return register


def numbers(texts: dict[str, str]) -> None:
    """Registers figures that are one number of their file: what `str.format` makes of the file.

    With `{"overflow/before": "{[accuracy][at the cure]:.1%}"}` a page says "94.4 %".
    """
    for name, text in texts.items():
        figure(name)(lambda found, text=text: text.format(found).replace("%", " %"))


# How numbers are printed.


def digits(number: float) -> str:
    """Returns a number with three digits, such as "7.40" and "475"."""
    return f"{number:#.3g}".removesuffix(".")


def size(number: float) -> str:
    """Returns bytes with three digits, such as "13.2 MB"."""
    units = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1))
    unit, one = next((name, one) for name, one in units if number >= one)
    return f"{digits(number / one)} {unit}"


def percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f} %"
