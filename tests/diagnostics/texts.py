"""What reports print of a few programs, as it is written down, and a digest of their data.

`python -m tests.diagnostics.texts` writes `texts.txt` anew; read in `git diff` what has changed.
"""

import hashlib
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np

import jmp
from benchmarks._program_texts import normal, without_lines
from jmp import diagnostics
from jmp.diagnostics import Range, RangeReport

LIST = pathlib.Path(__file__).with_suffix(".txt")
HALF = "mixed_float16"


def data(report):
    """A digest of what a report has as data, which JSON can hold."""
    text = without_lines(normal(json.dumps(report.to_dict())))
    return f"data: {hashlib.sha256(text.encode()).hexdigest()[:8]}"


def spec(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def network(params, x):
    """A product, a norm, a loop, branches, a softmax, and a product in float32."""
    with jax.named_scope("embed"):
        x = x @ params["embed"] + params["bias"]
    with jax.named_scope("norm"):
        x = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-6)
    with jax.named_scope("layers"):
        x, sums = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), h.sum()), x, params["layers"])
    x = jax.lax.cond(sums.sum() > 0, lambda x: x @ params["layers"][0], jnp.sin, x)
    with jax.named_scope("head"), jax.default_matmul_precision("highest"):
        weights = jax.nn.softmax(jax.checkpoint(lambda x: x @ params["embed"].T)(x))
    return jnp.mean(jnp.log(weights + 1e-9) * jmp.full_precision(jnp.matmul)(x, x.T).sum())


PARAMS = {"embed": spec(24, 16), "bias": spec(1, 16), "layers": spec(3, 16, 16)}
X = spec(4, 24)


def values(shapes):
    draw = np.random.default_rng(0)
    return jax.tree.map(lambda s: jnp.asarray(draw.standard_normal(s.shape, s.dtype)), shapes)


def hazards(x, w, cache, place):
    """Products of odd sizes, without tensor cores, in a loop; and sums and powers in half."""
    odd = x @ w[:, :-1]
    cache = jax.lax.dynamic_update_slice(cache, x[None], (place, 0, 0))
    dear = jnp.matmul(x, w, precision="highest")
    half = x.astype(jnp.float16)
    delicate = jnp.exp(half).sum() + jax.lax.reduce_sum_p.bind(
        half, axes=(0, 1), out_sharding=None)  # fmt: skip
    turns = jnp.sin(1e4 * (x @ w)) + jnp.sin((x + 1000.0) @ w)
    return odd.sum() + dear.sum() + delicate + turns.sum(), (x @ cache[0].T).sum(), cache


def unlike_rows():
    """Rows of every role, some half, with losses of every sort."""
    common = {"zeros": 2, "infinities": 0, "nans": 0}
    counts = {-30: 3, -25: 2, -20: 1, -14: 8, 0: 40, 15: 1, 16: 1}
    return [
        Range("parameter", "w", "float32", counts, **common),
        Range("parameter", "b", "bfloat16", {-140: 1, 3: 2}, **common),
        Range("gradient", "w", "float32", counts, **common, scale=2.0**4),
        Range("gradient", "b", "float32", {-60: 3, -2: 9}, **common, scale=2.0**4),
        Range("activation", "net/a", "float16", {-24: 5, 2: 7}, 1, 2, 3, 1.0, "exp", "a.py:1"),
        Range("activation", "net/b", "float16", {-16: 5, 2: 7}, 1, 0, 0, 1.0, "log", "a.py:2"),
        Range(
            "activation gradient", "net", "float16", counts, **common, scale=2.0**4,
            operation="float8 product", source="a.py:3"),
        Range("activation gradient", "net", "float16", {}, 0, 0, 0, 2.0**4, "add", "a.py:4"),
        *(Range("value", f"v{i}", "float32", {-26: i}, **common) for i in range(14)),
    ]  # fmt: skip


def ranges(rows, dtype):
    report = RangeReport(tuple(rows), dtype)
    totals = [report.total(role) for role in report.roles]
    return report, data(report), totals, report.best_scale("bfloat16")


def precision(function, *args, **options):
    report = diagnostics.precision_report(function, HALF, **options)(*args)
    return report, data(report)


def memory(function, *args):
    policies = ("float32", HALF)
    reports = {p: diagnostics.memory_report(function, p, compiled=False)(*args) for p in policies}
    return *reports.values(), *map(data, reports.values()), diagnostics.compare_memory(reports)


def nonfinite():
    loss = lambda params, x: jnp.sqrt(network(params, x) * 0.0)
    found = diagnostics.find_nonfinite(jax.grad(loss))(*values((PARAMS, X)))
    return found, data(found)


TEXTS = {
    "ranges": lambda: ranges(unlike_rows(), "float16"),
    "ranges in bfloat16": lambda: ranges(unlike_rows()[:4], "bfloat16"),
    "precision": lambda: precision(jax.grad(network), PARAMS, X),
    "hazards": lambda: precision(
        hazards, spec(1024, 512), spec(512, 512), spec(4, 1024, 512), spec(dtype=jnp.int32)),
    "memory": lambda: memory(network, PARAMS, X),
    "nonfinite": nonfinite,
}  # fmt: skip


def text_of(name):
    """The text of one entry, without what depends on lines of files."""
    with jax.numpy_rank_promotion("allow"):
        text = "\n".join(map(str, TEXTS[name]()))
    return re.sub(r" +", " ", re.sub(r"(\.py):\d+", r"\1", normal(text))).strip()


def written():
    parts = LIST.read_text().rstrip("\n").split("\n\n# ")
    pairs = (part.removeprefix("# ").split("\n", 1) for part in parts)
    return {name: text for name, text in pairs}


if __name__ == "__main__":
    LIST.write_text("\n\n".join(f"# {name}\n{text_of(name)}" for name in TEXTS) + "\n")
