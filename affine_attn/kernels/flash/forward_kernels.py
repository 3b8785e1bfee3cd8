"""Forward of attention with a distance logit, and the statistics pass over the same scores (Triton kernels only).

The legend is in scores.py.
"""

import triton
import triton.language as tl

from affine_attn.kernels.constants import LN2, LOG2E
from affine_attn.kernels.flash.scores import (
    ALIBI,
    DIAGONAL_TILES,
    EDGE_TILES,
    FAR_TILES,
    NEAR_TILES,
    SCALE_INVARIANT,
    _alibi_slope2,
    _capped,
    _key_segments,
    _load_basis,
    _load_rows,
    _near_factor,
    _row_tile_scores,
    _store_rows,
)


@triton.jit
def _forward_tiles(
    b_acc, b_sum, b_max, b_q, p_k, p_v, start, stop, o_slot, b_doc_slot, p_document, p_padding, p_far, p_basis,
    qk_factor, cap_factor, slope2, inv_tau, Tk, window, stride_kn, stride_vn,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr,
    LOGIT: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, HAS_PADDING: tl.constexpr,
    FAST_LOG: tl.constexpr, FAR_SLOTS: tl.constexpr, MASKED: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """Online softmax over the key tiles [start, stop); p_k and p_v move from `start` to `stop`."""
    o_n = tl.arange(0, BLOCK_N)
    b_basis = _load_basis(p_basis, BLOCK_N, FAR_SLOTS, FAR)
    for n0 in range(start, stop, BLOCK_N):
        b_k = _load_rows(p_k, stride_kn, Tk - n0, BLOCK_N, D, BLOCK_D, MASKED)
        b_qk = _capped(tl.dot(b_q, tl.trans(b_k), input_precision="ieee"), cap_factor)  # [M,N]
        b_score2, _ = _row_tile_scores(
            b_qk, o_slot, n0, o_n, b_basis, b_doc_slot, p_document, p_padding, p_far, qk_factor, slope2, inv_tau,
            Tk, window, LOGIT, HAS_WINDOW, HAS_DOCUMENTS, HAS_PADDING, FAST_LOG, FAR_SLOTS, MASKED, FAR, True, BLOCK_N,
        )  # fmt: skip
        b_max_new = tl.maximum(b_max, tl.max(b_score2, 1))  # [M]
        b_shift = b_max_new
        if MASKED:  # a row may have seen no key yet: -inf - -inf would be NaN
            b_shift = tl.where(b_max_new == float("-inf"), 0.0, b_max_new)
        b_p = tl.exp2(b_score2 - b_shift[:, None])
        b_rescale = tl.exp2(b_max - b_shift)
        b_sum = b_sum * b_rescale + tl.sum(b_p, 1)
        b_acc = b_acc * b_rescale[:, None]
        b_v = _load_rows(p_v, stride_vn, Tk - n0, BLOCK_N, DV, BLOCK_DV, MASKED)
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc, input_precision="ieee")
        b_max = b_max_new
        p_k += BLOCK_N * stride_kn
        p_v += BLOCK_N * stride_vn
    return b_acc, b_sum, b_max, p_k, p_v


@triton.jit
def flash_forward_kernel(
    p_q, p_k, p_v, p_out, p_lse, p_document, p_doc_first, p_padding, p_far, p_basis,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_ob, stride_oh, stride_on, H, G, Tq, Tk, window, qk_factor, cap_factor, inv_tau,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, LOGIT: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
    HAS_PADDING: tl.constexpr, FAST_LOG: tl.constexpr, FAR_SLOTS: tl.constexpr, FAR_REACH: tl.constexpr,
):  # fmt: skip
    """out = softmax(s) v and lse (natural log). Grid (cdiv(Tq, BLOCK_M), B*H)."""
    MASK_ALL: tl.constexpr = HAS_DOCUMENTS or HAS_PADDING
    m0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M  # the longest rows first: an even finish
    o_bh = tl.program_id(1).to(tl.int64)
    o_b = o_bh // H
    o_h = o_bh % H
    p_q += o_b * stride_qb + o_h * stride_qh + m0.to(tl.int64) * stride_qn
    p_k += o_b * stride_kb + o_h // G * stride_kh
    p_v += o_b * stride_vb + o_h // G * stride_vh
    first_slot = m0 + Tk - Tq
    o_m = tl.arange(0, BLOCK_M)
    o_slot = first_slot + o_m
    b_doc_slot = o_slot
    if HAS_DOCUMENTS:
        p_document += o_b * Tk
        p_doc_first += o_b * Tk
        b_doc_slot = tl.load(p_document + o_slot, mask=(o_slot >= 0) & (o_slot < Tk), other=0)
    if HAS_PADDING:
        p_padding += o_b * Tk
    slope2 = qk_factor
    if LOGIT == ALIBI:
        slope2 = _alibi_slope2(o_h, H)
    b_q = _load_rows(p_q, stride_qn, Tq - m0, BLOCK_M, D, BLOCK_D, True)
    b_acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    b_sum = tl.zeros([BLOCK_M], tl.float32)
    b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    start, edge, far, diagonal, stop = _key_segments(
        p_doc_first, o_slot, first_slot, Tk, window,
        HAS_WINDOW, HAS_DOCUMENTS, MASK_ALL, FAR_SLOTS, FAR_REACH, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    p_k += start.to(tl.int64) * stride_kn
    p_v += start.to(tl.int64) * stride_vn
    for segment in tl.static_range(4):  # unrolled: each segment is its own loop, compiled without the work it can skip
        if (
            segment == NEAR_TILES or (segment == FAR_TILES and FAR_SLOTS > 0)
            or ((segment == DIAGONAL_TILES or (segment == EDGE_TILES and HAS_WINDOW)) and not MASK_ALL)
        ):  # fmt: skip
            if segment == EDGE_TILES:
                lower, upper = start, edge
            elif segment == FAR_TILES:
                lower, upper = edge, far
            elif segment == NEAR_TILES:
                lower, upper = far, diagonal
            else:
                lower, upper = diagonal, stop
            b_acc, b_sum, b_max, p_k, p_v = _forward_tiles(
                b_acc, b_sum, b_max, b_q, p_k, p_v, lower, upper, o_slot, b_doc_slot, p_document, p_padding,
                p_far, p_basis, qk_factor, cap_factor, slope2, inv_tau, Tk, window, stride_kn, stride_vn,
                D, BLOCK_D, DV, BLOCK_DV, BLOCK_N, LOGIT, HAS_WINDOW, HAS_DOCUMENTS, HAS_PADDING, FAST_LOG, FAR_SLOTS,
                MASK_ALL or segment == EDGE_TILES or segment == DIAGONAL_TILES, segment == FAR_TILES,
            )  # fmt: skip
    m_empty = b_sum == 0.0
    b_sum = tl.where(m_empty, 1.0, b_sum)
    b_lse = (b_max + tl.log2(b_sum)) * LN2
    if LOGIT == SCALE_INVARIANT:
        b_lse += 1.0  # the constant left out of every score
    b_lse = tl.where(m_empty, float("-inf"), b_lse)
    p_out += o_b * stride_ob + o_h * stride_oh + m0.to(tl.int64) * stride_on
    p_lse += o_bh * Tq
    tl.store(p_lse + m0 + o_m, b_lse, mask=m0 + o_m < Tq)
    _store_rows(p_out, b_acc / b_sum[:, None], stride_on, Tq - m0, BLOCK_M, DV, BLOCK_DV)


@triton.jit
def _statistics_tiles(
    b_exp_sum, b_exp_score, b_score_sum, b_max, b_q, p_k, start, stop, o_slot, b_doc_slot, p_document, p_padding,
    qk_factor, cap_factor, slope2, inv_tau, shift2, Tk, window, stride_kn,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, LOGIT: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr, HAS_PADDING: tl.constexpr, FAST_LOG: tl.constexpr, CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """The running statistics over the key tiles [start, stop); p_k moves from `start` to `stop`."""
    o_n = tl.arange(0, BLOCK_N)
    for n0 in range(start, stop, BLOCK_N):
        b_k = _load_rows(p_k, stride_kn, Tk - n0, BLOCK_N, D, BLOCK_D, MASKED)
        b_qk = _capped(tl.dot(b_q, tl.trans(b_k), input_precision="ieee"), cap_factor)  # [M,N]
        b_score2, _ = _row_tile_scores(
            b_qk, o_slot, n0, o_n, qk_factor, b_doc_slot, p_document, p_padding, None, qk_factor, slope2, inv_tau,
            Tk, window, LOGIT, HAS_WINDOW, HAS_DOCUMENTS, HAS_PADDING, FAST_LOG, 0, MASKED, False, CAUSAL, BLOCK_N,
        )  # fmt: skip
        b_max_new = tl.maximum(b_max, tl.max(b_score2, 1))
        if MASKED:
            m_visible = b_score2 > float("-inf")
            b_score_sum += tl.sum(tl.where(m_visible, b_score2 + shift2, 0.0), 1)
            b_shift = tl.where(b_max_new > float("-inf"), b_max_new, 0.0)
            b_below = tl.where(m_visible, b_score2 - b_shift[:, None], 0.0)  # score2 - max
            b_p = tl.where(m_visible, tl.exp2(b_below), 0.0)
        else:
            b_score_sum += tl.sum(b_score2, 1) + shift2 * BLOCK_N
            b_shift = b_max_new
            b_below = b_score2 - b_shift[:, None]
            b_p = tl.exp2(b_below)
        b_drop = tl.where(b_max > float("-inf"), b_max - b_shift, 0.0)  # by how much the maximum rose, negative
        b_rescale = tl.exp2(b_drop)
        b_exp_score = (b_exp_score + b_exp_sum * b_drop) * b_rescale + tl.sum(b_p * b_below, 1)
        b_exp_sum = b_exp_sum * b_rescale + tl.sum(b_p, 1)
        b_max = b_max_new
        p_k += BLOCK_N * stride_kn
    return b_exp_sum, b_exp_score, b_score_sum, b_max, p_k


@triton.jit
def flash_statistics_kernel(
    p_q, p_k, p_first_key, p_lse, p_mean, p_max, p_sum, p_first_score,
    p_document, p_doc_first, p_doc_last, p_padding,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, H, G, Tq, Tk, window, qk_factor,
    cap_factor, inv_tau,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LOGIT: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, HAS_PADDING: tl.constexpr, FAST_LOG: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """Write for each query row, in fp32 and natural units: log-sum-exp, softmax-weighted mean score (entropy = lse -
    mean), largest score, sum of the scores of the visible keys, score of the row's first visible key (p_first_key
    int32 [B,Tq], -1 = none). A row without visible keys gives (-inf, 0, -inf, 0, -inf).
    No values are read. Grid (cdiv(Tq, BLOCK_M), B*H)."""
    m0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    o_bh = tl.program_id(1).to(tl.int64)
    o_b = o_bh // H
    o_h = o_bh % H
    p_q += o_b * stride_qb + o_h * stride_qh + m0.to(tl.int64) * stride_qn
    p_k += o_b * stride_kb + o_h // G * stride_kh
    first_slot = m0 + Tk - Tq
    o_m = m0 + tl.arange(0, BLOCK_M)
    o_slot = first_slot + tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, BLOCK_D)
    m_row = o_m < Tq
    b_doc_slot = o_slot
    start = first_slot * 0
    stop = start + Tk
    if CAUSAL:
        stop = tl.minimum(Tk, first_slot + BLOCK_M)
        if HAS_WINDOW:
            start = tl.maximum(first_slot - window + 1, 0)
    if HAS_DOCUMENTS:
        m_slot = (o_slot >= 0) & (o_slot < Tk)
        p_document += o_b * Tk
        # Ids are slots: a query before the first key has none of them.
        b_doc_slot = tl.load(p_document + o_slot, mask=m_slot, other=-1)
        start = tl.maximum(start, tl.min(tl.load(p_doc_first + o_b * Tk + o_slot, mask=m_slot, other=2147483647)))
        stop = tl.minimum(stop, tl.max(tl.load(p_doc_last + o_b * Tk + o_slot, mask=m_slot, other=-1)) + 1)
    if HAS_PADDING:
        p_padding += o_b * Tk
    start = start // BLOCK_N * BLOCK_N
    slope2 = qk_factor
    if LOGIT == ALIBI:
        slope2 = _alibi_slope2(o_h, H)
    shift2 = 0.0  # the constant the scale-invariant score2 leaves out
    if LOGIT == SCALE_INVARIANT:
        shift2 = LOG2E
    b_q = _load_rows(p_q, stride_qn, Tq - m0, BLOCK_M, D, BLOCK_D, True)
    b_exp_sum = tl.zeros([BLOCK_M], tl.float32)  # sum of exp2(score2 - max)
    b_exp_score = tl.zeros([BLOCK_M], tl.float32)  # sum of exp2(score2 - max) * (score2 - max): no cancellation
    b_score_sum = tl.zeros([BLOCK_M], tl.float32)
    b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    # Whole tiles that every row sees come first, unmasked; a window, documents or padding may cut any tile.
    full = start
    if not (HAS_WINDOW or HAS_DOCUMENTS or HAS_PADDING):
        full = Tk
        if CAUSAL:
            full = tl.minimum(Tk, tl.maximum(first_slot + 1, 0))
        full = full // BLOCK_N * BLOCK_N + start
    p_k_tile = p_k + start.to(tl.int64) * stride_kn
    for masked in tl.static_range(2):
        if masked == 1:
            lower, upper = full, stop
        else:
            lower, upper = start, full
        b_exp_sum, b_exp_score, b_score_sum, b_max, p_k_tile = _statistics_tiles(
            b_exp_sum, b_exp_score, b_score_sum, b_max, b_q, p_k_tile, lower, upper, o_slot, b_doc_slot, p_document,
            p_padding, qk_factor, cap_factor, slope2, inv_tau, shift2, Tk, window, stride_kn,
            D, BLOCK_D, BLOCK_N, LOGIT, HAS_WINDOW, HAS_DOCUMENTS, HAS_PADDING, FAST_LOG, CAUSAL, masked == 1,
        )  # fmt: skip

    # The first visible key differs by row (documents, window): one gathered row of k each.
    o_first = tl.load(p_first_key + o_b * Tq + o_m, mask=m_row, other=-1)
    p_first = p_k + o_first.to(tl.int64)[:, None] * stride_kn + o_d[None, :]
    b_k_first = tl.load(p_first, mask=(o_first[:, None] >= 0) & (o_d[None, :] < D), other=0.0)
    b_first = _capped(tl.sum(b_q.to(tl.float32) * b_k_first.to(tl.float32), 1), cap_factor)  # [M]
    if LOGIT == SCALE_INVARIANT:
        b_factor = _near_factor(o_slot, o_first, inv_tau, True, FAST_LOG)
        b_first = b_factor * (b_first * qk_factor - b_factor) + shift2
    else:
        b_first = b_first * qk_factor
    if LOGIT == ALIBI:
        b_first -= slope2 * (o_slot - o_first).to(tl.float32)

    m_empty = b_exp_sum == 0.0
    b_safe_sum = tl.where(m_empty, 1.0, b_exp_sum)
    b_max = b_max + shift2  # -inf stays -inf
    o_out = o_bh * Tq + o_m
    tl.store(p_lse + o_out, (b_max + tl.log2(b_safe_sum)) * LN2, mask=m_row)
    tl.store(p_mean + o_out, tl.where(m_empty, 0.0, b_max + b_exp_score / b_safe_sum) * LN2, mask=m_row)
    tl.store(p_max + o_out, b_max * LN2, mask=m_row)
    tl.store(p_sum + o_out, b_score_sum * LN2, mask=m_row)
    tl.store(p_first_score + o_out, tl.where(o_first >= 0, b_first * LN2, float("-inf")), mask=m_row)
