"""Gluon kernel: the gradients of alpha, beta and v that affine attention adds to a plain backward, in one pass.

Every tensor is read once, by the copy engine, in the order in which it lies in memory, and nothing is left for another
kernel. An item is L tokens of one kv head, with the query heads of its group. Items of a kv head are numbered from its
last tokens to its first, and program p of P takes items p, p + P, ...: at any time the programs together work on
neighbouring memory, as a copy does.

dv of a token wants the sum of beta * dy over all later tokens, which other programs have. A program publishes the total
of an item as soon as it has it, and asks for those of later tokens one item afterwards, when they should be there. What
is not there yet is ABSENT, bits that no arithmetic makes, so each number is its own flag. An item waits only for items
with smaller numbers: none waits for ever.

A program has a warp that loads; for each C columns a group of four warps that multiplies and sums; a warp that brings
numbers per row, one that brings the totals of later tokens, and one that writes gradients of numbers per row.

Legend. d_ tensor descriptor, s_ shared memory, p_ pointer, b_ block in registers, t_ one that is on its way, o_
offsets, m_ mask. Barriers: full, of what is there, and free, of what is done with. Where there are two slots, they take
turns.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Tokens of an item, columns of a group of warps, items whose totals are added up one by one, and how many at once.
L = tl.constexpr(64)
C = tl.constexpr(64)
BLOCK = tl.constexpr(16)
AT_ONCE = tl.constexpr(8)
ABSENT = tl.constexpr(-21555)


@gluon.jit
def _item(n, sizes):
    """The n-th item of this program: batch entry, kv head, number of both together, number of its tokens' segment."""
    _items, segments, kv_heads, _T = sizes
    i = gl.program_id(0) + n * gl.num_programs(0)
    bh = i // segments
    return bh // kv_heads, bh % kv_heads, bh, segments - 1 - i % segments


@gluon.jit
def _count(sizes):
    return gl.cdiv(sizes[0] - gl.program_id(0), gl.num_programs(0))


@gluon.jit
def _panel(s, slot):
    return s.index(slot).reshape([L, C])


@gluon.jit
def _load(inputs, memory, barriers, sizes, GROUP: gl.constexpr, PANELS: gl.constexpr, STAGES: gl.constexpr):
    """The warp that loads. dv comes an item later than the rest."""
    d_dy, d_o, d_v, d_dv = inputs
    s_dy, s_o, s_v, s_dv = memory[0], memory[1], memory[2], memory[3]
    full, free, v_full, v_free, dv_full, dv_free = barriers[:6]
    count = _count(sizes)
    i = 0
    for n in range(count + 1):
        if n < count:
            b, kv, _bh, segment = _item(n, sizes)
            mbarrier.wait(v_free.index(n & 1), ((n // 2) & 1) ^ 1)
            mbarrier.expect(v_full.index(n & 1), L * PANELS * C * 2)
            for panel in gl.static_range(PANELS):
                tma.async_copy_global_to_shared(
                    d_v, [b, kv, segment * L, panel * C], v_full.index(n & 1), s_v.index((n & 1) * PANELS + panel)
                )
            for g in range(GROUP):
                slot = i % STAGES
                mbarrier.wait(free.index(slot), ((i // STAGES) & 1) ^ 1)
                mbarrier.expect(full.index(slot), 2 * L * PANELS * C * 2)
                for panel in gl.static_range(PANELS):
                    corner = [b, kv * GROUP + g, segment * L, panel * C]
                    tma.async_copy_global_to_shared(d_dy, corner, full.index(slot), s_dy.index(slot * PANELS + panel))
                    tma.async_copy_global_to_shared(d_o, corner, full.index(slot), s_o.index(slot * PANELS + panel))
                i += 1
        if n > 0:
            m = n - 1
            b, kv, _bh, segment = _item(m, sizes)
            mbarrier.wait(dv_free.index(m & 1), ((m // 2) & 1) ^ 1)
            mbarrier.expect(dv_full.index(m & 1), L * PANELS * C * 2)
            for panel in gl.static_range(PANELS):
                tma.async_copy_global_to_shared(
                    d_dv, [b, kv, segment * L, panel * C], dv_full.index(m & 1), s_dv.index((m & 1) * PANELS + panel)
                )


@gluon.jit
def _bring_rows(rows, memory, barriers, sizes, GROUP: gl.constexpr, PANELS: gl.constexpr, SAVED: gl.constexpr):
    """A warp that brings the sum of the values before an item, and beta with the sign of alpha."""
    p_alpha, p_beta, p_before, _dalpha, _dbeta, _totals = rows
    s_before, s_beta = memory[6], memory[7]
    rows_full, rows_free = barriers[6], barriers[7]
    T = sizes[3]
    o = gl.arange(0, L, gl.BlockedLayout([L // 32], [32], [1], [0]))
    for n in range(_count(sizes)):
        _b, _kv, bh, segment = _item(n, sizes)
        o_t = segment * L + o
        mbarrier.wait(rows_free.index(n & 1), ((n // 2) & 1) ^ 1)
        p_row = p_before + (bh.to(gl.int64) * gl.cdiv(T, SAVED) + segment * (L // SAVED)) * PANELS * C
        for panel in gl.static_range(PANELS):
            s_before.index((n & 1) * PANELS + panel).store(gl.load(p_row + panel * C + o))
        for g in range(GROUP):
            first = (bh.to(gl.int64) * GROUP + g) * T
            b_alpha = gl.load(p_alpha + first + o_t, mask=o_t < T, other=1.0).to(gl.float32)
            b_beta = gl.load(p_beta + first + o_t, mask=o_t < T, other=0.0).to(gl.float32)
            s_beta.index((n & 1) * GROUP + g).store(gl.where(b_alpha < 0, -b_beta, b_beta))
        mbarrier.arrive(rows_full.index(n & 1), count=1)


@gluon.jit
def _present(p, m):
    """Numbers that other programs publish, as soon as all are there."""
    b_bits = gl.load(p, mask=m, other=0, volatile=True)
    while gl.max(gl.max((b_bits == ABSENT).to(gl.int32), 1), 0) > 0:
        b_bits = gl.load(p, mask=m, other=0, volatile=True)
    return b_bits.to(gl.float32, bitcast=True)


@gluon.jit
def _bring_totals(rows, memory, barriers, sizes, PANELS: gl.constexpr):
    """A warp that adds up the totals of the tokens after an item: those of the items in its block of them one by one,
    and one for all later blocks, which the item that comes last in a block publishes for the next."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, PANELS * C // 32], [1, 32], [1, 1], [1, 0])
    D: gl.constexpr = PANELS * C
    p_totals = rows[5]
    s_after = memory[8]
    after_full, after_free, part_full = barriers[8], barriers[9], barriers[10]
    segments = sizes[1]
    blocks = gl.cdiv(segments, BLOCK)
    o_r = gl.arange(0, AT_ONCE, gl.SliceLayout(1, LAYOUT))
    o_d = gl.arange(0, D, gl.SliceLayout(0, LAYOUT))
    for n in range(_count(sizes)):
        _b, _kv, bh, segment = _item(n, sizes)
        p_head = p_totals + bh.to(gl.int64) * (segments + blocks) * D
        block = segment // BLOCK
        # Programs go about in step: those of the later tokens are not ready before this one is.
        mbarrier.wait(part_full.index(n & 1), (n // 2) & 1)
        b_after = gl.zeros([D], gl.float32, gl.SliceLayout(0, LAYOUT))
        for start in gl.static_range(0, BLOCK, AT_ONCE):
            # The last row is the number for all later blocks.
            o_later = segment + 1 + start + o_r
            is_last = start + o_r == BLOCK - 1
            o_row = gl.where(is_last, segments + block + 1, o_later)
            m_row = gl.where(is_last, block + 1 < blocks, (o_later // BLOCK == block) & (o_later < segments))
            b_after += gl.sum(_present(p_head + o_row[:, None] * D + o_d[None, :], m_row[:, None]), 0)
        mbarrier.wait(after_free.index(n & 1), ((n // 2) & 1) ^ 1)
        s_after.index(n & 1).store(b_after)
        mbarrier.arrive(after_full.index(n & 1), count=1)
        if segment % BLOCK == 0:
            b_own = gl.sum(_present(p_head + segment * D + o_d[None, :], (o_d >= 0)[None, :]), 0)
            gl.store(p_head + (segments + block) * D + o_d, (b_own + b_after).to(gl.int32, bitcast=True))


@gluon.jit
def _write_rows(rows, memory, barriers, sizes, p_dy, strides, GROUP: gl.constexpr, PANELS: gl.constexpr):
    """A warp that writes the gradients of alpha and beta, and turns rows of dy back that came negated."""
    p_alpha, _beta, _before, p_dalpha, p_dbeta, _totals = rows
    s_part = memory[9]
    part_full, part_free = barriers[10], barriers[11]
    stride_b, stride_h, stride_t = strides
    T = sizes[3]
    LINE: gl.constexpr = gl.BlockedLayout([L // 32], [32], [1], [0])
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    o = gl.arange(0, L, LINE)
    o_r = gl.arange(0, 4, gl.SliceLayout(1, LAYOUT))
    o_d = gl.arange(0, PANELS * C, gl.SliceLayout(0, LAYOUT))
    for n in range(_count(sizes)):
        b, kv, bh, segment = _item(n, sizes)
        o_t = segment * L + o
        mbarrier.wait(part_full.index(n & 1), (n // 2) & 1)
        for g in range(GROUP):
            first = (bh.to(gl.int64) * GROUP + g) * T
            b_alpha = gl.load(p_alpha + first + o_t, mask=o_t < T, other=1.0).to(gl.float32)
            b_sign = gl.where(b_alpha < 0, -1.0, 1.0)
            part = ((n & 1) * GROUP + g) * PANELS * 2
            b_dalpha, b_dbeta = gl.zeros([L], gl.float32, LINE), gl.zeros([L], gl.float32, LINE)
            for panel in gl.static_range(PANELS):
                b_dalpha += s_part.index(part + panel * 2).load(LINE)
                b_dbeta += s_part.index(part + panel * 2 + 1).load(LINE)
            gl.store(p_dalpha + first + o_t, b_sign * b_dalpha, mask=o_t < T)
            gl.store(p_dbeta + first + o_t, b_sign * b_dbeta, mask=o_t < T)
            if gl.min(b_alpha, 0) < 0:
                p_head = p_dy + b.to(gl.int64) * stride_b + (kv * GROUP + g).to(gl.int64) * stride_h
                for row in range(0, L, 4):
                    o_row = segment * L + row + o_r
                    m_row = gl.load(p_alpha + first + o_row, mask=o_row < T, other=1.0).to(gl.float32) < 0
                    p_rows = p_head + o_row.to(gl.int64)[:, None] * stride_t + o_d[None, :]
                    gl.store(p_rows, -gl.load(p_rows, mask=m_row[:, None], other=0.0), mask=m_row[:, None])
        mbarrier.arrive(part_free.index(n & 1), count=1)


@gluon.jit
def _add_to_dv(
    panel: gl.constexpr, n, b_from, d_dv, memory, barriers, sizes, PANELS: gl.constexpr, LAYOUT: gl.constexpr
):  # fmt: skip
    """dv of item n += the sums from its tokens on: within the item, and after it."""
    s_dv, s_after = memory[3], memory[8]
    dv_full, dv_free, after_full, after_free = barriers[4], barriers[5], barriers[8], barriers[9]
    b, kv, _bh, segment = _item(n, sizes)
    mbarrier.wait(after_full.index(n & 1), (n // 2) & 1)
    b_after = s_after.index(n & 1).slice(panel * C, C).load(gl.SliceLayout(0, LAYOUT))
    mbarrier.arrive(after_free.index(n & 1), count=1)
    mbarrier.wait(dv_full.index(n & 1), (n // 2) & 1)
    slot = (n & 1) * PANELS + panel
    b_dv = _panel(s_dv, slot).load(LAYOUT).to(gl.float32) + (b_from + b_after[None, :])
    _panel(s_dv, slot).store(b_dv.to(s_dv.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(d_dv, [b, kv, segment * L, panel * C], s_dv.index(slot))
    if n > 0:
        tma.store_wait(1)
        mbarrier.arrive(dv_free.index((n - 1) & 1), count=1)


@gluon.jit
def _differentiate(
    panel: gl.constexpr, p_totals, d_dv, memory, barriers, sizes,
    GROUP: gl.constexpr, PANELS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A group of warps, with C columns of every item."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    s_dy, s_o, s_v, _dv, s_ones, s_weighted, s_before, s_beta, _after, s_part = memory
    full, free, v_full, v_free, _5, _6, rows_full, rows_free, _9, _10, part_full, part_free = barriers
    segments = sizes[1]
    o_t, o_d = gl.arange(0, L, ROWS), gl.arange(0, C, COLUMNS)
    b_zero = gl.zeros([L, C], gl.float32, LAYOUT)
    b_last = b_zero
    count = _count(sizes)
    i = 0
    for n in range(count):
        _b, _kv, bh, segment = _item(n, sizes)
        mbarrier.wait(v_full.index(n & 1), (n // 2) & 1)
        t_u = warpgroup_mma(s_ones, _panel(s_v, (n & 1) * PANELS + panel), b_zero, use_acc=False, is_async=True)
        mbarrier.wait(rows_full.index(n & 1), (n // 2) & 1)
        b_before = s_before.index((n & 1) * PANELS + panel).load(COLUMNS)
        b_u = warpgroup_mma_wait(0, deps=(t_u,)) + b_before[None, :]
        mbarrier.arrive(v_free.index(n & 1), count=1)
        mbarrier.wait(part_free.index(n & 1), ((n // 2) & 1) ^ 1)
        b_weighted = b_zero
        for g in range(GROUP):
            slot = i % STAGES
            mbarrier.wait(full.index(slot), (i // STAGES) & 1)
            b_dy = _panel(s_dy, slot * PANELS + panel).load(LAYOUT).to(gl.float32)
            b_o = _panel(s_o, slot * PANELS + panel).load(LAYOUT).to(gl.float32)
            mbarrier.arrive(free.index(slot), count=1)
            part = (((n & 1) * GROUP + g) * PANELS + panel) * 2
            s_part.index(part).store(gl.sum(b_dy * b_o, 1))
            s_part.index(part + 1).store(gl.sum(b_dy * b_u, 1))
            b_weighted += s_beta.index((n & 1) * GROUP + g).load(ROWS)[:, None] * b_dy
            i += 1
        mbarrier.arrive(part_full.index(n & 1), count=1)
        mbarrier.arrive(rows_free.index(n & 1), count=1)
        # As two numbers of 16 bits each, so that their sums have more than the 16 bits of the result.
        b_high = b_weighted.to(s_dy.dtype)
        _panel(s_weighted, panel * 2).store(b_high)
        _panel(s_weighted, panel * 2 + 1).store((b_weighted - b_high.to(gl.float32)).to(s_dy.dtype))
        fence_async_shared()
        ones = s_ones.permute((1, 0))
        t_high = warpgroup_mma(ones, _panel(s_weighted, panel * 2), b_zero, use_acc=False, is_async=True)
        t_low = warpgroup_mma(ones, _panel(s_weighted, panel * 2 + 1), b_zero, use_acc=False, is_async=True)
        b_from = warpgroup_mma_wait(1, deps=(t_high,))
        b_from += warpgroup_mma_wait(0, deps=(t_low,))
        if n > 0:
            _add_to_dv(panel, n - 1, b_last, d_dv, memory, barriers, sizes, PANELS, LAYOUT)
        # Behind the fence in there, which would wait for these stores.
        place = bh.to(gl.int64) * (segments + gl.cdiv(segments, BLOCK)) + segment
        p_total = p_totals + place * PANELS * C + panel * C
        b_bits = b_from.to(gl.int32, bitcast=True)
        gl.store(p_total + o_t[:, None] * 0 + o_d[None, :], b_bits, mask=(o_t == 0)[:, None])
        b_last = b_from
    _add_to_dv(panel, count - 1, b_last, d_dv, memory, barriers, sizes, PANELS, LAYOUT)
    tma.store_wait(0)


@gluon.jit
def streaming_backward_kernel(
    d_dy, d_o, d_v, d_dv, p_alpha, p_beta, p_before, p_dalpha, p_dbeta, p_totals, p_dy, stride_b, stride_h, stride_t,
    items, segments, kv_heads, T,
    GROUP: gl.constexpr, PANELS: gl.constexpr, STAGES: gl.constexpr, SAVED: gl.constexpr,
):  # fmt: skip
    """dalpha = <dy, o>, dbeta = <dy, u>, dv += the sum of beta * dy from each token on; totals are ABSENT before."""
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    s_dy = gl.allocate_shared_memory(d_dy.dtype, [STAGES * PANELS, 1, 1, L, C], d_dy.layout)
    s_o = gl.allocate_shared_memory(d_dy.dtype, [STAGES * PANELS, 1, 1, L, C], d_dy.layout)
    s_v = gl.allocate_shared_memory(d_dy.dtype, [2 * PANELS, 1, 1, L, C], d_dy.layout)
    s_dv = gl.allocate_shared_memory(d_dy.dtype, [2 * PANELS, 1, 1, L, C], d_dy.layout)
    s_weighted = gl.allocate_shared_memory(d_dy.dtype, [2 * PANELS, 1, 1, L, C], d_dy.layout)
    s_before = gl.allocate_shared_memory(gl.float32, [2 * PANELS, C], PLAIN)
    s_beta = gl.allocate_shared_memory(gl.float32, [2 * GROUP, L], PLAIN)
    s_after = gl.allocate_shared_memory(gl.float32, [2, PANELS * C], PLAIN)
    s_part = gl.allocate_shared_memory(gl.float32, [2 * GROUP * PANELS * 2, L], PLAIN)
    # Ones where a column is not after its row: times values the running sums, and transposed the sums to the end.
    ONES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, L, 16])
    o_row, o_column = gl.arange(0, L, gl.SliceLayout(1, ONES)), gl.arange(0, L, gl.SliceLayout(0, ONES))
    b_ones = gl.where(o_column[None, :] <= o_row[:, None], 1.0, 0.0).to(d_dy.dtype)
    s_ones = gl.allocate_shared_memory(d_dy.dtype, [1, 1, 1, L, C], d_dy.layout).index(0).reshape([L, C])
    s_ones.store(b_ones)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    v_free = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    dv_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    dv_free = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    rows_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    rows_free = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    after_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    after_free = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    part_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    part_free = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    for two in gl.static_range(2):
        mbarrier.init(v_full.index(two), count=1)
        mbarrier.init(v_free.index(two), count=PANELS)
        mbarrier.init(dv_full.index(two), count=1)
        mbarrier.init(dv_free.index(two), count=PANELS)
        mbarrier.init(rows_full.index(two), count=1)
        mbarrier.init(rows_free.index(two), count=PANELS)
        mbarrier.init(after_full.index(two), count=1)
        mbarrier.init(after_free.index(two), count=PANELS)
        mbarrier.init(part_full.index(two), count=PANELS)
        mbarrier.init(part_free.index(two), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=PANELS)
    fence_async_shared()
    inputs, strides, sizes = (d_dy, d_o, d_v, d_dv), (stride_b, stride_h, stride_t), (items, segments, kv_heads, T)
    memory = (s_dy, s_o, s_v, s_dv, s_ones, s_weighted, s_before, s_beta, s_after, s_part)
    barriers = (
        full, free, v_full, v_free, dv_full, dv_free, rows_full, rows_free, after_full, after_free, part_full, part_free
    )  # fmt: skip
    rows = (p_alpha, p_beta, p_before, p_dalpha, p_dbeta, p_totals)
    if PANELS == 2:
        gl.warp_specialize([
            (_differentiate, (0, p_totals, d_dv, memory, barriers, sizes, GROUP, PANELS, STAGES)),
            (_differentiate, (1, p_totals, d_dv, memory, barriers, sizes, GROUP, PANELS, STAGES)),
            (_load, (inputs, memory, barriers, sizes, GROUP, PANELS, STAGES)),
            (_bring_rows, (rows, memory, barriers, sizes, GROUP, PANELS, SAVED)),
            (_bring_totals, (rows, memory, barriers, sizes, PANELS)),
            (_write_rows, (rows, memory, barriers, sizes, p_dy, strides, GROUP, PANELS)),
        ], [4, 1, 1, 1, 1], [192, 40, 40, 112, 48])  # fmt: skip
    else:
        gl.warp_specialize([
            (_differentiate, (0, p_totals, d_dv, memory, barriers, sizes, GROUP, PANELS, STAGES)),
            (_load, (inputs, memory, barriers, sizes, GROUP, PANELS, STAGES)),
            (_bring_rows, (rows, memory, barriers, sizes, GROUP, PANELS, SAVED)),
            (_bring_totals, (rows, memory, barriers, sizes, PANELS)),
            (_write_rows, (rows, memory, barriers, sizes, p_dy, strides, GROUP, PANELS)),
        ], [1, 1, 1, 1], [40, 40, 72, 48])  # fmt: skip
