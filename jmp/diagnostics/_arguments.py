"""Arguments of diagnostics: the function that is asked about, and what it is called with.

Flax nnx and Equinox open no name scopes for their modules. Here modules among the arguments open
scopes with their paths.
"""

import contextlib
import importlib
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from jmp import _jax_compat, adapters
from jmp._messages import check_function, described, framework_of, listed
from jmp.autocasting import NoHalfProductWarning, autocast
from jmp.autocasting._autocast import Program, make_program, runs_late
from jmp.dtypes import is_castable
from jmp.policy import Policy, get_policy
from jmp.rules import UnusedRuleWarning
from jmp.trees import PyTree, stands_for_numbers


def asked_function(
    call: str, fun: Callable[..., Any], early: tuple[Any, ...], policy: object = None
) -> Callable[..., Any]:
    """Returns the function that is asked about, as a function of what `split_arguments` returns.

    It works on copies of nnx modules, also if `fun` is one or a method of one, so that the caller's
    modules stay as they are. Methods of nnx modules, and of Equinox modules among the arguments,
    open scopes with the paths of the modules. `rules=` of `autocast` may name these paths.

    Args:
      call: the right call, for the error; it begins with the name of the diagnostic.
      early: further positional arguments, which belong in the second call.
      policy: text or a `Policy`; None if it was left out.

    Raises: TypeError if `fun` is no function, or if its arguments came in the first call.

    >>> asked_function("compare(fun, policy)(*args)", len, (), "mixed_float16")("ab")
    2
    """
    caller = call.partition("(")[0]
    check_function(fun, caller, call)
    is_policy = policy is None or isinstance(policy, (str, Policy))
    if early or not is_policy:
        got = early[0] if is_policy else policy
        raise TypeError(
            f"{caller} got {described(got)} too early; expected the function's arguments in a call "
            f"of their own: {call}."
        )
    if framework_of(fun) not in (None, "flax.nnx") or runs_late(fun):
        return fun
    if "flax.nnx" in sys.modules:  # else there is no module of it
        fun = _nnx().of_split_modules(fun, in_scopes=True)
    return adapters.equinox.in_scopes(fun) if "equinox" in sys.modules else fun


def autocast_if_asked(
    caller: str, fun: Callable[..., Any], policy: str | Policy | None, options: Mapping[str, Any]
) -> Callable[..., Any]:
    """Returns `fun` under autocast with these options, or `fun` itself without a policy.

    Raises: TypeError for options without a policy.
    """
    if policy is not None:
        return autocast(fun, policy, **options)
    if options:
        raise TypeError(
            f"{caller} got {listed(sorted(options))} without a policy; expected one too: "
            f"{caller}(fun, 'mixed_float16', ...), because these are options of autocast."
        )
    return fun


def half_program(
    caller: str, fun: Callable[..., Any], policy: str | Policy, options: Mapping[str, Any]
) -> Program:
    """Returns what autocast makes of `fun`; raises ValueError for a policy without half."""
    program = make_program(fun, policy, **options)
    if program is None:
        raise ValueError(
            f"{caller} got the policy {get_policy(policy)}, which computes in float32: nothing is "
            "in half. Ask with 'mixed_float16' or 'mixed_bfloat16'."
        )
    return program


@contextlib.contextmanager
def without_warnings_of_plans() -> Iterator[None]:
    """Hides autocast's warnings of rules and products, because a report says the same."""
    with warnings.catch_warnings():
        for told in (UnusedRuleWarning, NoHalfProductWarning):
            warnings.simplefilter("ignore", told)
        yield


def check_numbers(arrays: Sequence[Any], caller: str, expected: str) -> None:
    """Raises TypeError for an array without numbers: a traced one, or a `jax.ShapeDtypeStruct`."""
    for array in arrays:
        if isinstance(array, jax.ShapeDtypeStruct) or not _jax_compat.is_concrete(array):
            raise TypeError(
                f"{caller} got {described(array)}, which holds no numbers; expected {expected}."
            )


def split_arguments(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns arguments with their nnx modules taken apart, as `asked_function` takes them."""
    return _nnx().split_modules((args, kwargs)) if "flax.nnx" in sys.modules else (args, kwargs)


def trained_parameters(tree: PyTree) -> PyTree:
    """Returns the part of a tree of arguments that an optimizer is given.

    It leaves out the Variables of nnx modules that are no parameters, leaves of Equinox modules
    that are no floating arrays, and all other leaves that are no arrays.
    """

    def trained(part: Any) -> Any:
        if _is_split_module(part):
            return trained_parameters(part.parameters)
        if _is_equinox(part):
            floating = lambda x: x if stands_for_numbers(x) and is_castable(x.dtype) else None
            return jax.tree.map(floating, part)
        return part if stands_for_numbers(part) else None

    return jax.tree.map(trained, tree, is_leaf=lambda x: _is_split_module(x) or _is_equinox(x))


def _nnx() -> Any:
    return importlib.import_module("jmp.adapters._nnx_modules")


def _is_equinox(value: Any) -> bool:
    return framework_of(value) == "equinox"


def _is_split_module(value: Any) -> bool:
    return "flax.nnx" in sys.modules and isinstance(value, _nnx().SplitModule)
