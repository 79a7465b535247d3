"""Writes `mistakes.md` from `testbed/mistakes.py`: `python -m docs.mistakes`, after a change."""

import pathlib

import jmp
from testbed.mistakes import MISTAKES, names

PAGE = pathlib.Path(__file__).with_suffix(".md")

# Not all in the page: some depend on the version of JAX.
_ALL_DTYPES = ", ".join(name for names in jmp.dtype_to_names.values() for name in names)

INTRODUCTION = """# Errors and warnings

1. Search this page for the first words of your message, without the names and shapes in it.
2. Do what its last sentence says: each message says what you passed, what was expected, and what
   to write instead.
3. If you caught the error, you can continue: it is raised before anything changes. The parameters,
   the optimizer's state and the loss scale are as they were.

A wrong kind is a `TypeError`, a wrong value or a wrong order a `ValueError`. If a message is
missing here, or does not say what to write, that is a bug. Report it with what `python -m jmp`
prints. Without a message, but with a wrong result, a slow step or too little memory: \
[troubleshooting.md](troubleshooting.md).

## Warnings

| the warning | what to do |
|---|---|
| `jmp.UnscaledLossWarning` | The model computes in float16 without a loss scale. Make the \
optimizer by `transforms.mixed_precision(tx, policy)` with the policy of the model. If no scale \
is wanted: `transforms.with_loss_scale(tx, jmp.StaticLossScale(1.0))`. |
| `jmp.UnusedRuleWarning` | A rule matched nothing. Compare its spelling with the paths in the \
message, or with those that `print(diagnostics.precision_report(loss_fn, policy)(*args))` shows; \
put special rules before general ones: the first that matches counts. Haiku's `~` may be left out. |
| "... of `hk.mixed_precision.set_policy` too" | Modules have a policy from Haiku in addition to \
that of `autocast`. Remove the lines of `set_policy`, or call \
`hk.mixed_precision.clear_policy(hk.Linear)` before. |
| `jmp.NoHalfProductWarning` | No product is half. The message counts the reasons: remove \
`precision="highest"`, casts to float32 in front of products, or a rule that is too general. |
| `jmp.HalfReductionWarning` | With "r=f32" the gradients of some products stay half between \
devices: of convolutions, and in custom derivatives. The message counts them. Keep them in \
float32 by a rule; or ignore it: if a sum overflows, loss scaling skips the step. |
| `jmp.Float16OnTpuWarning` | A TPU has no matrix unit for float16. Use "mixed_bfloat16" there, \
without a loss scale; or "p=f32,c=half,o=f32", which chooses by the device. |

In tests turn them into errors: `warnings.simplefilter("error", jmp.UnusedRuleWarning)`.

## The errors

Each line of code raises the error and the message next to it. A test runs every line and compares
this page. The lines use these names:

| name | what it is |
|---|---|
| `linen`, `nnx_adapter`, `equinox`, `haiku` | the modules of `jmp.adapters` |
| `F16` | "mixed_float16" |
| `loss_fn`, `pair_fn` | functions of `params` and `x` that return a scalar, and a scalar with \
an auxiliary output |
| `model_loss`, `model_pair` | the same of a model |
| `scale`, `tx`, `opt_state`, `chain_state` | a `DynamicLossScale`, an optimizer with it, its \
state alone and in a chain |
| `adam`, `masters_tx` | an optimizer without a loss scale, and one with float32 masters |
| `state`, `flax_state`, `optimizer` | a `linen.TrainState`, Flax's own `TrainState`, an \
`nnx.Optimizer` |
| `linen_model`, `nnx_model`, `eqx_model`, `eqx_mlp`, `network` | models of Flax linen, Flax nnx, \
Equinox (one of an array, one with functions in it) and Haiku |
| `many`, `long_text` | a dictionary of a thousand arrays, a megabyte of text |
| `report` | what `diagnostics.range_report` returned |
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
        parts += [
            f"### {title}\n",
            "| the mistake | the error | the message |\n|---|---|---|",
        ]
        for row in rows:
            words = message_of(row.code).replace(
                _ALL_DTYPES, "bf16, bfloat16, f16, float16, ..."
            )
            words = (
                words.replace("|", "\\|").replace("*", "\\*").replace("__", "\\_\\_")
            )
            words = words.replace("\n", " ")
            parts.append(f"| `{row.code}` | {row.error.__name__} | {words} |")
        parts.append("")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
