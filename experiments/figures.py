"""Pictures of the runs of table A: a pure function of their folders."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from affine_attn.distill.gradients import STEPS
from experiments.runs import Run

_SMOOTHED = 20  # steps of a point of a loss curve


def draw(runs: Sequence[Run], folder: Path) -> Iterator[Path]:
    """Loss, gradient norms of the first steps, and how the students attend, each variant a mean over its seeds."""
    import matplotlib

    matplotlib.use("svg")
    # The same numbers give the same file.
    matplotlib.rcParams["svg.hashsalt"] = "experiments"
    if not runs:
        return
    yield _panels(folder / "losses.svg", runs, {"training loss": _loss_curve})
    yield _panels(folder / "gradient_norms.svg", runs, {f"gradient norm, first {STEPS} steps": _norm_curve})
    watched = {
        "mean_logit": "mean logit",
        "first_token": "weight on the first key",
        "entropy": "entropy",
        "row_sum": "sum of weights",
    }
    curves = {title: _statistics_curve(name) for name, title in watched.items()}
    yield _panels(folder / "attention.svg", runs, curves)


Curve = Callable[[Run], tuple[list[float], list[float]]]


def _loss_curve(run: Run) -> tuple[list[float], list[float]]:
    series = run.series()
    at = range(0, len(series["loss"]) - _SMOOTHED + 1, _SMOOTHED)
    return [series["step"][i + _SMOOTHED - 1] for i in at], [
        statistics.fmean(series["loss"][i : i + _SMOOTHED]) for i in at
    ]


def _norm_curve(run: Run) -> tuple[list[float], list[float]]:
    series = run.series()
    return series["step"][:STEPS], series["grad_norm"][:STEPS]


def _statistics_curve(name: str) -> Curve:
    """A mean over layers and heads."""

    def curve(run: Run) -> tuple[list[float], list[float]]:
        rows = run.statistics()
        return [row["step"] for row in rows], [statistics.fmean(map(statistics.fmean, row[name])) for row in rows]

    return curve


def _panels(path: Path, runs: Sequence[Run], curves: dict[str, Curve]) -> Path:
    """A row per learning rate, a column per curve."""
    from matplotlib import pyplot

    rates = sorted({run.rate for run in runs})
    colours = {name: f"C{i}" for i, name in enumerate(sorted({run.variant for run in runs}))}
    size = (4.5 * len(curves), 3 * len(rates))
    figure, axes = pyplot.subplots(len(rates), len(curves), figsize=size, squeeze=False, layout="constrained")
    for row, rate in zip(axes, rates, strict=True):
        for axis, (title, curve) in zip(row, curves.items(), strict=True):
            for variant, colour in colours.items():
                found = [curve(run) for run in runs if (run.variant, run.rate) == (variant, rate)]
                if not found:
                    continue
                # A run that was cut short ends the mean: later points would be of other seeds.
                steps = min((x for x, _ in found), key=len)
                mean = [statistics.fmean(values) for values in zip(*(y[: len(steps)] for _, y in found), strict=True)]
                axis.plot(steps, mean, color=colour, label=variant, linewidth=1)
            axis.set_title(f"{title}, lr {rate:g}", fontsize=9)
            axis.set_xlabel("step")
    axes[0][0].legend(fontsize=7)
    _save(figure, path)
    pyplot.close(figure)
    return path


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
