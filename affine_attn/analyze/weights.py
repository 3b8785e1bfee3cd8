"""Of the weights w themselves, block by block: what no identity gives when they may be negative, and small maps."""

from typing import NamedTuple

import torch
from torch import Tensor

from affine_attn.core.call import Call
from affine_attn.core.reference import probabilities, rows_of, scores, sink_rows, weights


class SignedStatistics(NamedTuple):
    """Of every row [B, H, Tq], in the precision of row statistics."""

    negative: Tensor  # number of visible keys with a weight below zero
    entropy_clipped: Tensor  # of max(w, 0) / sum max(w, 0)
    entropy_absolute: Tensor  # of |w| / sum |w|


def signed_statistics(call: Call) -> SignedStatistics:
    parts = []
    for rows, keys in call.blocks():
        w = _weights(call, rows, keys)
        # The logarithm is the dear part: one for both entropies, w log |w| with the sign of w.
        size, product = w.abs(), torch.xlogy(w, w.abs())
        clipped = _entropy(w.clamp(min=0).sum(-1), product.masked_fill(w < 0, 0.0).sum(-1))
        absolute = _entropy(size.sum(-1), (product * w.sign()).sum(-1))
        parts.append(SignedStatistics((w < 0).sum(-1), clipped, absolute))
    return SignedStatistics(*(torch.cat(part, -1) for part in zip(*parts, strict=True)))


def window_weights(call: Call, window: slice) -> Tensor:
    """w [B, H, n, n] of the n queries and keys of a window. The rows are normalised over all their keys, so that many
    scores exist for a while; a call with as many queries as keys."""
    keys = call.mask.key_range(call.tq, call.tk, window)
    seen = _weights(call, window, keys)
    result = seen.new_zeros(*seen.shape[:3], window.stop - window.start)
    first, last = max(keys.start, window.start), min(keys.stop, window.stop)
    result[..., first - window.start : last - window.start] = seen[..., first - keys.start : last - keys.start]
    return result


def _weights(call: Call, rows: slice, keys: slice) -> Tensor:
    visible = call.visible(rows, keys)
    p, _ = probabilities(scores(call, call.k, visible, rows, keys), sink_rows(call, rows))
    return weights(p, visible, rows_of(call.alpha, rows), rows_of(call.beta, rows))


def _entropy(total: Tensor, products: Tensor) -> Tensor:
    """Of x / S with S = sum x, x >= 0, from S and sum x log x: log S - sum x log x / S. Nothing but zeros has none."""
    some = torch.where(total > 0, total, 1.0)
    return torch.where(total > 0, some.log() - products / some, 0.0)
