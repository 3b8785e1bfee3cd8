"""Tiny Hugging Face models whose tokens depend on everything: large weights, averages and sinks away from zero."""

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from affine_attn.models import AffineAttnConfig, AffineAttnForCausalLM
from affine_attn.models.modeling import AffineAttnAttention

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def tiny_config(attention="affine", **changes) -> AffineAttnConfig:
    changes = {"qk_norm": attention == "scale_invariant"} | changes
    return AffineAttnConfig(attention=attention, **(SIZES | changes))


def tiny_model(attention="affine", **changes) -> AffineAttnForCausalLM:
    """Make a model in eval mode, in fp32, with stage parameters that matter."""
    torch.manual_seed(1)
    return stir(AffineAttnForCausalLM(tiny_config(attention, **changes))).eval()


def stir(model):
    with torch.no_grad():
        for layer in (m for m in model.modules() if isinstance(m, AffineAttnAttention)):
            if layer.alpha is not None:
                layer.alpha.alpha_ma.copy_(torch.rand(layer.alpha.alpha_ma.shape) + 0.5)
                # N = 2048 would hide beta in sequences of twenty tokens.
                layer.alpha.alpha_ma.mul_(100)
            if layer.sinks is not None:
                layer.sinks.normal_(std=3)
    return model


def words() -> PreTrainedTokenizerFast:
    """A tokenizer of w0, w1 and so on: as many words as a tiny model knows."""
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(SIZES["vocab_size"])}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def left_padded(batch: int = 2, length: int = 10, padded: int = 4, seed: int = 0):
    """input_ids and attention_mask; the first row is padded on the left."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, SIZES["vocab_size"], (batch, length), generator=generator)
    mask = torch.ones_like(tokens)
    mask[0, :padded] = 0
    return tokens * mask, mask
