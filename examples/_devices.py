"""The devices of an example, in one process or in several, and what lies on which of them."""

import argparse
import os
from typing import Any

import jax
import numpy as np
from _common import positive
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

# What a training may be resumed with: another number of devices rounds sums in another order.
DEVICE_OPTIONS = "fsdp devices processes process_id coordinator".split()


def add_device_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("devices and processes").add_argument
    add("--fsdp", action="store_true", help="shard parameters and the optimizer's state, too")
    add("--devices", type=positive(int), help="of each process; default: all. CPUs are split up")
    add("--processes", type=_processes, help="how many run this command; 'auto' asks Slurm or MPI")
    add("--process-id", type=int, help="which of the processes this is, from 0")
    add("--coordinator", help="HOST:PORT at which process 0 may listen")


def _processes(text: str) -> Any:
    return text if text == "auto" else positive(int)(text)


def check_processes(arguments: argparse.Namespace) -> None:
    """Raises ValueError for processes that could never meet."""
    processes, own, address = arguments.processes, arguments.process_id, arguments.coordinator
    if processes == "auto" or (processes, own, address) == (None, None, None):
        return
    if None in (processes, own, address):
        raise ValueError(
            f"Got --processes {processes}, --process-id {own} and --coordinator {address}; "
            f"expected all three, such as --processes {processes or 2} --process-id 0 "
            "--coordinator localhost:9876, the address of process 0 in all of them."
        )
    host, _, port = address.rpartition(":")
    if not (0 <= own < processes and host and port.isdigit()):
        raise ValueError(
            f"Got --process-id {own} and --coordinator {address}; expected an id from 0 to "
            f"{processes - 1}, in each process another, and the address of process 0 as HOST:PORT."
        )


def start_devices(arguments: argparse.Namespace) -> Mesh:
    """Waits for the other processes, if there are any, and returns all devices in a row.

    Raises: ValueError if a process has too few devices, or if they do not divide the rows.
    """
    # Who has split the CPU up already has the first of its parts taken.
    if arguments.devices and "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", arguments.devices)
    if arguments.processes:
        processes = None if arguments.processes == "auto" else arguments.processes
        jax.distributed.initialize(arguments.coordinator, processes, arguments.process_id)
    devices = []  # of process 0, then of process 1, ...: each has consecutive rows of a batch
    for process in range(jax.process_count()):
        own = [device for device in jax.devices() if device.process_index == process]
        wanted = arguments.devices or len(own)
        if len(own) < wanted:
            raise ValueError(
                f"Got --devices {wanted}, but process {process} has {len(own)}; expected as many "
                "or fewer, or no --devices to take all."
            )
        devices += own[:wanted]
    if arguments.batch_size % len(devices):
        above = -(-arguments.batch_size // len(devices)) * len(devices)
        raise ValueError(
            f"Got --batch-size {arguments.batch_size} for {len(devices)} devices; expected a "
            f"multiple of {len(devices)}, as each takes an equal part: --batch-size {above}, or "
            "fewer --devices."
        )
    return Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,))


def place_params(shapes: Any, mesh: Mesh, sharded: bool) -> Any:
    """Returns a tree of shapes that say where each parameter lies.

    Args:
      sharded: each matrix along the largest of its axes that the devices divide. Vectors are whole
        on each device, and so is everything if False.
    """

    def place(leaf: Any) -> jax.ShapeDtypeStruct:
        fitting = [axis for axis, size in enumerate(leaf.shape) if size % mesh.size == 0]
        spec = P()
        if sharded and fitting and leaf.ndim > 1:
            spec = P(*[None] * max(fitting, key=lambda axis: leaf.shape[axis]), "data")
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(place, shapes)


def own_part(rows: np.ndarray) -> np.ndarray:
    """Returns the rows of a batch that belong to the devices of this process."""
    return rows.reshape(jax.process_count(), -1, *rows.shape[1:])[jax.process_index()]


def join_parts(rows: np.ndarray, mesh: Mesh) -> jax.Array:
    """Returns the batch of which each process gives its own rows, spread over all devices."""
    return jax.make_array_from_process_local_data(NamedSharding(mesh, P("data")), rows)
