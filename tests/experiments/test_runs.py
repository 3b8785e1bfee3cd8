"""The experiment runner: students side by side are what they are alone, runs go on, tables follow from folders."""

import json
import math
import resource
import shutil
import subprocess
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from affine_attn.core.spec import Affine, AttentionSpec
from affine_attn.core.variants import variant
from affine_attn.data import shards
from affine_attn.data.shards import TokenShards
from affine_attn.data.tokenizer import train_tokenizer
from affine_attn.distill.data import sequences
from affine_attn.distill.run import run as distill
from affine_attn.distill.teacher import ask, logits
from affine_attn.evaluate.run import Request, evaluate
from affine_attn.kernels.epilogue import launch as epilogue
from affine_attn.models import AffineAttnForCausalLM, preset
from affine_attn.models.load import ModelHandle
from affine_attn.nn.alpha import alpha_gates
from affine_attn.runs.files import write_json
from experiments import (
    carry_out,
    contrasts,
    controls,
    grid,
    learner,
    needles,
    page,
    replay,
    report,
    runs,
    side_by_side,
    small,
    tables,
    zero_shot,
)
from experiments.bigram import bigram
from experiments.data import prepare_split
from experiments.plan import plan
from tests.support.evaluation_sets import DOCUMENTS, TEXTS, write_sets
from tests.support.tiny_runs import LENGTH, VOCAB, a_group, averages, counting_shards, metrics, tiny

NAMES = ("softmax", "sink", "affine")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    return counting_shards(folder)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("teacher")
    torch.manual_seed(7)
    AffineAttnForCausalLM(preset("nano", "softmax", vocab_size=VOCAB)).save_pretrained(folder)
    return folder


@pytest.fixture
def recipe(data, teacher):
    return tiny(
        data, teacher=str(teacher), steps=24, seed=3, valid_sequences=1000, statistics_steps=10, save_steps=1000
    )


def trained(group: grid.Group, output: Path) -> dict[str, runs.Run]:
    assert carry_out.carry_out([group], output, math.inf, "f" * 40)
    return {run.folder.name: run for run in runs.read_runs(output)}


@pytest.mark.parametrize(("names", "micro_batch"), [(("sink", "affine"), 4), (("affine",), 2)])
def test_side_by_side_is_alone(recipe, tmp_path, names, micro_batch):
    """Bit by bit, and as the trainer for users has it."""
    recipe = replace(recipe, steps=12, micro_batch=micro_batch)
    together = trained(a_group(recipe, "softmax", *names), tmp_path / "together")
    for name in names:
        (alone,) = trained(a_group(recipe, name), tmp_path / name).values()
        assert alone.series() == together[alone.folder.name].series()
        assert alone.valid == together[alone.folder.name].valid
        assert alone.statistics() == together[alone.folder.name].statistics()
        chosen = replace(recipe, attention=name, statistics_steps=0)
        distill(chosen, tmp_path / f"trainer-{name}")
        theirs = metrics(tmp_path / f"trainer-{name}")
        series = alone.series()
        for ours, column in (("loss", "loss"), ("hard", "hard"), ("grad_norm", "grad_norm"), ("lr", "lr")):
            assert series[ours] == pytest.approx([row[column] for row in theirs], rel=1e-6)
        last = theirs[-1]
        assert alone.valid["kd"] == pytest.approx(last["valid_kd"], rel=1e-6)
        assert alone.valid["ce"] == pytest.approx(last["valid_hard"], rel=1e-6)
        assert alone.valid["ppl"] == pytest.approx(last["valid_perplexity"], rel=1e-6)
        assert alone.valid["entropy"] == pytest.approx(last["valid_entropy"], rel=1e-6)
        assert alone.valid["tokens"] == last["valid_tokens"]


def test_micro_batches_are_the_batch(recipe, data):
    """Losses, gradients and alpha's average, which moves once a step, of sequences with unequal numbers of labels."""
    student = grid.Student(variant="affine", attention=variant("affine"), learning_rate=1e-2)
    batches = list(islice(learner.batches_of(recipe, sequences(recipe), 0, torch.device("cpu")), 3))
    teacher = AffineAttnForCausalLM(preset("nano", "softmax", vocab_size=VOCAB)).requires_grad_(False)
    whole, parted = (
        learner.Learner(student, replace(recipe, micro_batch=size), torch.device("cpu")) for size in (4, 1)
    )
    seen: dict[int, list[torch.Tensor]] = {}
    for one in (whole, parted):

        def keep(*_: Any, one: learner.Learner = one) -> None:
            seen[id(one)] = [p.grad.clone() for p in one.model.parameters() if p.grad is not None]

        one.optimizer.register_step_pre_hook(keep)
    for batch in batches:
        alone = {name: tensor[:1] for name, tensor in batch.items()}
        by_itself = learner.loss_of(parted.model.eval(), alone, asked(teacher, alone), recipe)
        gradients = torch.autograd.grad(by_itself.loss, list(parted.model.train().parameters()))
        before = averages(parted.model).clone()
        whole.step(batch, asked(teacher, batch))
        parts = [{name: tensor[i : i + 1] for name, tensor in batch.items()} for i in range(4)]
        assert len({int((part["shift_labels"] != -100).sum()) for part in parts}) > 1
        for part in parts[:-1]:
            parted.accumulate(part, asked(teacher, part), learner.counted(parts))
        assert torch.equal(averages(parted.model), before)
        parted.step(parts[-1], asked(teacher, parts[-1]), learner.counted(parts))
        torch.testing.assert_close(averages(parted.model), averages(whole.model), rtol=1e-5, atol=1e-7)
        assert not torch.equal(averages(parted.model), before)
        for ours, theirs in zip(seen[id(parted)], seen[id(whole)], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
        for one in (whole, parted):
            one.look()
        assert parted.rows[-1][:4] == pytest.approx(whole.rows[-1], rel=1e-5)
        assert parted.rows[-1][4] == pytest.approx(float(torch.nn.utils.get_total_norm(gradients)), rel=1e-4)
    assert len(parted.rows[-1]) == len(runs.COLUMNS)


def asked(teacher: AffineAttnForCausalLM, batch: dict[str, torch.Tensor]) -> Any:
    return logits(ask(teacher, learner.context(batch)))


@pytest.mark.gpu
def test_a_replayed_step_is_the_step(recipe, tmp_path, monkeypatch):
    """Losses show that rates, batches, targets and moving averages reach a CUDA graph anew at every step."""
    # A low rate: at high ones rounding grows fast. Documents that do not see each other are looked for on the host.
    group = a_group(replace(recipe, steps=12, documents=False), "softmax", "affine", rate=1e-4)
    monkeypatch.setattr(epilogue, "_LONG", 0)  # with a second stream, as at lengths that are worth training
    replayed = trained(group, tmp_path / "replayed")
    monkeypatch.setattr(replay, "EAGER_STEPS", 10**9)
    for name, run in trained(group, tmp_path / "eager").items():
        for column, values in run.series().items():
            assert replayed[name].series()[column] == pytest.approx(values, rel=1e-3), (name, column)
        assert replayed[name].valid["kd"] == pytest.approx(run.valid["kd"], rel=1e-3)


def test_decay_is_the_trainers(data, tmp_path):
    """Norms of q and k, and scales of logits, decay or not as in Trainer."""
    from affine_attn.distill.run import training_arguments
    from affine_attn.distill.trainer import DistillTrainer

    chosen = tiny(data)
    config = preset("nano", variant("logn"), vocab_size=VOCAB, qk_norm=True)
    theirs = DistillTrainer(
        AffineAttnForCausalLM(config), training_arguments(chosen, tmp_path), TokenShards(data, LENGTH)
    )
    model = AffineAttnForCausalLM(config)
    ours = learner.new_optimizer(model, chosen, torch.tensor(1e-3))
    decays = {id(p): entry["weight_decay"] for entry in ours.param_groups for p in entry["params"]}
    theirs_by_name = {
        id(p): entry["weight_decay"] for entry in theirs.create_optimizer().param_groups for p in entry["params"]
    }
    names = dict(theirs.model.named_parameters())
    assert {n: decays[id(p)] for n, p in model.named_parameters()} == {
        n: theirs_by_name[id(p)] for n, p in names.items()
    }


def test_time_limit_and_resume(recipe, tmp_path, monkeypatch):
    """Stopped at every look at the clock and started again: the same numbers, of micro-batches too. What is finished is
    left alone."""
    recipe = replace(recipe, micro_batch=2)
    group = a_group(recipe, "softmax", "affine")
    straight = trained(group, tmp_path / "straight")
    clock = iter(range(10**6))
    monkeypatch.setattr(side_by_side.time, "monotonic", lambda: next(clock))
    output, calls = tmp_path / "stopped", 0
    while not carry_out.carry_out([group], output, next(clock) + 1.5, "f" * 40):
        calls += 1
        assert not list(output.glob(f"*/*/{runs.RESULT}"))
        assert list(output.glob(f"*/*/{runs.METRICS}")), "series of a run under way are there too"
        assert calls < 10
    assert calls == 4  # 24 steps, a look every 10 micro-batches
    for run in runs.read_runs(output):
        assert run.series() == straight[run.folder.name].series()
        assert run.valid == straight[run.folder.name].valid
        assert run.statistics() == straight[run.folder.name].statistics()
    assert not list(output.rglob("checkpoint.pt"))
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*") if path.is_file()}
    assert carry_out.carry_out([group], output, -math.inf, "f" * 40)
    assert before == {path: path.stat().st_mtime_ns for path in output.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match="other settings"):
        carry_out.carry_out([replace(group, recipe=replace(recipe, steps=30))], output, math.inf)


def test_a_run_killed_among_its_results_goes_on(recipe, tmp_path, monkeypatch):
    """One student has its result, the other only its place in the checkpoint."""
    group = a_group(replace(recipe, save_steps=10), "softmax", "affine")
    straight = trained(group, tmp_path / "straight")
    write, written = runs.write_result, []

    def killed(folder: Path, *others: Any) -> None:
        if written:
            raise KeyboardInterrupt
        written.append(folder)
        write(folder, *others)

    monkeypatch.setattr(runs, "write_result", killed)
    with pytest.raises(KeyboardInterrupt):
        trained(group, tmp_path / "killed")
    monkeypatch.setattr(runs, "write_result", write)
    for name, run in trained(group, tmp_path / "killed").items():
        assert run.series() == straight[name].series()
        assert run.valid == straight[name].valid


def test_a_student_that_diverges_leaves_the_others(recipe, tmp_path):
    wild = grid.Student(variant="wild", attention=AttentionSpec(), learning_rate=1e30)
    group = a_group(recipe, "softmax")
    found = trained(replace(group, students=(*group.students, wild)), tmp_path / "both")
    alone = trained(group, tmp_path / "alone")
    assert found["softmax-0.01"].series() == alone["softmax-0.01"].series()
    assert found["softmax-0.01"].valid == alone["softmax-0.01"].valid
    lost = found[wild.name]
    assert lost.diverged_step == len(lost.series()["step"]) + 1
    assert not lost.valid
    assert tables.has_diverged(lost, lost.series()["loss"])
    assert not (lost.folder / runs.MODEL).exists()


def test_figures_and_page_of_the_first_seed(recipe, tmp_path):
    """Students of one seed and rate are analysed, and shown by the figures and the page of affine-attn report."""
    short = replace(recipe, steps=12, seed=grid.SEEDS[0])
    group = a_group(short, "affine", "softmax", rate=grid.COMMON_RATE)
    other = grid.Student(variant="softmax", attention=AttentionSpec(), learning_rate=1e-2)
    found = trained(replace(group, students=(*group.students, other)), tmp_path / "runs")
    assert {name for name, run in found.items() if run.analysis()} == {"affine-0.003", "softmax-0.003"}
    shown = page.pictured(found.values())
    assert [run.name for run in shown] == ["softmax", "affine"]
    assert shown[1].analyses[0].content["map"]["layers"] == [0, 1]
    assert [row["loss"] for row in shown[1].metrics] == found["affine-0.003"].series()["loss"]
    assert shown[1].result["valid_loss"] == found["affine-0.003"].valid["kd"]
    drawn = {path.name for path in page.draw(found.values(), tmp_path / "figures")}
    # Figures 2 to 10 of the paper.
    for name in ("logits", "row_sums", "first_token", "heads_row_sum", "entropy", "loss", "gradient_norm", "late_loss"):
        assert f"{name}.svg" in drawn
    page.write(found.values(), tmp_path / "page.html")
    assert "softmax" in (tmp_path / "page.html").read_text()
    with pytest.raises(ValueError, match="no run of table A was analysed"):
        page.write([found["softmax-0.01"]], tmp_path / "page.html")
    elsewhere = replace(group, recipe=replace(short, seed=grid.SEEDS[1]))
    assert not any(map(elsewhere.is_analysed, elsewhere.students))


def test_zero_shot_answers_are_counted_as_if_the_model_were_here(recipe, data, tmp_path, monkeypatch):
    """Questions, answers and counting, in three places, give what affine-attn eval gives in one."""
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    sets, own = write_sets(tmp_path / "sets"), shutil.copytree(data, tmp_path / "shards")
    tokenizer, vocabulary = own / shards.TOKENIZER, 300
    train_tokenizer([json.dumps(DOCUMENTS), *TEXTS], vocabulary, tokenizer)
    group = a_group(replace(recipe, data=str(own), vocab_size=vocabulary), "softmax", "affine")
    for student in group.students:
        folder = tmp_path / "runs" / group.name / student.name
        folder.mkdir(parents=True)
        write_json(folder / runs.CONFIG, runs.config(group, student))
        runs.write_model(folder, AffineAttnForCausalLM(student.config(group.recipe)), tokenizer)
    found, request = list(runs.read_runs(tmp_path / "runs")), Request(data=[str(sets)], limit=2)
    questions = tmp_path / "questions.jsonl.gz"
    assert zero_shot.write_questions(group, request, questions) > 20
    assert len(list(zero_shot.answer(found, questions))) == 2
    assert not list(zero_shot.answer(found, questions)), "what is answered is not asked again"
    for run in found:
        assert list(zero_shot.count([run], group, request, questions))
    run = found[0]
    expected = evaluate(ModelHandle(str(run.folder / runs.MODEL)), request, tmp_path / "here")
    got = {result["name"]: result["metrics"] for result in run.evaluations()}
    assert got == {result["name"]: result["metrics"] for result in expected["results"]}
    assert tables.accuracies(run)["accuracy"] == pytest.approx(expected["average"]["value"])
    summary = tables.zero_shot(found)
    assert [(row["variant"], row["n"]) for row in summary] == [("affine", 1), ("softmax", 1)]
    other = tmp_path / "other.jsonl.gz"
    zero_shot.write_questions(group, replace(request, limit=1), other)
    with pytest.raises(ValueError, match="other questions"):
        list(zero_shot.count(found, group, request, other))


def test_a_full_disk_leaves_no_half_of_a_file(tmp_path):
    """One that is there counts as answered, and is not written again."""
    path, limits = tmp_path / "answers.json.gz", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            runs.write_gzip(path, [np.random.default_rng(0).bytes(5000).hex()])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not path.exists()


def test_options_of_a_student(recipe, tmp_path):
    """W_a at zero, no rotation, norms, longer text: each reaches the model and its validation."""
    spec = AttentionSpec(affine=Affine(length=LENGTH, beta=False))
    student = grid.Student(
        variant="odd one",
        attention=spec,
        learning_rate=0.01,
        w_a="zeros",
        qk_norm=True,
        positions="p_rope",
        slowest=5,
    )
    new = learner.Learner(student, recipe, torch.device("cpu"))
    assert all(not gate.w_a.any() for gate in alpha_gates(new.model))
    assert new.model.config.rope_parameters["rope_type"] == "p_rope"
    assert new.model.model.rotary_emb.inv_freq[new.model.config.head_dim // 4 - 1] == pytest.approx(1 / 5)
    plain = replace(recipe, documents=False, steps=4, warmup_steps=1)
    group = grid.Group(name="c", table="c", recipe=plain, students=(student,), lengths=(LENGTH, 4 * LENGTH))
    (run,) = trained(group, tmp_path).values()
    model = AffineAttnForCausalLM.from_pretrained(run.folder / runs.MODEL)
    assert model.config.qk_norm
    text = TokenShards(recipe.data, 4 * LENGTH, "valid", documents=False)
    losses = []
    for i in range(len(text)):
        with torch.no_grad():
            logits = model(input_ids=text[i]["input_ids"][None]).logits[0]
        losses.append(torch.nn.functional.cross_entropy(logits, text[i]["shift_labels"], reduction="none"))
    assert run.valid[f"ce_{4 * LENGTH}"] == pytest.approx(float(torch.cat(losses).mean()), rel=1e-5)


def test_needles_are_learned_and_asked_for_at_every_length(recipe, data, tmp_path):
    own, vocabulary = shutil.copytree(data, tmp_path / "shards"), 300
    train_tokenizer(
        [json.dumps(DOCUMENTS), "\nThe special magic Oslo number is 1234567.\n"] * 20,
        vocabulary,
        own / shards.TOKENIZER,
    )
    longer = replace(recipe, data=str(own), vocab_size=vocabulary, teacher=None, documents=False, sequence_length=256)
    group = grid.Group(
        name="d",
        table="d",
        recipe=replace(longer, steps=30, warmup_steps=2, learning_rate=1e-2),
        students=a_group(longer, "affine").students,
        lengths=(256, 280),
        needles=grid.Needles(steps=30),
    )
    (run,) = trained(group, tmp_path / "runs").values()
    assert {"needle_256", "needle_280"} <= run.valid.keys()
    (row,) = tables.table_d([run])
    assert row["needle_280"] == run.valid["needle_280"]
    # What was saved has not seen a needle yet; found() teaches it.
    model = AffineAttnForCausalLM.from_pretrained(run.folder / runs.MODEL)
    asked = replace(group.recipe, needles=needles.NEEDLES, seed=99)

    def loss() -> float:
        with torch.no_grad():
            batches = [
                {name: tensor[None] for name, tensor in item.items()}
                for item in map(sequences(asked).__getitem__, range(4))
            ]
            return sum(float(learner.loss_of(model, batch, None, asked).loss) for batch in batches)

    before = loss()
    measured = needles.found(group.students[0], model, group, group.needles)
    assert loss() < 0.9 * before
    assert measured.keys() == {"needle_256", "needle_280"}
    wild = replace(group.needles, learning_rate=1e30)
    assert set(needles.found(group.students[0], model, group, wild).values()) == {None}


def test_the_grid_and_its_plan(data, teacher, tmp_path):
    recipe = grid.base_recipe(str(data), "qwen1.5-0.5b")
    groups = grid.groups(recipe)
    assert len({group.name for group in groups}) == len(groups)
    runs_of = {(g.table, s.variant, s.learning_rate, g.recipe.seed) for g in groups for s in g.students}
    for name in ("softmax", "off_by_one", "sink", "affine", "gated", "affine_gated"):
        for rate in (1e-3, 2e-3, 3e-3, 5e-3):
            assert {("a", name, rate, seed) for seed in (1, 2, 3)} <= runs_of
    assert {("a", name, 3e-3, seed) for name in NAMES for seed in (4, 5)} <= runs_of
    # The comparisons that matter most come first.
    assert [group.name for group in groups[:4]] == ["a-core-seed1", "a-others-seed1", "a-seed2", "a-core-seed3"]
    for group in groups:
        for student in group.students:
            assert student.config(group.recipe).spec(0) == student.attention
            json.dumps(runs.config(group, student))
    lines = list(plan(groups, []))
    assert len([line for line in lines if "seed" in line]) == len(groups)
    assert f"{len(runs_of)} runs" in lines[-2]


def test_plan_leaves_out_what_is_finished(recipe, tmp_path):
    first, second = a_group(recipe, "softmax"), a_group(recipe, "affine", name="a-other")
    trained(first, tmp_path)
    lines = list(plan([first, second], list(runs.read_runs(tmp_path))))
    assert not any(line.startswith("a-test") for line in lines)
    assert any(line.startswith("a-other") for line in lines)
    assert any("measured over 1 runs" in line for line in lines)


def test_bigram(tmp_path):
    """Against the formula, word by word, on text with pairs and tokens that were never seen in training."""
    random, parts = np.random.default_rng(0), {}
    for split, documents, most in (("train", 12, VOCAB - 4), ("valid", 4, VOCAB)):
        writer = shards.ShardWriter(tmp_path, f"{split}-00000", np.dtype("<u2"))
        for _ in range(documents):
            writer.append(random.integers(most, size=25))
        parts[split] = writer.commit()
    manifest = {"version": shards.VERSION, "vocab_size": VOCAB, "dtype": "uint16", "shards": parts}
    write_json(tmp_path / shards.MANIFEST, manifest)
    found = bigram(str(tmp_path), LENGTH, documents=True)
    pairs = {}
    for split in ("train", "valid"):
        text = TokenShards(tmp_path, LENGTH, split)
        both = [(text[i]["input_ids"].tolist(), text[i]["shift_labels"].tolist()) for i in range(len(text))]
        pairs[split] = [(v, w) for a, b in both for v, w in zip(a, b, strict=True) if w != -100]
    train = pairs["train"]
    total = 0.0
    for v, w in pairs["valid"]:
        after = [b for a, b in train if a == v]
        unigram = (sum(b == w for _, b in train) + 1) / (len(train) + VOCAB)
        kinds = max(1, len(set(after)))
        total -= math.log((after.count(w) + kinds * unigram) / (len(after) + kinds))
    assert found["ce"] == pytest.approx(total / len(pairs["valid"]))
    assert found["tokens"] == len(pairs["valid"])


def test_the_command(data, teacher, tmp_path, monkeypatch, capsys):
    from experiments import __main__ as command

    monkeypatch.setattr(command, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(grid, "LENGTH", LENGTH)

    def call(*arguments: str) -> int:
        monkeypatch.setattr("sys.argv", ["experiments", *arguments])
        return command.main()

    assert call("bigram", "--data", str(data)) == 0
    assert json.loads((tmp_path / "results" / "bigram.json").read_text())["ppl"] > 1
    place = ("--data", str(data), "--teacher", str(teacher), "--output", str(tmp_path / "runs"))
    assert call("run", *place, "--dry-run", "--only", "noise") == 0
    assert "noise-seed3" in capsys.readouterr().out
    assert call("run", *place, "--only", "nothing") == 2
    assert "no group begins with 'nothing'" in capsys.readouterr().err
    monkeypatch.setattr(grid, "base_recipe", lambda data, teacher: tiny(data, teacher=teacher, warmup_steps=1))
    assert call("run", *place, "--only", "noise", "--commit", "f" * 40) == 0
    assert "all groups are finished" in capsys.readouterr().out
    about = [json.loads(path.read_text()) for path in (tmp_path / "runs").rglob("environment.json")]
    assert {entry["commit"] for entry in about} == {"f" * 40}
    assert call("tables", "--runs", str(tmp_path / "none")) == 2


def test_prepare_keeps_the_given_split(tmp_path):
    for split, texts in (("train", ["one two", "three"]), ("valid", ["four five six"])):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    from affine_attn.data.tokenizer import END_OF_DOCUMENT, train_tokenizer

    train_tokenizer(["one two three four five six"], 260, tmp_path / "tokenizer")
    given = ([str(tmp_path / "train.jsonl")], [str(tmp_path / "valid.jsonl")], str(tmp_path / "tokenizer"))
    manifest = prepare_split(tmp_path / "out", *given, END_OF_DOCUMENT, 1 << 20)
    assert manifest["documents"] == {"train": 2, "valid": 1}
    assert manifest == prepare_split(tmp_path / "out", *given, END_OF_DOCUMENT, 1 << 20)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out" / "tokenizer")
    held_out = TokenShards(tmp_path / "out", 4, "valid")
    assert tokenizer.decode(held_out[0]["input_ids"]).startswith("f")
    assert {path.name for path in (tmp_path / "out").glob("*.bin")} == {"train-00000.bin", "valid-00000.bin"}


def test_sinks_and_scales_do_not_decay(data, tmp_path):
    """Trainer would multiply a sink by 0.4 over the paper's 9000 steps; W_a is a matrix like any other. Runs that were
    made before decay them too, and say so."""
    from affine_attn.distill.run import training_arguments
    from affine_attn.distill.trainer import DistillTrainer

    spec = replace(variant("logn"), sink="learned", affine=Affine(length=LENGTH), gate="learned")
    chosen = tiny(data)
    model = AffineAttnForCausalLM(preset("nano", spec, vocab_size=VOCAB))
    theirs = DistillTrainer(model, training_arguments(chosen, tmp_path), TokenShards(data, LENGTH))
    decays = {id(p): entry["weight_decay"] for entry in theirs.create_optimizer().param_groups for p in entry["params"]}
    attention = "model.layers.1.self_attn."
    of = {name.removeprefix(attention): decays[id(p)] for name, p in model.named_parameters() if attention in name}
    assert {name for name, decay in of.items() if decay == 0} == {"sinks", "logn_scale", "gate_scale"}
    assert of["alpha.w_a"] == of["q_proj.weight"] == chosen.weight_decay

    before = learner.new_optimizer(model, chosen, torch.tensor(1e-3), **grid.RECORDED)
    (kept,) = [entry["params"] for entry in before.param_groups if entry["weight_decay"] == 0]
    assert {id(p) for p in kept} == {id(p) for name, p in model.named_parameters() if "norm" in name}
    told = [student.to_dict() for group in grid.groups(chosen) for student in group.students]
    assert not any("decays_sinks" in entry for entry in told), "what all runs so far had is not written down anew"


def test_students_of_a_seed_share_weights_with_softmax(recipe):
    """What softmax lacks is drawn last, so that a pair of one seed differs in it alone."""

    def started(student: grid.Student) -> dict[str, torch.Tensor]:
        return learner.Learner(student, recipe, torch.device("cpu")).model.state_dict()

    softmax, gated = (controls._student(name, recipe, 1e-3) for name in ("softmax", "gated"))
    plain, own = started(softmax), started(gated)
    assert plain.keys() < own.keys()
    assert all(torch.equal(plain[name], own[name]) for name in plain)
    drawn = {name: tensor for name, tensor in own.items() if name not in plain}
    assert all(0.01 < tensor.std() < 0.03 for tensor in drawn.values())
    before = started(replace(softmax, shared_start=False))
    assert all(torch.equal(plain[name], before[name]) for name in before), "softmax of a seed is what it always was"
    wider = started(replace(gated, intermediate=160))
    assert torch.equal(wider["model.layers.0.self_attn.q_proj.weight"], plain["model.layers.0.self_attn.q_proj.weight"])


def test_every_control_from_one_command_to_its_table(data, teacher, tmp_path, monkeypatch):
    """At toy size: what table A has is trained too, and each comparison finds its runs."""
    from experiments import __main__ as command

    monkeypatch.setattr(controls, "SEEDS", (1, 2))
    monkeypatch.setattr(controls, "MORE_SEEDS", ())
    monkeypatch.setattr(tables, "SEVERAL_SEEDS", 2)
    monkeypatch.setattr(contrasts, "SEVERAL_SEEDS", 2)
    monkeypatch.setattr(controls, "WIDER", 160)
    toy = {"statistics_steps": 0, "warmup_steps": 1}
    monkeypatch.setattr(grid, "base_recipe", lambda data, teacher: tiny(data, teacher=teacher, **toy))
    base, of_a = tiny(data, teacher=str(teacher), **toy), tmp_path / "runs"
    for seed in (1, 2):
        groups = [
            a_group(replace(base, seed=seed), "softmax", "sink", "affine", "gated", rate=rate)
            for rate in contrasts.TABLE_RATES
        ]
        for number, group in enumerate(groups):
            own = replace(group, name=f"a-{number}-seed{seed}")
            side_by_side.train(own, carry_out._teacher(base), of_a / own.name, math.inf, {"commit": "0" * 40})
    place = ("run", "--data", str(data), "--teacher", str(teacher), "--output", str(of_a), "--commit", "0" * 40)
    monkeypatch.setattr(controls, "SIZES", dict.fromkeys(controls.SIZES, "nano"))
    monkeypatch.setattr(controls, "EARLY", {"decay_steps": 0, "steps": 12, "micro_batch": 2})
    monkeypatch.setattr(controls, "LARGER", {"global_batch": 8, "steps": 4})
    for number in (1, 2, 3, 4, 5, 6, 7, 9):
        monkeypatch.setattr("sys.argv", ["experiments", *place, "--only", f"{number}-"])
        assert command.main() == 0
    found = list(runs.read_runs(of_a))
    rows = contrasts.losses(found)
    assert {row["outcome"] for row in rows} <= {"better", "worse", "open"}
    assert {row["n"] for row in rows} == {2}
    assert len(tables.controls(found)) == sum(run.table == grid.CONTROLS for run in found) > 70
    (row,) = [row for row in rows if row["comparison"] == "affine against softmax x 0.5" and row["lr"] == "0.003"]
    loss = {(run.variant, run.rate, run.seed): run.valid["kd"] for run in found if run.table in ("a", grid.CONTROLS)}
    by_hand = [loss["affine", 3e-3, seed] - loss["softmax x 0.5", 3e-3, seed] for seed in (1, 2)]
    assert row["difference"] == pytest.approx(sum(by_hand) / 2)
    shares = contrasts.shares(found)
    assert len(shares) == 16
    assert len(contrasts.variances(found)) == 8
    pages = [tmp_path / path.name for path in report.DOCUMENTS]
    for copied, original in zip(pages, report.DOCUMENTS, strict=True):
        copied.write_text(original.read_text())
    written = report.write_report(of_a, tmp_path / "results", pages)
    assert {path.name for path in islice(written, 12 + len(pages))} >= {"controls.csv", "controls_summary.csv"}
    early = contrasts.early(found)
    assert [(row["students"], row["batch"]) for row in early] == [("0.5b", 4)] * 4 + [("0.5b", 8)] * 2 + [("1b", 4)] * 3
    assert {(row["n"], row["diverged"]) for row in early} == {(2, 0)}
    assert all(math.isfinite(row["ratio from step 1"]) for row in early if row["variant"] != "softmax")
    assert all(row["of a micro-batch"] > 0 for row in early)
    # Twelve steps have some behind the very first ones, four have none.
    assert [math.isfinite(row["noise in its square"]) for row in early] == [row["batch"] == 4 for row in early]
    assert "| of a micro-batch |" in (tmp_path / "reproduction-controls-results.md").read_text()
    assert "Nothing has been run yet" not in (tmp_path / "reproduction-controls-results.md").read_text()


def test_the_tables_of_one_seed_get_two_more_from_one_command(tmp_path, monkeypatch):
    """Control 8 at toy size: tables C and D have intervals then, in their page too."""
    from experiments import __main__ as command

    own, vocabulary = counting_shards(tmp_path, held_out=30), 300
    train_tokenizer(["\nThe special magic Oslo number is 1234567.\n"] * 20, vocabulary, own / shards.TOKENIZER)
    teacher = AffineAttnForCausalLM(preset("nano", "softmax", vocab_size=vocabulary))
    teacher.save_pretrained(tmp_path / "teacher")
    toy = {"documents": False, "sequence_length": 256, "vocab_size": vocabulary, "statistics_steps": 0}
    toy |= {"warmup_steps": 1, "decay_steps": 1, "steps": 4, "global_batch": 1, "micro_batch": 1}

    def base(data: str, teacher: str) -> Any:
        return tiny(Path(data), teacher=teacher, **toy)

    monkeypatch.setattr(grid, "base_recipe", base)
    monkeypatch.setattr(grid, "BEYOND", (2,))
    monkeypatch.setattr(grid, "Needles", partial(grid.Needles, steps=3, haystacks=1))
    output, place = tmp_path / "runs", (str(own), str(tmp_path / "teacher"))
    for seed in (2, 3):
        group = a_group(replace(base(*place), seed=seed), "affine", rate=grid.COMMON_RATE, name=f"a-seed{seed}")
        assert carry_out.carry_out([replace(group, lengths=(256,))], output, math.inf, "f" * 40)
    arguments = ("--data", place[0], "--teacher", place[1], "--output", str(output), "--commit", "f" * 40)
    monkeypatch.setattr("sys.argv", ["experiments", "run", *arguments, "--only", "8-"])
    assert command.main() == 0
    found = list(runs.read_runs(output))
    of_c = tables.summary(tables.table_c(found), ("kd_loss",), "affine")
    assert [row["n"] for row in of_c] == [2] * 7
    assert {row["variant"] for row in of_c} == {"affine", *(student.variant for student in grid.ablations(256))}
    assert all(math.isfinite(row["kd_loss difference low"]) for row in of_c if row["variant"] != "affine")
    of_d = tables.summary(tables.table_d(found), ("ce_256", "ce_512", "needle_512"), "rope")
    slowest = 256 // grid.TURN
    assert {(row["variant"], row["n"]) for row in of_d} == {(s.variant, 2) for s in grid.distances(256, slowest)}
    assert all(math.isfinite(row[f"ce_{length} low"]) for row in of_d for length in (256, 512))
    both = f"scale_invariant + affine, p-rope {slowest}"
    (row,) = [row for row in of_d if row["variant"] == both]
    loss = {(run.variant, run.seed): run.valid["ce_512"] for run in found if run.table == "d"}
    assert row["ce_512 difference"] == pytest.approx(sum(loss[both, s] - loss["rope", s] for s in (2, 3)) / 2)
    page = Path(shutil.copy(report.ROOT / "docs" / "reproduction-further.md", tmp_path))
    assert page in islice(report.write_report(output, tmp_path / "results", [page]), 12)
    text = page.read_text()
    assert f"| {both} | 2 |" in text
    assert "| affine, no beta | 2 |" in text


def test_a_part_of_the_small_controls_is_a_page_that_says_so(data, teacher, tmp_path, monkeypatch):
    """One seed and a part of the next, collected by the commands of the manual."""
    from experiments import __main__ as command

    monkeypatch.setattr(controls, "SMALL_SEEDS", (1, 2))
    monkeypatch.setattr(controls, "SMALL_RATES", (2e-3,))
    toy = tiny(data, teacher=str(teacher), documents=False, statistics_steps=0, steps=4, warmup_steps=1, decay_steps=1)
    monkeypatch.setattr(controls, "small_recipe", lambda data, teacher: toy)
    monkeypatch.chdir(tmp_path)
    write, written = runs.write_result, []

    def killed(folder: Path, *others: Any) -> None:
        written.append(folder)
        if len(written) > 13:
            raise KeyboardInterrupt
        write(folder, *others)

    monkeypatch.setattr(runs, "write_result", killed)
    arguments = ("--data", str(data), "--teacher", str(teacher), "--commit", "f" * 40)
    monkeypatch.setattr("sys.argv", ["experiments", "run", "--small", *arguments])
    assert command.main() == 130
    manual = (report.ROOT / "docs" / "reproduction-how.md").read_text().split("pages say how many seeds")[1]
    collect = [line.strip() for line in manual.splitlines() if line.startswith("    ")][:3]
    subprocess.run(["bash", "-euc", "\n".join(collect)], check=True)
    results = Path("experiments/results")
    assert len(list(results.rglob(runs.CONFIG))) == 13
    kept = {path.name for path in results.rglob("*") if path.is_file()}
    assert kept == {runs.CONFIG, runs.ENVIRONMENT, runs.METRICS, runs.STATISTICS, runs.RESULT}
    page = Path(shutil.copy(report.ROOT / "docs" / "reproduction-controls-cpu.md", tmp_path))
    assert page in islice(report.write_report(results / "runs", results, [page]), 12)
    text = page.read_text()
    assert "13 finished runs of 13" in text
    assert "1 of 2 seeds are complete (1); in part there: 2 (2 of 11 runs)." in text
    assert "| affine against it, outcome |" in text
    found = list(runs.read_runs(results / "runs"))
    by_variant = {row["variant"]: row for row in small.rows(found)}
    assert {name: row["n"] for name, row in by_variant.items() if row["n"] > 1} == {"softmax": 2, "affine": 2}
    assert len(by_variant) == 11
    loss = {(run.variant, run.seed): run.valid["kd"] for run in found}
    by_hand = loss["affine", 1] - loss[controls.HALF, 1]
    assert by_variant[controls.HALF]["affine against it"] == pytest.approx(by_hand)
    monkeypatch.setattr(controls, "SMALL_SEEDS", (1, 2, 3, 4))
    assert small.coverage(found).endswith("; not run: 2 (3, 4).")


def test_the_grid_still_knows_the_runs_that_were_made():
    """A student that changes needs another name, or its finished run would be refused."""
    results, recipe = report.ROOT / "experiments" / "results" / "runs", grid.base_recipe("data", "teacher")
    made = {folder.parent for folder in results.glob("*/*/result.json")}
    small = controls.small_groups(controls.small_recipe("data", "teacher"))
    every = grid.groups(recipe) + controls.groups(recipe) + small
    known = {results / group.name / student.name: (group, student) for group in every for student in group.students}
    assert made <= set(known)
    assert all(runs.is_finished(folder, *known[folder]) for folder in made)
    assert all(grid.Student.from_dict(student.to_dict()) == student for _, student in known.values())
