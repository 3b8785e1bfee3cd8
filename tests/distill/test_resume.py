"""What --resume goes on from, and what it refuses: another run's, damaged and incomplete files."""

import errno
import json
import math
import shutil
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from affine_attn.cli import app
from affine_attn.distill import run as run_module
from affine_attn.distill.run import run
from affine_attn.distill.trainer import DistillTrainer
from affine_attn.errors import UserError
from affine_attn.nn.alpha import alpha_gates
from affine_attn.runs.files import JsonLines
from tests.support.tiny_runs import counting_shards, metrics, tiny, trainer


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return counting_shards(tmp_path_factory.mktemp("shards"))


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
    """Copies of a run that is about to make its model, from its last checkpoint; the model itself is ``kept``."""
    chosen, once = tiny(data, save_steps=4), tmp_path_factory.mktemp("finished")
    run(chosen, once)
    (once / "model").rename(once / "kept")
    return lambda folder: (chosen, shutil.copytree(once, folder / "run"))


def test_a_checkpoint_of_another_run_is_not_gone_on_from(data, tmp_path):
    """Two runs would be mixed in metrics.jsonl, and nothing would show it."""
    theirs, mine = tmp_path / "theirs", tmp_path / "mine"
    run(tiny(data, save_steps=3, keep_checkpoints=1), theirs)
    run(tiny(data, save_steps=3, keep_checkpoints=1, seed=1), mine)
    shutil.rmtree(mine / "model")
    shutil.copytree(theirs / "checkpoint-6", mine / "checkpoint-57")
    with pytest.raises(UserError, match=r"checkpoint-57 is of another run, with seed=0, not 1: give a new folder"):
        run(tiny(data, seed=1), mine, resume=True)
    (mine / "checkpoint-57" / "run.json").unlink()
    with pytest.raises(UserError, match=r"checkpoint-57 does not say of which run it is"):
        run(tiny(data, seed=1), mine, resume=True)
    shutil.rmtree(mine / "checkpoint-57")
    # What decides no number may be another.
    assert run(tiny(data, seed=1, save_steps=2), mine, resume=True).is_dir()


@pytest.mark.parametrize("name", ["checkpoint-57", "model", "metrics.jsonl", "statistics.jsonl"])
def test_a_folder_of_a_run_without_its_recipe_is_refused(name, data, tmp_path):
    (tmp_path / name).mkdir()
    for resume in (False, True, None):
        with pytest.raises(UserError, match=rf"holds {name}, but no recipe\.json that says of which run"):
            run(tiny(data), tmp_path, resume=resume)


def test_what_a_folder_holds_counts_once_it_is_locked(data, tmp_path, monkeypatch):
    """Here another process trains there, to the end, while this one loads its data and its teacher."""
    chosen, lock = tiny(data, save_steps=2), run_module.alone_in_run

    @contextmanager
    def late(folder):
        monkeypatch.setattr(run_module, "alone_in_run", lock)
        run(chosen, folder.path)
        finished.append({path.name: path.stat().st_mtime_ns for path in folder.path.iterdir() if path.is_file()})
        with lock(folder):
            yield

    for resume in (True, None):
        finished, output = [], tmp_path / str(resume)
        monkeypatch.setattr(run_module, "alone_in_run", late)
        assert run(chosen, output, resume=resume) == output / "model"
        assert finished == [{path.name: path.stat().st_mtime_ns for path in output.iterdir() if path.is_file()}]
    monkeypatch.setattr(run_module, "alone_in_run", late)
    with pytest.raises(UserError, match="holds a run: give --resume"):
        run(chosen, tmp_path / "new")


def test_a_run_killed_before_its_first_checkpoint_leaves_no_line_behind(data, tmp_path, monkeypatch):
    chosen, log = tiny(data, statistics_steps=1), DistillTrainer.log

    def killed(self, logs, *others):
        log(self, logs, *others)
        if self.state.global_step == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(DistillTrainer, "log", killed)
    with pytest.raises(KeyboardInterrupt):
        run(chosen, tmp_path)
    monkeypatch.setattr(DistillTrainer, "log", log)
    run(chosen, tmp_path, resume=True)
    lines = (tmp_path / "statistics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(7))
    assert [row["step"] for row in metrics(tmp_path)] == list(range(1, 7))


@pytest.mark.parametrize(
    ("tensor", "renamed"),
    [("alpha.alpha_ma", False), ("alpha.w_a", True), ("model.layers.1.", False), ("model.norm.weight", False)],
)
def test_a_checkpoint_must_hold_every_tensor(tensor, renamed, finished, tmp_path):
    """Trainer begins anew what is missing, and says so in a log alone."""
    chosen, output = finished(tmp_path)
    file = output / "checkpoint-6" / "model.safetensors"
    tensors = load_file(file)
    gone = [name for name in tensors if tensor in name]
    for name in gone:
        value = tensors.pop(name)
        if renamed:
            tensors[f"{name}_old"] = value
    save_file(tensors, file)
    more = f" and {len(gone) - 1} more" if gone[1:] else ""
    with pytest.raises(UserError, match=rf"checkpoint-6 could not be loaded \(it misses {min(gone)}{more}\)"):
        run(chosen, output, resume=True)


def test_a_checkpoint_must_hold_no_other_tensor(finished, tmp_path):
    chosen, output = finished(tmp_path)
    file = output / "checkpoint-6" / "model.safetensors"
    save_file(load_file(file) | {"model.layers.0.self_attn.sinks": torch.zeros(4)}, file)
    with pytest.raises(UserError, match=r"could not be loaded \(it has an unknown model.layers.0.self_attn.sinks\)"):
        run(chosen, output, resume=True)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_average_that_is_not_finite_is_refused(value, finished, tmp_path):
    chosen, output = finished(tmp_path)
    for file in (output / "checkpoint-6" / "model.safetensors", output / "kept" / "model.safetensors"):
        tensors = load_file(file)
        name = next(name for name in tensors if name.endswith("layers.1.self_attn.alpha.alpha_ma"))
        tensors[name][1] = value
        save_file(tensors, file, {"format": "pt"})
    with pytest.raises(UserError, match=rf"checkpoint-6 could not be loaded \({name} is {value}\)"):
        run(chosen, output, resume=True)
    (output / "kept").rename(output / "model")
    with pytest.raises(UserError, match=rf"model: {name} is {value}, so the checkpoint is damaged"):
        AutoModelForCausalLM.from_pretrained(output / "model")
    answer = CliRunner().invoke(app, ["generate", str(output / "model"), "text"])
    assert (answer.exit_code, len(answer.output.splitlines())) == (2, 1)


def test_an_average_that_is_not_finite_ends_a_run_before_it_is_saved(data, tmp_path):
    stopped = trainer(tiny(data, save_steps=1), tmp_path)
    stopped.create_optimizer()

    def spoil(*_):
        if stopped.state.global_step == 1:
            alpha_gates(stopped.model)[1].alpha_ma[0] = math.nan

    stopped.optimizer.register_step_post_hook(spoil)
    told = r"layers.1.self_attn.alpha.alpha_ma is nan at step 2; the last good checkpoint is .*checkpoint-1$"
    with pytest.raises(FloatingPointError, match=told):
        stopped.train()
    assert not (tmp_path / "checkpoint-2").exists()


@pytest.mark.parametrize("content", [b"", b"rubbish", b"{}", None])
def test_damaged_random_numbers_are_not_gone_on_from(content, finished, tmp_path):
    chosen, output = finished(tmp_path)
    shutil.rmtree(output / "checkpoint-6")
    file = output / "checkpoint-4" / "rng_state.pth"
    torch.save({}, file) if content is None else file.write_bytes(content)
    damaged = r"checkpoint-4 could not be loaded \(.+\): if it is damaged, remove it"
    with pytest.raises(UserError, match=damaged) as told:
        run(chosen, output, resume=True)
    assert "last good checkpoint" not in str(told.value)


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("trainer_state.json", content) for content in ("{}", "[]", DEEP, '{"global_step": 4}')),
        *((name, content) for name in ("run.json", "recipe.json") for content in ("{}", DEEP)),
    ],
)
def test_json_of_another_shape_is_not_gone_on_from(name, content, finished, tmp_path):
    chosen, output = finished(tmp_path)
    place = output if name == "recipe.json" else output / "checkpoint-6"
    (place / name).write_text(content)
    with pytest.raises(UserError, match=r"could not be loaded|is damaged"):
        run(chosen, output, resume=True)


def test_a_disk_that_is_full_of_lines_ends_a_run_with_its_last_checkpoint_named(data, tmp_path, monkeypatch):
    append = JsonLines.append

    def full(self, row):
        if row["step"] == 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        append(self, row)

    monkeypatch.setattr(JsonLines, "append", full)
    with pytest.raises(UserError, match=r"No space left on device; the last good checkpoint is .*checkpoint-2$"):
        run(tiny(data, save_steps=2), tmp_path)
