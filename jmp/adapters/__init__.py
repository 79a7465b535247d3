"""Adapters make an unmodified model of a framework compute with a policy; one framework a file.

Each has an `autocast` for the models of its framework, which calls `jmp.autocast`: products are
half, norms float32, and rules name exceptions.

  - `autocast(model.apply, policy)` (linen): a function of variables. Returns that function.
  - `autocast(model, policy)` (nnx), `autocast(network, policy)` (haiku): a model, or a pair
    of functions. Returns another one.
  - `autocast(loss_fn, policy)` (nnx, equinox): any function whose arguments are models, such as a
    loss. Returns that function.

The first two cast the results of a call to the policy's output dtype. The third reads the compute
dtype of the policy, and results keep their dtypes.

`linen` and `nnx` need flax, `equinox` and `haiku` theirs. Each is loaded at its first use, so that
it needs only its own framework: `jmp.adapters.linen` works after `import jmp`, and so does `from
jmp.adapters import linen`.
"""

from typing import TYPE_CHECKING

from jmp import _lazy

if TYPE_CHECKING:
    from jmp.adapters import equinox as equinox
    from jmp.adapters import haiku as haiku
    from jmp.adapters import linen as linen
    from jmp.adapters import nnx as nnx
else:  # type checkers would take every misspelt name for an attribute
    __getattr__, __dir__ = _lazy.loaded_when_touched(
        __name__, {"linen": "flax", "nnx": "flax", "equinox": "equinox", "haiku": "haiku"}
    )
