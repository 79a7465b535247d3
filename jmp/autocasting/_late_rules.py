"""The rules of `custom_jvp`, `custom_vjp` and `custom_vmap`, which JAX traces when it needs them.

That may be after autocast has run. So what is to hold inside a rule is put around the function that
an equation holds in its place.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax.extend import linear_util
from jax.lax import Precision

from jmp.autocasting._registry import Params

Change = Callable[[Any, Any], Any]


def has_rules(name: str) -> bool:
    """Returns whether the primitive called `name` holds rules."""
    return name in ("custom_jvp_call", "custom_vjp_call", "custom_vmap_call")


def with_rules(params: Params, precision: Any, change: Change) -> dict[str, Any]:
    """Returns parameters of an equation with rules whose products have a precision.

    Args:
      precision: of products that say none, as products hold it.
      change: fills the jaxpr of a rule, given the precision. To be a function of a module: rules
        that are changed alike are then equal, as programs that hold them are.
    """
    found = dict(params)
    for name in {"jvp_jaxpr_fun", "fwd_jaxpr_thunk"} & params.keys():
        # JAX traces it once for all who call the function, elsewhere perhaps.
        found[name] = _with_changed_jaxpr(params[name], change, precision)
    if "bwd" in params:
        found["bwd"] = _with_default(params["bwd"], precision)
    if "rule" in params:  # of vmap
        found["rule"] = _batching_with_default(params["rule"], precision)
    return found


@linear_util.transformation2
def _with_changed_jaxpr(rule: Any, change: Change, precision: Any, *zeros: Any) -> Any:
    jaxpr, *others = rule(*zeros)
    return change(jaxpr, precision), *others


@linear_util.transformation2
def _with_default(rule: Any, precision: Any, *operands: Any) -> Any:
    with _default(precision):
        return rule(*operands)


def _batching_with_default(rule: Any, precision: Any) -> Any:
    @functools.wraps(rule)
    def batching(*args: Any) -> Any:
        with _default(precision):
            return rule(*args)

    return batching


def _default(precision: Any) -> AbstractContextManager[Any]:
    one = precision[0] if isinstance(precision, tuple) else precision
    return jax.default_matmul_precision(
        one.name.lower() if isinstance(one, Precision) else one.name
    )
