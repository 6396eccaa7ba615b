"""TED talks in English: a client is a talk, its rows are segments of words; groups are topics of the training text.

The four collections differ by caption format (with or without punctuation), so letters are taken in lower case, without
punctuation, stage directions and credits. A talk that repeats another one is left out, whatever its collection: some
talks stand in two collections under other titles, with captions that differ in a few words. A segment that occurred
before is left out too, such as the opening words of a series.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bespoke.data.population import Population
from bespoke.data.sources.formats.topics import grouped
from bespoke.data.sources.formats.unigrams import gains
from bespoke.data.sources.registry import Statistics, at_least, describe, find_file, read_columns
from bespoke.data.splits import Split, cross_silo
from bespoke.data.texts import vocabulary as texts
from bespoke.errors import UserError
from bespoke.randomness import text_key, uniform

FILE = "ted/ted_talks.parquet"
COLUMNS = ("collection", "title", "text")
RUN = 8  # consecutive words that two talks have in common only by quoting each other
COPY = 0.2  # a talk with so much of its runs in another one repeats it; two talks of a speaker share less than a tenth
ONE_IN = 8  # runs compared: those whose hash is a multiple of this
_LEFT_OUT = re.compile(r"\([^)]*\)|\[[^\]]*\]|^(?:translator|reviewer):.*$", re.IGNORECASE | re.MULTILINE)
_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)*")


def load(
    talks: int = 600,
    segments: int = 46,
    length: int = 20,
    vocabulary: int = 10000,
    groups: Literal["topics", "collections"] = "topics",
    clusters: int = 7,
    seed: int = 0,
) -> Population:
    """The first `segments` segments of each of `talks` talks (0: of all) that are long enough, drawn with `seed`.

    groups: the collection of a talk, or its topic, found by `clusters` clusters of training text.
    """
    at_least("ted", 1, segments=segments, length=length, vocabulary=vocabulary)
    at_least("ted", 0, talks=talks)
    at_least("ted", 2, clusters=clusters)
    listed = _read(find_file(FILE, "ted"))
    chosen = ChosenSegments(segments, length)
    for collection, title in sorted(listed, key=lambda names: text_key(f"{seed}/{names[0]}/{names[1]}")):
        chosen.take(collection, title, words_of(listed[collection, title]))
        if talks and len(chosen.kept) == talks:
            break
    if not chosen.kept or len(chosen.kept) < talks:
        raise UserError(
            f"the source 'ted': {len(chosen.kept)} talks have {segments} segments of {length} words; lower the options "
            "'talks' and 'segments'"
        )
    about = describe(
        "ted",
        input="tokens",
        notes=[
            f"{len(chosen.kept):,} talks of {segments} segments of {length} words; {chosen.short:,} shorter talks, "
            f"{chosen.copies:,} talks that repeat another one and {chosen.repeated:,} segments that repeat another one "
            "were left out on the way."
        ],
    )
    if groups == "topics":
        about["topics"] = {"clusters": clusters, "seed": seed}
    names = np.repeat(list(chosen.kept), segments)
    return texts.population(
        [segment for talk in chosen.kept.values() for segment in talk], names, about=about, length=length,
        vocabulary=vocabulary, end=False,
        group=np.array([name.partition("/")[0] for name in names]) if groups == "collections" else None,
    )  # fmt: skip


def statistics(talks: int = 600) -> list[Statistics]:
    """What groups of talks know of their held-out text: topics, collections, and groups at random of topics' sizes."""
    return [gained(kind, population, split) for kind, population, split in divided(talks)]


def divided(talks: int = 600) -> Iterator[tuple[str, Population, Split]]:
    """The talks divided by topics, by collections, and at random into groups of the topics' sizes."""
    plain = load(talks)
    split = cross_silo(plain)
    topics = grouped(plain, split)
    assert topics.group is not None
    yield "by topics", topics, split
    names, collections = np.unique([name.partition("/")[0] for name in plain.ids], return_inverse=True)
    yield "by collections", replace(plain, group=collections, groups=names.tolist()), split
    shuffled = topics.group[np.argsort(uniform("shuffled groups", 0, plain.keys))]
    numbers = [f"group {place + 1}" for place in range(len(topics.groups))]
    yield "divided at random", replace(plain, group=shuffled, groups=numbers), split


def gained(kind: str, population: Population, split: Split) -> Statistics:
    """The table of one division: the perplexity of query text by word frequencies of all talks and of the group's."""
    rows = [
        [gain.group, gain.clients, gain.words, f"{gain.common:.1f}", f"{gain.own:.1f}", f"{gain.percent:+.1f} %"]
        for gain in gains(population, split, population.about["text"]["vocabulary"])
    ]
    title = f"Perplexity of held-out text by word frequencies, {kind}"
    return Statistics(title, ("group", "talks", "words", "all talks'", "its own", "gain"), rows)


class ChosenSegments:
    """Talks taken one after the other, without those that repeat one taken before."""

    def __init__(self, segments: int, length: int) -> None:
        self.segments, self.length = segments, length
        self.kept: dict[str, list[list[str]]] = {}  # by collection/title
        self.short = self.copies = self.repeated = 0
        self._runs: dict[int, list[int]] = {}  # talks in which a run of words occurs
        self._said: set[tuple[str, ...]] = set()
        self._ids: dict[str, int] = {}

    def take(self, collection: str, title: str, words: list[str]) -> None:
        """Keep the talk's first segments that are new; not a talk that is too short, or that repeats another one."""
        whole = len(words) // self.length
        if whole < self.segments:
            self.short += 1
            return
        runs = self._hashed(words)
        shared = Counter(talk for run in runs for talk in self._runs.get(run, ()))
        if shared and shared.most_common(1)[0][1] >= COPY * len(runs):
            self.copies += 1
            return
        fresh: list[tuple[str, ...]] = []
        for begin in range(0, whole * self.length, self.length):
            segment = tuple(words[begin : begin + self.length])
            if segment in self._said:
                self.repeated += 1
                continue
            fresh.append(segment)
            self._said.add(segment)
            if len(fresh) == self.segments:
                break
        if len(fresh) < self.segments:
            self.short += 1
            return
        for run in runs:
            self._runs.setdefault(run, []).append(len(self.kept))
        self.kept[f"{collection}/{title}"] = [list(segment) for segment in fresh]

    def _hashed(self, words: list[str]) -> list[int]:
        """One in ONE_IN of the talk's runs of words, as hashes."""
        ids = np.array([self._ids.setdefault(word, len(self._ids) + 1) for word in words], dtype=np.uint64)
        if len(ids) < RUN:
            return []
        hashes: NDArray[np.uint64] = np.zeros(len(ids) - RUN + 1, dtype=np.uint64)
        for place in range(RUN):  # multiplication modulo 2^64, then the high bits, which depend on every word
            hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + ids[place : len(hashes) + place]
        hashes ^= hashes >> np.uint64(29)
        hashes = hashes * np.uint64(0xBF58476D1CE4E5B9)
        hashes ^= hashes >> np.uint64(32)
        return list(set(hashes[hashes % np.uint64(ONE_IN) == 0].tolist()))


def words_of(text: str) -> list[str]:
    """The words of a talk in lower case; an apostrophe belongs to its word."""
    return _WORD.findall(_LEFT_OUT.sub(" ", text).replace("’", "'").lower())


def _read(path: Path) -> dict[tuple[str, str], str]:
    """The text of each talk by collection and title."""
    collection, title, text = read_columns(path, COLUMNS)
    return {(kind, name): spoken for kind, name, spoken in zip(collection, title, text)}
