"""What `precision=` says of a product, and what a product has that says nothing.

HIGH and HIGHEST, and a named algorithm, are the user's word: such a product has float32 operands
and a float32 result, because a user who asks for more digits than a float32 product has by default
does not want fewer. JAX itself asks inside expm, pinv, lstsq, polyfit, image.resize and in the
derivatives of eigh, svd and cholesky. DEFAULT, and no precision, leave the choice to autocast.

A float32 product that says nothing is none on an accelerator: a GPU multiplies it in TF32, which
has 11 bits, a TPU in one pass of bfloat16. So where the user, or autocast for its numerics, asks
for float32, it is bound with HIGHEST. DEFAULT is the product's word there. An equation that
runs as it was written, such as a custom_vjp or a loop to a tolerance, keeps what it says.

The global `jax_default_matmul_precision` says what a *float32* product does; it keeps no product
from being lowered. So functions are traced with it switched off, and all products that stay float32
are bound with it, in place of HIGHEST.

The rules of `custom_jvp`, `custom_vjp` and `custom_vmap` are traced by JAX when it needs them,
maybe after autocast has run. So what is to hold inside a rule is put around the function that an
equation holds in its place.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.extend import linear_util
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.lax import Precision

from jmp import _jax_compat
from jmp._jax_compat import Params
from jmp.autocasting._graph import Node
from jmp.autocasting._numbers import dtype_of
from jmp.autocasting._propagation import inner_equations
from jmp.autocasting._registry import Category, is_low
from jmp.autocasting._request import AUTOCAST, Request
from jmp.dtypes import FLOAT32

HIGHEST = (Precision.HIGHEST, Precision.HIGHEST)

# Dtypes that autocast never makes half, and what a user can do.
NEVER_HALF = {
    "float64": ", and autocast lowers only float32: cast to it what may be half",
    "complex128": ", which has no half type",
    "complex64": ", which has no half type",
}

HOLD_RULES = ("custom_jvp_call", "custom_vjp_call", "custom_vmap_call")

# Chooses the precision of products that say nothing, given an equation, its name stack, and what
# holds around it.
Choice = Callable[[JaxprEqn, Any, Any], Any]


def names_algorithm(params: Params) -> bool:
    """Returns whether a product says how the hardware shall multiply."""
    return type(params.get("precision")).__name__ in ("DotAlgorithm", "DotAlgorithmPreset")


def asked_for(equation: JaxprEqn) -> str:
    """Returns why `precision=` keeps a product of float32 operands as it is, or nothing."""
    if not (is_low(equation) and _reads(equation, np.float32)):
        return ""
    if names_algorithm(equation.params):
        return "the user named the algorithm"
    said = _of_operands(equation.params.get("precision"))
    asked = next((one for one in (Precision.HIGHEST, Precision.HIGH) if one in said), None)
    return f"the user asked for precision={asked.name}" if asked else ""


def why_not_lowered(node: Node, half: np.dtype) -> str:
    """Returns what the user chose for a product that autocast must leave."""
    dtypes = {v.dtype for v in node.inexact}
    if names_algorithm(node.params):
        return "the user named the algorithm"
    found = {str(v.dtype) for v in (*node.inputs, *node.outputs)}
    for name, way_out in NEVER_HALF.items():
        if name in found:
            return f"the user chose {name}{way_out}"
    others = {"float16", "bfloat16"} & found - {str(half)}
    if others:
        (other,) = others
        return f"the user chose {other}; for {half} use dtype=None, or cast to float32"
    if not dtypes <= {FLOAT32, half} or not all(v.is_float32 for v in node.outputs):
        return "the user chose other dtypes"
    if FLOAT32 not in dtypes:
        return "the user chose half operands and a float32 result"
    return ""


def _of_operands(precision: Any) -> tuple[Any, ...]:
    """Returns what `precision=` says of each operand of a product; one entry if it is one word."""
    return precision if isinstance(precision, tuple) else (precision,)


def precision_of(equation: JaxprEqn, params: Params) -> str:
    """Returns the precision that a float32 product is bound with, in words.

    Args:
      equation: as it was traced.
      params: what it is bound with.
    """
    precision = params.get("precision")
    if precision is None:
        return "default"
    said = (precision,) if names_algorithm(params) else _of_operands(precision)
    names = [getattr(one, "name", str(one)) for one in dict.fromkeys(said)]
    is_ours = _says_nothing(equation) and _jax_compat.default_precision_setting() is None
    return " and ".join(names) + ("" if is_ours else ", the user's")


# Products that say nothing.


def with_precision(node: Node, request: Request) -> Params:
    """Returns parameters in which products of float32 regions that say nothing have HIGHEST.

    Such regions may also stand inside a node that is bound as a whole. Other products that are
    kept in float32 count as well: those of `full=`, and for their numerics those whose rule is
    FULL, such as inner products, which are sums. Where the user has set a global default, all
    products that say nothing have that.
    """
    if not (node.multiplies or node.holds_functions):
        return node.params
    is_kept = node.multiplies and node.rule.category is Category.FULL
    around = HIGHEST if is_kept else None
    return _filled_params(node.equation, node.scope, _choice(request), around)


def as_written(function: ClosedJaxpr, node: Node, request: Request) -> ClosedJaxpr:
    """Returns a function inside a node that is run as it was written, its products likewise."""
    filled: ClosedJaxpr = _mapped(function, _filling(node.scope, _choice(request), None))
    return filled


def _choice(request: Request) -> Choice:
    """Returns what products that say nothing get: the global default, if there is one."""
    default = _default_precision()
    if default is not None:
        return lambda *_: default

    def choose(equation: JaxprEqn, scope: Any, around: Any) -> Any:
        region = request.region(scope)
        if region.is_decided:
            return None
        asked = request.settings.overrides.get(equation.primitive.name)
        return HIGHEST if region.in_float32 or asked is Category.FULL else around

    return choose


def _filled_params(equation: JaxprEqn, scope: Any, choose: Choice, around: Any) -> Params:
    """Returns the parameters of an equation, filled; the same object where nothing changes."""
    precision, params = choose(equation, scope, around), equation.params
    fill = _filling(scope, choose, precision)
    found = {key: _mapped(parameter, fill) for key, parameter in params.items()}
    if precision is HIGHEST and equation.primitive.name in HOLD_RULES:
        found = _with_rules(found, _of_rules(equation))
    if precision is not None and _says_nothing(equation):
        # Half and integer products have all their digits anyway.
        if precision is not HIGHEST or _reads(equation, np.float32, np.complex64):
            found["precision"] = precision
    return params if all(found[key] is params[key] for key in params) else found


def _of_rules(equation: JaxprEqn) -> Any:
    """Returns the precision of a custom derivative's rules in a region.

    Rules have the precision that all products of the function name, if they agree: JAX traces the
    function under a default that the user sets around the call, and its rules later, without it.
    Else it is HIGHEST.
    """
    products = filter(is_low, inner_equations(equation))
    said = {product.params.get("precision") for product in products}
    word = said.pop() if len(said) == 1 else None
    is_one = word is not None and len(set(_of_operands(word))) == 1
    return word if is_one else HIGHEST


def _filling(scope: Any, choose: Choice, around: Any) -> Callable[[JaxprEqn], JaxprEqn]:
    """Returns a function that fills an equation of a jaxpr that stands under a name stack."""

    def fill(equation: JaxprEqn) -> JaxprEqn:
        found = _filled_params(equation, scope + equation.source_info.name_stack, choose, around)
        return equation if found is equation.params else equation.replace(params=dict(found))

    return fill


def _mapped(parameter: Any, change: Callable[[JaxprEqn], JaxprEqn]) -> Any:
    """Returns a parameter of an equation with all equations changed in the jaxprs that it holds."""
    if isinstance(parameter, (tuple, list)):
        items = [_mapped(item, change) for item in parameter]
        if all(new is old for new, old in zip(items, parameter, strict=True)):
            return parameter
        # `custom_linear_solve` holds its functions in a named tuple.
        make: Any = getattr(parameter, "_make", type(parameter))
        return make(items)
    inner, _ = _jax_compat.open_jaxpr(parameter)
    if not hasattr(inner, "eqns"):
        return parameter
    equations = list(map(change, inner.eqns))
    if all(new is old for new, old in zip(equations, inner.eqns, strict=True)):
        return parameter
    changed = inner.replace(eqns=equations)
    return changed if inner is parameter else parameter.replace(jaxpr=changed)


def _reads(equation: JaxprEqn, *dtypes: Any) -> bool:
    return any(dtype_of(atom) in dtypes for atom in equation.invars)


def _says_nothing(equation: JaxprEqn) -> bool:
    return is_low(equation) and equation.params.get("precision", "") is None


def _default_precision() -> Any:
    """Returns what the global default puts into a product that names no precision; or None."""
    if _jax_compat.default_precision_setting() is None:
        return None
    vector = jax.ShapeDtypeStruct((1,), np.float32)
    (equation,) = _jax_compat.open_jaxpr(jax.make_jaxpr(jax.lax.dot)(vector, vector))[0].eqns
    return equation.params["precision"]


# Rules of custom derivatives.


def _with_rules(params: Params, precision: Any) -> dict[str, Any]:
    """Returns parameters of an equation with rules, in which products that say none have it.

    The functions that fill rules are those of this module: rules that are changed alike are then
    equal, as programs that hold them are.
    """
    found = dict(params)
    for name in {"jvp_jaxpr_fun", "fwd_jaxpr_thunk"} & params.keys():
        # JAX traces it once for all who call the function, elsewhere perhaps.
        found[name] = _with_filled_jaxpr(params[name], precision)
    if "bwd" in params:
        found["bwd"] = _with_default(params["bwd"], precision)
    if "rule" in params:  # of vmap
        found["rule"] = functools.partial(_run_with_default, params["rule"], precision)
    return found


def _run_and_fill(rule: Any, precision: Any, *zeros: Any) -> Any:
    jaxpr, *others = rule(*zeros)
    choose = lambda _, scope, __: None if AUTOCAST in _jax_compat.scope_names(scope) else precision
    fill = _filling(_jax_compat.empty_name_stack(), choose, None)
    return _mapped(jaxpr, fill), *others


def _run_with_default(rule: Any, precision: Any, *args: Any) -> Any:
    one = _of_operands(precision)[0]
    name: Any = one.name.lower() if isinstance(one, Precision) else one.name
    with jax.default_matmul_precision(name):
        return rule(*args)


_with_filled_jaxpr: Any = linear_util.transformation2(_run_and_fill)
_with_default: Any = linear_util.transformation2(_run_with_default)
