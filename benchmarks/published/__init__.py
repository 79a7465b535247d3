"""Models that nobody here wrote, called as their users call them: one file a source, one row each.

A source's file has `ROWS`; it is imported when one of its rows is asked for, since each source
brings packages of its own. Every model is tiny and has random parameters: nothing is downloaded.
"""

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Model:
    """A model with its parameters, a batch, and a way to train it; no dropout, so that runs agree.

    Attributes:
      apply: the function that users call, such as `model.__call__` or `module.apply`.
      call: `(apply, params, batch) -> output` calls it as its users do.
      score: `(output, batch) -> loss`.
      params: float32 leaves; the gradient is with respect to them.
      batch: arrays.
    """

    apply: Callable[..., Any]
    call: Callable[[Callable[..., Any], Any, Any], Any]
    score: Callable[[Any, Any], Any]
    params: Any
    batch: Any

    def loss(self, params: Any, batch: Any) -> Any:
        return self.score(self.call(self.apply, params, batch), batch)


@dataclasses.dataclass(frozen=True)
class Row:
    """A published model.

    Attributes:
      name: as in `--only`.
      title: as in the table.
      make: returns the model; where `by_hand`, it takes a dtype for the model's own option, and
        the parameters of other dtypes than float32 are not used.
      by_hand: whether the model has an option that makes it compute in half.
      adapter: `(apply, policy) -> apply` through an adapter of ours; None where none is for it.
    """

    name: str
    title: str
    make: Callable[..., Model]
    by_hand: bool = False
    adapter: Callable[[Callable[..., Any], str], Callable[..., Any]] | None = None


# Module, title in the table, and the distributions whose versions the table names.
SOURCES = {
    "hugging_face": ("Hugging Face transformers", ("transformers", "flax")),
    "stable_diffusion": ("Hugging Face diffusers", ("diffusers", "flax")),
    "keras_models": ("Keras", ("keras",)),
    "graphs": ("Graph networks", ("jraph", "e3nn-jax", "dm-haiku")),
    "haiku_models": ("Haiku", ("dm-haiku",)),
    "equations": ("Diffrax", ("diffrax", "equinox")),
}


def rows_of(source: str) -> tuple[Row, ...]:
    return importlib.import_module(f"benchmarks.published.{source}").ROWS


def sources() -> dict[str, str]:
    """Returns the source of each model, by name, of the sources that can be imported here."""
    found = {}
    for source in SOURCES:
        try:
            found |= {row.name: source for row in rows_of(source)}
        except ImportError as error:
            print(f"Without {SOURCES[source][0]}: {error}")
    return found


def find(source: str, name: str) -> Row:
    return next(row for row in rows_of(source) if row.name == name)
