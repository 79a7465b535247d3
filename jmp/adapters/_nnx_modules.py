"""Modules of Flax nnx that compute with a policy, and as arguments of diagnostics.

- `lift`: a function of modules under autocast. nnx modules are objects whose Variables change, and
  autocast sees only pure functions. So the function is lifted with Flax's own bookkeeping
  (`nnx.to_tree`, `nnx.from_tree`), as under `nnx.jit`.
- `view_of`: a copy of a module that computes with a policy when it is called. Flax opens no name
  scope for an nnx module and offers no way to intercept its calls, so a module that a rule names is
  given a subclass of its class whose methods open the scope themselves. In a view it keeps that
  class; in `lift` only the copies in the trace have it.
- `changes_between`, `check_writable`, `whole_if_it_fails`: what a call changes in modules is
  written back as a whole or not at all. Flax empties a module before it writes it anew, and refuses
  to write a Variable inside another trace than the one it was made in. So changes are found by
  comparison, a change that cannot be written is refused before, and after any other error modules
  and Variables are as they were.
- `split_modules`, `merge_modules`: modules as trees, for diagnostics. JAX takes an nnx module for a
  tree, and makes two Variables of one that stands in two places. `split_modules` makes a tree too,
  with one leaf for each Variable, named as rules name it. `merge_modules` makes new modules of it,
  so that a function cannot change the caller's.
"""

import contextlib
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
from flax import errors, nnx
from jax.typing import DTypeLike

from jmp._array_calls import Untrained, take_arrays
from jmp._messages import first_few
from jmp.adapters._module_policies import (
    ModulePolicies,
    ModuleScopes,
    marked_class,
    plain_class,
    set_class,
    subclass,
)
from jmp.dtypes import FLOAT32, is_half
from jmp.policy import Policy, mark_lowered
from jmp.trees import PyTree, cast_leaf, is_array

P = ParamSpec("P")
R = TypeVar("R")
M = TypeVar("M", bound=nnx.Module)

_POLICIES = "_jmp_module_policies"  # the attribute of a view's class that says how it computes


def lift(fun: Callable[P, R], policies: ModulePolicies) -> Callable[P, R]:
    """Returns `fun` under autocast; it may change modules among its arguments."""
    tag = object()  # tells Flax this function's bookkeeping from others

    @functools.wraps(fun)  # options name its arguments, warnings name it
    def pure(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = nnx.from_tree((args, kwargs), is_inner=True, ctxtag=tag)
        models = instances_in((args, kwargs), nnx.Pytree, nnx.Variable)
        before = [taken_apart([model])[0] for model in models]
        with policies.in_force(), _prepared(models, policies):
            result = fun(*args, **kwargs)
        policies.rules.warn_unused()
        after = [taken_apart([model])[0] for model in models]
        changes = map(changes_between, before, after)
        # A model from outside of a trace may be called inside it, but not be written to.
        changed = {i: found for i, found in enumerate(changes) if found != ()}
        written = [models[i] for i in changed]
        return changed, nnx.to_tree((written, result), ctxtag=tag)

    lowered = policies.autocast(pure)

    @functools.wraps(fun)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        models = instances_in((args, kwargs), nnx.Pytree, nnx.Variable)
        with nnx.update_context(tag):
            args, kwargs = nnx.to_tree((args, kwargs), ctxtag=tag)
            changed, after = lowered(*args, **kwargs)
            for index, changes in changed.items():
                check_writable(models[index], changes)
            with whole_if_it_fails(*(models[index] for index in changed)):
                _, result = nnx.from_tree(after, is_inner=False, ctxtag=tag)
        return result

    return mark_lowered(wrapped, policies.lowered)


def instances_in(tree: PyTree, *classes: type) -> list[Any]:
    """Returns what is of some classes in a tree, such as its modules and optimizers."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, classes))
    return [leaf for leaf in leaves if isinstance(leaf, classes)]


@contextlib.contextmanager
def _prepared(models: Sequence[Any], policies: ModulePolicies) -> Iterator[None]:
    """Within the context modules that rules match have marked classes; no parameter is half."""
    with contextlib.ExitStack() as undone:
        for model in models:
            if isinstance(model, nnx.Module):
                for module, path, classes in _modules_with_path(model):
                    own, named = type(module), policies.named(module, path, classes)
                    undone.callback(set_class, module, own)
                    set_class(module, marked_class(own, nnx.Module, policies, named))
                policies.match_parameters(nnx.as_pure(nnx.state(model)))
        for _, variable in nnx.iter_graph(models):
            before: Any = variable.get_value() if isinstance(variable, nnx.Param) else None
            if is_array(before) and is_half(before.dtype):
                wide = cast_leaf(before, FLOAT32)
                variable.set_value(wide)
                undone.callback(_narrow, variable, before, wide)
        yield


def _narrow(variable: nnx.Variable[Any], before: Any, wide: Any) -> None:
    """Makes a parameter half again: as it was before, if it has not changed since."""
    after = variable.get_value()
    variable.set_value(before if after is wide else cast_leaf(after, before.dtype))


# Changes of a call are written back as a whole or not at all.


def changes_between(before: "SplitModule", after: "SplitModule") -> tuple[str, ...] | None:
    """Returns the paths of the Variables that changed; None if attributes came or went."""
    if after.where != before.where:
        return None
    return tuple(path for path, value in after.items() if not _is_same(value, before[path]))


def _is_same(value: PyTree, other: PyTree) -> bool:
    structures: list[Any] = [jax.tree.structure(value), jax.tree.structure(other)]
    pairs = map(operator.is_, jax.tree.leaves(value), jax.tree.leaves(other))
    return structures[0] == structures[1] and all(pairs)


def check_writable(node: Any, changed: Sequence[str] | None) -> None:
    """Raises `flax.errors.TraceContextError` if the changes of a call cannot be written to `node`.

    Args:
      node: a module, an optimizer or a Variable.
      changed: the result of `changes_between`.
    """
    flat = nnx.to_flat_state(nnx.state([node]))
    variables = {"/".join(map(str, path)): variable for (_, *path), variable in flat}
    written = list(variables if changed is None else changed)
    try:
        for variable in map(variables.__getitem__, written):
            if isinstance(variable, nnx.Variable):  # else Flax itself refuses a foreign attribute
                variable.set_raw_value(variable.get_raw_value())
    except errors.TraceContextError as error:
        named = [f"{type(variables[path]).__name__} {path}".rstrip() for path in written]
        what = "attributes" if changed is None else first_few(named, len(named), most=4)
        raise errors.TraceContextError(
            f"A call changes {what} of {type(node).__name__}, which comes from outside of the "
            "trace (jax.jit, jax.grad, jax.make_jaxpr) that the call is in: the change cannot be "
            "written back. Nothing was changed. Make the model an argument, under nnx.jit or "
            "nnx.grad; or call model.eval() first, if it is to be evaluated."
        ) from error


@contextlib.contextmanager
def whole_if_it_fails(*nodes: Any) -> Iterator[None]:
    """Leaves modules, optimizers and Variables as they were if the code inside raises."""
    attributes, variables = [], []
    for _, node in nnx.iter_graph(nodes):
        if isinstance(node, nnx.Variable):
            variables.append((node, node.get_raw_value(), node.get_metadata()))
        elif isinstance(node, nnx.Pytree):
            attributes.append((node, dict(vars(node))))
    try:
        yield
    except BaseException:
        for node, before in attributes:
            vars(node).clear()
            vars(node).update(before)
        for variable, value, metadata in variables:
            if variable.get_raw_value() is not value:
                variable.set_raw_value(value)
            if variable.get_metadata() != metadata:
                variable.set_metadata(metadata)
        raise


# Views.


def view_of(model: M, policies: ModulePolicies) -> M:
    """Returns a copy of `model` that shares its Variables and computes with `policies`.

    Each module in it has a class that computes with its policy, except modules of views inside.
    """
    replaced = getattr(type(model), _POLICIES, None)  # if the model is a view itself
    view: M = nnx.clone(model, variables=False)
    for module, path, classes in _modules_with_path(view):
        if getattr(type(module), _POLICIES, None) in (None, replaced):
            named = policies.named(module, path, classes)
            set_class(module, _view_class(plain_class(type(module)), policies, named))
    return view


@functools.cache  # one class for all views, so that their graph definitions compare equal
def _view_class(module_type: type, policies: ModulePolicies, named: Policy | None) -> type:
    """Returns a subclass whose `__call__` runs under autocast, if it is not inside it already."""
    base = marked_class(module_type, nnx.Module, policies, named)
    body: dict[str, Any] = {_POLICIES: policies}
    if "__call__" in dir(module_type):
        body["__call__"] = _lowered_call(base, policies)
    return mark_lowered(subclass(base, body), policies.lowered)


def _lowered_call(module_type: Any, policies: ModulePolicies) -> Callable[..., Any]:
    lowered = lift(module_type.__call__, policies)

    @functools.wraps(module_type.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if policies.are_in_force:
            return module_type.__call__(self, *args, **kwargs)
        return policies.policy.cast_to_output(lowered(self, *args, **kwargs))

    return call


def _modules_with_path(model: nnx.Module) -> list[tuple[nnx.Module, str, tuple[type, ...]]]:
    """Returns every module of `model`: itself, its path, and its class and those around it."""
    found = list(nnx.iter_modules(model))
    classes = {path: type(module) for path, module in found}
    return [(m, "/".join(map(str, path)), _around(path, classes)) for path, m in found]


def _around(path: tuple[Any, ...], classes: dict[Any, type]) -> tuple[type, ...]:
    ancestors = [path[:end] for end in range(len(path), -1, -1)]  # innermost first
    return tuple(classes[ancestor] for ancestor in ancestors if ancestor in classes)


def cast_in_place(
    model: nnx.Module, policy_for: Callable[[str, tuple[type, ...]], Policy] | None = None
) -> None:
    """Casts statistics to float32, and parameters as `policy_for(path, classes)` stores them.

    Args:
      policy_for: asked with a path and the classes around it; None leaves parameters as they are.
    """
    classes = {path: type(module) for path, module in nnx.iter_modules(model)}
    with whole_if_it_fails(model):
        for path, variable in nnx.to_flat_state(nnx.state(model)):
            if isinstance(variable, nnx.BatchStat):
                dtype: DTypeLike = FLOAT32
            elif policy_for is not None and isinstance(variable, nnx.Param):
                name = "/".join(map(str, path))
                dtype = policy_for(name, _around(path, classes)).param_dtype
            else:
                continue
            value = variable.get_value()
            cast = cast_leaf(value, dtype)
            if cast is not value:
                variable.set_value(cast)


# Modules as trees, for diagnostics.


@jax.tree_util.register_pytree_with_keys_class
class SplitModule(dict[str, Any]):
    """The arrays of one of several modules that were taken apart together.

    The keys are the paths of the Variables, joined by slashes; each is `Untrained`, except for an
    `nnx.Param`.

    Attributes:
      where: the graph of all modules, and the path of each array in it.
    """

    def __init__(self, names: Iterable[str], arrays: Iterable[Any], where: Any) -> None:
        super().__init__(zip(names, arrays, strict=True))
        self.where = where

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        """The arrays with their names; the rest."""
        arrays = [(jax.tree_util.DictKey(name), array) for name, array in self.items()]
        return arrays, (tuple(self), self.where)

    @classmethod
    def tree_unflatten(cls, held: Any, arrays: Any) -> "SplitModule":
        """The inverse of `tree_flatten_with_keys`."""
        names, where = held
        return cls(names, arrays, where)


def _is_node(value: Any) -> bool:
    return isinstance(value, nnx.Pytree)


def _is_split(value: Any) -> bool:
    return isinstance(value, SplitModule)


def split_modules(tree: PyTree) -> PyTree:
    """Returns a tree with its modules, optimizers and random-number streams taken apart."""
    nodes, rest = take_arrays(tree, _is_node, is_leaf=_is_node)
    return rest.filled(taken_apart(nodes)) if nodes else tree


def taken_apart(nodes: list[Any]) -> list[SplitModule]:
    """Returns the arrays of several modules, optimizers or Variables, which may share some.

    A module may have arrays as attributes, without a Variable. A Variable may hold containers, such
    as what `nnx.capture` fills: they are copied, because they may change in place.
    """
    graph, state = nnx.split(nodes)
    variables = nnx.to_flat_state(state)
    parts = []
    for number in range(len(nodes)):
        own = [(path, variable) for path, variable in variables if path[0] == number]
        names = [_name(path[1:], variable) for path, variable in own]
        arrays = [jax.tree.map(lambda x: x, _raw(variable)) for _, variable in own]
        parts.append(SplitModule(names, arrays, (graph, tuple(path for path, _ in own))))
    return parts


def _raw(variable: Any) -> Any:
    return variable.get_raw_value() if isinstance(variable, nnx.Variable) else variable


def _name(path: tuple[Any, ...], variable: Any) -> str:
    # A key of a dict with a slash in it stands in quotes: two Variables never share a name.
    name = "/".join(repr(part) if "/" in str(part) else str(part) for part in path)
    return name if isinstance(variable, nnx.Param) else Untrained(name)


def merge_modules(tree: PyTree) -> PyTree:
    """Returns a tree with new modules in place of the ones that were taken apart."""
    parts, rest = take_arrays(tree, _is_split, is_leaf=_is_split)
    if not parts:
        return tree
    flat: dict[Any, Any] = {}
    for part in parts:
        graph, paths = part.where  # the graph of all parts
        flat.update(zip(paths, part.values(), strict=True))
    return rest.filled(nnx.merge(graph, nnx.from_flat_state(flat)))


def of_split_modules(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `fun` as a function of modules that were taken apart; it changes no module.

    The methods of its modules open scopes that say their paths.

    Args:
      fun: a function; or a module or a method of one, which is called on a copy.
    """
    own: Any = fun if isinstance(fun, nnx.Module) else getattr(fun, "__self__", None)
    is_method = isinstance(own, nnx.Module)
    body: Any = fun
    if is_method:  # by its class: what `nnx.jit` makes of a method does not say whose it is
        body = type(own).__call__ if own is fun else body.__func__
    lifted = lift(body, ModuleScopes())

    @functools.wraps(body, updated=())
    def of_arrays(*args: Any, **kwargs: Any) -> Any:
        if is_method:
            args = (merge_modules(split_modules(own)), *args)
        elif not instances_in((args, kwargs), SplitModule):
            return fun(*args, **kwargs)
        args, kwargs = merge_modules((args, kwargs))
        return lifted(*args, **kwargs)

    return of_arrays
