"""Statistics of attention weights without ever holding an N x N matrix.

One pass over q and k, a kernel on CUDA and blocks of rows elsewhere, gives five numbers per row; the rest is algebra.
With z the log-sum-exp, m the softmax-weighted mean score and f = sigmoid(z - sink) the mass that the sink leaves, the
entropy of softmax is H = z - m, and that of p = f * softmax is f * (H - log f).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from affine_attn.core.call import Call, checked_call
from affine_attn.core.engines import triton
from affine_attn.core.masks import Mask
from affine_attn.core.reference import probabilities, row_dtype, scores, sink_rows
from affine_attn.core.spec import Logit


class AttentionStats(NamedTuple):
    """fp32. A row without visible keys has zeros, and sink mass 1 if there is a sink; max_logit of nothing is -inf."""

    entropy: Tensor  # [B, H, Tq] of p, the weights before alpha and beta: -sum p log p
    first_token: Tensor  # [B, H, Tq] weight w on the first visible key
    row_sum: Tensor  # [B, H, Tq] sum of the weights w
    sink_mass: Tensor  # [B, H, Tq] probability that the sink takes
    mean_logit: Tensor  # [B, H] over all visible pairs, after stage 1
    max_logit: Tensor  # [B, H]


@torch.no_grad()
def attention_stats(
    q: Tensor,
    k: Tensor,
    mask: Mask = Mask(),
    scale: float | None = None,
    logit: Logit | None = None,
    sink: Tensor | float | None = None,
    alpha: Tensor | None = None,
    beta: Tensor | None = None,
) -> AttentionStats:
    """Statistics of the weights that :func:`attention` would use for the same arguments, which mean the same here.

    q [B, H, Tq, D], k [B, Hkv, Tk, D]. Values and gate are not asked for: they do not change the weights.
    """
    call = checked_call(q, k, k, mask, scale, logit, sink, alpha, beta)
    first_key = mask.first(call.tq, call.tk, q.device)
    if triton.why_not_statistics(call) is None:
        rows = triton.score_statistics(call, first_key[:, 0].expand(q.shape[0], call.tq))
    else:
        rows = _score_statistics(call, first_key)
    z, count = rows.lse, call.count()
    seen = count > 0
    # On a GPU every operation is a launch, as long as some of the kernel's time: only those that a call needs.
    entropy, normaliser = z - rows.mean, z
    kept, taken = seen.expand_as(z).to(z.dtype), torch.zeros_like(z)
    if (sinks := sink_rows(call, slice(None))) is not None:
        kept = torch.where(seen, torch.sigmoid(z - sinks), 0.0)
        taken = 1 - kept
        entropy = kept * entropy - torch.xlogy(kept, kept)
        normaliser = torch.logaddexp(z, sinks.to(z.dtype))
    first, row_sum = torch.exp(rows.first - normaliser), kept
    if alpha is not None:
        first, row_sum = alpha * first, alpha * kept
    if beta is not None:
        first, row_sum = first + beta, row_sum + count * beta.to(z.dtype)
    pairs = count.expand(q.shape[0], 1, call.tq).sum(-1)
    return AttentionStats(
        torch.where(seen, entropy, 0.0).float(),
        torch.where(seen, first, 0.0).float(),
        row_sum.float(),
        taken.float(),
        (rows.total.sum(-1, dtype=torch.float64) / pairs.clamp(min=1)).float(),
        rows.largest.amax(-1).float() if call.tq else z.new_full(q.shape[:2], float("-inf")).float(),
    )


def _score_statistics(call: Call, first_key: Tensor) -> triton.ScoreStatistics:
    """The five numbers per row from blocks of the reference's scores."""
    like = torch.zeros_like(call.q[..., 0], dtype=row_dtype(call.q), memory_format=torch.contiguous_format)
    nothing = torch.full_like(like, float("-inf"))
    found = triton.ScoreStatistics(nothing, like, nothing.clone(), like.clone(), nothing.clone())
    for rows, keys in call.blocks():
        if keys.stop == keys.start:
            continue
        visible = call.visible(rows, keys)
        s = scores(call, call.k, visible, rows, keys)
        p, _ = probabilities(s, None)
        visible_scores = torch.where(visible, s, 0.0)
        found.lse[:, :, rows] = s.logsumexp(-1)
        found.mean[:, :, rows] = (p * visible_scores).sum(-1)
        found.largest[:, :, rows] = s.amax(-1)
        found.total[:, :, rows] = visible_scores.sum(-1)
        at = (first_key[..., rows] - keys.start).expand(*s.shape[:3])[..., None]
        first = s.gather(-1, at.clamp(min=0))
        found.first[:, :, rows] = torch.where(at >= 0, first, float("-inf"))[..., 0]
    return found
