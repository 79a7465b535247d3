"""`memory_report`: how many bytes training holds in memory, and for which arrays.

It counts one step as a function of flat arrays: its state from shapes, its activations from the
residuals of a linearisation. XLA's own figures are of the compiled step.

`jax.vjp` returns a function whose leaves are the arrays that it holds, the residuals. In a trace,
each of them is a variable of a jaxpr: an argument, which is there anyway, or the result of an
equation, which is kept only for the backward pass. So the bytes are exact, and each array can be
followed to the equation that made it, into jits, loops, branches and rematerialised regions.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import optax
from jax.extend.core import JaxprEqn, Literal

from jmp import _jax_compat
from jmp._array_calls import ArrayCall, cotangent, is_trained, vjp_at
from jmp._messages import wrong
from jmp.autocasting._autocast import autocast
from jmp.autocasting._numbers import shape_of, size_of
from jmp.autocasting._propagation import Propagation, WayInside
from jmp.diagnostics._asked import asked_function, split_arguments
from jmp.diagnostics._places import path_of, users_line
from jmp.diagnostics._reports import Report, added_up, first_rows, size, table, totals
from jmp.dtypes import is_castable
from jmp.loss_scaling._gradients import pair_of
from jmp.policy import Policy
from jmp.transforms._wrapping import as_transformation
from jmp.trees import PyTree, is_array, stands_for_numbers

SHOWN = 20
ARRAYS = ("module", "source", "operation", "dtype", "shape", "times", "size")
BytesByDtype = dict[str, int]  # bytes by dtype


def memory_report(
    fun: Callable[..., Any],
    policy: str | Policy | None = None,
    *early: Any,
    optimizer: optax.GradientTransformation | None = None,
    argnums: int | Sequence[int] = 0,
    frozen: int | Sequence[int] = (),
    has_aux: bool = False,
    compiled: bool = True,
    **options: Any,
) -> Callable[..., "MemoryReport"]:
    """Returns a function that counts what a training step of `fun` holds, in bytes.

    Called with `fun`'s arguments it counts state, gradients and activations. Activations are the
    arrays that the linearisation of `fun` keeps for its backward pass, exactly; see `Residual`.
    Nothing is
    run: `jax.ShapeDtypeStruct` may stand for arrays.

    Args:
      fun: a loss, as for `jax.grad`.
      policy: counts `jmp.autocast(fun, policy)` instead; parameters stay as they are given.
      optimizer: an optax transformation, for the bytes of its state.
      argnums: which arguments are parameters. Only what their gradients need is kept.
      frozen: which arguments hold weights that are not trained, such as the backbone of a LoRA.
        They are counted in a row of their own, and their half copies as copies of parameters.
      has_aux: whether `fun` returns a pair, of which the first is differentiated.
      compiled: whether XLA compiles value and gradient, for its own figures. It compiles for the
        device that the arguments are on, or that the sharding of a `ShapeDtypeStruct` names.
      options: further options of `jmp.autocast`, such as `rules`; they need a policy.

    Returns: a function of `fun`'s arguments that returns a `MemoryReport`. Arguments that are no
      arrays reach `fun` as they are.

    Raises:
      TypeError: `fun` is no function, or its arguments were given in the first call; `optimizer` is
        no optax transformation; options without a policy; when called, with `has_aux`, a result
        that is no pair.
      ValueError: when called, `argnums` that name no argument, or none that holds floating arrays;
        `frozen` that names no argument, or a trained one.

    >>> def loss(w, x):
    ...     return jnp.mean(jnp.exp(x @ w))
    >>> w, x = jnp.ones((8, 4)), jnp.ones((16, 8))
    >>> report = memory_report(loss, "mixed_float16", compiled=False)(w, x)
    >>> report.parameter_bytes
    {'float32': 128}
    >>> report.activation_bytes  # x in half, the exponential in float32
    {'float16': 256, 'float32': 256}
    """
    call = "memory_report(fun, policy=policy)(*args)"
    function = asked_function(call, fun, early, policy, options)
    if optimizer is not None:
        optimizer = as_transformation(optimizer, "memory_report", "optimizer")
    if policy is not None:
        function = autocast(function, policy, **options)

    def count(*args: Any, **kwargs: Any) -> MemoryReport:
        args, kwargs = split_arguments(*args, **kwargs)
        call = ArrayCall(function, args, kwargs)
        structs = jax.eval_shape(lambda *leaves: leaves, *call.arrays)
        parameters = call.within(argnums, "memory_report")
        weights = call.within(frozen, "memory_report", "frozen")
        if weights.keys() & parameters.keys():
            expected = "arguments that are not among argnums: a trained one is not frozen"
            raise wrong(ValueError, "memory_report", frozen, expected, name="frozen")
        moving = list(call.floating_within(argnums, "memory_report"))
        # As `jax.grad` gives gradients: a tuple for several arguments.
        params = args[argnums] if isinstance(argnums, int) else tuple(args[i] for i in argnums)
        state = jax.eval_shape(optimizer.init, _trained(params)) if optimizer else ()

        # The loss, and the arrays of what is not differentiated.
        def loss(*arrays: Any) -> tuple[Any, list[Any]]:
            result = call(*arrays)
            result, aux = pair_of(result, "(loss, aux)") if has_aux else (result, None)
            return result, [leaf for leaf in jax.tree.leaves(aux) if is_array(leaf)]

        def step(*arrays: Any) -> Any:
            result, vjp, aux = vjp_at(loss, arrays, moving)
            return result, vjp(jax.tree.map(lambda x: cotangent(x, 1), result)), aux

        traced = jax.jit(step).trace(*call.arrays)
        temp, peak = _xla_bytes(traced) if compiled else (None, None)
        return MemoryReport(
            parameters=sum(structs[i].size for i in moving),
            parameter_bytes=_sizes([structs[i] for i in parameters]),
            gradient_bytes=_sizes(traced.out_info[1]),
            optimizer_bytes=_sizes(state),
            residuals=tuple(residuals(loss, call.arrays, moving, weights)),
            xla_temp_bytes=temp,
            xla_peak_bytes=peak,
            frozen_bytes=_sizes([structs[i] for i in weights]),
        )

    return count


def _trained(tree: PyTree) -> PyTree:
    """Returns a tree of arguments as an optimizer is given it: the shapes of what is trained.

    It has None for all other leaves: arrays of integers, what is no array, and Variables of nnx
    modules that are no parameters.
    """

    def struct(path: Any, leaf: Any) -> Any:
        if not (stands_for_numbers(leaf) and is_castable(leaf.dtype) and is_trained(path)):
            return None
        own_bytes = leaf.dtype.newbyteorder("=")  # NumPy's may be swapped
        return jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(own_bytes))

    return jax.tree_util.tree_map_with_path(struct, tree)


@dataclasses.dataclass(frozen=True)
class Residual:
    """An array kept for the backward pass, or several that agree in everything but their number.

    Attributes:
      module: path of modules or name scopes, "" at the top.
      source: "file:line" of the user's code.
      operation: the primitive that made it; "literal" for a number in the program, and "argument"
        for a second copy of an argument.
      dtype, shape: of one array; a loop keeps the values of all iterations in one array.
      of_parameters: whether it is computed only from parameters, frozen ones included, as their
        half copies are, so that it does not grow with the batch.
      times: how many there are.
      bytes: the bytes of all of them together.

    >>> row = Residual("mlp", "model.py:7", "tanh", "float16", (8, 4), False, times=3, bytes=192)
    >>> row.times, row.bytes
    (3, 192)
    """

    module: str
    source: str
    operation: str
    dtype: str
    shape: tuple[int, ...]
    of_parameters: bool
    times: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class MemoryReport(Report):
    """What `memory_report` counted; `print` shows it, `to_dict` gives the data. 1 MB is 10^6 bytes.

    Attributes:
      parameters: the number of elements of all parameters, P.
      parameter_bytes, gradient_bytes: by dtype; a gradient has its parameter's dtype.
      optimizer_bytes: the optimizer's state by dtype, float32 masters included.
      residuals: the arrays that are kept for the backward pass, in rows that add up exactly.
      xla_temp_bytes: what XLA's compiled value and gradient holds besides arguments and results;
        None if it was not compiled, or if the backend does not say.
      xla_peak_bytes: arguments, results and temp together.
      frozen_bytes: the arguments that were named as `frozen`, by dtype.

    >>> loss = lambda w, x: jnp.sum(jnp.sin(x * w))
    >>> report = memory_report(loss, compiled=False)(jnp.ones(4), jnp.ones(4))
    >>> report.parameters, report.gradient_bytes, report.activation_bytes  # the cosine
    (4, {'float32': 16}, {'float32': 16})
    """

    computed: ClassVar[tuple[str, ...]] = (
        "activations", "activation_bytes", "copy_bytes", "parts", "total_bytes",
    )  # fmt: skip
    parameters: int
    parameter_bytes: BytesByDtype
    gradient_bytes: BytesByDtype
    optimizer_bytes: BytesByDtype
    residuals: tuple[Residual, ...]
    xla_temp_bytes: int | None = None
    xla_peak_bytes: int | None = None
    frozen_bytes: BytesByDtype = dataclasses.field(default_factory=dict)

    @property
    def activations(self) -> int:
        """The number of elements kept for the backward pass, N, without copies of parameters."""
        rows = (row for row in self.residuals if not row.of_parameters)
        return sum(row.times * size_of(row.shape) for row in rows)

    @property
    def activation_bytes(self) -> BytesByDtype:
        """Bytes kept for the backward pass, by dtype, without copies of parameters."""
        return _bytes_of(row for row in self.residuals if not row.of_parameters)

    @property
    def copy_bytes(self) -> BytesByDtype:
        """Bytes kept that are computed only from parameters, such as half copies, by dtype."""
        return _bytes_of(row for row in self.residuals if row.of_parameters)

    @property
    def parts(self) -> dict[str, int]:
        """Bytes of each part of `total_bytes`."""
        sizes = {
            "parameters": self.parameter_bytes,
            "frozen parameters": self.frozen_bytes,
            "gradients": self.gradient_bytes,
            "optimizer": self.optimizer_bytes,
            "copies of parameters": self.copy_bytes,
            "activations": self.activation_bytes,
        }
        return {name: sum(size.values()) for name, size in sizes.items()}

    @property
    def total_bytes(self) -> int:
        """Bytes of everything counted, together; the batch is not counted."""
        return sum(self.parts.values())

    def __str__(self) -> str:
        cells = []
        for row in sorted(self.residuals, key=lambda row: -row.bytes):
            what = row.module, row.source, row.operation, row.dtype
            shape = "x".join(map(str, row.shape))
            cells.append((*what, shape, str(row.times), size(row.bytes)))
        title = "kept for the backward pass, most is kept first:"
        lines = first_rows(title, ARRAYS, cells, SHOWN, "residuals") if cells else []
        return "\n".join([compare_memory({"one step": self}), *lines])


def compare_memory(reports: Mapping[str, MemoryReport]) -> str:
    """Returns one table of several memory reports, a column each.

    Args:
      reports: what `memory_report` returned, by the names of the columns.

    Raises: TypeError for anything other than reports by name.

    >>> from jmp.diagnostics import memory_report
    >>> def loss(w, x):
    ...     return jnp.mean(jnp.exp(x @ w))
    >>> arguments = jnp.ones((8, 4)), jnp.ones((16, 8))
    >>> policies = ("float32", "mixed_float16")
    >>> reports = {p: memory_report(loss, p, compiled=False)(*arguments) for p in policies}
    >>> "N : P" in compare_memory(reports)
    True
    """
    are_reports = isinstance(reports, Mapping) and len(reports) > 0
    if not (are_reports and all(isinstance(r, MemoryReport) for r in reports.values())):
        by_name = "{'float32': report, 'mixed_float16': other}"
        expected = f"what memory_report(fun)(*args) returned, by name: {by_name}"
        raise wrong(TypeError, "compare_memory", reports, expected)
    columns = list(map(_column, reports.values()))
    rows = [(name, *(column[name] for column in columns)) for name in columns[0]]
    return table(("", *reports), [row for row in rows if any(row[1:])])


def _column(report: MemoryReport) -> dict[str, str]:
    """Returns what a column says, by row; "" for nothing."""
    return {
        **{name: size(number) for name, number in report.parts.items()},
        "total": size(report.total_bytes),
        "P, parameters": f"{report.parameters:,}",
        "N, activations kept": f"{report.activations:,}",
        "N : P": f"{report.activations / report.parameters:.3g}" if report.parameters else "",
        "XLA: temp": size(report.xla_temp_bytes),
        "XLA: peak of value and gradient": size(report.xla_peak_bytes),
    }


def _xla_bytes(traced: jax.stages.Traced) -> tuple[int | None, int | None]:
    """Compiles, and returns XLA's temp and peak; None for both if its backend does not say."""
    found = traced.lower().compile().memory_analysis()
    if found is None:
        return None, None
    # Not XLA's own peak, which leaves temp out on a CPU.
    temp = found.temp_size_in_bytes
    held = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    return temp, held + temp


def _sizes(tree: PyTree) -> BytesByDtype:
    sizes = totals((str(x.dtype), x.size * x.dtype.itemsize) for x in jax.tree.leaves(tree))
    return dict(sorted(sizes.items()))


def _bytes_of(rows: Iterable[Residual]) -> BytesByDtype:
    return dict(sorted(totals((row.dtype, row.bytes) for row in rows).items()))


# The residuals of a linearisation.


class Provenance(NamedTuple):
    """Where a value comes from."""

    module: str = ""
    source: str = ""
    operation: str = "literal"
    inputs: frozenset[str] = frozenset()  # "parameters", "data", both or neither
    depth: int = 0  # how many equations are around the one that made it

    def also_of(self, others: Iterable["Provenance"]) -> "Provenance":
        """Returns the provenance of a value that was computed from others, too."""
        return self._replace(inputs=self.inputs.union(*(other.inputs for other in others)))


LITERAL = Provenance()
# A branch fills in something for a residual of another platform: XLA keeps no room for it.
ELSEWHERE = Provenance(operation="platform")
FOLLOWED = {*_jax_compat.CALLS, "scan", "cond"}


def residuals(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    parameters: Iterable[int],
    frozen: Iterable[int] = (),
) -> list[Residual]:
    """Returns what `jax.vjp` of `function` keeps, besides arguments and closed-over arrays.

    The function returns a pair, of which the first is differentiated, with respect to the arguments
    at the positions `parameters`; those at `frozen` are parameters too. `jax.ShapeDtypeStruct` may
    stand for arrays.
    """
    positions = list(parameters)
    weights = {*positions, *frozen}
    leaves = lambda *arrays: jax.tree.leaves(vjp_at(function, arrays, positions)[1])
    jaxpr, _ = _jax_compat.open_jaxpr(jax.make_jaxpr(leaves)(*arguments))
    names = ["parameters" if i in weights else "data" for i in range(len(jaxpr.invars))]
    inputs = [Provenance("", "", "argument", frozenset([name])) for name in names]
    held = {*jaxpr.invars, *jaxpr.constvars}
    found = []
    for atom, made in zip(jaxpr.outvars, PROVENANCES.through(jaxpr, inputs), strict=True):
        is_given = bool(shape_of(atom)) if isinstance(atom, Literal) else atom in held
        if is_given or made == ELSEWHERE:
            continue  # an argument, an array that the function closes over, or nothing at all
        dtype, shape = atom.aval.dtype, tuple(atom.aval.shape)
        is_copy = made.inputs == {"parameters"}
        held_bytes = size_of(shape) * dtype.itemsize
        place = made.module, made.source, made.operation
        found.append(Residual(*place, str(dtype), shape, is_copy, times=1, bytes=held_bytes))
    return added_up(found, "times", "bytes")


def _of_results(
    equation: JaxprEqn,
    around: tuple[JaxprEqn, ...],
    operands: list[Provenance],
    inside: WayInside[Provenance],
) -> Sequence[Provenance]:
    """Returns the provenance of each result: an equation inside, if there is one."""
    name = equation.primitive.name
    if (branch := _branch_here(equation)) is not None:
        return PROVENANCES.through(branch, operands[1:], (*around, equation))
    # The index of a platform is known when the program is compiled.
    is_filling = name.startswith(("empty", "platform_index"))
    if is_filling or (operands and all(operand == ELSEWHERE for operand in operands)):
        return [ELSEWHERE] * len(equation.outvars)
    if name in FOLLOWED and (found := inside()):
        return found
    module, source = path_of((*around, equation)), users_line((*around, equation))
    if not (module or source):
        # Such as a cast of ours, which has the place of its operand.
        near = next((operand for operand in operands if operand.module or operand.source), LITERAL)
        module, source = near.module, near.source
    made = Provenance(module, source, name, depth=len(around)).also_of(operands)
    return [made] * len(equation.outvars)


def _one_of(choices: Sequence[Provenance], deciding: Sequence[Provenance]) -> Provenance:
    """Returns the provenance of a value that is one of several: see `Join` of `_propagation`."""
    if deciding:
        # A branch fills in values that it does not keep, which are computed from nothing.
        chosen = next((choice for choice in choices if choice.inputs), choices[0])
    else:
        # The turn before made the carries of a loop; among equal depths any order would do.
        chosen = max(choices, key=lambda made: (made.depth, made[:3]))
    return chosen.also_of((*choices, *deciding))


PROVENANCES = Propagation(_of_results, _one_of, lambda _: LITERAL)


def _branch_here(equation: JaxprEqn) -> Any:
    """Returns the branch of `lax.platform_dependent` that runs here; None for what is no such."""
    here = "cuda" if jax.default_backend() == "gpu" else jax.default_backend()
    platforms = _jax_compat.branches_platforms(equation.params) or ()
    pairs = zip(platforms, _jax_compat.inner_jaxprs(equation), strict=False)
    return next((branch for names, branch in pairs if {here, "default"} & set(names)), None)
