"""Triton kernels of the fused epilogue: stages 2 to 4 around any attention that returns (o, z).

Legend. p_ pointer, b_ block of values, o_ offsets, m_ mask. T tokens of a tile, D head dim padded to a power of two.
stride_xb, _xh, _xt: of tensor x along batch, heads and tokens, where x is the letter of its pointer, or s sink (scale),
g gate, d dy, a do (the gradient that goes into the attention), w dgate, n dv.

A program is one warp. It walks down a segment of tokens, tile by tile, with a slice of the columns and all query
heads of a kv head, and asks for everything a tile needs before it computes anything: these kernels move memory, what
costs is waiting for it, and many small programs wait at the same time.

Sums over tokens. Segments are anchored at the queries: segment c of the keys covers slots from first + c * LENGTH,
first = older - n_older * LENGTH <= 0, so query segment r and key segment n_older + r cover the same slots. A small
kernel prepares the sum of the values before each segment, as a sum within its block of segments and a total per
block. In the backward the sums run the other way, and dv is not there yet: a segment leaves for each of its slots what
its own queries want added, and its total; small kernels add up the totals from the end and, once there is a dv, add
both to it.

RESTARTS: sums begin anew with each document, and p_first [B, keys] says where a slot's document begins. What goes from
tile to tile, from segment to segment and from block to block is then the sum over the document that the next one
begins in. No sum is ever of more than one document: nothing is subtracted that a row does not see.

SLIDES: a row sees the last ``window`` slots, two segments at least. Its sum has four parts: its tile up to it; what
comes before that in its segment; whole segments; and where the window begins, the end of a segment, which is the end of
a tile and the tiles after that. A small kernel prepares the sum from each tile to the end of its segment. With the
slots of the keys the same holds the other way round for dv, where a tile is a segment.
"""

import triton
import triton.language as tl

from affine_attn.kernels.constants import ELEMENTWISE, HEADWISE, LEARNED_SINK, NO_SINK, NO_SUMS, RUNNING, TABLE, WHOLE


@triton.jit
def value_sums_kernel(
    p_v, p_first, p_sums, stride_vb, stride_vh, stride_vt, kv_heads, keys, first, segments, blocks, block_segments,
    RESTARTS: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr, SLICE: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """sums[bh, c] = sum of the values before key segment c in its block, sums[bh, segments + n] = total of block n."""
    SLICES: tl.constexpr = D // SLICE
    part, block = tl.program_id(0) % SLICES, tl.program_id(0) // SLICES
    bh = tl.program_id(1).to(tl.int64)
    o_d = part * SLICE + tl.arange(0, SLICE)
    p_v += (bh // kv_heads) * stride_vb + (bh % kv_heads) * stride_vh
    p_sums += bh * (segments + blocks) * D + o_d
    b_sum = tl.zeros([SLICE], tl.float32)
    for segment in range(block * block_segments, tl.minimum((block + 1) * block_segments, segments)):
        o_t = first + segment * LENGTH + tl.arange(0, LENGTH)
        m_v = ((o_t >= 0) & (o_t < keys))[:, None] & (o_d < HEAD_DIM)[None, :]
        b_v = tl.load(p_v + o_t[:, None].to(tl.int64) * stride_vt + o_d[None, :], mask=m_v, other=0.0)
        tl.store(p_sums + segment * D, b_sum)
        if RESTARTS:
            start, stop = first + segment * LENGTH, first + (segment + 1) * LENGTH
            next_first = _first_slot(p_first, bh // kv_heads, stop, keys)
            b_v = tl.where((o_t >= next_first)[:, None], b_v, 0.0)
            b_sum = tl.where(next_first <= start, b_sum, 0.0)
        b_sum += tl.sum(b_v.to(tl.float32), 0)
    tl.store(p_sums + (segments + block) * D, b_sum)


@triton.jit
def tile_sums_kernel(
    p_v, p_sums, stride_vb, stride_vh, stride_vt, kv_heads, keys, first, segments,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, SLICE: tl.constexpr, T: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """sums[bh, n] = sum of the values from tile n of the keys to the end of its segment; some columns of a segment."""
    SLICES: tl.constexpr = D // SLICE
    TILES: tl.constexpr = LENGTH // T
    part, segment = tl.program_id(0) % SLICES, tl.program_id(0) // SLICES
    bh = tl.program_id(1).to(tl.int64)
    o_d, o_t = part * SLICE + tl.arange(0, SLICE), first + segment * LENGTH + tl.arange(0, LENGTH)
    m_v = ((o_t >= 0) & (o_t < keys))[:, None] & (o_d < HEAD_DIM)[None, :]
    p_v += (bh // kv_heads) * stride_vb + (bh % kv_heads) * stride_vh
    b_v = tl.load(p_v + o_t[:, None].to(tl.int64) * stride_vt + o_d[None, :], mask=m_v, other=0.0)
    b_totals = tl.sum(tl.reshape(b_v.to(tl.float32), [TILES, T, SLICE]), 1)
    p_rows = p_sums + (bh * segments * TILES + segment * TILES + tl.arange(0, TILES))[:, None] * D + o_d[None, :]
    tl.store(p_rows, tl.cumsum(b_totals, 0, reverse=True))


@triton.jit
def _sum_of_segments(p_sums, start, stop, o_d, TILES: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr):
    """Sum of whole segments, of which every one is the sum from its first tile."""
    b_sum = tl.zeros(o_d.shape, tl.float32)
    for segment in range(start, stop, ROWS):
        o_segment = segment + tl.arange(0, ROWS)
        p_rows = p_sums + (o_segment * TILES)[:, None] * D + o_d[None, :]
        b_sum += tl.sum(tl.load(p_rows, mask=(o_segment < stop)[:, None], other=0.0), 0)
    return b_sum


@triton.jit
def _first_seen(p_v, o_slot, m_d, window, stride_vt, o_d, T: tl.constexpr):
    """The first value that each row of a tile sees and not all do: a row sees them from its own on."""
    o_seen = o_slot - window + 1
    m_seen = ((tl.arange(0, T) < T - 1) & (o_seen >= 0))[:, None] & m_d
    return tl.load(p_v + o_seen[:, None].to(tl.int64) * stride_vt + o_d[None, :], mask=m_seen, other=0.0)


@triton.jit
def _first_slot(p_first, b, o_slot, keys):
    """Return where the documents of slots begin; past the end that of the last one."""
    return tl.load(p_first + b * keys + tl.minimum(o_slot, keys - 1))


@triton.jit
def _add_unless_first(m_left, b_left, m_right, b_right):
    """Add what came before, unless this is the first of another document."""
    return m_left | m_right, tl.where(m_right != 0, b_right, b_left + b_right)


@triton.jit
def _running_sums(b_v, b_before, b_first, o_slot, start, o_d):
    """Running sums of a tile that begins at slot ``start``, each over the row's own document; b_before is what came
    before the tile of the document that it begins in."""
    m_first = (b_first == o_slot)[:, None] & (o_d >= 0)[None, :]
    _, b_u = tl.associative_scan((m_first.to(tl.int32), b_v.to(tl.float32)), 0, _add_unless_first)
    return b_u + tl.where((b_first < start)[:, None], b_before[None, :], 0.0)


@triton.jit
def _sliding_sums(b_v, b_old, b_base):
    """Sums over the window of each row of a tile: b_old are the first values seen, b_base the sum that all rows see."""
    b_u = tl.cumsum(b_v.to(tl.float32), 0) + tl.cumsum(b_old.to(tl.float32), 0, reverse=True)
    return b_u + b_base[None, :]


@triton.jit
def _sums_from_rows(b_weighted, b_total, b_first, b_next, next_first, o_d):
    """Sums from each row of a tile to the end of its document; b_next has the documents of the slots after the rows',
    b_total the sum after the tile over the document that begins at ``next_first``."""
    m_last = (b_first != b_next)[:, None] & (o_d >= 0)[None, :]
    _, b_from = tl.associative_scan((m_last.to(tl.int32), b_weighted), 0, _add_unless_first, reverse=True)
    return b_from + tl.where((b_first == next_first)[:, None], b_total[None, :], 0.0)


@triton.jit
def epilogue_kernel(
    p_o, p_z, p_v, p_first, p_sums, p_before, p_sink, p_alpha, p_beta, p_gate, p_y, p_lse,
    stride_ob, stride_oh, stride_ot, stride_vb, stride_vh, stride_vt,
    stride_gb, stride_gh, stride_gt, stride_yb, stride_yh, stride_yt, stride_sb, stride_sh, stride_st,
    kv_heads, queries, tiles, older, n_older, segments, blocks, block_segments, window, constant_sink,
    SINK: tl.constexpr, HAS_ALPHA: tl.constexpr, SUMS: tl.constexpr, RESTARTS: tl.constexpr,
    SLIDES: tl.constexpr, UNEVEN: tl.constexpr, GATE: tl.constexpr, KEEP_OUT: tl.constexpr,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr, SLICE: tl.constexpr,
    T: tl.constexpr, LENGTH: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """y = gate * (alpha * sigmoid(z - sink) * o + beta * u) for a segment, a slice of columns, the heads of a kv head.

    The heads come in CHUNKS chunks of CHUNK. With KEEP_OUT a sink also rewrites o to o' in place (the backward needs
    it). lse becomes what the stock backward must see: z' = logaddexp(z, sink), less log |row factor| where the factor
    (alpha, headwise gate) is folded into it.
    """
    SLICES: tl.constexpr = D // SLICE
    part, segment = tl.program_id(0) % SLICES, tl.program_id(0) // SLICES
    bh = tl.program_id(1).to(tl.int64)
    b, kv_head = bh // kv_heads, bh % kv_heads
    heads = kv_heads * CHUNKS * CHUNK
    o_d = part * SLICE + tl.arange(0, SLICE)
    if SLIDES:
        # In tiles and segments of the keys, from the first one on: where the program begins, and the windows of its
        # first tile's rows.
        TILES: tl.constexpr = LENGTH // T
        p_sums += bh * segments * TILES * D
        own, back = n_older + segment, window // T
        far = tl.cdiv(back, TILES)
        left = (own * TILES + 1 - back + far * TILES) // TILES - far
        b_before = tl.zeros([SLICE], tl.float32)
        b_between = _sum_of_segments(p_sums, tl.maximum(left + 2, 0), own, o_d, TILES, D, 16)
        b_next = _sum_of_segments(p_sums, tl.maximum(left + 1, 0), tl.minimum(left + 2, own), o_d, TILES, D, 1)
    elif SUMS == RUNNING or SUMS == WHOLE:
        start = 0
        if RESTARTS:
            # The segment that its document begins in.
            own = _first_slot(p_first, b, older + segment * LENGTH, older + queries)
            start = (own - older + n_older * LENGTH) // LENGTH
        b_before = _sum_before(
            p_sums, bh, n_older + segment, start, segments, blocks, block_segments, o_d, SUMS, D, BLOCKS
        )
    if SUMS == WHOLE:
        b_u = b_before[None, :]
        tl.store(p_before + bh * D + o_d, b_before, mask=(o_d < D) & (segment == 0))
    for tile in range(segment * (LENGTH // T), tl.minimum((segment + 1) * (LENGTH // T), tiles)):
        o_t = tile * T + tl.arange(0, T)
        m_t = o_t < queries
        m_td = m_t[:, None] & (o_d < HEAD_DIM)[None, :]
        o_td = o_t[:, None].to(tl.int64)
        if SUMS == RUNNING:
            p_slot = p_v + b * stride_vb + kv_head * stride_vh + (older + o_td) * stride_vt + o_d[None, :]
            b_v = tl.load(p_slot, mask=m_td & (older + o_td >= 0), other=0.0)
        if SLIDES:
            p_values, m_d = p_v + b * stride_vb + kv_head * stride_vh, (o_d < HEAD_DIM)[None, :]
            b_old = _first_seen(p_values, older + o_t, m_d, window, stride_vt, o_d, T)
            # The first whole tile in the windows of all rows.
            whole = own * TILES + (tile - segment * TILES) + 1 - back
            b_base = tl.load(p_sums + whole * D + o_d, mask=(o_d < D) & (whole >= 0), other=0.0)
            if UNEVEN:
                o_odd = older + (tile + 1) * T - window + tl.arange(0, T)
                m_odd = ((o_odd < older + (tile + 1) * T - back * T) & (o_odd >= 0))[:, None] & m_d
                p_odd = p_values + o_odd[:, None].to(tl.int64) * stride_vt + o_d[None, :]
                b_base += tl.sum(tl.load(p_odd, mask=m_odd, other=0.0).to(tl.float32), 0)
            b_base += b_between + b_before
            b_base += tl.where((whole + far * TILES) // TILES - far == left, b_next, 0.0)
            tl.store(p_before + (bh * tiles + tile) * D + o_d, b_base)
        elif SUMS == RUNNING:
            tl.store(p_before + (bh * tiles + tile) * D + o_d, b_before)
        if RESTARTS:
            b_first = _first_slot(p_first, b, older + o_t, older + queries)
            next_first = _first_slot(p_first, b, older + (tile + 1) * T, older + queries)
        if SUMS == TABLE:
            b_u = tl.load(p_before + (bh * queries + o_td) * HEAD_DIM + o_d[None, :], mask=m_td, other=0.0)
        for chunk in range(CHUNKS):
            b_outs, b_zs, b_sinks, b_alphas, b_betas, b_gates = (), (), (), (), (), ()
            for i in tl.static_range(CHUNK):
                h = (kv_head * CHUNKS + chunk) * CHUNK + i
                o_row = (b * heads + h) * queries + o_t
                p_out = p_o + b * stride_ob + h * stride_oh + o_td * stride_ot + o_d[None, :]
                b_outs = b_outs + (tl.load(p_out, mask=m_td, other=0.0),)
                b_zs = b_zs + (tl.load(p_z + o_row, mask=m_t, other=0.0),)
                if SINK == LEARNED_SINK:
                    p_s = p_sink + b * stride_sb + h * stride_sh + o_t.to(tl.int64) * stride_st
                    b_sinks = b_sinks + (tl.load(p_s, mask=m_t, other=0.0).to(tl.float32),)
                if HAS_ALPHA:
                    b_alphas = b_alphas + (tl.load(p_alpha + o_row, mask=m_t, other=0.0).to(tl.float32),)
                if SUMS != NO_SUMS:
                    b_betas = b_betas + (tl.load(p_beta + o_row, mask=m_t, other=0.0).to(tl.float32),)
                if GATE == HEADWISE:
                    p_g = p_gate + b * stride_gb + h * stride_gh + o_t.to(tl.int64) * stride_gt
                    b_gates = b_gates + (tl.load(p_g, mask=m_t, other=0.0),)
                if GATE == ELEMENTWISE:
                    p_g = p_gate + b * stride_gb + h * stride_gh + o_td * stride_gt + o_d[None, :]
                    b_gates = b_gates + (tl.load(p_g, mask=m_td, other=0.0),)
            if RESTARTS:
                b_u = _running_sums(b_v, b_before, b_first, older + o_t, older + tile * T, o_d)
            elif SLIDES:
                b_u = _sliding_sums(b_v, b_old, b_base)
            elif SUMS == RUNNING:
                b_u = tl.cumsum(b_v.to(tl.float32), 0) + b_before[None, :]
            for i in tl.static_range(CHUNK):
                h = (kv_head * CHUNKS + chunk) * CHUNK + i
                b_y, b_lse = b_outs[i].to(tl.float32), b_zs[i]
                if SINK != NO_SINK:
                    if SINK == LEARNED_SINK:
                        b_sink = b_sinks[i]
                    else:
                        b_sink = tl.zeros([T], tl.float32) + constant_sink
                    # A row without keys is 0 already; with a sink of -inf the difference would be NaN.
                    b_kept = tl.where(b_lse == float("-inf"), 0.0, tl.sigmoid(b_lse - b_sink))
                    b_y *= b_kept[:, None]
                    # The larger one outside the logarithm: finite for any finite sink, and right for infinite ones too.
                    b_top = tl.maximum(b_lse, b_sink)
                    b_gap = tl.where(b_lse == b_sink, 0.0, -tl.abs(b_lse - b_sink))
                    b_lse = b_top + tl.log(1.0 + tl.exp(b_gap))
                    if KEEP_OUT:
                        p_out = p_o + b * stride_ob + h * stride_oh + o_td * stride_ot + o_d[None, :]
                        tl.store(p_out, b_y.to(p_o.dtype.element_ty), mask=m_td)
                if HAS_ALPHA:
                    b_y *= b_alphas[i][:, None]
                if SUMS != NO_SUMS:
                    b_y += b_betas[i][:, None] * b_u
                # A row without keys keeps its -inf; a factor of 0 makes the others +inf: no weight in the backward.
                m_seen = b_lse != float("-inf")
                if HAS_ALPHA:
                    b_lse = tl.where(m_seen, b_lse - tl.log(tl.abs(b_alphas[i])), b_lse)
                if GATE == ELEMENTWISE:
                    b_y *= b_gates[i].to(tl.float32)
                if GATE == HEADWISE:
                    b_gate = b_gates[i].to(tl.float32)
                    b_y *= b_gate[:, None]
                    b_lse = tl.where(m_seen, b_lse - tl.log(tl.abs(b_gate)), b_lse)
                tl.store(p_lse + (b * heads + h) * queries + o_t, b_lse, mask=m_t & (part == 0))
                p_out_y = p_y + b * stride_yb + h * stride_yh + o_td * stride_yt + o_d[None, :]
                tl.store(p_out_y, b_y.to(p_y.dtype.element_ty), mask=m_td)
        if RESTARTS:
            b_before = tl.where(next_first <= older + tile * T, b_before, 0.0)
            b_v = tl.where((older + o_t >= next_first)[:, None], b_v, 0.0)
        if SUMS == RUNNING:
            b_before += tl.sum(b_v.to(tl.float32), 0)


@triton.jit
def _sum_before(
    p_sums,
    bh,
    segment,
    start,
    segments,
    blocks,
    block_segments,
    o_d,
    SUMS: tl.constexpr,
    D: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Sum of the values before a key segment, from the segment ``start`` on, or of all of them: its own row, and totals
    of blocks. BLOCKS > blocks."""
    o_n = tl.arange(0, BLOCKS)
    if SUMS == RUNNING:
        o_row = tl.where(o_n == BLOCKS - 1, segment, segments + o_n)
        m_row = ((o_n >= start // block_segments) & (o_n < segment // block_segments)) | (o_n == BLOCKS - 1)
    else:
        o_row = segments + o_n
        m_row = o_n < blocks
    p_row = p_sums + (bh * (segments + blocks) + o_row)[:, None] * D + o_d[None, :]
    return tl.sum(tl.load(p_row, mask=m_row[:, None], other=0.0), 0)


@triton.jit
def scale_rows_kernel(
    p_x, p_scale, scale, p_y, stride_xb, stride_xh, stride_xt, stride_yb, stride_yh, stride_yt, stride_sb,
    heads, rows, tiles, HAS_ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """y = scale * x, with HAS_ROWS also times a number for every row that all heads share; y may be x."""
    # One axis: the others of a grid end at 65535, which decoding may pass.
    tile, bh = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    b, h = bh // heads, bh % heads
    o_t, o_d = tile * T + tl.arange(0, T), tl.arange(0, D)
    m_t = o_t < rows
    m_td = m_t[:, None] & (o_d < HEAD_DIM)[None, :]
    o_td = o_t[:, None].to(tl.int64)
    b_x = tl.load(p_x + b * stride_xb + h * stride_xh + o_td * stride_xt + o_d[None, :], mask=m_td, other=0.0)
    b_y = b_x.to(tl.float32) * scale
    if HAS_ROWS:
        b_y *= tl.load(p_scale + b * stride_sb + o_t, mask=m_t, other=0.0)[:, None]
    p_row = p_y + b * stride_yb + h * stride_yh + o_td * stride_yt
    tl.store(p_row + o_d[None, :], b_y.to(p_y.dtype.element_ty), mask=m_td)


@triton.jit
def negate_rows_kernel(
    p_dy, p_alpha, p_gate, stride_db, stride_dh, stride_dt, stride_gb, stride_gh, stride_gt, heads, queries,
    HAS_ALPHA: tl.constexpr, HAS_GATE: tl.constexpr,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Negate in place the rows of dy whose factor alpha * gate is negative; doing it twice restores them.

    The size of the factor is in the log-sum-exp. Factors of one sign, the usual case, cost a look at the factors.
    """
    block, bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = bh // heads, bh % heads
    p_dy += b * stride_db + h * stride_dh
    if HAS_GATE:
        p_gate += b * stride_gb + h * stride_gh
    if HAS_ALPHA:
        p_alpha += bh * queries
    o_t = block * ROWS + tl.arange(0, ROWS)
    o_gate = o_t.to(tl.int64) * stride_gt
    if tl.min(_row_factor(p_alpha, p_gate, o_t, o_gate, o_t < queries, HAS_ALPHA, HAS_GATE), 0) < 0:
        for start in range(block * ROWS, (block + 1) * ROWS, T):
            _negate_rows(
                p_dy, p_alpha, p_gate, start, queries, stride_dt, stride_gt, HAS_ALPHA, HAS_GATE, HEAD_DIM, D, T
            )


@triton.jit
def _row_factor(p_alpha, p_gate, o_alpha, o_gate, m, HAS_ALPHA: tl.constexpr, HAS_GATE: tl.constexpr):
    b_factor = tl.full(m.shape, 1.0, tl.float32)
    if HAS_ALPHA:
        b_factor *= tl.load(p_alpha + o_alpha, mask=m, other=1.0).to(tl.float32)
    if HAS_GATE:
        b_factor *= tl.load(p_gate + o_gate, mask=m, other=1.0).to(tl.float32)
    return b_factor


@triton.jit
def _negate_rows(
    p_dy, p_alpha, p_gate, start, queries, stride_dt, stride_gt,
    HAS_ALPHA: tl.constexpr, HAS_GATE: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """T rows of one head."""
    o_t, o_d = start + tl.arange(0, T), tl.arange(0, D)
    b_factor = _row_factor(p_alpha, p_gate, o_t, o_t.to(tl.int64) * stride_gt, o_t < queries, HAS_ALPHA, HAS_GATE)
    m_rows = (b_factor < 0)[:, None] & (o_d < HEAD_DIM)[None, :]
    p_rows = p_dy + o_t[:, None].to(tl.int64) * stride_dt + o_d[None, :]
    tl.store(p_rows, -tl.load(p_rows, mask=m_rows, other=0.0), mask=m_rows)


@triton.jit
def epilogue_backward_kernel(
    p_dy, p_o, p_lse, p_v, p_first, p_before, p_sink, p_alpha, p_beta, p_gate,
    p_dsink, p_dalpha, p_dbeta, p_dgate, p_do, p_weighted, p_totals,
    stride_db, stride_dh, stride_dt, stride_ob, stride_oh, stride_ot, stride_vb, stride_vh, stride_vt,
    stride_gb, stride_gh, stride_gt, stride_wb, stride_wh, stride_wt, stride_ab, stride_ah, stride_at,
    stride_sb, stride_sh, stride_st, stride_part,
    kv_heads, queries, tiles, older, segments, window,
    SINK: tl.constexpr, HAS_ALPHA: tl.constexpr, SUMS: tl.constexpr, RESTARTS: tl.constexpr, SLIDES: tl.constexpr,
    GATE: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr,
    SLICE: tl.constexpr, T: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """Gradients of sink, alpha, beta and gate, and what dv wants: beta * gate * dy summed over the heads of a group.

    The size of the row factor is in lse, its sign in the incoming gradient of the attention: dy comes with rows negated
    where the factor is negative; under an elementwise gate that gradient is written here, do = sign * gate * dy.
    Gradients of row statistics are sums over columns: each slice writes its part. With running sums p_weighted gets
    the sum from a row to the end of its segment and p_totals the whole segment's; with a table, or sums that slide,
    p_weighted gets every row by itself.
    """
    SLICES: tl.constexpr = D // SLICE
    part, segment = tl.program_id(0) % SLICES, tl.program_id(0) // SLICES
    bh = tl.program_id(1).to(tl.int64)
    b, kv_head = bh // kv_heads, bh % kv_heads
    heads = kv_heads * CHUNKS * CHUNK
    o_d = part * SLICE + tl.arange(0, SLICE)
    b_total = tl.zeros([SLICE], tl.float32)
    if SUMS == WHOLE:
        b_u = tl.load(p_before + bh * D + o_d)[None, :]
    stop = tl.minimum((segment + 1) * (LENGTH // T), tiles)
    for step in range(stop - segment * (LENGTH // T)):
        tile = stop - 1 - step
        o_t = tile * T + tl.arange(0, T)
        m_t = o_t < queries
        m_td = m_t[:, None] & (o_d < HEAD_DIM)[None, :]
        o_td = o_t[:, None].to(tl.int64)
        if SUMS == RUNNING:
            m_v = m_td & (older + o_td >= 0)
            p_slot = p_v + b * stride_vb + kv_head * stride_vh + (older + o_td) * stride_vt + o_d[None, :]
            b_v = tl.load(p_slot, mask=m_v, other=0.0)
            b_before = tl.load(p_before + (bh * tiles + tile) * D + o_d)
        if SLIDES:
            p_values, m_d = p_v + b * stride_vb + kv_head * stride_vh, (o_d < HEAD_DIM)[None, :]
            b_old = _first_seen(p_values, older + o_t, m_d, window, stride_vt, o_d, T)
        if RESTARTS:
            b_first = _first_slot(p_first, b, older + o_t, older + queries)
            next_first = _first_slot(p_first, b, older + (tile + 1) * T, older + queries)
        if SUMS == TABLE:
            b_u = tl.load(p_before + (bh * queries + o_td) * HEAD_DIM + o_d[None, :], mask=m_td, other=0.0)
        if SUMS != NO_SUMS:
            b_weighted = tl.zeros([T, SLICE], tl.float32)
        for chunk in range(CHUNKS):
            b_dys, b_outs, b_sinks, b_lses, b_alphas, b_betas, b_gates = (), (), (), (), (), (), ()
            for i in tl.static_range(CHUNK):
                h = (kv_head * CHUNKS + chunk) * CHUNK + i
                o_row = (b * heads + h) * queries + o_t
                p_in = p_dy + b * stride_db + h * stride_dh + o_td * stride_dt + o_d[None, :]
                b_dys = b_dys + (tl.load(p_in, mask=m_td, other=0.0),)
                p_out = p_o + b * stride_ob + h * stride_oh + o_td * stride_ot + o_d[None, :]
                b_outs = b_outs + (tl.load(p_out, mask=m_td, other=0.0),)
                if SINK == LEARNED_SINK:
                    p_s = p_sink + b * stride_sb + h * stride_sh + o_t.to(tl.int64) * stride_st
                    b_sinks = b_sinks + (tl.load(p_s, mask=m_t, other=0.0).to(tl.float32),)
                    b_lses = b_lses + (tl.load(p_lse + o_row, mask=m_t, other=0.0),)
                if HAS_ALPHA:
                    b_alphas = b_alphas + (tl.load(p_alpha + o_row, mask=m_t, other=1.0).to(tl.float32),)
                else:
                    b_alphas = b_alphas + (tl.full([T], 1.0, tl.float32),)
                if SUMS != NO_SUMS:
                    b_betas = b_betas + (tl.load(p_beta + o_row, mask=m_t, other=0.0).to(tl.float32),)
                if GATE == HEADWISE:
                    p_g = p_gate + b * stride_gb + h * stride_gh + o_t.to(tl.int64) * stride_gt
                    b_gates = b_gates + (tl.load(p_g, mask=m_t, other=1.0).to(tl.float32),)
                elif GATE == ELEMENTWISE:
                    p_g = p_gate + b * stride_gb + h * stride_gh + o_td * stride_gt + o_d[None, :]
                    b_gates = b_gates + (tl.load(p_g, mask=m_td, other=0.0),)
                else:
                    b_gates = b_gates + (tl.full([T], 1.0, tl.float32),)
            if RESTARTS:
                b_u = _running_sums(b_v, b_before, b_first, older + o_t, older + tile * T, o_d)
            elif SLIDES:
                b_u = _sliding_sums(b_v, b_old, b_before)
            elif SUMS == RUNNING:
                b_u = tl.cumsum(b_v.to(tl.float32), 0) + b_before[None, :]
            for i in tl.static_range(CHUNK):
                h = (kv_head * CHUNKS + chunk) * CHUNK + i
                o_row = (b * heads + h) * queries + o_t
                b_dy, b_o = b_dys[i].to(tl.float32), b_outs[i].to(tl.float32)
                b_alpha = b_alphas[i]
                b_gate = tl.full([T], 1.0, tl.float32) if GATE == ELEMENTWISE else b_gates[i]
                b_sign = tl.where(b_alpha * b_gate < 0, -1.0, 1.0)
                if GATE == ELEMENTWISE:
                    b_inner = b_o * b_alpha[:, None]
                    if SUMS != NO_SUMS:
                        b_inner += b_betas[i][:, None] * b_u
                    p_w = p_dgate + b * stride_wb + h * stride_wh + o_td * stride_wt + o_d[None, :]
                    tl.store(p_w, (b_dy * b_inner).to(p_dgate.dtype.element_ty), mask=m_td)
                    b_dy *= b_gates[i].to(tl.float32)
                    p_a = p_do + b * stride_ab + h * stride_ah + o_td * stride_at + o_d[None, :]
                    tl.store(p_a, (b_sign[:, None] * b_dy).to(p_do.dtype.element_ty), mask=m_td)
                elif HAS_ALPHA or GATE == HEADWISE:
                    b_dy *= b_sign[:, None]
                b_along = tl.sum(b_dy * b_o, 1)
                if SINK == LEARNED_SINK:
                    b_p_sink = tl.exp(tl.where(b_lses[i] == b_sinks[i], 0.0, b_sinks[i] - b_lses[i]))
                    tl.store(p_dsink + part * stride_part + o_row, -b_sign * b_p_sink * b_along, mask=m_t)
                if HAS_ALPHA:
                    tl.store(p_dalpha + part * stride_part + o_row, b_gate * b_along, mask=m_t)
                b_dgate = b_alpha * b_along
                if SUMS != NO_SUMS:
                    b_to_u = tl.sum(b_dy * b_u, 1)
                    tl.store(p_dbeta + part * stride_part + o_row, b_gate * b_to_u, mask=m_t)
                    b_dgate += b_betas[i] * b_to_u
                    b_weighted += (b_betas[i] * b_gate)[:, None] * b_dy
                if GATE == HEADWISE:
                    tl.store(p_dgate + part * stride_part + o_row, b_dgate, mask=m_t)
        if SUMS == RUNNING or SUMS == TABLE:
            p_rows = p_weighted + (bh * queries + o_td) * HEAD_DIM + o_d[None, :]
        if SUMS == TABLE:
            tl.store(p_rows, b_weighted, mask=m_td)
        elif RESTARTS:
            b_next = _first_slot(p_first, b, older + o_t + 1, older + queries)
            b_from = _sums_from_rows(b_weighted, b_total, b_first, b_next, next_first, o_d)
            tl.store(p_rows, b_from.to(p_weighted.dtype.element_ty), mask=m_td)
            b_total = tl.sum(tl.where((o_t == tile * T)[:, None], b_from, 0.0), 0)
        elif SUMS != NO_SUMS:
            b_more = tl.sum(b_weighted, 0)
            if SLIDES:
                tl.store(p_rows, b_weighted.to(p_weighted.dtype.element_ty), mask=m_td)
            elif SUMS == RUNNING:
                # The sum from a row on, as what the rows before it leave of the total: a reversed scan takes twice the
                # shuffles, and shuffles are what this kernel runs out of first.
                b_from = (b_more + b_total)[None, :] - (tl.cumsum(b_weighted, 0) - b_weighted)
                tl.store(p_rows, b_from.to(p_weighted.dtype.element_ty), mask=m_td)
            b_total += b_more
    if SUMS == RUNNING or SUMS == WHOLE:
        tl.store(p_totals + (bh * segments + segment) * D + o_d, b_total)


@triton.jit
def _sum_from_each(
    p_totals, p_sums, p_first, kv, part, segments, b, keys, older, RESTARTS: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, SLICE: tl.constexpr, ROWS: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """sums[kv, c] = the totals of a group of heads from segment c to the last, some columns."""
    o_r, o_d = tl.arange(0, ROWS), part * SLICE + tl.arange(0, SLICE)
    b_after = tl.zeros([SLICE], tl.float32)
    blocks = tl.cdiv(segments, ROWS)
    for step in range(blocks):
        o_row = (blocks - 1 - step) * ROWS + o_r
        o_rd, m_rd = o_row[:, None] * D + o_d[None, :], (o_row < segments)[:, None] & (o_d < D)[None, :]
        b_rows = tl.zeros([ROWS, SLICE], tl.float32)
        for g in range(GROUP):
            b_rows += tl.load(p_totals + (kv * GROUP + g) * segments * D + o_rd, mask=m_rd, other=0.0)
        if RESTARTS:
            # A segment's document may end before the next one, whose sum is of another then.
            o_start = older + o_row * LENGTH
            m_ends = (_first_slot(p_first, b, o_start + LENGTH, keys) > o_start) | (o_row >= segments - 1)
            m_ends = m_ends[:, None] & (o_d >= 0)[None, :]
            m_ended, b_sums = tl.associative_scan((m_ends.to(tl.int32), b_rows), 0, _add_unless_first, reverse=True)
            b_sums += tl.where(m_ended != 0, 0.0, b_after[None, :])
            b_after = tl.sum(tl.where((o_r == 0)[:, None], b_sums, 0.0), 0)
        else:
            b_sums = tl.cumsum(b_rows, 0, reverse=True) + b_after[None, :]
            b_after += tl.sum(b_rows, 0)
        tl.store(p_sums + kv * segments * D + o_rd, b_sums, mask=m_rd)


@triton.jit
def totals_from_kernel(
    p_totals, p_sums, p_first, segments, kv_heads, keys, older, RESTARTS: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, SLICE: tl.constexpr, ROWS: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    kv, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    _sum_from_each(
        p_totals, p_sums, p_first, kv, part, segments, kv // kv_heads, keys, older, RESTARTS, GROUP, D, SLICE, ROWS,
        LENGTH,
    )  # fmt: skip


@triton.jit
def zeros_and_totals_kernel(
    p_zeros, numbers, p_totals, segments, sums,
    D: tl.constexpr, SLICE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Zeros to add to, and beside that the totals from each segment on, in place: by themselves a launch that waits."""
    program = tl.program_id(0)
    if program < sums:
        kv, part = (program // (D // SLICE)).to(tl.int64), program % (D // SLICE)
        _sum_from_each(p_totals, p_totals, None, kv, part, segments, 0, 0, 0, False, 1, D, SLICE, ROWS, 1)
    else:
        o = (program - sums).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        tl.store(p_zeros + o, tl.zeros([BLOCK], tl.float32), mask=o < numbers)


@triton.jit
def add_seen_by_kernel(
    p_dv, p_weighted, p_from, p_first, p_dy, p_alpha, p_gate,
    stride_nb, stride_nh, stride_nt, stride_db, stride_dh, stride_dt, stride_gb, stride_gh, stride_gt,
    kv_heads, queries, older, segments,
    RESTARTS: tl.constexpr, HAS_ALPHA: tl.constexpr, HAS_GATE: tl.constexpr, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, T: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """dv of a query's slot += the weighted sum of the queries from its own on: in its segment, and after that.

    On the way the rows of dy that were negated for the attention's backward are restored.
    """
    tile, bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, kv_head = bh // kv_heads, bh % kv_heads
    o_t, o_d = tile * T + tl.arange(0, T), tl.arange(0, D)
    o_td = o_t[:, None].to(tl.int64)
    m_td = (o_t < queries)[:, None] & (o_d < HEAD_DIM)[None, :]
    m_v = m_td & (older + o_td >= 0)
    b_weighted = tl.load(p_weighted + (bh * queries + o_td) * HEAD_DIM + o_d[None, :], mask=m_td, other=0.0)
    p_slot = p_dv + b * stride_nb + kv_head * stride_nh + (older + o_td) * stride_nt + o_d[None, :]
    b_dv = tl.load(p_slot, mask=m_v, other=0.0)
    after = tile * T // LENGTH + 1
    b_after = tl.load(p_from + (bh * segments + after) * D + o_d, mask=(o_d < HEAD_DIM) & (after < segments), other=0.0)
    if HAS_ALPHA or HAS_GATE:
        if HAS_GATE:
            p_gate += b * stride_gb + kv_head * GROUP * stride_gh
        if HAS_ALPHA:
            p_alpha += bh * GROUP * queries
        # All heads of the group at once: a power of two of them.
        o_h = tl.arange(0, triton.next_power_of_2(GROUP))[:, None]
        m_ht = (o_h < GROUP) & (o_t < queries)[None, :]
        o_alpha, o_gate = o_h * queries + o_t[None, :], o_h * stride_gh + o_t[None, :].to(tl.int64) * stride_gt
        b_factor = _row_factor(p_alpha, p_gate, o_alpha, o_gate, m_ht, HAS_ALPHA, HAS_GATE)
        has_negative = tl.min(tl.min(b_factor, 1), 0) < 0
    b_after = b_after[None, :]
    if RESTARTS:
        # What comes after the segment is of the document that the next one begins in.
        b_first = _first_slot(p_first, b, older + o_t, older + queries)
        next_first = _first_slot(p_first, b, older + after * LENGTH, older + queries)
        b_after = tl.where((b_first == next_first)[:, None], b_after, 0.0)
    b_sum = b_dv.to(tl.float32) + (b_weighted.to(tl.float32) + b_after)
    tl.store(p_slot, b_sum.to(p_dv.dtype.element_ty), mask=m_v)
    if HAS_ALPHA or HAS_GATE:
        if has_negative:
            p_dy += b * stride_db + kv_head * GROUP * stride_dh
            for _ in range(GROUP):
                _negate_rows(
                    p_dy, p_alpha, p_gate, tile * T, queries, stride_dt, stride_gt, HAS_ALPHA, HAS_GATE, HEAD_DIM, D, T
                )
                p_dy += stride_dh
                if HAS_GATE:
                    p_gate += stride_gh
                if HAS_ALPHA:
                    p_alpha += queries


@triton.jit
def add_window_kernel(
    p_dv, p_weighted, p_totals, stride_nb, stride_nh, stride_nt, kv_heads, keys, queries, older, n_older, segments,
    window, UNEVEN: tl.constexpr,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, SLICE: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """dv of a key += the weighted rows of the ``window`` queries from its slot on; some columns of a segment."""
    SLICES: tl.constexpr = D // SLICE
    part, segment = tl.program_id(0) % SLICES, tl.program_id(0) // SLICES
    bh = tl.program_id(1).to(tl.int64)
    b, kv_head = bh // kv_heads, bh % kv_heads
    o_d, o_r = part * SLICE + tl.arange(0, SLICE), tl.arange(0, LENGTH)
    m_d = (o_d < HEAD_DIM)[None, :]
    # Queries that stand where the segment's slots are.
    first = (segment - n_older) * LENGTH
    o_slot = older + first + o_r
    m_slot = ((o_slot >= 0) & (o_slot < keys))[:, None] & m_d
    p_slot = p_dv + b * stride_nb + kv_head * stride_nh + o_slot[:, None].to(tl.int64) * stride_nt + o_d[None, :]
    b_dv = tl.load(p_slot, mask=m_slot, other=0.0)
    b_own = _weighted_rows(p_weighted, bh, first + o_r, queries, m_d, o_d, HEAD_DIM)
    # A key is seen by the queries of the window's end that the keys before it are not seen by.
    o_end = tl.where(o_r > 0, first + window - 1 + o_r, -1)
    b_end = _weighted_rows(p_weighted, bh, o_end, queries, m_d, o_d, HEAD_DIM)
    whole = window // LENGTH
    p_totals += bh * segments * D
    start, stop = tl.maximum(segment - n_older + 1, 0), tl.minimum(segment - n_older + whole, segments)
    b_all = _sum_of_segments(p_totals, start, stop, o_d, 1, D, 16)
    if UNEVEN:
        o_odd = first + whole * LENGTH + o_r
        o_odd = tl.where(o_odd < first + window, o_odd, -1)
        b_all += tl.sum(_weighted_rows(p_weighted, bh, o_odd, queries, m_d, o_d, HEAD_DIM), 0)
    b_sum = tl.cumsum(b_own, 0, reverse=True) + tl.cumsum(b_end, 0) + b_all[None, :]
    tl.store(p_slot, (b_dv.to(tl.float32) + b_sum).to(p_dv.dtype.element_ty), mask=m_slot)


@triton.jit
def _weighted_rows(p_weighted, bh, o_t, queries, m_d, o_d, HEAD_DIM: tl.constexpr):
    m_t = (o_t >= 0) & (o_t < queries)
    p_rows = p_weighted + (bh * queries + o_t[:, None].to(tl.int64)) * HEAD_DIM + o_d[None, :]
    return tl.load(p_rows, mask=m_t[:, None] & m_d, other=0.0).to(tl.float32)
