"""Rows of a table in half whose gradient, a sum over repeated rows, adds up in float32."""

from collections.abc import Sequence
from typing import Any

import jax

from jmp import _jax_compat
from jmp.autocasting._casts import cast
from jmp.autocasting._registry import Params
from jmp.dtypes import FLOAT32


def look_up(gather: Any, operands: Sequence[Any], params: Params) -> Any:
    """Binds a gather of a half table.

    Were the table cast to float32 for it, as elsewhere, devices would send each other that.
    """

    def rows_of(table: Any, indices: Any) -> Any:
        (rows,) = _jax_compat.bind(gather, [table, indices], params)
        return rows

    lookup = jax.custom_jvp(rows_of)

    def derivative(primals: Any, tangents: Any) -> Any:
        (table, indices), (change, _) = primals, tangents
        return lookup(table, indices), cast(rows_of(cast(change, FLOAT32), indices), table.dtype)

    lookup.defjvp(derivative)
    return lookup(*operands)
