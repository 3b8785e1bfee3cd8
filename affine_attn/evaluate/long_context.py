"""The loss by position, at lengths beyond those of training."""

import math
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from affine_attn.distill.shards import TokenShards
from affine_attn.evaluate.perplexity import documents, encode, prefix_token, token_losses


class Stream(Protocol):
    """One text without boundaries."""

    tokens: int

    def read(self, start: int, stop: int) -> np.ndarray: ...


class JoinedTexts:
    """The documents of a file, one after the other, each after the tokenizer's begin (or end) token."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, file: Path):
        prefix = prefix_token(tokenizer)
        self._tokens = np.concatenate([[prefix, *encode(tokenizer, text)] for text in documents(file)]).astype(np.int64)
        self.tokens = len(self._tokens)

    def read(self, start: int, stop: int) -> np.ndarray:
        return self._tokens[start:stop]


def joined_shards(folder: Path, split: str = "valid") -> Stream:
    return TokenShards(folder, 1, split, documents=False)


def loss_by_position(model: PreTrainedModel, stream: Stream, length: int, limit: int | None = None) -> dict[str, Any]:
    """Sequences of a length from joined documents that all see each other: a document is rarely that long.

    Every sequence predicts ``length`` tokens, in stretches of positions that double: 0, 1, 2-3, 4-7 and so on. Standard
    errors are over sequences.
    """
    sequences = min((stream.tokens - 1) // length, limit or stream.tokens)
    if sequences < 1:
        raise ValueError(f"--length {length} needs {length + 1} tokens, and there are {stream.tokens}")
    edges = [0, *(2**i for i in range(math.ceil(math.log2(length)) if length > 1 else 0)), length]
    means = np.empty((sequences, len(edges) - 1))
    whole = np.empty(sequences)
    for i in tqdm(range(sequences), desc=f"Length {length}"):
        window = torch.from_numpy(stream.read(i * length, (i + 1) * length + 1).astype(np.int64))
        losses = token_losses(model, {"input_ids": window[:-1], "shift_labels": window[1:]}).numpy()
        whole[i] = losses.mean()
        means[i] = [losses[a:b].mean() for a, b in pairwise(edges)]
    return {
        "metrics": {"loss": _over_sequences(whole)},
        "positions": [
            {"first": a, "last": b - 1, **_over_sequences(means[:, i])} for i, (a, b) in enumerate(pairwise(edges))
        ],
        "boundaries": "documents are joined and see each other",
        "length": length,
        "stride": length,
        "sequences": sequences,
        "model_length": model.config.max_position_embeddings,
    }


def _over_sequences(values: np.ndarray) -> dict[str, float | None]:
    error = float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None
    return {"value": float(values.mean()), "stderr": error}
