"""The aten attention operators behind one pair of functions: (q, k, v) -> (o, z) and back.

z is the natural log-sum-exp in fp32 [B, H, Tq]. Operators align a causal mask of Tq != Tk differently, so a causal
call is cut into pieces whose causal part is square; pieces over different keys are merged by their log-sum-exp. The
backward needs no merging: with the merged output and log-sum-exp each piece's stock backward is already exact.

A call with more elements than the operators can count is cut before that into shares of sequences, or of heads of one
sequence, which have only keys and values in common.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from affine_attn.core.pieces import Piece, causal_pieces
from affine_attn.core.stages import row_dtype
from affine_attn.kernels.device import cdiv

# An operator is called by its function in torch where it has one, which takes a microsecond less.
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
    if _is_countable(q, v):
        return _forward(kernel, q, k, v, scale, causal, window)
    o, z = new_output(q, v), torch.empty(q.shape[:3], dtype=row_dtype(q), device=q.device)
    for share in _shares(q, k, v):
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
    if _is_countable(q, v):
        return _backward(kernel, do, q, k, v, o, z, scale, causal, window)
    dq, shares = torch.empty_like(q), _shares(q, k, v)
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


def new_output(q: Tensor, v: Tensor) -> Tensor:
    """Allocate o [B, H, Tq, Dv], in the layout of q where it is as wide."""
    return torch.empty_like(q) if q.size(3) == v.size(3) else q.new_empty(*q.shape[:3], v.size(3))


def _is_countable(q: Tensor, v: Tensor) -> bool:
    """Return True if one call of an operator can count all sequences, and all elements of tensors in one width."""
    (batch, heads, queries, dim), (_, kv_heads, keys, value_dim) = q.shape, v.shape
    most = batch * max(heads * queries, kv_heads * keys) * max(dim, value_dim)
    return most <= MOST_ELEMENTS and batch <= MOST_SEQUENCES


class _Share(NamedTuple):
    """Indices of sequences and heads that one call of an operator can count."""

    of_q: tuple[slice, slice]
    of_kv: tuple[slice, slice]


def _shares(q: Tensor, k: Tensor, v: Tensor) -> list[_Share]:
    """Return the fewest shares, as equal as they can be."""
    batch, heads, kv_heads = q.shape[0], q.shape[1], k.shape[1]
    group = heads // kv_heads
    width = max(q.shape[3], v.shape[3])
    of_head = q.shape[2] * width
    # kv heads of all sequences, each with its query heads.
    together = MOST_ELEMENTS // max(group * of_head, k.shape[2] * width)
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
    tq, tk = q.size(2), k.size(2)
    if not causal or tq in (1, tk):
        return _FORWARD[kernel](q, k, v, causal and tq > 1, scale)
    return forward_in_pieces(kernel, q, k, v, scale, causal_pieces(tq, tk).pieces)


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
    tq, tk = q.size(2), k.size(2)
    if not causal or tq in (1, tk):
        return _BACKWARD[kernel](do, q, k, v, o, z, causal and tq > 1, scale)
    return backward_in_pieces(kernel, do, q, k, v, o, z, scale, causal_pieces(tq, tk).pieces)


def forward_in_pieces(
    kernel: str | None, q: Tensor, k: Tensor, v: Tensor, scale: float, pieces: Iterable[Piece]
) -> tuple[Tensor, Tensor]:
    """Return (o, z) of rows and keys in the order of the pieces; both are 0 in rows that see nothing."""
    o, z = new_output(q, v).zero_(), torch.zeros(q.shape[:3], dtype=row_dtype(q), device=q.device)
    for piece in pieces:
        for (q_part, o_part, z_part), kv in _parts(piece, (q, o, z), (k, v)):
            found = _FORWARD[kernel](q_part, *kv, piece.is_causal, scale, *_masks(piece, q))
            if piece.is_second:
                found = _merge(o_part, z_part, *found)
            o_part.copy_(found[0])
            z_part.copy_(found[1])
    return o, z


def backward_in_pieces(
    kernel: str | None,
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    z: Tensor,
    scale: float,
    pieces: Iterable[Piece],
    share_keys: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv); ``share_keys``: the gradients of a key are sums over several pieces."""
    dq = torch.zeros_like(q)
    dk, dv = (torch.zeros_like(x, dtype=z.dtype if share_keys else x.dtype) for x in (k, v))
    for piece in pieces:
        for (do_part, q_part, *oz, dq_part), (*kv, dk_part, dv_part) in _parts(
            piece, (do, q, o, z, dq), (k, v, dk, dv)
        ):
            inputs = do_part, q_part, *kv, *oz, piece.is_causal, scale, *_masks(piece, q)
            found = _BACKWARD[kernel](*inputs)
            dq_part.copy_(dq_part.to(z.dtype) + found[0] if piece.is_second else found[0])
            for total, gradient in ((dk_part, found[1]), (dv_part, found[2])):
                if share_keys:
                    _add(gradient, total, piece)
                else:
                    total.copy_(gradient)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _parts(
    piece: Piece, of_rows: Sequence[Tensor], of_keys: Sequence[Tensor]
) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Views of tensors [B, H, T, ...]: those of a piece, or for each sequence its blocks, [blocks, H, rows, ...]."""
    rows, keys = [x[piece.of_rows] for x in of_rows], [x[piece.of_keys] for x in of_keys]
    if piece.blocks == 1:
        yield rows, keys
        return
    for b in range(rows[0].shape[0]):
        yield (
            [_blocks(x[b], piece.step, piece.step) for x in rows],
            [_blocks(x[b], piece.keys_of_block, piece.step) for x in keys],
        )


def _blocks(x: Tensor, size: int, step: int) -> Tensor:
    """Views of ``size`` neighbours, each ``step`` after the one before: [H, T, ...] -> [blocks, H, size, ...]."""
    return x.unfold(1, size, step).movedim(-1, 2).transpose(0, 1)


def _add(part: Tensor, total: Tensor, piece: Piece) -> None:
    """Add a part to a view of :func:`_parts`, whose blocks may have keys in common."""
    size = piece.step if piece.blocks > 1 else part.shape[2]
    for start in range(0, part.shape[2], size):
        some = slice(start, start + size)
        total[:, :, some] += part[:, :, some]


def _masks(piece: Piece, q: Tensor) -> tuple[Tensor, ...]:
    """Return the float mask of a piece that needs one."""
    return () if (hidden := piece.hidden) is None else (hidden.to(row_dtype(q)),)


def _merge(o1: Tensor, z1: Tensor, o2: Tensor, z2: Tensor) -> tuple[Tensor, Tensor]:
    z = torch.logaddexp(z1, z2)
    o = o1 * torch.exp(z1 - z)[..., None] + o2 * torch.exp(z2 - z)[..., None]
    return o.to(o1.dtype), z


def _cpu_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    operator = torch._scaled_dot_product_flash_attention_for_cpu
    if not causal and _is_foldable(q, k):
        o, z = operator(_folded(q, k), k, v, 0.0, False, attn_mask=_folded_mask(mask, q, k), scale=scale)
        return o.reshape(q.shape), z.reshape(q.shape[:3])
    return operator(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)


def _cpu_backward(
    do, q, k, v, o, z, causal: bool, scale: float, mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    if not causal and _is_foldable(q, k):
        do, folded, o, z = (_folded(x, k) for x in (do, q, o, z))
        dq, dk, dv = _cpu_backward(do, folded, k, v, o, z, False, scale, _folded_mask(mask, q, k))
        return dq.reshape(q.shape), dk, dv
    operator = aten._scaled_dot_product_flash_attention_for_cpu_backward
    return operator(do, q, k, v, o, z, 0.0, causal, attn_mask=mask, scale=scale)


def _is_foldable(q: Tensor, k: Tensor) -> bool:
    """Return True if the CPU's operator would read the keys again for each head of a group, for a few queries only."""
    return q.size(1) > k.size(1) and q.size(2) <= _FEW_QUERIES


def _folded(x: Tensor, k: Tensor) -> Tensor:
    """The heads of a group as more queries of its kv head, [B, H, T, ...] -> [B, Hkv, g T, ...]."""
    return x.reshape(x.shape[0], k.shape[1], -1, *x.shape[3:])


def _folded_mask(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """The same of a float mask [rows, keys] or [B or 1, H, rows, keys]."""
    if mask is None or mask.ndim == 4:
        if mask is None:
            return None
        return _folded(mask.expand(mask.shape[0], q.shape[1], q.shape[2], mask.shape[3]), k)
    return mask.repeat(q.shape[1] // k.shape[1], 1)


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    o, z, *_ = torch._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)
    return o, z.view(q.shape[:3])


def _cudnn_backward(do, q, k, v, o, z, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    none = torch.empty(0, dtype=torch.int64, device=q.device)
    lse = z.view(*q.shape[:3], 1)
    rest = (none, none, None, None, None, q.shape[2], k.shape[2], 0.0, causal)
    return aten._scaled_dot_product_cudnn_attention_backward(do, q, k, v, o, lse, *rest, scale=scale)


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    o, z, *_ = torch._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
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
