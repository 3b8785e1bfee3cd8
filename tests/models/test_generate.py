"""Generation: with a cache, in any order and layout, the tokens are those of the full forward."""

import copy

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, StaticCache
from transformers.exporters import DynamoConfig, DynamoExporter
from transformers.exporters.utils import decompose_for_generation

from affine_attn import VARIANTS
from tests.support.hf import left_padded, tiny_model

NEW = 7


def greedy(model, tokens, mask, **kwargs):
    return model.generate(tokens, attention_mask=mask, max_new_tokens=NEW, do_sample=False, **kwargs)


def full_logits(model, tokens, mask):
    """Logits of the real positions of one forward without a cache, positions counted from the first real token."""
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return model(tokens, attention_mask=mask, position_ids=positions, use_cache=False).logits


def extended(mask, tokens):
    return torch.cat((mask, torch.ones(len(mask), tokens.shape[1] - mask.shape[1], dtype=mask.dtype)), 1)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", VARIANTS)
def test_cached_generation_is_the_full_forward_at_every_step(name, cache):
    model = tiny_model(name)
    tokens, mask = left_padded()
    out = greedy(
        model,
        tokens,
        mask,
        output_logits=True,
        return_dict_in_generate=True,
        cache_implementation=cache,
        disable_compile=True,
    )
    logits = torch.stack(out.logits, 1)
    sequence = out.sequences
    expected = full_logits(model, sequence, extended(mask, sequence))[:, tokens.shape[1] - 1 : -1]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(expected.argmax(-1), sequence[:, tokens.shape[1] :])
    assert len(set(sequence[0, tokens.shape[1] :].tolist())) > 1, "a constant sequence would hide mistakes"


@pytest.mark.parametrize("window", [3, [3, None]])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_windows_generate_like_the_full_forward(window, cache):
    model = tiny_model("affine", window=window)
    tokens, mask = left_padded()
    with_cache = greedy(model, tokens, mask, cache_implementation=cache, disable_compile=True)
    assert torch.equal(with_cache, greedy(model, tokens, mask, use_cache=False))


def test_prefill_in_chunks_and_crop():
    model = tiny_model("affine_gated")
    tokens, _ = left_padded(padded=0)
    expected = model(tokens).logits
    cache = DynamicCache(config=model.config)
    pieces = [model(part, past_key_values=cache).logits for part in tokens.split([4, 1, 5], 1)]
    torch.testing.assert_close(torch.cat(pieces, 1), expected, rtol=1e-4, atol=1e-4)
    cache.crop(-4)
    again = model(tokens[:, 6:], past_key_values=cache).logits
    torch.testing.assert_close(again, expected[:, 6:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["softmax", "affine", "scale_invariant"])
def test_a_static_cache_filled_in_chunks(name):
    model = tiny_model(name)
    tokens, _ = left_padded(padded=0)
    cache = StaticCache(config=model.config, max_cache_len=16)
    pieces = [model(part, past_key_values=cache).logits for part in tokens.split([4, 1, 5], 1)]
    torch.testing.assert_close(torch.cat(pieces, 1), model(tokens).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["sink", "affine", "logn"])
def test_beam_search_is_the_same_without_a_cache(name):
    model = tiny_model(name)
    tokens, mask = left_padded()
    beams = [greedy(model, tokens, mask, num_beams=3, use_cache=use_cache) for use_cache in (True, False)]
    assert torch.equal(*beams)


@pytest.mark.parametrize("name", ["softmax", "affine"])
def test_assisted_generation_is_greedy_generation(name):
    model, assistant = tiny_model(name), tiny_model("off_by_one", num_hidden_layers=1)
    tokens, _ = left_padded(batch=1, padded=0)
    mask = torch.ones_like(tokens)
    assert torch.equal(greedy(model, tokens, mask, assistant_model=assistant), greedy(model, tokens, mask))


def test_sampling_is_the_same_with_and_without_a_cache():
    model = tiny_model("affine")
    tokens, mask = left_padded()
    drawn = []
    for use_cache in (True, False):
        torch.manual_seed(5)
        drawn.append(
            model.generate(tokens, attention_mask=mask, max_new_tokens=NEW, do_sample=True, use_cache=use_cache)
        )
    assert torch.equal(*drawn)


def test_inputs_embeds_start_a_generation():
    model = tiny_model("affine")
    tokens, mask = left_padded()
    embeds = model.get_input_embeddings()(tokens)
    out = model.generate(inputs_embeds=embeds, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(out, greedy(model, tokens, mask)[:, tokens.shape[1] :])


@pytest.mark.gpu
@pytest.mark.parametrize("cache", ["offloaded", "offloaded_static", "static"])
def test_caches_on_the_gpu(cache):
    model = tiny_model("affine").cuda()
    tokens, mask = (x.cuda() for x in left_padded())
    # transformers compiles decoding by itself, and torch 2.11 crashes on the streams of an offloaded static cache.
    alone = {"disable_compile": cache == "offloaded_static"}
    with_cache = greedy(model, tokens, mask, cache_implementation=cache, **alone)
    assert torch.equal(with_cache, greedy(model, tokens, mask, use_cache=False))


def test_the_forward_and_backward_compile_in_one_graph():
    model = tiny_model("affine_gated", num_hidden_layers=1)
    tokens, _ = left_padded(padded=0)
    gradients = []
    for forward in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        model.zero_grad()
        logits = forward(tokens, use_cache=False).logits
        logits.square().mean().backward()
        gradients.append([logits, *(p.grad.clone() for p in model.parameters())])
    for expected, got in zip(*gradients, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_decoding_with_a_static_cache_compiles_once():
    """Left-padded, token by token: the mask enters as tensors of one shape, so nothing is compiled anew."""
    torch._dynamo.reset()
    model = tiny_model("affine")
    tokens, mask = left_padded()
    expected = greedy(model, tokens, mask)
    cache = StaticCache(config=model.config, max_cache_len=20)
    step = torch.compile(model, fullgraph=True, backend="aot_eager")
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    ids, graphs = tokens, []
    with torch.no_grad():
        for i in range(NEW):
            new = ids if i == 0 else ids[:, -1:]
            inputs = model.prepare_inputs_for_generation(
                ids,
                next_sequence_length=new.shape[1],
                past_key_values=cache,
                attention_mask=mask,
                position_ids=positions[:, -new.shape[1] :],
            )
            logits = (model if i == 0 else step)(**inputs).logits
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
            ids = torch.cat((ids, logits[:, -1:].argmax(-1)), 1)
            mask, positions = extended(mask, ids), torch.cat((positions, positions[:, -1:] + 1), 1)
    assert torch.equal(ids, expected)
    assert graphs[-1] == graphs[2], f"graphs compiled so far, step by step: {graphs}"


@pytest.mark.parametrize("several", [False, True], ids=["one_token", "several_tokens"])
def test_prefill_and_decoding_with_a_static_cache_are_exported(several):
    """As transformers' exporter captures them from ``generate``, left-padded; it takes tensors and caches alone."""
    model = tiny_model("affine", num_hidden_layers=1)
    tokens, mask = left_padded()
    settings = GenerationConfig(cache_implementation="static", max_length=20, do_sample=False)
    inputs = {"input_ids": tokens, "attention_mask": mask}
    for piece, arguments in decompose_for_generation(model, inputs, settings, several).values():
        with torch.no_grad():
            expected = piece(**copy.deepcopy(arguments)).logits
            exported = DynamoExporter().export(piece, arguments, DynamoConfig(dynamic=several))
            logits = exported.module()(**copy.deepcopy(arguments)).logits
        torch.testing.assert_close(logits[:, -1], expected[:, -1], rtol=1e-4, atol=1e-4)
