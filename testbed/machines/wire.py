"""Reads what devices send each other in a program compiled for eight H200s or TPUs, without them.

How the wire is counted: bytes that one device receives in one step, of the algorithms in a ring. Of
n devices each receives (n - 1) / n of an array that is gathered, of one that is reduced and
scattered, and of one that goes all to all; an all-reduce is both of the first two; a permutation is
the array once. What stands in a loop counts once a turn, if `hlo.turns` knows their number. Of
branches all count.

In a program for TPUs collectives also stand inside fusions. One that runs beside other work is
begun in a fusion of its own, repeated inside the fusions of that work, and ended in another one: it
counts where it begins. What a TPU reduces and scatters is called an all-reduce in a fusion
`all-reduce-scatter`, which keeps one part of n. A gather beside the product that reads it, and a
scattered sum beside the product that makes it, may be a loop of permutations: on eight devices it
sends nine eighths of the array, where a ring needs seven.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from testbed.machines.gpus import facts_of_gpu
from testbed.machines.hlo import (
    ARRAY,
    FUSED,
    Computations,
    Instruction,
    array_bytes,
    parse_program,
    turns,
)
from testbed.machines.tpus import tpus

DEVICES = 8
MIB = 2**20
KINDS = {
    "all-gather": lambda received, n: received * (n - 1) / n,
    "all-reduce": lambda received, n: 2 * received * (n - 1) / n,
    "reduce-scatter": lambda received, n: received * (n - 1),  # its result is one part of n
    "all-to-all": lambda received, n: received * (n - 1) / n,
    "collective-permute": lambda received, n: received,
    "ragged-all-to-all": lambda received, n: received * (n - 1) / n,
    "collective-broadcast": lambda received, n: received,
}

# Their shape names what goes in, then what comes out.
IN_AND_OUT = frozenset({"all-gather-start", "all-to-all-start", "reduce-scatter-start"})

IS_BEGUN = 'custom_call_target="AsyncCollectiveStart"'
REDUCE_AND_SCATTER = "all-reduce-scatter"

CALLED = re.compile(r"(?:to_apply|condition|body|calls|(?:true|false)_computation)=%([\w.\-]+)")
BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
LISTED_GROUP = re.compile(r"replica_groups=\{\{([\d,]+)\}")
COUNTED_GROUPS = re.compile(r"replica_groups=\[\d+,(\d+)\]")
NAMED_GROUPS = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")
NAMED_AXIS = re.compile(r"'(\w+)'=(\d+)")


@dataclasses.dataclass(frozen=True)
class Sent:
    """An array that one collective moves.

    Attributes:
      kind: such as "all-gather".
      dtype: as HLO names it, such as "f16".
      bytes: that one device receives in one step, all turns of its loops together.
      elements: of the array that is gathered or reduced: of a reduce-scatter all parts together.
    """

    kind: str
    dtype: str
    bytes: float
    elements: int


def h200s(axes: Mapping[str, int], axis_type: AxisType = AxisType.Auto) -> Mesh:
    """Returns a mesh of H200s, such as of the axes `{"data": 8}`; eight to a machine."""
    return _mesh(_devices(math.prod(axes.values())), axes, axis_type)


def v5es(axes: Mapping[str, int], axis_type: AxisType = AxisType.Auto) -> Mesh:
    """Returns a mesh of eight TPUs, v5e."""
    return _mesh(tpus("v5e:2x4"), axes, axis_type)


def _mesh(devices: tuple[Any, ...], axes: Mapping[str, int], axis_type: AxisType) -> Mesh:
    shaped = np.array(devices).reshape(tuple(axes.values()))
    return Mesh(shaped, tuple(axes), axis_types=(axis_type,) * len(axes))


@functools.cache
def _devices(number: int) -> tuple[Any, ...]:
    machines, each = (number // DEVICES, DEVICES) if number > DEVICES else (1, number)
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=facts_of_gpu("h200"), topology=f"1x{machines}x{each}"
    )
    return tuple(topology.devices)


def wire(text: str) -> list[Sent]:
    """Returns what the collectives of an HLO program move."""
    computations, entry = parse_program(text)
    return _sent_by(entry, computations, 1)


def received(sent: list[Sent], kind: str = "", dtype: str = "") -> float:
    """Returns the MiB that a device receives in a step, of one kind or dtype if given."""
    chosen = (s for s in sent if kind in ("", s.kind) and dtype in ("", s.dtype))
    return sum(s.bytes for s in chosen) / MIB


def _sent_by(computation: str, computations: Computations, times: int) -> list[Sent]:
    found: list[Sent] = []
    for instruction in computations[computation]:
        kind = instruction.opcode.removesuffix("-start")
        if kind in KINDS:
            found += _arrays(kind, instruction, times)
            continue
        if instruction.opcode == "fusion":
            found += _sent_in_fusion(instruction, computations, times)
            continue
        inner = times
        if instruction.opcode == "while":
            inner *= turns(instruction, computations) or 1
        names = CALLED.findall(instruction.attributes)
        for branches in BRANCHES.findall(instruction.attributes):
            names += re.findall(r"%([\w.\-]+)", branches)
        for name in names:
            found += _sent_by(name, computations, inner)
    return found


def _sent_in_fusion(fusion: Instruction, computations: Computations, times: int) -> list[Sent]:
    """Returns the collectives that a fusion of a TPU begins, or those that are the whole of it."""
    (name,) = FUSED.findall(fusion.attributes)
    inside = [i for i in computations.get(name, []) if i.opcode in KINDS]
    if name.startswith(REDUCE_AND_SCATTER):
        sent = [s for i in inside for s in _arrays(i.opcode, i, times)]
        # An all-reduce is counted as two rounds; here the second one is left out.
        return [dataclasses.replace(s, kind="reduce-scatter", bytes=s.bytes / 2) for s in sent]
    if any(IS_BEGUN in i.attributes for i in computations.get(name, [])):
        return [s for i in inside for s in _arrays(i.opcode, i, times)]
    return []


def _arrays(kind: str, instruction: Instruction, times: int) -> list[Sent]:
    shape = instruction.shape
    arrays = ARRAY.findall(shape)
    if instruction.opcode in IN_AND_OUT:
        arrays = arrays[len(arrays) // 2 :]
    elif instruction.opcode == "collective-permute-start":
        arrays = arrays[1:2]
    devices = group_size(instruction.attributes)
    found = []
    for dtype, dimensions, _ in arrays:
        (size,) = array_bytes(f"{dtype}[{dimensions}]")
        elements = math.prod(int(d) for d in dimensions.split(",") if d)
        whole = elements * devices if kind == "reduce-scatter" else elements
        found.append(Sent(kind, dtype, times * KINDS[kind](size, devices), whole))
    return found


def group_size(attributes: str) -> int:
    """Returns how many devices take part in a collective.

    >>> group_size("replica_groups={{0,1},{2,3}}"), group_size("replica_groups=[2,4]<=[8]")
    (2, 4)
    >>> group_size("replica_groups=mesh['a'=2,'b'=4] {'b'}")
    4
    """
    if found := LISTED_GROUP.search(attributes):
        return len(found[1].split(","))
    if found := COUNTED_GROUPS.search(attributes):
        return int(found[1])
    if found := NAMED_GROUPS.search(attributes):
        sizes = {name: int(size) for name, size in NAMED_AXIS.findall(found[1])}
        return math.prod(sizes[name] for name in re.findall(r"'(\w+)'", found[2]))
    return DEVICES  # all of them; of a permutation, whose number does not count
