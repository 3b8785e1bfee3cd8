"""Needles in a haystack: facts hidden in text and asked for at its end, as in arXiv 2505.17083.

A sequence is text of the shards with a few sentences "The special magic <city> number is <7 digits>." put into it, and
ends with the beginnings of these sentences and the numbers that complete them. Only these last numbers are learned.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import Dataset

from affine_attn.data.shards import IGNORED, TokenShards
from affine_attn.data.tokenizer import find_tokenizer, load_tokenizer
from affine_attn.errors import UserError

CITIES = (
    "Amsterdam", "Athens", "Berlin", "Boston", "Cairo", "Chicago", "Delhi", "Dublin", "Geneva", "Hanoi", "Helsinki",
    "Istanbul", "Jakarta", "Kyoto", "Lagos", "Lima", "Lisbon", "London", "Madrid", "Manila", "Montreal", "Nairobi",
    "Oslo", "Paris", "Prague", "Rome", "Santiago", "Seoul", "Sydney", "Tokyo", "Toronto", "Vienna", "Warsaw", "Zurich",
)  # fmt: skip


class Stream(Protocol):
    """One text without boundaries."""

    tokens: int

    def read(self, start: int, stop: int) -> np.ndarray: ...


class Haystack(NamedTuple):
    ids: Tensor  # int64 [length]
    labels: Tensor  # the next token where it belongs to an answer, else -100


class Needles:
    """Makes haystacks of a text. ``encode`` gives the tokens of a sentence, in the vocabulary of the text."""

    def __init__(self, text: Stream, encode: Callable[[str], list[int]]):
        self.text, self._encode = text, encode
        # Digits that look alike to the model would make every answer right.
        if len({tuple(encode(f" {digit}")) for digit in range(10)}) < 10:
            raise UserError("the tokenizer does not tell digits apart, which needles are made of")

    def haystack(
        self, rng: np.random.Generator, start: int, length: int, depths: Sequence[float], asked: Sequence[int]
    ) -> Haystack:
        """``length`` tokens, with text from token ``start`` on.

        depths: where in the text each needle goes, 0 its beginning and 1 its end; asked: those that are asked for.
        """
        cities = rng.choice(CITIES, len(depths), replace=False)
        prompts = [self._encode(f"\nThe special magic {city} number is") for city in cities]
        answers = [self._encode(f" {number}") for number in rng.integers(10**6, 10**7, len(depths))]
        stop = self._encode(".\n")
        room = length - sum(len(p) + len(a) + len(stop) for p, a in zip(prompts, answers, strict=True))
        room -= sum(len(prompts[i]) + len(answers[i]) for i in asked)
        if room < 1:
            raise UserError(f"{length} tokens are too few for {len(depths)} needles and {len(asked)} questions")
        if start + room > self.text.tokens:
            raise UserError(
                f"a haystack of {length} tokens needs {room} of text, there are {self.text.tokens}: give more text"
            )
        words, pieces, done = self.text.read(start, start + room).astype(np.int64).tolist(), [], 0
        for i in np.argsort(depths, kind="stable"):
            place = round(depths[i] * room)
            pieces += [*words[done:place], *prompts[i], *answers[i], *stop]
            done = place
        pieces += words[done:]
        labels = [IGNORED] * len(pieces)
        for i in asked:
            pieces += [*prompts[i], *answers[i]]
            # The last token of the question predicts the first of the answer.
            labels += [*[IGNORED] * (len(prompts[i]) - 1), *answers[i], IGNORED]
        return Haystack(torch.tensor(pieces), torch.tensor(labels))


def _encoded(tokenizer: Tokenizer, words: str) -> list[int]:
    return tokenizer.encode(words, add_special_tokens=False).ids


class NeedleSequences(Dataset[dict[str, Tensor]]):
    """``number`` sequences for training, each with needles and places of its own; all needles are asked for.

    ``first``: sequences of the same seed before these, such as those of the training that these are held out from.
    """

    def __init__(self, text: TokenShards, number: int, needles: int = 3, seed: int = 0, first: int = 0):
        if not 1 <= needles <= len(CITIES):
            raise UserError(f"needles must be between 1 and {len(CITIES)}, got {needles}")
        self.text, self.number, self.needles, self.seed, self.first = text, number, needles, seed, first
        self.sequence_length, self.manifest, self.tokenizer = text.sequence_length, text.manifest, text.tokenizer
        # No lambda: processes that read data get this object pickled.
        self._made = Needles(text, partial(_encoded, load_tokenizer(find_tokenizer(str(text.tokenizer)))))

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        if not 0 <= i < self.number:
            raise IndexError(f"sequence {i} of {self.number}")
        rng, start = np.random.default_rng((self.seed, self.first + i)), i % len(self.text) * self.sequence_length
        depths, asked = rng.random(self.needles), rng.permutation(self.needles)
        ids, labels = self._made.haystack(rng, start, self.sequence_length, depths.tolist(), asked.tolist())
        # As transformers has labels: of the token itself.
        own = torch.cat((labels.new_full((1,), IGNORED), labels[:-1]))
        return {"input_ids": ids, "labels": own, "shift_labels": labels}
