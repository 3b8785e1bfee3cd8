"""The sequences a model is looked at with: of a text file or of prepared shards, whole ones only."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from affine_attn.data.shards import MANIFEST, PROGRESS, TokenShards
from affine_attn.errors import UserError
from affine_attn.evaluate.perplexity import documents, encode, prefix_token

APART = "packed as in training: documents do not see each other"
JOINED = "documents are joined and see each other"


def is_shards(data: Path) -> bool:
    return (data / MANIFEST).exists() or (data / PROGRESS).exists()


def load_sequences(
    data: Path, length: int, count: int, tokenizer: PreTrainedTokenizerBase | None, join: bool = False
) -> list[dict[str, Tensor]]:
    """Return at most ``count`` arguments of a decoder, [1, length] each. ``join``: one text without boundaries.

    Shards give their valid split. In a text file every document follows the tokenizer's begin (or end) token.
    """
    if is_shards(data):
        shards = TokenShards(data, length, "valid", documents=not join)
        items = [shards[i] for i in range(min(count, len(shards)))]
        names = ("input_ids",) if join else ("input_ids", "position_ids")
        return [{name: item[name][None] for name in names} for item in items]
    if data.is_dir():
        raise UserError(f"{data} has no {MANIFEST}: give a folder that affine-attn prepare has made, or a text file")
    if tokenizer is None:
        raise UserError(f"a model without a tokenizer cannot read {data}: give shards, see affine-attn prepare")
    found = []
    stream = _tokens(data, tokenizer)
    while len(found) < count and len(part := list(islice(stream, length))) == length:
        ids, starts = (torch.tensor(column) for column in zip(*part, strict=True))
        # Counted from the start of the document or of the sequence, whichever is later.
        positions = torch.arange(length) - torch.where(starts, torch.arange(length), 0).cummax(0).values
        sequence = {"input_ids": ids[None], "position_ids": positions[None]}
        found.append({"input_ids": ids[None]} if join else sequence)
    if not found:
        raise UserError(f"{data} has less than {length} tokens: give more text or a lower --length")
    return found


def _tokens(file: Path, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[int, bool]]:
    """Tokens, and whether a document starts with them."""
    prefix = prefix_token(tokenizer)
    for text in documents(file):
        yield prefix, True
        yield from ((token, False) for token in encode(tokenizer, text))
