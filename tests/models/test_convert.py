"""Conversion of existing checkpoints, in memory and on the command line, and the way back."""

import math
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from affine_attn import VARIANTS, Affine, AttentionSpec, variant
from affine_attn.core.spec import ACTIVATIONS
from affine_attn.models import AffineAttnForCausalLM, convert, export, logits_moved, stage_keys
from affine_attn.nn.alpha import alpha_gates
from tests.support.hf import SIZES, left_padded, tiny_model

WINDOWED = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
SOURCES = {
    "llama": LlamaConfig(**SIZES),
    "llama tied and biased": LlamaConfig(**SIZES, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "llama3 rope": LlamaConfig(
        **SIZES,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "mistral": MistralConfig(**SIZES, sliding_window=5),
    "qwen2": Qwen2Config(**SIZES),
    "qwen2 windowed": Qwen2Config(**SIZES, **WINDOWED),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
    "qwen3 windowed": Qwen3Config(**SIZES, **WINDOWED | {"max_window_layers": 0}),
    "qwen3 biased": Qwen3Config(**SIZES, head_dim=16, attention_bias=True),
}


def original(name):
    model = AutoModelForCausalLM.from_config(SOURCES[name]).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key or "bias" in key:
                parameter.normal_(1.0 if "norm" in key else 0.0, 0.3)
    return model


def assert_same(ours, theirs):
    tokens, mask = left_padded(length=12)
    real = mask.bool()
    # In float64: two models in fp32 are as far from each other as each is from the truth.
    logits = [deepcopy(model).double()(tokens, mask).logits[real] for model in (ours, theirs)]
    torch.testing.assert_close(*logits, rtol=0, atol=1e-5)
    generated = [m.generate(tokens, attention_mask=mask, max_new_tokens=8, do_sample=False) for m in (ours, theirs)]
    assert torch.equal(*generated)


@pytest.mark.parametrize("name", SOURCES)
def test_softmax_is_the_original_and_the_way_back_too(name):
    source = original(name)
    model = convert(source, "softmax")
    assert type(model) is AffineAttnForCausalLM
    assert stage_keys(model) == []
    assert_same(model, source)
    back = export(model)
    assert type(back) is type(source)
    assert_same(back, source)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize(
    "attention",
    [
        *("affine", "affine_sigmoid", "sink", "gated", "gated_headwise", "affine_gated", "sink+affine_gated"),
        AttentionSpec(gate="learned"),
        ["softmax", "sink"],
    ],
    ids=str,
)
def test_what_can_starts_as_softmax_and_learns(name, attention):
    source = original(name)
    model = convert(source, attention, start_as_softmax=True)
    assert_same(model, source)
    tokens, _ = left_padded(padded=0)
    model(tokens, labels=tokens).loss.backward()
    state = dict(model.named_parameters())
    for key in set(stage_keys(model)) & set(state):
        assert state[key].grad.abs().max() > 0, key
    for gate in alpha_gates(model):
        assert gate.alpha_range == 2
        assert torch.equal(gate.alpha_ma, torch.ones(4))


@pytest.mark.parametrize(
    ("attention", "reason"),
    [
        ("alibi", "Alibi changes the logits whatever its parameters are"),
        ("scale_invariant+affine", "ScaleInvariant changes the logits"),
        ("logn", "LogN changes the logits"),
        ("off_by_one", "the constant sink 0.0 takes weight"),
        (AttentionSpec(gate=0.5), "no form of the gate 0.5 is 1"),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:scale-invariant attention without qk_norm")
def test_what_can_not_start_as_softmax_is_named(attention, reason):
    with pytest.raises(ValueError, match=f"^start_as_softmax: {reason}"):
        convert(original("llama"), attention, start_as_softmax=True)


def test_how_far_the_logits_move_is_measured():
    source, (tokens, _) = original("llama").train(), left_padded(padded=0)
    model = convert(source, "sink")
    moved, changed = logits_moved(model, source, tokens)
    assert source.training
    p, q = (m.eval()(tokens).logits.log_softmax(-1) for m in (source, model))
    assert moved == pytest.approx((p.exp() * (p - q)).sum(-1).mean().item(), rel=1e-4)
    assert changed == (p.argmax(-1) != q.argmax(-1)).float().mean()
    assert moved > 1e-3
    same = logits_moved(convert(source, "sink", start_as_softmax=True), source, tokens)
    assert same == (pytest.approx(0, abs=1e-6), 0)


def test_the_length_of_training_is_chosen():
    model = convert(original("llama"), ["affine", "logn"], length=300)
    assert model.config.spec(0).affine.length == model.config.spec(1).logit.length == 300
    assert model.model.layers[1].self_attn.logn_scale[0].item() == pytest.approx(1 / math.log(300))
    with pytest.raises(ValueError, match="length: this attention has none; affine has, and logn"):
        convert(original("llama"), "sink", length=300)


@pytest.mark.parametrize("function", [F.softplus, lambda x: 3 + torch.tanh(x)], ids=["softplus", "shifted_tanh"])
def test_any_activation_that_is_positive_at_zero_starts_as_softmax(function, monkeypatch):
    monkeypatch.setitem(ACTIVATIONS, "own", function)
    source = original("llama")
    model = convert(source, AttentionSpec(affine=Affine(phi="own")), start_as_softmax=True)
    assert_same(model, source)
    assert model.config.spec(0).affine.alpha_range == pytest.approx(1 / function(torch.tensor(0.0)).item())


@pytest.mark.parametrize("function", [torch.relu, torch.tanh, lambda x: x - 1, torch.reciprocal])
def test_an_activation_that_is_not_positive_at_zero_cannot_start_as_softmax(function, monkeypatch):
    monkeypatch.setitem(ACTIVATIONS, "own", function)
    with pytest.raises(ValueError, match=r"^start_as_softmax: phi\(0\) must be positive and finite.*of 'own'$"):
        convert(original("llama"), AttentionSpec(affine=Affine(phi="own")), start_as_softmax=True)


def test_a_trained_affine_model_starts_as_softmax_too():
    source = tiny_model("affine")
    shared = {key: tensor for key, tensor in source.state_dict().items() if key not in stage_keys(source)}
    softmax = tiny_model("softmax")
    softmax.load_state_dict(shared)
    assert_same(convert(source, "affine", start_as_softmax=True), softmax)


def test_generation_settings_are_a_copy():
    source = tiny_model("softmax")
    source.generation_config.max_new_tokens = 3
    model = convert(source, "affine")
    model.generation_config.max_new_tokens = 5
    assert source.generation_config.max_new_tokens == 3


@pytest.mark.parametrize("attention", VARIANTS)
def test_every_variant_keeps_the_shared_tensors(attention):
    source = original("qwen3")
    model = convert(source, attention)
    assert model.config.spec(1) == variant(attention)
    state = model.state_dict()
    for key, tensor in source.state_dict().items():
        assert torch.equal(state.pop(key), tensor), key
    assert sorted(state) == sorted(stage_keys(model))


def test_from_a_folder_with_its_dtype(tmp_path):
    original("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    model = convert(tmp_path, ["affine", "softmax"])
    assert model.dtype == torch.bfloat16
    assert model.model.layers[0].self_attn.alpha.alpha_ma.dtype == torch.float32
    assert [model.config.spec(i) for i in range(2)] == [variant("affine"), AttentionSpec()]


def test_what_does_not_fit_is_refused():
    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=11))
    with pytest.raises(
        ValueError, match="model_type must be one of llama, mistral, qwen2, qwen3, affine_attn, got 'gpt2'"
    ):
        convert(gpt2)
    with pytest.raises(ValueError, match="must be a causal model with its head, got a LlamaModel"):
        convert(original("llama").model)
    with pytest.raises(ValueError, match="must be a transformers model, its folder or its hub id, got a Linear"):
        convert(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="only softmax attention exists in plain models"):
        export(tiny_model("affine"))
    with pytest.raises(ValueError, match="plain models have no rope_type 'nope'"):
        export(tiny_model("softmax", rope_parameters={"rope_type": "nope"}))
    with pytest.raises(ValueError, match=r"no plain model .* these parts: qkv_bias, windows \[3, 4\]"):
        export(tiny_model("softmax", qkv_bias=True, window=[3, 4]))
    with pytest.raises(ValueError, match=r"self_attn.alpha.alpha_ma of the source has no place in the target, and so"):
        convert(tiny_model("affine"), "softmax")
    strange = original("llama")
    strange.model.layers[0].self_attn.extra = torch.nn.Linear(2, 2)
    with pytest.raises(
        ValueError, match=r"self_attn.extra.bias of the source has no place in the target, and so for 1"
    ):
        convert(strange, "softmax")
