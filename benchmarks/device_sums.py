"""What a sum of gradients over devices costs, and how far it is from that of float64.

    python -m benchmarks.device_sums    # needs no GPU
    .venv-targets/bin/python -m benchmarks.device_sums --tpu    # after `make targets`; no TPU

Bytes and memory are those of programs compiled for H200s: a step of eight layers of 1024 x 1024 in
float16, 4,096 rows, parameters in shards or replicated. Errors are measured on as many CPU devices:
each has a gradient of its own, and the error is that of the sum of these float16 numbers. A CPU
adds up bfloat16 in float32, and would show no error of a half sum. With `--tpu` the same steps are
compiled in bfloat16 for eight TPUs, and cycles are counted too.
"""

import argparse
import functools
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jmp
from benchmarks.processes import ROOT
from testbed.machines.gpus import compile_for_placed
from testbed.machines.tpus import compile_placed_for_tpus
from testbed.machines.wire import h200s, v5es, wire
from testbed.relative_errors import relative_error

P = PartitionSpec
DEVICES = (2, 8, 64)
LAYERS, WIDTH, ROWS = 8, 1024, 4096
FORMS: dict[str, dict[str, str]] = {
    "half": {},
    "float32": {"reduce_dtype": "float32", "send_dtype": "float32"},
    "exchange": {"reduce_dtype": "float32", "send_dtype": "float16"},
    "returned": {"reduce_dtype": "float32", "send_dtype": "float16", "return_dtype": "float16"},
}
PLACES = {"fsdp": P("data"), "dp": P()}


def forms_of(place: str) -> list[str]:
    return [form for form in FORMS if place == "dp" or form != "returned"]


def counted(place: str, form: str, devices: int, tpu: bool = False) -> dict[str, float]:
    """Returns bytes received, temp bytes and kernels (of TPUs cycles) of a step."""
    mesh, spec = (v5es if tpu else h200s)({"data": devices}), PLACES[place]
    half = "bfloat16" if tpu else "float16"
    dtypes = {name: dtype.replace("float16", half) for name, dtype in FORMS[form].items()}

    def loss(weights: Any, x: Any) -> Any:
        for w in jmp.gather_params(weights, "data", half, **dtypes):
            x = jnp.tanh(x @ w)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    step = jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=(spec, P("data")), out_specs=spec)
    placed = lambda shape, spec, dtype: jax.ShapeDtypeStruct(
        shape, dtype, sharding=NamedSharding(mesh, spec)
    )
    weights = [placed((WIDTH, WIDTH), spec, jnp.float32)] * LAYERS
    arguments = weights, placed((ROWS, WIDTH), P("data"), half)
    program: Any = (compile_placed_for_tpus if tpu else compile_for_placed)(step, *arguments)
    return {
        "received": sum(sent.bytes for sent in wire(program.text)),
        "temp": program.temp_bytes,
        **({"cycles": program.cycles} if tpu else {"kernels": program.kernels}),
    }


def parts(kind: str, devices: int) -> np.ndarray:
    """Returns a float16 gradient for each device."""
    found = np.random.default_rng(0).normal(size=(devices, 64, 64))
    if kind == "one large":
        found[0] *= 2.0**12
    elif kind == "cancelling":  # what is left is as large as a 256th of what cancels
        found[devices // 2 :] = -found[: devices // 2] * (1 + 2.0**-8)
    return found.astype(np.float16)


KINDS = ("random", "one large", "cancelling")


def error(form: str, kind: str, devices: int) -> float:
    """Returns the norm of what a sum lacks of the exact one, over the norm of that."""
    mesh = jax.make_mesh((devices,), ("data",), (AxisType.Auto,), devices=jax.devices()[:devices])
    gradients = parts(kind, devices)

    def loss(w: Any, part: Any) -> Any:
        whole = jmp.gather_params(w, "data", "float16", **FORMS[form])
        return jnp.sum(whole.astype(jnp.float32) * part[0].astype(jnp.float32))

    specs = (P("data"), P("data"))
    step = jax.jit(jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=specs, out_specs=P("data")))
    found = np.asarray(step(jnp.zeros(gradients.shape[1:]), gradients), np.float64)
    exact = gradients.astype(np.float64).sum(0)
    return relative_error(found, exact)


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.device_sums", description=__doc__)
    default = ROOT / "results" / "device_sums.json"
    parser.add_argument("--output", type=pathlib.Path, default=default)
    parser.add_argument("--devices", type=int, nargs="+", default=list(DEVICES))
    parser.add_argument("--tpu", action="store_true")
    arguments = parser.parse_args(given)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(arguments.devices))
    output = arguments.output
    found = json.loads(output.read_text()) if output.exists() else {}
    if arguments.tpu:
        found["v5e"] = {
            place: {form: counted(place, form, 8, tpu=True) for form in forms_of(place)}
            for place in PLACES
        }
    else:
        each = lambda measure: {str(number): measure(number) for number in arguments.devices}
        found["jax"] = jax.__version__
        found["counted"] = {
            place: {form: each(functools.partial(counted, place, form)) for form in forms_of(place)}
            for place in PLACES
        }
        found["errors"] = {
            form: {kind: each(functools.partial(error, form, kind)) for kind in KINDS}
            for form in forms_of("fsdp")
        }
    output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
