"""Triton kernels that add up what each row sees: values seen by a query, or gradients seen by a key.

Legend. p_ pointer, b_ block of values, o_ offsets, m_ mask. M rows and N sources of a tile, D head dim padded to a
power of two. A row is what a sum belongs to, a source what it adds up: queries and keys, or keys and queries
(TRANSPOSED). Everything is decided in slots, where both have a place: row r stands at slot row_offset + r, source s at
source_offset + s, and a row sees the sources from ``back`` slots before to ``ahead`` slots after its own that have its
document. Causality and the window are such a band from either side.

Padding hides keys whatever the row: as sources they count as zeros, as rows they are left alone. So it never cuts a
tile of pairs.
"""

import triton
import triton.language as tl


@triton.jit
def _load_sources(
    p_source, p_real, tile, stride_st, sources,
    HIDE_PADDING: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Tile of sources of one head, [N, D]; zeros for padding and past the end."""
    o_s, o_d = tile * N + tl.arange(0, N), tl.arange(0, D)
    m_s = o_s < sources
    if HIDE_PADDING:
        m_s = m_s & (tl.load(p_real + o_s, mask=m_s, other=0) != 0)
    p_tile = p_source + o_s[:, None].to(tl.int64) * stride_st + o_d[None, :]
    return tl.load(p_tile, mask=m_s[:, None] & (o_d < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def tile_totals_kernel(
    p_source, p_real, p_totals, stride_sb, stride_sh, stride_st, kv_heads, sources, tiles,
    HIDE_PADDING: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """totals[b * kv_heads + h, tile, :] = sum of a tile of sources, fp32. Grid (tiles, B * kv_heads)."""
    tile, bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = bh // kv_heads, bh % kv_heads
    p_source += b * stride_sb + h * stride_sh
    if HIDE_PADDING:
        p_real += b * sources
    b_source = _load_sources(p_source, p_real, tile, stride_st, sources, HIDE_PADDING, HEAD_DIM, D, N)
    tl.store(p_totals + (bh * tiles + tile) * D + tl.arange(0, D), tl.sum(b_source.to(tl.float32), 0))


@triton.jit
def visible_sums_kernel(
    p_source, p_totals, p_result, p_real, p_doc_first, p_doc_last, p_run_first, p_run_last,
    stride_sb, stride_sh, stride_st, stride_rb, stride_rh, stride_rt,
    kv_heads, slots, rows, row_offset, sources, source_offset, tiles, back, ahead,
    TRANSPOSED: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, HAS_PADDING: tl.constexpr, IN_FP32: tl.constexpr,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """result = sum of the visible sources, or result += it (TRANSPOSED). Grid (cdiv(rows, M), B * kv_heads).

    Source tiles that every row of the tile sees whole lie side by side; of these only the totals are read. The tiles
    on either side of them are multiplied with their 0/1 mask.

    doc_first and doc_last [B, slots] are the first and last slot of a slot's document and bound the tiles to look at;
    the first one also names the document. run_first and run_last bound the run of slots of one document around a slot:
    ids may come back later, so only inside its run is everything of its document.
    """
    HIDE_PADDING: tl.constexpr = HAS_PADDING and not TRANSPOSED
    # Gradients of 16-bit values come in fp32. Two bf16 pieces keep 16 bits of them, and bf16 has the range of fp32.
    SPLIT: tl.constexpr = TRANSPOSED and p_result.dtype.element_ty != tl.float32
    OPERAND: tl.constexpr = tl.float32 if IN_FP32 else (tl.bfloat16 if SPLIT else p_source.dtype.element_ty)
    bh = tl.program_id(1).to(tl.int64)
    b, h = bh // kv_heads, bh % kv_heads
    p_source += b * stride_sb + h * stride_sh
    p_totals += bh * tiles * D
    p_result += b * stride_rb + h * stride_rh
    if HAS_PADDING:
        p_real += b * slots
    first_row = tl.program_id(0) * M
    last_row = tl.minimum(first_row + M, rows) - 1
    o_m, o_n, o_d = first_row + tl.arange(0, M), tl.arange(0, N), tl.arange(0, D)
    # Past the end the last row is repeated, which changes no bound.
    o_row = tl.minimum(o_m, last_row)
    o_row_slot = row_offset + o_row

    # Slots that some row may see, and slots that every row sees.
    low, high = row_offset + first_row - back, row_offset + last_row + ahead
    sure_low, sure_high = row_offset + last_row - back, row_offset + first_row + ahead
    if HAS_DOCUMENTS:
        p_doc_first += b * slots
        # A query before the first slot has no document.
        m_row_slot = o_row_slot >= 0
        b_row_document = tl.load(p_doc_first + o_row_slot, mask=m_row_slot, other=slots)
        b_doc_last = tl.load(p_doc_last + b * slots + o_row_slot, mask=m_row_slot, other=-1)
        b_run_first = tl.load(p_run_first + b * slots + o_row_slot, mask=m_row_slot, other=slots)
        b_run_last = tl.load(p_run_last + b * slots + o_row_slot, mask=m_row_slot, other=-1)
        low, high = tl.maximum(low, tl.min(b_row_document, 0)), tl.minimum(high, tl.max(b_doc_last, 0))
        sure_low = tl.maximum(sure_low, tl.max(b_run_first, 0))
        sure_high = tl.minimum(sure_high, tl.min(b_run_last, 0))

    # The same as tiles of sources: [start, stop), and inside it [full_start, full_stop).
    start = tl.maximum(low - source_offset, 0) // N
    stop = tl.maximum(tl.minimum(high - source_offset + 1, sources) + N - 1, start * N) // N
    full_start = tl.minimum((tl.maximum(sure_low - source_offset, 0) + N - 1) // N, stop)
    full_stop = tl.maximum(tl.minimum(tl.maximum(sure_high - source_offset + 1, 0) // N, stop), full_start)

    b_sum = tl.zeros([M, D], tl.float32)
    full = full_stop - full_start
    for step in range(start, stop - full):
        tile = tl.where(step < full_start, step, step + full)
        o_source = tile * N + o_n
        o_source_slot = source_offset + o_source
        b_ahead = o_source_slot[None, :] - o_row_slot[:, None]
        m_seen = (b_ahead >= -back) & (b_ahead <= ahead)
        if HAS_DOCUMENTS:
            m_source_slot = (o_source_slot >= 0) & (o_source < sources)
            b_document = tl.load(p_doc_first + o_source_slot, mask=m_source_slot, other=-1)
            m_seen = m_seen & (b_row_document[:, None] == b_document[None, :])
        b_seen = m_seen.to(OPERAND)
        # [N, D]
        b_source = _load_sources(p_source, p_real, tile, stride_st, sources, HIDE_PADDING, HEAD_DIM, D, N)
        if SPLIT:
            b_high = b_source.to(tl.bfloat16)
            b_low = (b_source - b_high.to(tl.float32)).to(tl.bfloat16)
            b_sum = tl.dot(b_seen, b_high.to(OPERAND), b_sum, input_precision="ieee")
            b_sum = tl.dot(b_seen, b_low.to(OPERAND), b_sum, input_precision="ieee")
        else:
            b_sum = tl.dot(b_seen, b_source.to(OPERAND), b_sum, input_precision="ieee")

    b_total = tl.zeros([D], tl.float32)
    for tile in range(full_start, full_stop, CHUNK):
        o_tile = tile + tl.arange(0, CHUNK)
        p_chunk = p_totals + o_tile[:, None] * D + o_d[None, :]
        b_total += tl.sum(tl.load(p_chunk, mask=(o_tile < full_stop)[:, None], other=0.0), 0)
    b_sum += b_total[None, :]

    m_result = o_m < rows
    if HAS_PADDING and TRANSPOSED:
        m_result = m_result & (tl.load(p_real + o_row) != 0)
    m_result = m_result[:, None] & (o_d < HEAD_DIM)[None, :]
    p_rows = p_result + o_row[:, None].to(tl.int64) * stride_rt + o_d[None, :]
    if TRANSPOSED:
        b_sum += tl.load(p_rows, mask=m_result, other=0.0).to(tl.float32)
    tl.store(p_rows, b_sum.to(p_result.dtype.element_ty), mask=m_result)
