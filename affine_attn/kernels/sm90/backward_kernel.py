"""Gluon kernel: the sm90 backward of causal attention, with what beta adds to the gradient of v.

Affine weights are alpha * p + beta. In a backward that has the weights of a block in registers before it multiplies
them with dy, beta is one addition. It is needed in blocks on the diagonal alone: queries of later blocks see all keys
of a tile, so each of these gets the same sum of beta * dy, whose parts sm90_preprocess_kernel has computed.

One CTA per SM computes the tiles that the tile scheduler gives it; a tile is N keys of one kv head. It goes through the
query heads that share them, and for each through the blocks of M queries from the diagonal to the end; dk and dv stay
in registers. Two consumer warpgroups have N / 2 keys each, and everything transposed, keys down and queries across, so
that weights and their gradients are left operands of the MMAs as they are. Gradients of scores go through shared memory
for dq, of which each warpgroup computes one half of the columns. One producer warp loads tiles, one loads row
statistics, one adds dq to what other CTAs have added. All run ahead into the next tile as far as their pipeline stages
allow.

MMA accumulators need not start at zero: scores start at -lse / scale, and dy v' at -<dy, o>. What the next step wants
to subtract is there already; a load behind the MMAs would wait for all of them.

Legend. d_ tensor descriptor, s_ shared memory, p_ pointer, b_ block in registers, t_ one that an MMA is computing, o_
offsets, m_ mask. T tokens. Barriers: full and free, see pipeline.py.
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

from affine_attn.kernels.sm90.pipeline import matrix, nth_tile, tile_count, wait_free, wait_full

# Keys of a tile, and of a warpgroup; queries at a time.
N = tl.constexpr(128)
HALF = tl.constexpr(64)
M = tl.constexpr(64)


@gluon.jit
def _load(
    inputs, memory, barriers, order, T, GROUP: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, TILES: gl.constexpr
):  # fmt: skip
    """Load tiles of k and v, and blocks of q and dy: a producer warp."""
    d_q, d_k, d_v, d_dy = inputs
    s_k, s_v, s_q, s_dy = memory[0], memory[1], memory[2], memory[3]
    kv_full, kv_free, full, free = barriers[0], barriers[1], barriers[2], barriers[3]
    i = 0
    for n in range(tile_count(order)):
        b, kv, _, key0 = nth_tile(order, n)
        stage = n % TILES
        wait_free(kv_free, n, stage, TILES)
        mbarrier.expect(kv_full.index(stage), 2 * N * D * 2)
        tma.async_copy_global_to_shared(d_k, [b, kv, key0, 0], kv_full.index(stage), s_k.index(stage))
        tma.async_copy_global_to_shared(d_v, [b, kv, key0, 0], kv_full.index(stage), s_v.index(stage))
        for g in range(GROUP):
            for row0 in range(key0, T, M):
                stage = i % STAGES
                wait_free(free, i, stage, STAGES)
                mbarrier.expect(full.index(stage), 2 * M * D * 2)
                corner = [b, kv * GROUP + g, row0, 0]
                tma.async_copy_global_to_shared(d_q, corner, full.index(stage), s_q.index(stage))
                tma.async_copy_global_to_shared(d_dy, corner, full.index(stage), s_dy.index(stage))
                i += 1


@gluon.jit
def _bring_rows(
    rows, memory, barriers, order, kv_heads, T, per_scale,
    GROUP: gl.constexpr, STAGES: gl.constexpr, HAS_BETA: gl.constexpr, HAS_SIGNS: gl.constexpr,
):  # fmt: skip
    """Load row statistics, in a warp: what the accumulators of scores and dy v' start at, and beta. With HAS_SIGNS the
    latter two change their sign where p_signs is negative, as rows of dy have."""
    p_lse, p_delta, p_beta, p_signs = rows
    s_rows = memory[5]
    full, free = barriers[2], barriers[3]
    o = gl.arange(0, M, gl.BlockedLayout([M // 32], [32], [1], [0]))
    i = 0
    for n in range(tile_count(order)):
        b, kv, _, key0 = nth_tile(order, n)
        for g in range(GROUP):
            first = ((b * kv_heads + kv).to(gl.int64) * GROUP + g) * T
            for row0 in range(key0, T, M):
                m_t = row0 + o < T
                b_lse = gl.load(p_lse + first + row0 + o, mask=m_t, other=float("inf"))
                b_delta = gl.load(p_delta + first + row0 + o, mask=m_t, other=0.0)
                if HAS_BETA:
                    b_beta = gl.load(p_beta + first + row0 + o, mask=m_t & (row0 < key0 + N), other=0.0)
                    if HAS_SIGNS:
                        is_negative = gl.load(p_signs + first + row0 + o, mask=m_t, other=1.0) < 0
                        b_delta = gl.where(is_negative, -b_delta, b_delta)
                        b_beta = gl.where(is_negative, -b_beta, b_beta)
                stage = i % STAGES
                wait_free(free, i, stage, STAGES)
                s_rows.index(stage * 3).store(-b_lse * per_scale)
                s_rows.index(stage * 3 + 1).store(-b_delta)
                if HAS_BETA:
                    s_rows.index(stage * 3 + 2).store(b_beta)
                mbarrier.arrive(full.index(stage), count=1)
                i += 1


@gluon.jit
def _add_dq(p_dq, memory, barriers, order, kv_heads, T, GROUP: gl.constexpr, D: gl.constexpr):
    """Add blocks of dq to what other CTAs have added, in a warp: fences of the warpgroups would wait for that."""
    ROWS: gl.constexpr = 1024 // D
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [128 // D, D // 4], [1, 1], [1, 0])
    s_dq = memory[6]
    dq_full, dq_free = barriers[6], barriers[7]
    o_r, o_d = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)), gl.arange(0, D, gl.SliceLayout(0, LAYOUT))
    i = 0
    for n in range(tile_count(order)):
        b, kv, _, key0 = nth_tile(order, n)
        for g in range(GROUP):
            p_head = p_dq + ((b * kv_heads + kv).to(gl.int64) * GROUP + g) * (gl.cdiv(T, M) * M) * D
            for row0 in range(key0, T, M):
                mbarrier.wait(dq_full.index(0), i & 1)
                for start in gl.static_range(0, M, ROWS):
                    b_dq = s_dq.slice(start, ROWS).load(LAYOUT)
                    p_rows = p_head + (row0 + start) * D + o_r[:, None] * D + o_d[None, :]
                    # Four neighbours at a time.
                    gl.inline_asm_elementwise(
                        "{ mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; "
                        "red.relaxed.gpu.global.add.v4.f32 [$4], {$8, $9, $10, $11}; }",
                        "=r,=r,=r,=r,l,l,l,l,f,f,f,f",
                        [p_rows.to(gl.int64, bitcast=True), b_dq], gl.int32, is_pure=False, pack=4,
                    )  # fmt: skip
                mbarrier.arrive(dq_free.index(0), count=1)
                i += 1


@gluon.jit
def _hand_over(i, b_dq, group: gl.constexpr, s_dq, barriers, COLUMNS: gl.constexpr):
    """Hand a warpgroup's half of the i-th block of dq to the warp that adds it."""
    dq_full, dq_free = barriers[6], barriers[7]
    mbarrier.wait(dq_free.index(0), (i & 1) ^ 1)
    s_dq.slice(group * COLUMNS, COLUMNS, dim=1).store(b_dq)
    mbarrier.arrive(dq_full.index(0), count=1)


@gluon.jit
def _dq(ds, k, b_zero, group: gl.constexpr, COLUMNS: gl.constexpr):
    """Start the MMA of a warpgroup's half of the columns of dq."""
    return warpgroup_mma(
        ds.permute((1, 0)), k.slice(group * COLUMNS, COLUMNS, dim=1), b_zero, use_acc=False, is_async=True
    )


@gluon.jit
def _step(
    i, j, row0, is_first, tile, b_dk, b_dv, memory, barriers, offsets, factor,
    DIAGONAL: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, HAS_BETA: gl.constexpr, LATE: gl.constexpr,
    LAYOUTS: gl.constexpr,
):  # fmt: skip
    """Compute one block of queries, the i-th of the CTA. With LATE, dq is that of the block before, so that neither
    warpgroup waits for the other; gradients of scores then lie in two buffers, j of them so far. The one before a
    tile's first is of the tile before, and what comes of it is dropped."""
    S_LAYOUT: gl.constexpr = LAYOUTS[0]
    LEFT: gl.constexpr = LAYOUTS[1]
    Q_LAYOUT: gl.constexpr = LAYOUTS[2]
    DQ_COLUMNS: gl.constexpr = LAYOUTS[3]
    group: gl.constexpr = LAYOUTS[4]
    COLUMNS: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    # Plus a 0 that the compiler does not know: else it computes addresses of all operands once, and has no registers
    # to keep them in.
    zero = row0 >> 31
    k, v = matrix(memory[0], tile + zero, N, D), matrix(memory[1], tile + zero, N, D)
    my_k, my_v = k.slice(group * HALF, HALF), v.slice(group * HALF, HALF)
    o_key, o_query = offsets
    s_q, s_dy, s_ds, s_rows = memory[2], memory[3], memory[4], memory[5]
    full, free, ds_full, ds_free = barriers[2], barriers[3], barriers[4], barriers[5]
    b_zero = gl.zeros([HALF, M], gl.float32, S_LAYOUT)
    b_dq_zero = gl.zeros([M, DQ_COLUMNS], gl.float32, Q_LAYOUT)
    stage = i % STAGES
    wait_full(full, i, stage, STAGES)
    q, dy = matrix(s_q, stage, M, D), matrix(s_dy, stage, M, D)
    b_start, _ = gl.broadcast(s_rows.index(stage * 3).load(COLUMNS)[None, :], b_zero)
    b_minus_delta, _ = gl.broadcast(s_rows.index(stage * 3 + 1).load(COLUMNS)[None, :], b_zero)
    t_s = warpgroup_mma(my_k, q.permute((1, 0)), b_start, is_async=True)
    t_dp = warpgroup_mma(my_v, dy.permute((1, 0)), b_minus_delta, is_async=True)
    if LATE:
        mbarrier.wait(ds_full.index((j - 1) & 1), ((j - 1) >> 1) & 1)
        t_dq = _dq(s_ds.index((j - 1) & 1), k, b_dq_zero, group, DQ_COLUMNS)
    b_p = gl.exp2(warpgroup_mma_wait(1 + LATE, deps=(t_s,)) * factor)
    if DIAGONAL:
        m_seen = row0 + o_query[None, :] >= o_key[:, None]
        b_p = gl.where(m_seen, b_p, 0.0)
    b_w = b_p
    if HAS_BETA and DIAGONAL:
        b_w = gl.where(m_seen, b_p + s_rows.index(stage * 3 + 2).load(COLUMNS)[None, :], 0.0)
    t_dv = warpgroup_mma(gl.convert_layout(b_w.to(s_q.dtype), LEFT), dy, b_dv, is_async=True)
    b_ds = (b_p * warpgroup_mma_wait(1 + LATE, deps=(t_dp,))).to(s_q.dtype)
    if LATE:
        # The second buffer has been read once more than the first, as the block before the first one.
        mbarrier.wait(ds_free.index(j & 1), (((j + 1) >> 1) & 1) ^ 1)
        s_ds.index(j & 1).slice(group * HALF, HALF).store(b_ds)
        fence_async_shared()
        mbarrier.arrive(ds_full.index(j & 1), count=1)
        t_dk = warpgroup_mma(gl.convert_layout(b_ds, LEFT), q, b_dk, is_async=True)
        b_dq = warpgroup_mma_wait(2, deps=(t_dq,))
        mbarrier.arrive(ds_free.index((j - 1) & 1), count=1)
        if not is_first:
            _hand_over(i - 1, b_dq, group, memory[6], barriers, DQ_COLUMNS)
        b_dv = warpgroup_mma_wait(1, deps=(t_dv,))
    else:
        mbarrier.wait(ds_free.index(0), (i & 1) ^ 1)
        s_ds.index(zero).slice(group * HALF, HALF).store(b_ds)
        fence_async_shared()
        mbarrier.arrive(ds_full.index(0), count=1)
        mbarrier.wait(ds_full.index(0), i & 1)
        t_dq = _dq(s_ds.index(zero), k, b_dq_zero, group, DQ_COLUMNS)
        t_dk = warpgroup_mma(gl.convert_layout(b_ds, LEFT), q, b_dk, is_async=True)
        b_dv = warpgroup_mma_wait(2, deps=(t_dv,))
        b_dq = warpgroup_mma_wait(1, deps=(t_dq,))
        mbarrier.arrive(ds_free.index(0), count=1)
        _hand_over(i, b_dq, group, memory[6], barriers, DQ_COLUMNS)
    b_dk = warpgroup_mma_wait(0, deps=(t_dk,))
    mbarrier.arrive(free.index(stage), count=1)
    return b_dk, b_dv


@gluon.jit
def _differentiate(
    group: gl.constexpr, outputs, memory, barriers, order, sizes, factor, scale,
    GROUP: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, TILES: gl.constexpr, HAS_BETA: gl.constexpr,
    LATE: gl.constexpr, SEGMENT: gl.constexpr,
):  # fmt: skip
    """Compute dk and dv of HALF of the keys of each tile: a consumer warpgroup."""
    DQ_COLUMNS: gl.constexpr = D // 2
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    KV_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    Q_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DQ_COLUMNS, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, KV_LAYOUT, 2)
    LAYOUTS: gl.constexpr = (S_LAYOUT, LEFT, Q_LAYOUT, DQ_COLUMNS, group)
    d_dk, d_dv, p_after = outputs
    kv_heads, T, segments = sizes
    s_k, s_v, s_q, s_ds = memory[0], memory[1], memory[2], memory[4]
    kv_full, kv_free, ds_full, ds_free = barriers[0], barriers[1], barriers[4], barriers[5]
    o_half = group * HALF + gl.arange(0, HALF, gl.SliceLayout(1, S_LAYOUT))
    o_query = gl.arange(0, M, gl.SliceLayout(0, S_LAYOUT))
    o_d = gl.arange(0, D, gl.SliceLayout(0, KV_LAYOUT))
    i = 0
    for n in range(tile_count(order)):
        b, kv, _, key0 = nth_tile(order, n)
        tile = n % TILES
        offsets = (key0 + o_half, o_query)
        b_dk, b_dv = gl.zeros([HALF, D], gl.float32, KV_LAYOUT), gl.zeros([HALF, D], gl.float32, KV_LAYOUT)
        wait_full(kv_full, n, tile, TILES)
        for g in range(GROUP):
            for row0 in range(key0, gl.minimum(key0 + N, T), M):
                b_dk, b_dv = _step(
                    i, i + n, row0, g * T + row0 == key0, tile, b_dk, b_dv, memory, barriers, offsets, factor,
                    True, D, STAGES, HAS_BETA, LATE, LAYOUTS,
                )  # fmt: skip
                i += 1
            for row0 in range(key0 + N, T, M):
                b_dk, b_dv = _step(
                    i, i + n, row0, False, tile, b_dk, b_dv, memory, barriers, offsets, factor,
                    False, D, STAGES, HAS_BETA, LATE, LAYOUTS,
                )  # fmt: skip
                i += 1
        k, v = matrix(s_k, tile, N, D), matrix(s_v, tile, N, D)
        if LATE:
            j = i + n - 1
            mbarrier.wait(ds_full.index(j & 1), (j >> 1) & 1)
            b_zero = gl.zeros([M, DQ_COLUMNS], gl.float32, Q_LAYOUT)
            t_dq = _dq(s_ds.index(j & 1), k, b_zero, group, DQ_COLUMNS)
            b_dq = warpgroup_mma_wait(0, deps=(t_dq,))
            mbarrier.arrive(ds_free.index(j & 1), count=1)
            # What comes before the next tile's first.
            mbarrier.arrive(ds_full.index((j + 1) & 1), count=1)
            _hand_over(i - 1, b_dq, group, memory[6], barriers, DQ_COLUMNS)
            mbarrier.wait(ds_free.index(j & 1), ((j + 1) >> 1) & 1)
        else:
            mbarrier.wait(ds_free.index(0), (i & 1) ^ 1)
        if HAS_BETA:
            after = key0 + N
            p_row = p_after + ((b * kv_heads + kv).to(gl.int64) * segments + after // SEGMENT) * D
            b_dv += gl.load(p_row + o_d, mask=(o_d < D) & (after < T), other=0.0)[None, :]
        # Both warpgroups are done with all of k.
        k.slice(group * HALF, HALF).store((b_dk * scale).to(s_q.dtype))
        v.slice(group * HALF, HALF).store(b_dv.to(s_q.dtype))
        fence_async_shared()
        corner = [b, kv, key0 + group * HALF, 0]
        tma.async_copy_shared_to_global(d_dk, corner, s_k.index(tile).slice(group * HALF, HALF, dim=2))
        tma.async_copy_shared_to_global(d_dv, corner, s_v.index(tile).slice(group * HALF, HALF, dim=2))
        tma.store_wait(0)
        mbarrier.arrive(kv_free.index(tile), count=1)


@gluon.jit(do_not_specialize=["most"])
def sm90_backward_kernel(
    d_q, d_k, d_v, d_dy, d_dk, d_dv, p_lse, p_delta, p_beta, p_signs, p_after, p_dq, p_order, p_tiles,
    most, kv_heads, T, segments, factor, scale, per_scale,
    GROUP: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, TILES: gl.constexpr, HAS_BETA: gl.constexpr,
    HAS_SIGNS: gl.constexpr, LATE: gl.constexpr, SEGMENT: gl.constexpr,
):  # fmt: skip
    """Write dk and dv, and add dq without its scale to p_dq: float32, 0 before, its rows padded to a multiple of M.

    `factor` is the scale times log2(e), lse the log-sum-exp less the logarithm of |row factor|, delta <dy, o>; dy,
    delta and beta come negated where the row factor is negative, or with HAS_SIGNS dy alone, and p_signs tells where
    that is. p_after[bh, c] is the sum of beta * gate * dy from segment c on.
    """
    gl.static_assert(N % SEGMENT == 0, "a segment begins where a tile ends")
    gl.static_assert(HAS_BETA or not HAS_SIGNS, "signs come with beta")
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    s_k = gl.allocate_shared_memory(d_q.dtype, [TILES, 1, 1, N, D], d_k.layout)
    s_v = gl.allocate_shared_memory(d_q.dtype, [TILES, 1, 1, N, D], d_k.layout)
    s_q = gl.allocate_shared_memory(d_q.dtype, [STAGES, 1, 1, M, D], d_q.layout)
    s_dy = gl.allocate_shared_memory(d_q.dtype, [STAGES, 1, 1, M, D], d_q.layout)
    DS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([N, M], d_q.dtype)
    s_ds = gl.allocate_shared_memory(d_q.dtype, [1 + LATE, N, M], DS)
    if LATE:  # of the block before the first
        ZERO: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
        s_ds.index(1).store(gl.zeros([N, M], d_q.dtype, ZERO))
    s_rows = gl.allocate_shared_memory(gl.float32, [3 * STAGES, M], PLAIN)
    # In eights: rows of threads that store at the same time lie in different banks.
    s_dq = gl.allocate_shared_memory(gl.float32, [M, D], gl.SwizzledSharedLayout(8, 1, 4, [1, 0]))
    kv_full = gl.allocate_shared_memory(gl.int64, [TILES, 1], BARRIER)
    kv_free = gl.allocate_shared_memory(gl.int64, [TILES, 1], BARRIER)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    ds_full = gl.allocate_shared_memory(gl.int64, [1 + LATE, 1], BARRIER)
    ds_free = gl.allocate_shared_memory(gl.int64, [1 + LATE, 1], BARRIER)
    dq_full = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    dq_free = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    mbarrier.init(dq_full.index(0), count=2)
    mbarrier.init(dq_free.index(0), count=1)
    for tile in gl.static_range(TILES):
        mbarrier.init(kv_full.index(tile), count=1)
        mbarrier.init(kv_free.index(tile), count=2)
    for buffer in gl.static_range(1 + LATE):
        mbarrier.init(ds_full.index(buffer), count=2)
        mbarrier.init(ds_free.index(buffer), count=2)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=2)
        mbarrier.init(free.index(stage), count=2)
    fence_async_shared()
    inputs, outputs, rows = (d_q, d_k, d_v, d_dy), (d_dk, d_dv, p_after), (p_lse, p_delta, p_beta, p_signs)
    memory = (s_k, s_v, s_q, s_dy, s_ds, s_rows, s_dq)
    barriers = (kv_full, kv_free, full, free, ds_full, ds_free, dq_full, dq_free)
    order, sizes = (p_order, most, p_tiles), (kv_heads, T, segments)
    gl.warp_specialize([
        (_differentiate, (0, outputs, memory, barriers, order, sizes, factor, scale,
                          GROUP, D, STAGES, TILES, HAS_BETA, LATE, SEGMENT)),
        (_differentiate, (1, outputs, memory, barriers, order, sizes, factor, scale,
                          GROUP, D, STAGES, TILES, HAS_BETA, LATE, SEGMENT)),
        (_bring_rows, (rows, memory, barriers, order, kv_heads, T, per_scale, GROUP, STAGES, HAS_BETA, HAS_SIGNS)),
        (_add_dq, (p_dq, memory, barriers, order, kv_heads, T, GROUP, D)),
        (_load, (inputs, memory, barriers, order, T, GROUP, D, STAGES, TILES)),
    ], [4, 1, 1, 1], [232, 40, 40, 40])  # fmt: skip
