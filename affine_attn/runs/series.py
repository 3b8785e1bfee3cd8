"""A run step by step: what is measured, and what it comes to.

``metrics.jsonl`` has a line for every step:

==================== ==================================================================================================
step                 optimizer steps done, from 1
loss                 what is minimised; kd, hard and entropy are its parts (``distill.losses.Loss``); kd needs a teacher
grad_norm            2-norm of all gradients before they are clipped
lr                   learning rate of this step
tokens_per_second    of all devices, since the line before; validation and statistics do not count
mfu                  tokens_per_second by the FLOPs of a token (student's training, teacher's forward), over the peak
                     of the devices; only in bfloat16 and on a device whose peak is known (``distill.estimate.PEAKS``)
peak_memory_bytes    most that torch has held on the first process's GPU so far
max_rss_bytes        without a GPU instead: most memory the first process has held so far
valid_...            after a step that was followed by validation, see ``distill.validation``
==================== ==================================================================================================

``statistics.jsonl`` has how the student attends as it learns, on a few sequences that stay the same: one line after
every ``statistics_steps`` optimizer steps, and one before the first. ``step`` counts the steps done. All else is a list
over layers of lists over heads: ``entropy``, ``first_token``, ``row_sum`` and ``sink_mass``, means over queries;
``mean_logit`` and ``max_logit`` over visible pairs; for affine attention also ``alpha``, its mean over tokens,
``alpha_saturated``, the share of them with alpha at an end of its range, and ``alpha_ma``. A layer without alpha has
null there. ``AttentionStats`` has the definitions.

``result.json`` is a finished run in a few numbers, all of them from its metrics.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from affine_attn.errors import UserError
from affine_attn.runs.analysis import Analysis
from affine_attn.runs.layout import METRICS, RunFolder

# The paper's late phase: steps 7000 to 9000 of 9000.
LATE = 7 / 9
# Of the paper's statistics of gradients.
STEPS = 500
SPIKE_FACTORS = (6, 9)
# What result.json may have of them.
LOSSES = ("loss", "kd", "hard", "valid_loss", "valid_kd", "valid_hard", "valid_perplexity")
_SPEEDS = ("tokens_per_second", "mfu")
_MEMORY = ("peak_memory_bytes", "max_rss_bytes")


@dataclass(frozen=True)
class Run:
    """The lines of its metrics and statistics, as figures show them."""

    name: str
    variant: str | None
    metrics: list[dict[str, Any]]
    statistics: list[dict[str, Any]]

    def curve(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of a metric, where it was measured."""
        rows = [(row["step"], row[name]) for row in self.metrics if row.get(name) is not None]
        return _columns(rows)

    def mean_statistic(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and the mean over layers and heads of a statistic; layers that lack it do not count."""
        rows = []
        for row in self.statistics:
            layers = [layer for layer in row.get(name) or () if layer is not None]
            if layers:
                rows.append((row["step"], float(np.mean(layers))))
        return _columns(rows)


def read_run(folder: Path, name: str, variant: str | None) -> Run:
    """``metrics.jsonl`` must be there, ``statistics.jsonl`` may."""
    run = RunFolder(folder)
    if not (metrics := run.metrics.rows()):
        raise UserError(f"{folder} has no steps in {METRICS}: it is not the folder of a training run")
    return Run(name, variant, metrics, run.statistics.rows())


def runs_of(analyses: Sequence[Analysis]) -> list[Run]:
    """Those of the analysed models that were trained in a run."""
    return [
        read_run(Path(analysis.content["run"]), analysis.name, analysis.content["model"]["variant"])
        for analysis in analyses
        if analysis.content["run"] is not None
    ]


def running_mean(values: np.ndarray) -> np.ndarray:
    """Average over a fiftieth of the steps up to each, so that a zoom shows what the whole shows."""
    sums = np.cumsum(np.concatenate(([0.0], values)))
    ends = np.arange(len(values)) + 1
    first = np.maximum(ends - max(1, len(values) // 50), 0)
    return (sums[1:] - sums[first]) / (ends - first)


def gradient_statistics(norms: Sequence[float], steps: int = STEPS) -> dict[str, float]:
    """Mean, standard deviation, variance, their ratio CV = std / mean, and spikes: steps with g > median + k MAD.

    Those of the affine paper's Tables 4 and 5 (arXiv 2602.23057), of the gradient norm of every step, neither smoothed
    nor clipped. The paper does not say which deviation and which MAD; here the deviation is that of the steps
    themselves (divided by their number), and MAD the plain median of |g - median(g)|, without the factor 1.4826 of
    normal distributions.
    """
    g = np.asarray(norms[:steps], np.float64)
    if not g.size:
        raise UserError("there are no gradient norms")
    mean, std = g.mean(), g.std()
    middle = np.median(g)
    mad = np.median(abs(g - middle))
    spikes = {f"spikes_{k}": int((g > middle + k * mad).sum()) for k in SPIKE_FACTORS}
    cv = float(std / mean) if mean else 0.0
    return {"steps": g.size, "mean": float(mean), "std": float(std), "variance": float(std**2), "cv": cv, **spikes}


def gradient_table(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Tables 4 and 5 of the paper, a row for each run; ``gradient_statistics`` has the formulas."""
    return [{"name": run.name, **gradient_statistics(run.curve("grad_norm")[1].tolist())} for run in runs]


def result(run: RunFolder) -> dict[str, Any]:
    """Return the last step's line (its losses, and those on held-out text), with medians of speeds and the most memory
    over all steps, and ``gradients``: ``gradient_statistics`` of the first steps."""
    rows = run.metrics.rows()
    summary = dict(rows[-1])
    for names, reduced in ((_SPEEDS, median), (_MEMORY, max)):
        summary |= {name: reduced(row[name] for row in rows) for name in names if name in summary}
    return summary | {"gradients": gradient_statistics([row["grad_norm"] for row in rows])}


def _columns(rows: list[tuple[int, float]]) -> tuple[np.ndarray, np.ndarray]:
    table = np.array(rows, np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1]
