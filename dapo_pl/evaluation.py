"""avg@k, pass@k and cons@k with their uncertainty, on [problems, samples] tables.

Accuracies are fractions in [0, 1]. Intervals are over problems, because the question is how the model would
do on other problems of the kind, and paired where two evaluations share their problems.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import beta

Correct = Any
"""[problems, samples] of booleans: nested lists, a numpy array or a tensor."""


def _table(correct: Correct) -> np.ndarray:
    table = np.asarray(correct, dtype=float)
    if table.ndim != 2 or table.shape[1] < 1:
        raise ValueError(f"a [problems, samples] table is needed, not one of shape {table.shape}")
    return table


def per_problem_avg_at_k(correct: Correct) -> np.ndarray:
    """[problems], the share of each problem's samples that are right."""
    return _table(correct).mean(axis=1)


def per_problem_pass_at_k(correct: Correct, k: int | None = None) -> np.ndarray:
    """[problems], the unbiased estimate 1 - C(n - c, k) / C(n, k) of solving it within k of n samples."""
    table = _table(correct)
    n = table.shape[1]
    size = n if k is None else k
    if not 1 <= size <= n:
        raise ValueError(f"pass@{size} cannot be estimated from {n} samples")
    wrong = n - table.sum(axis=1)
    # The product form of the ratio of binomials: no large numbers, and exactly 0 when fewer than k are wrong.
    miss = np.prod(np.clip(wrong[:, None] - np.arange(size), 0, None) / (n - np.arange(size)), axis=1)
    return 1 - miss


def per_problem_cons_at_k(answers: Sequence[Sequence[Any]], truths: Sequence[Any] | None = None) -> np.ndarray:
    """[problems], the probability that a majority vote is right, ties broken at random.

    Args:
        answers: [problems][samples]; None abstains. Without `truths`, a table of right and wrong instead, and
            the vote is between the two.
        truths: [problems].
    """
    if truths is None:
        table = _table(answers)
        share = table.mean(axis=1)
        return np.where(share > 0.5, 1.0, np.where(share == 0.5, 0.5, 0.0))
    values = []
    for row, truth in zip(answers, truths, strict=True):
        votes = Counter(answer for answer in row if answer is not None)
        top = max(votes.values(), default=0)
        leaders = [answer for answer, count in votes.items() if count == top]
        values.append(1 / len(leaders) if truth in leaders else 0.0)
    return np.array(values)


def avg_at_k(correct: Correct) -> float:
    """Mean accuracy over problems and samples."""
    return float(per_problem_avg_at_k(correct).mean())


def pass_at_k(correct: Correct, k: int | None = None) -> float:
    """Share of problems solved within k samples; k is all of them when None."""
    return float(per_problem_pass_at_k(correct, k).mean())


def cons_at_k(answers: Sequence[Sequence[Any]], truths: Sequence[Any] | None = None) -> float:
    """Share of problems whose majority answer is right, see `per_problem_cons_at_k`."""
    return float(per_problem_cons_at_k(answers, truths).mean())


@dataclass(frozen=True)
class Interval:
    """Lower and upper bound."""

    low: float
    high: float


def bootstrap_interval(
    values: Any, *, level: float = 0.95, resamples: int = 10_000, seed: int = 0, bounded: bool = True
) -> Interval:
    """Interval of the mean of per-problem values by the bootstrap over problems (studentised).

    A percentile interval of 30 problems covers too little; scaling by each resample's own standard error
    mends that. Values that are all the same carry no spread to resample. For accuracies the bounds are then
    those of Clopper and Pearson, as if each problem were one trial: 30 of 30 is not certainty.

    Args:
        values: [problems].
        level: coverage.
        resamples: bootstrap resamples.
        seed: of the resampling.
        bounded: the values are fractions in [0, 1], and so are the bounds.
    """
    values = np.asarray(values, dtype=float)
    count = len(values)
    if count == 0:
        raise ValueError("no problems: there is nothing to resample")
    mean = float(values.mean())
    tail = (1 - level) / 2
    if np.ptp(values) == 0:
        if not bounded:
            return Interval(mean, mean)
        right = mean * count
        low = beta.ppf(tail, right, count - right + 1) if right > 0 else 0.0
        high = beta.ppf(1 - tail, right + 1, count - right) if right < count else 1.0
        return Interval(float(low), float(high))
    picks = np.random.default_rng(seed).integers(0, count, size=(resamples, count))
    drawn = values[picks]
    spread = drawn.std(axis=1, ddof=1)
    error = values.std(ddof=1) / np.sqrt(count)
    usable = spread > 0  # a resample of one value only has no scale
    t = (drawn.mean(axis=1)[usable] - mean) / (spread[usable] / np.sqrt(count))
    low, high = mean - np.quantile(t, [1 - tail, tail]) * error
    if bounded:
        low, high = max(0.0, low), min(1.0, high)
    return Interval(float(low), float(high))


@dataclass(frozen=True)
class PairedDifference:
    """`after - before` over the same problems, with its interval and the p-value of no difference."""

    mean: float
    low: float
    high: float
    p_value: float
    problems: int


def paired_difference(
    before: Any, after: Any, *, level: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> PairedDifference:
    """Compare two evaluations problem by problem.

    Args:
        before, after: [problems] per-problem values, in the same order.
        level, resamples, seed: see `bootstrap_interval`.

    Returns:
        The p-value is that of a two-sided permutation test that flips the sign of each problem's difference,
        by Monte Carlo with the observed one counted in, so it is never 0.
    """
    before, after = np.asarray(before, dtype=float), np.asarray(after, dtype=float)
    if before.shape != after.shape:
        raise ValueError(f"paired over {before.shape} and {after.shape} problems: they must be the same ones")
    difference = after - before
    interval = bootstrap_interval(difference, level=level, resamples=resamples, seed=seed, bounded=False)
    flips = np.random.default_rng(seed).choice([-1.0, 1.0], size=(resamples, len(difference)))
    observed = abs(difference.mean())
    # The tolerance keeps ties that differ by rounding alone on the side of no difference.
    extreme = np.abs((flips * difference).mean(axis=1)) >= observed - 1e-12
    p_value = (1 + int(extreme.sum())) / (1 + resamples)
    return PairedDifference(float(difference.mean()), interval.low, interval.high, p_value, len(difference))


@dataclass
class EvaluationResult:
    """k samples of each problem: [problems], and [problems][samples]."""

    problem_ids: list[str]
    truths: list[int]
    answers: list[list[int | None]]
    correct: list[list[bool]]
    lengths: list[list[int]]
    truncated: list[list[bool]]

    def summary(self) -> dict[str, float]:
        """avg@k, pass@k and cons@k with `_low` and `_high`, mean length and truncated share."""
        k = len(self.correct[0])
        summary: dict[str, float] = {}
        for name, values in (
            (f"avg@{k}", per_problem_avg_at_k(self.correct)),
            (f"pass@{k}", per_problem_pass_at_k(self.correct)),
            (f"cons@{k}", per_problem_cons_at_k(self.answers, self.truths)),
        ):
            interval = bootstrap_interval(values)
            summary |= {name: float(values.mean()), f"{name}_low": interval.low, f"{name}_high": interval.high}
        summary["response_length_mean"] = float(np.mean(self.lengths))
        summary["truncated_share"] = float(np.mean(self.truncated))
        return summary

    def to_json(self, path: Path) -> None:
        """Write whole or not at all."""
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        draft.write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")
        draft.replace(path)

    @classmethod
    def from_json(cls, path: Path) -> EvaluationResult:
        """Read what `to_json` wrote."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))
