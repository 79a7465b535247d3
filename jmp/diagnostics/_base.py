"""Functions that all diagnostics share: they take a function and its arguments, and print reports.

Flax nnx and Equinox open no name scopes for their modules. Here modules among the arguments open
scopes with their paths.
"""

import contextlib
import dataclasses
import importlib
import sys
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import jax

from jmp import _jax_compat, adapters
from jmp._messages import check_function, described, framework_of, listed
from jmp.autocasting import NoHalfProductWarning
from jmp.autocasting._autocast import AllOptions, Program, make_program, runs_late
from jmp.autocasting.float8 import E4M3
from jmp.dtypes import HALF_DTYPES
from jmp.policy import Policy, get_policy
from jmp.rules import UnusedRuleWarning

# Dtypes as reports name them: the half types, and what operands of float8 products are held in.
HALVES = tuple(map(str, HALF_DTYPES))
FLOAT8 = str(E4M3)
UNITS = ("B", "kB", "MB", "GB", "TB")

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
R = TypeVar("R", bound=Any)  # a dataclass


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


def _nnx() -> Any:
    return importlib.import_module("jmp.adapters._nnx_modules")


# Reports.


@dataclasses.dataclass(frozen=True)
class Report:
    """The result of a diagnostic: `print` shows it, `to_dict` gives the data.

    Attributes:
      computed: the properties that are data too.
    """

    computed: ClassVar[tuple[str, ...]] = ()

    def to_dict(self) -> dict[str, Any]:
        """Returns the data as dictionaries, lists, numbers and strings."""
        data = dataclasses.asdict(self) | {name: getattr(self, name) for name in self.computed}
        return {name: value for name, value in data.items() if not name.startswith("_")}


def totals(pairs: Iterable[tuple[K, int]]) -> dict[K, int]:
    """Returns the sum of the numbers of each key, the keys in the order in which they come.

    >>> totals([("float16", 2), ("float32", 4), ("float16", 2)])
    {'float16': 4, 'float32': 4}
    """
    found: dict[K, int] = {}
    for key, number in pairs:
        found[key] = found.get(key, 0) + number
    return found


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Returns the items of each key, the keys in the order in which they come.

    >>> grouped([1, 2, 3], lambda number: number % 2)
    {1: [1, 3], 0: [2]}
    """
    found: dict[K, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def added_up(rows: Iterable[R], *numbers: str) -> list[R]:
    """Returns one dataclass for those that differ only in some numbers, which are added up.

    >>> rows = [Report(), Report()]
    >>> added_up(rows) == rows[:1]
    True
    """

    def others(row: R) -> R:
        return dataclasses.replace(row, **dict.fromkeys(numbers, 0))

    def sums(some: list[R]) -> dict[str, int]:
        return {name: sum(getattr(row, name) for row in some) for name in numbers}

    groups = grouped(rows, others).values()
    return [dataclasses.replace(some[0], **sums(some)) for some in groups]


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns the rows under the names of their columns, as lines of text.

    >>> print(table(["name", "value"], [["loss", "0.25"]]))
      name   value
     ──────────────
      loss   0.25
    """
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    lines = ["  " + "   ".join(map(str.ljust, row, widths)).rstrip() for row in (columns, *rows)]
    lines.insert(1, " " + "─" * (sum(widths) + 3 * len(widths) - 1))
    return "\n".join(lines)


def first_rows(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], shown: int, data: str
) -> list[str]:
    """Returns the lines of a table of the first rows; `data` names the attribute that has all
    rows."""
    more = [f"and {len(rows) - shown} more, which `{data}` has too"] if len(rows) > shown else []
    return [title, table(columns, rows[:shown]), *more]


def size(number: int | None) -> str:
    """Returns bytes in a unit that suits them; "" for none.

    >>> size(12_345_678), size(999_600)
    ('12.3 MB', '1 MB')
    """
    if not number:
        return ""
    digits = len(str(round(float(f"{number:.3g}"))))  # rounded first: 999.6 kB is 1 MB
    power = min((digits - 1) // 3, len(UNITS) - 1)
    return f"{number / 1000**power:.3g} {UNITS[power]}"
