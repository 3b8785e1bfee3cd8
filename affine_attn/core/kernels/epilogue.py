"""Triton kernels of the fused epilogue: stages 2 to 4 around any attention that returns (o, z).

Legend. p_ pointer, b_ block of values, o_ offsets, m_ mask. T tokens of a tile, D head dim padded to a power of two.
The sums u of visible values of a tile are its own running sums plus the sum of all earlier tiles, which a small kernel
prepares. The backward needs the mirror image, sums over later tiles, of something it computes itself: there programs
publish their tile's sum and read those of later tiles.

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
            b_y *= tl.sigmoid(b_lse - b_sink)[:, None]
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
            if HAS_ALPHA:
                b_lse -= tl.log(tl.abs(b_alpha))
            if GATE == HEADWISE:
                p_g = p_gate + b * stride_gb + h * stride_gh + o_t * stride_gt
                b_gate = tl.load(p_g, mask=m_t, other=0.0).to(tl.float32)
                b_y *= b_gate[:, None]
                b_lse -= tl.log(tl.abs(b_gate))
        tl.store(p_lse + o_row, b_lse, mask=m_t)
        p_out_y = p_y + b * stride_yb + h * stride_yh + o_td * stride_yt + o_d[None, :]
        tl.store(p_out_y, b_y.to(p_y.dtype.element_ty), mask=m_td)


@triton.jit
def prepare_gradient_kernel(
    p_dy, p_alpha, p_gate, p_do,
    stride_db, stride_dh, stride_dt, stride_gb, stride_gh, stride_gt, stride_ob, stride_oh, stride_ot,
    heads, queries,
    HAS_ALPHA: tl.constexpr, GATE: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """The incoming gradient as the stock backward must see it.

    Elementwise gate: do = alpha * gate * dy. Else the size of the row factor is folded into the log-sum-exp and only
    its sign is left: rows with a negative factor are negated in place (p_do is p_dy), others are not even read. Run a
    second time it restores dy exactly.
    """
    tile, bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = bh // heads, bh % heads
    o_t, o_d = tile * T + tl.arange(0, T), tl.arange(0, D)
    m_t = o_t < queries
    m_td = m_t[:, None] & (o_d < HEAD_DIM)[None, :]
    o_td = o_t[:, None].to(tl.int64)
    b_factor = tl.full([T], 1.0, tl.float32)
    if HAS_ALPHA:
        b_factor = tl.load(p_alpha + bh * queries + o_t, mask=m_t, other=1.0).to(tl.float32)
    p_in = p_dy + b * stride_db + h * stride_dh + o_td * stride_dt + o_d[None, :]
    p_out = p_do + b * stride_ob + h * stride_oh + o_td * stride_ot + o_d[None, :]
    if GATE == ELEMENTWISE:
        p_g = p_gate + b * stride_gb + h * stride_gh + o_td * stride_gt + o_d[None, :]
        b_dy = tl.load(p_in, mask=m_td, other=0.0).to(tl.float32) * tl.load(p_g, mask=m_td, other=0.0).to(tl.float32)
        tl.store(p_out, (b_dy * b_factor[:, None]).to(p_do.dtype.element_ty), mask=m_td)
    else:
        if GATE == HEADWISE:
            p_g = p_gate + b * stride_gb + h * stride_gh + o_t * stride_gt
            b_factor *= tl.load(p_g, mask=m_t, other=1.0).to(tl.float32)
        m_negative = m_t & (b_factor < 0)
        if tl.max(m_negative.to(tl.int32), 0) > 0:
            m_rows = m_negative[:, None] & m_td
            tl.store(p_out, -tl.load(p_in, mask=m_rows, other=0.0), mask=m_rows)


@triton.jit
def _missing(p_flag, m_flag):
    """How many of these tiles have not been published yet."""
    b_ready = tl.atomic_add(p_flag, 0, mask=m_flag, sem="acquire")
    return tl.sum(tl.where(m_flag, 1 - b_ready, 0), 0)


@triton.jit
def _add_to_dv(
    b_local, p_dv, p_totals, p_ready, o_slot, m_td, stride_nt, tile, query_tiles,
    D: tl.constexpr, FLAGS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """dv of a tile += b_local [T, D] + the totals of all later tiles; p_* point at this kv head.

    Row 0 of b_local, the sum over the whole tile, is published first. Programs start with the last tile, so the tiles
    waited for are running or done; their totals are added in a fixed order.
    """
    o_d = tl.arange(0, D)
    p_slot = p_dv + o_slot[:, None].to(tl.int64) * stride_nt + o_d[None, :]
    b_dv = tl.load(p_slot, mask=m_td, other=0.0).to(tl.float32) + b_local
    # Every thread's part of the total must be out before the flag is raised.
    tl.debug_barrier()
    tl.atomic_xchg(p_ready + tile, 1, sem="release")
    for c in range(tile + 1, query_tiles, FLAGS):
        o_c = c + tl.arange(0, FLAGS)
        while _missing(p_ready + o_c, o_c < query_tiles) > 0:
            pass
    b_later = tl.zeros([D], tl.float32)
    for c in range(tile + 1, query_tiles, CHUNK):
        o_c = c + tl.arange(0, CHUNK)
        # Written by other programs of this launch: read past the L1 cache.
        p_total = p_totals + o_c[:, None] * D + o_d[None, :]
        b_later += tl.sum(tl.load(p_total, mask=(o_c < query_tiles)[:, None], other=0.0, cache_modifier=".cg"), 0)
    tl.store(p_slot, (b_dv + b_later[None, :]).to(p_dv.dtype.element_ty), mask=m_td)


@triton.jit
def row_gradients_kernel(
    p_dy, p_o, p_lse, p_v, p_prefix, p_sink, p_alpha, p_beta, p_gate,
    p_dv, p_dsink, p_dalpha, p_dbeta, p_dgate, p_totals, p_ready,
    stride_db, stride_dh, stride_dt, stride_ob, stride_oh, stride_ot, stride_vb, stride_vh, stride_vt,
    stride_gb, stride_gh, stride_gt, stride_nb, stride_nh, stride_nt, stride_sb, stride_sh, stride_st,
    batch, heads, kv_heads, queries, older, n_older, tiles, query_tiles,
    SINK: tl.constexpr, HAS_ALPHA: tl.constexpr, HAS_BETA: tl.constexpr, HAS_GATE: tl.constexpr,
    CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr, T: tl.constexpr,
    FLAGS: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """All gradients of the stages where the gate, if any, is one number per row; runs after the stock backward.

    Everything follows from <dy, o'> and <dy, u> of each row, and from R_j = sum over later rows of the tile of
    beta * gate * dy. All three are products of tiles that lie in shared memory, so the tensor cores do them and no tile
    passes through registers: the diagonal of dy o'^T, the lower triangle of dy v^T, and a weighted triangle times dy.
    """
    # fp16 operands keep their precision near this size of beta, and prefix sums their range.
    SHIFT: tl.constexpr = 64.0
    DTYPE: tl.constexpr = p_dy.dtype.element_ty
    pid = tl.program_id(0)
    columns = batch * kv_heads
    tile = query_tiles - 1 - pid // columns
    bh = (pid % columns).to(tl.int64)
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
            b_before = tl.load(p_prefix + (n_older + tile) * D + o_d) * (1.0 / SHIFT)
        else:
            b_before = tl.load(p_prefix + tiles * D + o_d) * (1.0 / SHIFT)
        # The fp32 vector as two columns of a matrix, its high and its low part.
        b_high = b_before.to(DTYPE)
        b_low = (b_before - b_high.to(tl.float32)).to(DTYPE)
        o_c = tl.arange(0, 16)[None, :]
        b_split = tl.where(o_c == 0, b_high[:, None], tl.where(o_c == 1, b_low[:, None], 0.0)).to(DTYPE)
        b_r = tl.zeros([T, D], tl.float32)
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
            b_to_u = SHIFT * tl.sum(tl.dot(b_dy, b_split, input_precision="ieee"), 1)
            if CAUSAL:
                b_products = tl.dot(b_dy, tl.trans(b_v), input_precision="ieee")
                b_to_u += tl.sum(tl.where(o_i[:, None] >= o_i[None, :], b_products, 0.0), 1)
            tl.store(p_dbeta + o_row, b_gate * b_to_u, mask=m_t)
            b_dgate += b_beta * b_to_u
            b_weight = (SHIFT * b_beta * b_gate).to(DTYPE)
            b_weight = tl.where(o_i[:, None] <= o_i[None, :], b_weight[None, :], 0.0).to(DTYPE)
            b_r = tl.dot(b_weight, b_dy, b_r, input_precision="ieee")
        if HAS_GATE:
            tl.store(p_dgate + o_row, b_dgate.to(p_dgate.dtype.element_ty), mask=m_t)
    if HAS_BETA:
        b_r *= 1.0 / SHIFT
        p_totals += bh * query_tiles * D
        tl.store(p_totals + tile * D + o_d, tl.sum(tl.where(o_i[:, None] == 0, b_r, 0.0), 0))
        if CAUSAL:
            p_dv += b * stride_nb + kv_head * stride_nh
            p_ready += bh * query_tiles
            _add_to_dv(b_r, p_dv, p_totals, p_ready, older + o_t, m_td, stride_nt, tile, query_tiles, D, FLAGS, CHUNK)


@triton.jit
def gated_gradients_kernel(
    p_dy, p_o, p_lse, p_v, p_prefix, p_sink, p_alpha, p_beta, p_gate,
    p_dv, p_dsink, p_dalpha, p_dbeta, p_dgate, p_totals, p_ready,
    stride_db, stride_dh, stride_dt, stride_ob, stride_oh, stride_ot, stride_vb, stride_vh, stride_vt,
    stride_gb, stride_gh, stride_gt, stride_wb, stride_wh, stride_wt, stride_nb, stride_nh, stride_nt,
    stride_sb, stride_sh, stride_st,
    batch, heads, kv_heads, queries, older, n_older, tiles, query_tiles,
    SINK: tl.constexpr, HAS_ALPHA: tl.constexpr, HAS_BETA: tl.constexpr,
    CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr, T: tl.constexpr,
    FLAGS: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """All gradients of the stages with an elementwise gate, whose own gradient is a tile."""
    pid = tl.program_id(0)
    columns = batch * kv_heads
    tile = query_tiles - 1 - pid // columns
    bh = (pid % columns).to(tl.int64)
    b, kv_head = bh // kv_heads, bh % kv_heads
    group = heads // kv_heads
    o_i, o_d = tl.arange(0, T), tl.arange(0, D)
    o_t = tile * T + o_i
    m_t = o_t < queries
    m_td = m_t[:, None] & (o_d < HEAD_DIM)[None, :]
    o_td = o_t[:, None].to(tl.int64)
    if HAS_BETA:
        p_v += b * stride_vb + kv_head * stride_vh
        p_prefix += bh * (tiles + 1) * D
        b_u = _visible_values(p_v, p_prefix, older + o_t, m_td, stride_vt, tile, n_older, tiles, CAUSAL, D, T)
        b_du = tl.zeros([T, D], tl.float32)
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
            b_du += b_beta[:, None] * b_g
    if HAS_BETA:
        p_totals += bh * query_tiles * D
        tl.store(p_totals + tile * D + o_d, tl.sum(b_du, 0))
        if CAUSAL:
            p_dv += b * stride_nb + kv_head * stride_nh
            p_ready += bh * query_tiles
            b_r = tl.cumsum(b_du, 0, reverse=True)
            _add_to_dv(b_r, p_dv, p_totals, p_ready, older + o_t, m_td, stride_nt, tile, query_tiles, D, FLAGS, CHUNK)
