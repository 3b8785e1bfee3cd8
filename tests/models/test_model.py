"""The Hugging Face model: same numbers as transformers' own, masks that arrive, weights that survive."""

import copy
import json
import warnings

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    StaticCache,
    Trainer,
    TrainingArguments,
)

from affine_attn import VARIANTS, Affine, AttentionSpec, ScaleInvariant, track_alpha, variant
from affine_attn.core.call import checked_call
from affine_attn.core.pieces import pieces_of
from affine_attn.core.spec import GATES
from affine_attn.engines.needs import COUNTED, facts_of
from affine_attn.models import (
    PRESETS,
    AffineAttnConfig,
    AffineAttnForCausalLM,
    AffineAttnModel,
    StreamingCache,
    TrackAlpha,
    preset,
)
from affine_attn.models.collect import collect_statistics
from affine_attn.models.masks import decoder_mask
from affine_attn.nn.alpha import alpha_gates
from affine_attn.nn.rope import Rope
from tests.support.hf import SIZES, left_padded, tiny_config, tiny_model


def loss(model, tokens, mask=None):
    out = model(tokens, attention_mask=mask).logits
    return torch.nn.functional.cross_entropy(out[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


@pytest.mark.parametrize(
    ("original", "config", "changes"),
    [
        (LlamaForCausalLM, LlamaConfig, {}),
        (LlamaForCausalLM, LlamaConfig, {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        (LlamaForCausalLM, LlamaConfig, {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
        (Qwen2ForCausalLM, Qwen2Config, {"qkv_bias": True}),
        (Qwen3ForCausalLM, Qwen3Config, {"qk_norm": True, "head_dim": 16}),
    ],
)
def test_softmax_is_the_model_of_transformers(original, config, changes):
    ours = tiny_model("softmax", **changes)
    theirs = original(config(**(SIZES | {k: v for k, v in changes.items() if k not in ("qkv_bias", "qk_norm")}))).eval()
    theirs.load_state_dict(ours.state_dict())
    tokens, mask = left_padded()
    real = mask.bool()
    torch.testing.assert_close(ours(tokens, mask).logits[real], theirs(tokens, mask).logits[real], rtol=0, atol=1e-5)
    loss(ours, tokens, mask).backward()
    loss(theirs, tokens, mask).backward()
    for (name, p), (_, expected) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        torch.testing.assert_close(p.grad, expected.grad, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("name", VARIANTS)
def test_padding_changes_nothing(name):
    model = tiny_model(name)
    tokens, mask = left_padded()
    alone = model(tokens[:1, 4:]).logits
    torch.testing.assert_close(model(tokens, mask).logits[:1, 4:], alone, rtol=1e-4, atol=1e-4)
    right = torch.cat((tokens[:, 4:], torch.zeros_like(tokens[:, :3])), 1)
    valid = torch.cat((torch.ones_like(tokens[:, 4:]), torch.zeros_like(tokens[:, :3])), 1)
    torch.testing.assert_close(model(right, valid).logits[:1, :6], alone, rtol=1e-4, atol=1e-4)


def test_the_queries_of_padding_on_the_right_are_not_computed():
    """Those of padding on the left see nothing anyway."""
    tokens, left = left_padded()
    for mask, has_documents in ((left, False), (left.flip(1), True), (torch.ones_like(left), False)):
        found = decoder_mask(tokens, mask).mask
        assert (found.documents is not None) == has_documents
        pieces = pieces_of(found, *tokens.shape[1:], *tokens.shape[1:], tokens.device).pieces
        rows = sum((p.rows.stop - p.rows.start) * len(range(*p.sequences.indices(len(tokens)))) for p in pieces)
        assert rows == mask.sum()
    cached = DynamicCache(config=tiny_model().config)
    cached.update(*torch.zeros(2, len(tokens), 2, 3, 8), 0)
    grown = F.pad(left.flip(1), (0, 3), value=1)
    assert decoder_mask(tokens, grown, cached).mask.documents is None


@pytest.mark.parametrize("name", VARIANTS)
def test_packing_equals_separate_sequences(name):
    """By restarting positions, with and without an attention mask beside them, and by document ids."""
    model = tiny_model(name)
    tokens, _ = left_padded(batch=1, length=11, padded=0)
    expected = torch.cat([model(part).logits for part in tokens.split([4, 1, 6], 1)], 1)
    positions = torch.cat([torch.arange(n) for n in (4, 1, 6)])[None]
    documents = torch.tensor([[7] * 4 + [3] + [7_000_000_000] * 6])
    packed = {
        "positions": model(tokens, position_ids=positions),
        "positions and mask": model(tokens, attention_mask=torch.ones_like(tokens), position_ids=positions),
        "documents": model(tokens, document_ids=documents),
        "documents and positions": model(tokens, document_ids=documents, position_ids=positions),
    }
    for how, output in packed.items():
        torch.testing.assert_close(output.logits, expected, rtol=1e-4, atol=1e-4, msg=f"{how} leaks")


def test_packed_positions_promise_that_documents_are_contiguous_and_how_many_there_are():
    tokens = torch.zeros(2, 11, dtype=torch.long)
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in ((4, 1, 6), (9, 2))])
    mask = decoder_mask(tokens, None, position_ids=positions).mask
    # Five, in the next power of two: a number that is another in each batch would be compiled again for each.
    assert (mask.contiguous, mask.most_documents) == (True, 8)
    assert mask.documents.diff(dim=1).nonzero().tolist() == [[0, 3], [0, 4], [1, 8]]
    starts, _ = mask.cu_seqlens(11, 11)
    assert starts.tolist() == [0, 4, 5, 11, 20, 22, 22, 22, 22]
    q = torch.empty(2, 2, 11, 8)
    assert facts_of(checked_call(q, q, q, mask)).documents == COUNTED
    assert decoder_mask(tokens, None, position_ids=torch.arange(11)[None]).mask.documents is None
    # Ids may come back, and nobody looks.
    assert not decoder_mask(tokens, None, document_ids=mask.documents).mask.contiguous


@pytest.mark.parametrize("kind", ["dynamic", "static", "streaming"])
def test_packing_reaches_a_cache_or_is_refused(kind):
    model = tiny_model()
    kinds = {
        "dynamic": lambda: DynamicCache(config=model.config),
        "static": lambda: StaticCache(config=model.config, max_cache_len=20),
        "streaming": StreamingCache,
    }
    tokens, _ = left_padded(batch=1, length=11, padded=0)
    positions = torch.cat([torch.arange(n) for n in (4, 7)])[None]
    expected = torch.cat([model(part).logits for part in tokens.split([4, 7], 1)], 1)
    empty, cache = (kinds[kind]() for _ in range(2))
    packed = model(tokens, position_ids=positions, past_key_values=empty).logits
    torch.testing.assert_close(packed, expected, rtol=1e-4, atol=1e-4)
    model(tokens[:, :2], past_key_values=cache)
    with pytest.raises(ValueError, match="position_ids restart after 2 cached tokens: packed sequences must come at"):
        model(tokens[:, 2:], position_ids=positions[:, 2:], past_key_values=cache)


@pytest.mark.parametrize("first", [3, 1])
def test_packed_documents_with_padding_between_them_equal_separate_sequences(first):
    """After a document of one token the next one begins at the same position."""
    model = tiny_model()
    tokens, mask = left_padded(batch=1, length=12, padded=0)
    mask[:, first:5] = mask[:, 10:] = 0
    positions = torch.tensor([[0, 1, 2, 3, 0, 0, 1, 2, 3, 4, 0, 1]])
    logits = model(tokens, mask, position_ids=positions).logits
    for document in (slice(0, first), slice(5, 10)):
        torch.testing.assert_close(logits[:, document], model(tokens[:, document]).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("counted", [False, True], ids=["skipped", "counted"])
def test_padding_inside_of_a_document_does_not_cut_it(counted):
    """Whether the positions that are given count the padding or not."""
    model = tiny_model(rope_parameters={"rope_type": "nope"})
    tokens, mask = left_padded(batch=1, padded=0)
    mask[:, 3:5] = 0
    positions = torch.arange(10)[None] if counted else (mask.cumsum(1) - 1) * mask
    expected = model(tokens, mask).logits[mask.bool()]
    torch.testing.assert_close(model(tokens, mask, position_ids=positions).logits[mask.bool()], expected)


def test_windows_per_layer():
    model = tiny_model("affine", window=[3, None], num_hidden_layers=2)
    tokens, mask = left_padded()
    weights = model(tokens, mask, output_attentions=True).attentions
    visible = [(w != 0).any(1) for w in weights]
    assert visible[0].sum(-1).max() == 3
    assert visible[1].sum(-1).max() == 10
    assert not visible[0][0, :, :4].any()


@pytest.mark.parametrize("name", VARIANTS)
def test_output_attentions_are_the_weights_that_make_the_output(name):
    """w v, gated and projected, is what the layer returned."""
    model = tiny_model(name, num_hidden_layers=1)
    layer = model.model.layers[0].self_attn
    seen = {}
    layer.register_forward_hook(lambda _, args, kwargs, out: seen.update(kwargs, out=out), with_kwargs=True)
    tokens, mask = left_padded()
    output = model(tokens, mask, output_attentions=True, output_hidden_states=True)
    (w,) = output.attentions
    assert len(output.hidden_states) == 2
    x = seen["hidden_states"]
    _, _, v = layer.project(x)
    y = w @ v.repeat_interleave(2, dim=1)
    if layer.attn_gate is not None:
        y = y * GATES[layer.spec.gate].activation(layer.attn_gate(x)).unflatten(-1, (4, -1)).transpose(1, 2)
    torch.testing.assert_close(layer.o_proj(y.transpose(1, 2).flatten(2)), seen["out"][0], rtol=1e-4, atol=1e-4)


def test_output_attentions_as_a_setting():
    model = tiny_model()
    model.config.output_attentions = True
    assert len(model(torch.ones(1, 3, dtype=torch.long)).attentions) == 2


@pytest.mark.parametrize("name", VARIANTS)
def test_save_and_load(name, tmp_path):
    model = tiny_model(name)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert {path.suffix for path in tmp_path.iterdir()} == {".safetensors", ".json", ".py", ".md"}
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    tokens, mask = left_padded()
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is AffineAttnForCausalLM
    assert again.config.spec(0) == variant(name)
    assert torch.equal(again(tokens, mask).logits, model(tokens, mask).logits)
    headless = AutoModel.from_pretrained(tmp_path)
    assert type(headless) is AffineAttnModel
    assert torch.equal(headless(tokens, mask).last_hidden_state, model.model(tokens, mask).last_hidden_state)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for key, tensor in half.state_dict().items():
        average = key.endswith("alpha_ma")
        assert tensor.dtype == (torch.float32 if average else torch.bfloat16), key
        if average:
            assert torch.equal(tensor, model.state_dict()[key])
    half(tokens, mask)


def test_the_average_stays_fp32_however_a_model_is_made(tmp_path):
    made = AutoModelForCausalLM.from_config(tiny_config(), dtype=torch.bfloat16)
    for model in (made, tiny_model().to(torch.bfloat16), tiny_model().half()):
        gate = model.model.layers[0].self_attn.alpha
        assert gate.alpha_ma.dtype == torch.float32
        assert gate.w_a.dtype != torch.float32
    made.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.dtype == torch.bfloat16
    assert again.model.layers[0].self_attn.alpha.alpha_ma.dtype == torch.float32


def test_the_average_starts_where_its_spec_says():
    spec = AttentionSpec(affine=Affine(start=0.3, alpha_range=2.0))
    model = AutoModelForCausalLM.from_config(tiny_config(spec))
    assert model.model.layers[1].self_attn.alpha.alpha_ma.tolist() == pytest.approx([0.3] * 4)


def test_a_loaded_model_trains_and_tracks_alpha(tmp_path):
    from affine_attn import track_alpha

    tiny_model().save_pretrained(tmp_path)
    model = AffineAttnForCausalLM.from_pretrained(tmp_path).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    track_alpha(model, optimizer)
    before = model.model.layers[0].self_attn.alpha.alpha_ma.clone()
    tokens, mask = left_padded()
    loss(model, tokens, mask).backward()
    optimizer.step()
    assert not torch.equal(before, model.model.layers[0].self_attn.alpha.alpha_ma)


@pytest.mark.parametrize("callbacks", [[TrackAlpha()], []], ids=["callback", "by hand"])
def test_alpha_is_tracked_under_transformers_trainer(callbacks, tmp_path):
    """Once per step, however many micro-batches it has."""
    model = tiny_model("affine").train()
    for layer in model.model.layers:
        layer.self_attn.alpha.alpha_ma.zero_()
    sequences = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(1, 61, (8, 10))]
    settings = TrainingArguments(
        tmp_path, max_steps=1, per_device_train_batch_size=2, gradient_accumulation_steps=4, learning_rate=0.0,
        report_to=[], save_strategy="no", use_cpu=True,
    )  # fmt: skip
    means = collect_statistics(model, [{"input_ids": torch.stack([entry["input_ids"] for entry in sequences])}])
    trainer = Trainer(model, settings, train_dataset=sequences, callbacks=callbacks)
    if not callbacks:
        track_alpha(model, trainer.create_optimizer())
    trainer.train()
    for gate, mean in zip(alpha_gates(model), means, strict=True):
        torch.testing.assert_close(gate.alpha_ma, 0.1 * mean.alpha)


def test_a_forward_on_meta_tells_shapes():
    with torch.device("meta"):
        model = AffineAttnForCausalLM(tiny_config("affine_gated"))
        assert model(torch.zeros(2, 6, dtype=torch.int64), use_cache=False).logits.shape == (2, 6, 61)


def test_gradient_checkpointing_gives_the_same_gradients():
    tokens, mask = left_padded()
    plain, saving = tiny_model("affine_gated").train(), tiny_model("affine_gated").train()
    saving.gradient_checkpointing_enable()
    for model in (plain, saving):
        loss(model, tokens, mask).backward()
    for p, q in zip(plain.parameters(), saving.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-6)
    sums = [m.model.layers[0].self_attn.alpha for m in (plain, saving)]
    # The recomputed forward does not count a second time.
    assert torch.equal(sums[0]._count, sums[1]._count)
    torch.testing.assert_close(sums[0]._sum, sums[1]._sum)


def test_resizing_and_tying_embeddings(tmp_path):
    model = tiny_model(tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.resize_token_embeddings(80)
    assert model(torch.full((1, 3), 79)).logits.shape[-1] == 80
    model.save_pretrained(tmp_path)
    again = AffineAttnForCausalLM.from_pretrained(tmp_path)
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert again.config.vocab_size == 80


def test_config_takes_names_specs_dicts_and_lists_and_is_plain_json():
    spec = AttentionSpec(sink=0.5, affine=Affine(length=7))
    for given, expected in [
        ("sink", [variant("sink")] * 2),
        (spec, [spec] * 2),
        (spec.to_dict(), [spec] * 2),
        (["softmax", spec], [variant("softmax"), spec]),
    ]:
        config = AffineAttnConfig(attention=given, num_hidden_layers=2, window=[4, None])
        again = AffineAttnConfig.from_dict(json.loads(config.to_json_string()))
        for made in (config, again):
            assert [made.spec(i) for i in range(2)] == expected
            assert [made.layer_window(i) for i in range(2)] == [4, None]


def test_an_attention_that_is_set_later_is_the_same_as_one_that_is_given(tmp_path):
    spec = AttentionSpec(affine=Affine(length=7))
    for value in ("sink", spec, ["softmax", spec]):
        config = tiny_config("gated")
        config.attention = value
        assert config.to_dict() == tiny_config(value).to_dict()
        assert AffineAttnForCausalLM(config).config.base_model_tp_plan == tiny_config(value).base_model_tp_plan
    tiny_model("affine").save_pretrained(tmp_path)
    model = AffineAttnForCausalLM.from_pretrained(tmp_path, attention=spec)
    assert model.model.layers[1].self_attn.alpha.length == 7
    with pytest.raises(ValueError, match=r"unexpected keys .*alpha"):
        AffineAttnForCausalLM.from_pretrained(tmp_path, attention="softmax")
    with pytest.raises(ValueError, match="attention has 5 entries, num_hidden_layers is 2"):
        AffineAttnForCausalLM.from_pretrained(tmp_path, attention=["affine"] * 5)
    with pytest.raises(ValueError, match=r"attention_dropout must be 0, got 0.1"):
        AffineAttnForCausalLM.from_pretrained(tmp_path, attention_dropout=0.1)


def test_layers_may_differ():
    model = tiny_model(["gated", "affine"])
    kinds = [{name.split(".")[0] for name, _ in layer.self_attn.named_parameters()} for layer in model.model.layers]
    assert "attn_gate" in kinds[0]
    assert "alpha" not in kinds[0]
    assert "alpha" in kinds[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention": {"logit": None, "squash": 1}}, "unknown entries \\['squash'\\]"),
        ({"attention": {"logit": {"kind": "cubic"}}}, "logit kind must be one of"),
        ({"attention": "afine"}, "did you mean 'affine'"),
        ({"attention": 3}, "attention must be a variant's name"),
        ({"attention": ["affine"] * 3}, "attention has 3 entries, num_hidden_layers is 2"),
        ({"window": [2]}, "window has 1 entries, num_hidden_layers is 2"),
        ({"window": 0}, "window must be an integer >= 1 .*got 0"),
        ({"window": 2**63}, "window must be an integer >= 1 .*got 9223372036854775808"),
        ({"num_attention_heads": 0}, "num_attention_heads must be an integer >= 1, got 0"),
        ({"window": (4, 2.0)}, "window must be an integer >= 1 .*got 2.0"),
        ({"head_dim": 15}, "head_dim must be even for RoPE, got 15"),
        ({"num_attention_heads": 3, "hidden_size": 33}, "must be a multiple of num_key_value_heads"),
        ({"attention_dropout": 0.1}, "attention_dropout must be 0, got 0.1"),
        ({"sliding_window": 4}, "sliding_window is no setting here, got 4; window is the one to give"),
        ({"layer_types": ["full_attention"] * 2}, "layer_types is no setting here"),
        ({"attention_chunk_size": 4}, "attention_chunk_size is no setting here, got 4"),
        ({"partial_rotary_factor": 0.5}, "needs rope_type 'proportional', got 0.5 with 'default'"),
        (
            {
                "rope_parameters": {
                    "rope_type": "linear",
                    "rope_theta": 1e4,
                    "factor": 2.0,
                    "partial_rotary_factor": 0.5,
                }
            },
            "needs rope_type 'proportional', got 0.5 with 'linear'",
        ),
    ],
)
def test_bad_configs_get_one_sentence(changes, message):
    with pytest.raises(ValueError, match=message) as error:
        tiny_config(**changes)
    assert "\n" not in str(error.value)


def test_scale_invariant_attention_without_norms_warns():
    with pytest.warns(UserWarning, match="unit variance"):
        tiny_config(AttentionSpec(logit=ScaleInvariant()), qk_norm=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tiny_config(AttentionSpec(logit=ScaleInvariant()), qk_norm=True)


@pytest.mark.parametrize(
    ("changes", "rope"),
    [
        ({"rope_type": "p_rope"}, Rope("p_rope")),
        ({"rope_type": "p_rope", "slowest": 64.0}, Rope("p_rope", slowest=64.0)),
        ({"rope_type": "p_rope_top", "rope_theta": 500.0, "p": 0.5}, Rope("p_rope_top", 500.0, 0.5)),
        (
            {"rope_type": "proportional", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
            Rope("p_rope_top", 500.0, 0.5),
        ),
        ({"rope_type": "nope"}, None),
        ({"rope_type": "default"}, Rope()),
    ],
)
def test_rope_types(changes, rope, tmp_path):
    model = tiny_model("softmax", rope_parameters=changes)
    model.save_pretrained(tmp_path)
    again = AffineAttnForCausalLM.from_pretrained(tmp_path)
    expected = torch.zeros(4) if rope is None else rope.frequencies(8)
    in_bfloat16 = (
        AffineAttnForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16),
        AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16),
        copy.deepcopy(model).to(torch.bfloat16),
    )
    assert {made.dtype for made in in_bfloat16} == {torch.bfloat16}
    for made in (model, again, *in_bfloat16):
        torch.testing.assert_close(made.model.rotary_emb.inv_freq, expected, rtol=1e-6, atol=0)
    tokens, _ = left_padded(padded=0)
    shifted = again(tokens, position_ids=torch.arange(10)[None] + 5).logits
    torch.testing.assert_close(shifted, model(tokens).logits, rtol=1e-4, atol=1e-4)


def test_other_implementations_are_refused():
    with pytest.raises(ValueError, match="run attn_implementation='affine_attn' only, got 'sdpa'"):
        AutoModelForCausalLM.from_config(tiny_config(), attn_implementation="sdpa")
    assert AutoModelForCausalLM.from_config(tiny_config(), attn_implementation="eager").config._attn_implementation == (
        "affine_attn"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"attention_mask": torch.ones(1, 1, 3, 3)}, "attention_mask must be 2-D"),
        ({"attention_mask": torch.ones(2, 3)}, r"attention_mask must be 2-D \[1, tokens so far\], got \[2, 3\]"),
        ({"attention_mask": torch.ones(1, 2)}, "attention_mask must cover all 3 tokens, cached and new, got 2"),
        ({"document_ids": torch.ones(1, 2, dtype=torch.long)}, "document_ids must name every key"),
    ],
)
def test_masks_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        tiny_model()(torch.ones(1, 3, dtype=torch.long), **arguments)


def damaged(tmp_path, change):
    from safetensors.torch import load_file, save_file

    tiny_model().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return AutoModelForCausalLM.from_pretrained(tmp_path)


def test_checkpoints_of_another_attention_are_refused(tmp_path):
    key = "model.layers.0.self_attn.alpha.alpha_ma"
    with pytest.raises(ValueError, match=f"missing keys {key}; the checkpoint does not hold"):
        damaged(tmp_path, lambda tensors: tensors.pop(key))
    with pytest.raises(ValueError, match=r"unexpected keys model.layers.0.self_attn.sinks; the checkpoint"):
        damaged(tmp_path, lambda tensors: tensors.update({"model.layers.0.self_attn.sinks": torch.zeros(4)}))


def test_a_corrupted_file_is_refused(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(Exception, match=r"(?i)header"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


# Public parameter counts of the originals, embeddings counted once.
ORIGINALS = {
    "qwen1.5-0.5b": 463_987_712,
    "qwen1.5-1.8b": 1_836_828_672,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "llama3.1-8b": 8_030_261_248,
}
# H * D * layers, the paper's Tables 1 and 2.
ADDED = {
    ("qwen1.5-0.5b", "affine"): 393_216,
    ("llama3.2-1b", "affine"): 1_048_576,
    ("llama3.2-3b", "affine"): 2_064_384,
    ("llama3.2-1b", "gated"): 67_108_864,
    ("llama3.2-3b", "gated"): 264_241_152,
    ("llama3.2-1b", "affine_gated"): 68_157_440,
    ("llama3.2-1b", "sink"): 32 * 16,
    ("llama3.2-1b", "off_by_one"): 0,
}


def parameters(name, attention):
    with torch.device("meta"):
        return AffineAttnForCausalLM(preset(name, attention)).num_parameters()


@pytest.mark.parametrize("name", ORIGINALS)
def test_presets_have_the_papers_sizes(name):
    assert parameters(name, "softmax") == ORIGINALS[name]
    for (preset_name, attention), added in ADDED.items():
        if preset_name == name:
            assert parameters(name, attention) - ORIGINALS[name] == added, attention


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_takes_every_variant_at_its_training_length(name):
    length, _ = PRESETS[name]
    for attention in VARIANTS:
        spec = preset(name, attention).spec(0)
        if spec.affine is not None:
            assert spec.affine.length == length
    assert preset(name, AttentionSpec(affine=Affine(length=5))).spec(0).affine.length == 5
    assert preset(name, vocab_size=99, eos_token_id=None).vocab_size == 99


def test_logits_bring_their_positions_and_norms():
    length, _ = PRESETS["nano"]
    invariant, alibi, affine = (preset("nano", name) for name in ("scale_invariant", "alibi", "affine"))
    positions = {"rope_type": "p_rope", "rope_theta": 10000.0, "slowest": length / 8}
    assert (invariant.qk_norm, invariant.rope_parameters) == (True, positions)
    assert (alibi.qk_norm, alibi.rope_parameters["rope_type"]) == (False, "nope")
    assert (affine.qk_norm, affine.rope_parameters["rope_type"]) == (False, "default")
    # A choice wins, and layers that want different ones leave it to the preset.
    assert preset("nano", "alibi", rope_parameters=positions).rope_parameters == positions
    mixed = preset("nano", ["scale_invariant", "affine"], qk_norm=True)
    assert mixed.rope_parameters["rope_type"] == "default"
    assert preset("nano", "scale_invariant", rope_theta=500.0).rope_parameters == positions | {"rope_theta": 500.0}
    assert preset("nano", invariant.attention).to_dict() == invariant.to_dict()


def test_unknown_fields_of_a_preset_are_refused():
    with pytest.raises(ValueError, match=r"no field 'num_layers' of an AffineAttnConfig; did you mean num_labels"):
        preset("nano", num_layers=3)
    assert preset("nano", num_hidden_layers=3, rope_theta=500.0, num_labels=5).rope_parameters["rope_theta"] == 500.0


def test_unknown_presets_are_refused():
    with pytest.raises(ValueError, match="unknown preset 'tiny'; allowed are qwen1"):
        preset("tiny")


def test_auto_config_knows_the_type(tmp_path):
    tiny_config("logn").save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is AffineAttnConfig


def test_a_loaded_model_may_step_before_it_has_counted_a_token(tmp_path):
    """Loaded in eval mode, as from_pretrained does: nothing is counted, and the average stays."""
    AffineAttnForCausalLM(preset("nano", "affine")).save_pretrained(tmp_path)
    model = AffineAttnForCausalLM.from_pretrained(tmp_path)
    before = [gate.alpha_ma.clone() for gate in alpha_gates(model)]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    track_alpha(model, optimizer)
    model(torch.tensor([[1, 2, 3]])).logits.sum().backward()
    optimizer.step()
    assert all(torch.equal(gate.alpha_ma, old) for gate, old in zip(alpha_gates(model), before, strict=True))
    model.train()
    model(torch.tensor([[1, 2, 3]]))
    optimizer.step()
    assert not any(torch.equal(gate.alpha_ma, old) for gate, old in zip(alpha_gates(model), before, strict=True))
