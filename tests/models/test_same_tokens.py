"""Shards and models of different tokenizers: where the vocabulary is large enough, no error and no loss would tell."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from affine_attn.cli import app
from affine_attn.data.prepare import prepare
from affine_attn.data.tokenizer import END_OF_DOCUMENT, require_same_tokens
from affine_attn.models import AffineAttnForCausalLM, preset

VOCAB = 280
FIELDS = ["student=nano", f"vocab_size={VOCAB}", "sequence_length=16", "global_batch=2", "micro_batch=2", "steps=1"]
FIELDS += ["warmup_steps=0", "decay_steps=0", "attention=softmax"]


def corpus(folder: Path, text: str) -> Path:
    folder.mkdir()
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": f"{text} {i}"}) + "\n" for i in range(40)))
    prepare(folder / "data", [str(folder / "text.jsonl")], vocab_size=VOCAB, valid=0.3)
    return folder / "data"


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> tuple[Path, Path, Path]:
    """A model with its tokenizer, the shards of that tokenizer, and shards of another one of the same size."""
    folder = tmp_path_factory.mktemp("tokens")
    own, other = (
        corpus(folder / "own", "a quiet river runs " * 9),
        corpus(folder / "other", "four black boxes jump " * 9),
    )
    AffineAttnForCausalLM(preset("nano", "softmax", vocab_size=VOCAB)).save_pretrained(folder / "model")
    shutil.copytree(own / "tokenizer", folder / "model", dirs_exist_ok=True)
    return folder / "model", own, other


COMMANDS = {
    "teacher": ["distill", "demo", "data={data}", "teacher={model}", *FIELDS, "--output", "{out}"],
    "start": ["distill", "demo", "data={data}", "teacher=none", "start={model}", *FIELDS, "--output", "{out}"],
    "cache-teacher": ["cache-teacher", "{data}", "{model}", "--sequence-length", "16", "--output", "{out}"],
    "eval": ["eval", "{model}", "--shards", "{data}", "--length", "16", "--output", "{out}"],
    "analyze": ["analyze", "{model}", "--data", "{data}", "--length", "16", "--no-figures", "--output", "{out}"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_shards_of_another_tokenizer_are_refused(name, places, tmp_path):
    model, own, other = places
    for data, code in ((other, 2), (own, 0)):
        arguments = [part.format(data=data, model=model, out=tmp_path / "out") for part in COMMANDS[name]]
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == code, result.output
        assert ("made with another tokenizer than that of" in result.output) == bool(code)


def test_special_tokens_may_differ_and_a_tokenizer_may_be_missing(places, tmp_path):
    model, own, other = places
    shutil.copytree(model, tmp_path / "model")
    file = tmp_path / "model" / "tokenizer.json"
    file.write_text(file.read_text().replace(END_OF_DOCUMENT, "<|im_end|>"))
    require_same_tokens(own, str(tmp_path / "model"))
    file.unlink()
    require_same_tokens(other, str(tmp_path / "model"))
