"""Modules of Flax nnx that compute by a policy, and what calls change in them.

nnx modules are objects whose Variables change. A function of them is lifted over autocast, which
sees pure functions alone, by Flax's own bookkeeping (`nnx.to_tree`, `nnx.from_tree`), as under
`nnx.jit` (`lift`). Flax opens no name scope for an nnx module and offers no way to intercept its
calls, so a module that a rule names is given a subclass of its class whose methods open the scope
themselves: for the length of the trace, on the copies that live in it, or for good in a view
(`view_of`).

What a call changes in modules is written back as a whole or not at all. Flax empties a module
before it writes it anew, and refuses to write a Variable inside another trace than the one it was
made in. So a change that cannot be written is refused before (`check_writable`), and whatever else
is raised in between leaves modules and Variables as they were (`whole_if_it_fails`).

Diagnostics ask about functions of modules. JAX takes an nnx module for a tree, and makes two
Variables of one that stands in two places. What `split_modules` makes is a tree too, with one leaf
a Variable, named as rules name it; `merge_modules` makes new modules of it, so that nothing that a
function changes in them reaches the caller's.
"""

import contextlib
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
from flax import errors, nnx
from jax.typing import DTypeLike

from jmp._array_calls import Untrained
from jmp.adapters._module_policies import (
    ModulePolicies,
    ModuleScopes,
    marked_class,
    plain_class,
    subclass,
)
from jmp.dtypes import FLOAT32, is_half
from jmp.policy import Policy, mark_lowered
from jmp.trees import PyTree, cast_leaf, is_array, joined

P = ParamSpec("P")
R = TypeVar("R")

_POLICIES = "_jmp_module_policies"  # the attribute of a view's class that says how it computes
_SHOWN = 4  # Variables in an error


def lift(fun: Callable[P, R], policies: ModulePolicies) -> Callable[P, R]:
    """Returns `fun` under autocast; what it changes in modules among its arguments is changed."""
    tag = object()  # tells this function's bookkeeping from that of others, in Flax

    @functools.wraps(fun)  # options name its arguments, warnings name it
    def pure(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = nnx.from_tree((args, kwargs), is_inner=True, ctxtag=tag)
        models = _nodes((args, kwargs))
        before = list(map(Contents.of, models))
        with policies.in_force(), _prepared(models, policies):
            result = fun(*args, **kwargs)
        policies.rules.warn_unused()
        changes = [Contents.of(m).changes(b) for m, b in zip(models, before, strict=True)]
        # A model from outside of a trace may be called inside it, but not be written to.
        changed = {i: found for i, found in enumerate(changes) if found != ()}
        written = [models[i] for i in changed]
        return list(changed.items()), nnx.to_tree((written, result), ctxtag=tag)

    lowered = policies.autocast(pure)

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

    return mark_lowered(wrapped, policies.lowered)


def _nodes(tree: PyTree) -> list[Any]:
    """Returns the modules, optimizers and Variables among the leaves of a tree."""
    kinds = (nnx.Pytree, nnx.Variable)
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kinds))
    return [leaf for leaf in leaves if isinstance(leaf, kinds)]


@contextlib.contextmanager
def _prepared(models: Sequence[Any], policies: ModulePolicies) -> Iterator[None]:
    """Within the context modules that rules match have marked classes; no parameter is half."""
    with contextlib.ExitStack() as undone:
        for model in models:
            if isinstance(model, nnx.Module):
                for module, path, classes in _modules_with_path(model):
                    named = policies.named(module, path, classes)
                    if named is not None:
                        marked = marked_class(type(module), nnx.Module, policies, named)
                        undone.callback(_set_class, module, type(module))
                        _set_class(module, marked)
                match_parameters(model, policies)
        for model in models:
            for _, variable in nnx.iter_graph(model):
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


def view_of(model: nnx.Module, policies: ModulePolicies) -> Any:
    """Returns a copy of `model` that shares its Variables and computes by `policies`.

    Modules are copied and Variables are not. Each copy has a class that computes by its policy.
    """
    replaced = getattr(type(model), _POLICIES, None)  # if the model is a view itself
    copies: dict[int, Any] = {}  # a module used in two places stays one module

    def view(node: Any, path: str, around: tuple[type, ...]) -> Any:
        """Returns `node`, of any kind, with every module in it replaced by its view."""
        if isinstance(node, (list, tuple)) and not hasattr(node, "_fields"):
            return type(node)(view(v, joined(path, str(i)), around) for i, v in enumerate(node))
        if isinstance(node, dict):
            return {k: view(v, joined(path, str(k)), around) for k, v in node.items()}
        if not isinstance(node, nnx.Pytree) or isinstance(node, nnx.Variable):
            return node
        if id(node) in copies:
            return copies[id(node)]

        own_policies = getattr(type(node), _POLICIES, None)
        own_type = type(node)
        if own_policies is not None and own_policies == replaced:
            own_type, own_policies = plain_class(own_type), None
        classes = (own_type, *around)
        copy = copies[id(node)] = object.__new__(own_type)
        for name, value in vars(node).items():
            vars(copy)[name] = view(value, joined(path, name), classes)
        if own_policies is None and isinstance(node, nnx.Module):
            named = policies.named(node, path, classes)
            _set_class(copy, _view_class(own_type, policies, named))
        return copy

    return view(model, "", ())


@functools.cache  # one class for all views, so that their graph definitions compare equal
def _view_class(module_type: type, policies: ModulePolicies, named: Policy | None) -> type:
    """Returns a subclass whose `__call__` computes by autocast, if it is not inside it already."""
    base: Any = module_type
    if named is not None:
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


def _set_class(module: nnx.Pytree, own_type: type) -> None:
    # Not by assignment, which nnx writes down in the module's graph as that of an attribute.
    object.__setattr__(module, "__class__", own_type)


class Contents(NamedTuple):
    """What a module, an optimizer or a Variable holds, to be compared with what it holds later."""

    graph: Any
    arrays: dict[str, list[Any]]  # by the path of a Variable; one may hold a tuple that grows
    structures: list[Any]

    @classmethod
    def of(cls, node: Any) -> "Contents":
        """Returns what `node` holds now."""
        graph, state = nnx.split([node])
        arrays, structures = {}, []
        for (_, *path), variable in nnx.to_flat_state(state):
            arrays["/".join(map(str, path))], structure = jax.tree.flatten(variable)
            structures.append(structure)
        return cls(graph, arrays, structures)

    def changes(self, before: "Contents") -> tuple[str, ...] | None:
        """Returns the paths of the Variables that changed; None if attributes came or went."""
        if (self.graph, self.structures) != (before.graph, before.structures):
            return None
        return tuple(
            path
            for path, arrays in self.arrays.items()
            if not all(map(operator.is_, arrays, before.arrays[path]))
        )


def check_writable(node: Any, changed: Sequence[str] | None) -> None:
    """Raises `flax.errors.TraceContextError` if what a call changed cannot be written to `node`.

    Args:
      node: a module, an optimizer or a Variable.
      changed: what `Contents.changes` returned.
    """
    frozen = {
        "/".join(map(str, path)): variable
        for (_, *path), variable in nnx.to_flat_state(nnx.state([node]))
        if not _is_writable(variable)
    }
    refused = list(frozen) if changed is None else [path for path in changed if path in frozen]
    if not refused:
        return
    named = [f"{type(frozen[path]).__name__} {path}".rstrip() for path in refused[:_SHOWN]]
    more = f" and {len(refused) - _SHOWN} more" if len(refused) > _SHOWN else ""
    what = "attributes" if changed is None else ", ".join(named) + more
    raise errors.TraceContextError(
        f"A call changes {what} of {type(node).__name__}, which comes from outside of the trace "
        "(jax.jit, jax.grad, jax.make_jaxpr) that the call is in: the change cannot be written "
        "back. Nothing was changed. Make the model an argument, under nnx.jit or nnx.grad; or call "
        "model.eval() first, if it is to be evaluated."
    )


def _is_writable(variable: nnx.Variable[Any]) -> bool:
    try:
        variable.set_raw_value(variable.get_raw_value())
    except errors.TraceContextError:
        return False
    return True


@contextlib.contextmanager
def whole_if_it_fails(*nodes: Any) -> Iterator[None]:
    """Leaves modules, optimizers and Variables as they were if what is inside raises."""
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


def _modules_with_path(model: nnx.Module) -> list[tuple[nnx.Module, str, tuple[type, ...]]]:
    """Returns every module of `model`: itself, its path, and its class and those around it."""
    found = list(nnx.iter_modules(model))
    classes = {path: type(module) for path, module in found}
    return [(m, "/".join(map(str, path)), _around(path, classes)) for path, m in found]


def variables_with_path(model: nnx.Module) -> list[tuple[str, nnx.Variable[Any], tuple[type, ...]]]:
    """Returns every Variable of `model`: its path, itself, and the classes around it."""
    classes = {path: type(module) for path, module in nnx.iter_modules(model)}
    variables = nnx.to_flat_state(nnx.state(model))
    return [("/".join(map(str, path)), v, _around(path, classes)) for path, v in variables]


def _around(path: tuple[Any, ...], classes: dict[Any, type]) -> tuple[type, ...]:
    ancestors = [path[:end] for end in range(len(path), -1, -1)]  # innermost first
    return tuple(classes[ancestor] for ancestor in ancestors if ancestor in classes)


def match_parameters(model: nnx.Module, policies: ModulePolicies) -> None:
    """Lets rules that name single parameters match; only `cast_params` reads them."""
    for path, _, _ in variables_with_path(model):
        policies.rules.policy_for(path)


def cast_in_place(
    variables: Sequence[tuple[str, nnx.Variable[Any], tuple[type, ...]]],
    policy_for: Callable[[str, tuple[type, ...]], Policy] | None = None,
) -> None:
    """Casts statistics to float32, and parameters as `policy_for(path, classes)` stores them.

    Args:
      variables: each with its path and the classes around it.
      policy_for: None leaves parameters as they are.
    """
    with whole_if_it_fails(*(variable for _, variable, _ in variables)):
        for path, variable, classes in variables:
            if isinstance(variable, nnx.BatchStat):
                dtype: DTypeLike = FLOAT32
            elif policy_for is not None and isinstance(variable, nnx.Param):
                dtype = policy_for(path, classes).param_dtype
            else:
                continue
            value = variable.get_value()
            cast = cast_leaf(value, dtype)
            if cast is not value:
                variable.set_value(cast)


@jax.tree_util.register_pytree_with_keys_class
class SplitModule:
    """The Variables of one of several modules that were taken apart together.

    Attributes:
      arrays: what they hold.
      names: their paths, joined by slashes; `Untrained` but for those of `nnx.Param`.
      where: the graph of all modules, and the key path of each array in it.
    """

    def __init__(self, arrays: Iterable[Any], names: tuple[str, ...], where: Any) -> None:
        self.arrays = tuple(arrays)
        self.names = names
        self.where = where

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        """The arrays with their names; the rest."""
        keys = map(jax.tree_util.DictKey, self.names)
        return tuple(zip(keys, self.arrays, strict=True)), (self.names, self.where)

    @classmethod
    def tree_unflatten(cls, held: Any, arrays: Any) -> "SplitModule":
        """The inverse of `tree_flatten_with_keys`."""
        return cls(arrays, *held)

    @property
    def parameters(self) -> dict[str, Any]:
        """The arrays that `nnx.grad` differentiates, by path."""
        named = zip(self.names, self.arrays, strict=True)
        return {name: array for name, array in named if not isinstance(name, Untrained)}


def _is_node(value: Any) -> bool:
    return isinstance(value, nnx.Pytree)


def _is_split(value: Any) -> bool:
    return isinstance(value, SplitModule)


def split_modules(tree: PyTree) -> PyTree:
    """Returns a tree with its modules, optimizers and random-number streams taken apart."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=_is_node)
    nodes = [leaf for leaf in leaves if _is_node(leaf)]
    if not nodes:
        return tree
    graph, state = nnx.split(nodes)
    found: list[list[tuple[Any, str, Any]]] = [[] for _ in nodes]  # key path, name, array
    for path, variable in nnx.to_flat_state(state):
        node, *inside = path
        name = "/".join(map(str, inside))
        name = name if isinstance(variable, nnx.Param) else Untrained(name)
        found[int(str(node))].append((path, name, variable.get_raw_value()))
    parts = []
    for rows in found:
        paths, names, arrays = ([row[column] for row in rows] for column in range(3))
        parts.append(SplitModule(arrays, tuple(names), (graph, tuple(paths))))
    following = iter(parts)
    filled = [next(following) if _is_node(leaf) else leaf for leaf in leaves]
    return jax.tree.unflatten(structure, filled)


def merge_modules(tree: PyTree) -> PyTree:
    """Returns a tree in which new modules stand for those that were taken apart."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=_is_split)
    parts = [leaf for leaf in leaves if _is_split(leaf)]
    if not parts:
        return tree
    flat = {
        path: array
        for part in parts
        for path, array in zip(part.where[1], part.arrays, strict=True)
    }
    following = iter(nnx.merge(parts[0].where[0], nnx.State.from_flat_path(flat)))
    filled = [next(following) if _is_split(leaf) else leaf for leaf in leaves]
    return jax.tree.unflatten(structure, filled)


def of_split_modules(fun: Callable[..., Any], *, in_scopes: bool) -> Callable[..., Any]:
    """Returns `fun` as a function of modules that were taken apart, which changes none.

    Args:
      fun: a function; a module or a method of one, of which a copy is called.
      in_scopes: whether the methods of its modules open scopes that say their paths.
    """
    own = fun if isinstance(fun, nnx.Module) else getattr(fun, "__self__", None)
    own = own if isinstance(own, nnx.Module) else None
    name = "__call__" if own is fun else getattr(fun, "__name__", "")
    method: Any = getattr(type(own), name, None)
    body = fun if own is None or method is None else method
    lifted = lift(body, ModuleScopes()) if in_scopes else body

    @functools.wraps(body, updated=())
    def of_arrays(*args: Any, **kwargs: Any) -> Any:
        if body is not fun:
            args = (merge_modules(split_modules(own)), *args)
        elif not any(map(_is_split, jax.tree.leaves((args, kwargs), is_leaf=_is_split))):
            return fun(*args, **kwargs)
        args, kwargs = merge_modules((args, kwargs))
        return lifted(*args, **kwargs)

    return of_arrays
