"""A loss and its gradient, compiled once, whose scopes round by flags that it is called with."""

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp import _jax_compat
from jmp._array_calls import ArrayCall, vjp_at
from jmp._messages import described
from jmp.autocasting._autocast import make_program
from jmp.autocasting._operations import NoHalfProductWarning
from jmp.autocasting._regions import MODULE
from jmp.diagnostics._arguments import check_numbers
from jmp.diagnostics._emulation import Flags, Site, run_emulated
from jmp.diagnostics._scope_search import Errors, grouped
from jmp.policy import Policy, get_policy
from jmp.rules import UnusedRuleWarning
from jmp.trees import holds_numbers


class FlaggedProgram:
    """A loss and its gradient, whose scopes round to half or not by flags.

    Attributes:
      scopes: their paths.
      in_float8: the numbers of those with float8 products.
      expected: loss and gradients in float32, by kind and path as `compare` has them.
    """

    def __init__(
        self,
        loss: Callable[..., Any],
        policy: str | Policy,
        args: Sequence[Any],
        argnums: int | Sequence[int],
        scale: float,
        options: dict[str, Any],
        of_modules: bool = False,
    ) -> None:
        program = make_program(loss, policy, **options)
        if program is None:
            raise ValueError(
                f"find_float32 got the policy {get_policy(policy)}, which computes in float32: "
                "nothing is in half. Ask with 'mixed_float16' or 'mixed_bfloat16'."
            )
        call = ArrayCall(loss, args)
        check_numbers(
            call.arrays, "find_float32", "the arrays of a training step, outside of jax.jit"
        )
        self._arrays = call.arrays
        within = call.within(argnums, "find_float32").items()
        paths = {i: p for i, p in within if jnp.issubdtype(self._arrays[i].dtype, jnp.inexact)}
        if not paths:
            raise ValueError(
                f"find_float32 got argnums={described(argnums)} and {len(args)} arguments, with no "
                "floating array to differentiate there; expected the parameters."
            )
        with warnings.catch_warnings():
            for told in (UnusedRuleWarning, NoHalfProductWarning):  # when it is measured
                warnings.simplefilter("ignore", told)
            traced = program.trace(tuple(args), {})
        self._plan, self._positions, self._scale = traced.plan, list(paths), scale
        self._constants = _jax_compat.open_jaxpr(traced.closed)[1]
        paths_of_sites, paths_in_float8 = self._paths()
        named = {path: _named(path, of_modules) for path in paths_of_sites}
        groups = grouped(named.values())
        self._groups = {path: groups[name] for path, name in named.items()}
        self.scopes = list(dict.fromkeys(self._groups.values()))
        self.in_float8 = frozenset(self.scopes.index(self._groups[p]) for p in paths_in_float8)
        if not self.scopes:
            raise ValueError(
                "find_float32 got a function in which autocast puts nothing in half: it has no "
                "product, or it runs under autocast already, as what an adapter returns. Expected "
                "the function in float32: loss_fn, and not jmp.autocast(loss_fn, policy)."
            )
        if self.scopes == [""] and not of_modules:
            raise ValueError(
                "find_float32 got a function that opens no name scopes, so that no rule can name a "
                "part of it. Modules of Flax linen and Haiku open them, and so do those of nnx and "
                "Equinox that are arguments of it; elsewhere write with jax.named_scope('head'): "
                "around each part, such as the call of a layer."
            )
        # A gradient stays where its parameter lies. A reference that lay elsewhere than the zeros
        # of the first call would make another program.
        some = [self._arrays[i] for i in paths]
        placed = [x.sharding if getattr(x, "committed", False) else None for x in some]
        self._step = jax.jit(self._loss_and_errors, out_shardings=((None, placed), None))
        zeros = [np.zeros(x.shape, x.dtype) for x in some]
        self._reference: Any = (
            np.zeros((), np.float32),
            [x if p is None else jax.device_put(x, p) for x, p in zip(zeros, placed, strict=True)],
        )
        nothing = np.zeros(len(self.scopes), bool)
        (loss_value, gradients), norms = self._call(nothing, nothing, nothing)
        _check_reference(norms, gradients, list(paths.values()))
        self._reference = (
            np.asarray(loss_value),
            [_kept(x) if p is None else x for x, p in zip(gradients, placed, strict=True)],
        )
        self.expected = {("result", ""): loss_value} | {
            ("gradient", path): gradient
            for path, gradient in zip(paths.values(), gradients, strict=True)
        }

    def _call(self, *flags: Any) -> Any:
        return self._step(flags, self._arrays, self._reference)

    def errors(self, in_half: Any, in_float8: Any, is_alone: bool) -> Errors:
        """Returns the errors of loss and gradient where some scopes round to half.

        Args:
          in_half: their numbers.
          in_float8: the numbers of those among them whose float8 products are float8.
          is_alone: loops and branches do not take what is inside to float32 with them.
        """
        own, float8 = np.zeros((2, len(self.scopes)), bool)
        own[list(in_half)] = True
        float8[list(in_float8)] = True
        inside = np.ones_like(own) if is_alone else own
        norms = self._call(own, inside, float8)[1]
        loss, gradient = (_relative(*map(float, pair)) for pair in norms)
        return loss, gradient

    def _paths(self) -> tuple[list[str], list[str]]:
        """Returns the paths of all scopes that round, to half and to float8, in program order."""
        found: tuple[dict[str, None], dict[str, None]] = ({}, {})

        def note(paths: dict[str, None], site: Site) -> Any:
            paths[site.path] = None
            return np.False_

        flags = Flags(*(functools.partial(note, paths) for paths in found))
        jax.eval_shape(lambda *arrays: self._run(arrays, flags), *self._arrays)
        return list(found[0]), list(found[1])

    def _run(self, arrays: Sequence[Any], flags: Flags) -> Any:
        return run_emulated(self._plan, [*self._constants, *arrays], flags)[0]

    def _loss_and_errors(self, flags: Any, arrays: Any, reference: Any) -> Any:
        numbers = {scope: i for i, scope in enumerate(self.scopes)}
        number_of = {path: numbers[scope] for path, scope in self._groups.items()}
        own, inside, float8 = ([array[i] for i in range(len(numbers))] for array in flags)

        def is_half(site: Site) -> Any:
            flag = own[number_of[site.path]]
            for path in site.around & number_of.keys():
                flag = flag & inside[number_of[path]]
            return flag

        asked = Flags(is_half, lambda site: float8[number_of[site.path]])
        loss, vjp = vjp_at(lambda *some: self._run(some, asked), arrays, self._positions)
        gradients = [g / self._scale for g in vjp(jnp.full((), self._scale, loss.dtype))]
        expected, expected_gradients = reference
        return (loss, gradients), (
            (_norm([loss - expected]), _norm([expected])),
            (
                _norm([a - b for a, b in zip(gradients, expected_gradients, strict=True)]),
                _norm(expected_gradients),
            ),
        )


def _named(path: str, of_modules: bool) -> str:
    """Returns what a rule calls a scope: where it calls modules, "" for what is in none."""
    if not of_modules:
        return path
    return path.removeprefix(MODULE) if path.startswith(MODULE) else ""


def _kept(array: Any) -> Any:
    """Returns an array of one device as it is, and any other on the host."""
    return array if len(array.sharding.device_set) == 1 else np.asarray(array)


def _norm(leaves: Sequence[Any]) -> Any:
    """Returns the Euclidean norm of all leaves as one vector, which does not overflow by itself."""
    largest = [jnp.max(abs(x), initial=0) for x in leaves]
    unit = jnp.max(jnp.stack(largest))
    unit = jnp.where(unit > 0, unit, 1)
    return unit * jnp.sqrt(sum(jnp.sum(abs(x / unit) ** 2) for x in leaves))


def _relative(error: float, reference: float) -> float:
    if error == 0:
        return 0.0
    return error / reference if math.isfinite(error) and reference > 0 else math.inf


def on_device(leaf: Any) -> Any:
    """Returns a NumPy array as one of JAX's, without the program that `jnp.asarray` compiles."""
    if not isinstance(leaf, (np.ndarray, np.generic)) or not holds_numbers(leaf):
        return leaf
    return jax.device_put(np.asarray(leaf, leaf.dtype.newbyteorder("=")))


def _check_reference(norms: Any, gradients: Sequence[Any], paths: Sequence[str]) -> None:
    (loss, _), (gradient, _) = norms
    if math.isfinite(loss) and math.isfinite(gradient):
        return
    wrong = ["the loss"] if not math.isfinite(loss) else []
    wrong += [
        f"the gradient of {path or 'the argument'}"
        for path, x in zip(paths, gradients, strict=True)
        if not np.all(np.isfinite(np.asarray(x)))
    ]
    more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    raise ValueError(
        f"find_float32 found {wrong[0]}{more} infinite or NaN in float32, so that there is nothing "
        "to compare with. diagnostics.find_nonfinite(jax.grad(loss_fn))(*args) names the operation "
        "behind it."
    )
