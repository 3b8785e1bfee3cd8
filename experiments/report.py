"""Writes the tables (CSV), the figures and the generated parts of README.md and docs/ from run folders."""

import csv
import io
import json
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from affine_attn.runs.files import write_text
from benchmarks.readme import rewrite
from experiments import claims, contrasts, details, figures, grid, headlines, larger, page, small, tables
from experiments.grid import SMALL
from experiments.runs import Run, read_runs
from experiments.tables import Row

ROOT = Path(__file__).parent.parent
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("reproduction*.md")))
_MARK = re.compile(r"<!-- (\w+): python -m experiments tables -->")
_SHORT = 7  # characters of a commit; the CSV files have all
_NOT_RUN = "Nothing has been run yet."


def write_report(root: Path, results: Path, documents: Sequence[Path] = DOCUMENTS) -> Iterator[Path]:
    """Each file as it is written."""
    runs = sorted(read_runs(root), key=lambda run: (grid.place(run.variant), run.rate, run.seed))
    if not runs:
        raise ValueError(f"{root} has no runs: copy the folders of python -m experiments run there")
    of_a = [run for run in runs if run.table == "a"]
    judged = results / "bigram.json"
    bigram = json.loads(judged.read_text()) if judged.exists() else None
    floor, b = tables.noise(runs), tables.table_b(of_a)
    c, d = tables.table_c(runs), tables.table_d(runs)
    lengths = [name for name in (d[0] if d else ()) if name.startswith(("ce_", "needle_"))]
    per_run = {"table_a": tables.table_a(of_a, bigram), "table_b": b, "table_c": c, "table_d": d, "noise": floor}
    per_run["controls"] = tables.controls(runs)
    compared = contrasts.losses(runs)
    summaries = {
        "table_a": tables.summary_a(of_a),
        "table_b": tables.summary_b(b),
        "table_c": tables.summary(c, ("kd_loss", "grad_variance"), "affine"),
        "table_d": tables.summary(d, lengths, "rope"),
        "noise": floor,
        "controls": compared,
    }
    for name, rows in per_run.items():
        yield _write_csv(results / f"{name}.csv", rows)
        if summaries[name] is not rows:
            yield _write_csv(results / f"{name}_summary.csv", summaries[name])
    # Six measures of table D: their differences to rope would make it too wide to read.
    narrow = [
        {x: row[x] for x in row if " difference" not in x and not x.endswith(" p")} for row in summaries["table_d"]
    ]
    shown = summaries | {"table_d": narrow, "zero_shot": tables.zero_shot(of_a)}
    shown |= {"claims": claims.judged(of_a, floor), "shares": contrasts.shares(runs)}
    shown |= {"variances": contrasts.variances(runs), "leads": details.leads(of_a), "spread": details.spread(of_a)}
    shown |= {"steadiness": details.steadiness(of_a), "headlines": headlines.rows(of_a)}
    shown |= {"choices": headlines.choices(runs)}
    shown |= {"small": small.rows(runs), "early": contrasts.early(runs)}
    shown |= {"larger": larger.cost(), "resolution": larger.resolution(of_a)}
    del shown["controls"]
    parts = {name: markdown(rows) or _NOT_RUN for name, rows in shown.items()}
    judges = [row for row in per_run["table_a"] if "seed" not in row]
    parts["table_a"] = "\n\n".join(part for part in (parts["table_a"], markdown(judges)) if part)
    parts |= {f"control_{n}": _control(compared, n) for n in sorted({row["control"] for row in compared})}
    parts["runs"] = cost([run for run in runs if run.table != SMALL])
    of_small = [run for run in runs if run.table == SMALL]
    parts["small_runs"] = f"{cost(of_small)} {small.coverage(runs)}" if of_small else _NOT_RUN
    parts["small_says"] = "\n".join(f"- {sentence}" for sentence in small.says(runs)) or _NOT_RUN
    parts["reproduction"] = _short(summaries, floor)
    said = [f"- {sentence}" for sentence in headlines.summary(runs)]
    parts["summary"], parts["six_lines"] = ("\n".join(lines) or _NOT_RUN for lines in (said, said[:6]))
    for document in documents:
        text = document.read_text()
        yield _rewritten(document, text, {name: parts[name] for name in _MARK.findall(text)})
    yield from figures.draw(of_a, results)
    yield from figures.draw_lengths(runs, results)
    yield from page.draw(runs, results / "figures")


def _rewritten(document: Path, text: str, parts: dict[str, str]) -> Path:
    write_text(document, rewrite(text, parts))
    return document


def _short(summaries: dict[str, list[Row]], floor: list[Row]) -> str:
    loss = tables.noise_floor(floor, "kd_difference")
    variance = math.exp(tables.noise_floor(floor, "log_variance_difference", grid.PAPER_RATE))
    at = f"at {grid.PAPER_RATE:g}"
    known = f"{_number(loss)} in loss, a factor of {_number(variance)} in gradient variance {at}"
    table = markdown(tables.short(summaries["table_a"], summaries["table_b"]))
    return f"{table}\n\nNoise floor, one run against itself run again: {known if floor else 'not measured yet'}."


def _control(compared: Sequence[Row], number: int) -> str:
    """What a control was asked for; primary comparisons are those with a corrected p."""
    rows = [{x: row[x] for x in row if x not in ("control", "primary")} for row in compared if row["control"] == number]
    return markdown([row for row in rows if row["n"]]) or _NOT_RUN


def markdown(rows: Sequence[Row]) -> str:
    """Intervals in one cell."""
    if not rows:
        return ""
    hidden = ("commit", "torch", "device", "run", "steps", "minutes")
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name not in hidden]
    names = [name for name in names if not name.endswith((" low", " high"))]
    lines = [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
    for row in rows:
        lines.append(f"| {' | '.join(_cell(row, name) for name in names)} |")
    return "\n".join(lines)


def cost(runs: Sequence[Run]) -> str:
    """What was run, on what, and for how long."""
    if not runs:
        return _NOT_RUN
    finished = [run for run in runs if run.result]
    minutes = sum(run.result["speed"]["seconds"] / run.result["speed"]["students"] for run in finished) / 60
    tokens = sum(_tokens(run) for run in finished)
    about = [run.environment() for run in runs]
    devices, commits, torch = (
        ", ".join(sorted({str(entry.get(name))[:length] for entry in about}))
        for name, length in (("device", None), ("commit", _SHORT), ("torch", None))
    )
    return (
        f"{len(finished)} finished runs of {len(runs)}, {tokens / 1e6:,.1f}M tokens, "
        f"{minutes:.1f} minutes of {devices} (training alone); torch {torch}; commits {commits}."
    )


def _tokens(run: Run) -> int:
    """Return the tokens of a run's training; learning to find needles is not counted."""
    recipe = run.config["recipe"]
    return (run.diverged_step or recipe["steps"]) * recipe["global_batch"] * recipe["sequence_length"]


def _cell(row: Row, name: str) -> str:
    value = row.get(name)
    text = _number(value)
    low, high = row.get(f"{name} low"), row.get(f"{name} high")
    if low is not None and math.isfinite(low):
        text += f" [{_number(low)}, {_number(high)}]"
    return text


def _number(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _write_csv(path: Path, rows: Sequence[Row]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())
    return path
