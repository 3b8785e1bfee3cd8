"""Passes over all visible pairs in torch, a block of rows at a time, so that no Tq x Tk tensor exists."""

from typing import NamedTuple

import torch
from torch import Tensor

from affine_attn.core.call import Call
from affine_attn.core.stages import own_precision, probabilities, row_dtype, scores, sums_of_visible


def sums_in_blocks(x: Tensor, call: Call) -> Tensor:
    """sum of x [B, Hkv, Tk, D] over the keys each row sees, [B, Hkv, Tq, D]; in torch, in blocks of rows.

    [B, H, Tq, D] where heads see other keys.
    """
    heads = call.heads if call.mask.is_by_head else x.shape[1]
    total = x.new_zeros(x.shape[0], heads, call.tq, x.shape[3])
    with own_precision(x):
        for rows, keys in call.blocks():
            total[:, :, rows] = sums_of_visible(call.visible(rows, keys), x[:, :, keys])
    return total


def sums_in_blocks_backward(dtotal: Tensor, call: Call) -> Tensor:
    """The transpose of :func:`sums_in_blocks`."""
    dx = dtotal.new_zeros(*dtotal.shape[:2], call.tk, dtotal.shape[3])
    with own_precision(dtotal):
        for rows, keys in call.blocks():
            dx[:, :, keys] += call.visible(rows, keys).to(dtotal.dtype).mT @ dtotal[:, :, rows]
    return dx.unflatten(1, (call.k.shape[1], -1)).sum(2) if call.mask.is_by_head else dx


class ScoreStatistics(NamedTuple):
    """[B, H, Tq] each; a row without visible keys has (-inf, 0, -inf, 0, -inf)."""

    lse: Tensor
    mean: Tensor  # weighted by the softmax: entropy = lse - mean
    largest: Tensor
    total: Tensor
    first: Tensor  # score of the row's first visible key


def score_statistics(call: Call, first_key: Tensor) -> ScoreStatistics:
    """Return the row statistics of the scores; first_key int [B or 1, 1, Tq], -1 where a row has none."""
    like = torch.zeros_like(call.q[..., 0], dtype=row_dtype(call.q), memory_format=torch.contiguous_format)
    nothing = torch.full_like(like, float("-inf"))
    found = ScoreStatistics(nothing, like, nothing.clone(), like.clone(), nothing.clone())
    for rows, keys in call.blocks():
        if keys.stop == keys.start:
            continue
        visible = call.visible(rows, keys)
        s = scores(call, call.k, visible, rows, keys)
        p, _ = probabilities(s, None)
        visible_scores = torch.where(visible, s, 0.0)
        found.lse[:, :, rows] = s.logsumexp(-1)
        found.mean[:, :, rows] = torch.where(p > 0, p * visible_scores, 0.0).sum(-1)  # a bias of -inf is visible
        found.largest[:, :, rows] = s.amax(-1)
        found.total[:, :, rows] = visible_scores.sum(-1)
        at = (first_key[..., rows] - keys.start).expand(*s.shape[:3])[..., None]
        first = s.gather(-1, at.clamp(min=0))
        found.first[:, :, rows] = torch.where(at >= 0, first, float("-inf"))[..., 0]
    return found
