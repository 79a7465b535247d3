"""Continue a bfloat16 training in float16 with float32 parameters, in Flax linen.

Its parameters and moments were saved in bfloat16. The training goes on with both in
float32, products in float16 and a dynamic loss scale, and is saved and restored again.

    python checkpoint.py --steps 60
"""

import argparse
import pathlib
import tempfile
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax.training import train_state

import jmp
from jmp import diagnostics, transforms
from jmp.adapters import linen

ADAM = optax.adam(3e-3)


class Net(nn.Module):
    dtype: Any = jnp.bfloat16
    param_dtype: Any = jnp.bfloat16

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kinds = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        x = nn.relu(nn.LayerNorm(**kinds)(nn.Dense(64, **kinds)(x)))
        return nn.Dense(1, **kinds)(x)[:, 0]


def batch(step: int) -> tuple[jax.Array, jax.Array]:
    x = jax.random.normal(jax.random.key(step), (64, 16))
    return x, jnp.sin(x[:, 0] + x[:, 1])


def loss_of(apply_fn: Any, params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((apply_fn({"params": params}, x).astype(jnp.float32) - y) ** 2)


@jax.jit
def bfloat16_step(state, x, y):
    loss_fn = lambda params: loss_of(state.apply_fn, params, x, y)
    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


@jax.jit
def train_step(state, x, y):
    loss_fn = lambda params: loss_of(state.apply_fn, params, x, y)
    loss, grads = jmp.scaled_value_and_grad(loss_fn, state.loss_scale)(state.params)
    return state.apply_gradients(grads=grads), loss


def train(step_fn: Any, state: Any, steps: range) -> tuple[Any, np.ndarray]:
    losses = []
    for step in steps:
        state, loss = step_fn(state, *batch(step))
        losses.append(float(loss))
    return state, np.asarray(losses)


def dtypes_of(params: Any) -> set[str]:
    return {str(leaf.dtype) for leaf in jax.tree.leaves(params)}


def create_old() -> train_state.TrainState:
    model = Net()
    params = model.init(jax.random.key(0), batch(0)[0])["params"]
    return train_state.TrainState.create(apply_fn=model.apply, params=params, tx=ADAM)


def continued(old: train_state.TrainState, policy: str) -> linen.TrainState:
    """Returns a state with float32 parameters that goes on from the bfloat16 one."""
    # Products of layers with dtype=bfloat16 would stay bfloat16.
    model = Net(dtype=None, param_dtype=jnp.float32)
    new = linen.TrainState.create(
        apply_fn=linen.autocast(model.apply, policy),
        params=jmp.cast_to_full(old.params),
        tx=transforms.mixed_precision(ADAM, policy),
    )
    opt_state = new.opt_state._replace(inner_state=jmp.cast_to_full(old.opt_state))
    return new.replace(opt_state=opt_state, step=jnp.asarray(old.step, jnp.int32))


def save_and_restore(path: pathlib.Path, state: Any, like: Any) -> Any:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, state)
        checkpointer.wait_until_finished()
        return checkpointer.restore(path, like)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args(argv).steps
    first, second = range(steps), range(steps, 2 * steps)
    with tempfile.TemporaryDirectory() as folder:
        trained, old_losses = train(bfloat16_step, create_old(), first)
        old = save_and_restore(pathlib.Path(folder) / "old", trained, create_old())
        assert dtypes_of(old.params) == {"bfloat16"}
        state, losses = train(train_step, continued(old, "mixed_float16"), second)
        fresh = continued(create_old(), "mixed_float16")
        resumed = save_and_restore(pathlib.Path(folder) / "new", state, fresh)
    _, reference = train(train_step, continued(old, "float32"), second)
    print(f"first {old_losses[:5].mean():.4f}, last {losses[-5:].mean():.4f}")
    assert losses[-5:].mean() < 0.9 * old_losses[:5].mean()
    assert abs(losses - reference).max() < 0.01
    assert dtypes_of(state.params) == {"float32"}
    assert isinstance(state.loss_scale, jmp.DynamicLossScale)
    grad_fn = jax.grad(lambda params: loss_of(state.apply_fn, params, *batch(0)))
    diagnostics.assert_products_in(grad_fn, jnp.float16)(state.params)
    after, _ = train(train_step, state, range(5))
    after_restore, _ = train(train_step, resumed, range(5))
    pairs = zip(jax.tree.leaves(after), jax.tree.leaves(after_restore), strict=True)
    assert all(jnp.array_equal(ours, theirs) for ours, theirs in pairs)
    assert after.step + after.opt_state.skipped_steps == 2 * steps + 5


if __name__ == "__main__":
    main()
