"""Flax linen: run an unmodified model in mixed precision, and train it with atomic steps.

`autocast(model.apply, policy)` gives a function that is called exactly as `model.apply` is, and
runs under `jmp.autocast`: each product is half, forward and backward, whatever `dtype` the model's
layers name, unless a rule or `keep_dtypes` says otherwise; norms, softmax, sums and running
statistics are float32. Rules name modules by path or by class: while the model is traced, Flax says
which module is being called. `_module_policies` decides which parameters are those of a norm.

`TrainState` skips a step atomically: parameters, optimizer state, batch statistics and step count
move together or not at all. Its `replace(params=...)` lets masters follow: the next step, which
starts from them, would undo it. `_linen_checkpoints` saves and restores it.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, Self, TypeVar, Unpack

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training import train_state

from jmp._messages import refuse_other_models, wrong
from jmp.adapters._atomic import check_is_scaled, grads_finite_in, keep_if_skipped, loss_scale_in
from jmp.adapters._linen_checkpoints import array_fields, register_train_state
from jmp.adapters._module_policies import ModulePolicies, cast_by_paths, opened, policy_of_norms
from jmp.autocasting._autocast import Options
from jmp.loss_scaling._scales import LossScale
from jmp.policy import Policy, get_policy, mark_lowered
from jmp.rules import Rule
from jmp.transforms._masters import follow_replaced
from jmp.transforms._placement import placed
from jmp.transforms._wrapping import as_transformation, check_order, structures_compared
from jmp.trees import PyTree, cast_floating, cast_to_at_least_float32, register_for_export

__all__ = ["TrainState", "autocast", "cast_params"]

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")

# Names that an apply function may give the variables.
_VARIABLES = ("variables", "params")


def autocast(
    apply_fn: Callable[P, R],
    policy: str | Policy,
    *,
    rules: Sequence[Rule] | None = None,
    keep_dtypes: bool = False,
    **options: Unpack[Options],
) -> Callable[P, R]:
    """Returns an `apply_fn` that computes with `policy`; call it exactly as before.

    Args:
      apply_fn: `model.apply` of an unmodified model, or the model, which stands for that; or any
        function of its variables that applies it, such as the `__call__` of a Hugging Face model.
        Variables are its first argument, or its keyword argument `variables` or `params`.
        Parameters may be stored in float32 (O1), or in half except in norms (O2, see
        `cast_params`). Half parameters are computed with as float32 numbers; their gradients come
        back in half.
      policy: its compute dtype is for products, its output dtype for what the call returns.
      rules: `(target, policy)` pairs, see `jmp.rules`; paths name modules. `("head", "float32")`
        computes the head in float32. Norms compute in float32 from half inputs in every policy; a
        float32 rule for one keeps its output float32.
      keep_dtypes: whether modules with `dtype=jnp.float32` compute in float32. In most published
        models this is the default of `dtype`, so with False the policy decides. A rule comes first
        in either case.
      **options: further options of `jmp.autocast`, such as `recompute="none"`.

    Returns: a function with `apply_fn`'s signature. Updated batch statistics come back in float32
      whatever dtype they were passed in (in half under O3); other collections keep their dtypes.
      A model that was wrapped keeps its own policy inside another wrapped model.

    Raises:
      TypeError: `apply_fn` is a method that takes no variables, or of another framework; a policy,
        a rule or an option is of the wrong kind.
      ValueError: a policy is unknown or has a float8 besides its products; `jmp.autocast` refuses
        the value of an option; or policy and rules name two half dtypes (at the call).

    Warns: `UnusedRuleWarning` for a rule that matched no module and no parameter.

    >>> import flax.linen as nn
    >>> model = nn.Dense(3)
    >>> variables = model.init(jax.random.key(0), jnp.ones((1, 2)))
    >>> autocast(model.apply, "p=f32,c=bf16,o=bf16")(variables, jnp.ones((1, 2))).dtype
    dtype(bfloat16)
    """
    apply_fn = _apply_of(apply_fn)
    policies = ModulePolicies(policy, rules, options, keep_dtypes=keep_dtypes)

    def intercept(call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        # Another wrapped model may be inside this one; an unbound module has no parameters.
        if not policies.are_in_force or context.module.scope is None:
            return call(*args, **kwargs)
        module = context.module
        classes = _with_classes_around(module)
        path, root = "/".join(module.path), classes[-1].__name__
        with opened(policies.scope_of(module, path, classes, root)):
            return call(*args, **kwargs)

    @functools.wraps(apply_fn)
    def in_float32(*args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], Mapping):
            args = (_widened(args[0], policies), *args[1:])
        wide = {name: _widened(kwargs[name], policies) for name in _VARIABLES if name in kwargs}
        with policies.in_force(), nn.intercept_methods(intercept):
            return apply_fn(*args, **{**kwargs, **wide})

    lowered = policies.autocast(in_float32)
    cast_statistics = functools.partial(cast_floating, dtype=policies.statistics_dtype)

    @functools.wraps(apply_fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = lowered(*args, **kwargs)
        if kwargs.get("mutable", False) is False and not kwargs.get("capture_intermediates"):
            return policies.policy.cast_to_output(result)
        output, updated = result
        updated = _with_cast(updated, batch_stats=cast_statistics)
        return policies.policy.cast_to_output(output), updated

    return mark_lowered(wrapped, policies.lowered)


def cast_params(variables: T, policy: str | Policy, rules: Sequence[Rule] | None = None) -> T:
    """Returns `variables` stored as `policy` says, and norms and batch statistics in float32.

    Args:
      variables: what `model.init` returned, with its collections, or only its "params".
      policy: its param dtype is for every parameter that is in no rule and in no norm.
      rules: as in `autocast`. Only paths can match: variables have no classes of modules. Norms are
        recognised by their names ("scale", "bn1", "LayerNorm_0").

    Returns: the same structure and shapes, cast. `jmp.cast_to_full` casts it back for export.

    Raises:
      TypeError: a model instead of its variables; a policy that is neither text nor a `Policy`.
      ValueError: an unknown policy, or one that stores in float8.

    Warns: `UnusedRuleWarning` for a rule that matched nothing.

    >>> norm = {"scale": jnp.ones(2)}
    >>> params = {"Dense_0": {"kernel": jnp.ones((2, 2))}, "BatchNorm_0": norm}
    >>> cast = cast_params(params, "O2")
    >>> cast["Dense_0"]["kernel"].dtype, cast["BatchNorm_0"]["scale"].dtype
    (dtype('float16'), dtype('float32'))
    """
    refuse_other_models(variables, "cast_params", "variables", "", "what model.init returned")
    policy = get_policy(policy)
    rules = None if rules is None else tuple(rules)  # read more than once
    cast_params_only = functools.partial(cast_by_paths, policy=policy, rules=rules)
    if not _has_collections(variables):
        return cast_params_only(variables)
    statistics_dtype = policy_of_norms(policy, rules).param_dtype
    cast_statistics = functools.partial(cast_floating, dtype=statistics_dtype)
    return _with_cast(variables, params=cast_params_only, batch_stats=cast_statistics)


def _apply_of(apply_fn: Any) -> Any:
    """Returns a function of a model's variables; raises TypeError for anything else."""
    expected = "a function of a model's variables"
    if _is_unbound(apply_fn):
        return apply_fn.apply
    owner = getattr(apply_fn, "__self__", None)
    for value in (apply_fn, owner):
        refuse_other_models(value, "autocast", "apply_fn", "flax.linen", expected)
    # `apply` and `init` take variables; methods of the model's author do not.
    is_by_its_author = getattr(apply_fn, "__name__", "") not in vars(nn.Module)
    takes_no_variables = _is_unbound(owner) and is_by_its_author
    if takes_no_variables or not callable(apply_fn):
        more = " Write autocast(model.apply, policy); for other methods give method= in its call."
        raise wrong(TypeError, "autocast", apply_fn, expected, more=more)
    return apply_fn


def _is_unbound(value: object) -> bool:
    """Returns whether a value is a module without variables."""
    return isinstance(value, nn.Module) and value.scope is None


def _with_classes_around(module: Any) -> list[type]:
    """Returns the class of a module and of those around it, innermost first."""
    classes = []
    while isinstance(module, nn.Module):
        classes.append(type(module))
        module = module.parent
    return classes


def _widened(variables: PyTree, policies: ModulePolicies) -> PyTree:
    """Returns half parameters and statistics in float32; caches of a model keep their dtypes."""
    if not _has_collections(variables):
        return policies.widened(variables)
    return _with_cast(variables, params=policies.widened, batch_stats=cast_to_at_least_float32)


def _has_collections(variables: PyTree) -> bool:
    """Returns whether these are variables with collections; else they are only parameters."""
    return isinstance(variables, Mapping) and ("params" in variables or "batch_stats" in variables)


def _with_cast(variables: T, **casts: Callable[[Any], Any]) -> T:
    """Returns variables whose collections of these names are cast, if they have them."""
    held: Any = variables
    cast = {name: function(held[name]) for name, function in casts.items() if name in held}
    return type(held)({**held, **cast})


# Training, with atomic steps.


class TrainState(train_state.TrainState):
    """Flax's TrainState with batch statistics, whose steps are atomic.

    Make one with `TrainState.create`. An atomic step is taken as a whole or not at all. A subclass
    may have fields of its own, each with a default, as `average: PyTree = None`.

    Attributes, in addition to Flax's:
      batch_stats: the model's running statistics, or None.

    >>> import flax.linen as nn, optax, jmp
    >>> from jmp import transforms
    >>> model = nn.Dense(1)
    >>> params = model.init(jax.random.key(0), jnp.ones((1, 2)))["params"]
    >>> tx = transforms.with_loss_scale(optax.sgd(0.1), jmp.StaticLossScale(8))
    >>> state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    >>> bad = jax.tree.map(lambda p: p * jnp.inf, params)
    >>> skipped = state.apply_gradients(grads=bad)
    >>> int(skipped.step), bool(skipped.grads_finite)
    (0, False)
    """

    batch_stats: PyTree = None

    @classmethod
    def create(
        cls,
        *,
        apply_fn: Callable[..., Any],
        params: optax.Params,
        tx: optax.GradientTransformation,
        **kwargs: Any,
    ) -> Self:
        """Creates a state at step 0.

        The step is an int32 array from the start: a Python 0 would compile the step twice. It lies
        on the mesh of the parameters, if they are sharded.

        Args:
          apply_fn: the model's apply function, such as `autocast` returned.
          params: a tree of arrays, float32 or half.
          tx: an optax transformation, such as `transforms.mixed_precision(optax.adam(1e-3), ...)`.
            In a chain, transformations may come after loss scaling: `apply_gradients` undoes what
            they changed in a step that is skipped.
          **kwargs: the other fields, such as `batch_stats`.

        Raises:
          TypeError: `tx` is no optax transformation; None as parameters.
          ValueError: an optimizer in an order that fails, see `transforms.check_optimizer_state`;
            `mixed_precision` of a policy with float32 parameters, if these are half.

        Warns: `jmp.UnscaledLossWarning` for an optimizer without a loss scale if `apply_fn`
          computes in float16.
        """
        caller = "TrainState.create"
        as_transformation(tx, caller, "tx")
        if params is None:
            expected = "a tree of arrays, such as model.init(key, x)['params']"
            raise wrong(TypeError, caller, params, expected, name="params")
        state: Self = super().create(  # type: ignore[no-untyped-call]  # Flax gives no types
            apply_fn=apply_fn, params=params, tx=tx, **kwargs
        )
        check_order(state.opt_state, params, undone_on_a_skip=True)
        check_is_scaled(state.opt_state, apply_fn)
        return state.replace(step=placed(jnp.zeros([], jnp.int32), params))

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)  # type: ignore[no-untyped-call]  # likewise
        _exchange_made_by_flax(cls)

    @property
    def loss_scale(self) -> LossScale:
        """The loss scale in force, wherever the optimizer holds it; `NoOpLossScale` if nowhere."""
        return loss_scale_in(self.opt_state)

    @property
    def grads_finite(self) -> jax.Array:
        """Whether the last step was taken, a bool scalar, wherever the optimizer holds it.

        It is True before the first step, and always True if nothing is checked: without loss
        scaling and with `NoOpLossScale`, as in bfloat16.
        """
        return grads_finite_in(self.opt_state)

    def apply_gradients(
        self, *, grads: optax.Updates, extra_args: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> Self:
        """Returns the next state, or on overflow this one with a smaller scale.

        Args:
          grads: scaled gradients, as `jmp.scaled_value_and_grad` returns them.
          extra_args: further arguments of `tx.update`, such as `{"value": loss}` for
            `optax.contrib.reduce_on_plateau`.
          **kwargs: fields to replace, such as `batch_stats=new_statistics`. If the step is skipped
            arrays stay as they were, like the parameters. A field that is computed from the *new*
            parameters, such as their average, is selected after this call, with `grads_finite` of
            the new state.

        Raises:
          TypeError: a field that the state does not have; None as gradients.
          ValueError: gradients of another structure than the parameters.
        """
        tx = as_transformation(self.tx, "apply_gradients", "tx")
        update = functools.partial(tx.update, **(extra_args or {}))
        given: Self = self.replace(tx=optax.GradientTransformation(self.tx.init, update))
        with structures_compared(grads, self.params, "apply_gradients"):
            new: Self = super(TrainState, given).apply_gradients(  # type: ignore[no-untyped-call]
                grads=grads, **kwargs
            )
        moved = {"step", "params", *kwargs} & {*array_fields(self)}
        before = {name: getattr(self, name) for name in moved}
        after = {name: getattr(new, name) for name in moved}
        kept, opt_state = keep_if_skipped(after, before, new.opt_state, self.opt_state)
        return new.replace(opt_state=opt_state, tx=kwargs.get("tx", self.tx), **kept)


def _replace_with_masters(self: TrainState, **updates: Any) -> TrainState:
    """Returns a state with other fields; masters follow `params=`, unless `opt_state=` is given.

    If the masters did not follow, the next step, which starts from them, would undo the
    replacement. To evaluate with other parameters and go on with the present ones afterwards, give
    `opt_state=state.opt_state` too.

    Raises: TypeError for a field that the state does not have; ValueError for `params=` if the
      masters are one vector, as inside `optax.flatten`.
    """
    if "params" in updates and "opt_state" not in updates:
        params, opt_state = follow_replaced(self.opt_state, updates["params"], self.params)
        updates |= {"params": params, "opt_state": opt_state}
    return dataclasses.replace(self, **updates)


def _exchange_made_by_flax(cls: type[TrainState]) -> None:
    """Gives a class our `replace` and our way to restore, in place of those that Flax makes."""
    cls.replace = _replace_with_masters  # type: ignore[assignment, method-assign]
    register_for_export(cls)
    register_train_state(cls)


_exchange_made_by_flax(TrainState)
