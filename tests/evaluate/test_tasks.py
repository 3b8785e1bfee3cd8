"""``affine-attn eval`` on tasks: the harness's numbers, local data, resuming, scoring elsewhere, mistakes."""

import gzip
import hashlib
import json
import lzma
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import lm_eval
import lm_eval.tasks
import pytest
import torch
from lm_eval.models.huggingface import HFLM
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from affine_attn import Affine, AttentionSpec
from affine_attn.cli import app
from affine_attn.evaluate import harness
from affine_attn.evaluate.harness import BatchedLM
from affine_attn.evaluate.results import TABLE_1, measured_once
from affine_attn.evaluate.score import Pair, batch_rows, read_requests, read_scores, score, score_file
from affine_attn.evaluate.tasks import LocalData, find_tasks, local_dataset
from affine_attn.models import convert
from affine_attn.runs.provenance import commit
from tests.support.evaluation_sets import DOCUMENTS, TEXTS, small_llama, write_sets
from tests.support.hf import stir, tiny_model

runner = CliRunner()
# A folder with the real sets, as the tutorial says; the test on them takes a minute.
REAL_DATA = os.environ.get("AFFINE_ATTN_EVAL_DATA")


@pytest.fixture(scope="module", autouse=True)
def _offline():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.config.HF_HUB_OFFLINE", True)
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        yield


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    return write_sets(tmp_path_factory.mktemp("sets"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    small_llama(folder)
    return folder


@pytest.fixture(scope="module")
def converted(llama, tmp_path_factory):
    folder = tmp_path_factory.mktemp("converted")
    convert(llama, "softmax").save_pretrained(folder)
    AutoTokenizer.from_pretrained(llama).save_pretrained(folder)
    return folder


def run(*arguments):
    return runner.invoke(app, ["eval", *map(str, arguments)])


def results(*arguments) -> dict[str, dict]:
    answer = run(*arguments, "--json")
    assert answer.exit_code == 0, answer.output
    return {result["name"]: result for result in json.loads(answer.stdout)["results"]}


def values(found: dict[str, dict]) -> dict[str, dict]:
    return {name: result["metrics"] for name, result in found.items()}


def harness_alone(model: Path, files: dict[str, Path], folder: Path, limit: int | None = None) -> dict[str, dict]:
    """Its own loader, model class and entry point; the task files name JSON files, as its documentation says."""
    folder.mkdir()
    root = Path(lm_eval.tasks.__file__).parent
    own = {"winogrande": "winogrande/default", "boolq": "super_glue/boolq/default", "c4": "c4/c4"}
    own |= {"piqa": "piqa/piqa", "hellaswag": "hellaswag/hellaswag"}
    own |= {"arc_easy": "arc/arc_easy", "arc_challenge": "arc/arc_challenge"}
    for task, file in files.items():
        split = "test" if task.startswith("arc") else "validation"
        documents = [json.loads(line) for line in _read(file).splitlines()]
        if task == "boolq":
            documents = [{**document, "label": int(document["answer"])} for document in documents]
        data = folder / f"{task}.jsonl"
        data.write_text("".join(json.dumps(document) + "\n" for document in documents))
        lines = [
            f"include: {root / own[task]}.yaml",
            f"task: {task}_direct",
            "tag: []",
            "dataset_path: json",
            "dataset_name: null",
            "training_split: null",
            *(["validation_split: null"] if split == "test" else []),
            f"dataset_kwargs: {json.dumps({'data_files': {split: str(data)}, 'cache_dir': str(folder / 'cache')})}",
        ]
        (folder / f"{task}.yaml").write_text("\n".join(lines))
    lm = HFLM(pretrained=AutoModelForCausalLM.from_pretrained(model), tokenizer=str(model), batch_size=2)
    manager = lm_eval.tasks.TaskManager(include_path=str(folder), include_defaults=False)
    names = [f"{task}_direct" for task in files]
    found = lm_eval.simple_evaluate(model=lm, tasks=names, task_manager=manager, limit=limit, bootstrap_iters=10)
    return {name.removesuffix("_direct"): metrics for name, metrics in found["results"].items()}


def _read(file: Path) -> str:
    return lzma.decompress(file.read_bytes()).decode() if file.suffix == ".xz" else file.read_text()


def same_as_alone(ours: dict[str, dict], alone: dict[str, dict]) -> None:
    for task, metrics in ours.items():
        names = {key.split(",")[0] for key in alone[task] if key.endswith(",none") and "_stderr" not in key}
        assert names <= metrics.keys(), task
        for name in names:
            assert metrics[name]["value"] == pytest.approx(alone[task][f"{name},none"], rel=1e-5), (task, name)
            if task != "c4":
                assert metrics[name]["stderr"] == pytest.approx(alone[task][f"{name}_stderr,none"], rel=1e-9)


def test_the_six_tasks_have_the_numbers_of_the_harness_alone(llama, converted, sets, tmp_path):
    native = values(results(llama, "--data", sets, "--output", tmp_path / "native"))
    assert list(native) == list(TABLE_1)
    ours = values(results(converted, "--data", sets, "--output", tmp_path / "ours"))
    assert ours == native
    files = {task.name: next(iter(task.files.values())) for task in find_tasks(TABLE_1, LocalData.parse([str(sets)]))}
    same_as_alone(native, harness_alone(llama, files, tmp_path / "alone"))


def test_c4_is_the_perplexity_of_the_harness_and_that_per_token_beside_it(llama, sets, tmp_path):
    file = sets / "texts.jsonl"
    found = results(llama, "c4", "--data", f"c4={file}", "--output", tmp_path / "ours")
    same_as_alone(values(found), harness_alone(llama, {"c4": file}, tmp_path / "alone"))
    metrics = found["c4"]["metrics"]
    texts = results(llama, "--text", file, "--length", "256", "--output", tmp_path / "text")["perplexity-texts-256"]
    # The harness's detokenizer leaves these texts alone, and its windows are those without overlap.
    assert texts["metrics"]["token_perplexity"] == pytest.approx(metrics["token_perplexity"], rel=1e-5)
    assert texts["metrics"]["word_perplexity"] == pytest.approx(metrics["word_perplexity"], rel=1e-5)
    assert metrics["token_perplexity"]["stderr"] > 0


@pytest.mark.skipif(not REAL_DATA, reason="AFFINE_ATTN_EVAL_DATA names no folder with the evaluation sets")
def test_on_the_real_sets_the_numbers_are_those_of_the_harness_alone(tmp_path):
    llama, converted = tmp_path / "llama", tmp_path / "converted"
    # Its tokens are short, so that texts are long.
    convert(small_llama(llama, max_position_embeddings=4096), "softmax").save_pretrained(converted)
    AutoTokenizer.from_pretrained(llama).save_pretrained(converted)
    given = ["--data", REAL_DATA, "--limit", "24"]
    native = values(results(llama, *given, "--output", tmp_path / "native"))
    assert values(results(converted, *given, "--output", tmp_path / "ours")) == native
    files = {task.name: task.files for task in find_tasks(TABLE_1, LocalData.parse([REAL_DATA]))}
    evaluated = {name: found.get("test") or found["validation"] for name, found in files.items()}
    same_as_alone(native, harness_alone(llama, evaluated, tmp_path / "alone", limit=24))


def requests(*pairs):
    return [SimpleNamespace(args=pair, task_name="test") for pair in pairs]


@pytest.mark.parametrize("attention", ["softmax", "affine", "sink", "affine_gated", "alibi"])
def test_batches_do_not_change_scores(llama, attention):
    """Padding on the right for scores, on the left with a mask for generation, as HFLM calls the model."""
    model = stir(convert(llama, attention)).eval()
    tokenizer = AutoTokenizer.from_pretrained(llama)
    pairs = [(text[:n], text[n : n + m]) for text in TEXTS for n, m in ((5, 3), (17, 20), (40, 1), (0, 9))]
    alone = BatchedLM(model, tokenizer, 1).loglikelihood(requests(*pairs), disable_tqdm=True)
    together = BatchedLM(model, tokenizer).loglikelihood(requests(*pairs), disable_tqdm=True)
    torch.testing.assert_close(torch.tensor(together), torch.tensor(alone), rtol=1e-5, atol=1e-4)
    settings = {"until": ["@"], "max_gen_toks": 6}
    prompts = [(text[:n], settings) for text, n in zip(TEXTS, (4, 30, 18), strict=True)]
    one_by_one = BatchedLM(model, tokenizer, 1).generate_until(requests(*prompts), disable_tqdm=True)
    assert BatchedLM(model, tokenizer, 3).generate_until(requests(*prompts), disable_tqdm=True) == one_by_one
    assert any(one_by_one)


def test_rolling_windows_are_those_of_the_harness(llama):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(llama), AutoTokenizer.from_pretrained(llama)
    asked = requests(*((text,) for text in TEXTS))
    ours = BatchedLM(model, tokenizer).loglikelihood_rolling(asked)
    assert max(len(BatchedLM(model, tokenizer).windows(text)) for text in TEXTS) > 1
    assert ours == pytest.approx(HFLM(pretrained=model, tokenizer=tokenizer).loglikelihood_rolling(asked), rel=1e-5)


def test_a_batch_holds_as_many_rows_as_its_longest_allows(llama, monkeypatch):
    """The harness asks per request, and compares with the rows so far: sizes that change inside a batch never match."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(llama), AutoTokenizer.from_pretrained(llama)
    monkeypatch.setattr("affine_attn.evaluate.harness.batch_rows", lambda length, *_: max(1, 60 // length))
    lm = BatchedLM(model, tokenizer)
    shapes = []
    forward = lm._model_call
    monkeypatch.setattr(lm, "_model_call", lambda inputs: shapes.append(tuple(inputs.shape)) or forward(inputs))
    lm.loglikelihood(requests(*((TEXTS[2][i : 2 * i], " end of it") for i in range(1, 30))), disable_tqdm=True)
    assert sum(rows for rows, _ in shapes) == 29
    assert all(rows == max(1, 60 // length) for rows, length in shapes[:-1])
    assert max(rows for rows, _ in shapes) > 3
    assert batch_rows(10**9, 50_000, torch.device("cpu")) == 1


def test_a_model_that_counts_padding_is_scored_one_by_one():
    model = tiny_model(AttentionSpec(affine=Affine(length="keys")))
    pairs = [Pair((1, 2, 3), (4, 5)), Pair((6,), (7, 8, 9, 10, 11, 12)), Pair((1,) * 20, (2,))]
    alone = [score(model, [pair])[0].log_likelihood for pair in pairs]
    assert [result.log_likelihood for result in score(model, pairs)] == pytest.approx(alone, rel=1e-5)
    with pytest.raises(ValueError, match="one by one"):
        score(model, pairs, batch_size=2)


def test_a_finished_task_is_taken_up_and_another_question_is_not_mixed_with_it(converted, sets, tmp_path, monkeypatch):
    asked, run_task = [], harness.run_task

    def counted(lm, task, limit):
        asked.append((task.config.task, limit))
        return run_task(lm, task, limit)

    monkeypatch.setattr(harness, "run_task", counted)
    given = ["--data", sets, "--output", tmp_path]
    first = results(converted, "piqa", *given)
    assert results(converted, "piqa", "boolq", *given)["piqa"] == first["piqa"]
    assert asked == [("piqa", None), ("boolq", None)]
    limited = results(converted, "piqa", "--limit", "2", *given)
    assert limited["piqa"]["documents"] == 2
    assert first["piqa"]["documents"] == 3
    changed = tmp_path / "changed"
    model = AutoModelForCausalLM.from_pretrained(converted)
    torch.nn.init.normal_(model.lm_head.weight)
    model.save_pretrained(changed)
    AutoTokenizer.from_pretrained(converted).save_pretrained(changed)
    assert results(changed, "piqa", *given)["piqa"]["identity"] != first["piqa"]["identity"]
    assert results(converted, "piqa", *given) == first
    assert asked == [("piqa", None), ("boolq", None), ("piqa", 2), ("piqa", None)]


def test_a_result_says_what_it_is(converted, sets, tmp_path):
    found = results(converted, "winogrande", "--data", sets, "--output", tmp_path)["winogrande"]
    assert found["versions"]["lm-eval"] == lm_eval.__version__
    assert found["commit"] == commit()
    assert found["shots"] == 0
    assert found["model"]["parameters"] == AutoModelForCausalLM.from_pretrained(converted).num_parameters()
    assert found["model"]["dtype"] == "float32"
    assert found["metrics"]["acc"]["stderr"] > 0
    (file,) = tmp_path.glob("winogrande-*.json")
    assert json.loads(file.read_text()) == found


def test_the_table_is_that_of_the_paper(converted, sets, tmp_path):
    given = ["--data", sets, "--data", f"c4={sets / 'texts.jsonl'}", "--output", tmp_path]
    answer = run(converted, *TABLE_1, "c4", *given)
    assert answer.exit_code == 0, answer.output
    for heading in ("C4 PPL", "Wino", "PIQA", "Hella", "ARC-c", "ARC-e", "BoolQ", "Avg."):
        assert heading in answer.stdout
    found = json.loads(run(converted, *TABLE_1, *given, "--json").stdout)
    shown = [r["metrics"].get("acc_norm", r["metrics"]["acc"]) for r in found["results"]]
    cells = [cell["value"] for cell in shown]
    assert found["average"]["value"] == pytest.approx(sum(cells) / 6)
    assert found["average"]["stderr"] == pytest.approx(math.hypot(*(cell["stderr"] for cell in shown)) / 6)
    assert f"{100 * sum(cells) / 6:.1f}" in answer.stdout


# A machine without the harness: importing it is an error there. Calls of the command, one after the other.
WITHOUT_HARNESS = """
import json, sys
sys.modules.update(dict.fromkeys(["lm_eval", "datasets", "pyarrow", "jinja2"]))
from typer.testing import CliRunner
from affine_attn.cli import app
answers = [CliRunner().invoke(app, arguments) for arguments in json.loads(sys.argv[1])]
print(json.dumps([[answer.exit_code, answer.stdout, answer.stderr] for answer in answers]))
"""


def test_scored_where_no_harness_is_the_metrics_are_the_same(converted, sets, tmp_path):
    texts = sets / "texts.jsonl"
    tasks = [*TABLE_1, "c4", "--data", sets, "--data", f"c4={texts}"]
    asked, scores = tmp_path / "requests.jsonl.gz", tmp_path / "scores.jsonl"
    exported = run(converted, *tasks, "--export-requests", asked)
    assert exported.exit_code == 0, exported.output
    calls = [
        ["eval-score", converted, asked, scores],
        ["eval", converted, "piqa"],
        ["eval", converted, "--text", texts, "--output", tmp_path, "--json"],
    ]
    command = [sys.executable, "-c", WITHOUT_HARNESS, json.dumps(calls, default=str)]
    answers = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    scored, refused_task, perplexity = answers
    assert scored[0] == 0, scored
    assert refused_task[0] == 2
    assert "tasks need lm-evaluation-harness: pip install 'affine-attn[eval]'" in refused_task[2]
    assert json.loads(perplexity[1])["results"][0]["documents"] == len(TEXTS)
    # Where the harness is, no weights are needed.
    here = tmp_path / "here"
    here.mkdir()
    for file in converted.iterdir():
        if file.is_file() and "safetensors" not in file.name:
            (here / file.name).write_bytes(file.read_bytes())
    imported = results(here, *tasks, "--import-scores", scores)
    direct = results(converted, *tasks, "--output", tmp_path / "direct")
    assert imported["winogrande"]["identity"] == direct["winogrande"]["identity"]
    assert imported["winogrande"]["model"]["parameters"] == direct["winogrande"]["model"]["parameters"]
    for task in TABLE_1:
        assert imported[task]["metrics"] == direct[task]["metrics"]
    for name, cell in direct["c4"]["metrics"].items():
        assert imported["c4"]["metrics"][name] == pytest.approx(cell, rel=1e-5), name


def test_scores_of_another_model_are_refused(converted, sets, tmp_path):
    """By the weights where they are here, else by what the configuration says; what was not compared is recorded."""
    asked, scores, other = tmp_path / "requests.jsonl", tmp_path / "scores.jsonl", tmp_path / "other"
    given = ["piqa", "--data", sets]
    run(converted, *given, "--export-requests", asked)
    model = AutoModelForCausalLM.from_pretrained(converted)
    torch.nn.init.normal_(model.lm_head.weight)
    model.save_pretrained(other)
    AutoTokenizer.from_pretrained(converted).save_pretrained(other)
    assert runner.invoke(app, ["eval-score", str(converted), str(asked), str(scores)]).exit_code == 0
    imported = [*given, "--import-scores", scores]
    refused(f"has the scores of another model than {other}, of {converted}: weights, conf", other, *imported)
    assert not (other / "evaluation").exists()
    assert results(converted, *imported, "--output", tmp_path / "own")["piqa"]["compared_with_weights"] is True
    (other / "model.safetensors").unlink()
    answer = run(other, *imported, "--json")
    assert f"the weights of {other} are not here, so whether they are the same was not checked" in answer.stderr
    (result,) = json.loads(answer.stdout)["results"]
    assert result["compared_with_weights"] is False
    assert result["model"]["path"] == str(converted)
    config = json.loads((other / "config.json").read_text())
    for changes, message in (
        ({"intermediate_size": 24}, "parameters is"),
        ({"attention": {"sink": 0.0}}, "attention is"),
    ):
        (other / "config.json").write_text(json.dumps(config | changes))
        refused(f"has the scores of another model than {other}, of {converted}: {message}", other, *imported)


def test_bad_rows_are_named(converted, tmp_path):
    """Of requests and of scores, whose files people may write or cut by hand."""
    asked, scores = tmp_path / "requests.jsonl", tmp_path / "scores.jsonl"
    header, config = {"format": "affine-attn requests 1", "max_length": 64}, AutoConfig.from_pretrained(converted)
    good = [[1, 2], [3]]
    shapes = [3, None, {}, [], [[1], []], [[], [1]], [[1, 2]], [[1], [2], [3]], ["ab", "c"]]
    for bad in (*shapes, [[1], ["a"]], [[1], [-1]], [[1], [2.5]], [[True], [1]]):
        asked.write_text("".join(json.dumps(row) + "\n" for row in (header, good, bad)))
        with pytest.raises(ValueError, match=r"requests.jsonl, line 3, is not a request, two lists of token ids"):
            read_requests(asked, config)
    answer = runner.invoke(app, ["eval-score", str(converted), str(asked), str(scores)])
    assert answer.exit_code == 2
    assert answer.stderr.splitlines()[-1].endswith("with at least one in each: [[true], [1]]")
    for first in ({"format": header["format"]}, header | {"max_length": "many"}):
        asked.write_text(json.dumps(first) + "\n" + json.dumps(good) + "\n")
        with pytest.raises(ValueError, match=r"its first line has no max_length"):
            read_requests(asked, config)
    asked.write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"is not a file of affine-attn requests 1, or cut short"):
        read_requests(asked, config)
    assert not scores.exists()
    about = dict.fromkeys(("path", "fingerprint", "dtype", "model_type", "attention", "parameters"), "x")
    header = {"format": "affine-attn scores 1", "requests": "x", "model": about}
    for bad in (
        3,
        [good],
        [good, -1.5],
        [good, [-1.5]],
        [good, ["x", True]],
        [good, [True, True]],
        [[[1]], [-1.5, True]],
    ):
        scores.write_text("".join(json.dumps(row) + "\n" for row in (header, [good, [-1.0, True]], bad)))
        with pytest.raises(ValueError, match=r"scores.jsonl, line 3, is not a request"):
            read_scores(scores)
    for first, message in ((header | {"model": {"path": "x"}}, "does not say the attention, dtype"),
                           (header | {"model": 3}, "its first line has no model")):  # fmt: skip
        scores.write_text(json.dumps(first) + "\n")
        with pytest.raises(ValueError, match=message):
            read_scores(scores)


PATTERNS = ("sets[1]", "s?ts", "sets*", "{sets,other}", "**", "sets::other", "file:/sets")


@pytest.mark.parametrize("name", PATTERNS)
def test_names_of_local_files_are_no_patterns(name, sets, tmp_path, monkeypatch):
    """The file that was named is evaluated, whatever lies where its name would lead as a pattern."""
    for other in ("sets", "sets1", "s1ts", "other"):
        (tmp_path / other / "piqa").mkdir(parents=True)
        (tmp_path / other / "piqa" / "validation.jsonl").write_text(json.dumps(DOCUMENTS["piqa"][0]) + "\n")
    place = tmp_path / name / "piqa"
    place.mkdir(parents=True)
    for file in (place / "validation.jsonl", place / "file[2]*.jsonl"):
        file.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS["piqa"]))
    for given in (str(tmp_path / name), f"piqa={place / 'file[2]*.jsonl'}"):
        (task,) = find_tasks(["piqa"], LocalData.parse([given]))
        documents = task.load().validation_docs()
        assert [document["goal"] for document in documents] == [document["goal"] for document in DOCUMENTS["piqa"]]
        (digest,) = task.identity()["data"].values()
        assert digest == hashlib.sha256((place / "validation.jsonl").read_bytes()).hexdigest()


def test_every_format_of_local_files_gives_the_same_documents(tmp_path):
    import bz2

    import pyarrow as pa
    import pyarrow.parquet as pq

    records = [*DOCUMENTS["arc_easy"], {"id": "x", "question": "no choices"}]
    lines = "".join(json.dumps(record) + "\n" for record in records).encode()
    (tmp_path / "a.jsonl").write_bytes(lines)
    (tmp_path / "a.json").write_text(json.dumps(records, indent=1))
    for suffix, compress in (("gz", gzip.compress), ("xz", lzma.compress), ("bz2", bz2.compress)):
        (tmp_path / f"a.jsonl.{suffix}").write_bytes(compress(lines))
    with pa.output_stream(str(tmp_path / "a.jsonl.zst"), compression="zstd") as stream:
        stream.write(lines)
    names = dict.fromkeys(name for record in records for name in record)
    pq.write_table(pa.table({name: [record.get(name) for record in records] for name in names}), tmp_path / "a.parquet")
    expected = [{name: record.get(name) for name in names} for record in records]
    for file in tmp_path.iterdir():
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        assert list(local_dataset("arc_easy", {"test": (str(file), digest)})["test"]) == expected, file


def test_a_file_that_changes_between_its_hash_and_its_reading_is_refused(tmp_path):
    file = tmp_path / "piqa.jsonl"
    file.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS["piqa"]))
    (task,) = find_tasks(["piqa"], LocalData.parse([f"piqa={file}"]))
    task.identity()
    file.write_text(file.read_text().replace("tea", "ink"))
    with pytest.raises(ValueError, match=r"piqa.jsonl was changed while the task was evaluated: run the command again"):
        task.load()


def test_scores_of_other_requests_are_refused(converted, sets, tmp_path):
    asked, scores = tmp_path / "requests.jsonl", tmp_path / "scores.jsonl"
    run(converted, "piqa", "--data", sets, "--export-requests", asked)
    assert runner.invoke(app, ["eval-score", str(converted), str(asked), str(scores)]).exit_code == 0
    for change, message in [
        (("boolq", "--import-scores", scores), "lacks a request of these tasks"),
        (("piqa", "--import-scores", asked), "is a file of affine-attn requests 1"),
    ]:
        refused(message, converted, *change, "--data", sets, "--output", tmp_path / "out")
    lines = scores.read_text().splitlines()
    scores.write_text("\n".join(lines[:-1]))
    refused("is damaged", converted, "piqa", "--import-scores", scores, "--data", sets, "--output", tmp_path / "out")
    tiny = tmp_path / "tiny"
    tiny_model("softmax").save_pretrained(tiny)
    answer = runner.invoke(app, ["eval-score", str(tiny), str(asked), str(scores)])
    assert answer.exit_code == 2
    assert "exported for another model" in answer.stderr


def test_a_place_that_cannot_be_written_is_named_before_anything_is_computed(converted, sets, tmp_path):
    (tmp_path / "file").write_text("")
    below = tmp_path / "file" / "below"

    def measure():
        raise AssertionError("it would be lost")

    with pytest.raises(ValueError, match=r"results cannot be written to .*below: give a folder of your own"):
        measured_once(below, "piqa", {}, measure)
    asked = tmp_path / "requests.jsonl"
    run(converted, "piqa", "--data", sets, "--limit", 2, "--export-requests", asked)
    assert runner.invoke(app, ["eval-score", str(converted), str(asked), str(tmp_path / "new" / "s")]).exit_code == 0
    with pytest.raises(FileExistsError):
        score_file(SimpleNamespace(config=AutoConfig.from_pretrained(converted)), {}, asked, below)


def refused(message, *arguments):
    answer = run(*arguments)
    assert answer.exit_code == 2, answer.output
    lines = [line for line in answer.stderr.splitlines() if line and "%|" not in line]
    assert message in lines[-1], answer.stderr
    assert "Traceback" not in answer.output
    return lines


def test_mistakes_are_answered_in_one_line(llama, sets, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"goal": "x"}\n')
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"goal": "x", "sol1": "never" * 300, "sol2": "now", "label": 1}) + "\n")
    cut = tmp_path / "cut.jsonl"
    cut.write_text('{"goal": "x", \n')
    packed = {"xz": lzma.compress(long.read_bytes()), "gz": gzip.compress(long.read_bytes())}
    broken = {f"cut.jsonl.{kind}": content[:-20] for kind, content in packed.items()}
    broken["changed.jsonl.xz"] = packed["xz"].replace(packed["xz"][30:40], b"0123456789")
    for name, content in broken.items():
        (tmp_path / name).write_bytes(content)
    for arguments, message in [
        *(((llama, "piqa", "--data", f"piqa={tmp_path / name}"), "is damaged, or not JSON lines") for name in broken),
        ((tmp_path / "nowhere",), "there is no folder"),
        ((llama, "--dtype", "float8"), "--dtype must be one of float32"),
        ((llama, "--device", "abacus"), "is none that torch knows"),
        ((llama, "arc_esy"), "did you mean 'arc_easy'?"),
        ((llama, "arc_easy"), "give local files with --data"),
        ((llama, "--data", tmp_path / "none"), "there is no folder"),
        ((llama, "c4", "--data", sets), "c4/validation.jsonl, or give --data c4=FILE"),
        ((llama, "c4", "--data", f"c4={tmp_path / 'none'}"), "there is no file"),
        ((llama, "piqa", "--data", f"piqa={bad}"), "its fields must be those of baber/piqa"),
        ((llama, "piqa", "--data", f"piqa={cut}"), "cut.jsonl, line 1, is not JSON"),
        ((llama, "--text", tmp_path / "none"), "there is no file"),
        ((llama, "--shards", tmp_path), "has no manifest.json: make it with affine-attn prepare"),
        ((llama, "--length", "8"), "are for --text and --shards"),
        ((llama, "--import-scores", tmp_path / "none", "--data", sets), "there is no file"),
        ((llama, "--text", bad, "--import-scores", bad), "--import-scores is for tasks"),
    ]:
        lines = refused(message, *arguments, "--output", tmp_path / "out")
        assert len(lines) == 1, lines
    given = ["--data", f"piqa={long}", "--output", tmp_path / "out"]
    refused("more than the 256 positions of the model", llama, "piqa", *given)
    refused("more than the 256 positions of the model", llama, "piqa", *given, "--export-requests", tmp_path / "asked")
    assert not (tmp_path / "out").exists()


OTHERS = {
    "gsm8k": {
        "train": [{"question": f"How much is {i} and {i}?", "answer": f"#### {2 * i}"} for i in range(6)],
        "test": [{"question": "How much is 7 and 7?", "answer": "#### 14"}],
    },
    "triviaqa": {"validation": [{"question": "What floats", "answer": {"aliases": ["ice"], "value": "ice"}}]},
    "lambada_openai": {"test": [{"text": "The ferry left before noon"}]},
    "wikitext": {"test": [{"page": "A page about boats."}]},
    "sciq": {
        "test": [
            {"support": "Ice melts.", "question": "What melts?", "correct_answer": "ice"}
            | {f"distractor{i}": f"rock {i}" for i in (1, 2, 3)}
        ]
    },
    "squad_completion": {"validation": [{"text": "a", "value": "b"}]},
    "humaneval": {"test": [{"task_id": "1", "prompt": "def f():", "test": "", "entry_point": "f"}]},
    "ifeval": {"train": [{"key": 1, "prompt": "Say hi.", "instruction_id_list": [], "kwargs": []}]},
}


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    folder = tmp_path_factory.mktemp("others")
    for task, splits in OTHERS.items():
        (folder / task).mkdir()
        for split, documents in splits.items():
            (folder / task / f"{split}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in documents))
    return folder


def test_other_tasks_run_on_local_files_and_log_their_items(others, llama, tmp_path):
    long = tmp_path / "llama"
    small_llama(long, max_position_embeddings=1024)
    tasks = ["gsm8k", "triviaqa", "lambada_openai", "wikitext", "sciq"]
    results(long, *tasks, "--data", others, "--output", tmp_path, "--log-samples")

    def items(task: str) -> list[dict]:
        (file,) = tmp_path.glob(f"{task}-*.samples.jsonl")
        return [json.loads(line) for line in file.read_text().splitlines()]

    strict, flexible = items("gsm8k")
    assert (strict["filter"], flexible["filter"]) == ("strict-match", "flexible-extract")
    assert strict["choices"][0]["context"].count("Question:") == 6  # five shots
    assert isinstance(strict["choices"][0]["generated"], str)
    assert isinstance(items("triviaqa")[0]["choices"][0]["generated"], str)
    assert items("wikitext")[0]["choices"][0]["log_likelihood"] < 0
    assert items("lambada_openai")[0]["choices"][0]["continuation"] == " noon"
    (sciq,) = items("sciq")
    assert [choice["continuation"] for choice in sciq["choices"]] == [" rock 1", " rock 2", " rock 3", " ice"]
    best = max(range(4), key=lambda i: sciq["choices"][i]["log_likelihood"])
    assert (sciq["target"], sciq["doc"]["correct_answer"], sciq["acc"]) == (3, "ice", float(best == 3))


def test_items_of_a_finished_task_are_written_when_they_are_asked_for(converted, sets, tmp_path):
    plain = results(converted, "piqa", "--data", sets, "--output", tmp_path)
    assert not list(tmp_path.glob("*.jsonl"))
    logged = results(converted, "piqa", "--data", sets, "--output", tmp_path, "--log-samples")
    assert logged["piqa"]["metrics"] == plain["piqa"]["metrics"]
    assert "samples" not in logged["piqa"]
    (file,) = tmp_path.glob("piqa-*.samples.jsonl")
    assert len(file.read_text().splitlines()) == len(DOCUMENTS["piqa"])
    refused("--log-samples is for tasks", converted, "--text", sets / "texts.jsonl", "--log-samples")


def test_what_a_task_needs_beyond_documents_is_said(others, llama, monkeypatch):
    refused("squad_completion is a program of the harness", llama, "squad_completion", "--data", others)

    def unreachable(*_, **__):
        raise FileNotFoundError("code_eval is not on this machine")

    monkeypatch.setattr("evaluate.load", unreachable)
    refused("humaneval: it needs more than documents", llama, "humaneval", "--data", others)
    monkeypatch.setitem(sys.modules, "langdetect", None)
    refused("ifeval needs langdetect: pip install langdetect", llama, "ifeval", "--data", others)
    refused("give the tasks of a group by their names, such as mmlu_", llama, "mmlu", "--data", others)


def test_requests_that_differ_in_their_last_token_share_a_row(llama):
    model = AutoModelForCausalLM.from_pretrained(llama)
    pairs = [Pair((1, 2, 3), (choice,)) for choice in (4, 5, 6)] + [Pair((1, 2), (3, 7)), Pair((1, 2), (9, 7))]
    alone = [score(model, [pair])[0] for pair in pairs]
    read = []
    model.register_forward_pre_hook(lambda _, arguments: read.append(len(arguments[0])))
    together = score(model, pairs)
    # (1, 2, 3) for four of them.
    assert read == [2]
    assert [each.greedy for each in together] == [each.greedy for each in alone]
    expected = [each.log_likelihood for each in alone]
    assert [each.log_likelihood for each in together] == pytest.approx(expected, rel=1e-5)


def test_a_task_without_a_file_comes_from_the_hub_where_files_of_others_are_given(tmp_path):
    (tmp_path / "texts.jsonl").write_text("{}")
    config = {"validation_split": "validation", "test_split": None}
    only_files = LocalData.parse([f"c4={tmp_path / 'texts.jsonl'}"])
    assert only_files.splits("c4", config) == {"validation": tmp_path / "texts.jsonl"}
    assert only_files.splits("arc_easy", config) == {}
    with pytest.raises(ValueError, match="is evaluated on its validation split"):
        LocalData.parse([str(tmp_path)]).splits("arc_easy", config)
