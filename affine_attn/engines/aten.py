"""The aten attention operators behind one pair of functions: (q, k, v) -> (o, z) and back.

z is the natural log-sum-exp in fp32 [B, H, Tq]. Operators align a causal mask of Tq != Tk differently, so a causal
call is cut into pieces whose causal part is square; pieces over different keys are merged by their log-sum-exp. The
backward needs no merging: with the merged output and log-sum-exp each piece's stock backward is already exact.

A call with more elements than the operators can count is cut before that into shares of sequences, or of heads of one
sequence, which have only keys and values in common.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from affine_attn.core.stages import row_dtype
from affine_attn.kernels.device import cdiv

aten = torch.ops.aten

# The operators on CUDA count the elements of a tensor in 32 bits. Beyond that cuDNN's backward returns wrong gradients
# of the last sequences without an error, and flash's kernels write elsewhere.
MOST_ELEMENTS = 2**31 - 1
# CUDA's limit for the axes of a grid over which the operators lay the sequences.
MOST_SEQUENCES = 65535
# Queries whose heads the CPU's operator takes faster as more queries: it takes 32 at a time.
_FEW_QUERIES = 16


def forward(
    kernel: str | None, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, window: int | None
) -> tuple[Tensor, Tensor]:
    """Return (o, z) of plain attention by a kernel of ``plan.KERNELS``; windows are those of "flash2" alone."""
    if _is_countable(q, k):
        return _forward(kernel, q, k, v, scale, causal, window)
    o, z = torch.empty_like(q), torch.empty(q.shape[:3], dtype=row_dtype(q), device=q.device)
    for share in _shares(q, k):
        part = _forward(kernel, q[share.of_q], k[share.of_kv], v[share.of_kv], scale, causal, window)
        o[share.of_q], z[share.of_q] = part
    return o, z


def backward(
    kernel: str | None,
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    z: Tensor,
    scale: float,
    causal: bool,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv) of plain attention; exact also if o and z have a sink in them and do has factors per row."""
    if _is_countable(q, k):
        return _backward(kernel, do, q, k, v, o, z, scale, causal, window)
    dq, shares = torch.empty_like(q), _shares(q, k)
    # Where the query heads of a kv head are in several shares, its gradients are sums over them.
    is_shared = shares[0].of_kv == shares[1].of_kv
    dk, dv = (torch.zeros_like(x, dtype=z.dtype if is_shared else x.dtype) for x in (k, v))
    for share in shares:
        inputs = do[share.of_q], q[share.of_q], k[share.of_kv], v[share.of_kv], o[share.of_q]
        part = _backward(kernel, *inputs, z[share.of_q].contiguous(), scale, causal, window)
        dq[share.of_q] = part[0]
        dk[share.of_kv] += part[1]
        dv[share.of_kv] += part[2]
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _is_countable(q: Tensor, k: Tensor) -> bool:
    """Return True if one call of an operator can count all elements and sequences."""
    return max(q.numel(), k.numel()) <= MOST_ELEMENTS and q.shape[0] <= MOST_SEQUENCES


class _Share(NamedTuple):
    """Indices of sequences and heads that one call of an operator can count."""

    of_q: tuple[slice, slice]
    of_kv: tuple[slice, slice]


def _shares(q: Tensor, k: Tensor) -> list[_Share]:
    """Return the fewest shares, as equal as they can be."""
    batch, heads, kv_heads = q.shape[0], q.shape[1], k.shape[1]
    group = heads // kv_heads
    of_head = q.shape[2] * q.shape[3]
    # kv heads of all sequences, each with its query heads.
    together = MOST_ELEMENTS // max(group * of_head, k.shape[2] * k.shape[3])
    if together >= kv_heads:
        some_rows, some_heads = _evenly(batch, min(MOST_SEQUENCES, together // kv_heads)), heads
    elif together:
        some_rows, some_heads = 1, _evenly(kv_heads, together) * group
    else:
        some_rows, some_heads = (
            1,
            max(n for n in range(1, group + 1) if group % n == 0 and n * of_head <= MOST_ELEMENTS),
        )
    shares = []
    for row in range(0, batch, some_rows):
        for head in range(0, heads, some_heads):
            rows, end = slice(row, row + some_rows), head + some_heads
            shares.append(_Share((rows, slice(head, end)), (rows, slice(head // group, cdiv(end, group)))))
    return shares


def _evenly(size: int, most: int) -> int:
    """Return the size of nearly equal parts of at most ``most``."""
    return cdiv(size, cdiv(size, most))


def _forward(
    kernel: str | None, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, window: int | None
) -> tuple[Tensor, Tensor]:
    if window is not None:
        return _window_forward(q, k, v, scale, window)
    if not causal or q.shape[2] in (1, k.shape[2]):
        return _FORWARD[kernel](q, k, v, causal and q.shape[2] > 1, scale)
    pieces = _pieces(q.shape[2], k.shape[2])
    results = [_FORWARD[kernel](q, k[:, :, keys], v[:, :, keys], is_causal, scale) for keys, is_causal in pieces]
    return _merge(*results[0], *results[1])


def _backward(
    kernel: str | None,
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    z: Tensor,
    scale: float,
    causal: bool,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    if window is not None:
        return _window_backward(do, q, k, v, o, z, scale, window)
    if not causal or q.shape[2] in (1, k.shape[2]):
        return _BACKWARD[kernel](do, q, k, v, o, z, causal and q.shape[2] > 1, scale)
    pieces = _pieces(q.shape[2], k.shape[2])
    results = [
        _BACKWARD[kernel](do, q, k[:, :, keys], v[:, :, keys], o, z, is_causal, scale) for keys, is_causal in pieces
    ]
    dqs, dks, dvs = zip(*results, strict=True)
    dq = torch.add(*(dq.to(z.dtype) for dq in dqs)).to(q.dtype)
    return dq, torch.cat(dks, 2), torch.cat(dvs, 2)


def _pieces(tq: int, tk: int) -> list[tuple[slice, bool]]:
    """(keys, is_causal) calls whose causal part is square."""
    return [(slice(0, tk - tq), False), (slice(tk - tq, tk), True)]


def _merge(o1: Tensor, z1: Tensor, o2: Tensor, z2: Tensor) -> tuple[Tensor, Tensor]:
    z = torch.logaddexp(z1, z2)
    o = o1 * torch.exp(z1 - z)[..., None] + o2 * torch.exp(z2 - z)[..., None]
    return o.to(o1.dtype), z


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    if not causal and _is_foldable(q, k):
        o, z = aten._scaled_dot_product_flash_attention_for_cpu(_folded(q, k), k, v, 0.0, False, scale=scale)
        return o.reshape(q.shape), z.reshape(q.shape[:3])
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)


def _cpu_backward(do, q, k, v, o, z, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    if not causal and _is_foldable(q, k):
        do, folded, o, z = (_folded(x, k) for x in (do, q, o, z))
        dq, dk, dv = _cpu_backward(do, folded, k, v, o, z, False, scale)
        return dq.reshape(q.shape), dk, dv
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(do, q, k, v, o, z, 0.0, causal, scale=scale)


def _is_foldable(q: Tensor, k: Tensor) -> bool:
    """Return True if the CPU's operator would read the keys again for each head of a group, for a few queries only."""
    return q.shape[1] > k.shape[1] and q.shape[2] <= _FEW_QUERIES


def _folded(x: Tensor, k: Tensor) -> Tensor:
    """The heads of a group as more queries of its kv head, [B, H, T, ...] -> [B, Hkv, g T, ...]."""
    return x.reshape(x.shape[0], k.shape[1], -1, *x.shape[3:])


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    o, z, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)
    return o, z.view(q.shape[:3])


def _cudnn_backward(do, q, k, v, o, z, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    none = torch.empty(0, dtype=torch.int64, device=q.device)
    lse = z.view(*q.shape[:3], 1)
    rest = (none, none, None, None, None, q.shape[2], k.shape[2], 0.0, causal)
    return aten._scaled_dot_product_cudnn_attention_backward(do, q, k, v, o, lse, *rest, scale=scale)


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    o, z, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    return o, z


def _flash_backward(do, q, k, v, o, z, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    none = torch.empty(0, dtype=torch.int64, device=q.device)
    rest = (None, None, q.shape[2], k.shape[2], 0.0, causal, none, none)
    return aten._scaled_dot_product_flash_attention_backward(do, q, k, v, o, z, *rest, scale=scale)


def _window_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> tuple[Tensor, Tensor]:
    """The flash operator counts look-back keys without self, in [B, T, H, D], aligned at the bottom right."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    sizes = {"window_size_left": window - 1, "window_size_right": 0}
    rest = (None, None, q.shape[1], k.shape[1], 0.0, False, False)
    o, z, *_ = aten._flash_attention_forward(q, k, v, *rest, scale=scale, **sizes)
    return o.transpose(1, 2), z


def _window_backward(do, q, k, v, o, z, scale: float, window: int) -> tuple[Tensor, Tensor, Tensor]:
    do, q, k, v, o = (x.transpose(1, 2) for x in (do, q, k, v, o))
    none = torch.empty(0, dtype=torch.int64, device=q.device)
    sizes = {"window_size_left": window - 1, "window_size_right": 0}
    rest = (None, None, q.shape[1], k.shape[1], 0.0, False, none, none)
    gradients = aten._flash_attention_backward(do, q, k, v, o, z, *rest, scale=scale, **sizes)
    dq, dk, dv = (gradient.transpose(1, 2) for gradient in gradients)
    return dq, dk, dv


_FORWARD: dict[str | None, Callable[..., tuple[Tensor, Tensor]]] = {
    "flash_for_cpu": _cpu_forward,
    "cudnn": _cudnn_forward,
    "flash2": _flash_forward,
}
_BACKWARD: dict[str | None, Callable[..., tuple[Tensor, Tensor, Tensor]]] = {
    "flash_for_cpu": _cpu_backward,
    "cudnn": _cudnn_backward,
    "flash2": _flash_backward,
}
