"""Equinox: run unmodified modules in mixed precision, and train them with atomic steps.

`autocast(loss_fn, policy)` is used as `eqx.filter_jit` is: on functions whose arguments are, or
contain, modules. Wrap the whole loss, with its `jax.vmap`, and not the module inside it: the best
program for one example is not the best for a batch.

`train_step` skips a step atomically: model, optimizer state and `eqx.nn.State` move together or not
at all.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import equinox as eqx
import jax
import optax

from jmp._messages import check_function, refuse_other_models
from jmp.adapters._atomic import TrainStep, check_step, take_step
from jmp.adapters._marked_modules import Names, classes_around, mark, plain_class, set_class
from jmp.adapters._module_policies import ModulePolicies, ModuleScopes, storage_rules
from jmp.autocasting._autocast import or_decorator
from jmp.loss_scaling._gradients import value_and_scaled_grad
from jmp.loss_scaling._scales import LossScale
from jmp.policy import Policy, get_policy
from jmp.rules import Rule
from jmp.trees import PyTree, cast_leaf, cast_to_at_least_float32, is_array, path_string

__all__ = [
    "TrainStep",
    "apply_updates",
    "autocast",
    "cast_params",
    "scaled_value_and_grad",
    "train_step",
]

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")


@or_decorator
def autocast(
    fun: Any = None, policy: Any = None, *, rules: Sequence[Rule] = (), **options: Any
) -> Any:
    """Returns `fun`, a function of Equinox modules, computing in mixed precision.

    Args:
      fun: a function whose arguments may be, or contain, modules and `eqx.nn.State`, such as a
        loss. Left out, a decorator is returned. Half arrays of modules count as float32 numbers;
        their gradients come back in half.
      policy: only its compute dtype is read. Results keep the dtypes that `fun` returns.
      rules: `(target, policy)` pairs, see `jmp.rules`; paths are attribute names from a module
        among the arguments on, joined by slashes: "layers/0". If no rule names a module, a glob or
        a regular expression may name a scope of `jax.named_scope`.
      **options: further options of `jmp.autocast`.

    Returns: a function with `fun`'s signature, for `eqx.filter_jit`, `eqx.filter_grad`, `jax.vmap`.

    Raises:
      TypeError: no policy; `fun` is no function.
      ValueError: a policy is unknown; or policy and rules name two half dtypes (at the call).

    Warns: `UnusedRuleWarning` for a rule that matched no module, no array of one and no scope.

    >>> import equinox as eqx
    >>> loss = lambda model, x: jax.vmap(model)(x).sum()
    >>> model = eqx.nn.Linear(2, 3, key=jax.random.key(0))
    >>> grads = eqx.filter_grad(autocast(loss, "mixed_bfloat16"))(model, jnp.ones((4, 2)))
    >>> grads.weight.dtype
    dtype('float32')
    """
    check_function(fun, "autocast", "autocast(loss_fn, policy)(model, *args)")
    refuse_other_models(fun, "autocast", "fun", "equinox", "a function of Equinox modules")
    return with_marked_modules(fun, ModulePolicies(policy, rules, options, name_scopes=True))


def with_marked_modules(fun: Callable[P, R], policies: ModulePolicies) -> Callable[P, R]:
    """Returns `fun` under autocast; each module among its arguments computes with its own
    policy."""

    @functools.wraps(fun)
    def in_float32(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = _map_modules(functools.partial(_mark_module, policies), (args, kwargs))
        with policies.in_force():
            result = fun(*args, **kwargs)
        return _map_modules(_unmark_module, result)

    return policies.autocast(in_float32)


def in_scopes(fun: Callable[P, R]) -> Callable[P, R]:
    """Returns `fun`, in which the methods of modules among the arguments open scopes with paths.

    Half arrays of modules count as float32 numbers, as under `autocast`.

    A function may combine a part of a module, which `eqx.partition` returned, with another part. If
    the other part is no argument, it has no marks, and Equinox refuses to combine the two. Such a
    function runs as it is; a trace decides.
    """
    marked = with_marked_modules(fun, ModuleScopes())

    @functools.wraps(fun)
    def scoped(*args: P.args, **kwargs: P.kwargs) -> R:
        if not any(map(_is_module, jax.tree.leaves((args, kwargs), is_leaf=_is_module))):
            return fun(*args, **kwargs)
        chosen = marked
        try:
            eqx.filter_eval_shape(marked, *args, **kwargs)
        except (TypeError, ValueError):  # an error of the function itself comes again
            chosen = fun
        return chosen(*args, **kwargs)

    return scoped


def cast_params(model: T, policy: str | Policy, rules: Sequence[Rule] | None = None) -> T:
    """Returns `model` stored as `policy` says: arrays in `param_dtype`, arrays of norms in float32.

    Args:
      model: a module, or a tree of them. An `eqx.nn.State` stays as it is, float32.
      policy, rules: as in `autocast`; classes, paths of modules and of arrays match. Norms that no
        rule matches are float32, except with `rules=()` or a pure half policy without rules.

    Returns: a model of the same structure; `jmp.cast_to_full` casts it back for export.
    Raises: TypeError for a model of another framework; ValueError for an unknown policy, or one
      that stores in float8.
    Warns: `UnusedRuleWarning` for a rule that matched nothing.

    >>> import equinox as eqx
    >>> cast_params(eqx.nn.Linear(2, 3, key=jax.random.key(0)), "O2").weight.dtype
    dtype('float16')
    """
    refuse_other_models(model, "cast_params", "model", "equinox", "a module of Equinox")
    stored = storage_rules(get_policy(policy), rules)

    def cast_module(module: eqx.Module) -> eqx.Module:
        classes = {names: type(part) for names, part in _modules_in(module)}

        def cast(path: tuple[Any, ...], leaf: Any) -> Any:
            if not is_array(leaf):
                return leaf
            names = tuple(path_string((key,)) for key in path)
            policy = stored.policy_for("/".join(names), classes_around(names, classes))
            return cast_leaf(leaf, policy.param_dtype)

        return jax.tree_util.tree_map_with_path(cast, module, is_leaf=_is_state_index)

    result = _map_modules(cast_module, model)
    stored.warn_unused()
    return result


def scaled_value_and_grad(
    fun: Callable[P, Any], loss_scale: LossScale, *, has_aux: bool = False
) -> Callable[P, tuple[Any, Any]]:
    """Like `eqx.filter_value_and_grad`, for a loss times its scale; see
    `jmp.scaled_value_and_grad`.

    Args:
      fun: returns a real floating scalar, or `(scalar, aux)` with `has_aux`. Differentiated with
        respect to the floating arrays of its first argument.
      loss_scale: the scale in force.

    Returns: a function that returns `(value, gradients)` or `((value, aux), gradients)`: the value
      unscaled, the gradients still scaled, with None in place of leaves that are no floating
      arrays.
    Raises: as `jmp.scaled_value_and_grad`.

    >>> import equinox as eqx
    >>> model = eqx.nn.Linear(2, 1, key=jax.random.key(0))
    >>> loss = lambda model, x: jax.vmap(model)(x).sum()
    >>> _, grads = scaled_value_and_grad(loss, StaticLossScale(8))(model, jnp.ones((3, 2)))
    >>> float(grads.bias[0])
    24.0
    """

    check_function(fun, "scaled_value_and_grad", "scaled_value_and_grad(loss_fn, scale)(model)")
    return value_and_scaled_grad(eqx.filter_value_and_grad, fun, loss_scale, has_aux)


def train_step(
    loss_fn: Callable[..., Any],
    model: PyTree,
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
      loss_fn: called as `loss_fn(model, *args)`, returns a real floating scalar; with `state` as
        `loss_fn(model, state, *args)`, returns `(scalar, state)`. With `has_aux` it returns `aux`,
        or `(state, aux)`, beside the scalar.
      model: the module; its floating arrays are trained.
      opt_state: `tx.init(eqx.filter(model, eqx.is_inexact_array))`.
      tx: such as `transforms.mixed_precision(optax.adam(1e-3), "mixed_float16")`.
      *args: passed to `loss_fn`.
      state: an `eqx.nn.State`, or None.
      extra_args: further arguments of `tx.update`, such as `{"value": validation_loss}`; `value` is
        otherwise the loss of the step, for `optax.contrib.reduce_on_plateau`.

    Returns: a named tuple `(model, opt_state, loss, state, aux)`; the loss is unscaled, at least
      float32. Wrap the call in `eqx.filter_jit`.
    Raises: TypeError if the loss is no real floating scalar or an argument is of the wrong kind;
      ValueError if the model holds no floating array, or the optimizer's order is wrong.

    >>> import equinox as eqx, optax
    >>> from jmp import transforms
    >>> tx = transforms.mixed_precision(optax.sgd(0.1), "mixed_float16")
    >>> model = eqx.nn.Linear(2, 1, key=jax.random.key(0))
    >>> opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))
    >>> loss = autocast(lambda model, x: (jax.vmap(model)(x) ** 2).mean(), "mixed_float16")
    >>> step = train_step(loss, model, opt_state, tx, jnp.ones((4, 2)))
    >>> step.loss.dtype, type(step.model).__name__
    (dtype('float32'), 'Linear')
    """
    check_step(loss_fn, model, "equinox", "a module of Equinox, or a tree of them")
    params, static = eqx.partition(model, eqx.is_inexact_array)

    @functools.wraps(loss_fn)
    def of_params(params: PyTree, *args: Any, **kwargs: Any) -> Any:
        return loss_fn(eqx.combine(params, static), *args, **kwargs)

    step = take_step(of_params, params, opt_state, tx, args, state, has_aux, extra_args)
    return step._replace(model=eqx.combine(step.model, static))


def apply_updates(model: T, updates: PyTree) -> T:
    """Returns `model` with updates added, in the dtypes of its arrays.

    `eqx.apply_updates` would make half arrays float32, because updates are float32.

    Args:
      model: a module, whose floating arrays are trained.
      updates: what `tx.update` returned, with None in place of leaves that are not trained.

    >>> import equinox as eqx
    >>> model = cast_params(eqx.nn.Linear(2, 1, key=jax.random.key(0)), "O2")
    >>> updates = jax.tree.map(jnp.zeros_like, cast_to_full(eqx.filter(model, eqx.is_array)))
    >>> apply_updates(model, updates).weight.dtype
    dtype('float16')
    """
    add = lambda update, array: array if update is None else (array + update).astype(array.dtype)
    return jax.tree.map(add, updates, model, is_leaf=lambda leaf: leaf is None)


def _is_module(node: object) -> bool:
    return isinstance(node, eqx.Module) and not _is_state_index(node)


def _is_state_index(node: object) -> bool:
    return isinstance(node, eqx.nn.StateIndex)


def _map_modules(function: Callable[[eqx.Module], Any], tree: PyTree) -> PyTree:
    """Applies `function` to the outermost modules of a tree."""
    return jax.tree.map(lambda x: function(x) if _is_module(x) else x, tree, is_leaf=_is_module)


def _modules_in(node: Any, names: Names = ()) -> Iterator[tuple[Names, eqx.Module]]:
    """Yields the modules of a tree, each behind the names that lead to it."""
    if _is_module(node):
        yield names, node
    is_one_level_below = lambda part: part is not node
    parts, _ = jax.tree_util.tree_flatten_with_path(node, is_leaf=is_one_level_below)
    for key, part in parts:
        if part is not node:
            yield from _modules_in(part, (*names, path_string(key)))


def _mark_module(policies: ModulePolicies, module: eqx.Module) -> eqx.Module:
    """Returns a module whose parts open the scopes of the rules they match, arrays in float32."""
    policies.match_parameters(module)
    copy = jax.tree.map(cast_to_at_least_float32, module, is_leaf=_is_state_index)
    mark(_modules_in(copy), eqx.Module, policies)
    return copy


def _unmark_module(module: eqx.Module) -> eqx.Module:
    copy = jax.tree.map(lambda leaf: leaf, module)
    for _, part in _modules_in(copy):
        set_class(part, plain_class(type(part)))
    return copy
