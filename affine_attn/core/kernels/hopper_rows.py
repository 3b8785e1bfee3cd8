"""Gluon kernel: what goes before the backward of our own for Hopper, gradients and other numbers per row.

Legend. p_ pointer, b_ block of values, o_ offsets, m_ mask. D head dim. stride_xb, _xh, _xt: of tensor x along batch,
heads and tokens; d dy, o out, v values, g gate, w dgate, a do (the gradient that goes into the attention), s sink.

Why Gluon: this kernel should be as fast as a copy, and what Triton's choice of layouts costs in instructions shows. A
program is one warp. A row lies in four threads, eight neighbouring columns at a time: that is how operands of a product
of tiles lie, too, but for the order of their columns, and both operands have the same order. So what memory gives goes
into products as it is, and sums over rows take two shuffles.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from affine_attn.core.kernels.epilogue import ELEMENTWISE, HEADWISE, LEARNED_SINK

# Tokens and columns at a time: more would cost registers, and so warps that wait for memory at the same time.
STEP = tl.constexpr(16)
COLUMNS = tl.constexpr(64)


@gluon.jit
def _sums_up_to_each(b_v, b_before, s_v, ROWS: gl.constexpr, PAIRS: gl.constexpr):
    """u, the values that each token sees: those before, and those of the step up to its own."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, PAIRS, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, PAIRS, 2)
    o_i, o_j = gl.arange(0, STEP, gl.SliceLayout(1, LEFT)), gl.arange(0, STEP, gl.SliceLayout(0, LEFT))
    b_ones = (o_i[:, None] >= o_j[None, :]).to(b_v.dtype)
    s_v.store(b_v)
    b_u = mma_v2(b_ones, s_v.load(RIGHT), gl.zeros([STEP, COLUMNS], gl.float32, PAIRS))
    return gl.convert_layout(b_u, ROWS) + b_before[None, :]


@gluon.jit
def row_gradients_kernel(
    p_dy, p_o, p_lse, p_v, p_before, p_sink, p_alpha, p_beta, p_gate,
    p_dsink, p_dalpha, p_dbeta, p_dgate, p_do, p_delta, p_shift, p_totals,
    stride_db, stride_dh, stride_dt, stride_ob, stride_oh, stride_ot, stride_vb, stride_vh, stride_vt,
    stride_gb, stride_gh, stride_gt, stride_wb, stride_wh, stride_wt, stride_ab, stride_ah, stride_at,
    stride_sb, stride_sh, stride_st,
    heads, queries, tiles,
    SINK: gl.constexpr, HAS_ALPHA: gl.constexpr, HAS_BETA: gl.constexpr, GATE: gl.constexpr,
    GROUP: gl.constexpr, D: gl.constexpr, STEPS: gl.constexpr, SAVED: gl.constexpr,
):  # fmt: skip
    """Gradients of sink, alpha, beta and gate, and what hopper_backward_kernel wants: do, the incoming gradient of the
    attention, delta = <do, o>, shift, the beta that goes with do, and totals, the sum of shift * do over a tile.

    A program has a tile, STEPS steps of tokens of one head. The size of the row factor alpha * gate is in lse, its sign
    in do. Under an elementwise gate do is sign * gate * dy; else it is dy, of which rows with a negative factor are
    negated here. delta must be that of do as it is rounded: weights multiply a difference, which is 0 where a row sees
    one key.
    """
    gl.static_assert(STEPS == 1 or D == COLUMNS, "weighted rows of earlier steps are those of the same columns")
    gl.static_assert(not HAS_BETA or STEP % SAVED == 0, "sums of values are known where a step begins")
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [1, 1], [1, 0])
    ROW: gl.constexpr = gl.SliceLayout(1, ROWS)
    # Whole columns to a thread.
    DOWN: gl.constexpr = gl.BlockedLayout([STEP, 2], [1, 32], [1, 1], [1, 0])
    PAIRS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, PAIRS, 8)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, PAIRS, 8)
    tile, bh = gl.program_id(0) % tiles, (gl.program_id(0) // tiles).to(gl.int64)
    b, h = bh // heads, bh % heads
    o_i, o_j = gl.arange(0, STEP, gl.SliceLayout(1, PAIRS)), gl.arange(0, STEP, gl.SliceLayout(0, PAIRS))
    o_column = gl.arange(0, COLUMNS, gl.SliceLayout(0, ROWS))
    o_down = gl.arange(0, COLUMNS, gl.SliceLayout(0, DOWN))
    if GATE == ELEMENTWISE and HAS_BETA:
        s_v = gl.allocate_shared_memory(p_v.dtype.element_ty, [STEP, COLUMNS], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
    for step in gl.static_range(STEPS):
        row0 = (tile * STEPS + step) * STEP
        o_t = row0 + gl.arange(0, STEP, ROW)
        m_t = o_t < queries
        o_td, o_row = o_t[:, None].to(gl.int64), bh * queries + o_t
        b_alpha, b_gate = gl.full([STEP], 1.0, gl.float32, ROW), gl.full([STEP], 1.0, gl.float32, ROW)
        if HAS_ALPHA:
            b_alpha = gl.load(p_alpha + o_row, mask=m_t, other=1.0).to(gl.float32)
        if HAS_BETA:
            b_beta = gl.load(p_beta + o_row, mask=m_t, other=0.0).to(gl.float32)
        if GATE == HEADWISE:
            p_g = p_gate + b * stride_gb + h * stride_gh + o_t.to(gl.int64) * stride_gt
            b_gate = gl.load(p_g, mask=m_t, other=1.0).to(gl.float32)
        b_sign = gl.where(b_alpha * b_gate < 0, -1.0, 1.0)
        b_along, b_far = gl.zeros([STEP], gl.float32, ROW), gl.zeros([STEP], gl.float32, ROW)
        b_pairs = gl.zeros([STEP, STEP], gl.float32, PAIRS)
        for column in gl.static_range(0, D, COLUMNS):
            o_d = column + o_column
            m_td = m_t[:, None] & (o_d < D)[None, :]
            p_rows = p_dy + b * stride_db + h * stride_dh + o_td * stride_dt + o_d[None, :]
            b_do = gl.load(p_rows, mask=m_td, other=0.0)
            p_out = p_o + b * stride_ob + h * stride_oh + o_td * stride_ot + o_d[None, :]
            b_o = gl.load(p_out, mask=m_td, other=0.0).to(gl.float32)
            if HAS_BETA:
                p_slot = p_v + b * stride_vb + h // GROUP * stride_vh + o_td * stride_vt + o_d[None, :]
                b_v = gl.load(p_slot, mask=m_td, other=0.0)
                p_sum = p_before + (bh // GROUP * gl.cdiv(queries, SAVED) + row0 // SAVED) * D
                b_before = gl.load(p_sum + o_d, mask=(o_d < D) & (row0 < queries), other=0.0)
            if GATE == ELEMENTWISE:
                b_dy = b_do.to(gl.float32)
                p_g = p_gate + b * stride_gb + h * stride_gh + o_td * stride_gt + o_d[None, :]
                b_gates = gl.load(p_g, mask=m_td, other=0.0).to(gl.float32)
                b_inner = b_o * b_alpha[:, None]
                if HAS_BETA:
                    b_inner += b_beta[:, None] * _sums_up_to_each(b_v, b_before, s_v, ROWS, PAIRS)
                p_w = p_dgate + b * stride_wb + h * stride_wh + o_td * stride_wt + o_d[None, :]
                gl.store(p_w, (b_dy * b_inner).to(p_dgate.dtype.element_ty), mask=m_td)
                b_do = (b_dy * b_gates).to(b_do.dtype)
                p_a = p_do + b * stride_ab + h * stride_ah + o_td * stride_at + o_d[None, :]
                gl.store(p_a, (b_sign[:, None] * b_do.to(gl.float32)).to(b_do.dtype), mask=m_td)
            b_do32 = b_do.to(gl.float32)
            b_along += gl.sum(b_do32 * b_o, 1)
            if HAS_BETA:
                b_right = gl.convert_layout(gl.permute(b_v, (1, 0)), RIGHT)
                b_pairs = mma_v2(gl.convert_layout(b_do, LEFT), b_right, b_pairs)
                b_far += gl.sum(b_do32 * b_before[None, :], 1)
                if step == 0:
                    b_weighted = gl.zeros([STEP, COLUMNS], gl.float32, ROWS)
                b_weighted += (b_gate * b_beta)[:, None] * b_do32
                if step == STEPS - 1:
                    b_total = gl.sum(gl.convert_layout(b_weighted, DOWN), 0)
                    gl.store(p_totals + (bh * tiles + tile) * D + column + o_down, b_total)
        gl.store(p_delta + o_row, b_sign * b_along, mask=m_t)
        if SINK == LEARNED_SINK:
            p_s = p_sink + b * stride_sb + h * stride_sh + o_t.to(gl.int64) * stride_st
            b_sink = gl.load(p_s, mask=m_t, other=0.0).to(gl.float32)
            b_lse = gl.load(p_lse + o_row, mask=m_t, other=0.0)
            b_p_sink = gl.exp(gl.where(b_lse == b_sink, 0.0, b_sink - b_lse))
            gl.store(p_dsink + o_row, -b_sign * b_p_sink * b_along, mask=m_t)
        if HAS_ALPHA:
            gl.store(p_dalpha + o_row, (b_gate * b_along).to(p_dalpha.dtype.element_ty), mask=m_t)
        b_dgate = b_alpha * b_along
        if HAS_BETA:
            b_near = gl.sum(gl.where(o_i[:, None] >= o_j[None, :], b_pairs, 0.0), 1)
            b_to_u = b_far + gl.convert_layout(b_near, ROW)
            gl.store(p_dbeta + o_row, (b_gate * b_to_u).to(p_dbeta.dtype.element_ty), mask=m_t)
            gl.store(p_shift + o_row, b_sign * b_gate * b_beta, mask=m_t)
            b_dgate += b_beta * b_to_u
        if GATE == HEADWISE:
            gl.store(p_dgate + o_row, b_dgate.to(p_dgate.dtype.element_ty), mask=m_t)
        if GATE == HEADWISE or (HAS_ALPHA and GATE != ELEMENTWISE):
            if gl.min(b_sign, 0) < 0:
                for column in gl.static_range(0, D, COLUMNS):
                    m_negated = (m_t & (b_sign < 0))[:, None] & (column + o_column < D)[None, :]
                    p_rows = p_dy + b * stride_db + h * stride_dh + o_td * stride_dt + column + o_column[None, :]
                    b_dy = gl.load(p_rows, mask=m_negated, other=0.0)
                    gl.store(p_rows, (-b_dy.to(gl.float32)).to(b_dy.dtype), mask=m_negated)
