"""What a run writes down about itself: metrics, statistics, validation and the result."""

import dataclasses
import importlib.util
import json
import math
import re
import shutil
import statistics
import subprocess

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from affine_attn.cli import app
from affine_attn.data import shards
from affine_attn.distill import estimate, validation
from affine_attn.distill.data import held_out
from affine_attn.distill.metrics import Metrics
from affine_attn.distill.recipes import LEARNING_RATES, recipe
from affine_attn.distill.run import run, take_up, training_arguments
from affine_attn.distill.sweep import grid, outcome, stopped, table
from affine_attn.models import AffineAttnForCausalLM, preset
from affine_attn.models.collect import collect_statistics
from affine_attn.nn.alpha import alpha_gates
from affine_attn.runs.files import JsonLines
from affine_attn.runs.layout import RunFolder
from affine_attn.runs.provenance import commit, environment
from affine_attn.runs.series import gradient_statistics
from tests.distill.test_run import teacher_of
from tests.support.tiny_runs import VOCAB, counting_shards, metrics, tiny, trainer


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return counting_shards(tmp_path_factory.mktemp("shards"))


def statistics_of(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "statistics.jsonl").read_text().splitlines()]


def exact(folder) -> list[dict]:
    """What must not depend on the clock or on who looks."""
    clock = ("tokens_per_second", "max_rss_bytes")
    return [{name: value for name, value in row.items() if name not in clock} for row in metrics(folder)]


# Metrics


@pytest.mark.parametrize("most", [0.0, 1e-3])
def test_the_gradient_norm_is_that_of_the_whole_gradient(data, tmp_path, most):
    """Clipped or not, from its definition at the weights that the run starts from, and at every step."""
    measured = trainer(tiny(data, max_grad_norm=most), tmp_path)
    norms = []

    def before_clipping(*_, **__):
        squares = [parameter.grad.double().pow(2).sum() for parameter in measured.model.parameters()]
        norms.append(torch.stack(squares).sum().sqrt().item())

    clip = measured.accelerator.clip_grad_norm_
    measured.accelerator.clip_grad_norm_ = lambda *args: (before_clipping(), clip(*args))[1]
    measured.train()
    assert [row["grad_norm"] for row in metrics(tmp_path)] == pytest.approx(norms, rel=1e-5)
    assert len(norms) == 6
    assert min(norms) > 1e-2


def test_speed_and_memory_of_a_cpu_are_measured_and_its_peak_is_not_invented(data, tmp_path):
    run(tiny(data), tmp_path)
    for row in metrics(tmp_path):
        assert row["tokens_per_second"] > 0
        assert 2**26 < row["max_rss_bytes"] < 2**40
        assert not {"mfu", "peak_memory_bytes"} & set(row)


def test_mfu_is_flops_over_the_peak_of_all_devices(data, tmp_path, monkeypatch):
    """On a device that is only named, with a clock that is only told."""
    chosen, teacher = tiny(data, dtype="bfloat16"), teacher_of(data)
    student = estimate.size(chosen.student_config)
    taught = trainer(chosen, tmp_path, teacher)
    flops = student.training_flops(16) + estimate.size(teacher.config).forward_flops(16)
    assert taught.metrics.flops_per_token == flops
    now = iter([10.0, 12.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "NVIDIA H200")
    monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda _: 1234)

    class Arguments:
        device, bf16, world_size = torch.device("cuda:0"), True, 4

    of_four = Metrics(RunFolder(tmp_path), Arguments, step_tokens=10**9, flops_per_token=10**6)
    of_four.seconds = next(now)
    row = of_four.measured(1)
    assert row["mfu"] == pytest.approx(0.5e9 * 1e6 / (4 * 989e12), abs=1e-4)
    assert row["peak_memory_bytes"] == 1234
    Arguments.bf16 = False
    assert Metrics(RunFolder(tmp_path), Arguments, 1, 1).peak is None
    Arguments.bf16 = True
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "NVIDIA Something")
    assert Metrics(RunFolder(tmp_path), Arguments, 1, 1).peak is None


def test_a_pause_is_no_training_time(data, tmp_path, monkeypatch):
    paused = trainer(tiny(data), tmp_path).metrics
    now = iter([1.0, 101.0, 102.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    with paused.paused():
        pass
    assert paused.measured(1)["tokens_per_second"] == paused.step_tokens / 2


def test_lines_after_the_checkpoint_and_a_line_that_was_cut_go(tmp_path):
    file = JsonLines(tmp_path / "new" / "lines.jsonl")
    file.cut(0)
    for step in range(4):
        file.append({"step": step, "values": [step, None]})
    with file.path.open("a") as end:
        end.write('{"step": 4, "val')
    file.cut(2)
    assert file.rows() == [{"step": step, "values": [step, None]} for step in range(3)]
    assert [path.name for path in file.path.parent.iterdir()] == ["lines.jsonl"]
    # A crash of the machine may leave zeros, or whatever was on the disk, where a line was.
    for broken in (b"\0\0\0\n", b'{"step": \xff\n', b'{"st\n', b"3\n"):
        file.cut(2)
        with file.path.open("ab") as end:
            end.write(broken)
        with pytest.raises(ValueError, match=r"lines.jsonl, line 4, is damaged: remove it"):
            file.rows()
        file.path.unlink()
        for step in range(3):
            file.append({"step": step})


# Statistics


@pytest.mark.parametrize("changes", [{}, {"dtype": "bfloat16", "gradient_checkpointing": True, "micro_batch": 2}])
def test_statistics_leave_no_trace_in_training(data, tmp_path, changes):
    seen, unseen = tmp_path / "seen", tmp_path / "unseen"
    run(tiny(data, statistics_steps=2, teacher="nano", **changes), seen)
    run(tiny(data, statistics_steps=0, teacher="nano", **changes), unseen)
    assert exact(seen) == exact(unseen)
    a, b = (AutoModelForCausalLM.from_pretrained(folder / "model").state_dict() for folder in (seen, unseen))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert [row["step"] for row in statistics_of(seen)] == [0, 2, 4, 6]
    assert not (unseen / "statistics.jsonl").exists()


def test_statistics_are_those_of_the_weights_of_their_step(data, tmp_path):
    chosen = tiny(data, statistics_steps=3)
    run(chosen, tmp_path)
    first, _, last = statistics_of(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    valid = shards.TokenShards(data, 16, "valid")
    batches = [{name: valid[i][name][None] for name in ("input_ids", "position_ids")} for i in range(4)]
    expected = collect_statistics(model, batches)
    for name in set(last) - {"step"}:
        values = torch.stack([getattr(layer, name) for layer in expected])
        torch.testing.assert_close(torch.tensor(last[name]), values, rtol=1e-5, atol=1e-6)
    assert torch.tensor(last["alpha_ma"]).equal(torch.stack([gate.alpha_ma for gate in alpha_gates(model)]))
    assert not torch.tensor(first["alpha_ma"]).any()
    assert set(last) == {
        "step", "entropy", "first_token", "row_sum", "sink_mass", "mean_logit", "max_logit",
        "alpha", "alpha_saturated", "alpha_ma",
    }  # fmt: skip


def test_a_resumed_run_writes_the_same_statistics_once(data, tmp_path):
    chosen = tiny(data, attention="sink", statistics_steps=1, save_steps=4, keep_checkpoints=9)
    run(chosen, tmp_path)
    whole = statistics_of(tmp_path)
    assert "alpha" not in whole[0]
    for late in ("checkpoint-6", "model"):
        shutil.rmtree(tmp_path / late)
    run(chosen, tmp_path, resume=True)
    assert statistics_of(tmp_path) == whole
    assert [row["step"] for row in whole] == list(range(7))


# Validation and the result


def test_validation_is_the_loss_on_the_held_out_text(data, tmp_path):
    """With a teacher and batches that do not divide the sequences, against the definition on the finished model."""
    chosen = tiny(data, teacher="nano", hard=0.25, valid_sequences=7, valid_steps=4, micro_batch=2)
    run(chosen, tmp_path)
    rows = metrics(tmp_path)
    assert [row["step"] for row in rows if "valid_loss" in row] == [4, 6]
    last, student = rows[-1], AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    torch.manual_seed(chosen.seed)
    teacher = AffineAttnForCausalLM(preset("nano", "softmax", vocab_size=VOCAB)).eval()
    valid = shards.TokenShards(data, 16, "valid")
    batch = {name: torch.stack([valid[i][name] for i in range(7)]) for name in valid[0]}
    context = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"]}
    p, q = (model(**context).logits.log_softmax(-1) for model in (student.eval(), teacher))
    counts = batch["shift_labels"] != -100
    hard = torch.nn.functional.nll_loss(p[counts], batch["shift_labels"][counts]).item()
    kd = -(q.exp() * p).sum(-1)[counts].mean().item()
    assert last["valid_hard"] == pytest.approx(hard, rel=1e-5)
    assert last["valid_kd"] == pytest.approx(kd, rel=1e-5)
    assert last["valid_loss"] == pytest.approx(0.75 * kd + 0.25 * hard, rel=1e-5)
    assert last["valid_perplexity"] == pytest.approx(math.exp(hard), rel=1e-5)
    assert last["valid_tokens"] == counts.sum()

    unseen = tmp_path / "unseen"
    run(dataclasses.replace(chosen, valid_sequences=0), unseen)
    assert [row["loss"] for row in metrics(unseen)] == [row["loss"] for row in rows]
    assert "valid_loss" not in metrics(unseen)[-1]


def test_ranks_take_the_same_number_of_turns_and_an_empty_one_does_not_count(data, tmp_path, monkeypatch):
    for sequences, batch, world in ((7, 2, 2), (5, 4, 2), (1, 2, 3)):
        turns = [validation._turns(sequences, batch, rank, world) for rank in range(world)]
        assert len({len(mine) for mine in turns}) == 1
        assert sorted(i for mine in turns for turn in mine for i in turn) == list(range(sequences))
    chosen = tiny(data, valid_sequences=5)
    one = trainer(chosen, tmp_path)
    expected = validation.validate(one, held_out(chosen))
    monkeypatch.setattr(validation, "_turns", lambda *_: [range(4), range(4, 5), range(5, 5)])
    assert validation.validate(one, held_out(chosen)) == expected


def test_gradient_statistics_of_a_series_with_known_answers():
    # Median 10 and MAD 1, so spikes lie above 16 and above 19, not at them.
    series = [9.0] * 103 + [10.0] + [11.0] * 100 + [16.0, 16.5, 19.5]
    found = gradient_statistics(series)
    mean, variance = 2089 / 207, statistics.pvariance(series)
    expected = {"steps": 207, "mean": mean, "std": variance**0.5, "variance": variance, "cv": variance**0.5 / mean}
    assert found == pytest.approx(expected | {"spikes_6": 2, "spikes_9": 1})
    # Only the first 500 steps count.
    steady = {"steps": 500, "mean": 1, "std": 0, "variance": 0, "cv": 0, "spikes_6": 0, "spikes_9": 0}
    assert gradient_statistics([1.0] * 500 + [100.0] * 400) == steady


def test_the_result_is_that_of_the_metrics(data, tmp_path):
    run(tiny(data, valid_sequences=5), tmp_path)
    rows, found = metrics(tmp_path), json.loads((tmp_path / "result.json").read_text())
    last = {name: value for name, value in rows[-1].items() if name != "tokens_per_second"}
    assert last.items() <= found.items()
    assert found["valid_perplexity"] > 1
    assert found["tokens_per_second"] == statistics.median(row["tokens_per_second"] for row in rows)
    assert found["gradients"] == gradient_statistics([row["grad_norm"] for row in rows])


# Where and by what


def test_the_environment_names_code_seeds_and_device(data, tmp_path):
    found = environment(training_arguments(tiny(data, seed=3), tmp_path))
    assert (found["seed"], found["data_seed"], found["processes"]) == (3, 3, 1)
    assert found["torch"] == torch.__version__
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?", found["commit"]) or "affine_attn" in found


def test_a_commit_is_that_of_the_folder_itself(tmp_path):
    def git(*arguments):
        name = ["-c", "user.name=n", "-c", "user.email=e"]
        return subprocess.run(["git", "-C", tmp_path, *name, *arguments], check=True, capture_output=True, text=True)

    git("init")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-m", "first")
    head = git("rev-parse", "HEAD").stdout.strip()
    assert commit(tmp_path) == head
    (tmp_path / "file").write_text("2")
    assert commit(tmp_path) == f"{head}-dirty"
    (tmp_path / "inside").mkdir()
    assert commit(tmp_path / "inside") is None


def test_a_reporter_that_is_not_installed_is_one_sentence(data, tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *more: None if name == "trackio" else find(name, *more)
    )
    with pytest.raises(ValueError, match=r"^report_to=trackio needs that package: pip install trackio$"):
        run(tiny(data, report_to="trackio"), tmp_path)
    with pytest.raises(ValueError, match="report_to must be one of none, tensorboard, wandb, trackio, got carrier"):
        tiny(data, report_to="carrier")


# Sweeps


def test_a_sweep_is_a_run_for_each_value_and_a_table(data, tmp_path):
    chosen = tiny(data, valid_sequences=2)
    fields = [f"{name}={value}" for name, value in dataclasses.asdict(chosen).items()]
    arguments = ["distill", "demo", *fields, "--output", str(tmp_path), "--sweep", "learning_rate=1e-2,1e-3"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines()]
    for rate in ("1e-2", "1e-3"):
        folder = tmp_path / f"learning_rate={rate}"
        found = json.loads((folder / "result.json").read_text())
        (cells,) = (row for row in rows if row[:1] == [rate])
        # No kd where there is no teacher.
        assert float(cells[1]) == pytest.approx(found["hard"], abs=1e-3)
        assert float(cells[2]) == pytest.approx(found["valid_perplexity"], abs=0.1)
        assert float(cells[3]) == pytest.approx(found["gradients"]["mean"], abs=1e-3)
        assert json.loads((folder / "recipe.json").read_text())["learning_rate"] == float(rate)
    assert ["learning_rate", "CE", "ppl"] in [row[:3] for row in rows]
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("model.safetensors")}
    again = CliRunner().invoke(app, arguments)
    assert again.stdout == result.stdout
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("model.safetensors")} == before


def test_a_run_that_diverges_does_not_end_a_sweep(data, tmp_path, monkeypatch):
    def diverging(chosen, output):
        if chosen.learning_rate > 1:
            raise FloatingPointError("loss is nan at step 3; there is no checkpoint yet")
        return take_up(chosen, output)

    monkeypatch.setattr("affine_attn.distill.sweep.take_up", diverging)
    recipes = grid(tiny(data), "learning_rate=9,1e-3", tmp_path)
    first, second = (outcome(label, chosen, tmp_path) for label, chosen in recipes.items())
    assert first == {"run": "learning_rate=9", "stopped": "loss is nan at step 3; there is no checkpoint yet"}
    assert second["loss"] > 0
    assert table([first, second]).row_count == 2
    assert list(stopped([first, second])) == ["learning_rate=9: loss is nan at step 3; there is no checkpoint yet"]
    with pytest.raises(FloatingPointError):
        # Without a teacher there is nothing to compare.
        outcome("teacher", recipes["learning_rate=9"], tmp_path)


def test_the_students_of_a_sweep_have_one_teacher(data, tmp_path):
    """Trained by the recipe as it is without the sweep; where values ask for different ones, each has its own."""
    chosen = tiny(data, teacher="train", learning_rate=1e-2)
    teacher, *students = grid(chosen, "learning_rate=1e-3,1e-2", tmp_path).values()
    assert teacher == chosen.teacher_recipe
    assert [student.learning_rate for student in students] == [1e-3, 1e-2]
    assert {student.teacher for student in students} == {str(tmp_path / "teacher" / "model")}
    for sweep in (
        "teacher=train:nano,train:micro",
        "teacher=train,none",
        "sequence_length=16,32",
        "student=nano,micro",
    ):
        field, _, values = sweep.partition("=")
        expected = [chosen.override([f"{field}={value}"]) for value in values.split(",")]
        assert [*grid(chosen, sweep, tmp_path).values()] == expected
    assert "teacher" in grid(tiny(data, teacher="train:nano"), "student=nano,micro", tmp_path)


def test_the_papers_grid_and_mistakes_in_one(tmp_path):
    assert [chosen.learning_rate for chosen in grid(recipe("paper-1b"), "learning_rate", tmp_path).values()] == [
        *LEARNING_RATES
    ]
    assert (LEARNING_RATES[0], LEARNING_RATES[-1]) == (5e-4, 5e-3)
    for sweep, message in (
        ("seed", "--sweep must be field=value"),
        ("sede=1,2", "did you mean seed"),
        ("seed=1,1", "are the same"),
    ):
        with pytest.raises(ValueError, match=message):
            grid(recipe("demo"), sweep, tmp_path)


def test_the_folders_of_a_sweep_lie_beside_each_other(tmp_path):
    places = ("data/a", "../data/b")
    runs = grid(recipe("small"), f"data={','.join(places)}", tmp_path)
    assert {label: chosen.data for label, chosen in runs.items()} == {
        "data=data--a": places[0],
        "data=..--data--b": places[1],
    }


def test_a_dry_run_of_a_sweep_has_every_run():
    result = CliRunner().invoke(app, ["distill", "demo", "--dry-run", "--sweep", "attention=softmax,affine"])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    heads = [lines.index(f"{label}:") for label in ("teacher", "attention=softmax", "attention=affine")]
    assert heads == sorted(heads)
    # The teacher is trained once: each student only asks it.
    teacher, softmax, affine = (float(line.split()[1].rstrip(",")) for line in lines if line.startswith("FLOPs"))
    assert softmax <= affine < 1.1 * softmax < teacher + softmax
    assert next(line for line in lines if line.startswith("teacher ")) == "teacher     none: plain pretraining"
