"""Pictures of the runs of tables A and D: a pure function of their folders."""

import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from affine_attn.runs.files import written
from affine_attn.runs.series import STEPS
from experiments.grid import PAPER_RATE
from experiments.runs import Run
from experiments.tables import by_setting, table_d

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SMOOTHED = 20  # steps of a point of a loss curve
_SETTLED = 200  # the first step of differences, which are several times larger before
_WIDEST = 14  # inches of a picture, for its letters to be read in a page
# Of table D, whose names are not those of variants.
_COLOUR_OF = {"rope": "softmax", "scale_invariant + affine": "affine"}

Points = tuple[list[float], list[float]]  # steps, values
Curve = Callable[[Run], Points | None]


class Panel(NamedTuple):
    """A row of a picture."""

    label: str
    curve: Curve
    scale: str = "linear"
    has_range: bool = True  # of the seeds, around their mean


def draw(runs: Sequence[Run], folder: Path) -> Iterator[Path]:
    """Loss by learning rate and over training, gradient norms of the first steps, and how the students attend, each
    variant a mean over its seeds."""
    if not runs:
        return
    yield _rates(folder / "rates.svg", runs)
    losses = Panel("training loss", _loss), Panel("less softmax's at the same seed", _difference(runs))
    yield _panels(folder / "losses.svg", runs, losses)
    norms = Panel(f"gradient norm, first {STEPS} steps", _norm, scale="log", has_range=False)
    yield _panels(folder / "gradient_norms.svg", runs, (norms,))
    watched = {
        "mean_logit": "mean logit",
        "first_token": "weight on the first key",
        "entropy": "entropy",
        "row_sum": "sum of weights",
    }
    attention = [Panel(label, _statistic(name)) for name, label in watched.items()]
    yield _panels(folder / "attention.svg", runs, attention)


def _loss(run: Run) -> Points:
    series = run.series()
    at = range(0, len(series["loss"]) - _SMOOTHED + 1, _SMOOTHED)
    return [series["step"][i + _SMOOTHED - 1] for i in at], [
        statistics.fmean(series["loss"][i : i + _SMOOTHED]) for i in at
    ]


def _difference(runs: Sequence[Run]) -> Curve:
    """Return the difference on equal batches, so that what is hard about a batch is no part of it."""
    softmax = {(run.seed, run.rate): run for run in runs if run.variant == "softmax"}

    def curve(run: Run) -> Points | None:
        baseline = softmax.get((run.seed, run.rate))
        if baseline is None or run.variant == "softmax":
            return None
        (steps, mine), (_, theirs) = _loss(run), _loss(baseline)
        # Either may have been cut short.
        kept = [i for i in range(min(len(mine), len(theirs))) if steps[i] > _SETTLED]
        return [steps[i] for i in kept], [mine[i] - theirs[i] for i in kept]

    return curve


def _norm(run: Run) -> Points:
    series = run.series()
    return series["step"][:STEPS], series["grad_norm"][:STEPS]


def _statistic(name: str) -> Curve:
    """A mean over layers and heads."""

    def curve(run: Run) -> Points:
        rows = run.statistics()
        return [row["step"] for row in rows], [statistics.fmean(map(statistics.fmean, row[name])) for row in rows]

    return curve


def draw_lengths(runs: Sequence[Run], folder: Path) -> Iterator[Path]:
    """Table D: the loss, and the share of needles found, at the training length and beyond."""
    from affine_attn.analyze.style import lines, new_figure, style

    rows = table_d(runs)
    if not rows:
        return
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    # A colour for each attention, dashes for another rotation under the same.
    attentions = [re.sub(r"(, )?p-rope( \d+)?$", "", name) or "p-rope" for name in variants]
    drawn = lines([_COLOUR_OF.get(name, name) for name in attentions])
    with style():
        figure, (axes,) = new_figure(10, 3.8, 1, 2)
        for axis, measure, label in zip(axes, ("ce", "needle"), ("cross-entropy", "needles found"), strict=True):
            for variant, line in zip(variants, drawn, strict=True):
                mine = [row for row in rows if row["variant"] == variant]
                at = sorted((int(name.split("_")[1]), name) for name in mine[0] if name.startswith(f"{measure}_"))
                means = [statistics.fmean(row[name] for row in mine) for _, name in at]
                axis.plot([length for length, _ in at], means, label=variant, marker=".", **line)
                axis.set_xscale("log", base=2)
                axis.set_xticks([length for length, _ in at], [str(length) for length, _ in at])
            axis.minorticks_off()
            axis.set_xlabel("tokens of a sequence")
            axis.set_ylabel(label)
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right center", fontsize=8, handlelength=3)
        yield _saved(figure, folder / "lengths.svg")


def _rates(path: Path, runs: Sequence[Run]) -> Path:
    """What a variant makes of a learning rate: a mean over the seeds there, their range a bar."""
    from affine_attn.analyze.style import lines, new_figure, style

    at = by_setting(runs, lambda run: run.valid.get("kd"))
    variants = list(dict.fromkeys(variant for variant, _ in at))
    with style():
        figure, ((axis,),) = new_figure(6, 3.6)
        axis.set_xscale("log")
        for variant, line in zip(variants, lines(variants), strict=True):
            found = sorted((rate, list(values.values())) for (name, rate), values in at.items() if name == variant)
            means = [statistics.fmean(values) for _, values in found]
            below = [mean - min(values) for mean, (_, values) in zip(means, found, strict=True)]
            above = [max(values) - mean for mean, (_, values) in zip(means, found, strict=True)]
            axis.errorbar([rate for rate, _ in found], means, (below, above), label=variant, marker=".", **line)
        axis.axvline(PAPER_RATE, color="0.6", linewidth=1, linestyle=":")
        axis.text(PAPER_RATE, 0.02, " the paper's rate", transform=axis.get_xaxis_transform(), fontsize=8, color="0.4")
        rates = sorted({rate for _, rate in at})
        axis.set_xticks(rates, [f"{rate:g}" for rate in rates])
        axis.minorticks_off()
        axis.set_xlabel("learning rate")
        axis.set_ylabel("loss on held-out text")
        axis.legend(fontsize=8, ncols=2, loc="upper left")
        return _saved(figure, path)


def _panels(path: Path, runs: Sequence[Run], panels: Sequence[Panel]) -> Path:
    """A column per learning rate; a variant is the mean over its seeds, and variants come in the order of the runs."""
    from affine_attn.analyze.style import lines, new_figure, style

    rates = sorted({run.rate for run in runs})
    variants = list(dict.fromkeys(run.variant for run in runs))
    with style():
        width = min(4.5 * len(rates), _WIDEST)
        figure, axes = new_figure(width, 2.7 * len(panels), len(panels), len(rates), sharey="row")
        for row, panel in zip(axes, panels, strict=True):
            row[0].set_ylabel(panel.label)
            for axis, rate in zip(row, rates, strict=True):
                axis.set_yscale(panel.scale)
                for variant, line in zip(variants, lines(variants), strict=True):
                    of_variant = [panel.curve(run) for run in runs if (run.variant, run.rate) == (variant, rate)]
                    found = [points for points in of_variant if points is not None]
                    if not found:
                        continue
                    # A run that was cut short ends the mean: later points would be of other seeds.
                    steps = min((x for x, _ in found), key=len)
                    values = list(zip(*(y[: len(steps)] for _, y in found), strict=True))
                    axis.plot(steps, [statistics.fmean(v) for v in values], label=variant, linewidth=1.2, **line)
                    if panel.has_range:
                        low, high = [min(v) for v in values], [max(v) for v in values]
                        axis.fill_between(steps, low, high, color=line["color"], alpha=0.15, linewidth=0)
        for axis, rate in zip(axes[0], rates, strict=True):
            axis.set_title(f"learning rate {rate:g}")
        for axis in axes[-1]:
            axis.set_xlabel("step")
        handles, labels = axes[0][-1].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", fontsize=8, ncols=len(labels))
        return _saved(figure, path)


def _saved(figure: "Figure", path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with written(path) as file:
        figure.savefig(file, format=path.suffix[1:], metadata={"Date": None})
    return path
