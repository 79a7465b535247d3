"""Parts of a package that are loaded when they are touched, not when the package is (PEP 562)."""

import importlib
import sys
from collections.abc import Callable, Mapping
from types import ModuleType


def loaded_when_touched(
    package: str, parts: Mapping[str, str]
) -> tuple[Callable[[str], ModuleType], Callable[[], list[str]]]:
    """Returns a package's `__getattr__` and `__dir__`.

    Args:
      package: its name, such as "jmp.adapters".
      parts: its modules by name, each with the extra of jmp that installs what it needs, or "".

    The `__getattr__` raises ModuleNotFoundError, with the extra to install, where a part needs what
    is not installed, and AttributeError for a name that is no part.
    """

    def load(name: str) -> ModuleType:
        if name not in parts:
            raise AttributeError(
                f"module {package!r} has no attribute {name!r}",
                name=name,
                obj=sys.modules[package],
            )
        try:
            return importlib.import_module(f"{package}.{name}")
        except ModuleNotFoundError as error:
            missing = (error.name or "").partition(".")[0]
            if missing in ("", "jmp"):  # not a matter of what is installed
                raise
            extra = parts[name]
            way = f"jmp with its extra {extra!r}: pip install '.[{extra}]' in the clone of jmp"
            raise ModuleNotFoundError(
                f"{package}.{name} needs {missing}, which is not installed. Install "
                f"{way if extra else f'it: pip install {missing}'}.",
                name=error.name,
            ) from error

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *parts})

    return load, names
