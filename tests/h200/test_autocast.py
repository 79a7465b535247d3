"""How lean a training step under autocast is, against the same model written in half by hand.

The table of the documentation has the models at full size (`benchmarks/programs.py`); here
they have fewer layers, so that they compile in seconds. Bounds are 2 % above what was measured.
"""

import jax
import jax.numpy as jnp
import pytest

import jmp
from testbed.machines.gpus import compile_for_h200
from testbed.models import MODELS, cross_entropy
from tests.commands import in_full
from tests.gates import assert_leaner_than_by_hand
from tests.h200.fixture import spec

# Sizes; bounds of the bytes moved, temporary memory and kernels, as ratios to the model by hand.
GATES = [
    ("resnet", {"widths": (64, 128)}, (1.01, 1.02, 1.02)),
    ("unet", {"widths": (32, 64)}, (1.02, 1.02, 1.06)),
    ("gpt", {"layers": 1}, (0.75, 0.80, 1.04)),
    ("scanned_gpt", {"layers": 2}, (0.83, 0.97, 0.98)),
    ("lstm", {"width": 256}, (0.52, 0.64, 0.71)),
    ("plain_transformer", {"layers": 1}, (0.67, 0.77, 1.01)),
    # Rows that are no multiple of eight long, as the tokens of a ViT.
    ("equinox_attention", {"batch": 8, "length": 509, "width": 512}, (0.73, 0.71, 0.86)),
]


@pytest.mark.parametrize(("name", "sizes", "at_most"), in_full(GATES, but=["lstm"]))
def test_leaner_than_by_hand(h200, name, sizes, at_most):
    (model,) = (model for model in MODELS if model.name == name)
    with jax.numpy_rank_promotion("allow"):
        assert_leaner_than_by_hand(model, sizes, at_most)


def of_log_softmax(logits, labels):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1).mean()


# A head of a language model and its loss: tokens, width, classes; how often the logits are moved.
# Seven times is what must be: the product writes them, the loss reads them, their gradient reads
# and writes, two products read that; 0.9 to 1.5 are weights and features. In two passes: 10 to 11.
HEADS = [
    (cross_entropy, 8192, 768, 50304, 7.1),
    (of_log_softmax, 8192, 768, 50304, 7.1),
    # Shorter rows: XLA makes one kernel of a softmax that it finds.
    (cross_entropy, 4096, 512, 8192, 7.8),
]


@pytest.mark.parametrize(("loss", "tokens", "width", "classes", "at_most"), in_full(HEADS))
def test_a_loss_reads_the_logits_twice(h200, loss, tokens, width, classes, at_most):
    """Once forward and once backward."""
    head = jmp.autocast(lambda x, table, labels: loss(x @ table.T, labels), "mixed_float16")
    arrays = spec(tokens, width), spec(classes, width), spec(tokens, dtype=jnp.int32)
    program = compile_for_h200(jax.value_and_grad(head, (0, 1)), *arrays)
    assert program.bytes_moved <= at_most * 2 * tokens * classes


def test_a_loss_is_one_pass(h200):
    """What it computes of a product shares one cast: XLA stores nothing of it in float32."""
    loss = jmp.autocast(lambda w, x, y: jnp.mean((jax.nn.silu(x @ w) - y) ** 2), "mixed_float16")
    w, x = spec(512, 512), spec(8192, 512)
    # 16.5 otherwise.
    assert compile_for_h200(jax.value_and_grad(loss), w, x, x).bytes_moved <= 11.8 * 2 * x.size
