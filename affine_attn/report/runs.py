"""What a report is about: the files of a run or of a model, read through the modules that define them."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from affine_attn.checks import is_count
from affine_attn.errors import UserError
from affine_attn.evaluate.results import TABLE_1, accuracy
from affine_attn.runs import series
from affine_attn.runs.analysis import Analysis, has_analysis, is_number, read_analysis
from affine_attn.runs.files import JsonLines, read_object
from affine_attn.runs.layout import ANALYSIS, EVALUATION, METRICS, RECIPE, RunFolder

# Weights that all maps of a page may have together: about 2 MB of it.
MAP_NUMBERS = 1_500_000


@dataclass(frozen=True)
class Run(series.Run):
    """A run of ``affine-attn distill``; or a model from elsewhere, which has neither recipe nor metrics."""

    folder: Path
    recipe: dict[str, Any]
    environment: dict[str, Any]
    result: dict[str, Any]
    finished: bool
    evaluations: list[dict[str, Any]]
    analysis: Analysis | None

    @property
    def model(self) -> Path:
        return RunFolder(self.folder).model if self.recipe else self.folder

    @property
    def zero_shot(self) -> dict[str, dict[str, Any]]:
        """The result of every task of Table 1 over the most documents: a trial with --limit does not stand for it."""
        of_tasks = [result for result in self.evaluations if result["name"] in TABLE_1]
        return {result["name"]: result for result in sorted(of_tasks, key=lambda result: result["limit"] or math.inf)}


def measured(result: dict[str, Any]) -> str:
    """All that decides an evaluation but the weights: results with the same may be compared."""
    return json.dumps({**result["identity"], "model": result["identity"]["model"].get("dtype")}, sort_keys=True)


def about(result: dict[str, Any]) -> str:
    """What the name of an evaluation leaves out. Many files are called valid.jsonl: their folder tells them apart."""
    data = "/".join(Path(str(result.get("data") or "")).parts[-2:])
    parts = [f"first {result['limit']}" if result.get("limit") else "", data]
    return "".join(f" · {part}" for part in parts if part)


def read_runs(folders: Sequence[Path]) -> list[Run]:
    if not folders:
        raise UserError("a report needs the folder of at least one run")
    return [_read(folder, name) for folder, name in zip(folders, _names(folders), strict=True)]


def _read(folder: Path, name: str) -> Run:
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}")
    run = RunFolder(folder)
    trained = run.recipe.is_file()
    model = run.model if trained else folder
    evaluations = [_evaluation(path) for path in sorted((model / EVALUATION).glob("*.json"))]
    analysis = read_analysis(model / ANALYSIS, MAP_NUMBERS) if has_analysis(model / ANALYSIS) else None
    if not trained and not evaluations and analysis is None:
        raise UserError(
            f"{folder} is no run of affine-attn distill (it has no {RECIPE}), "
            "and no model that affine-attn eval or analyze has results of"
        )
    metrics = _rows(run.metrics, "loss", "grad_norm") if trained else []
    if trained and not metrics:
        raise UserError(f"{folder} has no step in {METRICS} yet: there is nothing to report")
    recipe = read_object(run.recipe) if trained else {}
    for field, kind in (("attention", str), ("steps", int), ("global_batch", int), ("sequence_length", int)):
        if trained and not isinstance(recipe.get(field), kind):
            raise UserError(f"{run.recipe} is damaged: {field} is {recipe.get(field)!r:.60}")
    return Run(
        name=name,
        variant=recipe["attention"] if trained else analysis.content["model"]["variant"] if analysis else None,
        folder=folder,
        recipe=recipe,
        environment=read_object(run.environment) if trained else {},
        metrics=metrics,
        statistics=_rows(run.statistics) if trained else [],
        result=series.result(run) if trained else {},
        finished=not trained or run.result.is_file(),
        evaluations=evaluations,
        analysis=analysis,
    )


def _names(folders: Sequence[Path]) -> list[str]:
    """Name each folder by the fewest last parts of its path that keep them apart."""
    paths = [folder.resolve() for folder in folders]
    if len(set(paths)) < len(paths):
        raise UserError("the same folder is given twice")
    for count in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-count:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    raise AssertionError("different paths have different names")


def _evaluation(path: Path) -> dict[str, Any]:
    """A result of ``affine-attn eval``, with a number wherever tables and figures need one."""
    result = read_object(path)
    try:
        _require(
            isinstance(result["name"], str) and isinstance(result["identity"]["model"], dict), "its name or identity"
        )
        _require(result.get("limit") is None or is_count(result["limit"]), f"limit {result.get('limit')!r}")
        cells = {name: [cell] for name, cell in result["metrics"].items()}
        for part, places in (("positions", ("first", "last")), ("depths", ("depth",))):
            cells[part] = result.get(part, [])
            for cell in cells[part]:
                _require(all(is_number(cell[place]) for place in places), f"{part} {cell!r:.60}")
        for name, of_name in cells.items():
            for cell in of_name:
                numbers = (cell["value"], cell["stderr"])
                _require(all(number is None or is_number(number) for number in numbers), f"{name} {cell!r:.60}")
        if result["name"] in TABLE_1:
            accuracy(result)
        parameters = result.get("model", {}).get("parameters", 0)
        _require(is_count(parameters), f"parameters {parameters!r}")
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        reason = error if isinstance(error, ValueError) else "it is not what affine-attn eval writes"
        raise UserError(f"{path} is damaged ({reason}): remove it to measure again") from error
    return result


def _rows(lines: JsonLines, *needed: str) -> list[dict[str, Any]]:
    """Lines of a run: nothing but numbers, in lists over layers and heads too. ``needed``: what every line has."""
    rows = lines.rows()
    for number, row in enumerate(rows, start=1):
        wrong = [name for name, value in row.items() if not _all_numbers(value)]
        wrong += [name for name in ("step", *needed) if not is_number(row.get(name))]
        if wrong:
            raise UserError(f"{lines.path}, line {number}, is damaged: {wrong[0]} is {row.get(wrong[0])!r:.60}")
    return rows


def _all_numbers(value: Any) -> bool:
    return all(map(_all_numbers, value)) if isinstance(value, list) else value is None or is_number(value)


def _require(ok: bool, what: str) -> None:
    if not ok:
        raise UserError(what)
