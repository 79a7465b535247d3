"""The example of reinforcement learning, at a tiny size, and in pieces."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.project.running import imported_example, refusal

pytestmark = pytest.mark.full

TINY = ["--digits=1", "--width=32", "--heads=2", "--pretrain-to=0.3", "--batch-size=16"]


@pytest.fixture(scope="module")
def grpo():
    """The example as a module."""
    with imported_example("grpo") as module:
        yield module


@pytest.fixture(scope="module")
def made(grpo):
    """Returns what gives programs, a state and the questions of a step, for some options."""
    start = functools.cache(lambda: grpo.pretrain(grpo.argument_parser().parse_args(TINY), 0))

    @functools.cache
    def programs(kind, *options):
        arguments = grpo.argument_parser().parse_args([*TINY, *options])
        texts = functools.partial(grpo.texts_of_step, arguments, 0)
        return grpo.make_programs(arguments, kind), texts

    def make(kind, *options):
        made, texts = programs(kind, *options)
        return made, made.create(start()), texts

    return make


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--heads=3"], "--heads 3 does not divide --width 32"),
        (["--group=1"], "expected 2 or more answers to compare"),
        (["--pretrain-to=1"], "a share below 1"),
    ],
)
def test_a_mistake_is_told_with_a_way_out(tmp_path, options, words):
    assert words in refusal("grpo", *TINY, f"--output-dir={tmp_path / 'out'}", *options)
    assert not (tmp_path / "out").exists()


def test_it_learns(grpo, made):
    gains = []
    for seed in range(3):  # a single one gains 0.07 to 0.20, in float32 0.10 to 0.16
        programs, state, texts = made(grpo.Kind("mixed_float16"), "--learning-rate=1e-3")
        rewards = []
        for step in range(100):
            samples, reward = programs.sample(state.params, texts(step), seed, step)
            rewards.append(float(reward))
            for _ in range(2):
                state, measured = programs.train(state, samples)
                assert not measured["applied_nonfinite"]
        gains.append(np.mean(rewards[-20:]) - np.mean(rewards[:20]))
        # The first scale may be too large for it, and then halves.
        assert measured["skipped"] < 5 and measured["loss_scale"] > 2.0**10
    assert np.mean(gains) > 0.1


def gap(grpo, made, *kind, **more):
    programs, state, texts = made(grpo.Kind(*kind, **more))
    gaps = []
    for step in range(8):  # two have a few dozen tokens, whose gap differs between processors
        samples, _ = programs.sample(state.params, texts(step), 0, step)
        state, measured = programs.train(state, samples)
        gaps.append(float(measured["gap"]))
    return np.mean(gaps)


def test_the_gap_to_a_sampler_in_half_is_that_of_the_digits(grpo, made):
    in_float32 = gap(grpo, made, "float32")
    in_float16 = gap(grpo, made, "mixed_float16", sampler="half")
    in_bfloat16 = gap(grpo, made, "mixed_bfloat16", sampler="half")
    assert in_float32 < 1e-6 < in_float16 <= in_bfloat16 / 6


def test_with_the_same_roundings_there_is_nearly_no_gap(grpo, made):
    for precision, more in (("mixed_float16", {}), ("mixed_bfloat16", {"all_roundings": True})):
        same, other = gap(grpo, made, precision, **more), gap(grpo, made, precision, sampler="half")
        assert same < other / 20


@pytest.mark.parametrize("loss_scale", ["default", "none"])
def test_a_gradient_that_is_not_finite_changes_nothing_if_it_is_checked(grpo, made, loss_scale):
    programs, state, texts = made(grpo.Kind("mixed_float16", loss_scale))
    samples, _ = programs.sample(state.params, texts(0), 0, 0)
    before = jax.tree.map(np.array, (state.params, state.opt_state.inner_state))
    samples = samples._replace(log_probs=samples.log_probs.at[3, 1].set(jnp.nan))
    state, measured = programs.train(state, samples)
    if loss_scale == "none":
        assert measured["applied_nonfinite"]  # without a check it is applied, and counted
        return
    assert measured["skipped"] == 1 and not measured["applied_nonfinite"]
    assert measured["loss_scale"] == 2.0**15
    after = state.params, state.opt_state.inner_state
    jax.tree.map(np.testing.assert_array_equal, after, before)
