"""What calls change in modules of Flax nnx: all of it is written back, or nothing.

Flax empties a module before it writes it anew, and refuses to write a Variable inside another trace
than the one it was made in. So a change that cannot be written is refused before, and whatever else
is raised in between leaves modules and Variables as they were.
"""

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from flax import errors, nnx

from jmp.adapters._norms import FLOAT32_POLICY
from jmp.policy import Policy
from jmp.trees import cast_leaf

SHOWN = 4  # Variables in an error


class Contents(NamedTuple):
    """What a module, an optimizer or a Variable holds, to be compared with what it holds later."""

    graph: Any
    arrays: dict[str, list[Any]]  # by the path of a Variable; one may hold a tuple that grows
    structures: list[Any]

    @classmethod
    def of(cls, node: Any) -> "Contents":
        """Returns what `node` holds now."""
        graph, state = nnx.split([node])
        arrays, structures = {}, []
        for (_, *path), variable in nnx.to_flat_state(state):
            arrays["/".join(map(str, path))], structure = jax.tree.flatten(variable)
            structures.append(structure)
        return cls(graph, arrays, structures)

    def changes(self, before: "Contents") -> tuple[str, ...] | None:
        """Returns the paths of the Variables that changed; None if attributes came or went."""
        if (self.graph, self.structures) != (before.graph, before.structures):
            return None
        return tuple(
            path
            for path, arrays in self.arrays.items()
            if not all(map(operator.is_, arrays, before.arrays[path]))
        )


def check_writable(node: Any, changed: Sequence[str] | None) -> None:
    """Raises `flax.errors.TraceContextError` if what a call changed cannot be written to `node`.

    Args:
      node: a module, an optimizer or a Variable.
      changed: what `Contents.changes` returned.
    """
    frozen = {
        "/".join(map(str, path)): variable
        for (_, *path), variable in nnx.to_flat_state(nnx.state([node]))
        if not _is_writable(variable)
    }
    refused = list(frozen) if changed is None else [path for path in changed if path in frozen]
    if not refused:
        return
    named = [f"{type(frozen[path]).__name__} {path}".rstrip() for path in refused[:SHOWN]]
    more = f" and {len(refused) - SHOWN} more" if len(refused) > SHOWN else ""
    what = "attributes" if changed is None else ", ".join(named) + more
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


def cast_in_place(
    variables: Sequence[tuple[str, nnx.Variable[Any], tuple[type, ...]]],
    policy_for: Callable[[str, tuple[type, ...]], Policy] | None = None,
) -> None:
    """Casts statistics to float32, and parameters as `policy_for(path, classes)` stores them.

    Args:
      variables: each with its path and the classes around it.
      policy_for: None leaves parameters as they are.
    """
    with whole_if_it_fails(*(variable for _, variable, _ in variables)):
        for path, variable, classes in variables:
            if isinstance(variable, nnx.BatchStat):
                policy = FLOAT32_POLICY
            elif policy_for is not None and isinstance(variable, nnx.Param):
                policy = policy_for(path, classes)
            else:
                continue
            value = variable.get_value()
            cast = cast_leaf(value, policy.param_dtype)
            if cast is not value:
                variable.set_value(cast)
