"""Statistics of attention weights without ever holding an N x N matrix.

One pass over q and k, a kernel on CUDA and blocks of rows elsewhere, gives five row statistics; the rest is algebra.
With z the log-sum-exp, m the softmax-weighted mean score and f = sigmoid(z - sink) the mass that the sink leaves, the
entropy of softmax is H = z - m, and that of p = f * softmax is f * (H - log f).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from affine_attn.core.blocks import ScoreStatistics
from affine_attn.core.call import Call
from affine_attn.core.stages import sink_rows


class AttentionStats(NamedTuple):
    """fp32. A row without visible keys has zeros, and sink mass 1 if there is a sink; max_logit of nothing is -inf."""

    entropy: Tensor  # [B, H, Tq] of p, the weights before alpha and beta: -sum p log p
    first_token: Tensor  # [B, H, Tq] weight w on the first visible key
    row_sum: Tensor  # [B, H, Tq] sum of the weights w
    sink_mass: Tensor  # [B, H, Tq] probability that the sink takes
    mean_logit: Tensor  # [B, H] over all visible pairs, after stage 1
    max_logit: Tensor  # [B, H]


def attention_statistics(call: Call, rows: ScoreStatistics) -> AttentionStats:
    """Return what follows from the row statistics of the scores by algebra."""
    alpha, beta = call.alpha, call.beta
    z, count = rows.lse, call.count()
    seen = count > 0
    # A bias of -inf takes a row's weights and leaves its keys visible: to beta, say.
    scored = seen if call.bias is None else z > float("-inf")
    # On a GPU every operation is a launch, as long as some of the kernel's time: only those that a call needs.
    entropy, normaliser = z - rows.mean, z
    kept, taken = scored.expand_as(z).to(z.dtype), torch.zeros_like(z)
    if (sinks := sink_rows(call, slice(None))) is not None:
        kept = torch.where(scored, torch.sigmoid(z - sinks), 0.0)
        taken = 1 - kept
        entropy = kept * entropy - torch.xlogy(kept, kept)
        normaliser = torch.logaddexp(z, sinks.to(z.dtype))
    if call.bias is not None:
        entropy, normaliser = (torch.where(scored, x, 0.0) for x in (entropy, normaliser))
    first, row_sum = torch.exp(rows.first - normaliser), kept
    if alpha is not None:
        first, row_sum = alpha * first, alpha * kept
    if beta is not None:
        first, row_sum = first + beta, row_sum + count * beta.to(z.dtype)
    pairs = count.expand(call.q.shape[0], -1, call.tq).sum(-1)
    return AttentionStats(
        torch.where(seen, entropy, 0.0).float(),
        torch.where(seen, first, 0.0).float(),
        row_sum.float(),
        taken.float(),
        (rows.total.sum(-1, dtype=torch.float64) / pairs.clamp(min=1)).float(),
        rows.largest.amax(-1).float() if call.tq else z.new_full(call.q.shape[:2], float("-inf")).float(),
    )
