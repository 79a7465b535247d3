"""Attention: found in the dataflow, and run by a platform's fused kernel if it has one."""

from jmp.autocasting.attention._fusing import fuse_attentions

__all__ = ["fuse_attentions"]
