"""`logprob_gap`: the distance between the log-probabilities that two programs give the same tokens.

One program scores whole sequences at once, as in training and in prefill; the other generates one
token at a time, with a cache. Both compute the same function, and round in different places.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jmp._messages import described, wrong
from jmp.diagnostics._arguments import asked_function, split_arguments
from jmp.diagnostics._tables import Report, table

QUANTILES = (0.5, 0.9, 0.99)


def logprob_gap(
    trained: Callable[..., Any], sampled: Callable[..., Any], *early: Any, where: Any = None
) -> Callable[..., "LogprobGap"]:
    """Returns a function that measures |log p - log q| per token between two programs.

    Each takes the same arguments and returns log-probabilities of the same tokens, one number a
    token, in arrays of one shape: `trained` log p, as training computes it, `sampled` log q, as the
    loop that generates does. Both run on the device as they are given: wrap them in `jmp.autocast`.
    The differences are computed in float64 on the host.

    Args:
      trained, sampled: functions of arrays, or of any pytrees.
      where: booleans of that shape that say which tokens count; by default all. Paddings, and
        tokens after the end of a text, should not.

    Returns: a function of their arguments that returns a `LogprobGap`.

    Raises:
      TypeError: one of them is no function or returns no floating array; `where` is not boolean.
      ValueError: shapes differ, or no token counts.

    >>> logits, tokens = jnp.eye(3), jnp.arange(3)
    >>> def score(logits):
    ...     return jnp.diagonal(jax.nn.log_softmax(logits))
    >>> def rounded(logits):
    ...     return score(logits.astype(jnp.bfloat16)).astype(jnp.float32)
    >>> gap = logprob_gap(score, rounded)(logits)
    >>> gap.tokens, 0 < gap.mean <= gap.maximum < 0.01, gap.effective_sample_size > 0.999
    (3, True, True)
    """
    call = "logprob_gap(trained, sampled)(*args)"
    functions = [asked_function(call, f, early) for f in (trained, sampled)]

    def measure(*args: Any, **kwargs: Any) -> LogprobGap:
        args, kwargs = split_arguments(*args, **kwargs)
        log_p, log_q = (_scores(function(*args, **kwargs)) for function in functions)
        if log_p.shape != log_q.shape:
            raise ValueError(
                f"logprob_gap got log-probabilities of the shapes {log_p.shape} and {log_q.shape}; "
                "expected one number for each of the same tokens from both functions."
            )
        return _gap(log_p, log_q, _counted(where, log_p.shape))

    return measure


@dataclasses.dataclass(frozen=True)
class LogprobGap(Report):
    """What `logprob_gap` found; `print` shows it, `to_dict` gives the data. Natural logarithms.

    A token that has minus infinity in both has no gap; a token that is not finite in one of them,
    or NaN, is counted in `nonfinite` and is no part of the other numbers.

    Attributes:
      tokens: how many tokens count.
      nonfinite: how many of them have a gap that is not finite.
      mean, maximum: of |log p - log q|.
      quantiles: of |log p - log q|, by their share: 0.5, 0.9, 0.99.
      place: the index of the token of the largest gap.
      bias: the mean of log p - log q, with its sign.
      effective_sample_size: of the importance ratios r = p / q, as a share of the tokens:
        (sum r)^2 / (n sum r^2) (Kong 1992); 1 if all ratios are equal.

    >>> from jmp.diagnostics import logprob_gap
    >>> score = lambda x: jnp.log(x)
    >>> gap = logprob_gap(score, lambda x: score(x) - 0.25)(jnp.full(8, 0.5))
    >>> round(gap.mean, 3), round(gap.effective_sample_size, 3)
    (0.25, 1.0)
    >>> gap.quantiles[0.5] == gap.maximum
    True
    """

    tokens: int
    nonfinite: int
    mean: float
    maximum: float
    quantiles: dict[float, float]
    place: tuple[int, ...]
    bias: float
    effective_sample_size: float

    def __str__(self) -> str:
        rows = [("mean", f"{self.mean:.3g}"), ("maximum", f"{self.maximum:.3g}")]
        rows += [(f"quantile {share}", f"{gap:.3g}") for share, gap in self.quantiles.items()]
        place = ", ".join(map(str, self.place))
        lines = [
            f"|log p - log q| of {self.tokens:,} tokens, the largest at [{place}]:",
            table(("", "nats"), rows),
            f"log p - log q on average: {self.bias:.3g}",
            f"effective sample size of p / q: {self.effective_sample_size:.4f} of the tokens",
        ]
        if self.nonfinite:
            lines.append(f"left out, not finite: {self.nonfinite:,} tokens")
        return "\n".join(lines)


def _scores(found: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Returns log-probabilities in float64."""
    dtype = getattr(found, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, np.floating):
        raise TypeError(
            f"logprob_gap got {described(found)} from a function; expected an array of "
            "log-probabilities, one floating number a token. If it returns several, choose one: "
            "lambda *args: fun(*args)[0]."
        )
    return np.asarray(found).astype(np.float64)


def _counted(where: Any, shape: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Returns which tokens count."""
    if where is None:
        return np.ones(shape, bool)
    counted = np.asarray(where)
    if counted.dtype != bool:
        raise wrong(TypeError, "logprob_gap", where, "an array of booleans", name="where")
    if counted.shape != shape or not counted.any():
        raise ValueError(
            f"logprob_gap got where= of the shape {counted.shape}, True for {counted.sum()} "
            f"tokens; expected the shape of the log-probabilities, {shape}, and True for one."
        )
    return counted


def _gap(log_p: Any, log_q: Any, counted: Any) -> LogprobGap:
    with np.errstate(invalid="ignore"):
        difference = np.where(log_p == log_q, 0, log_p - log_q)
    finite = counted & np.isfinite(difference)
    found = difference[finite]
    if not found.size:
        raise ValueError(
            f"logprob_gap found no token with finite log-probabilities in both, of {counted.sum()}."
        )
    gaps = np.where(finite, np.abs(difference), -1)
    ratios = np.exp(found - found.max())  # their common factor drops out
    return LogprobGap(
        tokens=int(counted.sum()),
        nonfinite=int(counted.sum() - found.size),
        mean=float(np.abs(found).mean()),
        maximum=float(gaps.max()),
        quantiles={share: float(np.quantile(np.abs(found), share)) for share in QUANTILES},
        place=tuple(map(int, np.unravel_index(gaps.argmax(), gaps.shape))),
        bias=float(found.mean()),
        effective_sample_size=float(ratios.sum() ** 2 / (ratios.size * (ratios**2).sum())),
    )
