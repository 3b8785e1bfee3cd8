"""``affine-attn convert`` and ``affine-attn generate`` on small folders."""

import json
import re
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    modeling_gguf_pytorch_utils,
)
from typer.testing import CliRunner

from affine_attn import Affine, AttentionSpec
from affine_attn.cli import app
from benchmarks.converted import measured
from tests.support.gguf_file import write_gguf
from tests.support.hf import SIZES, tiny_model, words

convert = sys.modules["affine_attn.models.convert"]  # the module, not the function of its name

runner = CliRunner()


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(folder)
    words().save_pretrained(folder)
    return folder


@pytest.mark.filterwarnings("ignore:scale-invariant attention without qk_norm")
def test_perplexity_after_converting(llama, tmp_path):
    (tmp_path / "texts.txt").write_text("w1 w2 w3 w4 w5 w6 w7")
    tokenizer = words()
    tokenizer.eos_token = "w3"
    shutil.copytree(llama, tmp_path / "llama")
    tokenizer.save_pretrained(tmp_path / "llama")
    found = measured(str(tmp_path / "llama"), tmp_path / "texts.txt", length=16, limit=None)
    for name in ("softmax", "sink", "gated", "affine_gated"):
        assert found["variants"][name]["softmax"] == pytest.approx(found["source"], rel=1e-4)
    assert found["variants"]["gated"]["untrained"] != found["source"]
    assert "LogN changes the logits" in found["variants"]["logn"]["softmax"]


def run(*arguments):
    return runner.invoke(app, [str(argument) for argument in arguments])


def logits(folder):
    return AutoModelForCausalLM.from_pretrained(folder)(torch.arange(1, 9)[None]).logits


def test_there_and_back(llama, tmp_path):
    there = run("convert", llama, tmp_path / "there", "--attention", "softmax")
    assert there.exit_code == 0, there.output
    assert "0 new tensors" in there.output
    torch.testing.assert_close(logits(tmp_path / "there"), logits(llama), rtol=0, atol=1e-5)
    back = run("convert", tmp_path / "there", tmp_path / "back", "--to-plain")
    assert back.exit_code == 0, back.output
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "back")) is LlamaForCausalLM
    torch.testing.assert_close(logits(tmp_path / "back"), logits(llama), rtol=0, atol=1e-5)
    assert AutoTokenizer.from_pretrained(tmp_path / "back")("w3 w4").input_ids == [3, 4]


def test_a_conversion_says_what_it_did_to_the_model(llama, tmp_path, monkeypatch):
    monkeypatch.setattr(convert, "_SAMPLE", "w3 w1 w4 w1 w5 w9 w2 w6 " * 9)
    started = run("convert", llama, tmp_path / "affine", "--start-as-softmax", "--with-code", "--length", "100")
    assert started.exit_code == 0, started.output
    assert "4 new tensors (--verbose lists them)" in started.output
    assert re.search(
        r"on 64 tokens the next one's distribution moves by \S+ nats.* at 0% of them$", started.output, re.M
    )
    assert "import affine_attn.models" in started.output
    assert (tmp_path / "affine" / "modeling_affine_attn.py").exists()
    torch.testing.assert_close(logits(tmp_path / "affine"), logits(llama), rtol=0, atol=1e-5)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "affine").config.spec(0).affine.length == 100
    broken = run("convert", llama, tmp_path / "broken", "--verbose")
    assert "model.layers.1.self_attn.alpha.w_a [4, 32]" in broken.output
    assert re.search(r"at \d+% of them: train it, or try --start-as-softmax$", broken.output, re.M)


def test_attention_may_be_json(llama, tmp_path):
    given = '["softmax", {"sink": "learned", "affine": {"length": 100}}]'
    made = run("convert", llama, tmp_path / "new", "--attention", given)
    assert made.exit_code == 0, made.output
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "new").config
    assert config.spec(0) == AttentionSpec()
    assert config.spec(1) == AttentionSpec(sink="learned", affine=Affine(length=100))
    wrong = run("convert", llama, tmp_path / "wrong", "--attention", '{"sink": }')
    assert wrong.exit_code == 2
    assert "is not JSON" in wrong.stderr


def test_ends_that_disagree_are_named(tmp_path):
    LlamaForCausalLM(LlamaConfig(**SIZES | {"eos_token_id": [5, 6]})).save_pretrained(tmp_path / "llama")
    tokenizer = words()
    tokenizer.eos_token, tokenizer.pad_token = "w7", "w0"
    tokenizer.save_pretrained(tmp_path / "llama")
    told = run("convert", tmp_path / "llama", tmp_path / "new").output
    assert "eos: the tokenizer's is 7 (w7), the model's [5, 6]; generate goes by the model's" in told
    assert "pad:" not in told


def test_a_gguf_file_is_a_source(llama, tmp_path, monkeypatch):
    write_gguf(AutoModelForCausalLM.from_pretrained(llama), tmp_path / "tiny.gguf")
    result = run("convert", tmp_path / "tiny.gguf", tmp_path / "new", "--attention", "softmax")
    assert result.exit_code == 0, result.output
    torch.testing.assert_close(logits(tmp_path / "new"), logits(llama), rtol=0, atol=1e-5)
    monkeypatch.setattr(modeling_gguf_pytorch_utils, "is_gguf_available", lambda *_: False)
    missing = run("convert", tmp_path / "tiny.gguf", tmp_path / "other")
    assert missing.exit_code == 2
    assert "gguf" in missing.stderr


def test_a_model_of_the_family_keeps_its_attention_unless_told(tmp_path):
    """Its length above all: the same weights at another one are another model."""
    tiny_model(AttentionSpec(affine=Affine(length=5))).save_pretrained(tmp_path / "model")
    result = run("convert", tmp_path / "model", tmp_path / "with-code", "--with-code")
    assert result.exit_code == 0, result.output
    assert "0 new tensors" in result.output
    torch.testing.assert_close(logits(tmp_path / "with-code"), logits(tmp_path / "model"), rtol=0, atol=0)


@pytest.mark.parametrize("options", [(), ("--temperature", "0.7", "--seed", "3"), ("--recent", "4")])
def test_generate_streams_text_and_says_how_fast(options, tmp_path):
    tiny_model("affine").save_pretrained(tmp_path)
    words().save_pretrained(tmp_path)
    result = run("generate", tmp_path, "w1 w2 w3", "--max-new-tokens", "9", *options)
    assert result.exit_code == 0, result.output
    assert len(re.findall(r"\bw\d+\b", result.stdout)) == 9
    assert re.search(r"9 tokens in .* s, .* tokens/s on cpu", result.stderr)
    again = run("generate", tmp_path, "w1 w2 w3", "--max-new-tokens", "9", *options)
    assert again.stdout == result.stdout


def test_mistakes_are_answered_in_one_line(llama, tmp_path):
    tiny_model("affine").save_pretrained(tmp_path / "model")
    tiny_model("softmax").save_pretrained(tmp_path / "softmax")
    (tmp_path / "damaged").mkdir()
    for file in llama.iterdir():
        (tmp_path / "damaged" / file.name).write_bytes(file.read_bytes()[: 200 if "safetensors" in file.name else None])
    shutil.copytree(llama, tmp_path / "torn")
    (tmp_path / "torn" / "tokenizer.json").write_text('{"version"')
    shutil.copytree(llama, tmp_path / "odd")
    config = json.loads((llama / "config.json").read_text())
    (tmp_path / "odd" / "config.json").write_text(json.dumps(config | {"hidden_size": "32"}))
    LlamaForCausalLM(LlamaConfig(**SIZES | {"vocab_size": 5})).save_pretrained(tmp_path / "small")
    words().save_pretrained(tmp_path / "small")
    new = tmp_path / "new"
    for arguments, message in [
        (("convert", llama, llama), "is not empty; give a new folder"),
        (("convert", llama, new, "--attention", "afine"), "did you mean 'affine'?"),
        (("convert", llama, new, "--attention", "logn", "--start-as-softmax"), "LogN changes the logits"),
        (("convert", llama, new, "--attention", "sink", "--length", "9"), "length: this attention has none"),
        (("convert", llama, new, "--to-plain"), "needs an AffineAttn model"),
        (("convert", tmp_path / "model", new, "--to-plain"), "only softmax attention exists in plain models"),
        (("convert", llama, new, "--to-plain", "--attention", "sink"), "--to-plain goes with none of --attention"),
        (("convert", tmp_path / "damaged", new), "holds a damaged safetensors file"),
        (("convert", llama, new, "--attention", ""), "unknown variant ''"),
        (("convert", tmp_path / "torn", new), f"the tokenizer of {tmp_path / 'torn'} cannot be read: Expecting ':'"),
        (
            ("convert", tmp_path / "odd", new),
            f"the config of {tmp_path / 'odd'} is wrong: TypeError: Field 'hidden_size'",
        ),
        (("generate", tmp_path / "odd", "w1"), "is wrong: TypeError: Field 'hidden_size' expected int, got str"),
        (
            ("generate", tmp_path / "small", "w4 w7"),
            "its tokenizer makes token 7 of the prompt, the model knows 5 tokens",
        ),
        (("generate", tmp_path / "model", "w1"), "has no tokenizer"),
        (("generate", llama, "w1", "--recent", "4"), "--recent needs an AffineAttn model"),
        (("generate", llama, ""), "the prompt has no tokens"),
    ]:
        result = run(*arguments)
        assert result.exit_code == 2, result.output
        assert message in result.stderr
        assert len([line for line in result.stderr.splitlines() if "%|" not in line and line]) == 1, result.stderr
        assert not new.exists()


@pytest.mark.parametrize("model", ["llama", "affine"])
def test_a_checkpoint_that_is_not_all_of_its_model_is_refused(model, llama, tmp_path):
    """transformers starts from random numbers what is not there."""
    folder = tmp_path / "model"
    (tiny_model() if model == "affine" else AutoModelForCausalLM.from_pretrained(llama)).save_pretrained(folder)
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())

    def refused(message, *without, **changes):
        held = {name: tensor for name, tensor in tensors.items() if name not in without}
        save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config | changes))
        result = run("convert", folder, tmp_path / "new")
        assert result.exit_code == 2, result.output
        assert message in result.stderr
        assert not (tmp_path / "new").exists()

    refused("the checkpoint does not hold model.norm.weight", "model.norm.weight")
    refused("down_proj.weight is [32, 48] in the checkpoint and [32, 40] by its config", intermediate_size=40)
    # Fewer layers by the config: transformers would leave the others out.
    refused("model.layers.1.input_layernorm.weight", num_hidden_layers=1)


DEEP = "[" * 100_000


@pytest.mark.parametrize("model", ["llama", "affine"])
def test_files_of_another_shape_are_named_in_one_line(model, llama, tmp_path):
    whole = tmp_path / "whole"
    shutil.copytree(llama, whole)
    if model == "affine":
        tiny_model().save_pretrained(whole)
    config = json.loads((whole / "config.json").read_text())

    def refused(message, name, content):
        folder = shutil.copytree(whole, tmp_path / "model")
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(config | content))
        result = run("generate", folder, "w1 w2")
        assert (result.exit_code, message in result.stderr) == (2, True), (result.output, result.exception)
        assert len([line for line in result.stderr.splitlines() if "%|" not in line and line]) == 1, result.stderr
        shutil.rmtree(folder)

    for name in ("config.json", "generation_config.json", "tokenizer_config.json", "model.safetensors.index.json"):
        for content in ("[]", DEEP, "null", "{"):
            refused(f"{name} is damaged: it is not", name, content)
    for content in ("{}", "[]", DEEP, "null"):
        refused("model cannot be read", "tokenizer.json", content)
    refused("model is wrong: Unrecognized model", "config.json", "{}")
    affine = model == "affine"
    refused("hidden_size" if affine else "cannot be loaded: ", "config.json", {"hidden_size": -4})
    refused("vocab_size" if affine else "cannot be loaded: ", "config.json", {"vocab_size": -1})
    refused("vocab_size" if affine else "cannot be loaded: ", "config.json", {"vocab_size": 0})
    refused("is wrong: ", "config.json", {"num_attention_heads": 0})
    refused("cannot be loaded: ", "config.json", {"hidden_act": "nothing"})
    refused("cannot be loaded: ", "config.json", {"pad_token_id": 10**6})
    if affine:
        refused("model is wrong: Affine: length must", "config.json", {"attention": {"affine": {"length": 10**30}}})


@pytest.mark.parametrize("command", [("generate", "MISSING", "hello"), ("convert", "MISSING", "TARGET")])
def test_a_folder_that_is_not_there_is_said_so(command, tmp_path):
    result = run(*(tmp_path / word if word.isupper() else word for word in command))
    assert result.exit_code == 2
    assert "there is no folder" in result.output
