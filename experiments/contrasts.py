"""What the controls are compared with, as it was written down before they were run, and what came out.

The rules are in docs/reproduction-controls.md. A comparison is a difference of two settings at equal seed. Its outcome
is decided by the 95 % interval of that difference: better below zero, worse above it, else open.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from affine_attn.runs.series import STEPS, gradient_statistics
from experiments import controls
from experiments.compare import holm, interval, outcome, paired, welch
from experiments.controls import BEST, HEADWISE, HIGHER_RATE, IDENTITY, LEARNED, LOWER_RATE, NO_BETA, UNDECAYED
from experiments.details import noise_share, spikes
from experiments.grid import COMMON_RATE, CONTROLS, HIGH_RATE, PAPER_RATE, SWEPT_RATE
from experiments.runs import MICRO_NORM, Run
from experiments.tables import LATER, SEVERAL_SEEDS, Row, best_rate, gradient_variance, interval_columns

SCALES = (controls.HALF, controls.ROOT_HALF, LEARNED, IDENTITY)
TABLE_RATES = (COMMON_RATE, SWEPT_RATE, PAPER_RATE, HIGH_RATE)
OWN_BEST = "own best"
Seeds = dict[int, float]


class Setting(NamedTuple):
    """Runs that differ in their seed alone. ``of``: "a" for table A, else the number of a control, or several."""

    of: str
    variant: str
    rates: tuple[float, ...]  # of several the best, once all of them were run

    def __str__(self) -> str:
        marks = {"2": ", q/k norm", "4": ", 2500 steps", "6": ", MLP 1280", "7": ", warmup 300"}
        if (self.of, self.variant) == ("5", "affine"):
            return "affine, weights as softmax's"
        return self.variant + ("" if self.variant == UNDECAYED else marks.get(self.of, ""))


class Comparison(NamedTuple):
    """``variant`` less ``baseline``; less the same difference of two others, where it is a change of a difference."""

    control: int
    variant: Setting
    baseline: Setting
    less: tuple[Setting, Setting] | None = None
    is_primary: bool = False  # one of those that are corrected for their number

    def __str__(self) -> str:
        text = f"{self.variant} against {self.baseline}"
        return text if self.less is None else f"{text}, less {self.less[0]} against {self.less[1]}"


def _a(variant: str, *rates: float) -> Setting:
    return Setting("a", variant, rates or (BEST[variant],))


def comparisons() -> Iterator[Comparison]:
    """All of them, with the primary ones of a control first."""
    for rates in ((COMMON_RATE,), TABLE_RATES):
        for name in SCALES:
            yield Comparison(1, _a("affine", *rates), Setting("1", name, rates), is_primary=True)
    for rate in (SWEPT_RATE, PAPER_RATE, HIGH_RATE):
        for name in SCALES:
            yield Comparison(1, _a("affine", rate), Setting("1", name, (rate,)))
    for rate in TABLE_RATES:
        for name in SCALES:
            yield Comparison(1, Setting("1", name, (rate,)), _a("softmax", rate))

    normed_rates = (COMMON_RATE, SWEPT_RATE, HIGH_RATE)
    for rates in ((COMMON_RATE,), normed_rates):
        for name in ("affine", "gated"):
            yield Comparison(2, Setting("2", name, rates), Setting("2", "softmax", rates), is_primary=True)
    for rate in normed_rates:
        own = {name: Setting("2", name, (rate,)) for name in ("softmax", "affine", "gated")}
        if rate != COMMON_RATE:
            yield Comparison(2, own["affine"], own["softmax"])
        yield Comparison(2, own["softmax"], _a("softmax", rate))
        yield Comparison(2, own["affine"], own["softmax"], less=(_a("affine", rate), _a("softmax", rate)))

    softmax, sink = (Setting("a3", name, (*TABLE_RATES, LOWER_RATE)) for name in ("softmax", "sink"))
    affine = Setting("a3", "affine", (*TABLE_RATES, HIGHER_RATE))
    yield Comparison(3, affine, softmax, is_primary=True)
    yield Comparison(3, affine, sink, is_primary=True)
    for name, rate in (("softmax", LOWER_RATE), ("sink", LOWER_RATE), ("affine", HIGHER_RATE)):
        yield Comparison(3, Setting("3", name, (rate,)), _a(name))

    for name in ("affine", "gated"):
        longer = Setting("4", name, (BEST[name],)), Setting("4", "softmax", (BEST["softmax"],))
        yield Comparison(4, *longer, is_primary=True)
    for name in ("affine", "gated"):
        longer = Setting("4", name, (BEST[name],)), Setting("4", "softmax", (BEST["softmax"],))
        yield Comparison(4, *longer, less=(_a(name), _a("softmax")))

    here = {name: Setting("5", name, (COMMON_RATE,)) for name in ("affine", NO_BETA, HEADWISE)}
    yield Comparison(5, here[NO_BETA], here["affine"], is_primary=True)
    yield Comparison(5, here[HEADWISE], here["affine"], is_primary=True)
    yield Comparison(5, here[HEADWISE], _a("gated"))
    yield Comparison(5, here["affine"], _a("affine"))

    wide, wide_affine = (Setting("6", name, (BEST[name],)) for name in ("softmax", "affine"))
    yield Comparison(6, _a("gated"), wide, is_primary=True)
    yield Comparison(6, wide_affine, wide, is_primary=True)
    yield Comparison(6, _a("gated"), wide_affine, is_primary=True)
    yield Comparison(6, wide, _a("softmax"))

    slow = {rate: Setting("7", "softmax", (rate,)) for rate in (COMMON_RATE, HIGH_RATE)}
    undecayed = Setting("7", UNDECAYED, (BEST["sink"],))
    yield Comparison(7, slow[COMMON_RATE], _a("softmax", COMMON_RATE), is_primary=True)
    yield Comparison(7, slow[HIGH_RATE], _a("softmax", HIGH_RATE), is_primary=True)
    yield Comparison(7, _a("affine"), slow[COMMON_RATE], is_primary=True)
    yield Comparison(7, undecayed, _a("sink"), is_primary=True)


def _variances() -> Iterator[Comparison]:
    """Compare variances of gradients at the paper's rate, which the first control is asked for too."""
    for name in SCALES:
        yield Comparison(1, _a("affine", PAPER_RATE), Setting("1", name, (PAPER_RATE,)))
        yield Comparison(1, Setting("1", name, (PAPER_RATE,)), _a("softmax", PAPER_RATE))


def losses(runs: Sequence[Run]) -> list[Row]:
    """A row per comparison of final losses on held-out text; those that were not run yet say so."""
    measured = _by_setting(runs, lambda run: run.valid.get("kd"))
    rows = [_row(comparison, measured) for comparison in comparisons()]
    for control in {row["control"] for row in rows}:
        family = [row for row in rows if row["control"] == control and row["primary"]]
        for row, corrected in zip(family, holm([row["p"] for row in family]), strict=True):
            row["p Holm"] = corrected
    return rows


def variances(runs: Sequence[Run]) -> list[Row]:
    """A row per comparison of the variance of gradient norms: a ratio, from the first step and from later ones on."""
    rows: dict[Comparison, Row] = {}
    for start in (1, *LATER):

        def value(run: Run, start: int = start) -> float | None:
            found = gradient_variance(run.series()["grad_norm"], start)
            return math.log(found) if found else None

        measured = _by_setting([run for run in runs if _is_asked(run)], value)
        for comparison in _variances():
            row = rows.setdefault(comparison, {"comparison": str(comparison), "lr": PAPER_RATE})
            both = _seeds(comparison.variant, measured), _seeds(comparison.baseline, measured)
            if all(both):
                difference = paired(both[0][1], both[1][1]).difference  # pyright: ignore
                row |= {"n": difference.n} | interval_columns(f"ratio from step {start}", difference, math.exp)
    return [row for row in rows.values() if "n" in row]


def early(runs: Sequence[Run]) -> list[Row]:
    """Compare control nine's gradient norms of the first steps by architecture and batch: those of the very first step,
    what of them is noise, and against softmax variances as ratios, the rest as differences."""
    measured: dict[tuple[str, int, str], dict[int, Run]] = {}
    diverged: Counter[tuple[str, int, str]] = Counter()
    for run in runs:
        control, _, name = run.config["group"].partition("-")
        if run.table == CONTROLS and control == "9" and run.result is not None:
            key = name.split("-")[0], run.config["recipe"]["global_batch"], run.variant
            seeds = measured.setdefault(key, {})
            diverged[key] += run.diverged_step is not None
            if run.diverged_step is None:
                seeds[run.seed] = run
    rows = []
    for (size, batch, variant), mine in sorted(measured.items(), key=lambda entry: entry[0][:2]):
        row: Row = {"students": size, "batch": batch, "variant": variant, "n": len(mine)}
        row["diverged"] = diverged[size, batch, variant]
        for name, column in (("norm of step 1", "grad_norm"), ("of a micro-batch", MICRO_NORM)):
            row[name] = interval([run.series()[column][0] for run in mine.values()]).mean
        row |= interval_columns("noise in its square", interval([noise_share(run) for run in mine.values()]))
        theirs = measured.get((size, batch, "softmax"), {})
        shared = sorted(mine.keys() & theirs.keys())
        pairs = [[of[seed].series()["grad_norm"] for of in (mine, theirs)] for seed in shared]
        if variant == "softmax" or not pairs:
            rows.append(row)
            continue
        spans = {f"ratio from step {start}": (start, STEPS) for start in (1, *LATER)}
        spans[f"ratio to step {controls.LARGER['steps']}"] = 1, controls.LARGER["steps"]
        for name, (start, stop) in spans.items():
            both = [[gradient_variance(series[:stop], start) for series in pair] for pair in pairs]
            logs = [math.log(one / other) for one, other in both if one and other]
            row |= interval_columns(name, interval(logs), math.exp)
        cv = [[gradient_statistics(series)["cv"] for series in pair] for pair in pairs]
        row |= interval_columns("cv", interval([one - other for one, other in cv]))
        for name, own in (("own", True), ("softmax's", False)):
            counted = [spikes(one, one if own else other) - spikes(other, other) for one, other in pairs]
            row |= interval_columns(f"spikes, {name} threshold", interval(counted))
        rows.append(row)
    return rows


def shares(runs: Sequence[Run]) -> list[Row]:
    """How much of what affine gains on softmax a scale has, by rate, over the seeds that all three have."""
    measured = _by_setting(runs, lambda run: run.valid.get("kd"))
    rows = []
    for rate in TABLE_RATES:
        for name in SCALES:
            settings = Setting("1", name, (rate,)), _a("softmax", rate), _a("affine", rate)
            found = [_seeds(setting, measured) for setting in settings]
            if not all(found):
                continue
            scale, softmax, affine = (seeds for _, seeds in found)  # pyright: ignore
            shared = sorted(scale.keys() & softmax.keys() & affine.keys())
            gains = [[softmax[seed] - values[seed] for seed in shared] for values in (scale, affine)]
            gain, of_affine = (interval(values).mean for values in gains)
            row: Row = {"variant": name, "lr": rate, "n": len(shared), "loss": interval(list(scale.values())).mean}
            row |= {"gain": gain, "affine's gain": of_affine, "share": gain / of_affine if of_affine > 0 else math.nan}
            row["against softmax at its best rate"] = paired(
                scale, measured["a", "softmax", BEST["softmax"]]
            ).difference.mean
            rows.append(row)
    return rows


def scales_that_explain(runs: Sequence[Run]) -> list[str] | None:
    """The scales that meet the rule of control 1, at the common rate and at own best; None before it can be asked."""
    measured = _by_setting(runs, lambda run: run.valid.get("kd"))
    explaining = []
    for name in SCALES:
        met = []
        for rates in ((COMMON_RATE,), TABLE_RATES):
            found = [
                _seeds(setting, measured)
                for setting in (Setting("1", name, rates), _a("affine", *rates), _a("softmax", *rates))
            ]
            if not all(found):
                return None
            scale, affine, softmax = (seeds for _, seeds in found)  # pyright: ignore
            affine = {seed: affine[seed] for seed in scale}
            gain, of_affine = (-paired(values, softmax).difference.mean for values in (scale, affine))
            met.append(is_level(outcome(paired(affine, scale).difference), gain / of_affine if of_affine > 0 else 0.0))
        if all(met):
            explaining.append(name)
    return explaining


def is_level(word: str, share: float) -> bool:
    """The rule of control 1: affine is not better than a scale, which has at least half of affine's gain."""
    return word in ("open", "worse") and share >= 0.5


def _row(comparison: Comparison, measured: dict) -> Row:
    of = comparison.variant, comparison.baseline, *(comparison.less or ())
    row: Row = {"control": comparison.control, "comparison": str(comparison), "primary": comparison.is_primary}
    found = [_seeds(setting, measured) for setting in of]
    row["lr"] = _rates(comparison, found)
    if not all(found):
        return row | {"n": 0, "difference": math.nan, "p": math.nan, "outcome": outcome(interval([]))}
    seeds = [values for _, values in found]  # pyright: ignore
    shared = sorted(set.intersection(*map(set, seeds)))
    first, second = (_difference(seeds[i : i + 2], shared) for i in (0, 2))
    changed = {seed: first[seed] - second.get(seed, 0.0) for seed in shared}
    difference, p = paired(changed, dict.fromkeys(shared, 0.0))
    # Of a change of a difference there are no two groups to tell apart.
    unpaired = welch(list(seeds[0].values()), list(seeds[1].values())) if comparison.less is None else math.nan
    row |= {"n": difference.n} | interval_columns("difference", difference) | {"p": p, "p Welch": unpaired}
    return row | {"outcome": outcome(difference)}


def _difference(pair: Sequence[Seeds], shared: Sequence[int]) -> Seeds:
    return {seed: pair[0][seed] - pair[1][seed] for seed in shared} if pair else {}


def _rates(comparison: Comparison, found: Sequence[tuple[float, Seeds] | None]) -> str:
    """The two rates, or the one of both; of several that were not all run, what they will be chosen by."""
    several = [len(setting.rates) > 1 for setting in comparison[1:3]]
    names = [
        f"{place[0]:g}" if place else OWN_BEST if choice else f"{setting.rates[0]:g}"
        for setting, place, choice in zip(comparison[1:3], found, several, strict=False)
    ]
    text = names[0] if names[0] == names[1] else " and ".join(names)
    return f"{OWN_BEST}, {text}" if any(several) and all(found) else text


def _seeds(setting: Setting, measured: dict[tuple[str, str, float], Seeds]) -> tuple[float, Seeds] | None:
    """Its rate, and a value for every seed; None while it, or one of the rates it is chosen from, was not run."""
    at = {
        (setting.variant, rate): measured[of, setting.variant, rate]
        for of in setting.of
        for rate in setting.rates
        if (of, setting.variant, rate) in measured
    }
    if len(at) < len(setting.rates):
        return None
    if len(setting.rates) == 1:
        rate = setting.rates[0]
    elif all(len(values) >= SEVERAL_SEEDS for values in at.values()):
        rate = best_rate(setting.variant, at)
    else:
        return None
    return rate, at[setting.variant, rate]


def _is_asked(run: Run) -> bool:
    return run.table in ("a", CONTROLS) and run.rate == PAPER_RATE


def _by_setting(runs: Sequence[Run], value: Callable[[Run], float | None]) -> dict[tuple[str, str, float], Seeds]:
    found: dict[tuple[str, str, float], Seeds] = {}
    for run in runs:
        of = {"a": "a", CONTROLS: run.config["group"].split("-")[0]}.get(run.table)
        if of is not None and (number := value(run)) is not None:
            found.setdefault((of, run.variant, run.rate), {})[run.seed] = number
    return found
