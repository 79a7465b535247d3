"""Targets: the passes for a kind of hardware, one file each; importing this registers them.

A new pass is a function here, and a row in the tuple of each target that is to have it. Passes that
more than one target has, or that are long, have a file of their own.
"""

from jmp.autocasting.targets import gpu, tpu

__all__ = ["gpu", "tpu"]
