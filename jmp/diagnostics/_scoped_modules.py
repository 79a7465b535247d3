"""Losses of nnx and Equinox modules, whose frameworks open no name scopes by path."""

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from jmp._calls import ArrayCall
from jmp._frameworks import framework_of
from jmp.adapters._module_scopes import ModuleScopes
from jmp.autocasting import autocast

# Where the lift of a framework stands, and its autocast.
ADAPTERS = {
    "flax.nnx": ("jmp.adapters._nnx_modules", "jmp.adapters.nnx"),
    "equinox": ("jmp.adapters.equinox", "jmp.adapters.equinox"),
}


class Scoped(NamedTuple):
    """A loss whose scopes can be asked about."""

    loss: Callable[..., Any]  # in which modules among the arguments open scopes
    autocast: Callable[..., Any]  # what takes the rules that are found
    framework: str | None  # whose modules are named by their paths; None: name scopes are named


def scoped(loss: Callable[..., Any], args: Sequence[Any]) -> Scoped:
    """Returns a loss with scopes for the nnx or Equinox modules among its arguments, if any.

    Where the loss takes parts of modules alone, it is returned as it is.
    """
    models = [x for x in jax.tree.leaves(args, is_leaf=_is_model) if _is_model(x)]
    framework = framework_of(models[0]) if models else None
    if framework is None:
        return Scoped(loss, autocast, None)
    lifting, adapter = map(importlib.import_module, ADAPTERS[framework])
    lifted = lifting.lift(loss, ModuleScopes())

    @functools.wraps(loss)
    def on_copies(*args: Any) -> Any:
        # What the loss changes in an nnx module would be written back into the argument.
        return lifted(*jax.tree.map(lambda leaf: leaf, args))

    call = ArrayCall(on_copies, args)
    try:
        jax.eval_shape(call, *call.arrays)
    except (TypeError, ValueError):
        # A part of a model, as `eqx.partition` gives it, is combined inside with one that has no
        # scopes, which Equinox refuses. An error of the loss itself comes again.
        return Scoped(loss, autocast, None)
    return Scoped(on_copies, adapter.autocast, framework)


def _is_model(value: Any) -> bool:
    return framework_of(value) in ADAPTERS
