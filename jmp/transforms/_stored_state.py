"""`with_stored_state`: the state of any optimizer in one or two bytes a number."""

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec
from jax.tree_util import keystr, tree_flatten_with_path, tree_leaves_with_path, tree_map_with_path
from jax.typing import DTypeLike

from jmp._messages import listed, users_stacklevel, wrong
from jmp.dtypes import FLOAT32, floating_dtype
from jmp.rules import UnusedRuleWarning, glob_matches
from jmp.sharding._axes import mapped_axes, names_by_dimension
from jmp.transforms import _encodings, _wrapping
from jmp.transforms._encodings import KINDS, StoredArray, encoded, least_scales, peaks_of
from jmp.transforms._few_kernels import chunks
from jmp.transforms._placement import BOX, parameter_path
from jmp.transforms._rounding import RandomBits
from jmp.trees import PyTree, cast_to_at_least_float32, path_string

CALLER = "with_stored_state"


@_wrapping.register_wrapper(CALLER, _wrapping.STORES_STATE)
class WithStoredStateState(NamedTuple):
    """State of `with_stored_state`.

    Attributes:
      count: int32 scalar: the steps so far, from which random bits are computed.
      inner_state: state of the wrapped optimizer, some of its arrays as `StoredArray`.

    >>> import optax
    >>> from jmp import transforms
    >>> tx = transforms.with_stored_state(optax.trace(0.9), "bfloat16")
    >>> tx.init(jnp.ones((1, 2))).inner_state.trace.codes
    Array([[0, 0]], dtype=bfloat16)
    """

    count: jax.Array  # type: ignore[assignment]  # a tuple's method
    inner_state: PyTree


# Arrays whose peaks one reduction finds; each thread of a GPU keeps two numbers for each.
ARRAYS_TOGETHER = 8
Rule = tuple[str, str, DTypeLike]
S = TypeVar("S")
# For 8 bits: what small models put most of their accuracy into, and whose rows are seldom updated.
EMBEDDINGS = "*embed*"
OF_8_BITS = ("int8", "float8_e4m3fn")
Peaks = dict[str, tuple[jax.Array, ...]]  # by the path of an array of the state


def with_stored_state(
    inner: _wrapping.Optimizer,
    stored: DTypeLike | Iterable[Rule],
    *,
    seed: int = 0,
    rounding: str = "stochastic",
    specs: PyTree = None,
) -> _wrapping.Transformation[WithStoredStateState]:
    """Stores the state of an optimizer in one or two bytes a number, and computes it in float32.

    Each step decodes the state to float32, runs `inner`, and encodes what comes out. So the numbers
    of optax mean what they say: 0.999 is 1.0 in bfloat16, and a bfloat16 second moment never falls.

    Encoding is stochastic. Rounded to the nearest a second moment would still not fall: 0.999 moves
    it by less than half a spacing. With `rounding="nearest"` a slowly moving average stops moving:
    it is for arrays that each step replaces as a whole.

    These are stored: float32 arrays of the shape of a parameter, at the end of whose path that
    parameter's path stands: Adam's moments, momentum, `MultiSteps`' sums, averages of parameters.
    Anything else that a state holds stays as it is: counts, factored moments, preconditioners. Do
    not store parameters that the state keeps, as `contrib.sam` does, nor moments of which the
    optimizer takes a difference, as `rmsprop(centered=True)` does: rounding can make it negative.

    To find scales, other types than bfloat16 run `inner` twice; of the first run a compiled program
    computes only the new state. An infinity or NaN stays one, and in "int8" its whole block does:
    put `with_loss_scale` around with a scale that checks, such as `jmp.StaticLossScale(1.0)`.

    Args:
      inner: any optax transformation, or a `MultiSteps` object. It sees gradients, parameters and
        its state in at least float32.
      stored: "bfloat16", "float16", "float8_e4m3fn", "int8" (see `StoredArray`), or rules `(glob of
        the state's path, glob of the parameter's path, dtype)`, of which the first that matches
        counts; "float32", and where none matches, is as it was. Globs match as those of
        `jmp.PolicyRules`, from any name of a path on: `[("mu", "*", "bfloat16"), ("nu", "kernel",
        "int8")]`; the path of the state is without the parameter's. With one dtype instead of
        rules, types of 8 bits leave vectors, and parameters whose path has "embed" in it, in
        float32; and every type leaves what is a parameter itself in `init`.
      seed: an integer, for stochastic rounding, as in `with_stochastic_rounding`.
      rounding: "stochastic" or "nearest".
      specs: as in `with_stochastic_rounding`, for an `update` inside of a shard_map. Rows are
        scaled along the last axis, which no shard_map may divide.

    Returns: a transformation whose state is a `WithStoredStateState`. It goes inside of what stores
      parameters, as `with_split_masters(with_stored_state(adam, "bfloat16"))`, and inside of
      `with_loss_scale`.

    Raises:
      TypeError: `inner` is no transformation; `stored` is no dtype and no list of such rules; a
        seed that is no integer.
      ValueError: a dtype that is none of these, another rounding; in `init`, masters or loss
        scaling inside of it.

    Warns: `jmp.UnusedRuleWarning`, in `init`, for rules that matched nothing.

    >>> tx = with_stored_state(optax.adam(1e-3), "bfloat16")
    >>> state = tx.init({"w": jnp.ones((2, 4))})
    >>> state.inner_state[0].mu["w"].codes.dtype
    dtype(bfloat16)
    """
    optimizer = _wrapping.checked_inner(inner, WithStoredStateState)
    given: Any = stored
    is_one_dtype = isinstance(given, str) or not isinstance(given, Iterable)
    rules = [("*", "*", _kind(given))] if is_one_dtype else list(map(_checked_rule, given))
    bits = RandomBits(CALLER, seed, specs)
    if rounding not in ("stochastic", "nearest"):
        raise wrong(ValueError, CALLER, rounding, "'stochastic' or 'nearest'", name="rounding")

    def init(params: optax.Params) -> WithStoredStateState:
        wide = cast_to_at_least_float32(params)
        inner_state = optimizer.init(wide)
        stored_state = _first_encoded(inner_state, wide, rules, spares=is_one_dtype)
        return WithStoredStateState(jnp.zeros([], jnp.int32), stored_state)

    def update(
        updates: Any, state: WithStoredStateState, params: Any = None, **extra_args: Any
    ) -> tuple[optax.Updates, WithStoredStateState]:
        gradients, seen = cast_to_at_least_float32((updates, params))
        extra_args = _wrapping.with_gradients(extra_args, updates, gradients)

        def run(inner_state: PyTree) -> tuple[optax.Updates, PyTree]:
            decoded = decode_state(inner_state)
            return optimizer.update(gradients, decoded, seen, **extra_args)

        # Scales are found first; then all is computed again behind barriers. Without them XLA would
        # keep the new state, in float32, from one pass to the next. The first run computes only the
        # state.
        peaks = _peaks_like(state.inner_state, run, updates)
        old, peaks = _behind_barriers(state.inner_state, peaks)
        new_updates, inner_state = run(old)
        least = {jax.typeof(found[0]): least_scales(found[0]) for found in peaks.values()}

        def encode(path: tuple[Any, ...], was: Any, new: Any) -> Any:
            if not is_stored(was):
                return new
            name = keystr(path)
            _check_rows_are_whole(name, was, bits.spec_of(name))
            drawn = bits.at(name, new, state.count) if rounding == "stochastic" else None
            found = peaks.get(name)
            least_of = least[jax.typeof(found[0])] if found else _encodings.LEAST_SCALE
            return encoded(new.astype(jnp.float32), was.kind, drawn, found, least_of)

        count = optax.safe_increment(state.count)
        stored_state = tree_map_with_path(encode, old, inner_state, is_leaf=is_stored)
        return new_updates, WithStoredStateState(count, stored_state)

    return _wrapping.transformation(init, update, WithStoredStateState)


def is_stored(node: object) -> bool:
    """Returns whether a node of a state is an array that is encoded."""
    return isinstance(node, StoredArray)


def decode_state(opt_state: PyTree) -> PyTree:
    """Returns an optimizer's state with its `StoredArray`s as the float32 arrays they stand for.

    To look at values, or to go on with a state in float32. The state of an `nnx.Optimizer` is given
    as `nnx.as_pure(...)`.

    >>> import optax
    >>> state = with_stored_state(optax.trace(0.9), "int8").init({"w": jnp.ones((2, 4))})
    >>> decode_state(state).inner_state.trace["w"].dtype
    dtype('float32')
    """
    decode = lambda node: node.decoded() if is_stored(node) else node
    return jax.tree.map(decode, opt_state, is_leaf=is_stored)


def encode_state(opt_state: S, values: PyTree) -> S:
    """Returns an optimizer's state that holds these values, stored as its own are.

    The inverse of `decode_state`, for a run that goes on from a state in float32, or from one that
    was stored in another way. Values are rounded to the nearest.

    Args:
      opt_state: a state, such as `tx.init(params).inner_state`, for its `StoredArray`s.
      values: a state of the same structure, with float32 arrays in their places.

    Raises: ValueError if the structures differ.

    >>> import optax
    >>> params, sgd = {"w": jnp.ones((2, 4))}, optax.sgd(0.1, momentum=0.9)
    >>> _, state = sgd.update(params, sgd.init(params))
    >>> fresh = with_stored_state(sgd, "int8").init(params)
    >>> stored = fresh._replace(inner_state=encode_state(fresh.inner_state, state))
    >>> stored.inner_state[0].trace["w"].codes.dtype
    dtype('uint8')
    """
    encode = lambda old, new: encoded(new, old.kind) if is_stored(old) else new
    return jax.tree.map(encode, opt_state, values, is_leaf=is_stored)


def _peaks_like(
    old: PyTree, run: Callable[[PyTree], tuple[optax.Updates, PyTree]], gradients: PyTree
) -> Peaks:
    """Returns by path the peaks of the state that comes next; finds many arrays' together.

    The arrays of one parameter are in one reduction, which reads its gradient once; and so are a
    few parameters of one shape, whose rows are read side by side.
    """
    structure: Any
    found, structure = tree_flatten_with_path(old, is_leaf=is_stored)
    of_parameters: dict[Any, list[int]] = {}
    by_path = dict(tree_leaves_with_path(gradients))
    for position, (path, leaf) in enumerate(found):
        if is_stored(leaf) and leaf.scales is not None:
            of = parameter_path(leaf.codes, path, by_path)
            of_parameters.setdefault((of, leaf.kind), []).append(position)
    if not of_parameters:
        return {}
    new = structure.flatten_up_to(run(old)[1])
    alike: dict[Any, list[list[int]]] = {}
    for (_, kind), positions in of_parameters.items():
        types = tuple(jax.typeof(new[position]) for position in positions)
        alike.setdefault((kind, types), []).append(positions)
    peaks: Peaks = {}
    for (kind, types), parameters in alike.items():
        for some in chunks(parameters, max(1, ARRAYS_TOGETHER // len(types))):
            together = [position for positions in some for position in positions]
            of_each = peaks_of([new[position].astype(jnp.float32) for position in together], kind)
            names = (keystr(found[position][0]) for position in together)
            peaks |= dict(zip(names, of_each, strict=True))
    return peaks


def _behind_barriers(old: PyTree, peaks: Peaks) -> tuple[PyTree, Peaks]:
    """Returns a state and peaks of which no array can be had before the peaks that belong to it.

    Each array has its own barrier: arrays that share one count, inside of a shard_map, as different
    on each device if one of them is. A count is not, nor are parameters that no axis divides.
    """
    waited = dict(peaks)

    def wait(path: tuple[Any, ...], leaf: Any) -> Any:
        if (name := keystr(path)) in peaks:
            leaf, waited[name] = lax.optimization_barrier((leaf, peaks[name]))
        return leaf

    return tree_map_with_path(wait, old, is_leaf=is_stored), waited


def _first_encoded(
    state: PyTree, params: PyTree, rules: Sequence[tuple[str, str, str]], spares: bool
) -> PyTree:
    """Returns the first state with some arrays encoded.

    Args:
      rules: globs of the state's path and of the parameter's path, and the kind of storage.
      spares: whether 8 bits leave out vectors and embeddings, and all kinds the parameters' copies.
    """
    by_path = dict(tree_leaves_with_path(params))
    unused = dict(enumerate(rules))
    seen: list[str] = []

    def kind_of(path: str, of: str) -> str:
        for index, (of_state, of_parameter, kind) in enumerate(rules):
            if glob_matches(of_state, path) and glob_matches(of_parameter, of):
                unused.pop(index, None)
                return kind
        return "float32"

    def encode(path: tuple[Any, ...], node: Any) -> Any:
        (inside, leaf), *_ = tree_leaves_with_path(node) or [((), None)]
        path = (*path, *inside)
        of = parameter_path(leaf, path, by_path)
        if of is None or getattr(leaf, "dtype", None) != FLOAT32 or not leaf.size * leaf.ndim:
            return node
        names = _as_in_rules(path[: len(path) - len(of)]), _as_in_rules(of)
        seen.append(", ".join(names))
        kind = kind_of(*names)
        is_small = leaf.ndim < 2 or glob_matches(EMBEDDINGS, names[1].lower())
        is_copy = leaf is by_path[of]
        if kind == "float32" or (spares and (is_copy or (is_small and kind in OF_8_BITS))):
            return node
        stored = encoded(leaf, kind)
        return dataclasses.replace(stored, codes=jax.tree.map(lambda _: stored.codes, node))

    found = tree_map_with_path(encode, state, is_leaf=_is_variable)
    if unused and not spares:
        warnings.warn(
            f"{CALLER} has rules that matched no array of the state: "
            f"{listed(rule[:2] for rule in unused.values())}. Check their spelling (paths here are "
            f"{listed(seen, most=4)}); an earlier rule may have taken every match.",
            UnusedRuleWarning,
            stacklevel=users_stacklevel(),
        )
    return found


def _as_in_rules(path: tuple[Any, ...]) -> str:
    """Returns a path as rules match it: without the last part inside a parameter's box."""
    return path_string(path[:-1] if path[-1:] == (BOX,) else path)


def _is_variable(node: object) -> bool:
    """Returns whether a node is a Variable of Flax nnx, which may hold an array, and no tree.

    Its `init` sees Variables, its `update` arrays: nnx puts the new arrays into the old Variables.
    """
    classes = type(node).__mro__
    return any(of.__name__ == "Variable" and of.__module__.startswith("flax.") for of in classes)


def _checked_rule(rule: Any) -> tuple[str, str, str]:
    are_globs = isinstance(rule, tuple) and all(isinstance(part, str) for part in rule[:2])
    if not (are_globs and len(rule) == 3):
        expected = "(glob of the state's path, glob of the parameter's path, dtype)"
        raise wrong(TypeError, CALLER, rule, expected, name="a rule")
    return *rule[:2], _kind(rule[2])


def _kind(dtype: Any) -> str:
    """Returns the name of a kind of storage, or "float32".

    Raises: TypeError for what is no dtype; ValueError for one that is none of these.
    """
    kind = "int8" if np.dtype(np.int8) == dtype else str(floating_dtype(dtype, "stored"))
    known = (*KINDS, "float32")
    if kind not in known:
        raise ValueError(f"{CALLER} got stored={kind}; expected one of {listed(known)}.")
    return kind


def _check_rows_are_whole(path: str, stored: StoredArray, spec: PartitionSpec | None) -> None:
    """Raises ValueError for rows that a shard_map divides, of which no device knows the largest."""
    names = names_by_dimension(spec or PartitionSpec(), stored.codes.ndim)[-1]
    divided = set(names).intersection(mapped_axes())
    if stored.scales is not None and divided:
        raise ValueError(
            f"{CALLER} got {path}, stored as {stored.kind} with scales along its last axis, which "
            f"the shard_map divides along {listed(sorted(divided))}; expected whole rows. Divide "
            "another axis, store it in bfloat16, which has no scales, or update under jit."
        )
