"""Runs -> figures of the page, as plotly.js draws them. No colour of the theme and no size of the screen is in here.

A figure has panels, and pickers that choose what all its panels show. Text that comes from files passes ``label``.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from typing import Any

import numpy as np
import torch

from affine_attn.core.spec import ACTIVATIONS
from affine_attn.evaluate.results import TABLE_1, accuracy
from affine_attn.figures.style import HISTOGRAMS, METRICS, RUN_COLOURS
from affine_attn.report.runs import MAP_NUMBERS, Look, Run, about, looks, measured
from affine_attn.runs.series import LATE, running_mean

# Of the lines of runs beyond these colours, which begin anew, and of analyses of different text; and in words.
DASHES = {"solid": "solid", "dash": "dashed", "dot": "dotted", "dashdot": "dash-dotted"}
# A curve with more points shows the least and the greatest value of every stretch, so that no spike is lost.
MOST_POINTS = 2000
# Numbers that histograms of single heads may have together, as MAP_NUMBERS for maps; beyond it layers alone are shown.
HISTOGRAM_NUMBERS = 1_500_000

# Panels of curves over training: is it the late phase, title.
_PHASES = ((False, "whole run"), (True, "late phase"))
# Of histograms: bins of different models lie at different places.
_CLOSEST = {"hovermode": "closest"}


@dataclass(frozen=True)
class Panel:
    """``traces`` has plotly's data by the choice of the pickers: numbers of options joined by "/"."""

    traces: dict[str, list[dict[str, Any]]]
    layout: dict[str, Any]
    title: str = ""


@dataclass(frozen=True)
class Picker:
    label: str
    options: list[str]


@dataclass(frozen=True)
class Figure:
    id: str
    title: str
    caption: str
    panels: list[Panel]
    pickers: list[Picker] = field(default_factory=list)


def label(text: str) -> str:
    """Text as plotly shows it: it takes tags and entities for markup, and breaks lines at their ends."""
    visible = "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text.replace("\n", "↵").replace("\t", "→"))
    return visible.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def rounded(values: Iterable[float | None], digits: int = 5) -> list[float | None]:
    """Round to significant digits; JSON has no word for what is not finite."""
    return [None if v is None or not math.isfinite(v) else float(f"{v:.{digits}g}") for v in values]


def percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


def thinned(x: np.ndarray, y: np.ndarray, most: int = MOST_POINTS) -> tuple[list, list]:
    if len(x) > most:
        kept: set[int] = {0, len(x) - 1}
        for stretch in np.array_split(np.arange(len(x)), most // 2):
            # What is not a number is no extreme.
            kept.add(int(stretch[np.nan_to_num(y[stretch], nan=np.inf).argmin()]))
            kept.add(int(stretch[np.nan_to_num(y[stretch], nan=-np.inf).argmax()]))
        order = sorted(kept)
        x, y = x[order], y[order]
    return x.astype(int).tolist(), rounded(y.tolist())


def training(runs: Sequence[Run]) -> list[Figure]:
    trained = [(i, run) for i, run in enumerate(runs) if run.metrics]
    if not trained:
        return []
    figures = [_loss(trained), _gradient_norm(trained)]
    if any(len(run.curve("valid_loss")[0]) > 1 for _, run in trained):
        figures.append(_validation(trained))
    return figures + _attention_while_training(trained)


def _loss(trained: list[tuple[int, Run]]) -> Figure:
    def curves(late: bool) -> list[dict]:
        traces = []
        for i, run in trained:
            steps, losses = run.curve("loss")
            shown = _late(steps) if late else slice(None)
            x, y = thinned(steps[shown], losses[shown])
            faint = {"width": 1}
            traces.append(_line(i, run, x, y, line=faint, opacity=0.35, hoverinfo="skip", showlegend=False))
            x, y = thinned(steps[shown], running_mean(losses)[shown])
            traces.append(_line(i, run, x, y))
        return traces

    caption = (
        "What is minimised: every step faint, and its mean over the last fiftieth of the run. "
        "Late phase: the last two ninths of the steps, on their own scale."
    )
    panels = [Panel({"": curves(late)}, _axes("step", "loss"), title) for late, title in _PHASES]
    return Figure("loss", "Loss", caption, panels)


def _gradient_norm(trained: list[tuple[int, Run]]) -> Figure:
    def curves(late: bool) -> list[dict]:
        traces = []
        for i, run in trained:
            steps, norms = run.curve("grad_norm")
            shown = _late(steps) if late else slice(None)
            traces.append(_line(i, run, *thinned(steps[shown], norms[shown]), line={"width": 1}))
        return traces

    caption = (
        "2-norm of the whole gradient at every step, before clipping and without smoothing; logarithmic. "
        f"Curves of more than {MOST_POINTS} steps show the extremes of every stretch."
    )
    axes = _axes("step", "gradient norm", yaxis={"type": "log", "nticks": 6})
    return Figure(
        "gradient-norm", "Gradient norm", caption, [Panel({"": curves(late)}, axes, t) for late, t in _PHASES]
    )


def _validation(trained: list[tuple[int, Run]]) -> Figure:
    panels = []
    for name, title in (("valid_loss", "loss"), ("valid_perplexity", "perplexity")):
        traces = [
            _line(i, run, *thinned(*curve), mode="lines+markers")
            for i, run in trained
            if len((curve := run.curve(name))[0])
        ]
        panels.append(Panel({"": traces}, _axes("step", title), title))
    caption = f"Losses on text that is never trained on, {_training_sequences(trained)}."
    return Figure("validation", "Held-out text", caption, panels)


def _attention_while_training(trained: list[tuple[int, Run]]) -> list[Figure]:
    panels = []
    for metric, title in METRICS.items():
        traces = [
            _line(i, run, *thinned(*curve)) for i, run in trained if len((curve := run.mean_statistic(metric))[0])
        ]
        if _tells(traces):
            panels.append(Panel({"": traces}, _axes("step", ""), title))
    caption = (
        f"On a few sequences that stay the same, {_training_sequences(trained)}; means over layers and heads. "
        "What is 0 throughout is left out."
    )
    return [Figure("while-training", "Attention while training", caption, panels)] if panels else []


def _training_sequences(trained: list[tuple[int, Run]]) -> str:
    lengths = {f"{run.recipe['sequence_length']} tokens of {run.recipe.get('data')}" for _, run in trained}
    return f"in sequences as in training ({'; '.join(sorted(lengths))})"


def evaluation(runs: Sequence[Run]) -> list[Figure]:
    return [*_accuracies(runs), *_positions(runs), *_needles(runs)]


def _accuracies(runs: Sequence[Run]) -> list[Figure]:
    traces, tasks = [], [task for task in TABLE_1 if any(task in run.zero_shot for run in runs)]
    for i, run in enumerate(runs):
        cells = {TABLE_1[task]: accuracy(result) for task, result in run.zero_shot.items()}
        if cells:
            traces.append(
                _trace(i, run)
                | {
                    "type": "scatter",
                    "mode": "markers",
                    "marker": {"color": _colour(i), "size": 9},
                    "x": list(cells),
                    "y": rounded(percent(cell["value"]) for cell in cells.values()),
                    "error_y": _interval([percent(cell["stderr"]) for cell in cells.values()]),
                    "hovertemplate": "%{x}: %{y:.2f} %",
                }
            )
    if not traces:
        return []
    caption = (
        "acc_norm where the harness has it, over the most documents there is a result of; bars are 95 % intervals, "
        "1.96 standard errors to each side."
    )
    order = {"categoryorder": "array", "categoryarray": [TABLE_1[task] for task in tasks], "type": "category"}
    layout = _axes("", "accuracy, %", xaxis=order) | {"scattermode": "group", "scattergap": 0.6}
    return [Figure("tasks", "Zero-shot tasks", caption, [Panel({"": traces}, layout)])]


def _comparable(runs: Sequence[Run], part: str) -> Iterator[tuple[str, list[tuple[int, Run, dict[str, Any]]]]]:
    """Evaluations that have this part, those that differ in the weights alone together, under a heading."""
    together: dict[str, list[tuple[int, Run, dict[str, Any]]]] = {}
    for i, run in enumerate(runs):
        for found in run.evaluations:
            if part in found:
                together.setdefault(measured(found), []).append((i, run, found))
    names = Counter(entries[0][2]["name"] for entries in together.values())
    for entries in together.values():
        first = entries[0][2]
        yield label(first["name"] + (about(first) if names[first["name"]] > 1 else "")), entries


def _positions(runs: Sequence[Run]) -> list[Figure]:
    panels = []
    for heading, entries in _comparable(runs, "positions"):
        traces = []
        for i, run, found in entries:
            places = found["positions"]
            trace = _line(i, run, [p["last"] + 1 for p in places], rounded(p["value"] for p in places))
            traces.append(trace | {"mode": "lines+markers", "error_y": _interval([p["stderr"] for p in places])})
        places = sorted({x for trace in traces for x in trace["x"]})
        ticks = {"type": "log", "tickvals": places, "ticktext": [f"{place}" for place in places]}
        panels.append(Panel({"": traces}, _axes("position", "loss", xaxis=ticks), heading))
    caption = "Mean loss up to each position, from twice as early; bars are 95 % intervals over sequences."
    return [Figure("positions", "Loss by position", caption, panels)] if panels else []


def _needles(runs: Sequence[Run]) -> list[Figure]:
    axes = _axes("depth of the needle", "found, %", yaxis={"range": [-5, 105]})
    panels = []
    for heading, entries in _comparable(runs, "depths"):
        traces = []
        for i, run, found in entries:
            places = sorted(found["depths"], key=lambda place: place["depth"])
            trace = _line(i, run, [p["depth"] for p in places], rounded(percent(p["value"]) for p in places))
            errors = _interval([percent(p["stderr"]) for p in places])
            traces.append(trace | {"mode": "lines+markers", "error_y": errors})
        panels.append(Panel({"": traces}, axes, heading))
    caption = (
        "How often the model writes a number that is hidden in a text and asked for after it; depth 0 is the text's "
        "beginning. The number in a heading is the length in tokens; bars are 95 % intervals over haystacks."
    )
    return [Figure("needles", "Needles in haystacks", caption, panels)] if panels else []


def analysis(runs: Sequence[Run]) -> list[Figure]:
    analysed, texts = looks(runs)
    if not analysed:
        return []
    figures = [
        _row_sums(analysed),
        _per_layer(analysed),
        _per_head(analysed),
        *_activations(analysed),
        *_histograms(analysed),
        _maps(analysed),
    ]
    words = list(DASHES.values())
    told = [f"{words[n % len(words)]} lines: {text}" if len(texts) > 1 else text for n, text in enumerate(texts)]
    return [replace(figure, caption=f"{figure.caption} Sequences: {'; '.join(told)}.") for figure in figures]


def _row_sums(analysed: list[tuple[int, Look]]) -> Figure:
    layers = max(len(run.analysis.content["row_sums"]["counts"]) for _, run in analysed)
    traces: dict[str, list[dict]] = {}
    for choice in range(layers + 1):
        traces[str(choice)] = []
        for i, run in analysed:
            sums = run.analysis.content["row_sums"]
            if choice > len(sums["counts"]):
                continue
            # The first choice is all layers together.
            chosen = sums["all"] if choice == 0 else {name: sums[name][choice - 1] for name in sums["all"]}
            traces[str(choice)] += [
                _steps(i, run, sums["edges"], chosen["counts"]),
                _mark(i, run, chosen["mean"], "dash", "mean"),
                _mark(i, run, chosen["median"], "dot", "median"),
            ]
    caption = (
        "Sums of the weights of every query, averaged over heads (the paper's Figure 3). Each curve is scaled to its "
        "highest bin; upright lines: dashed the mean, dotted the median."
    )
    picker = Picker("layer", ["all", *map(str, range(layers))])
    return Figure(
        "row-sums",
        "Sums of weights",
        caption,
        [Panel(traces, _axes("sum of weights", "") | _CLOSEST)],
        [picker],
    )


def _per_layer(analysed: list[tuple[int, Look]]) -> Figure:
    panels = []
    for metric, title in METRICS.items():
        tables = [(i, run, run.analysis.content["layers"].get(metric) or []) for i, run in analysed]
        traces = [
            _line(i, run, list(range(len(values))), rounded(values), mode="lines+markers")
            for i, run, values in tables
            if any(value is not None for value in values)
        ]
        if _tells(traces):
            count = max(len(trace["x"]) for trace in traces)
            panels.append(Panel({"": traces}, _axes("layer", "", xaxis=_numbers(count)), title))
    caption = (
        "Means over queries and heads, of the largest logit the maximum. The first-token weight is the paper's Figure "
        "4. Entropy (Figure 6) is not defined for negative weights: of p, before alpha and beta; of the weights cut at "
        "0 and renormalised; of their absolute values renormalised. What is 0 throughout is left out."
    )
    return Figure("per-layer", "Layer by layer", caption, panels)


def _per_head(analysed: list[tuple[int, Look]]) -> Figure:
    metrics = [m for m in METRICS if any(_any(run.analysis.content["heads"].get(m)) for _, run in analysed)]
    tables = {(n, m): run.analysis.content["heads"].get(m) for n, (_, run) in enumerate(analysed) for m in metrics}
    ranges = {m: _range([table for (_, of), table in tables.items() if of == m]) for m in metrics}
    panels = []
    for n, (i, run) in enumerate(analysed):
        traces = {}
        for choice, metric in enumerate(metrics):
            rows = [rounded(row or [None] * run.analysis.content["model"]["heads"]) for row in tables[n, metric] or []]
            low, high = ranges[metric]
            trace = _trace(i, run) | {"type": "heatmap", "z": rows, "zmin": low, "zmax": high}
            traces[str(choice)] = [trace | {"hovertemplate": "layer %{y}, head %{x}<br>%{z:.4g}", "showlegend": False}]
        shape = run.analysis.content["model"]
        layers = _numbers(shape["layers"]) | {"autorange": "reversed"}
        panels.append(Panel(traces, _axes("head", "layer", _numbers(shape["heads"]), layers), label(run.name)))
    caption = (
        "Means over queries, on one scale for all models. The paper's Figure 5 is the sum of weights; what is grey "
        "does not exist."
    )
    return Figure("per-head", "Layers and heads", caption, panels, [Picker("metric", [METRICS[m] for m in metrics])])


def _activations(analysed: list[tuple[int, Look]]) -> list[Figure]:
    having = [(i, run) for i, run in analysed if run.analysis.alpha_counts is not None]
    if not having:
        return []
    x, functions, names = torch.arange(-80, 81) / 10, [], []
    for name, dash, place in (("linear_clipping", "solid", -4.0), ("sigmoid", "dash", 2.0)):
        phi = ACTIVATIONS[name]
        line = {"color": RUN_COLOURS[-1], "dash": dash, "width": 1.8}
        curve = {"x": rounded(x.tolist()), "y": rounded(phi(x).tolist()), "line": line, "hovertemplate": "%{y:.3f}"}
        spoken = name.replace("_", " ")
        functions.append({"type": "scatter", "mode": "lines", "name": spoken} | curve)
        beside = {"showarrow": False, "xanchor": "right", "xshift": -8}
        names.append({"x": place, "y": float(phi(torch.tensor(place))), "text": spoken} | beside)
    own = [_steps(i, run, _histogram(run, "alpha")["edges"], run.analysis.alpha_counts.tolist()) for i, run in having]
    panels = [
        Panel({"": functions}, _axes("x = W_a h", "φ(x)") | {"annotations": names}, "activation"),
        Panel({"": own}, _axes("α", "") | _CLOSEST, "α of all layers and heads"),
    ]
    caption = (
        "α is alpha_range times one of two functions (the paper's Figure 11); beside them, what the models make of it, "
        "each curve scaled to its highest bin. At the flat ends of linear clipping no gradient passes."
    )
    return [Figure("activations", "The activation of α", caption, panels)]


def _histograms(analysed: list[tuple[int, Look]]) -> list[Figure]:
    kinds = {kind: text for kind, text in HISTOGRAMS.items() if any(_histogram(run, kind) for _, run in analysed)}
    if not kinds:
        return []
    layers, heads = (max(run.analysis.content["model"][name] for _, run in analysed) for name in ("layers", "heads"))
    drawn = [found for kind in kinds for _, run in analysed if (found := _histogram(run, kind))]
    if layers * heads * sum(len(found["edges"]) for found in drawn) > HISTOGRAM_NUMBERS:
        heads = 0
    panels = []
    for kind, text in kinds.items():
        traces: dict[str, list[dict]] = {}
        for layer, head in product(range(layers), range(heads + 1)):
            key = f"{layer}/{head}"
            traces[key] = []
            for i, run in analysed:
                found = _histogram(run, kind)
                counts = found["counts"][layer] if found and layer < len(found["counts"]) else None
                if counts and head <= len(counts):
                    chosen = np.sum(counts, axis=0).tolist() if head == 0 else counts[head - 1]
                    traces[key].append(_steps(i, run, found["edges"], chosen))
        panels.append(Panel(traces, _axes(text, "") | _CLOSEST, text))
    pickers = [Picker("layer", [*map(str, range(layers))]), Picker("head", ["all", *map(str, range(heads))])]
    caption = "One value per query and head. Each curve is scaled to its highest bin."
    if not heads:
        caption += " Single heads are left out: there are too many for a page."
    return [Figure("alpha-beta", "α and β", caption, panels, pickers)]


def _maps(analysed: list[tuple[int, Look]]) -> Figure:
    layers = sorted({layer for _, run in analysed for layer in run.analysis.content["map"]["layers"]})
    heads = max(run.analysis.content["model"]["heads"] for _, run in analysed)
    size = _map_size(
        len(layers) * (heads + 1) * len(analysed), max(run.analysis.weights.shape[-1] for _, run in analysed)
    )
    keys = {f"{n}/{h}": (layer, h - 1) for (n, layer), h in product(enumerate(layers), range(heads + 1))}
    maps = {(n, key): _map(run, *place, size) for n, (_, run) in enumerate(analysed) for key, place in keys.items()}
    panels = []
    for n, (i, run) in enumerate(analysed):
        window = run.analysis.content["map"]
        # The place keeps equal tokens apart.
        names = [f"{place} {label(token)}" for place, token in enumerate(window["tokens"][:size], window["start"])]
        traces = {}
        for key in keys:
            together = [weights for m in range(len(analysed)) if (weights := maps[m, key]) is not None]
            weights = maps[n, key]
            if weights is None:
                traces[key] = []
                continue
            ends = {
                "zmin": min(0.0, *(float(w.min()) for w in together)),
                "zmax": max(float(w.max()) for w in together),
            }
            trace = _trace(i, run) | {"type": "heatmap", "x": names, "y": names, "zmid": 0} | ends
            z = weights.astype(float).round(4).tolist()
            traces[key] = [trace | {"z": z, "hovertemplate": "%{y} looks at<br>%{x}: %{z:.4f}", "showlegend": False}]
        axis = {"type": "category", "tickfont": {"size": 9}}
        axes = _axes("", "", xaxis=axis, yaxis=axis | {"autorange": "reversed"})
        panels.append(Panel(traces, axes, label(run.name)))
    caption = (
        f"Weights w of queries (rows) on keys (columns), {size} tokens of the first sequence; the mean over heads is "
        "the paper's Figure 9. Models share a scale: 0 has the colour of the page, below it is orange, and colours "
        "follow the square root of a weight."
    )
    pickers = [Picker("layer", [*map(str, layers)]), Picker("head", ["mean", *map(str, range(heads))])]
    return Figure("maps", "Attention maps", caption, panels, pickers)


def _map_size(maps: int, window: int) -> int:
    """Return how many of the tokens that were kept fit the page."""
    return max(1, min(window, math.isqrt(MAP_NUMBERS // maps)))


def _map(run: Look, layer: int, head: int, size: int) -> np.ndarray | None:
    """Weights [queries, keys]; head -1 is the mean over heads. None where the model has no such layer or head."""
    shape = run.analysis.content
    if layer not in shape["map"]["layers"] or head >= shape["model"]["heads"]:
        return None
    weights = run.analysis.map(layer)[:, :size, :size]
    return weights.mean(0) if head < 0 else weights[head]


def _trace(i: int, run: Run | Look) -> dict[str, Any]:
    return {"name": label(run.name), "meta": i}


def _dashed(i: int, run: Run | Look) -> dict[str, str]:
    text = run.text if isinstance(run, Look) else 0
    return {"dash": list(DASHES)[(i // len(RUN_COLOURS) + text) % len(DASHES)]}


def _line(i: int, run: Run | Look, x: Sequence, y: Sequence, **more: Any) -> dict[str, Any]:
    line = {"color": _colour(i), "width": 1.8} | _dashed(i, run) | more.pop("line", {})
    return _trace(i, run) | {"type": "scatter", "mode": "lines", "x": list(x), "y": list(y), "line": line} | more


def _steps(i: int, run: Look, edges: Sequence[float], counts: Sequence[int]) -> dict[str, Any]:
    total, highest = max(1, sum(counts)), max(1, *counts)
    centres = [(a + b) / 2 for a, b in pairwise(edges)]
    trace = _line(i, run, rounded(centres), rounded(c / highest for c in counts), line={"shape": "hvh"})
    trace |= {"fill": "tozeroy", "fillcolor": f"{_colour(i)}33", "customdata": rounded(100 * c / total for c in counts)}
    return trace | {"hovertemplate": "%{x:.4g}: %{customdata:.3g} % of queries"}


def _mark(i: int, run: Look, at: float, dash: str, what: str) -> dict[str, Any]:
    line = {"dash": dash, "width": 1.5}
    return _line(i, run, rounded([at, at]), [0, 1], line=line, hovertemplate=f"{what} %{{x:.4g}}", showlegend=False)


def _interval(errors: list[float | None]) -> dict[str, Any]:
    return {"type": "data", "array": rounded(None if e is None else 1.96 * e for e in errors), "thickness": 1.2}


def _colour(i: int) -> str:
    return RUN_COLOURS[i % len(RUN_COLOURS)]


def _axes(x: str, y: str, xaxis: dict | None = None, yaxis: dict | None = None) -> dict[str, Any]:
    return {"xaxis": {"title": {"text": x}} | (xaxis or {}), "yaxis": {"title": {"text": y}} | (yaxis or {})}


def _numbers(count: int) -> dict[str, Any]:
    """An axis of layers or heads: whole numbers alone."""
    return {"tick0": 0, "dtick": math.ceil(count / 12)}


def _tells(traces: list[dict[str, Any]]) -> bool:
    return any(value for trace in traces for value in trace["y"])


def _late(steps: np.ndarray) -> np.ndarray:
    return steps >= LATE * steps[-1]


def _any(table: list | None) -> bool:
    return any(row is not None and any(v is not None for v in row) for row in table or ())


def _range(tables: list[list | None]) -> tuple[float, float]:
    values = [v for table in tables for row in table or () for v in row or () if v is not None and math.isfinite(v)]
    return min(values), max(values)


def _histogram(run: Look, kind: str) -> dict | None:
    return run.analysis.content["histograms"].get(kind)


SECTIONS: dict[str, Callable[[Sequence[Run]], list[Figure]]] = {
    "Training": training,
    "Evaluation": evaluation,
    "How the models attend": analysis,
}
