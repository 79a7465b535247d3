"""Modules of Flax nnx that compute by a policy: lifted functions, marked modules, views.

nnx modules are objects whose Variables change. A function of them is lifted over autocast, which
sees pure functions alone, by Flax's own bookkeeping (`nnx.to_tree`, `nnx.from_tree`), as under
`nnx.jit`. Flax opens no name scope for an nnx module and offers no way to intercept its calls, so a
module that a rule names is given a subclass of its class whose methods open the scope themselves:
for the length of the trace, on the copies that live in it, or for good in a view.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np
from flax import nnx

from jmp._marks import LOWERED_TO, mark_lowered
from jmp.adapters._module_policies import ModulePolicies, marked_class, plain_class, subclass
from jmp.adapters._nnx_changes import Contents, check_writable, whole_if_it_fails
from jmp.adapters._norms import FLOAT32_POLICY
from jmp.dtypes import is_half
from jmp.policy import Policy
from jmp.trees import PyTree, cast_leaf, is_array, joined

P = ParamSpec("P")
R = TypeVar("R")

_POLICIES = "_jmp_module_policies"


def lift(fun: Callable[P, R], modules: ModulePolicies) -> Callable[P, R]:
    """Returns `fun` under autocast; what it changes in modules among its arguments is changed."""
    tag = object()  # tells this function's bookkeeping from that of others, in Flax

    @functools.wraps(fun)  # options name its arguments, warnings name it
    def pure(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = nnx.from_tree((args, kwargs), is_inner=True, ctxtag=tag)
        models = _nodes((args, kwargs))
        before = list(map(Contents.of, models))
        with modules.in_force(), _marking(models, modules), _widened(models):
            result = fun(*args, **kwargs)
        modules.rules.warn_unused()
        changes = [Contents.of(m).changes(b) for m, b in zip(models, before, strict=True)]
        # A model from outside of a trace may be called inside it, but not be written to.
        changed = {i: found for i, found in enumerate(changes) if found != ()}
        written = [models[i] for i in changed]
        return list(changed.items()), nnx.to_tree((written, result), ctxtag=tag)

    lowered = modules.autocast(pure)

    @functools.wraps(fun)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        models = _nodes((args, kwargs))
        with nnx.update_context(tag):
            args, kwargs = nnx.to_tree((args, kwargs), ctxtag=tag)
            changed, after = lowered(*args, **kwargs)
            for index, changes in changed:
                check_writable(models[index], changes)
            with whole_if_it_fails(*(models[index] for index, _ in changed)):
                _, result = nnx.from_tree(after, is_inner=False, ctxtag=tag)
        return result

    return mark_lowered(wrapped, modules.lowered)


def _nodes(tree: PyTree) -> list[Any]:
    """Returns the modules, optimizers and Variables among the leaves of a tree."""
    kinds = (nnx.Pytree, nnx.Variable)
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kinds))
    return [leaf for leaf in leaves if isinstance(leaf, kinds)]


@contextlib.contextmanager
def _marking(models: Sequence[Any], modules: ModulePolicies) -> Iterator[None]:
    """Gives each module that a rule matches a class that says so, within the context."""
    plain = []
    for model in models:
        if isinstance(model, nnx.Module):
            for module, path, classes in _modules_with_path(model):
                named = modules.named(module, path, classes)
                if named is not None:
                    plain.append((module, type(module)))
                    _set_class(module, marked_class(type(module), nnx.Module, modules, named))
            mark_parameters(model, modules)
    try:
        yield
    finally:
        for module, own_type in plain:
            _set_class(module, own_type)


@contextlib.contextmanager
def _widened(models: Sequence[Any]) -> Iterator[None]:
    """Holds half parameters in float32 within the context."""
    narrow = []
    for model in models:
        for _, variable in nnx.iter_graph(model):
            before: Any = variable.get_value() if isinstance(variable, nnx.Param) else None
            if is_array(before) and is_half(before.dtype):
                wide = cast_leaf(before, FLOAT32_POLICY.param_dtype)
                variable.set_value(wide)
                narrow.append((variable, before, wide))
    try:
        yield
    finally:
        for variable, before, wide in narrow:
            after = variable.get_value()
            variable.set_value(before if after is wide else cast_leaf(after, before.dtype))


def view_of(model: nnx.Module, modules: ModulePolicies) -> Any:
    """Returns a copy of `model` that shares its Variables and computes by `modules`."""
    return _View(modules, replaced=getattr(type(model), _POLICIES, None)).of(model, "", ())


class _View:
    """Copies modules, not Variables, and gives each copy a class that computes by its policy.

    Args:
      replaced: how the view computes that is being replaced, if one is.
    """

    def __init__(self, modules: ModulePolicies, replaced: ModulePolicies | None) -> None:
        self._modules = modules
        self._replaced = replaced
        self._copies: dict[int, Any] = {}  # a module used in two places stays one module

    def of(self, node: Any, path: str, around: tuple[type, ...]) -> Any:
        """Returns `node` with every module in it replaced by its view.

        Args:
          node: a module, a container of modules, or anything else, which is returned as it is.
          path: its attribute path.
          around: classes of the modules around it, innermost first.
        """
        if isinstance(node, (list, tuple)) and not hasattr(node, "_fields"):
            return type(node)(self.of(v, joined(path, str(i)), around) for i, v in enumerate(node))
        if isinstance(node, dict):
            return {k: self.of(v, joined(path, str(k)), around) for k, v in node.items()}
        if not isinstance(node, nnx.Pytree) or isinstance(node, nnx.Variable):
            return node
        if id(node) in self._copies:
            return self._copies[id(node)]

        own_policies = getattr(type(node), _POLICIES, None)
        own_type = type(node)
        if own_policies is not None and own_policies == self._replaced:
            own_type, own_policies = plain_class(own_type), None
        classes = (own_type, *around)
        copy = object.__new__(own_type)
        self._copies[id(node)] = copy
        attributes = vars(copy)
        for name, value in vars(node).items():
            attributes[name] = self.of(value, joined(path, name), classes)
        if own_policies is None and isinstance(node, nnx.Module):
            named = self._modules.named(node, path, classes)
            _set_class(copy, _view_class(own_type, self._modules, named))
        return copy


@functools.cache  # one class for all views, so that their graph definitions compare equal
def _view_class(module_type: type, modules: ModulePolicies, named: Policy | None) -> type:
    """Returns a subclass whose `__call__` computes by autocast, if it is not inside it already."""
    base: Any = module_type
    if named is not None:
        base = marked_class(module_type, nnx.Module, modules, named)
    body: dict[str, Any] = {_POLICIES: modules, LOWERED_TO: np.dtype(modules.lowered)}
    if "__call__" in dir(module_type):
        body["__call__"] = _lowered_call(base, modules)
    return subclass(base, body)


def _lowered_call(module_type: Any, modules: ModulePolicies) -> Callable[..., Any]:
    lowered = lift(module_type.__call__, modules)

    @functools.wraps(module_type.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if modules.are_in_force:
            return module_type.__call__(self, *args, **kwargs)
        return modules.policy.cast_to_output(lowered(self, *args, **kwargs))

    return call


def _set_class(module: nnx.Pytree, own_type: type) -> None:
    # Not by assignment, which nnx writes down in the module's graph as that of an attribute.
    object.__setattr__(module, "__class__", own_type)


def _modules_with_path(model: nnx.Module) -> list[tuple[nnx.Module, str, tuple[type, ...]]]:
    """Returns every module of `model`: itself, its path, and its class and those around it."""
    found = {path: module for path, module in nnx.iter_modules(model)}
    classes = {path: type(module) for path, module in found.items()}
    return [(m, "/".join(map(str, path)), _around(path, classes)) for path, m in found.items()]


def variables_with_path(model: nnx.Module) -> list[tuple[str, nnx.Variable[Any], tuple[type, ...]]]:
    """Returns every Variable of `model`: its path, itself, and the classes around it."""
    classes = {path: type(module) for path, module in nnx.iter_modules(model)}
    found = []
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        found.append(("/".join(map(str, path)), variable, _around(path, classes)))
    return found


def _around(path: tuple[Any, ...], classes: dict[Any, type]) -> tuple[type, ...]:
    ancestors = [path[:end] for end in range(len(path), -1, -1)]  # innermost first
    return tuple(classes[ancestor] for ancestor in ancestors if ancestor in classes)


def mark_parameters(model: nnx.Module, modules: ModulePolicies) -> None:
    """Marks the rules that name single parameters as used; only `cast_params` reads them."""
    for path, _, _ in variables_with_path(model):
        modules.rules.policy_for(path)
