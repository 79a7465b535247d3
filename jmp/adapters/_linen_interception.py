"""How a Flax linen model is made to compute by rules: by intercepting its modules' method calls.

One `Interceptor` lives for one `apply`. At each call it looks up the module's policy, sets the
module's compute dtype for the length of the call, and casts at the border where that dtype differs
from the surrounding one.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import numpy as np

from jmp.adapters._borders import call_across_border, warn_if_explicitly_float32
from jmp.dtypes import is_half
from jmp.rules import PolicyRules
from jmp.trees import cast_floating

# Reparametrisations work on float32 kernels; the layer they wrap casts the result.
_KEEP_DTYPE = (nn.WeightNorm, nn.SpectralNorm)
# `setup` has no inputs, and a cell's first carry keeps its dtype through the whole scan.
_NO_BORDER = ("setup", "initialize_carry")


class Interceptor:
    """Sees every method call inside one `apply`; for `nn.intercept_methods`.

    Args:
      rules: which policy a module computes by.
      compute_dtype: the dtype outside of the root module.
    """

    def __init__(self, rules: PolicyRules, compute_dtype: np.dtype) -> None:
        self._rules = rules
        self._surrounding = [compute_dtype]

    def __call__(self, call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        module, method = context.module, context.method_name
        outer = self._surrounding[-1]
        inner = self._rules.policy_for("/".join(module.path), _classes(module)).compute_dtype
        if inner == np.float32 and is_half(outer) and _norm_with_float32_inside(module):
            inner = outer
        # Functions that Flax lifts into a scan pass through here too; they are no methods, and
        # their carries must keep their types.
        # A recurrent cell's carry is float32, and so would be its output: half again from there.
        is_cell = isinstance(module, nn.RNNCellBase) and method == "__call__"
        border = inner != outer or is_cell
        border &= method not in _NO_BORDER and hasattr(type(module), method)
        self._surrounding.append(inner)
        try:
            with _computing_in(module, inner):
                if not border:
                    return call(*args, **kwargs)
                return call_across_border(
                    call, args, kwargs, inner=inner, outer=outer, is_cell=is_cell
                )
        finally:
            self._surrounding.pop()


@contextlib.contextmanager
def _computing_in(module: nn.Module, dtype: np.dtype) -> Iterator[None]:
    """Makes `module`, a copy that lives for one `apply`, compute in `dtype` within the context."""
    own = vars(module)  # modules are frozen for their authors: write past that
    before = dict(own)
    if not _is_flax_layer(module):
        own["param"] = _casting_param(module, dtype)
    elif own["dtype"] is None:
        own["dtype"] = dtype
    else:
        warn_if_explicitly_float32(module, "/".join(module.path), dtype)
    try:
        yield
    finally:
        for name in ("param", "dtype"):
            if name in before:
                own[name] = before[name]
            else:
                own.pop(name, None)


def _casting_param(module: nn.Module, dtype: np.dtype) -> Callable[..., Any]:
    declare = type(module).param

    def param(*args: Any, **kwargs: Any) -> Any:
        return cast_floating(declare(module, *args, **kwargs), dtype)

    return param


def _is_flax_layer(module: nn.Module) -> bool:
    """Whether a class of Flax's own declares the module's `dtype`; subclasses of it count."""
    return not isinstance(module, _KEEP_DTYPE) and any(
        base.__module__.startswith("flax.") and "dtype" in vars(base).get("__annotations__", {})
        for base in type(module).__mro__
    )


def _norm_with_float32_inside(module: nn.Module) -> bool:
    """Whether a module is a norm of Flax's that computes in float32 from half inputs by itself.

    Its `dtype`, which its author has left open, is but what its output is cast to. Cast to float32
    on entry its input's cotangent would be a float32 array, which XLA stores: 2 % of the bytes of a
    ResNet-50's step.
    """
    flax_computes = type(module).__call__.__module__ == "flax.linen.normalization"
    reduces_in_float32 = getattr(module, "force_float32_reductions", False)
    return flax_computes and reduces_in_float32 and module.dtype is None


def _classes(module: nn.Module) -> list[type]:
    classes = []
    node: Any = module
    while isinstance(node, nn.Module):
        classes.append(type(node))
        node = node.parent
    return classes
