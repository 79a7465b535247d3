"""`Policy`: which dtype parameters are stored in, computed in and returned in.

A policy is a frozen, hashable triple, and, if a user chose them, the dtypes of reductions between
devices, of products and of their results. It says nothing of single layers: `jmp.rules` adds
exceptions. Text and policies convert both ways: `get_policy("p=f32,c=f16,o=f32")` and
`str(policy)`.
"""

import dataclasses
import functools
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jmp._messages import described, did_you_mean, wrong
from jmp.dtypes import ScalarType, dtype_to_names, floating_dtype, is_half, parse_dtype, scalar_type
from jmp.trees import cast_floating

T = TypeVar("T")

# How each field, in their order, is called in text: the letter that `str` writes, and a word.
_KEYS = {
    "param_dtype": ("p", "params"),
    "compute_dtype": ("c", "compute"),
    "output_dtype": ("o", "output"),
    "reduce_dtype": ("r", "reduce"),
    "product_dtype": ("m", "product"),
    "result_dtype": ("y", "result"),
}
_FIELDS = {key: field for field, keys in _KEYS.items() for key in keys}

# Names that Keras made customary, and Apex's opt levels, as text for `get_policy`.
_NAMED = {
    "mixed_float16": "p=f32,c=f16,o=f32",
    "mixed_bfloat16": "p=f32,c=bf16,o=f32",
    "mixed_float8": "p=f32,c=bf16,o=f32,m=f8",
    "O0": "f32",
    "O1": "p=f32,c=half,o=f32",
    "O2": "p=half,c=half,o=f32",
    "O3": "half",
}


@dataclasses.dataclass(frozen=True)
class Policy:
    """Three dtypes: parameters are stored in one, computed in another, outputs returned in a third.

    Attributes:
      param_dtype: dtype in which parameters are stored.
      compute_dtype: dtype in which products are computed.
      output_dtype: dtype in which results are returned.
      reduce_dtype: dtype in which gradients are added up between devices, or None, which leaves the
        choice to XLA and is no part of the text.
      product_dtype: float8 for autocast's products with parameters, "f8" or `jnp.float8_e4m3fn`; or
        None, which leaves all products in the compute dtype.
      result_dtype: float32 for products that autocast computes from half operands and leaves in the
        float32 that they are added up in, such as logits; or None: they are rounded to the compute
        dtype.

    Each may be given as a dtype, scalar type or name. It is kept as JAX's scalar type, such as
    `jnp.float16`, which makes an array when called; `np.dtype(policy.compute_dtype)` is the dtype.

    Raises:
      TypeError: a dtype is of the wrong kind, such as None or a number.
      ValueError: one is unknown or not real floating, `reduce_dtype` is a float8, `product_dtype`
        is another dtype than float8_e4m3fn, or `result_dtype` another than float32.

    >>> policy = Policy("float32", jnp.float16, np.dtype("float32"))
    >>> str(policy)
    'p=full,c=f16,o=full'
    >>> policy == get_policy(str(policy))
    True
    >>> policy.compute_dtype(2.0)
    Array(2., dtype=float16)
    >>> str(Policy("f32", "f16", "f32", reduce_dtype="f32"))
    'p=full,c=f16,o=full,r=full'
    >>> str(Policy("f32", "bf16", "f32", product_dtype="f8"))
    'p=full,c=bf16,o=full,m=f8'
    >>> str(Policy("f32", "bf16", "f32", result_dtype="f32"))
    'p=full,c=bf16,o=full,y=full'
    """

    param_dtype: ScalarType
    compute_dtype: ScalarType
    output_dtype: ScalarType
    # Defaults of the class too: pickles of earlier versions do not have them.
    reduce_dtype: ScalarType | None = dataclasses.field(default=None, kw_only=True)
    product_dtype: ScalarType | None = dataclasses.field(default=None, kw_only=True)
    result_dtype: ScalarType | None = dataclasses.field(default=None, kw_only=True)

    def __init__(
        self,
        param_dtype: DTypeLike,
        compute_dtype: DTypeLike,
        output_dtype: DTypeLike,
        *,
        reduce_dtype: DTypeLike | None = None,
        product_dtype: DTypeLike | None = None,
        result_dtype: DTypeLike | None = None,
    ) -> None:
        given = param_dtype, compute_dtype, output_dtype, reduce_dtype, product_dtype, result_dtype
        for name, dtype in zip(_KEYS, given, strict=True):
            object.__setattr__(self, name, _checked_dtype(dtype, name))

    def cast_to_param(self, tree: T) -> T:
        """Casts the floating leaves of `tree`, any pytree, to `param_dtype`; shapes stay."""
        return cast_floating(tree, self.param_dtype)

    def cast_to_compute(self, tree: T) -> T:
        """Casts the floating leaves of `tree`, any pytree, to `compute_dtype`; shapes stay."""
        return cast_floating(tree, self.compute_dtype)

    def cast_to_output(self, tree: T) -> T:
        """Casts the floating leaves of `tree`, any pytree, to `output_dtype`; shapes stay."""
        return cast_floating(tree, self.output_dtype)

    def with_output_dtype(self, output_dtype: DTypeLike) -> "Policy":
        """Returns the same policy with another output dtype.

        Raises: as `Policy`.
        """
        dtype = scalar_type(floating_dtype(output_dtype, "output_dtype"))
        return dataclasses.replace(self, output_dtype=dtype)

    @property
    def is_pure_half(self) -> bool:
        """Whether all three dtypes are one half dtype (O3): nothing at all is kept in float32."""
        dtypes = {self.param_dtype, self.compute_dtype, self.output_dtype}
        return len(dtypes) == 1 and is_half(self.compute_dtype)

    def __str__(self) -> str:
        given = _given_dtypes(self)
        names = {field: dtype_to_names[np.dtype(dtype).type][0] for field, dtype in given.items()}
        names |= {"product_dtype": "f8"} if self.product_dtype is not None else {}
        return ",".join(f"{_KEYS[field][0]}={name}" for field, name in names.items())

    def __repr__(self) -> str:
        """Returns the call that makes an equal policy."""
        arguments = (f"{name}=jnp.{dtype.__name__}" for name, dtype in _given_dtypes(self).items())
        return f"Policy({', '.join(arguments)})"


def _given_dtypes(policy: Policy) -> dict[str, Any]:
    """Returns the dtypes that a policy says, by field."""
    return {name: dtype for name, dtype in vars(policy).items() if dtype is not None}


# The dtypes that the fields that may be None take.
_OPTIONAL = {
    "reduce_dtype": ("float32", "bfloat16", "float16", "float64"),
    "product_dtype": ("float8_e4m3fn",),
    "result_dtype": ("float32",),
}


def _checked_dtype(dtype: Any, name: str) -> ScalarType | None:
    """Returns the scalar type of a field; raises TypeError or ValueError for a wrong one."""
    if dtype is None and name in _OPTIONAL:
        return None
    if name == "product_dtype" and isinstance(dtype, str) and dtype in ("f8", "float8"):
        return scalar_type(jnp.float8_e4m3fn)  # four significant bits, numbers up to 448
    checked = scalar_type(floating_dtype(dtype, name))
    if name in _OPTIONAL and checked.__name__ not in _OPTIONAL[name]:
        expected = f"{' or '.join(_OPTIONAL[name])}, or None"
        raise ValueError(f"{name} got {checked.__name__}; expected {expected}.")
    return checked


def refuse_float8(policy: Policy, caller: str) -> None:
    """Raises ValueError if a dtype of `policy` is a float8, which `caller` does not support yet.

    Float8 numbers need scales of their own: a plain cast to float8_e4m3fn makes NaN of 1000.
    Autocast gives such scales to products (`product_dtype`).
    """
    for name, dtype in _given_dtypes(policy).items():
        if np.dtype(dtype).itemsize == 1 and name != "product_dtype":
            raise ValueError(
                f"{caller} got the policy '{policy}', whose {name} is {dtype.__name__}: float8 is "
                "not supported there yet. Expected float16, bfloat16 or float32, such as "
                "'mixed_bfloat16', or 'mixed_float8' for float8 products of bfloat16 operands. A "
                "Policy's own casts support float8."
            )


def check_for_autocast(policy: Policy) -> None:
    """Raises ValueError for a policy whose dtypes autocast does not support.

    It sees operations and no devices: it can give the gradient of a weight in float32, so that the
    sums over devices behind it are float32, but cannot make XLA add up in a half dtype. The scales
    of float8 products are as small as gradients: float16 would flush them to zero.
    """
    refuse_float8(policy, "autocast")
    got = f"autocast got the policy '{policy}'"
    reduce_dtype = policy.reduce_dtype
    if reduce_dtype is not None and np.dtype(reduce_dtype) != np.float32:
        name = reduce_dtype.__name__
        raise ValueError(
            f"{got}, whose reduce_dtype is {name}; expected float32, or None, which leaves the "
            "choice to XLA (under jit the compute dtype). In shard_map and along explicit axes "
            f"jmp.gather_params(..., reduce_dtype='{name}') adds up in it."
        )
    if policy.product_dtype is None:
        return
    if policy.compute_dtype != jnp.bfloat16:
        raise ValueError(
            f"{got}: float8 products with the compute dtype {policy.compute_dtype.__name__}; "
            "expected bfloat16, which holds their scales: 'mixed_float8'."
        )
    if policy.result_dtype is not None:
        raise ValueError(
            f"{got}: float32 results of float8 products are not supported yet. Expected one of the "
            "two; a rule gives a part of the model the other, such as "
            "rules=[('head', 'mixed_bfloat16,result=f32')]."
        )


def get_policy(policy: str | Policy) -> Policy:
    """Reads a policy from text; a `Policy` is returned as it is.

    The grammar, spaces allowed:
      - one dtype for all three: "float32", "bf16", "half" (float16, on a TPU bfloat16);
      - fields "p" or "params", "c" or "compute", "o" or "output": "p=f32,c=f16,o=f32". Parameters
        default to float32, compute to the parameters' dtype, output to compute's;
      - field "r" or "reduce": `reduce_dtype`; "m" or "product": `product_dtype`, which is "f8"; "y"
        or "result": `result_dtype`, which is "f32"; None if they are not given;
      - "mixed_float16" and "mixed_bfloat16": float32 parameters and outputs, half compute;
        "mixed_float8": bfloat16 compute, products of parameters in float8 ("m=f8");
      - "O0" float32; "O1" half compute on float32 parameters; "O2" half parameters too; "O3" pure
        half, for which adapters keep no norm in float32;
      - what has a name, then further fields: "mixed_float16,r=f32".

    Raises:
      TypeError: neither text nor a policy.
      ValueError: unknown name, dtype or field, a field given twice, or as `Policy`.

    >>> str(get_policy("c=bf16"))
    'p=full,c=bf16,o=bf16'
    >>> str(get_policy("mixed_bfloat16,r=f32"))
    'p=full,c=bf16,o=full,r=full'
    >>> get_policy("mixed_bfloat16,result=f32").result_dtype.__name__
    'float32'
    """
    if isinstance(policy, Policy):
        return policy
    if not isinstance(policy, str):
        expected = "a Policy or text such as 'mixed_float16' or 'p=f32,c=f16,o=f32'"
        raise wrong(TypeError, "get_policy", policy, expected)
    parts = [part.strip() for part in policy.split(",")]
    if parts[0] in _NAMED:
        parts = [*_NAMED[parts[0]].split(","), *parts[1:]]
    given: dict[str, Any] = {}
    if "=" not in parts[0]:
        dtype = parse_dtype(parts.pop(0), _NAMED)
        given = {"param_dtype": dtype, "compute_dtype": dtype, "output_dtype": dtype}
    for part in parts:
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or key not in _FIELDS:
            raise ValueError(
                f"Unknown key {described(key)} in policy {described(policy)}; expected one of "
                f"{', '.join(_FIELDS)}, written 'p=f32,c=f16,o=f32'.{did_you_mean(key, _FIELDS)}"
            )
        if _FIELDS[key] in given:
            raise ValueError(
                f"Policy {described(policy)} gives {_FIELDS[key]} twice; give each of param, "
                "compute, output, reduce, product and result at most once."
            )
        given[_FIELDS[key]] = value
    given.setdefault("param_dtype", "float32")
    given.setdefault("compute_dtype", given["param_dtype"])
    given.setdefault("output_dtype", given["compute_dtype"])
    return Policy(**given)


# This attribute marks functions and classes of modules that compute with a policy, and the update
# of an optimizer that was made for one.
LOWERED_TO = "__jmp_lowered_to__"


def mark_lowered(fun: T, dtype: DTypeLike) -> T:
    """Returns `fun`, marked with the dtype that its products are computed in.

    Training steps read the mark, to warn of an optimizer that scales no loss of a float16 model.
    """
    setattr(fun, LOWERED_TO, np.dtype(dtype))
    return fun


def lowered_to(fun: object) -> np.dtype | None:
    """Returns the dtype that a function or module, or what a function wraps, is marked with.

    None if nothing is marked.

    >>> str(lowered_to(jax.jit(autocast(lambda x: x @ x, "mixed_bfloat16"))))
    'bfloat16'
    """
    while fun is not None:
        dtype: np.dtype | None = getattr(fun, LOWERED_TO, None)
        if dtype is not None:
            return dtype
        fun = fun.func if isinstance(fun, functools.partial) else getattr(fun, "__wrapped__", None)
    return None
