"""What a reader of two minutes gets: a row per claim, and a summary in sentences whose numbers come from the runs."""

import math
from collections.abc import Sequence

from experiments import claims, contrasts, details
from experiments.claims import BEST, Claim
from experiments.compare import Interval, paired
from experiments.controls import HALF, LEARNED
from experiments.grid import COMMON_RATE, CONTROLS, HIGH_RATE, PAPER_RATE, SWEPT_RATE
from experiments.runs import Run
from experiments.tables import BASELINE, Row, best_rate, by_setting

_DOUBTS = {
    ("loss", "affine", "softmax"): "a constant on the output does as much at 0.003",
    ("loss", "affine", "sink"): "weight decay acted on these sinks",
    ("loss", "affine_gated", "gated"): "three seeds",
    ("variance of gradient norms", "affine", "softmax"): "most of it lies in the first ten steps",
    ("coefficient of variation", "affine", "softmax"): "behind the warmup it is the other way at three of four rates",
    ("spikes, k = 9", "affine", "softmax"): "by a threshold common to both, affine has fewer at the paper's rate",
    ("zero-shot accuracy, points", "affine", "softmax"): "one seed, and the questions alone err by as much",
}


# The same runs say both, see details.steadiness.
_UNSETTLED = ("coefficient of variation", "spikes, k = 9")


def rows(runs: Sequence[Run]) -> list[Row]:
    """A row per claim: at the paper's rate, and with each variant at its own best rate for the loss."""
    found = []
    loss = by_setting(runs, lambda run: run.valid.get("kd"))
    for claim in claims.CLAIMS:
        at = by_setting(runs, claim.value)
        row: Row = {"claim": f"{claim.of}, {claim.variant} against {claim.baseline}", "paper": claim.paper}
        verdicts = []
        for name, both in (("at the paper's rate", (PAPER_RATE, PAPER_RATE)), ("at own best", _best(claim, loss))):
            values, baseline = (
                {} if rate is None else at.get((variant, rate), {})
                for variant, rate in zip((claim.variant, claim.baseline), both, strict=True)
            )
            difference = paired(values, baseline).difference
            row[name] = _shown(difference, claim.is_ratio)
            verdicts.append(f"{name}: {_word(difference, claim.is_lower)}" if difference.n else "")
        row["verdict"] = "; ".join(verdict for verdict in verdicts if verdict) or "not measured at these rates"
        if claim.of in _UNSETTLED:
            row["verdict"] = "no result: its sign depends on the definition"
        found.append(row | {"main doubt": _DOUBTS[claim.of, claim.variant, claim.baseline]})
    return found


def _best(claim: Claim, loss: dict) -> tuple[float | None, float | None]:
    known = {variant for variant, _ in loss}
    both = claim.variant, claim.baseline
    first, second = (best_rate(variant, loss) if variant in known else None for variant in both)
    return first, second


def _word(difference: Interval, is_lower: bool) -> str:
    """Of the claim's variant against its baseline."""
    if difference.n < 2:
        return "one seed"
    if difference.low <= 0 <= difference.high:
        return "open"
    word = "better" if (difference.high < 0) == is_lower else "worse"
    return word if difference.n >= claims.MANY_SEEDS else f"{word} ({difference.n} seeds)"


def _shown(difference: Interval, is_ratio: bool) -> str:
    if not difference.n:
        return ""
    mean, low, high = (math.exp(x) if is_ratio else x for x in difference[:3])
    text = f"x {mean:.3g}" if is_ratio else f"{mean:+.3g}"
    return f"{text} [{low:.3g}, {high:.3g}]" if difference.n > 1 else text


def summary(runs: Sequence[Run]) -> list[str]:
    """Sentences, each with the numbers it stands on; the first six are those of the README."""
    of_a = [run for run in runs if run.table == "a"]
    kd = by_setting(of_a, lambda run: run.valid.get("kd"))
    variance = by_setting(of_a, claims.log_variance)
    if not {BASELINE, "sink", "affine", "gated", "affine_gated"} <= {variant for variant, _ in kd}:
        return []

    def against(variant: str, baseline: str, *rates: float) -> tuple[str, str]:
        """The difference, and in how many of how many seeds it has its sign."""
        mine, theirs = (rates * 2)[:2] if rates else (best_rate(variant, kd), best_rate(baseline, kd))
        values, others = kd.get((variant, mine), {}), kd.get((baseline, theirs), {})
        found = paired(values, others).difference
        signs = [(values[seed] - others[seed]) * found.mean > 0 for seed in values.keys() & others.keys()]
        return _shown(found, is_ratio=False), f"in {sum(signs)} of {len(signs)} seeds"

    def ratio(rate: float) -> str:
        both = variance.get(("affine", rate), {}), variance.get((BASELINE, rate), {})
        return _shown(paired(*both).difference, is_ratio=True)

    top, sink_at_paper = against("affine", BASELINE), against("affine", "sink", PAPER_RATE)
    worse, times, pairs = details.stacked(of_a)
    leads = {row["lr"]: row for row in details.leads(of_a)}
    steady = {row["lr"]: row for row in details.steadiness(of_a)}
    spreads = {row["variant"]: row for row in details.spread(of_a)}
    low, best = leads[f"{PAPER_RATE:g}"], leads[BEST]
    early, late = ([name for name in low if " to " in name][place] for place in (0, -1))
    swept, common = f"at {SWEPT_RATE:g}", f"at {COMMON_RATE:g}"
    error = details.accuracy_error(of_a)
    paper, high = f"{PAPER_RATE:g}", f"{HIGH_RATE:g}"
    gated, early_share = against("gated", BASELINE), _percent(steady[PAPER_RATE]["of the first ten steps"])
    spread, spread_of_softmax = (
        [f"{spreads[variant][f'at {rate:g}']:.2g}" for rate in (PAPER_RATE, SWEPT_RATE, COMMON_RATE)]
        for variant in ("affine", BASELINE)
    )
    return [
        f"**At the paper's rate, {paper}, affine does not lower the loss**: "
        f"{against('affine', BASELINE, PAPER_RATE)[0]} against softmax (open), and {sink_at_paper[0]} against sink: "
        f"worse {sink_at_paper[1]}.",
        f"**At higher rates it does**: {against('affine', BASELINE, SWEPT_RATE)[0]} {swept} and "
        f"{against('affine', BASELINE, COMMON_RATE)[0]} {common}; with each at its own best, {top[0]}, {top[1]}. "
        f"At {high} softmax, sink and off-by-one end far above their best; affine and gates bear it (three seeds).",
        f"**An elementwise gate does more**: {gated[0]} at own best, {gated[1]}. Affine on top of it makes it worse by "
        f"{worse.mean:.3g} [{worse.low:.3g}, {worse.high:.3g}] at rates up to {COMMON_RATE:g}, "
        f"in {times} of {pairs} pairs.",
        _why(runs, details.share_of_norms(runs)),
        f"**The lead is one of early training and was still shrinking when runs ended**: at the paper's rate from "
        f"{low[early]:.3g} (steps {early}) to {low[late]:+.3g} (steps {late}), on the other side of zero from "
        f"step {low['keeps its sign from step']} on; at own best from {best[early]:.3g} to {best[late]:.3g}.",
        f"**The variance of gradient norms is lower at the paper's rate**, {ratio(PAPER_RATE)} of softmax's, as the "
        f"paper says; {early_share} of the difference are the first ten steps. {swept.capitalize()} it is "
        f"{ratio(SWEPT_RATE)}, {common} {ratio(COMMON_RATE)}, at {high} {ratio(HIGH_RATE)} (three seeds).",
        f"**Seeds differ less with affine**: a standard deviation of the loss of {spread[1]} {swept} and "
        f"{spread[2]} {common}, where softmax has {spread_of_softmax[1]} and {spread_of_softmax[2]}; at the paper's "
        f"rate {spread[0]} and {spread_of_softmax[0]}.",
        "**Sink and off-by-one** do not differ from softmax in loss at any rate by an interval that leaves out zero.",
        "**Steadiness relative to the mean, and spikes, are no results**: the sign of both depends on where one begins "
        "to count and on whose threshold ([table](reproduction-gradients.md#what-the-sign-depends-on)).",
        f"**Accuracies** are of one seed, and between two students the questions alone make a standard error of "
        f"{'' if error is None else f'{error:.1f}'} points: nothing follows.",
    ]


def _why(runs: Sequence[Run], share_of_norms: float | None) -> str:
    """What the controls say so far."""
    norms = (
        "" if share_of_norms is None else f"; in one seed norms on q and k alone have {_percent(share_of_norms)} of it"
    )
    shares = {row["variant"]: row for row in contrasts.shares(runs) if row["lr"] == COMMON_RATE}
    if LEARNED not in shares:
        return f"**Why affine is ahead is open**: it halves the output of attention at the start{norms}."
    compared = {row["comparison"]: row for row in contrasts.losses(runs) if row["lr"] == f"{COMMON_RATE:g}"}
    row = compared[f"affine against {LEARNED}"]
    left = f"{row['difference']:+.3g} [{row['difference low']:.3g}, {row['difference high']:.3g}], {row['n']} seeds"
    learned, half = (_percent(shares[name]["share"]) for name in (LEARNED, HALF))
    ran = sorted({run.config["group"].split("-")[0] for run in runs if run.table == CONTROLS and run.result})
    return (
        f"**At {COMMON_RATE:g} a constant does nearly all that affine does there**: the output of softmax times one "
        f"learned number per head has {learned} of affine's gain on softmax, times a fixed 0.5 {half}; affine against "
        f"the learned number is {left} ({row['outcome']}){norms}. "
        f"Controls that have been run, at least in part: {', '.join(ran)}."
    )


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
