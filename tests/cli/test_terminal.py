"""What is printed on a terminal of 80 columns: tables fit, and text wraps at words."""

import io

import pytest
from rich.console import Console
from typer.testing import CliRunner

from affine_attn.cli import app, evaluation, start, terminal, training
from tests.support.evaluation_sets import small_llama, write_sets
from tests.support.tiny_runs import counting_shards, tiny


@pytest.fixture
def screen(monkeypatch):
    """What stands on the terminal, line by line, without its colours."""
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    for module in (terminal, evaluation, start, training):
        monkeypatch.setattr(module, "console", console)
    monkeypatch.setattr(terminal.tell, "__defaults__", (console,))
    return lambda *arguments: _lines(console, arguments)


def _lines(console: Console, arguments: tuple[object, ...]) -> list[str]:
    console.file = io.StringIO()
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    assert not result.stdout.strip(), "all of it goes through the console"
    return console.file.getvalue().splitlines()


def test_every_table_fits(screen, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = tmp_path / "a-folder-with-a-rather-long-name"
    data.mkdir()
    counting_shards(data)
    fields = [f"{name}={value}" for name, value in vars(tiny(data, steps=4)).items()]
    sweep = 'attention=softmax,{"affine":{"length":16},"sink":"learned","gate":"headwise"}'
    swept = screen("distill", "demo", *fields, "--output", "sweep", "--sweep", sweep)
    small_llama(tmp_path / "a-model-with-a-rather-long-name")
    write_sets(tmp_path / "sets")
    model = tmp_path / "a-model-with-a-rather-long-name"
    one = screen("eval", model, "piqa", "--data", "sets", "--limit", 2)
    text = screen("eval", model, "--text", "sets/texts.jsonl", "--length", 16)
    shown = [swept, one, text, screen("recipes"), screen("recipes", "demo"), screen("variants")]
    shown.append(screen("distill", "demo", *fields, "--dry-run"))
    for lines in shown:
        assert lines
        assert max(map(len, lines)) <= 80, "\n".join(lines)
    # The caption of one narrow column is not as narrow.
    assert any("accuracy in %, acc_norm where the harness has it" in line for line in one)


def test_text_wraps_at_words_on_a_terminal_alone(monkeypatch):
    words = [f"word{i}" for i in range(40)]
    for is_terminal in (True, False):
        console = Console(file=io.StringIO(), width=80, force_terminal=is_terminal, color_system=None)
        terminal.tell(" ".join(words), console)
        lines = console.file.getvalue().splitlines()
        assert " ".join(line.strip() for line in lines).split() == words
        assert (len(lines) > 1) == is_terminal
        console.file = io.StringIO()
        terminal.tell(f"  affine-attn {' '.join(words)}", console)
        assert len(console.file.getvalue().splitlines()) == 1  # a command is there to be copied
