"""Our states inside an optimizer's state: find them, and what they store of which parameters.

A state of ours may lie in a chain, in a group of `optax.partition`, or in another wrapper's state.
`locate` finds it, with what it lies in. In order below:

1. what is an optimizer, and what is the state of one;
2. `locate`, `find_states` and `map_states`, for states of any type;
3. `STORAGES`: the states that store half parameters. `kept_by_path` says what they keep beside
   which parameter, and two checks refuse the orders in which they fail.
"""

import collections
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias, TypeVar

import jax
import optax
from jax.tree_util import keystr, tree_leaves_with_path

from jmp._messages import described, wrong
from jmp.transforms._rounding import needs_master
from jmp.trees import PyTree, is_array, leaves_by_path

S = TypeVar("S")
T = TypeVar("T")
Kinds: TypeAlias = type[S] | tuple[type[S], ...]
Around: TypeAlias = tuple[tuple[Any, int], ...]
ROOT = keystr(())  # the path of a tree that is one array


def as_transformation(transformation: object, caller: str) -> optax.GradientTransformationExtraArgs:
    """Returns an optax transformation that takes extra arguments; `MultiSteps` objects are fine."""
    if isinstance(transformation, optax.MultiSteps):
        transformation = transformation.gradient_transformation()
    if not isinstance(transformation, optax.GradientTransformation):
        expected = "an optax transformation, such as optax.adam(1e-3)"
        more = " Did you forget to call it?" * inspect.isfunction(transformation)
        raise wrong(TypeError, caller, transformation, expected, name="inner", more=more)
    return optax.with_extra_args_support(transformation)


def is_optimizer(value: object) -> bool:
    """Returns whether a value is an optimizer, and not the state of one."""
    return isinstance(value, optax.GradientTransformation | optax.MultiSteps)


def check_is_state(opt_state: object) -> None:
    """Raises TypeError for an optimizer in the place of its state."""
    if is_optimizer(opt_state):
        raise TypeError(
            f"Got {described(opt_state)} as the state of an optimizer; expected what "
            "tx.init(params) or tx.update(...) returned, not the optimizer itself."
        )


def holds_a_state(tree: PyTree) -> bool:
    """Returns whether a tree is or holds an optimizer, or the state of one."""

    def is_state(node: object) -> bool:
        kind = type(node)
        is_ours = kind.__module__.startswith("jmp.transforms")
        is_named_so = kind.__name__.endswith("State") and (is_ours or _is_of_optax(kind))
        return is_optimizer(node) or is_named_so

    return any(map(is_state, jax.tree.leaves(tree, is_leaf=is_state)))


def locate(opt_state: optax.OptState, kinds: Kinds[S]) -> list[tuple[S, Around]]:
    """Returns every state of one of `kinds` in `opt_state`, however deep, outermost first.

    Beside each state is what it lies in, outermost first: pairs of a node and of the number of the
    child that leads to the state.
    """

    def visit(node: Any, around: Around) -> Iterator[tuple[S, Around]]:
        if isinstance(node, kinds):
            yield node, around
        for position, child in enumerate(children(node)):
            yield from visit(child, (*around, (node, position)))

    return list(visit(opt_state, ()))


def find_states(opt_state: optax.OptState, kinds: Kinds[S]) -> list[S]:
    """Returns every state of one of `kinds` in `opt_state`, however deep, outermost first."""
    return [state for state, _ in locate(opt_state, kinds)]


def map_states(function: Callable[[S], S], opt_state: T, kinds: Kinds[S]) -> T:
    """Returns `opt_state` with `function` applied to every outermost state of one of `kinds`."""
    is_state: Callable[[Any], bool] = lambda node: isinstance(node, kinds)
    return jax.tree.map(
        lambda node: function(node) if is_state(node) else node, opt_state, is_leaf=is_state
    )


def children(node: Any) -> list[Any]:
    """Returns what is directly in a node of a tree, nothing for a leaf."""
    inside = jax.tree.leaves(node, is_leaf=lambda inside: inside is not node)
    return [child for child in inside if child is not node]


def is_chain(node: object) -> bool:
    """Returns whether `node` is the state of `optax.chain` or `optax.named_chain`.

    A tuple with an array or a tree of arrays in it is one of the user's: `(step, opt_state)`.
    """
    if type(node) is tuple:
        return not any(is_array(part) or type(part) in (dict, list, int) for part in node)
    return isinstance(node, collections.OrderedDict)


def wrapper_of_optax(node: object) -> str | None:
    """Returns which optax transformation keeps such a state, "optax.masked"; None for others'."""
    if is_chain(node) or not _is_of_optax(type(node)):
        return None
    words = re.findall("[A-Z]+[a-z]*", type(node).__name__.removesuffix("State"))
    package = "optax.contrib" if "contrib" in type(node).__module__ else "optax"
    return f"{package}.{'_'.join(words).lower()}"


def _is_of_optax(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "optax"


# How half parameters are stored, by the type of the state. Each `ParameterStorage` adds itself.
STORAGES: dict[type, Any] = {}


def locate_storing(opt_state: optax.OptState) -> list[tuple[Any, Around]]:
    """Returns the states in `opt_state` that store half parameters, as `locate` does."""
    return locate(opt_state, tuple(STORAGES))


def kept_by_path(opt_state: optax.OptState) -> dict[str, tuple[Any, Any]]:
    """Returns what is kept beside each half parameter, and by which `ParameterStorage`.

    The keys are the paths (`keystr`) of the parameters of all groups. Beside a parameter there is
    an array, or an `EmptyState` if its storage keeps nothing.
    """
    return {
        keystr(path): (beside, STORAGES[type(state)])
        for state, _ in locate_storing(opt_state)
        for path, beside in tree_leaves_with_path(state[0], is_leaf=is_kept)
    }


def is_kept(node: object) -> bool:
    """Returns whether a node says that a parameter is stored, and that nothing is kept beside."""
    return isinstance(node, optax.EmptyState)


# States of optax's wrappers that hand an update on as it is, or hold all of it back.
_AROUND_MASTERS = frozenset(
    """PartitionState MaskedState MultiStepsState InjectHyperparamsState
    InjectStatefulHyperparamsState SAMState""".split()
)


def check_nothing_changes_masters(opt_state: optax.OptState) -> None:
    """Raises ValueError if something changes an update after master parameters have moved.

    Raises TypeError too, for an optimizer in the place of its state.
    """
    check_is_state(opt_state)
    for state, around in locate_storing(opt_state):
        caller = STORAGES[type(state)].caller
        for node, position in around:
            outer = wrapper_of_optax(node)
            if outer and type(node).__name__ not in _AROUND_MASTERS:
                raise ValueError(
                    f"This optimizer has {caller} inside {outer}, which changes the parameters but "
                    f"not their masters. Put it around: {caller}({outer}(...))."
                )
            if is_chain(node) and position + 1 < len(node):
                raise ValueError(
                    f"This optimizer chains a transformation after {caller}; it would change "
                    "the parameters but not their masters. Move it inside: "
                    f"{caller}(optax.chain(adam, scale))."
                )


def check_half_ones_are_seen(opt_state: optax.OptState, params: optax.Params) -> None:
    """Raises ValueError if masters were made of one float32 vector, but parameters are half.

    Args:
      opt_state: an optimizer's state.
      params: the parameters that its `init` was given.
    """
    given = leaves_by_path(params)
    if ROOT in given or not any(map(needs_master, given.values())):
        return
    for state, around in locate_storing(opt_state):
        # A group to which no parameter belongs has no masters either.
        is_of_a_group = any(isinstance(node, optax.MaskedState) for node, _ in around)
        if isinstance(state[0], optax.MaskedNode) and not is_of_a_group:
            caller = STORAGES[type(state)].caller
            raise ValueError(
                f"{caller} got no half parameters: something around it, such as "
                "optax.flatten, made one vector of half and float32 ones, which has no masters, "
                f"and updates would be lost. Put it inside: {caller}(optax.flatten(adam))."
            )
