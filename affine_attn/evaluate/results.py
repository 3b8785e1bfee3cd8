"""Results: files that a later call takes up, and the tables people read."""

import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.table import Table

from affine_attn.errors import UserError
from affine_attn.runs.files import read_object, require_writable, write_json, write_text
from affine_attn.runs.layout import result_name
from affine_attn.runs.provenance import provenance

# Columns of the paper's Table 1, in its order: task, heading.
TABLE_1 = {
    "winogrande": "Wino",
    "piqa": "PIQA",
    "hellaswag": "Hella",
    "arc_challenge": "ARC-c",
    "arc_easy": "ARC-e",
    "boolq": "BoolQ",
}
# Metrics that are shares, which people read in percent: the harness's, and of needles.
SHARES = ("acc", "acc_norm", "acc_mutual_info", "exact_match", "em", "f1", "accuracy")


def measured_once(
    folder: Path, name: str, identity: dict[str, Any], measure: Callable[[], dict[str, Any]], log_samples: bool = False
) -> tuple[dict[str, Any], Path, bool]:
    """The result with this identity: read where a call before has written it, else measured and written.

    Another model, limit or file is another result, of another name. log_samples: what is under "samples" of what was
    measured becomes a file of JSON lines beside it; it never stands in the result. Returns the result, its file, and
    whether it was there.
    """
    path = folder / f"{result_name(name, identity)}.json"
    log = samples_file(path)
    if path.exists() and (log.exists() or not log_samples):
        try:
            return read_object(path, "metrics"), path, True
        except UserError as error:
            raise UserError(f"{error}; remove it to measure again") from error
    require_writable(folder)
    found = measure()
    samples = found.pop("samples", None)
    result = {"name": name, "identity": identity, **found, **provenance()}
    folder.mkdir(parents=True, exist_ok=True)
    if log_samples and samples is not None:
        # Before the result, which says that all is there.
        write_text(log, "".join(json.dumps(sample, ensure_ascii=False, default=str) + "\n" for sample in samples))
    write_json(path, result)
    return result, path, False


def samples_file(result: Path) -> Path:
    """Return the file of the items of a task, one JSON line each, beside its result."""
    return result.with_name(f"{result.stem}.samples.jsonl")


def accuracy(result: dict[str, Any]) -> dict[str, float | None]:
    """The number of a task in Table 1: acc_norm where the harness has it, which the paper leaves unsaid."""
    metrics = result["metrics"]
    return metrics.get("acc_norm") or metrics["acc"]


def average(results: dict[str, dict[str, Any]]) -> dict[str, float | None] | None:
    """Average the six tasks, whose errors are independent; None unless all are there."""
    if not TABLE_1.keys() <= results.keys():
        return None
    cells = [accuracy(results[task]) for task in TABLE_1]
    errors = [cell["stderr"] for cell in cells]
    n = len(cells)
    error = None if None in errors else math.sqrt(sum(error**2 for error in errors if error is not None)) / n
    return {"value": sum(cell["value"] or 0.0 for cell in cells) / n, "stderr": error}


def tables(summary: dict[str, Any]) -> list[Table | str]:
    """Table 1 for what it has, then everything else line by line. The model and what Table 1 shows are lines around
    them: as title and caption they would be as narrow as the table."""
    results = {result["name"]: result for result in summary["results"]}
    found: list[Table | str] = [summary["model"]]
    in_table_1 = [name for name in ("c4", *TABLE_1) if name in results]
    if in_table_1:
        found += _table_1(summary, results, in_table_1)
    rest = [result for result in summary["results"] if result["name"] not in in_table_1]
    if rest:
        table = Table("measure", "metric", "value", "±")
        names = Counter(result["name"] for result in rest)
        for result in rest:
            # Two texts may be called valid.jsonl.
            name = result["name"] if names[result["name"]] == 1 else f"{result['name']} of {result['data']}"
            for metric, cell in result["metrics"].items():
                table.add_row(name, metric, _number(cell["value"]), _number(cell["stderr"]))
            for place in result.get("positions", ()):
                positions = f"loss at {place['first']}-{place['last']}"
                table.add_row(name, positions, _number(place["value"]), _number(place["stderr"]))
            for place in result.get("depths", ()):
                depth = f"accuracy at depth {place['depth']:g}"
                table.add_row(name, depth, _number(place["value"]), _number(place["stderr"]))
        found.append(table)
    return found


def _table_1(summary: dict[str, Any], results: dict[str, dict[str, Any]], names: list[str]) -> list[Table | str]:
    limited = sorted({results[name]["limit"] for name in names if results[name]["limit"]})
    caption = "accuracy in %, acc_norm where the harness has it; C4: perplexity per word; ± one standard error"
    if limited:
        caption += f"; only the first {', '.join(map(str, limited))} documents of each"
    table = Table()
    cells = []
    for name in names:
        table.add_column("C4 PPL" if name == "c4" else TABLE_1[name], justify="right")
        cells.append(results[name]["metrics"]["word_perplexity"] if name == "c4" else _percent(accuracy(results[name])))
    if summary["average"] is not None:
        table.add_column("Avg.", justify="right")
        cells.append(_percent(summary["average"]))
    table.add_row(*(_with_error(cell) for cell in cells))
    return [table, caption]


def _percent(cell: dict[str, float | None]) -> dict[str, float | None]:
    return {key: None if value is None else 100 * value for key, value in cell.items()}


def _with_error(cell: dict[str, float | None]) -> str:
    value = "—" if cell["value"] is None else f"{cell['value']:.1f}"
    # On a line of its own, so that eight columns fit a terminal.
    return value if cell["stderr"] is None else f"{value}\n±{cell['stderr']:.1f}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
