"""What a diagnostic was asked about: a function, and its arguments in a call of their own."""

from typing import Any

from jmp._calls import check_function
from jmp._describe import described
from jmp.policy import Policy


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
