"""Parts of a package that are loaded at their first use, not with the package (PEP 562)."""

import importlib
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from types import ModuleType

# The extras of jmp; each installs the package of its name.
EXTRAS = frozenset({"flax", "equinox", "haiku"})


def loaded_when_touched(
    package: str, parts: Mapping[str, str]
) -> tuple[Callable[[str], ModuleType], Callable[[], list[str]]]:
    """Returns a package's `__getattr__` and `__dir__`.

    Args:
      package: its name, such as "jmp.adapters".
      parts: its modules by name, each with the package beside jax that it needs, or "".

    The `__getattr__` raises ModuleNotFoundError, which names the extra to install, if a part needs
    a package that is not installed, and AttributeError for a name that is no part. The `__dir__`
    lists the parts that can be loaded: `help` and completion touch all that is listed.
    """

    def load(name: str) -> ModuleType:
        if name not in parts:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        try:
            return importlib.import_module(f"{package}.{name}")
        except ModuleNotFoundError as error:
            missing = (error.name or "").partition(".")[0]
            if missing in ("", "jmp"):  # not a matter of what is installed
                raise
            way = f"it: pip install {missing}"
            if missing in EXTRAS:
                way = f"jmp with its extra '{missing}': pip install '.[{missing}]' in its clone"
            raise ModuleNotFoundError(
                f"{package}.{name} needs {missing}, which is not installed. Install {way}.",
                name=error.name,
            ) from error

    def names() -> list[str]:
        # A package is looked for, and not imported.
        can_load = [name for name, needs in parts.items() if not needs or find_spec(needs)]
        return sorted({*vars(sys.modules[package]), *can_load})

    return load, names
