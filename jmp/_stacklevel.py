"""Which line a warning names: the user's."""

import sys
from types import FrameType

# Packages whose frames stand between a user's line and a warning.
_BETWEEN = {"jmp", "jax", "flax", "equinox", "haiku", "optax", "contextlib", "functools"}


def users_stacklevel() -> int:
    """Returns the `stacklevel` with which a warning of the calling function names the user's line.

    It is the innermost line outside of this package, JAX and the frameworks.

    >>> users_stacklevel() > 1  # this line is of jmp
    True
    """
    level = 1
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _BETWEEN:
            return level
        level, frame = level + 1, frame.f_back
    return 2
