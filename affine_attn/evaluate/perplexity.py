"""Perplexity of texts, document by document, and of prepared shards, packed as in training."""

import math
import re
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from affine_attn.data.shards import IGNORED, TokenShards
from affine_attn.data.texts import boundaries, documents, encode, prefix_token
from affine_attn.distill.losses import CHUNK_BYTES, chunk_size
from affine_attn.errors import UserError
from affine_attn.evaluate.score import Pair, score

# "value" and "stderr", which is None where there is none.
Measured = dict[str, Any]


def mean_loss(losses: Sequence[float], counts: Sequence[int]) -> Measured:
    """Nats per token (or word, or byte), from the summed losses of documents and their numbers of them.

    The standard error is that of a ratio of two sums over documents; one document alone has none.
    """
    total, n = sum(counts), len(counts)
    mean = sum(losses) / total
    if n < 2:
        return {"value": mean, "stderr": None}
    spread = sum((loss - mean * count) ** 2 for loss, count in zip(losses, counts, strict=True))
    return {"value": mean, "stderr": math.sqrt(spread * n / (n - 1)) / total}


def perplexity(losses: Sequence[float], counts: Sequence[int]) -> Measured:
    """exp of the mean loss, with its standard error carried through; none where it exceeds what a float holds."""
    mean = mean_loss(losses, counts)
    if mean["value"] > math.log(sys.float_info.max):
        return {"value": None, "stderr": None}
    value = math.exp(mean["value"])
    return {"value": value, "stderr": mean["stderr"] and value * mean["stderr"]}


def bits(losses: Sequence[float], counts: Sequence[int]) -> Measured:
    """The mean loss in bits."""
    return {name: nats and nats / math.log(2) for name, nats in mean_loss(losses, counts).items()}


def windows(tokens: Sequence[int], prefix: int, length: int, stride: int) -> Iterator[Pair]:
    """Cover a document: each window scores the next ``stride`` tokens, after as many before as ``length`` inputs hold.

    The first token follows ``prefix``. With stride = length contexts only overlap in the last window, which is how
    lm-evaluation-harness does it.
    """
    if not 1 <= stride <= length:
        raise UserError(f"--stride must be between 1 and the length of {length}, got {stride}")
    sequence = (prefix, *tokens)
    done = 1
    while done < len(sequence):
        # The first window has no context to keep, so it scores all its tokens.
        end = min(done + (length if done == 1 else stride), len(sequence))
        yield Pair(sequence[max(0, end - 1 - length) : done], sequence[done:end])
        done = end


def text_perplexity(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    file: Path,
    length: int,
    stride: int,
    limit: int | None = None,
    batch_size: int | None = None,
) -> dict[str, Any]:
    """Documents of a text or JSON-lines file, each scored on its own after the tokenizer's begin (or end) token."""
    texts = list(islice((text for text in documents(file) if text.strip()), limit))
    prefix = prefix_token(tokenizer)
    encoded = [list(windows(encode(tokenizer, text), prefix, length, stride)) for text in texts]
    scores = iter(score(model, [pair for pairs in encoded for pair in pairs], batch_size, f"Scoring {file.name}"))
    losses = [-sum(next(scores).log_likelihood for _ in pairs) for pairs in encoded]
    tokens = [sum(len(pair.continuation) for pair in pairs) for pairs in encoded]
    if not sum(tokens):
        raise UserError(f"{file} has no text to score")
    words, size = [len(re.split(r"\s+", text)) for text in texts], [len(text.encode()) for text in texts]
    return {
        "metrics": {
            "loss": mean_loss(losses, tokens),
            "token_perplexity": perplexity(losses, tokens),
            "word_perplexity": perplexity(losses, words),
            "bits_per_byte": bits(losses, size),
        },
        "boundaries": "every document on its own, after the tokenizer's begin (or end) token",
        "length": length,
        "stride": stride,
        "documents": len(texts),
        "tokens": sum(tokens),
    }


def shard_perplexity(
    model: PreTrainedModel,
    folder: Path,
    length: int,
    split: str = "valid",
    limit: int | None = None,
    as_trained: bool = False,
) -> dict[str, Any]:
    """Sequences of whole shards: documents do not see each other, and their first tokens are not predicted.

    as_trained: the model was trained on sequences of this length and kind, which the result then says.
    """
    shards = TokenShards(folder, length, split)
    losses, counts = [], []
    for i in tqdm(range(min(len(shards), limit or len(shards))), desc=f"Scoring {folder.name}"):
        item = shards[i]
        losses.append(float(token_losses(model, item).sum()))
        counts.append(int((item["shift_labels"] != IGNORED).sum()))
    return {
        "metrics": {"loss": mean_loss(losses, counts), "token_perplexity": perplexity(losses, counts)},
        "boundaries": f"{boundaries(True, as_trained)}, first tokens are not predicted",
        "length": length,
        "stride": length,
        "split": split,
        "sequences": len(losses),
        "tokens": sum(counts),
    }


@torch.inference_mode()
def token_losses(model: PreTrainedModel, item: dict[str, Tensor]) -> Tensor:
    """The loss in nats at every position of one sequence [T], in fp64; 0 where there is no label.

    The head is applied to a stretch of positions at a time, so that no logits of the whole sequence exist.
    """
    for name in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        if getattr(model.config, name, None):
            raise UserError(f"a model with {name} has more than a plain head, which is all that is applied here")
    inputs = {name: item[name][None].to(model.device) for name in ("input_ids", "position_ids") if name in item}
    base: Any = model.base_model
    head: Any = model.get_output_embeddings()
    hidden = base(**inputs, use_cache=False).last_hidden_state[0]
    labels = item["shift_labels"].to(model.device)
    size = chunk_size(len(labels), model.config.vocab_size, hidden.element_size(), CHUNK_BYTES)
    return torch.cat(
        [
            F.cross_entropy(head(states).float(), wanted, ignore_index=IGNORED, reduction="none").double().cpu()
            for states, wanted in zip(hidden.split(size), labels.split(size), strict=True)
        ]
    )
