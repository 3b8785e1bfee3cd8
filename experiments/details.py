"""What lies behind the rows of tables A and B: spread of seeds, leads over training, where gradients differ."""

import math
import statistics
from collections.abc import Sequence

import numpy as np

from affine_attn.runs.series import STEPS, gradient_statistics
from experiments.compare import Interval, interval
from experiments.grid import COMMON_RATE, SEEDS
from experiments.runs import MICRO_NORM, Run
from experiments.tables import (
    BASELINE,
    SEVERAL_SEEDS,
    SMOOTHED_STEPS,
    Row,
    accuracies,
    best_rate,
    by_setting,
    gradient_variance,
    interval_columns,
)

LEADER = "affine"
# Where gradient norms are looked at again: behind the very first steps, and behind the warmup.
BEHIND_FIRST, BEHIND_WARMUP = 11, 101
SPIKE_FACTOR = 9


def spread(runs: Sequence[Run]) -> list[Row]:
    """Standard deviation of the final loss over seeds, by variant and learning rate."""
    at = by_setting(runs, lambda run: run.valid.get("kd"))
    rows: dict[str, Row] = {}
    for (variant, rate), values in sorted(at.items(), key=lambda entry: entry[0][1]):
        if len(values) >= SEVERAL_SEEDS:
            rows.setdefault(variant, {"variant": variant})[f"at {rate:g}"] = statistics.stdev(values.values())
    return [rows[variant] for variant in dict.fromkeys(variant for variant, _ in at) if variant in rows]


def leads(runs: Sequence[Run]) -> list[Row]:
    """Affine's training loss less softmax's at equal seed, at five times of training, and the step from which it keeps
    the sign of the end; also of each at its own best rate."""
    at = by_setting(runs, lambda run: run.valid.get("kd"))
    if not {BASELINE, LEADER} <= {variant for variant, _ in at}:
        return []
    found = {(run.variant, run.rate, run.seed): run for run in runs if run.variant in (BASELINE, LEADER)}
    pairs = {f"{rate:g}": (rate, rate) for rate in sorted({rate for variant, rate in at if variant == LEADER})}
    pairs["own best"] = best_rate(LEADER, at), best_rate(BASELINE, at)
    rows = []
    for name, (mine, theirs) in pairs.items():
        seeds = sorted({seed for variant, rate, seed in found if (variant, rate) == (LEADER, mine)})
        curves = [
            _loss_difference(found[LEADER, mine, seed], found[BASELINE, theirs, seed])
            for seed in seeds
            if (BASELINE, theirs, seed) in found
        ]
        mean = [sum(points) / len(points) for points in zip(*curves, strict=False)]
        if not mean:
            continue
        row: Row = {"lr": name, "n": len(curves)}
        row |= {f"{i * SMOOTHED_STEPS + 1} to {(i + 1) * SMOOTHED_STEPS}": mean[i] for i in _spread_out(len(mean))}
        other = [i for i, value in enumerate(mean) if value * mean[-1] < 0]
        rows.append(row | {"keeps its sign from step": (other[-1] + 1 if other else 0) * SMOOTHED_STEPS + 1})
    return rows


def _loss_difference(run: Run, baseline: Run) -> list[float]:
    """Means over as many steps as divergence is judged by."""
    pairs = zip(run.series()["loss"], baseline.series()["loss"], strict=False)
    differences = [mine - theirs for mine, theirs in pairs]
    starts = range(0, len(differences) - SMOOTHED_STEPS + 1, SMOOTHED_STEPS)
    return [sum(differences[i : i + SMOOTHED_STEPS]) / SMOOTHED_STEPS for i in starts]


def _spread_out(count: int) -> list[int]:
    """Return up to five places of so many, the last among them."""
    return sorted({round((count - 1) * part / 5) for part in range(1, 6)})


def steadiness(runs: Sequence[Run]) -> list[Row]:
    """Affine's gradient norms less softmax's at equal seed, by rate: the coefficient of variation from the first step
    and behind the warmup, spikes by the threshold of each and by softmax's for both, and what part of the
    difference of variances the first ten steps make."""
    norms = {(run.variant, run.rate, run.seed): run.series()["grad_norm"][:STEPS] for run in runs}
    rows = []
    for rate in sorted({rate for variant, rate, _ in norms if variant == LEADER}):
        pairs = [
            (mine, norms[BASELINE, rate, seed])
            for (variant, of, seed), mine in norms.items()
            if (variant, of) == (LEADER, rate) and (BASELINE, rate, seed) in norms
        ]
        if not pairs or min(len(series) for pair in pairs for series in pair) < BEHIND_WARMUP:
            continue
        row: Row = {"lr": rate, "n": len(pairs)}
        for start in (1, BEHIND_WARMUP):
            both = [[gradient_statistics(series[start - 1 :])["cv"] for series in pair] for pair in pairs]
            row |= interval_columns(f"cv from step {start}", interval([mine - theirs for mine, theirs in both]))
        own = [spikes(mine, mine) - spikes(theirs, theirs) for mine, theirs in pairs]
        common = [spikes(mine, theirs) - spikes(theirs, theirs) for mine, theirs in pairs]
        row |= interval_columns("spikes, own threshold", interval(own))
        row |= interval_columns("spikes, softmax's threshold", interval(common))
        whole, rest = (
            statistics.fmean((gradient_variance(a, start) or 0) - (gradient_variance(b, start) or 0) for a, b in pairs)
            for start in (1, BEHIND_FIRST)
        )
        rows.append(row | {"of the first ten steps": 1 - rest / whole if whole else math.nan})
    return rows


def spikes(norms: Sequence[float], threshold_of: Sequence[float]) -> int:
    """Steps above the median of ``threshold_of`` by so many times its usual distance from it."""
    g = np.asarray(threshold_of)
    median = np.median(g)
    return int((np.asarray(norms) > median + SPIKE_FACTOR * np.median(abs(g - median))).sum())


def noise_share(run: Run) -> float:
    """Return what the choice of text adds to the squared norm of a batch's gradient, after the very first steps.

    A micro-batch, one of so many parts, has the same gradient on average and so many times the variance:
    E |g|² = |G|² + V and E |g_micro|² = |G|² + parts V.
    """
    recipe, series = run.config["recipe"], run.series()
    parts = recipe["global_batch"] // recipe["micro_batch"]
    behind = slice(BEHIND_FIRST - 1, STEPS)
    if not series["grad_norm"][behind]:
        return math.nan
    whole, micro = (np.mean(np.square(series[name][behind])) for name in ("grad_norm", MICRO_NORM))
    return float((micro - whole) / ((parts - 1) * whole))


def stacked(runs: Sequence[Run]) -> tuple[Interval, int, int]:
    """Affine on top of a gate less the gate alone, up to the common rate: the mean over rates of each seed, and in how
    many of how many pairs it is worse."""
    at = by_setting(runs, lambda run: run.valid.get("kd"))
    rates = [rate for variant, rate in at if variant == "affine_gated" and rate <= COMMON_RATE]
    by_seed: dict[int, list[float]] = {}
    for rate in rates:
        for seed, loss in at["affine_gated", rate].items():
            if seed in at.get(("gated", rate), {}):
                by_seed.setdefault(seed, []).append(loss - at["gated", rate][seed])
    pairs = [difference for differences in by_seed.values() for difference in differences]
    means = [statistics.fmean(differences) for differences in by_seed.values()]
    return interval(means), sum(difference > 0 for difference in pairs), len(pairs)


def share_of_norms(runs: Sequence[Run]) -> float | None:
    """Return the share of affine's lead in cross-entropy that norms on q and k give softmax, at one rate and seed."""
    found = {
        (run.table, run.variant): run.valid["ce"]
        for run in runs
        if (run.seed, run.rate) == (SEEDS[0], COMMON_RATE) and "ce" in run.valid
    }
    wanted = ("a", BASELINE), ("a", LEADER), ("d", "rope")
    if not found.keys() >= set(wanted):
        return None
    plain, affine, normed = (found[key] for key in wanted)
    return (plain - normed) / (plain - affine)


def accuracy_error(runs: Sequence[Run]) -> float | None:
    """The standard error of a difference of two mean accuracies, in points, from the number of questions alone."""
    asked = [run.evaluations() for run in runs if accuracies(run)]
    if not asked:
        return None
    errors = [_standard_errors(results) for results in asked]
    return 100 * math.sqrt(2) * statistics.fmean(math.sqrt(sum(e * e for e in each)) / len(each) for each in errors)


def _standard_errors(results: Sequence[Row]) -> list[float]:
    """Return the standard errors of the tasks with an accuracy, that which counts."""
    found = [result["metrics"].get("acc_norm") or result["metrics"].get("acc") for result in results]
    return [metric["stderr"] for metric in found if metric]
