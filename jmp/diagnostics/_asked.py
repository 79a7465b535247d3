"""The function that a diagnostic is asked about, and its arguments.

Flax nnx and Equinox open no name scopes for their modules. Here modules among the arguments open
scopes with their paths.
"""

import contextlib
import importlib
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jmp import adapters
from jmp._messages import check_function, described, framework_of, listed
from jmp.autocasting import NoHalfProductWarning
from jmp.autocasting._autocast import AllOptions, Program, make_program, runs_late
from jmp.policy import Policy, get_policy
from jmp.rules import UnusedRuleWarning


def asked_function(
    call: str,
    fun: Callable[..., Any],
    early: tuple[Any, ...],
    policy: object = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Returns the function that is asked about, as a function of what `split_arguments` returns.

    It works on copies of nnx modules, also if `fun` is one or a method of one, so that the caller's
    modules stay as they are. Methods of nnx modules, and of Equinox modules among the arguments,
    open scopes with the paths of the modules. `rules=` of `autocast` may name these paths.

    Args:
      call: the right call, for the error; it begins with the name of the diagnostic.
      early: further positional arguments, which belong in the second call.
      policy: text or a `Policy`; None if it was left out.
      options: options of `autocast`, which need a policy.

    Raises: TypeError if `fun` is no function, if its arguments came in the first call, for an
      option that `autocast` does not have, or for options without a policy.

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
    if unknown := sorted({*(options or ())} - AllOptions.__optional_keys__):
        raise TypeError(
            f"{caller} got {listed(unknown)}, no option of its own or of autocast; expected the "
            f"function's arguments in a call of their own: {call}."
        )
    if options and policy is None:
        raise TypeError(
            f"{caller} got {listed(sorted(options))} without a policy; expected one too: "
            f"{caller}(fun, 'mixed_float16', ...), because these are options of autocast."
        )
    if framework_of(fun) not in (None, "flax.nnx") or runs_late(fun):
        return fun
    if "flax.nnx" in sys.modules:  # else there is no module of it
        fun = _nnx().of_split_modules(fun)
    return adapters.equinox.in_scopes(fun) if "equinox" in sys.modules else fun


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
def without_warnings() -> Iterator[None]:
    """Hides autocast's warnings of rules and products, because a report says the same."""
    with warnings.catch_warnings():
        for told in (UnusedRuleWarning, NoHalfProductWarning):
            warnings.simplefilter("ignore", told)
        yield


def split_arguments(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns arguments with their nnx modules taken apart, as `asked_function` takes them."""
    return _nnx().split_modules((args, kwargs)) if "flax.nnx" in sys.modules else (args, kwargs)


def _nnx() -> Any:
    return importlib.import_module("jmp.adapters._nnx_modules")
