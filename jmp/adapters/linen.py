"""Flax linen: run an unmodified model in mixed precision, and train it with atomic steps.

`wrap_apply(model.apply, policy)` gives a function that is called exactly as `model.apply` is, and
computes by `jmp.autocast`: each product in half, forward and backward, whatever `dtype` the model's
layers name; norms, softmax, sums and running statistics in float32. Rules name modules by path or
by class: while the model is traced, Flax tells which module is being called.

`TrainState` skips a step atomically: parameters, optimizer state, batch statistics and step count
move together or not at all. Importing this module also teaches `flax.serialization` loss scales.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar, Unpack

import flax.linen as nn
import jax
from jax.typing import DTypeLike

from jmp._messages import described, refuse_other_models
from jmp.adapters import _train_state
from jmp.adapters._module_policies import (
    FLOAT32_POLICY,
    ModulePolicies,
    is_norm_parameters,
    keeps_norms_float32,
)
from jmp.adapters._train_state import TrainState
from jmp.autocasting._autocast import Options
from jmp.policy import Policy, get_policy, mark_lowered
from jmp.rules import PolicyRules, Rule
from jmp.trees import PyTree, cast_floating, cast_leaf, cast_to_at_least_float32, path_string

__all__ = ["TrainState", "cast_params", "wrap_apply"]

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")

_train_state.register()


def wrap_apply(
    apply_fn: Callable[P, R],
    policy: str | Policy,
    rules: Sequence[Rule] | None = None,
    *,
    keep_dtypes: bool = False,
    **options: Unpack[Options],
) -> Callable[P, R]:
    """Returns `apply_fn` computing by `policy`; call it exactly as before.

    Args:
      apply_fn: `model.apply` of an unmodified model, or any function of its variables that applies
        it, such as the `__call__` of a Hugging Face model. Variables are its first argument, or its
        keyword argument `variables` or `params`. Parameters may be stored in float32 (O1), or in
        half except those of norms (O2, see `cast_params`). Half parameters are computed with as
        float32 numbers; their gradients come back in half.
      policy: its compute dtype is for products, its output dtype for what the call returns.
      rules: `(target, policy)` pairs, see `jmp.rules`; a path is that of a module.
        `("head", "float32")` computes the head in float32. Norms compute in float32 from half
        inputs in every policy; a float32 rule for one keeps its output float32.
      keep_dtypes: whether modules with `dtype=jnp.float32` compute in float32. In most published
        models this is the default of `dtype`, so with False the policy decides. A rule comes first
        in either case.
      **options: those of `jmp.autocast`, such as `recompute="none"`.

    Returns: a function with `apply_fn`'s signature. Updated batch statistics come back in float32
      whatever dtype they were passed in (in half under O3); other collections keep their dtypes.
      A model that was wrapped keeps its own policy inside another wrapped model.

    Raises:
      TypeError: `apply_fn` is a module, a method that takes no variables, or of another framework;
        a policy, a rule or an option is of the wrong kind.
      ValueError: policy and rules name two half dtypes; a policy is unknown or has a float8 besides
        its products; or `jmp.autocast` refuses the value of an option.

    Warns: `UnusedRuleWarning` for a rule that matched no module and no parameter.

    >>> import flax.linen as nn
    >>> model = nn.Dense(3)
    >>> variables = model.init(jax.random.key(0), jnp.ones((1, 2)))
    >>> wrap_apply(model.apply, "p=f32,c=bf16,o=bf16")(variables, jnp.ones((1, 2))).dtype
    dtype(bfloat16)
    """
    _check_apply(apply_fn)
    modules = ModulePolicies(policy, rules, options, keep_dtypes=keep_dtypes)
    statistics = FLOAT32_POLICY if modules.keeps_norms_float32 else modules.policy

    def intercept(call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        # A model wrapped by itself stands inside this one; an unbound module has no parameters.
        if not modules.are_in_force or context.module.scope is None:
            return call(*args, **kwargs)
        module, *around = _with_parents(context.module)
        root = [module, *around][-1]
        classes = [type(node) for node in (module, *around)]
        named = modules.named(module, "/".join(module.path), classes, root=type(root).__name__)
        with modules.scope(named):
            return call(*args, **kwargs)

    @functools.wraps(apply_fn)
    def in_float32(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = _map_variables(_widen, args, kwargs)
        with modules.in_force(), nn.intercept_methods(intercept):
            result = apply_fn(*args, **kwargs)
        for variables in _variables_among(args, kwargs):  # rules may name single parameters
            for path, _ in _parameters_with_path(variables):
                modules.rules.policy_for(path)
        modules.rules.warn_unused()
        return result

    lowered = modules.autocast(in_float32)

    @functools.wraps(apply_fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = lowered(*args, **kwargs)
        if kwargs.get("mutable", False) is False and not kwargs.get("capture_intermediates"):
            return modules.policy.cast_to_output(result)
        output, updated = result
        updated = _cast_statistics(updated, statistics.param_dtype)
        return modules.policy.cast_to_output(output), updated

    return mark_lowered(wrapped, modules.lowered)


def cast_params(variables: T, policy: str | Policy, rules: Sequence[Rule] | None = None) -> T:
    """Returns `variables` stored as `policy` says, and norms and batch statistics in float32.

    Args:
      variables: what `model.init` returned, with its collections, or its "params" alone.
      policy: its param dtype is for every parameter that is in no rule and in no norm.
      rules: as in `wrap_apply`. Only paths can match: variables have no classes of modules.
        Norms are told by their names ("scale", "bn1", "LayerNorm_0").

    Returns: the same structure and shapes, cast. `jmp.cast_to_full` casts it back for export.

    Raises:
      TypeError: a model instead of its variables; a policy that is neither text nor a `Policy`.
      ValueError: an unknown policy, or one that stores in float8.

    Warns: `UnusedRuleWarning` for a rule that matched nothing.

    >>> params = {"Dense_0": {"kernel": jnp.ones((2, 2))}, "BatchNorm_0": {"scale": jnp.ones(2)}}
    >>> cast = cast_params(params, "O2")
    >>> cast["Dense_0"]["kernel"].dtype, cast["BatchNorm_0"]["scale"].dtype
    (dtype('float16'), dtype('float32'))
    """
    refuse_other_models(variables, "cast_params", "variables", "", "what model.init returned")
    policy = get_policy(policy)
    rules = None if rules is None else tuple(rules)
    keeps_norms = keeps_norms_float32(policy, rules)
    norms = _norm_modules(variables) if keeps_norms else frozenset()
    path_rules = PolicyRules(
        rules or (),
        policy,
        fallback=lambda path, _: FLOAT32_POLICY if path.rpartition("/")[0] in norms else None,
    )
    path_rules.refuse_float8("cast_params")
    cast = {
        path: cast_leaf(leaf, path_rules.policy_for(path).param_dtype)
        for path, leaf in _parameters_with_path(variables)
    }
    path_rules.warn_unused()
    statistics = FLOAT32_POLICY if keeps_norms else policy
    variables = _cast_statistics(variables, statistics.param_dtype)
    stored: T = jax.tree_util.tree_map_with_path(
        lambda path, leaf: cast.get(_path_in_params(path, variables), leaf), variables
    )
    return stored


def _check_apply(apply_fn: Any) -> None:
    """Raises TypeError for what is no function of a model's variables."""
    expected = "a function of a model's variables"
    for value in (apply_fn, getattr(apply_fn, "__self__", None)):  # a model, or that of a method
        refuse_other_models(value, "wrap_apply", "apply_fn", "flax.linen", expected)
    if isinstance(apply_fn, nn.Module) and apply_fn.scope is None:
        raise TypeError(
            f"wrap_apply got the module {type(apply_fn).__name__}; expected {expected}. Write "
            "wrap_apply(model.apply, policy)."
        )
    owner, name = getattr(apply_fn, "__self__", None), getattr(apply_fn, "__name__", "")
    if isinstance(owner, nn.Module) and owner.scope is None and name not in vars(nn.Module):
        raise TypeError(
            f"wrap_apply got {type(owner).__name__}.{name}, which takes no variables; expected "
            f"{expected}. Write wrap_apply(model.apply, policy), and give method= when it is "
            "called."
        )
    if not callable(apply_fn):
        raise TypeError(
            f"wrap_apply got {described(apply_fn)}; expected {expected}: wrap_apply(model.apply, "
            "policy)."
        )


def _with_parents(module: nn.Module) -> list[nn.Module]:
    """Returns a module and those around it, innermost first."""
    nodes = []
    node: Any = module
    while isinstance(node, nn.Module):
        nodes.append(node)
        node = node.parent
    return nodes


def _map_variables(function: Callable[[Any], Any], args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Applies `function` to the variables among the arguments of an apply function."""
    if args and isinstance(args[0], Mapping):
        args = (function(args[0]), *args[1:])
    named = {name: kwargs[name] for name in ("variables", "params") if name in kwargs}
    return args, {**kwargs, **{name: function(value) for name, value in named.items()}}


def _variables_among(args: Any, kwargs: Any) -> list[Any]:
    found: list[Any] = []
    _map_variables(found.append, args, kwargs)
    return found


def _widen(variables: PyTree) -> PyTree:
    """Returns half parameters and statistics in float32; what a model caches keeps its dtype."""
    if not any(_has_collection(variables, name) for name in ("params", "batch_stats")):
        return cast_to_at_least_float32(variables)  # the parameters alone
    wide = {
        name: cast_to_at_least_float32(collection)
        for name, collection in variables.items()
        if name in ("params", "batch_stats")
    }
    return type(variables)({**variables, **wide})


def _cast_statistics(variables: PyTree, dtype: DTypeLike) -> PyTree:
    if not _has_collection(variables, "batch_stats"):
        return variables
    return type(variables)(
        {**variables, "batch_stats": cast_floating(variables["batch_stats"], dtype)}
    )


def _has_collection(variables: PyTree, name: str) -> bool:
    return hasattr(variables, "keys") and name in variables


def _parameters_with_path(variables: PyTree) -> list[tuple[str, Any]]:
    params = variables["params"] if _has_collection(variables, "params") else variables
    if not _has_collection(variables, "params") and _has_collection(variables, "batch_stats"):
        return []
    return [(path_string(p), leaf) for p, leaf in jax.tree_util.tree_leaves_with_path(params)]


def _path_in_params(path: tuple[Any, ...], variables: PyTree) -> str:
    collection, _, rest = path_string(path).partition("/")
    if _has_collection(variables, "params"):
        return rest if collection == "params" else ""
    return path_string(path)


def _norm_modules(variables: PyTree) -> frozenset[str]:
    """Returns the paths of the modules whose parameters are those of a norm."""
    names: dict[str, list[str]] = {}
    for path, _ in _parameters_with_path(variables):
        module, _, name = path.rpartition("/")
        names.setdefault(module, []).append(name)
    return frozenset(
        module for module, own in names.items() if is_norm_parameters(module.split("/")[-1], own)
    )
