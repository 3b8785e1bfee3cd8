"""A file of a run has its name in one place, and whoever reads or writes it goes there."""

import ast
from pathlib import Path

import pytest

from affine_attn.data import shards
from affine_attn.runs import analysis, layout
from affine_attn.runs.layout import RunFolder, beside, model_and_run

PACKAGE = Path(__file__).parents[2] / "affine_attn"
FILES = {
    *(layout.RECIPE, layout.ENVIRONMENT, layout.METRICS, layout.STATISTICS, layout.RESULT, layout.IDENTITY),
    *(analysis.FILE, analysis.MAPS, shards.MANIFEST, shards.PROGRESS),
}
# Words that also mean other things: names where a path goes on with them.
FOLDERS = {layout.MODEL, layout.TEACHER, layout.EVALUATION, layout.ANALYSIS, shards.TOKENIZER, shards.TEACHER_CACHE}


def _named(source: str) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and node.value in FILES:
            found.add(node.value)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and isinstance(node.right, ast.Constant):
            found |= {node.right.value} & FOLDERS
    return found


def test_names_of_files_stand_in_one_place():
    found = {path.relative_to(PACKAGE).as_posix(): _named(path.read_text()) for path in PACKAGE.rglob("*.py")}
    elsewhere = {name: names for name, names in found.items() if names and not name.startswith("runs/")}
    assert elsewhere == {"data/shards.py": {shards.MANIFEST, shards.PROGRESS}}


@pytest.mark.parametrize("line", ['METRICS = "metrics.jsonl"', 'place = folder / "model"'])
def test_another_place_would_be_found(line):
    assert _named(line)


def test_a_model_is_found_with_its_run(tmp_path):
    run = RunFolder(tmp_path / "run")
    run.model.mkdir(parents=True)
    (run.model / "config.json").touch()
    assert model_and_run(run.path) == (run.model, run)
    # A folder of that name alone is no sign of a run.
    assert model_and_run(run.model) == (run.model, None)
    run.metrics.append({"step": 1})
    assert model_and_run(run.model) == (run.model, run)
    assert model_and_run("owner/name") == (Path("owner/name"), None)


def test_results_lie_beside_a_model_or_under_its_hub_id(tmp_path):
    assert beside(str(tmp_path), layout.EVALUATION) == tmp_path / "evaluation"
    assert beside("owner/name", layout.EVALUATION) == Path("evaluation/owner--name")
