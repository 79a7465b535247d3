"""Where the programs of `benchmarks.plan_sample` come from, and how each is drawn.

A source is a table of programs, or programs that have numbers. Only public addresses of jmp stand
here and in what this imports, because the same programs are lowered by other states of it.
"""

import functools
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from testbed import (
    float8_programs,
    gpt2,
    models,
    op_cases,
    position_cases,
    published_models,
    random_graphs,
    random_programs,
)
from testbed.planned import MODULES as PLANNED


class Program(NamedTuple):
    """A float32 function, and the options that autocast may get.

    Attributes:
      fun: what a user writes.
      args: arrays or their shapes.
      scopes: patterns of its name scopes.
      written: the options that it was written for.
      has_attention: whether attention is in it.
      is_float8: whether it is large enough that float8 is drawn more often.
    """

    fun: Callable[..., Any]
    args: tuple[Any, ...]
    scopes: Sequence[str] = ()
    written: dict[str, Any] | None = None
    has_attention: bool = False
    is_float8: bool = False


class Drawn(NamedTuple):
    """A program of a source with the policy and the options of autocast."""

    source: str
    name: str
    program: Program
    policy: str
    options: dict[str, Any]
    has_report: bool


Makers = dict[str, Callable[[], Program]]  # by name; what takes time is made when it is drawn


class Source(NamedTuple):
    """Programs by name, or by number, and how many of 3,000 they are.

    Attributes:
      has_reports: whether each program has a report, or every third: of a large program a report
        takes longer than the program and its gradient.
    """

    share: int
    table: Callable[[], Makers] | None = None
    numbered: Callable[[int], Program] | None = None
    has_reports: bool = True


# The models.

WIDE_BATCH = 256
SCOPES_OF_LINEN = ("*Dense*", "*Norm*", "*Attention*", "*Embed*")


def of_models() -> Makers:
    made: Makers = {}
    for model in models.MODELS:
        made[f"{model.name}, small"] = functools.partial(_model, model)
        # What the losses of these two close over is made by running the model.
        is_run = model.name in ("resnet", "haiku_resnet")
        large = _model_with_a_wide_batch if is_run else _large_model
        made[f"{model.name}, large"] = functools.partial(large, model)
    for layers in (1, 2):
        made[f"gpt2 of {layers}"] = functools.partial(_gpt2, layers)
    return made


def _of_loss(loss: Any, params: Any, batch: Any) -> Program:
    return Program(loss, (params, *batch), scopes=SCOPES_OF_LINEN, has_attention=True)


@functools.cache
def _model(model: models.Model) -> Program:
    return _of_loss(*model.make(**model.small))


@functools.cache
def _model_with_a_wide_batch(model: models.Model) -> Program:
    program = _model(model)
    wide = lambda x: jax.ShapeDtypeStruct((WIDE_BATCH, *x.shape[1:]), x.dtype)
    return program._replace(args=(program.args[0], *map(wide, program.args[1:])))


@functools.cache
def _large_model(model: models.Model) -> Program:
    losses = []

    def shapes() -> Any:
        loss, params, batch = model.make()
        losses.append(loss)
        return params, batch

    params, batch = jax.eval_shape(shapes)
    return _of_loss(losses[0], params, batch)._replace(is_float8=True)


@functools.cache
def _gpt2(layers: int) -> Program:
    loss, params, tokens = gpt2.gpt2(layers)
    return _of_loss(loss, params, (tokens,))._replace(scopes=("*attn*", "*ln_*", "*mlp*"))


def of_published() -> Makers:
    return {
        pattern.name: functools.partial(_pattern, pattern) for pattern in published_models.PATTERNS
    }


@functools.cache
def _pattern(pattern: published_models.Pattern) -> Program:
    return _of_loss(*pattern.make())


# Small programs, each written for one thing.


def of_positions() -> Makers:
    made: Makers = {
        case.name: functools.partial(_position, number, case)
        for number, case in enumerate(position_cases.CASES)
    }
    for fun, args, _ in position_cases.EXACT:
        made[fun.__name__] = functools.partial(Program, fun, args)
    return made


def _position(number: int, case: position_cases.Case) -> Program:
    drawn = np.random.default_rng(number)
    fun = functools.partial(case.loss, jnp.float32)
    args = (case.params(drawn), *case.inputs(drawn))
    return Program(fun, args, scopes=["positions"], has_attention=True)


def of_planned() -> Makers:
    return {
        f"{name} {case.fun.__name__}": functools.partial(
            Program, case.fun, case.args, written=case.options
        )
        for name, module in PLANNED.items()
        for case in module.CASES
    }


@functools.cache
def _identity() -> jax.Array:
    """Returns a matrix that counts as a weight: one made inside a program would be a constant."""
    with jax.ensure_compile_time_eval():
        return jnp.eye(2)


def _product(x: Any) -> Any:
    """Multiplies an array by one, as a matrix product; each entry by itself, so that NaN stays.

    Twice, since one product of inputs stays float32 if a sine reads it; beside zeros, since a sum
    over an axis of length one is a multiplication.
    """
    if not x.size:
        return x
    beside_zeros = jnp.pad(jnp.reshape(x, (-1, 1)), ((0, 0), (0, 1)))
    return jnp.reshape((beside_zeros @ _identity() @ _identity())[:, 0], x.shape)


def _behind(fun: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *xs: fun(*map(_product, xs))


def _in_front(fun: Callable[..., Any]) -> Callable[..., Any]:
    is_float32 = lambda x: getattr(x, "dtype", None) == np.float32
    multiplied = lambda x: _product(x) if is_float32(x) else x
    return lambda *xs: jax.tree.map(multiplied, fun(*xs))


# Where an operation stands beside products.
PLACES: dict[str, Callable[..., Any]] = {
    "alone": lambda fun: fun,
    "behind": _behind,
    "in front": _in_front,
    "between": lambda fun: _in_front(_behind(fun)),
}


def of_operations() -> Makers:
    return {
        f"{name} {place}": functools.partial(Program, wrap(call), tuple(inputs))
        for name, call, inputs in op_cases.OP_CASES
        for place, wrap in PLACES.items()
    }


# Random programs.


def a_chain(number: int) -> Program:
    drawn = random.Random(f"chain {number}")
    among = [random_programs.OPERATIONS, random_programs.TRANSFORMATIONS]
    names = [drawn.choice(sorted(drawn.choice(among))) for _ in range(drawn.randint(2, 8))]
    x = jax.ShapeDtypeStruct((4, 8), jnp.float32)
    return Program(random_programs.program(names), (x,))


def a_float8_program(number: int) -> Program:
    sizes = [float8_programs.LARGE, float8_programs.LARGE, float8_programs.SMALL][number % 3]
    program = float8_programs.program(number, sizes)
    return Program(program.loss, (program.params, program.x), is_float8=True)


def _random(draw: Callable[[int], random_graphs.Program]) -> Callable[[int], Program]:
    return lambda number: Program(*draw(number), scopes=random_graphs.SCOPES, has_attention=True)


SOURCES: dict[str, Source] = {
    "models": Source(120, of_models, has_reports=False),
    "published": Source(50, of_published),
    "positions": Source(200, of_positions),
    "planned": Source(560, of_planned),
    "operations": Source(500, of_operations),
    "chains": Source(450, numbered=a_chain),
    "float8": Source(180, numbered=a_float8_program, has_reports=False),
    "graphs": Source(450, numbered=_random(random_graphs.graph), has_reports=False),
    "nests": Source(350, numbered=_random(random_graphs.nest), has_reports=False),
    "sharded": Source(100, numbered=_random(random_graphs.sharded), has_reports=False),
}


# How they are drawn.


def drawn_programs(count: int, seed: int, only: Sequence[str] = ()) -> Iterator[Drawn]:
    """Yields about so many programs: of each source its share, and one at least.

    The first programs of a source are the same whatever the count and the other sources.

    Args:
      only: names of sources; all if there are none.
    """
    sources = {name: source for name, source in SOURCES.items() if not only or name in only}
    shares = sum(source.share for source in sources.values())
    for name, source in sources.items():
        wanted = max(1, round(count * source.share / shares))
        made = _programs(source, random.Random(f"{seed} {name}"), seed)
        for number, (title, program, is_first) in enumerate(itertools.islice(made, wanted)):
            as_written = is_first and program.written is not None
            way = random.Random(f"{seed} {name} {number}")
            policy, options = _as_written(program) if as_written else _way(way, program)
            has_report = source.has_reports or number % 3 == 0
            yield Drawn(name, f"{number} {title}", program, policy, options, has_report)


def _programs(
    source: Source, order: random.Random, seed: int
) -> Iterator[tuple[str, Program, bool]]:
    """Yields a source's programs without end, with their names, and whether for the first time.

    A table is gone through again and again, each time in an order that is drawn.
    """
    if source.numbered is not None:
        for number in itertools.count(seed * 10**6):
            yield str(number), source.numbered(number), True
    made = source.table() if source.table is not None else {}
    for turn in itertools.count():
        for name in order.sample(sorted(made), len(made)):
            yield name, made[name](), turn == 0


def _as_written(program: Program) -> tuple[str, dict[str, Any]]:
    options = dict(program.written or {})
    return options.pop("policy", "mixed_float16"), options


POLICIES = (
    *["mixed_float16"] * 4, *["mixed_bfloat16"] * 3, "mixed_float16,r=f32", "mixed_bfloat16,r=f32",
    "mixed_float8", "mixed_float8,r=f32",
)  # fmt: skip
OVERRIDES: tuple[dict[str, Any], ...] = (
    {"low": ["exp"]},
    {"full": ["tanh", "add"]},
    {"follow": ["reduce_sum"]},
    {"full": ["dot_general"]},
)


def _way(way: random.Random, program: Program) -> tuple[str, dict[str, Any]]:
    """Draws a policy and options."""
    policy = way.choice(POLICIES)
    if program.is_float8 and way.random() < 0.6:
        policy = way.choice(["mixed_float8", "mixed_float8", "mixed_float8,r=f32"])
    options: dict[str, Any] = dict(program.written or {})
    options.pop("policy", None)
    if way.random() < 0.35:
        options["recompute"] = way.choice(["none", "all"])
    if "float8" in policy and way.random() < 0.4:
        options["float8"] = "all"
    if program.has_attention and way.random() < 0.25:
        options["attention"] = "fused"
    if program.scopes and way.random() < 0.25:
        half = "f16" if "float16" in policy and "bfloat16" not in policy else "bf16"
        kept = way.choice(["float32", f"p=f32,c=f32,o={half}"])
        options["rules"] = [(way.choice(program.scopes), kept)]
    if way.random() < 0.08:
        options |= way.choice(OVERRIDES)
    if way.random() < 0.15:
        options["platform"] = "tpu"
    return policy, options
