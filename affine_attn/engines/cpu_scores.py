"""Attention in torch on blocks of rows, some heads at a time, whose scores stay in a core's cache.

For scores that PyTorch's operator for the CPU cannot be given: those with a factor for each pair. Torch's operations
read and write them more often than the operator does; in return no scores are computed beyond the end of a block.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from affine_attn.core.masks import with_4_dims
from affine_attn.core.pieces import Piece
from affine_attn.core.stages import own_precision
from affine_attn.engines.aten import new_output

# Rows of a block, and scores at a time for each thread: two such buffers are a MiB.
ROWS, _SCORES = 64, 2**17


def forward(q: Tensor, k: Tensor, v: Tensor, scale: float, blocks: Iterable[Piece]) -> tuple[Tensor, Tensor]:
    """Return (o, z) of scores factor * scale * q.k + mask; both are 0 in rows that see nothing."""
    o, z = new_output(q, v).zero_(), q.new_zeros(q.shape[:3])
    buffer = _buffer(q, k)
    with own_precision(q):
        for share in _shares(blocks, q, k):
            of_rows = share.scores(q, k, scale, buffer)
            largest = of_rows.amax(-1, keepdim=True)
            # An offset may hide all keys.
            largest.masked_fill_(largest == -torch.inf, 0.0)
            total = of_rows.sub_(largest).exp_().sum(-1, keepdim=True)
            total.masked_fill_(total == 0, 1.0)
            out = torch.bmm(share.by_kv_head(of_rows), v[share.of_keys].flatten(0, 1))
            torch.div(out.view(*of_rows.shape[:3], -1), total, out=o[share.of_rows])
            torch.add(largest, total.log(), out=z[share.of_rows][..., None])
    return o, z


def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, z: Tensor, scale: float, blocks: Iterable[Piece]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv)."""
    dq, dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    # Log-sum-exp and <do, o> of each row.
    z, along = z[..., None], (do * o).sum(-1, keepdim=True)
    buffers = _buffer(q, k), _buffer(q, k)
    with own_precision(q):
        for share in _shares(blocks, q, k):
            of_rows, of_keys = share.of_rows, share.of_keys
            p = share.scores(q, k, scale, buffers[0]).sub_(z[of_rows]).exp_()
            ds = share.matmul(do, v, buffers[1]).sub_(along[of_rows]).mul_(p)
            ds = ds if share.factor is None else ds.mul_(share.factor)
            p, ds = share.by_kv_head(p), share.by_kv_head(ds)
            queries, incoming = (share.by_kv_head(x[of_rows]) for x in (q, do))
            torch.mul(torch.bmm(ds, k[of_keys].flatten(0, 1)).view(dq[of_rows].shape), scale, out=dq[of_rows])
            dk[of_keys].add_(torch.bmm(ds.mT, queries).view(dk[of_keys].shape), alpha=scale)
            dv[of_keys].add_(torch.bmm(p.mT, incoming).view(dv[of_keys].shape))
    return dq, dk, dv


class _Share(NamedTuple):
    """Some sequences and heads of a block of rows: indices of tensors of q and of k, and the terms of the scores."""

    of_rows: tuple[slice, slice, slice]
    of_keys: tuple[slice, slice, slice]
    mask: Tensor
    factor: Tensor | None

    def matmul(self, q: Tensor, k: Tensor, buffer: Tensor) -> Tensor:
        """Return q.k of the share [B, H, rows, keys], in the buffer."""
        q, k = q[self.of_rows], k[self.of_keys]
        shape = (*q.shape[:3], k.shape[2])
        out = buffer[: shape[0] * shape[1] * shape[2] * shape[3]].view(k.shape[0] * k.shape[1], -1, k.shape[2])
        return torch.bmm(q.reshape(out.shape[0], -1, q.shape[3]), k.flatten(0, 1).mT, out=out).view(shape)

    def scores(self, q: Tensor, k: Tensor, scale: float, buffer: Tensor) -> Tensor:
        s = self.matmul(q, k, buffer)
        if self.factor is None:
            return s.mul_(scale).add_(self.mask)
        return torch.addcmul(self.mask, s, self.factor, value=scale, out=s)

    def by_kv_head(self, x: Tensor) -> Tensor:
        """[B, H, rows, n] -> [B Hkv, group rows, n]."""
        heads = self.of_keys[1].stop - self.of_keys[1].start
        return x.reshape(x.shape[0] * heads, -1, x.shape[3])


def _shares(blocks: Iterable[Piece], q: Tensor, k: Tensor) -> Iterator[_Share]:
    """Yield as many sequences and heads at a time as the buffer has room for, by their scores."""
    kv_heads, group = k.shape[1], q.shape[1] // k.shape[1]
    for block in blocks:
        first, end, _ = block.sequences.indices(q.shape[0])
        rows, keys = (part.stop - part.start for part in (block.rows, block.keys))
        most = max(1, _most_scores() // (group * rows * keys))
        some_heads, some = min(most, kv_heads), max(1, most // kv_heads)
        assert block.kept is not None
        for b in range(first, end, some):
            sequences = slice(b, min(b + some, end))
            of_block = slice(b - first, sequences.stop - first)
            for h in range(0, kv_heads, some_heads):
                of_kv = slice(h, min(h + some_heads, kv_heads))
                of_q = slice(of_kv.start * group, of_kv.stop * group)
                mask, factor = (None if x is None else _part(x, of_block, of_q) for x in (block.kept, block.factor))
                assert mask is not None
                yield _Share((sequences, of_q, block.rows), (sequences, of_kv, block.keys), mask, factor)


def _part(x: Tensor, sequences: slice, heads: slice) -> Tensor:
    """Return what of x, broadcastable to [B, H, rows, keys], some sequences and heads have."""
    x = with_4_dims(x)
    x = x if x.shape[0] == 1 else x[sequences]
    return x if x.shape[1] == 1 else x[:, heads]


def _most_scores() -> int:
    return _SCORES * torch.get_num_threads()


def _buffer(q: Tensor, k: Tensor) -> Tensor:
    """Memory that all blocks share, for one kv head at least: what is new has to be made by the system first."""
    group = q.shape[1] // k.shape[1]
    return q.new_empty(max(_most_scores(), group * min(ROWS, q.shape[2]) * k.shape[2]))
