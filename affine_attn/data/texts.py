"""Texts and shards as evaluations and analyses read them: document by document, joined, or in whole sequences."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from affine_attn.data.corpus import find_sources
from affine_attn.data.shards import MANIFEST, PROGRESS, TokenShards
from affine_attn.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def boundaries(apart: bool, as_trained: bool) -> str:
    """What results say of the boundaries of documents."""
    seen = "documents do not see each other" if apart else "documents are joined and see each other"
    return f"packed as in training: {seen}" if as_trained else seen


def documents(file: Path) -> Iterator[str]:
    """Texts of a file in its order; those of JSON lines are in the field "text"."""
    if not file.exists():
        raise UserError(f"there is no file {file}")
    for source in find_sources([str(file)]):
        yield from (text for text, _ in source.read(0))


def encode(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]  # pyright: ignore[reportReturnType]


def prefix_token(tokenizer: "PreTrainedTokenizerBase") -> int:
    """What stands before a document: the token of its begin, or where there is none that of an end."""
    found = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if not isinstance(found, int):
        raise UserError("the tokenizer has neither a begin nor an end token to put before a document")
    return found


class JoinedTexts:
    """The documents of a file, one after the other, each after the tokenizer's begin (or end) token."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", file: Path):
        prefix = prefix_token(tokenizer)
        texts = [[prefix, *encode(tokenizer, text)] for text in documents(file)]
        if not texts:
            raise UserError(f"{file} has no text")
        self._tokens = np.concatenate(texts).astype(np.int64)
        self.tokens = len(self._tokens)

    def read(self, start: int, stop: int) -> np.ndarray:
        return self._tokens[start:stop]


def joined_shards(folder: Path, split: str = "valid") -> TokenShards:
    return TokenShards(folder, 1, split, documents=False)


def is_shards(data: Path) -> bool:
    return (data / MANIFEST).exists() or (data / PROGRESS).exists()


def load_sequences(
    data: Path, length: int, count: int, tokenizer: "PreTrainedTokenizerBase | None", join: bool = False
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


def _tokens(file: Path, tokenizer: "PreTrainedTokenizerBase") -> Iterator[tuple[int, bool]]:
    """Tokens, and whether a document starts with them."""
    prefix = prefix_token(tokenizer)
    for text in documents(file):
        yield prefix, True
        yield from ((token, False) for token in encode(tokenizer, text))
