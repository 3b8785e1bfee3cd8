"""A bigram model, to judge the size of gaps between students: counts of the training text, interpolated.

p(w | v) = (c(v, w) + t(v) u(w)) / (c(v) + t(v)) with t(v) the number of different tokens seen after v (Witten and Bell
1991) and u the unigram with one added to every count. It has no parameter to tune.
"""

import math
from typing import Any

import numpy as np

from affine_attn.data.shards import IGNORED, TokenShards


def bigram(data: str, sequence_length: int, documents: bool) -> dict[str, Any]:
    """Its ``ce`` and ``ppl`` on the held-out tokens that students of these settings are validated on."""
    train, valid = (TokenShards(data, sequence_length, split, documents) for split in ("train", "valid"))
    vocabulary = train.manifest["vocab_size"]
    first, second = _pairs(train)
    keys, counts = np.unique(first * vocabulary + second, return_counts=True)
    followed = np.bincount(first, minlength=vocabulary)
    kinds = np.bincount(keys // vocabulary, minlength=vocabulary)
    unigram = np.bincount(second, minlength=vocabulary) + 1.0
    unigram /= unigram.sum()
    v, w = _pairs(valid)
    wanted = v * vocabulary + w
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    together = np.where(keys[at] == wanted, counts[at], 0)
    # After a token that was never followed by any, the unigram alone.
    weight = np.maximum(kinds[v], 1)
    probability = (together + weight * unigram[w]) / (followed[v] + weight)
    ce = float(-np.log(probability).mean())
    return {"ce": ce, "ppl": math.exp(ce), "tokens": len(w), "train_tokens": len(second)}


def _pairs(text: TokenShards) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and those that follow them and are to be predicted."""
    parts = []
    for i in range(len(text)):
        item = text[i]
        labels = item["shift_labels"].numpy()
        known = labels != IGNORED
        parts.append((item["input_ids"].numpy()[known], labels[known]))
    first, second = zip(*parts, strict=True)
    return np.concatenate(first), np.concatenate(second)
