"""`find_float32`: which name scopes must stay in float32.

One program is compiled for all questions: every scope rounds to half or not by a flag that it is
called with (`_emulation`). It runs once for each scope alone in half, and for a few sets of scopes
(`_scope_search`). It is called in a loop and not under vmap, which would take the memory of all
runs at once. What was found is measured in the program that autocast makes with these rules: the
second compilation.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp._calls import check_function
from jmp._describe import described, listed
from jmp.autocasting._autocast import AllOptions
from jmp.diagnostics._comparison import Comparison, comparison_of, run
from jmp.diagnostics._flagged_program import Errors, FlaggedProgram, on_device
from jmp.diagnostics._scope_search import rules_for, search
from jmp.diagnostics._scoped_modules import scoped
from jmp.diagnostics._tables import table
from jmp.dtypes import is_half
from jmp.loss_scaling import StaticLossScale
from jmp.loss_scaling._gradients import scaled_loss
from jmp.policy import Policy, get_policy
from jmp.rules import Rule
from jmp.trees import cast_to_at_least_float32

CALL = "find_float32(loss_fn, policy, *args, tolerance=0.01)"
SHOWN = 8


@dataclasses.dataclass(frozen=True)
class ScopeAlone:
    """The error of the program in which one scope rounds to half and everything else is float32.

    Attributes:
      path: names of scopes, or of modules, joined by slashes; "" for what is in none. What is
        inside a scope of its own does not count.
      loss_error, gradient_error: relative, see `find_float32`; infinite where not finite.
      in_float32: whether the rules that were found keep it in float32.
    """

    path: str
    loss_error: float
    gradient_error: float
    in_float32: bool


@dataclasses.dataclass(frozen=True)
class Float32Scopes:
    """What `find_float32` found; `print` shows it, `to_dict` gives the data.

    Attributes:
      policy: the policy, as text.
      tolerance: of the relative errors.
      rules: for `rules=` of `jmp.autocast`; those that were given come first. Empty where no scope
        has to stay in float32.
      all_half: the errors of loss and gradient with all scopes in half, as emulated.
      scopes: each scope by itself, the worst first; empty where none has to stay in float32.
      comparison: `compare` of the program with these rules against float32.
    """

    policy: str
    tolerance: float
    rules: list[Rule]
    all_half: Errors
    scopes: list[ScopeAlone]
    comparison: Comparison

    @property
    def loss_error(self) -> float:
        """The relative error of the loss with the rules, measured in autocast's own program."""
        return self._error("result")

    @property
    def gradient_error(self) -> float:
        """That of the gradient, all leaves as one vector."""
        return self._error("gradient")

    @property
    def is_within(self) -> bool:
        """Whether both errors are within the tolerance."""
        return max(self.loss_error, self.gradient_error) <= self.tolerance

    def _error(self, kind: str) -> float:
        (row,) = (row for row in self.comparison.by_module(0) if row.kind == kind)
        return math.inf if math.isnan(row.relative_error) else row.relative_error

    def to_dict(self) -> dict[str, Any]:
        """Returns the data as dictionaries, lists, numbers and strings.

        Errors may be infinite.
        """
        data = {**vars(self), "rules": [(str(target), str(p)) for target, p in self.rules]}
        data["scopes"] = list(map(dataclasses.asdict, self.scopes))
        data["comparison"] = self.comparison.to_dict()
        names = ("loss_error", "gradient_error", "is_within")
        return {**data, **{name: getattr(self, name) for name in names}}

    def __str__(self) -> str:
        kept = sum(scope.in_float32 for scope in self.scopes)
        asked = f"{self.policy}, tolerance {self.tolerance:.2g}"
        if kept:
            lines = [
                f"{asked}: {kept} of {len(self.scopes)} scopes must stay in float32",
                "rules=[",
            ]
            lines += [f"    {rule!r}," for rule in self.rules] + ["]"]
        else:
            lines = [f"{asked}: no scope has to stay in float32"]
        rows = [("all scopes, without rules", *self.all_half, "emulated")] if kept else []
        what = "with these rules" if self.rules else "all scopes"
        rows.append((what, self.loss_error, self.gradient_error, "measured"))
        rows += [
            (f"{scope.path or NOWHERE} alone", scope.loss_error, scope.gradient_error, "emulated")
            for scope in self.scopes[: max(SHOWN, kept + 2)]
        ]
        cells = [(name, f"{loss:.2g}", f"{grad:.2g}", how) for name, loss, grad, how in rows]
        lines.append(table(("in half", "loss error", "gradient error", ""), cells))
        if not self.is_within:
            lines.append(
                "Above the tolerance: autocast's own program differs from what was emulated. Ask "
                "with a smaller tolerance, which finds more scopes."
            )
        return "\n".join(lines)


NOWHERE = "what is in no scope"


def find_float32(
    loss_fn: Callable[..., Any],
    policy: str | Policy,
    *args: Any,
    tolerance: float | None = None,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    scale: float = 1.0,
    **options: Any,
) -> Float32Scopes:
    """Finds the name scopes that must stay in float32 under `autocast(loss_fn, policy)`.

    The loss and its gradient run once in float32, once with all scopes in half, and once with each
    scope alone in half; then with the scopes left out that are the worst alone, until the errors
    are within the tolerance. All of these are one compiled program. At last autocast's own program
    with the rules found is compiled, run, and compared with float32.

    Modules of Flax linen and Haiku open scopes; elsewhere write `with jax.named_scope("head"):`
    around a part of the model. Where modules of nnx or Equinox are among `args`, they are the
    scopes, by the paths that rules of `nnx.autocast` and `equinox.autocast` name. A scope stands
    for the operations in it that are in no scope inside; above 256 scopes the inner ones count with
    those around them.

    Args:
      loss_fn: as for `jmp.autocast`, returning a real floating scalar, or `(loss, aux)` with
        `has_aux`.
      policy: its compute dtype is read.
      args: of `loss_fn`, all by position. Half arrays are widened, exactly. Callbacks in it run
        each time.
      tolerance: of |loss - float32's| / |float32's|, and of ||gradient - float32's|| /
        ||float32's||, the Euclidean norm over all leaves of the gradient together. Left out, 16
        unit roundoffs of the half type: 0.0078 for float16, 0.063 for bfloat16.
      argnums, has_aux: as in `jax.value_and_grad`.
      scale: loss scale: cotangents are multiplied, gradients divided. Without one small float16
        gradients underflow, and scopes are found for that.
      options: those of `jmp.autocast`; `rules` that it has already stay, in front.

    Returns: a `Float32Scopes`, whose `rules` are ready for `autocast(loss_fn, policy, rules=...)`:
      that of `jmp`, or of the adapter whose modules are among `args`.

    Raises:
      TypeError: `loss_fn` is no function, or returns no scalar; a policy, a tolerance or an option
        of the wrong kind; arguments that hold no numbers.
      ValueError: a policy that computes in float32; a tolerance or a scale that is not positive; no
        floating array to differentiate; no scope in the program, or nothing in half; rules beside
        modules of nnx or Equinox; a loss or gradient that is not finite in float32.

    >>> def loss(w, x):
    ...     with jax.named_scope("body"):
    ...         x = jnp.tanh(x @ w)
    ...     with jax.named_scope("head"):
    ...         return jnp.mean((x @ (3e4 * w)) / 3e4)
    >>> found = find_float32(loss, "mixed_float16", jnp.ones((8, 8)) / 2, jnp.ones((4, 8)))
    >>> found.rules
    [('head', 'float32')]
    """
    _check_asked(loss_fn, policy, args, options)
    tolerance = _checked_tolerance(tolerance, policy)
    if not 0 < scale < math.inf:
        raise ValueError(
            f"find_float32 got scale={described(scale)}; expected a loss scale, above zero."
        )
    scaled = scaled_loss(loss_fn, StaticLossScale(1.0), has_aux)

    @functools.wraps(loss_fn)  # options name its arguments, warnings name it
    def loss(*args: Any) -> Any:
        _, (value, _) = scaled(*args)
        return value

    args = jax.tree.map(on_device, cast_to_at_least_float32(args))
    given = options.pop("rules", ())
    given = tuple(given) if isinstance(given, Iterator) else given  # read more than once
    with_scopes, lower, framework = scoped(loss, args)
    if framework and given:
        raise ValueError(
            f"find_float32 got rules= and modules of {framework}, whose paths they name; expected "
            "none: it asks about all modules."
        )
    with jax.default_matmul_precision("highest"):
        program = FlaggedProgram(
            with_scopes,
            policy,
            args,
            argnums,
            scale,
            {**options, "rules": given},
            of_modules=framework is not None,
        )
        all_half = program.errors(range(len(program.scopes)))
        kept: frozenset[int] = frozenset()
        alone: list[Errors] = []
        if max(all_half) > tolerance:
            every = range(len(program.scopes))
            alone = [program.errors([i], is_alone=True) for i in every]
            error = lambda kept: max(program.errors(set(every) - kept))
            kept = search(list(map(max, alone)), error, tolerance)
    half = policy if isinstance(policy, str) else str(policy)
    states = {scope: i in kept for i, scope in enumerate(program.scopes)}
    rules = [*given, *rules_for(states, half, anywhere=framework is None)]
    lowered = lower(loss, policy, rules=rules, **options)
    measured = run(lowered, (args, {}), argnums, scale)
    scopes = [ScopeAlone(program.scopes[i], *errors, i in kept) for i, errors in enumerate(alone)]
    scopes.sort(key=lambda scope: -max(scope.loss_error, scope.gradient_error))
    comparison = comparison_of(policy, "float32", scale, measured, program.expected)
    return Float32Scopes(str(get_policy(policy)), tolerance, rules, all_half, scopes, comparison)


# What was given.


def _check_asked(loss_fn: object, policy: object, args: Sequence[Any], options: Any) -> None:
    check_function(loss_fn, "find_float32", CALL)
    if not isinstance(policy, (str, Policy)):
        raise TypeError(
            f"find_float32 got {described(policy)} in the place of the policy; expected {CALL}."
        )
    if not args:
        raise TypeError(
            "find_float32 got no arguments of the loss; expected them in the same call: "
            f"{CALL}. It returns what it found, and no function."
        )
    if unknown := sorted(set(options) - AllOptions.__optional_keys__):
        raise TypeError(
            f"find_float32 got {listed(unknown)}, no option of its own or of autocast; expected "
            f"the arguments of the loss by position: {CALL}."
        )


def _checked_tolerance(tolerance: Any, policy: str | Policy) -> float:
    if tolerance is None:
        dtype = get_policy(policy).compute_dtype
        return 8 * float(jnp.finfo(dtype).eps) if is_half(dtype) else math.inf
    if isinstance(tolerance, bool) or not isinstance(
        tolerance, (int, float, np.integer, np.floating)
    ):
        raise TypeError(
            f"find_float32 got tolerance={described(tolerance)}; expected a relative error, such "
            "as 0.01."
        )
    if not 0 < tolerance < math.inf:
        raise ValueError(
            f"find_float32 got tolerance={described(tolerance)}; expected a relative error, above "
            "zero, such as 0.01."
        )
    return float(tolerance)
