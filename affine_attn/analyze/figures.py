"""Figures, each a pure function of saved files: of analyses (``files``) or of what training runs left (``training``).

Their numbers are those of the affine paper's figures (arXiv 2602.23057); docs/metrics.md says what each of them shows.
"""

import csv
import io
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import Normalize, PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from affine_attn.analyze.style import lines, new_figure, plain, style, token_labels
from affine_attn.core.spec import ACTIVATIONS
from affine_attn.errors import UserError
from affine_attn.figures.style import BELOW_ZERO, FAINT, HISTOGRAMS, INK, METRICS, MISSING, NOTE
from affine_attn.runs.analysis import Analysis
from affine_attn.runs.files import write_text, written
from affine_attn.runs.series import LATE, Run, gradient_table, running_mean, runs_of

ENTROPIES = ("entropy", "entropy_clipped", "entropy_absolute")
# What a layer × head map shows: the ends of its colours, where they are fixed.
HEAD_METRICS: dict[str, tuple[float, float | None]] = {
    "row_sum": (0, None),
    "first_token": (0, None),
    "sink_mass": (0, None),
    "negative": (0, None),
    "alpha": (0, None),
    "alpha_saturated": (0, None),
    "alpha_entropy": (-1, 1),
}
STATISTICS = ("entropy", "first_token", "row_sum", "alpha")
# The two of Figure 11: phi of alpha = alpha_range * phi(x).
FORMULAS = {
    "linear_clipping": "linear clipping: clamp(0.1 x + 0.5, 0, 1)",
    "sigmoid": "sigmoid: 1 / (1 + exp(-x))",
}
# The paper's Figure 9: the eighth layer, the first thirty tokens.
MAP_LAYER, MAP_TOKENS = 7, 30


def row_sums(analyses: Sequence[Analysis]) -> Figure:
    """Figure 3: histogram over queries of the sum of weights, averaged over heads; all layers."""
    figure, axes = new_figure(3.3 * len(analyses), 2.9, 1, len(analyses))
    for axis, analysis, line in zip(axes[0], analyses, _lines(analyses), strict=True):
        sums = analysis.content["row_sums"]
        counts = np.array(sums["all"]["counts"])
        axis.stairs(counts / counts.sum(), sums["edges"], fill=True, color=line["color"], alpha=0.75)
        for name, dashes in (("mean", "--"), ("median", ":")):
            value = sums["all"][name]
            axis.axvline(value, color=INK, linestyle=dashes, linewidth=1.2, label=f"{name} {value:.3f}")
        axis.set_title(plain(analysis.name))
        axis.set_xlabel("sum of the weights of a query")
        # Room for the legend above the bars.
        axis.set_ylim(top=axis.get_ylim()[1] * 1.3)
        axis.legend(fontsize=8, loc="upper left")
        axis.xaxis.set_major_locator(MaxNLocator(5))
    axes[0, 0].set_ylabel("fraction of queries")
    return figure


def first_token(analyses: Sequence[Analysis]) -> Figure:
    """Figure 4: weight on the first token, by layer."""
    figure, axes = new_figure(5.2, 3.2)
    _by_layer(axes[0, 0], analyses, "first_token")
    axes[0, 0].set_ylabel(METRICS["first_token"])
    axes[0, 0].set_ylim(bottom=min(0.0, axes[0, 0].get_ylim()[0]))
    axes[0, 0].legend()
    return figure


def entropy(analyses: Sequence[Analysis]) -> Figure:
    """Figure 6: entropy by layer, in the three definitions that negative weights allow."""
    figure, axes = new_figure(10, 3.2, 1, 3, sharey=True)
    for axis, metric in zip(axes[0], ENTROPIES, strict=True):
        _by_layer(axis, analyses, metric)
        axis.set_title(METRICS[metric])
    axes[0, 0].legend()
    return figure


def head_metric(analyses: Sequence[Analysis], metric: str) -> Figure:
    """Figure 5 (of ``row_sum``), and the like of other metrics: layer × head, one scale for all models that have it."""
    low, high = HEAD_METRICS[metric]
    shown = [analysis for analysis in analyses if metric in analysis.content["heads"]]
    maps = [_head_map(analysis, metric) for analysis in shown]
    if high is None:
        high = max(float(np.nanmax(values)) for values in maps)
    # Colours need a width, also where everything is zero.
    norm = Normalize(low, high if high > low else low + 1)
    layers, heads = (max(sizes) for sizes in zip(*(values.shape for values in maps), strict=True))
    width, height = np.clip(0.16 * heads, 1.8, 4.5) + 0.3, np.clip(0.16 * layers, 1.6, 5) + 0.9
    figure, axes = new_figure(width * len(maps) + 1.3, height, 1, len(maps))
    colours = colormaps["PuOr" if low < 0 else "cividis"].with_extremes(bad=MISSING)
    for axis, analysis, values in zip(axes[0], shown, maps, strict=True):
        axis.imshow(values, aspect="auto", cmap=colours, norm=norm, origin="lower")
        axis.set_title(plain(analysis.name))
        axis.set_xlabel("head")
        _integer_axes(axis)
    axes[0, 0].set_ylabel("layer")
    figure.colorbar(axes[0, 0].images[0], ax=list(axes[0]), label=METRICS[metric])
    return figure


def distributions(analyses: Sequence[Analysis]) -> Figure:
    """Alpha and beta of every head: one line of pixels for each, the heads of a layer below each other."""
    shown = [analysis for analysis in analyses if analysis.content["histograms"]]
    lines_most = max(analysis.content["model"]["layers"] * analysis.content["model"]["heads"] for analysis in shown)
    height = float(np.clip(0.05 * lines_most, 1.8, 7)) + 0.7
    figure, axes = new_figure(10, height * len(shown), len(shown), len(HISTOGRAMS))
    for row, analysis in zip(axes, shown, strict=True):
        heads, queries = analysis.content["model"]["heads"], analysis.content["data"]["tokens"]
        # One scale for the three; a head that is always the same must not hide all others.
        norm = PowerNorm(0.5, 0, _most(analysis) / queries)
        for axis, (name, label) in zip(row, HISTOGRAMS.items(), strict=True):
            if name not in analysis.content["histograms"]:
                axis.set_axis_off()
                continue
            histogram = analysis.content["histograms"][name]
            edges, counts = histogram["edges"], histogram["counts"]
            bins = len(edges) - 1
            image = np.concatenate([np.full((heads, bins), np.nan) if part is None else part for part in counts])
            extent = (edges[0], edges[-1], -0.5, len(counts) - 0.5)
            axis.imshow(image / queries, aspect="auto", cmap="Blues", norm=norm, origin="lower", extent=extent)
            axis.set_xlabel(label)
            axis.grid(False)
            axis.xaxis.set_major_locator(MaxNLocator(4))
            axis.yaxis.set_major_locator(MaxNLocator(8, integer=True))
            for layer in range(1, len(counts)):
                axis.axhline(layer - 0.5, color=FAINT, linewidth=0.4)
        row[0].set_title(plain(analysis.name), loc="left")
        row[0].set_ylabel("layer, its heads upwards")
        figure.colorbar(row[0].images[0], ax=list(row), label="fraction of queries")
    return figure


def attention_maps(analyses: Sequence[Analysis], layer: int | None = None, tokens: int = MAP_TOKENS) -> Figure:
    """Figure 9: weights averaged over heads, of a layer that all models kept; default: the eighth, else the last."""
    common = set.intersection(*(set(analysis.content["map"]["layers"]) for analysis in analyses))
    if layer is None:
        if not common:
            raise UserError("no layer's maps were kept of all models: analyze them with the same --layer")
        layer = MAP_LAYER if MAP_LAYER in common else max(common)
    maps = [analysis.map(layer).mean(0)[:tokens, :tokens].astype(np.float64) for analysis in analyses]
    # The first query has one key and all its weight on it: linear colours would show little else.
    norm = PowerNorm(0.5, 0, max(float(values.max()) for values in maps) or 1.0)
    colours = colormaps["cividis"].with_extremes(under=BELOW_ZERO, bad="white")
    figure, axes = new_figure(4.2 * len(analyses) + 0.9, 4.5, 1, len(analyses))
    for axis, analysis, values in zip(axes[0], analyses, maps, strict=True):
        place = analysis.content["map"]
        # Keys that no head sees hold exact zeros; those after the query are not drawn.
        drawn = np.where(np.tri(len(values), dtype=bool), values, np.nan)
        axis.imshow(drawn, cmap=colours, norm=norm)
        axis.set_title(plain(analysis.name))
        axis.set_xlabel("key")
        axis.grid(False)
        labels = token_labels(place["tokens"][: len(values)])
        ticks = range(len(labels))
        size = float(np.clip(170 / max(len(labels), 1), 3, 7))
        axis.set_xticks(ticks, labels, rotation=90, fontsize=size)
        axis.set_yticks(ticks, labels, fontsize=size)
    axes[0, 0].set_ylabel("query")
    extend = "min" if any((values < 0).any() for values in maps) else "neither"
    label = f"weight, mean over heads, layer {layer}" + (" (orange: below zero)" if extend == "min" else "")
    figure.colorbar(axes[0, 0].images[0], ax=list(axes[0]), label=label, extend=extend, shrink=0.85)
    return figure


def activations(analyses: Sequence[Analysis] = ()) -> Figure:
    """Figure 11: the two functions that alpha is made with; beside them the alpha of the models that have one."""
    shown = [analysis for analysis in analyses if analysis.alpha_counts is not None]
    figure, axes = new_figure(8.6 if shown else 4.6, 3, 1, 2 if shown else 1)
    axis, x = axes[0, 0], torch.arange(-80, 81) / 10
    for (name, formula), dashes in zip(FORMULAS.items(), ("-", "--"), strict=True):
        axis.plot(x, ACTIVATIONS[name](x), color=INK, linestyle=dashes, label=formula)
    axis.set_xlabel("x = w·h, before the activation")
    axis.set_ylabel("φ(x)")
    axis.set_ylim(-0.05, 1.35)
    axis.legend(loc="upper left", fontsize=8)
    for analysis, line in zip(shown, _lines(shown), strict=True):
        counts, edges = analysis.alpha_counts, analysis.content["histograms"]["alpha"]["edges"]
        axes[0, 1].stairs(counts / counts.sum(), edges, label=plain(analysis.name), linewidth=1.4, **line)
    if shown:
        axes[0, 1].set_xlabel("α of all layers and heads")
        axes[0, 1].set_ylabel("fraction of queries")
        axes[0, 1].legend(fontsize=8)
    return figure


def loss(runs: Sequence[Run]) -> Figure:
    """Figure 7: the training loss of every step, with a running mean over a fiftieth of them."""
    figure, axes = new_figure(5.6, 3.4)
    _curves(axes[0, 0], runs, "loss")
    axes[0, 0].set_ylabel("training loss [nats per token]")
    axes[0, 0].legend()
    return figure


def late_loss(runs: Sequence[Run]) -> Figure:
    """Figure 10: the running mean alone, in the last two ninths of the steps."""
    figure, axes = new_figure(5.6, 3.4)
    _curves(axes[0, 0], runs, "loss", LATE)
    axes[0, 0].set_ylabel("training loss [nats per token]")
    axes[0, 0].legend()
    return figure


def gradient_norm(runs: Sequence[Run]) -> Figure:
    """Figure 8: the norm of all gradients before they are clipped."""
    figure, axes = new_figure(5.6, 3.4)
    _curves(axes[0, 0], runs, "grad_norm")
    axes[0, 0].set_yscale("log")
    axes[0, 0].set_ylabel("gradient norm, before clipping")
    axes[0, 0].legend()
    return figure


def logits(runs: Sequence[Run]) -> Figure:
    """Figure 2: the mean logit over training, over all layers, heads and visible pairs."""
    figure, axes = new_figure(5.6, 3.4)
    _statistic(axes[0, 0], runs, "mean_logit")
    axes[0, 0].axhline(0, color=FAINT, linewidth=0.8)
    axes[0, 0].set_ylabel(METRICS["mean_logit"])
    axes[0, 0].legend()
    return figure


def statistics(runs: Sequence[Run]) -> Figure:
    """How attention changes over training: means over layers and heads."""
    figure, axes = new_figure(10, 5.6, 2, 2)
    for axis, name in zip(axes.flat, STATISTICS, strict=True):
        _statistic(axis, runs, name)
        axis.set_ylabel(METRICS[name])
        if not axis.lines:
            axis.text(0.5, 0.5, "none of these models has it", ha="center", transform=axis.transAxes, color=NOTE)
    axes[0, 0].legend()
    return figure


def draw_all(analyses: Sequence[Analysis], folder: Path) -> list[Path]:
    """All figures that these analyses and the runs they name have something for."""
    return draw(analyses, runs_of(analyses), folder)


def draw(analyses: Sequence[Analysis], runs: Sequence[Run], folder: Path) -> list[Path]:
    """All figures of these analyses and runs, of which either may be none, each as PNG and SVG, and Tables 4 and 5."""
    figures: dict[str, Callable[[], Figure]] = {"activations": partial(activations, analyses)}
    if analyses:
        figures |= {plot.__name__: partial(plot, analyses) for plot in (row_sums, first_token, entropy)}
    for metric in HEAD_METRICS:
        if any(_head_map(a, metric).any() for a in analyses if metric in a.content["heads"]):
            figures[f"heads_{metric}"] = partial(head_metric, analyses, metric)
    if any(analysis.content["histograms"] for analysis in analyses):
        figures["distributions"] = partial(distributions, analyses)
    if analyses and set.intersection(*(set(analysis.content["map"]["layers"]) for analysis in analyses)):
        figures["attention_maps"] = partial(attention_maps, analyses)
    if runs:
        figures |= {plot.__name__: partial(plot, runs) for plot in (loss, late_loss, gradient_norm)}
    if any(run.statistics for run in runs):
        figures |= {plot.__name__: partial(plot, runs) for plot in (logits, statistics)}
    folder.mkdir(parents=True, exist_ok=True)
    written = [path for name, plot in figures.items() for path in save(plot, folder / name)]
    return [*written, *([_write_gradients(runs, folder / "gradients.csv")] if runs else [])]


def save(draw: Callable[[], Figure], path: Path) -> list[Path]:
    """Draw and write ``path``.png and ``path``.svg; the same input gives the same bytes."""
    files = [path.with_name(f"{path.name}.{kind}") for kind in ("png", "svg")]
    with style():
        figure = draw()
        for path, date in zip(files, ({}, {"Date": None}), strict=True):
            with written(path) as file:
                figure.savefig(file, format=path.suffix[1:], metadata=date)
    return files


def _write_gradients(runs: Sequence[Run], path: Path) -> Path:
    rows = gradient_table(runs)
    text = io.StringIO(newline="")
    table = csv.DictWriter(text, rows[0])
    table.writeheader()
    table.writerows(rows)
    write_text(path, text.getvalue())
    return path


def _lines(shown: Sequence[Analysis]) -> list[dict[str, Any]]:
    return lines(analysis.content["model"]["variant"] for analysis in shown)


def _by_layer(axis: Axes, analyses: Sequence[Analysis], metric: str) -> None:
    for analysis, line in zip(analyses, _lines(analyses), strict=True):
        values = analysis.content["layers"][metric]
        axis.plot(range(len(values)), values, marker="o", markersize=3.5, label=plain(analysis.name), **line)
    axis.set_xlabel("layer")
    axis.xaxis.set_major_locator(MaxNLocator(10, integer=True))


def _head_map(analysis: Analysis, metric: str) -> np.ndarray:
    """[L, H], NaN where there is no number."""
    heads = analysis.content["model"]["heads"]
    of_layers = analysis.content["heads"][metric]
    return np.array([[np.nan] * heads if layer is None else layer for layer in of_layers], np.float64)


def _most(analysis: Analysis) -> int:
    """The largest count in a histogram of any head."""
    layers = [layer for entry in analysis.content["histograms"].values() for layer in entry["counts"] if layer]
    return max(int(np.max(layer)) for layer in layers)


def _integer_axes(axis: Axes) -> None:
    axis.grid(False)
    for side in (axis.xaxis, axis.yaxis):
        side.set_major_locator(MaxNLocator(8, integer=True))


def _curves(axis: Axes, runs: Sequence[Run], name: str, begin: float = 0.0) -> None:
    """Every step faintly, a running mean over a fiftieth of the steps on top; from ``begin`` on, the mean alone."""
    for run, line in zip(runs, lines(run.variant for run in runs), strict=True):
        steps, values = run.curve(name)
        means = running_mean(values)
        late = steps >= begin * steps[-1]
        if not begin:
            axis.plot(steps[late], values[late], color=line["color"], alpha=0.2, linewidth=0.6)
        axis.plot(steps[late], means[late], label=plain(run.name), **line)
    axis.set_xlabel("optimizer step")


def _statistic(axis: Axes, runs: Sequence[Run], name: str) -> None:
    for run, line in zip(runs, lines(run.variant for run in runs), strict=True):
        steps, values = run.mean_statistic(name)
        if len(steps):
            axis.plot(steps, values, marker="o", markersize=3, label=plain(run.name), **line)
    axis.set_xlabel("optimizer step")
