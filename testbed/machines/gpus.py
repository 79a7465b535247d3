"""Compiles programs for GPUs on a machine without one, and counts what they do.

XLA's CUDA compiler needs no device, only the facts of one (`facts/`) and the `jax-cuda12-pjrt`
wheel. It gives the optimised, scheduled program that the GPU would run: which kernels, on which
dtypes, in how much memory. Nothing is tuned on a device, so nothing here speaks of time. The
machine code of the kernels, which XLA makes last, nobody reads: `cuda/` stands for CUDA's tools and
makes none, which saves a third of the CPU time and the installation of CUDA.

`hlo.py` says how the figures are counted.

Programs that call cuSOLVER (`jnp.linalg.cholesky` and its like) do not compile here: their handlers
are registered by the full CUDA plugin only.
"""

import contextlib
import dataclasses
import functools
import math
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
from jax._src.cudnn import fused_attention_stablehlo as cudnn_attention
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from testbed.machines.hlo import count

FACTS = pathlib.Path(__file__).with_name("facts")
GPUS = ("h200", "h100", "a100", "l40s", "b200")  # the one that most tests count on first

CUDNN_VERSION = 91000  # 9.10, as in the hardware facts
# A part of the keys of JAX's caches: what is traced as if there were cuDNN is not taken elsewhere.
_cudnn_version = jax.make_user_context(None)

# Triton's matrix products are chosen by timing them on a device; without one cuBLAS is the stable
# answer.
COMPILER_OPTIONS = {
    "xla_gpu_enable_triton_gemm": False,
    "xla_gpu_cuda_data_dir": str(pathlib.Path(__file__).with_name("cuda")),
}


@dataclasses.dataclass(frozen=True)
class Program:
    """What the compiler says of one program; `hlo.py` says how each figure is counted.

    Attributes:
      text: the optimised, scheduled program in HLO text.
      bytes_moved: bytes read and written by the kernels.
      kernels: instructions that launch work on the device, copies included.
      copies: `copy` and `copy-start` instructions.
      conditionals: `conditional` instructions; at each the host waits for the device.
      loops_of_unknown_turns: these count as one turn.
      temp_bytes: memory held for intermediate values, workspaces of library calls included.
      compile_seconds: CPU seconds of XLA, of all threads; the one figure that is not repeated.
    """

    text: str
    bytes_moved: int
    kernels: int
    copies: int
    conditionals: int
    loops_of_unknown_turns: int
    temp_bytes: int
    compile_seconds: float = dataclasses.field(default=0, compare=False)

    def figures(self, *names: str) -> dict[str, int]:
        """Returns some attributes by their names."""
        return {name: getattr(self, name) for name in names}


def compile_for_gpu(
    target: str,
    function: Callable[..., Any],
    *arguments: Any,
    donate_argnums: int | tuple[int, ...] = (),
) -> Program:
    """Compiles `function` for one GPU and counts what it does.

    Args:
      target: one of `GPUS`.
      function: a function that `jax.jit` accepts; it may be jitted already.
      *arguments: pytrees of arrays or `jax.ShapeDtypeStruct`; only shapes and dtypes are read.
      donate_argnums: positions of the arguments whose memory the results may take over. A donation
        on an already jitted `function` is lost in the outer jit: name it here.

    Returns: the program and its figures.
    """
    sharding = one_gpu(target)
    specs = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=sharding, weak_type=leaf.weak_type
        ),
        jax.eval_shape(lambda *leaves: leaves, *arguments),
    )
    return compile_for_placed(function, *specs, donate_argnums=donate_argnums)


compile_for_h200 = functools.partial(compile_for_gpu, "h200")


def compile_for_placed(
    function: Callable[..., Any], *arguments: Any, **jit_options: Any
) -> Program:
    """Compiles `function` for the GPUs that its arguments are placed on.

    Args:
      function: a function that `jax.jit` accepts.
      *arguments: pytrees of `jax.ShapeDtypeStruct` with shardings, as on a mesh of `wire.h200s`.
      **jit_options: such as `out_shardings` and `donate_argnums`.

    Returns: the program of one device and its figures.
    """
    with as_if_cudnn():
        traced = jax.jit(function, **jit_options).trace(*arguments)
        lowered = traced.lower(lowering_platforms=("cuda",))
    begun = time.process_time()
    with _nothing_stored():
        compiled = lowered.compile(compiler_options=COMPILER_OPTIONS)
    seconds = time.process_time() - begun
    text = compiled.as_text()
    temp = compiled.memory_analysis().temp_size_in_bytes
    return Program(text=text, temp_bytes=temp, compile_seconds=seconds, **count(text))


@contextlib.contextmanager
def as_if_cudnn() -> Iterator[None]:
    """Traces cuDNN's attention on a machine without cuDNN; it can be compiled, but not run.

    `jax.nn.dot_product_attention(..., implementation="cudnn")` asks for cuDNN's version while it is
    traced, and raises RuntimeError where there is none. Here the answer is 9.10. All other checks
    of JAX stay: the dtype has to be half, a head at most 128 wide (256 on a device that JAX sees to
    be a Hopper), and for a gradient the sequences of even length.

    What is traced inside is not taken from JAX's caches outside, nor the other way round. For one
    thread at a time: others see the answer too.
    """
    answer = mock.patch.object(cudnn_attention, "check_cudnn_version", lambda: CUDNN_VERSION)
    with answer, _cudnn_version(CUDNN_VERSION):
        yield


@contextlib.contextmanager
def _nothing_stored() -> Iterator[None]:
    """Keeps programs out of JAX's compilation cache: without a GPU they cannot be read again."""
    option = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, option)
    jax.config.update(option, math.inf)
    try:
        yield
    finally:
        jax.config.update(option, before)


@functools.cache
def one_gpu(target: str = "h200") -> NamedSharding:
    """Returns where the arguments of a program for one GPU lie."""
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=facts_of_gpu(target), topology="1x1x1"
    )
    return NamedSharding(topologies.make_mesh(topology, (1,), ("x",)), PartitionSpec())


def facts_of_gpu(target: str) -> str:
    """Returns what XLA asks of a device."""
    return (FACTS / f"{target}.textproto").read_text()
