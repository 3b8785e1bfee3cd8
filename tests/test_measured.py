"""What a run writes down about itself: metrics, statistics, validation and the result."""

import json
import shutil

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from affine_attn.core.alpha import alpha_gates
from affine_attn.distill import estimate, shards
from affine_attn.distill.metrics import JsonLines, Metrics
from affine_attn.distill.run import run
from affine_attn.models.statistics import collect_statistics
from tests.test_distill import VOCAB, metrics, teacher_of, tiny, trainer


def documents(folder, split: str, number: int, seed: int) -> list[dict]:
    """Counting tokens, as in the tests of training."""
    writer, rng = shards.ShardWriter(folder, f"{split}-00000", np.dtype("<u2")), np.random.default_rng(seed)
    for _ in range(number):
        start, length = rng.integers(1, VOCAB), rng.integers(5, 40)
        writer.append(np.append((start + np.arange(length)) % (VOCAB - 1) + 1, 0))
    return writer.commit()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    parts = {"train": documents(folder, "train", 120, 0), "valid": documents(folder, "valid", 12, 1)}
    manifest = {"version": shards.VERSION, "vocab_size": VOCAB, "dtype": "uint16", "shards": parts}
    shards.write_json(folder / shards.MANIFEST, manifest)
    return folder


def statistics(folder) -> list[dict]:
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

    of_four = Metrics(tmp_path, Arguments, step_tokens=10**9, flops_per_token=10**6)
    of_four.seconds = next(now)
    row = of_four.measured(1)
    assert row["mfu"] == pytest.approx(0.5e9 * 1e6 / (4 * 989e12), abs=1e-4)
    assert row["peak_memory_bytes"] == 1234
    Arguments.bf16 = False
    assert Metrics(tmp_path, Arguments, 1, 1).peak is None
    Arguments.bf16 = True
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "NVIDIA Something")
    assert Metrics(tmp_path, Arguments, 1, 1).peak is None


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


# Statistics


@pytest.mark.parametrize("changes", [{}, {"dtype": "bfloat16", "gradient_checkpointing": True, "micro_batch": 2}])
def test_statistics_leave_no_trace_in_training(data, tmp_path, changes):
    seen, unseen = tmp_path / "seen", tmp_path / "unseen"
    run(tiny(data, statistics_steps=2, teacher="nano", **changes), seen)
    run(tiny(data, statistics_steps=0, teacher="nano", **changes), unseen)
    assert exact(seen) == exact(unseen)
    a, b = (AutoModelForCausalLM.from_pretrained(folder / "model").state_dict() for folder in (seen, unseen))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert [row["step"] for row in statistics(seen)] == [0, 2, 4, 6]
    assert not (unseen / "statistics.jsonl").exists()


def test_statistics_are_those_of_the_weights_of_their_step(data, tmp_path):
    chosen = tiny(data, statistics_steps=3)
    run(chosen, tmp_path)
    first, _, last = statistics(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    train = shards.TokenShards(data, 16)
    batches = [{name: train[i][name][None] for name in ("input_ids", "position_ids")} for i in range(4)]
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
    whole = statistics(tmp_path)
    assert "alpha" not in whole[0]
    for late in ("checkpoint-6", "model"):
        shutil.rmtree(tmp_path / late)
    run(chosen, tmp_path, resume=True)
    assert statistics(tmp_path) == whole
    assert [row["step"] for row in whole] == list(range(7))
