"""Half parameters and small states of optimizers: bytes, final losses, second moments."""

import functools
from typing import Any

from benchmarks._tables import table
from benchmarks.pages.registry import figure, numbers

# The names of the file, and how pages write them.
WAYS = {
    "float32": "float32 parameters",
    "full": '`masters="full"`',
    "split": '`masters="split"`',
    "kahan": '`masters="kahan"`',
    "stochastic": '`masters="stochastic"`',
    "split, bfloat16 state": "split, state in bfloat16",
    "stochastic, int8 state": "stochastic, state in int8",
    "stochastic, float8_e4m3fn state": "stochastic, state in float8_e4m3fn",
    "none": '`masters="none"`',
    "optax": "plain optax, parameters and state in bfloat16",
}
SHORT = {way: way.replace(", ", "-").removesuffix(" state").replace("_", "-") for way in WAYS}


def _difference(row: Any) -> str:
    """Returns how final losses differ from those in float32, in thousandths of a nat."""
    return f"{1000 * row['difference']:+.1f} ± {1000 * row['difference_spread']:.1f}"


@figure("small_states/table")
def _(found: Any) -> str:
    rows = []
    for way, title in WAYS.items():
        counted, trained = found["bytes"]["ways"][way], found["text"]["ways"][way]
        rows.append([
            title,
            f"{counted['held']:.2f}",
            f"{counted['moved']:.2f}",
            f"{trained['final_loss']:.4f} ± {trained['spread']:.4f}",
            "" if way == "float32" else _difference(trained),
        ])  # fmt: skip
    headers = ["way", "bytes held", "bytes moved", "final loss", "difference, 0.001 nats"]
    return table(headers, rows)


@figure("small_states/moments")
def _(found: Any) -> str:
    ways = found["moments"]["ways"]
    value = lambda way: f"{ways[way]['step']:.3f} ± {ways[way]['spread']:.3f}"
    rows = [["optax's own, with bfloat16 parameters", value("optax, bfloat16 parameters"), ""]]
    for kind in ("bfloat16", "float16", "float8_e4m3fn", "int8"):
        rows.append(
            [kind, *(value(f"{kind}, {rounding}") for rounding in ("nearest", "stochastic"))]
        )
    return table(["stored as", "to the nearest", "stochastically"], rows)


numbers({
    "small_states/text-steps": "{[text][steps]:,}",
    "small_states/text-parameters": "{[text][parameters]:,}",
    "small_states/seeds": "{[text][seeds]}",
    "small_states/counted-tensors": "{[bytes][tensors]}",
})  # fmt: skip


@figure("small_states/counted-parameters")
def _(found: Any) -> str:
    return f"{found['bytes']['parameters'] / 1e6:.1f} million"


def _of_language_model(found: Any, way: str) -> str:
    """Returns the final loss less that in float32, in nats."""
    row = found["text"]["ways"][way]
    return f"{row['difference']:+.4f} ± {row['difference_spread']:.4f}"


def _bytes(found: Any, way: str, what: str) -> str:
    return f"{found['bytes']['ways'][way][what]:.2f}".removesuffix(".00")


for _way, _short in SHORT.items():
    figure(f"small_states/difference-{_short}")(functools.partial(_of_language_model, way=_way))
    for _what in ("held", "moved"):
        figure(f"small_states/{_what}-{_short}")(functools.partial(_bytes, way=_way, what=_what))
