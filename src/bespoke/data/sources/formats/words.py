"""Sentences as token ids for next-word prediction: 0 is padding, then the words, unknown, begin and end.

As TensorFlow Federated and Motley do it: a sentence is <bos>, its first `length` words and, if it is shorter, <eos>;
without its last token it is x, without its first y.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bespoke.data.about import About
from bespoke.data.sources.registry import describe

PAD = 0


@dataclass(frozen=True)
class Vocabulary:
    """Words by frequency; word i has the id i + 1."""

    words: tuple[str, ...]

    @property
    def oov(self) -> int:
        return len(self.words) + 1

    @property
    def bos(self) -> int:
        return len(self.words) + 2

    @property
    def eos(self) -> int:
        return len(self.words) + 3

    def __len__(self) -> int:
        return len(self.words) + 4

    @cached_property
    def ids(self) -> dict[str, int]:
        return {word: place for place, word in enumerate(self.words, start=1)}

    def encode(self, sentences: Sequence[Sequence[str]], length: int) -> NDArray[np.int16 | np.int32]:
        """A row of length + 1 tokens for each sentence."""
        rows = np.full((len(sentences), length + 1), PAD, dtype=np.int16 if len(self) < 2**15 else np.int32)
        rows[:, 0] = self.bos
        for row, sentence in zip(rows, sentences):
            known = [self.ids.get(word, self.oov) for word in sentence[:length]]
            if len(known) < length:
                known.append(self.eos)
            row[1 : len(known) + 1] = known
        return rows

    def described(self, length: int) -> About:
        """What a population of such rows says of its tokens; the accuracy leaves out unknown words and ends."""
        return {
            "input": "tokens",
            "vocabulary": len(self),
            "words": list(self.words),
            "unscored": [self.oov, self.eos],
            "features": [f"word {i}" for i in range(length)],
            "numeric": [False] * length,
            "target": "next word",
        }

    def about(self, source: str, length: int, /, **rest: Unpack[About]) -> About:
        """The description of a source's population of such rows."""
        learned = "which words are known, by how many clients or how often they say them, is learned without noise"
        about: About = {**self.described(length), "learned": learned, **rest}
        return describe(source, **about)


def shifted(tokens: NDArray[Any]) -> dict[str, Tensor]:
    """x and y of rows of tokens: two views of one array, for the largest sources fill the memory."""
    whole: Tensor = torch.from_numpy(tokens)
    return {"x": whole[:, :-1], "y": whole[:, 1:]}


def client_counts(clients: Iterable[Iterable[Sequence[str]]]) -> Counter[str]:
    """In how many clients each word occurs; a client is its sentences."""
    found: Counter[str] = Counter()
    for sentences in clients:
        found.update({word for sentence in sentences for word in sentence})
    return found


def ranked(counts: Counter[str]) -> list[str]:
    """Words by falling count, alphabetically among equals: the same list on every machine."""
    return sorted(counts, key=lambda word: (-counts[word], word))
