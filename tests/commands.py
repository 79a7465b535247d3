"""Which tests belong to `make test` and which to `make test-all` only; `conftest.py` obeys it."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def in_full(cases: Iterable[Any], *, but: Sequence[Any] = (), first: int = 0) -> list[Any]:
    """Returns cases of `parametrize`, of which `make test` runs a few.

    Args:
      cases: values, or tuples of them.
      but: those that `make test` runs: cases, or names of cases that have one.
      first: how many from the front it runs too.
    """
    found = []
    for place, case in enumerate(cases):
        values = case if isinstance(case, tuple) else (case,)
        named = {getattr(value, "name", value) for value in values if _is_plain(value)}
        is_core = place < first or bool(named.intersection(but))
        found.append(case if is_core else pytest.param(*values, marks=pytest.mark.full))
    return found


def _is_plain(value: Any) -> bool:
    return isinstance(value, str) or hasattr(value, "name")
