"""A mask as pieces: rows and keys that a stock operator can do in one call.

In a suitable order of its keys every row of a mask sees neighbours alone (``Mask.ranges``). Rows whose ranges go on in
the same way are one piece: a square with a causal diagonal, a rectangle that is seen whole, or a band with a float
mask. Small neighbours share one with a float mask. All of it is found once for a mask, and read on the host.
"""

import functools
from collections.abc import Iterable, Iterator
from itertools import groupby, pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from affine_attn.core.masks import Mask, Order
from affine_attn.core.stages import own_precision, row_dtype

# Scores that cost what a call of an operator does, for eight heads or so.
_CALL = 512
# Scores of a float mask that is kept with its piece.
_KEPT = 2**16
# Least and most rows of a piece that has a float mask.
_ROWS = 32, 256


class Piece(NamedTuple):
    """Rows of some sequences and the keys that any of them sees, by their places in the order of the mask."""

    sequences: slice
    rows: slice
    keys: slice
    is_causal: bool = False  # as many keys as rows; a row sees those up to its own
    seen: tuple[Tensor, Tensor] | None = None  # first key of each row and that after its last one; None: all are seen
    width: int | None = None  # of a band: a row sees so many keys, from the one after the first of the row before
    blocks: int = 1  # blocks of as many rows, which ``hidden`` is for
    kept: Tensor | None = None  # what ``hidden`` returns, where it is small
    factor: Tensor | None = None  # of the scores
    is_second: bool = False  # the rows have another piece, with other keys

    @property
    def step(self) -> int:
        """Rows of a block."""
        return (self.rows.stop - self.rows.start) // self.blocks

    @property
    def keys_of_block(self) -> int:
        return self.keys.stop - self.keys.start - (self.blocks - 1) * self.step

    @property
    def of_rows(self) -> tuple[slice, slice, slice]:
        return self.sequences, slice(None), self.rows

    @property
    def of_keys(self) -> tuple[slice, slice, slice]:
        return self.sequences, slice(None), self.keys

    @property
    def hidden(self) -> Tensor | None:
        """0 where a row of a block sees a key and -inf elsewhere, fp32 [rows, keys]; None where all see all."""
        return self.kept if self.kept is not None or self.seen is None else _hidden(self.seen, self.keys)


class Pieces(NamedTuple):
    """What covers all that a mask leaves visible; rows that see nothing are in none."""

    rows: Order | None  # None: as they are
    keys: Order | None
    pieces: tuple[Piece, ...]
    share_keys: bool  # a key may be in several pieces


def pieces_of(mask: Mask, tq: int, tk: int, device: torch.device) -> Pieces:
    """Return the pieces of a mask on the CPU, found once for all masks of the same tensors and numbers."""
    if not mask.tensors:
        return _pieces_of_numbers(mask.causal, mask.window, mask.window_after, tq, tk)
    return mask.derived("pieces", (tq, tk), lambda: _pieces(mask, tq, tk, device))


@functools.lru_cache(64)
def _pieces_of_numbers(causal: bool, window: int | None, after: int | None, tq: int, tk: int) -> Pieces:
    # A backward may take them, whoever asked first.
    with torch.inference_mode(False):
        return _pieces(Mask(causal, window, window_after=after), tq, tk, torch.device("cpu"))


def causal_pieces(tq: int, tk: int) -> Pieces:
    """Return those of a causal mask with fewer queries than keys, for operators that align it in different ways."""
    every, rows = slice(None), slice(0, tq)
    older = Piece(every, rows, slice(0, tk - tq))
    own = Piece(every, rows, slice(tk - tq, tk), is_causal=True, is_second=True)
    return Pieces(None, None, (older, own), share_keys=False)


def row_blocks(piece: Piece, size: int) -> Iterator[Piece]:
    """Cut a piece into blocks of rows, for float masks of their own: none of them is causal."""
    rows, keys = piece.rows, piece.keys
    for start in range(rows.start, rows.stop, size):
        block = slice(start, min(start + size, rows.stop))
        of_block = slice(block.start - rows.start, block.stop - rows.start)
        if piece.is_causal:
            end = torch.arange(keys.start + of_block.start + 1, keys.start + of_block.stop + 1, device="cpu")
            seen = torch.full_like(end, keys.start), end
            yield Piece(piece.sequences, block, slice(keys.start, int(end[-1])), seen=seen, is_second=piece.is_second)
        elif piece.seen is not None:
            seen = piece.seen[0][of_block], piece.seen[1][of_block]
            yield Piece(piece.sequences, block, slice(int(seen[0].min()), int(seen[1].max())), seen=seen)
        else:
            yield piece._replace(rows=block)


def visible_sums(x: Tensor, found: Pieces, queries: int) -> Tensor:
    """Return the sum of x [B, Hkv, Tk, D] over the keys each row sees, [B, Hkv, Tq, D] in at least fp32."""
    x, dtype = in_order(x, found.keys), row_dtype(x)
    total = torch.zeros(*x.shape[:2], queries, x.shape[3], dtype=dtype, device=x.device)
    with own_precision(x):
        for piece in found.pieces:
            part = x[piece.of_keys]
            if piece.is_causal:
                part = part.cumsum(2, dtype=dtype)
            elif piece.width is not None:
                part = _sliding_sums(part.to(dtype), piece.width)
            elif piece.seen is not None:
                part = _seen(piece).to(dtype) @ part.to(dtype)
            else:
                part = part.sum(2, keepdim=True, dtype=dtype)
            total[piece.of_rows] += part
    return out_of_order(total, found.rows)


def visible_sums_backward(dtotal: Tensor, found: Pieces, keys: int) -> Tensor:
    """The transpose of :func:`visible_sums`."""
    dtotal = in_order(dtotal, found.rows)
    dx = torch.zeros(*dtotal.shape[:2], keys, dtotal.shape[3], dtype=dtotal.dtype, device=dtotal.device)
    with own_precision(dtotal):
        for piece in found.pieces:
            part = dtotal[piece.of_rows]
            if piece.is_causal:
                part = part.flip(2).cumsum(2).flip(2)
            elif piece.width is not None:
                # Rows that see a key are a band of the same width.
                beyond = piece.width - 1
                part = _sliding_sums(F.pad(part, (0, 0, beyond, beyond)), piece.width)
            elif piece.seen is not None:
                part = _seen(piece).to(dtotal.dtype).mT @ part
            else:
                part = part.sum(2, keepdim=True)
            dx[piece.of_keys] += part
    return out_of_order(dx, found.keys)


def _sliding_sums(x: Tensor, width: int) -> Tensor:
    """Return the sums of ``width`` neighbours along dim 2, of each that has so many from it on.

    Neighbours lie in two blocks of ``width``: the end of one and the beginning of the next. Differences of running sums
    would lose what a large value rounds off, and let it change rows that do not see it.
    """
    count = x.shape[2] - width + 1
    blocks = F.pad(x, (0, 0, 0, -x.shape[2] % width)).unflatten(2, (-1, width))
    end = blocks.flip(3).cumsum(3).flip(3).flatten(2, 3)
    beginning = blocks.cumsum(3)
    beginning[:, :, :, -1] = 0.0  # a whole block is the end of itself
    return end[:, :, :count] + beginning.flatten(2, 3)[:, :, width - 1 : width - 1 + count]


def in_order(x: Tensor, order: Order | None) -> Tensor:
    """Return x [B or 1, ., T, ...] with its rows or keys in an order."""
    return x if order is None else _taken(x, order.slot)


def out_of_order(x: Tensor, order: Order | None) -> Tensor:
    """Return x with its rows or keys where they were before :func:`in_order`."""
    return x if order is None else _taken(x, order.place)


def _taken(x: Tensor, index: Tensor) -> Tensor:
    x = x.expand(index.shape[0], *x.shape[1:])
    taken = torch.empty_like(x)
    for b in range(x.shape[0]):
        torch.index_select(x[b], 1, index[b], out=taken[b])
    return taken


def _pieces(mask: Mask, tq: int, tk: int, device: torch.device) -> Pieces:
    found = mask.ranges(tq, tk, device)
    down, up = found.low.diff(), found.high.diff()
    is_step = (down >= 0) & (down <= 1) & (up >= 0) & (up <= 1)
    # A look for all sequences: of many short ones the tensors cost more than the lists.
    looked = (x.tolist() for x in (found.low, found.high, torch.where(is_step, 2 * down + up, -1)))
    ranges = [_RangesOfRows(*x) for x in zip(*looked, strict=True)]
    pieces = []
    for sequences, of_rows in _alike(ranges):
        low, high = (x[sequences.start or 0] for x in (found.low, found.high))
        for span in _merged(_spans(of_rows)):
            pieces += [piece._replace(sequences=sequences) for piece in _cut(span, low, high)]
    return Pieces(found.rows, found.keys, tuple(pieces), _share_keys(pieces))


class _RangesOfRows(NamedTuple):
    """Those of a sequence."""

    low: list[int]
    high: list[int]
    kinds: list[int]  # how a range goes on in the next row, a key of _STEPS; else -1


def _share_keys(pieces: list[Piece]) -> bool:
    by_sequences = sorted(pieces, key=lambda piece: (piece.sequences.start or 0, piece.keys.start))
    neighbours = pairwise(by_sequences)
    return any(piece.blocks > 1 for piece in pieces) or any(
        a.sequences == b.sequences and b.keys.start < a.keys.stop for a, b in neighbours
    )


def _alike(ranges: list[_RangesOfRows]) -> Iterator[tuple[slice, _RangesOfRows]]:
    """Neighbouring sequences with the same ranges."""
    if len(ranges) == 1:
        yield slice(None), ranges[0]
        return
    start = 0
    for of_rows, alike in groupby(ranges):
        stop = start + len(list(alike))
        yield slice(start, stop), of_rows
        start = stop


class _Span(NamedTuple):
    """Rows from start to stop, and how far the first key and the last one move from row to row; None: irregularly."""

    start: int
    stop: int
    first: int  # key
    last: int  # key, behind it
    steps: tuple[int, int] | None
    width: int  # keys of the first row

    @property
    def cost(self) -> int:
        """Scores to compute."""
        rows = self.stop - self.start
        if self.steps == _CAUSAL:
            return rows * (self.width - 1) + rows * (rows + 1) // 2 + (_CALL if self.width > 1 else 0)
        if self.steps == _BAND:
            return rows * (self.width + min(rows, _rows_of_band(self.width)) - 1)
        return rows * (self.last - self.first)

    def united(self, other: "_Span") -> "_Span":
        first, last = min(self.first, other.first), max(self.last, other.last)
        return _Span(self.start, other.stop, first, last, None, self.width)


_WHOLE, _CAUSAL, _BAND = (0, 0), (0, 1), (1, 1)
_STEPS = {0: _WHOLE, 1: _CAUSAL, 3: _BAND}


def _spans(ranges: _RangesOfRows) -> Iterator[_Span]:
    """Maximal runs of rows whose ranges go on in the same way; without those that see nothing."""
    low, high, kinds = ranges

    def span(start: int, stop: int, steps: tuple[int, int] | None) -> Iterator[_Span]:
        while start < stop and low[start] >= high[start]:
            start += 1
        if start < stop:
            yield _Span(start, stop, low[start], high[stop - 1], steps, high[start] - low[start])

    start = step = 0
    for kind, alike in groupby(kinds):
        step += len(list(alike))
        if kind >= 0 and start <= step:
            yield from span(start, step + 1, _STEPS.get(kind))
            start = step + 1
        elif kind < 0:
            for row in range(start, step):
                yield from span(row, row + 1, _WHOLE)
            start = max(start, step)
    if start < len(low):
        yield from span(start, len(low), _WHOLE)


def _merged(spans: Iterable[_Span]) -> list[_Span]:
    """Unite neighbours where more scores cost less than another call."""
    merged: list[_Span] = []
    for span in spans:
        while merged and (both := merged[-1].united(span)).cost <= merged[-1].cost + span.cost + _CALL:
            merged.pop()
            span = both
        merged.append(span)
    return merged


def _cut(span: _Span, low: Tensor, high: Tensor) -> Iterator[Piece]:
    """Return the pieces of a span; those of a band are alike and share their float mask."""
    every = slice(None)
    rows, start, stop = span.stop - span.start, span.start, span.stop
    if span.steps == _WHOLE:
        yield Piece(every, slice(start, stop), slice(span.first, span.last))
        return
    if span.steps == _CAUSAL and not (span.width > 1 and rows * rows <= 2 * _CALL):
        older = span.first + span.width - 1
        if older > span.first:
            yield Piece(every, slice(start, stop), slice(span.first, older))
        yield Piece(every, slice(start, stop), slice(older, span.last), is_causal=True, is_second=older > span.first)
        return
    step = _ROWS[1]
    if span.steps == _BAND:
        step = _rows_of_band(span.width)
        blocks = rows // step
        if blocks > 1:
            of_block = slice(start, start + step)
            hidden = _hidden((low[of_block], high[of_block]), slice(span.first, span.first + span.width + step - 1))
            block = slice(start, start + blocks * step)
            keys = slice(span.first, span.first + span.width + blocks * step - 1)
            yield Piece(every, block, keys, False, (low[block], high[block]), span.width, blocks, hidden)
            start = block.stop
    for first in range(start, stop, step):
        block = slice(first, min(first + step, stop))
        seen = low[block], high[block]
        keys = slice(int(seen[0].min()), int(seen[1].max()))
        width = span.width if span.steps == _BAND else None
        piece = Piece(every, block, keys, seen=seen, width=width)
        is_small = (block.stop - block.start) * (keys.stop - keys.start) <= _KEPT
        yield piece._replace(kept=piece.hidden) if is_small else piece


def _rows_of_band(width: int) -> int:
    """Rows of a block of a band: few compute little that is hidden, many are large matmuls."""
    return min(max(width // 4, _ROWS[0]), _ROWS[1])


def _seen(piece: Piece) -> Tensor:
    assert piece.seen is not None
    low, high = (x[:, None] for x in piece.seen)
    place = torch.arange(piece.keys.start, piece.keys.stop, device=low.device)
    return (place >= low) & (place < high)


def _hidden(seen: tuple[Tensor, Tensor], keys: slice) -> Tensor:
    low, high = (x[:, None] for x in seen)
    place = torch.arange(keys.start, keys.stop, device=low.device)
    return torch.where((place >= low) & (place < high), 0.0, float("-inf"))
