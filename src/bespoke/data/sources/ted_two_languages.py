"""Talks in English and in Spanish (mTEDx; Salesky et al. 2021): a client per talk, next-word prediction.

Made for one question: does a method with two clusters find the two languages? So that it can only find them by their
words, and that neither language is the rule and the other the exception, both are made alike:

- words are lower-case letters alone, as the Spanish transcripts have them; stage directions and credits are left out;
- the running text of a talk is cut into pieces of `length` words, so that no sentence length tells a language;
- Spanish is scarce (28 talks of 27 to 1,098 words), so each English talk is cut to the size of a Spanish one, and there
  are as many of them unless `english_talks` says otherwise;
- one vocabulary: the words that occur in most clients, which with such clients holds about as many of each language;
- a talk is never cut into two clients, which could be put together for their topic.

Twenty thousand words are few: what the figure shows is the assignment of clients, not the accuracy reached.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from bespoke.data.population import Population
from bespoke.data.sources.formats.words import Vocabulary, client_counts, ranked, shifted
from bespoke.data.sources.registry import at_least, damaged, find_file
from bespoke.errors import UserError
from bespoke.randomness import text_key

SPANISH = ("valid.txt", "test.txt")
ENGLISH = "ted/ted_talks.parquet"
# Small, for a few thousand words; Motley's sizes are for four thousand talks.
MODEL = {"name": "transformer", "embedding": 32, "width": 64, "hidden": 128, "heads": 4}
_LEFT_OUT = re.compile(r"\([^)]*\)|\[[^\]]*\]|^(?:translator|reviewer):.*$", re.IGNORECASE | re.MULTILINE)
_APOSTROPHES = str.maketrans("", "", "'’")
_WORD = re.compile(r"[^\W\d_]+")


def load(
    english_talks: int = 0, length: int = 10, least: int = 10, vocabulary: int = 1000, seed: int = 0
) -> Population:
    """Spanish talks of at least `least` pieces and `english_talks` English ones (0: as many); groups are languages."""
    at_least("ted-two-languages", 1, length=length, least=least, vocabulary=vocabulary)
    at_least("ted-two-languages", 0, english_talks=english_talks)
    spanish = {talk: pieces for talk, text in _spanish().items() if len(pieces := _pieces(text, length)) >= least}
    if not spanish:
        raise UserError(
            f"the source 'ted-two-languages': no Spanish talk has {least} pieces of {length} words; lower the options "
            "'least' and 'length'"
        )
    sizes = sorted((len(pieces) for pieces in spanish.values()), reverse=True)
    clients = {f"es:{talk}": pieces for talk, pieces in spanish.items()}
    english = _english(english_talks or len(spanish), sizes[0], length, seed)
    for place, (talk, pieces) in enumerate(english.items()):
        clients[f"en:{talk}"] = pieces[: sizes[place % len(sizes)]]
    counts = client_counts(clients.values())
    words = Vocabulary(tuple(ranked(counts)[:vocabulary]))
    names = sorted(clients)
    rows = [len(clients[name]) for name in names]
    tokens = words.encode([piece for name in names for piece in clients[name]], length)
    known = float((tokens[:, 1:] != words.oov).mean())
    about = words.about(
        "ted-two-languages", length, model=MODEL,
        notes=[
            f"{len(spanish)} Spanish talks and {len(english)} English ones, cut to the Spanish talks' sizes.",
            f"{len(words.words)} words in most talks, of either language, make up {known:.0%} of the text; they were "
            "counted over all talks.",
        ],
    )  # fmt: skip
    group = np.repeat([{"en": "English", "es": "Spanish"}[name[:2]] for name in names], rows)
    return Population.build(shifted(tokens), np.repeat(names, rows), group=group, about=about)


def _pieces(text: str, length: int) -> list[list[str]]:
    """Whole pieces of `length` words; the rest at the end is left out."""
    words = _WORD.findall(_LEFT_OUT.sub(" ", text).translate(_APOSTROPHES).lower())
    return [words[begin : begin + length] for begin in range(0, len(words) - length + 1, length)]


def _spanish() -> dict[str, str]:
    """The text of each Spanish talk; lines are talk_segment, start, end, text."""
    talks: dict[str, list[str]] = {}
    for name in SPANISH:
        path = find_file(f"spanish_ted/{name}", "ted-two-languages")
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
            parts = line.split("\t")
            talk = parts[0].rpartition("_")[0]
            if len(parts) != 4 or not talk:
                raise damaged(path, f"{line[:60]!r} in line {number}", "talk_segment, start, end, text between tabs")
            talks.setdefault(talk, []).append(parts[3])
    return {talk: "\n".join(lines) for talk, lines in talks.items()}


def _english(talks: int, most: int, length: int, seed: int) -> dict[str, list[list[str]]]:
    """Talks of TED's main collection with enough text for the longest Spanish one, in an order drawn with `seed`."""
    import pyarrow
    import pyarrow.parquet

    path: Path = find_file(ENGLISH, "ted-two-languages")
    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise damaged(path, f"no readable Parquet file ({error})", "a Parquet file") from None
    columns = ("collection", "title", "text")
    if not set(columns) <= set(table.column_names):
        raise damaged(path, f"the columns {table.column_names}", ", ".join(columns))
    collection, title, text = (table[column].to_pylist() for column in columns)
    own = {title: text for kind, title, text in zip(collection, title, text) if kind == "ted"}
    chosen: dict[str, list[list[str]]] = {}
    for name in sorted(own, key=lambda name: text_key(f"{seed}/{name}")):
        pieces = _pieces(own[name], length)
        if len(pieces) >= most:
            chosen[name] = pieces
        if len(chosen) == talks:
            return chosen
    raise UserError(
        f"option 'english_talks' of the source 'ted-two-languages' is {talks}, and {path} has {len(chosen)} talks of "
        f"{most * length} words or more"
    )
