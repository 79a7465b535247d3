"""What moves between devices: `gather`, and along which mapped axes values differ.

`_gather.py` reads what the user gave and says for each parameter along which axes it is gathered;
`_shard_map.py` and `_explicit.py` move it, and give it its gradient back; `_axes.py` asks JAX which
axes are mapped.
"""

from jmp.sharding._gather import gather

__all__ = ["gather"]
