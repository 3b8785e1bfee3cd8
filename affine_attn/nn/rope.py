"""Rotary position embeddings behind one table builder, the truncated p-RoPE readings included.

A frequency of zero leaves its pair of channels unrotated, so every reading is a list of D/2 frequencies:

    rope           theta^(-2k/D)
    p_rope         first quarter of D: slowest^-linspace(0, 1), rest 0 (half-truncated, as in modded-nanogpt)
    p_rope_top     theta^(-2k/D) for the highest share p of the pairs, rest 0 (Barbero et al., arXiv 2410.06205)

The third reading of the scale-invariant paper, ordinary RoPE with base 1024, is ``Rope(theta=1024)``. The paper trains
at 4096 tokens, where the slowest pair of p_rope turns by 4 radians; for shorter sequences see docs/footguns.md.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from affine_attn.core.spec import is_number


@dataclass(frozen=True)
class Rope:
    """Rotary position embeddings: ordinary RoPE, or one of two kinds that leave a part of the channel pairs alone."""

    kind: Literal["rope", "p_rope", "p_rope_top"] = "rope"
    theta: float = 10000.0
    p: float = 0.75  # share of rotated pairs, p_rope_top only
    slowest: float = 1024.0  # positions per radian of the slowest rotated pair, p_rope only

    def __post_init__(self):
        if self.kind not in ("rope", "p_rope", "p_rope_top"):
            raise ValueError(f"Rope: kind must be 'rope', 'p_rope' or 'p_rope_top', got {self.kind!r}")
        if not (is_number(self.theta) and self.theta > 0):
            raise ValueError(f"Rope: theta must be a number > 0, got {self.theta!r}")
        if not (is_number(self.p) and 0 < self.p <= 1):
            raise ValueError(f"Rope: p must be a number in (0, 1], got {self.p!r}")
        if not (is_number(self.slowest) and self.slowest >= 1):
            raise ValueError(f"Rope: slowest must be at least 1 position per radian, got {self.slowest}")

    def frequencies(self, head_dim: int, device: torch.device | None = None) -> Tensor:
        """Radians per position of each of the D/2 channel pairs, fp32."""
        pairs = head_dim // 2
        if self.kind == "p_rope":
            rotated = pairs // 2
            # Not the default type: transformers sets that of the weights while it builds a model.
            fast = (1.0 / self.slowest) ** torch.linspace(0, 1, rotated, dtype=torch.float32, device=device)
            return torch.cat((fast, fast.new_zeros(pairs - rotated)))
        k = torch.arange(pairs, device=device, dtype=torch.float32)
        frequencies = self.theta ** (-2 * k / head_dim)
        rotated = pairs if self.kind == "rope" else round(self.p * pairs)
        return torch.where(k < rotated, frequencies, 0.0)

    def table(self, positions: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
        """cos and sin, fp32 [..., T, D/2], for integer positions [..., T]."""
        angles = positions[..., None].float() * self.frequencies(head_dim, positions.device)
        return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (c, c + D/2) of x [B, H, T, D], computed in fp32; cos and sin [..., T, D/2] are those of a table.

    All of it, its gradient too, lies in memory as projections write it and o_proj reads it, heads inside tokens: an
    attention lays its output out like its queries, so nothing is copied into another order on the way.
    """
    # Of whole heads: on a CPU operations on half of a head's channels take half as long again.
    cos, sin = torch.cat((cos, cos), -1)[..., None, :], torch.cat((-sin, sin), -1)[..., None, :]
    wide = x.transpose(1, 2).float()
    rotated = wide * cos + wide.roll(x.shape[-1] // 2, -1) * sin
    return rotated.to(x.dtype).transpose(1, 2)
