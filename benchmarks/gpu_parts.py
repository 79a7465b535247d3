"""What a GPU is to show beside training steps: times of other programs, and how exact they are.

A part has programs that compute the same in different ways. One process compiles all, compares what
they compute with the program in exact float32, if the part has one, and times them in turns.

    python -m benchmarks.run --suite gpu --only attention-llama decoding
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jmp
from benchmarks import families, workloads
from benchmarks._names import named
from benchmarks.families._layers import FAMILIES
from benchmarks.pairing import paired
from benchmarks.processes import failure
from benchmarks.recipes._training import update_of
from benchmarks.workloads import UPDATES
from testbed.decoding import SMALL, Decoder
from testbed.machines import attentions, float8_steps
from testbed.relative_errors import relative_error

BASELINE, BFLOAT16, EXACT = "by hand", "bfloat16", "exact float32"
Programs = dict[str, tuple[Callable[..., Any], Any]]  # a function and its arguments


@dataclasses.dataclass(frozen=True)
class Part:
    """Programs that compute the same.

    Attributes:
      name: as in `--only`.
      title: as in the report.
      programs: makes each way's function and arguments, `EXACT` first if there is one; small, if
        it is given True.
      baseline: the way that ratios are to.
    """

    name: str
    title: str
    programs: Callable[[bool], Programs]
    baseline: str = BASELINE


def _attention(module: Any, small: bool) -> Programs:
    """The gradients of one attention."""
    shape = (2, 32, 512) if small else attentions.X.shape
    x = jax.random.normal(jax.random.key(0), shape)
    padding = jnp.arange(shape[1]) < jnp.array([[shape[1] - 8]] * shape[0])
    arguments = module().init(jax.random.key(1), x, padding), x, padding
    steps = {
        EXACT: attentions.step(module()),
        BASELINE: attentions.step(module(jnp.float16)),
        "autocast": attentions.step(module(), attention="plain"),
        "fused": attentions.step(module(), attention="fused"),
    }
    return {way: (step, arguments) for way, step in steps.items()}


def _family(family: Any, small: bool) -> Programs:
    """Loss and gradients of a model that no rule was tuned on."""
    layers = families.TIMED
    sizes = family.small if small else family.sizes
    params, inputs = families.drawn(family, layers, sizes)
    ways = {EXACT: "float32", BASELINE: families.BASE, "autocast": "autocast"}
    step = lambda way: families.step_of(family, way, "float16", layers, sizes)
    return {title: (step(way), (params, *inputs)) for title, way in ways.items()}


def _decoding(small: bool) -> Programs:
    """The log-probabilities of the tokens that a transformer with a cache generates."""
    sizes = SMALL if small else {}
    arguments = Decoder(**sizes).example()
    decoders = {
        EXACT: Decoder(**sizes),
        BASELINE: Decoder(jnp.float16, **sizes),
        "autocast": jmp.autocast(Decoder(**sizes), "mixed_float16"),
    }
    scores = lambda decoder: lambda *given: decoder(*given)[1]
    return {way: (scores(decoder), arguments) for way, decoder in decoders.items()}


def _float8(title: str, small: bool) -> Programs:
    """An SGD step in float8, and one in bfloat16."""
    loss, *shapes = _SMALL_FLOAT8 if small else float8_steps.FULL_SIZES[title]()
    arguments = jax.tree.map(_drawn, tuple(shapes))
    ways = {BFLOAT16: "mixed_bfloat16", "float8": "mixed_float8"}
    return {way: (float8_steps.step(loss, policy), arguments) for way, policy in ways.items()}


_SMALL_FLOAT8 = (
    float8_steps.scanned,
    (float8_steps.float32(2, 32, 64), float8_steps.float32(2, 64, 32)),
    float8_steps.float32(16, 32),
)


def _drawn(shape: Any) -> Any:
    """Returns numbers of about unit gain, or tokens."""
    if jnp.issubdtype(shape.dtype, jnp.integer):
        return jnp.zeros(shape.shape, shape.dtype)
    gain = shape.shape[-2] ** -0.5 if len(shape.shape) > 1 else 1
    return gain * jax.random.normal(jax.random.key(0), shape.shape, shape.dtype)


def _small_states(small: bool) -> Programs:
    """An Adam update of parameters and states that are stored in several ways."""
    from benchmarks.small_states import STRATEGIES  # which imports what runs this

    shapes = workloads.find(UPDATES[0].name, small).shapes
    found: Programs = {}
    for way, strategy in STRATEGIES.items():
        optimizer = strategy(optax.adam(1e-3))
        params = [jnp.ones(shape, strategy.dtype) for shape in shapes]
        gradients = [jnp.full(shape, 1e-3, strategy.dtype) for shape in shapes]
        found[way] = update_of(optimizer), (params, optimizer.init(params), gradients)
    return found


ATTENTIONS = tuple(
    Part(
        f"attention-{module.__name__.lower()}",
        f"{title}: gradients",
        functools.partial(_attention, module),
    )
    for title, module in {
        "Attention of a Llama": attentions.Llama,
        "Attention of a BERT": attentions.Bert,
        "Attention of a ViT": attentions.ViT,
    }.items()
)
FAMILY_PARTS = tuple(
    Part(f"family-{row.name}", f"{row.title}: a step", functools.partial(_family, row))
    for row in FAMILIES
)
OTHERS = (
    Part("decoding", "1,024 tokens of a decoder of two layers", _decoding),
    *(
        Part(f"float8-{place}", f"Float8: {title}", functools.partial(_float8, title), BFLOAT16)
        for place, title in enumerate(float8_steps.FULL_SIZES)
    ),
    Part("small-states", f"{UPDATES[0].title}, each way to store", _small_states, "full"),
)
PARTS = (*ATTENTIONS, *FAMILY_PARTS, *OTHERS)


def counted(part_name: str, small: bool, rounds: int) -> dict[str, dict[str, Any]]:
    """Returns for each way what `paired` says of it and its `deviation`, or `{"error": sentence}`.

    The deviation is the relative error to exact float32; a part without that way has none.
    """
    part = named("part", part_name, PARTS)
    timed: dict[str, Callable[[int], float]] = {}
    found: dict[str, dict[str, Any]] = {}
    exact = None
    for way, (function, arguments) in part.programs(small).items():
        try:
            with jax.default_matmul_precision("highest" if way == EXACT else None):
                compiled = jax.jit(function).lower(*arguments).compile()
            result = jax.block_until_ready(compiled(*arguments))
        except Exception as error:  # one way that fails is a line of the report
            found[way] = failure(error)
            continue
        exact = result if way == EXACT else exact
        found[way] = {} if exact is None else {"deviation": relative_error(result, exact)}
        timed[way] = functools.partial(_seconds, compiled, arguments)
    if part.baseline not in timed:
        return {way: answer for way, answer in found.items() if "error" in answer}
    step_seconds = timed[part.baseline](2) / 2
    ratios = paired(timed, step_seconds, part.baseline, rounds)
    return {way: answer | ratios.get(way, {}) for way, answer in found.items()}


def _seconds(compiled: Callable[..., Any], arguments: Any, steps: int) -> float:
    """Runs a program some times, and waits for the device once at the end."""
    started = time.perf_counter()
    for _ in range(steps):
        result = compiled(*arguments)  # the one before is let go: results of all would fill memory
    jax.block_until_ready(result)
    return time.perf_counter() - started
