"""Writes the tables (CSV), the figures and the generated parts of docs/reproduction.md from run folders."""

import csv
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.readme import rewrite
from experiments import claims, figures, grid, page, tables
from experiments.runs import Run, read_runs
from experiments.tables import Row

ROOT = Path(__file__).parent.parent
DOCUMENT, README = ROOT / "docs" / "reproduction.md", ROOT / "README.md"


def write_report(root: Path, results: Path, document: Path = DOCUMENT, readme: Path = README) -> Iterator[Path]:
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
    summaries = {
        "table_a": tables.summary_a(of_a),
        "table_b": tables.summary_b(b),
        "table_c": tables.summary(c, ("kd_loss", "grad_variance"), "affine"),
        "table_d": tables.summary(d, lengths, "rope"),
        "noise": floor,
    }
    for name, rows in per_run.items():
        yield _write_csv(results / f"{name}.csv", rows)
        if summaries[name] is not rows:
            yield _write_csv(results / f"{name}_summary.csv", summaries[name])
    is_noise = noise_by_column(floor)
    # Six measures of table D: their differences to rope would make it too wide to read.
    narrow = [
        {x: row[x] for x in row if " difference" not in x and not x.endswith(" p")} for row in summaries["table_d"]
    ]
    shown = summaries | {"table_d": narrow}
    parts = {name: markdown(rows, is_noise) or "Nothing has been run yet." for name, rows in shown.items()}
    judges = [row for row in per_run["table_a"] if "seed" not in row]
    parts["table_a"] = "\n\n".join(part for part in (parts["table_a"], markdown(judges)) if part)
    # Its differences are of accuracies, which the noise floor of losses says nothing about.
    parts["zero_shot"] = markdown(tables.zero_shot(of_a)) or "Nothing has been run yet."
    parts["runs"] = cost(runs)
    parts["claims"] = markdown(claims.judged(of_a, floor))
    document.write_text(rewrite(document.read_text(), parts))
    yield document
    short = markdown(tables.short(summaries["table_a"], summaries["table_b"]), is_noise)
    loss = tables.noise_floor(floor, "kd_difference")
    variance = math.exp(tables.noise_floor(floor, "log_variance_difference", grid.PAPER_RATE))
    at = f"at {grid.PAPER_RATE:g}"
    known = f"{_number(loss)} in loss, a factor of {_number(variance)} in gradient variance {at}"
    short += f"\n\nNoise floor, one run against itself run again: {known if floor else 'not measured yet'}."
    readme.write_text(rewrite(readme.read_text(), {"reproduction": short}))
    yield readme
    yield from figures.draw(of_a, results)
    yield from figures.draw_lengths(runs, results)
    yield from page.draw(runs, results / "figures")


def noise_by_column(noise: Sequence[Row]) -> dict[str, Callable[[Row, str], bool]]:
    """Whether a row's value in a column is no larger than its noise floor; columns that have none are not there."""

    def of_loss(row: Row, name: str) -> bool:
        return abs(row[name]) <= tables.noise_floor(noise, "kd_difference", row.get("lr"))

    def of_variance(row: Row, name: str) -> bool:
        rate = grid.PAPER_RATE if name == tables.STEADINESS else row["lr"]
        return abs(math.log(row[name])) <= tables.noise_floor(noise, "log_variance_difference", rate)

    losses = dict.fromkeys(("difference", "kd_loss difference"), of_loss)
    return losses | dict.fromkeys(("ratio", tables.STEADINESS), of_variance)


def markdown(rows: Sequence[Row], is_noise: Mapping[str, Callable[[Row, str], bool]] = {}) -> str:
    """Intervals in one cell; what is below the noise floor of its column is said to be."""
    if not rows:
        return ""
    hidden = ("commit", "torch", "device", "run", "steps", "minutes")
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name not in hidden]
    names = [name for name in names if not name.endswith((" low", " high"))]
    lines = [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
    for row in rows:
        lines.append(f"| {' | '.join(_cell(row, name, is_noise) for name in names)} |")
    return "\n".join(lines)


def cost(runs: Sequence[Run]) -> str:
    """What was run, on what, and for how long."""
    finished = [run for run in runs if run.result]
    minutes = sum(run.result["speed"]["seconds"] / run.result["speed"]["students"] for run in finished) / 60
    tokens = sum(_tokens(run) for run in finished)
    about = [run.environment() for run in runs]
    devices, commits, torch = (
        ", ".join(sorted({str(entry.get(name)) for entry in about})) for name in ("device", "commit", "torch")
    )
    return (
        f"{len(finished)} finished runs of {len(runs)}, {tokens / 1e6:,.1f}M tokens, "
        f"{minutes:.1f} minutes of {devices} (training alone); torch {torch}; commit {commits}."
    )


def _tokens(run: Run) -> int:
    """Of its training; learning to find needles is not counted."""
    recipe = run.config["recipe"]
    return (run.diverged_step or recipe["steps"]) * recipe["global_batch"] * recipe["sequence_length"]


def _cell(row: Row, name: str, is_noise: Mapping[str, Callable[[Row, str], bool]]) -> str:
    value = row.get(name)
    text = _number(value)
    low, high = row.get(f"{name} low"), row.get(f"{name} high")
    if low is not None and math.isfinite(low):
        text += f" [{_number(low)}, {_number(high)}]"
    if value is not None and name in is_noise and is_noise[name](row, name):
        text += " (noise)"
    return text


def _number(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _write_csv(path: Path, rows: Sequence[Row]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return path
