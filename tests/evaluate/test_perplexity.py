"""Perplexity and loss by position against the model's own loss, computed densely."""

import json
import math
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from typer.testing import CliRunner

from affine_attn import Affine, AttentionSpec
from affine_attn.cli import app, terminal
from affine_attn.data.prepare import prepare
from affine_attn.data.shards import TokenShards
from affine_attn.evaluate.long_context import loss_by_position
from affine_attn.evaluate.perplexity import mean_loss, perplexity, token_losses, windows
from affine_attn.evaluate.score import Pair, score
from affine_attn.models import AffineAttnForCausalLM, convert
from tests.support.evaluation_sets import TEXTS, small_llama
from tests.support.hf import stir, tiny_model

runner = CliRunner()
LENGTH = 48


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with affine attention, shards of its tokenizer, and the texts they were made of."""
    place = tmp_path_factory.mktemp("model")
    model = stir(convert(small_llama(place), "affine"))
    model.save_pretrained(place)
    (place / "texts").mkdir()
    for i, text in enumerate(TEXTS):
        (place / "texts" / f"{i}.txt").write_text(text)
    prepare(place / "shards", [str(place / "texts")], tokenizer=str(place), valid=0.999)
    return place


def evaluated(*arguments) -> dict:
    answer = runner.invoke(app, ["eval", *map(str, arguments), "--json"])
    assert answer.exit_code == 0, answer.output
    return {result["name"]: result for result in json.loads(answer.stdout)["results"]}


def dense_losses(model, tokens):
    """[T - 1] from one forward over all tokens."""
    with torch.no_grad():
        logits = model(torch.tensor(tokens)[None]).logits[0]
    return F.cross_entropy(logits[:-1], torch.tensor(tokens[1:]), reduction="none")


@pytest.mark.parametrize("stride", [1, 3, 7, 8])
@pytest.mark.parametrize("count", [0, 1, 8, 9, 30])
def test_windows_predict_every_token_once_after_all_the_context_that_fits(count, stride):
    tokens = list(range(100, 100 + count))
    pairs = list(windows(tokens, 7, 8, stride))
    assert [token for pair in pairs for token in pair.continuation] == tokens
    done = 0
    sequence = (7, *tokens)
    for pair in pairs:
        done += len(pair.continuation)
        whole = pair.context + pair.continuation
        assert whole == sequence[done + 1 - len(whole) : done + 1]
        # Eight inputs, or all there are.
        assert len(whole) - 1 == min(8, done)
        assert pair is pairs[0] or len(pair.continuation) <= stride


def test_a_stride_beyond_the_length_is_refused():
    with pytest.raises(ValueError, match="--stride must be between 1 and the length of 8"):
        list(windows([1, 2], 0, 8, 9))


def test_scores_are_those_of_a_dense_forward():
    model = tiny_model("affine")
    pairs = [Pair((1, 2, 3), (4, 5, 6)), Pair((9,), (8, 7)), Pair((3,) * 11, (1,))]
    for pair, found in zip(pairs, score(model, pairs), strict=True):
        expected = dense_losses(model, [*pair.context, *pair.continuation])[-len(pair.continuation) :]
        assert found.log_likelihood == pytest.approx(-float(expected.sum()), rel=1e-5)
    with torch.no_grad():
        likeliest = int(model(torch.tensor([[1, 2, 3]])).logits[0, -1].argmax())
    found = score(model, [Pair((1, 2, 3), (likeliest,)), Pair((1, 2, 3), ((likeliest + 1) % 61,))])
    assert [result.greedy for result in found] == [True, False]


def test_the_mean_is_over_tokens_and_its_error_over_documents():
    generator = np.random.default_rng(0)
    counts = generator.integers(5, 50, 400)
    losses = counts * 2.0 + generator.normal(size=400) * counts
    found = mean_loss(losses.tolist(), counts.tolist())
    assert found["value"] == pytest.approx(losses.sum() / counts.sum())
    draws = generator.integers(0, 400, (4000, 400))
    bootstrap = (losses[draws].sum(1) / counts[draws].sum(1)).std()
    assert found["stderr"] == pytest.approx(bootstrap, rel=0.05)
    per_token = perplexity(losses.tolist(), counts.tolist())
    assert per_token["value"] == pytest.approx(math.exp(found["value"]))
    assert per_token["stderr"] == pytest.approx(per_token["value"] * found["stderr"])
    # With one token each that of a mean: s / sqrt(n), with n - 1 in s.
    assert mean_loss([1.0, 3.0], [1, 1]) == {"value": 2.0, "stderr": 1.0}
    assert mean_loss([6.0], [3]) == {"value": 2.0, "stderr": None}
    assert perplexity([1e6], [1]) == {"value": None, "stderr": None}


def test_texts_are_scored_document_by_document(folder, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    file = tmp_path / "short.jsonl"
    short = [TEXTS[0], TEXTS[2]]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in short))
    found = evaluated(folder, "--text", file, "--length", 200, "--output", tmp_path)["perplexity-short-200"]
    losses = [dense_losses(model, [tokenizer.eos_token_id, *tokenizer.encode(text)]) for text in short]
    assert found["metrics"]["loss"]["value"] == pytest.approx(float(torch.cat(losses).mean()), rel=1e-5)
    assert found["tokens"] == sum(map(len, losses))
    assert (found["length"], found["stride"]) == (200, 200)
    assert "every document on its own" in found["boundaries"]
    # One token at a time sees all that the window holds: a document within the length has the same loss.
    strided = evaluated(folder, "--text", file, "--length", 200, "--stride", 1, "--output", tmp_path)
    assert strided["perplexity-short-200"]["metrics"]["loss"] == pytest.approx(found["metrics"]["loss"], rel=1e-4)


def test_shards_are_scored_as_training_packs_them(folder, tmp_path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    found = evaluated(folder, "--shards", folder / "shards", "--length", LENGTH, "--output", tmp_path)
    result = found[f"perplexity-shards-{LENGTH}"]
    shards = TokenShards(folder / "shards", LENGTH, "valid")
    total, count = 0.0, 0
    for item in (shards[i] for i in range(len(shards))):
        with torch.no_grad():
            logits = model(item["input_ids"][None], position_ids=item["position_ids"][None]).logits[0]
        total += float(F.cross_entropy(logits, item["shift_labels"], reduction="sum"))
        count += int((item["shift_labels"] >= 0).sum())
    assert result["tokens"] == count
    assert result["metrics"]["loss"]["value"] == pytest.approx(total / count, rel=1e-5)
    assert result["boundaries"] == "documents do not see each other, first tokens are not predicted"


@pytest.mark.parametrize(
    ("lengths", "expected", "why"),
    [
        ({"of": 24}, 24, "as in the model's training"),
        ({"of": 24, "positions": 16}, 16, "as many as the model has positions"),
        ({"positions": 4096}, 2048, "what the model was trained on is not known"),
    ],
)
def test_a_length_that_is_not_given_is_that_of_the_training(lengths, expected, why, folder, tmp_path):
    """The affine stage of a converted model, or its run, says how long; that of softmax alone does not."""
    trained = lengths.get("of")
    attention = AttentionSpec(affine=Affine(length=trained)) if trained else "softmax"
    model = AffineAttnForCausalLM.from_pretrained(folder).config
    model.attention, model.max_position_embeddings = attention, lengths.get("positions", 256)
    AffineAttnForCausalLM(model).save_pretrained(tmp_path / "model")
    for file in folder.glob("tokenizer*"):
        shutil.copy(file, tmp_path / "model")
    answer = runner.invoke(app, ["eval", str(tmp_path / "model"), "--text", str(folder / "texts" / "0.txt")])
    assert answer.exit_code == 0, answer.output
    assert f"sequences of {expected} tokens, {why}; --length gives others" in answer.stderr
    assert list((tmp_path / "model" / "evaluation").glob(f"perplexity-0-{expected}-*.json"))


def test_texts_of_one_name_are_told_apart_in_the_table(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(terminal.console, "width", 400)
    files = [tmp_path / name / "valid.txt" for name in ("a", "b")]
    for file in files:
        file.parent.mkdir()
        file.write_text(f"A text of {file.parent.name}.")
    given = [str(folder), "--text", str(files[0]), "--text", str(files[1]), "--length", "16"]
    answer = CliRunner().invoke(app, ["eval", *given, "--output", str(tmp_path)])
    assert answer.exit_code == 0, answer.output
    for file in files:
        assert f"perplexity-valid-16 of {file}" in answer.stdout


def test_the_head_is_applied_in_stretches(monkeypatch):
    model = tiny_model("affine")
    tokens = torch.randint(0, 61, (41,))
    item = {"input_ids": tokens[:-1], "shift_labels": tokens[1:]}
    whole = token_losses(model, item)
    torch.testing.assert_close(whole.float(), dense_losses(model, tokens.tolist()), rtol=1e-5, atol=1e-5)
    monkeypatch.setattr("affine_attn.evaluate.perplexity.CHUNK_BYTES", 61 * 4 * 7)
    torch.testing.assert_close(token_losses(model, item), whole)
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(ValueError, match="more than a plain head"):
        token_losses(model, item)


class Tokens:
    def __init__(self, count):
        self.tokens = count
        self._all = torch.randint(0, 61, (count,)).numpy()

    def read(self, start, stop):
        return self._all[start:stop]


@pytest.mark.parametrize("length", [1, 6, 64])
def test_loss_by_position_is_that_of_dense_forwards(length):
    model, stream = tiny_model("affine", max_position_embeddings=16), Tokens(3 * length + 1)
    found = loss_by_position(model, stream, length)
    assert found["sequences"] == 3
    rows = torch.stack(
        [dense_losses(model, stream.read(i * length, (i + 1) * length + 1).tolist()) for i in range(3)]
    ).double()
    assert found["metrics"]["loss"]["value"] == pytest.approx(float(rows.mean()), rel=1e-5)
    covered = [i for place in found["positions"] for i in range(place["first"], place["last"] + 1)]
    assert covered == list(range(length))
    for place in found["positions"]:
        means = rows[:, place["first"] : place["last"] + 1].mean(1)
        assert place["value"] == pytest.approx(float(means.mean()), rel=1e-5)
        assert place["stderr"] == pytest.approx(float(means.std() / math.sqrt(3)), rel=1e-3)
    with pytest.raises(ValueError, match="needs 501 tokens"):
        loss_by_position(model, stream, 500)


def test_positions_from_the_command(folder, tmp_path):
    given = ["--by-position", "--length", 32, "--length", 300, "--limit", 2, "--output", tmp_path]
    found = evaluated(folder, "--shards", folder / "shards", "--text", folder / "texts" / "1.txt", *given)
    assert list(found) == ["positions-1-32", "positions-1-300", "positions-shards-32", "positions-shards-300"]
    # Beyond the 256 positions of the model.
    assert found["positions-shards-300"]["positions"][-1]["last"] == 299
    assert found["positions-shards-300"]["model_length"] == 256
    answer = runner.invoke(app, ["eval", str(folder), "--text", str(folder / "texts" / "1.txt"), *map(str, given)])
    assert "loss at 256-299" in answer.stdout
