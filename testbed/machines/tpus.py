"""Compiles programs for TPUs on a machine without one, and reads what XLA says of them.

It takes libtpu, in an environment of its own: where people train, JAX would look for a TPU. Nothing
runs. XLA's compiler for TPUs says of each instruction how many cycles it estimates: these are added
up here, those of a loop's body once for each of its turns. It counts no cycles inside a custom
call, such as a Pallas kernel. Bytes are those of the device's memory; `hlo.py` says how they and
the turns are counted.
"""

import dataclasses
import functools
import os
import re
import time
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from testbed.machines.hlo import (
    Computations,
    Instruction,
    called_by,
    count,
    named,
    parse_program,
    turns,
)

TPUS = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "7x": "tpu7x:2x2x1"}
CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
UNKNOWN = 2**60  # XLA writes a number near 2**63 where it has no estimate


@dataclasses.dataclass(frozen=True)
class TpuProgram:
    """What the compiler says of one program.

    Attributes:
      text: the optimised program in HLO text.
      bytes_moved: bytes read from and written to the memory of the device (HBM).
      cycles: as XLA estimates them.
      temp_bytes: memory held for intermediate values.
      loops_of_unknown_turns: these count as one turn, in bytes and cycles.
      compile_seconds: CPU seconds of XLA, of all threads.
    """

    text: str
    bytes_moved: int
    cycles: int
    temp_bytes: int
    loops_of_unknown_turns: int
    compile_seconds: float


def compile_for_tpu(
    target: str,
    function: Callable[..., Any],
    *arguments: Any,
    donate_argnums: int | tuple[int, ...] = (),
) -> TpuProgram:
    """Compiles `function` for one TPU.

    Args:
      target: one of `TPUS`.
      function: a function that `jax.jit` accepts.
      *arguments: pytrees of arrays or `jax.ShapeDtypeStruct`; only shapes and dtypes are read.
      donate_argnums: positions of the arguments whose memory the results may take over.
    """
    sharding = SingleDeviceSharding(tpus(TPUS[target])[0])
    specs = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        jax.eval_shape(lambda *leaves: leaves, *arguments),
    )
    return compile_placed_for_tpus(function, *specs, donate_argnums=donate_argnums)


def compile_placed_for_tpus(
    function: Callable[..., Any], *arguments: Any, **jit_options: Any
) -> TpuProgram:
    """Compiles `function` for the TPUs that its arguments are placed on.

    Args:
      function: a function that `jax.jit` accepts.
      *arguments: pytrees of `jax.ShapeDtypeStruct` with shardings, as on a mesh of `wire.v5es`.
      **jit_options: such as `out_shardings` and `donate_argnums`.

    Returns: the program of one device and its figures.
    """
    traced = jax.jit(function, **jit_options).trace(*arguments)
    lowered = traced.lower(lowering_platforms=("tpu",))
    begun = time.process_time()
    compiled = lowered.compile()
    compile_seconds = time.process_time() - begun
    text = compiled.as_text()
    counted = count(text)
    return TpuProgram(
        text=text,
        bytes_moved=counted["bytes_moved"],
        cycles=estimated_cycles(text),
        temp_bytes=compiled.memory_analysis().temp_size_in_bytes,
        loops_of_unknown_turns=counted["loops_of_unknown_turns"],
        compile_seconds=compile_seconds,
    )


@functools.cache
def tpus(topology: str) -> tuple[Any, ...]:
    """Returns the devices of a topology, such as "v5e:2x4"."""
    # libtpu asks the network where it runs, and may be loaded by one process at a time otherwise.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    found = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    return tuple(found.devices)


def estimated_cycles(text: str) -> int:
    """Returns the cycles that XLA estimates for an HLO program."""
    computations, entry = parse_program(text)
    return _cycles_of(entry, computations)


def _cycles_of(name: str, computations: Computations) -> int:
    return sum(_cycles(instruction, computations) for instruction in computations[name])


def _cycles(instruction: Instruction, computations: Computations) -> int:
    if instruction.opcode == "while":
        times = turns(instruction, computations) or 1
        return times * _cycles_of(named("body", instruction), computations)
    found = CYCLES.search(instruction.attributes)
    own = int(found[1]) if found and int(found[1]) < UNKNOWN else 0
    called = [_cycles_of(name, computations) for name in called_by(instruction)]
    # Of branches one runs.
    return own + (max(called) if instruction.opcode == "conditional" else sum(called))
