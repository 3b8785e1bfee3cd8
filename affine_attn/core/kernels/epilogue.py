"""Triton kernels of the fused epilogue: stages 2 to 4 around any attention that returns (o, z).

Legend. p_ pointer, b_ block of values, o_ offsets, m_ mask. T tokens of a tile, D head dim padded to a power of two.

Sums over tokens travel in a relay, so that every tensor is read once: a program publishes the total of its tile, adds up
what the programs before it have published, and goes on. Programs start in the order of their ids, so whoever is waited
for is running or done. A relay is cut into legs: within its leg a program adds the totals one by one, and the last of a
leg hands on the sum of everything so far. The additions are always the same, in the same order.
"""

import triton
import triton.language as tl

NO_SINK: tl.constexpr = tl.constexpr(0)
CONSTANT_SINK: tl.constexpr = tl.constexpr(1)
LEARNED_SINK: tl.constexpr = tl.constexpr(2)
NO_GATE: tl.constexpr = tl.constexpr(0)
HEADWISE: tl.constexpr = tl.constexpr(1)
ELEMENTWISE: tl.constexpr = tl.constexpr(2)
# Where the sums u of visible values come from: nowhere, a relay over the tiles of a causal mask, one sum for all
# queries, or a table with a row per query.
NO_SUMS: tl.constexpr = tl.constexpr(0)
RELAYED: tl.constexpr = tl.constexpr(1)
WHOLE: tl.constexpr = tl.constexpr(2)
TABLE: tl.constexpr = tl.constexpr(3)
# Bits of a NaN that stand for "not yet published".
UNSET: tl.constexpr = tl.constexpr(0x7FC0A55A)


@triton.jit
def _publish(p_x, b_x):
    """Any NaN is published as the ordinary one: no value is mistaken for an absent one."""
    tl.store(p_x, tl.where(b_x == b_x, b_x, float("nan")))


@triton.jit
def _await(p_x, m_x):
    """What other programs publish at p_x, as soon as all of it is there; each value is its own sign of arrival."""
    b_x = tl.load(p_x, mask=m_x, other=0.0, volatile=True)
    while tl.max((b_x.to(tl.int32, bitcast=True) == UNSET).to(tl.int32)) == 1:
        b_x = tl.load(p_x, mask=m_x, other=0.0, volatile=True)
    return b_x


@triton.jit
def _sum_before(p_relay, b_total, n, o_d, stops, D: tl.constexpr, LEG: tl.constexpr):
    """Hand in the total of stop n of a relay; the sum of all stops before it.

    p_relay [stops + legs, D] holds a total per stop, then the sum of everything before each leg.
    """
    _publish(p_relay + n * D + o_d, b_total)
    leg = n // LEG
    o_n = leg * LEG + tl.arange(0, LEG)
    b_sum = tl.sum(_await(p_relay + o_n[:, None] * D + o_d[None, :], (o_n < n)[:, None]), 0)
    if leg > 0:
        b_sum += _await(p_relay + (stops + leg) * D + o_d, o_d < D)
    if n % LEG == LEG - 1:
        _publish(p_relay + (stops + leg + 1) * D + o_d, b_sum + b_total)
    return b_sum


@triton.jit
def epilogue_kernel(
    p_o, p_z, p_v, p_base, p_relay, p_sums, p_sink, p_alpha, p_beta, p_gate, p_y, p_lse,
    stride_ob, stride_oh, stride_ot, stride_vb, stride_vh, stride_vt,
    stride_gb, stride_gh, stride_gt, stride_yb, stride_yh, stride_yt, stride_sb, stride_sh, stride_st,
    heads, kv_heads, queries, older, tiles, legs, constant_sink,
    SINK: tl.constexpr, HAS_ALPHA: tl.constexpr, SUMS: tl.constexpr, HAS_BASE: tl.constexpr, GATE: tl.constexpr,
    KEEP_OUT: tl.constexpr,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, SLICE: tl.constexpr, T: tl.constexpr, LEG: tl.constexpr,
    PREFETCH: tl.constexpr = True, EVICT: tl.constexpr = "",
):  # fmt: skip
    """y = gate * (alpha * sigmoid(z - sink) * o + beta * u) for a tile, some columns of it, of a kv head's query heads.

    With KEEP_OUT a sink also rewrites o to o' in place (the backward needs it). lse becomes what the stock backward
    must see: z' = logaddexp(z, sink), less log |row factor| where the factor (alpha, headwise gate) is folded into it.
    """
    SLICES: tl.constexpr = D // SLICE
    part, tile = tl.program_id(0) % SLICES, tl.program_id(1)
    bh = (tl.program_id(0) // SLICES).to(tl.int64)
    b, kv_head = bh // kv_heads, bh % kv_heads
    group = heads // kv_heads
    o_t, o_d = tile * T + tl.arange(0, T), part * SLICE + tl.arange(0, SLICE)
    m_t = o_t < queries
    m_td = m_t[:, None] & (o_d < HEAD_DIM)[None, :]
    o_td = o_t[:, None].to(tl.int64)
    p_o += b * stride_ob + kv_head * group * stride_oh + o_td * stride_ot + o_d[None, :]
    # On its way before anything is waited for.
    if PREFETCH:
        b_next = tl.load(p_o, mask=m_td, other=0.0, eviction_policy=EVICT)
    if SUMS == RELAYED:
        p_v += b * stride_vb + kv_head * stride_vh
        m_v = m_td & (older + o_td >= 0)
        b_v = tl.load(p_v + (older + o_td) * stride_vt + o_d[None, :], mask=m_v, other=0.0).to(tl.float32)
        b_u = tl.cumsum(b_v, 0)
        b_before = _sum_before(p_relay + bh * (tiles + legs) * D, tl.sum(b_v, 0), tile, o_d, tiles, D, LEG)
        if HAS_BASE:
            b_before += tl.load(p_base + bh * HEAD_DIM + o_d, mask=o_d < HEAD_DIM, other=0.0)
        tl.store(p_sums + (bh * tiles + tile) * D + o_d, b_before)
        b_u += b_before[None, :]
    if SUMS == WHOLE:
        b_u = tl.load(p_sums + bh * HEAD_DIM + o_d, mask=o_d < HEAD_DIM, other=0.0)[None, :]
    if SUMS == TABLE:
        b_u = tl.load(p_sums + (bh * queries + o_td) * HEAD_DIM + o_d[None, :], mask=m_td, other=0.0)
    for g in range(group):
        h = kv_head * group + g
        o_row = (b * heads + h) * queries + o_t
        if PREFETCH:
            b_y = b_next.to(tl.float32)
            b_next = tl.load(p_o + (g + 1) * stride_oh, mask=m_td & (g + 1 < group), other=0.0, eviction_policy=EVICT)
        else:
            b_y = tl.load(p_o + g * stride_oh, mask=m_td, other=0.0, eviction_policy=EVICT).to(tl.float32)
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
                tl.store(p_o + g * stride_oh, b_y.to(p_y.dtype.element_ty), mask=m_td)
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
        tl.store(p_lse + o_row, b_lse, mask=m_t & (part == 0))
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
def epilogue_backward_kernel(
    p_dy, p_o, p_lse, p_v, p_relay, p_sums, p_sink, p_alpha, p_beta, p_gate,
    p_dsink, p_dalpha, p_dbeta, p_dgate, p_dv, p_weighted,
    stride_db, stride_dh, stride_dt, stride_ob, stride_oh, stride_ot, stride_vb, stride_vh, stride_vt,
    stride_gb, stride_gh, stride_gt, stride_wb, stride_wh, stride_wt, stride_sb, stride_sh, stride_st,
    stride_nb, stride_nh, stride_nt,
    heads, kv_heads, queries, older, tiles, legs,
    SINK: tl.constexpr, HAS_ALPHA: tl.constexpr, SUMS: tl.constexpr, GATE: tl.constexpr,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, T: tl.constexpr, LEG: tl.constexpr,
    PREFETCH: tl.constexpr = True, EVICT: tl.constexpr = "",
):  # fmt: skip
    """Gradients of sink, alpha, beta and gate, and beta's share of dv, for one tile of a kv head's query heads.

    dv_j gets the sum over queries i >= j, and over the heads of the group, of beta_i * gate_i * dy_i: the relay runs
    from the last tile to the first. Elsewhere the tile's own share is handed out instead: WHOLE leaves its total in
    p_relay, TABLE every row in p_weighted.
    """
    stop = tl.program_id(1)
    tile = tiles - 1 - stop
    bh = tl.program_id(0).to(tl.int64)
    b, kv_head = bh // kv_heads, bh % kv_heads
    group = heads // kv_heads
    o_t, o_d = tile * T + tl.arange(0, T), tl.arange(0, D)
    m_t = o_t < queries
    m_td = m_t[:, None] & (o_d < HEAD_DIM)[None, :]
    o_td = o_t[:, None].to(tl.int64)
    p_dy += b * stride_db + kv_head * group * stride_dh + o_td * stride_dt + o_d[None, :]
    p_o += b * stride_ob + kv_head * group * stride_oh + o_td * stride_ot + o_d[None, :]
    # On their way before anything is computed.
    if PREFETCH:
        b_next_dy = tl.load(p_dy, mask=m_td, other=0.0, eviction_policy=EVICT)
        b_next_o = tl.load(p_o, mask=m_td, other=0.0, eviction_policy=EVICT)
    if SUMS == RELAYED:
        p_v += b * stride_vb + kv_head * stride_vh
        m_v = m_td & (older + o_td >= 0)
        b_v = tl.load(p_v + (older + o_td) * stride_vt + o_d[None, :], mask=m_v, other=0.0)
        b_u = tl.cumsum(b_v.to(tl.float32), 0) + tl.load(p_sums + (bh * tiles + tile) * D + o_d)[None, :]
    if SUMS == WHOLE:
        b_u = tl.load(p_sums + bh * HEAD_DIM + o_d, mask=o_d < HEAD_DIM, other=0.0)[None, :]
    if SUMS == TABLE:
        b_u = tl.load(p_sums + (bh * queries + o_td) * HEAD_DIM + o_d[None, :], mask=m_td, other=0.0)
    if SUMS != NO_SUMS:
        b_weighted = tl.zeros([T, D], tl.float32)
    for g in range(group):
        h = kv_head * group + g
        o_row = (b * heads + h) * queries + o_t
        if PREFETCH:
            b_dy, b_o = b_next_dy.to(tl.float32), b_next_o.to(tl.float32)
            m_next = m_td & (g + 1 < group)
            b_next_dy = tl.load(p_dy + (g + 1) * stride_dh, mask=m_next, other=0.0, eviction_policy=EVICT)
            b_next_o = tl.load(p_o + (g + 1) * stride_oh, mask=m_next, other=0.0, eviction_policy=EVICT)
        else:
            b_dy = tl.load(p_dy + g * stride_dh, mask=m_td, other=0.0, eviction_policy=EVICT).to(tl.float32)
            b_o = tl.load(p_o + g * stride_oh, mask=m_td, other=0.0, eviction_policy=EVICT).to(tl.float32)
        b_alpha = tl.full([T], 1.0, tl.float32)
        b_gate = tl.full([T], 1.0, tl.float32)
        if HAS_ALPHA:
            b_alpha = tl.load(p_alpha + o_row, mask=m_t, other=1.0).to(tl.float32)
        if SUMS != NO_SUMS:
            b_beta = tl.load(p_beta + o_row, mask=m_t, other=0.0).to(tl.float32)
        if GATE == HEADWISE:
            b_gate = tl.load(p_gate + b * stride_gb + h * stride_gh + o_t * stride_gt, mask=m_t, other=1.0)
            b_gate = b_gate.to(tl.float32)
        b_factor = tl.full([T], 1.0, tl.float32)
        if GATE == ELEMENTWISE:
            p_g = p_gate + b * stride_gb + h * stride_gh + o_td * stride_gt + o_d[None, :]
            b_inner = b_o * b_alpha[:, None]
            if SUMS != NO_SUMS:
                b_inner += b_beta[:, None] * b_u
            p_w = p_dgate + b * stride_wb + h * stride_wh + o_td * stride_wt + o_d[None, :]
            tl.store(p_w, (b_dy * b_inner).to(p_dgate.dtype.element_ty), mask=m_td)
            b_dy *= tl.load(p_g, mask=m_td, other=0.0).to(tl.float32)
            b_factor = b_alpha
        elif HAS_ALPHA or GATE == HEADWISE:
            # These rows came negated.
            m_negated = (b_alpha * b_gate < 0)[:, None]
            b_dy = tl.where(m_negated, -b_dy, b_dy)
            tl.store(p_dy + g * stride_dh, b_dy.to(p_v.dtype.element_ty), mask=m_td & m_negated)
            # The size of the factor is in lse.
            b_factor = tl.where(b_alpha * b_gate < 0, -1.0, 1.0)
        b_along = tl.sum(b_dy * b_o, 1)
        if SINK == LEARNED_SINK:
            p_s = p_sink + b * stride_sb + h * stride_sh + o_t * stride_st
            b_sink = tl.load(p_s, mask=m_t, other=0.0).to(tl.float32)
            b_lse = tl.load(p_lse + o_row, mask=m_t, other=0.0)
            b_p_sink = tl.exp(tl.where(b_lse == b_sink, 0.0, b_sink - b_lse))
            tl.store(p_dsink + o_row, -b_factor * b_p_sink * b_along, mask=m_t)
        if HAS_ALPHA:
            tl.store(p_dalpha + o_row, b_gate * b_along, mask=m_t)
        b_dgate = b_alpha * b_along
        if SUMS != NO_SUMS:
            b_to_u = tl.sum(b_dy * b_u, 1)
            tl.store(p_dbeta + o_row, b_gate * b_to_u, mask=m_t)
            b_dgate += b_beta * b_to_u
            b_weighted += (b_beta * b_gate)[:, None] * b_dy
        if GATE == HEADWISE:
            tl.store(p_dgate + o_row, b_dgate.to(p_dgate.dtype.element_ty), mask=m_t)
    if SUMS == RELAYED:
        p_dv += b * stride_nb + kv_head * stride_nh + (older + o_td) * stride_nt + o_d[None, :]
        b_dv = tl.load(p_dv, mask=m_v, other=0.0).to(tl.float32) + tl.cumsum(b_weighted, 0, reverse=True)
        b_after = _sum_before(p_relay + bh * (tiles + legs) * D, tl.sum(b_weighted, 0), stop, o_d, tiles, D, LEG)
        tl.store(p_dv, (b_dv + b_after[None, :]).to(p_v.dtype.element_ty), mask=m_v)
    if SUMS == WHOLE:
        tl.store(p_relay + (bh * (tiles + legs) + stop) * D + o_d, tl.sum(b_weighted, 0))
    if SUMS == TABLE:
        tl.store(p_weighted + (bh * queries + o_td) * HEAD_DIM + o_d[None, :], b_weighted, mask=m_td)
