"""Attention: found in the dataflow, and run by a platform's fused kernel if it has one.

`_matching` finds it, with axes as labels (`_axes`). `_kernels` says how a kernel is to compute it,
and `_fusing` makes the step. `_cudnn` runs on CUDA, `_pallas` on TPUs.
"""

from jmp.autocasting.attention._cudnn import CUDNN
from jmp.autocasting.attention._fusing import fuse_attentions
from jmp.autocasting.attention._pallas import PALLAS

__all__ = ["CUDNN", "PALLAS", "fuse_attentions"]
