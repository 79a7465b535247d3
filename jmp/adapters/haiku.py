"""Haiku: run an unmodified, transformed network in mixed precision, and train it with atomic steps.

`autocast(hk.transform_with_state(forward), policy)` gives the same pair of functions, whose `apply`
runs under `jmp.autocast`. `train_step` skips a step atomically: parameters, optimizer state and the
network's state move together or not at all.
"""

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, Unpack

import haiku as hk
import optax

from jmp._messages import PrecisionWarning, users_stacklevel, way_out, wrong
from jmp.adapters._atomic import TrainStep, check_step, take_step
from jmp.adapters._module_policies import ModulePolicies, cast_by_paths, opened
from jmp.autocasting._autocast import Options
from jmp.policy import Policy, get_policy
from jmp.rules import Rule
from jmp.trees import PyTree, cast_floating, cast_to_at_least_float32

__all__ = ["autocast", "cast_params", "train_step"]

T = TypeVar("T", bound=Mapping[str, Any])
N = TypeVar("N", hk.Transformed, hk.TransformedWithState)


def autocast(
    network: N,
    policy: str | Policy,
    *,
    rules: Sequence[Rule] | None = None,
    **options: Unpack[Options],
) -> N:
    """Returns `network` with an `apply` that computes with `policy`; call it exactly as before.

    Args:
      network: what `hk.transform` or `hk.transform_with_state` returned, also through
        `hk.without_apply_rng`. Parameters may be stored in float32 (O1), or in half except in norms
        (O2, see `cast_params`). Half parameters are computed with as float32 numbers; their
        gradients come back in half.
      policy: its compute dtype is for products, its output dtype for what the network returns.
      rules: `(target, policy)` pairs, see `jmp.rules`; a path is a module's name as it stands in
        the parameters, such as "res_net/~/logits", or without the "~", as `precision_report` prints
        it: "res_net/logits". Norms compute in float32 from half inputs in every policy; a float32
        rule for one keeps its output float32.
      **options: further options of `jmp.autocast`.

    Returns: the same kind of pair; `init` is the network's own. Floating state comes back in
      float32 whatever dtype it was passed in (in half under O3); counters stay integers.

    Raises:
      TypeError: `network` is not transformed.
      ValueError: a policy is unknown; or policy and rules name two half dtypes (at the call).

    Warns: `UnusedRuleWarning` for a rule that matched no module and no parameter; `UserWarning`
      if a module has a policy of `hk.mixed_precision.set_policy` too.

    >>> import haiku as hk
    >>> network = hk.without_apply_rng(hk.transform(lambda x: hk.Linear(3)(x)))
    >>> half = autocast(network, "p=f32,c=bf16,o=bf16")
    >>> params = half.init(jax.random.key(0), jnp.ones((1, 2)))
    >>> half.apply(params, jnp.ones((1, 2))).dtype
    dtype(bfloat16)
    """
    if not isinstance(network, (hk.Transformed, hk.TransformedWithState)):
        expected = (
            "what hk.transform or hk.transform_with_state returned. Each function of an "
            "hk.multi_transform is wrapped separately: "
            "autocast(hk.Transformed(network.init, network.apply[0]), policy)"
        )
        raise wrong(TypeError, "autocast", network, expected, more=way_out(network))
    policies = ModulePolicies(policy, rules, options)
    has_state = isinstance(network, hk.TransformedWithState)

    @functools.wraps(network.apply)
    def in_float32(params: optax.Params, *args: Any, **kwargs: Any) -> Any:
        around: list[type] = []  # classes of the modules being called, innermost first

        def intercept(call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
            # A constructor computes nothing; another wrapped network may be inside this one.
            if context.method_name == "__init__" or not policies.are_in_force:
                return call(*args, **kwargs)
            module = context.module
            _warn_of_own_policy(type(module))
            around.insert(0, type(module))
            try:
                with opened(policies.scope_of(module, module.module_name, around)):
                    return call(*args, **kwargs)
            finally:
                around.pop(0)

        params = policies.widened(params)
        if has_state and "state" in kwargs:
            kwargs = {**kwargs, "state": cast_to_at_least_float32(kwargs["state"])}
        elif has_state:
            args = (cast_to_at_least_float32(args[0]), *args[1:])
        with policies.in_force(), hk.intercept_methods(intercept):
            return network.apply(params, *args, **kwargs)

    lowered = policies.autocast(in_float32)

    @functools.wraps(network.apply)
    def apply(*args: Any, **kwargs: Any) -> Any:
        result = lowered(*args, **kwargs)
        if not has_state:
            return policies.policy.cast_to_output(result)
        output, state = result
        state = cast_floating(state, policies.statistics_dtype)
        return policies.policy.cast_to_output(output), state

    return type(network)(network.init, apply)


def _warn_of_own_policy(module_type: type[hk.Module]) -> None:
    """Warns if a class of modules has a policy of Haiku's own beside the policy of `autocast`."""
    if hk.mixed_precision.get_policy(module_type) is not None:
        warnings.warn(
            f"autocast computes with its policy and rules, and '{module_type.__name__}' has a "
            "policy of hk.mixed_precision.set_policy too, whose casts to half stay. Remove the "
            "lines of set_policy, or call hk.mixed_precision.clear_policy of the class before.",
            PrecisionWarning,
            stacklevel=users_stacklevel(),
        )


def cast_params(params: T, policy: str | Policy, rules: Sequence[Rule] | None = None) -> T:
    """Returns `params` stored as `policy` says: in `param_dtype`, and in norms in float32.

    Args:
      params: what `network.init` returned, without the state, which stays float32.
      policy: its param dtype is for every parameter that is in no rule and in no norm.
      rules: as in `autocast`. Only paths can match: parameters have no modules' classes. Norms are
        recognised by their names.

    Returns: the same structure; `jmp.cast_to_full` casts it back for export.

    Raises:
      TypeError: `params` is no dictionary of dictionaries; a policy of the wrong kind.
      ValueError: an unknown policy, or one that stores in float8.

    Warns: `UnusedRuleWarning` for a rule that matched nothing.

    >>> params = {"linear": {"w": jnp.ones((2, 2))}, "batch_norm": {"scale": jnp.ones(2)}}
    >>> cast = cast_params(params, "O2")
    >>> cast["linear"]["w"].dtype, cast["batch_norm"]["scale"].dtype
    (dtype('float16'), dtype('float32'))
    """
    if not isinstance(params, Mapping) or not all(isinstance(x, Mapping) for x in params.values()):
        expected = "what network.init returned: {module: {name: array}}"
        raise wrong(TypeError, "cast_params", params, expected, name="params", more=way_out(params))
    return cast_by_paths(params, get_policy(policy), rules)


def train_step(
    loss_fn: Callable[..., Any],
    params: optax.Params,
    opt_state: PyTree,
    tx: optax.GradientTransformation,
    *args: Any,
    state: PyTree = None,
    has_aux: bool = False,
    extra_args: Mapping[str, Any] | None = None,
) -> TrainStep:
    """Takes one training step; after an overflow nothing changes but the loss scale and its counts.

    Without a loss scale, as by default in bfloat16, no gradient is checked and no step is skipped;
    `mixed_precision(..., loss_scale=jmp.StaticLossScale(1.0))` checks and skips.

    Args:
      loss_fn: called as `loss_fn(params, *args)`, returns a real floating scalar; with `state` as
        `loss_fn(params, state, *args)`, returns `(scalar, state)`. With `has_aux` it returns `aux`,
        or `(state, aux)`, beside the scalar.
      params: what is trained.
      opt_state: `tx.init(params)`.
      tx: such as `transforms.mixed_precision(optax.adam(1e-3), "mixed_float16")`.
      *args: passed to `loss_fn`.
      state: the network's state, or None.
      has_aux: whether `loss_fn` returns more than that.
      extra_args: further arguments of `tx.update`, such as `{"value": validation_loss}`; `value` is
        otherwise the loss of the step, for `optax.contrib.reduce_on_plateau`.

    Returns: a named tuple `(model, opt_state, loss, state, aux)`: `model` is the parameters; the
      loss is unscaled, at least float32. Wrap the call in `jax.jit`.
    Raises: TypeError if the loss is no real floating scalar or an argument is of the wrong kind;
      ValueError if there are no floating arrays to train, or the optimizer's order is wrong.

    >>> import haiku as hk, optax
    >>> from jmp import transforms
    >>> network = hk.without_apply_rng(hk.transform(lambda x: hk.Linear(1)(x)))
    >>> network = autocast(network, "mixed_float16")
    >>> params = network.init(jax.random.key(0), jnp.ones((1, 2)))
    >>> tx = transforms.mixed_precision(optax.sgd(0.1), "mixed_float16")
    >>> loss_fn = lambda params, x: (network.apply(params, x) ** 2).mean()
    >>> step = train_step(loss_fn, params, tx.init(params), tx, jnp.ones((4, 2)))
    >>> step.loss.dtype, sorted(step.model["linear"])
    (dtype('float32'), ['b', 'w'])
    """
    check_step(loss_fn, params, "", "parameters, such as network.init returned")
    return take_step(loss_fn, params, opt_state, tx, args, state, has_aux, extra_args)
