"""Needle retrieval of ``affine-attn eval``: against generation, and with models whose answers are known."""

import json
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from affine_attn.cli import app
from affine_attn.data.needles import Needles
from affine_attn.data.prepare import prepare
from affine_attn.data.texts import JoinedTexts, joined_shards
from affine_attn.evaluate import long_context
from affine_attn.evaluate.long_context import needle_retrieval
from affine_attn.models import convert
from tests.support.evaluation_sets import small_llama
from tests.support.hf import stir
from tests.support.tiny_runs import counting_shards

runner = CliRunner()
LENGTH = 400


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with affine attention, a long text, and shards of it."""
    place = tmp_path_factory.mktemp("model")
    stir(convert(small_llama(place), "affine")).save_pretrained(place)
    lines = (f"line {line} of a text that says nothing about numbers" for line in range(300))
    (place / "text.txt").write_text("\n".join(lines))
    prepare(place / "shards", [str(place / "text.txt")], tokenizer=str(place), valid=0.999)
    return place


class Reader(torch.nn.Module):
    """Writes the number of the needle that ``choose`` takes, given (city, number) of the needles and the city asked."""

    def __init__(self, tokenizer, choose):
        super().__init__()
        self.tokenizer, self.choose = tokenizer, choose
        self.head = torch.nn.Identity()
        self.device, self.config = torch.device("cpu"), SimpleNamespace(max_position_embeddings=256)
        self.base_model = self.read

    def get_output_embeddings(self):
        return self.head

    def read(self, input_ids, use_cache):
        ids = input_ids[0].tolist()
        text = self.tokenizer.decode(ids)
        needles = dict(re.findall(r"The special magic (\w+) number is (\d{7})\.", text))
        assert len(needles) == 3
        city = re.findall(r"The special magic (\w+) number is", text)[-1]
        answer = self.tokenizer.encode(f" {needles[self.choose(list(needles), city)]}")
        hidden = torch.zeros(1, len(ids), len(self.tokenizer))
        # The answer to the question ends the sequence; each of its tokens is foretold one position earlier.
        for back, token in enumerate(reversed(answer)):
            hidden[0, len(ids) - 2 - back, token] = 1.0
        return SimpleNamespace(last_hidden_state=hidden)


def retrieved(folder, choose, **settings):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = JoinedTexts(tokenizer, folder / "text.txt")
    return needle_retrieval(Reader(tokenizer, choose), text, tokenizer.encode, LENGTH, **settings)


def test_a_file_without_documents_is_named(folder, tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"empty.jsonl has no text"):
        JoinedTexts(AutoTokenizer.from_pretrained(folder), tmp_path / "empty.jsonl")


def test_a_model_that_reads_the_question_is_always_right(folder):
    found = retrieved(folder, lambda cities, asked: asked, haystacks=6)
    assert found["metrics"]["accuracy"] == {"value": 1.0, "stderr": 0.0}
    assert [place["depth"] for place in found["depths"]] == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert {place["value"] for place in found["depths"]} == {1.0}


def test_a_model_that_takes_any_needle_is_right_by_chance(folder):
    """The first in the alphabet of three cities: a third. The depths share their haystacks, so errors do not shrink."""
    found = retrieved(folder, lambda cities, asked: min(cities), depths=[0.0, 1.0], haystacks=90)
    cell = found["metrics"]["accuracy"]
    assert cell["stderr"] == pytest.approx(math.sqrt(cell["value"] * (1 - cell["value"]) / 89))
    assert abs(cell["value"] - 1 / 3) < 2 * cell["stderr"] < 0.12
    for place in found["depths"]:
        assert (place["value"], place["stderr"]) == pytest.approx((cell["value"], cell["stderr"]))


def test_depth_is_that_of_the_needle_that_is_asked_for(folder):
    first, last = ([place["value"] for place in retrieved(folder, choose, depths=[0.0, 1.0], haystacks=8)["depths"]]
                   for choose in (lambda cities, asked: cities[0], lambda cities, asked: cities[-1]))  # fmt: skip
    assert (first, last) == ([1.0, 0.0], [0.0, 1.0])


def test_an_answer_counts_if_generation_gives_it(folder, monkeypatch):
    """On haystacks whose answer is what the model writes, or that but for the last token."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    needles = Needles(joined_shards(folder / "shards"), tokenizer.encode)
    for seed in range(3):
        ids, labels = needles.haystack(np.random.default_rng(seed), seed, LENGTH, [0.3, 0.5, 0.9], asked=[0])
        digits = int((labels >= 0).sum())
        with torch.no_grad():
            written = model.generate(
                ids[None, :-digits], attention_mask=torch.ones(1, LENGTH - digits), max_new_tokens=digits,
                min_new_tokens=digits, do_sample=False, suppress_tokens=[],
            )[0]  # fmt: skip
        answer = labels.clone()
        answer[labels >= 0] = written[-digits:]
        assert long_context._answered(model, long_context.Haystack(written, answer))
        changed = written.clone()
        changed[-1] = (changed[-1] + 1) % len(tokenizer)
        answer[-2] = changed[-1]
        assert not long_context._answered(model, long_context.Haystack(changed, answer))


def evaluated(*arguments):
    answer = runner.invoke(app, ["eval", *map(str, arguments)])
    assert answer.exit_code == 0, answer.output
    return answer


def test_the_command_measures_once_and_says_what(folder, tmp_path):
    asked = [folder, "--shards", folder / "shards", "--text", folder / "text.txt", "--needle", "--by-position"]
    asked += ["--length", 200, "--length", LENGTH, "--depth", 0.5, "--limit", 2, "--output", tmp_path]
    found = {result["name"]: result for result in json.loads(evaluated(*asked, "--json").stdout)["results"]}
    assert list(found) == [
        f"{kind}-{place}-{length}" for place in ("text", "shards") for kind in ("positions", "needle")
        for length in (200, LENGTH)
    ]  # fmt: skip
    result = found[f"needle-shards-{LENGTH}"]
    assert (result["length"], result["haystacks"], result["needles"], result["seed"]) == (LENGTH, 2, 3, 0)
    assert (result["model_length"], [place["depth"] for place in result["depths"]]) == (256, [0.5])
    # A model that was never trained.
    assert result["metrics"]["accuracy"] == {"value": 0.0, "stderr": 0.0}
    assert result["model"]["fingerprint"] == result["identity"]["model"]["fingerprint"]
    assert result["versions"]["torch"]
    again = evaluated(*asked)
    assert again.stderr.count("measured before") == 8
    assert "accuracy at depth 0.5" in again.stdout
    other = evaluated(*asked, "--seed", 1)
    assert other.stderr.count("measured before") == 4


def test_what_cannot_be_asked_is_one_sentence(folder, tmp_path):
    (tmp_path / "short.txt").write_text("few words")
    (tmp_path / "counting").mkdir()
    large = counting_shards(tmp_path / "counting")
    manifest = json.loads((large / "manifest.json").read_text()) | {"vocab_size": 100_000}
    (large / "manifest.json").write_text(json.dumps(manifest))
    for arguments, message in (
        (["--needle"], "--needle are for --text and --shards"),
        (["--text", folder / "text.txt", "--depth", 0.5], "--depth is where the needle of --needle lies"),
        (["--text", folder / "text.txt", "--needle", "--stride", 9], "--stride is for --text"),
        (["--text", folder / "text.txt", "--needle", "--length", 40], "40 tokens are too few for 3 needles"),
        (["--text", tmp_path / "short.txt", "--needle", "--length", 400], "give more text"),
        (["--shards", large, "--needle"], "tokens up to 99999"),
    ):
        answer = runner.invoke(app, ["eval", str(folder), *map(str, arguments), "--output", str(tmp_path / "no")])
        assert (answer.exit_code, message in answer.output) == (2, True), answer.output
    assert not (tmp_path / "no").exists()


def test_a_tokenizer_without_digits_is_refused(folder):
    with pytest.raises(ValueError, match="does not tell digits apart"):
        Needles(joined_shards(folder / "shards"), lambda words: [0] * len(words))
