"""Targets: the passes for a kind of hardware, one file each; importing this registers them.

A new target is a file with a `HardwareTarget` and `register_target`, and its name below; `gpu.py` is
one to start from. A new pass is a function in this folder, and a row in the tuple of each target
that is to have it. A pass that is long, or that several targets have, has a file of its own.
"""

from jmp.autocasting.targets import gpu, tpu

__all__ = ["gpu", "tpu"]
