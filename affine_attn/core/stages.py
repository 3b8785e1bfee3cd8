"""The stages in torch, on a block of rows and keys: one place for each formula.

The reference runs them on everything at once, ``blocked``, the statistics and the analysis block by block.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from affine_attn.core.call import Call
from affine_attn.core.masks import block_of


def scores(
    call: Call, k: Tensor, visible: Tensor, rows: slice, keys: slice, matmul: torch.dtype | None = None
) -> Tensor:
    """Stage 1 for a block of rows and keys: s [B, H, rows, keys], -inf on invisible keys."""
    dtype = row_dtype(call.q)
    s = raw_scores(call, k, rows, keys, matmul)
    s = s if call.curve is None else call.curve.curve(s)
    factor, offset = coefficients(call, rows, keys)
    s = s if factor is None else factor * s
    s = s if offset is None else s + offset
    s = s if call.bias is None else s + block_of(call.bias, rows, keys).to(dtype)
    return s.masked_fill(~visible, float("-inf"))


def raw_scores(call: Call, k: Tensor, rows: slice, keys: slice, matmul: torch.dtype | None = None) -> Tensor:
    """Scale q.k^T, before stage 1."""
    dtype = row_dtype(call.q)
    return call.scale * grouped_matmul(call.q[:, :, rows].to(dtype), k[:, :, keys].to(dtype).mT, matmul)


def coefficients(call: Call, rows: slice, keys: slice) -> tuple[Tensor | None, Tensor | None]:
    """Factor and offset of the logit stage on a block, broadcastable to [B, H, rows, keys]."""
    if call.logit is None:
        return None, None
    p = call.mask.positions(call.tq, call.tk, call.q.device)[:, None, rows, None]
    j = torch.arange(call.tk, device=call.q.device)[keys]
    head = torch.arange(call.heads, device=call.q.device)[:, None, None]
    return call.logit.coefficients((p - j).to(row_dtype(call.q)), call.count()[..., rows, None], head, call.heads)


def probabilities(s: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Stage 2: p [B, H, rows, keys] and the sink's own probability [B, H, rows, 1]."""
    pivot = s.detach().amax(-1, keepdim=True) if s.shape[-1] else s.new_full((*s.shape[:-1], 1), float("-inf"))
    if sink is not None:
        sink = sink[..., None]
        pivot = torch.maximum(pivot, sink.detach())
    # A row without keys and without a sink has no maximum; any finite pivot gives it p = 0 and finite gradients.
    pivot = torch.where(pivot == float("-inf"), 0.0, pivot)
    e = torch.exp(s - pivot)
    total = e.sum(-1, keepdim=True)
    if sink is None:
        return e / torch.where(total == 0, 1.0, total), None
    # A sink of +inf is its own pivot: inf - inf would be NaN where it takes everything.
    e_sink = torch.exp(torch.where(torch.isposinf(sink), 0.0, sink - pivot))
    total = total + e_sink
    total = torch.where(total == 0, 1.0, total)
    return e / total, e_sink / total


def weights(p: Tensor, visible: Tensor, alpha: Tensor | None, beta: Tensor | None) -> Tensor:
    """Stage 3: alpha * p + beta on visible keys."""
    if alpha is not None:
        p = alpha.to(p.dtype)[..., None] * p
    return p if beta is None else p + torch.where(visible, beta.to(p.dtype)[..., None], 0.0)


def grouped_matmul(x: Tensor, m: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """x [B, H, T, n] @ m [B, Hkv, n, d], query head h with kv head h // (H / Hkv), without copying m."""
    group = x.shape[1] // m.shape[1]
    # By way of one dimension: for the stride of heads and queries together torch.export would have to know
    # which of T and T * T is less, and it cannot say.
    rows = x.flatten(1).view(x.shape[0], m.shape[1], group * x.shape[2], x.shape[3])
    with own_precision(x):
        product = rows @ m if dtype is None else (rows.to(dtype) @ m.to(dtype)).to(x.dtype)
    return product.unflatten(2, (group, x.shape[2])).flatten(1, 2)


def sums_of_visible(visible: Tensor, x: Tensor) -> Tensor:
    """visible [B or 1, 1 or H, T, n] @ x [B, Hkv, n, d]: [B, Hkv, T, d], by query head where heads see other keys."""
    visible = visible.to(x.dtype)
    if visible.shape[1] == 1:
        return visible @ x
    return grouped_matmul(visible.expand(x.shape[0], -1, -1, -1), x)


def own_precision(x: Tensor) -> AbstractContextManager:
    """Return a context without autocast, which would round scores and weights to 16 bits."""
    # Tensors without numbers know no autocast.
    if x.is_meta or not torch.is_autocast_enabled(kind := x.device.type):
        return nullcontext()
    return torch.autocast(kind, enabled=False)


def row_dtype(x: Tensor) -> torch.dtype:
    """Row statistics are at least float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def rows_of(x: Tensor | None, rows: slice | None) -> Tensor | None:
    """A block of rows of a stage input [B, H, Tq, ...]; all of them where rows are None."""
    return x if x is None or rows is None else x[:, :, rows]


def sink_rows(call: Call, rows: slice) -> Tensor | None:
    """The sink of a block of rows, broadcastable to [B, H, rows], in the precision of row statistics."""
    if call.sink is None:
        return None
    sink = torch.as_tensor(call.sink, dtype=row_dtype(call.q), device=call.q.device)
    return sink if sink.ndim == 0 else sink[:, None] if sink.ndim == 1 else sink[:, :, rows]
