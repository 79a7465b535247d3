"""Targets: the passes for a kind of hardware, one file each; importing this registers them.

A new target is a file with a `HardwareTarget` that it registers, and its name below; start from
`gpu.py`. A new pass is a function in this folder, and a row in the tuple of each target that is to
have it, or in `_everywhere.py`, whose passes all have. A pass that is long, or that several targets
have, has a file of its own.
"""

from jmp.autocasting.targets import gpu, tpu

__all__ = ["gpu", "tpu"]
