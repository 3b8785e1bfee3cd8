"""Every command of the README and the tutorials, in their order, in one checkout: a small recipe on a few files, in
this process. ``make test-readme`` runs them as they stand."""

import dataclasses
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from affine_attn.cli import app
from affine_attn.data import corpus
from affine_attn.distill import recipes
from tests.support import pages


def test_every_page_is_read_and_every_reason_is_of_a_command():
    tutorials = {f"docs/tutorials/{path.name}" for path in (pages.ROOT / "docs" / "tutorials").glob("*.md")}
    assert tutorials <= set(pages.PAGES)
    lines = [command.line for command in pages.commands()]
    assert len(lines) > 60
    assert not set(pages.SKIPPED) - set(lines)
    # What begins like a command and is none would go unnoticed.
    assert all(shlex.split(line) for line in lines)


@pytest.fixture
def checkout(family, tmp_path, monkeypatch):
    """What git ignores is what it does there."""
    shutil.copy(pages.ROOT / ".gitignore", tmp_path)
    pages.track_everything(tmp_path)
    pages.write_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    few = {"student": "nano", "teacher": "train:nano", "vocab_size": 300, "valid_sequences": 2, "statistics_steps": 2}
    few |= {"steps": 3, "warmup_steps": 1, "decay_steps": 1}
    demo = recipes.RECIPES["demo"]
    monkeypatch.setitem(recipes.RECIPES, "demo", lambda: dataclasses.replace(demo(), **few))
    standard_library = corpus.standard_library
    monkeypatch.setattr(corpus, "standard_library", lambda _: standard_library(20))
    (tmp_path / "mine.toml").write_text(re.sub(r"steps = \d+", "steps = 3", (tmp_path / "mine.toml").read_text()))
    yield tmp_path
    sys.modules.pop("my_variants", None)


# Whose tests are elsewhere, and take as long here.
LONG = ("affine-attn export models/mine --onnx", "affine-attn variants --check")


def expanded(line: str) -> list[str]:
    """The words of a line as a shell has them."""
    words = []
    for word in shlex.split(line):
        words += sorted(map(str, Path().glob(word))) if "*" in word else [word]
    return words


def outputs(folder: Path) -> dict[Path, bytes]:
    kinds = (".json", ".html", ".safetensors", ".onnx", ".jsonl", ".gz", ".bin")
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.suffix in kinds}


def test_the_commands_run_in_their_order_in_one_checkout(checkout):
    ran, before = 0, outputs(checkout)
    for page, line in pages.commands():
        if line in pages.SKIPPED or line in LONG or not line.startswith("affine-attn"):
            continue  # make, pip and scripts are not of this process
        words = expanded(line)[1:]
        words += ["--no-figures"] if words[0] == "analyze" else []
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, f"{page}: {line}\n{result.output}\n{result.exception!r}"
        after = outputs(checkout)
        replaced = [str(path) for path, content in before.items() if after.get(path) != content]
        assert not replaced, f"{page}: {line} replaced {replaced}"
        ran, before = ran + 1, after
    assert ran > 40
    assert pages.untracked_or_changed(checkout) == ""
    assert torch.is_grad_enabled()
