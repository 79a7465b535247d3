"""What is decided of each value of a level: the one place where dtypes are written down."""

from collections.abc import Iterable, Set

import numpy as np

from jmp.autocasting._flow import Destination, Facts, Info
from jmp.autocasting._graph import Node, Value


class Storage:
    """The dtypes that values are stored in, as far as they are decided; before that, nominal ones.

    Attributes:
      facts: of the level.
      half: the compute dtype.
    """

    def __init__(self, facts: Facts, half: np.dtype) -> None:
        self.facts = facts
        self.half = half
        self._dtypes: dict[Value, np.dtype | None] = {}

    def store(self, values: Iterable[Value], dtypes: Iterable[np.dtype | None]) -> None:
        """Decides what values are stored in."""
        self._dtypes.update(zip(values, dtypes, strict=True))

    def dtype(self, value: Value) -> np.dtype | None:
        """Returns what a value is stored in; None for what has no dtype."""
        return self._dtypes.get(value, value.dtype)

    def is_half(self, value: Value) -> bool:
        """Returns whether a value is stored in the compute dtype."""
        return self.dtype(value) == self.half

    def info(self, value: Value) -> Info:
        """Returns what another level needs to know of a value."""
        return Info(self.dtype(value), value not in self.facts.dependent)

    def destination(self, value: Value) -> Destination:
        """Returns where a value goes."""
        return Destination(value in self.facts.feeds, value in self.facts.kept)

    def rounded_by_rule(self, value: Value) -> np.dtype | None:
        """Returns the dtype that a rule rounds a value to, where it leaves the rule's region."""
        node = value.producer
        if node is None or node.region.output_dtype is None or not value.is_float32:
            return None
        leaves = all(user.region != node.region for user in value.users)
        return self.half if leaves else None

    def leaves_half(self, value: Value, inside: Set[Node]) -> bool:
        """Returns whether a value leaves an island in half: where a product follows.

        Not if it reaches the float32 carry of a loop, nor if all that read it read float32.
        """
        readers = [user for user in value.users if user not in inside]
        read_wide = readers and all(user.reads_float32 for user in readers)
        return value in self.facts.feeds and value not in self.facts.kept and not read_wide

    def may_be_mask(self, value: Value) -> bool:
        """Returns whether a value may hold -1e9: it is known to, or is an input that is no bias."""
        if not value.is_float32 or self.half != np.float16:  # bfloat16 holds what float32 holds
            return False
        if value.constant is not None:
            return value.exceeds(self.half)
        is_input = value not in self.facts.dependent and not self.facts.is_bias(value)
        return value.is_hard or (is_input and not value.fits_half)
