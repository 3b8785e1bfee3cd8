"""What a user would write with torch alone for a mask: the yardsticks beside F.scaled_dot_product_attention.

Each is softmax attention of q [B, H, T, D] and k, v [B, Hkv, T, D], [B, H, T, D] again; differentiable but for
FlexAttention on a CPU. Compiled ones wait for seconds when they are first called with a shape.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def document_loop(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    """Causal documents, one after another in each row: a call for each."""
    parts = (x.split(lengths, 2) for x in (q, k, v))
    return torch.cat([causal(*part) for part in zip(*parts, strict=True)], 2)


def real_parts(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], on_the_left: bool = False) -> Tensor:
    """Causal sequences with padding: a call for the real tokens of each; 0 elsewhere."""
    tokens, rows = q.shape[2], []
    for sequences, length in zip(zip(*(x.split(1) for x in (q, k, v)), strict=True), lengths, strict=True):
        real = slice(tokens - length, tokens) if on_the_left else slice(0, length)
        around = (0, 0, tokens - length, 0) if on_the_left else (0, 0, 0, tokens - length)
        rows.append(F.pad(causal(*(x[:, :, real] for x in sequences)), around))
    return torch.cat(rows)


def window_blocks(q: Tensor, k: Tensor, v: Tensor, window: int, rows: int) -> Tensor:
    """A causal window in one call, for blocks of ``rows`` queries with the keys that any of them sees, [1, H, T, D]."""
    blocks, back = q.shape[2] // rows, window - 1
    i, j = torch.arange(rows, device=q.device)[:, None], torch.arange(rows + back, device=q.device)
    seen = (j >= i) & (j <= i + back)
    # Only the first blocks see keys before the first one.
    slots = torch.arange(blocks, device=q.device)[:, None, None] * rows + j - back
    of_blocks = q[0].unflatten(1, (blocks, rows)).transpose(0, 1)
    kv = (F.pad(x[0], (0, 0, back, 0)).unfold(1, rows + back, rows).permute(1, 0, 3, 2) for x in (k, v))
    y = F.scaled_dot_product_attention(of_blocks, *kv, attn_mask=(seen & (slots >= 0))[:, None], enable_gqa=True)
    return y.transpose(0, 1).flatten(1, 2)[None]


def float_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Scores with a mask [B or 1, H or 1, T, T] added."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, factor: Tensor) -> Tensor:
    """Scores times a factor, with a mask added, both broadcastable to [B, H, T, T]."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return (q.shape[-1] ** -0.5 * (q @ k.mT) * factor + mask).softmax(-1) @ v


def dense_compiled(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, factor: Tensor) -> Tensor:
    return compiled(dense)(q, k, v, mask, factor)


def flex_compiled(
    q: Tensor, k: Tensor, v: Tensor, sees: Callable[..., Tensor], score: Callable[..., Tensor] | None = None
) -> Tensor:
    """FlexAttention with its mask_mod and its score_mod; its block mask is made once."""
    from torch.nn.attention.flex_attention import flex_attention

    block_mask = _block_mask(sees, q.shape[2], q.device)
    return compiled(flex_attention)(q, k, v, score_mod=score, block_mask=block_mask, enable_gqa=True)


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)


@functools.cache
def _block_mask(sees: Callable[..., Tensor], tokens: int, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(sees, None, None, tokens, tokens, device=device)
