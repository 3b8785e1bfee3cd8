"""The demo, with few steps on few files: the whole way, reused the second time, taken up where it was stopped."""

import dataclasses
import io
import json
import re
import shutil

import pytest
from rich.console import Console
from typer.testing import CliRunner

from affine_attn.cli import app
from affine_attn.demo import run_demo
from affine_attn.distill.recipes import recipe
from tests.support.tiny_runs import metrics

RUNS = ("teacher", "attention=softmax", "attention=sink", "attention=affine")


def tiny_demo(folder, console=None):
    chosen = dataclasses.replace(
        recipe("demo"), student="nano", data=str(folder / "data"), vocab_size=300, sequence_length=32,
        steps=6, warmup_steps=2, decay_steps=2, save_steps=3, valid_sequences=4, statistics_steps=3,
    )  # fmt: skip
    console = console or Console(file=io.StringIO(), width=80)
    run_demo(chosen, folder / "runs", console, max_files=20)
    return console.file.getvalue()


def test_it_fits_a_terminal(finished):
    folder, text = finished
    assert max(len(line) for line in text.splitlines() if re.match(r" *\S+ +[\d.-]+ ", line)) <= 80
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    tiny_demo(folder, console)
    lines = console.file.getvalue().splitlines()
    assert all(len(line) <= 80 or line.startswith("  affine-attn") or str(folder) in line for line in lines)


def written(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    return folder, tiny_demo(folder)


def cells(text):
    """Rows of the table by their first cell."""
    names = {run.removeprefix("attention=") for run in RUNS}
    return {name: values for name, *values in map(str.split, filter(str.strip, text.splitlines())) if name in names}


def test_the_table_is_that_of_the_results(finished):
    folder, text = finished
    table = cells(text)
    assert len(table) == len(RUNS)
    for run in RUNS:
        found = json.loads((folder / "runs" / run / "result.json").read_text())
        kd, hard, perplexity, mean, std, variance, cv, *spikes = table[run.removeprefix("attention=")]
        assert kd == (f"{found['kd']:.3f}" if run != "teacher" else "-")
        assert (hard, perplexity) == (f"{found['hard']:.3f}", f"{found['valid_perplexity']:.1f}")
        gradients = found["gradients"]
        assert [mean, std, variance, cv] == [
            f"{gradients['mean']:.3f}", f"{gradients['std']:.3f}", f"{gradients['variance']:.4f}",
            f"{gradients['cv']:.3f}",
        ]  # fmt: skip
        assert spikes == [str(gradients["spikes_6"]), str(gradients["spikes_9"])]


def test_students_differ_in_their_attention_alone(finished):
    folder, _ = finished
    teacher, *students = (json.loads((folder / "runs" / run / "recipe.json").read_text()) for run in RUNS)
    assert [student.pop("attention") for student in students] == ["softmax", "sink", "affine"]
    assert students[0] == students[1] == students[2]
    assert students[0]["teacher"] == str(folder / "runs" / "teacher" / "model")
    assert (teacher["teacher"], teacher["seed"]) == (None, students[0]["seed"])
    # The same batches: the entropy of the one teacher's targets does not depend on the student.
    softmax, sink, affine = ([row["entropy"] for row in metrics(folder / "runs" / run)] for run in RUNS[1:])
    assert softmax == sink == affine
    assert not list((folder / "runs").glob("attention=*/teacher"))


def test_it_ends_with_a_page_about_the_students(finished):
    folder, text = finished
    page = folder / "runs" / "report.html"
    assert text.splitlines()[-1].endswith(str(page))
    content = page.read_text()
    assert all(run.removeprefix("attention=") in content for run in RUNS[1:])
    for run in RUNS[1:]:
        (analysis,) = (folder / "runs" / run / "model" / "analysis").glob("data-32-*/analysis.json")
        # As long as what they were trained on, and packed like it.
        seen = json.loads(analysis.read_text())["data"]
        assert (seen["length"], seen["boundaries"].partition(":")[0]) == (32, "packed as in training")


def test_a_rerun_trains_nothing_again(finished):
    folder, text = finished
    before = written(folder)
    again = tiny_demo(folder)
    assert written(folder) == before
    assert cells(again) == cells(text)
    assert again.count("finished before, reused") == len(RUNS)


def test_an_interrupted_one_goes_on_to_the_same_table(finished, caplog):
    folder, text = finished
    last = folder / "runs" / RUNS[-1]
    rows = metrics(last)
    for late in ("model", "checkpoint-6"):
        shutil.rmtree(last / late)
    begun = (last / "checkpoint-3" / "trainer_state.json").stat().st_mtime_ns
    page = folder / "runs" / "report.html"

    def untouched():
        return {path: time for path, time in written(folder).items() if last not in path.parents and path != page}

    others = untouched()
    again = tiny_demo(folder)
    assert cells(again) == cells(text)
    assert [row["loss"] for row in metrics(last)] == [row["loss"] for row in rows]
    assert [row["tokens_per_second"] for row in metrics(last)[:3]] == [row["tokens_per_second"] for row in rows[:3]]
    assert (last / "checkpoint-3" / "trainer_state.json").stat().st_mtime_ns == begun
    assert untouched() == others
    assert again.count("finished before, reused") == len(RUNS) - 1
    assert [record.getMessage() for record in caplog.records] == [f"going on after {last / 'checkpoint-3'}"]


def test_the_command_says_in_one_line_what_is_in_its_way(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "demo").mkdir(parents=True)
    (tmp_path / "data" / "demo" / "mine.txt").write_text("mine")
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == 2
    assert result.stderr.splitlines() == [
        "data/demo is not empty (mine.txt) and was not begun by this command; give a new folder; "
        "to begin afresh, delete data/demo and runs/demo"
    ]
