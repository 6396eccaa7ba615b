"""Sentiment140 (Go et al. 2009) by user: is a tweet positive or negative? Words as frozen GloVe vectors.

Read from training.1600000.processed.noemoticon.csv (polarity 0 or 4, id, date, query, user, text; latin-1) and a text
file of vectors (a word and its numbers in each line). As in FedProx (Li et al. 2020) users with more than 30 tweets are
clients, 30 % of them are kept (of which its draw left 772), tweets are split into words and marks, and the first 25 are
kept, padded with the unknown word. Unlike there, words are looked up in lower case, as GloVe's are written.

A token is a row of the vectors of those words that occur; 0 is the unknown word, whose vector is zero. Where the
vectors lie: bespoke.data.sources.formats.vectors.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bespoke.data.population import Population
from bespoke.data.sources.formats.vectors import keep
from bespoke.data.sources.formats.words import ranked
from bespoke.data.sources.registry import at_least, damaged, describe, find_file
from bespoke.errors import UserError
from bespoke.randomness import client_keys, uniform

TWEETS = "sent140/training.1600000.processed.noemoticon.csv"
LAYOUT = "polarity (0 or 4), id, date, query, user, text"
POLARITIES = {"0": 0, "4": 1}
_TOKEN = re.compile(r"[\w']+|[.,!?;]")
Row = tuple[int, str, str, str]  # class, date, user, text


def load(least: int = 31, share: float = 0.3, length: int = 25, vectors: str = "glove.6B.300d.txt") -> Population:
    """A `share` of the users with at least `least` tweets; `vectors` is a file in sent140/."""
    at_least("sent140", 1, least=least, length=length)
    if not 0 < share <= 1:
        raise UserError(f"option 'share' of the source 'sent140' is {share}; it has to be above 0 and at most 1")
    path = find_file(TWEETS, "sent140")
    book = find_file(f"sent140/{vectors}", "sent140")
    tweets = Counter(user for _, _, user, _ in _rows(path))
    enough = sorted(user for user, count in tweets.items() if count >= least)
    kept = {user for user, drawn in zip(enough, uniform("users", client_keys(enough))) if drawn < share}
    if not kept:
        raise UserError(
            f"the source 'sent140': {len(enough)} users have {least} tweets or more, and share = {share} keeps none of "
            f"them; the largest number of tweets of any user is {max(tweets.values())}"
        )
    rows = [row for row in _rows(path) if row[2] in kept]
    said = [_TOKEN.findall(text.lower())[:length] for _, _, _, text in rows]
    counts = Counter(word for words in said for word in words)
    known, table = _look_up(book, counts)
    ids = {word: place for place, word in enumerate(known, start=1)}
    x = np.zeros((len(rows), length), dtype=np.int16 if len(known) < 2**15 else np.int32)
    for row, words in zip(x, said):
        row[: len(words)] = [ids.get(word, 0) for word in words]
    covered = sum(counts[word] for word in known) / max(counts.total(), 1)
    about = describe(
        "sent140",
        input="tokens",
        vocabulary=len(known) + 1,
        words=known,
        learned="which words are known is learned from what clients say, without noise",
        vectors=keep("sent140", table),
        dimension=table.shape[1],
        classes=["negative", "positive"],
        features=[f"word {place}" for place in range(length)],
        numeric=[False] * length,
        target="sentiment",
        model={"name": "sentiment-lstm"},
        notes=[
            f"{len(kept)} of {len(tweets)} users: {share:.0%} of the {len(enough)} with {least} tweets or more.",
            f"{book.name} knows {covered:.0%} of the words said; {len(known)} different ones.",
        ],
    )
    columns: dict[str, NDArray[Any]] = {
        "x": x,
        "y": np.array([label for label, _, _, _ in rows], dtype=np.int64),
        "time": np.array([_seconds(path, date) for _, date, _, _ in rows]),
    }
    return Population.build(columns, [user for _, _, user, _ in rows], about=about)


def _rows(path: Path) -> Iterator[Row]:
    """The file as a stream: it is read twice rather than held, for few of its rows are kept."""
    found = False
    with open(path, newline="", encoding="latin-1") as file:
        for number, row in enumerate(csv.reader(file), start=1):
            if len(row) != 6 or row[0] not in POLARITIES or not row[4]:
                raise damaged(path, f"{','.join(row)[:60]!r} in line {number}", LAYOUT)
            found = True
            yield POLARITIES[row[0]], row[2], row[4], row[5]
    if not found:
        raise damaged(path, "no rows", LAYOUT)


def _seconds(path: Path, date: str) -> float:
    """'Mon Apr 06 22:19:45 PDT 2009' as seconds; all are of one time zone, which is left out."""
    try:
        _, month, day, clock, _, year = date.split()
        then = datetime.strptime(f"{month} {day} {clock} {year}", "%b %d %H:%M:%S %Y")
    except ValueError:
        raise damaged(path, f"the date {date!r}", "dates like 'Mon Apr 06 22:19:45 PDT 2009'") from None
    return (then - datetime(1970, 1, 1)).total_seconds()


def _look_up(path: Path, counts: Counter[str]) -> tuple[list[str], NDArray[np.float32]]:
    """The words that have a vector, by frequency, and their vectors after one of zeros."""
    found: dict[str, NDArray[np.float32]] = {}
    width = 0
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            width = width or line.count(" ")
            if line.count(" ") < max(width, 1):
                raise damaged(
                    path, f"{line[:40]!r} in line {number}", f"a word and {width or 300} numbers in every line"
                )
            word = line[: line.index(" ")]
            if word in counts and word not in found:
                try:
                    found[word] = np.array(line.rsplit(" ", width)[1:], dtype=np.float32)
                except ValueError as error:
                    raise damaged(path, f"{error} in line {number}", f"a word and {width} numbers") from None
    if not found:
        raise damaged(path, "none of the words of the tweets", "vectors of lower-case English words, such as GloVe's")
    known = [word for word in ranked(counts) if word in found]
    return known, np.stack([np.zeros(width, np.float32), *(found[word] for word in known)])
