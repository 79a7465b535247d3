"""The kinds of nodes that are levels of their own, by the names of their primitives."""

from typing import Any

from jmp.autocasting._custom_derivatives import CustomJvp, CustomVjp
from jmp.autocasting._loops import Cond, Scan, While
from jmp.autocasting._nesting import Jit, Remat, ShardMap

KINDS: dict[str, Any] = {
    "jit": Jit,
    "pjit": Jit,
    "remat": Remat,
    "remat2": Remat,
    "checkpoint": Remat,
    "shard_map": ShardMap,
    "scan": Scan,
    "while": While,
    "cond": Cond,
    "custom_jvp_call": CustomJvp,
    "custom_vjp_call": CustomVjp,
}
