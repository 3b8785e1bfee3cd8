"""Any mask on PyTorch's flash operator for the CPU: a call of it for each piece of the mask (core/pieces.py).

Scores that depend on the distance come in as a float mask, on blocks of rows so that no Tq x Tk tensor exists. A bias
is one as it is.
"""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from affine_attn.core.call import Call
from affine_attn.core.masks import block_of, with_4_dims
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
    share_keys = found.share_keys or _has_offsets(call)
    dq, dk, dv = aten.backward_in_pieces(_KERNEL, do, q, k, v, o, z, call.scale, _scored(call, found), share_keys)
    return out_of_order(dq, found.rows), out_of_order(dk, found.keys), out_of_order(dv, found.keys)


def _has_offsets(call: Call) -> bool:
    return call.logit is not None or call.bias is not None or call.mask.allowed is not None


def _scored(call: Call, found: Pieces) -> Iterable[Piece]:
    """Return the pieces, those of scores with offsets as blocks of rows that have these in their float masks."""
    if not _has_offsets(call):
        return found.pieces
    bias, allowed = (None if x is None else _ordered(with_4_dims(x), found) for x in (call.bias, call.mask.allowed))
    distances = None if call.logit is None else _distances(call, found)
    dtype = row_dtype(call.q)

    def offsets(block: Piece) -> Tensor:
        total = torch.zeros((), dtype=dtype, device="cpu") if distances is None else distances(block)
        if bias is not None:
            added = _part(bias, block).to(dtype)
            total = added if distances is None else total + added
        return total if allowed is None else torch.where(_part(allowed, block), total, -torch.inf)

    pieces = _with_one_for_each_row(found.pieces)
    if call.logit is None and allowed is None:
        return _with_bias(pieces, offsets)
    return with_offsets(pieces, offsets)


def _with_bias(pieces: Iterable[Piece], bias: Callable[[Piece], Tensor]) -> Iterator[Piece]:
    """Add a bias, which is there already: pieces in which nothing is hidden are not cut."""
    for piece in pieces:
        if piece.seen is None:
            yield piece._replace(kept=bias(piece))
        else:
            yield from with_offsets((piece,), bias)


def _with_one_for_each_row(pieces: tuple[Piece, ...]) -> Iterator[Piece]:
    """Unite the two pieces of a row: where an offset hides all keys of one, no log-sum-exp can merge them."""
    for n, piece in enumerate(pieces):
        other = pieces[n + 1] if n + 1 < len(pieces) else None
        if other is not None and other.is_second:
            first, last = piece.keys.start, other.keys.stop
            end = torch.arange(other.keys.start + 1, last + 1, device="cpu")
            seen = torch.full_like(end, first), end
            yield Piece(piece.sequences, piece.rows, slice(first, last), seen=seen)
        elif not piece.is_second:
            yield piece


def _ordered(x: Tensor, found: Pieces) -> Tensor:
    """Return x [B or 1, H or 1, Tq or 1, Tk or 1] with rows and keys in the order of the pieces."""
    x = x if x.shape[2] == 1 else in_order(x, found.rows)
    return x if x.shape[3] == 1 else in_order(x.mT, found.keys).mT


def _part(x: Tensor, block: Piece) -> Tensor:
    """Return what of x [B or 1, H or 1, Tq or 1, Tk or 1] a block has."""
    return block_of(x if x.shape[0] == 1 else x[block.sequences], block.rows, block.keys)


def _distances(call: Call, found: Pieces) -> Callable[[Piece], Tensor]:
    """Return the function that gives a block the offsets of a distance logit."""
    logit, dtype, device = call.logit, row_dtype(call.q), call.q.device
    row_slots = in_order(call.mask.positions(call.tq, call.tk, device)[:, None], found.rows)
    key_slots = in_order(torch.arange(call.tk, device=device)[None, None], found.keys)
    head, no_count = torch.arange(call.heads, device=device)[:, None, None], torch.ones((), device=device)
    assert logit is not None

    def offsets(block: Piece) -> Tensor:
        distance = _of(row_slots, block.of_rows)[..., None] - _of(key_slots, block.of_keys)[..., None, :]
        factor, offset = logit.coefficients(distance.to(dtype), no_count, head, call.heads)
        assert factor is None
        assert offset is not None
        return offset

    return offsets


def with_offsets(pieces: Iterable[Piece], offsets: Callable[[Piece], Tensor]) -> Iterator[Piece]:
    """Cut pieces into blocks of rows, and add ``offsets`` [B or 1, H or 1, rows or 1, keys or 1] of a block to its
    scores."""
    for piece in pieces:
        for block in row_blocks(piece, _ROWS):
            hidden, offset = block.hidden, offsets(block)
            yield block._replace(kept=offset if hidden is None else offset + hidden)


def _of(slots: Tensor, index: tuple[slice, slice, slice]) -> Tensor:
    """Slots [B or 1, 1, T] of a piece; one row holds for all sequences."""
    return slots[index if slots.shape[0] > 1 else (slice(None), *index[1:])]
