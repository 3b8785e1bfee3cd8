"""Gluon kernel: gradients of sink, alpha, beta and gate, and the row statistics that sm90_backward_kernel reads.

It runs before the attention's backward, as FlashAttention's preprocess kernel does, and should be as fast as a copy:
bytes must be in flight all the time, and neighbours in memory together. One warp only issues loads: TMA brings tiles of
ROWS x COLUMNS into pipeline stages in shared memory, and row statistics come along as small asynchronous copies. One
warpgroup computes from there. Few stages are enough, and more are slower: what lies in them when the last bytes arrive
is still to be computed.

With 128 columns a token has two rows of a tile, one after the other: so a tile is one piece of memory, as a tile of 64
columns is. An item is a tile of values, and those of dy, o and gates of all query heads that share them, head by head.
The sums u of values up to each token are a triangle of ones times the values, plus what lies before; they stay in
registers for all heads. Items follow each other in memory, and CTAs take them in turns.

Legend. d_ tensor descriptor, s_ shared memory, p_ pointer, b_ block in registers, o_ offsets, m_ mask. D head dim, T
tokens, PARTS rows of a token. stride_xb, _xh, _xt: of tensor x along batch, heads and tokens; d do, g gate, s sink.
Barriers: full and free, see pipeline.py.
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

from affine_attn.kernels.constants import ELEMENTWISE, HEADWISE, LEARNED_SINK
from affine_attn.kernels.sm90.pipeline import matrix, wait_free, wait_full

ROWS = tl.constexpr(64)
COLUMNS = tl.constexpr(64)
# Where a stage has its row statistics, and how many of them.
ALPHA = tl.constexpr(0)
BETA = tl.constexpr(1)
ROW_GATE = tl.constexpr(2)
SINK_LOGIT = tl.constexpr(3)
LSE = tl.constexpr(4)
NUMBERS = tl.constexpr(5)


@gluon.jit
def _count(sizes):
    """Return how many items this CTA has."""
    return gl.cdiv(sizes[3] - gl.program_id(0), gl.num_programs(0))


@gluon.jit
def _item(n, sizes, PARTS: gl.constexpr):
    """Return the n-th item of this CTA: its number, batch entry, kv head, both in one number, first token."""
    kv_heads, _, per_head, _ = sizes
    item = gl.program_id(0) + n * gl.num_programs(0)
    bh = item // per_head
    return item, bh // kv_heads, bh % kv_heads, bh.to(gl.int64), item % per_head * (ROWS // PARTS)


@gluon.jit
def _load(
    inputs, numbers, memory, barriers, sizes, strides,
    SINK: gl.constexpr, HAS_ALPHA: gl.constexpr, HAS_BETA: gl.constexpr, GATE: gl.constexpr,
    GROUP: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, SAVED: gl.constexpr,
):  # fmt: skip
    """Load tiles and row statistics: the producer warp."""
    # Launched while the kernel before it ends: nothing is read, and so nothing written, before that one is done.
    gdc_wait()
    PARTS: gl.constexpr = D // COLUMNS
    TENSORS: gl.constexpr = 3 if GATE == ELEMENTWISE else 2
    BYTES: gl.constexpr = ROWS * COLUMNS * 2
    d_dy, d_o, d_v, d_gate = inputs
    p_before, p_alpha, p_beta, p_gate, p_sink, p_lse = numbers
    s_tiles, s_numbers, s_v, s_before = memory[0], memory[1], memory[2], memory[3]
    full, free, v_full, v_free = barriers
    T = sizes[1]
    stride_gb, stride_gh, stride_gt, stride_sb, stride_sh, stride_st = strides
    # One number a thread at a time: they may begin anywhere. Each row of a token gets the token's.
    o_m = gl.arange(0, ROWS, gl.BlockedLayout([1], [32], [1], [0])) // PARTS
    o_d = gl.arange(0, D, gl.BlockedLayout([D // 32], [32], [1], [0]))
    i = 0
    for n in range(_count(sizes)):
        _, b, kv, bh, token0 = _item(n, sizes, PARTS)
        if HAS_BETA:
            stage = n % STAGES
            wait_free(v_free, n, stage, STAGES)
            p_sum = p_before + (bh * gl.cdiv(T, SAVED) + token0 // SAVED) * D
            async_copy.async_copy_global_to_shared(s_before.index(stage), p_sum + o_d)
            async_copy.mbarrier_arrive(v_full.index(stage), increment_count=False)
            mbarrier.expect(v_full.index(stage), BYTES)
            tma.async_copy_global_to_shared(d_v, [b, kv, token0, 0, 0], v_full.index(stage), s_v.index(stage))
        for g in range(GROUP):
            h, o_t = kv * GROUP + g, token0 + o_m
            o_row, m_t = (bh * GROUP + g) * T + o_t, o_t < T
            stage = i % STAGES
            my_full, number = full.index(stage), stage * NUMBERS
            wait_free(free, i, stage, STAGES)
            if HAS_ALPHA:
                async_copy.async_copy_global_to_shared(s_numbers.index(number + ALPHA), p_alpha + o_row, mask=m_t)
            if HAS_BETA:
                async_copy.async_copy_global_to_shared(s_numbers.index(number + BETA), p_beta + o_row, mask=m_t)
            if GATE == HEADWISE:
                p_rows = p_gate + b.to(gl.int64) * stride_gb + h.to(gl.int64) * stride_gh
                p_rows = p_rows + o_t.to(gl.int64) * stride_gt
                async_copy.async_copy_global_to_shared(s_numbers.index(number + ROW_GATE), p_rows, mask=m_t)
            if SINK == LEARNED_SINK:
                p_rows = p_sink + b.to(gl.int64) * stride_sb + h.to(gl.int64) * stride_sh
                p_rows = p_rows + o_t.to(gl.int64) * stride_st
                async_copy.async_copy_global_to_shared(s_numbers.index(number + SINK_LOGIT), p_rows, mask=m_t)
                async_copy.async_copy_global_to_shared(s_numbers.index(number + LSE), p_lse + o_row, mask=m_t)
            # Full when the tiles are there, and what each thread has asked for.
            async_copy.mbarrier_arrive(my_full, increment_count=False)
            mbarrier.expect(my_full, TENSORS * BYTES)
            corner = [b, h, token0, 0, 0]
            tma.async_copy_global_to_shared(d_dy, corner, my_full, s_tiles.index(stage * TENSORS))
            tma.async_copy_global_to_shared(d_o, corner, my_full, s_tiles.index(stage * TENSORS + 1))
            if GATE == ELEMENTWISE:
                tma.async_copy_global_to_shared(d_gate, corner, my_full, s_tiles.index(stage * TENSORS + 2))
            i += 1


@gluon.jit
def _number(s_numbers, stage, which: gl.constexpr, m_t, other: gl.constexpr, ROW: gl.constexpr):
    """Read a row statistic from a stage; lanes past the last token hold garbage and get ``other``."""
    return gl.where(m_t, s_numbers.index(stage * NUMBERS + which).load(ROW), other)


@gluon.jit
def _values_seen(stage, o_r, memory, PARTS: gl.constexpr, LAYOUT: gl.constexpr):
    """Start the MMA of u, the sum of the values up to each token."""
    s_v, s_before, s_ones = memory[2], memory[3], memory[4]
    b_start = gl.zeros([ROWS, COLUMNS], gl.float32, LAYOUT)
    for part in gl.static_range(PARTS):
        s_columns = s_before.index(stage).slice(part * COLUMNS, COLUMNS)
        b_before = s_columns.load(gl.SliceLayout(0, LAYOUT))[None, :]
        b_start = gl.where((o_r % PARTS == part)[:, None], b_before, b_start)
    return warpgroup_mma(s_ones, matrix(s_v, stage, ROWS, COLUMNS), b_start, is_async=True)


@gluon.jit
def _over_columns(b_rows, PARTS: gl.constexpr, ROW: gl.constexpr):
    """Sum over all columns of a token, in each of its rows."""
    b_parts = gl.reshape(gl.sum(b_rows, 1), [ROWS // PARTS, PARTS])
    b_sums, _ = gl.broadcast(gl.sum(b_parts, 1)[:, None], b_parts)
    return gl.convert_layout(gl.reshape(b_sums, [ROWS]), ROW)


@gluon.jit
def _store_sum_over_tokens(p_total, b_rows, PARTS: gl.constexpr):
    """Sum through a layout in which a thread has all rows of a column: shuffles would take twice as long."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([ROWS // 2 // PARTS, 1, 1], [1, 1, 32], [1, PARTS, 4 // PARTS], [2, 1, 0])
    COLUMN: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    # The two rows that a thread has already.
    b_pairs = gl.sum(gl.reshape(b_rows, [4, 2, 8, COLUMNS]), 1)
    b_tokens = gl.convert_layout(gl.reshape(b_pairs, [ROWS // 2 // PARTS, PARTS, COLUMNS]), LAYOUT)
    o_part, o_d = gl.arange(0, PARTS, gl.SliceLayout(1, COLUMN)), gl.arange(0, COLUMNS, gl.SliceLayout(0, COLUMN))
    gl.store(p_total + o_part[:, None] * COLUMNS + o_d[None, :], gl.sum(b_tokens, 0))


@gluon.jit
def _negate(
    p_do, p_alpha, p_gate, sizes, strides,
    HAS_ALPHA: gl.constexpr, GATE: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Negate rows with a negative factor, of all items of this CTA. No variant has any; where a call does, dy is read
    again."""
    TOKENS: gl.constexpr = ROWS * COLUMNS // D
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    stride_db, stride_dh, stride_dt, stride_gb, stride_gh, stride_gt = strides
    T = sizes[1]
    o_m, o_d = gl.arange(0, TOKENS, gl.SliceLayout(1, LAYOUT)), gl.arange(0, D, gl.SliceLayout(0, LAYOUT))
    for n in range(_count(sizes)):
        _, b, kv, bh, token0 = _item(n, sizes, D // COLUMNS)
        for g in range(GROUP):
            h, o_t = (kv * GROUP + g).to(gl.int64), token0 + o_m
            m_t = o_t < T
            p_rows = p_do + b.to(gl.int64) * stride_db + h * stride_dh + (o_t.to(gl.int64) * stride_dt)[:, None]
            # All rows, so that it need not wait for the factors.
            b_dy = gl.load(p_rows + o_d[None, :], mask=m_t[:, None] & (o_d < D)[None, :], other=0.0)
            b_factor = gl.full([TOKENS], 1.0, gl.float32, gl.SliceLayout(1, LAYOUT))
            if HAS_ALPHA:
                b_factor = gl.load(p_alpha + (bh * GROUP + g) * T + o_t, mask=m_t, other=1.0)
            if GATE == HEADWISE:
                p_gates = p_gate + b.to(gl.int64) * stride_gb + h * stride_gh + o_t.to(gl.int64) * stride_gt
                b_factor *= gl.load(p_gates, mask=m_t, other=1.0)
            m_negative = (m_t & (b_factor < 0))[:, None] & (o_d < D)[None, :]
            gl.store(p_rows + o_d[None, :], (-b_dy.to(gl.float32)).to(b_dy.dtype), mask=m_negative)


@gluon.jit
def _differentiate(
    outputs, results, factors, memory, barriers, sizes, strides,
    SINK: gl.constexpr, HAS_ALPHA: gl.constexpr, HAS_BETA: gl.constexpr, GATE: gl.constexpr,
    GROUP: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Compute the gradients: the consumer warpgroup."""
    PARTS: gl.constexpr = D // COLUMNS
    TENSORS: gl.constexpr = 3 if GATE == ELEMENTWISE else 2
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    d_do, d_dgate, p_do = outputs
    p_alpha, p_gate = factors
    p_dsink, p_dalpha, p_dbeta, p_dgate, p_delta, p_shift, p_totals = results
    s_tiles, s_numbers = memory[0], memory[1]
    full, free, v_full, v_free = barriers
    T = sizes[1]
    o_r = gl.arange(0, ROWS, ROW)
    b_least = gl.full([ROWS], 1.0, gl.float32, ROW)
    i = 0
    for n in range(_count(sizes)):
        item, b, kv, bh, token0 = _item(n, sizes, PARTS)
        b_weighted = gl.zeros([ROWS, COLUMNS], gl.float32, LAYOUT)
        o_t = token0 + o_r // PARTS
        m_t = o_t < T
        # Of a token's rows one writes.
        m_once = m_t & (o_r % PARTS == 0)
        b_u = gl.zeros([ROWS, COLUMNS], gl.float32, LAYOUT)
        if HAS_BETA:
            stage = n % STAGES
            wait_full(v_full, n, stage, STAGES)
            b_u = warpgroup_mma_wait(0, deps=(_values_seen(stage, o_r, memory, PARTS, LAYOUT),))
            mbarrier.arrive(v_free.index(stage), count=1)
        for g in range(GROUP):
            o_row = (bh * GROUP + g) * T + o_t
            stage = i % STAGES
            wait_full(full, i, stage, STAGES)
            b_alpha, b_gate = gl.full([ROWS], 1.0, gl.float32, ROW), gl.full([ROWS], 1.0, gl.float32, ROW)
            b_beta, b_sink, b_lse = b_alpha, b_alpha, b_alpha
            if HAS_ALPHA:
                b_alpha = _number(s_numbers, stage, ALPHA, m_t, 1.0, ROW)
            if HAS_BETA:
                b_beta = _number(s_numbers, stage, BETA, m_t, 0.0, ROW)
            if GATE == HEADWISE:
                b_gate = _number(s_numbers, stage, ROW_GATE, m_t, 1.0, ROW)
            if SINK == LEARNED_SINK:
                b_sink = _number(s_numbers, stage, SINK_LOGIT, m_t, 0.0, ROW)
                b_lse = _number(s_numbers, stage, LSE, m_t, 0.0, ROW)
            b_factor = b_alpha * b_gate
            b_least = gl.minimum(b_least, b_factor)
            b_sign = gl.where(b_factor < 0, -1.0, 1.0)
            s_dy = matrix(s_tiles, stage * TENSORS, ROWS, COLUMNS)
            b_do = s_dy.load(LAYOUT)
            b_o = matrix(s_tiles, stage * TENSORS + 1, ROWS, COLUMNS).load(LAYOUT).to(gl.float32)
            if GATE == ELEMENTWISE:
                # do and dgate take the place of dy and the gate.
                s_gate = matrix(s_tiles, stage * TENSORS + 2, ROWS, COLUMNS)
                b_dy, b_gates = b_do.to(gl.float32), s_gate.load(LAYOUT).to(gl.float32)
                b_inner = b_o * b_alpha[:, None]
                if HAS_BETA:
                    b_inner += b_beta[:, None] * b_u
                b_do = (b_dy * b_gates).to(b_do.dtype)
                s_gate.store((b_dy * b_inner).to(b_do.dtype))
                s_dy.store((b_sign[:, None] * b_do.to(gl.float32)).to(b_do.dtype))
                fence_async_shared()
                corner = [b, kv * GROUP + g, token0, 0, 0]
                tma.async_copy_shared_to_global(d_dgate, corner, s_tiles.index(stage * TENSORS + 2))
                tma.async_copy_shared_to_global(d_do, corner, s_tiles.index(stage * TENSORS))
                # What was to leave the stage before has left.
                tma.store_wait(2)
                if i > 0:
                    mbarrier.arrive(free.index((i - 1) % STAGES), count=1)
            else:
                mbarrier.arrive(free.index(stage), count=1)
            i += 1
            b_do32 = b_do.to(gl.float32)
            b_along = _over_columns(b_do32 * b_o, PARTS, ROW)
            b_row_dgate = b_alpha * b_along
            if HAS_BETA:
                b_weighted += (b_gate * b_beta)[:, None] * b_do32
                b_to_u = _over_columns(b_do32 * b_u, PARTS, ROW)
                b_row_dgate += b_beta * b_to_u
                gl.store(p_dbeta + o_row, (b_gate * b_to_u).to(p_dbeta.dtype.element_ty), mask=m_once)
            if HAS_ALPHA:
                gl.store(p_dalpha + o_row, b_gate * b_along, mask=m_once)
            if GATE == HEADWISE:
                gl.store(p_dgate + o_row, b_row_dgate.to(p_dgate.dtype.element_ty), mask=m_once)
            if GATE == HEADWISE and HAS_BETA:
                gl.store(p_shift + o_row, b_sign * b_gate * b_beta, mask=m_once)
            if GATE == HEADWISE or not HAS_ALPHA or not HAS_BETA:
                gl.store(p_delta + o_row, b_sign * b_along, mask=m_once)
            if SINK == LEARNED_SINK:
                b_p_sink = gl.exp(gl.where(b_lse == b_sink, 0.0, b_sink - b_lse))
                gl.store(p_dsink + o_row, -b_sign * b_p_sink * b_along, mask=m_once)
        if HAS_BETA:
            _store_sum_over_tokens(p_totals + item.to(gl.int64) * D, b_weighted, PARTS)
    if GATE == ELEMENTWISE:
        tma.store_wait(0)
    elif HAS_ALPHA or GATE == HEADWISE:
        if gl.min(b_least, 0) < 0:
            _negate(p_do, p_alpha, p_gate, sizes, strides, HAS_ALPHA, GATE, GROUP, D)


@gluon.jit
def _make_triangle(s_ones, PARTS: gl.constexpr):
    """Write ones for each row and the rows of the same columns before it. In the MMA a value that is not finite also
    reaches, as 0 times it, tokens of the tile before it and the columns of the other half."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    o_i, o_j = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)), gl.arange(0, ROWS, gl.SliceLayout(0, LAYOUT))
    m_seen = (o_j[None, :] <= o_i[:, None]) & (o_j[None, :] % PARTS == o_i[:, None] % PARTS)
    s_ones.store(gl.where(m_seen, 1.0, 0.0).to(s_ones.dtype))


@gluon.jit
def sm90_preprocess_kernel(
    d_dy, d_o, d_v, d_gate, d_do, d_dgate, p_before, p_lse, p_sink, p_alpha, p_beta, p_gate,
    p_do, p_dsink, p_dalpha, p_dbeta, p_dgate, p_delta, p_shift, p_totals,
    stride_db, stride_dh, stride_dt, stride_gb, stride_gh, stride_gt, stride_sb, stride_sh, stride_st,
    kv_heads, T, per_head, items,
    SINK: gl.constexpr, HAS_ALPHA: gl.constexpr, HAS_BETA: gl.constexpr, GATE: gl.constexpr,
    GROUP: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, SAVED: gl.constexpr,
):  # fmt: skip
    """Write gradients of sink, alpha, beta and gate, and what sm90_backward_kernel reads: do, the incoming gradient of
    the attention, delta = <do, o>, shift, the beta that goes with do, totals, the sum of beta * gate * dy over an item.

    The size of the row factor alpha * gate is in lse, its sign in do. Under an elementwise gate do is sign * gate * dy;
    else it is dy, of which rows with a negative factor are negated here. delta must be that of do as it is rounded:
    weights multiply a difference, which is 0 where a row sees one key. Without a gate per head shift is beta, and
    delta, if there is alpha too, its gradient, both up to the sign of alpha: these are not written.
    """
    PARTS: gl.constexpr = D // COLUMNS
    TENSORS: gl.constexpr = 3 if GATE == ELEMENTWISE else 2
    gl.static_assert(not HAS_BETA or ROWS // PARTS % SAVED == 0, "sums of values are known where a tile begins")
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    s_tiles = gl.allocate_shared_memory(
        d_dy.dtype, [STAGES * TENSORS, 1, 1, ROWS // PARTS, PARTS, COLUMNS], d_dy.layout
    )
    s_numbers = gl.allocate_shared_memory(gl.float32, [STAGES * NUMBERS, ROWS], PLAIN)
    s_v = gl.allocate_shared_memory(d_dy.dtype, [STAGES, 1, 1, ROWS // PARTS, PARTS, COLUMNS], d_dy.layout)
    s_before = gl.allocate_shared_memory(gl.float32, [STAGES, D], PLAIN)
    ONES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, ROWS], d_dy.dtype)
    s_ones = gl.allocate_shared_memory(d_dy.dtype, [ROWS, ROWS], ONES)
    if HAS_BETA:
        _make_triangle(s_ones, PARTS)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for stage in gl.static_range(STAGES):
        # TMA, and each thread of the producer warp.
        mbarrier.init(full.index(stage), count=1 + 32)
        mbarrier.init(v_full.index(stage), count=1 + 32)
        mbarrier.init(free.index(stage), count=1)
        mbarrier.init(v_free.index(stage), count=1)
    fence_async_shared()
    memory, barriers = (s_tiles, s_numbers, s_v, s_before, s_ones), (full, free, v_full, v_free)
    inputs, numbers = (d_dy, d_o, d_v, d_gate), (p_before, p_alpha, p_beta, p_gate, p_sink, p_lse)
    outputs, factors, sizes = (d_do, d_dgate, p_do), (p_alpha, p_gate), (kv_heads, T, per_head, items)
    results = (p_dsink, p_dalpha, p_dbeta, p_dgate, p_delta, p_shift, p_totals)
    gl.warp_specialize([
        (_differentiate, (outputs, results, factors, memory, barriers, sizes,
                          (stride_db, stride_dh, stride_dt, stride_gb, stride_gh, stride_gt),
                          SINK, HAS_ALPHA, HAS_BETA, GATE, GROUP, D, STAGES)),
        (_load, (inputs, numbers, memory, barriers, sizes,
                 (stride_gb, stride_gh, stride_gt, stride_sb, stride_sh, stride_st),
                 SINK, HAS_ALPHA, HAS_BETA, GATE, GROUP, D, STAGES, SAVED)),
    ], [1], [40])  # fmt: skip
