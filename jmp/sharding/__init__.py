"""Values on several devices: `gather_params`, and along which mapped axes values differ.

`_axes.py` says which axes are mapped, and along which of them a value differs; `_gather.py` moves
parameters, and adds up their gradients over devices.
"""

from jmp.sharding._gather import gather_params

__all__ = ["gather_params"]
