"""The StreamingLLM cache: bounded, exact on what it keeps, and usable with every variant."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from affine_attn import VARIANTS, AttentionLayer
from affine_attn.models import AffineAttnForCausalLM, StreamingCache, preset
from tests.support.hf import SIZES, left_padded, tiny_model


@pytest.mark.parametrize("name", VARIANTS)
def test_without_eviction_it_is_the_full_forward(name):
    model = tiny_model(name)
    tokens, _ = left_padded(padded=0)
    cache = StreamingCache(sinks=2, recent=8)
    pieces = [model(part, past_key_values=cache).logits for part in tokens.split([4, 1, 5], 1)]
    torch.testing.assert_close(torch.cat(pieces, 1), model(tokens).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", VARIANTS)
def test_with_eviction_it_is_attention_on_the_kept_tokens(name):
    """In one layer keys and values depend on their own token alone, so the kept tokens can be run by themselves."""
    model = tiny_model(name, num_hidden_layers=1)
    tokens, _ = left_padded(length=20, padded=0)
    cache = StreamingCache(sinks=2, recent=6)
    for end in range(1, 21):
        logits = model(tokens[:, end - 1 : end], past_key_values=cache).logits
        kept = list(range(min(2, end))) + list(range(max(2, end - 6), end))
        torch.testing.assert_close(logits[:, -1], model(tokens[:, kept]).logits[:, -1], rtol=1e-4, atol=1e-4)
        assert cache.layers[0].keys.shape[2] == len(kept) <= 8
    chunk = model(tokens[:, :4], past_key_values=cache).logits
    kept = torch.cat((tokens[:, :2], tokens[:, 18:20], tokens[:, :4]), 1)
    torch.testing.assert_close(chunk, model(kept).logits[:, -4:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_beams", [1, 2])
def test_generate_runs_on_it_beyond_its_size(num_beams):
    model = tiny_model("affine")
    tokens, _ = left_padded(padded=0)
    mask = torch.ones_like(tokens)
    options = {"attention_mask": mask, "do_sample": False, "num_beams": num_beams}
    large, small = StreamingCache(recent=100), StreamingCache(sinks=2, recent=10)
    expected = model.generate(tokens, max_new_tokens=5, **options)
    assert torch.equal(model.generate(tokens, max_new_tokens=5, past_key_values=large, **options), expected)
    out = model.generate(tokens, max_new_tokens=40, past_key_values=small, **options)
    assert out.shape[1] == 50
    assert small.layers[1].keys.shape[2] == 12


def test_a_hundred_thousand_tokens_in_constant_memory():
    model = AffineAttnForCausalLM(preset("nano", "affine")).eval()
    generator = torch.Generator().manual_seed(0)
    cache, chunk, sizes = StreamingCache(sinks=4, recent=252), 250, set()
    with torch.no_grad():
        for step in range(400):
            tokens = torch.randint(0, 256, (1, chunk), generator=generator)
            logits = model(tokens, past_key_values=cache, logits_to_keep=1).logits
            assert logits.isfinite().all()
            if step:
                sizes.add(
                    sum(t.untyped_storage().nbytes() for layer in cache.layers for t in (layer.keys, layer.values))
                )
    assert cache.get_seq_length() == 100_000
    assert len(sizes) == 1


def test_what_it_cannot_do_is_refused():
    model, cache = tiny_model(), StreamingCache()
    tokens, mask = left_padded()
    with pytest.raises(ValueError, match="padded batches have no common positions"):
        model(tokens, mask, past_key_values=cache)
    model(tokens, past_key_values=cache)
    with pytest.raises(ValueError, match="tokens cannot be taken back"):
        cache.crop(-1)
    cache.reset()
    assert cache.get_seq_length() == 0
    # These rotate their keys first, and would go on beyond the positions they know.
    layer = AttentionLayer(32, 4)
    for foreign in (
        lambda: LlamaForCausalLM(LlamaConfig(**SIZES))(tokens, past_key_values=cache),
        lambda: layer(torch.randn(1, 3, 32), positions=torch.arange(3)[None], cache=cache),
    ):
        with pytest.raises(ValueError, match="as only AffineAttn models hand them over"):
            foreign()
    for recent in (0, 2.0, 10**30):
        with pytest.raises(ValueError, match=f"sinks must be >= 0 and recent >= 1, got 4 and {recent};"):
            StreamingCache(recent=recent)
