"""WikiText-103 (Merity et al. 2017) by page: predict the next word; groups are topics, as the titles tell them.

As in Liu et al., Group Personalized Federated Learning (ICASSP 2023): a page is a client, its sentences are examples,
and pages whose title names one of five topics make a group. The paper says neither how a title names a topic nor how
text becomes sentences: here a topic's words stand in the title as whole words ("Battle of Nauplia", "Tea (film)"), and
sentences end at a full stop, question or exclamation mark that stands by itself, as WikiText's tokens do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from bespoke.data import texts
from bespoke.data.population import NO_GROUP, Population
from bespoke.data.sources import at_least, damaged, describe, find_folder
from bespoke.errors import UserError

TOPICS = ("battle", "film", "video game", "music", "disease")  # Table 2 of the paper
OTHER = NO_GROUP
FILES = ("wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens")
UNKNOWN = "<unk>"
_TITLE = re.compile(r"= ([^=].*?) =")  # deeper headings have more of them
_END = {".", "?", "!"}


def load(length: int = 20, vocabulary: int = 33000, least: int = 4, topics_only: bool = False) -> Population:
    """Pages of at least `least` sentences, the first `length` words of each; topics_only: those of the five topics."""
    at_least("wikitext103", 1, length=length, vocabulary=vocabulary, least=least)
    folder = find_folder("wikitext103", "wikitext103")
    paths = [folder / name for name in FILES if (folder / name).is_file()]
    if not paths:
        raise damaged(folder, "no such file", " or ".join(FILES))
    found: dict[str, list[list[str]]] = {}
    for path in paths:
        for title, sentences in pages(path):
            name, number = title, 1
            while name in found:  # two pages of one title are two clients
                name, number = f"{title} ({number + 1})", number + 1
            found[name] = sentences
    kept = {n: s for n, s in found.items() if len(s) >= least and not (topics_only and topic_of(n) == OTHER)}
    if not kept:
        raise UserError(f"the source 'wikitext103': no page has {least} sentences; lower the option 'least'")
    names = sorted(kept)
    rows = [len(kept[name]) for name in names]
    notes = [
        f"Read {', '.join(path.name for path in paths)}: {len(kept):,} pages of at least {least} sentences.",
        "A page's topic is the first of "
        + ", ".join(TOPICS)
        + " whose words stand in its title; most pages have none.",
    ]
    return texts.population(
        [sentence for name in names for sentence in kept[name]], np.repeat(names, rows),
        group=np.repeat([topic_of(name) for name in names], rows), length=length, vocabulary=vocabulary,
        unknown=[UNKNOWN], about=describe("wikitext103", input="tokens", notes=notes),
    )  # fmt: skip


def pages(path: Path) -> Iterator[tuple[str, list[list[str]]]]:
    """Each page's title and sentences; headings are not text."""
    title, sentences = "", list[list[str]]()
    with path.open(encoding="utf-8") as lines:
        try:
            for line in map(str.strip, lines):
                heading = line.startswith("= ") and line.endswith(" =")
                named = _TITLE.fullmatch(line)
                if named and not line.startswith("= ="):
                    if title:
                        yield title, sentences
                    title, sentences = named[1], []
                elif line and not heading:
                    if not title:
                        raise damaged(path, f"text before the first title: {line[:40]!r}", "a line ' = Title = '")
                    sentences += sentences_of(line.split())
        except UnicodeDecodeError as error:
            raise damaged(path, error, "UTF-8 text") from None
    if not title:
        raise damaged(path, "no page", "a line ' = Title = ' before each")
    yield title, sentences


def sentences_of(words: Sequence[str]) -> list[list[str]]:
    """A paragraph's sentences, each with its end mark."""
    found, begin = [], 0
    for place, word in enumerate(words, start=1):
        if word in _END or place == len(words):
            found.append(list(words[begin:place]))
            begin = place
    return found


def topic_of(title: str) -> str:
    """The first topic whose words stand in the title."""
    plain = f" {' '.join(re.findall(r'[a-z]+', title.lower()))} "
    return next((topic for topic in TOPICS if f" {topic} " in plain), OTHER)
