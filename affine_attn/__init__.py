"""Attention whose weights need not sum to one: affine scaling, sinks, gates, distance logits, on fast kernels."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from affine_attn.api import attention, attention_stats, explain
    from affine_attn.core.masks import Mask
    from affine_attn.core.spec import Affine, Alibi, AttentionSpec, LogN, ScaleInvariant, SoftCap
    from affine_attn.core.stats import AttentionStats
    from affine_attn.core.variants import VARIANTS, variant
    from affine_attn.nn.alpha import AlphaGate, commit_alpha, track_alpha
    from affine_attn.nn.layer import AttentionLayer
    from affine_attn.nn.rope import Rope

__version__ = "0.2.0"

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
    "SoftCap",
    "attention",
    "attention_stats",
    "commit_alpha",
    "explain",
    "track_alpha",
    "variant",
]

_MODULES = {
    "nn.alpha": ("AlphaGate", "commit_alpha", "track_alpha"),
    "api": ("attention", "attention_stats", "explain"),
    "nn.layer": ("AttentionLayer",),
    "core.masks": ("Mask",),
    "nn.rope": ("Rope",),
    "core.spec": ("Affine", "Alibi", "AttentionSpec", "LogN", "ScaleInvariant", "SoftCap"),
    "core.stats": ("AttentionStats",),
    "core.variants": ("VARIANTS", "variant"),
}


def __getattr__(name: str) -> Any:
    """Public names are loaded when first used: torch takes seconds, which affine-attn --help would wait for."""
    if name == "plot":
        return importlib.import_module(f"{__name__}.plot")
    for module, names in _MODULES.items():
        if name in names:
            found = getattr(importlib.import_module(f"{__name__}.{module}"), name)
            globals()[name] = found
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
