"""What quantizes, generates and evaluates."""

import functools
import json

import pytest
import torchao
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, pipeline

from tests.support.hf import left_padded, tiny_model


def test_torchao(model):
    """torchao, weights of 8 bits: logits within 5 % of those in fp32, and it generates."""
    tokens, mask = left_padded()
    expected = model(tokens, mask).logits
    torchao.quantize_(model, torchao.quantization.Int8WeightOnlyConfig())
    assert 0 < (model(tokens, mask).logits - expected).norm() < 0.05 * expected.norm()
    assert model.generate(tokens, attention_mask=mask, max_new_tokens=4, do_sample=False).shape[1] > 10


@pytest.mark.parametrize("settings", [{"load_in_8bit": True}, {"load_in_4bit": True}], ids=["8 bits", "4 bits"])
def test_bitsandbytes(settings, tmp_path):
    """bitsandbytes, 8 and 4 bits: the logits of a model with the same rounded weights, and it generates."""
    import affine_attn.models  # noqa: F401  # glue

    # Its kernels of 4 bits want inputs of 64 channels, and outputs of 32, at least.
    tiny_model("affine", hidden_size=64, intermediate_size=64).save_pretrained(tmp_path)
    load = functools.partial(AutoModelForCausalLM.from_pretrained, tmp_path)
    quantized, rounded = (load(quantization_config=BitsAndBytesConfig(**settings)) for _ in range(2))
    tokens, mask = left_padded()
    expected = rounded.dequantize()(tokens, mask).logits
    # With 8 bits, inputs of the layers are rounded too.
    within = 0.05 if "load_in_8bit" in settings else 1e-5
    assert (quantized(tokens, mask).logits - expected).norm() < within * expected.norm()
    generated = quantized.generate(tokens, attention_mask=mask, max_new_tokens=4, do_sample=False)
    assert generated.shape[1] > 10


def test_pipeline(folder, model, tokenizer):
    """transformers' pipeline: the text of generate."""
    import affine_attn.models  # noqa: F401  # glue

    text = pipeline("text-generation", folder)("w1 w2", max_new_tokens=4, do_sample=False)[0]["generated_text"]
    tokens = tokenizer("w1 w2", return_tensors="pt").input_ids
    new = model.generate(tokens, max_new_tokens=4, do_sample=False)[0, 2:]
    assert text == "w1 w2" + tokenizer.decode(new)


def test_lm_eval(folder, command, tmp_path):
    """lm_eval, its own command: a task of two choices is scored."""
    (tmp_path / "choice.jsonl").write_text('{"q": "w1 w2", "a": ["w3", "w4"], "l": 1}\n')
    task = {
        "task": "choice",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "choice.jsonl")}},
        "output_type": "multiple_choice",
        "test_split": "test",
        "doc_to_text": "{{q}}",
        "doc_to_choice": "{{a}}",
        "doc_to_target": "{{l}}",
    }
    (tmp_path / "choice.yaml").write_text(json.dumps(task))
    model_args = f"pretrained={folder},trust_remote_code=True"  # glue
    printed = command(
        *("lm_eval", "run", "--model", "hf", "--tasks", "choice", "--include_path", tmp_path, "--device", "cpu"),
        *("--model_args", model_args),
    )
    assert "|choice|" in printed
