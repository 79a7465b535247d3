"""Sweeps autocast over code that nobody here wrote, and says what fails.

Two sources: the harnesses with which JAX tests its own primitives, and the public functions of
jax.numpy, jax.nn, jax.scipy and jax.lax, with arguments found by trying templates in float32. Each
runs behind a product, in front of one and between two, with its gradient where float32 has one, in
float32 and under autocast in both half types, all in one compiled program.

A case fails if autocast raises where float32 does not; if a result has another dtype or shape; if
it is not finite where float32 is, within the half type's range; or if it is not close. Operands are
numbers that both half types hold, and products multiply by one, so that whatever differs was
computed in half: no comparison, index or rank may differ at all.

    JAX_PLATFORMS=cpu PYTHONPATH=. .venv-test/bin/python benchmarks/op_sweep.py --shard 1/2

Each shard appends to a file in `build/op_sweep/`, and skips what stands there already; the table is
of all shards so far.
"""

import argparse
import collections
import functools
import importlib
import inspect
import itertools
import json
import pathlib
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from tabulate import tabulate

import jmp

HALVES = {"mixed_float16": jnp.float16, "mixed_bfloat16": jnp.bfloat16}
BUILD = pathlib.Path("build/op_sweep")
RESULTS = pathlib.Path("results/op_sweep.json")

# Roundings of the half type that a result may be off, as a part of its largest entry.
ROUNDINGS = 16
# Elements of an operand: more take long, and show nothing more.
LARGEST = 1 << 13
# What cannot be closer, and why.
EXPECTED = {
    "harness approx_top_k_large": "entries are equal, and any of them may be taken",
    "jax.lax.linalg.qdwh": "the number of iterations, which one rounding of float32 decides",
    "jax.scipy.special.expn": "of an order that is an array, jax.grad(jax.jit(expn)) fails as well",
    "jax.numpy.linalg.lstsq": "the system has a solution, and what is left over is roundings",
}


# A case's name and how to make it, which takes time.
Named = tuple[str, Callable[[], "Case"]]


class Case(NamedTuple):
    """A function of float32 arrays, and arrays that it takes; without them, why there are none."""

    name: str
    group: str
    fun: Callable[..., Any]
    arrays: list[np.ndarray]
    untried: str = ""


# The products around a function.


@functools.cache
def identity() -> jax.Array:
    """Returns a matrix that counts as a weight: one made inside a program would be a constant."""
    with jax.ensure_compile_time_eval():
        return jnp.eye(2)


def product(x: Any) -> Any:
    """Multiplies an array by one, as a matrix product; each entry by itself, so that NaN stays.

    Twice, since one product of inputs stays float32 if a sine reads it; beside zeros, since a sum
    over an axis of length one is a multiplication.
    """
    if not x.size:
        return x
    beside_zeros = jnp.pad(jnp.reshape(x, (-1, 1)), ((0, 0), (0, 1)))
    return jnp.reshape((beside_zeros @ identity() @ identity())[:, 0], x.shape)


def behind(fun: Callable[..., Any]) -> Callable[..., Any]:
    """The function of products."""
    return lambda *xs: fun(*map(product, xs))


def in_front(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Products of the function's float32 results."""

    def wrapped(*xs: Any) -> Any:
        is_float32 = lambda x: getattr(x, "dtype", None) == np.float32
        return jax.tree.map(lambda x: product(x) if is_float32(x) else x, fun(*xs))

    return wrapped


PLACES: dict[str, Callable[..., Any]] = {
    "behind": behind,
    "in front": in_front,
    "between": lambda fun: in_front(behind(fun)),
}


def with_gradient(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Returns results and the gradient of a weighted sum of them."""

    def total(xs: Any) -> Any:
        results = fun(*xs)
        terms = [jnp.zeros(())]
        for leaf in jax.tree.leaves(results):
            if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
                weights = (np.arange(np.size(leaf)) % 5 - 1.5).reshape(np.shape(leaf)) / 2
                sums = jnp.sum(leaf * weights.astype(np.float32))
                terms.append(jnp.real(sums) + jnp.imag(sums))
        return sum(terms), results

    def both(*xs: Any) -> Any:
        (_, results), gradient = jax.value_and_grad(total, has_aux=True)(xs)
        return results, gradient

    return both


def without_gradient(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Returns results alone, as `with_gradient` does."""
    return lambda *xs: (fun(*xs), ())


# One case.


def check(
    case: Case, policies: Iterable[str] = tuple(HALVES), places: Iterable[str] = tuple(PLACES)
) -> dict[str, Any]:
    """Runs one case; returns what was tried and a list of failures, or why it was not tried."""
    report = {"name": case.name, "group": case.group}
    if case.untried:
        return {**report, "untried": case.untried}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        differentiate = with_gradient
        try:
            jax.eval_shape(with_gradient(behind(case.fun)), *case.arrays)
        except Exception:
            differentiate = without_gradient
        found = _failures(case, differentiate, list(itertools.product(policies, places)))
    if isinstance(found, str):
        return {**report, "untried": found}
    return {**report, "gradient": differentiate is with_gradient, "failures": found}


def _failures(case: Case, differentiate: Any, ways: list[tuple[str, str]]) -> list[str] | str:
    # Products multiply by one: in float32 they may be left out.
    programs = {"float32": differentiate(case.fun)}
    for policy, place in ways:
        program = jmp.autocast(PLACES[place](case.fun), policy)
        programs[f"{policy} {place}"] = differentiate(program)
    try:
        results = _run(programs, case.arrays)
    except Exception:  # by themselves, to see which
        try:
            results = _run({"float32": programs["float32"]}, case.arrays)
        except Exception as error:
            return f"float32 fails: {type(error).__name__}"
    failures = []
    for name, program in programs.items():
        try:
            got = results[name] if name in results else _run({name: program}, case.arrays)[name]
        except Exception as error:
            line = str(error).strip().splitlines() or [""]
            failures.append(f"{name}: {type(error).__name__}: {line[0][:200]}")
            continue
        half = HALVES.get(name.split()[0], jnp.float32)
        found = _differences(got, results["float32"], half)
        failures += [f"{name}: {difference}" for difference in found]
    return failures


def _run(programs: dict[str, Any], arrays: list[np.ndarray]) -> dict[str, Any]:
    """Compiles the programs as one, and runs it."""
    together = jax.jit(lambda *xs: {name: program(*xs) for name, program in programs.items()})
    return jax.tree.map(lambda x: x if _is_key(x) else np.asarray(x), together(*arrays))


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.extended)


def _differences(got: Any, expected: Any, half: Any) -> Iterator[str]:
    """Yields what is wrong with results and gradients."""
    for what, found, wanted in zip(("result", "gradient"), got, expected, strict=True):
        if jax.tree.structure(found) != jax.tree.structure(wanted):
            yield f"{what}: another structure"
            continue
        leaves = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
        for number, (x, y) in enumerate(leaves):
            difference = _difference(x, y, half, 1 if what == "result" else 2)
            if difference:
                yield f"{what} {number}: {difference}"


def _difference(x: Any, y: Any, half: Any, factor: int) -> str:
    if (x.dtype, x.shape) != (y.dtype, y.shape):
        return f"{x.dtype}{list(x.shape)} instead of {y.dtype}{list(y.shape)}"
    if _is_key(y) or not y.size:
        return ""
    if not jnp.issubdtype(y.dtype, jnp.inexact):
        count = int((x != y).sum())
        return f"{count} of {y.size} entries differ" if count else ""
    within = np.isfinite(y) & (np.abs(y) <= float(jnp.finfo(half).max))
    if not np.isfinite(x[within]).all():
        return f"not finite where float32 is {y[within & ~np.isfinite(x)][0]:.3g}"
    if not within.any():
        return ""
    x, y = x[within], y[within]
    error, largest = np.abs(x - y).max(), max(np.abs(y).max(), 1e-4)
    bound = ROUNDINGS * factor * float(jnp.finfo(half).eps)
    return f"off by {error / largest:.2g} of {largest:.2g}" if error > bound * largest else ""


# The cases: JAX's harnesses.


def rounded(x: Any) -> np.ndarray:
    """Rounds to what float16 and bfloat16 both hold."""
    x = np.asarray(x, np.float32)
    return x.astype(np.float16).astype(ml_dtypes.bfloat16).astype(np.float32)


def _is_float32(x: Any) -> bool:
    return getattr(x, "dtype", None) == np.float32


def case_of(name: str, group: str, fun: Callable[..., Any], args: Any) -> Case:
    """A case of the float32 arrays among `args`, at any depth; the others are held as they are."""
    leaves, structure = jax.tree.flatten(args)
    arrays = [rounded(leaf) for leaf in leaves if _is_float32(leaf)]

    def of_arrays(*xs: Any) -> Any:
        following = iter(xs)
        merged = [next(following) if _is_float32(leaf) else leaf for leaf in leaves]
        return fun(*jax.tree.unflatten(structure, merged))

    return Case(name, group, of_arrays, arrays, "" if arrays else "no float32 operand")


def harness_cases(per_group: int) -> Iterator[Named]:
    """Yields JAX's own harnesses with float32 operands, at most `per_group` for each primitive."""
    argv, sys.argv = sys.argv, sys.argv[:1]  # its import reads the command line
    from jax._src.internal_test_util import test_harnesses

    sys.argv = argv
    groups: dict[str, list[Any]] = {}
    for harness in test_harnesses.all_harnesses:
        descriptors = [getattr(d, "dtype", None) for d in harness.arg_descriptors]
        if harness.dtype == np.float32 or np.float32 in descriptors:
            groups.setdefault(harness.group_name, []).append(harness)
    for harnesses in groups.values():
        # Neighbours in the list differ little: take some from all over it.
        places = np.linspace(0, len(harnesses) - 1, min(per_group, len(harnesses))).astype(int)
        for place, harness in enumerate(harnesses):
            make = functools.partial(_harness_case, harness, place in places)
            yield f"harness {harness.fullname}", make


def _harness_case(harness: Any, is_wanted: bool) -> Case:
    name, group = f"harness {harness.fullname}", harness.group_name
    if not is_wanted:
        return Case(name, group, harness.fun, [], "enough others of this primitive")
    if not harness.filter("cpu"):
        return Case(name, group, harness.fun, [], "JAX does not have it on a CPU")
    args = harness.dyn_args_maker(np.random.RandomState(0))
    case = case_of(name, group, harness.dyn_fun, list(args))
    is_large = any(array.size > LARGEST for array in case.arrays)
    return case._replace(untried="large operands") if is_large else case


# The cases: public functions.

MODULES = (
    "jax.numpy", "jax.numpy.linalg", "jax.numpy.fft", "jax.nn", "jax.lax", "jax.lax.linalg",
    "jax.ops", "jax.image", "jax.scipy.special", "jax.scipy.linalg", "jax.scipy.signal",
    "jax.scipy.ndimage", "jax.scipy.fft", "jax.scipy.integrate", "jax.scipy.interpolate",
    "jax.scipy.cluster.vq", "jax.scipy.sparse.linalg", "jax.scipy.spatial.transform",
    *(f"jax.scipy.stats{name}" for name in (
        "", ".bernoulli", ".beta", ".betabinom", ".binom", ".cauchy", ".chi2", ".dirichlet",
        ".expon", ".gamma", ".gennorm", ".geom", ".gumbel_l", ".gumbel_r", ".laplace", ".logistic",
        ".multinomial", ".multivariate_normal", ".nbinom", ".norm", ".pareto", ".poisson", ".t",
        ".truncnorm", ".uniform", ".vonmises", ".wrapcauchy",
    )),
)  # fmt: skip
# Files, settings, and what hands out types or functions.
NOT_TRIED = frozenset(
    "save savez load fromfile from_dlpack frombuffer fromstring fromiter get_printoptions "
    "set_printoptions printoptions dtype finfo iinfo issubdtype result_type promote_types "
    "can_cast isdtype broadcast_shapes einsum_path array_repr array_str ufunc astype_dtype".split()
)

_numbers = np.random.default_rng(0)
# Symmetric, positive definite, entries between zero and one.
MATRIX = rounded(_numbers.uniform(0.05, 0.3, (4, 4)))
MATRIX = (MATRIX + MATRIX.T) / 2 + np.diag(rounded([0.5, 0.625, 0.5625, 0.6875]))
OTHER = rounded(_numbers.uniform(0.1, 0.9, (4, 4)))
VECTOR, OTHER_VECTOR = OTHER[0], OTHER[1]
THIRD = rounded(_numbers.uniform(0.1, 0.9, (4, 4)))
CUBE = rounded(_numbers.uniform(-0.9, 0.9, (2, 4, 4)))
IMAGE = rounded(_numbers.uniform(-0.9, 0.9, (1, 4, 4, 4)))
SCALAR = np.float32(0.5)
INDICES = np.array([0, 2, 1, 0])
COLUMNS = np.array([[0], [2], [1], [0]])
COUNTS = np.array([1.0, 2.0, 3.0, 4.0], np.float32)
TRUTHS = np.array([True, False, True, True])
ROWS = jax.lax.ScatterDimensionNumbers((1,), (0,), (0,))
GATHERED = jax.lax.GatherDimensionNumbers((1,), (0,), (0,))


class Keywords(dict):
    """The last of a template's arguments, if some go by name."""


# Arguments, tried in this order: the first that float32 takes are kept.
TEMPLATES: list[tuple[Any, ...]] = [
    (MATRIX,),
    (MATRIX, OTHER),
    (MATRIX, OTHER, THIRD),
    (VECTOR,),
    (VECTOR, OTHER_VECTOR),
    (VECTOR, VECTOR, COUNTS),
    (MATRIX, VECTOR),
    (VECTOR, MATRIX),
    (MATRIX, 1),
    (MATRIX, 2, 1),
    (1, MATRIX),
    (MATRIX, (1,)),
    (MATRIX, (1, 0)),
    (MATRIX, (4, 4)),
    (MATRIX, (2, 8)),
    ([MATRIX, OTHER],),
    ((MATRIX, OTHER), 0),
    ((MATRIX, True), OTHER),
    (MATRIX, INDICES),
    (MATRIX, COLUMNS, 1),
    (MATRIX, INDICES, 1),
    (MATRIX, INDICES, OTHER),
    (INDICES, MATRIX),
    (INDICES, VECTOR),
    (VECTOR, INDICES, Keywords(num_segments=4)),
    (TRUTHS, MATRIX),
    (TRUTHS, MATRIX, OTHER),
    (MATRIX > 0.2, MATRIX, OTHER),
    (COUNTS, COUNTS, VECTOR),
    (COUNTS, COUNTS, COUNTS, VECTOR),
    (INDICES, COUNTS, VECTOR),
    (INDICES, 4, VECTOR),
    (INDICES, 4, COUNTS, COUNTS),
    (VECTOR, -COUNTS, COUNTS),
    (VECTOR, OTHER_VECTOR, MATRIX),
    (CUBE,),
    (CUBE, CUBE),
    (CUBE, 1),
    (IMAGE,),
    (IMAGE, (1, 8, 8, 4), "linear"),
    (IMAGE, IMAGE, IMAGE),
    (IMAGE, IMAGE, (1, 1), "SAME"),
    (VECTOR, [COUNTS - 1], 1),
    (MATRIX, [INDICES, INDICES], 1),
    (MATRIX, np.float32),
    (SCALAR,),
    (SCALAR, SCALAR),
    (SCALAR, SCALAR, 4),
    (SCALAR, 2 * SCALAR, 3 * SCALAR),
    (MATRIX, MATRIX[0, 0], 0),
    (MATRIX, SCALAR, ((1, 1, 0), (0, 1, 0))),
    (MATRIX, (0, 1), (2, 3)),
    (MATRIX, (1, 1), (2, 2)),
    (MATRIX, 0, 2, 1),
    (MATRIX, 1, 0, 2),
    (MATRIX, OTHER, (0, 0)),
    (MATRIX, VECTOR, 1, 0),
    (MATRIX, OTHER[:1], 1, 0),
    (MATRIX, (2, 4, 4), (1, 2)),
    (MATRIX, 5, 3),
    (MATRIX, 0, np.int32),
    (MATRIX, INDICES, 0, 0),
    (MATRIX, np.zeros((), np.float32), jax.lax.add, (0,)),
    (np.float32(-np.inf), MATRIX, OTHER),
    (MATRIX, OTHER, (((1,), (0,)), ((), ()))),
    (MATRIX, CUBE[:, :, :2], np.array([1, 3], np.int32)),
    (CUBE, MATRIX[:2], Keywords(axis=1)),
    (jnp.sin, MATRIX),
    (jnp.sum, 0, MATRIX),
    (jnp.sum, MATRIX, (0,)),
    (jnp.add, MATRIX, OTHER),
    (lambda x, y: (x + y, x * y), VECTOR[0], VECTOR),
    (jnp.dot, MATRIX, VECTOR),
    (MATRIX, [MATRIX > 0.5], [jnp.sin, jnp.cos]),
    ([MATRIX > 0.5, MATRIX > 0.2], [MATRIX, OTHER]),
    ("ij,jk", MATRIX, OTHER),
    (np.True_, jnp.sin, jnp.cos, MATRIX),
    (1, [jnp.sin, jnp.cos], MATRIX),
    (0, 3, lambda _, x: jnp.sin(x), MATRIX),
    (lambda x: x.sum() > 1, jnp.sin, MATRIX),
    (jnp.multiply, MATRIX),
    (MATRIX, COLUMNS, jnp.tanh, ROWS, Keywords(update_shape=(4, 4))),
    (MATRIX, COLUMNS, OTHER, ROWS),
    (MATRIX, COLUMNS, GATHERED, (1, 4)),
    (MATRIX, np.zeros((), np.float32), jax.lax.add, (2, 2), (1, 1), "VALID"),
    (IMAGE, (2, 2), (1, 1), "SAME"),
    (MATRIX, 0, 1),
    (MATRIX, (2, 2), 1),
    (MATRIX[None], (0,)),
    (MATRIX, SCALAR, Keywords(inplace=False)),
    (MATRIX, INDICES[:, None], OTHER[:, :1], Keywords(axis=1, inplace=False)),
    (MATRIX[:3, :3], OTHER[:3, :3]),
    (VECTOR, OTHER_VECTOR, 2),
    (VECTOR, Keywords(size=3)),
    (VECTOR, OTHER_VECTOR, Keywords(size=3)),
    (TRUTHS, MATRIX, Keywords(size=4)),
    (INDICES, [VECTOR, OTHER_VECTOR, VECTOR]),
    (INDICES, VECTOR, Keywords(length=4)),
    (VECTOR, OTHER_VECTOR[1:], Keywords(eigvals_only=True)),
    (VECTOR, OTHER_VECTOR, VECTOR, MATRIX),
    (VECTOR, OTHER_VECTOR[1:]),
    ((MATRIX, np.arange(4)), VECTOR),
    (2, VECTOR),
    (3, 2, VECTOR),
    (COUNTS, 2, 3),
    (jax.random.key(0), MATRIX),
    (jax.random.key(0), MATRIX, (4, 4)),
]


def function_cases() -> Iterator[Named]:
    """Yields the public functions of `MODULES`, once each, with arguments that float32 takes."""
    seen: set[Any] = set()
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        for name, fun in sorted(vars(module).items()):
            if name.startswith("_") or inspect.isclass(fun) or not callable(fun):
                continue
            if name in NOT_TRIED or id(fun) in seen:
                continue
            seen.add(id(fun))
            full_name = f"{module_name}.{name}"
            yield full_name, functools.partial(_function_case, full_name, module_name, fun)


def _function_case(name: str, module: str, fun: Callable[..., Any]) -> Case:
    for template in TEMPLATES:
        keywords = template[-1] if isinstance(template[-1], Keywords) else {}
        args = template[:-1] if keywords else template
        case = case_of(name, module, functools.partial(fun, **keywords), list(args))
        if not case.arrays:
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                results = jax.tree.leaves(jax.eval_shape(case.fun, *case.arrays))
        except Exception:
            continue
        if any(hasattr(leaf, "dtype") for leaf in results):
            return case
    return Case(name, module, fun, [], "no template of arguments fits")


# The command.


SOURCES: dict[str, Callable[[int], Iterator[Named]]] = {
    "harnesses": harness_cases,
    "functions": lambda _: function_cases(),
}


def run(
    cases: Iterable[Named],
    shard: int,
    shards: int,
    file: pathlib.Path,
    scale: float,
    places: Iterable[str],
) -> None:
    """Runs one shard of the cases, but those done already, and appends to a file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    done = {report["name"] for report in _reports(file.parent)}
    for number, (name, make) in enumerate(cases):
        if number % shards != shard - 1 or name in done:
            continue
        case = make()
        case = case._replace(arrays=[x * np.float32(scale) for x in case.arrays])
        report = check(case, places=places)
        with file.open("a") as lines:
            lines.write(json.dumps(report) + "\n")
        for failure in report.get("failures", ()):
            print(f"{case.name}: {failure}", flush=True)
        if number % 50 == 0:
            jax.clear_caches()


def _reports(folder: pathlib.Path) -> list[dict[str, Any]]:
    files = sorted(folder.glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def summary(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns how many were tried by source, why others were not, and every failure."""
    sources = collections.defaultdict(collections.Counter)
    untried: dict[str, list[str]] = {}
    failures = {}
    for report in reports:
        is_harness = report["name"].startswith("harness ")
        counts = sources["harnesses" if is_harness else report["group"]]
        if "untried" in report:
            counts["not tried"] += 1
            untried.setdefault(report["untried"], []).append(report["name"])
            continue
        counts["tried"] += 1
        counts["with a gradient"] += report["gradient"]
        if report["failures"]:
            why = "".join(w for name, w in EXPECTED.items() if report["name"].startswith(name))
            counts["expected" if why else "failed"] += 1
            failures[report["name"]] = {"why": why, "failures": report["failures"]}
    return {
        "jax": jax.__version__,
        "sources": {name: dict(counts) for name, counts in sorted(sources.items())},
        "not tried": {why: len(names) for why, names in sorted(untried.items())},
        "names not tried": {
            why: sorted(names) for why, names in sorted(untried.items()) if "enough" not in why
        },
        "failures": dict(sorted(failures.items())),
    }


def table(found: dict[str, Any]) -> str:
    """Returns the summary as tables of text."""
    columns = ["tried", "with a gradient", "failed", "expected", "not tried"]
    rows = [
        [source, *(counts.get(column, 0) for column in columns)]
        for source, counts in found["sources"].items()
    ]
    rows.append(["together", *(sum(row[i + 1] for row in rows) for i in range(len(columns)))])
    parts = [tabulate(rows, ["source", *columns], tablefmt="github")]
    parts.append(
        tabulate(found["not tried"].items(), ["not tried because", "cases"], tablefmt="github")
    )
    for name, failure in found["failures"].items():
        parts.append("\n  ".join([f"{name} ({failure['why'] or 'FAILED'})", *failure["failures"]]))
    return "\n\n".join(parts)


def main() -> None:
    """Runs one shard, then writes and prints what all shards have found so far."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shard", default="1/1", help="which part of the cases, such as 1/2")
    parser.add_argument("--per-primitive", type=int, default=8, help="harnesses of one primitive")
    parser.add_argument("--source", default="", choices=list(SOURCES), help="one of the two alone")
    parser.add_argument("--scale", type=float, default=1, help="a power of two, times all operands")
    parser.add_argument("--places", nargs="+", default=list(PLACES), choices=list(PLACES))
    parser.add_argument("--only", default="", help="cases whose name contains this, not recorded")
    options = parser.parse_args()
    jax.config.update("jax_disable_most_optimizations", True)
    sources = [options.source] if options.source else list(SOURCES)
    cases = itertools.chain(*(SOURCES[source](options.per_primitive) for source in sources))
    if options.only:
        for name, make in cases:
            if options.only in name:
                print(check(make()), flush=True)
        return
    shard, shards = map(int, options.shard.split("/"))
    folder = BUILD / f"scale {options.scale:g}"
    file = folder / f"{options.source or 'all'} {shard} of {shards}.jsonl"
    run(cases, shard, shards, file, options.scale, options.places)
    found = summary(list({report["name"]: report for report in _reports(folder)}.values()))
    if options.scale == 1:
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))


if __name__ == "__main__":
    main()
