"""Any mask on PyTorch's flash operator for the CPU: a call of it for each piece of the mask (core/pieces.py).

What is added to scores, by their distance say, comes in as a float mask, on blocks of rows so that no Tq x Tk tensor
exists. A bias is one as it is. Where a logit has factors for the scores too, blocks of rows are not the operator's but
torch's (engines/cpu_scores.py).
"""

import functools
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from affine_attn.core.call import Call
from affine_attn.core.masks import block_of, with_4_dims
from affine_attn.core.pieces import Piece, Pieces, in_order, out_of_order, pieces_of, row_blocks
from affine_attn.core.spec import Coefficients, Logit
from affine_attn.core.stages import row_dtype
from affine_attn.engines import aten, cpu_scores

_KERNEL = "flash_for_cpu"
# Rows of a block that has a float mask of its own.
_ROWS = 128
# Most keys of a table of coefficients, which then has 16 MiB.
_LONGEST = 2**15


def attend(call: Call) -> tuple[Tensor, Tensor]:
    """Return (o, z), which are 0 in rows that see nothing."""
    found = pieces_of(call.mask, call.tq, call.tk, call.q.device)
    q, k, v = in_order(call.q, found.rows), in_order(call.k, found.keys), in_order(call.v, found.keys)
    o, z = aten.forward_in_pieces(_KERNEL, q, k, v, call.scale, _scored(call, found, _ROWS))
    return out_of_order(o, found.rows), out_of_order(z, found.rows)


def attend_backward(call: Call, do: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    found = pieces_of(call.mask, call.tq, call.tk, call.q.device)
    do, q, o, z = (in_order(x, found.rows) for x in (do, call.q, out, lse))
    k, v = in_order(call.k, found.keys), in_order(call.v, found.keys)
    # Blocks of rows have keys in common.
    share_keys, pieces = found.share_keys or _has_terms(call), _scored(call, found, _ROWS)
    dq, dk, dv = aten.backward_in_pieces(_KERNEL, do, q, k, v, o, z, call.scale, pieces, share_keys)
    return out_of_order(dq, found.rows), out_of_order(dk, found.keys), out_of_order(dv, found.keys)


def attend_with_factors(call: Call) -> tuple[Tensor, Tensor]:
    """The same for a logit that has factors for the scores."""
    found, dtype = pieces_of(call.mask, call.tq, call.tk, call.q.device), row_dtype(call.q)
    # Matmuls of torch would round scores of 16 bits.
    q, k, v = in_order(call.q, found.rows), in_order(call.k, found.keys), in_order(call.v, found.keys)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    o, z = cpu_scores.forward(q, k, v, call.scale, _scored(call, found, cpu_scores.ROWS))
    return out_of_order(o, found.rows).to(call.q.dtype), out_of_order(z, found.rows)


def attend_with_factors_backward(call: Call, do: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    found, dtype = pieces_of(call.mask, call.tq, call.tk, call.q.device), row_dtype(call.q)
    do, q, o, z = (in_order(x, found.rows).to(dtype) for x in (do, call.q, out, lse))
    k, v = (in_order(x, found.keys).to(dtype) for x in (call.k, call.v))
    dq, dk, dv = cpu_scores.backward(do, q, k, v, o, z, call.scale, _scored(call, found, cpu_scores.ROWS))
    gradients = out_of_order(dq, found.rows), out_of_order(dk, found.keys), out_of_order(dv, found.keys)
    dq, dk, dv = (gradient.to(call.q.dtype) for gradient in gradients)
    return dq, dk, dv


def _has_terms(call: Call) -> bool:
    return call.logit is not None or call.bias is not None or call.mask.allowed is not None


# Factor of the scores, and what is added to them.
_Terms = tuple[Tensor | None, Tensor]


def _scored(call: Call, found: Pieces, rows: int) -> Iterable[Piece]:
    """Return the pieces, those of scores with terms as blocks of so many rows that have these."""
    if not _has_terms(call):
        return found.pieces
    bias, allowed = (None if x is None else _ordered(with_4_dims(x), found) for x in (call.bias, call.mask.allowed))
    has_table = call.logit is not None and _has_table(call, call.logit, found)
    coefficients = None if call.logit is None else (_slices if has_table else _coefficients)(call, found)
    dtype = row_dtype(call.q)

    def terms(block: Piece) -> _Terms:
        factor, total = Coefficients(None, None) if coefficients is None else coefficients(block)
        if bias is not None:
            added = _part(bias, block).to(dtype)
            total = added if total is None else total + added
        total = torch.zeros((), dtype=dtype, device="cpu") if total is None else total
        return factor, total if allowed is None else torch.where(_part(allowed, block), total, -torch.inf)

    pieces = _with_one_for_each_row(found.pieces)
    if call.logit is None and allowed is None:
        return _with_bias(pieces, terms, rows)
    return _with_terms(pieces, terms, rows, are_causal=has_table)


def _with_bias(pieces: Iterable[Piece], terms: Callable[[Piece], _Terms], rows: int) -> Iterator[Piece]:
    """Add a bias, which is there already: pieces in which nothing is hidden are not cut."""
    for piece in pieces:
        if piece.seen is None:
            yield piece._replace(kept=terms(piece)[1])
        else:
            yield from _with_terms((piece,), terms, rows)


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


def _coefficients(call: Call, found: Pieces) -> Callable[[Piece], Coefficients]:
    """Return the function that gives a block the coefficients of a logit."""
    logit, dtype, device = call.logit, row_dtype(call.q), call.q.device
    row_slots = in_order(call.mask.positions(call.tq, call.tk, device)[:, None], found.rows)
    key_slots = in_order(torch.arange(call.tk, device=device)[None, None], found.keys)
    count, head = in_order(call.count(), found.rows)[..., None], torch.arange(call.heads, device=device)[:, None, None]
    assert logit is not None

    def coefficients(block: Piece) -> Coefficients:
        distance = _of(row_slots, block.of_rows)[..., None] - _of(key_slots, block.of_keys)[..., None, :]
        return Coefficients(*logit.coefficients(distance.to(dtype), _part(count, block), head, call.heads))

    return coefficients


def _has_table(call: Call, logit: Logit, found: Pieces) -> bool:
    """Return True if all blocks of rows have their coefficients in one table, by the distance."""
    is_in_place = found.rows is None and found.keys is None and call.mask.lengths is None
    return logit.by_distance_alone and call.mask.causal and is_in_place and call.tk <= _LONGEST


def _slices(call: Call, found: Pieces) -> Callable[[Piece], Coefficients]:
    """The same, of a table that all calls share; offsets hide later keys."""
    assert call.logit is not None
    # Powers of two: in decoding keys grow with each token.
    longest = 1 << (call.tk - 1).bit_length()
    table = _table(call.logit, longest, row_dtype(call.q))

    def coefficients(block: Piece) -> Coefficients:
        rows, keys = (part.stop - part.start for part in (block.rows, block.keys))
        first = longest - (block.rows.start + call.tk - call.tq - block.keys.start)
        return Coefficients(*(None if x is None else x[:rows, first : first + keys] for x in table))

    return coefficients


@functools.lru_cache(8)
def _table(logit: Logit, longest: int, dtype: torch.dtype) -> Coefficients:
    """Return the coefficients of as many rows as a block has, whose last key is the last row's own: of distances up to
    ``longest``."""
    # A backward may take them, whoever asked first.
    with torch.inference_mode(False):
        rows = cpu_scores.ROWS
        row, column = (torch.arange(size, device="cpu", dtype=dtype) for size in (rows, longest + rows))
        distance, nothing = row[:, None] + longest - column, torch.zeros((), device="cpu", dtype=dtype)
        factor, offset = logit.coefficients(distance, nothing, nothing, 1)
        offset = torch.zeros_like(distance) if offset is None else offset
        return Coefficients(factor, torch.where(distance < 0, -torch.inf, offset))


def _with_terms(
    pieces: Iterable[Piece], terms: Callable[[Piece], _Terms], rows: int, are_causal: bool = False
) -> Iterator[Piece]:
    """Cut pieces into blocks of rows with the factor and the offset [B or 1, H or 1, rows or 1, keys or 1] of their
    scores; are_causal: offsets hide later keys themselves."""
    for piece in pieces:
        for block in row_blocks(piece, rows):
            factor, offset = terms(block)
            hidden = None if are_causal and piece.is_causal else block.hidden
            yield block._replace(kept=offset if hidden is None else offset + hidden, factor=factor)


def _of(slots: Tensor, index: tuple[slice, slice, slice]) -> Tensor:
    """Slots [B or 1, 1, T] of a piece; one row holds for all sequences."""
    return slots[index if slots.shape[0] > 1 else (slice(None), *index[1:])]
