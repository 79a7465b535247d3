"""Ways from a checkpoint of one kind of training to another, and what comes out bit-equal.

The lines of each migration are those of `docs/checkpoints.md`. They are run on a training that was
saved and restored, once by `flax.serialization` and once by Orbax.
"""

import dataclasses
import pathlib
import re
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import serialization
from flax.training import dynamic_scale, train_state
from jax.flatten_util import ravel_pytree

import jmp
from jmp import transforms
from jmp.adapters import linen
from testbed import ROOT

PAGE = ROOT / "docs" / "checkpoints.md"
# By their titles.
_, _, _section = PAGE.read_text().partition("\n## Change the kind of training\n")
_section, _, _ = _section.partition("\n## ")
LINES = dict(re.findall(r"^(\S[^\n]*):\n\n```py\n(.*?)^```", _section, re.M | re.S))

inner = optax.adam(1e-2)
SCALES = {
    "dynamic": jmp.DynamicLossScale(2.0**10, period=4),
    "static": jmp.StaticLossScale(256),
    "no-op": jmp.NoOpLossScale(),
    "hysteresis": jmp.HysteresisLossScale(2.0**9, period=6, hysteresis=3),
}
LIKE_FLAX = jmp.DynamicLossScale(
    2.0**16,
    period=5,
    growth_factor=2.0,
    backoff_factor=0.5,
    min_loss_scale=float(jnp.finfo("float32").tiny),
)
DYNAMIC = transforms.with_loss_scale(inner, SCALES["dynamic"])
MASTERS = transforms.with_master_params(inner)
BOTH = transforms.with_loss_scale(MASTERS, SCALES["dynamic"])
SPLIT = transforms.with_split_masters(inner)


@dataclasses.dataclass(frozen=True)
class Migration:
    """A way from one kind of training to another.

    Attributes:
      old, new: the optimizers.
      recipe: the title of its lines; by default `name`.
      stored: how the old training stores its parameters.
      pack: makes of parameters and optimizer state what is saved.
      more: other names that the lines use.
    """

    name: str
    old: optax.GradientTransformation
    new: optax.GradientTransformation
    recipe: str = ""
    stored: str = "float32"
    pack: Callable[[Any, Any], dict[str, Any]] = lambda p, o: {"params": p, "opt_state": o}
    more: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def title(self) -> str:
        return self.recipe or self.name

    @property
    def lines(self) -> str:
        """Returns the lines that are run.

        They find what was restored as `params` and `opt_state` (or as `state`), and the new
        optimizer as `tx`; they leave the new `params` and `opt_state` (or `state`).
        """
        return LINES[self.title[0].upper() + self.title[1:]]


def with_dynamic_scale(params: Any, opt_state: Any) -> dict[str, Any]:
    theirs = dynamic_scale.DynamicScale(growth_interval=4, fin_steps=jnp.int32(3), scale=1024.0)
    return {"params": params, "opt_state": opt_state, "dynamic_scale": theirs}


def in_state(cls: type, tx: optax.GradientTransformation) -> Callable[[Any, Any], dict[str, Any]]:
    def pack(params: Any, opt_state: Any) -> dict[str, Any]:
        state = cls.create(apply_fn=None, params=params, tx=tx)
        return {"state": state.replace(step=jnp.int32(3), opt_state=opt_state)}

    return pack


MIGRATIONS = (
    Migration("float32 to a dynamic scale", inner, DYNAMIC),
    Migration("a dynamic scale to float32", DYNAMIC, inner),
    Migration("float32 to O2: half parameters, masters", inner, MASTERS),
    Migration("float32 to O2: half parameters, masters, a dynamic scale", inner, BOTH),
    Migration("masters to float32", MASTERS, inner, stored="O2"),
    Migration("masters and a dynamic scale to float32", BOTH, inner, stored="O2"),
    Migration("float32 to split masters", inner, SPLIT),
    Migration("split masters to float32", SPLIT, inner, stored="bfloat16"),
    *(
        Migration(
            name, old, new, recipe="whole masters to split masters, and back", stored="bfloat16"
        )
        for name, old, new in (
            ("masters to split masters", MASTERS, SPLIT),
            ("split masters to masters", SPLIT, MASTERS),
        )
    ),
    *(
        Migration(
            f"{old} scale to {new}",
            transforms.with_loss_scale(inner, SCALES[old]),
            transforms.with_loss_scale(inner, SCALES[new]),
            recipe="a scale of one class to another: dynamic, static, no-op, hysteresis",
            more={"new_scale": SCALES[new]},
        )
        for old in SCALES
        for new in SCALES
        if old != new
    ),
    Migration(
        "Flax's `DynamicScale` to a dynamic scale",
        inner,
        transforms.with_loss_scale(inner, LIKE_FLAX),
        pack=with_dynamic_scale,
    ),
    Migration(
        "Flax's `TrainState` to ours", inner, DYNAMIC, pack=in_state(train_state.TrainState, inner)
    ),
    Migration(
        "our `TrainState` to Flax's", DYNAMIC, inner, pack=in_state(linen.TrainState, DYNAMIC)
    ),
)


def make_params(stored: str) -> Any:
    values = jnp.linspace(-1, 1, 32)
    params = {
        "Dense_0": {"kernel": values[:16] / 3, "bias": values[16:]},
        "LayerNorm_0": {"scale": values[:16] + 2, "bias": values[16:] / 7},
    }
    policy = {"O2": "O2", "bfloat16": "p=bf16,c=bf16,o=f32"}.get(stored)
    return linen.cast_params(params, policy) if policy else params


def trained(
    tx: optax.GradientTransformation, params: Any, opt_state: Any, steps: range
) -> tuple[Any, Any]:
    """Returns parameters and state after these steps, with gradients that float16 holds exactly."""
    for number in steps:
        scaling = transforms.loss_scale_state(opt_state)
        factor = 1.0 if scaling is None else scaling.loss_scale.loss_scale
        size = 2.0**-5 * (1 + number % 3)
        gradients = jax.tree.map(lambda p, by=factor * size: jnp.full_like(p, by), params)
        updates, opt_state = tx.update(gradients, opt_state, params)
        params = optax.apply_updates(params, updates)
    return params, opt_state


def by_flax(saved: Any, fresh: Any) -> Any:
    restored = serialization.from_bytes(fresh, serialization.to_bytes(saved))
    return jax.tree.map(jnp.asarray, restored)


def by_orbax(saved: Any, fresh: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
        path = pathlib.Path(folder) / "saved"
        checkpointer.save(path, saved)
        checkpointer.wait_until_finished()
        return checkpointer.restore(path, fresh)


WAYS = {"flax.serialization": by_flax, "Orbax": by_orbax}


def migrated(row: Migration, restored: dict[str, Any]) -> dict[str, Any]:
    """Returns all names after the lines of a migration: `params`, `opt_state` or `state`."""
    known = {"jax": jax, "jnp": jnp, "jmp": jmp, "transforms": transforms, "linen": linen}
    known |= {"train_state": train_state, "tx": row.new}
    names = known | row.more | restored
    exec(compile(row.lines, row.name, "exec"), names)
    if "state" in restored:
        names |= {"params": names["state"].params, "opt_state": names["state"].opt_state}
    return names


def compared(row: Migration, way: str) -> dict[str, bool]:
    """Returns what is bit-equal between a training that went on and one that was migrated.

    `structure` says whether the new optimizer would have made such a state itself: a step that was
    compiled for it takes the migrated one.
    """
    fresh = make_params(row.stored)
    begun = row.old.init(fresh)
    params, opt_state = trained(row.old, fresh, begun, range(3))
    names = migrated(row, WAYS[way](row.pack(params, opt_state), row.pack(fresh, begun)))
    after = trained(row.new, names["params"], names["opt_state"], range(3, 6))
    expected = trained(row.old, params, opt_state, range(3, 6))
    was, now = (params, opt_state), (names["params"], names["opt_state"])
    return {
        "structure": described(row.new.init(now[0])) == described(now[1]),
        "parameters": bits(truth(*now)) == bits(truth(*was)),
        "moments": bits(moments(*now)) == bits(moments(*was)),
        "the next steps": (
            bits((truth(*after), moments(*after))) == bits((truth(*expected), moments(*expected)))
        ),
    }


def truth(params: Any, opt_state: Any) -> Any:
    """Returns the parameters in float32, as the optimizer knows them."""
    return transforms.masters(opt_state, params)


def moments(params: Any, opt_state: Any) -> Any:
    """Returns Adam's state, each moment as one vector."""
    del params
    is_adam = lambda node: isinstance(node, optax.ScaleByAdamState)
    (found,) = filter(is_adam, jax.tree.leaves(opt_state, is_leaf=is_adam))
    return [ravel_pytree(part)[0] for part in found]


def described(tree: Any) -> tuple[Any, list[Any]]:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(leaf.shape, leaf.dtype) for leaf in leaves]


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]
