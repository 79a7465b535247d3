"""What moves between devices: `gather`, and along which mapped axes values differ.

`_axes.py` says along which axes a parameter lies, and which axes are mapped; `_gather.py` moves the
parameters, and gives them their gradients back.
"""

from jmp.sharding._gather import gather

__all__ = ["gather"]
