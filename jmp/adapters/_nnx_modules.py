"""Modules of Flax nnx that compute with a policy, and as arguments of diagnostics.

- `lift`: a function of modules under autocast. nnx modules are objects whose Variables change, and
  autocast sees only pure functions. So the function is lifted with Flax's own bookkeeping
  (`nnx.to_tree`, `nnx.from_tree`), as under `nnx.jit`.
- `view_of`: a copy of a module that computes with a policy when it is called. Flax opens no name
  scope for an nnx module and offers no way to intercept its calls, so a module that a rule names is
  given a subclass of its class whose methods open the scope themselves. In a view it keeps that
  class; in `lift` only the copies in the trace have it.
- `whole_if_it_fails`: what a call changes in modules is written back as a whole or not at all. Flax
  empties a module before it writes it anew, and refuses to write a Variable inside another trace
  than the one it was made in. So after an error modules and Variables are as they were.
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
from jmp._messages import listed
from jmp.adapters._marked_modules import classes_around, mark, plain_class, set_class, subclass
from jmp.adapters._module_policies import ModulePolicies, ModuleScopes
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
        after = [taken_apart([model])[0] for model in models]
        # A model from outside of a trace may be called inside it, but not be written to.
        changed = [i for i, pair in enumerate(zip(before, after, strict=True)) if _differ(*pair)]
        written = [models[i] for i in changed]
        return changed, nnx.to_tree((written, result), ctxtag=tag)

    lowered = policies.autocast(pure)

    @functools.wraps(fun)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        models = instances_in((args, kwargs), nnx.Pytree, nnx.Variable)
        with nnx.update_context(tag):
            args, kwargs = nnx.to_tree((args, kwargs), ctxtag=tag)
            changed, after = lowered(*args, **kwargs)
            written = [models[index] for index in changed]
            with whole_if_it_fails(*written), _error_of_another_trace(written):
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
                for _, module in nnx.iter_modules(model):
                    undone.callback(set_class, module, type(module))
                mark(nnx.iter_modules(model), nnx.Module, policies)
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


def _differ(before: "SplitModule", after: "SplitModule") -> bool:
    """Returns whether a Variable has changed, or whether attributes came or went."""
    structure: Any
    (leaves, structure), (others, other) = map(jax.tree.flatten, (before, after))
    return structure != other or any(map(operator.is_not, leaves, others))


@contextlib.contextmanager
def _error_of_another_trace(written: Sequence[Any]) -> Iterator[None]:
    """Says what to do if Flax refuses to write to modules, optimizers or Variables."""
    try:
        yield
    except errors.TraceContextError as error:
        raise errors.TraceContextError(
            f"A call changes {listed(written)}, as BatchNorm and Dropout do in training, from "
            "outside of the trace (jax.jit, jax.grad, jax.make_jaxpr) that the call is in: the "
            "change cannot be written back. Nothing was changed. Make the model an argument, under "
            "nnx.jit or nnx.grad; or call model.eval() first, if it is to be evaluated."
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
    is_own: Callable[[Any], bool] = lambda x: getattr(type(x), _POLICIES, None) in (None, replaced)
    modules = {names: module for names, module in nnx.iter_modules(view) if is_own(module)}
    for module in modules.values():
        set_class(module, plain_class(type(module)))
    mark(modules.items(), nnx.Module, policies)
    for module in modules.values():
        set_class(module, _view_class(type(module), policies))
    return view


@functools.cache  # one class for all views, so that their graph definitions compare equal
def _view_class(module_type: type, policies: ModulePolicies) -> type:
    """Returns a subclass whose `__call__` runs under autocast, if it is not inside it already."""
    body: dict[str, Any] = {_POLICIES: policies}
    if "__call__" in dir(module_type):
        as_written: Any = module_type.__call__
        lowered = lift(as_written, policies)

        @functools.wraps(as_written)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if policies.are_in_force:
                return as_written(self, *args, **kwargs)
            return policies.policy.cast_to_output(lowered(self, *args, **kwargs))

        body["__call__"] = call
    return mark_lowered(subclass(module_type, body), policies.lowered)


def cast_in_place(
    model: nnx.Module, policy_for: Callable[[str, tuple[type, ...]], Policy] | None = None
) -> None:
    """Casts statistics to float32, and parameters as `policy_for(path, classes)` stores them.

    Args:
      policy_for: asked with a path and the classes around it; None leaves parameters as they are.
    """
    classes = {path: type(module) for path, module in nnx.iter_modules(model)}
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        if isinstance(variable, nnx.BatchStat):
            dtype: DTypeLike = FLOAT32
        elif policy_for is not None and isinstance(variable, nnx.Param):
            policy = policy_for("/".join(map(str, path)), classes_around(path, classes))
            dtype = policy.param_dtype
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


def split_modules(tree: PyTree) -> PyTree:
    """Returns a tree with its modules, optimizers and random-number streams taken apart."""
    is_node = lambda value: isinstance(value, nnx.Pytree)
    nodes, rest = take_arrays(tree, is_node, is_leaf=is_node)
    return rest.filled(taken_apart(nodes)) if nodes else tree


def taken_apart(nodes: list[Any]) -> list[SplitModule]:
    """Returns the arrays of several modules, optimizers or Variables, which may share some.

    A module may have arrays as attributes, without a Variable. A Variable may hold containers, such
    as what `nnx.capture` fills: they are copied, because they may change in place.
    """
    raw: Callable[[Any], Any] = lambda x: x.get_raw_value() if isinstance(x, nnx.Variable) else x
    graph, state = nnx.split(nodes)
    variables = nnx.to_flat_state(state)
    parts = []
    for number in range(len(nodes)):
        own = [(path, variable) for path, variable in variables if path[0] == number]
        names = [_name(path[1:], variable) for path, variable in own]
        arrays = [jax.tree.map(lambda x: x, raw(variable)) for _, variable in own]
        parts.append(SplitModule(names, arrays, (graph, tuple(path for path, _ in own))))
    return parts


def _name(path: tuple[Any, ...], variable: Any) -> str:
    # A key of a dict with a slash in it stands in quotes: two Variables never share a name.
    name = "/".join(repr(part) if "/" in str(part) else str(part) for part in path)
    return name if isinstance(variable, nnx.Param) else Untrained(name)


def merge_modules(tree: PyTree) -> PyTree:
    """Returns a tree with new modules in place of the ones that were taken apart."""
    is_split = lambda value: isinstance(value, SplitModule)
    parts, rest = take_arrays(tree, is_split, is_leaf=is_split)
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
            args = (nnx.clone(own), *args)
        elif not instances_in((args, kwargs), SplitModule):
            return fun(*args, **kwargs)
        args, kwargs = merge_modules((args, kwargs))
        return lifted(*args, **kwargs)

    return of_arrays
