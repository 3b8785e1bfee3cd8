"""Flash attention whose logit depends on the distance between query and key (Triton kernels only).

    s_ij = a(t) * x_ij + m(t),   t = p_i - j >= 0,   p_i = i + Tk - Tq  (slot of query i)
    x_ij = scale * q_i.k_j, or with a soft cap  cap * tanh(scale / cap * q_i.k_j)

LOGIT 0  plain           a = 1                         m = 0
LOGIT 1  ScaleInvariant  a = sqrt(1 + 2 log1p(t/tau))  m = -2 log1p(t/tau) = 1 - a^2
LOGIT 2  Alibi           a = 1                         m = -slope_h t,   slope_h = 2^(-8 (h+1) / H)

Everything runs in base 2: "score2" is s * log2(e). For the scale-invariant logit one number per score is enough.
With the factor  f = sqrt(log2e) * a = sqrt(log2e + 2 log2(1 + t/tau)):

    s * log2e = f * (sqrt(log2e) * x  -  f)  +  log2e

A soft cap replaces each product q.k by its tanh as it leaves the MMA, and qk_factor has the cap in place of the scale:
all that follows is the same, and a backward multiplies by the slope 1 - tanh^2 once.

The constant log2e is the same for every key, so the kernels leave it out and add it back in the log-sum-exp.
How f is obtained decides the speed (Triton's log2 alone is some twenty instructions, a plain score about nine):
  near tiles   exact, per score: fast log2 and rsqrt of the special-function unit
  far tiles    f is smooth there: a Chebyshev polynomial in the column offset, one set of coefficients per row. That is
               a matmul of inner size FAR_SLOTS = 16, so the TENSOR CORE evaluates it: no work per score.
               Coefficients depend on the distance of row and tile centre only and come from a table; both factors are
               fp16, cut into pieces that add up to fp32 accuracy (far_tables.py). A tile is far when
               all its rows are at least FAR_RATIO half-widths from its centre.

Legend
  B batch, H query heads, Hkv key heads, G = H / Hkv, Tq / Tk query / key length, D head dim, DV that of the values
  p_ pointer   o_ offset or index   b_ block value   m_ mask
  BLOCK_M queries per tile, BLOCK_N keys per tile, BLOCK_D, BLOCK_DV = D, DV rounded up to a power of two
  slot     position of a query among the keys (p_i above)
  masked   a tile whose scores are compared with the mask; unmasked tiles do no mask work at all
  cap_factor  scale / cap, None without a soft cap
Tensors q, dq [B,H,Tq,D], k, dk [B,Hkv,Tk,D], out, grad_out and v, dv with DV channels; any strides but a last one of 1;
row vectors (lse, delta) [B,H,Tq] fp32 contiguous; documents int32 and padding uint8 [B,Tk] contiguous;
doc_first / doc_last int32 [B,Tk] = first / last slot with the same document id (they bound the loops). The id that the
launcher gives a document is its first slot, so p_document and p_doc_first are one tensor.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from affine_attn.kernels.constants import LOG2E
from affine_attn.kernels.tanh import tanh

# Module constants go on the right of an operator: constexpr * tensor is not a tensor in the interpreter.
SCALE_INVARIANT = tl.constexpr(1)
ALIBI = tl.constexpr(2)
# The four kinds of tiles along a row block, from the oldest keys to the newest; each gets its own loop.
EDGE_TILES = tl.constexpr(0)  # cut by the window (or, for dk and dv, by the end of the queries): masked
FAR_TILES = tl.constexpr(1)
NEAR_TILES = tl.constexpr(2)
DIAGONAL_TILES = tl.constexpr(3)  # cut by causality: masked


@triton.jit
def _capped(b_qk, cap_factor):
    """q.k, or with a soft cap the tanh that takes its place."""
    if cap_factor is not None:
        b_qk = tanh(b_qk * cap_factor)
    return b_qk


@triton.jit
def _times_slope(b_p, b_qk, b_factor, cap_factor, LOGIT: tl.constexpr):
    """Weights times how much their score2 changes with the product q.k that was capped, in units of qk_factor."""
    if LOGIT == SCALE_INVARIANT:
        b_p = b_p * b_factor
    if cap_factor is not None:
        b_p = b_p * (1.0 - b_qk * b_qk)
    return b_p


@triton.jit
def _near_factor(o_slot, o_key, inv_tau, MASKED: tl.constexpr, FAST_LOG: tl.constexpr):
    """f(t) for every pair, exactly. o_slot, o_key: int32, [R,1] and [1,C] or the other way round -> [R,C] fp32."""
    b_distance = o_slot.to(tl.float32) - o_key.to(tl.float32)  # exact below 2^24, one instruction per score
    if MASKED:  # future keys: keep f finite, the mask removes them later
        b_distance = tl.maximum(b_distance, 0.0)
    b_ratio = b_distance * inv_tau + 1.0
    if FAST_LOG:  # one instruction; tl.log2 is some twenty
        b_square = libdevice.fast_log2f(b_ratio) * 2.0 + LOG2E
    else:
        b_square = tl.log2(b_ratio) * 2.0 + LOG2E
    return b_square * tl.rsqrt(b_square)


@triton.jit
def _far_factor(o_center, b_basis, p_far, SLOTS: tl.constexpr):
    """f(t) around one centre distance per row, by tensor core: coefficients [R,SLOTS] @ basis [SLOTS,C] -> [R,C] fp32.

    Row t of the table holds the Chebyshev coefficients of f on [t - C/2, t + C/2], each cut into fp16 pieces that add
    up to fp32 accuracy; the basis holds the polynomials at the C offsets. o_center int32 [R]."""
    o_slots = tl.arange(0, SLOTS)
    b_coefficient = tl.load(p_far + o_center[:, None] * SLOTS + o_slots[None, :])  # [R,SLOTS]
    return tl.dot(b_coefficient, b_basis)


@triton.jit
def _load_basis(p_basis, WIDTH: tl.constexpr, SLOTS: tl.constexpr, FAR: tl.constexpr):
    """[SLOTS, WIDTH] fp16, once per loop over far tiles."""
    if FAR:
        b_basis = tl.load(p_basis + tl.arange(0, SLOTS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :])
    else:
        b_basis = 0.0
    return b_basis


@triton.jit
def _alibi_slope2(o_head, H):
    """Slope of query head o_head, in base 2."""
    return tl.exp2(-8.0 * (o_head + 1) / H) * LOG2E


@triton.jit
def _visible(
    o_slot, o_key, b_doc_slot, b_doc_key, b_real_key, Tk, window,
    HAS_WINDOW: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, HAS_PADDING: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Which pairs are visible. Slot-like and key-like arguments are [R,1] and [1,C] or the other way round."""
    if CAUSAL:
        m_visible = (o_key <= o_slot) & (o_key < Tk)
    else:
        m_visible = o_key + o_slot * 0 < Tk  # any slot; the sum gives the shape [R,C]
    if HAS_WINDOW:
        m_visible = m_visible & (o_slot - o_key < window)
    if HAS_DOCUMENTS:
        m_visible = m_visible & (b_doc_slot == b_doc_key)
    if HAS_PADDING:
        m_visible = m_visible & (b_real_key != 0)
    return m_visible


@triton.jit
def _load_rows(p_rows, stride, n_rows, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, CHECK: tl.constexpr):
    """[ROWS, BLOCK_D] tile at p_rows; rows from n_rows on and columns from D on read as 0."""
    o_row = tl.arange(0, ROWS)
    o_d = tl.arange(0, BLOCK_D)
    p_tile = p_rows + o_row[:, None] * stride + o_d[None, :]
    if CHECK:
        b_tile = tl.load(p_tile, mask=(o_row[:, None] < n_rows) & (o_d[None, :] < D), other=0.0)
    elif D != BLOCK_D:
        b_tile = tl.load(p_tile, mask=o_d[None, :] < D, other=0.0)
    else:
        b_tile = tl.load(p_tile)
    return b_tile


@triton.jit
def _store_rows(
    p_rows, b_tile, stride, n_rows, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    o_row = tl.arange(0, ROWS)
    o_d = tl.arange(0, BLOCK_D)
    p_tile = p_rows + o_row[:, None] * stride + o_d[None, :]
    tl.store(p_tile, b_tile.to(p_rows.dtype.element_ty), mask=(o_row[:, None] < n_rows) & (o_d[None, :] < D))


@triton.jit
def _key_segments(
    p_doc_first, o_slot, first_slot, Tk, window,
    HAS_WINDOW: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, MASK_ALL: tl.constexpr, FAR_SLOTS: tl.constexpr,
    FAR_REACH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Cuts the keys of one query block into [start, edge) masked by the window, [edge, far) far, [far, diagonal) near
    and [diagonal, stop) masked by causality; all but `stop` are multiples of BLOCK_N. With MASK_ALL (documents or
    padding) every tile is masked anyway: [start, far) far and [far, stop) near."""
    stop = tl.minimum(Tk, first_slot + BLOCK_M)
    start = first_slot * 0  # a tensor, as the loops need it
    if HAS_WINDOW:
        start = tl.maximum(first_slot - window + 1, 0)
    if HAS_DOCUMENTS:
        m_slot = (o_slot >= 0) & (o_slot < Tk)
        start = tl.maximum(start, tl.min(tl.load(p_doc_first + o_slot, mask=m_slot, other=2147483647)))
    start = start // BLOCK_N * BLOCK_N
    diagonal = tl.maximum((first_slot + 1) // BLOCK_N * BLOCK_N, start)
    edge = start
    if HAS_WINDOW and not MASK_ALL:  # the last row of the block loses keys first
        edge = tl.maximum(first_slot + BLOCK_M - window + BLOCK_N - 1, 0) // BLOCK_N * BLOCK_N
        edge = tl.minimum(tl.maximum(edge, start), diagonal)
    far = edge
    if FAR_SLOTS > 0:  # tile n0 is far when the first row's distance to it is: n0 <= first_slot - FAR_REACH
        far = tl.maximum(first_slot - FAR_REACH + BLOCK_N, 0) // BLOCK_N * BLOCK_N
        far = tl.minimum(tl.maximum(far, edge), diagonal)
    if MASK_ALL:  # near and diagonal tiles are masked alike: one loop
        diagonal = stop
    return start, edge, far, diagonal, stop


@triton.jit
def _row_tile_scores(
    b_qk, o_slot, n0, o_n, b_basis, b_doc_slot, p_document, p_padding, p_far, qk_factor, slope2, inv_tau, Tk, window,
    LOGIT: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, HAS_PADDING: tl.constexpr,
    FAST_LOG: tl.constexpr, FAR_SLOTS: tl.constexpr, MASKED: tl.constexpr, FAR: tl.constexpr,
    CAUSAL: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """score2 [M,N] (-inf where invisible) and the factor f (LOGIT 1; elsewhere a placeholder) of capped q.k."""
    o_key = n0 + o_n  # [N]
    b_factor = qk_factor
    if LOGIT == SCALE_INVARIANT:
        if FAR:
            b_factor = _far_factor(o_slot - n0 - BLOCK_N // 2, b_basis, p_far, FAR_SLOTS)
        else:
            b_factor = _near_factor(o_slot[:, None], o_key[None, :], inv_tau, MASKED, FAST_LOG)
        b_score2 = b_factor * (b_qk * qk_factor - b_factor)
    else:
        b_score2 = b_qk * qk_factor
    if LOGIT == ALIBI:
        b_score2 -= slope2 * (o_slot.to(tl.float32)[:, None] - o_key.to(tl.float32)[None, :])
    if MASKED:
        b_doc_key = o_key
        if HAS_DOCUMENTS:
            b_doc_key = tl.load(p_document + o_key, mask=o_key < Tk, other=0)
        b_real_key = o_key
        if HAS_PADDING:
            b_real_key = tl.load(p_padding + o_key, mask=o_key < Tk, other=0)
        m_visible = _visible(
            o_slot[:, None], o_key[None, :], b_doc_slot[:, None], b_doc_key[None, :], b_real_key[None, :],
            Tk, window, HAS_WINDOW, HAS_DOCUMENTS, HAS_PADDING, CAUSAL,
        )  # fmt: skip
        b_score2 = tl.where(m_visible, b_score2, float("-inf"))
    return b_score2, b_factor
