"""`autocast` and `full_precision`, and what a call of an autocast function does.

A call traces, or finds the trace in JAX's own cache; plans, or finds the plan; and runs it: an
eager call through `jax.jit`, a call under a transformation by binding the plan's steps. A `Program`
holds the function, how to lower it, and the plans made for the types it was called with.
"""

import dataclasses
import functools
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, ParamSpec, Protocol, TypedDict, TypeVar, Unpack, overload

import jax
import jax.numpy as jnp

from jmp import _jax_compat
from jmp._array_calls import StaticPart, take_arrays
from jmp._messages import (
    check_function,
    described,
    framework_of,
    function_name,
    listed,
    users_stacklevel,
    way_out,
    wrong,
)
from jmp.autocasting._emit import run_plan
from jmp.autocasting._lowerings import cast_all
from jmp.autocasting._operations import WARNINGS
from jmp.autocasting._planner import plan_program
from jmp.autocasting._propagation import walk
from jmp.autocasting._request import AUTOCAST, FULL_PRECISION, Request, Settings
from jmp.autocasting._steps import Plan
from jmp.dtypes import FLOAT32
from jmp.policy import Policy, get_policy, mark_lowered
from jmp.rules import Rule, UnusedRuleWarning
from jmp.trees import as_jax_array, cast_leaf, holds_numbers

P = ParamSpec("P")
R = TypeVar("R")


class Options(TypedDict, total=False):
    """The keyword arguments of `autocast` but for rules, which adapters read themselves."""

    apply_to: Sequence[str]
    low: Iterable[Any]
    full: Iterable[Any]
    follow: Iterable[Any]
    recompute: str
    attention: str
    float8: str
    platform: str | None


class AllOptions(Options, total=False):
    """The keyword arguments of `autocast`, and of the adapters' functions of that name."""

    rules: Sequence[Rule]


class Autocast(Protocol):
    """How `autocast` is called, that of `jmp` and those of adapters."""

    @overload
    def __call__(
        self, fun: Callable[P, R], policy: str | Policy, **options: Unpack[AllOptions]
    ) -> Callable[P, R]: ...
    @overload
    def __call__(
        self, *, policy: str | Policy, **options: Unpack[AllOptions]
    ) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def or_decorator(lower: Callable[..., Any]) -> Autocast:
    """Returns an `autocast` that reads the policy, and returns a decorator where `fun` is left out.

    Args:
      lower: the same, given a function and a `Policy`.

    Raises (when called): TypeError if the policy was left out, or stands where the function should.
    """

    @functools.wraps(lower)
    def called(fun: Any = None, policy: str | Policy | None = None, **options: Any) -> Any:
        if isinstance(fun, (str, Policy)) and (policy is None or callable(policy)):
            raise TypeError(
                f"autocast got the policy {described(fun)} in the place of the function; write "
                "autocast(fun, policy), or @autocast(policy=policy) above a function."
            )
        if policy is None:
            raise TypeError(
                f"autocast got no policy (its first argument is {described(fun)}); write "
                "autocast(fun, 'mixed_float16') or @autocast(policy='mixed_float16')."
            )
        policy = get_policy(policy)
        if fun is None:
            return functools.partial(called, policy=policy, **options)
        return lower(fun, policy, **options)

    return called


@or_decorator
def autocast(
    fun: Any = None,
    policy: Any = None,
    *,
    apply_to: Sequence[str] = (),
    low: Iterable[Any] = (),
    full: Iterable[Any] = (),
    follow: Iterable[Any] = (),
    rules: Sequence[Rule] = (),
    recompute: str = "auto",
    attention: str = "plain",
    float8: str = "weights",
    platform: str | None = None,
) -> Any:
    """Returns `fun` computing in mixed precision: products in half, sums and norms in float32.

    `fun` is an unmodified float32 function: a loss, a model's apply, from any framework. Its
    arguments and results keep their dtypes; parameters stay float32 and are cast at each use, so
    that gradients arrive, and add up, in float32. Wrap the whole loss and differentiate the result:
    `jax.grad(autocast(loss_fn, policy))`.

    Args:
      fun: any function that JAX can trace. It is traced once for each shape and structure of
        its arguments: what changes from call to call must be an argument. Those that are not arrays
        (Python numbers, strings, callables) reach it as they are, and each new one is a new trace:
        pass a step or a learning rate as an array. Left out, a decorator is returned.
      policy: its compute dtype is read, float16 or bfloat16, and whether gradients of parameters
        are float32 ("r=f32") and products float8 ("m=f8", as in "mixed_float8"). With float32
        compute `fun` runs as it is, also inside another autocast.
      apply_to: names of arguments whose float32 leaves are rounded to the compute dtype on entry.
      low, full, follow: primitives, or their names, that this call computes in the compute dtype,
        in float32, or in the dtype that comes in; see the op table.
      rules: `(target, policy)` pairs for name scopes (Flax and Haiku open one for each module,
        `jax.named_scope` any other): `("head*", "float32")` runs the head in float32;
        `("*/norm", "p=f32,c=f32,o=f16")` does the same and rounds what leaves to half.
      recompute: float32 islands such as softmax or LayerNorm keep only their half inputs and are
        computed again in the backward pass: "auto" where that saves memory traffic, "none", "all".
      attention: "fused" computes attention by cuDNN's fused kernel in programs for CUDA, and by
        JAX's Pallas kernels in programs that are planned for TPUs (`platform`), where `fun` has
        attention of shapes that JAX supports there; see docs/autocast.md. "plain" computes it as it
        is written.
      float8: which products a policy with "m=f8" makes float8: "weights", those of a parameter;
        "all", those of two activations too, as attention's. See docs/float8.md.
      platform: what the program will run on, "gpu", "tpu" or "cpu". It decides what is kept for the
        backward pass, and how losses and attention are written; it does not decide the dtypes of
        products, sums and results. None is "tpu" if that is JAX's default backend when a call is
        first traced, otherwise "gpu". "cpu" is planned as "gpu". See docs/devices.md.

    Returns: a function with `fun`'s signature, usable under every JAX transformation.

    Raises:
      TypeError: `fun` or `policy` are missing or of the wrong kind; `fun` is a generator or a
        coroutine function, or returns a generator or a coroutine (at the call).
      ValueError: an unknown policy, or a compute dtype that is not supported, in the policy or in a
        rule; an unknown value of an option; a primitive in two categories; `fun` changes one of its
        arguments (at the call): the change would be lost.

    Warns: `UnusedRuleWarning` for a rule that no scope matched; `NoHalfProductWarning`, once, where
      `fun` has products, all of them stay float32, and the caller did not ask for that.

    >>> def loss(w, x):
    ...     return jnp.mean(jax.nn.softmax(x @ w) ** 2)
    >>> w, x = jnp.ones((4, 4)), jnp.ones((2, 4))
    >>> grads = jax.grad(autocast(loss, "mixed_bfloat16"))(w, x)
    >>> grads.dtype
    dtype('float32')
    """
    return lowered(
        fun,
        policy,
        apply_to=apply_to,
        low=low,
        full=full,
        follow=follow,
        rules=rules,
        recompute=recompute,
        attention=attention,
        float8=float8,
        platform=platform,
    )


def lowered(fun: Callable[P, R], policy: Policy, **options: Any) -> Callable[P, R]:
    """Returns what `autocast` does; the options are those of `make_program`."""
    program = make_program(fun, policy, **options)
    if program is None:
        return _under_scope(AUTOCAST, fun)  # an autocast around it leaves it as it is

    @functools.wraps(fun)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return program.call(args, kwargs)

    return mark_lowered(wrapped, policy.compute_dtype)


def make_program(
    fun: Callable[..., Any], policy: str | Policy, *, apply_to: Sequence[str] = (), **options: Any
) -> "Program | None":
    """Checks what `autocast` was given; None if the policy computes in float32.

    Args:
      options: the arguments of `Settings` but for the policy.
    """
    if not callable(fun):
        expected = "a function, such as a loss"
        raise wrong(TypeError, "autocast", fun, expected, more=way_out(fun))
    # A module without variables. One that is bound to its own, inside another, can be called.
    if framework_of(fun) == "flax.linen" and getattr(fun, "scope", fun) is None:
        raise TypeError(
            f"autocast got the module {type(fun).__name__}, which has no variables by itself; "
            f"expected a function, such as a loss.{way_out(fun)}"
        )
    check_runs_when_called(fun)
    settings = Settings(get_policy(policy), **options)
    names = checked_names(fun, apply_to)
    return None if settings.compute_dtype == FLOAT32 else Program(fun, settings, names)


def full_precision(fun: Callable[P, R]) -> Callable[P, R]:
    """Returns `fun` with a mark: inside `autocast` its operations run in float32.

    The mark holds under jit, grad, vmap, scan and nesting. Products have `Precision.HIGHEST`, since
    float32 is TF32 on a GPU and bfloat16 on a TPU otherwise, unless they, or the user's global
    default, say a precision. That is slow for a large product. If TF32 is enough, multiply under
    `jax.default_matmul_precision("tensorfloat32")` inside `fun`.

    Outside `autocast`, and where it computes in float32, nothing changes. Use the mark instead of
    `.astype(jnp.float32)`: in a float32 program that cast has no effect, and autocast does not see
    it.

    Args:
      fun: any function that JAX can trace.

    Returns: a function with `fun`'s signature and results.
    Raises: TypeError if `fun` is no function, or computes after the call has returned, as a
      generator does: the mark would be lost.

    >>> @full_precision
    ... def head(x, w):
    ...     return x @ w
    >>> model = autocast(lambda x, w: head(x @ w, w), "mixed_float16")
    >>> x = jnp.ones((2, 2))
    >>> program = str(jax.make_jaxpr(model)(x, x))
    >>> program.count("preferred_element_type=float16"), "HIGHEST" in program
    (1, True)
    """

    check_function(fun, "full_precision", "full_precision(fun)(*args), or @full_precision")
    check_runs_when_called(fun, "full_precision")
    return _under_scope(FULL_PRECISION, fun)


def _under_scope(name: str, fun: Callable[P, R]) -> Callable[P, R]:
    @functools.wraps(fun)
    def marked(*args: P.args, **kwargs: P.kwargs) -> R:
        with jax.named_scope(name):
            result = fun(*args, **kwargs)
        for leaf in jax.tree.leaves(result, is_leaf=inspect.isgenerator):
            check_runs_when_called(leaf, name.removeprefix("jmp."))
        return result

    return marked


# A function, and the plans of its calls.


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Packed:
    """A result whose arrays are leaves and whose other objects are part of the structure."""

    arrays: list[Any]
    held: StaticPart = dataclasses.field(metadata={"static": True})


class Traced(NamedTuple):
    """One call of a program: what was traced, planned, and what to run it on."""

    plan: Plan
    emit: Callable[..., list[Any]]  # of constants and arrays, cast to the dtypes of `plan.reads`
    emit_until: Callable[[str], Callable[..., list[Any]]]  # the same, after the pass of a name
    run: Callable[..., list[Any]]
    constants: list[Any]  # the arrays that the function closes over
    arrays: list[Any]  # those among the arguments
    result: Any


class Program:
    """A function, how to lower it, and the plans made for the types it was called with."""

    def __init__(
        self, fun: Callable[..., Any], settings: Settings, apply_to: tuple[str, ...]
    ) -> None:
        self.fun = fun
        self.settings = settings
        self.apply_to = apply_to
        # JAX caches traces by function; so each structure of arguments keeps its own function.
        self._flat_function = functools.lru_cache(self._make_flat_function)
        self._has_warned = False
        self._plans: Any = weakref.WeakKeyDictionary()

    def __reduce__(self) -> Any:
        """Pickles and copies what the program was made from; traces and plans are made anew."""
        return Program, (self.fun, self.settings, self.apply_to)

    def call(self, args: Any, kwargs: Any) -> Any:
        """Runs the function on these arguments."""
        traced = self.trace(args, kwargs)
        operands = cast_all([*traced.constants, *traced.arrays], traced.plan.reads)
        if all(map(_jax_compat.is_concrete, operands)):
            results = traced.run(*operands)  # compiled once: an eager call does not retrace
        else:
            results = traced.emit(*operands)
        leaves, structure = jax.tree.flatten(traced.result)
        results = [_of_type(x, leaf) for x, leaf in zip(results, leaves, strict=True)]
        packed = jax.tree.unflatten(structure, results)
        return packed.held.filled(packed.arrays)

    def trace(
        self, args: Any, kwargs: Any, is_taken: Callable[[Any], bool] = holds_numbers
    ) -> Traced:
        """Traces and plans, or finds what was traced and planned before.

        Args:
          is_taken: which leaves are arrays; a `jax.ShapeDtypeStruct` may stand for one.
        """
        taken, held = take_arrays((args, kwargs), is_taken)
        arrays = [x if isinstance(x, jax.ShapeDtypeStruct) else as_jax_array(x) for x in taken]
        types = tuple(map(_type_and_sign, held.leaves))
        default = _jax_compat.default_precision_setting()
        try:
            flat = self._flat_function(held, types, default)
        except TypeError:  # an argument that cannot be hashed
            flat = self._make_flat_function(held, types, default)
        with jax.default_matmul_precision(None):  # a product that names none has none
            closed, result = jax.make_jaxpr(flat, return_shape=True)(*arrays)
        jaxpr, constants = _jax_compat.open_jaxpr(closed)

        def planned(last_pass: str | None = None) -> Plan:
            request = Request(self.settings, last_pass)
            return plan_program(closed, self._in_half(held), request)

        if jaxpr not in self._plans:
            plan = planned()
            self._warn(plan, jaxpr)
            emit = functools.partial(_run_marked, plan)
            self._plans[jaxpr] = plan, emit, jax.jit(emit)
        plan, emit, run = self._plans[jaxpr]

        def emit_until(last_pass: str) -> Callable[..., list[Any]]:
            return functools.partial(_run_marked, planned(last_pass))

        return Traced(plan, emit, emit_until, run, constants, arrays, result)

    def _in_half(self, held: StaticPart) -> list[bool]:
        """For each array among the arguments, whether `apply_to` names it."""
        named: set[int] = set()
        if self.apply_to:
            # Leaves are counted, bound to the names of arguments, and counted there again.
            args, kwargs = jax.tree.unflatten(held.structure, range(len(held.leaves)))
            # Partially: a decorator may fill in the rest, and a call that is wrong fails by itself.
            bound = inspect.signature(self.fun).bind_partial(*args, **kwargs).arguments
            named = set(jax.tree.leaves([bound.get(name) for name in self.apply_to]))
        return [i in named for i, leaf in enumerate(held.leaves) if leaf is None]

    def _warn(self, plan: Plan, jaxpr: Any) -> None:
        plan.request.policy_rules.warn_unused()
        if not self._has_warned:
            for text_of, kind in WARNINGS:
                if text := text_of(plan, function_name(self.fun)):
                    warnings.warn(text, kind, stacklevel=users_stacklevel())
                    self._has_warned = True
        overrides = self.settings.overrides
        names = {visit.equation.primitive.name for visit in walk(jaxpr)} if overrides else ()
        for name, category in overrides.items():
            if name not in names:
                warnings.warn(
                    f"{category.value}= names {described(name)}, which is no primitive of this "
                    "program. Functions such as softmax or matmul are made of primitives (exp, "
                    "dot_general; jax.make_jaxpr shows them); to name a layer, use rules=.",
                    UnusedRuleWarning,
                    stacklevel=users_stacklevel(),
                )

    def _make_flat_function(
        self, held: StaticPart, types: tuple[Any, ...], default: Any
    ) -> Callable[..., Any]:
        # Each default precision has a trace of its own, because a trace holds the rules of custom
        # derivatives, which JAX traces once, under the default of that moment.
        def flat(*arrays: Any) -> Packed:
            args, kwargs = held.filled(arrays)
            result = self.fun(*args, **kwargs)
            _check_unchanged((args, kwargs), held, arrays)
            results, rest = take_arrays(result, is_leaf=inspect.isgenerator)
            for leaf in rest.leaves:
                check_runs_when_called(leaf)
            return Packed(results, rest)

        flat.__name__ = getattr(self.fun, "__name__", "autocast")
        return flat


def _of_type(result: Any, struct: Any) -> Any:
    """Returns a result in the dtype that it was traced with, weak if it was weak."""
    array = result if isinstance(result, jax.Array) else jnp.asarray(result, struct.dtype)
    return _jax_compat.with_weak_type(cast_leaf(array, struct.dtype), struct.weak_type)


def _run_marked(plan: Plan, *operands: Any) -> list[Any]:
    with jax.named_scope(AUTOCAST):
        return run_plan(plan, operands)


def _type_and_sign(leaf: Any) -> tuple[type, str]:
    """Returns what tells a leaf that is no array from its equals: 1 == True, and 0.0 == -0.0."""
    return type(leaf), repr(leaf) if isinstance(leaf, float | complex) else ""


# Functions that run later than they are called: what they are, how they and their results are told.
LATE = (
    ("a generator", inspect.isgeneratorfunction, inspect.isgenerator),
    ("a coroutine", inspect.iscoroutinefunction, inspect.iscoroutine),
    ("an asynchronous generator", inspect.isasyncgenfunction, inspect.isasyncgen),
)


def runs_late(fun: Any) -> bool:
    """Returns whether a function computes after the call of it has returned."""
    return any(is_function(fun) for _, is_function, _ in LATE)


def check_runs_when_called(fun: Any, caller: str = "autocast") -> None:
    """Refuses what computes after the call has returned: a function, or a result of one.

    Raises: TypeError for generators and coroutines, asynchronous ones too.
    """
    for what, is_function, is_result in LATE:
        if not (is_function(fun) or is_result(fun)):
            continue
        if inspect.iscoroutine(fun):
            fun.close()  # or Python warns that it was never awaited
        late = (
            f"{described(fun)}, {what}" if is_function(fun) else f"a function that returned {what}"
        )
        raise TypeError(
            f"{caller} got {late}: its body runs after the call has returned, out of its sight. "
            "Expected a function that computes its results and returns them; wrap the "
            "functions that the body calls, and leave the body outside."
        )


def checked_names(fun: Callable[..., Any], apply_to: Iterable[str]) -> tuple[str, ...]:
    """Returns what `apply_to=` names; refuses what names no arguments of the function."""
    is_text = isinstance(apply_to, str)
    names = tuple(apply_to) if isinstance(apply_to, Iterable) else (apply_to,)
    if is_text or not all(isinstance(name, str) for name in names):
        example = described(apply_to) if is_text else "'x'"
        expected = f"a list of names of arguments, such as apply_to=[{example}]"
        raise wrong(TypeError, "autocast", apply_to, expected, name="apply_to")
    parameters = inspect.signature(fun).parameters if names else {}
    unknown = [name for name in names if name not in parameters]
    if unknown:
        raise ValueError(
            f"autocast got apply_to={described(list(names))}, but '{function_name(fun)}' has no "
            f"argument {listed(unknown)}; it has {', '.join(list(parameters)[:16])}."
        )
    return names


def _check_unchanged(arguments: Any, held: StaticPart, arrays: Sequence[Any]) -> None:
    try:
        after, structure_after = jax.tree.flatten(arguments)
    except ValueError:  # an argument that may be used once, such as Equinox's State
        return
    pairs = zip(after, held.leaves_with(arrays), strict=True)
    if structure_after != held.structure or not all(a is b for a, b in pairs):
        raise ValueError(
            "The function changes one of its arguments; the change would be lost, because autocast "
            "traces a copy. Work on a copy of a dictionary or list (batch = {**batch, ...}), and "
            "return what changes. For nnx modules, whose state changes, use "
            "jmp.adapters.nnx.autocast, which writes their state back."
        )
