"""How errors and warnings are worded: errors of one form, any value in a few words, ways out.

The text of each stands where it is raised. Here, in this order:
  - errors: `wrong` for a value that is not as expected; `check_function`, `check_number` and
    `refuse_other_models` raise those that many functions share;
  - values in a few words: `described`, and what it does for names, arrays and trees. A user's value
    may be a whole optimizer state or ten megabytes of text: a message says what it is, never all
    that is in it;
  - names in another spelling: `did_you_mean`;
  - models of frameworks: which one (`framework_of`), and which call takes it (`way_out`,
    `way_to_parameters`). They are recognised by the names of their classes: whoever has a model has
    imported its framework, so that nothing is imported here;
  - the line that a warning names: `users_stacklevel`;
  - the warning about DeepMind's files among ours: `warn_of_mixed_files`.
"""

import functools
import inspect
import numbers
import os
import re
import reprlib
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from jax.tree_util import keystr, tree_leaves_with_path


class PrecisionWarning(UserWarning):
    """A warning of this library; each of its warnings is one of these.

    >>> import warnings
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always", PrecisionWarning)
    ...     PolicyRules([("haed*", "float32")], default="float32").warn_unused()
    >>> [warning.category.__name__ for warning in caught]
    ['UnusedRuleWarning']
    """


def wrong(
    kind: type[Exception],
    caller: str,
    value: object,
    expected: str,
    *,
    name: str = "",
    more: str = "",
) -> Exception:
    """Returns the error for one value that is not as expected; `raise` it.

    Args:
      kind: TypeError for a wrong kind of value, ValueError for a wrong value.
      caller: the public function or class that was given the value.
      value: what it was given.
      expected: what it takes, and the way out; without the full stop at the end.
      name: the argument's name, if the caller's name does not say it.
      more: sentences that follow, as `way_out` returns them: with a space in front.

    >>> wrong(ValueError, "clip_by_global_norm", -1, "a number above zero", name="max_norm")
    ValueError('clip_by_global_norm got max_norm=-1; expected a number above zero.')
    """
    given = f"{name}={described(value)}" if name else described(value)
    return kind(f"{caller} got {given}; expected {expected}.{more}")


def check_function(fun: object, caller: str, call: str) -> None:
    """Raises TypeError if `fun` cannot be called.

    Args:
      caller: the function that it was given to.
      call: how that one is called, for the error.
    """
    if not callable(fun):
        raise wrong(TypeError, caller, fun, f"a function: {call}")


def check_number(
    value: Any,
    caller: str,
    expected: str,
    is_right: Callable[[Any], bool] = lambda number: True,
    *,
    name: str = "",
    kind: Any = numbers.Real,
) -> Any:
    """Returns one number, of Python or in an array, as an int or a float.

    Args:
      value: what the user gave, of any real type, such as `fractions.Fraction` and NumPy's. True
        and False are no numbers.
      caller, expected, name: as for `wrong`.
      is_right: whether a number of this kind is taken; left out, each is.
      kind: int for whole numbers.

    Raises: TypeError for what is no such number, or is traced; ValueError if it is not right.

    >>> check_number(np.float32(8), "period", "at least 1", lambda n: n >= 1)
    8.0
    """
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"{caller} got a traced value; {name or 'it'} is part of the compiled program and must "
            f"be a plain number: {expected}."
        )
    is_scalar = isinstance(value, np.generic | np.ndarray | jax.Array) and value.ndim == 0
    number: Any = value.item() if is_scalar else value
    if isinstance(number, bool) or not isinstance(number, kind):
        raise wrong(TypeError, caller, value, expected, name=name)
    if not isinstance(number, int):
        try:
            number = float(number)
        except OverflowError:
            raise wrong(ValueError, caller, value, expected, name=name) from None
    if not is_right(number):
        raise wrong(ValueError, caller, value, expected, name=name)
    return number


def refuse_other_models(value: object, caller: str, name: str, own: str, expected: str) -> None:
    """Raises TypeError for a model of another framework.

    Args:
      caller, name: the function that got `value`, and the argument's name.
      own: the framework whose models are taken, or "" for none.
      expected: what should stand there.
    """
    if framework_of(value) not in (None, own):
        raise wrong(TypeError, caller, value, expected, name=name, more=way_out(value))


_TEXT = 60  # characters of a text or a name that are shown
_LENGTH = 240  # of a whole description


def described(value: object) -> str:
    """Returns a short text that says what a value is: its kind, dtype, shape or structure.

    Arrays are not printed, except scalars; texts and containers are cut.

    >>> described({"w": jnp.ones((2, 3)), "steps": [1] * 100})
    "{'steps': [1, 1, 1, 1, ...], 'w': float32[2,3]}"
    """
    text = _Description().repr(value)
    return text if len(text) <= _LENGTH else f"{text[: _LENGTH - 4]} ..."


class _Description(reprlib.Repr):
    """Cuts texts and containers as `reprlib` does; says of other objects only their kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 2
        self.maxstring = _TEXT
        self.maxdict = self.maxlist = self.maxtuple = self.maxset = 4

    def repr_int(self, x: int, level: int) -> str:
        """Whole numbers may have more digits than Python prints."""
        return repr(x) if x.bit_length() <= 128 else f"an int of {x.bit_length():,} bits"

    def repr_instance(self, x: Any, level: int) -> str:
        """Objects of classes that `reprlib` does not know."""
        if isinstance(x, (np.generic, np.ndarray, jax.Array)):
            return _described_array(x)
        if isinstance(x, jax.ShapeDtypeStruct):
            return f"ShapeDtypeStruct {shape_text(x)}"
        if x is None or isinstance(x, (bool, float, complex, np.dtype)):
            return repr(x)
        if isinstance(x, type):
            return f"the class {_cut(x.__name__)}"
        if inspect.isroutine(x):
            return f"the {'method' if inspect.ismethod(x) else 'function'} {function_name(x)}"
        name = _cut(type(x).__name__)
        return f"{'an' if name[:1].lower() in tuple('aeiou') else 'a'} {name}"


def listed(names: Iterable[Any], most: int = 8, written: Callable[[Any], str] = described) -> str:
    """Returns names joined by commas, the first few of many, each as `written` writes it.

    >>> listed("abc", most=2), listed("abc", written=str)
    ("'a', 'b' and 1 more", 'a, b, c')
    """
    names = list(names)
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(map(written, names[:most])) + more


def function_name(fun: object) -> str:
    """Returns what a function is called, or what it is, for a message.

    >>> function_name(len)
    'len'
    """
    if isinstance(fun, functools.partial):
        return function_name(fun.func)
    name = getattr(fun, "__name__", None)
    return _cut(name) if isinstance(name, str) else described(fun)


def shape_text(value: Any) -> str:
    """Returns the dtype and shape of an array.

    >>> shape_text(jnp.ones((2, 3)))
    'float32[2,3]'
    """
    return f"{value.dtype}[{','.join(map(str, value.shape))}]"


def where_trees_differ(first: Any, second: Any) -> str:
    """Returns a short text of how the structures of two trees differ.

    >>> where_trees_differ({"a": 1}, {"a": 1, "b": 2})
    "only the second has ['b']"
    """
    paths = [
        {keystr(path) or "the root": None for path, _ in tree_leaves_with_path(tree)}
        for tree in (first, second)
    ]
    words = []
    for which, here, there in (("first", *paths), ("second", *reversed(paths))):
        only = [path for path in here if path not in there]
        if only:
            words.append(f"only the {which} has {listed(only, 3, _cut)}")
    same_paths = f"same paths, other containers: {described(first)} and {described(second)}"
    return "; ".join(words) or same_paths


def _described_array(value: Any) -> str:
    if isinstance(value, jax.core.Tracer):
        return f"traced {shape_text(value)}"
    if isinstance(value, jax.Array) and value.is_deleted():
        return f"deleted {shape_text(value)}"
    is_number = value.ndim == 0 and getattr(value, "is_fully_addressable", True)
    if is_number and getattr(value.dtype, "kind", "") in tuple("biufc"):
        return f"{shape_text(value)} of value {value.item()!r}"
    return shape_text(value)


def _cut(text: str) -> str:
    return text if len(text) <= _TEXT else f"{text[:_TEXT]}... ({len(text):,} characters)"


def did_you_mean(text: str, known: Iterable[str]) -> str:
    """Returns " Did you mean ...?" with the known names that a text spells in another way; else "".

    >>> did_you_mean("fp16", ["mixed_float16", "float16", "bfloat16"])
    " Did you mean 'mixed_float16' or 'float16'?"
    """
    spelt = re.sub(r"\s", "", text.lower()).rpartition(".")[2]  # "float 16", "torch.float16"
    spelt = re.sub("^(.+)-mixed$", r"mixed_\1", spelt)  # "bf16-mixed", of PyTorch Lightning
    spelt = re.sub(r"(?<![a-z\d])(b?)(?:fp?)?(?=\d)", r"\1float", spelt)  # "fp16", "bf16"
    found = [name for name in known if f"_{name.lower()}".endswith(f"_{spelt}")]
    return f" Did you mean {' or '.join(map(repr, found))}?" if found else ""


# The classes of models, by module and name, and the call that runs such a model in half.
_MODELS = {
    ("flax.linen", "Module"): "jmp.adapters.linen.autocast(model.apply, policy)",
    ("flax.nnx", "Module"): "jmp.adapters.nnx.autocast(model, policy)",
    ("equinox", "Module"): "jmp.adapters.equinox.autocast(loss_fn, policy)",
    ("haiku", "Module"): "jmp.adapters.haiku.autocast(hk.transform(forward), policy)",
    ("haiku", "Transformed"): "jmp.adapters.haiku.autocast(network, policy)",
    ("haiku", "TransformedWithState"): "jmp.adapters.haiku.autocast(network, policy)",
    ("keras", "Layer"): "keras.mixed_precision.set_global_policy('mixed_float16')",
    ("torch", "Module"): "torch.amp: jmp is for JAX",
}


# The part of such a model that an optimizer takes.
_PARAMETERS = {
    "flax.linen": "variables['params'], where variables = model.init(key, x)",
    "flax.nnx": "nnx.state(model, nnx.Param), as nnx.Optimizer(model, tx, wrt=nnx.Param) does",
    "equinox": "eqx.filter(model, eqx.is_inexact_array)",
    "haiku": "params = network.init(key, x)",
}


def framework_of(value: Any) -> str | None:
    """Returns the framework whose model a value is; None if it is none.

    >>> framework_of(3) is None
    True
    """
    found = _model_class(value)
    return None if found is None else found[0]


def way_out(value: Any) -> str:
    """Returns which call takes a model of that framework, as a sentence; "" for no model.

    >>> way_out(3)
    ''
    """
    found = _model_class(value)
    return "" if found is None else f" A model of {found[0]} goes through {_MODELS[found]}."


def way_to_parameters(tree: Any) -> str:
    """Returns what an optimizer takes of a model in a tree, as a sentence; "" for no model.

    >>> way_to_parameters({"w": 3})
    ''
    """
    models = jax.tree.leaves(tree, is_leaf=lambda node: framework_of(node) in _PARAMETERS)
    found = [framework for framework in map(framework_of, models) if framework in _PARAMETERS]
    return f" For a model of {found[0]} it is {_PARAMETERS[found[0]]}." if found else ""


def _model_class(value: Any) -> tuple[str, str] | None:
    """Returns the row of `_MODELS` whose class a value is of."""
    for base in type(value).__mro__:
        for framework, name in _MODELS:
            is_inside = f"{base.__module__}.".startswith(f"{framework}.")
            if base.__name__ == name and is_inside:
                return framework, name
    return None


# Packages whose frames stand between a user's line and a warning.
_BETWEEN = {"jmp", "jax", "flax", "equinox", "haiku", "optax", "contextlib", "functools"}


def users_stacklevel() -> int:
    """Returns the `stacklevel` with which a warning of the calling function names the user's line.

    It is the innermost line outside of this package, JAX and the frameworks.

    >>> users_stacklevel() > 1  # this line is of jmp
    True
    """
    for level, (frame, _) in enumerate(traceback.walk_stack(sys._getframe(1)), start=1):
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _BETWEEN:
            return level
    return 2


def warn_of_mixed_files(folder: str) -> None:
    """Warns if files of DeepMind's `jmp` are in `folder`, the folder of this package.

    Looks for one file, because every import of the package comes here.
    """
    if os.path.exists(os.path.join(folder, "_src", "policy.py")):
        warnings.warn(
            "Files of DeepMind's jmp lie among those of this library: both were installed into one "
            "folder, and uninstalling one breaks the other. `python -m jmp` says how to repair it.",
            PrecisionWarning,
            stacklevel=3,
        )
