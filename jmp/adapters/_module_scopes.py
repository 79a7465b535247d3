"""Name scopes for the modules of a framework that opens none: nnx, and Equinox by path.

`lift(fun, ModuleScopes())` of an adapter is `fun` itself, in which every method of every module
among the arguments runs in a scope that names the module's path. Diagnostics read it, and say in
`rules=` of that adapter what they found.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax

from jmp.adapters._module_policies import ModulePolicies
from jmp.autocasting._module_paths import MODULE


class ModuleScopes(ModulePolicies):
    """No policy at all: what it says of a module is its path. All of them are equal."""

    def __init__(self) -> None:
        super().__init__("float32", (), {})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModuleScopes)

    def __hash__(self) -> int:
        return hash(MODULE)

    @property
    def are_in_force(self) -> bool:
        """True: also what computes by rules of its own inside says where it stands."""
        return True

    def autocast(self, fun: Any, *, name_scopes: bool = False) -> Any:
        """Returns the function as it is."""
        return fun

    def named(self, module: object, path: str, classes: Sequence[type], root: str = "") -> Any:
        """Returns the path of the module."""
        return path

    def scope(self, named: Any) -> AbstractContextManager[None]:
        """Returns the context that the methods of the module at a path run in."""
        return jax.named_scope(f"{MODULE}{named or ''}")
