"""Triton kernels of the fused epilogue: stages 2 to 4 around any attention that returns (o, z).

Legend. p_ pointer, b_ block of values, o_ offsets, m_ mask. T tokens of a tile, D head dim padded to a power of two.

Sums over tokens. Tiles are anchored at the queries: tile c of the keys covers slots from first + c*T, first = older -
n_older*T <= 0, so query tile r and key tile n_older + r cover the same slots. A small kernel prepares the sum of the
values before each tile, as a sum within its segment of tiles and a total per segment; a tile adds its own running sum.
The backward is the mirror image: a tile adds its own part to dv and leaves its total, a small kernel then adds to every
tile the totals of those after it.
"""

import triton
import triton.language as tl

NO_SINK: tl.constexpr = tl.constexpr(0)
CONSTANT_SINK: tl.constexpr = tl.constexpr(1)
LEARNED_SINK: tl.constexpr = tl.constexpr(2)
NO_GATE: tl.constexpr = tl.constexpr(0)
HEADWISE: tl.constexpr = tl.constexpr(1)
ELEMENTWISE: tl.constexpr = tl.constexpr(2)
# Where the sums u of visible values come from: nowhere, a running sum under a causal mask, one sum for all queries, or a
# table with a row per query.
NO_SUMS: tl.constexpr = tl.constexpr(0)
RUNNING: tl.constexpr = tl.constexpr(1)
WHOLE: tl.constexpr = tl.constexpr(2)
TABLE: tl.constexpr = tl.constexpr(3)


@triton.jit
def value_prefix_kernel(
    p_v, p_sums, stride_vb, stride_vh, stride_vt, kv_heads, keys, first, tiles, segments,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, SLICE: tl.constexpr, T: tl.constexpr, SEGMENT: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """sums[bh, c] = sum of the values before key tile c within its segment, sums[bh, tiles + s] = total of segment s.

    One program walks down a slice of the columns of one segment, so the sum never leaves its registers.
    """
    SLICES: tl.constexpr = D // SLICE
    bh = (tl.program_id(0) // SLICES).to(tl.int64)
    segment = tl.program_id(1)
    o_d = (tl.program_id(0) % SLICES) * SLICE + tl.arange(0, SLICE)
    p_v += (bh // kv_heads) * stride_vb + (bh % kv_heads) * stride_vh
    p_sums += bh * (tiles + segments) * D + o_d
    b_sum = tl.zeros([SLICE], tl.float32)
    for tile in tl.range(segment * SEGMENT, tl.minimum((segment + 1) * SEGMENT, tiles), num_stages=STAGES):
        o_t = first + tile * T + tl.arange(0, T)
        m_v = ((o_t >= 0) & (o_t < keys))[:, None] & (o_d < HEAD_DIM)[None, :]
        # [T, SLICE]
        b_v = tl.load(p_v + o_t[:, None].to(tl.int64) * stride_vt + o_d[None, :], mask=m_v, other=0.0)
        tl.store(p_sums + tile * D, b_sum)
        b_sum += tl.sum(b_v.to(tl.float32), 0)
    tl.store(p_sums + (tiles + segment) * D, b_sum)


@triton.jit
def _sum_rows(p_x, start, stop, D: tl.constexpr):
    """Sum of rows [start, stop) of an fp32 matrix of D columns, always in the same order."""
    o_d, b_sum = tl.arange(0, D), tl.zeros([D], tl.float32)
    for row in range(start, stop, 16):
        o_r = row + tl.arange(0, 16)
        b_sum += tl.sum(tl.load(p_x + o_r[:, None] * D + o_d[None, :], mask=(o_r < stop)[:, None], other=0.0), 0)
    return b_sum


@triton.jit
def _values_before(p_sums, tile, n_older, tiles, segments, SUMS: tl.constexpr, D: tl.constexpr, SEGMENT: tl.constexpr):
    """Sum of the values before a tile of queries, or of all values, fp32 [D]."""
    if SUMS == RUNNING:
        b_before = _sum_rows(p_sums + tiles * D, 0, (n_older + tile) // SEGMENT, D)
        return b_before + tl.load(p_sums + (n_older + tile) * D + tl.arange(0, D))
    else:
        return _sum_rows(p_sums + tiles * D, 0, segments, D)


@triton.jit
def _visible_values(
    p_v, p_sums, bh, o_t, m_td, stride_vt, queries, older, tile, n_older, tiles, segments,
    SUMS: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr, T: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    """u of a tile of queries, fp32 [T, D]; p_v points at the values of the kv head."""
    o_d, o_td = tl.arange(0, D), o_t[:, None].to(tl.int64)
    if SUMS == TABLE:
        return tl.load(p_sums + (bh * queries + o_td) * HEAD_DIM + o_d[None, :], mask=m_td, other=0.0)
    else:
        p_sums += bh * (tiles + segments) * D
        b_before = _values_before(p_sums, tile, n_older, tiles, segments, SUMS, D, SEGMENT)
        b_u = tl.zeros([T, D], tl.float32)
        if SUMS == RUNNING:
            m_v = m_td & (older + o_td >= 0)
            b_v = tl.load(p_v + (older + o_td) * stride_vt + o_d[None, :], mask=m_v, other=0.0)
            b_u = tl.cumsum(b_v.to(tl.float32), 0)
        return b_u + b_before[None, :]


@triton.jit
def epilogue_kernel(
    p_o, p_z, p_v, p_sums, p_sink, p_alpha, p_beta, p_gate, p_y, p_lse,
    stride_ob, stride_oh, stride_ot, stride_vb, stride_vh, stride_vt,
    stride_gb, stride_gh, stride_gt, stride_yb, stride_yh, stride_yt, stride_sb, stride_sh, stride_st,
    heads, kv_heads, queries, older, n_older, tiles, segments, constant_sink,
    SINK: tl.constexpr, HAS_ALPHA: tl.constexpr, SUMS: tl.constexpr, GATE: tl.constexpr, KEEP_OUT: tl.constexpr,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, T: tl.constexpr, SEGMENT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """y = gate * (alpha * sigmoid(z - sink) * o + beta * u) for one tile of the query heads of one kv head.

    With KEEP_OUT a sink also rewrites o to o' in place (the backward needs it). lse becomes what the stock backward
    must see: z' = logaddexp(z, sink), less log |row factor| where the factor (alpha, headwise gate) is folded into it.
    """
    tile, bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, kv_head = bh // kv_heads, bh % kv_heads
    group = heads // kv_heads
    o_t, o_d = tile * T + tl.arange(0, T), tl.arange(0, D)
    m_t = o_t < queries
    m_td = m_t[:, None] & (o_d < HEAD_DIM)[None, :]
    o_td = o_t[:, None].to(tl.int64)
    if SUMS != NO_SUMS:
        p_v += b * stride_vb + kv_head * stride_vh
        b_u = _visible_values(
            p_v, p_sums, bh, o_t, m_td, stride_vt, queries, older, tile, n_older, tiles, segments,
            SUMS, HEAD_DIM, D, T, SEGMENT,
        )  # fmt: skip
    for g in tl.range(0, group, num_stages=STAGES):
        h = kv_head * group + g
        o_row = (b * heads + h) * queries + o_t
        p_out = p_o + b * stride_ob + h * stride_oh + o_td * stride_ot + o_d[None, :]
        b_y = tl.load(p_out, mask=m_td, other=0.0).to(tl.float32)
        b_lse = tl.load(p_z + o_row, mask=m_t, other=0.0)
        if SINK != NO_SINK:
            if SINK == LEARNED_SINK:
                p_s = p_sink + b * stride_sb + h * stride_sh + o_t * stride_st
                b_sink = tl.load(p_s, mask=m_t, other=0.0).to(tl.float32)
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
                tl.store(p_out, b_y.to(p_o.dtype.element_ty), mask=m_td)
        if HAS_ALPHA:
            b_alpha = tl.load(p_alpha + o_row, mask=m_t, other=0.0).to(tl.float32)
            b_y *= b_alpha[:, None]
        if SUMS != NO_SUMS:
            b_beta = tl.load(p_beta + o_row, mask=m_t, other=0.0).to(tl.float32)
            b_y += b_beta[:, None] * b_u
        if GATE == ELEMENTWISE:
            p_g = p_gate + b * stride_gb + h * stride_gh + o_td * stride_gt + o_d[None, :]
            b_y *= tl.load(p_g, mask=m_td, other=0.0).to(tl.float32)
        else:
            # A row without keys keeps its -inf; a factor of 0 makes the others +inf: no weight in the backward.
            m_seen = b_lse != float("-inf")
            if HAS_ALPHA:
                b_lse = tl.where(m_seen, b_lse - tl.log(tl.abs(b_alpha)), b_lse)
            if GATE == HEADWISE:
                p_g = p_gate + b * stride_gb + h * stride_gh + o_t * stride_gt
                b_gate = tl.load(p_g, mask=m_t, other=0.0).to(tl.float32)
                b_y *= b_gate[:, None]
                b_lse = tl.where(m_seen, b_lse - tl.log(tl.abs(b_gate)), b_lse)
        tl.store(p_lse + o_row, b_lse, mask=m_t)
        p_out_y = p_y + b * stride_yb + h * stride_yh + o_td * stride_yt + o_d[None, :]
        tl.store(p_out_y, b_y.to(p_y.dtype.element_ty), mask=m_td)


@triton.jit
def gated_gradient_kernel(
    p_dy, p_alpha, p_gate, p_do,
    stride_db, stride_dh, stride_dt, stride_gb, stride_gh, stride_gt, stride_ob, stride_oh, stride_ot,
    heads, queries,
    HAS_ALPHA: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """do = alpha * gate * dy, the incoming gradient of the attention under an elementwise gate."""
    tile, bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = bh // heads, bh % heads
    o_t, o_d = tile * T + tl.arange(0, T), tl.arange(0, D)
    m_t = o_t < queries
    m_td = m_t[:, None] & (o_d < HEAD_DIM)[None, :]
    o_td = o_t[:, None].to(tl.int64)
    p_in = p_dy + b * stride_db + h * stride_dh + o_td * stride_dt + o_d[None, :]
    p_g = p_gate + b * stride_gb + h * stride_gh + o_td * stride_gt + o_d[None, :]
    b_do = tl.load(p_in, mask=m_td, other=0.0).to(tl.float32) * tl.load(p_g, mask=m_td, other=0.0).to(tl.float32)
    if HAS_ALPHA:
        b_do *= tl.load(p_alpha + bh * queries + o_t, mask=m_t, other=0.0).to(tl.float32)[:, None]
    p_out = p_do + b * stride_ob + h * stride_oh + o_td * stride_ot + o_d[None, :]
    tl.store(p_out, b_do.to(p_do.dtype.element_ty), mask=m_td)


@triton.jit
def negate_rows_kernel(
    p_dy, p_alpha, p_gate, stride_db, stride_dh, stride_dt, stride_gb, stride_gh, stride_gt, heads, queries,
    HAS_ALPHA: tl.constexpr, HAS_GATE: tl.constexpr,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Negate in place the rows of dy whose factor alpha * gate is negative; the epilogue's backward restores them.

    The size of the factor is in the log-sum-exp. Factors of one sign, the usual case, cost a look at the factors.
    """
    block, bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = bh // heads, bh % heads
    p_dy += b * stride_db + h * stride_dh
    if HAS_GATE:
        p_gate += b * stride_gb + h * stride_gh
    if HAS_ALPHA:
        p_alpha += bh * queries
    o_d = tl.arange(0, D)
    if _negative(p_alpha, p_gate, block * ROWS, queries, stride_gt, HAS_ALPHA, HAS_GATE, ROWS):
        for start in range(block * ROWS, (block + 1) * ROWS, T):
            if _negative(p_alpha, p_gate, start, queries, stride_gt, HAS_ALPHA, HAS_GATE, T):
                o_t = start + tl.arange(0, T)
                b_factor = _row_factor(p_alpha, p_gate, o_t, queries, stride_gt, HAS_ALPHA, HAS_GATE, T)
                m_rows = (b_factor < 0)[:, None] & (o_d < HEAD_DIM)[None, :]
                p_rows = p_dy + o_t[:, None].to(tl.int64) * stride_dt + o_d[None, :]
                tl.store(p_rows, -tl.load(p_rows, mask=m_rows, other=0.0), mask=m_rows)


@triton.jit
def _row_factor(
    p_alpha, p_gate, o_t, queries, stride_gt, HAS_ALPHA: tl.constexpr, HAS_GATE: tl.constexpr, N: tl.constexpr
):
    b_factor = tl.full([N], 1.0, tl.float32)
    if HAS_ALPHA:
        b_factor *= tl.load(p_alpha + o_t, mask=o_t < queries, other=1.0).to(tl.float32)
    if HAS_GATE:
        b_factor *= tl.load(p_gate + o_t * stride_gt, mask=o_t < queries, other=1.0).to(tl.float32)
    return b_factor


@triton.jit
def _negative(
    p_alpha, p_gate, start, queries, stride_gt, HAS_ALPHA: tl.constexpr, HAS_GATE: tl.constexpr, N: tl.constexpr
):
    """Is any row factor of these N rows negative?"""
    o_t = start + tl.arange(0, N)
    return tl.min(_row_factor(p_alpha, p_gate, o_t, queries, stride_gt, HAS_ALPHA, HAS_GATE, N), 0) < 0


@triton.jit
def _high_and_low(b_x, DTYPE: tl.constexpr):
    """An fp32 vector [N] as the first two of 16 columns [N, 16]: its DTYPE value and what that leaves over."""
    b_high = b_x.to(DTYPE)
    b_low = (b_x - b_high.to(tl.float32)).to(DTYPE)
    o_c = tl.arange(0, 16)[None, :]
    return tl.where(o_c == 0, b_high[:, None], tl.where(o_c == 1, b_low[:, None], 0.0)).to(DTYPE)


@triton.jit
def row_gradients_kernel(
    p_dy, p_o, p_lse, p_v, p_sums, p_sink, p_alpha, p_beta, p_gate,
    p_dsink, p_dalpha, p_dbeta, p_dgate, p_dv, p_totals,
    stride_db, stride_dh, stride_dt, stride_ob, stride_oh, stride_ot, stride_vb, stride_vh, stride_vt,
    stride_gb, stride_gh, stride_gt, stride_nb, stride_nh, stride_nt, stride_sb, stride_sh, stride_st,
    heads, kv_heads, queries, older, n_older, tiles, segments, query_tiles,
    SINK: tl.constexpr, HAS_ALPHA: tl.constexpr, SUMS: tl.constexpr, HAS_GATE: tl.constexpr,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, T: tl.constexpr, SEGMENT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of sink, alpha, beta and a headwise gate, and a tile's own part of dv: sums of beta * gate * dy.

    All row gradients follow from <dy, o'> and <dy, u>. These are products of tiles that lie in shared memory, so the
    tensor cores do them and no tile passes through registers: the diagonal of dy o'^T, and the lower triangle of
    dy v^T plus dy times the sum of earlier values. dv gets a weighted triangle times dy.
    """
    # fp16 operands keep their precision at this size of beta, and prefix sums their range.
    SHIFT: tl.constexpr = 64.0
    DTYPE: tl.constexpr = p_dy.dtype.element_ty
    tile, bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, kv_head = bh // kv_heads, bh % kv_heads
    group = heads // kv_heads
    o_i, o_d = tl.arange(0, T), tl.arange(0, D)
    o_t = tile * T + o_i
    m_t = o_t < queries
    m_td = m_t[:, None] & (o_d < HEAD_DIM)[None, :]
    o_td = o_t[:, None].to(tl.int64)
    if SUMS != NO_SUMS:
        p_sums += bh * (tiles + segments) * D
        b_before = _values_before(p_sums, tile, n_older, tiles, segments, SUMS, D, SEGMENT)
        b_before = _high_and_low(b_before / SHIFT, DTYPE)
        b_total = tl.zeros([16, D], tl.float32)
    if SUMS == RUNNING:
        p_v += b * stride_vb + kv_head * stride_vh
        m_v = m_td & (older + o_td >= 0)
        b_v = tl.load(p_v + (older + o_td) * stride_vt + o_d[None, :], mask=m_v, other=0.0)
        b_own = tl.zeros([T, D], tl.float32)
    for g in tl.range(0, group, num_stages=STAGES):
        h = kv_head * group + g
        o_row = (b * heads + h) * queries + o_t
        p_in = p_dy + b * stride_db + h * stride_dh + o_td * stride_dt + o_d[None, :]
        p_out = p_o + b * stride_ob + h * stride_oh + o_td * stride_ot + o_d[None, :]
        b_dy = tl.load(p_in, mask=m_td, other=0.0)
        b_o = tl.load(p_out, mask=m_td, other=0.0)
        b_alpha = tl.full([T], 1.0, tl.float32)
        b_gate = tl.full([T], 1.0, tl.float32)
        if HAS_ALPHA:
            b_alpha = tl.load(p_alpha + o_row, mask=m_t, other=1.0).to(tl.float32)
        if HAS_GATE:
            p_g = p_gate + b * stride_gb + h * stride_gh + o_t * stride_gt
            b_gate = tl.load(p_g, mask=m_t, other=1.0).to(tl.float32)
        # The size of the row factor is in lse; where it is negative, dy came negated and goes back as it was.
        b_sign = tl.where(b_alpha * b_gate < 0, -1.0, 1.0)
        if HAS_ALPHA or HAS_GATE:
            tl.store(p_in, -b_dy, mask=m_td & (b_sign < 0)[:, None])
        b_products = tl.dot(b_dy, tl.trans(b_o), input_precision="ieee")
        b_along = b_sign * tl.sum(tl.where(o_i[:, None] == o_i[None, :], b_products, 0.0), 1)
        if SINK == LEARNED_SINK:
            p_s = p_sink + b * stride_sb + h * stride_sh + o_t * stride_st
            b_sink = tl.load(p_s, mask=m_t, other=0.0).to(tl.float32)
            b_lse = tl.load(p_lse + o_row, mask=m_t, other=0.0)
            # The sink's probability times |row factor|.
            b_p_sink = tl.exp(tl.where(b_lse == b_sink, 0.0, b_sink - b_lse))
            tl.store(p_dsink + o_row, -b_sign * b_p_sink * b_along, mask=m_t)
        b_dgate = b_alpha * b_along
        if HAS_ALPHA:
            tl.store(p_dalpha + o_row, b_gate * b_along, mask=m_t)
        if SUMS != NO_SUMS:
            b_beta = tl.load(p_beta + o_row, mask=m_t, other=0.0).to(tl.float32)
            b_to_u = SHIFT * tl.sum(tl.dot(b_dy, b_before, input_precision="ieee"), 1)
            if SUMS == RUNNING:
                b_products = tl.dot(b_dy, tl.trans(b_v), input_precision="ieee")
                b_to_u += tl.sum(tl.where(o_i[:, None] >= o_i[None, :], b_products, 0.0), 1)
            b_to_u *= b_sign
            tl.store(p_dbeta + o_row, b_gate * b_to_u, mask=m_t)
            b_dgate += b_beta * b_to_u
            b_weight = SHIFT * b_beta * b_gate * b_sign
            b_total = tl.dot(tl.trans(_high_and_low(b_weight, DTYPE)), b_dy, b_total, input_precision="ieee")
            if SUMS == RUNNING:
                b_triangle = tl.where(o_i[:, None] <= o_i[None, :], b_weight[None, :], 0.0).to(DTYPE)
                b_own = tl.dot(b_triangle, b_dy, b_own, input_precision="ieee")
        if HAS_GATE:
            tl.store(p_dgate + o_row, b_dgate.to(p_dgate.dtype.element_ty), mask=m_t)
    if SUMS == RUNNING:
        p_slot = p_dv + b * stride_nb + kv_head * stride_nh + (older + o_td) * stride_nt + o_d[None, :]
        b_dv = tl.load(p_slot, mask=m_v, other=0.0).to(tl.float32) + b_own / SHIFT
        tl.store(p_slot, b_dv.to(p_dv.dtype.element_ty), mask=m_v)
    if SUMS != NO_SUMS:
        tl.store(p_totals + (bh * query_tiles + tile) * D + o_d, tl.sum(b_total, 0) / SHIFT)


@triton.jit
def row_gradients_in_registers_kernel(
    p_dy, p_o, p_lse, p_v, p_sums, p_sink, p_alpha, p_beta, p_gate,
    p_dsink, p_dalpha, p_dbeta, p_dgate, p_dv, p_totals,
    stride_db, stride_dh, stride_dt, stride_ob, stride_oh, stride_ot, stride_vb, stride_vh, stride_vt,
    stride_gb, stride_gh, stride_gt, stride_nb, stride_nh, stride_nt, stride_sb, stride_sh, stride_st,
    stride_wb, stride_wh, stride_wt,
    heads, kv_heads, queries, older, n_older, tiles, segments, query_tiles,
    SINK: tl.constexpr, HAS_ALPHA: tl.constexpr, SUMS: tl.constexpr, GATE: tl.constexpr,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, T: tl.constexpr, SEGMENT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The same for what needs whole tiles in registers: an elementwise gate, or u from a table.

    With a table the weighted rows of dy go to p_totals, fp32 [queries, HEAD_DIM] per kv head, and dv stays as it is.
    """
    tile, bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, kv_head = bh // kv_heads, bh % kv_heads
    group = heads // kv_heads
    o_t, o_d = tile * T + tl.arange(0, T), tl.arange(0, D)
    m_t = o_t < queries
    m_td = m_t[:, None] & (o_d < HEAD_DIM)[None, :]
    o_td = o_t[:, None].to(tl.int64)
    if SUMS != NO_SUMS:
        p_v += b * stride_vb + kv_head * stride_vh
        b_u = _visible_values(
            p_v, p_sums, bh, o_t, m_td, stride_vt, queries, older, tile, n_older, tiles, segments,
            SUMS, HEAD_DIM, D, T, SEGMENT,
        )  # fmt: skip
        b_own = tl.zeros([T, D], tl.float32)
    for g in tl.range(0, group, num_stages=STAGES):
        h = kv_head * group + g
        o_row = (b * heads + h) * queries + o_t
        p_in = p_dy + b * stride_db + h * stride_dh + o_td * stride_dt + o_d[None, :]
        p_out = p_o + b * stride_ob + h * stride_oh + o_td * stride_ot + o_d[None, :]
        b_dy = tl.load(p_in, mask=m_td, other=0.0).to(tl.float32)
        b_o = tl.load(p_out, mask=m_td, other=0.0).to(tl.float32)
        b_alpha = tl.full([T], 1.0, tl.float32)
        b_gate = tl.full([T], 1.0, tl.float32)
        if HAS_ALPHA:
            b_alpha = tl.load(p_alpha + o_row, mask=m_t, other=1.0).to(tl.float32)
        if SUMS != NO_SUMS:
            b_beta = tl.load(p_beta + o_row, mask=m_t, other=0.0).to(tl.float32)
        if GATE == HEADWISE:
            b_gate = tl.load(p_gate + b * stride_gb + h * stride_gh + o_t * stride_gt, mask=m_t, other=1.0)
            b_gate = b_gate.to(tl.float32)
        if GATE == ELEMENTWISE:
            p_g = p_gate + b * stride_gb + h * stride_gh + o_td * stride_gt + o_d[None, :]
            b_columns = tl.load(p_g, mask=m_td, other=0.0).to(tl.float32)
            b_inner = b_o * b_alpha[:, None]
            if SUMS != NO_SUMS:
                b_inner += b_beta[:, None] * b_u
            p_w = p_dgate + b * stride_wb + h * stride_wh + o_td * stride_wt + o_d[None, :]
            tl.store(p_w, (b_dy * b_inner).to(p_dgate.dtype.element_ty), mask=m_td)
            b_dy *= b_columns
            b_factor = b_alpha
        else:
            b_factor = tl.where(b_alpha * b_gate < 0, -1.0, 1.0)
            if HAS_ALPHA or GATE == HEADWISE:
                b_dy *= b_factor[:, None]
                tl.store(p_in, b_dy.to(p_dy.dtype.element_ty), mask=m_td & (b_factor < 0)[:, None])
        b_along = tl.sum(b_dy * b_o, 1)
        if SINK == LEARNED_SINK:
            p_s = p_sink + b * stride_sb + h * stride_sh + o_t * stride_st
            b_sink = tl.load(p_s, mask=m_t, other=0.0).to(tl.float32)
            b_lse = tl.load(p_lse + o_row, mask=m_t, other=0.0)
            b_p_sink = tl.exp(tl.where(b_lse == b_sink, 0.0, b_sink - b_lse))
            tl.store(p_dsink + o_row, -b_factor * b_p_sink * b_along, mask=m_t)
        b_dgate = b_alpha * b_along
        if HAS_ALPHA:
            tl.store(p_dalpha + o_row, b_gate * b_along, mask=m_t)
        if SUMS != NO_SUMS:
            b_to_u = tl.sum(b_dy * b_u, 1)
            tl.store(p_dbeta + o_row, b_gate * b_to_u, mask=m_t)
            b_dgate += b_beta * b_to_u
            b_own += (b_beta * b_gate)[:, None] * b_dy
        if GATE == HEADWISE:
            tl.store(p_dgate + o_row, b_dgate.to(p_dgate.dtype.element_ty), mask=m_t)
    if SUMS == TABLE:
        tl.store(p_totals + (bh * queries + o_td) * HEAD_DIM + o_d[None, :], b_own, mask=m_td)
    elif SUMS != NO_SUMS:
        tl.store(p_totals + (bh * query_tiles + tile) * D + o_d, tl.sum(b_own, 0))
    if SUMS == RUNNING:
        m_v = m_td & (older + o_td >= 0)
        p_slot = p_dv + b * stride_nb + kv_head * stride_nh + (older + o_td) * stride_nt + o_d[None, :]
        b_dv = tl.load(p_slot, mask=m_v, other=0.0).to(tl.float32) + tl.cumsum(b_own, 0, reverse=True)
        tl.store(p_slot, b_dv.to(p_dv.dtype.element_ty), mask=m_v)


@triton.jit
def add_later_totals_kernel(
    p_dv, p_totals, stride_nb, stride_nh, stride_nt, kv_heads, queries, older, query_tiles,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, T: tl.constexpr, SEGMENT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dv of every tile but the last += the totals of all tiles after it; a program walks up a segment of tiles."""
    segment, bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_d = tl.arange(0, D)
    p_dv += (bh // kv_heads) * stride_nb + (bh % kv_heads) * stride_nh
    p_totals += bh * query_tiles * D
    stop = tl.minimum((segment + 1) * SEGMENT, query_tiles - 1)
    b_after = _sum_rows(p_totals, stop, query_tiles, D)
    for step in tl.range(0, stop - segment * SEGMENT, num_stages=STAGES):
        tile = stop - 1 - step
        o_slot = older + tile * T + tl.arange(0, T)
        m_v = ((o_slot >= 0) & (o_slot < older + queries))[:, None] & (o_d < HEAD_DIM)[None, :]
        p_slot = p_dv + o_slot[:, None].to(tl.int64) * stride_nt + o_d[None, :]
        b_dv = tl.load(p_slot, mask=m_v, other=0.0).to(tl.float32) + b_after[None, :]
        tl.store(p_slot, b_dv.to(p_dv.dtype.element_ty), mask=m_v)
        b_after += tl.load(p_totals + tile * D + o_d)
