"""Lets small products be float8 too, so that programs which run quickly have some."""

import contextlib
from collections.abc import Iterator
from unittest import mock

from jmp.autocasting.float8 import _passes


@contextlib.contextmanager
def small_is_float8() -> Iterator[None]:
    """Counts small products as large: all that may be float8 is float8."""
    with mock.patch.multiple(_passes, SMALL_PRODUCT=1, THIN=1):
        yield
