"""Flax nnx: run an unmodified model in mixed precision, and train it with atomic steps.

`with_policy(model, policy)` returns a second view of the model: new module objects around the
*same* Variables. On it Flax's own layers have their `dtype` set where the model left it at None,
and where two dtypes meet (a norm inside a half network, the model's outside) modules cast their
inputs on entry and their outputs on exit. The model that was passed keeps its configuration.

A parameter that a module of your own multiplies itself (`x @ self.w`) is not seen here and stays in
the dtype it is stored in: give it an explicit cast, or use one of Flax's layers.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from flax import nnx

from jmp import transforms
from jmp.adapters._borders import call_across_border, warn_if_explicitly_float32
from jmp.adapters._norms import FLOAT32, rules_for_modules
from jmp.dtypes import is_half
from jmp.loss_scaling import LossScale, NoOpLossScale
from jmp.loss_scaling._gradients import scaled_loss
from jmp.policy import Policy, get_policy
from jmp.rules import PolicyRules, Rule
from jmp.trees import cast_leaf, select_tree

M = TypeVar("M", bound=nnx.Module)


def with_policy(model: M, policy: str | Policy, rules: Sequence[Rule] | None = None) -> M:
    """Returns a view of `model` that computes by `policy` and shares its Variables.

    Args:
      model: an unmodified model; its configuration stays as it is. Half running statistics are
        brought back to float32 in place: Flax updates them in float32 in any case.
      policy: its compute dtype is for products, its output dtype for what calling the view returns.
        Floating inputs of the call are cast to the compute dtype.
      rules: `(target, policy)` pairs, see `jmp.rules`; paths are attribute names joined by slashes.
        Norm layers are float32 behind them; a rule for a norm overrides that, `rules=()` switches
        it off. Without rules a pure half policy (O3) keeps no norm in float32.

    Returns: a module of a subclass of the model's class, for `nnx.split` and `merge`, `nnx.jit`,
      `nnx.value_and_grad` and `nnx.Optimizer`. Modes are its own: call `eval()` on the view.

    Warns: `UnusedRuleWarning` for a rule that matched nothing; UserWarning for a layer that stays
      in float32 because the model says `dtype=jnp.float32`.

    >>> from flax import nnx
    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> half = with_policy(model, "p=f32,c=bf16,o=bf16")
    >>> half(jnp.ones((1, 2))).dtype, half.kernel is model.kernel, model.dtype
    (dtype(bfloat16), True, None)
    """
    policy = get_policy(policy)
    module_rules = rules_for_modules(policy, rules)
    view = _View(module_rules).of(model, "", (), policy)
    for path, _, _ in _variables_with_path(model):  # rules may name single parameters
        module_rules.policy_for(path)
    module_rules.warn_unused()
    _set_values(model, lambda variable, _: FLOAT32 if _is_statistic(variable) else None)
    return view


def cast_params(model: M, policy: str | Policy, rules: Sequence[Rule] | None = None) -> M:
    """Returns a copy of `model`, with Variables of its own, stored as `policy` says.

    Parameters are in `param_dtype` but for norms and running statistics, which are float32.

    Args:
      model: left as it is.
      policy, rules: as in `with_policy`; module classes, paths of modules and of parameters match.

    Warns: `UnusedRuleWarning` for a rule that matched nothing.

    >>> from flax import nnx
    >>> cast_params(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), "O2").kernel.dtype
    dtype('float16')
    """
    policy = get_policy(policy)
    module_rules = rules_for_modules(policy, rules)
    copy = nnx.clone(model)

    def stored_as(variable: nnx.Variable, where: tuple[str, tuple[type, ...]]) -> Policy | None:
        if _is_statistic(variable):
            return FLOAT32
        return module_rules.policy_for(*where) if isinstance(variable, nnx.Param) else None

    _set_values(copy, stored_as)
    module_rules.warn_unused()
    return copy


def loss_scale(optimizer: nnx.Optimizer) -> LossScale:
    """Returns the loss scale in force inside an `nnx.Optimizer`; `NoOpLossScale` if it has none.

    Raises: ValueError if the optimizer's order is at fault; see `transforms.check_optimizer_state`.

    >>> from flax import nnx
    >>> import optax
    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> loss_scale(nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param))
    NoOpLossScale()
    """
    scaling = _scaling(optimizer)
    return NoOpLossScale() if scaling is None else scaling.loss_scale


def train_step(
    loss_fn: Callable[..., Any],
    model: nnx.Module,
    optimizer: nnx.Optimizer,
    *args: Any,
    has_aux: bool = False,
) -> Any:
    """Takes one training step, or on overflow leaves everything as it was but the scale.

    Scales the loss, differentiates it with respect to the Variables the optimizer was made for, and
    updates model and optimizer in place. A skipped step moves no parameter, no optimizer state, no
    step count and no `BatchStat`; random-number counts advance. Wrap the call in `nnx.jit`.

    Args:
      loss_fn: called as `loss_fn(model, *args)`; returns a real floating scalar, or
        `(scalar, aux)` with `has_aux`.
      model: a view made by `with_policy`, or any model.
      optimizer: over a transformation such as `transforms.mixed_precision(optax.adam(1e-3), ...)`.
      *args: passed to `loss_fn`.
      has_aux: whether `loss_fn` returns something beside the loss.

    Returns: the unscaled loss in at least float32, or `(loss, aux)`.
    Raises: TypeError if the loss is not a real floating scalar.
    """
    statistics = nnx.as_pure(nnx.state(model, nnx.BatchStat))
    differentiate = nnx.value_and_grad(
        scaled_loss(loss_fn, loss_scale(optimizer), has_aux),
        argnums=nnx.DiffState(0, optimizer.wrt),
        has_aux=True,
    )
    (_, (value, aux)), gradients = differentiate(model, *args)
    step = optimizer.step[...]
    optimizer.update(model, gradients)

    scaling = _scaling(optimizer)
    if scaling is not None and not isinstance(scaling.loss_scale, NoOpLossScale):
        finite = scaling.grads_finite
        new_statistics = nnx.as_pure(nnx.state(model, nnx.BatchStat))
        nnx.update(model, select_tree(finite, new_statistics, statistics))
        optimizer.step[...] = select_tree(finite, optimizer.step[...], step)
    return (value, aux) if has_aux else value


class _View:
    """Copies modules, not Variables, and sets on each copy how it computes."""

    def __init__(self, rules: PolicyRules) -> None:
        self._rules = rules
        self._copies: dict[int, Any] = {}  # a module used in two places stays one module

    def of(self, node: Any, path: str, around: tuple[type, ...], outer: Policy) -> Any:
        """Returns `node` with every module in it replaced by its view.

        Args:
          node: a module, a container of modules, or anything else, which is returned as it is.
          path: its attribute path.
          around: classes of the modules around it, innermost first.
          outer: what surrounds it. At the root its output dtype is what leaves the model.
        """
        if isinstance(node, (list, tuple)) and not hasattr(node, "_fields"):
            return type(node)(
                self.of(v, _join(path, str(i)), around, outer) for i, v in enumerate(node)
            )
        if isinstance(node, dict):
            return {k: self.of(v, _join(path, str(k)), around, outer) for k, v in node.items()}
        if not isinstance(node, nnx.Pytree) or isinstance(node, nnx.Variable):
            return node
        if id(node) in self._copies:
            return self._copies[id(node)]

        classes = (type(node), *around)
        own = self._rules.policy_for(path, classes)
        copy = object.__new__(type(node))
        self._copies[id(node)] = copy
        attributes = vars(copy)
        for name, value in vars(node).items():
            attributes[name] = self.of(value, _join(path, name), classes, own)
        if _is_flax_layer(node) and "dtype" in attributes:
            if _is_unset(attributes["dtype"], classes):
                attributes["dtype"] = own.compute_dtype
            else:
                warn_if_explicitly_float32(node, path, own.compute_dtype)
        default_attention = attributes.get("attention_fn") is nnx.dot_product_attention
        if default_attention and is_half(own.compute_dtype):
            attributes["attention_fn"] = _attention_with_half_products
        leaves_in = outer.compute_dtype if path else outer.output_dtype
        # A recurrent cell's carry is float32, and so would be its output: half again from there.
        border = not path or own.compute_dtype != leaves_in or isinstance(node, nnx.RNNCellBase)
        if border and callable(node):
            copy.__class__ = _bordered(type(node), own.compute_dtype, leaves_in)
        return copy


@functools.wraps(nnx.dot_product_attention)
def _attention_with_half_products(
    *args: Any, dropout_rate: float = 0.0, deterministic: bool = False, **kwargs: Any
) -> Any:
    """Flax's attention, through its path that keeps both products half.

    Without dropout it calls `jax.nn.dot_product_attention`, whose float32 logits make the backward
    products float32 x half, and whose float16 products no CPU runs. With a dropout that is switched
    off it computes the same by its own einsums.
    """
    if dropout_rate == 0.0:
        dropout_rate, deterministic = 0.5, True
    kwargs |= {"dropout_rate": dropout_rate, "deterministic": deterministic}
    return nnx.dot_product_attention(*args, **kwargs)


@functools.cache  # one class for all views, so that their graph definitions compare equal
def _bordered(module_type: type, inner: np.dtype, outer: np.dtype) -> type:
    """Returns a subclass whose calls cast floating inputs to `inner` and outputs to `outer`."""
    is_cell = issubclass(module_type, nnx.RNNCellBase)

    @functools.wraps(module_type.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        own_call = functools.partial(module_type.__call__, self)  # type: ignore[operator]
        return call_across_border(own_call, args, kwargs, inner=inner, outer=outer, is_cell=is_cell)

    body = {"__call__": call, "__module__": module_type.__module__, "__doc__": module_type.__doc__}
    return type(module_type.__name__, (module_type,), body)


def _is_flax_layer(module: Any) -> bool:
    return any(
        base.__module__.startswith("flax.") and base not in (nnx.Module, nnx.Pytree, object)
        for base in type(module).__mro__
    )


def _is_unset(dtype: Any, classes: tuple[type, ...]) -> bool:
    """Whether a layer was built without a dtype.

    Embed and SimpleCell write float32 for None, the latter into the layers inside it too.
    """
    writes_float32 = any(issubclass(c, (nnx.Embed, nnx.SimpleCell)) for c in classes)
    return dtype is None or (writes_float32 and np.dtype(dtype) == np.float32)


def _is_statistic(variable: nnx.Variable) -> bool:
    return isinstance(variable, nnx.BatchStat)


def _variables_with_path(model: nnx.Module) -> list[tuple[str, nnx.Variable, tuple[type, ...]]]:
    """Returns every Variable of `model`: its path, itself, and the classes around it."""
    classes = {path: type(module) for path, module in nnx.iter_modules(model)}
    found = []
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        ancestors = [path[:end] for end in range(len(path), -1, -1)]  # innermost first
        around = tuple(classes[ancestor] for ancestor in ancestors if ancestor in classes)
        found.append(("/".join(map(str, path)), variable, around))
    return found


def _set_values(model: nnx.Module, stored_as: Callable[..., Policy | None]) -> None:
    """Casts in place: `stored_as(variable, (path, classes))` is a policy, or None to leave it."""
    for path, variable, classes in _variables_with_path(model):
        policy = stored_as(variable, (path, classes))
        if policy is not None:
            value = variable.get_value()
            cast = cast_leaf(value, policy.param_dtype)
            if cast is not value:
                variable.set_value(cast)


def _scaling(optimizer: nnx.Optimizer) -> transforms.WithLossScaleState | None:
    return transforms.loss_scale_state(nnx.as_pure(optimizer.opt_state))


def _join(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name
