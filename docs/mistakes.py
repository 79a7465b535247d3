"""Writes `mistakes.md` from `tests/mistakes.py`: `python -m docs.mistakes`, after a change."""

import pathlib

import jmp
from tests.mistakes import MISTAKES, names

PAGE = pathlib.Path(__file__).with_suffix(".md")

# Not all in the page: some depend on the version of JAX.
_ALL_DTYPES = ", ".join(name for names in jmp.dtype_to_names.values() for name in names)

INTRODUCTION = """# Mistakes, and what is said of them

Lines that are refused, each with its message. A wrong kind is a `TypeError`, a wrong value or order
a `ValueError`; nothing has changed by then. A test makes each of them and compares this page.

In these lines `linen`, `nnx_adapter`, `equinox` and `haiku` are the modules of `jmp.adapters`, and
`F16` is "mixed_float16". `loss_fn` takes `params` and `x` and gives a scalar, `pair_fn` the scalar
and something beside; `model_loss` and `model_pair` take a model instead. `scale` is a
`DynamicLossScale`, `tx` an optimizer with it, `adam` one without, `masters_tx` one with float32
masters; `opt_state` and `chain_state` are states of `tx`, alone and in a chain; `state` is a
`TrainState` of Flax, `optimizer` an `nnx.Optimizer`; `linen_model`, `nnx_model`, `eqx_model` and
`network` are models of Flax linen and nnx, Equinox and Haiku. `many` is a dictionary of a thousand
arrays, `long_text` a megabyte of text, `report` what `diagnostics.range_report` returned.
"""


def message(error: Exception) -> str:
    """Returns an error's message, without what JAX notes below it."""
    return str(error)


def message_of(code: str) -> str:
    """Returns the message of the error that a line of code raises."""
    try:
        eval(code, dict(names()))
    except (AssertionError, TypeError, ValueError) as error:
        return message(error)
    raise AssertionError(f"{code} raised nothing")


def page() -> str:
    """Returns the page's text."""
    parts = [INTRODUCTION]
    for title, rows in MISTAKES.items():
        parts += [f"## {title}\n", "| the mistake | | the message |\n|---|---|---|"]
        for row in rows:
            words = message_of(row.code).replace(_ALL_DTYPES, "bf16, bfloat16, f16, float16, ...")
            words = words.replace("|", "\\|").replace("\n", " ")
            parts.append(f"| `{row.code}` | {row.error.__name__} | {words} |")
        parts.append("")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
