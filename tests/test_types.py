"""Signatures survive wrapping: this file runs, and `make types` checks it as a user's program.

Each `type: ignore` is an error that a type checker must find: an unused one is an error too.
"""

from typing import TYPE_CHECKING, Any, assert_type

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jmp
from jmp import transforms
from jmp.adapters import linen
from jmp.transforms import WithLossScaleState, WithMasterParamsState

X = jnp.ones((2, 2))
SCALE = jmp.DynamicLossScale(jmp.half_dtype()(2**15))


def loss_fn(w: jax.Array, x: jax.Array, *, power: int = 2) -> jax.Array:
    return jnp.mean((x @ w) ** power)


def loss_and_aux(w: jax.Array, power: int = 2) -> tuple[jax.Array, dict[str, jax.Array]]:
    return jnp.mean((X @ w) ** power), {"w": w}


def test_autocast_keeps_the_signature_of_what_it_wraps() -> None:
    wrapped = jmp.autocast(loss_fn, "mixed_bfloat16", recompute="none")
    assert_type(wrapped(X, X, power=3), jax.Array)
    assert wrapped(X, X, power=3) == 8
    jax.eval_shape(jax.grad(wrapped), X, X)
    if TYPE_CHECKING:
        wrapped(X, 3)  # type: ignore[arg-type]
        wrapped(X, X, powers=3)  # type: ignore[call-arg]
        jmp.autocast(loss_fn, "mixed_float16", rules=[("head*", "float32")])
        jmp.autocast(loss_fn, "mixed_float16", rules=[3])  # type: ignore[list-item]
        jmp.autocast(loss_fn)  # type: ignore[call-overload]
        jmp.autocast(loss_fn, "mixed_float16", recomputing="none")  # type: ignore[call-overload]


def test_decorators_keep_the_signature_of_functions_and_methods() -> None:
    @jmp.autocast(policy="mixed_bfloat16", apply_to=["x"])
    def body(x: jax.Array, n: int) -> tuple[jax.Array, int]:
        return x @ x, n

    @jmp.full_precision
    def head(x: jax.Array, n: int) -> tuple[jax.Array, int]:
        return x @ x, n

    class Model:
        @jmp.full_precision
        def head(self, x: jax.Array) -> jax.Array:
            return head(*body(x, n=1))[0]

    assert_type(body(X, n=1), tuple[jax.Array, int])
    assert_type(head(X, n=1), tuple[jax.Array, int])
    assert_type(Model().head(X), jax.Array)
    assert Model().head(X)[0, 0] == 8
    if TYPE_CHECKING:
        body(X, m=1)  # type: ignore[call-arg]
        head(X, m=1)  # type: ignore[call-arg]
        Model().head(X, X)  # type: ignore[call-arg]


def test_scaled_value_and_grad_keeps_the_arguments() -> None:
    value, _ = jmp.scaled_value_and_grad(loss_fn, SCALE)(X, X, power=2)
    assert value == 4
    differentiate = jmp.scaled_value_and_grad(loss_and_aux, SCALE, has_aux=True)
    (value, aux), _ = differentiate(X, power=2)
    assert value == 4 and set(aux) == {"w"}
    jmp.scaled_value_and_grad(loss_and_aux, SCALE, 0, True)(X)
    if TYPE_CHECKING:
        differentiate(X, powers=2)  # type: ignore[call-arg]


def test_accumulated_value_and_grad_keeps_the_arguments() -> None:
    accumulated = jmp.accumulated_value_and_grad(loss_fn, SCALE, 2, weight=len, skip="micro_batch")
    value, _ = accumulated(X, X, power=2)
    assert value.dtype == jnp.float32
    if TYPE_CHECKING:
        accumulated(X, X, powers=2)  # type: ignore[call-arg]
        jmp.accumulated_value_and_grad(loss_fn, SCALE, 2, skip="all")  # type: ignore[arg-type]


def test_adapters_keep_signatures_too() -> None:
    @jmp.adapters.nnx.autocast(policy="mixed_bfloat16")
    def nnx_loss(model: nnx.Linear, x: jax.Array) -> jax.Array:
        return model(x).mean()

    def equinox_loss(model: eqx.nn.Linear, x: jax.Array) -> jax.Array:
        return jax.vmap(model)(x).mean()

    assert_type(nnx_loss(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), X), jax.Array)
    module = eqx.nn.Linear(2, 2, key=jax.random.key(0))
    lowered = jmp.adapters.equinox.autocast(equinox_loss, "mixed_bfloat16", recompute="none")
    assert_type(lowered(module, X), jax.Array)
    value, _ = jmp.adapters.equinox.scaled_value_and_grad(equinox_loss, SCALE)(module, x=X)
    assert value.dtype == jnp.float32
    dense = nn.Dense(2)
    apply_fn = linen.autocast(dense.apply, "mixed_bfloat16")
    apply_fn(dense.init(jax.random.key(0), X), X, mutable=["batch_stats"])
    if TYPE_CHECKING:
        nnx_loss(X, X)  # type: ignore[arg-type]
        lowered(module, y=X)  # type: ignore[call-arg]
        jmp.adapters.lin  # type: ignore[attr-defined]  # noqa: B018
        jmp.autocats  # type: ignore[attr-defined]  # noqa: B018


def test_optimizers_know_the_types_of_their_states() -> None:
    tx = transforms.with_loss_scale(optax.sgd(0.5), SCALE)
    state = tx.init(X)
    assert_type(state, WithLossScaleState)
    assert_type(tx.update(X, state, X)[1], WithLossScaleState)
    assert_type(state.loss_scale, jmp.LossScale)
    assert_type(transforms.loss_scale_state(state), WithLossScaleState | None)
    assert_type(transforms.set_loss_scale(state, SCALE), WithLossScaleState)
    masters = transforms.with_master_params(optax.sgd(0.5))
    assert_type(masters.init(X), WithMasterParamsState)
    assert_type(transforms.reset_masters(masters.init(X), X), WithMasterParamsState)
    both = transforms.mixed_precision(masters, "mixed_float16")
    assert_type(both.update(X, both.init(X), X)[1], WithLossScaleState)
    for made in (tx, masters, both):
        assert type(made) is optax.GradientTransformationExtraArgs
    optax.chain(tx, optax.scale(1.0)).init(X)
    if TYPE_CHECKING:
        state.scale  # type: ignore[attr-defined]  # noqa: B018
        tx.update(X, masters.init(X))  # type: ignore[arg-type]


def test_dtypes_of_policies_are_scalar_types_to_a_type_checker() -> None:
    dtype = jmp.get_policy("mixed_float16").compute_dtype
    assert_type(dtype(1.0), jax.Array)
    assert_type(dtype.__name__, str)
    names: dict[Any, str] = {jnp.float16: "f16"}
    assert names[dtype] == "f16"
    assert jnp.ones(2, dtype).dtype == dtype == jnp.float16
