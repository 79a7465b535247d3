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


def _example(name: str, options: str = "") -> Source:
    command = f"python examples/{name}.py{options} --output-dir results"
    return Source(f"results/{name}.json", command)


def _suite(suite: str) -> Source:
    return Source(f"results/benchmarks/{suite}.json", f"python -m benchmarks.run --suite {suite}")


def _module(name: str) -> Source:
    return Source(f"results/{name}.json", f"python -m benchmarks.{name}")


SOURCES = {
    "char_lm": _example("char_lm"),
    "autoencoder": _example("autoencoder"),
    "digits": _example("digits"),
    "diffusion": _example("diffusion"),
    "lora": _example("lora"),
    "seq2seq": _example("seq2seq"),
    "actor_critic": _example("actor_critic"),
    "data_parallel": _example("data_parallel"),
    "memory": _example("memory"),
    "grpo": _example("grpo", " --compare --seeds 5"),
    "overflow": _example("find_overflow"),
    "ranges": _example("inspect_ranges"),
    "recipes": _suite("compiled"),
    "programs": _suite("programs"),
    "targets": _suite("targets"),
    "families": _suite("families"),
    "gpu": _suite("gpu"),
    "wire": _suite("wire"),
    "float8": _module("float8_training"),
    "small_states": _module("small_states"),
    "published": Source("results/benchmarks/public_models", "make public-models"),
    "rules": Source("results/planner_rules.json", "python benchmarks/planner_rules.py"),
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
