"""Paired timing: what runs in the same round, in shuffled order, has the same slow moments."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import stats

# Long enough that reading the clock and waking a process do not count.
SLICE_SECONDS = 0.3


def paired(
    time_steps: dict[str, Callable[[int], float]],
    step_seconds: float | None,
    baseline: str,
    rounds: int,
) -> dict[str, dict[str, Any]]:
    """Times every candidate once a round and compares it with the baseline of the same round.

    Args:
      time_steps: for each candidate a function of a number of steps that returns their seconds.
      step_seconds: roughly how long a step takes, to choose how many are timed together; None for
        one at a time.
      baseline: the candidate that the ratios are to.
      rounds: how often; each in an order of its own.

    Returns: for each candidate its median `seconds` a step, the median `ratio` to the baseline and
      the 95 % bootstrap `interval` of that median; `{"error": sentence}` for one that raised
      RuntimeError, and for all if that was the baseline.
    """
    steps = 1 if step_seconds is None else int(np.clip(SLICE_SECONDS / step_seconds, 1, 100))
    shuffle = random.Random(0)
    seconds: dict[str, list[float]] = {name: [] for name in time_steps}
    failed: dict[str, dict[str, Any]] = {}
    for _ in range(rounds):
        order = [name for name in time_steps if name not in failed]
        shuffle.shuffle(order)
        for name in order:
            try:
                seconds[name].append(time_steps[name](steps) / steps)
            except RuntimeError as error:
                failed[name] = {"error": str(error)}
        if baseline in failed:
            return {name: failed[baseline] for name in time_steps} | failed

    results: dict[str, dict[str, Any]] = {}
    for name, own in seconds.items():
        if name in failed:
            results[name] = failed[name]
            continue
        ratios = np.array(own) / np.array(seconds[baseline])
        results[name] = {"seconds": float(np.median(own)), "ratio": float(np.median(ratios))}
        if np.ptp(ratios) > 0:  # the baseline's own ratios are all 1
            found = stats.bootstrap(
                (ratios,), np.median, method="percentile", rng=np.random.default_rng(0)
            )
            low, high = found.confidence_interval
            results[name]["interval"] = [float(low), float(high)]
    return results
