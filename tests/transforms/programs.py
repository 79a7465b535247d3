"""The programs of transformations, as they are written down: how many equations, and a digest.

How a state is made and updated may not change unseen, on one device or many: few kernels, no
gathers and no copies depend on forms that change no number. `python -m tests.transforms.programs`
writes `programs.txt` anew. A change of form is judged by `tests/h200/test_update_step.py`.
"""

import hashlib
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp
from benchmarks._program_texts import names_of_package, normal, program_text, without_names
from jmp import transforms
from jmp.transforms._few_kernels import SHORTER_THAN_A_LAUNCH, SMALL_LEAF

LIST = pathlib.Path(__file__).with_suffix(".txt")
F16, BF16, F32 = jnp.float16, jnp.bfloat16, jnp.float32
adam = optax.adam(0.1)

# Small, large and odd ones of every dtype; kernels of convolutions; rows of one and many blocks.
SHAPES = {
    "mixed": {
        "embed": (BF16, 64, 24), "kernel": (BF16, 4, 300), "other": (BF16, 4, 300),
        "convolution": (F16, 3, 3, 4, 8), "wide": (F32, 2, 4500), "bias": (F16, 24),
        "scalar": (F32,), "half scalar": (BF16,), "large": (F16, SHORTER_THAN_A_LAUNCH + 8),
        "complex": (jnp.complex64, 5), "empty": (BF16, 0, 8),
    },
    "many": {
        **{f"s{i}": (F32, i % 3 + 1) for i in range(34)},
        **{f"m{i}": (F32, 16, SMALL_LEAF // 16) for i in range(9)},
        "edge": (F32, SMALL_LEAF - 1), "odd": (F32, 3, 1367), "rows": (F32, 512, 8193),
        "rows of 1024": (F32, 8193, 1024), "alone": (F32, 16, 512, 2),
    },
    "matrices": {"w": (BF16, 16, 32), "v": (F32, 8, 520), "b": (BF16, 32)},
}  # fmt: skip
SPECS = {"w": P("x", "y"), "v": P(None, "y"), "b": P("y")}

WITH = {
    "loss scale": lambda inner: transforms.with_loss_scale(inner, jmp.DynamicLossScale(2.0**10)),
    "master params": transforms.with_master_params,
    "split masters": transforms.with_split_masters,
    "kahan": transforms.with_kahan_summation,
    "stochastic": transforms.with_stochastic_rounding,
    "bfloat16": lambda inner: transforms.with_stored_state(inner, "bfloat16"),
    "float16": lambda inner: transforms.with_stored_state(inner, "float16"),
    "float8": lambda inner: transforms.with_stored_state(inner, "float8_e4m3fn"),
    "int8": lambda inner: transforms.with_stored_state(inner, "int8", seed=3),
    "int8, nearest": lambda inner: transforms.with_stored_state(
        inner, [("mu", "*", "int8"), ("nu", "*", "float32")], rounding="nearest"),
    "clipping": lambda inner: optax.chain(transforms.clip_by_global_norm(1.0), inner),
    "all": lambda inner: transforms.mixed_precision(
        transforms.with_stored_state(inner, "int8"), "bfloat16", jmp.StaticLossScale(8.0),
        masters="split"),
}  # fmt: skip
NOT_FLOAT16 = ["split masters", "int8, nearest", "all"]
ON_MESHES = ["loss scale", "split masters", "kahan", "int8", "clipping", "all"]
CASES = [
    *[("one device", "mixed", name) for name in WITH if name not in NOT_FLOAT16],
    *[("one device", "many", "loss scale")],
    *[("one device", "matrices", name) for name in ("int8, nearest", "all", "split masters")],
    *[(place, "matrices", n) for place in ("auto", "explicit") for n in ON_MESHES],
]


def arrays(shapes, place):
    """Arrays of zeros, on a mesh of one device or of eight."""
    zeros = {name: jnp.zeros(shape, dtype) for name, (dtype, *shape) in SHAPES[shapes].items()}
    kind = AxisType.Explicit if place == "explicit" else AxisType.Auto
    sizes = (1, 1) if place == "one device" else (4, 2)
    mesh = jax.make_mesh(sizes, ("x", "y"), (kind,) * 2, devices=jax.devices()[: np.prod(sizes)])
    specs = dict.fromkeys(zeros, P()) if place == "one device" else SPECS
    return {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in zeros.items()}


def program(place, shapes, name):
    """The jaxpr that makes a state and updates it once."""
    tx, params = WITH[name](adam), arrays(shapes, place)

    def step(params, gradients):
        return tx.update(gradients, tx.init(params), params)

    return jax.make_jaxpr(step)(params, params)


def line_of(place, shapes, name):
    text = without_names(normal(program_text(program(place, shapes, name))), names_of_package())
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return f"{place}, {shapes}, {name}: {text.count(' = ')}, {digest}"


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    LIST.write_text("\n".join(line_of(*case) for case in CASES) + "\n")
