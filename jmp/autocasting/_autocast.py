"""`autocast` and `full_precision`: the public face."""

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, Protocol, TypedDict, TypeVar, Unpack, overload

import jax

from jmp._messages import check_function, described, framework_of, way_out, wrong
from jmp.autocasting._program import Program, check_runs_when_called, checked_names
from jmp.autocasting._request import AUTOCAST, FULL_PRECISION, Settings
from jmp.dtypes import FLOAT32
from jmp.policy import Policy, get_policy, mark_lowered
from jmp.rules import Rule

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
        backward pass, and how losses and attention are written, not the dtypes of products, sums
        and results do not. None is "tpu" if that is JAX's default backend when a call is first
        traced, otherwise "gpu". "cpu" is planned as "gpu". See docs/devices.md.

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
    fun: Callable[..., Any],
    policy: str | Policy,
    *,
    apply_to: Sequence[str] = (),
    **options: Any,
) -> Program | None:
    """Checks what `autocast` was given; None if the policy computes in float32.

    Args:
      options: the other fields of `Settings`.
    """
    if not callable(fun):
        expected = "a function, such as a loss"
        raise wrong(TypeError, "autocast", fun, expected, more=way_out(fun))
    # Bound to its variables, inside another module, it can be called as it is.
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
