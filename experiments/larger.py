"""What a larger check would take, and what difference it could tell from none: by calculation."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

from scipy import stats

from affine_attn.distill.estimate import ASSUMED_MFU, PEAK_FLOPS, duration, flops_per_token, size, teacher_config
from affine_attn.distill.recipes import recipe
from experiments.compare import CONFIDENCE
from experiments.runs import Run
from experiments.tables import BASELINE, Row, best_rate, by_setting

VARIANTS = ("softmax", "sink", "affine", "gated_headwise", "gated")
RATES, SEEDS, STEPS = (1e-3, 3e-3), 3, 1000
NUMBERS_OF_SEEDS = (3, 5, 10)


def cost() -> list[Row]:
    """A row per attention: one run of the paper's 0.5B recipe with a ninth of its steps, and all of them."""
    rows, total = [], 0.0
    for name in VARIANTS:
        chosen = replace(recipe("paper-0.5b"), attention=name, steps=STEPS, decay_steps=STEPS // 10)
        teacher = teacher_config(chosen)
        own = size(chosen.student_config)
        per_token = flops_per_token(chosen, own, teacher and size(teacher))
        seconds = chosen.tokens * per_token / (ASSUMED_MFU * PEAK_FLOPS)
        total += seconds * SEEDS * len(RATES)
        about = {
            "attention": name,
            "parameters": f"{own.parameters / 1e6:.1f}M",
            "tokens": f"{chosen.tokens / 1e9:.1f}B",
        }
        rows.append(about | {"a run": duration(seconds), "runs": SEEDS * len(RATES)})
    rows.append({"attention": "all", "a run": duration(total), "runs": len(rows) * SEEDS * len(RATES)})
    return rows


def resolution(runs: Sequence[Run]) -> list[Row]:
    """Half the width of a paired 95 % interval, for numbers of seeds: from how far the differences at own best, of
    variants with enough seeds, lie apart here."""
    at = by_setting(runs, lambda run: run.valid.get("kd"))
    rows = []
    for variant in dict.fromkeys(variant for variant, _ in at):
        if variant == BASELINE or BASELINE not in {name for name, _ in at}:
            continue
        mine, theirs = at[variant, best_rate(variant, at)], at[BASELINE, best_rate(BASELINE, at)]
        differences = [mine[seed] - theirs[seed] for seed in mine.keys() & theirs.keys()]
        if len(differences) < NUMBERS_OF_SEEDS[1]:
            continue
        deviation = statistics.stdev(differences)
        row: Row = {"difference": f"{variant} against {BASELINE}", "standard deviation": deviation}
        for n in NUMBERS_OF_SEEDS:
            row[f"+- with {n} seeds"] = float(stats.t.ppf((1 + CONFIDENCE) / 2, n - 1)) * deviation / math.sqrt(n)
        rows.append(row)
    return rows
