"""The modelled limit of a compiled program: what the data sheet of an H200 allows its kernels.

A model in milliseconds ("model ms"), never a time: nothing here was run. It is the sum over the
kernels of a program of

    max(bytes / bandwidth, operations / peak) + what launching a kernel costs

so that a measured step can be compared with it, and programs with each other. Bytes and kernels are
those of `testbed.machines.hlo`, which says how they are counted.

* Operations are those of library calls, two for a multiplication and its addition: matrix products
  of cuBLAS, convolutions and attention of cuDNN. Of anything else, fusions above all, the bytes
  decide.
* A convolution and both of its gradients take as many: for each element of its output a filter,
  also where that lies over padding. Strides leave holes in a gradient, which are not multiplied.
* Attention forward takes two products, of queries with keys and of probabilities with values;
  its gradient takes five, since the probabilities were not stored and are computed once more. A
  causal mask over as many queries as keys halves them. The softmax, padded keys and windows change
  nothing.
* A library call is one launch, also where the library takes several kernels for it.
* Caches are not modelled: an H200 holds 50 MB in its second-level cache, so a kernel that reads
  what the last one wrote may take less than its bytes say. Otherwise kernels take longer: none
  reaches the peak, and the matrices of a model are smaller than those of a data sheet.
"""

import json
import math
import re
from collections.abc import Callable
from typing import Any

from testbed.machines.hlo import ARRAY, Kernel, kernels

# NVIDIA's data sheet of the H200 SXM: bytes a second, and operations a second without sparsity.
BANDWIDTH = 4.8e12
PEAKS = {"f16": 989e12, "bf16": 989e12, "tf32": 494e12, "f32": 67e12}

# Seconds a kernel. XLA's own cost model, by which it decides what to fuse, takes one microsecond
# (`kKernelLaunchOverhead` in its `gpu_performance_model_base.h`) and calls it an estimate.
LAUNCH = 1e-6

TARGET = re.compile(r'custom_call_target="(__cu(?:blas|dnn)[^"]*)"')
OUTPUT_FEATURES = re.compile(r"dim_labels=\w+_(\w+)->")
PRECISION = re.compile(r'operand_precision"?[=:]\s*[\[{]([^\]}]*)')

Dimensions = tuple[int, ...]


def modelled_limit(text: str) -> dict[str, float]:
    """Returns the model milliseconds of a scheduled HLO program, in three parts; the sum is all.

    "bytes" is what the kernels take whose bytes decide, "operations" what those take whose
    operations do, and "launches" what launching all of them costs.
    """
    parts = {"bytes": 0.0, "operations": 0.0, "launches": 0.0}
    for kernel in kernels(text):
        moving, computing = kernel.bytes_moved / BANDWIDTH, 0.0
        if count := operations(kernel):
            computing = count / PEAKS[unit(kernel)]
        decides = "operations" if computing > moving else "bytes"
        parts[decides] += kernel.times * max(moving, computing)
        if not kernel.instruction.opcode.endswith("-done"):
            parts["launches"] += kernel.times * LAUNCH
    return {part: 1e3 * seconds for part, seconds in parts.items()}


def operations(kernel: Kernel) -> int:
    """Returns the floating-point operations of a library call; 0 of any other kernel."""
    target = TARGET.search(kernel.instruction.attributes)
    if target is None:
        return 0
    for start, count in OPERATIONS.items():
        if target[1].startswith(start):
            return count(kernel)
    raise ValueError(
        f"Got a call of {target[1]!r}; expected one whose operations are known: "
        f"{', '.join(OPERATIONS)}. Count it in benchmarks/_roofline.py."
    )


def unit(kernel: Kernel) -> str:
    """Returns the key of `PEAKS` for a library call: the dtype of its operands, or "tf32".

    XLA multiplies float32 in TF32 unless the program asks for the highest precision.
    """
    dtype, _ = _arrays(kernel.operands[0])[0]
    if dtype not in PEAKS:
        raise ValueError(
            f"Got a library call on {dtype}; expected one of {', '.join(PEAKS)}. "
            "Add its peak in benchmarks/_roofline.py."
        )
    precision = PRECISION.search(kernel.instruction.attributes)
    is_exact = precision is not None and "highest" in precision[1].lower()
    return "tf32" if dtype == "f32" and not is_exact else dtype


def _product(kernel: Kernel) -> int:
    left, result = _dimensions(kernel.operands[0]), _dimensions(kernel.instruction.shape)
    numbers = _backend_config(kernel)["gemm_backend_config"]["dot_dimension_numbers"]
    summed = math.prod(left[int(axis)] for axis in numbers["lhs_contracting_dimensions"])
    return 2 * math.prod(result) * summed


def _convolution(kernel: Kernel) -> int:
    return _of_filter(kernel, kernel.operands[1], kernel.instruction.shape)


def _input_gradient(kernel: Kernel) -> int:
    return _of_filter(kernel, kernel.operands[1], kernel.operands[0])


def _filter_gradient(kernel: Kernel) -> int:
    return _of_filter(kernel, kernel.instruction.shape, kernel.operands[1])


def _of_filter(kernel: Kernel, kernel_shape: str, output_shape: str) -> int:
    """Counts by the filter and the output of the convolution, or by what has their shapes."""
    weights, outputs = _dimensions(kernel_shape), _dimensions(output_shape)
    labels = OUTPUT_FEATURES.search(kernel.instruction.attributes)
    if labels is None:
        raise ValueError(f"Got a convolution without dim_labels: {kernel.instruction.name}.")
    return 2 * math.prod(outputs) * math.prod(weights) // weights[labels[1].index("o")]


def _attention(kernel: Kernel) -> int:
    keys, values = _head_width(kernel, 0), _head_width(kernel, 2)
    if re.search(r'custom_call_target="[^"]*Backward', kernel.instruction.attributes):
        # The gradients of queries, of keys and the scores once more; of values, of probabilities.
        return _pairs(kernel) * 2 * (3 * keys + 2 * values)
    return _pairs(kernel) * 2 * (keys + values)


def _pairs(kernel: Kernel) -> int:
    """Returns how often a query meets a key, over all heads."""
    config = _backend_config(kernel)["cudnn_fmha_backend_config"]
    pairs = math.prod(map(int, config["intermediate_tensor_shape"]["dimensions"]))
    return pairs // 2 if "CAUSAL" in config["mask_type"] else pairs


def _head_width(kernel: Kernel, operand: int) -> int:
    return _dimensions(kernel.operands[operand])[-1]


# By how the name of the call starts.
OPERATIONS: dict[str, Callable[[Kernel], int]] = {
    "__cublas$": _product,
    "__cudnn$convBackwardInput": _input_gradient,
    "__cudnn$convBackwardFilter": _filter_gradient,
    "__cudnn$convForward": _convolution,
    "__cudnn$convBiasActivationForward": _convolution,
    "__cudnn$fmha": _attention,
}


def _arrays(shape: str) -> list[tuple[str, Dimensions]]:
    """Returns dtype and dimensions of every array in a shape, tuples flattened."""
    return [
        (dtype, tuple(int(size) for size in sizes.split(",") if size))
        for dtype, sizes, _ in ARRAY.findall(shape)
    ]


def _dimensions(shape: str) -> Dimensions:
    """Returns the dimensions of the first array in a shape, which in a result is what it is for."""
    return _arrays(shape)[0][1]


def _backend_config(kernel: Kernel) -> Any:
    text = kernel.instruction.attributes
    return json.JSONDecoder().raw_decode(text, text.index("backend_config=") + 15)[0]
