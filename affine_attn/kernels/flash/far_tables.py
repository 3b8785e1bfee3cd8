"""Constant tables for far tiles of scale-invariant logits; scores.py has the idea."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from affine_attn.kernels.device import cached, to_device
from affine_attn.kernels.launch import LOG2E

# A tile is far when every row is at least this many tile half-widths from its centre: from there on the tables below
# give the factor a(t) to 2e-7 relative before fp32 rounding, for every tau.
FAR_RATIO = 3
# The (Chebyshev degree, fp16 piece) each column of a far table holds. A coefficient is about a sixth of the one before,
# so only the first few need more than one 11-bit piece. 16 columns are one tensor-core step.
FAR_SLOTS = (
    (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1), (4, 0), (4, 1),
    (5, 0), (6, 0), (7, 0), (8, 0), (9, 0),
)  # fmt: skip


class FarTables(NamedTuple):
    coefficients: Tensor  # fp16 [length, 16]: row c approximates f on [c - width/2, c + width/2]
    falling: Tensor  # fp16 [16, width]: Chebyshev polynomials at the distances c + width/2 - j (columns are keys)
    rising: Tensor  # fp16 [16, width]: the same at c - width/2 + i (columns are queries)


@cached
def far_tables(tau: float, width: int, length: int, device: torch.device) -> FarTables:
    """f(t) = sqrt(log2e + 2 log2(1 + t/tau)) as (coefficients @ basis), good from FAR_RATIO half-widths on."""
    half = width // 2
    degrees = 1 + max(degree for degree, _ in FAR_SLOTS)
    float64: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
    angle = (torch.arange(degrees, **float64) + 0.5) * (math.pi / degrees)
    # Rows nearer than one half-width are never read: keep them finite.
    center = torch.arange(length, **float64).clamp(min=half)
    t = center[:, None] + half * angle.cos()
    f = (LOG2E + 2 * LOG2E * torch.log1p(t / tau)).sqrt()
    waves = torch.cos(torch.arange(degrees, **float64)[:, None] * angle) * (2 / degrees)  # [degree, node]
    waves[0] /= 2
    rest = f @ waves.T  # Chebyshev interpolation: [length, degrees]
    offset = (half - torch.arange(width, **float64)) / half  # 1 .. -1 + 2/width
    coefficients = torch.empty(length, len(FAR_SLOTS), dtype=torch.float16, device="cpu")
    falling = torch.empty(len(FAR_SLOTS), width, dtype=torch.float16, device="cpu")
    rising = torch.empty_like(falling)
    for slot, (degree, _) in enumerate(FAR_SLOTS):
        coefficients[:, slot] = rest[:, degree].half()
        rest[:, degree] -= coefficients[:, slot].double()
        falling[slot] = torch.cos(degree * torch.acos(offset)).half()
        rising[slot] = torch.cos(degree * torch.acos(-offset)).half()
    return FarTables(*to_device((coefficients, falling, rising), device))
