"""attn_implementation="affine_attn" in models of transformers: masks, sinks, gradients."""

from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForTokenClassification,
    BartConfig,
    BertConfig,
    BertModel,
    BloomConfig,
    DeepseekV3Config,
    Gemma2Config,
    GptOssConfig,
    GraniteSWAConfig,
    LlamaConfig,
    MiMoV2FlashConfig,
    MistralConfig,
    OpenAIPrivacyFilterConfig,
    OPTConfig,
    Qwen2MoeConfig,
)

import affine_attn.models  # noqa: F401 (registers the implementation)
from affine_attn import Mask, attention
from affine_attn.models import attn_implementation
from affine_attn.models.attn_implementation import transformers_attention, transformers_mask
from affine_attn.models.masks import PreparedMask
from tests.support.hf import SIZES, left_padded, tiny_model

AUTO = (AutoModelForSeq2SeqLM, AutoModelForCausalLM, AutoModelForTokenClassification)
GPT_OSS = GptOssConfig(
    **(SIZES | {"num_hidden_layers": 3, "head_dim": 8, "sliding_window": 5}),
    num_local_experts=2,
    num_experts_per_tok=1,
    layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    rope_parameters={"rope_type": "default", "rope_theta": 1e4},
)


MOE = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
DEEPSEEK = {"n_group": 2, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "first_k_dense_replace": 1}
MODELS = {
    "gpt-oss": GPT_OSS,
    "granite_swa": GraniteSWAConfig(**SIZES, sliding_window=5),
    "mimo_v2_flash": MiMoV2FlashConfig(
        **SIZES, **MOE, head_dim=12, v_head_dim=8, n_routed_experts=4, n_group=1, topk_group=1, sliding_window=5
    ),
    "gemma2, soft-capped": Gemma2Config(**SIZES, head_dim=8, sliding_window=5, attn_logit_softcapping=2.0),
    # Its default window of no keys is of a mask that no layer uses.
    "qwen2_moe": Qwen2MoeConfig(**SIZES, **MOE, num_experts=4, shared_expert_intermediate_size=16),
    "deepseek_v3, values narrower than keys": DeepseekV3Config(
        **(SIZES | {"num_key_value_heads": 4}), **MOE, **DEEPSEEK, n_routed_experts=8,
        qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16,
    ),
    "openai_privacy_filter, two-sided": OpenAIPrivacyFilterConfig(
        **SIZES, head_dim=8, sliding_window=4, num_local_experts=2, num_experts_per_tok=1,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
    "bart, with an encoder": BartConfig(
        vocab_size=61, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, dropout=0.0,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64,
    ),
    "opt, which tells no layer of attentions": OPTConfig(
        vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=48, word_embed_proj_dim=32,
        dropout=0.0,
    ),
}  # fmt: skip


def pair(config):
    """The same weights, once on the eager path of transformers and once on ours; sinks of plus and minus 8."""
    torch.manual_seed(3)
    auto = next(auto for auto in AUTO if type(config) in auto._model_mapping)
    # A copy for each: models keep the config they are given, and with it the implementation.
    eager = auto.from_config(deepcopy(config), attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in eager.named_parameters():
            if name.endswith("sinks"):
                parameter.copy_(torch.tensor([8.0, -8.0, 0.5, 3.0]))
    ours = auto.from_config(deepcopy(config), attn_implementation="affine_attn").eval()
    ours.load_state_dict(eager.state_dict())
    assert (eager.config._attn_implementation, ours.config._attn_implementation) == ("eager", "affine_attn")
    return eager, ours


@pytest.mark.parametrize("padded", [0, 4])
@pytest.mark.parametrize("name", MODELS)
def test_models_have_the_values_and_gradients_of_their_eager_path(name, padded):
    eager, ours = pair(MODELS[name])
    tokens, mask = left_padded(length=12, padded=padded)
    gradients = []
    for model in (eager, ours):
        logits = model(tokens, attention_mask=mask).logits[mask.bool()]
        logits.square().mean().backward()
        gradients.append({"logits": logits} | {name: p.grad for name, p in model.named_parameters()})
    for key, expected in gradients[0].items():
        if expected is not None:
            torch.testing.assert_close(
                gradients[1][key], expected, rtol=1e-4, atol=1e-5, msg=lambda m, n=key: f"{n}: {m}"
            )
    for key, gradient in gradients[1].items():
        assert not key.endswith("sinks") or gradient.abs().min() > 0


def test_dense_masks_of_a_model_of_ones_own():
    """Bool ones, and those of numbers to add: a row of the least number only is a mean, as on the eager path."""
    eager, ours = pair(LlamaConfig(**SIZES))
    tokens, _ = left_padded(padded=0)
    allowed = torch.ones(2, 1, 10, 10, dtype=torch.bool).tril()
    allowed[:, :, 5:, 2] = False
    added = torch.zeros(2, 1, 10, 10).masked_fill(~allowed, torch.finfo(torch.float32).min)
    added[:, :, 6:, 3] = -1.5
    added[:, :, 8] = torch.finfo(torch.float32).min
    for mask in (allowed, added):
        expected = eager(tokens, attention_mask=mask if mask is added else torch.where(mask, 0.0, -torch.inf)).logits
        torch.testing.assert_close(ours(tokens, attention_mask=mask).logits, expected, rtol=1e-4, atol=1e-5)


def test_a_model_that_computes_with_its_mask_gets_a_sentence():
    _, bloom = pair(BloomConfig(vocab_size=61, hidden_size=32, n_layer=2, n_head=4))
    tokens, mask = left_padded()
    said = "this model computes with a tensor of numbers: use attn_implementation='eager'"
    with pytest.raises(ValueError, match=said):
        bloom(tokens, attention_mask=mask)
    mask = transformers_mask(1, 3, 3)
    assert not hasattr(mask, "dtype")
    for use in (
        lambda: mask[:, 0],
        lambda: mask[:, :, :, :2],
        lambda: mask[:, :, :2],
        lambda: torch.ones(1) + mask,
        lambda: torch.ones(1).masked_fill(mask, 0),
        lambda: ~mask,
    ):
        with pytest.raises(ValueError, match=said):
            use()


@pytest.mark.parametrize("dense", [False, True])
def test_a_mask_is_cut_to_its_last_queries(dense):
    """As gemma4 of transformers 5.23 does, behind the last layer that has keys and values of its own."""
    q, k, v = torch.randn(3, 2, 4, 9, 8)
    padding = torch.ones(2, 9, dtype=torch.bool)
    padding[0, :3] = False
    allowed = torch.rand(2, 1, 9, 9) > 0.3 if dense else None
    mask = PreparedMask(Mask(padding=padding, allowed=allowed, window=5))
    whole, _ = transformers_attention(torch.nn.Identity(), q, k, v, mask)
    last, _ = transformers_attention(torch.nn.Identity(), q[:, :, -3:], k, v, mask[:, :, slice(-3, None), :])
    torch.testing.assert_close(last, whole[:, -3:])


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize(
    "config",
    [GPT_OSS, LlamaConfig(**SIZES), MistralConfig(**SIZES, sliding_window=4)],
    ids=["gpt-oss", "llama", "mistral"],
)
def test_generation_is_that_of_the_eager_path(config, cache):
    eager, ours = pair(config)
    tokens, mask = left_padded(length=8)
    options = {"attention_mask": mask, "max_new_tokens": 10, "do_sample": False, "disable_compile": True}
    generated = ours.generate(tokens, cache_implementation=cache, **options)
    assert torch.equal(generated, eager.generate(tokens, **options))


def test_packed_positions_reach_a_foreign_model_with_what_they_promise(monkeypatch):
    masks = []

    def seen(q, k, v, mask, **named):
        masks.append(mask)
        return attention(q, k, v, mask, **named)

    monkeypatch.setattr(attn_implementation, "attention", seen)
    _, ours = pair(LlamaConfig(**SIZES))
    tokens, _ = left_padded(batch=1, length=9, padded=0)
    positions = torch.cat([torch.arange(n) for n in (4, 5)])[None]
    packed = ours(tokens, position_ids=positions, use_cache=False).logits
    assert {(mask.contiguous, mask.most_documents) for mask in masks} == {(True, 2)}
    separate = torch.cat([ours(part).logits for part in tokens.split([4, 5], 1)], 1)
    torch.testing.assert_close(packed, separate, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["gpt-oss", "opt, which tells no layer of attentions"])
def test_output_attentions_are_those_of_the_eager_path(name):
    eager, ours = pair(MODELS[name])
    tokens, mask = left_padded()
    for w, expected in zip(
        ours(tokens, mask, output_attentions=True).attentions,
        eager(tokens, mask, output_attentions=True).attentions,
        strict=True,
    ):
        # Rows of padding see nothing here and everything there.
        torch.testing.assert_close(w[0, :, 4:], expected[0, :, 4:], rtol=1e-4, atol=1e-5)


def test_weights_of_granite_swa_count_the_sink():
    """Its eager path gives those of the softmax, before the sink takes its part: docs/tutorials/hugging-face.md."""
    eager, ours = pair(MODELS["granite_swa"])
    tokens, _ = left_padded(padded=0)
    before, counted = (model(tokens, output_attentions=True).attentions[0] for model in (eager, ours))
    torch.testing.assert_close(before.sum(-1), torch.ones(2, 4, 10))
    assert counted.sum(-1).min() < 0.1
    torch.testing.assert_close(counted / counted.sum(-1, keepdim=True), before, rtol=1e-4, atol=1e-5)


def test_what_it_does_not_compute_is_refused():
    q = torch.randn(1, 2, 3, 4)
    mask = transformers_mask(1, 3, 3)
    with pytest.raises(ValueError, match="needs a mask, and this model gives its attention none"):
        transformers_attention(torch.nn.Module(), q, q, q, None)
    harmless = transformers_attention(torch.nn.Module(), q, q, q, mask, logits_to_keep=1, use_cache=True)
    assert torch.equal(harmless[0], transformers_attention(torch.nn.Module(), q, q, q, mask)[0])
    two_sided, _ = transformers_attention(torch.nn.Module(), q, q, q, None, is_causal=False)
    torch.testing.assert_close(two_sided, attention(q, q, q, mask=Mask(causal=False)).transpose(1, 2))
    with pytest.raises(ValueError, match=r"has no dropout, got 0\.1; set the config's to 0"):
        transformers_attention(torch.nn.Module(), q, q, q, mask, dropout=0.1)
    for name in ("position_bias", "indices", "block_indices"):
        with pytest.raises(ValueError, match=f"has no {name}, with which this model calls its attention"):
            transformers_attention(torch.nn.Module(), q, q, q, mask, **{name: torch.zeros(1, 2, 3, 3)})
    for named in ({"sinks": torch.zeros(2)}, {"a_setting_of_tomorrow": True}):
        with pytest.raises(ValueError, match=f"has no {next(iter(named))}, with which this model calls"):
            transformers_attention(torch.nn.Module(), q, q, q, mask, **named)
    with pytest.raises(ValueError, match="was given a causal mask and is_causal=False"):
        transformers_attention(torch.nn.Module(), q, q, q, mask, is_causal=False)
    with pytest.raises(ValueError, match="packs by position_ids that restart, got cu_seq_lens_q without them"):
        transformers_attention(torch.nn.Module(), q, q, q, mask, cu_seq_lens_q=torch.tensor([0, 1, 3]))
    longer = torch.randn(1, 2, 4, 4)
    with pytest.raises(ValueError, match="needs a mask of all keys: this model makes it for 3 and attends to 4"):
        transformers_attention(torch.nn.Module(), q, longer, longer, mask)
    unused = transformers_mask(1, 3, 3, local_size=0)
    with pytest.raises(ValueError, match="a window of 0 keys is none"):
        transformers_attention(torch.nn.Module(), q, q, q, unused)


def test_models_refuse_what_their_layers_do_not_know():
    """transformers hands on whatever a forward is given, down to the attention."""
    model, (tokens, _) = tiny_model("affine"), left_padded(padded=0)
    with pytest.raises(ValueError, match="has no documents_ids, with which this model calls its attention"):
        model(tokens, documents_ids=torch.zeros_like(tokens))
    with pytest.raises(ValueError, match="got cu_seq_lens_k without them"):
        model(tokens, cu_seq_lens_k=torch.tensor([0, 4, 20]))
    positions = torch.arange(20).view(2, 10) % 5
    packed = model(tokens, position_ids=positions, cu_seq_lens_q=torch.arange(0, 21, 5), use_cache=False).logits
    assert torch.equal(packed, model(tokens, position_ids=positions, use_cache=False).logits)


@pytest.fixture
def one_rank(tmp_path):
    """A mesh that has all of a sequence: what torch replaces for it is what it replaces for many."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_a_sequence_that_is_spread_over_ranks_is_refused(one_rank):
    """Every rank would attend to its own part, and say nothing."""
    q, (tokens, _) = torch.randn(1, 2, 3, 4), left_padded()
    own = tiny_model("softmax")
    llama = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES), attn_implementation="affine_attn")
    compiled = torch.compile(attention, backend="eager")
    torch.compile(attention, backend="eager", fullgraph=True)(q, q, q)
    runs = [lambda: attention(q, q, q), lambda: compiled(q, q, q), lambda: own(tokens), lambda: llama(tokens)]
    for run in runs:
        run()
    with context_parallel(one_rank, buffers=[torch.arange(8.0)[None]], buffer_seq_dims=[1]):
        for run in runs:
            with pytest.raises(ValueError, match="knows no context parallelism: under torch's context_parallel a rank"):
                run()
    assert not own.supports_context_parallel


def test_a_model_that_looks_both_ways_compiles_and_others_that_look_ahead_are_refused_there():
    """What is traced has no numbers to look at, and must not go on as if it were causal."""
    tokens, mask = left_padded()
    eager, ours = (BertModel(BertConfig(**SIZES, attn_implementation=name)).eval() for name in ("eager", "affine_attn"))
    ours.load_state_dict(eager.state_dict())
    expected = eager(tokens, attention_mask=mask).last_hidden_state[mask.bool()]
    for run in (ours, torch.compile(ours, backend="aot_eager")):
        found = run(tokens, attention_mask=mask).last_hidden_state[mask.bool()]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)

    def ahead(q):
        seen = transformers_mask(1, 3, 3, mask_function=lambda b, h, i, j: j <= i + 1)
        return transformers_attention(torch.nn.Module(), q, q, q, seen)[0]

    q = torch.randn(1, 2, 3, 4)
    near = torch.ones(3, 3).tril(1).bool()
    expected = attention(q, q, q, mask=Mask(causal=False, allowed=near)).transpose(1, 2)
    torch.testing.assert_close(ahead(q), expected)
    with pytest.raises(RuntimeError, match="lets tokens see later ones"):
        torch.compile(ahead, backend="aot_eager")(q)
