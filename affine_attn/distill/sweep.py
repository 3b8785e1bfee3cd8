"""One recipe with several values of a field: a run each, in a folder named after the value, and a table of them all."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from affine_attn.distill import estimate
from affine_attn.distill.recipes import LEARNING_RATES, Recipe
from affine_attn.distill.run import take_up
from affine_attn.errors import UserError
from affine_attn.runs.files import read_object
from affine_attn.runs.layout import TEACHER, RunFolder
from affine_attn.runs.series import LOSSES

# Of the gradients in result.json.
_GRADIENTS = ("mean", "std", "variance", "cv", "spikes_6", "spikes_9")
# Columns of the table: heading, key in a row, format.
_COLUMNS = (
    ("kd\nloss", "kd", ".3f"),
    ("hard\nCE", "hard", ".3f"),
    ("valid\nppl", "valid_perplexity", ".1f"),
    ("grad\nmean", "grad mean", ".3f"),
    ("\nstd", "grad std", ".3f"),
    ("\nvariance", "grad variance", ".4f"),
    ("\nCV", "grad cv", ".3f"),
    ("spikes\nk=6", "grad spikes_6", "d"),
    ("\nk=9", "grad spikes_9", "d"),
)
# A teacher that differs in one of these is another one. Else how it was trained is a matter of the recipe, not of the
# sweep: students are compared under the same teacher.
_TEACHER = ("student", "vocab_size", "data", "documents", "sequence_length")


def grid(recipe: Recipe, sweep: str, output: Path) -> dict[str, Recipe]:
    """``field=value,value,...`` as recipes by folder name; ``learning_rate`` alone is the paper's sweep.

    A teacher that is trained first, and that all of them can have, is the first of the runs.
    """
    name, _, values = sweep.partition("=")
    if sweep == "learning_rate":
        values = ",".join(f"{rate:g}" for rate in LEARNING_RATES)
    if not name or not values:
        raise UserError(f"--sweep must be field=value,value,... or learning_rate, got {sweep!r}")
    assignments = [f"{name}={value}" for value in _divided(values)]
    # A folder's name: one with slashes would be several, or lie elsewhere.
    students = {assignment.replace("/", "--"): recipe.override([assignment]) for assignment in assignments}
    if len(students) < len(assignments):
        raise UserError(f"--sweep has values that are the same, or the same folder: {values}")
    teacher = recipe.teacher_recipe
    if teacher is None or any(_kind(student.teacher_recipe) != _kind(teacher) for student in students.values()):
        return students
    folder = str(RunFolder(output).teacher.model)
    return {TEACHER: teacher} | {
        label: dataclasses.replace(student, teacher=folder) for label, student in students.items()
    }


def dry_run(name: str, recipe: Recipe, sweep: str, devices: int, mfu: float) -> Iterator[str]:
    """What ``--dry-run`` prints for a sweep: every run. Where the teacher is one of them, the others only ask it."""
    runs = grid(recipe, sweep, Path())
    for label, each in runs.items():
        asks = TEACHER in runs and label != TEACHER
        yield f"{label}:"
        yield from estimate.dry_run(
            name, dataclasses.replace(each, teacher=runs[TEACHER].student) if asks else each, devices, mfu
        )


def _divided(values: str) -> list[str]:
    """Divide at commas; those inside of JSON divide nothing."""
    found, depth = [""], 0
    for character in values:
        depth += (character in "[{") - (character in "]}")
        if character == "," and not depth:
            found.append("")
        else:
            found[-1] += character
    return found


def _kind(teacher: Recipe | None) -> tuple[Any, ...] | None:
    return teacher and tuple(getattr(teacher, name) for name in _TEACHER)


def outcome(label: str, recipe: Recipe, output: Path) -> dict[str, Any]:
    """Carry out one run of the grid and give its row of the table.

    A finished one is taken as it is, one that was begun goes on. A student that diverges is part of the
    answer: its row says so.
    """
    try:
        take_up(recipe, output / label)
    except FloatingPointError as error:
        if label == TEACHER:
            raise
        return {"run": label, "stopped": str(error)}
    found = read_object(RunFolder(output / label).result, "gradients")
    gradients = {f"grad {key}": found["gradients"][key] for key in _GRADIENTS}
    return {"run": label, **{key: found[key] for key in LOSSES if key in found}, **gradients}


def table(rows: list[dict[str, Any]], title: str | None = None) -> Table:
    """Columns that occur, of runs by the value of the field that they differ in."""
    field = rows[-1]["run"].partition("=")[0]
    # No lines between columns: it fits a terminal of 80.
    shown = Table(title=title, box=box.SIMPLE, padding=(0, 1, 0, 0))
    shown.add_column(f"\n{field}", overflow="fold")
    columns = [column for column in _COLUMNS if any(column[1] in row for row in rows)]
    for heading, _, _ in columns:
        shown.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        cells = (format(row[key], form) if key in row else "-" for _, key, form in columns)
        shown.add_row(row["run"].removeprefix(f"{field}="), *cells)
    return shown


def stopped(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Why runs have no numbers."""
    yield from (f"{row['run']}: {row['stopped']}" for row in rows if "stopped" in row)
