"""The pieces of a mask cover what it leaves visible, each pair once, whatever is combined."""

import random

import pytest
import torch
from torch import Tensor

from affine_attn import Mask
from affine_attn.core import pieces
from affine_attn.core.pieces import Piece, pieces_of, row_blocks, visible_sums, visible_sums_backward

CPU = torch.device("cpu")


def _documents(pick: random.Random, batch: int, keys: int) -> Tensor:
    ids = torch.tensor([[pick.randrange(pick.choice([1, 2, 8, 40])) for _ in range(keys)] for _ in range(batch)])
    ids = ids.sort(1).values if pick.random() < 0.6 else ids
    # Neighbours still, not in the order of their numbers.
    return (ids * 7 + 3) % 41 if pick.random() < 0.3 else ids


def _padding(pick: random.Random, batch: int, keys: int) -> Tensor:
    if pick.random() < 0.4:
        return torch.tensor([[pick.random() < 0.7 for _ in range(keys)] for _ in range(batch)])
    first = torch.tensor([[pick.randrange(keys + 1)] for _ in range(batch)])
    real = torch.arange(keys) >= first
    return real.flip(1) if pick.random() < 0.4 else real


def _case(seed: int) -> tuple[Mask, int, int, int]:
    pick = random.Random(seed)
    batch, keys = pick.randint(1, 3), pick.choice([1, 2, 5, 17, 40, 130, 200])
    queries = pick.choice([1, 2, keys, pick.randint(1, keys + 3)])
    causal = pick.random() < 0.75
    after = pick.choice([None, 0, 3, 40]) if not causal else None
    mask = Mask(
        causal=causal,
        window=pick.choice([1, 2, 5, 30, 400]) if (causal or after is not None) and pick.random() < 0.5 else None,
        window_after=after,
        documents=_documents(pick, batch, keys) if pick.random() < 0.6 else None,
        padding=_padding(pick, batch, keys) if pick.random() < 0.5 else None,
        lengths=torch.tensor([pick.randint(0, keys) for _ in range(batch)]) if pick.random() < 0.3 else None,
    )
    return mask, batch, queries, keys


def _pairs(piece: Piece) -> Tensor:
    """What rows and keys of a piece see each other, bool [rows, keys]."""
    rows, keys = (part.stop - part.start for part in (piece.rows, piece.keys))
    seen = torch.zeros(rows, keys, dtype=torch.bool)
    if piece.is_causal:
        assert rows == keys
        return ~seen.triu(1) & torch.ones_like(seen).tril()
    if piece.hidden is None:
        return ~seen
    for start in range(0, rows, piece.step):
        seen[start : start + piece.step, start : start + piece.keys_of_block] |= piece.hidden == 0
    return seen


def _count(of_sequence: list[Piece], batch: int, queries: int, keys: int) -> Tensor:
    count = torch.zeros(batch, queries, keys, dtype=torch.int64)
    for piece in of_sequence:
        count[piece.sequences, piece.rows, piece.keys] += _pairs(piece)
    return count


# As few calls as pay, or as many pieces as there are.
@pytest.mark.parametrize("call", [pieces._CALL, 0])
@pytest.mark.parametrize("seed", range(150))
def test_each_visible_pair_is_in_one_piece(seed, call, monkeypatch):
    monkeypatch.setattr(pieces, "_CALL", call)
    pieces._pieces_of_numbers.cache_clear()
    mask, batch, queries, keys = _case(seed)
    found = pieces_of(mask, queries, keys, CPU)
    visible = mask.visible(queries, keys, CPU, slice(0, queries), slice(0, keys))[:, 0].expand(batch, -1, -1)
    blocks = [block for piece in found.pieces for block in row_blocks(piece, 13)]
    for covering in (list(found.pieces), blocks):
        count = _count(covering, batch, queries, keys)
        if found.rows is not None:
            count = count.gather(1, found.rows.place[:, :, None].expand_as(count))
        if found.keys is not None:
            count = count.gather(2, found.keys.place[:, None].expand_as(count))
        assert torch.equal(count, visible.long())
    if not found.share_keys:
        for piece in found.pieces:
            others = [p for p in found.pieces if p is not piece and p.sequences == piece.sequences]
            assert all(p.keys.stop <= piece.keys.start or p.keys.start >= piece.keys.stop for p in others)
    values, weights = torch.randn(batch, 2, keys, 3).double(), visible[:, None].double()
    torch.testing.assert_close(visible_sums(values, found, queries), weights @ values)
    gradients = torch.randn(batch, 2, queries, 3).double()
    torch.testing.assert_close(visible_sums_backward(gradients, found, keys), weights.mT @ gradients)
    pieces._pieces_of_numbers.cache_clear()


def test_a_document_is_a_square_and_a_window_one_piece():
    (first, second) = pieces_of(Mask.packed([100, 60]), 160, 160, CPU).pieces
    assert first == Piece(slice(None), slice(0, 100), slice(0, 100), is_causal=True)._replace(sequences=first.sequences)
    assert (second.rows, second.keys, second.is_causal) == (slice(100, 160), slice(100, 160), True)
    square, band = pieces_of(Mask(window=64), 640, 640, CPU).pieces
    assert square.is_causal
    assert (band.width, band.blocks, band.step, band.keys_of_block) == (64, 18, 32, 95)


def test_padding_is_in_no_piece():
    real = torch.arange(400)[None] >= torch.tensor([[0], [300], [300]])
    (whole, rest) = pieces_of(Mask(padding=real), 400, 400, CPU).pieces
    assert (whole.sequences, whole.rows) == (slice(0, 1), slice(0, 400))
    assert (rest.sequences, rest.rows, rest.keys) == (slice(1, 3), slice(300, 400), slice(300, 400))


def test_padding_that_is_another_document_is_in_no_piece():
    real = torch.arange(400)[None] < torch.tensor([[400], [100]])
    (whole, part) = pieces_of(Mask(padding=real, documents=real.byte()), 400, 400, CPU).pieces
    assert (whole.sequences, whole.rows, whole.is_causal) == (slice(0, 1), slice(0, 400), True)
    assert (part.sequences, part.rows, part.keys, part.is_causal) == (slice(1, 2), slice(0, 100), slice(0, 100), True)


def test_cached_keys_are_a_rectangle_before_the_square():
    older, own = pieces_of(Mask(lengths=torch.tensor([900])), 100, 1000, CPU).pieces
    assert (older.keys, older.is_causal, older.is_second) == (slice(0, 800), False, False)
    assert (own.keys, own.is_causal, own.is_second) == (slice(800, 900), True, True)


def test_pieces_are_found_once_for_a_mask(monkeypatch):
    made, ranges = [], Mask.ranges
    monkeypatch.setattr(Mask, "ranges", lambda mask, *sizes: made.append(mask) or ranges(mask, *sizes))
    pieces._pieces_of_numbers.cache_clear()
    documents = torch.arange(50)[None] // 9
    for mask in (Mask(window=7), Mask(window=7), Mask(documents=documents), Mask(documents=documents)):
        pieces_of(mask, 50, 50, CPU)
    assert len(made) == 2
