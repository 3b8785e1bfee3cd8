"""What a reader of two minutes gets: a row per claim, and a summary in sentences whose numbers come from the runs."""

import math
from collections.abc import Iterable, Sequence

from affine_attn.core.variants import VARIANTS
from affine_attn.distill.estimate import size
from affine_attn.distill.recipes import Recipe
from experiments import claims, contrasts, details
from experiments.claims import BEST, Claim
from experiments.compare import Interval, interval, outcome, paired
from experiments.controls import HALF, LEARNED
from experiments.grid import COMMON_RATE, CONTROLS, HIGH_RATE, PAPER_RATE, SEEDS, SWEPT_RATE, Student
from experiments.runs import Run
from experiments.tables import BASELINE, SEVERAL_SEEDS, Row, best_rate, by_setting, interval_columns

_DOUBTS = {
    ("loss", "affine", "softmax"): "a constant on the output does as much",
    ("loss", "affine", "sink"): "weight decay acted on these sinks",
    ("loss", "affine_gated", "gated"): "three seeds",
    ("variance of gradient norms", "affine", "softmax"): "most of it lies in the first ten steps",
    ("coefficient of variation", "affine", "softmax"): "which steps are counted decides its sign",
    ("spikes, k = 9", "affine", "softmax"): "whose threshold is taken decides its sign",
    ("zero-shot accuracy, points", "affine", "softmax"): "one seed, and the questions alone err by as much",
}
# Columns of details.steadiness with the same claim by another definition.
_OTHERWISE = {"coefficient of variation": "cv from step 101", "spikes, k = 9": "spikes, softmax's threshold"}


def rows(runs: Sequence[Run]) -> list[Row]:
    """A row per claim: at the paper's rate, and with each variant at its own best rate for the loss."""
    found = []
    loss = by_setting(runs, lambda run: run.valid.get("kd"))
    steady = next((row for row in details.steadiness(runs) if row["lr"] == PAPER_RATE), {})
    for claim in claims.CLAIMS:
        at = by_setting(runs, claim.value)
        row: Row = {"claim": f"{claim.of}, {claim.variant} against {claim.baseline}", "paper": claim.paper}
        verdicts = {}
        for name, both in (("at the paper's rate", (PAPER_RATE, PAPER_RATE)), ("at own best", _best(claim, loss))):
            values, baseline = (
                {} if rate is None else at.get((variant, rate), {})
                for variant, rate in zip((claim.variant, claim.baseline), both, strict=True)
            )
            difference = paired(values, baseline).difference
            row[name] = _shown(difference, claim.is_ratio)
            if difference.n:
                verdicts[name] = _word(difference, claim.is_lower)
        row["verdict"] = "; ".join(f"{name}: {word}" for name, word in verdicts.items())
        column, first = _OTHERWISE.get(claim.of), outcome(_at_paper(claim, at), claim.is_lower)
        if column in steady:
            mean, low, high = (steady[column + end] for end in ("", " low", " high"))
            other = outcome(Interval(mean, low, high, steady["n"]), claim.is_lower)
            if {first, other} == {"better", "worse"}:
                row["verdict"] = f"no result: {first} as the paper counts, {other} by another definition"
        row["verdict"] = row["verdict"] or "not measured at these rates"
        found.append(row | {"main doubt": _DOUBTS[claim.of, claim.variant, claim.baseline]})
    return found


def _at_paper(claim: Claim, at: dict) -> Interval:
    values, baseline = (at.get((variant, PAPER_RATE), {}) for variant in (claim.variant, claim.baseline))
    return paired(values, baseline).difference


def _best(claim: Claim, loss: dict) -> tuple[float | None, float | None]:
    known = {variant for variant, _ in loss}
    both = claim.variant, claim.baseline
    first, second = (best_rate(variant, loss) if variant in known else None for variant in both)
    return first, second


def _word(difference: Interval, is_lower: bool = True) -> str:
    """Return the word for the claim's variant against its baseline."""
    word = outcome(difference, is_lower)
    is_few = word in ("better", "worse") and difference.n < claims.MANY_SEEDS
    return f"{word} ({difference.n} seeds)" if is_few else word


def _shown(difference: Interval, is_ratio: bool) -> str:
    if not difference.n:
        return ""
    mean, low, high = (math.exp(x) if is_ratio else x for x in difference[:3])
    text = f"x {mean:.3g}" if is_ratio else f"{mean:+.3g}"
    return f"{text} [{low:.3g}, {high:.3g}]" if difference.n > 1 else text


def choices(runs: Sequence[Run]) -> list[Row]:
    """A row per attention that one would choose among: at its own best rate, what it gains on softmax and costs."""
    asked = [
        run for run in runs if run.table == "a" or (run.table == CONTROLS and run.config["group"].startswith("1-"))
    ]
    loss = by_setting(asked, lambda run: run.valid.get("kd"))
    one = {run.variant: run for run in asked if run.valid}
    if BASELINE not in one:
        return []
    configs = {variant: _config(run) for variant, run in one.items()}
    baseline = loss[BASELINE, best_rate(BASELINE, loss)]
    rows = []
    for variant, (spelled, parameters) in configs.items():
        best, tried = best_rate(variant, loss), sorted(rate for name, rate in loss if name == variant)
        values = loss[variant, best]
        few = [f"{rate:g}" for rate in tried if len(loss[variant, rate]) < SEVERAL_SEEDS]
        row: Row = {"attention": variant, "in Python": spelled, "rate": best, "n": len(values)}
        row |= interval_columns("loss", interval(list(values.values())))
        if variant != BASELINE:
            row |= interval_columns("difference to softmax", paired(values, baseline).difference)
        row["parameters added"] = parameters - configs[BASELINE][1]
        rows.append(row | {f"rates with fewer than {SEVERAL_SEEDS} seeds": ", ".join(few)})
    return sorted(rows, key=lambda row: row["loss"])


def _config(run: Run) -> tuple[str, int]:
    """How a student's attention is written, and how many parameters it has."""
    student = Student.from_dict(run.config["student"])
    spelled = f'"{run.variant}"' if run.variant in VARIANTS else f"AttentionSpec(gate={student.attention.gate!r})"
    recipe = Recipe(**run.config["recipe"], attention=BASELINE)
    return f"`{spelled}`".replace("'", '"'), size(student.config(recipe)).parameters


def summary(runs: Sequence[Run]) -> list[str]:
    """Sentences, each with the numbers it stands on; the first six are those of the README."""
    of_a = [run for run in runs if run.table == "a"]
    kd = by_setting(of_a, lambda run: run.valid.get("kd"))
    variance = by_setting(of_a, claims.log_variance)
    if not {BASELINE, "sink", "affine", "gated", "affine_gated"} <= {variant for variant, _ in kd}:
        return []

    def difference(variant: str, baseline: str, *rates: float) -> Interval:
        mine, theirs = (rates * 2)[:2] if rates else (best_rate(variant, kd), best_rate(baseline, kd))
        return paired(kd.get((variant, mine), {}), kd.get((baseline, theirs), {})).difference

    def against(variant: str, baseline: str, *rates: float) -> str:
        """The difference, what its interval decides, and in how many seeds it has that sign."""
        mine, theirs = (rates * 2)[:2] if rates else (best_rate(variant, kd), best_rate(baseline, kd))
        values, others = kd.get((variant, mine), {}), kd.get((baseline, theirs), {})
        found = paired(values, others).difference
        same = [(values[seed] - others[seed]) * found.mean > 0 for seed in values.keys() & others.keys()]
        seeds = f", in {sum(same)} of {len(same)} seeds" if outcome(found) in ("better", "worse") else ""
        return f"{_shown(found, is_ratio=False)} ({outcome(found)}{seeds})"

    def ratio(rate: float, where: str) -> str:
        found = paired(variance.get(("affine", rate), {}), variance.get((BASELINE, rate), {})).difference
        seeds = "" if found.n >= claims.MANY_SEEDS else f", {found.n} seeds"
        return f"{_shown(found, is_ratio=True)} {where} ({outcome(found)}{seeds})"

    stacked, times, pairs = details.stacked(of_a)
    leads = {row["lr"]: row for row in details.leads(of_a)}
    steady = {row["lr"]: row for row in details.steadiness(of_a)}
    spreads = {row["variant"]: row for row in details.spread(of_a)}
    low, best = leads[f"{PAPER_RATE:g}"], leads[BEST]
    times_of_training = [name for name in low if " to " in name]
    early, late = times_of_training[0], times_of_training[-1]
    is_shrinking = abs(best[late]) < abs(best[times_of_training[-2]])
    rates = sorted({rate for _, rate in kd})
    error = details.accuracy_error(of_a)
    higher = [difference("affine", BASELINE, rate) for rate in (SWEPT_RATE, COMMON_RATE)]
    above = {
        variant: difference(variant, variant, HIGH_RATE, best_rate(variant, kd)).mean
        for variant in dict.fromkeys(variant for variant, _ in kd)
        if (variant, HIGH_RATE) in kd
    }
    decided = [
        f"{variant} at {rate:g}: {outcome(found)}"
        for variant in ("sink", "off_by_one")
        for rate in rates
        if outcome(found := difference(variant, BASELINE, rate)) in ("better", "worse")
    ]
    spread = {
        rate: [spreads[variant][f"at {rate:g}"] for variant in ("affine", BASELINE)]
        for rate in (PAPER_RATE, SWEPT_RATE, COMMON_RATE)
    }
    is_steadier = all(affine < softmax for affine, softmax in spread.values())
    of_scale, *of_controls = _why(runs, details.share_of_norms(runs))
    unsettled = [row["claim"].split(",")[0] for row in rows(of_a) if row["verdict"].startswith("no result")]
    return [
        f"**Against softmax at the paper's rate, {PAPER_RATE:g}, "
        f"{_effect('affine', difference('affine', BASELINE, PAPER_RATE))}**: "
        f"{against('affine', BASELINE, PAPER_RATE)}. Against a learned sink: {against('affine', 'sink', PAPER_RATE)}.",
        f"**Against softmax at higher rates {_effect('affine', *higher)}**: "
        f"{against('affine', BASELINE, SWEPT_RATE)} at {SWEPT_RATE:g} and "
        f"{against('affine', BASELINE, COMMON_RATE)} at {COMMON_RATE:g}. With each variant at its own best rate, of "
        f"the {len(rates)} tried the one with its lowest loss: {against('affine', BASELINE)}.",
        f"**At its own best rate {_effect('an elementwise gate', difference('gated', BASELINE))}**: "
        f"{against('gated', BASELINE)} against softmax, {against('gated', 'affine')} against affine. Gate and affine "
        f"together against the gate alone, at equal rates up to {COMMON_RATE:g}: {_shown(stacked, is_ratio=False)} "
        f"({outcome(stacked)}, in {times} of {pairs} pairs).",
        of_scale,
        f"**Affine's lead on softmax was {'still' if is_shrinking else 'not'} shrinking when runs ended**: with each "
        f"at its own best rate, training losses differ by {best[early]:.3g} in steps {early} and by {best[late]:.3g} "
        f"in steps {late}. At the paper's rate they differ by {low[early]:.3g} and {low[late]:+.3g} in the same steps; "
        f"from step {low['keeps its sign from step']} on the sign is that of the end.",
        f"**The variance of gradient norms, affine's over softmax's**, is below one in the paper. Here it is "
        f"{ratio(PAPER_RATE, 'at the same rate')}; {_percent(steady[PAPER_RATE]['of the first ten steps'])} of that "
        f"difference comes from the first ten steps. At higher rates it is "
        f"{', '.join(ratio(rate, f'at {rate:g}') for rate in rates[1:])}.",
        f"**At {HIGH_RATE:g} the loss is higher than at a variant's own best rate**, which stands in brackets: "
        f"{', '.join(f'{name} by {rise:.2g} ({best_rate(name, kd):g})' for name, rise in above.items())}.",
        *of_controls,
        f"**Seeds differ {'less' if is_steadier else 'as much'} with affine**: the standard deviation of its loss, and "
        f"softmax's, is {'; '.join(f'{a:.2g} and {s:.2g} at {rate:g}' for rate, (a, s) in spread.items())}.",
        f"**Sink and off-by-one against softmax**, by rate: {', '.join(decided) or 'open at all of them'}.",
        f"**No results** are {' and '.join(unsettled) or 'none of the claims'}: their sign depends on where one begins "
        "to count, or on whose threshold ([table](reproduction-gradients.md#what-the-sign-depends-on)).",
        f"**Accuracies** are of one seed, and between two students the questions alone make a standard error of "
        f"{'' if error is None else f'{error:.1f}'} points: nothing follows.",
    ]


def _effect(subject: str, *differences: Interval) -> str:
    """What intervals of losses say, if they agree."""
    words = {outcome(difference) for difference in differences}
    if words == {"better"}:
        return f"{subject} lowers the loss"
    return f"{subject} raises the loss" if words == {"worse"} else f"whether {subject} lowers the loss is open"


def _why(runs: Sequence[Run], share_of_norms: float | None) -> list[str]:
    """What the controls say so far: of the scale of the output first."""
    gain = "of affine's gain in cross-entropy, in one seed"
    norms = [] if share_of_norms is None else [f"**Norms on q and k alone** have {_percent(share_of_norms)} {gain}."]
    compared = {(row["comparison"], row["lr"]): row for row in contrasts.losses(runs)}
    shares: dict[float, dict[str, float]] = {}
    for row in contrasts.shares(runs):
        # A share of no gain means nothing, and one or two seeds are not the control's.
        if row["n"] >= len(SEEDS) and not math.isnan(row["share"]):
            shares.setdefault(row["lr"], {})[row["variant"]] = row["share"]
    rates = [rate for rate in sorted(shares) if shares[rate].keys() >= {LEARNED, HALF}]
    if not rates:
        return ["**Why affine is ahead is open**: it halves the output of attention at the start.", *norms]

    def against(name: str, rate: float) -> Row:
        return compared[f"affine against {name}", f"{rate:g}"]

    level = [
        name
        for name in shares[rates[0]]
        if all(contrasts.is_level(against(name, rate)["outcome"], shares[rate].get(name, 0.0)) for rate in rates)
    ]
    left = [
        f"{row['difference']:+.3g} [{row['difference low']:.3g}, {row['difference high']:.3g}] at {rate:g} "
        f"({row['outcome']})"
        for rate in rates
        for row in (against(LEARNED, rate),)
    ]
    of_learned, of_half = (
        _listed(f"{_percent(shares[rate][name])} at {rate:g}" for rate in rates) for name in (LEARNED, HALF)
    )
    ran = sorted({run.config["group"].split("-")[0] for run in runs if run.table == CONTROLS and run.result})
    explaining = contrasts.scales_that_explain(runs)
    asked = f"[control 1](reproduction-controls.md#rules), which asks at {COMMON_RATE:g} and at own best rates"
    rule = "affine is not better than such a scale, which has at least half of its gain"
    if explaining is None:
        verdict = f"**Scales that do what affine does** at these rates: {', '.join(level) or 'none'} ({rule}; {asked})"
    elif explaining:
        verdict = f"**It is the output scale**, by {asked}: {', '.join(explaining)} ({rule})"
    else:
        verdict = f"**No scale does what affine does**, by {asked}"
    heading = f"a scale of the output does {'what affine does' if level else 'less than affine'}"
    return [
        f"**At {_listed(f'{rate:g}' for rate in rates)} {heading}**: of affine's gain on softmax, softmax times one "
        f"learned number per head has {of_learned}. Times a fixed 0.5 it has {of_half}. Affine against the learned "
        f"number: {_listed(left)}, {len(SEEDS)} seeds.",
        f"{verdict}. Numbers of the controls with finished runs: {', '.join(ran)}.",
        *norms,
    ]


def _listed(words: Iterable[str]) -> str:
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
