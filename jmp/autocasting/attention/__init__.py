"""Attention: found in the dataflow, and run by a platform's fused kernel if it has one."""

from jmp.autocasting.attention._cudnn import CUDNN
from jmp.autocasting.attention._fusing import fuse_attentions
from jmp.autocasting.attention._pallas import PALLAS

__all__ = ["CUDNN", "PALLAS", "fuse_attentions"]
