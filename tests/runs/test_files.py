"""What is written is there whole or not at all, and a full disk names the file."""

import ast
import errno
import os
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from affine_attn.cli import app
from affine_attn.data.shards import ShardWriter
from affine_attn.models.remote_code import save_with_code
from affine_attn.runs.files import JsonLines, temporary, written
from tests.report.test_report import zero_shot
from tests.support.hf import tiny_model

PACKAGE = Path(__file__).parents[2] / "affine_attn"
# The writers themselves, locks that hold nothing, files of a temporary folder, and lines that are added one by one.
OTHERWISE = {
    "runs/files.py": {"open"},
    "data/shards.py": {"open"},
    "runs/locks.py": {"open"},
}


_IN_PLACE = ("torch.save", "json.dump", "shutil.copy", "shutil.copy2", "shutil.copyfile", "shutil.move")


@pytest.fixture
def full_disk(monkeypatch):
    """No file is longer than a byte once it is on the disk."""

    def fsync(_) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)


def test_what_was_there_stays_until_the_new_file_is_whole(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    writer = written(path)
    file = writer.__enter__()
    file.write(b"half of")
    file.flush()
    assert path.read_text() == "old"
    assert not writer.__exit__(KeyError, KeyError(), None)
    assert [(found.name, found.read_text()) for found in tmp_path.iterdir()] == [("file", "old")]
    with written(path) as file:
        file.write(b"new")
    assert [(found.name, found.read_text()) for found in tmp_path.iterdir()] == [("file", "new")]


def test_a_full_disk_leaves_the_last_report_and_names_the_file(tmp_path, full_disk):
    model, page = tmp_path / "model", tmp_path / "report.html"
    zero_shot(model, "piqa", "piqa", 0.5, None)
    page.write_text("a good report")
    result = CliRunner().invoke(app, ["report", str(model), "-o", str(page)])
    assert (result.exit_code, result.output) == (2, f"{page}: No space left on device\n")
    assert page.read_text() == "a good report"
    result = CliRunner().invoke(app, ["report", str(model), "-o", str(page), "--figures", str(tmp_path / "figures")])
    assert (result.exit_code, result.output) == (
        2, f"{tmp_path / 'figures' / 'activations.png'}: No space left on device\n",
    )  # fmt: skip
    assert not list((tmp_path / "figures").iterdir())


def test_a_full_disk_leaves_the_code_that_was_saved(tmp_path, full_disk, monkeypatch):
    model = tiny_model("softmax")
    with pytest.raises(OSError, match=r"No space left on device: '.*modeling_affine_attn.py'"):
        save_with_code(model, tmp_path)
    assert not list(tmp_path.glob("*.py*"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_shards_and_lines_on_a_full_disk_name_their_file(tmp_path):
    lines = tmp_path / "metrics.jsonl"
    lines.symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device: '.*metrics.jsonl'"):
        JsonLines(lines).append({"step": 1})
    temporary(tmp_path / "train-00000.bin").symlink_to("/dev/full")
    writer = ShardWriter(tmp_path, "train-00000", np.dtype("<u2"))
    with pytest.raises(OSError, match=r"No space left on device: '.*train-00000.bin'"):
        writer.append(np.zeros(1 << 21))


def test_nothing_is_written_in_another_way():
    found = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and (name := _writes(node)):
                found.setdefault(path.relative_to(PACKAGE).as_posix(), set()).add(name)
    assert found == OTHERWISE


def _writes(call: ast.Call) -> str | None:
    """The name of a call that opens or writes a path."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else None
    if name in ("write_text", "write_bytes", "write_image", "write_html"):
        return name
    if (function := ast.unparse(call.func)) in _IN_PLACE:
        return function
    called = name or getattr(call.func, "id", None)
    modes = [each.value for each in call.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    return called if called == "open" and any(set(mode) <= set("rwaxbt+") - set("r") for mode in modes) else None
