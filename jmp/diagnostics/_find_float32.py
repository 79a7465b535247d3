"""`find_float32`: which name scopes must stay in float32, or out of float8.

Each question is a program of autocast with rules that keep all but some scopes in float32, which is
compiled, run and compared with float32. `_scope_search` asks few questions where few scopes matter.
"""

import contextlib
import dataclasses
import functools
import math
import numbers
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jmp import _jax_compat
from jmp._array_calls import ArrayCall
from jmp._messages import listed, wrong
from jmp.autocasting._autocast import AllOptions, make_program
from jmp.autocasting._operations import NoHalfProductWarning, operations_of
from jmp.autocasting._request import module_paths
from jmp.autocasting._steps import steps_of
from jmp.autocasting.float8 import OPERANDS
from jmp.diagnostics._arguments import check_asked, check_numbers, scoped, split_arguments
from jmp.diagnostics._comparison import (
    Comparison,
    check_scale,
    comparison_of,
    results_and_gradients,
)
from jmp.diagnostics._scope_search import Errors, Found, Scopes, rules_for, search_levels
from jmp.diagnostics._tables import Report, table
from jmp.diagnostics._walk import path_in_rules, scopes_path
from jmp.dtypes import is_half
from jmp.loss_scaling import StaticLossScale
from jmp.loss_scaling._gradients import scaled_loss
from jmp.policy import Policy, get_policy
from jmp.rules import Rule, UnusedRuleWarning
from jmp.trees import cast_to_at_least_float32, holds_numbers

CALL = "find_float32(loss_fn, policy)(*args)"
SHOWN = 8
NOWHERE = "what is in no scope"


def find_float32(
    loss_fn: Callable[..., Any],
    policy: str | Policy,
    *early: Any,
    tolerance: float | None = None,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    scale: float = 1.0,
    **options: Any,
) -> Callable[..., "Float32Scopes"]:
    """Returns a function that finds the scopes that `autocast(loss_fn, policy)` needs in float32.

    It is called with the arguments of `loss_fn`. If the policy has float8 products, it also finds
    the scopes that must not be float8: a scope whose error in half is within the tolerance gets a
    rule without float8, any other a float32 rule.

    The loss and its gradient run once in float32, once with all scopes in half, and, if that is not
    within the tolerance, with groups of scopes in half and everything else in float32: a group that
    is not within it is split in two. Each run is a compilation: one culprit among 32 scopes takes
    about a dozen.

    Modules of Flax linen and Haiku open scopes; elsewhere write `with jax.named_scope("head"):`
    around a part of the model. If modules of nnx or Equinox are among the arguments, they are the
    scopes, by the paths that rules of `nnx.autocast` and `equinox.autocast` name. A scope stands
    for the operations in it that are in no scope inside.

    Args:
      loss_fn: as for `jmp.autocast`, returning a real floating scalar, or `(loss, aux)` with
        `has_aux`.
      policy: its compute dtype is read.
      tolerance: of |loss - float32's| / |float32's|, and of ||gradient - float32's|| /
        ||float32's||, the Euclidean norm over all leaves of the gradient together. Left out, 16
        unit roundoffs of the half type: 0.0078 for float16, 0.063 for bfloat16; for a policy with
        float8 products two of float8: 0.125.
      argnums, has_aux: as in `jax.value_and_grad`.
      scale: loss scale: cotangents are multiplied, gradients divided. Without one small float16
        gradients underflow, and scopes are found for that.
      options: those of `jmp.autocast`; `rules` that it has already stay, in front
        (none beside modules of nnx or Equinox).

    Returns: a function that returns a `Float32Scopes`. Half arrays among its arguments are widened,
      exactly; callbacks in `loss_fn` run each time. The `rules` are ready for
      `autocast(loss_fn, policy, rules=...)`: that of `jmp`, or of the adapter whose modules are
      among the arguments.

    Raises:
      TypeError: `loss_fn` is no function, or returns no scalar; a policy, a tolerance or an option
        of the wrong kind; arguments in the first call. When called, arguments that hold no numbers.
      ValueError: a policy that computes in float32; a tolerance or a scale that is not positive; no
        floating array to differentiate; no scope in the program, or nothing in half; rules beside
        modules of nnx or Equinox; a loss or gradient that is not finite in float32.

    >>> def loss(w, x):
    ...     with jax.named_scope("body"):
    ...         x = jnp.tanh(x @ w)
    ...     with jax.named_scope("head"):
    ...         return jnp.mean((x @ (3e4 * w)) / 3e4)
    >>> found = find_float32(loss, "mixed_float16")(jnp.ones((8, 8)) / 2, jnp.ones((4, 8)))
    >>> found.rules
    [('head', 'float32')]
    """
    check_asked("find_float32", CALL, loss_fn, early, policy)
    if unknown := sorted(set(options) - AllOptions.__optional_keys__):
        raise TypeError(
            f"find_float32 got {listed(unknown)}, no option of its own or of autocast; expected "
            f"the arguments of the loss in a call of their own: {CALL}."
        )
    options["rules"] = list(options.get("rules", ()))  # an iterator can be read once
    tolerance = _checked_tolerance(tolerance, policy)
    check_scale(scale, "find_float32")
    scaled = scaled_loss(loss_fn, StaticLossScale(1.0), has_aux)

    @functools.wraps(loss_fn)  # options name its arguments, warnings name it
    def loss(*args: Any, **kwargs: Any) -> Any:
        _, (value, _) = scaled(*args, **kwargs)
        return value

    def find(*args: Any, **kwargs: Any) -> Float32Scopes:
        given = cast_to_at_least_float32(split_arguments(*args, **kwargs))
        given = jax.tree.map(_on_device, given)
        trials = _Trials(loss, policy, given, argnums, scale, options)
        found = search_levels(trials.scopes, trials.in_float8, trials.errors, tolerance)
        rules = trials.rules(frozenset(trials.scopes) - found.half.kept, found.float8.kept)
        comparison = trials.comparison(rules)
        text = str(get_policy(policy))
        alone = _each_alone(found)
        return Float32Scopes(text, tolerance, rules, found.lowest, alone, comparison)

    return find


@dataclasses.dataclass(frozen=True)
class ScopeAlone:
    """The error of the program in which one scope rounds to half and everything else is float32.

    With `in_float8`: of the program in which the products of one scope are float8, and everything
    else has the dtypes that the rules give.

    Attributes:
      path: names of scopes, or of modules, joined by slashes; "" for what is in none. What is
        inside a scope of its own does not count.
      loss_error, gradient_error: relative, see `find_float32`; infinite where not finite.
      in_float32: whether the rules that were found keep it in float32.
      in_float8: whether it was asked about in float8.
      out_of_float8: whether the rules take its products out of float8.

    >>> scope = ScopeAlone("head", loss_error=0.2, gradient_error=0.1, in_float32=True)
    >>> scope.path, scope.in_float8
    ('head', False)
    """

    path: str
    loss_error: float
    gradient_error: float
    in_float32: bool
    in_float8: bool = False
    out_of_float8: bool = False


@dataclasses.dataclass(frozen=True)
class Float32Scopes(Report):
    """What `find_float32` found; `print` shows it, `to_dict` gives the data.

    Attributes:
      policy: the policy, as text.
      tolerance: of the relative errors.
      rules: for `rules=` of `jmp.autocast`; those that were given come first. Empty where no scope
        has to stay in float32 or out of float8.
      all_half: the errors of loss and gradient with all scopes in half, and in float8 where the
        policy asks for it.
      scopes: those scopes that were tried alone, the worst first, and so all that need a rule.
        Under a policy with float8 products a scope may stand there twice.
      comparison: `compare` of the program with these rules against float32.

    >>> from jmp.diagnostics import compare
    >>> comparison = compare(lambda w: jnp.sum(w @ w), "mixed_bfloat16")(jnp.eye(2))
    >>> scopes = Float32Scopes("mixed_bfloat16", 0.01, [], (0.0, 0.0), [], comparison)
    >>> scopes.rules, scopes.is_within  # exact in bfloat16
    ([], True)
    """

    computed: ClassVar[tuple[str, ...]] = ("loss_error", "gradient_error", "is_within")
    policy: str
    tolerance: float
    rules: list[Rule]
    all_half: Errors
    scopes: list[ScopeAlone]
    comparison: Comparison

    @property
    def loss_error(self) -> float:
        """The relative error of the loss with the rules."""
        return _errors_of(self.comparison)[0]

    @property
    def gradient_error(self) -> float:
        """The relative error of the gradient with the rules, all leaves as one vector."""
        return _errors_of(self.comparison)[1]

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
        asked = f"{self.policy}, tolerance {self.tolerance:.3g}"
        kept = [scope for scope in self.scopes if scope.in_float32 or scope.out_of_float8]
        if kept:
            must = [
                _count_of(self.scopes, "in_float32", "in float32", in_float8=False),
                _count_of(self.scopes, "out_of_float8", "out of float8", in_float8=True),
            ]
            lines = [f"{asked}: {', '.join(filter(None, must))}", "rules=["]
            lines += [f"    {rule!r}," for rule in self.rules] + ["]"]
            if any(not scope.path for scope in kept):
                lines.append(
                    f"'' is {NOWHERE}: the loss, and what the outermost module computes itself"
                )
        else:
            float8 = " or out of float8" * (get_policy(self.policy).product_dtype is not None)
            lines = [f"{asked}: no scope has to stay in float32{float8}"]
        rows = [("all scopes, without rules", *self.all_half)] if kept else []
        what = "with these rules" if self.rules else "all scopes"
        rows.append((what, self.loss_error, self.gradient_error))
        for scope in self.scopes[: max(SHOWN, len(kept) + 2)]:
            name = f"{scope.path or NOWHERE} alone{' in float8' * scope.in_float8}"
            rows.append((name, scope.loss_error, scope.gradient_error))
        cells = [(name, f"{loss:.2g}", f"{grad:.2g}") for name, loss, grad in rows]
        lines.append(table(("in half", "loss error", "gradient error"), cells))
        return "\n".join(lines)


def _count_of(scopes: Sequence[ScopeAlone], name: str, where: str, in_float8: bool) -> str:
    count = sum(getattr(scope, name) for scope in scopes if scope.in_float8 is in_float8)
    return f"{count} scope{'s' * (count > 1)} must stay {where}" if count else ""


def _checked_tolerance(tolerance: Any, policy: str | Policy) -> float:
    if tolerance is None:
        dtype = get_policy(policy).compute_dtype
        if get_policy(policy).product_dtype is not None:
            return float(jnp.finfo(OPERANDS).eps)
        return 8 * float(jnp.finfo(dtype).eps) if is_half(dtype) else math.inf
    expected = "a relative error, above zero, such as 0.01"
    if isinstance(tolerance, bool) or not isinstance(tolerance, numbers.Real):
        raise wrong(TypeError, "find_float32", tolerance, expected, name="tolerance")
    if not 0 < float(tolerance) < math.inf:
        raise wrong(ValueError, "find_float32", tolerance, expected, name="tolerance")
    return float(tolerance)


def _on_device(leaf: Any) -> Any:
    """Returns a NumPy array as one of JAX's, without the program that `jnp.asarray` compiles."""
    if not isinstance(leaf, (np.ndarray, np.generic)) or not holds_numbers(leaf):
        return leaf
    return jax.device_put(np.asarray(leaf, leaf.dtype.newbyteorder("=")))


class _Trials:
    """Programs of autocast with some scopes in half, each compared with float32.

    Attributes:
      scopes: paths of scopes with something in half, as rules name them, in program order.
      in_float8: those with float8 products.
    """

    def __init__(
        self,
        loss: Callable[..., Any],
        policy: str | Policy,
        given: tuple[tuple[Any, ...], dict[str, Any]],
        argnums: int | Sequence[int],
        scale: float,
        options: Mapping[str, Any],
    ) -> None:
        self._loss, self._policy, self._given = loss, policy, given
        self._argnums, self._scale = argnums, scale
        self._rules, self._options = options["rules"], options
        with_scopes, self._lower, framework = scoped(loss, *given)
        self._of_modules = framework is not None
        if framework and self._rules:
            raise ValueError(
                f"find_float32 got rules= and modules of {framework}, whose paths they name; "
                "expected none: it asks about all modules."
            )
        self._find_scopes(with_scopes)
        with jax.default_matmul_precision("highest"):
            self._expected = results_and_gradients(with_scopes, given, argnums, 1.0)
        _check_finite(self._expected)

    def _find_scopes(self, loss: Callable[..., Any]) -> None:
        program = make_program(loss, self._policy, **self._options)
        if program is None:
            raise ValueError(
                f"find_float32 got the policy {get_policy(self._policy)}, which computes in "
                "float32: nothing is in half. Ask with 'mixed_float16' or 'mixed_bfloat16'."
            )
        call = ArrayCall(loss, *self._given)
        call.floating_within(self._argnums, "find_float32")
        check_numbers(
            call.arrays, "find_float32", "the arrays of a training step, outside of jax.jit"
        )
        with _untold():
            plan = program.trace(*self._given).plan
        half, float8 = str(plan.request.settings.compute_dtype), str(OPERANDS)
        found: dict[str, None] = {}
        in_float8 = set()
        for operation in operations_of(steps_of(plan)):
            if operation.node.region.is_decided:  # by an autocast inside
                continue
            dtypes = {*operation.dtypes_in, *operation.dtypes_out}
            path = self._path(operation.scope)
            if half in dtypes:
                found[path] = None
            if float8 in dtypes:
                in_float8.add(path)
        if not found:
            raise ValueError(
                "find_float32 got a function in which autocast puts nothing in half: it has no "
                "product, or it runs under autocast already, as what an adapter returns. Expected "
                "the function in float32: loss_fn, and not jmp.autocast(loss_fn, policy)."
            )
        if list(found) == [""] and not self._of_modules:
            raise ValueError(
                "find_float32 got a function that opens no name scopes, so that no rule can name a "
                "part of it. Modules of Flax linen and Haiku open them, and so do those of nnx and "
                "Equinox that are arguments of it; elsewhere write with jax.named_scope('head'): "
                "around each part, such as the call of a layer."
            )
        self.scopes, self.in_float8 = list(found), frozenset(in_float8)

    def _path(self, stack: Any) -> str:
        if self._of_modules:
            return next(iter(module_paths(_jax_compat.scope_names(stack))), "")
        return path_in_rules(scopes_path(stack))

    def rules(self, in_half: Scopes, out_of_float8: Scopes) -> list[Rule]:
        """Returns the rules that were given, and those that keep the other scopes in float32."""
        half = dataclasses.replace(get_policy(self._policy), product_dtype=None)
        is_named = half == get_policy("mixed_bfloat16")
        policies = dict.fromkeys(self.scopes, str(self._policy))
        policies |= dict.fromkeys(out_of_float8, "mixed_bfloat16" if is_named else str(half))
        policies |= dict.fromkeys(frozenset(self.scopes) - in_half, "float32")
        found = rules_for(policies, str(self._policy), of_modules=self._of_modules)
        return [*self._rules, *found]

    def comparison(self, rules: Sequence[Rule]) -> Comparison:
        """Compares the program with these rules with float32."""
        lowered = self._lower(self._loss, self._policy, **{**self._options, "rules": rules})
        found = results_and_gradients(lowered, self._given, self._argnums, self._scale)
        return comparison_of(self._policy, self._scale, found, self._expected)

    def errors(self, in_half: Scopes, in_float8: Scopes) -> Errors:
        """Returns the errors of loss and gradient where only these scopes are in half."""
        with _untold():
            return _errors_of(self.comparison(self.rules(in_half, self.in_float8 - in_float8)))


@contextlib.contextmanager
def _untold() -> Iterator[None]:
    """Hides warnings of trials: those of the program with the rules that were found are shown."""
    with warnings.catch_warnings():
        for told in (UnusedRuleWarning, NoHalfProductWarning):
            warnings.simplefilter("ignore", told)
        yield


def _check_finite(expected: Mapping[tuple[str, str], Any]) -> None:
    wrong = [
        f"the gradient of {path or 'the argument'}" if kind == "gradient" else "the loss"
        for (kind, path), x in expected.items()
        if not np.all(np.isfinite(np.asarray(x)))
    ]
    if wrong:
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise ValueError(
            f"find_float32 found {wrong[0]}{more} infinite or NaN in float32, so that there is "
            "nothing to compare with. diagnostics.find_nonfinite(jax.grad(loss_fn))(*args) names "
            "the operation behind it."
        )


def _errors_of(comparison: Comparison) -> Errors:
    """Returns the relative errors of the loss and of the gradient, all leaves as one vector."""
    rows = {row.kind: row.relative_error for row in comparison.by_module(0)}
    errors = {kind: math.inf if math.isnan(error) else error for kind, error in rows.items()}
    return errors["result"], errors["gradient"]


def _each_alone(found: Found) -> list[ScopeAlone]:
    alone = []
    for path, errors in found.half.alone.items():
        alone.append(ScopeAlone(path, *errors, in_float32=path in found.half.kept))
    for path, errors in found.float8.alone.items():
        is_out = path in found.float8.kept
        alone.append(
            ScopeAlone(path, *errors, in_float32=False, in_float8=True, out_of_float8=is_out)
        )
    return sorted(alone, key=lambda scope: -max(scope.loss_error, scope.gradient_error))
