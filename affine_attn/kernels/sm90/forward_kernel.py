"""Gluon kernel: the sm90 forward, causal attention that finishes its rows while they are in registers.

A stock kernel writes o, and the epilogue reads it again to write y. Here sink, alpha, beta and gate are applied before
anything is written.

One CTA per SM computes the tiles that the tile scheduler gives it; a tile is N rows of one head. The kernel is warp
specialised. One producer warp loads by TMA, ahead into the next tile. Two consumer warpgroups attend, with M = N / 2
rows each and N keys at a time, from the diagonal backwards. A step issues the MMA of the scores of a block together
with that of the weights and values of the block before, and exponentiates while the tensor cores do the second, or the
other warpgroup's MMAs.

A pipeline stage has what a step needs: keys of its block, values of the block before. So a tile of `last + 1` blocks
takes stage 0, of keys alone, to `last + 1`. There values of the diagonal take the place of keys, once more: for beta,
a triangle of ones times these values gives the sums within a warpgroup's rows. Sums of what lies before come from
value_sums_kernel (kernels/epilogue/kernels.py); one more warp loads them. An elementwise gate is loaded to where its y
leaves from.

Legend. d_ tensor descriptor, s_ shared memory, p_ pointer, b_ block in registers, t_ one that an MMA is computing, o_
offsets, m_ mask. H query heads, T tokens. Barriers: full and free, see pipeline.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from affine_attn.kernels.constants import (
    CONSTANT_SINK,
    ELEMENTWISE,
    HEADWISE,
    LEARNED_SINK,
    LN2,
    LOG2E,
    NO_GATE,
    NO_SINK,
)
from affine_attn.kernels.sm90.pipeline import matrix, nth_tile, tile_count, wait_free, wait_full


@gluon.jit
def _load(
    inputs, memory, barriers, order, M: gl.constexpr, N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    AFFINE: gl.constexpr, GATE: gl.constexpr,
):  # fmt: skip
    """Load tiles of q, k, v and gate: the producer warp."""
    d_q, d_k, d_v, d_gate = inputs
    s_q, s_k, s_v, _, s_y, _ = memory
    q_full, q_free, full, free, _, _, gate_full, gate_free = barriers
    i = 0
    next_b, next_h, next_kv, next_row0 = nth_tile(order, 0)
    for n in range(tile_count(order)):
        b, h, kv, row0 = next_b, next_h, next_kv, next_row0
        next_b, next_h, next_kv, next_row0 = nth_tile(order, n + 1)
        last = row0 // N
        for j in range(last + 2):
            stage = i & (STAGES - 1)
            wait_free(free, i, stage, STAGES)
            has_keys, has_values = j <= last, j > 0
            has_both = has_values & (has_keys | AFFINE)
            mbarrier.expect(full.index(stage), 2 * N * D * 2, pred=has_both)
            mbarrier.expect(full.index(stage), N * D * 2, pred=not has_both)
            k_stage, v_stage = s_k.index(stage), s_v.index(stage)
            tma.async_copy_global_to_shared(d_k, [b, kv, row0 - j * N, 0], full.index(stage), k_stage, pred=has_keys)
            if AFFINE:
                tma.async_copy_global_to_shared(d_v, [b, kv, row0, 0], full.index(stage), k_stage, pred=not has_keys)
            values0 = row0 - (j - 1) * N
            tma.async_copy_global_to_shared(d_v, [b, kv, values0, 0], full.index(stage), v_stage, pred=has_values)
            i += 1
            if j == 0:
                for group in gl.static_range(2):
                    mbarrier.wait(q_free.index(group), (n & 1) ^ 1)
                    mbarrier.expect(q_full.index(group), M * D * 2)
                    tma.async_copy_global_to_shared(
                        d_q, [b, h, row0 + group * M, 0], q_full.index(group), s_q.index(group)
                    )
        if GATE == ELEMENTWISE:
            for group in gl.static_range(2):
                mbarrier.wait(gate_free.index(group), n & 1)
                mbarrier.expect(gate_full.index(group), M * D * 2)
                tma.async_copy_global_to_shared(
                    d_gate, [b, h, row0 + group * M, 0], gate_full.index(group), s_y.index(group)
                )


@gluon.jit
def _bring_sums(
    sums, memory, barriers, order, kv_heads, M: gl.constexpr, D: gl.constexpr, SEGMENT: gl.constexpr
):  # fmt: skip
    """Add up the values before each warpgroup's rows, in a warp: sum of the segment, totals of the blocks before."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([D // 32], [32], [1], [0])
    p_sums, segments, blocks, block_segments = sums
    s_before = memory[5]
    before_full, before_free = barriers[4], barriers[5]
    o_d = gl.arange(0, D, LAYOUT)
    for n in range(tile_count(order)):
        b, _h, kv, row0 = nth_tile(order, n)
        p_head = p_sums + (b * kv_heads + kv).to(gl.int64) * (segments + blocks) * D + o_d
        wait_free(before_free, n, n & 1, 2)
        for group in gl.static_range(2):
            # The second warpgroup's rows may all be past the end.
            segment = gl.minimum((row0 + group * M) // SEGMENT, segments - 1)
            b_sum = gl.load(p_head + segment * D)
            for block in range(segment // block_segments):
                b_sum += gl.load(p_head + (segments + block) * D)
            s_before.index((n & 1) * 2 + group).store(b_sum)
        mbarrier.arrive(before_full.index(n & 1), count=1)


@gluon.jit
def _weights(b_qk, b_max, factor, M: gl.constexpr, N: gl.constexpr, ROWS: gl.constexpr):
    """Return exp2(factor * qk - shift), the new maximum and shift, and partial sums of the weights: those of a thread,
    so that none waits for others."""
    # In eights: four chains of comparisons in a thread, not two.
    b_new = gl.max(gl.max(b_qk.reshape([M, N // 8, 8]), 1), 1)
    b_new = gl.maximum(b_max, gl.convert_layout(b_new, ROWS))
    b_shift = b_new * factor
    b_p = gl.exp2(b_qk * factor - b_shift[:, None])
    return b_p, b_new, b_shift, gl.sum(b_p.reshape([M, N // 8, 8]), 1)


@gluon.jit
def _attend(
    group: gl.constexpr, tensors, memory, barriers, order, sizes,
    M: gl.constexpr, N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, SINK: gl.constexpr, AFFINE: gl.constexpr,
    GATE: gl.constexpr, SAVED: gl.constexpr,
):  # fmt: skip
    """Attend from M rows of each tile: a consumer warpgroup."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    W_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    S_ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    O_COLUMNS: gl.constexpr = gl.SliceLayout(0, O_LAYOUT)
    d_o, d_y, p_lse, p_sink, p_alpha, p_beta, p_gate, p_before = tensors
    HAS_Y: gl.constexpr = AFFINE or GATE != NO_GATE
    HAS_ALPHA: gl.constexpr = AFFINE or GATE == HEADWISE
    s_q, s_k, s_v, s_o, s_y, s_before = memory
    q_full, q_free, full, free, before_full, before_free, gate_full, gate_free = barriers
    H, T, kv_heads, factor, constant_sink, stride_sb, stride_sh, stride_st, stride_gb, stride_gh, stride_gt = sizes
    q = matrix(s_q, group, M, D)
    o_row = group * M + gl.arange(0, M, S_ROWS)
    o_key = gl.arange(0, N, gl.SliceLayout(0, S_LAYOUT))
    o_t = group * M + gl.arange(0, M, O_ROWS)
    i = 0
    next_b, next_h, next_kv, next_row0 = nth_tile(order, 0)
    for n in range(tile_count(order)):
        b, h, kv, row0 = next_b, next_h, next_kv, next_row0
        first = (b * H + h).to(gl.int64) * T + row0
        if AFFINE:
            b_alpha = gl.load(p_alpha + first + o_t, mask=row0 + o_t < T, other=0.0).to(gl.float32)
            b_beta = gl.load(p_beta + first + o_t, mask=row0 + o_t < T, other=0.0).to(gl.float32)
        if GATE == HEADWISE:
            p_row = p_gate + b.to(gl.int64) * stride_gb + h.to(gl.int64) * stride_gh
            p_row += (row0 + o_t).to(gl.int64) * stride_gt
            b_gate = gl.load(p_row, mask=row0 + o_t < T, other=0.0).to(gl.float32)
            if AFFINE:  # as one with them: fewer registers through the loop
                b_alpha *= b_gate
                b_beta *= b_gate
            else:
                b_alpha = b_gate
        if SINK == LEARNED_SINK:
            p_row = p_sink + b.to(gl.int64) * stride_sb + h.to(gl.int64) * stride_sh + (row0 + o_row) * stride_st
            b_sink = gl.load(p_row, mask=row0 + o_row < T, other=0.0).to(gl.float32)
        elif SINK == CONSTANT_SINK:
            b_sink = gl.full([M], constant_sink, gl.float32, S_ROWS)
        mbarrier.wait(q_full.index(group), n & 1)
        wait_full(full, i, i & (STAGES - 1), STAGES)
        stage = i & (STAGES - 1)
        b_zero = gl.zeros([M, N], gl.float32, S_LAYOUT)
        t_qk = warpgroup_mma(q, matrix(s_k, stage, N, D).permute((1, 0)), b_zero, use_acc=False, is_async=True)
        b_qk = warpgroup_mma_wait(0, deps=(t_qk,))
        b_qk = gl.where(o_key[None, :] <= o_row[:, None], b_qk, float("-inf"))
        b_max = gl.full([M], float("-inf"), gl.float32, S_ROWS)
        b_p, b_max, b_shift, b_sum = _weights(b_qk, b_max, factor, M, N, S_ROWS)
        b_weight = gl.convert_layout(b_p.to(s_v.dtype), W_LAYOUT)
        if GATE == ELEMENTWISE:
            # By now the last tile's y has left the place that this one's gate goes to.
            tma.store_wait(0)
            mbarrier.arrive(gate_free.index(group), count=1)
        b_acc = gl.zeros([M, D], gl.float32, O_LAYOUT)
        i += 1
        wait_full(full, i, i & (STAGES - 1), STAGES)
        # Behind the wait: in this order the compiler puts one barrier less into the loop.
        mbarrier.arrive(free.index(stage), count=1)
        for _j in range(row0 // N):
            stage = i & (STAGES - 1)
            t_qk = warpgroup_mma(q, matrix(s_k, stage, N, D).permute((1, 0)), b_zero, use_acc=False, is_async=True)
            t_acc = warpgroup_mma(b_weight, matrix(s_v, stage, N, D), b_acc, is_async=True)
            b_qk = warpgroup_mma_wait(1, deps=(t_qk,))
            b_old = b_shift
            b_p, b_max, b_shift, b_total = _weights(b_qk, b_max, factor, M, N, S_ROWS)
            # Rounded shifts are subtracted, so no fused multiply-add: where the maximum stays, b_rescale is exactly 1,
            # which counts after hundreds of steps.
            b_change = gl.inline_asm_elementwise(
                "sub.rn.f32 $0, $1, $2;", "=f,f,f", [b_old, b_shift], gl.float32, is_pure=True, pack=1
            )
            b_rescale = gl.exp2(b_change)
            b_sum = b_sum * gl.convert_layout(b_rescale, gl.SliceLayout(1, b_sum.type.layout))[:, None] + b_total
            b_weight = gl.convert_layout(b_p.to(s_v.dtype), W_LAYOUT)
            i += 1
            # This wait comes here because it is a loop: ptxas moves the wait for the MMA across everything else,
            # to before the exponentials that should run beside it.
            wait_full(full, i, i & (STAGES - 1), STAGES)
            b_acc = warpgroup_mma_wait(0, deps=(t_acc,))
            mbarrier.arrive(free.index(stage), count=1)
            b_acc = b_acc * gl.convert_layout(b_rescale, O_ROWS)[:, None]
        stage = i & (STAGES - 1)
        t_acc = warpgroup_mma(b_weight, matrix(s_v, stage, N, D), b_acc, is_async=True)
        if AFFINE:
            o_n = gl.arange(0, M, gl.SliceLayout(0, W_LAYOUT))
            # Plus a 0 that the compiler does not know: ptxas may fill constant registers of an operand after the MMA
            # has begun to read them.
            o_m = gl.arange(0, M, gl.SliceLayout(1, W_LAYOUT)) + (row0 >> 31)
            b_ones = gl.where(o_n[None, :] <= o_m[:, None], 1.0, 0.0).to(s_v.dtype)
            values = matrix(s_k, stage, N, D).slice(group * M, M)
            t_u = warpgroup_mma(b_ones, values, gl.zeros([M, D], gl.float32, O_LAYOUT), use_acc=False, is_async=True)
        mbarrier.arrive(q_free.index(group), count=1)
        next_b, next_h, next_kv, next_row0 = nth_tile(order, n + 1)
        b_total = gl.convert_layout(gl.sum(b_sum, 1), S_ROWS)
        b_top = b_shift * LN2
        b_kept = gl.full([M], 1.0, gl.float32, S_ROWS)
        if SINK != NO_SINK:
            b_new = gl.maximum(b_top, b_sink)
            b_kept = gl.exp2((b_top - b_new) * LOG2E)
            # Where both are infinite their difference would be NaN.
            b_total = b_total * b_kept + gl.exp2(gl.where(b_sink == b_new, 0.0, b_sink - b_new) * LOG2E)
            b_top = b_new
        b_factor = gl.convert_layout(b_kept / b_total, O_ROWS)
        b_lse = b_top + gl.log2(b_total) * LN2
        if HAS_ALPHA:  # the backward makes its weights from it
            b_lse -= gl.log(gl.abs(gl.convert_layout(b_alpha, S_ROWS)))
        gl.store(p_lse + first + o_row, b_lse, mask=row0 + o_row < T)
        if AFFINE:
            wait_full(before_full, n, n & 1, 2)
            b_before = s_before.index((n & 1) * 2 + group).load(O_COLUMNS)
            mbarrier.arrive(before_free.index(n & 1), count=1)
            b_acc = warpgroup_mma_wait(1, deps=(t_acc,))
            b_u = warpgroup_mma_wait(0, deps=(t_u,)) + b_before[None, :]
        else:
            b_acc = warpgroup_mma_wait(0, deps=(t_acc,))
        mbarrier.arrive(free.index(stage), count=1)
        i += 1
        b_out = b_acc * b_factor[:, None]
        if GATE == ELEMENTWISE:
            mbarrier.wait(gate_full.index(group), n & 1)
            b_gate = matrix(s_y, group, M, D).load(O_LAYOUT).to(gl.float32)
        tma.store_wait(0)  # of the last tile
        matrix(s_o, group, M, D).store(b_out.to(s_o.dtype))
        if HAS_Y:
            b_y = b_out
            if HAS_ALPHA:
                b_y *= b_alpha[:, None]
            if AFFINE:
                b_y += b_beta[:, None] * b_u
            if GATE == ELEMENTWISE:
                b_y *= b_gate
            matrix(s_y, group, M, D).store(b_y.to(s_y.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(d_o, [b, h, row0 + group * M, 0], s_o.index(group))
        if HAS_Y:
            tma.async_copy_shared_to_global(d_y, [b, h, row0 + group * M, 0], s_y.index(group))
        if AFFINE:
            # The backward reads the sum before every SAVED tokens; one head of those that share it writes.
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


@gluon.jit(do_not_specialize=["most"])
def sm90_forward_kernel(
    d_q, d_k, d_v, d_gate, d_o, d_y, p_lse, p_sink, p_alpha, p_beta, p_gate, p_sums, p_before, p_order, p_tiles, most,
    H, kv_heads, T, factor, constant_sink, stride_sb, stride_sh, stride_st, stride_gb, stride_gh, stride_gt,
    segments, blocks, block_segments,
    N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, SINK: gl.constexpr, AFFINE: gl.constexpr,
    GATE: gl.constexpr, SEGMENT: gl.constexpr, SAVED: gl.constexpr,
):  # fmt: skip
    """Write o = softmax(q k') v with a sink, and its log-sum-exp. With AFFINE or a gate also y = gate * (alpha * o +
    beta * (sums of v)), and what the backward reads: log |row factor| off the log-sum-exp, the sum of values before
    every SAVED tokens."""
    M: gl.constexpr = N // 2
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    s_q = gl.allocate_shared_memory(d_q.dtype, [2, 1, 1, M, D], d_q.layout)
    s_k = gl.allocate_shared_memory(d_q.dtype, [STAGES, 1, 1, N, D], d_k.layout)
    s_v = gl.allocate_shared_memory(d_q.dtype, [STAGES, 1, 1, N, D], d_v.layout)
    s_o = gl.allocate_shared_memory(d_q.dtype, [2, 1, 1, M, D], d_o.layout)
    s_y, s_before = s_o, s_o
    if AFFINE or GATE != NO_GATE:
        s_y = gl.allocate_shared_memory(d_q.dtype, [2, 1, 1, M, D], d_o.layout)
    if AFFINE:
        s_before = gl.allocate_shared_memory(gl.float32, [4, D], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    q_free = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    before_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    before_free = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    gate_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    gate_free = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for two in gl.static_range(2):
        mbarrier.init(q_full.index(two), count=1)
        mbarrier.init(q_free.index(two), count=1)
        mbarrier.init(before_full.index(two), count=1)
        mbarrier.init(before_free.index(two), count=2)
        mbarrier.init(gate_full.index(two), count=1)
        mbarrier.init(gate_free.index(two), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    fence_async_shared()
    inputs, memory = (d_q, d_k, d_v, d_gate), (s_q, s_k, s_v, s_o, s_y, s_before)
    barriers = (q_full, q_free, full, free, before_full, before_free, gate_full, gate_free)
    tensors = (d_o, d_y, p_lse, p_sink, p_alpha, p_beta, p_gate, p_before)
    order, sums = (p_order, most, p_tiles), (p_sums, segments, blocks, block_segments)
    sizes = (H, T, kv_heads, factor, constant_sink, stride_sb, stride_sh, stride_st, stride_gb, stride_gh, stride_gt)
    if AFFINE:
        gl.warp_specialize([
            (_attend, (0, tensors, memory, barriers, order, sizes, M, N, D, STAGES, SINK, AFFINE, GATE, SAVED)),
            (_attend, (1, tensors, memory, barriers, order, sizes, M, N, D, STAGES, SINK, AFFINE, GATE, SAVED)),
            (_bring_sums, (sums, memory, barriers, order, kv_heads, M, D, SEGMENT)),
            (_load, (inputs, memory, barriers, order, M, N, D, STAGES, AFFINE, GATE)),
        ], [4, 1, 1], [240, 24, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_attend, (0, tensors, memory, barriers, order, sizes, M, N, D, STAGES, SINK, AFFINE, GATE, SAVED)),
            (_attend, (1, tensors, memory, barriers, order, sizes, M, N, D, STAGES, SINK, AFFINE, GATE, SAVED)),
            (_load, (inputs, memory, barriers, order, M, N, D, STAGES, AFFINE, GATE)),
        ], [4, 1], [240, 24])  # fmt: skip
