"""The controls at the scale of a CPU: what of them was run, and what they say.

The rules are those of docs/reproduction-controls.md, where p is not corrected and a rate stands for itself.
"""

from collections import Counter
from collections.abc import Callable, Sequence

from experiments import controls
from experiments.compare import Interval, interval, outcome, paired
from experiments.contrasts import SCALES, is_level
from experiments.controls import HEADWISE, NO_BETA, NORMED
from experiments.grid import SMALL
from experiments.runs import Run
from experiments.tables import BASELINE, Row, by_setting, interval_columns

AFFINE = "affine"


def coverage(runs: Sequence[Run]) -> str:
    """Which seeds are there, of those that were planned."""
    planned = Counter[int]()
    for group in controls.small_groups(controls.small_recipe(data="", teacher="")):
        planned[group.recipe.seed] += len(group.students)
    finished = Counter(run.seed for run in runs if run.table == SMALL and run.result)
    whole = [seed for seed in planned if finished[seed] >= planned[seed]]
    parts = [
        f"{seed} ({finished[seed]} of {planned[seed]} runs)" for seed in planned if 0 < finished[seed] < planned[seed]
    ]
    missing = [seed for seed in planned if not finished[seed]]
    said = [f"{len(whole)} of {len(planned)} seeds are complete{_listed(whole)}"]
    said += [f"in part there: {', '.join(parts)}"] if parts else []
    said += [f"not run: {len(missing)}{_listed(missing)}"] if missing else []
    return f"{'; '.join(said)}."


def _listed(seeds: Sequence[int]) -> str:
    return f" ({', '.join(map(str, seeds))})" if seeds else ""


def rows(runs: Sequence[Run]) -> list[Row]:
    """Each variant against softmax, and affine against each, by rate. All columns of a row but ``diverged`` are of the
    seeds in which the variant, softmax and affine have a loss."""
    found = []
    for (variant, rate), of_all in _losses(runs).items():
        values, softmax, affine = of_all
        row: Row = {"variant": variant, "lr": rate, "n": len(values)}
        row["diverged"] = sum(
            (run.variant, run.rate) == (variant, rate) and run.diverged_step is not None
            for run in runs
            if run.table == SMALL
        )
        row["loss"] = interval(list(values.values())).mean
        for name, mine, theirs in (("against softmax", values, softmax), ("affine against it", affine, values)):
            if mine != theirs:
                difference, p = paired(mine, theirs)
                row |= interval_columns(name, difference) | {f"p of {name}": p, f"{name}, outcome": outcome(difference)}
        found.append(row)
    return found


def says(runs: Sequence[Run]) -> list[str]:
    """The decisions on controls 1, 2 and 5 at each rate."""
    losses = _losses(runs)
    found = []
    for rate in sorted({rate for variant, rate in losses if variant == AFFINE}):

        def against(variant: str, baseline: str, rate: float = rate) -> Interval:
            values, others = (losses.get((name, rate), ({},))[0] for name in (variant, baseline))
            return paired(values, others).difference

        lead, normed = against(AFFINE, BASELINE), against(f"{AFFINE}{NORMED}", f"{BASELINE}{NORMED}")
        beta, headwise = against(NO_BETA, AFFINE), against(HEADWISE, AFFINE)
        found.append(
            f"**At {rate:g}**, affine against softmax: {_said(lead)}. {_scale(against, lead)} With norms on q and k in "
            f"both: {_said(normed)}. Affine without β against affine: {_said(beta)}; a headwise gate against affine: "
            f"{_said(headwise)}."
        )
    return found


def _scale(against: Callable[[str, str], Interval], lead: Interval) -> str:
    """The rule of control 1."""
    if outcome(lead) != "better":
        return "Without a lead there is nothing for a scale to explain."
    words = {name: outcome(against(AFFINE, name)) for name in SCALES}
    shares = {name: against(name, BASELINE).mean / lead.mean for name in SCALES}
    level = [
        f"{name} ({100 * shares[name]:.0f} % of its gain)" for name in SCALES if is_level(words[name], shares[name])
    ]
    if level:
        return f"By the rule of control 1 it is the output scale: affine is not better than {', '.join(level)}."
    if set(words.values()) == {"better"}:
        return "By the rule of control 1 it is not the output scale: affine is better than all four."
    return "The rule of control 1 leaves it open."


def _said(difference: Interval) -> str:
    word = outcome(difference)
    if difference.n < 2:
        return word
    return f"{word} ({difference.mean:+.3g} [{difference.low:.3g}, {difference.high:.3g}])"


def _losses(runs: Sequence[Run]) -> dict[tuple[str, float], tuple[dict[int, float], ...]]:
    """Return losses of a variant at a rate, of softmax and of affine there, in the seeds that all three have."""
    at = by_setting([run for run in runs if run.table == SMALL], lambda run: run.valid.get("kd"))
    found = {}
    for variant, rate in sorted(at, key=lambda key: key[1]):
        three = [at.get((name, rate), {}) for name in (variant, BASELINE, AFFINE)]
        shared = sorted(set.intersection(*map(set, three)))
        found[variant, rate] = tuple({seed: values[seed] for seed in shared} for values in three)
    return found
