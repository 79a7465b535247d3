"""Flax nnx: run an unmodified model in mixed precision, and train it with atomic steps.

`autocast` takes one of two things:
  - a model: `autocast(model, policy)` is a second view of it, new module objects around the *same*
    Variables, each of which computes with the policy when it is called;
  - a function: `autocast(loss_fn, policy)` is lifted as `nnx.jit` and `nnx.grad` are. Its modules
    are arguments, and its changes in them (statistics, counts, caches) are written back.

`train_step` skips a step atomically: parameters, optimizer state, batch statistics and step count
move together or not at all. To write such a step yourself, call `scaled_value_and_grad` and
`optimizer.update` inside `atomic_step`.
"""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar, Unpack, overload

import jax
import optax
from flax import nnx

from jmp import transforms
from jmp._messages import check_function, refuse_other_models, users_stacklevel, way_out, wrong
from jmp.adapters import _nnx_modules
from jmp.adapters._atomic import check_is_scaled, grads_finite_in, keep_if_skipped, loss_scale_in
from jmp.adapters._module_policies import ModulePolicies, storage_rules
from jmp.autocasting import NoHalfProductWarning
from jmp.autocasting._autocast import AllOptions, or_decorator
from jmp.autocasting._numbers import dtype_of
from jmp.autocasting._operations import is_product
from jmp.autocasting._propagation import walk
from jmp.dtypes import is_half
from jmp.loss_scaling._gradients import value_and_scaled_grad
from jmp.loss_scaling._scales import LossScale
from jmp.policy import Policy, get_policy, lowered_to
from jmp.rules import Rule

__all__ = [
    "atomic_step",
    "autocast",
    "cast_params",
    "grads_finite",
    "loss_scale",
    "reset_masters",
    "scaled_value_and_grad",
    "train_step",
]

M = TypeVar("M", bound=nnx.Module)
P = ParamSpec("P")
R = TypeVar("R")
_ORDER = " The order is train_step(loss_fn, model, optimizer, *args)."


@overload
def autocast(model: M, policy: str | Policy, **options: Unpack[AllOptions]) -> M: ...
@overload
def autocast(
    model: Callable[P, R], policy: str | Policy, **options: Unpack[AllOptions]
) -> Callable[P, R]: ...
@overload
def autocast(
    *, policy: str | Policy, **options: Unpack[AllOptions]
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
@or_decorator
def autocast(
    model: Any = None, policy: Any = None, *, rules: Sequence[Rule] | None = None, **options: Any
) -> Any:
    """Returns a view of a model, or a function of models, that computes in mixed precision.

    Args:
      model: an unmodified model. A call of the view, or of a module inside it, runs under
        `jmp.autocast`; other methods run as written except for modules that they call. Running
        statistics of the model that are half become float32 in place, because Flax computes their
        updates in float32. A view gives a new view, in which the old policy does not count. A view
        *inside* a model keeps its own policy. Or a function whose arguments may be, or contain,
        modules, optimizers and `nnx.Rngs`, such as a loss: `nnx.value_and_grad(autocast(loss_fn,
        policy))(model, batch)`, or a method: `autocast(Model.encode, policy)(model, x)`. Its
        changes in these modules are written back. Without a model a decorator is returned. Half
        parameters count as float32 numbers; their gradients come back in half.
      policy: its compute dtype is for products. Its output dtype is for the results of calls of a
        view; results of a function keep their dtypes.
      **options: further options of `jmp.autocast`. `rules` are `(target, policy)` pairs, see
        `jmp.rules`; paths are attribute names joined by slashes, from the model, or from a module
        among the arguments. Norms compute in float32 from half inputs in every policy.

    Returns: for a model, a module of a subclass of its class that shares its Variables, for
      `nnx.split` and `merge`, `nnx.jit`, `nnx.value_and_grad` and `nnx.Optimizer`; `view.eval()`
      sets the mode of the view, and not of the model. For a function, one with its signature.

    Raises:
      TypeError: no policy; neither a model nor a function, or a method bound to its module.
      ValueError: policy and rules name two half dtypes (at the call).

    Warns: `UnusedRuleWarning` for a rule that matched no module and no parameter.

    >>> from flax import nnx
    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> view = autocast(model, "p=f32,c=bf16,o=bf16")
    >>> view(jnp.ones((1, 2))).dtype, view.kernel is model.kernel
    (dtype(bfloat16), True)
    >>> loss_fn = nnx.jit(autocast(lambda model, x: model(x).sum(), "mixed_bfloat16"))
    >>> loss_fn(model, jnp.ones((1, 2))).dtype
    dtype('float32')
    """
    policies = ModulePolicies(policy, rules, options)
    refuse_other_models(model, "autocast", "model", "flax.nnx", "a model of nnx or a function")
    if isinstance(model, nnx.Module):
        view = _nnx_modules.view_of(model, policies)
        policies.match_parameters(nnx.as_pure(nnx.state(model)))
        policies.rules.warn_unused()
        _nnx_modules.cast_in_place(model)
        return view
    check_function(model, "autocast", "autocast(model, policy) or autocast(loss_fn, policy)")
    if isinstance(getattr(model, "__self__", None), nnx.Module):
        raise TypeError(
            f"autocast got {model.__qualname__}, a method bound to its module, whose changes would "
            f"be lost. Write autocast({model.__qualname__}, policy)(model, ...)."
        )
    return _nnx_modules.lift(model, policies)


def cast_params(model: M, policy: str | Policy, rules: Sequence[Rule] | None = None) -> M:
    """Returns a copy of `model`, with Variables of its own, stored as `policy` says.

    Parameters are in `param_dtype`; parameters of norms, and running statistics, are float32.

    Args:
      model: left as it is.
      policy, rules: as in `autocast`; module classes, paths of modules and of parameters match.

    Raises: TypeError if `model` is no module; ValueError for a policy unknown or stored in float8.
    Warns: `UnusedRuleWarning` for a rule that matched nothing.

    >>> from flax import nnx
    >>> cast_params(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), "O2").kernel.dtype
    dtype('float16')
    """
    _check_kinds("cast_params", model=model)
    stored = storage_rules(get_policy(policy), rules)
    copy = nnx.clone(model)
    _nnx_modules.cast_in_place(copy, stored.policy_for)
    stored.warn_unused()
    return copy


def loss_scale(optimizer: nnx.Optimizer[Any]) -> LossScale:
    """Returns the loss scale in force inside an `nnx.Optimizer`; `NoOpLossScale` if it has none.

    Raises: TypeError for another optimizer; otherwise as `transforms.check_optimizer_state`, except
      that a transformation with a state may come after loss scaling: `train_step` undoes its
      changes if it skips. A step with only `optimizer.update` does not: check that once with
      `transforms.check_optimizer_state(nnx.as_pure(optimizer.opt_state))`.

    >>> from flax import nnx
    >>> import optax
    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> loss_scale(nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param))
    NoOpLossScale()
    """
    _check_kinds("loss_scale", optimizer=optimizer)
    return loss_scale_in(nnx.as_pure(optimizer.opt_state))


def grads_finite(optimizer: nnx.Optimizer[Any]) -> jax.Array:
    """Returns whether the last step of an `nnx.Optimizer` was taken, a bool scalar.

    It is True before the first step, and always True if nothing is checked: without loss scaling
    and with `NoOpLossScale`, as in bfloat16.

    Raises: as `loss_scale`.

    >>> from flax import nnx
    >>> import optax
    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> bool(grads_finite(nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)))
    True
    """
    _check_kinds("grads_finite", optimizer=optimizer)
    return grads_finite_in(nnx.as_pure(optimizer.opt_state))


def reset_masters(model: nnx.Module, optimizer: nnx.Optimizer[Any]) -> None:
    """Sets the masters in an optimizer to its model's parameters, in place.

    Call it after `nnx.update(model, loaded)` and the like; otherwise the next step undoes them.

    Raises: TypeError for arguments of another kind; otherwise as `transforms.reset_masters`.

    >>> from flax import nnx
    >>> import optax
    >>> from jmp import transforms
    >>> model = cast_params(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), "O2")
    >>> tx = transforms.with_master_params(optax.sgd(1))
    >>> optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    >>> model.bias[...] = jnp.ones(1, jnp.float16)
    >>> reset_masters(model, optimizer)
    >>> float(nnx.as_pure(optimizer.opt_state).masters["bias"][0])
    1.0
    """
    _check_kinds("reset_masters", model=model, optimizer=optimizer)
    params = nnx.as_pure(nnx.state(model, optimizer.wrt))
    opt_state = transforms.reset_masters(nnx.as_pure(optimizer.opt_state), params)
    nnx.update(optimizer.opt_state, nnx.state(opt_state))


def train_step(
    loss_fn: Callable[..., Any],
    model: nnx.Module,
    optimizer: nnx.Optimizer[Any],
    *args: Any,
    has_aux: bool = False,
    extra_args: Mapping[str, Any] | None = None,
) -> Any:
    """Takes one training step; after an overflow nothing changes but the loss scale and its counts.

    Scales the loss, differentiates it with respect to the Variables the optimizer was made for, and
    updates model and optimizer in place. A skipped step moves no parameter, no optimizer state, no
    step count and no `BatchStat`, neither of the model nor of modules among the other arguments;
    random-number counts advance. Wrap the call in `nnx.jit`. An optimizer without a loss scale,
    such as for `mixed_bfloat16`, checks no gradient and skips no step:
    `transforms.mixed_precision(tx, policy, jmp.StaticLossScale(1.0))` checks and skips.

    Args:
      loss_fn: called as `loss_fn(model, *args)`; returns a real floating scalar, or
        `(scalar, aux)` with `has_aux`.
      model: a view that `autocast` returned, or any model.
      optimizer: over a transformation such as `transforms.mixed_precision(optax.adam(1e-3), ...)`.
      *args: passed to `loss_fn`.
      has_aux: whether `loss_fn` returns something beside the loss.
      extra_args: further arguments of `optimizer.tx.update`, such as `{"value": validation_loss}`;
        `value` is otherwise the loss of the step, for `optax.contrib.reduce_on_plateau`.

    Returns: the unscaled loss in at least float32, or `(loss, aux)`.
    Raises: TypeError if an argument is of the wrong kind or the loss is no real floating scalar;
      ValueError for an optimizer in a wrong order. After these and all other errors nothing has
      changed.
    Warns: `jmp.UnscaledLossWarning` for an optimizer without a loss scale if the model, or the
      loss, computes in float16; `jmp.NoHalfProductWarning` for an optimizer made for a half policy
      if all products of the loss are float32, as when the model was passed instead of its view.

    >>> from flax import nnx
    >>> import optax
    >>> from jmp import transforms
    >>> model = autocast(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), "mixed_float16")
    >>> tx = transforms.mixed_precision(optax.sgd(0.1), "mixed_float16")
    >>> optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    >>> step = nnx.jit(lambda m, o, x: train_step(lambda m, x: (m(x) ** 2).mean(), m, o, x))
    >>> step(model, optimizer, jnp.ones((4, 2))).dtype
    dtype('float32')
    """
    if not callable(loss_fn) or isinstance(loss_fn, nnx.Module):
        raise wrong(TypeError, "train_step", loss_fn, "a function", name="loss_fn", more=_ORDER)
    _check_kinds("train_step", model=model, optimizer=optimizer)
    check_is_scaled(nnx.as_pure(optimizer.opt_state), loss_fn, model)
    argnums = nnx.DiffState(0, optimizer.wrt)
    differentiate = scaled_value_and_grad(loss_fn, loss_scale(optimizer), argnums, has_aux)
    _check_is_lowered(optimizer, loss_fn, model, args)
    with _atomic(model, optimizer, _nnx_modules.instances_in(args, nnx.Module)):
        value, gradients = differentiate(model, *args)
        given = {"value": value[0] if has_aux else value, **(extra_args or {})}
        # Not all of optax takes more than gradients.
        takes_more = isinstance(optimizer.tx, optax.GradientTransformationExtraArgs)
        nnx.Optimizer.update(optimizer, model, gradients, **(given if takes_more else {}))
    return value


def _check_is_lowered(
    optimizer: nnx.Optimizer[Any], loss_fn: Callable[..., Any], model: nnx.Module, args: Any
) -> None:
    """Warns if an optimizer was made for a half policy, and the loss has only float32 products.

    A marked function or module has something in half. Any other, such as a model whose author wrote
    casts, is traced.
    """
    half = lowered_to(optimizer.tx.update)
    marks = map(lowered_to, [loss_fn, *(node for _, node in nnx.iter_graph(model))])
    if half is None or not is_half(half) or any(mark is not None for mark in marks):
        return
    graph, state = nnx.split((model, args))

    def loss_of(state: Any) -> Any:
        model, args = nnx.merge(graph, state)
        return jax.tree.leaves(loss_fn(model, *args))[0]

    equations = [visit.equation for visit in walk(jax.make_jaxpr(loss_of)(state).jaxpr)]
    dtypes = {dtype_of(x) for e in equations if is_product(e) for x in e.invars}
    if dtypes and not any(map(is_half, filter(None, dtypes))):
        warnings.warn(
            f"The optimizer was made for {half}, but all products of the loss are float32: the "
            "model trains in float32. Pass the view, train_step(loss_fn, autocast(model, "
            "policy), optimizer, ...), or wrap the loss with the autocast of this adapter.",
            NoHalfProductWarning,
            stacklevel=users_stacklevel(),
        )


def scaled_value_and_grad(
    fun: Callable[..., Any], loss_scale: LossScale, argnums: Any = 0, has_aux: bool = False
) -> Callable[..., tuple[Any, Any]]:
    """Like `nnx.value_and_grad`, for a loss times its scale; see `jmp.scaled_value_and_grad`.

    Args:
      fun: returns a real floating scalar, or `(scalar, aux)` with `has_aux`.
      loss_scale: the scale in force: `loss_scale(optimizer)`.
      argnums: as in `nnx.value_and_grad`: the numbers of the arguments to differentiate, for
        modules with respect to their parameters; or `nnx.DiffState(number, filter)`. For an
        optimizer with another `wrt` than `nnx.Param` write `nnx.DiffState(0, optimizer.wrt)`.
      has_aux: whether `fun` returns something beside the loss.

    Returns: a function that returns `(value, gradients)` or `((value, aux), gradients)`: the value
      unscaled and at least float32, the gradients an `nnx.State`, *still scaled*:
      `optimizer.update(model, gradients)` unscales and checks them.
    Raises: as `jmp.scaled_value_and_grad`.

    >>> from flax import nnx
    >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    >>> loss = lambda model, x: model(x).sum()
    >>> _, grads = scaled_value_and_grad(loss, StaticLossScale(8))(model, jnp.ones((3, 2)))
    >>> float(grads["bias"][0])
    24.0
    """
    if not callable(fun) or isinstance(fun, nnx.Module):
        expected = "a function of modules: scaled_value_and_grad(loss_fn, scale)(model)"
        raise wrong(TypeError, "scaled_value_and_grad", fun, expected)
    differentiate = functools.partial(nnx.value_and_grad, argnums=argnums)
    return value_and_scaled_grad(differentiate, fun, loss_scale, has_aux)


def atomic_step(
    model: nnx.Module, optimizer: nnx.Optimizer[Any], *others: nnx.Module
) -> contextlib.AbstractContextManager[None]:
    """Returns a context for a step of your own, whose changes stay, or are undone as a whole.

    Inside it differentiate with `scaled_value_and_grad` and call `optimizer.update` once. If the
    optimizer skips the step, no parameter, optimizer state, step count and `BatchStat` has moved
    when the context ends. Use it inside `nnx.jit`. `train_step` is such a step.

    Args:
      model: the model that the optimizer trains.
      optimizer: as in `train_step`; without a loss scale only an error undoes the changes.
      *others: modules whose parameters or statistics the step may change, such as an average of
        the parameters, or the generator of a GAN in a step of its discriminator.

    Raises: as `train_step`; ValueError if it ends without `optimizer.update`. After an error inside
      everything is as it was.
    Warns: `jmp.UnscaledLossWarning` for a model in float16 without a loss scale.

    >>> from flax import nnx
    >>> import optax
    >>> from jmp import transforms
    >>> model = autocast(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), "mixed_float16")
    >>> tx = transforms.mixed_precision(optax.sgd(0.1), "mixed_float16")
    >>> optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    >>> loss_fn = lambda model, x: (model(x) ** 2).mean()
    >>> with atomic_step(model, optimizer):
    ...     grad_fn = scaled_value_and_grad(loss_fn, loss_scale(optimizer))
    ...     loss, grads = grad_fn(model, jnp.full((4, 2), jnp.inf))
    ...     _ = optimizer.update(model, grads)
    >>> int(optimizer.step[...]), bool(jnp.isfinite(model.kernel[...]).all())  # skipped
    (0, True)
    """
    _check_kinds("atomic_step", model=model, optimizer=optimizer)
    for module in others:
        _check_kinds("atomic_step", others=module)
    check_is_scaled(nnx.as_pure(optimizer.opt_state), model)
    return _atomic(model, optimizer, list(others))


@contextlib.contextmanager
def _atomic(
    model: nnx.Module, optimizer: nnx.Optimizer[Any], others: list[nnx.Module]
) -> Iterator[None]:
    step = optimizer.step.get_value()
    before, state_before = _moved_by_a_step(model, optimizer, others)
    with _nnx_modules.whole_if_it_fails(model, optimizer, others):
        yield
        if optimizer.step.get_value() is step:
            raise ValueError(
                "atomic_step ended without a step of its optimizer; expected "
                "optimizer.update(model, gradients) inside. Nothing was changed."
            )
        after, state_after = _moved_by_a_step(model, optimizer, others)
        kept, opt_state = keep_if_skipped(after, before, state_after, state_before)
        variables, beside, optimizer.step[...] = kept
        nnx.update(model, variables)
        nnx.update(others, beside)
        nnx.update(optimizer.opt_state, nnx.state(opt_state))


def _moved_by_a_step(
    model: nnx.Module, optimizer: nnx.Optimizer[Any], others: list[nnx.Module]
) -> tuple[Any, Any]:
    """Returns the arrays that a step changes, and the optimizer's state, apart."""
    variables = nnx.state(model, nnx.filterlib.Any(optimizer.wrt, nnx.BatchStat))
    beside = nnx.state(others, nnx.filterlib.Any(nnx.Param, nnx.BatchStat))
    moved = (nnx.as_pure(variables), nnx.as_pure(beside), optimizer.step[...])
    return moved, nnx.as_pure(optimizer.opt_state)


def _check_kinds(caller: str, **given: object) -> None:
    """Raises TypeError for an `optimizer` that is no nnx.Optimizer, and for other values that are
    no nnx.Module."""
    for name, value in given.items():
        kind = nnx.Optimizer if name == "optimizer" else nnx.Module
        if not isinstance(value, kind):
            more = _ORDER if caller == "train_step" else way_out(value)
            raise wrong(TypeError, caller, value, f"an nnx.{kind.__name__}", name=name, more=more)
