"""Attention: found in the dataflow, and run by cuDNN's fused kernel where there is one."""

from jmp.autocasting.attention._cudnn import attend
from jmp.autocasting.attention._fusing import fuse_attentions

__all__ = ["attend", "fuse_attentions"]
