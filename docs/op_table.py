"""Writes `op_table.md` from the registry: `python docs/op_table.py`, after a rule has changed."""

import pathlib

from jmp.autocasting import Category, all_rules

PAGE = pathlib.Path(__file__).with_suffix(".md")

INTRODUCTION = """# Op table

The tables say what `jmp.autocast` does with each primitive; a test compares this page with the
registry. [What autocast does](autocast.md) says how the planner uses it.
`register_rule` adds a primitive of your own; `low=`, `full=` and `follow=` change a category for
one call.

A rule has a category and traits. *fusible*: XLA fuses the primitive with its neighbours, so it may
be part of a float32 island. *expensive*: its derivative keeps float32 values, so an island with
one is recomputed. *sums backward*: it loses nothing in half, but its derivative is a sum, so it
runs in float32 between two casts. `jmp.autocasting.Rule` explains the other traits.
"""

CATEGORIES = {
    Category.LOW: "Low: operands and result in the compute dtype",
    Category.FULL: "Full: float32",
    Category.WIDEST: "Widest: half if an operand is half and none requires float32",
    Category.FOLLOW: "Follow: in the dtype of the operands",
    Category.AS_WRITTEN: "As written: in the dtypes it was traced with",
}


def page():
    """Returns the page's text."""
    parts = [INTRODUCTION]
    for category, title in CATEGORIES.items():
        parts.append(f"## {title}\n")
        parts.append("| primitives | why | traits |\n|---|---|---|")
        rows = {}
        for name, rule in all_rules().items():
            if rule.category is category and rule.owner.startswith("jmp."):
                flags = [
                    f
                    for f in ("fusible", "expensive", "sums_backward")
                    if getattr(rule, f)
                ]
                flags = [flag.replace("_", " ") for flag in flags]
                rows.setdefault((rule.reason, ", ".join(flags)), []).append(f"`{name}`")
        parts += [
            f"| {' '.join(names)} | {why} | {flags} |"
            for (why, flags), names in rows.items()
        ]
        parts.append("")
    parts.append("A primitive that is not listed runs as it was written.\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
