"""attn_implementation="affine_attn" in models of transformers: masks, sinks, gradients."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from transformers import AutoModelForCausalLM, BertConfig, BertModel, GptOssConfig, LlamaConfig, MistralConfig

import affine_attn.models  # noqa: F401 (registers the implementation)
from affine_attn import attention
from affine_attn.models.attn_implementation import transformers_attention, transformers_mask
from tests.support.hf import SIZES, left_padded, tiny_model

GPT_OSS = GptOssConfig(
    **(SIZES | {"num_hidden_layers": 3, "head_dim": 8, "sliding_window": 5}),
    num_local_experts=2,
    num_experts_per_tok=1,
    layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    rope_parameters={"rope_type": "default", "rope_theta": 1e4},
)


def pair(config):
    """The same weights, once on the eager path of transformers and once on ours; sinks of plus and minus 8."""
    torch.manual_seed(3)
    eager = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in eager.named_parameters():
            if name.endswith("sinks"):
                parameter.copy_(torch.tensor([8.0, -8.0, 0.5, 3.0]))
    ours = AutoModelForCausalLM.from_config(config, attn_implementation="affine_attn").eval()
    ours.load_state_dict(eager.state_dict())
    return eager, ours


@pytest.mark.parametrize("padded", [0, 4])
def test_gpt_oss_has_the_values_and_gradients_of_its_eager_path(padded):
    eager, ours = pair(GPT_OSS)
    tokens, mask = left_padded(length=12, padded=padded)
    gradients = []
    for model in (eager, ours):
        logits = model(tokens, attention_mask=mask).logits[mask.bool()]
        logits.square().mean().backward()
        gradients.append({"logits": logits} | {name: p.grad for name, p in model.named_parameters()})
    for name, expected in gradients[0].items():
        torch.testing.assert_close(
            gradients[1][name], expected, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )
    sinks = gradients[1]["model.layers.0.self_attn.sinks"]
    assert sinks.abs().min() > 0


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


def test_packed_positions_reach_a_foreign_model():
    _, ours = pair(LlamaConfig(**SIZES))
    tokens, _ = left_padded(batch=1, length=9, padded=0)
    positions = torch.cat([torch.arange(n) for n in (4, 5)])[None]
    packed = ours(tokens, position_ids=positions, use_cache=False).logits
    separate = torch.cat([ours(part).logits for part in tokens.split([4, 5], 1)], 1)
    torch.testing.assert_close(packed, separate, rtol=1e-4, atol=1e-4)


def test_output_attentions_are_those_of_the_eager_path():
    eager, ours = pair(GPT_OSS)
    tokens, mask = left_padded()
    for w, expected in zip(
        ours(tokens, mask, output_attentions=True).attentions,
        eager(tokens, mask, output_attentions=True).attentions,
        strict=True,
    ):
        # Rows of padding see nothing here and everything there.
        torch.testing.assert_close(w[0, :, 4:], expected[0, :, 4:], rtol=1e-4, atol=1e-5)


def test_what_it_does_not_compute_is_refused():
    q = torch.randn(1, 2, 3, 4)
    mask = transformers_mask(1, 3, 3)
    with pytest.raises(ValueError, match="needs the mask its own function makes, got NoneType"):
        transformers_attention(torch.nn.Module(), q, q, q, None)
    with pytest.raises(ValueError, match="no dropout and no softcap"):
        transformers_attention(torch.nn.Module(), q, q, q, mask, dropout=0.1)
    for name in ("position_bias", "indices", "block_indices"):
        with pytest.raises(ValueError, match=f"has no {name}, with which this model calls its attention"):
            transformers_attention(torch.nn.Module(), q, q, q, mask, **{name: torch.zeros(1, 2, 3, 3)})
    for named in ({"sinks": torch.zeros(2)}, {"a_setting_of_tomorrow": True}):
        with pytest.raises(ValueError, match=f"has no {next(iter(named))}, with which this model calls"):
            transformers_attention(torch.nn.Module(), q, q, q, mask, **named)
    with pytest.raises(ValueError, match="is causal, got is_causal=False"):
        transformers_attention(torch.nn.Module(), q, q, q, mask, is_causal=False)
    with pytest.raises(ValueError, match="packs by position_ids that restart, got cu_seq_lens_q without them"):
        transformers_attention(torch.nn.Module(), q, q, q, mask, cu_seq_lens_q=torch.tensor([0, 1, 3]))
    longer = torch.randn(1, 2, 4, 4)
    with pytest.raises(ValueError, match="needs a mask of all keys: this model makes it for 3 and attends to 4"):
        transformers_attention(torch.nn.Module(), q, longer, longer, mask)
    with pytest.raises(ValueError, match="no custom ones"):
        transformers_mask(1, 3, 3, use_vmap=True)
    with pytest.raises(ValueError, match="lets tokens see later ones"):
        transformers_mask(1, 3, 3, mask_function=lambda b, h, i, j: i >= 0)


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


def test_a_model_that_looks_ahead_is_refused_when_it_is_compiled_too():
    """What is traced has no numbers to look at, and must not go on as if it were causal."""
    tokens, mask = left_padded()
    model = BertModel(BertConfig(**SIZES, attn_implementation="affine_attn")).eval()
    with pytest.raises(RuntimeError, match="lets tokens see later ones"):
        torch.compile(model, backend="aot_eager")(tokens, attention_mask=mask)
