"""What a diagnostic was asked about: a function, and its arguments in a call of their own.

Losses of nnx and Equinox modules, whose frameworks open no name scopes by path.
"""

import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from jmp import _jax_compat
from jmp._array_calls import ArrayCall
from jmp._messages import check_function, described, framework_of
from jmp.adapters._module_policies import ModuleScopes
from jmp.autocasting import autocast
from jmp.autocasting._program import runs_late
from jmp.dtypes import is_castable
from jmp.policy import Policy
from jmp.trees import PyTree, stands_for_numbers


def check_asked(caller: str, call: str, fun: object, early: tuple[Any, ...], policy: Any) -> None:
    """Raises TypeError if `fun` is no function, or its arguments came in the first call.

    Args:
      caller: the diagnostic.
      call: how it is called, for the error.
      early: positional arguments behind those that it has.
      policy: text or a `Policy`; None where it was left out.

    >>> check_asked("compare", "compare(fun, policy)(*args)", len, (), "mixed_float16")
    """
    check_function(fun, caller, call)
    is_policy = policy is None or isinstance(policy, (str, Policy))
    if early or not is_policy:
        got = early[0] if is_policy else policy
        raise TypeError(
            f"{caller} got {described(got)} too early; expected the function's arguments in a call "
            f"of their own: {call}."
        )


def check_numbers(arrays: Sequence[Any], caller: str, expected: str) -> None:
    """Raises TypeError for an array without numbers: one that is traced, or its type alone."""
    for array in arrays:
        if isinstance(array, jax.ShapeDtypeStruct) or not _jax_compat.is_concrete(array):
            raise TypeError(
                f"{caller} got {described(array)}, which holds no numbers; expected {expected}."
            )


class Scoped(NamedTuple):
    """A loss whose scopes can be asked about."""

    loss: Callable[..., Any]  # in which modules among the arguments open scopes
    autocast: Callable[..., Any]  # what takes the rules that are found
    framework: str | None  # whose modules are named by their paths; None: name scopes are named


def apart(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns arguments with their nnx modules taken apart, as what `of_modules` returns asks."""
    found: tuple[tuple[Any, ...], dict[str, Any]] = (args, kwargs)
    return _nnx().split_modules(found) if _has_nnx() else found


def parameters_of(tree: PyTree) -> PyTree:
    """Returns what an optimizer is given of a tree of arguments.

    Without what is not differentiated in nnx modules, what is no floating array in Equinox modules,
    and what is no array elsewhere.
    """
    if _has_nnx():
        tree = jax.tree.map(lambda x: x.parameters if _is_apart(x) else x, tree, is_leaf=_is_apart)

    def trained(part: Any) -> Any:
        if not _is_equinox(part):
            return part if stands_for_numbers(part) else None
        return jax.tree.map(
            lambda x: x if stands_for_numbers(x) and is_castable(x.dtype) else None, part
        )

    return jax.tree.map(trained, tree, is_leaf=_is_equinox)


def of_modules(fun: Callable[..., Any], *, in_scopes: bool = True) -> Callable[..., Any]:
    """Returns `fun` as a function of arguments that `apart` returned.

    It works on copies of nnx modules, also where `fun` is one or a method of one: what it changes
    in them is lost, and the caller's stay as they are.

    Args:
      fun: what a diagnostic is asked about.
      in_scopes: whether the modules' methods open scopes that name their paths.
    """
    is_other = framework_of(fun) not in (None, "flax.nnx") or runs_late(fun)
    return fun if is_other or not _has_nnx() else _nnx().of_split_modules(fun, in_scopes=in_scopes)


def in_paths(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Returns what `of_modules` does; Equinox modules among the arguments open scopes as well.

    As in `equinox.autocast`: half arrays of such modules count as float32 numbers.
    """
    fun = of_modules(fun)
    is_asked = "equinox" in sys.modules and framework_of(fun) is None
    if not is_asked or runs_late(fun):
        return fun

    @functools.wraps(fun)
    def in_scopes(*args: Any, **kwargs: Any) -> Any:
        given = (args, kwargs)
        if not any(map(_is_equinox, jax.tree.leaves(given, is_leaf=_is_equinox))):
            return fun(*args, **kwargs)
        leaves, structure = jax.tree.flatten(given)  # a State may be used once
        try:
            args, kwargs = jax.tree.unflatten(structure, leaves)
            return _lifted(fun)(*args, **kwargs)
        except (TypeError, ValueError):  # parts of modules, see `scoped`
            args, kwargs = jax.tree.unflatten(structure, leaves)
            return fun(*args, **kwargs)

    return in_scopes


def _lifted(fun: Callable[..., Any]) -> Any:
    return importlib.import_module("jmp.adapters.equinox").with_marked_modules(fun, ModuleScopes())


def _has_nnx() -> bool:
    return "flax.nnx" in sys.modules  # else there is no module of it


def _nnx() -> Any:
    return importlib.import_module("jmp.adapters._nnx_modules")


def scoped(loss: Callable[..., Any], args: Sequence[Any]) -> Scoped:
    """Returns a loss with scopes for the nnx or Equinox modules among its arguments, if any.

    Where the loss takes parts of Equinox modules alone, it is returned as it is.

    Args:
      loss: a function of modules.
      args: what `apart` returned of its arguments.
    """
    if _has_nnx() and any(map(_is_apart, jax.tree.leaves(args, is_leaf=_is_apart))):
        adapter = importlib.import_module("jmp.adapters.nnx")

        def lower(fun: Any, *policy: Any, **options: Any) -> Any:
            return of_modules(adapter.autocast(fun, *policy, **options), in_scopes=False)

        return Scoped(of_modules(loss), lower, "flax.nnx")
    if not any(map(_is_equinox, jax.tree.leaves(args, is_leaf=_is_equinox))):
        return Scoped(loss, autocast, None)
    adapter = importlib.import_module("jmp.adapters.equinox")
    lifted = functools.wraps(loss)(_lifted(loss))
    call = ArrayCall(lifted, args)
    try:
        jax.eval_shape(call, *call.arrays)
    except (TypeError, ValueError):
        # A part of a model, as `eqx.partition` gives it, is combined inside with one that has no
        # scopes, which Equinox refuses. An error of the loss itself comes again.
        return Scoped(loss, autocast, None)
    return Scoped(lifted, adapter.autocast, "equinox")


def _is_equinox(value: Any) -> bool:
    return framework_of(value) == "equinox"


def _is_apart(value: Any) -> bool:
    return isinstance(value, _nnx().SplitModule)
