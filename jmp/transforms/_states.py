"""The states of our wrappers: their types, finding them in chains, refusing orders that fail."""

import collections
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax

from jmp._messages import described, listed
from jmp.loss_scaling import LossScale
from jmp.sharding._axes import unreduced_axes
from jmp.trees import PyTree, is_array, leaves_by_path, register_for_export

S = TypeVar("S")
T = TypeVar("T")


class Transformation(optax.GradientTransformationExtraArgs, Generic[S]):  # type: ignore[misc]
    """A `GradientTransformationExtraArgs` whose state is an `S`.

    Optax declares every state as any tree at all, so that `tx.init(params).loss_scale` would be an
    error to a type checker. An annotation only: what our functions return is optax's own class.
    """

    if TYPE_CHECKING:

        def init(self, params: Any) -> S: ...

        def update(
            self, updates: Any, state: S, params: Any = None, **extra_args: Any
        ) -> tuple[Any, S]: ...


@register_for_export
class WithLossScaleState(NamedTuple):
    """State of `with_loss_scale`.

    Attributes:
      loss_scale: the `jmp.LossScale` for the next loss.
      grads_finite: bool scalar: whether the last gradients were finite, and with that the step
        taken. With `NoOpLossScale` nothing is checked: it stays True, also after an infinity.
      skipped_steps: int32 scalar: steps skipped so far.
      consecutive_skips: int32 scalar: steps skipped in a row. If it keeps growing, the model itself
        gives infinities or NaNs, and no scale helps.
      inner_state: state of the wrapped optimizer.

    >>> import optax
    >>> from jmp import transforms
    >>> tx = transforms.with_loss_scale(optax.sgd(0.1), DynamicLossScale(8.0))
    >>> state = tx.init(jnp.ones(2))
    >>> float(state.loss_scale.loss_scale), bool(state.grads_finite), int(state.skipped_steps)
    (8.0, True, 0)
    """

    loss_scale: LossScale
    grads_finite: jax.Array
    skipped_steps: jax.Array
    consecutive_skips: jax.Array
    inner_state: PyTree


@register_for_export
class WithMasterParamsState(NamedTuple):
    """State of `with_master_params`.

    Attributes:
      masters: the parameters' tree with a master, float32 or float64, for every half leaf, and
        `optax.MaskedNode()`, which holds nothing, for every other leaf; or `FlatMasters`.
      inner_state: state of the wrapped optimizer.

    >>> import optax
    >>> from jmp import transforms
    >>> params = {"w": jnp.ones(2, jnp.bfloat16), "norm": jnp.ones(2)}
    >>> state = transforms.with_master_params(optax.sgd(0.1)).init(params)
    >>> state.masters["w"].dtype, state.masters["norm"]  # float32 already: no second copy
    (dtype('float32'), MaskedNode())
    """

    masters: PyTree
    inner_state: PyTree


# How half parameters are stored, by the type of the state. Each `ParameterStorage` adds itself.
STORAGES: dict[type, Any] = {}


def storing_states() -> tuple[type[Any], ...]:
    """Returns the types of the states that hold what belongs to half parameters."""
    return tuple(STORAGES)


class Located(NamedTuple, Generic[S]):
    """A state inside that of an optimizer.

    Attributes:
      state: the state.
      around: what it lies in, outermost first: pairs of a node and of which child leads to it.
    """

    state: S
    around: tuple[tuple[Any, int], ...]


def locate(
    opt_state: optax.OptState, state_type: type[S] | tuple[type[S], ...]
) -> list[Located[S]]:
    """Returns every state of `state_type` in `opt_state`, however deep, outermost first."""

    def visit(node: Any, around: tuple[tuple[Any, int], ...]) -> Iterator[Located[S]]:
        if isinstance(node, state_type):
            yield Located(node, around)
        for position, child in enumerate(_children(node)):
            if _holds(child, state_type):
                yield from visit(child, (*around, (node, position)))

    return list(visit(opt_state, ()))


def find_states(opt_state: optax.OptState, state_type: type[S] | tuple[type[S], ...]) -> list[S]:
    """Returns every state of `state_type` in `opt_state`, however deep, outermost first."""
    return [found.state for found in locate(opt_state, state_type)]


def map_states(
    function: Callable[[S], S], opt_state: T, state_type: type[S] | tuple[type[S], ...]
) -> T:
    """Returns `opt_state` with `function` applied to every outermost state of `state_type`."""
    is_state: Callable[[Any], bool] = lambda node: isinstance(node, state_type)
    mapped: T = jax.tree.map(
        lambda node: function(node) if is_state(node) else node, opt_state, is_leaf=is_state
    )
    return mapped


def check_inner_state(inner_state: optax.OptState, state_type: type, caller: str) -> None:
    """Raises ValueError if `inner_state` holds a second wrapper of the same kind."""
    if find_states(inner_state, state_type):
        raise ValueError(
            f"{caller} got an inner transformation that contains {caller} already; gradients would "
            "be handled twice. Use it once, outermost."
        )


def check_no_storage_inside(inner_state: optax.OptState, caller: str) -> None:
    """Raises ValueError if half parameters are stored twice, or inside a state that is encoded."""
    for state in find_states(inner_state, storing_states()):
        inside = STORAGES[type(state)].caller
        if inside == caller:
            check_inner_state(inner_state, type(state), caller)
        raise ValueError(
            f"{caller} got an inner transformation that contains {inside}, which stores the "
            "parameters already. Use one of the two, around the optimizer."
        )


def check_no_loss_scaling_inside(inner_state: optax.OptState, caller: str) -> None:
    """Raises ValueError if a skipped step would not reach what is kept beside half parameters."""
    if find_states(inner_state, WithLossScaleState):
        raise ValueError(
            f"{caller} got an inner transformation that contains with_loss_scale; a skipped step "
            f"would still move what {caller} counts and keeps. Swap the two: "
            f"with_loss_scale({caller}(adam), loss_scale)."
        )


def check_own_state(state: object, state_type: type, caller: str) -> None:
    """Raises TypeError if `update` got something else than the state that it returned last."""
    if not isinstance(state, state_type):
        raise TypeError(
            f"{caller} got {described(state)} as its state; expected what tx.init(params) or "
            "tx.update returned. The order is tx.update(gradients, state, params)."
        )


def refuse_unreduced(updates: optax.Updates, caller: str) -> None:
    """Raises ValueError for gradients of which devices hold parts that are still to be added up."""
    if not any(map(_unreduced, jax.tree.leaves(updates))):
        return
    by_path = {path: _unreduced(leaf) for path, leaf in leaves_by_path(updates).items()}
    path, axes = next((path, axes) for path, axes in by_path.items() if axes)
    raise ValueError(
        f"{caller} got a gradient, at {path or 'the root'}, that is still to be added up over the "
        f"axes {listed(axes)}, so that an overflow cannot be seen; expected the sum: "
        "jax.sharding.reshard(gradient, jax.typeof(parameter).sharding)."
    )


def _unreduced(leaf: Any) -> list[str]:
    return sorted(unreduced_axes(leaf)) if isinstance(leaf, jax.Array) else []


def holds_a_state(tree: PyTree) -> bool:
    """Returns whether a tree is or holds an optimizer, or the state of one."""

    def is_state(node: object) -> bool:
        kind = type(node)
        ours_or_optax = is_of_optax(kind.__module__) or kind.__module__.startswith("jmp.transforms")
        is_optimizer = isinstance(node, optax.GradientTransformation | optax.MultiSteps)
        return is_optimizer or (ours_or_optax and kind.__name__.endswith("State"))

    return any(map(is_state, jax.tree.leaves(tree, is_leaf=is_state)))


def check_is_state(opt_state: object) -> None:
    """Raises TypeError for an optimizer in the place of its state."""
    if isinstance(opt_state, (optax.GradientTransformation, optax.MultiSteps)):
        raise TypeError(
            f"Got {described(opt_state)} as the state of an optimizer; expected what "
            "tx.init(params) or tx.update(...) returned, not the optimizer itself."
        )


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
    for found in locate(opt_state, storing_states()):
        caller = STORAGES[type(found.state)].caller
        for node, position in found.around:
            if _is_wrapper(node) and type(node).__name__ not in _AROUND_MASTERS:
                raise ValueError(
                    f"This optimizer has {caller} inside {_made_by(node)}, which changes the "
                    "parameters but not their masters. Put it around: "
                    f"{caller}({_made_by(node)}(...))."
                )
            if is_chain(node) and position + 1 < len(node):
                raise ValueError(
                    f"This optimizer chains a transformation after {caller}; it would change "
                    "the parameters but not their masters. Move it inside: "
                    f"{caller}(optax.chain(adam, scale))."
                )


def check_loss_scaling(opt_state: optax.OptState, *, undone_on_a_skip: bool) -> None:
    """Raises ValueError for what stands around loss scaling and fails there.

    That is anything but a chain's later part; and in a chain a later part with a state of its own.
    A skip does not reach it: its moments and counts move, and with them the parameters.

    Args:
      undone_on_a_skip: whether the step undoes, on a skip, what a chain's later part did.
    """
    scaled = locate(opt_state, WithLossScaleState)
    if len(scaled) > 1:
        raise ValueError(
            "This optimizer contains with_loss_scale more than once; gradients would be unscaled "
            "twice, or by several scales. Use it once, outermost. One optimizer for several groups "
            "is with_loss_scale(optax.partition(...), loss_scale)."
        )
    for node, position in (pair for found in scaled for pair in found.around):
        if isinstance(node, storing_states()):
            check_no_loss_scaling_inside(node.inner_state, STORAGES[type(node)].caller)
        if isinstance(node, optax.MultiStepsState):
            raise ValueError(
                "This optimizer accumulates outside of with_loss_scale; one infinite micro-batch "
                "would make the accumulator NaN for all later steps. Swap the two: "
                "with_loss_scale(optax.MultiSteps(adam, 4), loss_scale)."
            )
        if _is_wrapper(node):
            raise ValueError(
                f"This optimizer has with_loss_scale inside {_made_by(node)}, which sees gradients "
                "that are still scaled, or hides a skipped step. Put it around: "
                f"with_loss_scale({_made_by(node)}(...), loss_scale)."
            )
        if is_chain(node) and position > 0:
            raise ValueError(
                "This optimizer chains a transformation before with_loss_scale; it sees gradients "
                "that are still scaled: clipping them to 1, for one, would make updates 65536 "
                "times too small. Move it inside: "
                "with_loss_scale(optax.chain(clip_by_global_norm, adam), loss_scale)."
            )
        has_state_after = is_chain(node) and jax.tree.leaves(_children(node)[position + 1 :])
        if has_state_after and not undone_on_a_skip:
            raise ValueError(
                "This optimizer chains a transformation with a state after with_loss_scale; a "
                "skipped step would move that state and the parameters. Move it inside: "
                "with_loss_scale(optax.chain(clip, adam), loss_scale). (The steps of "
                "jmp.adapters undo it, and take such a chain.)"
            )


def is_of_optax(module: str) -> bool:
    """Returns whether a module of this name belongs to optax."""
    return module.partition(".")[0] == "optax"


def is_chain(node: object) -> bool:
    """Returns whether `node` is the state of `optax.chain` or `optax.named_chain`.

    A tuple with an array or a tree of arrays in it is one of the user's: `(step, opt_state)`.
    """
    if type(node) is tuple:
        return not any(is_array(part) or type(part) in (dict, list, int) for part in node)
    return isinstance(node, collections.OrderedDict)


def _is_wrapper(node: object) -> bool:
    return not is_chain(node) and is_of_optax(type(node).__module__)


def _made_by(state: object) -> str:
    """Returns the name of the optax transformation that keeps such a state: "masked"."""
    words = re.findall("[A-Z]+[a-z]*", type(state).__name__.removesuffix("State"))
    package = "optax.contrib" if "contrib" in type(state).__module__ else "optax"
    return f"{package}.{'_'.join(words).lower()}"


def _children(node: Any) -> list[Any]:
    if isinstance(node, collections.OrderedDict):
        return list(node.values())
    return jax.tree.leaves(node, is_leaf=lambda inside: inside is not node)


def _holds(node: Any, state_type: type | tuple[type, ...]) -> bool:
    leaves = jax.tree.leaves(node, is_leaf=lambda inside: isinstance(inside, state_type))
    return any(isinstance(leaf, state_type) for leaf in leaves)


def without_weak_types(tree: PyTree) -> PyTree:
    """Gives arrays that took their dtype from a Python number that dtype for good.

    The first step would return them strongly typed, and the second step would compile again.
    """
    return jax.tree.map(
        lambda leaf: jnp.asarray(leaf, leaf.dtype) if getattr(leaf, "weak_type", False) else leaf,
        tree,
    )
