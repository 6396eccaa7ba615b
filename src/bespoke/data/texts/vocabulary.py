"""Texts by client as rows of surface words, and the vocabulary learned from training rows.

`population` keeps texts as they are read and learns nothing: column `pieces` (rows, length) holds surface ids, 0 where
the text is over, and `about["pieces"]` the distinct surface words (word i has the id i + 1). `encode` makes the
vocabulary from training rows alone, and then x and y with the ids of data/words.py.

A sentence that was not cut is followed by <eos>, which is predicted and counted as a token; a cut one is not. An
unknown word is one token <unk> for every method alike. Two columns let vocabularies be compared by bits per character:
`characters` of a row (its words, and one for each space and for the end), and `spelling`, the bits that spell its
unknown words under the frequencies of characters in the training rows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from bespoke import pretrained
from bespoke.data.about import About, without
from bespoke.data.population import Population
from bespoke.data.sources.formats.words import PAD, Vocabulary, ranked, shifted
from bespoke.errors import UserError

Ints = NDArray[np.int64]
NOTHING = -1  # the target where a text of a pretrained model's tokens is over
RAW = ("pieces", "whole")  # columns that encoding replaces
DROPPED = ("pieces", "declared", "public")  # of `about`: all surface words, and vocabularies known without the data
CODE_POINTS = 0x110000  # characters that a word could be spelled with: one that training rows lack is any of them


def population(
    sentences: Sequence[Sequence[str]],
    clients: ArrayLike,
    *,
    about: About,
    length: int,
    vocabulary: int,
    least: int = 1,
    group: ArrayLike | None = None,
    whole: Sequence[bool] | None = None,
    characters: ArrayLike | None = None,
    end: bool = True,
    spaced: bool = True,
    unknown: Sequence[str] = (),
    columns: dict[str, NDArray[Any]] | None = None,
) -> Population:
    """Sentences as raw rows: the first `length` words of each.

    `whole` says which sentences have not been cut before; `end` whether <eos> follows a whole one. The vocabulary will
    be the `vocabulary` most frequent words of the training rows that occur at least `least` times there, never one of
    `unknown`. `characters` are those of each row as they were written; else they are counted, with a space between two
    words if they are `spaced`. `columns` has further columns, such as time or role.
    """
    ids: dict[str, int] = {}
    width = max((min(len(sentence), length) for sentence in sentences), default=0)
    pieces = np.zeros((len(sentences), max(width, 1)), dtype=np.int32)
    uncut = np.ones(len(sentences), dtype=bool) if whole is None else np.array(whole, dtype=bool)
    sizes, counts = np.zeros((2, len(sentences)), dtype=np.int64)
    for row, sentence in enumerate(sentences):
        kept = sentence[:length]
        pieces[row, : len(kept)] = [ids.setdefault(word, len(ids) + 1) for word in kept]
        sizes[row], counts[row] = sum(map(len, kept)), len(kept)
        uncut[row] &= len(sentence) <= length
    ended = uncut if end else np.zeros_like(uncut)
    if characters is None:
        characters = sizes + ended + (np.maximum(counts - 1, 0) if spaced else 0)
    about = {
        "task": "language", "input": "tokens", "target": "next word", "notes": [], "characters": True,
        "standardize": {"features": "none", "target": False},
        **about,
        "pieces": list(ids),
        "text": {**about.get("text", {}), "length": length, "vocabulary": vocabulary, "least": least, "end": end,
                 "unknown": list(unknown)},
    }  # fmt: skip
    held = {"pieces": pieces, "whole": ended, "characters": np.asarray(characters, np.int32), **(columns or {})}
    return Population.build(held, clients, group=group, about=about)


def counted(raw: Population, rows: Ints) -> Counter[str]:
    """How often each surface word occurs in these rows."""
    counts = np.bincount(raw.columns["pieces"].numpy()[rows].ravel(), minlength=len(raw.about["pieces"]) + 1)
    counts[PAD] = 0
    return Counter({raw.about["pieces"][place - 1]: int(counts[place]) for place in np.flatnonzero(counts)})


def learned(raw: Population, rows: Ints) -> tuple[str, ...]:
    """The vocabulary of these rows: the most frequent words, alphabetically among equals."""
    text, counts = raw.about["text"], counted(raw, rows)
    for word in text["unknown"]:
        counts.pop(word, None)
    return tuple(word for word in ranked(counts)[: text["vocabulary"]] if counts[word] >= text["least"])


def said(raw: Population, words: Sequence[str], rows: Ints) -> str:
    """Facts about a vocabulary: its size, and how much of these rows it covers."""
    counts = counted(raw, rows)
    missed = counts.total() - sum(counts[word] for word in words)
    text = raw.about["text"]
    least = f"at least {text['least']} times" if text["least"] > 1 else "most often"
    return (
        f"The vocabulary has {len(words):,} entries, found {least} in the training rows (at most "
        f"{text['vocabulary']:,}); {100 * missed / max(counts.total(), 1):.1f} % of what these rows hold is unknown."
    )


def encode(raw: Population, words: Sequence[str], rows: Ints, notes: Sequence[str] = ()) -> Population:
    """Rows of tokens of a vocabulary, and what unknown words cost by the characters of the training `rows`."""
    known, pieces = Vocabulary(tuple(words)), raw.columns["pieces"].numpy()
    small = np.int16 if len(known) < 2**15 else np.int32
    token = np.array([PAD, *(known.ids.get(word, known.oov) for word in raw.about["pieces"])], dtype=small)
    end = int(raw.about["text"]["end"])
    tokens = np.full((len(pieces), pieces.shape[1] + 1 + end), PAD, dtype=small)
    tokens[:, 0] = known.bos
    tokens[:, 1 : pieces.shape[1] + 1] = token[pieces]
    ended = np.flatnonzero(raw.columns["whole"].numpy())
    tokens[ended, (pieces[ended] > 0).sum(1) + 1] = known.eos
    bits = np.where(token == known.oov, [0.0, *spelled(raw.about["pieces"], counted(raw, rows))], 0.0)
    columns = {**shifted(tokens), "spelling": torch.from_numpy(bits[pieces].sum(1).astype(np.float32))}
    columns |= {name: column for name, column in raw.columns.items() if name not in RAW}
    about = without(raw.about, DROPPED)
    about = {**known.described(tokens.shape[1] - 1), **about, "notes": [*about["notes"], *notes]}
    return replace(raw, columns=columns, about=about, reader=None)


def encode_pretrained(raw: Population, name: str) -> Population:
    """Rows of a pretrained model's own tokens, cut by its own tokenizer: nothing is learned, and no token is unknown.

    Targets are -1 where the text is over, for a model may have any token at 0.
    """
    found, known = pretrained.facts(name), pretrained.tokenizer(name)
    text, pieces = raw.about["text"], raw.columns["pieces"].numpy()
    if name not in (text.get("pretrained"), text.get("tokenizer")):
        raise UserError(
            f"the texts of {raw.about.get('name')} are cut into {text.get('tokenizer', 'words')}, and the model "
            f"{name!r} reads tokens of its own; set tokenizer = 'model' in [data], or leave it out"
        )
    token = np.array([found.begin, *(known.token_to_id(piece) for piece in raw.about["pieces"])], dtype=np.int32)
    width = pieces.shape[1] + int(text["end"])
    targets = np.full((len(pieces), width), NOTHING, dtype=np.int32)
    targets[:, : pieces.shape[1]] = np.where(pieces > 0, token[pieces], NOTHING)
    ended = np.flatnonzero(raw.columns["whole"].numpy())
    targets[ended, (pieces[ended] > 0).sum(1)] = found.end
    inputs = np.concatenate([np.full((len(pieces), 1), found.begin, np.int32), targets[:, :-1]], 1)
    columns = {"x": torch.from_numpy(np.where(inputs == NOTHING, found.begin, inputs)), "y": torch.from_numpy(targets)}
    dropped = (*RAW, "characters")  # the first tokens of a row may be given: bits per character would not be theirs
    columns |= {name: column for name, column in raw.columns.items() if name not in dropped}
    about = without(raw.about, DROPPED)
    about |= {
        "input": "tokens", "vocabulary": found.vocabulary, "pretrained": name, "target": "next token",
        "features": [f"token {i}" for i in range(width)], "numeric": [False] * width,
    }  # fmt: skip
    return replace(raw, columns=columns, about=about, reader=None)


def spelled(words: Sequence[str], counts: Counter[str]) -> list[float]:
    """The bits that spell each word, with its end, under the frequencies of characters in counted words.

    Every frequency has one added to it; a character that does not occur shares one such, and is any code point.
    """
    letters: Counter[str] = Counter()
    for word, count in counts.items():
        for letter in word:
            letters[letter] += count
    total = letters.total() + counts.total() + len(letters) + 2
    cost = {letter: math.log2(total / (count + 1)) for letter, count in letters.items()}
    rare, last = math.log2(total) + math.log2(CODE_POINTS), math.log2(total / (counts.total() + 1))
    return [sum(cost.get(letter, rare) for letter in word) + last for word in words]
