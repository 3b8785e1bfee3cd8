"""Statistics of attention weights without ever holding an N x N matrix: one QK-only pass in blocks of rows."""

from typing import NamedTuple

import torch
from torch import Tensor

from affine_attn.core.call import checked_call
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
    """Entropy, first-token weight, row sum, sink mass and logit statistics of the weights ``attention`` would use."""
    call = checked_call(q, k, None, mask, scale, logit, sink, alpha, beta, None)
    dtype = row_dtype(q)
    rows_shape = q.shape[:3]
    entropy, first_p, mass, sink_mass = (torch.zeros(rows_shape, dtype=dtype, device=q.device) for _ in range(4))
    logit_sum = torch.zeros(q.shape[:2], dtype=torch.float64, device=q.device)
    max_logit = torch.full(q.shape[:2], float("-inf"), dtype=dtype, device=q.device)
    first = mask.first(call.tq, call.tk, q.device)
    if call.sink is not None:
        sink_mass.fill_(1.0)  # of rows without keys; every other row is written below
    for rows, keys in call.blocks():
        if keys.stop == keys.start:
            continue
        visible = call.visible(rows, keys)
        s = scores(call, k, visible, rows, keys)
        p, p_sink = probabilities(s, sink_rows(call, rows))
        entropy[:, :, rows] = torch.special.entr(p).sum(-1)
        mass[:, :, rows] = p.sum(-1)
        if p_sink is not None:
            sink_mass[:, :, rows] = p_sink[..., 0]
        at = (first[..., rows] - keys.start).expand(*p.shape[:3])[..., None]
        first_p[:, :, rows] = torch.where(at >= 0, p.gather(-1, at.clamp(min=0)), 0.0)[..., 0]
        logit_sum += torch.where(visible, s, 0.0).sum((2, 3), dtype=torch.float64)
        max_logit = torch.maximum(max_logit, s.amax((2, 3)))
    count = call.count()
    pairs = count.expand(q.shape[0], 1, call.tq).sum(-1)
    seen = count > 0
    a = 1.0 if alpha is None else alpha.to(dtype)
    b = 0.0 if beta is None else beta.to(dtype)
    return AttentionStats(
        entropy.float(),
        torch.where(seen, a * first_p + b, 0.0).float(),
        (a * mass + count * b).float(),
        sink_mass.float(),
        (logit_sum / pairs.clamp(min=1)).float(),
        max_logit.float(),
    )
