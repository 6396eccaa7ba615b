"""TF-IDF features of a text column, computed like scikit-learn's TfidfVectorizer with sublinear_tf=True.

A row's value of word j is (1 + ln c_j) (1 + ln((1 + n) / (1 + n_j))), where c_j counts the word in the row's text, n
the training rows and n_j those that have the word; then the values of a row are divided by their norm. Words are the
most frequent of the training rows. They are not standardized: rows have norm one already, and a division by the small
deviation of a rare word would undo the weights and let single words rule a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bespoke.data.about import TextRule, WeighedWords
from bespoke.data.population import Population
from bespoke.data.sources.formats.words import ranked
from bespoke.data.texts import vocabulary as texts
from bespoke.data.texts.tokenizers import tokenizer_of

Ints = NDArray[np.int64]

MOST_WORDS = 300  # features unless told: a linear model of more takes minutes, and rarely predicts better
LENGTH = 512  # words of a text that are looked at unless told
LEAST = 2  # training rows that have a word of the list
BLOCK = 2**22  # numbers that are counted at once


def pieces_of(found: Sequence[str | None], settings: TextRule) -> tuple[NDArray[np.int32], list[str]]:
    """Surface ids of each text's words, 0 where it is over, and the surface words; nothing is learned."""
    cut, ids = tokenizer_of(settings["tokenizer"]), dict[str, int]()
    rows = [
        [ids.setdefault(word, len(ids) + 1) for word in words[: settings["length"]]]
        for words in _words(found, cut, settings["lower"])
    ]
    return _padded(rows), list(ids)


def _words(found: Sequence[str | None], cut: Any, lower: bool) -> list[list[str]]:
    shown = (" ".join(((text or "").lower() if lower else text or "").split()) for text in found)
    return [[word for word, _ in cut.pieces(text)] for text in shown]


def _padded(rows: Sequence[Sequence[int]]) -> NDArray[np.int32]:
    found = np.zeros((len(rows), max((len(row) for row in rows), default=0) or 1), dtype=np.int32)
    for place, row in enumerate(rows):
        found[place, : len(row)] = row
    return found


def learned(raw: Population, rows: Ints) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """The words of these rows that become features, the most frequent first, and the weight (idf) of each."""
    pieces, surface = raw.columns["pieces"].numpy()[rows], raw.about["pieces"]
    ordered = np.sort(pieces, 1)
    first = np.concatenate([ordered[:, :1] > 0, (np.diff(ordered) > 0)], 1)  # each word once in each row
    spread = np.bincount(ordered[first], minlength=len(surface) + 1)
    counts = texts.counted(raw, rows)
    places = {word: place for place, word in enumerate(surface, start=1)}
    often = [word for word in ranked(counts) if spread[places[word]] >= LEAST]
    words = tuple(often[: raw.about["text"]["vocabulary"]])
    weights = [1 + np.log((1 + len(rows)) / (1 + spread[places[word]])) for word in words]
    return words, tuple(float(weight) for weight in weights)


def features(raw: Population, words: Sequence[str], weights: Sequence[float]) -> NDArray[np.float32]:
    """TF-IDF of every row of a table with texts."""
    places = {word: place for place, word in enumerate(words, start=1)}
    lookup = np.array([0, *(places.get(word, 0) for word in raw.about["pieces"])])
    return weighed(lookup[raw.columns["pieces"].numpy()], weights)


def features_of(found: Sequence[str | None], about: WeighedWords) -> NDArray[np.float32]:
    """TF-IDF of new texts; `about` has words, weights, tokenizer, lower and length, as an exported model keeps them."""
    cut, most = tokenizer_of(about["tokenizer"]), about["length"]
    places = {word: place for place, word in enumerate(about["words"], start=1)}
    rows = [[places.get(word, 0) for word in words[:most]] for words in _words(found, cut, about["lower"])]
    return weighed(_padded(rows), about["weights"])


def weighed(places: NDArray[Any], weights: ArrayLike) -> NDArray[np.float32]:
    """From the places of words in the list, counted from 1 (0: none), to TF-IDF."""
    idf = np.asarray(weights, dtype=float)
    many = len(idf) + 1
    found = np.zeros((len(places), len(idf)), dtype=np.float32)
    step = max(BLOCK // many, 1)
    for begin in range(0, len(places), step):
        block = places[begin : begin + step]
        flat = (np.arange(len(block))[:, None] * many + block).ravel()
        counts = np.bincount(flat, minlength=len(block) * many).reshape(len(block), many)[:, 1:].astype(float)
        values = np.where(counts > 0, 1 + np.log(np.maximum(counts, 1)), 0) * idf
        norms = np.linalg.norm(values, axis=1, keepdims=True)
        found[begin : begin + step] = values / np.where(norms > 0, norms, 1)
    return found
