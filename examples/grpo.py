"""Reinforcement learning by GRPO: the policy that samples and the policy that trains, in half.

    python examples/grpo.py                                # float16, a minute on two CPU cores
    python examples/grpo.py --precision mixed_bfloat16
    python examples/grpo.py --compare --seeds 5            # all that is compared; half an hour
    python examples/grpo.py --help

A small GPT adds two numbers: after "37+85=" it writes "122", and the reward is 1 if all digits are
right, else 0. It first learns from right answers, in float32, until it is right as often as
--pretrain-to says. Then each step draws questions and a group of answers to each, token by token
with a cache of keys and values, and updates the parameters from whole texts: group-relative
advantages and clipped ratios as in GRPO (Shao et al. 2024, arXiv 2402.03300), without its penalty
on the distance from the first policy.

Sampling and training compute the same function. The gap is the difference between the two
log-probabilities of a token that was drawn, before any update: 0 if nothing were rounded. Ratios
are of the policy that trains over the policy that sampled, so that the gap is in them. With
--sampler half the sampler is a program of its own, as a server's: parameters in half, and all but
softmax computed in half. It rounds in other places than the training.

Writes `grpo.json` and `grpo.svg` into the output folder.
"""

import argparse
import collections
import functools
import pathlib
import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from _common import (
    COLORS,
    OUTPUT,
    PRECISIONS,
    OptionsHelp,
    begin,
    finish,
    positive,
    print_table,
    rounded,
    stop,
)
from _sums import GPT, Sums, chosen
from rich.progress import Progress

import jmp
from jmp import transforms

LAST = 20  # steps, whose mean reward is the final one
AT_A_TIME = 20  # steps of pretraining between two looks at how often it is right
MOST = 5000  # of them, before it gives up
POINTS = 30  # of a curve in the report


class Kind(NamedTuple):
    """One way to train."""

    precision: str
    loss_scale: str = "default"
    sampler: str = "autocast"
    recompute: str = "none"
    all_roundings: bool = False

    @property
    def name(self) -> str:
        words = [self.precision.removeprefix("mixed_")]
        words += ["no loss scaling"] * (self.loss_scale == "none")
        words += ["sampled in half"] * (self.sampler == "half")
        words += [f"recompute {self.recompute}"] * (self.recompute != "none")
        return ", ".join(words + ["all roundings"] * self.all_roundings)


COMPARED = (
    Kind("float32"),
    Kind("mixed_bfloat16", sampler="half"),
    Kind("mixed_float16", sampler="half"),
    Kind("mixed_float16", "none", sampler="half"),
    Kind("mixed_bfloat16"),
    Kind("mixed_float16"),
    Kind("mixed_bfloat16", recompute="auto"),
    Kind("mixed_bfloat16", recompute="auto", all_roundings=True),
    Kind("mixed_float16", recompute="auto"),
)


class State(NamedTuple):
    """All that training changes."""

    params: Any
    opt_state: Any


class Samples(NamedTuple):
    """What the policy drew: a row is an answer, the rows of a group stand together."""

    texts: jax.Array  # int32[rows, length]
    log_probs: jax.Array  # float32[rows, tokens of an answer], by the policy that sampled
    advantages: jax.Array  # float32[rows]


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=OptionsHelp)
    add = parser.add_argument
    add("--precision", choices=PRECISIONS, default="mixed_float16")
    add("--loss-scale", choices=("default", "none"), default="default", help="none: of 1, no check")
    add("--sampler", choices=("autocast", "half"), default="autocast", help="half: one of its own")
    add("--recompute", choices=("none", "auto", "all"), default="none", help="as in jmp.autocast")
    add("--all-roundings", action="store_true", help="XLA may leave none out: no excess precision")
    add("--compare", action="store_true", help="these five options in all that is compared")
    add("--digits", type=positive(int), default=2, help="of each number")
    add("--layers", type=positive(int), default=2)
    add("--width", type=positive(int), default=64)
    add("--heads", type=positive(int), default=4)
    add("--pretrain-to", type=positive(float), default=0.4, help="share of right answers")
    add("--batch-size", type=positive(int), default=24, help="questions in a step")
    add("--group", type=positive(int), default=8, help="answers to a question")
    add("--steps", type=positive(int), default=300)
    add("--updates", type=positive(int), default=2, help="of the parameters, from one sample")
    add("--learning-rate", type=positive(float), default=3e-4)
    add("--clip", type=positive(float), default=0.2, help="how far from 1 a ratio counts")
    add("--seed", type=int, default=0, help="the first one")
    add("--seeds", type=positive(int), default=1, help="trainings, each with another seed")
    add("--output-dir", type=pathlib.Path, default=OUTPUT)
    return parser


def make_model(arguments: argparse.Namespace) -> GPT:
    length = Sums(arguments.digits).length
    return GPT(arguments.layers, arguments.width, arguments.heads, length)


def pretrain(arguments: argparse.Namespace, seed: int) -> Any:
    """Returns parameters that are right as often as was asked."""
    model, sums, optimizer = make_model(arguments), Sums(arguments.digits), optax.adam(1e-3)
    texts = sums.texts(np.arange(100**sums.digits))

    def log_probs(params: Any, texts: jax.Array) -> jax.Array:
        logits, _ = model(params, texts[:, :-1])
        return chosen(logits[:, sums.question - 1 :], texts[:, sums.question :])

    @jax.jit
    def steps(params: Any, opt_state: Any, first: Any) -> tuple[Any, Any, jax.Array]:
        def step(carry: Any, number: jax.Array) -> tuple[Any, None]:
            params, opt_state = carry
            key = jax.random.fold_in(jax.random.key(seed), number)
            batch = jnp.asarray(texts)[jax.random.randint(key, 256, 0, len(texts))]
            grads = jax.grad(lambda params: -log_probs(params, batch).mean())(params)
            updates, opt_state = optimizer.update(grads, opt_state)
            return (optax.apply_updates(params, updates), opt_state), None

        numbers = first + jnp.arange(AT_A_TIME)
        params, opt_state = jax.lax.scan(step, (params, opt_state), numbers)[0]
        # Whoever samples is right with the probability of the right answer: nothing is drawn.
        return params, opt_state, jnp.exp(log_probs(params, texts[::7]).sum(axis=1)).mean()

    params = jax.jit(model.init)(jax.random.key(seed))
    opt_state, right, count = jax.jit(optimizer.init)(params), 0.0, 0
    while right < arguments.pretrain_to:
        if count >= MOST:
            stop(
                f"After {count} steps {right:.0%} are right; expected --pretrain-to "
                f"{arguments.pretrain_to:g}. Give a lower share, or a larger --width."
            )
        params, opt_state, right = steps(params, opt_state, count)
        count += AT_A_TIME
    return jax.device_get(params)


def make_programs(arguments: argparse.Namespace, kind: Kind) -> types.SimpleNamespace:
    """Returns what runs on the device: `create`, `sample` and `train`."""
    model, sums = make_model(arguments), Sums(arguments.digits)
    policy = jmp.get_policy(kind.precision)
    scale = jmp.NoOpLossScale() if kind.loss_scale == "none" else None
    optimizer = transforms.mixed_precision(optax.adam(arguments.learning_rate), policy, scale)

    def create(params: Any) -> State:
        return State(params, optimizer.init(params))

    def generate(params: Any, questions: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns answers, drawn token by token, and the log-probability of each token."""
        caches = model.empty_caches(params, len(questions))
        _, caches = model(params, questions[:, :-1], 0, caches)

        def turn(carry: Any, inputs: Any) -> tuple[Any, Any]:
            (token, caches), (place, key) = carry, inputs
            logits, caches = model(params, token[:, None], place, caches)
            token = jax.random.categorical(key, logits[:, 0].astype(jnp.float32))
            return (token, caches), (token, chosen(logits[:, 0], token))

        numbers = jnp.arange(sums.question - 1, sums.length - 1)
        keys = jax.random.split(key, len(numbers))
        _, drawn = jax.lax.scan(turn, (questions[:, -1], caches), (numbers, keys))
        return jax.tree.map(jnp.transpose, drawn)

    def loss_fn(params: Any, samples: Samples) -> tuple[jax.Array, jax.Array]:
        """Returns GRPO's loss, and the log-ratios of the policy that trains over the sampler."""
        logits, _ = model(params, samples.texts[:, :-1])
        answers = samples.texts[:, sums.question :]
        differences = chosen(logits[:, sums.question - 1 :], answers) - samples.log_probs
        ratios, advantages = jnp.exp(differences), samples.advantages[:, None]
        clipped = jnp.clip(ratios, 1 - arguments.clip, 1 + arguments.clip)
        return -jnp.minimum(ratios * advantages, clipped * advantages).mean(), differences

    # Products and caches in half, softmax and loss in float32; `train` scales the loss. By default
    # what is recomputed depends on sizes, and with it what is rounded: the cached loop and whole
    # texts would round in other places.
    autocast = functools.partial(jmp.autocast, policy=policy, recompute=kind.recompute)
    loss_fn = autocast(loss_fn)
    if kind.sampler == "autocast":
        generate = autocast(generate)

    def sample(params: Any, texts: jax.Array, seed: Any, step: Any) -> tuple[Samples, jax.Array]:
        """Returns a group of answers to each question, and the mean reward."""
        texts = jnp.repeat(texts, arguments.group, axis=0)
        questions, right = texts[:, : sums.question], texts[:, sums.question :]
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(1), seed), step)
        if kind.sampler == "half":
            params = policy.cast_to_compute(params)
        answers, log_probs = generate(params, questions, key)
        rewards = jnp.all(answers == right, axis=1).astype(jnp.float32)
        groups = rewards.reshape(-1, arguments.group)
        centered = groups - groups.mean(axis=1, keepdims=True)
        advantages = centered / (groups.std(axis=1, keepdims=True) + 1e-4)
        texts = jnp.concatenate([questions, answers], axis=1)
        return Samples(texts, log_probs, advantages.reshape(-1)), rewards.mean()

    def train(state: State, samples: Samples) -> tuple[State, dict[str, jax.Array]]:
        """Returns the state after one update, and what was measured before it."""
        loss_scale, skipped = state.opt_state.loss_scale, state.opt_state.skipped_steps
        grad_fn = jmp.scaled_value_and_grad(loss_fn, loss_scale, has_aux=True)
        (_, differences), grads = grad_fn(state.params, samples)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        gaps, ratios = jnp.abs(differences), jnp.exp(differences)
        is_finite = jnp.isfinite(optax.tree.norm(grads))
        return State(optax.apply_updates(state.params, updates), opt_state), {
            "gap": gaps.mean(),
            "largest_gap": gaps.max(),
            "sample_size": ratios.sum() ** 2 / (ratios**2).sum() / ratios.size,
            "zeros": optax.tree.sum(jax.tree.map(lambda g: (g == 0).sum(), grads))
            / optax.tree.size(grads),
            "loss_scale": jnp.float32(opt_state.loss_scale.loss_scale),
            "skipped": opt_state.skipped_steps,
            "applied_nonfinite": ~is_finite & (opt_state.skipped_steps == skipped),
        }

    # By default XLA may compute on in float32 where a program rounds to half in between.
    options = {"xla_allow_excess_precision": False} if kind.all_roundings else None
    jit = functools.partial(jax.jit, compiler_options=options)
    return types.SimpleNamespace(
        create=jit(create), sample=jit(sample), train=jit(train, donate_argnums=0)
    )


def texts_of_step(arguments: argparse.Namespace, seed: int, step: int) -> np.ndarray:
    """Returns questions with their right answers."""
    random = np.random.default_rng((seed % 2**32, step))
    pairs = random.integers(100**arguments.digits, size=arguments.batch_size)
    return Sums(arguments.digits).texts(pairs)


def run(
    arguments: argparse.Namespace, programs: Any, params: Any, seed: int, tick: Any
) -> dict[str, Any]:
    """Trains from `params` on; returns what was measured at every step."""
    state, history = programs.create(params), collections.defaultdict(list)
    for step in range(arguments.steps):
        texts = texts_of_step(arguments, seed, step)
        samples, reward = programs.sample(state.params, texts, seed, step)
        measured = []
        for _ in range(arguments.updates):
            state, now = programs.train(state, samples)
            measured.append(now)
        # All of the first update, which has the parameters that sampled, but for what is counted.
        measured = jax.device_get(measured)
        values = measured[0] | {name: measured[-1][name] for name in ("loss_scale", "skipped")}
        values["applied_nonfinite"] = sum(now["applied_nonfinite"] for now in measured)
        values |= {"reward": reward, "last_sample_size": measured[-1]["sample_size"]}
        for name, value in values.items():
            history[name].append(np.asarray(value).item())
        tick()
    return history


def summarize(histories: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the figures of one kind of training: a list has an entry a seed."""
    array = lambda name: np.array([history[name] for history in histories], float)
    size = max(1, array("reward").shape[1] // POINTS)
    in_blocks = lambda x: x[:, : x.shape[1] // size * size].reshape(len(x), -1, size).mean(axis=2)
    finals = array("reward")[:, -LAST:].mean(axis=1)
    return {
        "final_rewards": finals.tolist(),
        "final_reward": float(finals.mean()),
        "mean_gaps": array("gap").mean(axis=1).tolist(),
        "largest_gaps": array("largest_gap").max(axis=1).tolist(),
        # Of the first update of each step the gap alone; of the last the policy's own steps, too.
        "sample_sizes": array("sample_size").mean(axis=1).tolist(),
        "last_sample_sizes": array("last_sample_size").mean(axis=1).tolist(),
        "zero_gradients": array("zeros").mean(axis=1).tolist(),
        "final_scales": array("loss_scale")[:, -1].tolist(),
        "skipped_steps": array("skipped")[:, -1].tolist(),
        "applied_nonfinite": array("applied_nonfinite").sum(axis=1).tolist(),
        "steps_a_point": size,
        "reward_curves": rounded(in_blocks(array("reward"))),
        "gap_curves": rounded(in_blocks(array("gap"))),
    }


def print_results(results: dict[str, Any], console: Any) -> None:
    headings = "final reward|mean gap|largest gap|sample size|zero gradients|scale|skipped"
    rows = [
        [
            name,
            f"{result['final_reward']:.3f} ± {np.std(result['final_rewards']):.3f}",
            f"{np.mean(result['mean_gaps']):.1e}",
            f"{np.max(result['largest_gaps']):.1e}",
            f"{np.mean(result['sample_sizes']):.6f}",
            f"{100 * np.mean(result['zero_gradients']):.1f} %",
            f"{np.median(result['final_scales']):g}",
            f"{np.mean(result['skipped_steps']):.1f}",
        ]
        for name, result in results.items()
    ]
    print_table(console, ["Sums by GRPO", *headings.split("|")], *rows)
    console.print(
        f"Final reward: of the last {LAST} steps, mean ± standard deviation of the seeds."
    )
    applied = sum(sum(result["applied_nonfinite"]) for result in results.values())
    console.print(f"Updates applied with a gradient that is not finite: {applied:.0f}.")


def plot(report: dict[str, Any]) -> Any:
    """Draws what `grpo.json` holds: rewards with their deviations above, gaps below."""
    colors = {"float32": COLORS[0], "bfloat16": COLORS[1], "float16": COLORS[3]}
    styles = {"sampled in half": "-", "all roundings": ":"}
    with plt.rc_context({"font.size": 14}):
        figure, (top, bottom) = plt.subplots(
            2, 1, figsize=(7, 10), sharex=True, layout="constrained"
        )
    # What is recomputed is a matter of sizes and not of this picture.
    shown = {name: run for name, run in report["runs"].items() if "recompute" not in name}
    for name, result in (shown or report["runs"]).items():
        rewards, gaps = (np.array(result[f"{what}_curves"], float) for what in ("reward", "gap"))
        steps = (np.arange(rewards.shape[1]) + 0.5) * result["steps_a_point"]
        precision, *words = name.split(", ")
        is_scaled = "no loss scaling" not in words
        style = styles.get(words[-1], "--") if words else "--"
        look = {"color": colors[precision], "linewidth": 2}
        # One sampler is enough above: rewards are alike.
        if style == "-" or precision == "float32" or len(shown) < 2:
            mean, deviation = rewards.mean(axis=0), rewards.std(axis=0)
            top.fill_between(
                steps, mean - deviation, mean + deviation, color=look["color"], alpha=0.15, lw=0
            )
            label = precision if is_scaled else f"{precision}, no loss scaling"
            top.plot(steps, mean, linestyle="-" if is_scaled else ":", label=label, **look)
        if is_scaled:
            bottom.plot(steps, gaps.mean(axis=0), linestyle=style, label=name, **look)
    top.set(ylabel="mean reward")
    bottom.set(xlabel="step", ylabel="mean gap, nats a token")
    if any(np.any(line.get_ydata() > 0) for line in bottom.lines):
        bottom.set_yscale("log")
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
        place = {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": 2}
        axes.legend(**place, frameon=False, fontsize=12, columnspacing=1)
    return figure


def main() -> None:
    arguments = argument_parser().parse_args()
    width, heads = arguments.width, arguments.heads
    if width % heads:
        stop(f"--heads {heads} does not divide --width {width}; expected a divisor")
    if arguments.group < 2 or arguments.pretrain_to >= 1:
        stop(
            f"got --group {arguments.group} and --pretrain-to {arguments.pretrain_to}; expected 2 "
            "or more answers to compare with each other, and a share below 1"
        )
    console = begin(arguments)
    one = Kind(*(getattr(arguments, name) for name in Kind._fields))
    starts = [pretrain(arguments, arguments.seed + number) for number in range(arguments.seeds)]
    results = {}
    with Progress(console=console) as progress:
        for kind in COMPARED if arguments.compare else (one,):
            programs = make_programs(arguments, kind)
            task = progress.add_task(kind.name, total=arguments.steps * arguments.seeds)
            tick = functools.partial(progress.advance, task)
            histories = [
                run(arguments, programs, params, seed, tick)
                for seed, params in enumerate(starts, arguments.seed)
            ]
            results[kind.name] = summarize(histories)
    print_results(results, console)
    finish(console, arguments, "grpo", plot, runs=results)


if __name__ == "__main__":
    main()
