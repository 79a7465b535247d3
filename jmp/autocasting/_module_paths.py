"""Paths of modules in name scopes: what diagnostics, and rules in them, call a place by.

Frameworks that open no scopes by path (nnx, Equinox) are made to, one for each call of a module.
"""

from collections.abc import Sequence

MODULE = "jmp.module:"


def joined_path(names: Sequence[str], outer: str = "") -> str:
    """Returns name scopes joined by slashes, without our own; a module's path begins anew.

    Args:
      names: scopes, outermost first.
      outer: the path around them.

    >>> joined_path(["jmp.module:", "jmp.module:block/mlp", "gate"], "block")
    'block/mlp/gate'
    >>> joined_path(["gate", "jmp.autocast"], "block")
    'block/gate'
    """
    path = [outer] if outer else []
    for name in names:
        if name.startswith(MODULE):
            path = [name.removeprefix(MODULE)]
        elif not name.startswith("jmp."):
            path.append(name)
    return "/".join(filter(None, path))


def module_paths(names: Sequence[str]) -> list[str]:
    """Returns the paths of the modules among name scopes, the innermost first.

    >>> module_paths(["jmp.module:", "jmp.module:block/mlp", "eqx.nn.Linear"])
    ['block/mlp', '']
    """
    return [name.removeprefix(MODULE) for name in reversed(names) if name.startswith(MODULE)]


def modules_path(names: Sequence[str]) -> str | None:
    """Returns the path of the innermost module among name scopes; None if there is none.

    >>> modules_path(["jmp.module:", "jmp.module:block/mlp", "eqx.nn.Linear"])
    'block/mlp'
    """
    return next(iter(module_paths(names)), None)
