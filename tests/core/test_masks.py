"""Who sees whom: everything a mask derives, against the definition written out pair by pair."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from affine_attn import Alibi, Mask, attention

CPU = torch.device("cpu")


def _sees(mask: Mask, b: int, i: int, j: int, tq: int, tk: int) -> bool:
    """The definition: queries are the last Tq of the filled slots, and every restriction must allow the pair."""
    length = tk if mask.lengths is None else int(mask.lengths[b])
    p = length - tq + i
    if j >= length:
        return False
    if mask.causal and j > p:
        return False
    if mask.window is not None and j <= p - mask.window:
        return False
    if mask.window_after is not None and j > p + mask.window_after:
        return False
    if mask.allowed is not None:
        allowed = mask.allowed.expand(max(b + 1, mask.allowed.shape[0]), 1, tq, tk)
        if not allowed[b, 0, i, j]:
            return False
    # A query in front of the first slot belongs to no document.
    if mask.documents is not None and (p < 0 or mask.documents[b, j] != mask.documents[b, p]):
        return False
    return mask.padding is None or bool(mask.padding[b, j])


def _table(mask: Mask, batch: int, tq: int, tk: int) -> list[list[list[bool]]]:
    return [[[_sees(mask, b, i, j, tq, tk) for j in range(tk)] for i in range(tq)] for b in range(batch)]


@st.composite
def cases(draw) -> tuple[Mask, int, int, int]:
    batch, tq, tk = draw(st.integers(1, 3)), draw(st.integers(1, 7)), draw(st.integers(0, 8))

    def rows(element: st.SearchStrategy, width: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        row = st.lists(element, min_size=width, max_size=width)
        return torch.tensor(draw(st.lists(row, min_size=batch, max_size=batch)), dtype=dtype)

    causal = draw(st.booleans())
    after = None if causal else draw(st.none() | st.integers(0, tk + 1))
    allowed = None
    if draw(st.booleans()):
        sizes = [draw(st.sampled_from([1, size])) for size in (batch, 1, tq, tk)]
        entries = draw(st.lists(st.booleans(), min_size=math.prod(sizes), max_size=math.prod(sizes)))
        allowed = torch.tensor(entries, dtype=torch.bool).view(sizes)
    mask = Mask(
        causal=causal,
        window=draw(st.none() | st.integers(1, tk + 2)) if causal or after is not None else None,
        # Ids may come back after another document, be negative or far apart.
        documents=rows(st.sampled_from([0, 1, -3, 10**6]), tk) if draw(st.booleans()) else None,
        padding=rows(st.booleans(), tk, torch.bool) if draw(st.booleans()) else None,
        lengths=rows(st.integers(0, tk), 1)[:, 0] if draw(st.booleans()) else None,
        window_after=after,
        allowed=allowed,
    )
    return mask, batch, tq, tk


MANY = settings(max_examples=250, deadline=None)


@MANY
@given(cases())
def test_visible_is_the_definition(case):
    mask, batch, tq, tk = case
    visible = mask.visible(tq, tk, CPU, slice(0, tq), slice(0, tk))
    assert visible.expand(batch, 1, tq, tk)[:, 0].tolist() == _table(mask, batch, tq, tk)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32], ids=str)
def test_lengths_of_any_integer_type(dtype):
    """Also where a row has fewer filled slots than queries, whose difference is negative."""
    q, k, v = torch.randn(2, 2, 200, 8), torch.randn(2, 2, 300, 8), torch.randn(2, 2, 300, 8)
    lengths = torch.tensor([3, 6])
    for impl in ("reference", "blocked", "flex"):
        for logit in (None, Alibi()):
            y = attention(q, k, v, Mask(lengths=lengths.to(dtype)), logit=logit, impl=impl)
            expected = attention(q, k, v, Mask(lengths=lengths), logit=logit, impl="reference")
            torch.testing.assert_close(y, expected, msg=lambda m, how=(impl, logit): f"{how}: {m}")


@MANY
@given(cases())
@example((Mask(window=2, padding=torch.tensor([[False, True, True, False, True]])), 1, 4, 5))
@example((Mask(window=3, padding=torch.tensor([[True, False, True]]), lengths=torch.tensor([2])), 1, 2, 3))
def test_count_is_the_number_of_visible_keys(case):
    mask, batch, tq, tk = case
    expected = [[sum(row) for row in rows] for rows in _table(mask, batch, tq, tk)]
    assert mask.count(tq, tk, CPU).expand(batch, 1, tq)[:, 0].tolist() == expected


@MANY
@given(cases())
def test_first_is_the_first_visible_slot_or_minus_one(case):
    mask, batch, tq, tk = case
    expected = [[row.index(True) if any(row) else -1 for row in rows] for rows in _table(mask, batch, tq, tk)]
    assert mask.first(tq, tk, CPU).expand(batch, 1, tq)[:, 0].tolist() == expected


@MANY
@given(cases(), st.data())
def test_key_range_covers_what_a_block_of_rows_sees(case, data):
    mask, batch, tq, tk = case
    start = data.draw(st.integers(0, tq - 1))
    stop = data.draw(st.integers(start + 1, tq))
    keys = mask.key_range(tq, tk, slice(start, stop))
    assert 0 <= keys.start <= keys.stop <= tk
    table = _table(mask, batch, tq, tk)
    seen = {j for rows in table for row in rows[start:stop] for j in range(tk) if row[j]}
    assert seen <= set(range(keys.start, keys.stop))


@MANY
@given(cases(), st.data())
def test_a_block_of_visible_is_a_cut_of_the_whole(case, data):
    mask, _, tq, tk = case
    rows = slice(data.draw(st.integers(0, tq)), tq)
    keys = slice(data.draw(st.integers(0, tk)), tk)
    whole = mask.visible(tq, tk, CPU, slice(0, tq), slice(0, tk))
    assert torch.equal(mask.visible(tq, tk, CPU, rows, keys), whole[:, :, rows, keys])


@pytest.mark.parametrize("shape", [(3, 5, 8), (2, 3, 5, 1), (3, 1, 8)], ids=str)
def test_heads_that_see_other_keys_have_masks_of_their_own(shape):
    allowed = torch.rand(shape, generator=torch.Generator().manual_seed(0)) > 0.4
    by_head = Mask(documents=torch.tensor([[0] * 3 + [1] * 5, [2] * 8]), allowed=allowed)
    assert by_head.is_by_head
    everything = slice(0, 5), slice(0, 8)
    for h in range(3):
        one = replace(by_head, allowed=allowed[..., h : h + 1, :, :])
        assert not one.is_by_head
        visible = one.visible(5, 8, CPU, *everything)[:, 0]
        assert torch.equal(by_head.visible(5, 8, CPU, *everything)[:, h], visible)
        assert torch.equal(by_head.count(5, 8, CPU)[:, h], one.count(5, 8, CPU)[:, 0])
        assert torch.equal(by_head.first(5, 8, CPU)[:, h], one.first(5, 8, CPU)[:, 0])
        b, i, j = torch.arange(2)[:, None, None], torch.arange(5)[:, None], torch.arange(8)
        assert torch.equal(by_head.predicate(5, 8)(b, torch.tensor(h), i, j), visible)


def test_key_range_is_tight_for_windows_on_both_sides():
    mask = Mask(causal=False, window=3, window_after=2)
    assert mask.key_range(10, 20, slice(2, 4)) == slice(10, 16)
    assert mask.band(10, 20) == (2, 2)


@pytest.mark.parametrize(
    ("window", "rows", "keys"),
    [
        (None, slice(0, 4), slice(0, 14)),
        (3, slice(0, 4), slice(8, 14)),
        (3, slice(8, 10), slice(16, 20)),
    ],
)
def test_key_range_is_tight_for_causal_and_windowed_rows(window, rows, keys):
    """Ten queries after ten older keys; a range that is merely correct would cost time."""
    assert Mask(window=window).key_range(10, 20, rows) == keys


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_document_ids_may_be_any_integer_of_their_type(dtype):
    """Hashes serve as ids; arithmetic on them must not overflow into another document."""
    large = torch.iinfo(dtype).max
    documents = torch.tensor([[large, 0, large - 1, large, -large, 0, -large, large // 2 + 1]], dtype=dtype)
    mask = Mask(documents=documents)
    table = _table(mask, 1, 8, 8)[0]
    assert mask.count(8, 8, CPU)[0, 0].tolist() == [sum(row) for row in table]
    assert mask.first(8, 8, CPU)[0, 0].tolist() == [row.index(True) for row in table]


def test_count_and_first_make_no_table_of_pairs():
    """At this length a table of pairs would be 2^40 entries."""
    tokens = 2**20
    documents = torch.arange(tokens)[None] // 1000
    mask = Mask(documents=documents, padding=torch.ones(1, tokens, dtype=torch.bool))
    assert mask.count(tokens, tokens, CPU)[0, 0, [0, 999, 1000, 12345]].tolist() == [1, 1000, 1, 346]
    assert mask.first(tokens, tokens, CPU)[0, 0, [0, 999, 1000, 12345]].tolist() == [0, 0, 1000, 12000]


@pytest.mark.parametrize("counted", [False, True])
def test_where_contiguous_documents_begin_and_end(counted):
    """Runs of equal ids in each row, among the tokens of all rows; queries are the last of each."""
    documents = torch.tensor([[4, 4, 4, 1, 1, 1, 1, 7], [0, 0, 0, 0, 0, 2, 2, 2]])
    mask = Mask(documents=documents, contiguous=True, most_documents=6 if counted else None)
    rest = [16] if counted else []
    queries, keys = mask.cu_seqlens(8, 8)
    assert keys.dtype == queries.dtype == torch.int32
    assert queries.tolist() == keys.tolist() == [0, 3, 7, 8, 13, 16, *rest]
    # The last four of each row: the first document has none of them.
    queries, keys = mask.cu_seqlens(4, 8)
    assert keys.tolist() == [0, 3, 7, 8, 13, 16, *rest]
    assert queries.tolist() == [0, 0, 3, 4, 5, 8, *([8] if counted else [])]
    # A mask of the same ids with another promise has a table of its own.
    assert len(Mask(documents=documents, contiguous=True, most_documents=9).cu_seqlens(8, 8)[1]) == 10


def test_a_packed_mask_knows_how_many_documents_there_are():
    """Those given, and one for the tokens behind them."""
    for mask in (Mask.packed([3, 5]), Mask.packed(cu_seqlens=torch.tensor([0, 3, 8]), tokens=10)):
        assert mask.most_documents == 3
    assert Mask.packed([3, 5]).cu_seqlens(8, 8)[1].tolist() == [0, 3, 8, 8]


def test_a_number_of_documents_is_promised_of_contiguous_ones():
    ids = torch.zeros(1, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match="most_documents must be an integer >= 1, got 0"):
        Mask(documents=ids, contiguous=True, most_documents=0)
    with pytest.raises(ValueError, match="most_documents counts contiguous documents"):
        Mask(documents=ids, most_documents=2)
