"""The optimizer inside of our transformations, their states inside of others, and refused orders.

1. `checked_inner` gives the optimizer inside, with errors that say which trees are wrong.
   `transformation` makes a transformation of two functions: the first makes a state, which is then
   placed on the devices of the parameters; the second gets arguments that were checked.
2. A state of ours may lie in a chain, in a group of `optax.partition`, or in another wrapper's
   state. `states_at` finds it, with what it lies in.
3. `_refuse_inside` and `check_optimizer_state` refuse the orders of transformations that fail: the
   first what lies inside of a transformation of ours, the second what lies around it.
"""

import collections
import contextlib
import inspect
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import keystr, tree_leaves_with_path

from jmp._messages import described, listed, way_to_parameters, where_trees_differ, wrong
from jmp.sharding._axes import unreduced_axes
from jmp.transforms._placement import placed
from jmp.transforms._rounding import needs_master
from jmp.trees import PyTree, is_array, leaves_by_path, register_for_export, stands_for_numbers

C = TypeVar("C", bound=type)
S = TypeVar("S")
T = TypeVar("T")
Around: TypeAlias = tuple[tuple[Any, int], ...]
Optimizer: TypeAlias = optax.GradientTransformation | optax.MultiSteps
ROOT = keystr(())  # the path of a tree that is one array
SCALES, STORES_PARAMETERS, STORES_STATE = range(3)  # from the outermost place to the innermost


class Wrapper(NamedTuple):
    """One of our transformations.

    Attributes:
      caller: the public function that makes it.
      place: where it belongs: `SCALES`, `STORES_PARAMETERS` or `STORES_STATE`.
      storage: the `ParameterStorage` of one that stores parameters; else None.
    """

    caller: str
    place: int
    storage: Any = None


WRAPPERS: dict[type, Wrapper] = {}  # by the type of the state


def register_wrapper(caller: str, place: int, storage: Any = None) -> Callable[[C], C]:
    """Registers the class of a transformation's state, for export and for the checks of orders.

    Args:
      caller, place, storage: see `Wrapper`.
    """

    def register(state_type: C) -> C:
        WRAPPERS[state_type] = Wrapper(caller, place, storage)
        return register_for_export(state_type)

    return register


class Transformation(optax.GradientTransformationExtraArgs, Generic[S]):  # type: ignore[misc]
    """A `GradientTransformationExtraArgs` whose state is an `S`.

    Optax declares every state as any tree at all, so that `tx.init(params).loss_scale` would be an
    error to a type checker. It is only an annotation: our functions return optax's own class.
    """

    if TYPE_CHECKING:

        def init(self, params: Any) -> S: ...

        def update(
            self, updates: Any, state: S, params: Any = None, **extra_args: Any
        ) -> tuple[Any, S]: ...


def transformation(
    init: Callable[[optax.Params], S],
    update: Callable[..., tuple[optax.Updates, S]],
    state_type: type[S],
) -> Transformation[S]:
    """Returns the transformation of these two functions, in which arguments are checked.

    Raises: in `update`, TypeError for a state that is not its own; ValueError for gradients that
      are still to be added up.
    """
    caller = WRAPPERS[state_type].caller
    placed_init = lambda params: placed(init(params), params)

    def checked_update(
        updates: optax.Updates, state: S, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, S]:
        if not isinstance(state, state_type):
            raise TypeError(
                f"{caller} got {described(state)} as its state; expected what tx.init(params) or "
                "tx.update returned. The order is tx.update(gradients, state, params)."
            )
        refuse_unreduced(updates, caller)
        return update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(placed_init, checked_update)


def checked_inner(inner: object, state_type: type) -> optax.GradientTransformationExtraArgs:
    """Returns the optimizer that one of ours wraps, with errors that say which trees are wrong.

    Its first state has no weak types.

    Args:
      state_type: the class of the state of the transformation around it.

    Raises:
      TypeError: `inner` is no transformation; in `init`, a leaf of the parameters is no array.
        Asked only after a failure: optimizers without moments take such leaves.
      ValueError: in `init`, as `_refuse_inside`; in `update`, as `structures_compared`.
    """
    caller = WRAPPERS[state_type].caller
    inside = as_transformation(inner, caller)

    def init(params: optax.Params) -> optax.OptState:
        try:
            state = inside.init(params)
        except (TypeError, ValueError, AttributeError) as error:
            for path, leaf in leaves_by_path(params).items():
                if not (stands_for_numbers(leaf) or isinstance(leaf, float)):
                    raise TypeError(
                        f"{caller} got {described(leaf)} as the parameter at {path or 'the root'}; "
                        f"expected a tree of arrays.{way_to_parameters(params)}"
                    ) from error
            raise
        _refuse_inside(state, state_type)
        return _without_weak_types(state)

    def update(
        updates: Any, state: optax.OptState, params: Any = None, **extra_args: Any
    ) -> tuple[optax.Updates, optax.OptState]:
        with structures_compared(updates, params, caller):
            return inside.update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(init, update)


def as_transformation(
    given: object, caller: str, name: str = "inner", more: str = ""
) -> optax.GradientTransformationExtraArgs:
    """Returns an optax transformation that takes extra arguments; `MultiSteps` objects are fine.

    Args:
      caller, name, more: for the error, as `wrong` takes them.

    Raises: TypeError for anything else.
    """
    if isinstance(given, optax.MultiSteps):
        given = given.gradient_transformation()
    if not isinstance(given, optax.GradientTransformation):
        expected = "an optax transformation, such as optax.adam(1e-3)"
        more = " Did you forget to call it?" if inspect.isfunction(given) else more
        raise wrong(TypeError, caller, given, expected, name=name, more=more)
    return optax.with_extra_args_support(given)


def with_gradients(
    extra_args: dict[str, Any], given: optax.Updates, gradients: optax.Updates
) -> dict[str, Any]:
    """Returns extra arguments in which `gradients` replace the gradients as they were given.

    Line searches get their gradients a second time, as `grad=`, the very same tree.
    """
    return {name: gradients if arg is given else arg for name, arg in extra_args.items()}


@contextlib.contextmanager
def structures_compared(
    gradients: optax.Updates, params: optax.Params | None, caller: str
) -> Iterator[None]:
    """Compares gradients and parameters if what is inside fails.

    Only then: an optimizer may take trees that differ.

    Raises:
      TypeError: None as gradients, before anything runs.
      ValueError: what is inside failed, and gradients have another structure than the parameters.
    """
    if gradients is None:
        raise TypeError(
            f"{caller} got None as gradients; expected a tree like the parameters, as "
            "jmp.scaled_value_and_grad(loss_fn, loss_scale)(params, ...) returns it beside the "
            "loss."
        )
    try:
        yield
    except (TypeError, ValueError) as error:
        got: Any = jax.tree.structure(gradients)
        if params is None or got == jax.tree.structure(params):
            raise
        raise ValueError(
            f"{caller} got gradients of another structure than the parameters: of gradients and "
            f"parameters {where_trees_differ(gradients, params)}. Differentiate with respect to "
            f"the parameters that the optimizer holds.{way_to_parameters(params)}"
        ) from error


def refuse_unreduced(updates: optax.Updates, caller: str) -> None:
    """Raises ValueError for gradients of which devices hold parts that are still to be added up."""
    for path, leaf in tree_leaves_with_path(updates):
        axes = sorted(unreduced_axes(leaf)) if isinstance(leaf, jax.Array) else []
        if axes:
            raise ValueError(
                f"{caller} got a gradient, at {keystr(path) or 'the root'}, that is still to be "
                f"added up over the axes {listed(axes)}, so that an overflow cannot be seen; "
                "expected the sum: jax.sharding.reshard(gradient, jax.typeof(parameter).sharding)."
            )


def _without_weak_types(inner_state: optax.OptState) -> optax.OptState:
    """Gives arrays that took their dtype from a Python number that dtype for good.

    The first step would return them strongly typed, and the second step would compile again.
    """

    def strong(leaf: Any) -> Any:
        return jnp.asarray(leaf, leaf.dtype) if getattr(leaf, "weak_type", False) else leaf

    return jax.tree.map(strong, inner_state)


# Our states inside of an optimizer's state.


def holds_a_state(tree: PyTree) -> bool:
    """Returns whether a tree is or holds an optimizer, or a state of ours or optax's."""

    def is_state(node: object) -> bool:
        package = type(node).__module__.partition(".")[0]
        is_named_so = type(node).__name__.endswith("State") and package in ("jmp", "optax")
        return isinstance(node, Optimizer) or is_named_so

    return any(map(is_state, jax.tree.leaves(tree, is_leaf=is_state)))


def states_at(opt_state: optax.OptState, *places: int) -> list[tuple[Any, Around]]:
    """Returns the states in `opt_state` of our transformations of some places, however deep.

    The outermost comes first. Beside each state is what it lies in, outermost first: pairs of a
    node and of the number of the child that leads to the state.
    """

    def visit(node: Any, around: Around) -> Iterator[tuple[Any, Around]]:
        if type(node) in WRAPPERS and WRAPPERS[type(node)].place in places:
            yield node, around
        for position, child in enumerate(_children(node)):
            yield from visit(child, (*around, (node, position)))

    return list(visit(opt_state, ()))


def map_states(function: Callable[[Any], Any], opt_state: T, place: int) -> T:
    """Returns `opt_state` with `function` applied to every outermost state of this place."""

    def is_state(node: Any) -> bool:
        return type(node) in WRAPPERS and WRAPPERS[type(node)].place == place

    mapped = lambda node: function(node) if is_state(node) else node
    return jax.tree.map(mapped, opt_state, is_leaf=is_state)


def _children(node: Any) -> list[Any]:
    """Returns what is directly in a node of a tree, nothing for a leaf."""
    inside = jax.tree.leaves(node, is_leaf=lambda inside: inside is not node)
    return [child for child in inside if child is not node]


def _is_chain(node: object) -> bool:
    """Returns whether `node` is the state of `optax.chain` or `optax.named_chain`.

    A tuple with an array or a tree of arrays in it is one of the user's: `(step, opt_state)`.
    """
    if type(node) is tuple:
        return not any(is_array(part) or type(part) in (dict, list, int) for part in node)
    return isinstance(node, collections.OrderedDict)


def _wrapper_of_optax(node: object) -> str | None:
    """Returns which optax transformation keeps such a state, "optax.masked"; None for others'."""
    package, *modules = type(node).__module__.split(".")
    if package != "optax" or _is_chain(node):
        return None
    if isinstance(node, optax.MultiStepsState):
        return "optax.MultiSteps"
    words = re.findall("[A-Z]+[a-z]*", type(node).__name__.removesuffix("State"))
    return f"optax.{'contrib.' * ('contrib' in modules)}{'_'.join(words).lower()}"


# States of optax's wrappers that hand an update on as it is, or hold all of it back.
_AROUND_MASTERS = frozenset(
    """PartitionState MaskedState MultiStepsState InjectHyperparamsState
    InjectStatefulHyperparamsState SAMState""".split()
)
_OPTIONS = {"with_loss_scale": ", loss_scale", "with_stored_state": ", 'bfloat16'"}  # in examples


def _refuse_inside(inner_state: optax.OptState, state_type: type) -> None:
    """Raises ValueError if the optimizer inside holds what belongs around it, or holds it twice.

    Loss scaling around all else: a skipped step would still move what is around it. Parameters
    around the state: `with_stored_state` would round what they keep.
    """
    caller, place, _ = WRAPPERS[state_type]
    for state, _ in states_at(inner_state, *range(place + 1)):
        found, place_of_found, _ = WRAPPERS[type(state)]
        swapped = _written_around(found, _written_around(caller, "adam"))
        way = f" Swap the two: {swapped}." if place_of_found < place else ""
        raise ValueError(
            f"{caller} got an inner transformation that contains {found}; expected with_loss_scale "
            "outermost, then one that stores the parameters, then with_stored_state, each at most "
            f"once.{way}"
        )


def check_optimizer_state(opt_state: PyTree) -> None:
    """Raises ValueError if an optimizer combines these transformations in an order that fails.

    Those orders are: anything before loss scaling in a chain, which would see scaled gradients;
    a transformation with a state after it, which a skip would not stop; loss scaling twice, or
    inside `partition`, `masked`, `apply_if_finite`, `MultiSteps` and the like; anything chained
    after masters, or masters inside `lookahead` and others that change updates. `named_chain` is
    a chain.

    A transformation sees its own part of the state, so neither `init` nor `update` can refuse these
    orders in a training step of your own: call this once, with `tx.init(params)`. `masters` checks
    the orders of masters, `loss_scale_state` all. The adapters call it too. They accept
    transformations after loss scaling, because their steps undo on a skip what these changed.

    Raises: ValueError for such an order; TypeError for an optimizer in the place of its state.

    >>> check_optimizer_state(())
    """
    check_order(opt_state)


def check_order(
    opt_state: optax.OptState, params: PyTree = None, *, undone_on_a_skip: bool = False
) -> None:
    """Raises ValueError for orders that fail; see `transforms.check_optimizer_state`.

    Args:
      params: the parameters that `init` was given. With them `check_half_ones_are_seen` too.
      undone_on_a_skip: whether the step undoes, on a skip, what a chain's later part did.

    Raises: TypeError too, for an optimizer in the place of its state.
    """
    check_is_state(opt_state)
    if len(states_at(opt_state, SCALES)) > 1:
        raise ValueError(
            "This optimizer contains with_loss_scale more than once; gradients would be unscaled "
            "twice, or by several scales. Use it once, outermost. One optimizer for several groups "
            "is with_loss_scale(optax.partition(...), loss_scale)."
        )
    check_nothing_changes_masters(opt_state)
    check_half_ones_are_seen(opt_state, params)
    for _, around in states_at(opt_state, SCALES):
        _check_around_scaling("with_loss_scale", around, undone_on_a_skip)


def check_is_state(opt_state: optax.OptState) -> None:
    """Raises TypeError for an optimizer in the place of its state."""
    if isinstance(opt_state, Optimizer):
        raise TypeError(
            f"Got {described(opt_state)} as the state of an optimizer; expected what "
            "tx.init(params) or tx.update(...) returned, not the optimizer itself."
        )


def check_nothing_changes_masters(opt_state: optax.OptState) -> None:
    """Raises ValueError if something changes an update after master parameters have moved."""
    reason = "which changes the parameters but not their masters"
    for state, around in states_at(opt_state, STORES_PARAMETERS):
        caller = WRAPPERS[type(state)].caller
        for node, position in around:
            outer = _wrapper_of_optax(node)
            if outer and type(node).__name__ not in _AROUND_MASTERS:
                raise _inside(caller, outer, reason)
            if _is_chain(node) and position + 1 < len(node):
                raise _chained(f"a transformation after {caller}", caller, reason)


def check_half_ones_are_seen(opt_state: optax.OptState, params: PyTree) -> None:
    """Raises ValueError if masters were made of one float32 vector, but parameters are half.

    So they are inside `optax.flatten`.

    Args:
      params: the parameters that `init` was given.
    """
    given = leaves_by_path(params)
    if ROOT in given or not any(map(needs_master, given.values())):
        return
    for state, around in states_at(opt_state, STORES_PARAMETERS):
        # A group to which no parameter belongs has no masters either.
        is_of_a_group = any(isinstance(node, optax.MaskedState) for node, _ in around)
        if isinstance(state[0], optax.MaskedNode) and not is_of_a_group:
            caller = WRAPPERS[type(state)].caller
            raise ValueError(
                f"{caller} got no half parameters: something around it, such as "
                "optax.flatten, made one vector of half and float32 ones, which has no masters, "
                f"and updates would be lost. Put it inside: {caller}(optax.flatten(adam))."
            )


def _check_around_scaling(caller: str, around: Around, undone_on_a_skip: bool) -> None:
    """Refuses all that is around loss scaling, but for the earlier part of a chain.

    In a chain a later part fails if it has a state of its own: a skip does not reach it, and its
    moments and counts move, and with them the parameters.
    """
    for node, position in around:
        if outer := _wrapper_of_optax(node):
            reason = "which sees gradients that are still scaled, or hides a skipped step"
            if isinstance(node, optax.MultiStepsState):
                reason = "whose sum would stay NaN for all later steps after one infinite gradient"
            raise _inside(caller, outer, reason)
        if _is_chain(node) and position > 0:
            reason = (
                "which sees gradients that are still scaled: clipping them to 1, for one, would "
                "make updates 65536 times too small"
            )
            raise _chained(f"a transformation before {caller}", caller, reason)
        if _is_chain(node) and jax.tree.leaves(_children(node)[1:]) and not undone_on_a_skip:
            reason = (
                "which a skipped step would move, and the parameters too (the steps of "
                "jmp.adapters undo it, and take such a chain)"
            )
            raise _chained(f"a transformation with a state after {caller}", caller, reason)


def _inside(caller: str, outer: str, reason: str) -> ValueError:
    return ValueError(
        f"This optimizer has {caller} inside {outer}, {reason}. Put it around: "
        f"{_written_around(caller, f'{outer}(...)')}."
    )


def _chained(what: str, caller: str, reason: str) -> ValueError:
    return ValueError(
        f"This optimizer chains {what}, {reason}. Move it inside: "
        f"{_written_around(caller, 'optax.chain(...)')}."
    )


def _written_around(caller: str, inner: str) -> str:
    """Returns how one of our transformations is written around an optimizer."""
    return f"{caller}({inner}{_OPTIONS.get(caller, '')})"
