"""Zero-shot accuracies of students: questions are written where lm-evaluation-harness and its data are, answered where
the models are, and counted where they were written."""

import gzip
import json
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from affine_attn.data.shards import TokenShards
from affine_attn.data.tokenizer import copy_files
from affine_attn.distill.recipes import Recipe
from affine_attn.evaluate.run import Request, evaluate, export_requests
from affine_attn.evaluate.score import SCORES, digest, read_requests, score, write_lines
from affine_attn.models.load import ModelHandle
from affine_attn.runs.layout import EVALUATION
from experiments.grid import Group, Student
from experiments.runs import MODEL, Run, write_gzip

ANSWERS = "answers.json.gz"


def write_questions(group: Group, request: Request, questions: Path) -> int:
    """The same for every student that is made as those of the group; returns how many."""
    with _without_weights(group.students[0], group.recipe) as handle:
        return export_requests(handle, request, questions)


def answer(runs: Iterable[Run], questions: Path) -> Iterator[Path]:
    """Each file as it is written, beside models that are there and have not answered yet."""
    for run in runs:
        file, model = run.folder / ANSWERS, run.folder / MODEL
        if file.exists() or not (model / "config.json").exists():
            continue
        handle = ModelHandle(str(model))
        pairs = read_requests(questions, handle.config)
        scores = score(handle.model, pairs, progress=run.folder.name)
        write_gzip(file, [json.dumps({"questions": digest(pairs), "model": handle.about(), "scores": scores})])
        yield file


def count(runs: Iterable[Run], group: Group, request: Request, questions: Path) -> Iterator[Path]:
    """Write what affine-attn eval would, for runs that have answered; each folder as it is done."""
    pairs = read_requests(questions, group.students[0].config(group.recipe))
    for run in runs:
        file = run.folder / ANSWERS
        if not file.exists():
            continue
        answers = json.loads(gzip.decompress(file.read_bytes()))
        if answers["questions"] != digest(pairs):
            raise ValueError(
                f"{file} answers other questions than {questions}: remove it, and let its model answer again"
            )
        student = Student.from_dict(run.config["student"])
        with _without_weights(student, group.recipe) as handle, tempfile.TemporaryDirectory() as folder:
            scores = Path(folder) / "scores.jsonl"
            header = {"format": SCORES, "requests": digest(pairs), "model": answers["model"]}
            write_lines(scores, header, zip(pairs, answers["scores"], strict=True))
            evaluate(handle, request, run.folder / EVALUATION, scores)
        yield run.folder / EVALUATION


@contextmanager
def _without_weights(student: Student, recipe: Recipe) -> Iterator[ModelHandle]:
    """What the harness asks of a model before it has questions: its configuration and tokenizer."""
    with tempfile.TemporaryDirectory() as folder:
        copy_files(TokenShards(recipe.data, 1).tokenizer, Path(folder))
        student.config(recipe).save_pretrained(folder)
        yield ModelHandle(folder)
