"""The GPT example, end to end on a small text, and in pieces if a mistake would not show there."""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jmp import transforms
from testbed.example_data import write_text
from tests.project.running import assert_saved_alike, completed, imported_example, refusal, saved

pytestmark = pytest.mark.full

MODEL = ["--layers=1", "--width=16", "--heads=2", "--length=12"]
TINY = [*MODEL, "--batch-size=4", "--steps=6", "--validate-every=3", "--checkpoint-every=4"]
TINY += ["--devices=1"]
# Everything in one training.
ACCUMULATING = [*TINY, "--accumulate=2", "--sample-length=20", "--prompt=x = "]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = write_text(tmp_path_factory.mktemp("text") / "nested")
    return [f"--data-dir={folder}", "--pattern=*.txt"]


@pytest.fixture(scope="module")
def gpt():
    """The example as a module."""
    with imported_example("gpt") as module:
        yield module


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    """One training without an interruption: what it printed, and the folder it wrote into."""
    folder = tmp_path_factory.mktemp("finished")
    return completed("gpt", *ACCUMULATING, *text, f"--output-dir={folder}"), folder


def test_it_writes_its_table_its_sample_its_numbers_and_its_picture(finished):
    printed, folder = finished
    for expected in ("Training on cpu", "tokens a second", "nats a byte", "0 of 6", "\nx = "):
        assert expected in printed
    report = json.loads((folder / "gpt.json").read_text())
    assert report["options"]["precision"] == "float16"
    assert report["skipped_steps"] == 0 and report["final_scale"] == 2.0**16
    assert report["tokens_per_second"] > 0 and report["sample"]
    history = report["history"]
    assert len(history["loss"]) == len(history["loss_scale"]) == len(history["skipped"]) == 6
    assert [step for step, _ in history["validation"]] == [3, 6]
    sizes = report["text_bytes"]
    assert sizes["validation"] == pytest.approx(0.1 * sum(sizes.values()), abs=1)
    assert "</svg>" in (folder / "gpt.svg").read_text()


def test_a_resumed_training_ends_bit_by_bit_where_an_uninterrupted_one_ends(
    finished, text, tmp_path
):
    options = [*ACCUMULATING, *text, f"--output-dir={tmp_path}"]
    printed = completed("gpt", *options, "--stop-after=5")  # between two checkpoints
    assert "Stopped after step 5 of 6" in printed
    assert not (tmp_path / "gpt.json").exists()
    completed("gpt", *options, "--resume")
    assert_saved_alike(tmp_path, finished[1], step=6)
    assert len(saved(tmp_path, 6)[0]) > 3 * 16  # parameters, two moments, the loss scale


def test_resuming_another_training_is_refused_before_anything_is_written(finished, text):
    _, folder = finished
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}

    def refused(*options):
        return refusal("gpt", *ACCUMULATING, *text, f"--output-dir={folder}", *options)

    message = refused("--resume", "--width=32")
    assert "got {'width': 32}; expected {'width': 16}" in message
    assert "another --checkpoint-dir" in message
    assert "text_sha256" in refused("--resume", "--pattern=part[01].txt")
    assert "expected a training there" in refused("--resume", f"--checkpoint-dir={folder / 'x'}")
    assert "holds a training; expected none, or --resume" in refused()
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


THREE = "--processes=3"
MISTAKES = [
    (["--width=16", "--heads=3"], "does not divide --width 16; expected one of 1, 2, 4, 8, 16"),
    (["--data-dir={tmp}/none"], "{tmp}/none is no folder"),
    (["--data-dir={tmp}"], "{tmp} holds no files *.txt"),
    (["--length=2000"], "35574 or more for one batch of 16 x 2001 bytes"),
    (["--prompt="], "--prompt is empty"),
    (["--masters=split"], "expected --precision bfloat16 or float8, or for float16 --masters full"),
    (["--masters=full", "--precision=float32"], "expected a --precision other than float32"),
    (["--batch-size=12", "--devices=8"], "--batch-size 16, or fewer --devices"),
    (["--devices=9"], "process 0 has 8; expected as many or fewer"),
    (["--process-id=1"], "expected all three, such as --processes 2"),
    ([THREE, "--process-id=1"], "expected all three, such as --processes 3"),
    ([THREE, "--process-id=3", "--coordinator=localhost:9876"], "expected an id from 0 to 2"),
    ([THREE, "--process-id=1", "--coordinator=9876"], "as HOST:PORT"),
]


@pytest.mark.parametrize(("options", "words"), MISTAKES, ids=lambda words: " ".join(words)[:60])
def test_a_mistake_is_told_with_a_way_out(text, tmp_path, options, words):
    options = [option.format(tmp=tmp_path) for option in options]
    message = refusal("gpt", *text, f"--output-dir={tmp_path / 'out'}", *options)
    assert words.format(tmp=tmp_path) in message
    assert not (tmp_path / "out").exists()


def test_every_file_of_the_pattern_is_read_and_the_end_is_held_out(gpt, text):
    training, held_out = gpt.load_text(gpt.argument_parser().parse_args([*text, *MODEL]))
    folder = pathlib.Path(text[0].removeprefix("--data-dir="))
    pieces = sorted(path.read_bytes() for path in folder.rglob("*.txt"))
    whole = training.tobytes() + held_out.tobytes()
    assert len(whole) == sum(map(len, pieces)) + len(pieces) - 1
    assert all(piece in whole for piece in pieces) and b"\0" not in whole
    assert len(held_out) == len(whole) // 10


@pytest.fixture(scope="module")
def programs(gpt, text):
    """Returns what gives the programs for some options, made once, and the rows of a step."""

    @functools.cache
    def made_for(*options):
        arguments = gpt.argument_parser().parse_args([*ACCUMULATING, *text, *options])
        mesh = gpt.start_devices(arguments)
        rows, training = gpt.Rows(arguments, mesh), gpt.load_text(arguments)[0]
        return gpt.make_programs(arguments, mesh), functools.partial(rows.of_step, training)

    return made_for


def test_only_kernels_decay(gpt):
    arguments = gpt.argument_parser().parse_args([*TINY, "--weight-decay=1000"])
    params = {name: jnp.ones(2) for name in ("kernel", "bias", "scale", "embedding")}
    optimizer, zeros = gpt.make_optimizer(arguments), jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(zeros, optimizer.init(params), params)
    assert [name for name, update in updates.items() if (update != 0).any()] == ["kernel"]


def losses_of(made, load, steps):
    state, losses = made.create(), []
    for step in range(steps):
        state, measured = made.train(state, load(step))
        losses.append(float(measured["loss"]))
    assert made.train._cache_size() == 1  # one compilation
    return losses


def test_float16_trains_as_float32_does(programs):
    exact = losses_of(*programs("--precision=float32"), steps=6)
    half = losses_of(*programs(), steps=6)
    assert exact[0] == pytest.approx(np.log(256), abs=0.1)  # knows nothing yet
    assert exact[-1] < exact[0] - 0.2
    assert half == pytest.approx(exact, rel=1e-2)
    assert half != exact


WAYS = [("full", "float16"), ("kahan", "float16"), ("split", "bfloat16"), ("stochastic", "float8")]


@pytest.mark.parametrize(("masters", "precision"), WAYS)
def test_half_parameters_train_as_float32_ones_do(programs, masters, precision):
    made, load = programs(f"--masters={masters}", f"--precision={precision}")
    state, dtype = made.create(), "float16" if precision == "float16" else "bfloat16"
    exact, _ = programs("--precision=float32")
    first = exact.create().params
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(state.params)} == {dtype}
    masters_now = transforms.masters(state.opt_state, state.params)
    tolerance = {"stochastic": 2**-8, "kahan": 2**-20}.get(masters, 0)
    for value, expected in zip(*map(jax.tree.leaves, (masters_now, first)), strict=True):
        np.testing.assert_allclose(value, expected, rtol=tolerance, atol=1e-7 * bool(tolerance))
    losses = losses_of(made, load, steps=6)
    assert losses == pytest.approx(losses_of(exact, load, steps=6), rel=1e-2)


EIGHT = ("--devices=8", "--batch-size=8", "--precision=float32")


@pytest.mark.parametrize("options", [(), ("--fsdp",)])
def test_eight_devices_train_as_one_does(programs, options):
    one = losses_of(*programs(*EIGHT, "--devices=1"), steps=3)
    assert losses_of(*programs(*EIGHT, *options), steps=3) == pytest.approx(one, rel=1e-5)


def test_fsdp_keeps_an_eighth_of_each_matrix_and_of_its_moments_on_a_device(programs):
    made, load = programs(*EIGHT, "--fsdp")
    state, _ = made.train(made.create(), load(0))
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        part = leaf.addressable_shards[0].data
        assert len(leaf.sharding.device_set) == 8
        assert leaf.size == part.size * (8 if leaf.ndim == 2 else 1), path
    kernel = state.params["blocks"][0]["mlp_in"]["kernel"]  # along its largest axis
    assert kernel.shape == (16, 64) and kernel.addressable_shards[0].data.shape == (16, 8)


def test_a_checkpoint_of_eight_devices_goes_on_on_four_and_on_one(programs, text, tmp_path):
    options = [*ACCUMULATING, *text, *EIGHT, "--validate-every=9", f"--output-dir={tmp_path}"]

    expected = losses_of(*programs(*EIGHT, "--devices=1"), steps=5)
    for step, more in (
        (2, ["--fsdp"]),
        (4, ["--fsdp", "--devices=4", "--resume"]),
        (5, ["--devices=1", "--resume"]),
    ):
        completed("gpt", *options, f"--stop-after={step}", *more)
        assert saved(tmp_path, step)[1]["loss"] == pytest.approx(expected[:step], rel=1e-5)


@pytest.mark.parametrize("prompt", [b"a", b"one that is longer than the window"])
def test_a_sample_is_drawn_from_what_the_window_shows(gpt, prompt):
    options = [*TINY, "--precision=float32", "--sample-length=20", "--temperature=1e-6"]
    arguments = gpt.argument_parser().parse_args(options)
    made = gpt.make_programs(arguments, gpt.start_devices(arguments))
    # Larger weights, so that what comes before matters; at no temperature, the likeliest byte.
    params = jax.tree.map(lambda leaf: 20 * leaf, made.create().params)
    numbers = np.frombuffer(prompt, np.uint8).astype(np.int32)
    drawn = np.asarray(made.sample(params, numbers))

    # The model is causal, so that its first window tells what follows each beginning of it.
    text = np.concatenate([numbers[-12:], drawn])
    graph = nnx.graphdef(gpt.GPT(16, 2, 1, 12, nnx.Rngs(0)))
    model = jax.jit(lambda windows: nnx.merge(graph, nnx.State(params))(windows).argmax(-1))
    likeliest = np.asarray(model(np.lib.stride_tricks.sliding_window_view(text, 12)))
    expected = np.concatenate([likeliest[0], likeliest[1:, -1]])[:-1]
    assert np.array_equal(expected[len(numbers[-12:]) - 1 :], drawn)
    assert len(set(drawn.tolist())) > 2
