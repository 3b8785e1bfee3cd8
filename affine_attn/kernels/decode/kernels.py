"""Decode attention for the affine family: few queries, a long key/value cache, memory-bound.

    z = logsumexp_j s_j ;  o = softmax(s) V ;  u = sum of V over the visible keys
    y = gate * (alpha * sigmoid(z - sink) * o + beta * u)

Two kernels (flash-decoding): `decode_split_kernel` streams one range of keys and values once and leaves
(m, l, acc) per row; `decode_combine_kernel` merges the ranges in a fixed order (deterministic, no atomics)
and applies sink, alpha, beta and gate. With a single range the first kernel does the epilogue itself.

The value sum u costs no work of its own: it is the un-normalised attention of a ZERO query. All its scores
are 0, so its running maximum is 0, its weights are exactly 1 and its accumulator is the sum of visible V.
So with beta each program carries one more "head", the zero head, in rows of the tile that tl.dot pads anyway.

Rows of a tile, all heads of one kv head and all queries (row r = head_in_group * TQ + query):

    r // TQ <  GROUP               query head kv * GROUP + r // TQ
    r // TQ == GROUP, with beta    the zero head: its accumulator is u of query r % TQ
    beyond                         padding up to BLOCK_M; computed (as zero queries), never stored

Legend
    p_ pointer   b_ block of values   o_ offsets   m_ mask   stride_xy: stride of tensor x along axis y
    axes: b batch, h query head or kv head, i query, n key, d channel
    TQ queries per head, GROUP = H / H_kv, ROWS = (GROUP + has beta) * TQ
    length: filled key slots of this batch row; query i sits at slot length - TQ + i
    DV: channels of the values, where not those D of the keys
    scores and m are in units of log2 (exp2 is the hardware instruction); sink stays a natural log
    cap_factor: scale / cap, None without a soft cap; with one, tanh(cap_factor * q.k) takes the place of q.k, and
    scale_log2 has the cap in place of the scale
    LOGIT: 0 plain, 1 ScaleInvariant(tau), 2 Alibi
    EARLY: launched before the kernel it depends on has ended; nothing is touched before gdc_wait()
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from affine_attn.kernels.constants import LN2, LOG2E
from affine_attn.kernels.tanh import tanh


@triton.jit
def row_length(p_lengths, batch, TK):
    """Filled key slots of a batch row; clamped so that a wrong length can never read outside the cache."""
    length = TK
    if p_lengths is not None:
        length = tl.minimum(tl.load(p_lengths + batch).to(tl.int32), TK)
    return length


@triton.jit
def visible_range(length, window, splits, TQ: tl.constexpr, HAS_WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """(first key any query sees, keys per split, number of splits in use), from the row's OWN length.

    Both kernels call this, so the combine knows which partial results exist without being told.
    """
    first_key = 0
    if HAS_WINDOW:
        # the earliest query (slot length - TQ) looks back furthest
        first_key = tl.maximum(length - TQ - window + 1, 0)
    tiles = tl.cdiv(tl.maximum(length - first_key, 0), BLOCK_N)
    tiles_per_split = tl.maximum(tl.cdiv(tiles, splits), 1)
    return first_key, tiles_per_split * BLOCK_N, tl.cdiv(tiles, tiles_per_split)


@triton.jit
def apply_logit(b_x, o_slot, o_n, b_slope, m_query_head, inverse_tau, LOGIT: tl.constexpr, TQ: tl.constexpr):
    """Stage 1 in log2 units: b_x = scale * log2(e) * q.k -> scores. Zero-query rows keep score 0."""
    if TQ == 1:
        # all rows are of one query, at length - 1, and log and sqrt are too slow to take for each of them
        o_slot = tl.max(o_slot, 0, keep_dims=True)
    # [BLOCK_M or 1, BLOCK_N]; keys after the query are masked later, the clamp only keeps the log defined
    b_t = tl.maximum(o_slot[:, None] - o_n[None, :], 0).to(tl.float32)
    if LOGIT == 1:
        # a = sqrt(1 + 2 log(1 + t/tau)), s = a x - 2 log(1 + t/tau)
        b_log2 = tl.log2(1.0 + b_t * inverse_tau)
        b_a = tl.sqrt(1.0 + b_log2 * (2.0 * LN2))
        b_x = tl.where(m_query_head[:, None], b_a * b_x - 2.0 * b_log2, 0.0)
    if LOGIT == 2:
        # the slope of zero-query rows is 0
        b_x = b_x - b_slope[:, None] * b_t
    return b_x


@triton.jit
def attend_tile(
    b_q, b_acc, b_m, b_l,
    p_k, p_v, p_padding, p_documents,
    start, stop, stride_kn, stride_vn,
    o_slot, b_document, b_slope, m_query_head,
    scale_log2, cap_factor, inverse_tau, window,
    TQ: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    LOGIT: tl.constexpr, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One tile of keys and values into the online softmax. MASKED=False promises: every row sees every key."""
    o_tile = tl.arange(0, BLOCK_N)
    o_n = start + o_tile
    o_d, o_dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    m_d, m_dv = o_d < D, o_dv < DV
    # 64-bit only for the start of the tile: a cache can exceed 2^31 elements, one tile cannot
    p_k_tile = p_k + tl.cast(start, tl.int64) * stride_kn
    p_v_tile = p_v + tl.cast(start, tl.int64) * stride_vn
    # [BLOCK_N, BLOCK_D] and [BLOCK_N, BLOCK_DV]
    p_k_tile = p_k_tile + o_tile[:, None] * stride_kn + o_d[None, :]
    p_v_tile = p_v_tile + o_tile[:, None] * stride_vn + o_dv[None, :]

    if MASKED:
        m_n = o_n < stop
        # masked by position alone: a load mask that depends on another load would stall the pipeline
        b_k = tl.load(p_k_tile, mask=m_n[:, None] & m_d[None, :], other=0.0)
        b_v = tl.load(p_v_tile, mask=m_n[:, None] & m_dv[None, :], other=0.0)
        if p_padding is not None:
            m_n = m_n & (tl.load(p_padding + o_n, mask=m_n, other=0) != 0)
        # [BLOCK_M, BLOCK_N], or [1, BLOCK_N] where no row differs from another
        m_visible = m_n[None, :]
        if CAUSAL:
            m_visible = m_visible & (o_n[None, :] <= o_slot[:, None])
        if HAS_WINDOW:
            m_visible = m_visible & (o_slot[:, None] - o_n[None, :] < window)
        if p_documents is not None:
            b_key_document = tl.load(p_documents + o_n, mask=m_n, other=0)
            m_visible = m_visible & (b_key_document[None, :] == b_document[:, None]) & (o_slot[:, None] >= 0)
            # only documents can hide a whole key from every row: causal and window ranges have no holes
            m_n = tl.max(m_visible.to(tl.int32), 0) > 0
        if p_padding is not None or p_documents is not None:
            # a key nobody sees may hold NaN: its score is replaced below, but its value needs a true zero
            b_v = tl.where(m_n[:, None], b_v, 0.0)
    else:
        if D == BLOCK_D:
            b_k = tl.load(p_k_tile)
        else:
            b_k = tl.load(p_k_tile, mask=m_d[None, :], other=0.0)
        if DV == BLOCK_DV:
            b_v = tl.load(p_v_tile)
        else:
            b_v = tl.load(p_v_tile, mask=m_dv[None, :], other=0.0)

    # [BLOCK_M, BLOCK_N]; tf32x3 concerns fp32 inputs only: nearly fp32 precision, where plain fp32 spills
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision="tf32x3")
    if cap_factor is not None:
        b_s = tanh(b_s * cap_factor)
    b_s *= scale_log2
    if LOGIT != 0:
        b_s = apply_logit(b_s, o_slot, o_n, b_slope, m_query_head, inverse_tau, LOGIT, TQ)
    if MASKED:
        b_s = tl.where(m_visible, b_s, float("-inf"))

    b_m_new = tl.maximum(b_m, tl.max(b_s, 1))
    b_m_shift = b_m_new
    if MASKED:
        # a row that has seen nothing yet: -inf - -inf would be NaN
        b_m_shift = tl.where(b_m_new == float("-inf"), 0.0, b_m_new)
    b_p = tl.exp2(b_s - b_m_shift[:, None])
    b_decay = tl.exp2(b_m - b_m_shift)
    b_l = b_l * b_decay + tl.sum(b_p, 1)
    # [BLOCK_M, BLOCK_DV]
    b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_decay[:, None], input_precision="tf32x3")
    return b_acc, b_m_new, b_l


@triton.jit
def finish_rows(
    b_acc, b_m, b_l, b_u, batch, o_h, o_i, m_row,
    p_sink, constant_sink, p_alpha, p_beta, p_gate, p_y,
    stride_sb, stride_sh, stride_si, stride_ab, stride_ah, stride_ai, stride_bb, stride_bh, stride_bi,
    stride_gb, stride_gh, stride_gi, stride_gd, stride_yb, stride_yh, stride_yi,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Stages 2 to 4 and the store, for rows [R] (head o_h, query o_i) with tiles [R, BLOCK_DV]."""
    o_d = tl.arange(0, BLOCK_DV)
    m_row_d = m_row[:, None] & (o_d[None, :] < DV)
    batch = tl.cast(batch, tl.int64)

    m_empty = b_l == 0.0
    b_l = tl.where(m_empty, 1.0, b_l)
    # alpha * sigmoid(z - sink) / l, one factor per row
    b_factor = 1.0 / b_l
    if p_sink is not None or constant_sink is not None:
        b_z_log2 = tl.where(m_empty, 0.0, b_m + tl.log2(b_l))
        if p_sink is not None:
            b_sink = tl.load(p_sink + batch * stride_sb + o_h * stride_sh + o_i * stride_si, mask=m_row, other=0.0)
            b_sink = b_sink.to(tl.float32)
        else:
            b_sink = constant_sink
        b_factor = b_factor / (1.0 + tl.exp2(b_sink * LOG2E - b_z_log2))
    if p_alpha is not None:
        b_alpha = tl.load(p_alpha + batch * stride_ab + o_h * stride_ah + o_i * stride_ai, mask=m_row, other=0.0)
        b_factor = b_factor * b_alpha.to(tl.float32)
    b_y = b_acc * b_factor[:, None]
    if p_beta is not None:
        b_beta = tl.load(p_beta + batch * stride_bb + o_h * stride_bh + o_i * stride_bi, mask=m_row, other=0.0)
        b_y += b_beta.to(tl.float32)[:, None] * b_u
    if p_gate is not None:
        p_gate_row = p_gate + batch * stride_gb + o_h * stride_gh + o_i * stride_gi
        # a headwise gate comes with stride_gd = 0
        b_gate = tl.load(p_gate_row[:, None] + o_d[None, :] * stride_gd, mask=m_row_d, other=0.0)
        b_y *= b_gate.to(tl.float32)
    p_y_row = p_y + batch * stride_yb + o_h * stride_yh + o_i * stride_yi
    tl.store(p_y_row[:, None] + o_d[None, :], b_y.to(p_y.dtype.element_ty), mask=m_row_d)


# what changes from one decoding step to the next must not trigger a new compilation
@triton.jit(do_not_specialize=["TK", "window", "splits", "stride_padding_b", "stride_documents_b"])
def decode_split_kernel(
    p_q, p_k, p_v, p_lengths, p_padding, p_documents,
    p_acc, p_m, p_l,
    p_sink, constant_sink, p_alpha, p_beta, p_gate, p_y,
    TK, window, splits, scale_log2, cap_factor, inverse_tau,
    stride_qb, stride_qh, stride_qi, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_padding_b, stride_documents_b,
    stride_sb, stride_sh, stride_si, stride_ab, stride_ah, stride_ai, stride_bb, stride_bh, stride_bi,
    stride_gb, stride_gh, stride_gi, stride_gd, stride_yb, stride_yh, stride_yi,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, TQ: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    LOGIT: tl.constexpr, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, FUSED: tl.constexpr, EARLY: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """grid (KV_HEADS * row blocks, splits, batch): one range of keys for one block of rows.

    Leaves p_acc [B, KV_HEADS, ROWS, splits, DV] and p_m, p_l [B, KV_HEADS, ROWS, splits] (fp32), or y if FUSED.
    kv heads are the fast grid axis so that neighbours read neighbouring memory of a [B, T, H, D] cache.
    """
    USE_BETA: tl.constexpr = p_beta is not None
    ROWS: tl.constexpr = (GROUP + 1) * TQ if USE_BETA else GROUP * TQ
    # with these masks any tile may have holes; otherwise only the tiles at the end need a mask
    MASK_ALL: tl.constexpr = (p_padding is not None) or (p_documents is not None) or (HAS_WINDOW and TQ > 1)
    if EARLY:
        gdc_wait()
        if not FUSED:
            # the combine may wait on the SMs that have nothing left to start
            gdc_launch_dependents()

    kv_head = tl.program_id(0) % KV_HEADS
    row_block = tl.program_id(0) // KV_HEADS
    split = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)

    length = row_length(p_lengths, batch, TK)
    first_key, keys_per_split, used = visible_range(length, window, splits, TQ, HAS_WINDOW, BLOCK_N)
    if not FUSED:
        # the combine never reads the slots of unused splits (a FUSED program always has a y to write)
        if split >= used:
            return
    start = first_key + split * keys_per_split
    stop = tl.minimum(start + keys_per_split, length)

    # [BLOCK_M]
    o_row = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    o_i = o_row % TQ
    o_group = o_row // TQ
    m_query_head = o_group < GROUP
    o_h = kv_head * GROUP + tl.where(m_query_head, o_group, 0)
    o_slot = length - TQ + o_i
    o_d = tl.arange(0, BLOCK_D)

    # [BLOCK_M, BLOCK_D]; the zero head and the padding rows are zero queries
    p_q_tile = p_q + batch * stride_qb + (o_h * stride_qh + o_i * stride_qi)[:, None] + o_d[None, :]
    b_q = tl.load(p_q_tile, mask=m_query_head[:, None] & (o_d[None, :] < D), other=0.0)
    p_k += batch * stride_kb + kv_head.to(tl.int64) * stride_kh
    p_v += batch * stride_vb + kv_head.to(tl.int64) * stride_vh

    b_slope = tl.zeros([BLOCK_M], tl.float32)
    if LOGIT == 2:
        b_head = (o_h + 1).to(tl.float32)
        b_slope = tl.where(m_query_head, tl.exp2(b_head * (-8.0 / (KV_HEADS * GROUP))) * LOG2E, 0.0)
    b_document = o_i
    if p_padding is not None:
        p_padding += batch * stride_padding_b
    if p_documents is not None:
        p_documents += batch * stride_documents_b
        b_document = tl.load(p_documents + o_slot, mask=o_slot >= 0, other=0)

    b_m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    b_l = tl.zeros([BLOCK_M], tl.float32)
    b_acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)

    # whole tiles that every row sees, then the rest (the range's end, keys only later queries see)
    masked_start = start
    if not MASK_ALL:
        full_stop = stop
        if CAUSAL:
            full_stop = tl.minimum(stop, length - TQ + 1)
        masked_start = start + tl.maximum(full_stop - start, 0) // BLOCK_N * BLOCK_N
        for tile_start in tl.range(start, masked_start, BLOCK_N, num_stages=NUM_STAGES):
            b_acc, b_m, b_l = attend_tile(
                b_q, b_acc, b_m, b_l, p_k, p_v, p_padding, p_documents,
                tile_start, stop, stride_kn, stride_vn, o_slot, b_document, b_slope, m_query_head,
                scale_log2, cap_factor, inverse_tau, window, TQ, D, DV, BLOCK_N, BLOCK_D, BLOCK_DV,
                LOGIT, CAUSAL, HAS_WINDOW, MASKED=False,
            )  # fmt: skip
    # a tail of one or two tiles gains nothing from a pipeline
    for tile_start in tl.range(masked_start, stop, BLOCK_N, num_stages=NUM_STAGES if MASK_ALL else 1):
        b_acc, b_m, b_l = attend_tile(
            b_q, b_acc, b_m, b_l, p_k, p_v, p_padding, p_documents,
            tile_start, stop, stride_kn, stride_vn, o_slot, b_document, b_slope, m_query_head,
            scale_log2, cap_factor, inverse_tau, window, TQ, D, DV, BLOCK_N, BLOCK_D, BLOCK_DV,
            LOGIT, CAUSAL, HAS_WINDOW, MASKED=True,
        )  # fmt: skip

    if FUSED:
        b_u = b_acc
        if USE_BETA:
            # row r takes the accumulator of the zero head for its own query
            b_u = tl.gather(b_acc, tl.broadcast_to((GROUP * TQ + o_i)[:, None], [BLOCK_M, BLOCK_DV]), 0)
        finish_rows(
            b_acc, b_m, b_l, b_u, batch, o_h, o_i, m_query_head, p_sink, constant_sink, p_alpha, p_beta, p_gate,
            p_y, stride_sb, stride_sh, stride_si, stride_ab, stride_ah, stride_ai, stride_bb, stride_bh, stride_bi,
            stride_gb, stride_gh, stride_gi, stride_gd, stride_yb, stride_yh, stride_yi, DV, BLOCK_DV,
        )  # fmt: skip
    else:
        # [BLOCK_M] places in scratch [B, KV_HEADS, ROWS, splits]
        o_partial = ((batch * KV_HEADS + kv_head) * ROWS + o_row) * splits + split
        m_row = o_row < ROWS
        tl.store(p_m + o_partial, b_m, mask=m_row)
        tl.store(p_l + o_partial, b_l, mask=m_row)
        o_dv = tl.arange(0, BLOCK_DV)
        m_acc = m_row[:, None] & (o_dv[None, :] < DV)
        tl.store(p_acc + o_partial[:, None] * DV + o_dv[None, :], b_acc, mask=m_acc)


@triton.jit(do_not_specialize=["TK", "window", "splits"])
def decode_combine_kernel(
    p_acc, p_m, p_l, p_lengths,
    p_sink, constant_sink, p_alpha, p_beta, p_gate, p_y,
    TK, window, splits,
    stride_sb, stride_sh, stride_si, stride_ab, stride_ah, stride_ai, stride_bb, stride_bh, stride_bi,
    stride_gb, stride_gh, stride_gi, stride_gd, stride_yb, stride_yh, stride_yi,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, TQ: tl.constexpr, DV: tl.constexpr, HAS_WINDOW: tl.constexpr,
    EARLY: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """grid (H * TQ, batch): merge the splits of one query row, then stages 2 to 4. BLOCK_N as in the split kernel."""
    USE_BETA: tl.constexpr = p_beta is not None
    ROWS: tl.constexpr = (GROUP + 1) * TQ if USE_BETA else GROUP * TQ

    head = tl.program_id(0) // TQ
    query = tl.program_id(0) % TQ
    batch = tl.program_id(1).to(tl.int64)
    # places in scratch [B, KV_HEADS, ROWS, splits] of this row and of the zero head for the same query
    first_row = (batch * KV_HEADS + head // GROUP) * ROWS
    o_partial = (first_row + (head % GROUP) * TQ + query) * splits
    o_partial_zero = (first_row + GROUP * TQ + query) * splits

    if EARLY:
        gdc_wait()
    length = row_length(p_lengths, batch, TK)
    _, _, used = visible_range(length, window, splits, TQ, HAS_WINDOW, BLOCK_N)

    o_d = tl.arange(0, BLOCK_DV)
    b_m = tl.full([1], float("-inf"), tl.float32)
    b_l = tl.zeros([1], tl.float32)
    b_acc = tl.zeros([1, BLOCK_DV], tl.float32)
    b_u = tl.zeros([1, BLOCK_DV], tl.float32)
    for first_split in range(0, used, BLOCK_S):
        # [BLOCK_S]
        o_s = first_split + tl.arange(0, BLOCK_S)
        m_s = o_s < used
        # [BLOCK_S, BLOCK_DV]
        m_tile = m_s[:, None] & (o_d[None, :] < DV)
        b_m_part = tl.load(p_m + o_partial + o_s, mask=m_s, other=float("-inf"))
        b_l_part = tl.load(p_l + o_partial + o_s, mask=m_s, other=0.0)
        b_acc_part = tl.load(p_acc + (o_partial + o_s)[:, None] * DV + o_d[None, :], mask=m_tile, other=0.0)
        if USE_BETA:
            # zero-head accumulators all have maximum 0: plain sums, nothing to rescale
            b_u_part = tl.load(p_acc + (o_partial_zero + o_s)[:, None] * DV + o_d[None, :], mask=m_tile, other=0.0)
            b_u += tl.sum(b_u_part, 0)[None, :]

        b_m_new = tl.maximum(b_m, tl.max(b_m_part, 0))
        # nothing visible so far: keep -inf - -inf (NaN) out
        b_m_shift = tl.where(b_m_new == float("-inf"), 0.0, b_m_new)
        b_weight = tl.exp2(b_m_part - b_m_shift)
        b_decay = tl.exp2(b_m - b_m_shift)
        b_l = b_l * b_decay + tl.sum(b_weight * b_l_part, 0)
        b_acc = b_acc * b_decay[:, None] + tl.sum(b_weight[:, None] * b_acc_part, 0)[None, :]
        b_m = b_m_new

    o_one = tl.arange(0, 1)
    finish_rows(
        b_acc, b_m, b_l, b_u, batch, head + o_one, query + o_one, o_one == 0,
        p_sink, constant_sink, p_alpha, p_beta, p_gate, p_y,
        stride_sb, stride_sh, stride_si, stride_ab, stride_ah, stride_ai, stride_bb, stride_bh, stride_bi,
        stride_gb, stride_gh, stride_gi, stride_gd, stride_yb, stride_yh, stride_yi, DV, BLOCK_DV,
    )  # fmt: skip
