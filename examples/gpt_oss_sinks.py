"""gpt-oss with its learned sinks on these engines, beside its eager attention: ``python examples/gpt_oss_sinks.py``.

Importing ``affine_attn.models`` registers the implementation. Values and gradients, those of the sinks included, agree.
"""

import torch
from transformers import AutoModelForCausalLM, GptOssConfig

import affine_attn.models  # noqa: F401 (registers attn_implementation="affine_attn")


def compare() -> dict[str, float]:
    """Return the largest differences to eager attention: of logits, and of the gradient of the sinks."""
    config = GptOssConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=8,
    )
    ids = torch.randint(0, 128, (2, 24), generator=torch.Generator().manual_seed(0))
    found = {}
    for implementation in ("eager", "affine_attn"):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
        output = model(input_ids=ids, labels=ids)
        output.loss.backward()
        sinks = torch.stack([layer.self_attn.sinks.grad for layer in model.model.layers])
        found[implementation] = (output.logits, sinks)
    pairs = zip(("logits", "gradient of sinks"), found["eager"], found["affine_attn"], strict=True)
    return {name: (a - b).abs().max().item() for name, a, b in pairs}


if __name__ == "__main__":
    for name, difference in compare().items():
        print(f"{name}: largest difference to eager {difference:.1e}")
