"""A cached teacher: the same targets as the live one cut to as many entries, whatever stops and restarts on the way."""

import dataclasses
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM
from typer.testing import CliRunner

from affine_attn.cli import app
from affine_attn.data.sampler import GlobalSampler
from affine_attn.data.shards import TokenShards
from affine_attn.distill import cache
from affine_attn.distill.cache import CachedShards, CachePlan, cache_teacher, cached_target
from affine_attn.distill.losses import Teacher
from affine_attn.distill.run import run
from affine_attn.distill.teacher import ask, fingerprint, frozen, largest
from affine_attn.runs.files import write_json
from affine_attn.runs.locks import claimed
from tests.distill.test_run import teacher_of
from tests.support.tiny_runs import VOCAB, counting_shards, metrics, tiny

LENGTH, K = 128, 5


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return counting_shards(tmp_path_factory.mktemp("shards"))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory, data) -> Path:
    model = teacher_of(data)
    with torch.no_grad():
        # So sharp that what is cut off matters, and which entries are the largest is beyond doubt.
        model.lm_head.weight.mul_(40)
    folder = tmp_path_factory.mktemp("teacher")
    model.save_pretrained(folder)
    return folder


def plan(data: Path, out: Path, **changes) -> CachePlan:
    fields = {"sequence_length": LENGTH, "k": K, "vocabulary": VOCAB, "dtype": "float32", "shard_tokens": 4 * LENGTH}
    return CachePlan(data, out, **(fields | changes))


@pytest.fixture(scope="module")
def cached(tmp_path_factory, data, teacher) -> Path:
    out = tmp_path_factory.mktemp("cache") / "out"
    cache_teacher(plan(data, out), str(teacher), batch=3)
    return out


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# The targets


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_largest_are_those_of_the_whole_logits(dtype):
    hidden, head = torch.randn(2, 37, 8, dtype=dtype), torch.randn(50, 8, dtype=dtype)
    # Chunks that do not divide the tokens.
    found = largest(Teacher(hidden, head), K, shared=41, chunk_bytes=10 * 41 * (dtype.itemsize + 4))
    logits = hidden @ head[:41].T
    assert found.logits.equal(logits.topk(K).values)
    assert found.logits.equal(logits.gather(-1, found.ids.long()))
    torch.testing.assert_close(found.log_sum_exp, logits.float().logsumexp(-1))
    torch.testing.assert_close(found.target.log_probs, logits.float().log_softmax(-1).topk(K).values)
    assert (found.mass < 1).all()
    with pytest.raises(ValueError, match="top_k must be between 1 and the teacher's 50 vocabulary entries, got 51"):
        largest(Teacher(hidden, head), 51)


@pytest.mark.parametrize("documents", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_items_have_the_targets_of_the_live_teacher(tmp_path, data, teacher, dtype, documents):
    """In the order of two shuffled epochs; the same batches as when it was written, so bit for bit."""
    made = plan(data, tmp_path / "out", dtype=dtype, documents=documents)
    cache_teacher(made, str(teacher), batch=1)
    items = CachedShards(data, LENGTH, documents=documents, cache=tmp_path / "out", vocabulary=VOCAB)
    network = LlamaForCausalLM.from_pretrained(teacher, dtype=getattr(torch, dtype))
    network = frozen(network, torch.device("cpu"))
    assert len(items) > made.shard_tokens // LENGTH, "the sequences must be in several files"
    assert all(items[-1][name].equal(values) for name, values in items[len(items) - 1].items())
    seen = set()
    for i in GlobalSampler(len(items), samples=2 * len(items), seed=3):
        item = items[i]
        context = {name: item[name][None] for name in ("input_ids", "position_ids") if name in item}
        expected, target = largest(ask(network, context), K), cached_target(item)
        assert item["teacher_logits"].equal(expected.logits[0])
        assert target.ids.equal(expected.target.ids[0])
        assert target.log_probs.equal(expected.target.log_probs[0])
        seen.add(int(i))
    assert seen == set(range(len(items)))
    assert ("position_ids" in items[0]) == documents


def test_entries_that_do_not_count_are_left_out(tmp_path, data, teacher):
    """A head with more entries than the tokenizer, as padded ones have, whatever they hold."""
    padded = LlamaForCausalLM.from_pretrained(teacher)
    padded.resize_token_embeddings(VOCAB + 8)
    with torch.no_grad():
        padded.lm_head.weight[VOCAB:] = 10 * padded.lm_head.weight[:8]
    padded.save_pretrained(tmp_path / "padded")
    # A batch as large as that of the other cache: the same products.
    cache_teacher(plan(data, tmp_path / "out", shard_tokens=1 << 22), str(tmp_path / "padded"), batch=3)
    item = CachedShards(data, LENGTH, cache=tmp_path / "out", vocabulary=VOCAB)[0]
    assert item["teacher_ids"].max() < VOCAB
    assert (cached_target(item).log_probs.exp().sum(-1) > 0.2).all()


def test_a_large_vocabulary_takes_four_bytes():
    assert cache.record_dtype(64, 128256, "bfloat16").itemsize == 64 * (4 + 2) + 4
    assert cache.record_dtype(64, 65536, "float32").itemsize == 64 * (2 + 4) + 4


# Training


def test_training_from_the_cache_is_training_with_the_teacher_cut_to_as_many(tmp_path, data, teacher, cached):
    """Over more than two epochs of packed documents; and resumed. To the rounding of other batches of the teacher."""
    common = {"sequence_length": LENGTH, "steps": 12, "loss": "forward_kl", "hard": 0.25, "temperature": 1.5}
    live = tiny(data, teacher=str(teacher), top_k=K, **common)
    stored = tiny(data, teacher=f"cache:{cached}", save_steps=5, keep_checkpoints=9, **common)
    assert live.steps * live.global_batch > 2 * len(TokenShards(data, LENGTH))
    run(live, tmp_path / "live")
    run(stored, tmp_path / "stored")
    names = ("loss", "kd", "hard", "entropy", "grad_norm")
    expected, actual = metrics(tmp_path / "live"), metrics(tmp_path / "stored")
    assert len(actual) == 12
    for a, b in zip(expected, actual, strict=True):
        assert [a[name] for name in names] == pytest.approx([b[name] for name in names], rel=2e-5)
    # Cut, it is another teacher than the whole one.
    run(dataclasses.replace(live, top_k=None, steps=4), tmp_path / "whole")
    assert abs(metrics(tmp_path / "whole")[0]["kd"] - expected[0]["kd"]) > 1e-3 * expected[0]["kd"]

    for late in ("checkpoint-10", "checkpoint-12", "model"):
        shutil.rmtree(tmp_path / "stored" / late)
    run(stored, tmp_path / "stored", resume=True)
    again = metrics(tmp_path / "stored")
    assert [[row[name] for name in names] for row in again] == [[row[name] for name in names] for row in actual]


def test_the_data_is_looked_at_before_the_teacher_and_both_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    nowhere = CliRunner().invoke(app, ["cache-teacher", str(tmp_path / "typo"), "typo"])
    assert nowhere.exit_code == 2
    assert nowhere.output == f"there is no file or folder {tmp_path / 'typo'}\n"
    untaught = CliRunner().invoke(app, ["cache-teacher", str(counting_shards(tmp_path)), "./typo"])
    assert (untaught.exit_code, untaught.output) == (2, "there is no folder ./typo\n")


def test_the_cache_beside_the_data_is_the_default(tmp_path, teacher):
    data = counting_shards(tmp_path)
    arguments = ["cache-teacher", str(data), str(teacher), "--sequence-length", str(LENGTH), "--top-k", str(K)]
    planned = CliRunner().invoke(app, [*arguments, "--dry-run"])
    assert planned.exit_code == 0, planned.output
    # 2 bytes for an entry below 65536 and for its logit.
    tokens = sum(len(TokenShards(data, LENGTH, split)) for split in ("train", "valid")) * LENGTH
    assert (
        f"24 bytes per token (5 x (2-byte entry + bfloat16 logit of 2 bytes) + 4) x {tokens:,} tokens" in planned.output
    )
    assert not (data / "teacher-cache").exists()
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "the largest 5 of 64 entries hold" in result.output
    assert sum(path.stat().st_size for path in (data / "teacher-cache").glob("*.top")) == 24 * tokens
    manifest = json.loads((data / "teacher-cache" / "manifest.json").read_text())
    own = LlamaForCausalLM.from_pretrained(teacher, dtype=torch.bfloat16)
    assert manifest["settings"]["teacher_sha256"] == fingerprint(own)
    assert (manifest["settings"]["dtype"], manifest["settings"]["top_k"]) == ("bfloat16", K)
    chosen = tiny(data, teacher="cache", sequence_length=LENGTH)
    run(chosen, tmp_path / "run")
    assert all("kd" in row for row in metrics(tmp_path / "run"))
    fields = [f"{name}={value}" for name, value in dataclasses.asdict(chosen).items()]
    dry = CliRunner().invoke(app, ["distill", "demo", *fields, "--dry-run"])
    assert "none in memory: its targets are read from" in dry.output


# The layout that accelerate gives to a student under FSDP2, on one process.
SHARDED = """
import sys
from types import MethodType
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from affine_attn.distill import losses, trainer
from affine_attn.models import AffineAttnForCausalLM, preset

torch.manual_seed(0)
student = AffineAttnForCausalLM(preset("nano", "affine", tie_word_embeddings=sys.argv[1] == "tied")).train()
student.forward = MethodType(trainer._loss_forward, student)
student.gradient_checkpointing_enable({"use_reentrant": False})
ids = torch.randint(0, 256, (2, 16))
target = losses.TopK(torch.arange(4).repeat(2, 16, 1), torch.randn(2, 16, 4))
given = dict(input_ids=ids, labels=ids, target=target, spec=losses.LossSpec(), shared=None, tokens=None)
expected = student(**given).loss
expected.backward()
gradients = {name: p.grad for name, p in student.named_parameters()}
student.zero_grad()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
options = {"mesh": init_device_mesh("cpu", (1,)), "mp_policy": trainer.SHARDED_BF16}
for layer in student.model.layers:
    fully_shard(layer, **options)
tail = [student.model.norm, student.lm_head]
if sys.argv[1] == "tied":
    tail.insert(1, student.model.embed_tokens)
else:
    fully_shard(student.model.embed_tokens, **options)
fully_shard(tail, **options, reshard_after_forward=False)
fully_shard(student, **options)
seen, compute = [], trainer.chunked_loss
trainer.chunked_loss = lambda *arguments, **others: seen.append(arguments) or compute(*arguments, **others)
parts = student(**given)
parts.loss.backward()
(hidden, weight, taken, _), = seen
assert hidden.dtype == weight.dtype == torch.bfloat16
assert taken.log_probs.equal(target.log_probs), "the targets were rounded"
assert parts.loss.dtype == parts.kd.dtype == torch.float32, "the loss was rounded"
torch.testing.assert_close(parts.loss, expected, rtol=1e-2, atol=0)
for name, parameter in student.named_parameters():
    difference = parameter.grad.full_tensor() - gradients[name]
    assert difference.norm() <= 0.05 * gradients[name].norm() + 1e-6, name
dist.destroy_process_group()
"""


@pytest.mark.parametrize("head", ["tied", "own"])
def test_sharded_in_bf16_the_targets_and_the_loss_are_not_rounded(head):
    command = [sys.executable, "-c", SHARDED, head]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]


# Going on


def test_killed_and_run_again_ends_with_the_same_bytes(tmp_path, data, teacher, cached):
    out = tmp_path / "out"
    settings = ["--sequence-length", LENGTH, "--top-k", K, "--dtype", "float32", "--shard-tokens", 4 * LENGTH]
    command = ["cache-teacher", data, teacher, *settings, "--batch-size", 3, "--output", out]
    # Slow enough to be killed in the middle of a file.
    program = (
        "import sys, time; from affine_attn.distill import cache; from affine_attn.cli import app; ask = cache.ask\n"
        "def slow(*a):\n    time.sleep(0.1)\n    return ask(*a)\ncache.ask = slow; app(sys.argv[1:])"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-c", program, *map(str, command)], env=environment)
    while process.poll() is None and not (
        (out / "train-00001.top").exists() and (out / "train-00002.top.tmp").exists()
    ):
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "it had ended before"
    with pytest.raises(ValueError, match="is not complete: run affine-attn cache-teacher again, it will go on"):
        CachedShards(data, LENGTH, cache=out, vocabulary=VOCAB)
    with pytest.raises(ValueError, match=r"was begun with top_k 5, not 6; give the same, or a new folder"):
        cache_teacher(plan(data, out, k=6), str(teacher))
    before = (out / "train-00000.top").stat().st_mtime_ns
    manifest = cache_teacher(plan(data, out), str(teacher), batch=3)
    assert files(out) == files(cached)
    assert (out / "train-00000.top").stat().st_mtime_ns == before
    # A finished one is left alone.
    assert cache_teacher(plan(data, out), str(teacher)) == manifest
    assert (out / "train-00000.top").stat().st_mtime_ns == before


def test_processes_share_the_work(tmp_path, data, teacher, cached):
    """A file that another has is left to it; who ends last completes the cache."""
    out = tmp_path / "out"
    out.mkdir()
    with (out / "train-00001.top.tmp").open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        other.write(b"longer than the file" * 9999)
        assert cache_teacher(plan(data, out), str(teacher), batch=3) is None
        assert not (out / "train-00001.top").exists()
        assert (out / "train-00002.top").exists()
    cache_teacher(plan(data, out), str(teacher), batch=3)
    assert files(out) == files(cached)
    # Completed between the look and the lock: it must not be cut.
    with claimed(out / "train-00001.top") as file:
        assert file is None
    assert files(out) == files(cached)


# Mistakes


def test_a_cache_of_something_else_is_refused(tmp_path, data, teacher, cached):
    def message(of: Path = data, length: int = LENGTH, vocabulary: int = VOCAB, **options) -> str:
        with pytest.raises(ValueError) as error:  # noqa: PT011
            CachedShards(of, length, cache=cached, vocabulary=vocabulary, **options)
        assert "\n" not in str(error.value)
        return str(error.value)

    assert "was made with sequence_length=128, not 64" in message(length=64)
    assert "was made with documents=True, not False" in message(documents=False)
    assert "was made with top_k=5, not 7" in message(top_k=7)
    assert "was made with vocabulary=64, not 65" in message(vocabulary=65)
    (tmp_path / "other").mkdir()
    other = counting_shards(tmp_path / "other", seed=1)
    assert "was made for other tokens than those of" in message(other)
    # The same counts, other tokens.
    shutil.copytree(data, tmp_path / "same")
    tokens = np.fromfile(tmp_path / "same" / "train-00000.bin", "<u2")
    tokens[7] ^= 1
    tokens.tofile(tmp_path / "same" / "train-00000.bin")
    assert "was made for other tokens than those of" in message(tmp_path / "same")
    shutil.copytree(data, tmp_path / "tokenizer")
    manifest = json.loads((data / "manifest.json").read_text()) | {"tokenizer_sha256": "another"}
    write_json(tmp_path / "tokenizer" / "manifest.json", manifest)
    assert "was made for another tokenizer than that of" in message(tmp_path / "tokenizer")
    shutil.copytree(cached, tmp_path / "cut")
    (tmp_path / "cut" / "train-00001.top").write_bytes(b"short")
    with pytest.raises(ValueError, match=r"train-00001\.top has 5 bytes where the manifest says"):
        CachedShards(data, LENGTH, cache=tmp_path / "cut", vocabulary=VOCAB)
    with pytest.raises(ValueError, match=r"has no manifest\.json: make it with affine-attn cache-teacher"):
        CachedShards(data, LENGTH, cache=tmp_path, vocabulary=VOCAB)


def test_what_cannot_be_cached_is_refused_before_anything_is_written(tmp_path, data, teacher, monkeypatch):
    for changes, message in (
        ({"k": 65}, "top_k must be between 1 and the 64 vocabulary entries, got 65"),
        ({"vocabulary": 63}, "has tokens up to 63, the teacher 63 vocabulary entries that count"),
        ({"dtype": "float16"}, "dtype must be one of bfloat16, float32"),
    ):
        with pytest.raises(ValueError, match=message):
            plan(data, tmp_path / "out", **changes)
    with pytest.raises(ValueError, match="the teacher has 64 vocabulary entries, fewer than 70"):
        cache_teacher(plan(data, tmp_path / "out", vocabulary=70), str(teacher))
    assert not (tmp_path / "out").exists()
    full = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    with pytest.raises(ValueError, match=r"needs 0.0 GiB more, its disk has 0.0 GiB: lower --top-k or give --output"):
        cache_teacher(plan(data, tmp_path / "out"), str(teacher))
    monkeypatch.undo()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("do not touch")
    with pytest.raises(ValueError, match=r"is not empty \(thesis.txt\) and was not begun by this command"):
        cache_teacher(plan(data, tmp_path / "mine"), str(teacher))


def test_a_teacher_that_overflows_is_not_cached(tmp_path, data):
    broken = teacher_of(data)
    with torch.no_grad():
        broken.model.norm.weight[0] = torch.inf
        broken.lm_head.weight[:, 0] = 1
    broken.save_pretrained(tmp_path / "broken")
    with pytest.raises(FloatingPointError, match="the teacher's logits are not finite in sequences 0 to 2"):
        cache_teacher(plan(data, tmp_path / "out"), str(tmp_path / "broken"), batch=3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"teacher": None, "top_k": 4}, "top_k=4 must be positive, and have a teacher to cut"),
        ({"teacher": "nano", "top_k": 0}, "top_k=0 must be positive"),
        ({"teacher": "cache", "loss": "reverse_kl"}, "loss=reverse_kl needs the whole teacher"),
    ],
)
def test_recipes_that_cannot_be(data, changes, message):
    with pytest.raises(ValueError, match=message):
        tiny(data, **changes)
