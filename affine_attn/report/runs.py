"""What a report is about: the files of a run or of a model, read through the modules that define them."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from affine_attn.analyze import files, training
from affine_attn.analyze.run import FOLDER as ANALYSIS
from affine_attn.distill.environment import ENVIRONMENT
from affine_attn.distill.metrics import METRICS, JsonLines
from affine_attn.distill.result import RESULT, result
from affine_attn.distill.run import MODEL, RECIPE
from affine_attn.distill.statistics import STATISTICS
from affine_attn.errors import UserError
from affine_attn.evaluate.results import FOLDER as EVALUATION
from affine_attn.evaluate.results import TABLE_1


@dataclass(frozen=True)
class Run(training.Run):
    """A run of ``affine-attn distill``; or a model from elsewhere, which has neither recipe nor metrics."""

    folder: Path
    recipe: dict[str, Any]
    environment: dict[str, Any]
    result: dict[str, Any]
    finished: bool
    evaluations: list[dict[str, Any]]
    analysis: files.Analysis | None

    @property
    def model(self) -> Path:
        return self.folder / MODEL if self.recipe else self.folder

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
    trained = (folder / RECIPE).is_file()
    model = folder / MODEL if trained else folder
    evaluations = [_json(path) for path in sorted((model / EVALUATION).glob("*.json"))]
    analysis = files.read(model / ANALYSIS) if (model / ANALYSIS / files.ANALYSIS).is_file() else None
    if not trained and not evaluations and analysis is None:
        raise UserError(
            f"{folder} is no run of affine-attn distill (it has no {RECIPE}), "
            "and no model that affine-attn eval or analyze has results of"
        )
    metrics = JsonLines(folder / METRICS).rows() if trained else []
    if trained and not metrics:
        raise UserError(f"{folder} has no step in {METRICS} yet: there is nothing to report")
    recipe = _json(folder / RECIPE) if trained else {}
    return Run(
        name=name,
        variant=recipe["attention"] if trained else analysis.content["model"]["variant"] if analysis else None,
        folder=folder,
        recipe=recipe,
        environment=_json(folder / ENVIRONMENT) if trained else {},
        metrics=metrics,
        statistics=JsonLines(folder / STATISTICS).rows() if trained else [],
        result=result(folder) if trained else {},
        finished=not trained or (folder / RESULT).is_file(),
        evaluations=evaluations,
        analysis=analysis,
    )


def _names(folders: Sequence[Path]) -> list[str]:
    """As few of the last parts of the paths as keep them apart."""
    paths = [folder.resolve() for folder in folders]
    if len(set(paths)) < len(paths):
        raise UserError("the same folder is given twice")
    for count in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-count:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    raise AssertionError("different paths have different names")


def _json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is damaged") from error
