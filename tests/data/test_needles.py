"""Needles in haystacks: how sequences are made, and that training on them runs."""

import dataclasses
import pickle
import re

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from affine_attn.data.needles import Needles, NeedleSequences
from affine_attn.data.prepare import prepare
from affine_attn.data.shards import IGNORED, TokenShards
from affine_attn.distill.data import sequences
from affine_attn.distill.recipes import recipe
from affine_attn.distill.run import run
from tests.support.tiny_runs import metrics, tiny

LENGTH = 192


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("needle")
    sources = folder / "text"
    sources.mkdir()
    for number in range(20):
        words = (f"line {line} of text {number}, which says nothing about magic" for line in range(40))
        (sources / f"{number}.txt").write_text("\n".join(words))
    prepare(folder / "data", [str(sources)], vocab_size=400, valid=0.2)
    return folder / "data"


def decoded(data, ids) -> str:
    return AutoTokenizer.from_pretrained(data / "tokenizer").decode(ids)


def test_only_the_answers_are_learned_and_they_are_in_the_text(data):
    made = NeedleSequences(TokenShards(data, LENGTH, documents=False), number=50, needles=2, seed=5)
    for i in (0, 7, 49):
        item = made[i]
        assert item["input_ids"].shape == item["shift_labels"].shape == (LENGTH,)
        text = decoded(data, item["input_ids"])
        said = re.findall(r"The special magic (\w+) number is (\d{7})\.", text)
        assert len(set(said)) == 2
        asked = re.findall(r"The special magic (\w+) number is (\d{7})(?!\.)", text)
        assert sorted(asked) == sorted(said)
        counts = item["shift_labels"] != -100
        assert decoded(data, item["shift_labels"][counts]).split() == [number for _, number in asked]
        # A label is the token that follows; transformers' own labels are of the token itself.
        assert torch.equal(item["shift_labels"][counts], item["input_ids"][1:][counts[:-1]])
        assert torch.equal(item["labels"][1:], item["shift_labels"][:-1])
        again = NeedleSequences(made.text, number=50, needles=2, seed=5)[i]
        assert all(torch.equal(item[name], again[name]) for name in item)
    assert not torch.equal(made[0]["input_ids"], made[1]["input_ids"])
    # As the processes that read data get it.
    assert torch.equal(pickle.loads(pickle.dumps(made))[7]["input_ids"], made[7]["input_ids"])
    with pytest.raises(ValueError, match="60 tokens are too few for 3 needles and 3 questions"):
        NeedleSequences(TokenShards(data, 60), 1)[0]


def test_what_is_held_out_asks_for_numbers_that_were_never_learned(data):
    chosen = tiny(data, needles=2, sequence_length=LENGTH, documents=False, valid_sequences=8)
    learned, held_out = (
        {tuple(item["labels"][item["labels"] != IGNORED].tolist()) for item in map(made.__getitem__, range(8))}
        for made in (sequences(chosen), sequences(chosen, "valid"))
    )
    assert len(learned) == len(held_out) == 8
    assert not learned & held_out


def test_depth_is_where_a_needle_lies(data):
    tokenizer = AutoTokenizer.from_pretrained(data / "tokenizer")
    made = Needles(TokenShards(data, LENGTH, documents=False), tokenizer.encode)
    for depth in (0.0, 0.5, 1.0):
        ids, _ = made.haystack(np.random.default_rng(0), 0, 2000, [depth], [0])
        place = decoded(data, ids).index("The special") / len(decoded(data, ids))
        assert place == pytest.approx(depth, abs=0.06)


def test_the_recipe_goes_on_from_a_model(data, tmp_path):
    paper = recipe("needle")
    assert (paper.steps, paper.warmup_steps, paper.decay_steps, paper.sequence_length) == (300, 100, 100, 4096)
    assert (paper.needles, paper.global_batch, paper.micro_batch) == (3, 64, 8)
    vocabulary = TokenShards(data, LENGTH).manifest["vocab_size"]
    first = tiny(data, vocab_size=vocabulary, sequence_length=64, steps=4)
    run(first, tmp_path / "first")
    tuning = dataclasses.replace(
        first, start=str(tmp_path / "first" / "model"), needles=2, sequence_length=LENGTH, documents=False
    )
    tuning = dataclasses.replace(tuning, learning_rate=1e-9, valid_sequences=3)
    assert isinstance(sequences(tuning), NeedleSequences)
    run(tuning, tmp_path / "tuned")
    a, b = (AutoModelForCausalLM.from_pretrained(tmp_path / name / "model") for name in ("first", "tuned"))
    weights = b.state_dict()
    for name, value in a.state_dict().items():
        if "alpha_ma" not in name:
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-7)
    # N of beta is the model's own, not that of the tuning.
    assert b.config.spec(0).affine.length == 64
    assert metrics(tmp_path / "tuned")[-1]["valid_tokens"] < 3 * 2 * 8
    for changes, message in (
        ({"attention": "sink"}, "has another attention than attention=sink"),
        ({"student": "micro"}, "has hidden_size 64, student=micro 128"),
        ({"start": str(tmp_path / "nowhere")}, "there is no folder"),
    ):
        with pytest.raises(ValueError, match=message):
            run(dataclasses.replace(tuning, **changes), tmp_path / "refused")
