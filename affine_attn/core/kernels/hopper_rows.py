"""Gluon kernel: what goes before the backward of our own for Hopper, gradients and other numbers per row.

It should be as fast as a copy, so bytes must be on their way all the time. Two programs share a multiprocessor. In
each, one warp does nothing but ask: the copy engine brings M tokens of one tensor at a time into a ring of slots in
shared memory, and numbers per row come along as small asynchronous copies. A group of four warps computes from there.
An item is M tokens of a kv head and of all query heads that share it: values come once, then dy, o and gates head by
head. The sums u of values up to each token are a triangle of ones times the values, plus what lies before; they stay in
registers for all heads. Items follow each other in memory, and programs take them in turns: so memory is read in its
order.

Legend. d_ tensor descriptor, s_ shared memory, p_ pointer, b_ block in registers, t_ one that is on its way, o_
offsets, m_ mask. D head dim, T tokens. stride_xb, _xh, _xt: of tensor x along batch, heads and tokens; d dy, g gate, s
sink. Barriers: full, of what is there, and free, of what is done with.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_wait

from affine_attn.core.kernels.epilogue import ELEMENTWISE, HEADWISE, LEARNED_SINK

# Tokens of an item, and columns that are computed at a time.
M = tl.constexpr(64)
COLUMNS = tl.constexpr(64)
# Where a slot has its numbers per row, and how many of them.
ALPHA = tl.constexpr(0)
BETA = tl.constexpr(1)
ROW_GATE = tl.constexpr(2)
SINK_LOGIT = tl.constexpr(3)
LSE = tl.constexpr(4)
NUMBERS = tl.constexpr(5)


@gluon.jit
def _count(sizes):
    """Items of this program."""
    return gl.cdiv(sizes[3] - gl.program_id(0), gl.num_programs(0))


@gluon.jit
def _item(n, sizes):
    """The n-th item of this program: its number, batch entry, kv head, both in one number, first token."""
    kv_heads, _, tiles, _ = sizes
    item = gl.program_id(0) + n * gl.num_programs(0)
    bh = item // tiles
    return item, bh // kv_heads, bh % kv_heads, bh.to(gl.int64), item % tiles * M


@gluon.jit
def _claim(i, ring, STAGES: gl.constexpr):
    """The slot of the i-th copy, once it is free."""
    slot = i % STAGES
    mbarrier.wait(ring[2].index(slot), ((i // STAGES) & 1) ^ 1)
    return slot


@gluon.jit
def _fill(slot, d_x, corner, ring, D: gl.constexpr):
    """Everything for this slot is asked for: it is full when this copy and those of the threads before it are done."""
    s_tiles, full, _ = ring
    async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
    mbarrier.expect(full.index(slot), M * D * 2)
    tma.async_copy_global_to_shared(d_x, corner, full.index(slot), s_tiles.index(slot))


@gluon.jit
def _load(
    inputs, rows, ring, s_before, s_numbers, sizes, strides,
    SINK: gl.constexpr, HAS_ALPHA: gl.constexpr, HAS_BETA: gl.constexpr, GATE: gl.constexpr,
    GROUP: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, SAVED: gl.constexpr,
):  # fmt: skip
    """The warp that asks."""
    # Launched while the kernel before it ends: nothing is read, and so nothing written, before that one is done.
    gdc_wait()
    d_dy, d_o, d_v, d_gate = inputs
    p_before, p_alpha, p_beta, p_gate, p_sink, p_lse = rows
    T = sizes[1]
    stride_gb, stride_gh, stride_gt, stride_sb, stride_sh, stride_st = strides
    # One number a thread at a time: rows may begin anywhere.
    o_m = gl.arange(0, M, gl.BlockedLayout([1], [32], [1], [0]))
    o_d = gl.arange(0, D, gl.BlockedLayout([D // 32], [32], [1], [0]))
    i = 0
    for n in range(_count(sizes)):
        _, b, kv, bh, row0 = _item(n, sizes)
        if HAS_BETA:
            slot = _claim(i, ring, STAGES)
            p_sum = p_before + (bh * gl.cdiv(T, SAVED) + row0 // SAVED) * D
            async_copy.async_copy_global_to_shared(s_before.index(slot), p_sum + o_d)
            _fill(slot, d_v, [b, kv, row0, 0], ring, D)
            i += 1
        for g in range(GROUP):
            h, o_t = kv * GROUP + g, row0 + o_m
            o_row, m_t = (bh * GROUP + g) * T + o_t, o_t < T
            corner = [b, h, row0, 0]
            slot = _claim(i, ring, STAGES)
            first = slot * NUMBERS
            if HAS_ALPHA:
                async_copy.async_copy_global_to_shared(s_numbers.index(first + ALPHA), p_alpha + o_row, mask=m_t)
            if HAS_BETA:
                async_copy.async_copy_global_to_shared(s_numbers.index(first + BETA), p_beta + o_row, mask=m_t)
            if GATE == HEADWISE:
                p_rows = p_gate + b.to(gl.int64) * stride_gb + h * stride_gh + o_t.to(gl.int64) * stride_gt
                async_copy.async_copy_global_to_shared(s_numbers.index(first + ROW_GATE), p_rows, mask=m_t)
            if SINK == LEARNED_SINK:
                p_rows = p_sink + b.to(gl.int64) * stride_sb + h * stride_sh + o_t.to(gl.int64) * stride_st
                async_copy.async_copy_global_to_shared(s_numbers.index(first + SINK_LOGIT), p_rows, mask=m_t)
                async_copy.async_copy_global_to_shared(s_numbers.index(first + LSE), p_lse + o_row, mask=m_t)
            _fill(slot, d_dy, corner, ring, D)
            _fill(_claim(i + 1, ring, STAGES), d_o, corner, ring, D)
            i += 2
            if GATE == ELEMENTWISE:
                _fill(_claim(i, ring, STAGES), d_gate, corner, ring, D)
                i += 1


@gluon.jit
def _await(i, ring, STAGES: gl.constexpr):
    """The slot of the i-th copy, once it is full."""
    slot = i % STAGES
    mbarrier.wait(ring[1].index(slot), (i // STAGES) & 1)
    return slot


@gluon.jit
def _tile(slot, ring, D: gl.constexpr):
    return ring[0].index(slot).reshape([M, D])


@gluon.jit
def _number(s_numbers, slot, which: gl.constexpr, m_t, other: gl.constexpr, ROW: gl.constexpr):
    """Behind the last token there is anything."""
    return gl.where(m_t, s_numbers.index(slot * NUMBERS + which).load(ROW), other)


@gluon.jit
def _values_seen(slot, column: gl.constexpr, ring, s_before, s_ones, D: gl.constexpr, LAYOUT: gl.constexpr):
    """u, some columns, on its way: the sum of the values up to each token."""
    b_before = s_before.index(slot).slice(column, COLUMNS).load(gl.SliceLayout(0, LAYOUT))
    b_start = gl.zeros([M, COLUMNS], gl.float32, LAYOUT) + b_before[None, :]
    return warpgroup_mma(s_ones, _tile(slot, ring, D).slice(column, COLUMNS, dim=1), b_start, is_async=True)


@gluon.jit
def _in_pairs(b_rows):
    """Sums of the two rows that a thread has, for half the registers."""
    return gl.sum(gl.reshape(b_rows, [4, 2, 8, COLUMNS]), 1)


@gluon.jit
def _add_columns(
    column: gl.constexpr, tiles, numbers, b_u, b_weighted, b_along, b_to_u,
    HAS_BETA: gl.constexpr, GATE: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """To the products <do, o> and <do, u> of rows, and to the weighted sum, what some columns give. Under an
    elementwise gate do and dgate go where dy and the gate came from."""
    s_dy, s_o, s_gate = tiles
    b_alpha, b_beta, b_gate, b_sign = numbers
    b_do = s_dy.slice(column, COLUMNS, dim=1).load(LAYOUT)
    b_o = s_o.slice(column, COLUMNS, dim=1).load(LAYOUT).to(gl.float32)
    if GATE == ELEMENTWISE:
        b_dy = b_do.to(gl.float32)
        b_gates = s_gate.slice(column, COLUMNS, dim=1).load(LAYOUT).to(gl.float32)
        b_inner = b_o * b_alpha[:, None]
        if HAS_BETA:
            b_inner += b_beta[:, None] * b_u
        s_gate.slice(column, COLUMNS, dim=1).store((b_dy * b_inner).to(b_do.dtype))
        b_do = (b_dy * b_gates).to(b_do.dtype)
        b_signed = (b_sign[:, None] * b_do.to(gl.float32)).to(b_do.dtype)
        s_dy.slice(column, COLUMNS, dim=1).store(b_signed)
    b_do32 = b_do.to(gl.float32)
    b_along += gl.sum(b_do32 * b_o, 1)
    if HAS_BETA:
        b_to_u += gl.sum(b_do32 * b_u, 1)
        b_weighted += _in_pairs((b_gate * b_beta)[:, None] * b_do32)
    return b_weighted, b_along, b_to_u


@gluon.jit
def _differentiate(
    outputs, results, ring, s_before, s_numbers, s_ones, sizes, strides,
    SINK: gl.constexpr, HAS_ALPHA: gl.constexpr, HAS_BETA: gl.constexpr, GATE: gl.constexpr,
    GROUP: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The group of warps that computes."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    d_do, d_dgate, p_dy = outputs
    p_dsink, p_dalpha, p_dbeta, p_dgate, p_delta, p_shift, p_totals = results
    T = sizes[1]
    stride_db, stride_dh, stride_dt = strides
    s_tiles, free = ring[0], ring[2]
    o_m, o_d = gl.arange(0, M, ROW), gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    i = 0
    for n in range(_count(sizes)):
        item, b, kv, bh, row0 = _item(n, sizes)
        o_t = row0 + o_m
        m_t = o_t < T
        # The last 64 columns, and with 128 of them the first.
        b_u = gl.zeros([M, COLUMNS], gl.float32, LAYOUT)
        b_first_u, b_weighted, b_first_weighted = b_u, _in_pairs(b_u), _in_pairs(b_u)
        if HAS_BETA:
            slot = _await(i, ring, STAGES)
            t_u = _values_seen(slot, D - COLUMNS, ring, s_before, s_ones, D, LAYOUT)
            if D > COLUMNS:
                t_first_u = _values_seen(slot, 0, ring, s_before, s_ones, D, LAYOUT)
                b_u = warpgroup_mma_wait(1, deps=(t_u,))
                b_first_u = warpgroup_mma_wait(0, deps=(t_first_u,))
            else:
                b_u = warpgroup_mma_wait(0, deps=(t_u,))
            mbarrier.arrive(free.index(slot), count=1)
            i += 1
        for g in range(GROUP):
            h, o_row = kv * GROUP + g, (bh * GROUP + g) * T + o_t
            of_dy = _await(i, ring, STAGES)
            b_alpha, b_gate = gl.full([M], 1.0, gl.float32, ROW), gl.full([M], 1.0, gl.float32, ROW)
            b_along, b_to_u = gl.zeros([M], gl.float32, ROW), gl.zeros([M], gl.float32, ROW)
            b_beta = b_along
            if HAS_ALPHA:
                b_alpha = _number(s_numbers, of_dy, ALPHA, m_t, 1.0, ROW)
            if HAS_BETA:
                b_beta = _number(s_numbers, of_dy, BETA, m_t, 0.0, ROW)
            if GATE == HEADWISE:
                b_gate = _number(s_numbers, of_dy, ROW_GATE, m_t, 1.0, ROW)
            b_sign = gl.where(b_alpha * b_gate < 0, -1.0, 1.0)
            of_o = _await(i + 1, ring, STAGES)
            of_gate = of_o
            i += 2
            if GATE == ELEMENTWISE:
                of_gate = _await(i, ring, STAGES)
                i += 1
            s_dy = _tile(of_dy, ring, D)
            tiles, numbers = (s_dy, _tile(of_o, ring, D), _tile(of_gate, ring, D)), (b_alpha, b_beta, b_gate, b_sign)
            if D > COLUMNS:
                b_first_weighted, b_along, b_to_u = _add_columns(
                    0, tiles, numbers, b_first_u, b_first_weighted, b_along, b_to_u, HAS_BETA, GATE, LAYOUT
                )
            b_weighted, b_along, b_to_u = _add_columns(
                D - COLUMNS, tiles, numbers, b_u, b_weighted, b_along, b_to_u, HAS_BETA, GATE, LAYOUT
            )
            mbarrier.arrive(free.index(of_o), count=1)
            if GATE == ELEMENTWISE:
                fence_async_shared()
                tma.async_copy_shared_to_global(d_dgate, [b, h, row0, 0], s_tiles.index(of_gate))
                tma.async_copy_shared_to_global(d_do, [b, h, row0, 0], s_tiles.index(of_dy))
                tma.store_wait(0)
                mbarrier.arrive(free.index(of_gate), count=1)
            elif HAS_ALPHA or GATE == HEADWISE:
                if gl.min(b_sign, 0) < 0:
                    p_rows = p_dy + b.to(gl.int64) * stride_db + h * stride_dh + o_t[:, None].to(gl.int64) * stride_dt
                    for column in gl.static_range(0, D, COLUMNS):
                        m_negated = (m_t & (b_sign < 0))[:, None] & (o_d < COLUMNS)[None, :]
                        b_dy = s_dy.slice(column, COLUMNS, dim=1).load(LAYOUT)
                        b_negative = (-b_dy.to(gl.float32)).to(b_dy.dtype)
                        gl.store(p_rows + column + o_d[None, :], b_negative, mask=m_negated)
            if SINK == LEARNED_SINK:
                b_sink = _number(s_numbers, of_dy, SINK_LOGIT, m_t, 0.0, ROW)
                b_lse = _number(s_numbers, of_dy, LSE, m_t, 0.0, ROW)
                b_p_sink = gl.exp(gl.where(b_lse == b_sink, 0.0, b_sink - b_lse))
                gl.store(p_dsink + o_row, -b_sign * b_p_sink * b_along, mask=m_t)
            mbarrier.arrive(free.index(of_dy), count=1)
            gl.store(p_delta + o_row, b_sign * b_along, mask=m_t)
            if HAS_ALPHA:
                gl.store(p_dalpha + o_row, (b_gate * b_along).to(p_dalpha.dtype.element_ty), mask=m_t)
            if HAS_BETA:
                gl.store(p_dbeta + o_row, (b_gate * b_to_u).to(p_dbeta.dtype.element_ty), mask=m_t)
                gl.store(p_shift + o_row, b_sign * b_gate * b_beta, mask=m_t)
            if GATE == HEADWISE:
                b_dgate = b_alpha * b_along + b_beta * b_to_u
                gl.store(p_dgate + o_row, b_dgate.to(p_dgate.dtype.element_ty), mask=m_t)
        if HAS_BETA:
            p_total = p_totals + item.to(gl.int64) * D
            if D > COLUMNS:
                b_total = gl.sum(gl.reshape(b_first_weighted, [M // 2, COLUMNS]), 0)
                gl.store(p_total + o_d, gl.convert_layout(b_total, gl.SliceLayout(0, LAYOUT)))
            b_total = gl.sum(gl.reshape(b_weighted, [M // 2, COLUMNS]), 0)
            gl.store(p_total + (D - COLUMNS) + o_d, gl.convert_layout(b_total, gl.SliceLayout(0, LAYOUT)))


@gluon.jit
def row_gradients_kernel(
    d_dy, d_o, d_v, d_gate, d_do, d_dgate, p_dy, p_before, p_lse, p_sink, p_alpha, p_beta, p_gate,
    p_dsink, p_dalpha, p_dbeta, p_dgate, p_delta, p_shift, p_totals,
    stride_db, stride_dh, stride_dt, stride_gb, stride_gh, stride_gt, stride_sb, stride_sh, stride_st,
    kv_heads, T, tiles, items,
    SINK: gl.constexpr, HAS_ALPHA: gl.constexpr, HAS_BETA: gl.constexpr, GATE: gl.constexpr,
    GROUP: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, SAVED: gl.constexpr,
):  # fmt: skip
    """Gradients of sink, alpha, beta and gate, and what hopper_backward_kernel wants: do, the incoming gradient of the
    attention, delta = <do, o>, shift, the beta that goes with do, and totals, the sum of beta * gate * dy over an item.

    The size of the row factor alpha * gate is in lse, its sign in do. Under an elementwise gate do is sign * gate * dy;
    else it is dy, of which rows with a negative factor are negated here. delta must be that of do as it is rounded:
    weights multiply a difference, which is 0 where a row sees one key.
    """
    gl.static_assert(not HAS_BETA or M % SAVED == 0, "sums of values are known where an item begins")
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    s_tiles = gl.allocate_shared_memory(d_dy.dtype, [STAGES, 1, 1, M, D], d_dy.layout)
    s_before = gl.allocate_shared_memory(gl.float32, [STAGES, D], PLAIN)
    s_numbers = gl.allocate_shared_memory(gl.float32, [STAGES * NUMBERS, M], PLAIN)
    ONES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([M, M], d_dy.dtype)
    s_ones = gl.allocate_shared_memory(d_dy.dtype, [M, M], ONES)
    if HAS_BETA:
        SQUARE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
        o_i, o_j = gl.arange(0, M, gl.SliceLayout(1, SQUARE)), gl.arange(0, M, gl.SliceLayout(0, SQUARE))
        s_ones.store(gl.where(o_j[None, :] <= o_i[:, None], 1.0, 0.0).to(d_dy.dtype))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for stage in gl.static_range(STAGES):
        # The copy engine, and each thread of the warp that asks.
        mbarrier.init(full.index(stage), count=1 + 32)
        mbarrier.init(free.index(stage), count=1)
    fence_async_shared()
    ring, sizes = (s_tiles, full, free), (kv_heads, T, tiles, items)
    inputs, outputs = (d_dy, d_o, d_v, d_gate), (d_do, d_dgate, p_dy)
    rows = (p_before, p_alpha, p_beta, p_gate, p_sink, p_lse)
    results = (p_dsink, p_dalpha, p_dbeta, p_dgate, p_delta, p_shift, p_totals)
    strides = (stride_gb, stride_gh, stride_gt, stride_sb, stride_sh, stride_st)
    gl.warp_specialize([
        (_differentiate, (outputs, results, ring, s_before, s_numbers, s_ones, sizes, (stride_db, stride_dh, stride_dt),
                          SINK, HAS_ALPHA, HAS_BETA, GATE, GROUP, D, STAGES)),
        (_load, (inputs, rows, ring, s_before, s_numbers, sizes, strides,
                 SINK, HAS_ALPHA, HAS_BETA, GATE, GROUP, D, STAGES, SAVED)),
    ], [1], [40])  # fmt: skip
