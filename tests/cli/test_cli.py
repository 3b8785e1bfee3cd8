"""The command line: help, completion, tables, exit codes."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from affine_attn import AttentionSpec, __version__
from affine_attn.cli import app, options
from affine_attn.core.variants import VARIANTS, variants_table
from affine_attn.errors import FileError, UserError

runner = CliRunner()
ROOT = Path(__file__).parents[2]


COMMANDS = (
    "demo", "variants", "bench", "convert", "export", "generate", "prepare", "distill", "recipes", "cache-teacher",
    "eval", "eval-score", "analyze", "report",
)  # fmt: skip


def test_help_lists_the_commands():
    result = runner.invoke(app, ["--help"])
    assert result.exit_code == 0
    assert tuple(typer.main.get_command(app).commands) == COMMANDS
    for command in (*COMMANDS, "--install-completion", "Exit codes"):
        assert command in result.output
    assert runner.invoke(app, ["--version"]).output == f"{__version__}\n"


def test_every_argument_and_option_has_a_word_of_help():
    for name, command in typer.main.get_command(app).commands.items():
        # bench passes everything on.
        for parameter in command.params if name != "bench" else ():
            assert getattr(parameter, "help", None), f"{name}: {parameter.name} has no help"
        assert command.help, name


def completed(*words: str) -> list[str]:
    """What the bash of a user is told, and that torch was not loaded for it."""
    program = (
        "import sys\n"
        "from affine_attn.cli import app\n"
        "try: app(prog_name='affine-attn')\n"
        "finally: assert 'torch' not in sys.modules"
    )
    line = {"COMP_WORDS": " ".join(("affine-attn", *words)), "COMP_CWORD": str(len(words))}
    environment = {**os.environ, **line, "_AFFINE_ATTN_COMPLETE": "complete_bash"}
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert not answer.stderr, answer.stderr
    return answer.stdout.split()


def test_a_shell_completes_names_without_waiting_for_torch():
    assert completed("ev") == ["eval", "eval-score"]
    assert completed("distill", "demo", "ste") == ["steps="]
    assert completed("distill", "demo", "attention=affine_") == ["attention=affine_sigmoid", "attention=affine_gated"]
    assert completed("distill", "paper") == ["paper-0.5b", "paper-1b", "paper-3b"]
    assert completed("convert", "a", "b", "--attention", "affine_") == ["affine_sigmoid", "affine_gated"]
    assert completed("eval", "model", "arc") == ["arc_challenge", "arc_easy"]
    assert completed("generate", "model", "text", "--device", "c") == ["cpu", "cuda"]
    assert completed("analyze", "model", "--dtype", "b") == ["bfloat16"]


def test_what_is_completed_is_what_there_is():
    from affine_attn.distill.recipes import RECIPES, Recipe
    from affine_attn.evaluate.results import TABLE_1
    from affine_attn.models.load import DTYPES

    assert tuple(VARIANTS) == options.VARIANTS
    assert tuple(RECIPES) == options.RECIPES
    assert tuple(field.name for field in dataclasses.fields(Recipe)) == options.FIELDS
    assert tuple(TABLE_1) == options.TASKS
    assert options.DTYPES == DTYPES


def test_variants_as_json_are_the_family():
    table = json.loads(runner.invoke(app, ["variants", "--json"]).output)
    assert {name: AttentionSpec.from_dict(entry["spec"]) for name, entry in table.items()} == {
        name: entry.spec for name, entry in VARIANTS.items()
    }


def test_bench_passes_everything_on_also_the_wish_for_help(monkeypatch):
    seen = []
    monkeypatch.setattr("runpy.run_path", lambda script, run_name: seen.append((script, sys.argv)))
    monkeypatch.setattr(sys, "argv", [])
    assert runner.invoke(app, ["bench", "--help", "--rounds", "3"]).exit_code == 0
    script = str(ROOT / "benchmarks" / "run.py")
    assert seen == [(script, [script, "--help", "--rounds", "3"])]


def test_a_place_that_is_nowhere_is_named():
    from affine_attn.runs.places import named_place

    with (
        pytest.raises(ValueError, match=r"^typo is no folder here, nor read from the hub: cannot connect$"),
        named_place("typo"),
    ):
        raise OSError("cannot connect\nand more")
    with pytest.raises(UserError, match=r"^no config$"), named_place(ROOT):
        raise OSError("no config")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "nowhere", "hello", "--device", "abacus"], "--device abacus is none that torch knows"),
        (["generate", "nowhere", "hello", "--device", "meta"], "--device meta: torch has no such device"),
        (["prepare", "FILE"], "FILE: File exists"),
        (["convert", "nowhere", "FILE"], "FILE is not empty; give a new folder"),
        (["eval", "nowhere", "--dtype", "int8"], "--dtype must be one of float32, bfloat16, float16, got 'int8'"),
    ],
)
def test_a_mistake_is_one_line(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE").write_text("text")
    result = runner.invoke(app, arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(message)
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "bug", [ValueError("x"), KeyError("x"), OSError("x"), ImportError("x"), FloatingPointError("x")]
)
def test_a_bug_does_not_look_like_wrong_input(bug, monkeypatch):
    def broken():
        raise bug

    monkeypatch.setattr("affine_attn.core.variants.variants_table", broken)
    result = runner.invoke(app, ["variants"])
    assert (result.exit_code, result.exception) == (1, bug)


@pytest.mark.parametrize(
    "wrong", [UserError("x"), FileError("x"), FileNotFoundError(2, "No such file", "x"), OSError(28, "disk full")]
)
def test_wrong_input_shows_its_traceback_with_debug_alone(wrong, monkeypatch):
    def refuse():
        raise wrong

    monkeypatch.setattr("affine_attn.core.variants.variants_table", refuse)
    whole = runner.invoke(app, ["--debug", "variants"])
    assert (whole.exit_code, whole.exception) == (1, wrong)
    short = runner.invoke(app, ["variants"])
    assert (short.exit_code, len(short.stderr.splitlines())) == (2, 1)


@pytest.mark.parametrize("content", ["{}", "[]", "[" * 100_000, "null"])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_tokenizer_of_another_shape_is_named_before_text_is_read(name, content, tmp_path):
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_text(content if file == name else "{}")
    (tmp_path / "text.txt").write_text("text")
    result = runner.invoke(
        app, ["prepare", str(tmp_path / "out"), str(tmp_path / "text.txt"), "--tokenizer", str(tmp_path)]
    )
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1), result.exception
    assert str(tmp_path / "tokenizer") in result.stderr


def test_what_users_give_is_refused_with_a_user_error():
    """A plain ValueError is a traceback to a command. What is left takes arguments from Python code alone."""
    called = ("api", "core/call", "core/masks", "nn/alpha", "nn/layer", "nn/rope")
    package = ROOT / "affine_attn"
    for path in sorted(package.rglob("*.py")):
        plain = [
            word
            for word in ("ValueError", "ModuleNotFoundError", "FloatingPointError", "OSError")
            if f"raise {word}(" in path.read_text()
        ]
        assert not plain or path.relative_to(package).with_suffix("").as_posix() in called, f"{path} raises {plain}"


@pytest.mark.parametrize("command", [["eval"], ["generate", "hello"], ["convert", "new"]])
def test_the_folder_of_a_run_is_told_from_its_model(command, tmp_path):
    (tmp_path / "run" / "model").mkdir(parents=True)
    (tmp_path / "run" / "model" / "config.json").write_text("{}")
    name, *others = command
    result = runner.invoke(app, [name, str(tmp_path / "run"), *others])
    assert result.exit_code == 2
    assert f"its model is {tmp_path / 'run' / 'model'}" in "".join(result.stderr.splitlines())


def test_variants_prints_the_table():
    result = runner.invoke(app, ["variants"])
    assert result.exit_code == 0
    assert variants_table() in result.output


def test_a_reader_that_has_had_enough_is_no_error():
    """As in: affine-attn variants | head -1."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "affine_attn.cli", "variants"]
    result = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False)
    os.close(writer)
    assert (result.returncode, result.stderr) == (1, "")


@pytest.mark.parametrize("arguments", [["nonsense"], ["demo", "--nonsense"]])
def test_a_wrong_argument_is_an_error_of_one_screen(arguments):
    result = runner.invoke(app, arguments)
    assert result.exit_code == 2
    assert "nonsense" in result.output


def test_a_check_names_an_engine_and_an_error_for_every_variant(monkeypatch):
    from affine_attn.bench import check

    # Timing says nothing in a test; the rest of the table is real.
    monkeypatch.setattr(check, "_time_over_plain", lambda inputs, device: 1.0)
    result = runner.invoke(app, ["variants", "--check"])
    assert result.exit_code == 0, result.output
    for name in VARIANTS:
        assert name in result.output
    assert "FlexAttention has no backward on the CPU" in " ".join(result.output.split())
