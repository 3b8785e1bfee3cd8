"""The paper's claims, each beside what was measured here.

One rule decides all of them: they agree or contradict if the 95 % interval of the paired difference lies on one side of
zero. What a run differs by from itself, run a second time, is printed beside it and decides nothing: the seeds of an
interval differ by that too.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from experiments.compare import Interval, holm, outcome, paired
from experiments.runs import Run
from experiments.tables import Row, accuracies, best_rate, by_setting, interval_columns, noise_floor

BEST = "own best"
# An interval of fewer rests on their being normally distributed, which so few cannot tell: a verdict says how many.
MANY_SEEDS = 5


class Claim(NamedTuple):
    """That ``variant`` has less of something than ``baseline``, or more where the paper says so."""

    of: str
    variant: str
    baseline: str
    paper: str  # its difference or ratio, by size of model
    value: Callable[[Run], float | None]
    floor: str | None  # column of the noise table
    is_lower: bool = True
    is_ratio: bool = False  # differences are of logarithms


def _loss(run: Run) -> float | None:
    return run.valid.get("kd")


def log_variance(run: Run) -> float | None:
    found = run.result and run.result["gradients"]
    return math.log(found["variance"]) if found and found["variance"] else None


def _variation(run: Run) -> float | None:
    found = run.result and run.result["gradients"]
    return found["cv"] if found else None


def _spikes(run: Run) -> float | None:
    found = run.result and run.result["gradients"]
    return found["spikes_9"] if found else None


def _accuracy(run: Run) -> float | None:
    found = accuracies(run).get("accuracy")
    return None if found is None else 100 * found


CLAIMS = (
    Claim("loss", "affine", "softmax", "0.00 (0.5B), -0.01 (1B), -0.01 (3B)", _loss, "kd_difference"),
    Claim("loss", "affine", "sink", "-0.01 (0.5B), -0.01 (1B), -0.01 (3B)", _loss, "kd_difference"),
    Claim("loss", "affine_gated", "gated", "0.00 (1B), -0.02 (3B)", _loss, "kd_difference"),
    Claim(
        "variance of gradient norms", "affine", "softmax", "x 0.79 (0.5B), x 0.74 (1B)",
        log_variance, "log_variance_difference", is_ratio=True,
    ),
    Claim(
        "coefficient of variation", "affine", "softmax", "-0.10 (0.5B), -0.17 (1B)", _variation, "cv_difference"
    ),
    Claim("spikes, k = 9", "affine", "softmax", "-8 (0.5B), -1 (1B)", _spikes, "spikes_9_difference"),
    Claim(
        "zero-shot accuracy, points", "affine", "softmax", "+0.7 (0.5B), +0.5 (1B), +1.6 (3B)",
        _accuracy, None, is_lower=False,
    ),
)  # fmt: skip


def judged(runs: Sequence[Run], noise: Sequence[Row]) -> list[Row]:
    """A row for every claim and learning rate that both have runs at; losses also at each one's own best rate."""
    rows = []
    for claim in CLAIMS:
        for rate, values, baseline in _pairs(claim, runs):
            floor = None if claim.floor is None else noise_floor(noise, claim.floor, rate)
            difference, p = paired(values, baseline)
            about: Row = {
                "what": claim.of,
                "of": f"{claim.variant} against {claim.baseline}",
                "paper": claim.paper,
                "lr": rate,
                "n": difference.n,
            }
            show = math.exp if claim.is_ratio else float
            shown = interval_columns("here", difference, show)
            tested: Row = {"p": p, "p Holm": math.nan, "noise": "" if floor is None else show(floor)}
            rows.append(about | shown | tested | {"verdict": verdict(difference, claim.is_lower)})
    for row, corrected in zip(rows, holm([row["p"] for row in rows]), strict=True):
        row["p Holm"] = corrected
    return rows


def verdict(difference: Interval, is_lower: bool) -> str:
    word = outcome(difference, is_lower)
    if word not in (decided := {"better": "agrees", "worse": "contradicts"}):
        return word
    return decided[word] if difference.n >= MANY_SEEDS else f"{decided[word]}, {difference.n} seeds"


def _pairs(claim: Claim, runs: Sequence[Run]) -> Iterator[tuple[float | str, dict[int, float], dict[int, float]]]:
    at = by_setting(runs, claim.value)
    for rate in sorted({rate for _, rate in at}):
        values, baseline = (at.get((name, rate), {}) for name in (claim.variant, claim.baseline))
        if values.keys() & baseline.keys():
            yield rate, values, baseline
    names = {name for name, _ in at}
    if claim.value is _loss and {claim.variant, claim.baseline} <= names:
        values, baseline = (at[name, best_rate(name, at)] for name in (claim.variant, claim.baseline))
        yield BEST, values, baseline
