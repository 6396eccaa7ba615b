"""TV scripts by character, the smaller dataset of FedPC (Silva et al., 2022): Friends and Game of Thrones.

A character is a client, a line an utterance. Clients are the six main characters of Friends and the thirteen of Game of
Thrones with most lines. The context is the show, so that every user has one context; or the season of the show, so that
users share contexts and have several.

With the cross-device protocol some characters are withheld. The paper chose them by hand and does not name them. Here
each show's characters are ranked by lines: of every six, the second validates and the fifth is tested. So each part
has characters of both shows: 13, 3 and 3 in all, near the 70/15/15 that the paper has of Reddit's users.
"""

from __future__ import annotations

import csv
import gzip
import re
import string
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from bespoke.data.population import Population
from bespoke.data.sources.formats.roles import TEST, TRAIN, VALIDATION, role_facts
from bespoke.data.sources.formats.spoken import SHORTEST, Utterance, kept_rows, long_enough, spoken
from bespoke.data.sources.registry import at_least, damaged, find_file

MAIN = ("Rachel Green", "Ross Geller", "Chandler Bing", "Monica Geller", "Joey Tribbiani", "Phoebe Buffay")
MOST_LINES = 13  # characters of Game of Thrones
WITHHELD = {1: VALIDATION, 4: TEST}  # by rank modulo six, from zero
_SEASON = re.compile(r"(?:Season )?([1-9][0-9]?)")


@dataclass(frozen=True)
class Show:
    """A show's file and the names of its columns."""

    name: str
    file: str
    speaker: str
    text: str
    season: str
    main: tuple[str, ...] = ()  # the characters that are clients; none named: those with most lines


SHOWS = (
    Show("Friends", "tv/friends.csv.gz", "speaker", "text", "season", MAIN),
    Show("Game of Thrones", "tv/game_of_thrones.csv.gz", "Name", "Sentence", "Season"),
)


@dataclass(frozen=True)
class SpokenLine:
    """A character's line."""

    speaker: str
    text: str
    season: int  # 0 if contexts are shows


def load(
    contexts: Literal["show", "season"] = "show",
    most: int = 0,
    length: int = 32,
    tokenizer: str = "words",
    pretrained: str = "",
    end: bool = True,
) -> Population:
    """The lines of nineteen characters; contexts are shows, or seasons of shows.

    most: a character keeps so many of its lines, drawn at random; 0: all. length: tokens that are kept of a line.
    tokenizer: words, characters, the folder of a Hugging Face tokenizer, or "model": that of the model `pretrained`.
    end: the end of a line is predicted too.
    """
    at_least("tv", 0, most=most)
    at_least("tv", SHORTEST, length=length)
    said, shows, notes = list[Utterance](), list[str](), list[str]()
    roles, places = dict[str, int](), list[str]()
    for show in SHOWS:
        path = find_file(show.file, "tv")
        lines = list(_lines(show, path, contexts == "season"))
        ranked = _characters(show, path, lines)
        roles |= {name: WITHHELD.get(rank % 6, TRAIN) for rank, name in enumerate(ranked)}
        of_ranked = [line for line in lines if line.speaker in ranked]
        usable = [line for line in of_ranked if long_enough(line.text)]
        notes.append(
            f"{show.name}: {len(ranked)} characters with {len(of_ranked):,} of {len(lines):,} lines; "
            f"{len(of_ranked) - len(usable):,} have fewer than {SHORTEST} words and were left out."
        )
        named = {season: _context(show, season) for season in sorted({line.season for line in usable})}
        places += named.values()
        said += [Utterance(line.speaker, named[line.season], line.text) for line in usable]
        shows += [show.name] * len(usable)
    rows = kept_rows([one.user for one in said], most)
    users = [said[row].user for row in rows]
    drawn = sorted(set(users))
    for role, word in ((VALIDATION, "validate"), (TEST, "are tested")):
        names = ", ".join(name for name in drawn if roles[name] == role)
        notes.append(f"With the cross-device protocol {names or 'no characters'} {word}.")
    return spoken(
        "tv", [said[row] for row in rows], contexts=places, context=contexts, length=length, tokenizer=tokenizer,
        pretrained=pretrained, end=end, group=[shows[row] for row in rows], notes=notes,
        columns={"role": np.array([roles[user] for user in users], dtype=np.uint8)},
        **role_facts(np.array([roles[name] for name in drawn], dtype=np.uint8)),
    )  # fmt: skip


def _context(show: Show, season: int) -> str:
    return f"{show.name}, season {season}" if season else show.name


def _characters(show: Show, path: Path, lines: Sequence[SpokenLine]) -> list[str]:
    """The show's clients by falling number of lines, alphabetically among equals."""
    counts = Counter(line.speaker for line in lines if line.speaker)
    known = [name for name in counts if name in show.main] if show.main else list(counts)
    ranked = sorted(known, key=lambda name: (-counts[name], name))[:MOST_LINES]
    if not ranked:
        raise damaged(path, "no line", f"lines of {', '.join(show.main) or 'characters'}")
    return ranked


def _lines(show: Show, path: Path, seasons: bool) -> Iterator[SpokenLine]:
    """The lines of a show's file; names are capitalized, for one of the files has them in lower case."""
    wanted = [show.speaker, show.text, *([show.season] if seasons else [])]
    number = 1
    with gzip.open(path, "rt", encoding="utf-8-sig", newline="") as file:
        try:
            reader = csv.reader(file)
            header = next(reader, [])
            if absent := [name for name in wanted if name not in header]:
                raise damaged(path, f"the columns {', '.join(header)} in line 1", f"a column {absent[0]}")
            places = [header.index(name) for name in wanted]
            for row in reader:
                if len(row) != len(header):
                    raise damaged(path, f"{len(row)} cells in line {number + 1}", f"{len(header)} as in line 1")
                speaker, text, *season = (row[place] for place in places)
                numbers = _SEASON.fullmatch(season[0]) if season else None
                if season and not numbers:
                    raise damaged(path, f"the season {season[0]!r} in line {number + 1}", "'1' or 'Season 1'")
                yield SpokenLine(string.capwords(speaker), text, int(numbers[1]) if numbers else 0)
                number = reader.line_num
        except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
            raise damaged(path, f"{error} after line {number}", "a table with commas, UTF-8 text, as .gz") from None
