"""Gluon kernel, an experiment: row_gradients_kernel for affine attention, with loads ahead of what is computed.

A program is one warp on which many steps of 16 tokens follow each other. While it computes one, the next ones are under
way into shared memory, where they take no registers. Legend as in affine_attn/core/kernels/hopper_rows.py; s_ shared
memory.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

STEP = tl.constexpr(16)
COLUMNS = tl.constexpr(64)


@gluon.jit
def _ask(item, last, slot, inputs, strides, sizes, memory, GROUP: gl.constexpr, D: gl.constexpr, SAVED: gl.constexpr):
    """Copies for a step of tokens; nothing behind the last."""
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [1, 1], [1, 0])
    LINE: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    p_dy, p_o, p_v, p_before = inputs
    stride_db, stride_dh, stride_dt, stride_ob, stride_oh, stride_ot, stride_vb, stride_vh, stride_vt = strides
    heads, queries, steps = sizes
    s_dy, s_o, s_v, s_before = memory
    bh, row0 = (item // steps).to(gl.int64), item % steps * STEP
    b, h = bh // heads, bh % heads
    o_t, o_d = row0 + gl.arange(0, STEP, gl.SliceLayout(1, ROWS)), gl.arange(0, D, gl.SliceLayout(0, ROWS))
    m_td = ((o_t < queries) & (item < last))[:, None] & (o_d < D)[None, :]
    o_td = o_t[:, None].to(gl.int64)
    p_rows = p_dy + b * stride_db + h * stride_dh + o_td * stride_dt + o_d[None, :]
    async_copy.async_copy_global_to_shared(s_dy.index(slot), p_rows, mask=m_td)
    p_rows = p_o + b * stride_ob + h * stride_oh + o_td * stride_ot + o_d[None, :]
    async_copy.async_copy_global_to_shared(s_o.index(slot), p_rows, mask=m_td)
    p_rows = p_v + b * stride_vb + h // GROUP * stride_vh + o_td * stride_vt + o_d[None, :]
    async_copy.async_copy_global_to_shared(s_v.index(slot), p_rows, mask=m_td)
    o_line = gl.arange(0, D, LINE)
    p_sum = p_before + (bh // GROUP * gl.cdiv(queries, SAVED) + row0 // SAVED) * D + o_line
    async_copy.async_copy_global_to_shared(s_before.index(slot), p_sum, mask=(o_line < D) & (item < last))
    async_copy.commit_group()


@gluon.jit
def _numbers(item, last, p_alpha, p_beta, sizes):
    ROW: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 8], [8, 4], [1, 1], [1, 0]))
    _, queries, steps = sizes
    o_t = item % steps * STEP + gl.arange(0, STEP, ROW)
    m_t = (o_t < queries) & (item < last)
    o_row = (item // steps).to(gl.int64) * queries + o_t
    return gl.load(p_alpha + o_row, mask=m_t, other=1.0), gl.load(p_beta + o_row, mask=m_t, other=0.0)


@gluon.jit
def rows_ahead_kernel(
    p_dy, p_o, p_v, p_before, p_alpha, p_beta, p_dalpha, p_dbeta, p_delta, p_shift, p_totals,
    stride_db, stride_dh, stride_dt, stride_ob, stride_oh, stride_ot, stride_vb, stride_vh, stride_vt,
    heads, queries, steps, items,
    GROUP: gl.constexpr, D: gl.constexpr, SAVED: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """What row_gradients_kernel gives for alpha and beta; rows of dy are not negated."""
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [1, 1], [1, 0])
    ROW: gl.constexpr = gl.SliceLayout(1, ROWS)
    DOWN: gl.constexpr = gl.BlockedLayout([STEP, 2], [1, 32], [1, 1], [1, 0])
    PAIRS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, PAIRS, 8)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, PAIRS, 8)
    # Rows that lie below each other are in different banks.
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    s_dy = gl.allocate_shared_memory(p_dy.dtype.element_ty, [STAGES, STEP, D], SHARED)
    s_o = gl.allocate_shared_memory(p_dy.dtype.element_ty, [STAGES, STEP, D], SHARED)
    s_v = gl.allocate_shared_memory(p_dy.dtype.element_ty, [STAGES, STEP, D], SHARED)
    s_before = gl.allocate_shared_memory(gl.float32, [STAGES, D], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    inputs, memory, sizes = (p_dy, p_o, p_v, p_before), (s_dy, s_o, s_v, s_before), (heads, queries, steps)
    strides = (stride_db, stride_dh, stride_dt, stride_ob, stride_oh, stride_ot, stride_vb, stride_vh, stride_vt)
    # In one piece: neighbours in memory follow each other.
    first = (gl.program_id(0).to(gl.int64) * items // gl.num_programs(0)).to(gl.int32)
    last = ((gl.program_id(0).to(gl.int64) + 1) * items // gl.num_programs(0)).to(gl.int32)
    o_i, o_j = gl.arange(0, STEP, gl.SliceLayout(1, PAIRS)), gl.arange(0, STEP, gl.SliceLayout(0, PAIRS))
    o_down = gl.arange(0, COLUMNS, gl.SliceLayout(0, DOWN))
    for stage in gl.static_range(STAGES - 1):
        _ask(first + stage, last, stage, inputs, strides, sizes, memory, GROUP, D, SAVED)
    b_next_alpha, b_next_beta = _numbers(first, last, p_alpha, p_beta, sizes)
    for n in range(last - first):
        item, slot, ahead = first + n, n % STAGES, n + STAGES - 1
        _ask(first + ahead, last, ahead % STAGES, inputs, strides, sizes, memory, GROUP, D, SAVED)
        b_alpha, b_beta = b_next_alpha, b_next_beta
        b_next_alpha, b_next_beta = _numbers(item + 1, last, p_alpha, p_beta, sizes)
        async_copy.wait_group(STAGES - 1)
        o_t = item % steps * STEP + gl.arange(0, STEP, ROW)
        m_t = o_t < queries
        o_row = (item // steps).to(gl.int64) * queries + o_t
        b_along, b_far = gl.zeros([STEP], gl.float32, ROW), gl.zeros([STEP], gl.float32, ROW)
        b_pairs = gl.zeros([STEP, STEP], gl.float32, PAIRS)
        for column in gl.static_range(0, D, COLUMNS):
            b_do = s_dy.index(slot).slice(column, COLUMNS, dim=1).load(ROWS)
            b_o = s_o.index(slot).slice(column, COLUMNS, dim=1).load(ROWS).to(gl.float32)
            b_v = s_v.index(slot).slice(column, COLUMNS, dim=1).load(ROWS)
            b_before = s_before.index(slot).slice(column, COLUMNS).load(gl.SliceLayout(0, ROWS))
            # Rows behind the end were not copied.
            b_do32 = gl.where(m_t[:, None], b_do.to(gl.float32), 0.0)
            b_along += gl.sum(b_do32 * b_o, 1)
            b_right = gl.convert_layout(gl.permute(b_v, (1, 0)), RIGHT)
            b_pairs = mma_v2(gl.convert_layout(b_do, LEFT), b_right, b_pairs)
            b_far += gl.sum(b_do32 * b_before[None, :], 1)
            b_total = gl.sum(gl.convert_layout(b_beta[:, None] * b_do32, DOWN), 0)
            gl.store(p_totals + item.to(gl.int64) * D + column + o_down, b_total)
        b_near = gl.sum(gl.where(o_i[:, None] >= o_j[None, :], b_pairs, 0.0), 1)
        b_sign = gl.where(b_alpha < 0, -1.0, 1.0)
        gl.store(p_delta + o_row, b_sign * b_along, mask=m_t)
        gl.store(p_dalpha + o_row, b_along, mask=m_t)
        gl.store(p_dbeta + o_row, b_far + gl.convert_layout(b_near, ROW), mask=m_t)
        gl.store(p_shift + o_row, b_sign * b_beta, mask=m_t)
    async_copy.wait_group(0)
