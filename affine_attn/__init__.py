"""Attention whose weights need not sum to one: affine scaling, sinks, gates, distance logits, on fast kernels."""

from affine_attn.core.alpha import AlphaGate, commit_alpha, track_alpha
from affine_attn.core.dispatch import attention, explain
from affine_attn.core.layer import AttentionLayer
from affine_attn.core.masks import Mask
from affine_attn.core.rope import Rope
from affine_attn.core.spec import Affine, Alibi, AttentionSpec, LogN, ScaleInvariant
from affine_attn.core.stats import AttentionStats, attention_stats
from affine_attn.core.variants import VARIANTS, variant

__version__ = "0.1.0"

__all__ = [
    "VARIANTS",
    "Affine",
    "Alibi",
    "AlphaGate",
    "AttentionLayer",
    "AttentionSpec",
    "AttentionStats",
    "LogN",
    "Mask",
    "Rope",
    "ScaleInvariant",
    "attention",
    "attention_stats",
    "commit_alpha",
    "explain",
    "track_alpha",
    "variant",
]
