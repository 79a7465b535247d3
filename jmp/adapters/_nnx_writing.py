"""What a call changes in modules of Flax nnx is written back as a whole or not at all.

Flax empties a module before it writes it anew, and refuses to write a Variable inside another trace
than the one it was made in. So what a call changes is found by comparison (`HeldByModule`), a
change that cannot be written is refused before (`check_writable`), and whatever else is raised in
between leaves modules and Variables as they were (`whole_if_it_fails`).
"""

import contextlib
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
from flax import errors, nnx

from jmp._messages import first_few


class HeldByModule(NamedTuple):
    """What a module, an optimizer or a Variable holds, to be compared with what it holds later."""

    structure: Any
    arrays: dict[str, list[Any]]  # by the path of a Variable, which may hold a tuple of them

    @classmethod
    def of(cls, node: Any) -> "HeldByModule":
        """Returns what `node` holds now."""
        graph, state = nnx.split([node])
        arrays = {path: jax.tree.leaves(held) for path, held in _variables_in(state).items()}
        return cls((graph, jax.tree.structure(state)), arrays)

    def changes(self, before: "HeldByModule") -> tuple[str, ...] | None:
        """Returns the paths of the Variables that changed; None if attributes came or went."""
        if self.structure != before.structure:
            return None
        return tuple(
            path
            for path, arrays in self.arrays.items()
            if not all(map(operator.is_, arrays, before.arrays[path]))
        )


def _variables_in(state_of_list: Any) -> dict[str, nnx.Variable[Any]]:
    """Returns the Variables in the state of a list of one node, by their paths in the node."""
    flat = nnx.to_flat_state(state_of_list)
    return {"/".join(map(str, path)): variable for (_, *path), variable in flat}


def check_writable(node: Any, changed: Sequence[str] | None) -> None:
    """Raises `flax.errors.TraceContextError` if what a call changed cannot be written to `node`.

    Args:
      node: a module, an optimizer or a Variable.
      changed: what `HeldByModule.changes` returned.
    """
    variables = _variables_in(nnx.state([node]))
    written = variables if changed is None else changed
    frozen = [path for path in written if not _is_writable(variables[path])]
    if not frozen:
        return
    named = [f"{type(variables[path]).__name__} {path}".rstrip() for path in frozen]
    what = "attributes" if changed is None else first_few(named, len(named), most=4)
    raise errors.TraceContextError(
        f"A call changes {what} of {type(node).__name__}, which comes from outside of the trace "
        "(jax.jit, jax.grad, jax.make_jaxpr) that the call is in: the change cannot be written "
        "back. Nothing was changed. Make the model an argument, under nnx.jit or nnx.grad; or call "
        "model.eval() first, if it is to be evaluated."
    )


def _is_writable(variable: nnx.Variable[Any]) -> bool:
    try:
        variable.set_raw_value(variable.get_raw_value())
    except errors.TraceContextError:
        return False
    return True


@contextlib.contextmanager
def whole_if_it_fails(*nodes: Any) -> Iterator[None]:
    """Leaves modules, optimizers and Variables as they were if what is inside raises."""
    attributes, variables = [], []
    for _, node in nnx.iter_graph(nodes):
        if isinstance(node, nnx.Variable):
            variables.append((node, node.get_raw_value(), node.get_metadata()))
        elif isinstance(node, nnx.Pytree):
            attributes.append((node, dict(vars(node))))
    try:
        yield
    except BaseException:
        for node, before in attributes:
            vars(node).clear()
            vars(node).update(before)
        for variable, value, metadata in variables:
            if variable.get_raw_value() is not value:
                variable.set_raw_value(value)
            if variable.get_metadata() != metadata:
                variable.set_metadata(metadata)
        raise
