"""Runs -> one HTML file that needs no network: tables as HTML, figures and plotly.js packed into it.

The page may be given to others, and what it shows was written by models and their data: all text is escaped, and its
Content-Security-Policy lets no script run but the two that are known by their hashes, and nothing be fetched.
"""

import base64
import dataclasses
import gzip
import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files as package_files
from pathlib import Path
from shlex import quote
from typing import Any

from affine_attn.analyze.run import variant_name
from affine_attn.core.spec import AttentionSpec
from affine_attn.errors import MissingPackage, UserError
from affine_attn.evaluate.results import SHARES, average
from affine_attn.figures.style import METRICS, RUN_COLOURS
from affine_attn.models.configuration import AffineAttnConfig, as_spec
from affine_attn.report.figures import SECTIONS, Figure, percent
from affine_attn.report.runs import Run, about, looks, measured, read_runs
from affine_attn.runs.files import written

PAGE = "report.html"
# Rows of the summary: heading, and where result.json (or "gradients" in it) has the number.
_RESULTS = {
    "loss, last step": "loss",
    "cross-entropy on the labels": "hard",
    "held-out loss": "valid_loss",
    "held-out perplexity": "valid_perplexity",
    "tokens per second, median": "tokens_per_second",
    "model FLOPs utilisation, median": "mfu",
}
_GRADIENTS = {
    "mean": "mean", "standard deviation": "std", "variance": "variance", "CV = std / mean": "cv",
    "spikes, g > median + 6 MAD": "spikes_6", "spikes, g > median + 9 MAD": "spikes_9",
}  # fmt: skip


def write_report(folders: Sequence[Path], output: Path | None = None, figures: Path | None = None) -> Path:
    """Write the page about these runs and return its path. ``figures``: a folder for PNG and SVG files.

    output: by default report.html, unless that is a report of other runs.
    """
    runs = read_runs(folders)
    if output is None:
        output = Path(PAGE)
        if (
            output.exists()
            and f"<title>{escape(_title(runs))}</title>" not in output.read_text(errors="replace")[:10_000]
        ):
            raise UserError(f"{output} is there, and is no report of {_title(runs)}: name another file with --output")
    if figures is not None:
        draw_figures(runs, figures)
    text = html(runs)
    output.parent.mkdir(parents=True, exist_ok=True)
    with written(output) as file:
        # Names of folders may hold bytes that are no text.
        file.write(text.encode(errors="backslashreplace"))
    return output


def draw_figures(runs: Sequence[Run], folder: Path) -> list[Path]:
    """Those of ``affine-attn analyze``, of these runs and under their names here."""
    # Says by itself that it needs matplotlib.
    from affine_attn.analyze.figures import draw

    analyses = [
        dataclasses.replace(look.analysis, content=look.analysis.content | {"name": look.name})
        for _, look in looks(runs)[0]
    ]
    return draw(analyses, [run for run in runs if run.metrics], folder)


def html(runs: Sequence[Run]) -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise MissingPackage("affine-attn report needs plotly: pip install 'affine-attn[report]'") from error
    plotly, script, style = get_plotlyjs(), _asset("page.js"), _asset("page.css")
    sections = {title: make(runs) for title, make in SECTIONS.items()}
    described = json.dumps([_described(f) for figures in sections.values() for f in figures], allow_nan=False)
    title = _title(runs)
    allowed = " ".join(f"'sha256-{_sha256(source)}'" for source in (script, plotly))
    policy = (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
    tables = {"Training": "", "Evaluation": _evaluations(runs), "How the models attend": _scalars(runs)}
    body = "".join(
        f"<section><h2>{escape(name)}</h2>{_missing(name, runs)}{tables[name]}{_figures(figures)}</section>"
        for name, figures in sections.items()
    )
    return f"""<!doctype html>
<html lang="en" data-theme="light">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{escape(title)}</title>
<style>{style}</style>
</head>
<body>
<header><h1>{escape(title)}</h1><p class="soft">{escape(_subtitle(runs))}</p></header>
<nav class="bar">{_chips(runs)}<button class="theme" type="button">light / dark</button></nav>
<section><h2>Summary</h2>{_summary(runs)}</section>
{body}
<section><h2>Configuration</h2>{_configuration(runs)}</section>
<div id="paper" hidden></div>
<noscript><p>The figures need JavaScript, which this browser does not run.</p></noscript>
<script type="text/plain" id="plotly">{_packed(plotly)}</script>
<script type="text/plain" id="figures">{_packed(described)}</script>
<script>{script}</script>
</body>
</html>
"""


def _title(runs: Sequence[Run]) -> str:
    return " · ".join(run.name for run in runs)


def _described(figure: Figure) -> dict[str, Any]:
    # Not asdict, which copies every number of every trace.
    return {**vars(figure), "panels": [*map(vars, figure.panels)], "pickers": [*map(vars, figure.pickers)]}


def _asset(name: str) -> str:
    return package_files("affine_attn.report").joinpath(name).read_text(encoding="utf-8")


def _sha256(source: str) -> str:
    return base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()


def _packed(text: str) -> str:
    """Base64, so nothing in it can be markup; the same text gives the same bytes."""
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _subtitle(runs: Sequence[Run]) -> str:
    commits = sorted({str(run.environment["commit"])[:12] for run in runs if "commit" in run.environment})
    count = "one model" if len(runs) == 1 else f"{len(runs)} models"
    return f"{count}, trained at commit {', '.join(commits)}" if commits else count


def _chips(runs: Sequence[Run]) -> str:
    return "".join(
        f'<button type="button" class="chip" data-run="{i}" aria-pressed="true" title="show or hide its curves">'
        f"{_dot(i)}{escape(run.name)}</button>"
        for i, run in enumerate(runs)
    )


def _dot(i: int) -> str:
    """A ring for a run that has its colour a second time; in figures its lines are dashed."""
    colour = RUN_COLOURS[i % len(RUN_COLOURS)]
    style = f"background:{colour}" if i < len(RUN_COLOURS) else f"border:3px solid {colour}"
    return f'<span class="dot" style="{style}"></span>'


def _figures(figures: Iterable[Figure]) -> str:
    return "".join(map(_figure, figures))


def _figure(figure: Figure) -> str:
    heatmaps = any(trace["type"] == "heatmap" for p in figure.panels for t in p.traces.values() for trace in t)
    pickers = "".join(
        f'<label>{escape(picker.label)} <select id="{figure.id}-picker-{i}">'
        + "".join(f'<option value="{n}">{escape(option)}</option>' for n, option in enumerate(picker.options))
        + "</select></label>"
        for i, picker in enumerate(figure.pickers)
    )
    # Titles of panels are labels already: the text of markup.
    panels = "".join(
        f'<div><div class="head"><h4>{panel.title}</h4>{_save(figure, n, "png")}{_save(figure, n, "svg")}</div>'
        f'<div class="plot" id="{figure.id}-{n}"></div></div>'
        for n, panel in enumerate(figure.panels)
    )
    return (
        f'<div class="card{" tall" if heatmaps else ""}"><h3>{escape(figure.title)}</h3>'
        f'<p class="caption">{escape(figure.caption)}</p>'
        f'{f"""<div class="pickers">{pickers}</div>""" if pickers else ""}<div class="panels">{panels}</div></div>'
    )


def _save(figure: Figure, n: int, kind: str) -> str:
    about = f'data-save="{kind}" data-figure="{figure.id}" data-panel="{n}" title="save as {kind.upper()}"'
    return f'<button type="button" {about}>{kind.upper()}</button>'


def _missing(section: str, runs: Sequence[Run]) -> str:
    """What is not there, and the command that makes it."""
    lacking: dict[str, tuple[str, list[str]]] = {
        "Training": (
            "Without metrics.jsonl, which affine-attn distill writes, so there are no curves of",
            [run.name for run in runs if not run.metrics],
        ),
        "Evaluation": (
            "No results yet: ",
            [f"affine-attn eval {quote(str(r.model))}" for r in runs if not r.evaluations],
        ),
        "How the models attend": (
            "Not analysed yet: ",
            [f"affine-attn analyze {quote(str(r.model))} --data DATA" for r in runs if not r.analyses],
        ),
    }
    text, entries = lacking[section]
    listed = ", ".join(f"<code>{escape(entry)}</code>" for entry in entries)
    without_steps = [run for run in runs if section == "Training" and run.metrics and not run.statistics]
    note = (
        '<p class="soft">Without <code>statistics.jsonl</code> (a recipe with <code>statistics_steps=100</code> writes '
        f"it): {', '.join(escape(run.name) for run in without_steps)}.</p>"
        if without_steps
        else ""
    )
    return (f'<p class="soft">{text} {listed}</p>' if entries else "") + note


def _summary(runs: Sequence[Run]) -> str:
    rows: list[tuple[str, list[str]]] = [
        ("attention", [_attention(run) for run in runs]),
        ("student", [str(run.recipe.get("student", "")) for run in runs]),
        ("parameters", [_parameters(run) for run in runs]),
        ("steps", [_steps(run) for run in runs]),
        ("training tokens", [_tokens(run) for run in runs]),
        *((title, [_number(run.result.get(key)) for run in runs]) for title, key in _RESULTS.items()),
        ("memory, most", [_memory(run) for run in runs]),
    ]
    steps = max((run.result["gradients"]["steps"] for run in runs if run.result), default=0)
    rows += [
        (
            f"gradient norm, first {steps} steps: {title}" if key == "mean" else f"… {title}",
            [_number(run.result["gradients"][key]) if run.result else "" for run in runs],
        )
        for title, key in _GRADIENTS.items()
    ]
    return f'<div class="card">{_table(_heads(runs), rows)}</div>'


def _attention(run: Run) -> str:
    model = run.facts
    if run.variant:
        return run.variant
    if not run.analyses and model.get("model_type") != AffineAttnConfig.model_type:
        return str(model.get("model_type", ""))
    if "attention" not in model:
        return ""
    layers = model["attention"] if isinstance(model["attention"], list) else [model["attention"]]
    counts = Counter(_spec_text(as_spec(layer)) for layer in layers)
    return ", ".join(text if len(counts) == 1 else f"{n} × {text}" for text, n in counts.items())


def _spec_text(spec: AttentionSpec) -> str:
    """The variant's name; the stages of a spec that has none."""
    if name := variant_name([spec]):
        return name
    stages = list(dict.fromkeys(_changed_fields(part) for part in spec.scores if part is not None))
    stages += [] if spec.sink is None else [f"sink {spec.sink}"]
    stages += [] if spec.affine is None else [_changed_fields(spec.affine)]
    stages += [] if spec.gate is None else [f"{spec.gate} gate"]
    return " + ".join(stages)


def _changed_fields(stage: Any) -> str:
    """A stage with the fields that are not those it begins with."""
    values = {field.name: (getattr(stage, field.name), field.default) for field in dataclasses.fields(stage)}
    changed = (f"{name}={value!r}" for name, (value, default) in values.items() if value != default)
    return f"{type(stage).__name__}({', '.join(changed)})"


def _parameters(run: Run) -> str:
    return f"{run.facts['parameters']:,}" if run.facts else ""


def _steps(run: Run) -> str:
    if not run.recipe:
        return ""
    done = run.metrics[-1]["step"]
    return f"{done:,}" if run.finished else f"{done:,} of {run.recipe['steps']:,}, unfinished"


def _tokens(run: Run) -> str:
    if not run.recipe:
        return ""
    return f"{run.metrics[-1]['step'] * run.recipe['global_batch'] * run.recipe['sequence_length']:,}"


def _memory(run: Run) -> str:
    found = run.result.get("peak_memory_bytes") or run.result.get("max_rss_bytes")
    return f"{found / 2**30:.2f} GiB" if found else ""


def _evaluations(runs: Sequence[Run]) -> str:
    """One row per number. What differs in anything but the weights is another row."""
    cells: dict[tuple[str, ...], dict[int, list[str]]] = {}
    told: dict[str, str] = {}
    shares: set[str] = set()
    for i, run in enumerate(runs):
        for result in run.evaluations:
            key = measured(result)
            told.setdefault(key, about(result))
            for metric, cell in result["metrics"].items():
                # Behind a comma stands the harness's filter.
                if (plain := metric.partition(",")[0]) in SHARES:
                    shares.add(plain)
                    cell = {k: percent(v) for k, v in cell.items()}
                row = (result["name"], metric, key)
                cells.setdefault(row, {}).setdefault(i, []).append(_with_error(cell))
        limits = {result["limit"] for result in run.zero_shot.values()}
        # A mean over different parts of the tasks would be compared with those of others.
        if len(limits) == 1 and (six := average(run.zero_shot)):
            row = ("average of the six", "%", about({"limit": limits.pop()}))
            told[row[2]] = row[2]
            cells.setdefault(row, {})[i] = [_with_error({k: percent(v) for k, v in six.items()})]
    if not cells:
        return ""
    rows = [
        (f"{name} {metric}{told[key]}", ["; ".join(found.get(i, ())) for i in range(len(runs))])
        for (name, metric, key), found in cells.items()
    ]
    caption = "± is one standard error; in brackets the 95 % interval, 1.96 standard errors to each side."
    if shares:
        caption = f"In %: {', '.join(sorted(shares))}; all else as it is. {caption}"
    return (
        f'<div class="card"><h3>Results</h3><p class="caption">{escape(caption)}</p>{_table(_heads(runs), rows)}</div>'
    )


def _with_error(cell: dict[str, float | None]) -> str:
    value, error = cell["value"], cell["stderr"]
    if value is None or error is None:
        return _number(value)
    return f"{_number(value)} ± {error:.2g} [{_number(value - 1.96 * error)}, {_number(value + 1.96 * error)}]"


def _scalars(runs: Sequence[Run]) -> str:
    shown, texts = looks(runs)
    if not shown:
        return ""
    scalars = [look.analysis.content["scalars"] for _, look in shown]
    rows = [
        (title, [_number(values.get(name)) for values in scalars])
        for name, title in METRICS.items()
        if any(name in values for values in scalars)
    ]
    caption = f"Means over layers, heads and queries: {'; '.join(texts)}."
    if len(texts) > 1:
        caption += " These are different texts: compare with care."
    return (
        f'<div class="card"><h3>In one number</h3><p class="caption">{escape(caption)}</p>'
        f"{_table([(i, look.name) for i, look in shown], rows)}</div>"
    )


def _configuration(runs: Sequence[Run]) -> str:
    parts = []
    shown, _ = looks(runs)
    for title, heads, tables in (
        ("Recipe", _heads(runs), [run.recipe for run in runs]),
        ("Environment", _heads(runs), [run.environment for run in runs]),
        ("Analysis", [(i, look.name) for i, look in shown], [_provenance(look.analysis.content) for _, look in shown]),
    ):
        names = dict.fromkeys(name for table in tables for name in table)
        rows = [(name, [_value(table.get(name)) if table else "" for table in tables]) for name in names]
        if rows:
            content = _table(heads, rows, mark=True)
            parts.append(
                f"<details{' open' if title == 'Recipe' else ''}><summary>{title}</summary>{content}</details>"
            )
    places = "".join(f"<li>{escape(run.name)}: <code>{escape(str(run.folder))}</code></li>" for run in runs)
    return f'<div class="card">{"".join(parts)}<p class="soft">Folders</p><ul>{places}</ul></div>'


def _provenance(content: dict[str, Any]) -> dict[str, Any]:
    return {**content["model"], **content["versions"], "commit": content["commit"]}


def _heads(runs: Sequence[Run]) -> list[tuple[int, str]]:
    return [(i, run.name) for i, run in enumerate(runs)]


def _table(heads: Iterable[tuple[int, str]], rows: Iterable[tuple[str, list[str]]], mark: bool = False) -> str:
    """A column for every head, which names its run's number. Rows without any entry are left out. ``mark``: those whose
    entries differ stand out."""
    head = "".join(f'<th scope="col">{_dot(i)}{escape(text)}</th>' for i, text in heads)
    body = "".join(
        f'<tr{" class=differs" if mark and _differ(cells) else ""}><th scope="row">{escape(title)}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        + "</tr>"
        for title, cells in rows
        if any(cells)
    )
    return f'<div class="scroll"><table><thead><tr><td></td>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _differ(cells: list[str]) -> bool:
    return len(set(filter(None, cells))) > 1


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _number(value: float | None) -> str:
    if value is None:
        return ""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 10_000 or isinstance(value, int) else f"{value:.4g}"
