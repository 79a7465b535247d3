"""Translates dates into ISO form in Flax linen: an encoder and a decoder with attention.

    python examples/seq2seq.py    # about a minute on two CPU cores; --help lists options

Dates are drawn and written in ten ways ("Saturday, 2 May 1998", "5/2/98"); the model writes them as
1998-05-02, character by character. A bidirectional GRU reads, another GRU writes, and attends to
what was read (Luong et al. 2015). Training is by teacher forcing: the decoder is given the
characters before the one that it writes. To translate, it is given its own.

It compares float32, mixed float16 and mixed bfloat16: losses, and how many held-out dates are right
to the last character. Greedy decoding is one loop in half: the weights are rounded once, before it,
and the state that it carries stays float32. The last column says for how many dates the same
weights write the same in float32.
"""

import datetime
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _common import PRECISIONS, begin, finish, parse_options, print_table

import jmp
from jmp import transforms
from jmp.adapters import linen

FORMS = (
    "%d %B %Y", "%d %b %Y", "%A, %d %B %Y", "%B %d, %Y", "%b %d, %Y",
    "%m/%d/%Y", "%m/%d/%y", "%d.%m.%Y", "%d.%m.%y", "%a %b %d %Y",
)  # fmt: skip
LONGEST, START = 28, 0  # characters; the token of padding, and of what is before the first


class Translator(nn.Module):
    """It knows nothing of precision."""

    width: int

    def setup(self) -> None:
        cells = [nn.RNN(nn.GRUCell(self.width // 2)) for _ in range(2)]
        self.read = nn.Bidirectional(*cells)
        self.write = nn.RNN(nn.GRUCell(self.width), return_carry=True)
        self.source, self.target = (nn.Embed(128, self.width) for _ in range(2))
        self.query, self.joint = nn.Dense(self.width), nn.Dense(self.width)
        self.head = nn.Dense(128)

    def encode(self, text: jax.Array) -> jax.Array:
        return self.read(self.source(text), seq_lengths=jnp.sum(text != START, axis=1))

    def decode(self, memory: jax.Array, mask: jax.Array, given: jax.Array, state: Any) -> Any:
        """Returns the state after the given characters, and logits for the ones after each."""
        state, hidden = self.write(self.target(given), initial_carry=state)
        scores = jnp.einsum("bth,bsh->bts", self.query(hidden), memory)
        weights = nn.softmax(jnp.where(mask[:, None], scores / self.width**0.5, -jnp.inf))
        read = jnp.einsum("bts,bsh->bth", weights, memory)
        joint = nn.tanh(self.joint(jnp.concatenate([hidden, read], axis=-1)))
        return state, self.head(joint)

    def __call__(self, text: jax.Array, given: jax.Array) -> jax.Array:
        state = jnp.zeros((len(text), self.width))
        return self.decode(self.encode(text), text != START, given, state)[1]


def greedy(model: Translator, variables: Any, text: jax.Array) -> jax.Array:
    """Returns the ten characters that the model writes for each text, int32[texts, 10]."""
    memory = model.apply(variables, text, method="encode")

    def write(carry: Any, _: None) -> tuple[Any, jax.Array]:
        state, given = carry
        state, logits = model.apply(variables, memory, text != START, given, state, method="decode")
        written = logits.argmax(-1)
        return (state, written), written[:, 0]

    state = jnp.zeros((len(text), model.width))
    first = jnp.full((len(text), 1), START)
    return jax.lax.scan(write, (state, first), length=10)[1].T


def draw_dates(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns texts int32[rows, LONGEST], with zeros behind them, and dates int32[rows, 10]."""
    random = np.random.default_rng(seed)
    days = map(datetime.date.fromordinal, random.integers(711_000, 747_000, rows).tolist())
    pairs = [(day.strftime(random.choice(FORMS)), day.isoformat()) for day in days]
    codes = lambda text, size: np.frombuffer(text.ljust(size, "\0").encode(), np.uint8)
    texts = np.stack([codes(text, LONGEST) for text, _ in pairs])
    return texts.astype(np.int32), np.stack([codes(date, 10) for _, date in pairs]).astype(np.int32)


def loss_fn(params: Any, apply_fn: Any, texts: jax.Array, dates: jax.Array) -> jax.Array:
    given = jnp.pad(dates[:, :-1], ((0, 0), (1, 0)), constant_values=START)
    logits = apply_fn({"params": params}, texts, given)
    return optax.softmax_cross_entropy_with_integer_labels(logits, dates).mean()


@jax.jit
def train_step(state: linen.TrainState, texts: jax.Array, dates: jax.Array) -> Any:
    grad_fn = jmp.scaled_value_and_grad(loss_fn, state.loss_scale)
    loss, grads = grad_fn(state.params, state.apply_fn, texts, dates)
    return state.apply_gradients(grads=grads), loss


def run(policy: str, arguments: Any, data: Any, held_out: Any) -> dict[str, Any]:
    model = Translator(arguments.width)
    texts, dates = data
    params = model.init(jax.random.key(0), texts[:1], dates[:1])["params"]
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(arguments.learning_rate))
    state = linen.TrainState.create(
        apply_fn=linen.autocast(model.apply, policy),
        params=params,
        tx=transforms.mixed_precision(inner, policy),
    )
    drawn = np.random.default_rng(0)
    losses = []
    for _ in range(arguments.steps):
        rows = drawn.integers(0, len(texts), arguments.batch_size)
        state, loss = train_step(state, texts[rows], dates[rows])
        losses.append(loss)

    def translate(policy: str) -> jax.Array:
        # Autocast takes the whole loop.
        in_loop = linen.autocast(lambda variables, text: greedy(model, variables, text), policy)
        return jax.jit(in_loop)({"params": state.params}, held_out[0])

    written, in_float32 = translate(policy), translate("float32")
    return {
        "loss": float(np.mean(losses[-20:])),
        "held-out loss": float(loss_fn(state.params, state.apply_fn, *held_out)),
        "right": float((written == held_out[1]).all(axis=1).mean()),
        "as in float32": float((written == in_float32).all(axis=1).mean()),
    }


def main() -> None:
    arguments = parse_options(
        __doc__, steps=250, batch_size=128, width=96, learning_rate=3e-3, precisions=PRECISIONS
    )
    console = begin(arguments)
    data, held_out = draw_dates(20_000, 0), draw_dates(1000, 1)
    runs = {policy: run(policy, arguments, data, held_out) for policy in arguments.precisions}
    rows = ([policy, *found.values()] for policy, found in runs.items())
    print_table(console, ["", *next(iter(runs.values()))], *rows)
    finish(console, arguments, "seq2seq", runs=runs)


if __name__ == "__main__":
    main()
