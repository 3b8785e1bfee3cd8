"""Any mask on PyTorch's flash operator for the CPU: a call of it for each piece of the mask (core/pieces.py).

Scores that depend on the distance come in as a float mask, on blocks of rows so that no Tq x Tk tensor exists.
"""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from affine_attn.core.call import Call
from affine_attn.core.pieces import Piece, Pieces, in_order, out_of_order, pieces_of, row_blocks
from affine_attn.core.stages import row_dtype
from affine_attn.engines import aten

_KERNEL = "flash_for_cpu"
# Rows of a block that has a float mask of its own.
_ROWS = 128


def attend(call: Call) -> tuple[Tensor, Tensor]:
    """Return (o, z), which are 0 in rows that see nothing."""
    found = pieces_of(call.mask, call.tq, call.tk, call.q.device)
    q, k, v = in_order(call.q, found.rows), in_order(call.k, found.keys), in_order(call.v, found.keys)
    o, z = aten.forward_in_pieces(_KERNEL, q, k, v, call.scale, _scored(call, found))
    return out_of_order(o, found.rows), out_of_order(z, found.rows)


def attend_backward(call: Call, do: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    found = pieces_of(call.mask, call.tq, call.tk, call.q.device)
    do, q, o, z = (in_order(x, found.rows) for x in (do, call.q, out, lse))
    k, v = in_order(call.k, found.keys), in_order(call.v, found.keys)
    # Blocks of rows have keys in common.
    share_keys = found.share_keys or call.logit is not None
    dq, dk, dv = aten.backward_in_pieces(_KERNEL, do, q, k, v, o, z, call.scale, _scored(call, found), share_keys)
    return out_of_order(dq, found.rows), out_of_order(dk, found.keys), out_of_order(dv, found.keys)


def _scored(call: Call, found: Pieces) -> Iterable[Piece]:
    """Return the pieces, those of a distance logit as blocks of rows that have its offsets in their float masks."""
    if call.logit is None:
        return found.pieces
    logit, dtype, device = call.logit, row_dtype(call.q), call.q.device
    row_slots = in_order(call.mask.positions(call.tq, call.tk, device)[:, None], found.rows)
    key_slots = in_order(torch.arange(call.tk, device=device)[None, None], found.keys)
    head, no_count = torch.arange(call.heads, device=device)[:, None, None], torch.ones((), device=device)

    def offsets(block: Piece) -> Tensor:
        distance = _of(row_slots, block.of_rows)[..., None] - _of(key_slots, block.of_keys)[..., None, :]
        factor, offset = logit.coefficients(distance.to(dtype), no_count, head, call.heads)
        assert factor is None
        assert offset is not None
        return offset

    return with_offsets(found.pieces, offsets)


def with_offsets(pieces: Iterable[Piece], offsets: Callable[[Piece], Tensor]) -> Iterator[Piece]:
    """Cut pieces into blocks of rows, and add ``offsets`` [B or 1, H, rows, keys] of a block to its scores."""
    for piece in pieces:
        for block in row_blocks(piece, _ROWS):
            hidden, offset = block.hidden, offsets(block)
            yield block._replace(kept=offset if hidden is None else offset.add_(hidden))


def _of(slots: Tensor, index: tuple[slice, slice, slice]) -> Tensor:
    """Slots [B or 1, 1, T] of a piece; one row holds for all sequences."""
    return slots[index if slots.shape[0] > 1 else (slice(None), *index[1:])]
