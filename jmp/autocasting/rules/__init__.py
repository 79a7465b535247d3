"""The op table's rows, one file per category; importing this package fills the registry.

Rules with a parameter that says the dtype of the result are registered where they stand.
"""

from jmp.autocasting._registry import Category, register_rule
from jmp.autocasting.rules import low
from jmp.autocasting.rules.as_written import AS_WRITTEN
from jmp.autocasting.rules.follow import FOLLOW
from jmp.autocasting.rules.full import FULL
from jmp.autocasting.rules.widest import WIDEST

__all__ = ["low"]

ROWS = {
    Category.FULL: FULL,
    Category.WIDEST: WIDEST,
    Category.FOLLOW: FOLLOW,
    Category.AS_WRITTEN: AS_WRITTEN,
}

for category, rows in ROWS.items():
    for primitives, (why, traits) in rows.items():
        register_rule(primitives.split(), category, why, traits)
