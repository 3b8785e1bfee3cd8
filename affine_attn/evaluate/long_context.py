"""The loss by position and needles in haystacks, at lengths beyond those of training."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise, product
from typing import Any

import numpy as np
import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from affine_attn.data.needles import Haystack, Needles, Stream
from affine_attn.data.shards import IGNORED
from affine_attn.data.texts import boundaries
from affine_attn.errors import UserError
from affine_attn.evaluate.perplexity import token_losses

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
# Per depth, where no number is given.
HAYSTACKS = 20
# In one haystack, as in arXiv 2505.17083.
NEEDLES = 3


def loss_by_position(model: PreTrainedModel, stream: Stream, length: int, limit: int | None = None) -> dict[str, Any]:
    """Sequences of a length from joined documents that all see each other: a document is rarely that long.

    Every sequence predicts ``length`` tokens, in stretches of positions that double: 0, 1, 2-3, 4-7 and so on. Standard
    errors are over sequences.
    """
    sequences = min((stream.tokens - 1) // length, limit or stream.tokens)
    if sequences < 1:
        raise UserError(f"--length {length} needs {length + 1} tokens, and there are {stream.tokens}")
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
        "boundaries": boundaries(apart=False, as_trained=False),
        "length": length,
        "stride": length,
        "sequences": sequences,
        "model_length": model.config.max_position_embeddings,
    }


def needle_retrieval(
    model: PreTrainedModel,
    text: Stream,
    encode: Callable[[str], list[int]],
    length: int,
    depths: Sequence[float] = DEPTHS,
    haystacks: int = HAYSTACKS,
    seed: int = 0,
) -> dict[str, Any]:
    """How often the model writes the number of a needle that lies at a depth of the text, 0 its beginning, 1 its end.

    One needle is asked for; the others lie anywhere. All depths have the same haystacks: only that needle moves. So the
    standard error of their mean is over haystacks, as that of every depth is: sqrt(p (1 - p) / (haystacks - 1)) there.
    """
    needles = Needles(text, encode)
    right = np.empty((haystacks, len(depths)))
    places = product(range(haystacks), enumerate(depths))
    for i, (j, depth) in tqdm(places, desc=f"Needles in {length}", total=right.size):
        rng = np.random.default_rng((seed, length, i))
        start = int(rng.integers(max(1, text.tokens - length + 1)))
        others = rng.random(NEEDLES - 1).tolist()
        right[i, j] = _answered(model, needles.haystack(rng, start, length, [depth, *others], asked=[0]))
    return {
        "metrics": {"accuracy": _over_sequences(right.mean(1))},
        "depths": [{"depth": depth, **_over_sequences(right[:, j])} for j, depth in enumerate(depths)],
        "boundaries": boundaries(apart=False, as_trained=False),
        "length": length,
        "haystacks": haystacks,
        "needles": NEEDLES,
        "seed": seed,
        "model_length": model.config.max_position_embeddings,
    }


@torch.inference_mode()
def _answered(model: PreTrainedModel, haystack: Haystack) -> bool:
    """Return True if greedy decoding writes the answer: each token is the likeliest after the right ones.

    The head is applied to the answer alone: logits of a whole long text would not fit.
    """
    base: Any = model.base_model
    head: Any = model.get_output_embeddings()
    hidden = base(input_ids=haystack.ids[None].to(model.device), use_cache=False).last_hidden_state[0]
    labels = haystack.labels.to(model.device)
    asked = labels != IGNORED
    return bool((head(hidden[asked]).argmax(-1) == labels[asked]).all())


def _over_sequences(values: np.ndarray) -> dict[str, float | None]:
    error = float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None
    return {"value": float(values.mean()), "stderr": error}
