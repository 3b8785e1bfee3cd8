"""What a report is about: the files of a run or of a model, read through the modules that define them."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from affine_attn.checks import is_count
from affine_attn.errors import UserError
from affine_attn.evaluate.results import TABLE_1, accuracy
from affine_attn.runs import series
from affine_attn.runs.analysis import Analysis, analyses_in, is_number, read_analysis
from affine_attn.runs.files import JsonLines, read_object
from affine_attn.runs.layout import ANALYSIS, EVALUATION, METRICS, RECIPE, RunFolder

# Weights that all maps of a page may have together: about 2 MB of it.
MAP_NUMBERS = 1_500_000


@dataclass(frozen=True)
class Run(series.Run):
    """A run of ``affine-attn distill``; or a model from elsewhere, which has neither recipe nor metrics. ``model`` is
    that folder or hub id."""

    folder: Path
    model: Path
    recipe: dict[str, Any]
    environment: dict[str, Any]
    result: dict[str, Any]
    finished: bool
    evaluations: list[dict[str, Any]]
    analyses: list[Analysis]

    @property
    def facts(self) -> dict[str, Any]:
        """What results say of the model itself."""
        contents = [*(analysis.content for analysis in self.analyses), *self.evaluations]
        return next((content["model"] for content in contents if "model" in content), {})

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


@dataclass(frozen=True)
class Look:
    """One analysis of a page: the name of its model, with what tells analyses apart where they are of different text;
    and which of the page's texts it is of."""

    name: str
    analysis: Analysis
    text: int


# In words, what may differ between analyses.
_DIFFER: tuple[Callable[[dict[str, Any]], str], ...] = (
    lambda content: f"{content['data']['length']:,} tokens",
    lambda content: "/".join(Path(content["data"]["path"]).parts[-2:]),
    lambda content: f"{content['data']['sequences']} sequences",
    lambda content: content["data"]["boundaries"].rpartition(": ")[2],
)


def looks(runs: Sequence[Run]) -> tuple[list[tuple[int, Look]], list[str]]:
    """Every analysis with the number of its run, and the texts they are of, in words."""
    found = [(i, analysis) for i, run in enumerate(runs) for analysis in run.analyses]
    told = [[words(analysis.content) for words in _DIFFER] for _, analysis in found]
    differing = [n for n in range(len(_DIFFER)) if len({words[n] for words in told}) > 1]
    texts: dict[str, str] = {}
    shown: list[tuple[int, Look]] = []
    for (i, analysis), words in zip(found, told, strict=True):
        short = [words[n] for n in differing]
        key = " · ".join(short)
        texts.setdefault(key, text_of(analysis.content["data"]))
        if sum(j == i and others == words for (j, _), others in zip(found, told, strict=True)) > 1:
            short.append("maps from {start} to {stop}".format(**analysis.content["map"]))
        shown.append((i, Look(" · ".join([runs[i].name, *short]), analysis, list(texts).index(key))))
    return shown, list(texts.values())


def text_of(data: dict[str, Any]) -> str:
    """How many sequences an analysis saw, how long they were and of what."""
    trained = data.get("training_length")
    beyond = f", trained on {trained}" if trained and trained != data["length"] else ""
    return f"{data['sequences']} × {data['length']} tokens of {data['path']}, {data['boundaries']}{beyond}"


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read runs, models and folders of ``affine-attn analyze --output``, whose analyses join those of a model that is
    given too."""
    if not folders:
        raise UserError("a report needs the folder of at least one run")
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise UserError("the same folder is given twice")
    places = [place for folder in folders for place in _places(folder)]
    own = {model.resolve(): place for place, model, _ in places if model in (place, RunFolder(place).model)}
    of_places: dict[Path, tuple[Path, list[Analysis]]] = {}
    for place, model, analyses in places:
        of_places.setdefault(own.get(model.resolve(), place), (model, []))[1].extend(analyses)
    return [
        _read(place, model, analyses, name)
        for (place, (model, analyses)), name in zip(of_places.items(), _names(list(of_places)), strict=True)
    ]


def _places(folder: Path) -> list[tuple[Path, Path, list[Analysis]]]:
    """The models that a folder is about: their names' places, the models' own, and their analyses."""
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}")
    run = RunFolder(folder)
    model = run.model if run.recipe.is_file() else folder
    if run.recipe.is_file() or (folder / EVALUATION).is_dir() or (folder / ANALYSIS).is_dir():
        return [(folder, model, _analyses(model / ANALYSIS))]
    of_models: dict[str, list[Analysis]] = {}
    for analysis in _analyses(folder):
        of_models.setdefault(analysis.name, []).append(analysis)
    if not of_models:
        raise UserError(
            f"{folder} is no run of affine-attn distill (it has no {RECIPE}), "
            "and no model that affine-attn eval or analyze has results of"
        )
    return [
        (folder if len(of_models) == 1 else folder / name, Path(analyses[0].content["model"]["path"]), analyses)
        for name, analyses in of_models.items()
    ]


def _analyses(folder: Path) -> list[Analysis]:
    found = [read_analysis(place, MAP_NUMBERS) for place in analyses_in(folder)]
    return sorted(found, key=lambda analysis: analysis.content["data"]["length"])


def _read(folder: Path, model: Path, analyses: list[Analysis], name: str) -> Run:
    run = RunFolder(folder)
    trained = run.recipe.is_file()
    evaluations = [_evaluation(path) for path in sorted((model / EVALUATION).glob("*.json"))]
    if not trained and not evaluations and not analyses:
        raise UserError(f"{folder} has no result of affine-attn eval or analyze, and no {RECIPE}")
    metrics = _rows(run.metrics, "loss", "grad_norm") if trained else []
    if trained and not metrics:
        raise UserError(f"{folder} has no step in {METRICS} yet: there is nothing to report")
    recipe = read_object(run.recipe) if trained else {}
    for field, kind in (("attention", str), ("steps", int), ("global_batch", int), ("sequence_length", int)):
        if trained and not isinstance(recipe.get(field), kind):
            raise UserError(f"{run.recipe} is damaged: {field} is {recipe.get(field)!r:.60}")
    return Run(
        name=name,
        variant=recipe["attention"] if trained else analyses[0].content["model"]["variant"] if analyses else None,
        folder=folder,
        model=model,
        recipe=recipe,
        environment=read_object(run.environment) if trained else {},
        metrics=metrics,
        statistics=_rows(run.statistics) if trained else [],
        result=series.result(run) if trained else {},
        finished=not trained or run.result.is_file(),
        evaluations=evaluations,
        analyses=analyses,
    )


def _names(folders: Sequence[Path]) -> list[str]:
    """Name each folder by the fewest last parts of its path that keep them apart."""
    paths = [folder.resolve() for folder in folders]
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
