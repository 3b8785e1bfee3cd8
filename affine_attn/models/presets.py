"""Named architectures: those the affine paper trains, their teachers, and small ones for tests and demos."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from affine_attn.checks import nearest
from affine_attn.core.spec import Alibi, AttentionSpec, ScaleInvariant
from affine_attn.core.variants import at_length, variant
from affine_attn.errors import UserError
from affine_attn.models.configuration import AffineAttnConfig, as_spec

# Radians by which the slowest pair of p-RoPE turns in a training sequence: a full turn and some, so that longer text
# brings no angle that training did not show (docs/reproduction.md, table D).
TURN = 8

_LLAMA32: dict[str, Any] = {
    "vocab_size": 128256,
    "intermediate_size": 8192,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
_QWEN15: dict[str, Any] = {
    "vocab_size": 151936,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "max_position_embeddings": 32768,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "qkv_bias": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
}

# name -> (training sequence length, what differs from the defaults of AffineAttnConfig)
PRESETS: dict[str, tuple[int, dict[str, Any]]] = {
    "qwen1.5-0.5b": (2048, _QWEN15 | {"hidden_size": 1024, "intermediate_size": 2816}),
    "qwen1.5-1.8b": (
        2048,
        _QWEN15 | {"hidden_size": 2048, "intermediate_size": 5504, "tie_word_embeddings": False},
    ),
    "llama3.2-1b": (2048, _LLAMA32 | {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32}),
    "llama3.2-3b": (2048, _LLAMA32 | {"hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 24}),
    "llama3.1-8b": (
        2048,
        _LLAMA32
        | {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "tie_word_embeddings": False,
            "rope_parameters": _LLAMA32["rope_parameters"] | {"factor": 8.0},
        },
    ),
}
# name: (hidden, layers, query heads, kv heads, vocabulary, training sequence length)
_SMALL = {
    "nano": (64, 2, 4, 2, 256, 128),
    "micro": (128, 4, 4, 2, 49152, 256),
    "mini": (384, 8, 6, 2, 49152, 512),
}
for _name, (_hidden, _layers, _heads, _kv_heads, _vocabulary, _length) in _SMALL.items():
    PRESETS[_name] = (
        _length,
        {
            "vocab_size": _vocabulary,
            "hidden_size": _hidden,
            "intermediate_size": 3 * _hidden,
            "num_hidden_layers": _layers,
            "num_attention_heads": _heads,
            "num_key_value_heads": _kv_heads,
            "max_position_embeddings": 8192,
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
    )


# Transformers keeps the two that are not its own in rope_parameters.
_FIELDS = {*(field.name for field in fields(AffineAttnConfig)), "num_labels", "rope_theta", "rope_scaling"}


def preset(name: str, attention: Any = "affine", **changes: Any) -> AffineAttnConfig:
    """The configuration of a named architecture with a chosen attention; ``changes`` override single fields.

    Those that are no field of it are refused. A variant given by name gets the preset's training sequence length where
    its formula has one; a spec is taken as is.
    Positions and norms are those of ``surroundings``.
    """
    if name not in PRESETS:
        raise UserError(f"unknown preset {name!r}; allowed are {', '.join(PRESETS)}")
    if unknown := next((field for field in changes if field not in _FIELDS), None):
        raise UserError(f"preset: there is no field {unknown!r} of an AffineAttnConfig{nearest(unknown, _FIELDS)}")
    length, architecture = PRESETS[name]
    each = attention if isinstance(attention, list | tuple) else [attention]
    specs = [at_length(variant(entry), length) if isinstance(entry, str) else as_spec(entry) for entry in each]
    chosen = specs if isinstance(attention, list | tuple) else specs[0]
    settings: dict[str, Any] = {"attention": chosen, "tie_word_embeddings": True} | architecture
    return AffineAttnConfig(**(settings | surroundings(specs, length) | changes))


def surroundings(specs: Sequence[AttentionSpec], length: int) -> dict[str, Any]:
    """What logits ask of the model around them, as fields of its configuration, where all layers have the same.

    Scale-invariant ones were derived for norms on q and k and hold beyond the training length on p-RoPE; ALiBi is all
    that its models know of positions.
    """
    if all(isinstance(spec.scores.logit, ScaleInvariant) for spec in specs):
        return {"qk_norm": True, "rope_parameters": {"rope_type": "p_rope", "slowest": max(1.0, length / TURN)}}
    if all(isinstance(spec.scores.logit, Alibi) for spec in specs):
        return {"rope_parameters": {"rope_type": "nope"}}
    return {}
