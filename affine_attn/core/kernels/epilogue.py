"""Triton kernels of the fused epilogue: stages 2 to 4 around any attention that returns (o, z).

Legend. p_ pointer, b_ block of values, o_ offsets, m_ mask. T tokens of a tile, D head dim padded to a power of two.
The sums u of visible values of a tile are its own running sums plus the sum of all earlier tiles, which a small kernel
prepares. The backward has the mirror image, sums over later tiles, of what its first kernel adds up per tile.

Tiles are anchored at the queries: tile c of the keys covers slots from first + c*T, first = older - n_older*T <= 0, so
query tile r and key tile n_older + r cover the same slots.
"""

import triton
import triton.language as tl

NO_SINK: tl.constexpr = tl.constexpr(0)
CONSTANT_SINK: tl.constexpr = tl.constexpr(1)
LEARNED_SINK: tl.constexpr = tl.constexpr(2)
NO_GATE: tl.constexpr = tl.constexpr(0)
HEADWISE: tl.constexpr = tl.constexpr(1)
ELEMENTWISE: tl.constexpr = tl.constexpr(2)


@triton.jit
def value_prefix_kernel(
    p_v, p_prefix, stride_vb, stride_vh, stride_vt, kv_heads, keys, first, tiles,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, SLICE: tl.constexpr, T: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """prefix[b * kv_heads + h, c, :] = sum of the values before key tile c, fp32; entry ``tiles`` is the whole sum.

    One program walks down a slice of the columns of one kv head, so the sum never leaves its registers.
    """
    bh = tl.program_id(0).to(tl.int64)
    o_d = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    p_v += (bh // kv_heads) * stride_vb + (bh % kv_heads) * stride_vh
    p_prefix += bh * (tiles + 1) * D + o_d
    b_sum = tl.zeros([SLICE], tl.float32)
    for tile in tl.range(0, tiles, num_stages=STAGES):
        o_t = first + tile * T + tl.arange(0, T)
        m_v = ((o_t >= 0) & (o_t < keys))[:, None] & (o_d < HEAD_DIM)[None, :]
        # [T, SLICE]
        b_v = tl.load(p_v + o_t[:, None].to(tl.int64) * stride_vt + o_d[None, :], mask=m_v, other=0.0)
        tl.store(p_prefix + tile * D, b_sum)
        b_sum += tl.sum(b_v.to(tl.float32), 0)
    tl.store(p_prefix + tiles * D, b_sum)


@triton.jit
def _visible_values(
    p_v, p_prefix, o_slot, m_v, stride_vt, tile, n_older, tiles,
    CAUSAL: tl.constexpr, D: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """u of a tile of queries, fp32 [T, D]."""
    o_d = tl.arange(0, D)
    if CAUSAL:
        b_before = tl.load(p_prefix + (n_older + tile) * D + o_d)
        b_v = tl.load(p_v + o_slot[:, None].to(tl.int64) * stride_vt + o_d[None, :], mask=m_v, other=0.0)
        return tl.cumsum(b_v.to(tl.float32), 0) + b_before[None, :]
    else:
        return tl.zeros([T, D], tl.float32) + tl.load(p_prefix + tiles * D + o_d)[None, :]


@triton.jit
def epilogue_kernel(
    p_o, p_z, p_v, p_prefix, p_sink, p_alpha, p_beta, p_gate, p_y, p_lse,
    stride_ob, stride_oh, stride_ot, stride_vb, stride_vh, stride_vt,
    stride_gb, stride_gh, stride_gt, stride_yb, stride_yh, stride_yt, stride_sb, stride_sh, stride_st,
    heads, kv_heads, queries, older, n_older, tiles, constant_sink,
    SINK: tl.constexpr, HAS_ALPHA: tl.constexpr, HAS_BETA: tl.constexpr, GATE: tl.constexpr,
    KEEP_OUT: tl.constexpr, CAUSAL: tl.constexpr,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, T: tl.constexpr, STAGES: tl.constexpr,
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
    if HAS_BETA:
        p_v += b * stride_vb + kv_head * stride_vh
        p_prefix += bh * (tiles + 1) * D
        b_u = _visible_values(p_v, p_prefix, older + o_t, m_td, stride_vt, tile, n_older, tiles, CAUSAL, D, T)
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
        if HAS_BETA:
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
    """Negate in place the rows of dy whose factor alpha * gate is negative; a second run restores them exactly.

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
    p_dy, p_o, p_lse, p_v, p_prefix, p_sink, p_alpha, p_beta, p_gate, p_dsink, p_dalpha, p_dbeta, p_dgate, p_totals,
    stride_db, stride_dh, stride_dt, stride_ob, stride_oh, stride_ot, stride_vb, stride_vh, stride_vt,
    stride_gb, stride_gh, stride_gt, stride_sb, stride_sh, stride_st,
    heads, kv_heads, queries, older, n_older, tiles, query_tiles,
    SINK: tl.constexpr, HAS_ALPHA: tl.constexpr, HAS_BETA: tl.constexpr, HAS_GATE: tl.constexpr,
    CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr, T: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of sink, alpha, beta and a headwise gate, and per tile the sum of beta * gate * dy over rows and heads.

    All follow from <dy, o'> and <dy, u> of each row. These are products of tiles that lie in shared memory, so the
    tensor cores do them and no tile passes through registers: the diagonal of dy o'^T, and the lower triangle of
    dy v^T plus dy times the sum of earlier values.
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
    if HAS_BETA:
        p_prefix += bh * (tiles + 1) * D
        if CAUSAL:
            p_v += b * stride_vb + kv_head * stride_vh
            b_v = tl.load(p_v + (older + o_td) * stride_vt + o_d[None, :], mask=m_td, other=0.0)
            b_before = tl.load(p_prefix + (n_older + tile) * D + o_d)
        else:
            b_before = tl.load(p_prefix + tiles * D + o_d)
        b_before = _high_and_low(b_before / SHIFT, DTYPE)
        b_total = tl.zeros([16, D], tl.float32)
    for g in tl.range(0, group, num_stages=STAGES):
        h = kv_head * group + g
        o_row = (b * heads + h) * queries + o_t
        p_in = p_dy + b * stride_db + h * stride_dh + o_td * stride_dt + o_d[None, :]
        p_out = p_o + b * stride_ob + h * stride_oh + o_td * stride_ot + o_d[None, :]
        b_dy = tl.load(p_in, mask=m_td, other=0.0)
        b_o = tl.load(p_out, mask=m_td, other=0.0)
        b_products = tl.dot(b_dy, tl.trans(b_o), input_precision="ieee")
        b_along = tl.sum(tl.where(o_i[:, None] == o_i[None, :], b_products, 0.0), 1)
        b_alpha = tl.full([T], 1.0, tl.float32)
        b_gate = tl.full([T], 1.0, tl.float32)
        if HAS_ALPHA:
            b_alpha = tl.load(p_alpha + o_row, mask=m_t, other=1.0).to(tl.float32)
        if HAS_GATE:
            p_g = p_gate + b * stride_gb + h * stride_gh + o_t * stride_gt
            b_gate = tl.load(p_g, mask=m_t, other=1.0).to(tl.float32)
        if SINK == LEARNED_SINK:
            p_s = p_sink + b * stride_sb + h * stride_sh + o_t * stride_st
            b_sink = tl.load(p_s, mask=m_t, other=0.0).to(tl.float32)
            b_lse = tl.load(p_lse + o_row, mask=m_t, other=0.0)
            # lse carries -log |row factor|, so this is the sink's probability times |row factor|.
            b_p_sink = tl.exp(tl.where(b_lse == b_sink, 0.0, b_sink - b_lse))
            tl.store(p_dsink + o_row, tl.where(b_alpha * b_gate < 0, b_along, -b_along) * b_p_sink, mask=m_t)
        b_dgate = b_alpha * b_along
        if HAS_ALPHA:
            tl.store(p_dalpha + o_row, b_gate * b_along, mask=m_t)
        if HAS_BETA:
            b_beta = tl.load(p_beta + o_row, mask=m_t, other=0.0).to(tl.float32)
            b_to_u = SHIFT * tl.sum(tl.dot(b_dy, b_before, input_precision="ieee"), 1)
            if CAUSAL:
                b_products = tl.dot(b_dy, tl.trans(b_v), input_precision="ieee")
                b_to_u += tl.sum(tl.where(o_i[:, None] >= o_i[None, :], b_products, 0.0), 1)
            tl.store(p_dbeta + o_row, b_gate * b_to_u, mask=m_t)
            b_dgate += b_beta * b_to_u
            b_weight = tl.trans(_high_and_low(SHIFT * b_beta * b_gate, DTYPE))
            b_total = tl.dot(b_weight, b_dy, b_total, input_precision="ieee")
        if HAS_GATE:
            tl.store(p_dgate + o_row, b_dgate.to(p_dgate.dtype.element_ty), mask=m_t)
    if HAS_BETA:
        tl.store(p_totals + (bh * query_tiles + tile) * D + o_d, tl.sum(b_total, 0) / SHIFT)


@triton.jit
def gated_row_gradients_kernel(
    p_dy, p_o, p_lse, p_v, p_prefix, p_sink, p_alpha, p_beta, p_gate, p_dsink, p_dalpha, p_dbeta, p_dgate, p_totals,
    stride_db, stride_dh, stride_dt, stride_ob, stride_oh, stride_ot, stride_vb, stride_vh, stride_vt,
    stride_gb, stride_gh, stride_gt, stride_wb, stride_wh, stride_wt, stride_sb, stride_sh, stride_st,
    heads, kv_heads, queries, older, n_older, tiles, query_tiles,
    SINK: tl.constexpr, HAS_ALPHA: tl.constexpr, HAS_BETA: tl.constexpr,
    CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr, T: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The same with an elementwise gate, whose gradient dy * (alpha * o' + beta * u) is itself a tile."""
    tile, bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, kv_head = bh // kv_heads, bh % kv_heads
    group = heads // kv_heads
    o_t, o_d = tile * T + tl.arange(0, T), tl.arange(0, D)
    m_t = o_t < queries
    m_td = m_t[:, None] & (o_d < HEAD_DIM)[None, :]
    o_td = o_t[:, None].to(tl.int64)
    if HAS_BETA:
        p_v += b * stride_vb + kv_head * stride_vh
        p_prefix += bh * (tiles + 1) * D
        b_u = _visible_values(p_v, p_prefix, older + o_t, m_td, stride_vt, tile, n_older, tiles, CAUSAL, D, T)
        b_total = tl.zeros([D], tl.float32)
    for g in tl.range(0, group, num_stages=STAGES):
        h = kv_head * group + g
        o_row = (b * heads + h) * queries + o_t
        p_in = p_dy + b * stride_db + h * stride_dh + o_td * stride_dt + o_d[None, :]
        p_out = p_o + b * stride_ob + h * stride_oh + o_td * stride_ot + o_d[None, :]
        p_g = p_gate + b * stride_gb + h * stride_gh + o_td * stride_gt + o_d[None, :]
        b_g = tl.load(p_in, mask=m_td, other=0.0).to(tl.float32)
        b_o = tl.load(p_out, mask=m_td, other=0.0).to(tl.float32)
        b_gate = tl.load(p_g, mask=m_td, other=0.0).to(tl.float32)
        b_inner = b_o
        if HAS_ALPHA:
            b_alpha = tl.load(p_alpha + o_row, mask=m_t, other=0.0).to(tl.float32)
            b_inner *= b_alpha[:, None]
        if HAS_BETA:
            b_beta = tl.load(p_beta + o_row, mask=m_t, other=0.0).to(tl.float32)
            b_inner += b_beta[:, None] * b_u
        p_w = p_dgate + b * stride_wb + h * stride_wh + o_td * stride_wt + o_d[None, :]
        tl.store(p_w, (b_g * b_inner).to(p_dgate.dtype.element_ty), mask=m_td)
        b_g *= b_gate
        b_along = tl.sum(b_g * b_o, 1)
        if HAS_ALPHA:
            tl.store(p_dalpha + o_row, b_along, mask=m_t)
            b_along *= b_alpha
        if SINK == LEARNED_SINK:
            p_s = p_sink + b * stride_sb + h * stride_sh + o_t * stride_st
            b_sink = tl.load(p_s, mask=m_t, other=0.0).to(tl.float32)
            b_lse = tl.load(p_lse + o_row, mask=m_t, other=0.0)
            b_p_sink = tl.exp(tl.where(b_lse == b_sink, 0.0, b_sink - b_lse))
            tl.store(p_dsink + o_row, -b_p_sink * b_along, mask=m_t)
        if HAS_BETA:
            tl.store(p_dbeta + o_row, tl.sum(b_g * b_u, 1), mask=m_t)
            b_total += tl.sum(b_beta[:, None] * b_g, 0)
    if HAS_BETA:
        tl.store(p_totals + (bh * query_tiles + tile) * D + o_d, b_total)


@triton.jit
def value_gradient_kernel(
    p_dy, p_beta, p_gate, p_totals, p_dv,
    stride_db, stride_dh, stride_dt, stride_gb, stride_gh, stride_gt, stride_nb, stride_nh, stride_nt,
    heads, kv_heads, queries, older, query_tiles,
    GATE: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr, T: tl.constexpr,
    CHUNK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dv_j += sum over queries i >= j, and over the heads of the group, of beta_i * gate_i * dy_i (causal only).

    Later tiles enter by their totals, always added in the same order, the tile itself by a weighted triangle times dy.
    """
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
    b_later = tl.zeros([D], tl.float32)
    for c in range(tile + 1, query_tiles, CHUNK):
        o_c = c + tl.arange(0, CHUNK)
        p_total = p_totals + (bh * query_tiles + o_c)[:, None] * D + o_d[None, :]
        b_later += tl.sum(tl.load(p_total, mask=(o_c < query_tiles)[:, None], other=0.0), 0)
    b_sum = tl.zeros([T, D], tl.float32)
    for g in tl.range(0, group, num_stages=STAGES):
        h = kv_head * group + g
        p_in = p_dy + b * stride_db + h * stride_dh + o_td * stride_dt + o_d[None, :]
        b_dy = tl.load(p_in, mask=m_td, other=0.0)
        b_weight = SHIFT * tl.load(p_beta + (b * heads + h) * queries + o_t, mask=m_t, other=0.0).to(tl.float32)
        if GATE == HEADWISE:
            p_g = p_gate + b * stride_gb + h * stride_gh + o_t * stride_gt
            b_weight *= tl.load(p_g, mask=m_t, other=0.0).to(tl.float32)
        if GATE == ELEMENTWISE:
            p_g = p_gate + b * stride_gb + h * stride_gh + o_td * stride_gt + o_d[None, :]
            b_gate = tl.load(p_g, mask=m_td, other=0.0)
            b_dy = (b_dy.to(tl.float32) * b_gate.to(tl.float32)).to(DTYPE)
        b_triangle = tl.where(o_i[:, None] <= o_i[None, :], b_weight[None, :], 0.0).to(DTYPE)
        b_sum = tl.dot(b_triangle, b_dy, b_sum, input_precision="ieee")
    p_slot = p_dv + b * stride_nb + kv_head * stride_nh + (older + o_td) * stride_nt + o_d[None, :]
    b_dv = tl.load(p_slot, mask=m_td, other=0.0).to(tl.float32)
    tl.store(p_slot, (b_dv + b_sum / SHIFT + b_later[None, :]).to(p_dv.dtype.element_ty), mask=m_td)
