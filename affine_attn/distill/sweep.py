"""One recipe with several values of a field: a run each, in a folder named after the value, and a table of them all."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from affine_attn.distill.recipes import LEARNING_RATES, Recipe
from affine_attn.distill.result import RESULT
from affine_attn.distill.run import run

# Columns of the table, as result.json has them; those of the gradients follow.
_LOSSES = ("loss", "kd", "hard", "valid_loss", "valid_kd", "valid_hard", "valid_perplexity")
_GRADIENTS = ("mean", "std", "variance", "cv", "spikes_6", "spikes_9")


def grid(recipe: Recipe, sweep: str) -> dict[str, Recipe]:
    """``field=value,value,...`` as recipes by folder name; ``learning_rate`` alone is the paper's sweep."""
    name, _, values = sweep.partition("=")
    if sweep == "learning_rate":
        values = ",".join(f"{rate:g}" for rate in LEARNING_RATES)
    if not name or not values:
        raise ValueError(f"--sweep must be field=value,value,... or learning_rate, got {sweep!r}")
    assignments = [f"{name}={value}" for value in values.split(",")]
    return {assignment: recipe.override([assignment]) for assignment in assignments}


def run_all(recipes: dict[str, Recipe], output: Path) -> Iterator[dict[str, Any]]:
    """One after the other; what is finished is taken as it is, what was begun goes on. A row of the table for each.

    A run that diverges is part of the answer: its row says so, and the next one starts.
    """
    for name, recipe in recipes.items():
        try:
            run(recipe, output / name, resume=True)
        except FloatingPointError as error:
            yield {"run": name, "stopped": str(error)}
            continue
        found = json.loads((output / name / RESULT).read_text(encoding="utf-8"))
        gradients = {f"grad {key}": found["gradients"][key] for key in _GRADIENTS}
        yield {"run": name, **{key: found[key] for key in _LOSSES if key in found}, **gradients}


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Markdown, with the columns that occur."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for row in rows:
        cells = (row.get(column, "") for column in columns)
        yield f"| {' | '.join(f'{cell:.4g}' if isinstance(cell, float) else str(cell) for cell in cells)} |"
