"""Recipes, and training by them: on random token shards, with models of a few thousand parameters."""

import dataclasses
import errno
import fcntl
import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from affine_attn.cli import app
from affine_attn.core.spec import AttentionSpec
from affine_attn.data.sampler import GlobalSampler
from affine_attn.distill import estimate, losses
from affine_attn.distill.data import held_out
from affine_attn.distill.losses import chunked_loss
from affine_attn.distill.recipes import RECIPES, recipe
from affine_attn.distill.run import default_output, run
from affine_attn.distill.trainer import DistillTrainer
from affine_attn.distill.validation import validate
from affine_attn.errors import UserError
from affine_attn.models import AffineAttnForCausalLM, preset
from tests.support.tiny_runs import LENGTH, VOCAB, averages, counting_shards, metrics, tiny, trainer


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return counting_shards(tmp_path_factory.mktemp("shards"))


# Recipes


@pytest.mark.parametrize("name", RECIPES)
def test_dry_run_needs_no_network(name, monkeypatch):
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("a dry run must not connect"))
    result = CliRunner().invoke(app, ["distill", name, "--dry-run"])
    assert result.exit_code == 0, result.output
    for what in ("parameters", "tokens", "FLOPs", "memory", "time", "ours"):
        assert what in result.output


def test_the_papers_recipes():
    for name in ("paper-0.5b", "paper-1b", "paper-3b"):
        chosen = recipe(name)
        assert chosen.tokens == 9000 * 1024 * 2048
        assert (chosen.learning_rate, chosen.weight_decay, chosen.warmup_steps) == (1e-3, 0.1, 100)
        affine = chosen.student_config.spec(0).affine
        assert (affine.momentum, affine.length) == (0.9, 2048)
        assert {"beta2", "max_grad_norm", "decay_steps", "temperature"} <= set(chosen.ours())
        assert not {"student", "attention", "steps", "learning_rate", "rho"} & set(chosen.ours())
    assert "teacher" in recipe("paper-3b").ours()
    assert "teacher" not in recipe("paper-1b").ours()
    assert "steps" in recipe("paper-1b", ["steps=1000"]).ours()
    assert recipe("paper-1b", ["rho=0.5"]).student_config.spec(0).affine.momentum == 0.5


def test_positions_are_those_of_the_runs_own_length():
    chosen = recipe("small", ["attention=scale_invariant+affine", "sequence_length=96"]).student_config
    assert (chosen.qk_norm, chosen.rope_parameters["slowest"]) == (True, 12.0)


def test_flops_are_those_of_the_formula():
    student = estimate.size(preset("nano", "softmax"))
    # Two layers: q and o 64 x 64, k and v 64 x 32, three of 64 x 192; the head 64 x 256.
    matmul = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 192) + 64 * 256
    assert student.matmul == matmul
    assert student.training_flops(128) == 6 * matmul + 6 * 2 * 128 * 4 * 16
    both = estimate.flops_per_token(recipe("small", ["sequence_length=128"]), student, student)
    assert both == student.training_flops(128) * 4 // 3
    trained = recipe("small", ["sequence_length=128", "teacher=train"])
    assert estimate.flops_per_token(trained, student, student) == student.training_flops(128) * 7 // 3


@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        (["lerning_rate=1"], "no field 'lerning_rate'; did you mean learning_rate"),
        (["steps"], "'steps' is not of the form field=value"),
        (["steps=many"], "steps must be an integer, got 'many'"),
        (["learning_rate=nan"], "learning_rate must be positive"),
        (["documents=maybe"], "documents must be true or false"),
        (["dtype=float16"], "dtype must be one of float32, bfloat16"),
        (["student=nanno"], "student=nanno is no preset; did you mean nano"),
        (["attention=afine"], "afine"),
        (["teacher=train:nanno"], "student=nanno is no preset"),
        (["loss=kl"], "loss: its kind is 'kl'"),
        (["rho=1"], "momentum must be a number in"),
        (["beta2=1"], "beta2 must be at least 0 and below 1, got 1.0"),
        (["warmup_steps=690"], "are more than steps=700"),
        (["global_batch=9"], "global_batch=9 is no multiple of micro_batch=4"),
        (["attention=affine+affine"], "variant 'affine+affine': 'affine' is given more than once"),
        (["keep_checkpoints=-1"], "keep_checkpoints must be finite and not negative, got -1"),
        (["vocab_size=-1"], "vocab_size must be positive and finite, got -1"),
        (["vocab_size=0"], "vocab_size must be positive and finite, got 0"),
        (["seed=-1"], "seed must be at least 0 and below 2**32, got -1"),
        ([f"seed={10**20}"], "seed must be at least 0 and below 2**32, got 1000"),
        ([f"sequence_length={10**30}"], "length must be an integer"),
        (["--sweep", "attention=../../x"], "unknown variant '../../x'"),
        (["--sweep", "seed=1,-1"], "seed must be at least 0"),
        (["teacher=nobody/nothing"], "teacher=nobody/nothing is no folder and no preset"),
    ],
)
def test_mistakes_are_answered_in_one_line(assignments, message):
    result = CliRunner().invoke(app, ["distill", "demo", *assignments, "--dry-run"])
    assert result.exit_code == 2
    assert message in result.output
    assert len(result.output.splitlines()) == 1


def test_overrides_are_read_as_the_fields_type():
    chosen = recipe("demo", ["learning_rate=5e-4", "steps=400", "teacher=none", "documents=False", "loss=jsd"])
    assert (chosen.learning_rate, chosen.steps, chosen.teacher, chosen.documents) == (5e-4, 400, None, False)
    with pytest.raises(ValueError, match="there is no recipe 'dmo'; did you mean demo"):
        recipe("dmo")


def test_a_run_with_other_fields_lies_beside_that_of_the_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs, fields = Path("runs"), ["attention=gated", "steps=500"]
    assert default_output(recipe("demo"), "demo", []) == runs / "demo"
    assert default_output(recipe("demo", fields), "demo", fields) == runs / "demo-attention=gated-steps=500"
    json_fields = ['attention={"gate": "learned"}', "teacher=runs/demo/teacher/model"]
    named = default_output(recipe("demo", json_fields), "demo", json_fields)
    assert re.fullmatch(r"runs/demo-[0-9a-f]{12}", str(named))
    assert default_output(recipe("demo", json_fields[:1]), "demo", json_fields[:1]) != named
    # One that was begun in the recipe's own folder goes on there.
    (runs / "demo").mkdir(parents=True)
    (runs / "demo" / "recipe.json").write_text(json.dumps(dataclasses.asdict(recipe("demo", fields))))
    assert default_output(recipe("demo", fields), "demo", fields) == runs / "demo"
    assert default_output(recipe("demo", fields[:1]), "demo", fields[:1]) == runs / "demo-attention=gated"


# Training


def test_a_run_from_the_command_line(data, tmp_path):
    chosen = tiny(data, steps=12)
    fields = [f"{name}={value}" for name, value in dataclasses.asdict(chosen).items()]
    arguments = ["distill", "demo", *fields, "--output", str(tmp_path / "run")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    rows = metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert rows[0]["loss"] == pytest.approx(math.log(VOCAB), abs=0.5)
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.5
    assert all(row["grad_norm"] > 0 and row["tokens_per_second"] > 0 for row in rows)
    # Warmup from 0, stable, linear decay.
    assert [row["lr"] for row in rows] == pytest.approx([0, 5e-3, *[1e-2] * 9, 5e-3])
    assert json.loads((tmp_path / "run" / "recipe.json").read_text()) == dataclasses.asdict(chosen)
    assert json.loads((tmp_path / "run" / "environment.json").read_text())["torch"] == torch.__version__
    student = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert student.config.use_cache
    assert averages(student).min() > 0.2
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    assert all(part in card for part in ("# run/model", "12 steps with", f"| loss | {rows[-1]['loss']:.4f} |"))
    assert "    learning_rate=0.01\n" in card
    assert "after `import affine_attn.models`" in result.output.replace("\n", " ")
    # The forward that returned losses was the trainer's; this one has logits.
    assert student(torch.arange(4)[None]).logits.shape == (1, 4, VOCAB)

    # Before and after: what, on what, where; what came of it, and what next.
    said = result.stderr
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for told in (
        f"student   nano, affine attention, {student.num_parameters():,} parameters; no teacher",
        f"tokens    {12 * 4 * LENGTH:,} in 12 steps, from {data}",
        f"device    {device} (",
        f"output    {tmp_path / 'run'}",
        f"loss {rows[-1]['loss']:.4f}, held-out perplexity {rows[-1]['valid_perplexity']:.2f}",
        " tokens/s, ",
        f"  affine-attn analyze {tmp_path / 'run'} --data {data}",
    ):
        assert said.count(told) == 1, told
    assert result.stdout.splitlines()[0] == str(tmp_path / "run" / "model")

    # The same command again finds it finished; another recipe is another run.
    again = CliRunner().invoke(app, arguments)
    assert (again.exit_code, again.stdout) == (0, result.stdout)
    assert again.stderr == f"{tmp_path / 'run'}: finished before\n"
    assert metrics(tmp_path / "run") == rows
    other = CliRunner().invoke(app, [*arguments, "seed=1"])
    assert "was begun with seed=0, not 1" in other.output


def test_the_gradient_norm_is_the_one_before_clipping(data, tmp_path):
    free, clipped = tmp_path / "free", tmp_path / "clipped"
    trainer(tiny(data, steps=4, max_grad_norm=0.0), free).train()
    trainer(tiny(data, steps=4, max_grad_norm=1e-3), clipped).train()
    # Clipping changes nothing for Adam's first step, whose learning rate is 0 anyway.
    assert metrics(clipped)[0]["grad_norm"] == metrics(free)[0]["grad_norm"] > 1e-2


@pytest.mark.parametrize("attention", ["softmax", "affine", "affine_gated"])
def test_a_compiled_layer_is_trained_as_one_graph(attention, data, tmp_path, monkeypatch):
    """Cut in pieces it trains to the same numbers, but copies and adds between them: 2 to 3 % of a 1B step."""
    compiled = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda self, **_: compiled(self, backend="aot_eager", fullgraph=True)
    )
    chosen = tiny(data, attention=attention, steps=4, compile=True)
    run = trainer(chosen, tmp_path)
    run.train()
    assert math.isfinite(metrics(tmp_path)[-1]["loss"])


def teacher_of(data) -> LlamaForCausalLM:
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **sizes))


def test_a_student_follows_its_teacher(data, tmp_path):
    chosen = tiny(data, steps=12, loss="forward_kl", hard=0.25)
    teacher = teacher_of(data)
    with torch.no_grad():
        # Sharp enough to be worth following.
        teacher.lm_head.weight.mul_(40)
    distilled = trainer(chosen, tmp_path, teacher)
    inputs = distilled.data_collator([distilled.train_dataset[i] for i in range(3)])
    loss = distilled.compute_loss(distilled.model.eval(), inputs)
    # The whole logits of both, and the definitions.
    context = {"input_ids": inputs["input_ids"], "position_ids": inputs["position_ids"]}
    plain = AffineAttnForCausalLM(chosen.student_config)
    plain.load_state_dict(distilled.model.state_dict())
    p = plain.eval()(**context).logits.log_softmax(-1)
    q = teacher(**context, use_cache=False).logits.log_softmax(-1)
    valid = inputs["shift_labels"] != -100
    kl = (q.exp() * (q - p)).sum(-1)[valid].mean()
    ce = torch.nn.functional.nll_loss(p[valid], inputs["shift_labels"][valid])
    torch.testing.assert_close(loss, 0.75 * kl + 0.25 * ce)

    before = {name: value.clone() for name, value in teacher.state_dict().items()}
    distilled.train()
    rows = metrics(tmp_path)
    assert rows[-1]["kd"] < 0.8 * rows[0]["kd"]
    for row in rows:
        assert row["loss"] == pytest.approx(0.75 * row["kd"] + 0.25 * row["hard"], rel=1e-5)
    assert all(torch.equal(value, before[name]) for name, value in teacher.state_dict().items())
    assert distilled.release()(torch.arange(4)[None]).logits.shape == (1, 4, VOCAB)


def test_a_model_is_given_back_with_the_forward_that_its_user_put_there(data, tmp_path):
    made = trainer(tiny(data), tmp_path)
    model = made.release()
    model.forward = model.base_model.forward
    given = model.forward
    again = DistillTrainer(model, made.args, made.train_dataset)
    assert again.model.forward is not given
    assert again.release().forward is given


@pytest.mark.parametrize("pays", [True, False])
def test_a_long_run_compiles_its_loss_from_the_first_step_and_not_for_validation(pays, data, tmp_path, monkeypatch):
    """Decided by the whole run, so that one that is resumed goes on with the same arithmetic."""
    compiled, asked, actual = [], [], losses._run

    def loss_run(hidden, weight, job, plan):
        compiled.append((plan.compiled, any(plan.needs)))
        return actual(hidden, weight, job, plan._replace(compiled=False))

    monkeypatch.setattr(losses, "_run", loss_run)
    monkeypatch.setattr(
        "affine_attn.distill.trainer.compiling_pays", lambda calls, logits: asked.append((calls, logits)) or pays
    )
    run(tiny(data, micro_batch=2, valid_steps=3, statistics_steps=0), tmp_path)
    assert asked == [(12, 12 * 2 * LENGTH * VOCAB)]
    assert compiled.count((pays, True)) == 12
    assert (True, False) not in compiled
    assert (False, False) in compiled


def test_a_teacher_is_trained_first_and_only_once(data, tmp_path):
    chosen = tiny(data, teacher="train:nano", attention="sink")
    run(chosen, tmp_path)
    rows, before = metrics(tmp_path / "teacher"), (tmp_path / "teacher" / "model" / "model.safetensors").stat()
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert "kd" not in rows[0]
    teacher = AutoModelForCausalLM.from_pretrained(tmp_path / "teacher" / "model")
    assert teacher.config.spec(0) == AttentionSpec()
    student = trainer(chosen, tmp_path / "other", teacher)
    student.train()
    exact = [row["kd"] for row in metrics(tmp_path / "other")]
    assert [row["kd"] for row in metrics(tmp_path)] == exact
    for gone in ("model", "checkpoint-6"):
        shutil.rmtree(tmp_path / gone)
    run(chosen, tmp_path, resume=True)
    assert [row["kd"] for row in metrics(tmp_path)] == exact
    assert (tmp_path / "teacher" / "model" / "model.safetensors").stat() == before


def test_a_teacher_with_more_than_a_product_in_its_head_is_refused(data, tmp_path):
    teacher = teacher_of(data)
    teacher.lm_head.bias = torch.nn.Parameter(torch.ones(VOCAB))
    with pytest.raises(ValueError, match="its logits are not the product"):
        trainer(tiny(data), tmp_path, teacher)


def test_micro_batches_are_one_large_batch(data, tmp_path):
    """Loss, gradients and alpha's average: one commit per optimizer step, whatever the accumulation."""
    one, two = tmp_path / "one", tmp_path / "two"
    whole, cut = trainer(tiny(data, steps=4), one), trainer(tiny(data, steps=4, micro_batch=2), two)
    assert cut.args.gradient_accumulation_steps == 2
    seen = []
    for run_of in (whole, cut):
        run_of.create_optimizer().register_step_post_hook(lambda *_, t=run_of: seen.append(averages(t.model).clone()))
        run_of.train()
    assert len(seen) == 8
    for a, b in zip(seen[:4], seen[4:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    # 0.9 of what was, 0.1 of a mean near 0.5.
    torch.testing.assert_close(seen[0], torch.full_like(seen[0], 0.05), rtol=0.1, atol=0)
    assert (seen[1] - seen[0]).min() > 0.03
    for a, b in zip(metrics(one), metrics(two), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)


def test_a_resumed_run_has_the_losses_of_one_never_stopped(data, tmp_path):
    chosen = tiny(data, save_steps=2, keep_checkpoints=9, micro_batch=2, teacher="nano", loss="forward_kl")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run(chosen, whole)
    # As a killed process leaves it: one checkpoint, a line too many, one cut in two, a checkpoint not yet complete.
    run(chosen, cut)
    for late in ("checkpoint-4", "checkpoint-6"):
        (cut / late / "trainer_state.json").unlink()
        (cut / late).rename(cut / f"{late}-gone")
    shutil.rmtree(cut / "model")
    with (cut / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "lo')
    (cut / "checkpoint.tmp" / "checkpoint-4").mkdir(parents=True)
    run(chosen, cut, resume=True)
    exact = [{key: row[key] for key in ("step", "loss", "kd", "hard", "grad_norm", "lr")} for row in metrics(whole)]
    assert exact == [{key: row[key] for key in exact[0]} for row in metrics(cut)]
    assert len(exact) == 6
    a, b = (AutoModelForCausalLM.from_pretrained(folder / "model").state_dict() for folder in (whole, cut))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not (cut / "checkpoint.tmp").exists()
    assert (cut / "checkpoint-6" / "trainer_state.json").exists()


@pytest.mark.parametrize("kept", [None, 0, 100])
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json"])
def test_a_damaged_checkpoint_is_not_gone_on_from(name, kept, data, tmp_path):
    """``kept``: bytes that are left of one of its files; None: the file is gone."""
    chosen = tiny(data, save_steps=4, keep_checkpoints=9)
    run(chosen, tmp_path)
    shutil.rmtree(tmp_path / "model")
    file = tmp_path / "checkpoint-6" / name
    content = file.read_bytes()
    file.unlink()
    if kept is not None:
        file.write_bytes(content[:kept])
    with pytest.raises(ValueError, match=r"checkpoint-6 could not be loaded \(.+\): if it is damaged, remove it"):
        run(chosen, tmp_path, resume=True)
    shutil.rmtree(tmp_path / "checkpoint-6")
    assert run(chosen, tmp_path, resume=True).is_dir()


def test_a_run_does_not_go_on_with_other_data(data, tmp_path):
    """Prepared anew in the same place: the order of the global sampler would be one of other sequences."""
    place = shutil.copytree(data, tmp_path / "data")
    chosen = tiny(place, save_steps=4)
    run(chosen, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "model")
    tokens = next(place.glob("train-*.bin"))
    content = tokens.read_bytes()
    tokens.write_bytes(content[::-1])
    with pytest.raises(ValueError, match=r"data has other tokens than when .*run was begun: give a new folder"):
        run(chosen, tmp_path / "run", resume=True)
    tokens.write_bytes(content)
    assert run(chosen, tmp_path / "run", resume=True).is_dir()


@pytest.mark.parametrize("link", ["tokenizer/secret.json", "tokenizer"])
def test_a_link_in_the_tokenizer_of_the_data_is_not_followed_into_the_model(link, data, tmp_path):
    place, secret = shutil.copytree(data, tmp_path / "data"), tmp_path / "secret"
    if link == "tokenizer":
        secret.mkdir()
    else:
        secret.write_text("of this machine")
        (place / "tokenizer").mkdir()
    (place / link).symlink_to(secret)
    with pytest.raises(UserError, match=f"{link} is (a link|no regular file): replace"):
        run(tiny(place), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_two_runs_do_not_share_a_folder(data, tmp_path):
    """Nor is one that was killed waited for: its lock goes with it."""
    hold = (
        "import fcntl, sys; file = open(sys.argv[1], 'a'); fcntl.lockf(file, fcntl.LOCK_EX); print(); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-uc", hold, tmp_path / ".lock"], stdin=-1, stdout=-1) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(ValueError, match="another process is training in"):
            run(tiny(data, steps=4), tmp_path)
        assert not (tmp_path / "recipe.json").exists()
        other.kill()
    assert run(tiny(data, steps=4), tmp_path).is_dir()


def test_a_run_goes_on_where_nothing_can_be_locked(data, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with pytest.warns(UserWarning, match="cannot be locked .*: see to it that nothing else trains there"):
        assert run(tiny(data, steps=4), tmp_path).is_dir()


def test_a_loss_that_is_not_finite_stops_the_run_before_it_is_saved(data, tmp_path):
    stopped = trainer(tiny(data, save_steps=1), tmp_path)
    compute = stopped.compute_loss

    def broken(model, inputs, **others):
        return compute(model, inputs, **others) * (math.nan if stopped.state.global_step == 2 else 1)

    stopped.compute_loss = broken
    with pytest.raises(FloatingPointError, match=r"loss is nan at step 3; the last good checkpoint is .*checkpoint-2$"):
        stopped.train()
    assert not (tmp_path / "checkpoint-3").exists()
    assert [row["step"] for row in metrics(tmp_path)] == [1, 2]


def test_a_perplexity_that_no_float_holds_does_not_end_the_run(data, tmp_path):
    """As with a rate much too high: the loss is finite, and beyond 709 nats its exponential is not."""
    chosen = tiny(data)
    wild = trainer(chosen, tmp_path)
    found = validate(wild, held_out(chosen))
    assert found["valid_perplexity"] == pytest.approx(math.exp(found["valid_hard"]))
    with torch.no_grad():
        wild.model.lm_head.weight.mul_(1e5)
    found = validate(wild, held_out(chosen))
    assert 710 < found["valid_hard"] < math.inf
    assert found["valid_perplexity"] == math.inf


def test_old_checkpoints_go_and_data_must_fit(data, tmp_path):
    run(tiny(data, save_steps=2), tmp_path)
    assert sorted(path.name for path in tmp_path.glob("checkpoint*")) == ["checkpoint-4", "checkpoint-6"]
    with pytest.raises(
        ValueError, match="has tokens up to 63, the student's vocabulary 32 entries: give vocab_size=64"
    ):
        run(tiny(data, vocab_size=32), tmp_path / "other")
    # Before the first step: on a GPU, a token too many would end the process whenever it comes.
    with pytest.raises(ValueError, match="has tokens up to 63, shared_vocab=50 leaves some of them out"):
        run(tiny(data, teacher="nano", shared_vocab=50), tmp_path / "other")
    AffineAttnForCausalLM(preset("nano", "softmax", vocab_size=32)).save_pretrained(tmp_path / "small")
    with pytest.raises(ValueError, match=r"has tokens up to 63, teacher=.*small knows 32"):
        run(tiny(data, teacher=str(tmp_path / "small")), tmp_path / "other")
    AffineAttnForCausalLM(preset("nano", "softmax", vocab_size=70)).save_pretrained(tmp_path / "large")
    large = str(tmp_path / "large")
    with pytest.raises(ValueError, match=r"has 64 and teacher=.*large has 70 vocabulary entries: give shared_vocab"):
        run(tiny(data, teacher=large), tmp_path / "other")
    with pytest.raises(ValueError, match=r"has 64 and teacher=.*large has 70 vocabulary entries, fewer than shared_v"):
        run(tiny(data, teacher=large, shared_vocab=65), tmp_path / "other")
    with pytest.raises(ValueError, match="top_k=65 is more than the 64 vocabulary entries of the target"):
        run(tiny(data, teacher=large, shared_vocab=64, top_k=65), tmp_path / "other")
    with pytest.raises(ValueError, match="affine-attn prepare"):
        run(tiny(tmp_path / "nowhere"), tmp_path / "other")
    assert not (tmp_path / "other").exists()
    (tmp_path / "recipe.json").write_text("{")
    with pytest.raises(ValueError, match=r"recipe\.json is damaged"):
        run(tiny(data), tmp_path, resume=True)


def test_sequences_come_in_the_order_of_the_global_sampler(data, tmp_path):
    """Which is that of the seed and the step alone: the loss of step 1 is that of samples 0 to 3."""
    ordered = trainer(tiny(data), tmp_path)
    order = GlobalSampler(len(ordered.train_dataset), seed=0).order(0, 4)
    batch = ordered.data_collator([ordered.train_dataset[i] for i in order.tolist()])
    hidden = ordered.model.eval().base_model(input_ids=batch["input_ids"], position_ids=batch["position_ids"])
    loss = chunked_loss(hidden.last_hidden_state, ordered.model.lm_head.weight, labels=batch["shift_labels"]).loss
    ordered.train()
    assert metrics(tmp_path)[0]["loss"] == pytest.approx(loss.item(), rel=1e-6)
