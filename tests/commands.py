"""Which tests belong to `make test`, and which to `make test-all` only; `conftest.py` obeys it."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import pytest


def in_full(
    cases: Iterable[Any] | Mapping[str, Any], *, but: Collection[Any] = (), first: int = 0
) -> list[Any]:
    """Returns the cases of `parametrize`, of which `make test` runs a few.

    Args:
      cases: values or tuples of values; or a mapping from the id of each to it.
      but: ids, names or values of those that `make test` runs.
      first: how many from the front it runs too.
    """
    ids = list(cases) if isinstance(cases, Mapping) else None
    found = []
    for place, case in enumerate(cases.values() if isinstance(cases, Mapping) else cases):
        values = case if isinstance(case, tuple) else (case,)
        names = [getattr(value, "name", value) for value in values] + (ids or [])[place:][:1]
        is_core = place < first or any(isinstance(name, str) and name in but for name in names)
        marks = () if is_core else pytest.mark.full
        found.append(pytest.param(*values, marks=marks, id=ids[place] if ids else None))
    return found
