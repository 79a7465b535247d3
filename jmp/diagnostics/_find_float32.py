"""`find_float32`: which name scopes must stay in float32, or out of float8.

Each question is a program of autocast with rules that keep all but some scopes in float32, which is
compiled, run and compared with float32. `search` asks few questions if few scopes matter; it is
given the errors of any choice of scopes, and does not know how they are measured.
"""

import dataclasses
import functools
import glob
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmp import _jax_compat
from jmp._array_calls import ArrayCall, check_numbers
from jmp.autocasting._autocast import autocast
from jmp.autocasting._operations import operations_of
from jmp.autocasting._request import module_paths
from jmp.autocasting._steps import Plan, steps_of
from jmp.autocasting.float8 import E4M3
from jmp.diagnostics._asked import asked_function, half_program, split_arguments, without_warnings
from jmp.diagnostics._comparison import check_positive, comparison_of, results_and_gradients
from jmp.diagnostics._places import path_in_rules, scopes_path
from jmp.diagnostics._reports import Report, table
from jmp.loss_scaling._gradients import scaled_loss
from jmp.loss_scaling._scales import StaticLossScale
from jmp.policy import Policy, get_policy
from jmp.rules import Rule
from jmp.trees import cast_to_at_least_float32

NOWHERE = "what is in no scope"


class Errors(NamedTuple):
    """Relative errors: of the loss, and of the gradient, all leaves as one vector."""

    loss: float
    gradient: float


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

    It is called with the arguments of `loss_fn`. If the policy has float8 products, it finds the
    scopes that must not be float8 instead, and their rules name the same policy without float8. Ask
    about that policy before.

    The loss and its gradient run once in float32, once with all scopes in half, and, if that is not
    within the tolerance, with groups of scopes in half and everything else in float32: a group that
    is not within it is split in two. Each run is a compilation: one culprit among 32 scopes takes
    about a dozen.

    Modules of Flax linen and Haiku open scopes; elsewhere write `with jax.named_scope("head"):`
    around a part of the model. If modules of nnx or Equinox are among the arguments, they are the
    scopes, with the paths that rules of `nnx.autocast` and `equinox.autocast` name. A scope stands
    for its operations that are in no inner scope.

    Args:
      loss_fn: as for `jmp.autocast`, returning a real floating scalar, or `(loss, aux)` with
        `has_aux`.
      policy: `find_float32` reads its compute dtype.
      tolerance: of |loss - float32's| / |float32's|, and of ||gradient - float32's|| /
        ||float32's||, the Euclidean norm over all leaves of the gradient together. Left out, 16
        unit roundoffs of the half type: 0.0078 for float16, 0.063 for bfloat16; for a policy with
        float8 products two of float8: 0.125.
      argnums, has_aux: as in `jax.value_and_grad`.
      scale: loss scale: cotangents are multiplied by it, gradients divided. Without a loss scale
        small float16 gradients underflow, and scopes are found for that reason.
      options: further options of `jmp.autocast`. Given `rules` stay, in front of those that are
        found.

    Returns: a function that returns a `Float32Scopes`. Half arrays among its arguments are widened,
      exactly; callbacks in `loss_fn` run each time. The `rules` are ready for `autocast(loss_fn,
      policy, rules=...)` of `jmp`, or of the adapter whose modules are among the arguments.

    Raises:
      TypeError: `loss_fn` is no function, or returns no scalar; a policy, a tolerance or an option
        of the wrong kind; arguments in the first call. When called, arguments that hold no numbers.
      ValueError: a policy that computes in float32; a tolerance or a scale that is not positive; no
        floating array to differentiate; no scope in the program, or nothing in half; a loss or
        gradient that is not finite in float32.

    >>> def loss(w, x):
    ...     with jax.named_scope("body"):
    ...         x = jnp.tanh(x @ w)
    ...     with jax.named_scope("head"):
    ...         return jnp.mean((x @ (3e4 * w)) / 3e4)
    >>> found = find_float32(loss, "mixed_float16")(jnp.ones((8, 8)) / 2, jnp.ones((4, 8)))
    >>> found.rules
    [('head', 'float32')]
    """
    call = "find_float32(loss_fn, policy)(*args)"
    function = asked_function(call, loss_fn, early, policy, options)
    asks_of_float8 = get_policy(policy).product_dtype is not None
    higher = _without_float8(policy) if asks_of_float8 else "float32"
    if tolerance is None:
        roundoff = jnp.finfo(E4M3 if asks_of_float8 else get_policy(policy).compute_dtype).eps
        tolerance = float(roundoff) * (1 if asks_of_float8 else 8)
    expected = "a relative error, above zero, such as 0.01"
    tolerance = check_positive(tolerance, "find_float32", "tolerance", expected)
    scale = check_positive(scale, "find_float32", "scale", "a loss scale, above zero")
    given_rules = list(options.pop("rules", ()))  # an iterator can be read once
    scaled = scaled_loss(function, StaticLossScale(1.0), has_aux)

    @functools.wraps(loss_fn)  # options name its arguments, warnings name it
    def loss(*args: Any, **kwargs: Any) -> Any:
        _, (value, _) = scaled(*args, **kwargs)
        return value

    def find(*args: Any, **kwargs: Any) -> Float32Scopes:
        given = cast_to_at_least_float32(split_arguments(*args, **kwargs))
        program = half_program("find_float32", loss, policy, {**options, "rules": given_rules})
        call = ArrayCall(loss, *given)
        call.floating_within(argnums, "find_float32")
        expected = "the arrays of a training step, outside of jax.jit"
        check_numbers(call.arrays, "find_float32", expected)
        with without_warnings():
            plan = program.trace(*given).plan
        scopes, asked, of_modules = _scopes_of(plan)
        plan.request.policy_rules.warn_unused()
        with jax.default_matmul_precision("highest"):
            reference = results_and_gradients(loss, given, argnums, 1.0)
        _check_finite(reference)

        def rules_without(low: frozenset[str]) -> list[Rule]:
            policies = {path: str(policy) if path in low else higher for path in scopes}
            return [*given_rules, *rules_for(policies, str(policy), of_modules)]

        @functools.cache
        def errors(low: frozenset[str]) -> Errors:
            lowered = autocast(loss, policy, **options, rules=rules_without(low))
            with without_warnings():
                found = results_and_gradients(lowered, given, argnums, scale)
            of_all_leaves = comparison_of(policy, scale, found, reference).by_module(0)
            # None is NaN, because the reference is finite.
            error = {row.kind: row.relative_error for row in of_all_leaves}
            return Errors(error["result"], error["gradient"])

        kept = search(asked, errors, tolerance)
        low = frozenset(scopes) - kept
        alone = {path: errors(frozenset([path])) for path in kept}
        return Float32Scopes(
            policy=str(get_policy(policy)),
            higher=higher,
            tolerance=tolerance,
            rules=rules_without(low),
            all_low=errors(frozenset(asked)),
            kept=dict(sorted(alone.items(), key=lambda item: -max(item[1]))),
            errors=errors(low),
        )

    return find


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
      kept: the scopes that the rules keep out of the policy, by their paths, the worst first, with
        the errors if only that scope is in the policy; "" stands for what is in no scope. Errors
        that are NaN are infinite.
      errors: the relative errors with these rules.

    >>> from jmp.diagnostics import find_float32
    >>> def loss(w):
    ...     with jax.named_scope("body"):
    ...         return jnp.sum(w @ w)
    >>> found = find_float32(loss, "mixed_bfloat16")(jnp.eye(2))
    >>> found.rules, found.is_within, found.errors.loss  # exact in bfloat16
    ([], True, 0.0)
    """

    computed: ClassVar[tuple[str, ...]] = ("is_within",)
    policy: str
    higher: str
    tolerance: float
    rules: list[Rule]
    all_low: Errors
    kept: dict[str, Errors]
    errors: Errors

    @property
    def is_within(self) -> bool:
        """Whether both errors are within the tolerance."""
        return max(self.errors) <= self.tolerance

    def to_dict(self) -> dict[str, Any]:
        """Returns the data as dictionaries, lists, numbers and strings.

        Errors may be infinite.
        """
        rules = [(str(target), str(policy)) for target, policy in self.rules]
        return super().to_dict() | {"rules": rules}

    def __str__(self) -> str:
        low, stay = "in half", "stay in float32"
        if self.higher != "float32":
            low, stay = "in float8", "stay out of float8"
        count = len(self.kept)
        must = f"{count} scope{'s' * (count > 1)} must" if count else "no scope has to"
        lines = [f"{self.policy}, tolerance {self.tolerance:.3g}: {must} {stay}"]
        rows = {"with these rules" if self.rules else "all scopes": self.errors}
        if self.kept:
            lines += ["rules=[", *(f"    {rule!r}," for rule in self.rules), "]"]
            rows = {"all scopes, without rules": self.all_low, **rows}
        if "" in self.kept:
            lines.append(f"'' is {NOWHERE}, and what the outermost module computes itself")
        rows |= {f"only {path or NOWHERE}": errors for path, errors in self.kept.items()}
        cells = [(name, *(f"{error:.2g}" for error in errors)) for name, errors in rows.items()]
        return "\n".join([*lines, table((low, "loss error", "gradient error"), cells)])


def _scopes_of(plan: Plan) -> tuple[list[str], list[str], bool]:
    """Returns the scopes with something in half, and those that are asked about, in program order.

    Asked about are all, or those with float8 products if the policy has any. Scopes have the paths
    that rules name. The last result says whether modules of nnx or Equinox are among them.

    Raises: ValueError if there is none, or none that a rule could name.
    """
    settings = plan.request.settings
    paths, of_modules = [], False  # a path for each operation, with its dtypes
    for operation in operations_of(steps_of(plan)):
        if operation.node.region.is_decided:  # by an autocast inside
            continue
        modules = module_paths(_jax_compat.scope_names(operation.scope))
        of_modules = of_modules or bool(modules)
        path = modules[0] if modules else path_in_rules(scopes_path(operation.scope))
        paths.append((path, {*operation.dtypes_in, *operation.dtypes_out}))

    def with_dtype(dtype: Any) -> list[str]:
        return list(dict.fromkeys(path for path, dtypes in paths if str(dtype) in dtypes))

    in_half = with_dtype(settings.compute_dtype)
    if not in_half:
        raise ValueError(
            "find_float32 got a function in which autocast puts nothing in half: it has no "
            "product, or it runs under autocast already, as what an adapter returns. Expected "
            "the function in float32: loss_fn, and not jmp.autocast(loss_fn, policy)."
        )
    if in_half == [""] and not of_modules:
        raise ValueError(
            "find_float32 got a function that opens no name scopes, so that no rule can name a "
            "part of it. Modules of Flax linen and Haiku open them, and so do modules of nnx "
            "and Equinox that are arguments; elsewhere write with jax.named_scope('head'): "
            "around each part, such as the call of a layer."
        )
    asked = in_half if settings.policy.product_dtype is None else with_dtype(E4M3)
    return in_half, asked, of_modules


def _without_float8(policy: str | Policy) -> str:
    """Returns a policy whose products are all in the compute dtype, by its name if it has one."""
    half = dataclasses.replace(get_policy(policy), product_dtype=None)
    return "mixed_bfloat16" if half == get_policy("mixed_bfloat16") else str(half)


# The search: which scopes to keep out, given the errors of any choice of them.

ErrorsOf = Callable[[frozenset[str]], Errors]


def search(scopes: Sequence[str], errors: ErrorsOf, tolerance: float) -> set[str]:
    """Returns which scopes to keep out of a precision so that the errors are within the tolerance.

    Groups of scopes are tried alone in it. A group within the tolerance is done; any other is split
    in two, down to single scopes. So few culprits among many scopes take few trials, and it does
    not matter that with all of them everything is infinite. If the others together are still too
    much, the worst of them go, until they are not.

    Args:
      scopes: the scopes that are asked about.
      errors: returns the errors of the program in which only the given scopes have the lower
        precision. It may be asked for the same scopes again.

    >>> sizes = {"a": 0.1, "b": 5.0, "c": 0.2, "d": 0.2}
    >>> errors = lambda low: (sum(sizes[scope] for scope in low), 0.0)
    >>> sorted(search("abcd", errors, 1.0)), sorted(search("abcd", errors, 0.35))
    (['b'], ['b', 'c'])
    """

    def error(group: Sequence[str]) -> float:
        return max(errors(frozenset(group))) if group else 0.0

    def culprits(group: Sequence[str]) -> set[str]:
        if error(group) <= tolerance:
            return set()
        if len(group) == 1:
            return set(group)
        middle = len(group) // 2
        return culprits(group[:middle]) | culprits(group[middle:])

    kept = culprits(scopes)
    others = [scope for scope in scopes if scope not in kept]
    while error(others) > tolerance:
        worst = max(others, key=lambda scope: error([scope]))
        others.remove(worst)
        kept.add(worst)
    return kept


def rules_for(policies: Mapping[str, str], default: str, of_modules: bool) -> list[tuple[str, str]]:
    """Returns rules with which autocast computes each of these scopes with its policy.

    A rule holds for all that is inside its scope, and may match from any name of a path on. So an
    inner scope of another policy, and another of the same name elsewhere, are named in rules of
    their own; longer paths come first, because the first rule that matches counts.

    Args:
      policies: the policy of each path of scopes that has operations of its own.
      default: the policy of operations that no rule names.
      of_modules: whether an adapter reads the rules: a rule for "", the outermost module, then
        holds for all modules inside it.

    >>> half = "mixed_float16"
    >>> rules_for({"net": "float32", "net/mlp": half, "head": "float32"}, half, False)
    [('net/mlp', 'mixed_float16'), ('head', 'float32'), ('net', 'float32')]
    """
    found: dict[str, str] = {}

    def longest_first() -> list[str]:
        return sorted(found, key=lambda scope: -(scope.count("/") + bool(scope)))

    for path in sorted(policies, key=lambda path: (path.count("/"), path)):
        around = [s for s in longest_first() if (f"/{s}/" in f"/{path}/" if s else of_modules)]
        held = found[around[0]] if around else default
        if held != policies[path]:
            found[path] = policies[path]
    return [(glob.escape(scope), found[scope]) for scope in longest_first()]


def _check_finite(expected: Mapping[tuple[str, str], Any]) -> None:
    for (kind, path), x in expected.items():
        if not np.all(np.isfinite(np.asarray(x))):
            what = f"the gradient of {path or 'the argument'}" if kind == "gradient" else "the loss"
            raise ValueError(
                f"find_float32 found {what} infinite or NaN in float32, so that there is nothing "
                "to compare with. diagnostics.find_nonfinite(jax.grad(loss_fn))(*args) names the "
                "operation behind it."
            )
