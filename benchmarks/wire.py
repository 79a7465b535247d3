"""Programs whose wire is counted: what eight H200s send each other in a step, by kind and dtype.

    python -m benchmarks.run --suite wire    # compiles each program of this list; needs no GPU

A case says where the parameters lie and how they move; each is written once for all variants:
float32, half by hand, and float32 under autocast. By hand is what somebody writes who knows how the
compiler works: what moves is cast before it moves. `testbed/machines/wire.py` counts, and says how.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jmp
from benchmarks._names import named
from testbed.machines.gpus import Program, compile_for_placed
from testbed.machines.wire import h200s, wire

P = PartitionSpec
Tree = Any
MeshOf = Callable[[], Mesh]  # called where a program is compiled: it starts a compiler


@dataclasses.dataclass(frozen=True)
class Variant:
    """A way to write the same step.

    Attributes:
      name, title: as in `--recipes`, and as in the report.
      half: what is computed and moved is cast by hand, to `dtype`.
      barrier: the cast is also kept before the move by `jax.lax.optimization_barrier`.
      policy: of autocast, for the loss; None without.
      dtype: the half one; no TPU multiplies float16.
      platform: as autocast is told.
    """

    name: str
    title: str
    half: bool = False
    barrier: bool = False
    policy: str | None = None
    dtype: Any = jnp.float16
    platform: str | None = None

    def parameter(self, leaf: jax.Array) -> jax.Array:
        """Casts a parameter that products read, in front of the move; only by hand."""
        half = self.value(leaf)
        return jax.lax.optimization_barrier(half) if self.barrier else half

    def value(self, array: jax.Array) -> jax.Array:
        """Casts an activation; only by hand."""
        return array.astype(self.dtype) if self.half else array

    def loss(self, function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        if self.policy is None:
            return function
        return jmp.autocast(function, self.policy, platform=self.platform)


BY_HAND = Variant("by-hand", "by hand, half", half=True)
WITH_BARRIER = Variant(
    "by-hand-barrier", "by hand, half, a barrier after the cast", half=True, barrier=True
)
IN_FLOAT8 = Variant("autocast-f8", "autocast, float8", policy="mixed_float8")
# A new variant is a row here, and nothing else; those of a few cases stand above.
VARIANTS = (
    Variant("float32", "float32"),
    BY_HAND,
    Variant("autocast", "autocast", policy="mixed_float16"),
    Variant("autocast-f32", "autocast, float32 reduction", policy="mixed_float16,r=f32"),
)


@dataclasses.dataclass(frozen=True)
class Step:
    """What is compiled.

    Attributes:
      function: returns the loss and the gradients of the parameters, float32 in all variants but
        where a case says otherwise.
      arguments: shapes with shardings.
      options: of `jax.jit`.
      mesh: is set around the compilation; explicit axes need it.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    mesh: Mesh | None = None


@dataclasses.dataclass(frozen=True)
class Case:
    """One training step, all variants.

    Attributes:
      name, title: as in `--only`, and as in the report.
      make: returns the step of a variant, at the size of the report or (True) a small one.
      more: variants that only this case has.
    """

    name: str
    title: str
    make: Callable[[Variant, bool], Step]
    more: tuple[Variant, ...] = ()

    @property
    def variants(self) -> tuple[Variant, ...]:
        return VARIANTS + self.more


# Four layers, 8.4 M parameters: 32 MiB in float32.

DATA, MODEL = "data", "model"
LAYERS = 4


def spec(mesh: Mesh, shape: tuple[int, ...], where: P, dtype: Any = jnp.float32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, where))


def layers(mesh: Mesh, where: P, small: bool) -> tuple[list[Any], Any]:
    """Returns the weights, and a batch of rows that lies along the data axis.

    There are more rows than a weight has, as in most training: with few of them XLA would rather
    move activations.
    """
    width, hidden, rows = (128, 256, 512) if small else (1024, 2048, 4096)
    shapes = ((width, hidden), (hidden, width)) * (LAYERS // 2)
    return [spec(mesh, shape, where) for shape in shapes], spec(mesh, (rows, width), P(DATA))


def network(variant: Variant, move: Callable[[jax.Array], jax.Array]) -> Callable[..., jax.Array]:
    """Returns the mean loss of four layers, each weight moved by `move` to where it is used."""

    def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        x = variant.value(x)
        for weight in weights:
            x = jnp.tanh(x @ move(variant.parameter(weight)))
        return (x.astype(jnp.float32) ** 2).mean()

    return loss


def stay(weight: jax.Array) -> jax.Array:
    return weight


def gather(weight: jax.Array) -> jax.Array:
    return jax.lax.all_gather(weight, DATA, tiled=True)


def reshard(weight: jax.Array) -> jax.Array:
    return jax.sharding.reshard(weight, P())


def mean_over_devices(loss: jax.Array, gradients: Tree) -> tuple[jax.Array, Tree]:
    """Returns the mean loss, and what was summed over devices divided by their number."""
    devices = jax.lax.axis_size(DATA)
    return jax.lax.pmean(loss, DATA), jax.tree.map(lambda leaf: leaf / devices, gradients)


def by_the_compiler(where: P, variant: Variant, small: bool) -> Step:
    """Only jit: XLA decides what moves."""
    mesh = h200s({DATA: 8})
    weights, batch = layers(mesh, where, small)
    step = jax.value_and_grad(variant.loss(network(variant, stay)))
    return Step(step, (weights, batch), {"out_shardings": (None, NamedSharding(mesh, where))})


def by_constraints(variant: Variant, small: bool) -> Step:
    """jit, where the user asks for the whole weight.

    XLA also moves a constraint in front of the cast: an expert keeps it behind with a barrier.
    """
    mesh = h200s({DATA: 8})
    weights, batch = layers(mesh, P(DATA), small)
    whole = functools.partial(jax.lax.with_sharding_constraint, shardings=NamedSharding(mesh, P()))
    step = jax.value_and_grad(variant.loss(network(variant, whole)))
    return Step(step, (weights, batch), {"out_shardings": (None, NamedSharding(mesh, P(DATA)))})


def by_explicit_axes(variant: Variant, small: bool) -> Step:
    mesh = h200s({DATA: 8}, AxisType.Explicit)
    step = jax.value_and_grad(variant.loss(network(variant, reshard)))
    return Step(step, layers(mesh, P(DATA), small), mesh=mesh)


def inside_shard_map(where: P, move: Any, variant: Variant, small: bool) -> Step:
    """The gradient and autocast inside of shard_map; AD adds up what is replicated by psum."""
    mesh = h200s({DATA: 8})
    gradient = jax.value_and_grad(variant.loss(network(variant, move)))

    def step(weights: Any, x: Any) -> Any:
        return mean_over_devices(*gradient(weights, x))

    places = {"in_specs": (where, P(DATA)), "out_specs": (P(), where)}
    return Step(jax.shard_map(step, mesh=mesh, **places), layers(mesh, where, small))


def around_shard_map(variant: Variant, small: bool) -> Step:
    """The gradient and autocast of a function that calls shard_map."""
    mesh = h200s({DATA: 8})
    own = network(variant, gather)

    def mean(weights: Any, x: Any) -> jax.Array:
        return jax.lax.pmean(own(weights, x), DATA)

    places = {"in_specs": (P(DATA), P(DATA)), "out_specs": P()}
    step = jax.value_and_grad(variant.loss(jax.shard_map(mean, mesh=mesh, **places)))
    return Step(step, layers(mesh, P(DATA), small))


def psum_by_the_user(variant: Variant, small: bool) -> Step:
    """shard_map, where each device takes its own gradient and the user adds them up.

    What is added up is in the dtype of the gradients: by hand that of the parameters cast outside
    of `grad`. Autocast's gradients are in float32 as the parameters are: the user's psum says so.
    """
    mesh = h200s({DATA: 8})
    gradient = jax.value_and_grad(variant.loss(network(variant, stay)))

    def step(weights: Any, x: Any) -> Any:
        own = jax.lax.pcast(weights, DATA, to="varying")
        loss, gradients = gradient(jax.tree.map(variant.parameter, own), x)
        loss, mean = mean_over_devices(loss, jax.lax.psum(gradients, DATA))
        return loss, jax.tree.map(lambda leaf: leaf.astype(jnp.float32), mean)

    places = {"in_specs": (P(), P(DATA)), "out_specs": P()}
    return Step(jax.shard_map(step, mesh=mesh, **places), layers(mesh, P(), small))


def convolutions(variant: Variant, small: bool) -> Step:
    """jit, four 3 x 3 convolutions whose kernels lie split by output channels."""
    mesh = h200s({DATA: 8})
    channels, images = (64, (64, 8, 8)) if small else (480, (256, 16, 16))
    where = P(None, None, None, DATA)
    kernels = [spec(mesh, (3, 3, channels, channels), where)] * LAYERS
    together = NamedSharding(mesh, P(DATA))

    def loss(kernels: Any, x: jax.Array) -> jax.Array:
        x = variant.value(x)
        for kernel in kernels:
            layout = {"padding": "SAME", "dimension_numbers": ("NHWC", "HWIO", "NHWC")}
            y = jax.lax.conv_general_dilated(x, variant.parameter(kernel), (1, 1), **layout)
            x = jax.lax.with_sharding_constraint(jax.nn.relu(y), together)
        return (x.astype(jnp.float32) ** 2).mean()

    step = jax.value_and_grad(variant.loss(loss))
    arguments = (kernels, spec(mesh, (*images, channels), P(DATA)))
    return Step(step, arguments, {"out_shardings": (None, NamedSharding(mesh, where))})


# A language model: a table that embeds and predicts, blocks scanned and computed again backward.


@dataclasses.dataclass(frozen=True)
class Sizes:
    layers: int = 4
    width: int = 512
    heads: int = 8
    vocabulary: int = 8192
    batch: int = 16
    length: int = 512


SMALL = Sizes(2, 128, 2, 1280, 16, 128)

NORMS = {"norm1": P(), "norm2": P()}
REPLICATED = {
    "table": P(),
    "norm": P(),
    "blocks": {"qkv": P(), "out": P(), "up": P(), "down": P()} | NORMS,
}
FSDP = {
    "table": P(DATA),
    "norm": P(),
    "blocks": dict.fromkeys(("qkv", "out", "up", "down"), P(None, DATA)) | NORMS,
}
INTO, OUT_OF = P(None, DATA, MODEL), P(None, MODEL, DATA)
FSDP_AND_TENSOR_PARALLEL = {
    "table": P(MODEL, DATA),
    "norm": P(),
    "blocks": {"qkv": INTO, "out": OUT_OF, "up": INTO, "down": OUT_OF} | NORMS,
}


def gpt_shapes(layers: int, width: int, vocabulary: int) -> Tree:
    """Returns the shapes of the parameters of a GPT, whose blocks are stacked."""
    return {
        "table": (vocabulary, width),
        "norm": (width,),
        "blocks": {
            "qkv": (layers, width, 3 * width),
            "out": (layers, width, width),
            "up": (layers, width, 4 * width),
            "down": (layers, 4 * width, width),
            "norm1": (layers, width),
            "norm2": (layers, width),
        },
    }


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns rows over the root of their mean square, computed in float32."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-6)
    return (y * scale[None, None]).astype(x.dtype)


def attend(qkv: jax.Array, heads: int) -> jax.Array:
    """Returns causal attention of queries, keys and values side by side; its softmax is float32."""
    batch, length, width = qkv.shape
    query, key, value = jnp.moveaxis(qkv.reshape(batch, length, 3, heads, -1), 2, 0)
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key).astype(jnp.float32)
    past = jnp.tril(jnp.ones((length, length), bool))[None, None]
    scores = jnp.where(past, scores * query.shape[-1] ** -0.5, -jnp.inf)
    weights = jax.nn.softmax(scores).astype(qkv.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value).reshape(batch, length, width // 3)


def language_model(mesh_of: MeshOf, places: Tree, variant: Variant, small: bool) -> Step:
    """jit, a GPT of 16.8 M parameters; activations are kept along the data axis."""
    mesh, sizes = mesh_of(), SMALL if small else Sizes()
    shapes = gpt_shapes(sizes.layers, sizes.width, sizes.vocabulary)
    is_place = lambda leaf: isinstance(leaf, P)
    params = jax.tree.map(
        lambda where, shape: spec(mesh, shape, where), places, shapes, is_leaf=is_place
    )
    tokens = spec(mesh, (sizes.batch, sizes.length), P(DATA), jnp.int32)
    together = NamedSharding(mesh, P(DATA))
    stay_together = lambda x: jax.lax.with_sharding_constraint(x, together)
    step = jax.value_and_grad(variant.loss(_gpt(variant, sizes, stay_together)))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, params)
    return Step(step, (params, tokens, tokens), {"out_shardings": (None, shardings)})


def _gpt(variant: Variant, sizes: Sizes, keep: Callable[[jax.Array], jax.Array]) -> Any:
    """Returns the loss of tokens and targets; `keep` holds activations in their place."""

    @jax.checkpoint
    def block(x: jax.Array, params: Any) -> tuple[jax.Array, None]:
        half = variant.parameter
        qkv = norm(x, params["norm1"]) @ half(params["qkv"])
        x = x + attend(qkv, sizes.heads) @ half(params["out"])
        y = jax.nn.gelu(norm(x, params["norm2"]) @ half(params["up"]))
        return keep(x + y @ half(params["down"])), None

    def loss(params: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        table = variant.parameter(params["table"])
        x, _ = jax.lax.scan(block, keep(table[tokens]), params["blocks"])
        # With `x @ table.T` XLA moves the table once more, 7 MiB in half.
        logits = jnp.einsum("btd,vd->btv", norm(x, params["norm"]), table).astype(jnp.float32)
        chosen = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
        return (jax.nn.logsumexp(logits, -1) - chosen).mean()

    return loss


CASES = (
    Case("fsdp", "FSDP, jit", functools.partial(by_the_compiler, P(DATA)), (IN_FLOAT8,)),
    Case(
        "fsdp-constraint",
        "FSDP, jit, `with_sharding_constraint`",
        by_constraints,
        (WITH_BARRIER, IN_FLOAT8),
    ),
    Case(
        "fsdp-shard-map",
        "FSDP, `all_gather` in shard_map, autocast inside",
        functools.partial(inside_shard_map, P(DATA), gather),
        (IN_FLOAT8,),
    ),
    Case(
        "fsdp-around-shard-map",
        "FSDP, `all_gather` in shard_map, autocast around",
        around_shard_map,
        (IN_FLOAT8,),
    ),
    Case("fsdp-explicit", "FSDP, explicit axes, `reshard`", by_explicit_axes, (IN_FLOAT8,)),
    Case("dp", "data parallel, jit", functools.partial(by_the_compiler, P())),
    Case(
        "dp-shard-map",
        "data parallel, shard_map, AD's psum",
        functools.partial(inside_shard_map, P(), stay),
    ),
    Case("dp-psum", "data parallel, shard_map, the user's psum of the gradients", psum_by_the_user),
    Case(
        "gpt-fsdp",
        "GPT, FSDP",
        functools.partial(language_model, lambda: h200s({DATA: 8}), FSDP),
        (IN_FLOAT8,),
    ),
    Case(
        "gpt-dp",
        "GPT, data parallel",
        functools.partial(language_model, lambda: h200s({DATA: 8}), REPLICATED),
    ),
    Case(
        "gpt-fsdp-tp",
        "GPT, FSDP by 4, tensor parallel by 2",
        functools.partial(
            language_model, lambda: h200s({DATA: 4, MODEL: 2}), FSDP_AND_TENSOR_PARALLEL
        ),
        (IN_FLOAT8,),
    ),
    Case("convolutions-fsdp", "four 3 x 3 convolutions, FSDP", convolutions),
)


def find(name: str) -> Case:
    return named("case", name, CASES)


def compile_step(case: Case, variant: str, small: bool = False) -> Program:
    """Compiles the step of `case` for eight H200s, in the variant of that name."""
    (row,) = (row for row in case.variants if row.name == variant)
    step = case.make(row, small)
    with contextlib.ExitStack() as stack:
        if step.mesh is not None:
            stack.enter_context(jax.set_mesh(step.mesh))
        return compile_for_placed(step.function, *step.arguments, **step.options)


def counted(case: str, variant: str, small: bool) -> dict[str, Any]:
    """Returns what the report says of a step: bytes by kind and dtype, and its figures."""
    program = compile_step(find(case), variant, small)
    figures = program.figures("bytes_moved", "kernels", "temp_bytes")
    return {"received": received_of(program.text)} | figures


def received_of(text: str) -> dict[str, int]:
    """Returns the bytes that a device receives in a step, by kind and dtype."""
    received: dict[str, int] = {}
    for sent in wire(text):
        name = f"{sent.kind} {sent.dtype}"
        received[name] = received.get(name, 0) + round(sent.bytes)
    return dict(sorted(received.items()))
