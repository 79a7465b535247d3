"""Writes the table of `devices.md` anew: `python -m docs.devices`. Needs no GPU.

What moves between devices is read from programs compiled for eight H200s
(`testbed/machines/wire.py`): the gradients of two matrices of 2048 x 2048, 32 MiB of float32, for
512 rows, by autocast; and a step of `examples/gpt.py`.
"""

import functools
import importlib
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp
from testbed.machines.gpus import compile_for_placed
from testbed.machines.wire import MIB, Sent, h200s, wire

PAGE = pathlib.Path(__file__).with_suffix(".md")
BEGIN, END = "<!-- written by docs/devices.py -->", "<!-- end -->"
WIDTH, ROWS, STEPS = 2048, 512, 4
POLICIES = ("float32", "mixed_float16", "mixed_float16,r=f32")
GPT = "--layers=4 --width=512 --heads=8 --length=256 --batch-size=32 --fsdp".split()
Lower = Callable[[Callable[..., Any]], Callable[..., Any]]


def loss_fn(params: Any, x: Any, place: Callable[[Any], Any] = lambda x: x) -> Any:
    x = place(jnp.tanh(x @ params[0]))
    return jnp.mean(jnp.square(place(x @ params[1])))


class Style(NamedTuple):
    """A way to train on several devices.

    Attributes:
      gradients: takes what lowers a function, and returns the gradients of `(params, x)`.
      specs: of the two parameters.
      axes: of the mesh, and their sizes.
      mapped: whether `gradients` runs inside `shard_map`; if "unchecked", with check_vma=False.
    """

    name: str
    gradients: Callable[[Lower], Any]
    specs: tuple[P, P] = (P(), P())
    axes: tuple[tuple[str, int], ...] = (("data", 8),)
    kind: AxisType = AxisType.Auto
    mapped: bool | str = False


def plain(lower: Lower) -> Any:
    return jax.grad(lower(loss_fn))


def of_mean(lower: Lower) -> Any:
    return jax.grad(lower(lambda params, x: lax.pmean(loss_fn(params, x), "data")))


def of_varying(lower: Lower) -> Any:
    def gradients(params: Any, x: Any) -> Any:
        varying = lax.pcast(params, "data", to="varying")
        return lax.pmean(jax.grad(lower(loss_fn))(varying, x), "data")

    return gradients


def of_window(lower: Lower, loss: Callable[..., Any] = loss_fn, **options: Any) -> Any:
    scale = jmp.NoOpLossScale()
    grad_fn = jmp.accumulated_value_and_grad(lower(loss), scale, STEPS, **options)
    return lambda params, x: grad_fn(params, x)[1]


def scanned_loss(params: Any, x: Any) -> Any:
    layer = lambda x, w: (jnp.tanh(x @ w), None)
    return jnp.mean(jnp.square(lax.scan(layer, x, jnp.stack(params))[0]))


def kept_apart(lower: Lower) -> Any:
    place = lambda x: lax.with_sharding_constraint(x, P("data"))
    return jax.grad(lower(lambda params, x: loss_fn(params, x, place)))


def gathered_in_map(lower: Lower) -> Any:
    gather = lambda params: [lax.all_gather(w, "data", tiled=True) for w in params]
    return jax.grad(
        lower(lambda params, x: lax.pmean(loss_fn(gather(params), x), "data"))
    )


def moved_to(move: Callable[[Any, P], Any]) -> Callable[[Lower], Any]:
    gathered = lambda params: [move(w, P()) for w in params]
    return lambda lower: jax.grad(lower(lambda params, x: loss_fn(gathered(params), x)))


def moved_before(lower: Lower) -> Any:
    gather = lambda params: [lax.all_gather(w, "data", tiled=True) for w in params]
    half = lower(loss_fn)
    return jax.grad(lambda params, x: lax.pmean(half(gather(params), x), "data"))


SHARDED = (P("data"), P("data"))
BOTH = (("data", 4), ("model", 2))
STYLES = [
    Style("data parallel: jit", plain),
    Style("data parallel: jit, explicit axes", plain, kind=AxisType.Explicit),
    Style("data parallel: `shard_map`, replicated parameters", of_mean, mapped=True),
    Style(
        "the same, parameters `pcast` to varying before, `pmean` after",
        of_varying,
        mapped=True,
    ),
    Style("`shard_map(check_vma=False)`, no `psum`", plain, mapped="unchecked"),
    Style(f"a window of {STEPS}: jit", of_window),
    Style(
        f"a window of {STEPS}: jit, layers in a scan",
        lambda lower: of_window(lower, scanned_loss),
    ),
    Style(
        f"a window of {STEPS}: `shard_map`, `reduce_axes`",
        lambda lower: of_window(lower, reduce_axes="data"),
        mapped=True,
    ),
    Style("FSDP: jit", plain, SHARDED),
    Style("FSDP: jit, activations constrained to `P('data')`", kept_apart, SHARDED),
    Style(
        "FSDP: jit, `with_sharding_constraint(w, P())`",
        moved_to(lax.with_sharding_constraint),
        SHARDED,
    ),
    Style(
        "FSDP: explicit axes, `reshard(w, P())`",
        moved_to(jax.sharding.reshard),
        SHARDED,
        kind=AxisType.Explicit,
    ),
    Style("FSDP: `shard_map`, `all_gather(w)`", gathered_in_map, SHARDED, mapped=True),
    Style(
        "FSDP: `shard_map`, `all_gather(w)` before the wrapped function",
        moved_before,
        SHARDED,
        mapped=True,
    ),
    Style(
        "tensor parallel: jit", plain, (P(None, "model"), P("model")), (("model", 8),)
    ),
    Style(
        "FSDP x tensor parallel: jit",
        plain,
        (P("data", "model"), P("model", "data")),
        BOTH,
    ),
]


def sent_by(style: Style, policy: str) -> list[Sent]:
    """Returns what the gradients of one style move between eight H200s."""
    mesh = h200s(dict(style.axes), style.kind)
    specs, rows = list(style.specs), P("data" if "data" in dict(style.axes) else None)
    placed = lambda shape, spec: jax.ShapeDtypeStruct(
        shape, jnp.float32, sharding=NamedSharding(mesh, spec)
    )
    params = [placed((WIDTH, WIDTH), spec) for spec in specs]
    gradients = style.gradients(lambda fun: jmp.autocast(fun, policy))
    if style.mapped:
        unchecked = style.mapped == "unchecked"
        gradients = jax.shard_map(
            gradients,
            mesh=mesh,
            in_specs=(specs, rows),
            out_specs=specs,
            check_vma=not unchecked,
        )
    with jax.set_mesh(mesh):
        places = [NamedSharding(mesh, spec) for spec in specs]
        program = compile_for_placed(
            gradients, params, placed((ROWS, WIDTH), rows), out_shardings=places
        )
    return wire(program.text)


def sent_by_gpt(policy: str, constrained: bool) -> list[Sent]:
    """Returns what a step of `examples/gpt.py` moves, with its constraint of activations or not."""
    sys.path.insert(0, str(PAGE.parents[1] / "examples"))
    gpt = importlib.import_module("gpt")
    arguments, mesh = gpt.argument_parser().parse_args(GPT), h200s({"data": 8})
    arguments.precision = policy
    as_it_is = lambda x, sharding: x
    place = lax.with_sharding_constraint if constrained else as_it_is
    with (
        mock.patch.dict(gpt.POLICIES, {policy: policy}),
        mock.patch.object(lax, "with_sharding_constraint", place),
    ):
        made = gpt.make_programs(arguments, mesh)
        shapes, places = jax.eval_shape(made.create), made.places
        placed = lambda leaf, place: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=place
        )
        size = (arguments.batch_size, arguments.length + 1)
        rows = jax.ShapeDtypeStruct(
            size, jnp.int32, sharding=NamedSharding(mesh, P("data"))
        )
        options = {
            "out_shardings": (places, NamedSharding(mesh, P())),
            "donate_argnums": 0,
        }
        state = jax.tree.map(placed, shapes, places)
        return wire(
            compile_for_placed(made.train.__wrapped__, state, rows, **options).text
        )


def cell(sent: list[Sent]) -> str:
    """Returns what is moved, small arrays apart: the MiB a device receives by kind and dtype."""
    sums: dict[tuple[str, str], float] = {}
    for array in sent:
        if array.elements > 10_000:
            key = (array.kind, array.dtype)
            sums[key] = sums.get(key, 0.0) + array.bytes / MIB
    cells = [f"{kind} {dtype} {mib:.1f}" for (kind, dtype), mib in sorted(sums.items())]
    return ", ".join(cells) or "nothing"


def table() -> str:
    rows: dict[str, Callable[[str], list[Sent]]] = {
        style.name: functools.partial(sent_by, style) for style in STYLES
    }
    for constrained, name in (
        (True, ""),
        (False, ", without its constraint of activations"),
    ):
        counted = functools.partial(sent_by_gpt, constrained=constrained)
        rows[f"`examples/gpt.py --fsdp`, 49 MiB{name}"] = counted
    lines = ["| | " + " | ".join(POLICIES) + " |", "|---" * (len(POLICIES) + 1) + "|"]
    for name, sent in rows.items():
        lines.append(
            f"| {name} | "
            + " | ".join(cell(sent(policy)) for policy in POLICIES)
            + " |"
        )
        print(lines[-1])
        as_bfloat16 = cell(sent("mixed_float16")).replace("f16", "bf16")
        assert as_bfloat16 == cell(sent("mixed_bfloat16")), (
            "the page says that both are alike"
        )
    return "\n".join(lines)


def main() -> None:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
