"""Statistics of the weights w block by block: what no identity gives where they may be negative, and small maps."""

from typing import NamedTuple

import torch
from torch import Tensor

from affine_attn.core.call import Call
from affine_attn.core.stages import probabilities, row_dtype, rows_of, scores, sink_rows, weights


class SignedStatistics(NamedTuple):
    """Statistics of every row [B, H, Tq], in the precision of row statistics."""

    negative: Tensor  # number of visible keys with a weight below zero
    entropy_clipped: Tensor  # of max(w, 0) / sum max(w, 0)
    entropy_absolute: Tensor  # of |w| / sum |w|


def signed_statistics(call: Call) -> SignedStatistics:
    like = torch.zeros(call.q.shape[:3], dtype=row_dtype(call.q), device=call.q.device)
    # Filled in place: small results allocated between large blocks would keep the allocator from reusing those.
    found = SignedStatistics(like, like.clone(), like.clone())
    for rows, keys in call.blocks():
        w = _weights(call, rows, keys)
        # The logarithm is the dear part: one for both entropies, w log |w| with the sign of w.
        size = w.abs()
        product = torch.xlogy(w, size)
        found.negative[:, :, rows] = (w < 0).sum(-1).to(like.dtype)
        clipped = w.clamp(min=0).sum(-1), product.masked_fill(w < 0, 0.0).sum(-1)
        found.entropy_clipped[:, :, rows] = _entropy(*clipped)
        found.entropy_absolute[:, :, rows] = _entropy(size.sum(-1), (product * w.sign()).sum(-1))
    return found


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
    """Return the entropy of x / S, S = sum x, x >= 0, from S and sum x log x: log S - sum x log x / S; of zeros 0."""
    some = torch.where(total > 0, total, 1.0)
    return torch.where(total > 0, some.log() - products / some, 0.0)
