"""Models of other frameworks than the one that was expected: told by their classes' names alone.

Nothing is imported for it: where there is a model, its framework was imported already.
"""

from typing import Any

import jax

from jmp._describe import described

# The classes of models, by module and name, and what runs such a model in mixed precision.
_MODELS = {
    ("flax.linen", "Module"): "jmp.adapters.linen.wrap_apply(model.apply, policy)",
    ("flax.nnx", "Module"): "jmp.adapters.nnx.with_policy(model, policy)",
    ("equinox", "Module"): "jmp.adapters.equinox.autocast(loss_fn, policy)",
    ("haiku", "Module"): "jmp.adapters.haiku.with_policy(hk.transform(forward), policy)",
    ("haiku", "Transformed"): "jmp.adapters.haiku.with_policy(network, policy)",
    ("haiku", "TransformedWithState"): "jmp.adapters.haiku.with_policy(network, policy)",
    ("keras", "Layer"): "keras.mixed_precision.set_global_policy('mixed_float16')",
    ("torch", "Module"): "torch.amp: jmp is for JAX",
}


# What an optimizer takes of such a model.
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
    found = _model(value)
    return None if found is None else found[0]


def way_out(value: Any) -> str:
    """Returns which call takes a model of that framework, as a sentence; "" for no model.

    >>> way_out(3)
    ''
    """
    found = _model(value)
    return "" if found is None else f" A model of {found[0]} goes through {_MODELS[found]}."


def parameters_of(tree: Any) -> str:
    """Returns what an optimizer takes of a model in a tree, as a sentence; "" for no model.

    >>> parameters_of({"w": 3})
    ''
    """
    models = jax.tree.leaves(tree, is_leaf=lambda node: framework_of(node) in _PARAMETERS)
    for framework in filter(None, map(framework_of, models)):
        if framework in _PARAMETERS:
            return f" Of a model of {framework} it is {_PARAMETERS[framework]}."
    return ""


def refuse_other_models(value: object, caller: str, role: str, own: str, expected: str) -> None:
    """Raises TypeError for a model of another framework.

    Args:
      caller, role: the function that got `value`, and as what.
      own: the framework whose models are taken.
      expected: what should stand there.
    """
    framework = framework_of(value)
    if framework is not None and framework != own:
        raise TypeError(
            f"{caller} got {described(value)} of {framework} as {role}; expected "
            f"{expected}.{way_out(value)}"
        )


def _model(value: Any) -> tuple[str, str] | None:
    for base in type(value).__mro__:
        for framework, name in _MODELS:
            is_inside = f"{base.__module__}.".startswith(f"{framework}.")
            if base.__name__ == name and is_inside:
                return framework, name
    return None
