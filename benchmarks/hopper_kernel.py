"""A causal flash forward for Hopper, warp-specialised, with the affine epilogue on rows that are still in registers
(Gluon kernels only; hopper_forward.py says why and times them).

One program per multiprocessor goes from tile to tile, in an order that the host has made. One warp loads, and runs
ahead into the next tile; GROUPS groups of four warps attend, with M rows each and N keys at a time. A step asks for the
scores of a block of keys together with the sum of the block before, and exponentiates while the tensor cores do the
sum, or another group's products.

Legend. d_ tensor descriptor, s_ shared memory, p_ pointer, b_ block in registers, t_ one that is on its way, o_
offsets, m_ mask. H query heads, G of them to a kv head, T tokens. Barriers: full, of what is loaded, and free, of what
is done with; blocks of k and v go through a ring of STAGES slots, block i of a program through slot i mod STAGES.

Sums of values for beta: a product with a triangle of ones gives those within the block of the diagonal; what lies
before comes from value_sums_kernel, as in the epilogue (affine_attn/core/kernels/epilogue.py).
"""

import math

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

LN2 = tl.constexpr(math.log(2))
# Three of four by the special-function unit, which a head_dim of 64 keeps as busy as the tensor cores, the fourth by a
# polynomial of degree 3 on [-1/2, 1/2] (relative error 8e-5, less than a 16-bit weight is rounded by).
EXP2_OF_FOUR = tl.constexpr("""
{
  .reg .f32 x, t, n, f, p;
  .reg .b32 i, r;
  ex2.approx.ftz.f32 $0, $4;
  ex2.approx.ftz.f32 $1, $5;
  ex2.approx.ftz.f32 $2, $6;
  max.f32 x, $7, 0fC2FC0000;
  add.rn.f32 t, x, 0f4B400000;
  sub.rn.f32 n, t, 0f4B400000;
  sub.rn.f32 f, x, n;
  fma.rn.f32 p, f, 0f3D61FBA9, 0f3E786F0D;
  fma.rn.f32 p, p, f, 0f3F31798D;
  fma.rn.f32 p, p, f, 0f3F7FFB49;
  mov.b32 i, t;
  shl.b32 i, i, 23;
  mov.b32 r, p;
  add.s32 r, r, i;
  mov.b32 $3, r;
}
""")


@gluon.jit
def _tile(p_order, most, n):
    """The n-th tile of this program, as head * blocks + block of rows; the list goes one further than there are."""
    return gl.load(p_order + gl.program_id(0) * most + n)


@gluon.jit
def _place(tile, H, T, blocks, GROUPS: gl.constexpr, M: gl.constexpr, N: gl.constexpr):
    """Of a tile: batch entry, head, first row, and how many blocks of keys its rows see."""
    head, row0 = tile // blocks, tile % blocks * (GROUPS * M)
    return head // H, head % H, row0, gl.cdiv(gl.minimum(row0 + GROUPS * M, T), N)


@gluon.jit
def _load(
    inputs, memory, barriers, order, sizes,
    GROUPS: gl.constexpr, M: gl.constexpr, N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The warp that loads. Blocks of keys come from the diagonal backwards, so that the masked one is the first."""
    d_q, d_k, d_v = inputs
    s_q, s_k, s_v, _, _ = memory
    q_full, q_free, full, free, _ = barriers
    p_order, most, p_tiles = order
    H, G, T, blocks, _ = sizes
    i = 0
    tile = _tile(p_order, most, 0)
    for n in range(gl.load(p_tiles + gl.program_id(0))):
        upcoming = _tile(p_order, most, n + 1)
        b, h, row0, count = _place(tile, H, T, blocks, GROUPS, M, N)
        for j in range(count):
            n0 = (count - 1 - j) * N
            slot = i % STAGES
            mbarrier.wait(free.index(slot), ((i // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(slot), 2 * N * D * 2)
            tma.async_copy_global_to_shared(d_k, [b, h // G, n0, 0], full.index(slot), s_k.index(slot))
            tma.async_copy_global_to_shared(d_v, [b, h // G, n0, 0], full.index(slot), s_v.index(slot))
            i += 1
            if j == 0:  # keys need not wait for the queries of the last tile
                for group in gl.static_range(GROUPS):
                    mbarrier.wait(q_free.index(group), (n & 1) ^ 1)
                    mbarrier.expect(q_full.index(group), M * D * 2)
                    tma.async_copy_global_to_shared(
                        d_q, [b, h, row0 + group * M, 0], q_full.index(group), s_q.index(group)
                    )
        tile = upcoming


@gluon.jit
def _weights(
    b_qk, b_max, factor, o_row, n0,
    N: gl.constexpr, LAYOUT: gl.constexpr, MASKED: gl.constexpr, POLYNOMIAL: gl.constexpr,
):  # fmt: skip
    """exp2(factor * (qk - max)), the new maximum, what older sums shrink by, and the sum of the weights."""
    if MASKED:
        o_key = n0 + gl.arange(0, N, gl.SliceLayout(0, LAYOUT))
        b_qk = gl.where(o_key[None, :] <= o_row[:, None], b_qk, float("-inf"))
    b_new = gl.maximum(b_max, gl.max(b_qk, 1))
    b_shift = b_new * factor
    if MASKED:  # a row may have seen no key yet: -inf - -inf would be NaN
        b_shift = gl.where(b_new == float("-inf"), 0.0, b_shift)
    b_score = b_qk * factor - b_shift[:, None]
    if POLYNOMIAL:
        b_p = gl.inline_asm_elementwise(EXP2_OF_FOUR, "=f,=f,=f,=f,f,f,f,f", [b_score], gl.float32, True, 4)
    else:
        b_p = gl.exp2(b_score)
    return b_p, b_new, gl.exp2(b_max * factor - b_shift), gl.sum(b_p, 1)


@gluon.jit
def _steps(
    group, n_step, i, first, last, count, b_acc, b_weight, b_max, b_sum, q, s_k, s_v, barriers, b_zero, o_row, factor,
    N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr, S_LAYOUT: gl.constexpr,
    W_LAYOUT: gl.constexpr, O_ROWS: gl.constexpr, TURNS: gl.constexpr, POLYNOMIAL: gl.constexpr,
):  # fmt: skip
    """Blocks of keys [first, last), counted from the diagonal: scores of a block beside the sum of the one before."""
    _, _, full, free, turn = barriers
    for j in range(first, last):
        old = i % STAGES
        i += 1
        if TURNS:
            mbarrier.wait(turn.index(group), (n_step + 1 + group) & 1)
        t_qk = warpgroup_mma(q, _block(s_k, i % STAGES, N, D).permute((1, 0)), b_zero, use_acc=False, is_async=True)
        t_acc = warpgroup_mma(b_weight, _block(s_v, old, N, D), b_acc, is_async=True)
        if TURNS:
            mbarrier.arrive(turn.index(1 - group), count=1)
            n_step += 1
        b_qk = warpgroup_mma_wait(1, deps=(t_qk,))
        b_p, b_max, b_rescale, b_total = _weights(
            b_qk, b_max, factor, o_row, (count - 1 - j) * N, N, S_LAYOUT, MASKED, POLYNOMIAL
        )
        b_sum = b_sum * b_rescale + b_total
        b_weight = gl.convert_layout(b_p.to(s_v.dtype), W_LAYOUT)
        # This wait comes here because it is a loop: ptxas moves the wait for the product across everything else, to
        # before the exponentials that should run beside it.
        _wait_for(i + 1, j + 1 < count, full, STAGES)
        b_acc = warpgroup_mma_wait(0, deps=(t_acc,))
        mbarrier.arrive(free.index(old), count=1)
        b_acc = b_acc * gl.convert_layout(b_rescale, O_ROWS)[:, None]
    return n_step, i, b_acc, b_weight, b_max, b_sum


@gluon.jit
def _wait_for(i, is_there, full, STAGES: gl.constexpr):
    """Block i, if there is one."""
    mbarrier.wait(full.index(i % STAGES), (i // STAGES) & 1, pred=is_there)


@gluon.jit
def _block(s, slot, ROWS: gl.constexpr, D: gl.constexpr):
    return s.index(slot).reshape([ROWS, D])


@gluon.jit
def _sums_before(p_sums, kv_head, segment, segments, sum_blocks, block_segments, D: gl.constexpr, BLOCKS: gl.constexpr):
    """What adds up to the sum of the values before a segment: its own row, and totals of the blocks before its own."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0])
    o_n = gl.arange(0, BLOCKS, gl.SliceLayout(1, LAYOUT))
    o_d = gl.arange(0, D, gl.SliceLayout(0, LAYOUT))
    o_row = gl.where(o_n == BLOCKS - 1, segment, segments + o_n)
    m_row = (o_n < segment // block_segments) | (o_n == BLOCKS - 1)
    p_row = p_sums + (kv_head * (segments + sum_blocks) + o_row)[:, None] * D + o_d[None, :]
    return gl.load(p_row, mask=m_row[:, None], other=0.0)


@gluon.jit
def _attend(
    group, tensors, sums, memory, barriers, order, sizes,
    GROUPS: gl.constexpr, M: gl.constexpr, N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, TURNS: gl.constexpr,
    POLYNOMIAL: gl.constexpr, AFFINE: gl.constexpr, BLOCKS: gl.constexpr, SEGMENT: gl.constexpr, SAVED: gl.constexpr,
):  # fmt: skip
    """A group of warps, with M rows of each tile."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    W_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    S_ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    O_COLUMNS: gl.constexpr = gl.SliceLayout(0, O_LAYOUT)
    d_o, d_y, p_lse, p_alpha, p_beta = tensors
    p_sums, p_before, segments, sum_blocks, block_segments = sums
    s_q, s_k, s_v, s_o, s_y = memory
    q_full, q_free, full, free, _turn = barriers
    p_order, most, p_tiles = order
    H, G, T, blocks, factor = sizes
    q = _block(s_q, group, M, D)
    n_step = 0
    i = 0
    tile = _tile(p_order, most, 0)
    for n in range(gl.load(p_tiles + gl.program_id(0))):
        upcoming = _tile(p_order, most, n + 1)
        b, h, row0, count = _place(tile, H, T, blocks, GROUPS, M, N)
        head, first_row = b * H + h, row0 + group * M
        diagonal = (count - 1) * N
        o_row = first_row + gl.arange(0, M, S_ROWS)
        mbarrier.wait(q_full.index(group), n & 1)
        _wait_for(i, True, full, STAGES)
        slot = i % STAGES
        b_zero = gl.zeros([M, N], gl.float32, S_LAYOUT)
        b_acc = gl.zeros([M, D], gl.float32, O_LAYOUT)
        t_qk = warpgroup_mma(q, _block(s_k, slot, N, D).permute((1, 0)), b_zero, use_acc=False, is_async=True)
        t_u = b_acc
        if AFFINE:
            o_key = diagonal + gl.arange(0, N, gl.SliceLayout(0, S_LAYOUT))
            b_ones = gl.where(o_key[None, :] <= o_row[:, None], 1.0, 0.0).to(s_v.dtype)
            t_u = warpgroup_mma(
                gl.convert_layout(b_ones, W_LAYOUT), _block(s_v, slot, N, D), b_acc, use_acc=False, is_async=True
            )
            b_qk = warpgroup_mma_wait(1, deps=(t_qk,))
        else:
            b_qk = warpgroup_mma_wait(0, deps=(t_qk,))
        b_max = gl.full([M], float("-inf"), gl.float32, S_ROWS)
        b_p, b_max, _, b_sum = _weights(b_qk, b_max, factor, o_row, diagonal, N, S_LAYOUT, True, False)
        b_weight = gl.convert_layout(b_p.to(s_v.dtype), W_LAYOUT)
        _wait_for(i + 1, count > 1, full, STAGES)
        if AFFINE:
            b_u = warpgroup_mma_wait(0, deps=(t_u,))
            # Asked for here, so that nobody waits for them at the end.
            o_t = first_row + gl.arange(0, M, O_ROWS)
            b_alpha = gl.load(p_alpha + head * T + o_t, mask=o_t < T, other=0.0)
            b_beta = gl.load(p_beta + head * T + o_t, mask=o_t < T, other=0.0)
        whole = 1
        if GROUPS * M > N:
            # More blocks than one are cut by the diagonal.
            whole = gl.maximum(count - (first_row + 1) // N, 1)
            n_step, i, b_acc, b_weight, b_max, b_sum = _steps(
                group, n_step, i, 1, whole, count, b_acc, b_weight, b_max, b_sum, q, s_k, s_v, barriers, b_zero, o_row,
                factor, N, D, STAGES, True, S_LAYOUT, W_LAYOUT, O_ROWS, TURNS, POLYNOMIAL,
            )  # fmt: skip
        n_step, i, b_acc, b_weight, b_max, b_sum = _steps(
            group, n_step, i, whole, count, count, b_acc, b_weight, b_max, b_sum, q, s_k, s_v, barriers, b_zero, o_row,
            factor, N, D, STAGES, False, S_LAYOUT, W_LAYOUT, O_ROWS, TURNS, POLYNOMIAL,
        )  # fmt: skip
        mbarrier.arrive(q_free.index(group), count=1)
        if AFFINE:
            kv_head = head // G
            b_before = _sums_before(
                p_sums, kv_head, diagonal // SEGMENT, segments, sum_blocks, block_segments, D, BLOCKS
            )
        t_acc = warpgroup_mma(b_weight, _block(s_v, i % STAGES, N, D), b_acc, is_async=True)
        b_lse = (b_max * factor + gl.log2(b_sum)) * LN2
        if AFFINE:  # alpha goes into what the stock backward takes for its weights
            b_lse -= gl.log(gl.abs(gl.convert_layout(b_alpha, S_ROWS)))
        gl.store(p_lse + head * T + o_row, b_lse, mask=o_row < T)
        b_acc = warpgroup_mma_wait(0, deps=(t_acc,))
        mbarrier.arrive(free.index(i % STAGES), count=1)
        i += 1
        b_out = b_acc / gl.convert_layout(b_sum, O_ROWS)[:, None]
        tma.store_wait(0)  # of the last tile
        _block(s_o, group, M, D).store(b_out.to(s_o.dtype))
        if AFFINE:
            b_u += gl.convert_layout(gl.sum(b_before, 0), O_COLUMNS)[None, :]
            b_y = b_alpha[:, None] * b_out + b_beta[:, None] * b_u
            _block(s_y, group, M, D).store(b_y.to(s_y.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(d_o, [b, h, first_row, 0], s_o.index(group))
        if AFFINE:
            tma.async_copy_shared_to_global(d_y, [b, h, first_row, 0], s_y.index(group))
            # For the backward: the sum before every SAVED tokens, by one head of those that share it.
            o_d = gl.arange(0, D, O_COLUMNS)
            saved = gl.cdiv(T, SAVED)
            o_saved = (o_t + 1) // SAVED
            m_saved = ((o_t + 1) % SAVED == 0) & (o_saved < saved) & (h % G == 0)
            p_saved = p_before + (kv_head * saved + o_saved)[:, None] * D + o_d[None, :]
            gl.store(p_saved, b_u, mask=m_saved[:, None])
            if (first_row == 0) & (h % G == 0):
                gl.store(p_before + kv_head * saved * D + o_d, gl.zeros([D], gl.float32, O_COLUMNS))
        tile = upcoming
    tma.store_wait(0)


@gluon.jit
def forward_kernel(
    d_q, d_k, d_v, d_o, d_y, p_lse, p_alpha, p_beta, p_sums, p_before, p_order, p_tiles, most, H, G, T, blocks, factor,
    segments, sum_blocks, block_segments,
    GROUPS: gl.constexpr, M: gl.constexpr, N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    REGISTERS: gl.constexpr, TURNS: gl.constexpr, POLYNOMIAL: gl.constexpr, AFFINE: gl.constexpr, BLOCKS: gl.constexpr,
    SEGMENT: gl.constexpr, SAVED: gl.constexpr,
):  # fmt: skip
    """o = softmax(q k') v and its log-sum-exp; with AFFINE also y = alpha * o + beta * (sums of v), log |alpha| off the
    log-sum-exp, and the sum of values before every SAVED tokens: what the engine's backward wants."""
    # A step waits for the next block while the product with the one before is on its way: three at a time.
    gl.static_assert(STAGES >= 3)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    s_q = gl.allocate_shared_memory(d_q.dtype, [GROUPS, 1, 1, M, D], d_q.layout)
    s_k = gl.allocate_shared_memory(d_q.dtype, [STAGES, 1, 1, N, D], d_k.layout)
    s_v = gl.allocate_shared_memory(d_q.dtype, [STAGES, 1, 1, N, D], d_v.layout)
    s_o = gl.allocate_shared_memory(d_q.dtype, [GROUPS, 1, 1, M, D], d_o.layout)
    s_y = gl.allocate_shared_memory(d_q.dtype, [GROUPS if AFFINE else 1, 1, 1, M if AFFINE else 8, D], d_o.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], BARRIER)
    q_free = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], BARRIER)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    for group in gl.static_range(GROUPS):
        mbarrier.init(q_full.index(group), count=1)
        mbarrier.init(q_free.index(group), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=GROUPS)
    for group in gl.static_range(2):
        mbarrier.init(turn.index(group), count=1)
    fence_async_shared()
    inputs, memory, barriers = (d_q, d_k, d_v), (s_q, s_k, s_v, s_o, s_y), (q_full, q_free, full, free, turn)
    tensors, sums = (d_o, d_y, p_lse, p_alpha, p_beta), (p_sums, p_before, segments, sum_blocks, block_segments)
    order, sizes = (p_order, most, p_tiles), (H, G, T, blocks, factor)
    if GROUPS == 2:
        gl.warp_specialize([
            (_attend, (0, tensors, sums, memory, barriers, order, sizes, GROUPS, M, N, D, STAGES, TURNS, POLYNOMIAL,
                       AFFINE, BLOCKS, SEGMENT, SAVED)),
            (_attend, (1, tensors, sums, memory, barriers, order, sizes, GROUPS, M, N, D, STAGES, TURNS, POLYNOMIAL,
                       AFFINE, BLOCKS, SEGMENT, SAVED)),
            (_load, (inputs, memory, barriers, order, sizes, GROUPS, M, N, D, STAGES)),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_attend, (0, tensors, sums, memory, barriers, order, sizes, GROUPS, M, N, D, STAGES, TURNS, POLYNOMIAL,
                       AFFINE, BLOCKS, SEGMENT, SAVED)),
            (_attend, (1, tensors, sums, memory, barriers, order, sizes, GROUPS, M, N, D, STAGES, TURNS, POLYNOMIAL,
                       AFFINE, BLOCKS, SEGMENT, SAVED)),
            (_attend, (2, tensors, sums, memory, barriers, order, sizes, GROUPS, M, N, D, STAGES, TURNS, POLYNOMIAL,
                       AFFINE, BLOCKS, SEGMENT, SAVED)),
            (_load, (inputs, memory, barriers, order, sizes, GROUPS, M, N, D, STAGES)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])  # fmt: skip
