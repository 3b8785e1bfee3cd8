"""Triton kernels of the fused epilogue: stages 2 to 4 around any attention that returns (o, z).

Legend. p_ pointer, b_ block of values, o_ offsets, m_ mask. T tokens of a tile, D head dim padded to a power of two.
The sums u of visible values of a tile are its own running sums plus the sum of all earlier tiles, which a small kernel
prepares. The backward needs the mirror image, sums over later tiles, of something it computes itself: there programs
publish their tile's sum and read those of later tiles.

Tiles are anchored at the queries: tile c of the keys covers slots [first + c*T, ...) with first = older - n_older*T <= 0,
so query tile r and key tile n_older + r cover the same slots.
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
def _running_sum(b_x, UPWARD: tl.constexpr, T: tl.constexpr, DTYPE: tl.constexpr):
    """Inclusive sums along the tokens of b_x [T, D], from the first row to each, or from each row to the last.

    A product with a 0/1 triangle: the tensor cores do it in a fraction of the instructions of a scan. A 16-bit DTYPE takes
    an fp32 input as a high and a low part, which keeps 16 bits of it.
    """
    o_t = tl.arange(0, T)
    triangle = (o_t[:, None] <= o_t[None, :]) if UPWARD else (o_t[:, None] >= o_t[None, :])
    if b_x.dtype == DTYPE:
        return tl.dot(triangle.to(DTYPE), b_x, input_precision="ieee")
    b_high = b_x.to(DTYPE)
    b_low = (b_x - b_high.to(tl.float32)).to(DTYPE)
    return tl.dot(triangle.to(DTYPE), b_low, tl.dot(triangle.to(DTYPE), b_high))


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
        return _running_sum(b_v, False, T, b_v.dtype) + b_before[None, :]
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
    HEAD_DIM: tl.constexpr, D: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """y = gate * (alpha * sigmoid(z - sink) * o + beta * u) for one tile of one query head.

    The heads of a group read the same values; the cache serves all but the first of them.

    With KEEP_OUT a sink also rewrites o to o' in place (the backward needs it). lse becomes what the stock backward must
    see: z' = logaddexp(z, sink), less log |row factor| where a row factor (alpha, headwise gate) can be folded into it.
    """
    # Heads of a group are neighbours in the grid, so that they meet their values in the cache.
    h, tile, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    kv_head = h // (heads // kv_heads)
    o_t, o_d = tile * T + tl.arange(0, T), tl.arange(0, D)
    m_t, m_d = o_t < queries, o_d < HEAD_DIM
    m_td = m_t[:, None] & m_d[None, :]
    o_td = o_t[:, None].to(tl.int64)
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
        p_v += b * stride_vb + kv_head * stride_vh
        p_prefix += (b * kv_heads + kv_head) * (tiles + 1) * D
        b_u = _visible_values(p_v, p_prefix, older + o_t, m_td, stride_vt, tile, n_older, tiles, CAUSAL, D, T)
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

    Elementwise gate: do = alpha * gate * dy. Else the size of the row factor is folded into the log-sum-exp and only its
    sign is left: rows with a negative factor are negated in place (p_do is p_dy), others are not even read. The
    backward kernel negates them back, which is exact.
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
def epilogue_backward_kernel(
    p_dy, p_o, p_lse, p_v, p_prefix, p_sink, p_alpha, p_beta, p_gate,
    p_dv, p_dsink, p_dalpha, p_dbeta, p_dgate, p_totals, p_ready,
    stride_db, stride_dh, stride_dt, stride_ob, stride_oh, stride_ot, stride_vb, stride_vh, stride_vt,
    stride_gb, stride_gh, stride_gt, stride_wb, stride_wh, stride_wt, stride_nb, stride_nh, stride_nt,
    stride_sb, stride_sh, stride_st,
    batch, heads, kv_heads, queries, older, n_older, tiles, query_tiles,
    SINK: tl.constexpr, HAS_ALPHA: tl.constexpr, HAS_BETA: tl.constexpr, GATE: tl.constexpr,
    CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr, T: tl.constexpr,
    FLAGS: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dalpha, dbeta, dgate, dsink of a tile, and its share of dv: dv_j += sum over later queries of beta * gate * dy.

    Runs after the stock backward and adds to its dv. Programs start with the last tile; each publishes the sum of its
    own tile, then waits for those of later tiles, which were started before it, and adds them in a fixed order.
    """
    pid = tl.program_id(0)
    columns = batch * kv_heads
    tile = query_tiles - 1 - pid // columns
    bh = (pid % columns).to(tl.int64)
    b, kv_head = bh // kv_heads, bh % kv_heads
    group = heads // kv_heads
    o_t, o_d = tile * T + tl.arange(0, T), tl.arange(0, D)
    m_t, m_d = o_t < queries, o_d < HEAD_DIM
    m_td = m_t[:, None] & m_d[None, :]
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
        b_g = tl.load(p_in, mask=m_td, other=0.0).to(tl.float32)
        b_o = tl.load(p_out, mask=m_td, other=0.0).to(tl.float32)
        # The row factor, whose size the log-sum-exp already carries unless the gate is elementwise.
        b_factor = tl.full([T], 1.0, tl.float32)
        if HAS_ALPHA:
            b_alpha = tl.load(p_alpha + o_row, mask=m_t, other=1.0).to(tl.float32)
            b_factor = b_alpha
        if GATE == HEADWISE:
            b_gate = tl.load(p_gate + b * stride_gb + h * stride_gh + o_t * stride_gt, mask=m_t, other=1.0)
            b_gate = b_gate.to(tl.float32)[:, None]
            b_factor *= tl.sum(b_gate, 1)
        if GATE == ELEMENTWISE:
            p_g = p_gate + b * stride_gb + h * stride_gh + o_td * stride_gt + o_d[None, :]
            b_gate = tl.load(p_g, mask=m_td, other=0.0).to(tl.float32)
        elif HAS_ALPHA or GATE == HEADWISE:
            m_negative = m_t & (b_factor < 0)
            if tl.max(m_negative.to(tl.int32), 0) > 0:
                b_g = tl.where(m_negative[:, None], -b_g, b_g)
                tl.store(p_in, b_g.to(p_dy.dtype.element_ty), mask=m_negative[:, None] & m_td)
        if GATE != NO_GATE:
            b_inner = b_o
            if HAS_ALPHA:
                b_inner = b_alpha[:, None] * b_o
            if HAS_BETA:
                b_inner += tl.load(p_beta + o_row, mask=m_t, other=0.0).to(tl.float32)[:, None] * b_u
            b_dgate = b_g * b_inner
            if GATE == ELEMENTWISE:
                p_w = p_dgate + b * stride_wb + h * stride_wh + o_td * stride_wt + o_d[None, :]
                tl.store(p_w, b_dgate.to(p_dgate.dtype.element_ty), mask=m_td)
            else:
                p_w = p_dgate + b * stride_wb + h * stride_wh + o_t * stride_wt
                tl.store(p_w, tl.sum(b_dgate, 1).to(p_dgate.dtype.element_ty), mask=m_t)
            b_g *= b_gate
        b_along = tl.sum(b_g * b_o, 1)
        if HAS_ALPHA:
            tl.store(p_dalpha + o_row, b_along, mask=m_t)
        if SINK == LEARNED_SINK:
            p_s = p_sink + b * stride_sb + h * stride_sh + o_t * stride_st
            b_sink = tl.load(p_s, mask=m_t, other=0.0).to(tl.float32)
            b_lse = tl.load(p_lse + o_row, mask=m_t, other=0.0)
            b_p_sink = tl.exp(tl.where(b_lse == b_sink, 0.0, b_sink - b_lse))
            # lse carries -log |row factor|, so this exponential is the sink's probability times |row factor|;
            # b_along already has the gate's factor.
            if GATE == ELEMENTWISE:
                if HAS_ALPHA:
                    b_along *= b_alpha
            else:
                if GATE == HEADWISE:
                    b_along = tl.where(tl.sum(b_gate, 1) == 0, 0.0, b_along / tl.abs(tl.sum(b_gate, 1)))
                if HAS_ALPHA:
                    b_along = tl.where(b_alpha < 0, -b_along, b_along)
            tl.store(p_dsink + o_row, -b_p_sink * b_along, mask=m_t)
        if HAS_BETA:
            tl.store(p_dbeta + o_row, tl.sum(b_g * b_u, 1), mask=m_t)
            b_beta = tl.load(p_beta + o_row, mask=m_t, other=0.0).to(tl.float32)
            b_du += b_beta[:, None] * b_g
    if HAS_BETA:
        tl.store(p_totals + (bh * query_tiles + tile) * D + o_d, tl.sum(b_du, 0))
        if CAUSAL:
            # Every thread's part of the total must be out before the flag is raised.
            tl.debug_barrier()
            tl.atomic_xchg(p_ready + bh * query_tiles + tile, 1, sem="release")
            p_slot = p_dv + b * stride_nb + kv_head * stride_nh + (older + o_td) * stride_nt + o_d[None, :]
            b_dv = tl.load(p_slot, mask=m_td, other=0.0).to(tl.float32)
            b_dv += _running_sum(b_du, True, T, p_v.dtype.element_ty)
            p_ready += bh * query_tiles
            p_totals += bh * query_tiles * D
            for c in range(tile + 1, query_tiles, FLAGS):
                o_c = c + tl.arange(0, FLAGS)
                while _missing(p_ready + o_c, o_c < query_tiles) > 0:
                    pass
            b_later = tl.zeros([D], tl.float32)
            for c in tl.range(tile + 1, query_tiles, CHUNK, num_stages=2):
                o_c = c + tl.arange(0, CHUNK)
                # Written by other programs of this launch: read past the L1 cache, always in the same order.
                p_total = p_totals + o_c[:, None] * D + o_d[None, :]
                b_later += tl.sum(
                    tl.load(p_total, mask=(o_c < query_tiles)[:, None], other=0.0, cache_modifier=".cg"), 0
                )
            tl.store(p_slot, (b_dv + b_later[None, :]).to(p_dv.dtype.element_ty), mask=m_td)
