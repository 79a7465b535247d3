"""`find_float32`: which name scopes must stay in float32, or out of float8.

One program is compiled for all questions: every scope rounds to half or not, and to float8 or not,
by flags that it is called with (`_emulation`). It runs once for each scope alone in half, and for a
few sets of scopes (`_scope_search`). It is called in a loop and not under vmap, which would take
the memory of all runs at once. What was found is measured in the program that autocast makes with
these rules: the second compilation.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp._messages import check_function, described, listed
from jmp.autocasting._autocast import AllOptions
from jmp.autocasting._float8 import OPERANDS
from jmp.diagnostics._arguments import apart, scoped
from jmp.diagnostics._comparison import comparison_of, run
from jmp.diagnostics._flagged_program import FlaggedProgram, on_device
from jmp.diagnostics._scope_search import Float32Scopes, Found, ScopeAlone, rules_for, search_levels
from jmp.dtypes import is_half
from jmp.loss_scaling import StaticLossScale
from jmp.loss_scaling._gradients import scaled_loss
from jmp.policy import Policy, get_policy
from jmp.trees import cast_to_at_least_float32

CALL = "find_float32(loss_fn, policy, *args, tolerance=0.01)"


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

    If the policy has float8 products, it also finds those that must not be float8: a scope whose
    error in half is within the tolerance gets a rule without float8, any other a float32 rule.

    The loss and its gradient run once in float32, once with all scopes in half, and once with each
    scope alone in half; then with the worst of these kept in float32, until the errors are within
    the tolerance. All these runs are one compiled program. Finally autocast's own program with the
    rules that were found is compiled, run, and compared with float32.

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
        unit roundoffs of the half type: 0.0078 for float16, 0.063 for bfloat16; for a policy with
        float8 products two of float8: 0.125.
      argnums, has_aux: as in `jax.value_and_grad`.
      scale: loss scale: cotangents are multiplied, gradients divided. Without one small float16
        gradients underflow, and scopes are found for that.
      options: those of `jmp.autocast`; `rules` that it has already stay, in front
        (none beside modules of nnx or Equinox).

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

    args = jax.tree.map(on_device, cast_to_at_least_float32(apart(*args)[0]))
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
        search = search_levels(program.errors, len(program.scopes), program.in_float8, tolerance)
    half = policy if isinstance(policy, str) else str(policy)
    policies = {scope: half for scope in program.scopes}
    policies |= {program.scopes[i]: "float32" for i in search.in_float32}
    policies |= {program.scopes[i]: _without_float8(policy) for i in search.out_of_float8}
    rules = [*given, *rules_for(policies, half, of_modules=framework is not None)]
    lowered = lower(loss, policy, rules=rules, **options)
    measured = run(lowered, (args, {}), argnums, scale)
    comparison = comparison_of(policy, "float32", scale, measured, program.expected)
    scopes = _each_alone(program.scopes, search)
    text = str(get_policy(policy))
    return Float32Scopes(text, tolerance, rules, search.lowest, scopes, comparison)


def _each_alone(paths: Sequence[str], search: Found) -> list[ScopeAlone]:
    found = [ScopeAlone(paths[i], *e, i in search.in_float32) for i, e in search.alone.items()]
    for i, errors in search.alone_in_float8.items():
        found.append(ScopeAlone(paths[i], *errors, False, True, i in search.out_of_float8))
    return sorted(found, key=lambda scope: -max(scope.loss_error, scope.gradient_error))


def _without_float8(policy: str | Policy) -> str:
    half = dataclasses.replace(get_policy(policy), product_dtype=None)
    return "mixed_bfloat16" if half == get_policy("mixed_bfloat16") else str(half)


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
        if get_policy(policy).product_dtype is not None:
            return float(jnp.finfo(OPERANDS).eps)
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
