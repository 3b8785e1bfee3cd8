"""Tables A to D and the noise floor, from run folders. Each is a list of rows: one per run, or one per setting."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from affine_attn.evaluate.results import TABLE_1, accuracy, average
from affine_attn.runs.series import STEPS, gradient_statistics
from experiments.compare import Interval, Paired, interval, paired
from experiments.grid import COMMON_RATE, CONTROLS, PAPER_RATE
from experiments.runs import Run

Row = dict[str, Any]
BASELINE = "softmax"
STEADINESS = f"gradient variance at {PAPER_RATE:g}, of {BASELINE}'s"
SEVERAL_SEEDS = 3
# A run that stayed finite has diverged too if its loss, over so many steps, ends so far above the lowest it had.
SMOOTHED_STEPS, LOSS_RISE = 50, 0.5
# Where variances of gradients also begin: behind the very first steps, and behind the warmup.
LATER = (11, 101)


def table_a(runs: Iterable[Run], bigram: Row | None) -> list[Row]:
    """Finished runs of table A, and what they are to be judged by: the teacher and a bigram."""
    rows = [
        _about(run) | _losses(run) | accuracies(run) | {"diverged_step": run.diverged_step} | _made(run)
        for run in runs
        if run.result
    ]
    valid = next((run.valid for run in runs if run.valid), None)
    judges = []
    if valid and "teacher_ce" in valid:
        ce = valid["teacher_ce"]
        judges.append({"variant": "teacher", "kd_loss": valid["entropy"], "ce": ce, "ppl": math.exp(ce)})
    if bigram:
        judges.append({"variant": "bigram", "ce": bigram["ce"], "ppl": bigram["ppl"]})
    return rows + judges


def summary_a(runs: Sequence[Run]) -> list[Row]:
    """Summarise by variant and learning rate, each against softmax at that rate; then each at its own best rate."""
    at = by_setting(runs, lambda run: run.valid.get("kd"))
    rows = [_compared(variant, rate, at, at.get((BASELINE, rate), {}), runs) for variant, rate in at]
    best = {variant: best_rate(variant, at) for variant, _ in at}
    if BASELINE in best:
        baseline = at[BASELINE, best[BASELINE]]
        rows += [_compared(variant, rate, at, baseline, runs) | {"best": "own best"} for variant, rate in best.items()]
    return rows


def short(of_a: Sequence[Row], of_b: Sequence[Row]) -> list[Row]:
    """Shorten the summaries of A and B: every variant at its own best rate, and its gradients at the paper's."""
    variances = {row["variant"]: row for row in of_b if row["lr"] == PAPER_RATE}
    rows = []
    for row in of_a:
        if row["best"]:
            kept = {name: value for name, value in row.items() if name not in ("best", "diverged", "p")}
            steadiness = variances.get(row["variant"], {})
            ends = ("", " low", " high") if "ratio" in steadiness else ()
            kept |= {STEADINESS + end: steadiness[f"ratio{end}"] for end in ends}
            rows.append(kept)
    return sorted(rows, key=lambda row: (row["variant"] != BASELINE, row["kd_loss"]))


def zero_shot(runs: Sequence[Run]) -> list[Row]:
    """Means over seeds by variant and learning rate, of the runs that were asked, and the paired difference of the mean
    accuracy to softmax's."""
    asked = {run.folder: found for run in runs if (found := accuracies(run))}
    at = by_setting(runs, lambda run: asked.get(run.folder, {}).get("accuracy"))
    rows = []
    for variant, rate in at:
        mine = [asked[run.folder] for run in runs if (run.variant, run.rate) == (variant, rate) and run.folder in asked]
        row: Row = {"variant": variant, "lr": rate, "n": len(mine)}
        row |= {task: interval([found[task] for found in mine]).mean for task in TABLE_1}
        row |= interval_columns("accuracy", interval([found["accuracy"] for found in mine]))
        if variant != BASELINE:
            against = paired(at[variant, rate], at.get((BASELINE, rate), {}))
            row |= interval_columns("difference", against.difference) | {"p": against.p}
        rows.append(row)
    return rows


def table_b(runs: Iterable[Run]) -> list[Row]:
    """Gradient norms of the first steps, of every run that has done so many or has diverged before."""
    rows = []
    for run in runs:
        series = run.series()
        if not series["step"] or (len(series["step"]) < STEPS and run.diverged_step is None):
            continue
        found: Row = {**gradient_statistics(series["grad_norm"])}
        for start in LATER:
            found[f"variance_from_{start}"] = gradient_variance(series["grad_norm"], start)
        diverged = {"diverged": has_diverged(run, series["loss"]), "diverged_step": run.diverged_step}
        rows.append(_about(run) | found | diverged | _made(run))
    return rows


def gradient_variance(norms: Sequence[float], start: int) -> float | None:
    """Return the variance from a step on, the first being 1, to the last of the first steps."""
    rest = norms[start - 1 : STEPS]
    return gradient_statistics(rest)["variance"] if rest else None


def summary_b(rows: Sequence[Row]) -> list[Row]:
    """Summarise by variant and rate; ``ratio`` is that of the variance to softmax's, a mean of logarithms, also of
    the variance without the first steps."""
    settings = dict.fromkeys((row["variant"], row["lr"]) for row in rows)

    def against_softmax(variance: str, variant: str, rate: float) -> Paired:
        values, baseline = (
            {row["seed"]: math.log(row[variance]) for row in _of((name, rate), rows) if row[variance]}
            for name in (variant, BASELINE)
        )
        return paired(values, baseline)

    summary = []
    for variant, rate in settings:
        mine = _of((variant, rate), rows)
        means = {
            name: interval([row[name] for row in mine]).mean for name in ("mean", "std", "cv", "spikes_6", "spikes_9")
        }
        ratio: Row = {}
        if variant != BASELINE:
            against = against_softmax("variance", variant, rate)
            ratio = interval_columns("ratio", against.difference, math.exp) | {"p": against.p}
            for start in LATER:
                later = against_softmax(f"variance_from_{start}", variant, rate)
                ratio[f"ratio_from_{start}"] = math.exp(later.difference.mean)
        diverged = f"{sum(row['diverged'] for row in mine)}/{len(mine)}"
        variance = interval_columns("variance", interval([row["variance"] for row in mine]))
        summary.append(
            {"variant": variant, "lr": rate, "n": len(mine)} | variance | means | ratio | {"diverged": diverged}
        )
    return summary


def has_diverged(run: Run, loss: Sequence[float]) -> bool:
    if run.diverged_step is not None:
        return True
    spans = range(0, len(loss) - SMOOTHED_STEPS + 1, SMOOTHED_STEPS)
    means = [sum(loss[i : i + SMOOTHED_STEPS]) / SMOOTHED_STEPS for i in spans]
    return bool(means) and means[-1] - min(means) > LOSS_RISE


def table_c(runs: Iterable[Run]) -> list[Row]:
    """One departure each, after the affine of table A at the same learning rate."""
    chosen = [
        run
        for run in runs
        if run.table == "c" or (run.table == "a" and run.variant == "affine" and run.rate == COMMON_RATE)
    ]
    rows = [
        _about(run) | _losses(run) | {"grad_variance": (run.result["gradients"] or {}).get("variance")} | _made(run)
        for run in chosen
        if run.result
    ]
    return sorted(rows, key=lambda row: row["variant"] != "affine")


def table_d(runs: Iterable[Run]) -> list[Row]:
    """Losses on held-out text, and needles found, at the training length and beyond; longer text is cut into other
    sequences."""
    rows = []
    for run in runs:
        if run.table == "d" and run.result:
            further = {name: value for name, value in run.valid.items() if name.startswith(("ce_", "needle_"))}
            length = run.config["recipe"]["sequence_length"]
            rows.append(_about(run) | {f"ce_{length}": run.valid.get("ce")} | further | _made(run))
    return rows


def summary(rows: Sequence[Row], measures: Sequence[str], baseline: str) -> list[Row]:
    """Summarise table C or D: means and differences to the variant that is the baseline, at equal seed."""
    found = []
    for variant in dict.fromkeys(row["variant"] for row in rows):
        row: Row = {"variant": variant, "n": sum(entry["variant"] == variant for entry in rows)}
        for measure in measures:
            values = {name: _seeds(rows, name, measure) for name in (variant, baseline)}
            row |= interval_columns(measure, interval(list(values[variant].values())))
            if variant != baseline:
                against = paired(values[variant], values[baseline])
                row |= interval_columns(f"{measure} difference", against.difference) | {f"{measure} p": against.p}
        found.append(row)
    return found


def controls(runs: Iterable[Run]) -> list[Row]:
    """Finished runs of the controls."""
    return [
        {"control": run.config["group"].split("-")[0], "group": run.config["group"]}
        | _about(run)
        | _losses(run)
        | {"grad_variance": (run.result["gradients"] or {}).get("variance"), "diverged_step": run.diverged_step}
        | _made(run)
        for run in runs
        if run.table == CONTROLS and run.result
    ]


def noise(runs: Sequence[Run]) -> list[Row]:
    """The same student, seed, data order and commit twice: what of a difference is no difference."""
    first = {(run.variant, run.rate, run.seed): run for run in runs if run.table == "a"}
    rows = []
    for again in runs:
        before = first.get((again.variant, again.rate, again.seed))
        if again.table != "noise" or before is None or not (again.valid and before.valid):
            continue
        if again.environment().get("commit") != before.environment().get("commit"):
            continue
        differences = {f"{name}_difference": abs(again.valid[name] - before.valid[name]) for name in ("kd", "ce")}
        pairs = zip(again.series()["loss"], before.series()["loss"], strict=True)
        differences["largest_step_difference"] = max(abs(a - b) for a, b in pairs)
        mine, theirs = (gradient_statistics(run.series()["grad_norm"]) for run in (again, before))
        differences["log_variance_difference"] = abs(math.log(mine["variance"] / theirs["variance"]))
        for name in ("cv", "spikes_9"):
            differences[f"{name}_difference"] = abs(mine[name] - theirs[name])
        rows.append(_about(again) | differences | _made(again))
    return rows


def noise_floor(noise: Sequence[Row], column: str, rate: float | str | None = None) -> float:
    """The largest difference of a run to its repetition at this rate, or at any where none was repeated there; NaN: not
    known."""
    at_rate = [row[column] for row in noise if row["lr"] == rate]
    return max(at_rate or (row[column] for row in noise), default=math.nan)


def _about(run: Run) -> Row:
    return {"variant": run.variant, "seed": run.seed, "lr": run.rate}


def accuracies(run: Run) -> Row:
    """Return those of the six zero-shot tasks and their mean, as affine-attn eval counts; empty if not asked."""
    results = {result["name"]: result for result in run.evaluations()}
    mean = average(results)
    if mean is None:
        return {}
    return {task: accuracy(results[task])["value"] for task in TABLE_1} | {"accuracy": mean["value"]}


def _losses(run: Run) -> Row:
    valid = run.valid
    return {"kd_loss": valid.get("kd"), "ce": valid.get("ce"), "ppl": valid.get("ppl")}


def _made(run: Run) -> Row:
    """Say where a number comes from and what it cost: its share of the time of its group."""
    about, speed = run.environment(), (run.result or {}).get("speed")
    minutes = None if speed is None else round(speed["seconds"] / speed["students"] / 60, 3)
    origin = {name: about.get(name) for name in ("commit", "torch", "device")}
    return {
        "steps": run.config["recipe"]["steps"],
        "minutes": minutes,
        **origin,
        "run": "/".join(run.folder.parts[-2:]),
    }


def by_setting(runs: Iterable[Run], value: Callable[[Run], float | None]) -> dict[tuple[str, float], dict[int, float]]:
    """(variant, lr) -> seed -> value, where there is one."""
    found: dict[tuple[str, float], dict[int, float]] = {}
    for run in runs:
        if (number := value(run)) is not None:
            found.setdefault((run.variant, run.rate), {})[run.seed] = number
    return found


def best_rate(variant: str, at: dict[tuple[str, float], dict[int, float]]) -> float:
    """Return the best rate: from the lowest on, one gives way to a higher one whose mean over the seeds that both have
    is lower. None owes its place to a seed that the other lacks, and no seed is left out because a third rate lacks it.

    Rates with a seed or two wait where others have several.
    """
    rates = {rate: values for (name, rate), values in at.items() if name == variant}
    enough = min(SEVERAL_SEEDS, max(map(len, rates.values())))
    best, *higher = sorted(rate for rate, values in rates.items() if len(values) >= enough)
    for rate in higher:
        shared = rates[best].keys() & rates[rate].keys()
        if not shared:
            raise ValueError(f"{variant}: rates {best:g} and {rate:g} have no seed in common, so neither is the better")
        best = min((best, rate), key=lambda each: sum(rates[each][seed] for seed in shared))
    return best


def _compared(variant: str, rate: float, at: dict, baseline: dict[int, float], runs: Iterable[Run]) -> Row:
    values = at[variant, rate]
    lost = sum((run.variant, run.rate) == (variant, rate) and run.diverged_step is not None for run in runs)
    perplexities = by_setting(runs, lambda run: run.valid.get("ppl"))[variant, rate]
    row: Row = {"variant": variant, "lr": rate, "best": "", "n": len(values), "diverged": lost}
    row |= interval_columns("kd_loss", interval(list(values.values())))
    row["ppl"] = interval(list(perplexities.values())).mean
    if variant != BASELINE:
        against = paired(values, baseline)
        row |= interval_columns("difference", against.difference) | {"p": against.p}
    return row


def interval_columns(name: str, of: Interval, apply: Callable[[float], float] = float) -> Row:
    return {name: apply(of.mean), f"{name} low": apply(of.low), f"{name} high": apply(of.high)}


def _of(key: tuple[str, float], rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if (row["variant"], row["lr"]) == key]


def _seeds(rows: Sequence[Row], variant: str, measure: str) -> dict[int, float]:
    return {row["seed"]: row[measure] for row in rows if row["variant"] == variant and row.get(measure) is not None}
