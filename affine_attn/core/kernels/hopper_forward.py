"""Gluon kernel: causal attention for Hopper that finishes its rows while they are in registers.

A stock kernel writes o, and the epilogue reads it again to write y. Here sink, alpha and beta are applied before
anything is written: what o is read for, and the launches, are saved.

One program per multiprocessor goes from tile to tile, in an order that the host has made; a tile is N rows of one head.
One warp loads, and runs ahead into the next tile. Two groups of four warps attend, with M = N / 2 rows each and N keys
at a time: a step asks for the scores of a block of keys together with the sum of the block before, and exponentiates
while the tensor cores do that sum, or the other group's products.

Sums of values for beta: in the block of the diagonal a product with a triangle of ones, per group; two more warps add
up the blocks before, as they come by.

Legend. d_ tensor descriptor, s_ shared memory, p_ pointer, b_ block in registers, t_ one that is on its way, o_
offsets, m_ mask. H query heads, T tokens. Barriers: full, of what is loaded, and free, of what is done with; blocks of
k and v go through a ring of STAGES slots, block i of a program through slot i mod STAGES.
"""

import math

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from affine_attn.core.kernels.epilogue import CONSTANT_SINK, LEARNED_SINK, NO_SINK

LOG2E = tl.constexpr(math.log2(math.e))
LN2 = tl.constexpr(math.log(2))


@gluon.jit
def _tile(p_order, most, n):
    """The n-th tile of this program: batch entry, head, head of k and v, first row; the list goes one further than
    there are."""
    p_tile = p_order + (gl.program_id(0) * most + n) * 4
    return gl.load(p_tile), gl.load(p_tile + 1), gl.load(p_tile + 2), gl.load(p_tile + 3)


@gluon.jit
def _wait_for(i, is_there, full, STAGES: gl.constexpr):
    """Block i, if there is one."""
    mbarrier.wait(full.index(i & (STAGES - 1)), (i // STAGES) & 1, pred=is_there)


@gluon.jit
def _block(s, slot, ROWS: gl.constexpr, D: gl.constexpr):
    return s.index(slot).reshape([ROWS, D])


@gluon.jit
def _load(
    inputs, memory, barriers, order,
    M: gl.constexpr, N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The warp that loads. Blocks of keys come from the diagonal backwards, so that the masked one is the first."""
    d_q, d_k, d_v = inputs
    s_q, s_k, s_v, _, _, _, _, _ = memory
    q_full, q_free, full, free, _, _ = barriers
    p_order, most, p_tiles = order
    i = 0
    next_b, next_h, next_kv, next_row0 = _tile(p_order, most, 0)
    for n in range(gl.load(p_tiles + gl.program_id(0))):
        b, h, kv, row0 = next_b, next_h, next_kv, next_row0
        next_b, next_h, next_kv, next_row0 = _tile(p_order, most, n + 1)
        for j in range(row0 // N + 1):
            n0 = row0 - j * N
            slot = i & (STAGES - 1)
            mbarrier.wait(free.index(slot), ((i // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(slot), 2 * N * D * 2)
            tma.async_copy_global_to_shared(d_k, [b, kv, n0, 0], full.index(slot), s_k.index(slot))
            tma.async_copy_global_to_shared(d_v, [b, kv, n0, 0], full.index(slot), s_v.index(slot))
            i += 1
            if j == 0:  # keys need not wait for the queries of the last tile
                for group in gl.static_range(2):
                    mbarrier.wait(q_free.index(group), (n & 1) ^ 1)
                    mbarrier.expect(q_full.index(group), M * D * 2)
                    tma.async_copy_global_to_shared(
                        d_q, [b, h, row0 + group * M, 0], q_full.index(group), s_q.index(group)
                    )


@gluon.jit
def _sum_values(memory, barriers, order, M: gl.constexpr, N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr):
    """Two warps that add up the values before each tile: products with a row of ones, a sixth of the instructions that
    additions would take."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [2, 1], [16, 8])
    ONES: gl.constexpr = gl.DotOperandLayout(1, LAYOUT, 2)
    _, _, s_v, _, _, _, _, s_before = memory
    _, _, full, free, before_full, before_free = barriers
    p_order, most, p_tiles = order
    o_n = gl.arange(0, 8, gl.SliceLayout(0, ONES))
    b_ones = gl.where((o_n == 0)[None, :], gl.full([16, 8], 1.0, s_v.dtype, ONES), 0.0).to(s_v.dtype)
    i = 0
    for n in range(gl.load(p_tiles + gl.program_id(0))):
        _b, _h, _kv, row0 = _tile(p_order, most, n)
        mbarrier.wait(before_free.index(n & 1), ((n // 2) & 1) ^ 1)
        _wait_for(i, True, full, STAGES)
        slot = i & (STAGES - 1)
        # Rows of the second group see all keys that the first group's rows are.
        b_sum = _add_rows(gl.zeros([D, 8], gl.float32, LAYOUT), b_ones, _block(s_v, slot, N, D), M)
        s_before.index((n & 1) * 2 + 1).store(gl.sum(b_sum, 1))
        mbarrier.arrive(free.index(slot), count=1)
        i += 1
        b_sum = gl.zeros([D, 8], gl.float32, LAYOUT)
        for _j in range(row0 // N):
            _wait_for(i, True, full, STAGES)
            slot = i & (STAGES - 1)
            b_sum = _add_rows(b_sum, b_ones, _block(s_v, slot, N, D), N)
            mbarrier.arrive(free.index(slot), count=1)
            i += 1
        s_before.index((n & 1) * 2).store(gl.sum(b_sum, 1))
        mbarrier.arrive(before_full.index(n & 1), count=1)


@gluon.jit
def _add_rows(b_sum, b_ones, values, ROWS: gl.constexpr):
    for row in gl.static_range(0, ROWS, 16):
        b_values = values.slice(row, 16).permute((1, 0)).load(gl.DotOperandLayout(0, b_sum.type.layout, 2))
        b_sum = mma_v2(b_values, b_ones, b_sum)
    return b_sum


@gluon.jit
def _weights(b_qk, b_max, factor, M: gl.constexpr, N: gl.constexpr, ROWS: gl.constexpr):
    """exp2(factor * (qk - max)), the new maximum, what older sums shrink by, and partial sums of the weights: those
    that a thread has, so that nothing waits for other threads."""
    # In eights: four chains of comparisons in a thread, not two.
    b_new = gl.max(gl.max(b_qk.reshape([M, N // 8, 8]), 1), 1)
    b_new = gl.maximum(b_max, gl.convert_layout(b_new, ROWS))
    b_shift = b_new * factor
    b_p = gl.exp2(b_qk * factor - b_shift[:, None])
    return b_p, b_new, gl.exp2(b_max * factor - b_shift), gl.sum(b_p.reshape([M, N // 8, 8]), 1)


@gluon.jit
def _attend(
    group: gl.constexpr, tensors, memory, barriers, order, sizes,
    M: gl.constexpr, N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, SINK: gl.constexpr, AFFINE: gl.constexpr,
    SAVED: gl.constexpr,
):  # fmt: skip
    """A group of warps, with M rows of each tile."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    W_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    S_ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    O_COLUMNS: gl.constexpr = gl.SliceLayout(0, O_LAYOUT)
    d_o, d_y, p_lse, p_sink, p_alpha, p_beta, p_before = tensors
    s_q, s_k, s_v, s_o, s_y, s_ones, s_u, s_before = memory
    q_full, q_free, full, free, before_full, before_free = barriers
    p_order, most, p_tiles = order
    H, T, kv_heads, factor, constant_sink, stride_sb, stride_sh, stride_st = sizes
    q = _block(s_q, group, M, D)
    o_row = group * M + gl.arange(0, M, S_ROWS)
    o_key = gl.arange(0, N, gl.SliceLayout(0, S_LAYOUT))
    o_t = group * M + gl.arange(0, M, O_ROWS)
    i = 0
    next_b, next_h, next_kv, next_row0 = _tile(p_order, most, 0)
    for n in range(gl.load(p_tiles + gl.program_id(0))):
        b, h, kv, row0 = next_b, next_h, next_kv, next_row0
        first = (b * H + h).to(gl.int64) * T + row0
        if AFFINE:
            b_alpha = gl.load(p_alpha + first + o_t, mask=row0 + o_t < T, other=0.0).to(gl.float32)
            b_beta = gl.load(p_beta + first + o_t, mask=row0 + o_t < T, other=0.0).to(gl.float32)
        if SINK == LEARNED_SINK:
            p_row = p_sink + b * stride_sb + h * stride_sh + (row0 + o_row) * stride_st
            b_sink = gl.load(p_row, mask=row0 + o_row < T, other=0.0).to(gl.float32)
        elif SINK == CONSTANT_SINK:
            b_sink = gl.full([M], constant_sink, gl.float32, S_ROWS)
        mbarrier.wait(q_full.index(group), n & 1)
        _wait_for(i, True, full, STAGES)
        slot = i & (STAGES - 1)
        b_zero = gl.zeros([M, N], gl.float32, S_LAYOUT)
        b_acc = gl.zeros([M, D], gl.float32, O_LAYOUT)
        t_qk = warpgroup_mma(q, _block(s_k, slot, N, D).permute((1, 0)), b_zero, use_acc=False, is_async=True)
        if AFFINE:
            values = _block(s_v, slot, N, D).slice(group * M, M)
            t_u = warpgroup_mma(s_ones, values, b_acc, use_acc=False, is_async=True)
            b_qk = warpgroup_mma_wait(1, deps=(t_qk,))
        else:
            b_qk = warpgroup_mma_wait(0, deps=(t_qk,))
        b_qk = gl.where(o_key[None, :] <= o_row[:, None], b_qk, float("-inf"))
        b_max = gl.full([M], float("-inf"), gl.float32, S_ROWS)
        b_p, b_max, _, b_sum = _weights(b_qk, b_max, factor, M, N, S_ROWS)
        b_weight = gl.convert_layout(b_p.to(s_v.dtype), W_LAYOUT)
        _wait_for(i + 1, row0 > 0, full, STAGES)
        if AFFINE:
            # Registers are short until the end.
            s_u.index(group).store(warpgroup_mma_wait(0, deps=(t_u,)))
        for j in range(row0 // N):
            old = i & (STAGES - 1)
            i += 1
            slot = i & (STAGES - 1)
            t_qk = warpgroup_mma(q, _block(s_k, slot, N, D).permute((1, 0)), b_zero, use_acc=False, is_async=True)
            t_acc = warpgroup_mma(b_weight, _block(s_v, old, N, D), b_acc, is_async=True)
            b_qk = warpgroup_mma_wait(1, deps=(t_qk,))
            b_p, b_max, b_rescale, b_total = _weights(b_qk, b_max, factor, M, N, S_ROWS)
            b_sum = b_sum * gl.convert_layout(b_rescale, gl.SliceLayout(1, b_sum.type.layout))[:, None] + b_total
            b_weight = gl.convert_layout(b_p.to(s_v.dtype), W_LAYOUT)
            # This wait comes here because it is a loop: ptxas moves the wait for the product across everything else,
            # to before the exponentials that should run beside it.
            _wait_for(i + 1, (j + 1) * N < row0, full, STAGES)
            b_acc = warpgroup_mma_wait(0, deps=(t_acc,))
            mbarrier.arrive(free.index(old), count=1)
            b_acc = b_acc * gl.convert_layout(b_rescale, O_ROWS)[:, None]
        slot = i & (STAGES - 1)
        t_acc = warpgroup_mma(b_weight, _block(s_v, slot, N, D), b_acc, is_async=True)
        mbarrier.arrive(q_free.index(group), count=1)
        next_b, next_h, next_kv, next_row0 = _tile(p_order, most, n + 1)
        b_total = gl.convert_layout(gl.sum(b_sum, 1), S_ROWS)
        b_top = b_max * factor
        b_kept = gl.full([M], 1.0, gl.float32, S_ROWS)
        if SINK != NO_SINK:
            b_sink *= LOG2E
            b_new = gl.maximum(b_top, b_sink)
            b_kept = gl.exp2(b_top - b_new)
            # Where both are infinite their difference would be NaN.
            b_total = b_total * b_kept + gl.exp2(gl.where(b_sink == b_new, 0.0, b_sink - b_new))
            b_top = b_new
        b_factor = gl.convert_layout(b_kept / b_total, O_ROWS)
        b_lse = (b_top + gl.log2(b_total)) * LN2
        if AFFINE:  # alpha goes into what the stock backward takes for its weights
            b_lse -= gl.log(gl.abs(gl.convert_layout(b_alpha, S_ROWS)))
        gl.store(p_lse + first + o_row, b_lse, mask=row0 + o_row < T)
        if AFFINE:
            mbarrier.wait(before_full.index(n & 1), (n // 2) & 1)
            b_before = s_before.index((n & 1) * 2).load(O_COLUMNS)
            if group == 1:
                b_before += s_before.index((n & 1) * 2 + 1).load(O_COLUMNS)
            b_u = s_u.index(group).load(O_LAYOUT) + b_before[None, :]
            mbarrier.arrive(before_free.index(n & 1), count=1)
        b_acc = warpgroup_mma_wait(0, deps=(t_acc,))
        mbarrier.arrive(free.index(slot), count=1)
        i += 1
        b_out = b_acc * b_factor[:, None]
        tma.store_wait(0)  # of the last tile
        _block(s_o, group, M, D).store(b_out.to(s_o.dtype))
        if AFFINE:
            b_y = b_alpha[:, None] * b_out + b_beta[:, None] * b_u
            _block(s_y, group, M, D).store(b_y.to(s_y.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(d_o, [b, h, row0 + group * M, 0], s_o.index(group))
        if AFFINE:
            tma.async_copy_shared_to_global(d_y, [b, h, row0 + group * M, 0], s_y.index(group))
            # For the backward: the sum before every SAVED tokens, by one head of those that share it.
            o_d = gl.arange(0, D, O_COLUMNS)
            saved = gl.cdiv(T, SAVED)
            o_saved = (row0 + o_t + 1) // SAVED
            is_first = h % (H // kv_heads) == 0
            m_saved = ((o_t + 1) % SAVED == 0) & (o_saved < saved) & is_first
            p_saved = p_before + (b * kv_heads + kv).to(gl.int64) * saved * D
            gl.store(p_saved + o_saved[:, None] * D + o_d[None, :], b_u, mask=m_saved[:, None])
            if (row0 + group == 0) & is_first:
                gl.store(p_saved + o_d, gl.zeros([D], gl.float32, O_COLUMNS))
    tma.store_wait(0)


@gluon.jit
def forward_kernel(
    d_q, d_k, d_v, d_o, d_y, p_lse, p_sink, p_alpha, p_beta, p_before, p_order, p_tiles, most, H, kv_heads, T, factor,
    constant_sink, stride_sb, stride_sh, stride_st,
    N: gl.constexpr, D: gl.constexpr, SINK: gl.constexpr, AFFINE: gl.constexpr, SAVED: gl.constexpr,
):  # fmt: skip
    """o = softmax(q k') v with a sink, and its log-sum-exp. With AFFINE also y = alpha * o + beta * (sums of v), log
    |alpha| off the log-sum-exp, and the sum of values before every SAVED tokens: what the engine's backward wants."""
    # A step waits for the next block while the product with the one before is on its way, so three at least.
    STAGES: gl.constexpr = 4
    M: gl.constexpr = N // 2
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    s_q = gl.allocate_shared_memory(d_q.dtype, [2, 1, 1, M, D], d_q.layout)
    s_k = gl.allocate_shared_memory(d_q.dtype, [STAGES, 1, 1, N, D], d_k.layout)
    s_v = gl.allocate_shared_memory(d_q.dtype, [STAGES, 1, 1, N, D], d_v.layout)
    s_o = gl.allocate_shared_memory(d_q.dtype, [2, 1, 1, M, D], d_o.layout)
    s_y, s_ones, s_u, s_before = s_o, s_o, s_o, s_o
    if AFFINE:
        s_y = gl.allocate_shared_memory(d_q.dtype, [2, 1, 1, M, D], d_o.layout)
        ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        o_m, o_n = gl.arange(0, M, gl.SliceLayout(1, ROWS)), gl.arange(0, M, gl.SliceLayout(0, ROWS))
        b_ones = gl.where(o_n[None, :] <= o_m[:, None], 1.0, 0.0).to(d_q.dtype)
        s_ones = gl.allocate_shared_memory(
            d_q.dtype, [M, M], gl.NVMMASharedLayout.get_default_for([M, M], d_q.dtype), b_ones
        )
        s_u = gl.allocate_shared_memory(gl.float32, [2, M, D], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
        s_before = gl.allocate_shared_memory(gl.float32, [4, D], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    q_free = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    before_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    before_free = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for two in gl.static_range(2):
        mbarrier.init(q_full.index(two), count=1)
        mbarrier.init(q_free.index(two), count=1)
        mbarrier.init(before_full.index(two), count=1)
        mbarrier.init(before_free.index(two), count=2)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=3 if AFFINE else 2)
    fence_async_shared()
    inputs, memory = (d_q, d_k, d_v), (s_q, s_k, s_v, s_o, s_y, s_ones, s_u, s_before)
    barriers = (q_full, q_free, full, free, before_full, before_free)
    tensors = (d_o, d_y, p_lse, p_sink, p_alpha, p_beta, p_before)
    order = (p_order, most, p_tiles)
    sizes = (H, T, kv_heads, factor, constant_sink, stride_sb, stride_sh, stride_st)
    if AFFINE:
        gl.warp_specialize([
            (_attend, (0, tensors, memory, barriers, order, sizes, M, N, D, STAGES, SINK, AFFINE, SAVED)),
            (_attend, (1, tensors, memory, barriers, order, sizes, M, N, D, STAGES, SINK, AFFINE, SAVED)),
            (_sum_values, (memory, barriers, order, M, N, D, STAGES)),
            (_load, (inputs, memory, barriers, order, M, N, D, STAGES)),
        ], [4, 2, 1], [232, 40, 40])  # fmt: skip
    else:
        gl.warp_specialize([
            (_attend, (0, tensors, memory, barriers, order, sizes, M, N, D, STAGES, SINK, AFFINE, SAVED)),
            (_attend, (1, tensors, memory, barriers, order, sizes, M, N, D, STAGES, SINK, AFFINE, SAVED)),
            (_load, (inputs, memory, barriers, order, M, N, D, STAGES)),
        ], [4, 1], [240, 24])  # fmt: skip
