"""Results of `find_float32`: the scopes that must stay in float32, and the rules that say so."""

import dataclasses
import math
from typing import Any, ClassVar

from jmp.diagnostics._comparison import Comparison
from jmp.diagnostics._tables import Report, table
from jmp.rules import Rule

SHOWN = 8
NOWHERE = "what is in no scope"
Errors = tuple[float, float]  # of the loss, of the gradient


@dataclasses.dataclass(frozen=True)
class ScopeAlone:
    """The error of the program in which one scope has the policy, and all others what is higher.

    That is float32, or of a policy with float8 products the same without float8.

    Attributes:
      path: names of scopes, or of modules, joined by slashes; "" for operations that are in none.
        Operations of an inner scope do not count.
      loss_error, gradient_error: relative errors, see `find_float32`; infinite if they are NaN.
      is_kept: whether the rules that were found keep it out of the policy.

    >>> scope = ScopeAlone("head", loss_error=0.2, gradient_error=0.1, is_kept=True)
    >>> scope.path, scope.is_kept
    ('head', True)
    """

    path: str
    loss_error: float
    gradient_error: float
    is_kept: bool


@dataclasses.dataclass(frozen=True)
class Float32Scopes(Report):
    """What `find_float32` found; `print` shows it, `to_dict` gives the data.

    Attributes:
      policy: the policy, as text.
      higher: "float32", or the policy without float8 if it has float8 products.
      tolerance: of the relative errors.
      rules: for `rules=` of `jmp.autocast`; the given rules come first. There is none if no scope
        needs `higher`.
      all_low: the errors of loss and gradient with all scopes in the policy.
      scopes: the scopes that were tried alone, the worst first, and so all that need a rule.
      comparison: `compare` of the program with these rules against float32.

    >>> from jmp.diagnostics import compare
    >>> comparison = compare(lambda w: jnp.sum(w @ w), "mixed_bfloat16")(jnp.eye(2))
    >>> scopes = Float32Scopes(
    ...     "mixed_bfloat16", "float32", 0.01, [], (0.0, 0.0), [], comparison
    ... )
    >>> scopes.rules, scopes.is_within  # exact in bfloat16
    ([], True)
    """

    computed: ClassVar[tuple[str, ...]] = ("loss_error", "gradient_error", "is_within")
    policy: str
    higher: str
    tolerance: float
    rules: list[Rule]
    all_low: Errors
    scopes: list[ScopeAlone]
    comparison: Comparison

    @property
    def loss_error(self) -> float:
        """The relative error of the loss with the rules."""
        return errors_of(self.comparison)[0]

    @property
    def gradient_error(self) -> float:
        """The relative error of the gradient with the rules, all leaves as one vector."""
        return errors_of(self.comparison)[1]

    @property
    def is_within(self) -> bool:
        """Whether both errors are within the tolerance."""
        return max(self.loss_error, self.gradient_error) <= self.tolerance

    def to_dict(self) -> dict[str, Any]:
        """Returns the data as dictionaries, lists, numbers and strings.

        Errors may be infinite.
        """
        rules = [(str(target), str(policy)) for target, policy in self.rules]
        return super().to_dict() | {"rules": rules, "comparison": self.comparison.to_dict()}

    def __str__(self) -> str:
        is_half = self.higher == "float32"
        stay = "stay in float32" if is_half else "stay out of float8"
        kept = [scope for scope in self.scopes if scope.is_kept]
        asked = f"{self.policy}, tolerance {self.tolerance:.3g}"
        lines = [f"{asked}: no scope has to {stay}"]
        if kept:
            count = f"{len(kept)} scope{'s' * (len(kept) > 1)} must {stay}"
            lines = [f"{asked}: {count}", "rules=["]
            lines += [f"    {rule!r}," for rule in self.rules] + ["]"]
            if any(not scope.path for scope in kept):
                lines.append(
                    f"'' is {NOWHERE}: the loss, and what the outermost module computes itself"
                )
        rows = [("all scopes, without rules", *self.all_low)] if kept else []
        what = "with these rules" if self.rules else "all scopes"
        rows.append((what, self.loss_error, self.gradient_error))
        for scope in self.scopes[: max(SHOWN, len(kept) + 2)]:
            name = f"only {scope.path or NOWHERE}"
            rows.append((name, scope.loss_error, scope.gradient_error))
        cells = [(name, f"{loss:.2g}", f"{grad:.2g}") for name, loss, grad in rows]
        low = "in half" if is_half else "in float8"
        lines.append(table((low, "loss error", "gradient error"), cells))
        return "\n".join(lines)


def errors_of(comparison: Comparison) -> Errors:
    """Returns the relative errors of the loss and of the gradient, all leaves as one vector."""
    rows = {row.kind: row.relative_error for row in comparison.by_module(0)}
    errors = {kind: math.inf if math.isnan(error) else error for kind, error in rows.items()}
    return errors["result"], errors["gradient"]
