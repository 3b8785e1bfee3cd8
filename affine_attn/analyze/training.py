"""What a training run has left that figures show: its losses, gradient norms and statistics by step."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from affine_attn.distill.metrics import METRICS, JsonLines
from affine_attn.distill.statistics import STATISTICS
from affine_attn.errors import UserError
from affine_attn.runs.analysis import Analysis
from affine_attn.runs.series import gradient_statistics

# The paper's late phase: steps 7000 to 9000 of 9000.
LATE = 7 / 9


@dataclass(frozen=True)
class Run:
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
    metrics = JsonLines(folder / METRICS).rows()
    if not metrics:
        raise UserError(f"{folder} has no steps in {METRICS}: it is not the folder of a training run")
    return Run(name, variant, metrics, JsonLines(folder / STATISTICS).rows())


def runs_of(analyses: Sequence[Analysis]) -> list[Run]:
    """Those of the analysed models that were trained in a run."""
    return [
        read_run(Path(analysis.content["run"]), analysis.name, analysis.content["model"]["variant"])
        for analysis in analyses
        if analysis.content["run"] is not None
    ]


def running_mean(values: np.ndarray) -> np.ndarray:
    """Over a fiftieth of the steps: the mean of those up to each, so that a zoom shows what the whole shows."""
    sums = np.cumsum(np.concatenate(([0.0], values)))
    ends = np.arange(len(values)) + 1
    first = np.maximum(ends - max(1, len(values) // 50), 0)
    return (sums[1:] - sums[first]) / (ends - first)


def gradient_table(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Tables 4 and 5 of the paper, a row for each run; ``gradient_statistics`` has the formulas."""
    return [{"name": run.name, **gradient_statistics(run.curve("grad_norm")[1].tolist())} for run in runs]


def _columns(rows: list[tuple[int, float]]) -> tuple[np.ndarray, np.ndarray]:
    table = np.array(rows, np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1]
