"""Writes the op table of `reference/autocast.md` from the registry.

Run `python docs/op_table.py` after a rule has changed.
"""

import pathlib

from jmp.autocasting import Category, all_rules

PAGE = pathlib.Path(__file__).parent / "reference" / "autocast.md"

CATEGORIES = {
    Category.LOW: "Low: operands and result in the compute dtype",
    Category.FULL: "Full: float32",
    Category.WIDEST: "Widest: half if an operand is half and none requires float32",
    Category.FOLLOW: "Follow: in the dtype of the operands",
    Category.AS_WRITTEN: "As written: in the dtypes it was traced with",
}
TRAITS = ("fusible", "expensive", "sums_backward")


def page():
    """Returns the page's text: all that stands before the first table, and the tables."""
    introduction, _, _ = PAGE.read_text().partition("\n### Low: ")
    parts = [introduction]
    for category, title in CATEGORIES.items():
        parts.append(f"### {title}\n")
        parts.append("| primitives | why | traits |\n|---|---|---|")
        rows = {}
        for name, rule in all_rules().items():
            if rule.category is category and rule.owner.startswith("jmp."):
                flags = [t.replace("_", " ") for t in TRAITS if getattr(rule, t)]
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
