"""TV scripts by character: counted by hand on small files, and on the real ones."""

from __future__ import annotations

import csv
import gzip
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from bespoke.data.population import Population
from bespoke.data.sources.formats.spoken import kept_rows, long_enough
from bespoke.data.sources.registry import load_source
from bespoke.data.sources.tv import MAIN
from bespoke.data.splits import cross_silo
from bespoke.data.tables.checks import check
from bespoke.data.texts import vocabulary as texts
from bespoke.errors import UserError
from bespoke.experiment.config import ExperimentConfig
from bespoke.experiment.prepare import make_split
from command import bespoke, refused

HEADS = {"friends": ["text", "speaker", "season"], "game_of_thrones": ["", "Season", "Name", "Sentence"]}


def write(folder: Path, name: str, rows: list[list[str]], head: list[str] | None = None) -> Path:
    (folder / "tv").mkdir(exist_ok=True)
    path = folder / "tv" / f"{name}.csv.gz"
    with gzip.open(path, "wt", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([head or HEADS[name], *rows])
    return path


def scripts(folder: Path) -> None:
    """Main character i of Friends has 8 - i long lines in two seasons and a short one; names a, b, ... 20 - i lines."""
    friends = [["(They all stare.)", "Scene Directions", "1"], ["Hello to everybody!", "#ALL#", "1"], ["No.", "", "1"]]
    for place, name in enumerate(MAIN):
        friends += [[f"Line number {n} of {name}", name, str(1 + n % 2)] for n in range(8 - place)]
        friends.append(["Oh well", name, "2"])  # two words
    thrones = [
        [str(n), f"Season {1 + n % 3}", f"{letter} stark", f"We must go, {n}."]
        for place, letter in enumerate("abcdefghijklmno")
        for n in range(20 - place)
    ]
    write(folder, "friends", friends)
    write(folder, "game_of_thrones", thrones)


def contexts_of(population: Population, user: str) -> Counter[str]:
    client = population.index(user)
    codes = population.columns["context"][population.offsets[client] : population.offsets[client + 1]].tolist()
    return Counter(population.about["contexts"][code] for code in codes)


def warnings_of(raw: Population) -> list[str]:
    rows = np.arange(raw.rows)
    return [found.text for found in check(texts.encode(raw, texts.learned(raw, rows), rows), cross_silo(raw))]


def test_characters_lines_and_shows(folder: Path) -> None:
    scripts(folder)
    population = load_source("tv")
    starks = [f"{letter} Stark" for letter in "ABCDEFGHIJKLM"]  # N and O have fewer lines
    assert list(population.ids) == sorted([*MAIN, *starks])
    sizes = dict(zip(population.ids, population.sizes().tolist()))
    assert sizes == {name: 8 - i for i, name in enumerate(MAIN)} | {name: 20 - i for i, name in enumerate(starks)}
    assert population.about["contexts"] == ["Friends", "Game of Thrones"]
    assert contexts_of(population, "Ross Geller") == {"Friends": 7}
    assert contexts_of(population, "C Stark") == {"Game of Thrones": 18}
    assert population.group_of(population.index("C Stark")) == "Game of Thrones"
    # of Friends 8 + 7 + 6 + 5 + 4 + 3 long and 6 short lines, and 3 of nobody; of 15 names 20 + 19 + ... + 6 lines
    assert population.about["notes"][:2] == [
        "Friends: 6 characters with 39 of 42 lines; 6 have fewer than 3 words and were left out.",
        "Game of Thrones: 13 characters with 182 of 195 lines; 0 have fewer than 3 words and were left out.",
    ]
    assert warnings_of(population) == ["Every client has one show: their effects cannot be separated within a client."]


def test_seasons_cross_users(folder: Path) -> None:
    scripts(folder)
    population = load_source("tv", contexts="season")
    assert population.about["contexts"] == [
        "Friends, season 1", "Friends, season 2",
        "Game of Thrones, season 1", "Game of Thrones, season 2", "Game of Thrones, season 3",
    ]  # fmt: skip
    assert contexts_of(population, "Ross Geller") == {"Friends, season 1": 4, "Friends, season 2": 3}
    assert sorted(contexts_of(population, "A Stark").values()) == [6, 7, 7]
    assert not warnings_of(population)


def test_known_and_withheld_characters_of_one_population(folder: Path) -> None:
    scripts(folder)
    population = load_source("tv")
    known = make_split(population, ExperimentConfig(split={"fractions": (0.6, 0.2, 0.2)}, stage=[{}]))
    assert len(known.train.clients) == len(known.test.query.clients) == 19
    twenty = np.array([population.index("A Stark")])
    parts = (known.train, known.test.validation, known.test.query)
    assert [len(part.of(twenty)[0]) for part in parts] == [12, 4, 4]
    withheld = make_split(population, ExperimentConfig(split={"protocol": "cross-device"}, stage=[{}]))

    def names(clients: np.ndarray) -> list[str]:
        return [population.ids[client] for client in clients]

    # by lines the second and the fifth of every six: of Friends Ross and Joey, of the starks B and H, E and K
    assert names(withheld.selection.validation.clients) == ["B Stark", "H Stark", "Ross Geller"]
    assert names(withheld.test.query.clients) == ["E Stark", "Joey Tribbiani", "K Stark"]
    assert len(withheld.train.clients) == 13
    trained = {population.about["contexts"][c] for c in population.columns["context"][withheld.train.of(
        withheld.train.clients)[0]].tolist()}  # fmt: skip
    assert trained == {"Friends", "Game of Thrones"}
    assert population.about["roles"] == {"train": 13, "validation": 3, "test": 3}


def test_three_words_or_more() -> None:
    """Signs are words by themselves, as they are tokens of language models."""
    assert [long_enough(text) for text in ("Oh well", "Oh well!", "I'm  here ", "a b c d", " ", "What?!")] == [
        False, True, False, True, False, True,
    ]  # fmt: skip


def test_fewer_lines_are_drawn_at_random_and_nested(folder: Path) -> None:
    users = ["b"] * 50 + ["a"] * 3 + ["b"] * 50
    few, more = (set(kept_rows(users, most).tolist()) for most in (10, 40))
    assert few <= more
    assert (len(few), len(more)) == (3 + 10, 3 + 40)
    assert {50, 51, 52} <= few
    assert min(few) < 45 < 58 < max(few)  # not the first ones: seasons come one after the other
    assert kept_rows(users, 0).tolist() == list(range(103))
    scripts(folder)
    population = load_source("tv", most=5)
    assert population.rows == 5 + 5 + 5 + 5 + 4 + 3 + 13 * 5


def test_tokens_and_length(folder: Path) -> None:
    """The first tokens of a line and the characters they take; no end after a line that was cut."""
    write(folder, "friends", [["I'm  here, OK?", MAIN[0], "1"]] * 3)
    write(folder, "game_of_thrones", [["1", "Season 1", "a b", "We must go"]] * 3)
    for length, pieces, characters, whole in ((3, ["i'm", "here", ","], 10, False), (9, None, 14, True)):
        population = load_source("tv", length=length)
        row = population.offsets[population.index(MAIN[0])]
        found = [population.about["pieces"][i - 1] for i in population.columns["pieces"][row].tolist() if i]
        assert found == (pieces or ["i'm", "here", ",", "ok", "?"])
        assert int(population.columns["characters"][row]) == characters  # of "i'm here, ok?", 13 and the end
        assert bool(population.columns["whole"][row]) == whole
    assert not load_source("tv", end=False).columns["whole"].any()


def test_another_tokenizer_reads_the_same_lines(folder: Path, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    scripts(folder)
    known = {"[UNK]": 0, "We": 1, "must": 2, "Line": 3}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(known, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    population = load_source("tv", tokenizer=str(tmp_path))
    assert population.rows == load_source("tv").rows
    assert set(population.about["pieces"]) == set(known)
    assert population.about["public"] == list(known)
    assert population.about["text"]["tokenizer"] == str(tmp_path)


@pytest.mark.parametrize(
    ("rows", "head", "options", "said"),
    [
        ([["Hello you all", "Nobody", "1"]], None, {}, "found no line, expected lines of Rachel Green"),
        ([["Hello you all", MAIN[0], "1"], ["x", "y"]], None, {}, "found 2 cells in line 3, expected 3 as in line 1"),
        ([["Hello you all", MAIN[0], "one"]], None, {"contexts": "season"}, "the season 'one' in line 2"),
        ([["Hello you all", MAIN[0]]], ["text", "who"], {}, "text, who in line 1, expected a column speaker"),
        ([["Hello you all", MAIN[0]]], ["text", "speaker"], {"contexts": "season"}, "expected a column season"),
    ],
)
def test_bad_tables(folder: Path, rows: list[list[str]], head: list[str], options: dict[str, str], said: str) -> None:
    path = write(folder, "friends", rows, head)
    with pytest.raises(UserError) as raised:
        load_source("tv", **options)
    assert said in str(raised.value)
    assert str(path) in str(raised.value)


def test_damaged_files(folder: Path, tmp_path: Path) -> None:
    scripts(folder)
    path = folder / "tv" / "friends.csv.gz"
    whole = path.read_bytes()
    for found, said in ((whole[:-40], "after line"), (b"text,speaker\n", "gzip")):
        path.write_bytes(found)
        with pytest.raises(UserError, match=said):
            load_source("tv")
    path.write_bytes(gzip.compress(b"text,speaker,season\n\xff\xfe bad bytes,x,1\n"))
    refused(bespoke("compare", "tv", "--out", tmp_path / "run"), "friends.csv.gz is damaged", "after line 1")


def test_the_real_scripts(real_data: Path) -> None:
    if not (real_data / "tv").is_dir():
        pytest.skip("the TV scripts are not beside the repo (../shared/data/tv)")
    population = load_source("tv", contexts="season", most=200)
    assert (len(population), population.rows) == (19, 19 * 200)
    assert population.about["notes"][:2] == [
        "Friends: 6 characters with 51,036 of 67,359 lines; 5,383 have fewer than 3 words and were left out.",
        "Game of Thrones: 13 characters with 10,081 of 23,911 lines; 521 have fewer than 3 words and were left out.",
    ]
    assert set(MAIN) < set(population.ids)
    assert len(population.about["contexts"]) == 10 + 8
    assert min(len(contexts_of(population, user)) for user in population.ids) == 7  # some come late or die early
