"""Backward of attention with a distance logit: delta, then dk and dv, then dq (Triton kernels only).

The legend is in scores.py.
"""

import triton
import triton.language as tl

from affine_attn.kernels.constants import LOG2E
from affine_attn.kernels.flash.scores import (
    ALIBI,
    DIAGONAL_TILES,
    EDGE_TILES,
    FAR_TILES,
    NEAR_TILES,
    SCALE_INVARIANT,
    _alibi_slope2,
    _capped,
    _far_factor,
    _key_segments,
    _load_basis,
    _load_rows,
    _near_factor,
    _row_tile_scores,
    _store_rows,
    _times_slope,
    _visible,
)


@triton.jit
def flash_preprocess_kernel(
    p_out, p_grad, p_lse, p_lse2, p_delta,
    stride_ob, stride_oh, stride_on, stride_gb, stride_gh, stride_gn, H, Tq,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, LOGIT: tl.constexpr,
):  # fmt: skip
    """delta = <grad_out, out> and the log-sum-exp in the kernels' base and offset. Grid (cdiv(Tq, BLOCK_M), B*H).

    A row that must not contribute (lse is -inf: no visible key; +inf: an infinite sink) gets lse2 = +inf, so that
    exp2(score2 - lse2) is 0 everywhere without another test."""
    m0 = tl.program_id(0) * BLOCK_M
    o_bh = tl.program_id(1).to(tl.int64)
    o_b = o_bh // H
    o_h = o_bh % H
    p_out += o_b * stride_ob + o_h * stride_oh + m0.to(tl.int64) * stride_on
    p_grad += o_b * stride_gb + o_h * stride_gh + m0.to(tl.int64) * stride_gn
    o_m = m0 + tl.arange(0, BLOCK_M)
    b_out = _load_rows(p_out, stride_on, Tq - m0, BLOCK_M, DV, BLOCK_DV, True).to(tl.float32)
    b_grad = _load_rows(p_grad, stride_gn, Tq - m0, BLOCK_M, DV, BLOCK_DV, True).to(tl.float32)
    b_lse = tl.load(p_lse + o_bh * Tq + o_m, mask=o_m < Tq, other=float("inf"))
    m_dead = tl.abs(b_lse) == float("inf")
    b_delta = tl.where(m_dead, 0.0, tl.sum(b_out * b_grad, 1))
    if LOGIT == SCALE_INVARIANT:
        b_lse -= 1.0
    b_lse2 = tl.where(m_dead, float("inf"), b_lse * LOG2E)
    tl.store(p_delta + o_bh * Tq + o_m, b_delta, mask=o_m < Tq)
    tl.store(p_lse2 + o_bh * Tq + o_m, b_lse2, mask=o_m < Tq)


@triton.jit
def _backward_query_tiles(
    b_dk, b_dv, b_k, b_v, p_q, p_grad, p_lse2, p_delta, start, stop, o_key, b_doc_key, b_real_key, p_document,
    p_far, p_basis, qk_factor, cap_factor, inv_tau, first_head, H, G, Tq, Tk, window,
    stride_qh, stride_qn, stride_gh, stride_gn,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
    LOGIT: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, HAS_PADDING: tl.constexpr,
    FAST_LOG: tl.constexpr, FAR_SLOTS: tl.constexpr, MASKED: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """dk and dv of one key block from the query tiles [start, stop) of the G heads from first_head on.

    Tiles are transposed: [N,M]. One loop runs over heads and tiles, so that the load pipeline never drains between
    heads. p_q, p_grad, p_lse2, p_delta point to row 0 of first_head."""
    o_m = tl.arange(0, BLOCK_M)
    b_basis = _load_basis(p_basis, BLOCK_M, FAR_SLOTS, FAR)
    tiles = tl.maximum(stop - start + BLOCK_M - 1, 0) // BLOCK_M
    p_q += start.to(tl.int64) * stride_qn
    p_grad += start.to(tl.int64) * stride_gn
    q_step = tl.cast(BLOCK_M * stride_qn, tl.int64)
    grad_step = tl.cast(BLOCK_M * stride_gn, tl.int64)
    q_jump = stride_qh - (tiles - 1).to(tl.int64) * BLOCK_M * stride_qn
    grad_jump = stride_gh - (tiles - 1).to(tl.int64) * BLOCK_M * stride_gn
    m0 = start
    head = first_head
    for _ in range(0, tiles * G):
        o_row = m0 + o_m
        o_slot = o_row + (Tk - Tq)
        b_q = _load_rows(p_q, stride_qn, Tq - m0, BLOCK_M, D, BLOCK_D, MASKED)
        b_kq = _capped(tl.dot(b_k, tl.trans(b_q), input_precision="ieee"), cap_factor)  # [N,M]
        if MASKED:  # rows past the end: lse2 = inf makes their weights 0
            b_lse2 = tl.load(p_lse2 + o_row, mask=o_row < Tq, other=float("inf"))
        else:
            b_lse2 = tl.load(p_lse2 + o_row)
        b_factor = qk_factor
        if LOGIT == SCALE_INVARIANT:
            if FAR:
                b_factor = _far_factor(m0 + (Tk - Tq) + BLOCK_M // 2 - o_key, b_basis, p_far, FAR_SLOTS)
            else:
                b_factor = _near_factor(o_slot[None, :], o_key[:, None], inv_tau, MASKED, FAST_LOG)
            b_score2 = b_factor * (b_kq * qk_factor - b_factor)
        else:
            b_score2 = b_kq * qk_factor
        if LOGIT == ALIBI:
            b_score2 -= _alibi_slope2(head, H) * (o_slot.to(tl.float32)[None, :] - o_key.to(tl.float32)[:, None])
        b_p = tl.exp2(b_score2 - b_lse2[None, :])  # [N,M]
        if MASKED:
            b_doc_slot = o_row
            if HAS_DOCUMENTS:
                b_doc_slot = tl.load(p_document + o_slot, mask=(o_slot >= 0) & (o_slot < Tk), other=0)
            m_visible = _visible(
                o_slot[None, :], o_key[:, None], b_doc_slot[None, :], b_doc_key[:, None], b_real_key[:, None],
                Tk, window, HAS_WINDOW, HAS_DOCUMENTS, HAS_PADDING, True,
            )  # fmt: skip
            b_p = tl.where(m_visible, b_p, 0.0)
        # Now rather than after the next MMAs: frees the registers of the factor and of the scores.
        b_ds = _times_slope(b_p, b_kq, b_factor, cap_factor, LOGIT)
        b_grad = _load_rows(p_grad, stride_gn, Tq - m0, BLOCK_M, DV, BLOCK_DV, MASKED)
        b_dv = tl.dot(b_p.to(b_grad.dtype), b_grad, b_dv, input_precision="ieee")
        b_dp = tl.dot(b_v, tl.trans(b_grad), input_precision="ieee")  # [N,M]
        if MASKED:
            b_delta = tl.load(p_delta + o_row, mask=o_row < Tq, other=0.0)
        else:
            b_delta = tl.load(p_delta + o_row)
        b_ds = b_ds * (b_dp - b_delta[None, :])
        b_dk = tl.dot(b_ds.to(b_q.dtype), b_q, b_dk, input_precision="ieee")
        # Next tile, or the first tile of the next head. By selection: with a branch here Triton does not prefetch.
        is_last = m0 + BLOCK_M >= stop
        p_q += tl.where(is_last, q_jump, q_step)
        p_grad += tl.where(is_last, grad_jump, grad_step)
        p_lse2 += tl.where(is_last, Tq, 0)
        p_delta += tl.where(is_last, Tq, 0)
        head += tl.where(is_last, 1, 0)
        m0 = tl.where(is_last, start, m0 + BLOCK_M)
    return b_dk, b_dv


@triton.jit
def flash_dkdv_kernel(
    p_q, p_k, p_v, p_grad, p_lse2, p_delta, p_dk, p_dv, p_document, p_doc_last, p_padding, p_far, p_basis,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_gb, stride_gh, stride_gn, stride_dkb, stride_dkh, stride_dkn, stride_dvb, stride_dvh, stride_dvn,
    H, G, Tq, Tk, window, qk_factor, cap_factor, grad_factor, inv_tau,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, LOGIT: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
    HAS_PADDING: tl.constexpr, FAST_LOG: tl.constexpr, FAR_SLOTS: tl.constexpr, FAR_REACH: tl.constexpr,
):  # fmt: skip
    """dk, dv of one key block, summed over the query heads of its group. Grid (cdiv(Tk, BLOCK_N), B*Hkv)."""
    MASK_ALL: tl.constexpr = HAS_DOCUMENTS or HAS_PADDING
    n0 = tl.program_id(0) * BLOCK_N  # the first keys have the most queries: longest first already
    Hkv = H // G
    o_b = (tl.program_id(1) // Hkv).to(tl.int64)
    o_kv = (tl.program_id(1) % Hkv).to(tl.int64)
    p_q += o_b * stride_qb
    p_grad += o_b * stride_gb
    p_k += o_b * stride_kb + o_kv * stride_kh + n0.to(tl.int64) * stride_kn
    p_v += o_b * stride_vb + o_kv * stride_vh + n0.to(tl.int64) * stride_vn
    p_dk += o_b * stride_dkb + o_kv * stride_dkh + n0.to(tl.int64) * stride_dkn
    p_dv += o_b * stride_dvb + o_kv * stride_dvh + n0.to(tl.int64) * stride_dvn
    o_key = n0 + tl.arange(0, BLOCK_N)
    b_doc_key = o_key
    b_real_key = o_key
    if HAS_DOCUMENTS:
        p_document += o_b * Tk
        p_doc_last += o_b * Tk
        b_doc_key = tl.load(p_document + o_key, mask=o_key < Tk, other=0)
    if HAS_PADDING:
        b_real_key = tl.load(p_padding + o_b * Tk + o_key, mask=o_key < Tk, other=0)
    b_k = _load_rows(p_k, stride_kn, Tk - n0, BLOCK_N, D, BLOCK_D, True)
    b_v = _load_rows(p_v, stride_vn, Tk - n0, BLOCK_N, DV, BLOCK_DV, True)
    b_dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    b_dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)

    # Query rows: [start, diagonal) masked by causality, [diagonal, far) near, [far, full) far, [full, stop) masked by
    # the window or cut by the end; all but `stop` are multiples of BLOCK_M. With MASK_ALL every tile is masked:
    # [start, far) near and [far, stop) far.
    first_row = n0 - (Tk - Tq)  # the row whose slot is the first key; may be negative
    stop = Tq
    if HAS_WINDOW:
        stop = tl.minimum(stop, tl.maximum(first_row + BLOCK_N - 1 + window, 0))
    if HAS_DOCUMENTS:
        last_slot = tl.max(tl.load(p_doc_last + o_key, mask=o_key < Tk, other=0))
        stop = tl.minimum(stop, tl.maximum(last_slot + 1 - (Tk - Tq), 0))
    start = tl.maximum(first_row, 0) // BLOCK_M * BLOCK_M
    far = stop
    if FAR_SLOTS > 0:  # tile m0 is far when m0 >= first_row + BLOCK_N - 1 + FAR_REACH - BLOCK_M
        far = tl.maximum(first_row + BLOCK_N + FAR_REACH - 2, start) // BLOCK_M * BLOCK_M
    if MASK_ALL:
        diagonal = start
        full = stop
        far = tl.minimum(far, stop)
    else:
        full = Tq // BLOCK_M * BLOCK_M
        if HAS_WINDOW:
            full = tl.minimum(full, tl.maximum(first_row + window, 0) // BLOCK_M * BLOCK_M)
        full = tl.maximum(full, start)
        diagonal = tl.maximum(first_row + BLOCK_N - 1 + BLOCK_M - 1, 0) // BLOCK_M * BLOCK_M
        diagonal = tl.minimum(tl.maximum(diagonal, start), full)
        far = tl.minimum(tl.maximum(far, diagonal), full)

    first_head = o_kv * G
    p_q += first_head * stride_qh
    p_grad += first_head * stride_gh
    p_lse2 += (o_b * H + first_head) * Tq
    p_delta += (o_b * H + first_head) * Tq
    for segment in tl.static_range(3, -1, -1):
        if (
            segment == NEAR_TILES or (segment == FAR_TILES and FAR_SLOTS > 0)
            or ((segment == DIAGONAL_TILES or segment == EDGE_TILES) and not MASK_ALL)
        ):  # fmt: skip
            if segment == DIAGONAL_TILES:
                lower, upper = start, diagonal
            elif segment == NEAR_TILES:
                lower, upper = diagonal, far
            elif segment == FAR_TILES:
                lower, upper = far, full
            else:
                lower, upper = full, stop
            b_dk, b_dv = _backward_query_tiles(
                b_dk, b_dv, b_k, b_v, p_q, p_grad, p_lse2, p_delta, lower, upper,
                o_key, b_doc_key, b_real_key, p_document, p_far, p_basis,
                qk_factor, cap_factor, inv_tau, first_head, H, G, Tq, Tk, window,
                stride_qh, stride_qn, stride_gh, stride_gn, D, BLOCK_D, DV, BLOCK_DV, BLOCK_M, LOGIT,
                HAS_WINDOW, HAS_DOCUMENTS, HAS_PADDING, FAST_LOG, FAR_SLOTS,
                MASK_ALL or segment == EDGE_TILES or segment == DIAGONAL_TILES, segment == FAR_TILES,
            )  # fmt: skip
    _store_rows(p_dk, b_dk * grad_factor, stride_dkn, Tk - n0, BLOCK_N, D, BLOCK_D)
    _store_rows(p_dv, b_dv, stride_dvn, Tk - n0, BLOCK_N, DV, BLOCK_DV)


@triton.jit
def _backward_key_tiles(
    b_dq, b_q, b_grad, b_lse2, b_delta, p_k, p_v, start, stop, o_slot, b_doc_slot, p_document, p_padding,
    p_far, p_basis, qk_factor, cap_factor, slope2, inv_tau, Tk, window, stride_kn, stride_vn,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr,
    LOGIT: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, HAS_PADDING: tl.constexpr,
    FAST_LOG: tl.constexpr, FAR_SLOTS: tl.constexpr, MASKED: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """dq of one query block from the key tiles [start, stop); p_k and p_v move from `start` to `stop`."""
    o_n = tl.arange(0, BLOCK_N)
    b_basis = _load_basis(p_basis, BLOCK_N, FAR_SLOTS, FAR)
    for n0 in range(start, stop, BLOCK_N):
        b_k = _load_rows(p_k, stride_kn, Tk - n0, BLOCK_N, D, BLOCK_D, MASKED)
        b_qk = _capped(tl.dot(b_q, tl.trans(b_k), input_precision="ieee"), cap_factor)  # [M,N]
        b_score2, b_factor = _row_tile_scores(
            b_qk, o_slot, n0, o_n, b_basis, b_doc_slot, p_document, p_padding, p_far, qk_factor, slope2, inv_tau,
            Tk, window, LOGIT, HAS_WINDOW, HAS_DOCUMENTS, HAS_PADDING, FAST_LOG, FAR_SLOTS, MASKED, FAR, True, BLOCK_N,
        )  # fmt: skip
        # Now rather than after the next MMA: frees the registers of the factor and of the scores.
        b_ds = _times_slope(tl.exp2(b_score2 - b_lse2[:, None]), b_qk, b_factor, cap_factor, LOGIT)
        b_v = _load_rows(p_v, stride_vn, Tk - n0, BLOCK_N, DV, BLOCK_DV, MASKED)
        b_dp = tl.dot(b_grad, tl.trans(b_v), input_precision="ieee")  # [M,N]
        b_ds = b_ds * (b_dp - b_delta[:, None])
        b_dq = tl.dot(b_ds.to(b_k.dtype), b_k, b_dq, input_precision="ieee")
        p_k += BLOCK_N * stride_kn
        p_v += BLOCK_N * stride_vn
    return b_dq, p_k, p_v


@triton.jit
def flash_dq_kernel(
    p_q, p_k, p_v, p_grad, p_lse2, p_delta, p_dq, p_document, p_doc_first, p_padding, p_far, p_basis,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_gb, stride_gh, stride_gn, stride_dqb, stride_dqh, stride_dqn,
    H, G, Tq, Tk, window, qk_factor, cap_factor, grad_factor, inv_tau,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, LOGIT: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
    HAS_PADDING: tl.constexpr, FAST_LOG: tl.constexpr, FAR_SLOTS: tl.constexpr, FAR_REACH: tl.constexpr,
):  # fmt: skip
    """dq of one query block; the walk over the keys is the forward's. Grid (cdiv(Tq, BLOCK_M), B*H)."""
    MASK_ALL: tl.constexpr = HAS_DOCUMENTS or HAS_PADDING
    m0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    o_bh = tl.program_id(1).to(tl.int64)
    o_b = o_bh // H
    o_h = o_bh % H
    p_q += o_b * stride_qb + o_h * stride_qh + m0.to(tl.int64) * stride_qn
    p_grad += o_b * stride_gb + o_h * stride_gh + m0.to(tl.int64) * stride_gn
    p_k += o_b * stride_kb + o_h // G * stride_kh
    p_v += o_b * stride_vb + o_h // G * stride_vh
    first_slot = m0 + Tk - Tq
    o_m = m0 + tl.arange(0, BLOCK_M)
    o_slot = first_slot + tl.arange(0, BLOCK_M)
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
    b_grad = _load_rows(p_grad, stride_gn, Tq - m0, BLOCK_M, DV, BLOCK_DV, True)
    b_lse2 = tl.load(p_lse2 + o_bh * Tq + o_m, mask=o_m < Tq, other=float("inf"))
    b_delta = tl.load(p_delta + o_bh * Tq + o_m, mask=o_m < Tq, other=0.0)
    b_dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    start, edge, far, diagonal, stop = _key_segments(
        p_doc_first, o_slot, first_slot, Tk, window,
        HAS_WINDOW, HAS_DOCUMENTS, MASK_ALL, FAR_SLOTS, FAR_REACH, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    p_k += start.to(tl.int64) * stride_kn
    p_v += start.to(tl.int64) * stride_vn
    for segment in tl.static_range(4):
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
            b_dq, p_k, p_v = _backward_key_tiles(
                b_dq, b_q, b_grad, b_lse2, b_delta, p_k, p_v, lower, upper, o_slot, b_doc_slot, p_document, p_padding,
                p_far, p_basis, qk_factor, cap_factor, slope2, inv_tau, Tk, window, stride_kn, stride_vn,
                D, BLOCK_D, DV, BLOCK_DV, BLOCK_N, LOGIT, HAS_WINDOW, HAS_DOCUMENTS, HAS_PADDING, FAST_LOG, FAR_SLOTS,
                MASK_ALL or segment == EDGE_TILES or segment == DIAGONAL_TILES, segment == FAR_TILES,
            )  # fmt: skip
    p_dq += o_b * stride_dqb + o_h * stride_dqh + m0.to(tl.int64) * stride_dqn
    _store_rows(p_dq, b_dq * grad_factor, stride_dqn, Tq - m0, BLOCK_M, D, BLOCK_D)
