"""The names of what a command leaves on disk: the folder of a run, and the folders beside a model."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from affine_attn.runs.files import JsonLines

RECIPE, ENVIRONMENT, RESULT = "recipe.json", "environment.json", "result.json"
METRICS, STATISTICS = "metrics.jsonl", "statistics.jsonl"
MODEL, TEACHER = "model", "teacher"
# In a checkpoint: of which run it is.
IDENTITY = "run.json"
# Beside a model: what ``affine-attn eval`` and ``affine-attn analyze`` found.
EVALUATION, ANALYSIS = "evaluation", "analysis"
# In that of analyses, the pictures of several models.
FIGURES = "figures"
_LOCK = ".lock"


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run of ``affine-attn distill``.

    It holds ``recipe.json``, ``environment.json``, ``metrics.jsonl`` and ``statistics.jsonl`` (``runs.series`` and
    ``runs.provenance`` say what is in them), the checkpoints, each with a ``run.json`` that tells its run from others,
    and, at the end, ``result.json`` and ``model``: the student with the tokenizer of its data, as ``from_pretrained``
    reads it. A teacher that is trained first has such a folder inside, ``teacher``. The empty ``.lock`` keeps other
    runs out.
    """

    path: Path

    @property
    def recipe(self) -> Path:
        return self.path / RECIPE

    @property
    def environment(self) -> Path:
        return self.path / ENVIRONMENT

    @property
    def metrics(self) -> JsonLines:
        return JsonLines(self.path / METRICS)

    @property
    def statistics(self) -> JsonLines:
        return JsonLines(self.path / STATISTICS)

    @property
    def result(self) -> Path:
        return self.path / RESULT

    @property
    def model(self) -> Path:
        return self.path / MODEL

    @property
    def has_model(self) -> bool:
        return (self.model / "config.json").exists()

    @property
    def teacher(self) -> "RunFolder":
        return RunFolder(self.path / TEACHER)

    @property
    def lock(self) -> Path:
        return self.path / _LOCK

    @property
    def unfinished_model(self) -> Path:
        return self.path / f"{MODEL}.tmp"

    @property
    def unfinished_checkpoint(self) -> Path:
        return self.path / "checkpoint.tmp"

    def after_recipe(self) -> Iterator[Path]:
        """What there is of all that a run writes after its recipe."""
        for pattern in ("checkpoint-*", MODEL, METRICS, STATISTICS, RESULT):
            yield from sorted(self.path.glob(pattern))


def model_and_run(path: str | Path) -> tuple[Path, RunFolder | None]:
    """The folder of a model and of the run that made it, given either; no run where it lies in none."""
    place, around = Path(path), RunFolder(Path(path).parent)
    if (run := RunFolder(place)).has_model:
        return run.model, run
    return place, around if place.name == MODEL and around.metrics.path.exists() else None


def result_name(name: str, identity: dict[str, Any]) -> str:
    """Return a name that ends in a hash of all that decides a result, so that anything else is another result."""
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]
    return f"{name}-{key}"


def beside(model: str, folder: str) -> Path:
    """Return where results about a model go by default: beside its weights, or under a name made of its hub id."""
    place = Path(model)
    return place / folder if place.is_dir() else Path(folder) / model.replace("/", "--")
