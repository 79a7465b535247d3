"""Adapts a language model in Flax linen: LoRA in float32 beside a frozen backbone in bfloat16.

    python examples/lora.py    # a minute and a half on two CPU cores; --help lists options

A small GPT learns Python code, the standard library, byte by byte. LoRA (Hu et al. 2021) adapts it
to English prose, the help texts of `pydoc`: each layer gets the product of two thin matrices beside
its weights, and only these are trained. They are a collection of their own, "lora", so that

- a step differentiates the adapters only, and makes no gradient of the backbone;
- the optimizer sees the adapters only: float32 parameters, whose gradients are scaled, unscaled and
  checked as always. Of the backbone it has no master and no moment.

It prints the held-out loss of full fine-tuning and of LoRA, and what a step holds in memory. In the
last run the adapters are bfloat16 too, without masters: many of their updates are rounded away.
"""

import pathlib
import sysconfig
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _common import begin, finish, parse_options, print_table

import jmp
from jmp import diagnostics, transforms
from jmp.adapters import linen

# What is trained, the policy of the stored backbone, that of the training, how adapters are stored.
HALF = "p=bf16,c=bf16,o=f32"
RUNS = {
    "everything, float32": ("params", "float32", "float32", None),
    "LoRA, float32": ("lora", "float32", "float32", None),
    "LoRA, mixed bfloat16": ("lora", HALF, "mixed_bfloat16", None),
    "LoRA, mixed float16": ("lora", HALF, "mixed_float16", None),
    "bfloat16, no masters": ("lora", HALF, HALF, "none"),
}


class LoRADense(nn.Module):
    """A Dense layer, and beside it two thin matrices in the collection "lora"."""

    features: int
    rank: int = 4

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        thin = nn.initializers.he_normal()
        shape = (x.shape[-1], self.rank)
        a = self.variable("lora", "a", lambda: thin(self.make_rng("params"), shape))
        b = self.variable("lora", "b", jnp.zeros, (self.rank, self.features))
        return nn.Dense(self.features)(x) + x @ a.value @ b.value


class GPT(nn.Module):
    """A decoder-only transformer of bytes; it knows nothing of precision."""

    width: int
    layers: int = 2
    heads: int = 4

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(256, self.width)(tokens)
        x = x + nn.Embed(tokens.shape[1], self.width)(jnp.arange(tokens.shape[1]))
        for _ in range(self.layers):
            joint = LoRADense(3 * self.width)(nn.LayerNorm()(x))
            parts = joint.reshape(*x.shape[:2], 3, self.heads, -1)
            mixed = jax.nn.dot_product_attention(*jnp.moveaxis(parts, 2, 0), is_causal=True)
            x = x + LoRADense(self.width)(mixed.reshape(x.shape))
            hidden = nn.gelu(LoRADense(4 * self.width)(nn.LayerNorm()(x)))
            x = x + LoRADense(self.width)(hidden)
        return nn.Dense(256)(nn.LayerNorm()(x))


def loss_fn(trained: Any, frozen: Any, tokens: jax.Array, apply_fn: Any) -> jax.Array:
    logits = apply_fn({**frozen, **trained}, tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


@jax.jit
def train_step(state: linen.TrainState, frozen: Any, tokens: jax.Array) -> linen.TrainState:
    # Only the first argument has gradients.
    grad_fn = jmp.scaled_value_and_grad(loss_fn, state.loss_scale)
    _, grads = grad_fn(state.params, frozen, tokens, state.apply_fn)
    return state.apply_gradients(grads=grads)


def train(state: Any, frozen: Any, text: np.ndarray, steps: int, arguments: Any) -> Any:
    """Returns the state after some steps on random windows of a text."""
    drawn = np.random.default_rng(0)
    for _ in range(steps):
        starts = drawn.integers(0, len(text) - arguments.length - 1, arguments.batch_size)
        state = train_step(state, frozen, text[starts[:, None] + np.arange(arguments.length + 1)])
    return state


def load_texts(size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the bytes of code, those of prose, and windows of held-out prose."""
    library = pathlib.Path(sysconfig.get_paths()["stdlib"])
    code = b"\n".join(path.read_bytes() for path in sorted(library.glob("*.py")))
    prose = np.frombuffer((library / "pydoc_data" / "topics.py").read_bytes(), np.uint8)
    windows = prose[-300 * size :].reshape(300, size).astype(np.int32)
    return np.frombuffer(code, np.uint8), prose[: -300 * size], windows


def main() -> None:
    options = {"pretrain_steps": 400, "steps": 400, "batch_size": 16, "length": 64, "width": 64}
    arguments = parse_options(__doc__, **options, runs=list(RUNS))
    console = begin(arguments)
    code, prose, held_out = load_texts(arguments.length + 1)
    model = GPT(arguments.width)
    variables = model.init(jax.random.key(0), held_out[:1, :-1])
    schedule = optax.cosine_decay_schedule(5e-4, arguments.steps)

    def create(trained: Any, policy: str, rate: Any, masters: str | None) -> linen.TrainState:
        apply_fn = linen.autocast(model.apply, policy)
        tx = transforms.mixed_precision(optax.adam(rate), policy, masters=masters)
        trained = jmp.get_policy(policy).cast_to_param(trained)
        return linen.TrainState.create(apply_fn=apply_fn, params=trained, tx=tx)

    lora, weights = ({name: variables[name]} for name in ("lora", "params"))
    state = create(weights, "mixed_bfloat16", 2e-3, None)
    weights = train(state, lora, code, arguments.pretrain_steps, arguments).params
    evaluate = jax.jit(loss_fn, static_argnums=3)
    console.print(f"After the code: {evaluate(weights, lora, held_out, model.apply):.4f} on prose.")
    losses, reports = {}, {}
    for name in arguments.runs:
        kind, stored, policy, masters = RUNS[name]
        backbone = linen.cast_params(weights, stored)  # norms stay float32
        trained, frozen = (backbone, lora) if kind == "params" else (lora, backbone)
        state = create(trained, policy, schedule, masters)
        state = train(state, frozen, prose, arguments.steps, arguments)
        apply_fn = state.apply_fn
        losses[name] = float(evaluate(state.params, frozen, held_out, apply_fn))
        loss = lambda *trees, apply_fn=apply_fn: loss_fn(*trees, apply_fn)
        report = diagnostics.memory_report(loss, optimizer=state.tx, frozen=1, compiled=False)
        reports[name] = report(state.params, frozen, held_out[: arguments.batch_size])
    print_table(console, ["held-out loss on prose", ""], *losses.items())
    print(diagnostics.compare_memory(reports))
    memory = {name: report.parts for name, report in reports.items()}
    finish(console, arguments, "lora", losses=losses, memory=memory)


if __name__ == "__main__":
    main()
