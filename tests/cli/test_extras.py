"""Commands where packages are missing, and what is refused before any is loaded."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer

from affine_attn.cli import app
from affine_attn.cli.commands import EXTRAS

ROOT = Path(__file__).parents[2]
# What torch, numpy, typer and rich need.
NEEDED = re.compile(
    r"(torch|numpy|typer|rich|filelock|typing_extensions|sympy|mpmath|networkx|jinja2|markupsafe|fsspec|shellingham|"
    r"annotated_doc|annotated_types|pydantic|pydantic_core|typing_inspection|markdown_it|mdurl|pygments|click)"
    r"(\.libs|\.py|gen|-.*)?",
    re.IGNORECASE,
)
COMMANDS = {
    "variants": None,
    "variants --check": None,
    "variants --json": None,
    "recipes": "models",
    "recipes demo": "models",
    "demo": "demo",
    "bench --help": "kernels,models,plots",
    "convert model new": "models,gguf",
    "export model --onnx": "models,onnx",
    "generate model hi": "models",
    "prepare out text.txt": "models,data",
    "distill demo": "models",
    "cache-teacher data model": "models",
    "eval model --text text.txt": "models,eval",
    "eval model arc_easy": "models,eval",
    "eval-score model text.txt out.gz": "models",
    "analyze model --data text.txt": "models,plots",
    "report model": "report,plots",
}
PROGRAM = """
import json, sys
from typer.testing import CliRunner
from affine_attn.cli import app
for line in json.load(sys.stdin):
    answer = CliRunner().invoke(app, line.split())
    loaded = sorted({"torch", "transformers"} & set(sys.modules))
    print(json.dumps([line, answer.exit_code, answer.stderr, repr(answer.exception), loaded]))
"""


def answers(folder: Path, lines: list[str], path: list[Path], *options: str) -> list[list]:
    """The exit code, the errors and what was loaded, of commands one after the other in a process."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    run = subprocess.run(
        [sys.executable, *options, "-c", PROGRAM],
        input=json.dumps(lines), capture_output=True, text=True, env=environment, cwd=folder, check=True,
    )  # fmt: skip
    return [json.loads(line) for line in run.stdout.splitlines()]


@pytest.fixture
def folder(tmp_path):
    for place in ("model", "data"):
        (tmp_path / place).mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "text.txt").write_text("text")
    return tmp_path


def test_with_torch_alone_a_command_works_or_names_its_extra_in_a_line(folder, tmp_path):
    installed, alone = Path(torch.__file__).parents[1], tmp_path / "alone"
    alone.mkdir()
    for entry in installed.iterdir():
        if NEEDED.fullmatch(entry.name):
            (alone / entry.name).symlink_to(entry)
    for line, code, said, exception, _ in answers(folder, list(COMMANDS), [alone, ROOT], "-S"):
        extra = COMMANDS[line]
        if extra is None:
            assert code == 0, (line, said, exception)
            continue
        assert code == 2, (line, said, exception)
        assert len(said.splitlines()) == 1, said
        # The package of models says for itself what it needs.
        assert re.search(rf"needs \w+: pip install 'affine-attn\[({extra}|models)\]'$", said), (line, said)


def test_the_table_of_the_docs_has_every_command_with_its_extras():
    page = (ROOT / "docs" / "quickstart.md").read_text().partition("| command | extras |")[2].partition("\n\n")[0]
    found = {}
    for row in page.splitlines()[2:]:
        _, names, extras, *_ = row.split("|")
        found |= dict.fromkeys(re.findall(r"`([\w-]+)`", names), ",".join(re.findall(r"`(\w+)`", extras)))
    assert found == {name: EXTRAS.get(name, "") for name in typer.main.get_command(app).commands}
    assert {line.split()[0] for line in COMMANDS} == set(found)


def test_wrong_input_is_refused_before_torch_is_loaded(folder):
    (folder / "runs").mkdir()
    (folder / "run" / "model").mkdir(parents=True)
    (folder / "run" / "model" / "config.json").write_text("{}")
    lines = {
        "distill dmo": "there is no recipe 'dmo'; did you mean demo?",
        "distill none.toml": "there is no file or folder none.toml",
        "distill demo stepps=5": "a recipe has no field 'stepps'; did you mean steps?",
        "recipes smal": "there is no recipe 'smal'; did you mean small?",
        "generate modle hi": "there is no folder modle; did you mean model?",
        "generate runs/dmo hi": "there is no folder runs/dmo",
        "eval run": "run is the folder of a run: its model is run/model",
        "convert runs/dmo new": "there is no folder runs/dmo",
        "export runs/dmo --onnx": "there is no folder runs/dmo",
        "generate ./nothing hi": "there is no folder ./nothing",
        "eval runs/dmo": "there is no folder runs/dmo",
        "eval model --text none.txt": "there is no file or folder none.txt",
        "analyze model --data none": "there is no file or folder none",
        "analyze a/b/c --data text.txt": "there is no folder a/b/c",
        "report runs/dmo": "there is no file or folder runs/dmo",
        "eval-score model none.gz out.gz": "there is no file or folder none.gz",
        "cache-teacher none model": "there is no file or folder none",
        "variants --import none.py": "--import none.py: there is no such file",
    }
    for line, code, said, exception, loaded in answers(folder, list(lines), [ROOT]):
        assert (code, said, loaded) == (2, f"{lines[line]}\n", []), (line, exception)


@pytest.mark.parametrize("own", [None, "active"])
def test_threads_wait_passively_unless_a_user_wants_otherwise(own):
    program = (
        "import os, sys\n"
        "from affine_attn.cli import app\n"
        "app(['--version'], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules\n"
        "print(os.environ['OMP_WAIT_POLICY'])"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment |= {"OMP_WAIT_POLICY": own} if own else {}
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    assert run.stdout.splitlines()[-1] == (own or "passive")
