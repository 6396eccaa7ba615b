"""WikiText-103 (Merity et al. 2017) by page: next-word prediction; groups are topics taken from the titles.

As in Liu et al., Group Personalized Federated Learning (ICASSP 2023): a page is a client, its sentences are examples,
and pages whose title names one of five topics make a group. The paper says neither how a title names a topic nor how
text becomes sentences: here a topic's words stand in the title as whole words ("Battle of Nauplia", "Tea (film)"), and
sentences end at a full stop, question or exclamation mark that stands by itself, as WikiText's tokens do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from bespoke.data.population import NO_GROUP, Population
from bespoke.data.sources.registry import Statistics, at_least, damaged, describe, find_folder
from bespoke.data.splits import Part
from bespoke.data.texts import vocabulary as texts
from bespoke.errors import UserError

TOPICS = ("battle", "film", "video game", "music", "disease")  # Table 2 of the paper
OTHER = NO_GROUP
FILES = ("wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens")
UNKNOWN = "<unk>"
TRAINED = 0.75  # of a page's sentences, in the paper
COUNTED = ("pages", "train sentences", "train words", "test sentences", "test words")
PAPER = {
    "all": ("28,726", "1263K", "65606K", "421K", "21095K"),
    "battle": ("409", "22,641", "1164K", "7,557", "377K"),
    "film": ("336", "21,408", "1125K", "7,137", "367K"),
    "video game": ("137", "5,449", "282K", "1,811", "90K"),
    "music": ("53", "2,427", "124K", "812", "40K"),
    "disease": ("10", "845", "41K", "281", "14K"),
}
_TITLE = re.compile(r"= ([^=].*?) =")  # deeper headings have more of them
_END = {".", "?", "!"}


def load(
    length: int = 20,
    vocabulary: int = 33000,
    least: int = 4,
    most: int = 0,
    topics_only: bool = False,
    groups: Literal["titles", "topics"] = "titles",
    clusters: int = 5,
) -> Population:
    """Pages of at least `least` sentences, the first `length` words of each; topics_only: those of the five topics.

    most: a page keeps its first so many sentences; 0: all. groups: the topic that a title names, or one of `clusters`
    topics found in training text.
    """
    at_least("wikitext103", 1, length=length, vocabulary=vocabulary, least=least)
    at_least("wikitext103", 0, most=most)
    at_least("wikitext103", 2, clusters=clusters)
    paths = _paths()
    found = _pages(paths)
    chosen = {n: s for n, s in found.items() if len(s) >= least and not (topics_only and topic_of(n) == OTHER)}
    kept = {name: sentences[: most or None] for name, sentences in chosen.items()}
    if not kept:
        raise UserError(f"the source 'wikitext103': no page has {least} sentences; lower the option 'least'")
    names = sorted(kept)
    rows = [len(kept[name]) for name in names]
    notes = [f"Read {', '.join(path.name for path in paths)}: {len(kept):,} pages of at least {least} sentences."]
    about = describe("wikitext103", input="tokens", notes=notes, text={"tokenizer": "words", "lower": False})
    group = None
    if groups == "topics":
        about["topics"] = {"clusters": clusters, "seed": 0}
    else:
        group = np.repeat([topic_of(name) for name in names], rows)
        listed = ", ".join(TOPICS)
        notes.append(f"A page's topic is the first of {listed} whose words stand in its title; most pages have none.")
    return texts.population(
        [sentence for name in names for sentence in kept[name]], np.repeat(names, rows),
        group=group, length=length, vocabulary=vocabulary, unknown=[UNKNOWN], about=about,
    )  # fmt: skip


def statistics() -> list[Statistics]:
    """Table 2 of the paper, by the files at hand: pages, sentences and words, of which 75 % are to train on."""
    found = _pages(_paths())
    names = [name for name, sentences in found.items() for _ in sentences]
    words = [len(sentence) for sentences in found.values() for sentence in sentences]
    titled = Population.build({"words": words}, names, group=[topic_of(name) for name in names])
    of = np.array([titled.group_of(client) for client in range(len(titled))])
    rows: list[list[Any]] = []
    for topic in PAPER:
        clients = np.flatnonzero((of == topic) | (topic == "all"))
        line: list[Any] = [topic, len(clients)]
        for part in (0, 1):
            places, _ = Part(part, (TRAINED, 1 - TRAINED)).rows(titled, clients)
            line += [len(places), int(titled.columns["words"][places].sum())]
        rows.append(line)
    printed = [[topic, *numbers] for topic, numbers in PAPER.items()]
    return [
        Statistics("Table 2 of Liu et al. (2023), by the files at hand", ("topic", *COUNTED), rows),
        Statistics("Table 2 as the paper has it", ("topic", *COUNTED), printed),
    ]


def _paths() -> list[Path]:
    folder = find_folder("wikitext103", "wikitext103")
    paths = [folder / name for name in FILES if (folder / name).is_file()]
    if not paths:
        raise damaged(folder, "no such file", " or ".join(FILES))
    return paths


def _pages(paths: Sequence[Path]) -> dict[str, list[list[str]]]:
    """The sentences of each page; two pages of one title are two clients."""
    found: dict[str, list[list[str]]] = {}
    for path in paths:
        for title, sentences in pages(path):
            name, number = title, 1
            while name in found:
                name, number = f"{title} ({number + 1})", number + 1
            found[name] = sentences
    return found


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
