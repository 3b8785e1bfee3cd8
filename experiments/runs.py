"""The folder of a run. One that holds ``result.json`` is finished.

config.json          group, table, student and recipe: all that decides the numbers
environment.json     on what it was made, and by which commit
metrics.csv.gz       a line for every step, see COLUMNS
statistics.jsonl.gz  how the student attends while it learns, see affine_attn.runs.series
result.json          losses on held-out text, statistics of the gradient norms, whether and when it diverged, speed
analysis             how the finished student attends, as affine-attn analyze has it; of some students only
answers.json.gz      to the questions of zero_shot; of some students only
evaluation           what was made of them, as affine-attn eval has it
model                the student, as from_pretrained reads it; too large to be kept with the rest
"""

import csv
import dataclasses
import gzip
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from affine_attn.analyze.run import Request, Target, analyze
from affine_attn.data.tokenizer import copy_files
from affine_attn.distill.recipes import Recipe
from affine_attn.runs.analysis import Analysis, read_analysis, write_analysis
from affine_attn.runs.files import write_json, written
from affine_attn.runs.layout import ANALYSIS, EVALUATION
from affine_attn.runs.series import gradient_statistics
from experiments.grid import Group, Student

if TYPE_CHECKING:
    from experiments.learner import Learner

CONFIG, ENVIRONMENT, METRICS, STATISTICS, RESULT, MODEL = (
    "config.json", "environment.json", "metrics.csv.gz", "statistics.jsonl.gz", "result.json", "model",
)  # fmt: skip
# lr is the rate of the step, loss what is minimised, hard the cross-entropy on the text, grad_norm before clipping.
COLUMNS = ("step", "lr", "loss", "hard", "grad_norm")
# Only where a step has several micro-batches: the norm of the first one's gradient, as if it were a batch of its own.
MICRO_NORM = "micro_norm"
# Of a recipe: where things lie and how they are run, not what comes out.
_FREE = ("data", "teacher", "workers", "compile", "save_steps")


def config(group: Group, student: Student) -> dict[str, Any]:
    recipe = dataclasses.asdict(dataclasses.replace(group.recipe, learning_rate=student.learning_rate))
    del recipe["attention"]
    about: dict[str, Any] = {"group": group.name, "table": group.table, "lengths": list(group.lengths)}
    if group.needles is not None:
        about["needles"] = dataclasses.asdict(group.needles)
    return about | {"student": student.to_dict(), "recipe": recipe}


def is_finished(folder: Path, group: Group, student: Student) -> bool:
    """A run of other settings in the same folder is refused, finished or not."""
    if (folder / CONFIG).exists():
        before, now = json.loads((folder / CONFIG).read_text()), config(group, student)
        for settings in (before, now):
            for name in _FREE:
                del settings["recipe"][name]
        if before != now:
            raise ValueError(f"{folder} holds a run with other settings: give another --output, or remove it")
    return (folder / RESULT).exists()


def write_series(folder: Path, group: Group, learner: "Learner", environment: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / CONFIG, config(group, learner.student))
    write_json(folder / ENVIRONMENT, environment)
    lines = (",".join((str(i), *(f"{x:.7g}" for x in row))) for i, row in enumerate(learner.rows, start=1))
    columns = (*COLUMNS, MICRO_NORM) if group.recipe.accumulation(1) > 1 else COLUMNS
    write_gzip(folder / METRICS, (",".join(columns), *lines))
    write_gzip(folder / STATISTICS, (json.dumps(_rounded(row)) for row in learner.statistics))


def write_model(folder: Path, model: PreTrainedModel, tokenizer: Path) -> None:
    model.save_pretrained(folder / MODEL)
    copy_files(tokenizer, folder / MODEL)


def analyze_model(folder: Path, recipe: Recipe, layers: int) -> None:
    """Analyse the folder's model, with maps of the first, a middle and the last layer: all would be too large."""
    request = Request(Path(recipe.data), recipe.sequence_length, layers=(0, layers // 2, layers - 1))
    write_analysis(folder / ANALYSIS, analyze(Target(folder.name, str(folder / MODEL), None), request))


def write_result(
    folder: Path,
    group: Group,
    learner: "Learner",
    valid: dict[str, Any] | None,
    speed: dict[str, Any],
    environment: dict[str, Any],
) -> None:
    """``valid`` is None for a student that diverged."""
    norms = [row[COLUMNS.index("grad_norm") - 1] for row in learner.rows]
    about = {"variant": learner.student.variant, "seed": group.recipe.seed, "lr": learner.student.learning_rate}
    content = about | {"diverged_step": learner.diverged, "valid": valid}
    gradients = gradient_statistics(norms) if norms else None
    write_json(folder / RESULT, content | {"gradients": gradients, "speed": speed, "environment": environment})


@dataclasses.dataclass(frozen=True)
class Run:
    """What a folder says."""

    folder: Path
    config: dict[str, Any]
    result: dict[str, Any] | None  # None: not finished

    @property
    def variant(self) -> str:
        return self.config["student"]["variant"]

    @property
    def rate(self) -> float:
        return self.config["student"]["learning_rate"]

    @property
    def seed(self) -> int:
        return self.config["recipe"]["seed"]

    @property
    def table(self) -> str:
        return self.config["table"]

    @property
    def valid(self) -> dict[str, float]:
        """Losses on held-out text; none of a run that diverged or goes on."""
        return (self.result or {}).get("valid") or {}

    @property
    def diverged_step(self) -> int | None:
        return (self.result or {}).get("diverged_step")

    def environment(self) -> dict[str, Any]:
        return json.loads((self.folder / ENVIRONMENT).read_text())

    def series(self) -> dict[str, list[float]]:
        """Columns of metrics.csv.gz."""
        with gzip.open(self.folder / METRICS, "rt") as file:
            columns, *rows = csv.reader(file)
        return {name: [float(row[i]) for row in rows] for i, name in enumerate(columns)}

    def evaluations(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted((self.folder / EVALUATION).glob("*.json"))]

    def analysis(self) -> Analysis | None:
        place = self.folder / ANALYSIS
        return read_analysis(place) if place.exists() else None

    def statistics(self) -> list[dict[str, Any]]:
        with gzip.open(self.folder / STATISTICS, "rt") as file:
            return [json.loads(line) for line in file]


def read_runs(root: Path) -> Iterator[Run]:
    """Finished runs and those under way, in the order of their names."""
    for path in sorted(root.glob(f"*/*/{CONFIG}")):
        result = path.with_name(RESULT)
        read = json.loads(result.read_text()) if result.exists() else None
        yield Run(path.parent, json.loads(path.read_text()), read)


def write_gzip(path: Path, lines: Iterable[str]) -> None:
    """All of it or nothing, and without a date inside: the same numbers are the same bytes."""
    with written(path) as file, gzip.GzipFile(filename="", fileobj=file, mode="wb", mtime=0) as content:
        content.write("".join(f"{line}\n" for line in lines).encode())


def _rounded(value: Any) -> Any:
    match value:
        case float():
            return float(f"{value:.5g}")
        case list():
            return [_rounded(entry) for entry in value]
        case dict():
            return {key: _rounded(entry) for key, entry in value.items()}
    return value
