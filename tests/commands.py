"""Which tests belong to `make test`, and which to `make test-all` only; `conftest.py` obeys it.

And what becomes of those for which something is missing here.
"""

import os
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NoReturn

import pytest


def skip_or_fail(reason: str, variable: str) -> NoReturn:
    """Skips, or fails where the environment says that what is missing must be there."""
    if os.environ.get(variable) == "1":
        pytest.fail(f"{variable}=1, but {reason}")
    pytest.skip(reason)


Case = type(pytest.param())


def in_full(
    cases: Iterable[Any] | Mapping[str, Any],
    *,
    but: Collection[str] = (),
    first: int = 0,
    one_of: int | None = None,
) -> list[Any]:
    """Returns the cases of `parametrize`, of which `make test` runs a few.

    Args:
      cases: values, tuples of values or `pytest.param`; or a mapping from the id of each to it.
      but: those that `make test` runs, by their ids, names, or texts among their values.
      first: how many from the front it runs too.
      one_of: it also runs the first, and one of so many from there on.
    """
    ids = cases if isinstance(cases, Mapping) else None
    found = []
    for place, case in enumerate(cases):
        name, case = (case, cases[case]) if ids is not None else (None, case)
        values, marks, name = case if isinstance(case, Case) else (_values(case), (), name)
        names = [name, *(getattr(value, "name", value) for value in values)]
        is_core = place < first or any(isinstance(each, str) and each in but for each in names)
        is_core |= one_of is not None and place % one_of == 0
        marks = (*marks, *([] if is_core else [pytest.mark.full]))
        found.append(pytest.param(*values, marks=marks, id=name))
    return found


def _values(case: Any) -> tuple[Any, ...]:
    return case if type(case) is tuple else (case,)  # an optimizer is a named tuple
