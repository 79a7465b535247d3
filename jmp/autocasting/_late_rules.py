"""The rules of `custom_jvp`, `custom_vjp` and `custom_vmap`, which JAX traces when it needs them.

That may be after autocast has run. So what is to hold inside a rule is put around the function that
an equation holds in its place.
"""

import functools
from collections.abc import Callable
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
        found["rule"] = functools.partial(_run_with_default, params["rule"], precision)
    return found


def _run_and_change(rule: Any, change: Change, precision: Any, *zeros: Any) -> Any:
    jaxpr, *others = rule(*zeros)
    return change(jaxpr, precision), *others


def _run_with_default(rule: Any, precision: Any, *args: Any) -> Any:
    one = precision[0] if isinstance(precision, tuple) else precision
    name: Any = one.name.lower() if isinstance(one, Precision) else one.name
    with jax.default_matmul_precision(name):
        return rule(*args)


_with_changed_jaxpr: Any = linear_util.transformation2(_run_and_change)
_with_default: Any = linear_util.transformation2(_run_with_default)
