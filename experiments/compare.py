"""How sure one can be of a mean over seeds, and of a difference at equal seed and data order."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

CONFIDENCE = 0.95


class Interval(NamedTuple):
    """Interval of a mean: Student's t over the seeds. Without a second seed the ends are NaN."""

    mean: float
    low: float
    high: float
    n: int


class Paired(NamedTuple):
    """A difference of pairs: its interval, and the two-sided p of the paired t-test."""

    difference: Interval
    p: float


def interval(values: Sequence[float]) -> Interval:
    x = np.asarray(values, np.float64)
    if x.size < 2:
        return Interval(float(x.mean()) if x.size else math.nan, math.nan, math.nan, x.size)
    half = stats.t.ppf((1 + CONFIDENCE) / 2, x.size - 1) * x.std(ddof=1) / math.sqrt(x.size)
    return Interval(float(x.mean()), float(x.mean() - half), float(x.mean() + half), x.size)


def paired(values: dict[int, float], baseline: dict[int, float]) -> Paired:
    """Compare over the seeds that both have."""
    seeds = sorted(values.keys() & baseline.keys())
    mine, theirs = ([side[seed] for seed in seeds] for side in (values, baseline))
    p = float(stats.ttest_rel(mine, theirs).pvalue) if len(seeds) > 1 else math.nan  # pyright: ignore
    return Paired(interval([a - b for a, b in zip(mine, theirs, strict=True)]), p)


def outcome(difference: Interval, is_lower: bool = True) -> str:
    """What the interval of a difference decides; ``is_lower``: less is better."""
    if difference.n < 2:
        return "one seed" if difference.n else "not run"
    if difference.low <= 0 <= difference.high:
        return "open"
    return "better" if (difference.high < 0) == is_lower else "worse"


def welch(values: Sequence[float], baseline: Sequence[float]) -> float:
    """The two-sided p of Welch's t-test: as if nothing paired the seeds."""
    if min(len(values), len(baseline)) < 2:
        return math.nan
    return float(stats.ttest_ind(values, baseline, equal_var=False).pvalue)  # pyright: ignore


def holm(p: Sequence[float]) -> list[float]:
    """The p of a family of tests, corrected for their number; those that are NaN are no tests of it."""
    order = sorted((i for i in range(len(p)) if not math.isnan(p[i])), key=lambda i: p[i])
    corrected, largest = list(p), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * p[i]))
        corrected[i] = largest
    return corrected
