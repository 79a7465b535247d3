"""What autocast adds to tracing: the gradient of a 12-layer GPT, traced plainly and under autocast.

Both are traced from scratch, caches cleared, in alternation; the median of the paired ratios is
printed, which a slow moment of the machine does not move. Needs no GPU:

    JAX_PLATFORMS=cpu PYTHONPATH=. .venv-test/bin/python benchmarks/trace_time.py
"""

import statistics
import time

import jax
import jax.numpy as jnp

import jmp
from tests.models import gpt

PAIRS = 8


def seconds_to_trace(function, *args):
    jax.clear_caches()
    start = time.perf_counter()
    jax.make_jaxpr(jax.grad(function))(*args)
    return time.perf_counter() - start


def main():
    loss, params, batch = gpt(jnp.float32, batch=1, length=64, layers=12, width=128, vocabulary=256)
    autocast = jmp.autocast(loss, "mixed_float16")
    seconds_to_trace(loss, params, *batch)  # imports
    plain, mixed = [], []
    for _ in range(PAIRS):
        plain.append(seconds_to_trace(loss, params, *batch))
        mixed.append(seconds_to_trace(autocast, params, *batch))
    ratios = [m / p for m, p in zip(mixed, plain, strict=True)]
    print(
        f"plain {statistics.median(plain):.2f} s, autocast {statistics.median(mixed):.2f} s, "
        f"median ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    )


if __name__ == "__main__":
    main()
