"""What the parts of the report share: titles of recipes, tables, sums, what did not run."""

from collections.abc import Iterable, Iterator
from typing import Any

from tabulate import tabulate

from benchmarks.recipes import RECIPES
from benchmarks.run import CONTROL

TITLES = {row.name: row.title for row in RECIPES} | {
    CONTROL: "by hand, a second process (A/A control)",
    "torch-eager": "PyTorch AMP, eager",
    "torch-compile": "PyTorch AMP, torch.compile",
}


def table(headers: list[str], rows: list[list[Any]]) -> str:
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True) + "\n"


def found_of(results: dict[str, Any], rows: Iterable[Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yields each row that has results, with them."""
    return ((row, found) for row in rows if (found := results["workloads"].get(row.name)))


def section(found: dict[str, Any], headers: list[str], rows: list[list[Any]]) -> str:
    """Returns the table of one workload below its title, and what did not run."""
    return f"### {found['title']}\n\n{table(headers, rows)}{failures(found['recipes'])}\n"


def total(counted: Any) -> float:
    """Returns a figure, or the sum of its parts."""
    return sum(counted.values()) if isinstance(counted, dict) else counted


def versions_of(machine: dict[str, Any]) -> str:
    names = {"python": "Python", "jax": "JAX", "jaxlib": "jaxlib", "flax": "Flax", "optax": "Optax"}
    return ", ".join(f"{title} {machine[name]}" for name, title in names.items())


def failures(recipes: dict[str, Any]) -> str:
    """Returns a line for every recipe that did not run, with its reason."""
    lines = [
        f"- {TITLES.get(name, name)}: not run: {found['error']}"
        for name, found in recipes.items()
        if "error" in found
    ]
    return "\n" + "\n".join(lines) + "\n" if lines else ""
