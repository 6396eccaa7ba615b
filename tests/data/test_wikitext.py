from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from bespoke.cli.descriptions import describe_sources, print_source
from bespoke.data.population import Population
from bespoke.data.sources.registry import load_source, source_statistics
from bespoke.data.sources.wikitext import OTHER, sentences_of, topic_of
from bespoke.data.texts import vocabulary as texts
from bespoke.errors import UserError

PAGES = """
 = Battle of X =

 A b c . A a !
 = = Before = =

 A = b , said she . Not ended
 = Tea ( film ) =

 A tea . <unk> tea ? b .
"""


def write(folder: Path, text: str, name: str = "wiki.valid.tokens") -> None:
    (folder / "wikitext103").mkdir(exist_ok=True)
    (folder / "wikitext103" / name).write_text(text, encoding="utf-8")


def everything_encoded(raw: Population) -> Population:
    """As if all rows were training rows."""
    rows = np.arange(raw.rows)
    return texts.encode(raw, texts.learned(raw, rows), rows)


def test_pages_of_a_small_file(folder: Path) -> None:
    write(folder, PAGES)
    population = load_source("wikitext103", length=3, vocabulary=5, least=3)
    assert list(population.ids) == ["Battle of X", "Tea ( film )"]
    assert [population.group_of(c) for c in (0, 1)] == ["battle", "film"]
    assert population.sizes().tolist() == [4, 3]
    population = everything_encoded(population)
    words = population.about["words"]
    # in the first three words A four times, b three, . and tea twice; of those that occur once, the first by alphabet
    assert words == ["A", "b", ".", "tea", "!"]
    names = ["<pad>", *words, "<oov>", "<bos>", "<eos>"]
    shown = [" ".join(names[i] for i in row) for row in population.columns["y"].tolist()]
    assert shown == [
        "A b <oov> <pad>", "A <oov> ! <eos>", "A <oov> b <pad>", "<oov> <oov> <eos> <pad>", "A tea . <eos>",
        "<oov> tea <oov> <eos>", "b . <eos> <pad>",
    ]  # fmt: skip
    assert all(names[row[0]] == "<bos>" for row in population.columns["x"].tolist())
    assert population.about["unscored"] == [6, 8]


def test_pages_of_several_files_and_of_one_title(folder: Path) -> None:
    write(folder, " = Tea = \n a . b . \n")
    write(folder, " = Tea = \n c . \n = Music of Y = \n d . \n", "wiki.test.tokens")
    population = load_source("wikitext103", least=1)
    assert list(population.ids) == ["Music of Y", "Tea", "Tea (2)"]
    assert list(load_source("wikitext103", least=2).ids) == ["Tea"]
    assert list(load_source("wikitext103", least=1, topics_only=True).ids) == ["Music of Y"]


def test_statistics_of_a_small_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = "".join(f" = Battle of {name} = \n a . b c . d e f . g h i . \n" for name in "XY")
    write(folder, f"{lines} = Tea = \n a b . \n")
    here, paper = source_statistics("wikitext103")
    counted = {row[0]: list(row[1:]) for row in here.rows}
    # three of four sentences train; a page of one sentence trains on it; 2 + 3 + 4 + 4 words in all
    assert counted["battle"][:2] == [2, 6]
    assert counted["battle"][3] == 2
    assert counted["battle"][2] + counted["battle"][4] == 26
    assert (counted["all"][0], counted["all"][1] + counted["all"][3]) == (3, 9)
    assert counted["all"][2] + counted["all"][4] == 29
    assert counted["film"] == [0, 0, 0, 0, 0]
    assert list(paper.rows[0]) == ["all", "28,726", "1263K", "65606K", "421K", "21095K"]
    print_source(describe_sources("wikitext103")[0])
    shown = capsys.readouterr().out
    assert re.search(r"battle +2 +6 ", shown)
    assert re.search(r"battle +409 +22,641 +1164K +7,557 +377K", shown)


def test_a_source_whose_files_are_not_here_is_shown_without_counts(folder: Path) -> None:
    assert describe_sources("wikitext103")[0]["statistics"] == []
    write(folder, "no title\n")
    with pytest.raises(UserError, match="text before the first title"):
        describe_sources("wikitext103")


def test_pages_may_have_topics_found_in_their_text(folder: Path) -> None:
    write(folder, PAGES)
    population = load_source("wikitext103", length=3, least=3, most=1, groups="topics", clusters=2)
    assert (population.group, population.about["topics"]) == (None, {"clusters": 2, "seed": 0})
    assert population.sizes().tolist() == [1, 1]


def test_topics_are_whole_words_of_titles() -> None:
    titles = {
        "Battle of Nauplia ( 1822 )": "battle", "Battlefield 2": OTHER, "The Film About a Battle": "battle",
        "History of the video game industry": "video game", "Video": OTHER, "Filmmaking": OTHER,
        "Kawasaki disease": "disease",
    }  # fmt: skip
    assert {title: topic_of(title) for title in titles} == titles


def test_sentences() -> None:
    assert sentences_of(["a", "b", ".", "c", "?", "d"]) == [["a", "b", "."], ["c", "?"], ["d"]]
    assert sentences_of(["a", "."]) == [["a", "."]]


@pytest.mark.parametrize(
    ("text", "words"),
    [(" text \n = Tea = \n", "text before the first title: 'text'"), ("\n", "no page")],
)
def test_files_of_another_layout(folder: Path, text: str, words: str) -> None:
    write(folder, text)
    with pytest.raises(UserError, match=words):
        load_source("wikitext103")


def test_missing_files(folder: Path) -> None:
    with pytest.raises(UserError, match=r"needs the folder wikitext103.*wikitext-103-v1\.zip"):
        load_source("wikitext103")
    (folder / "wikitext103").mkdir()
    with pytest.raises(UserError, match=r"wiki\.train\.tokens or wiki\.valid\.tokens"):
        load_source("wikitext103")
    write(folder, " = Tea = \n a . \n")
    with pytest.raises(UserError, match="no page has 4 sentences"):
        load_source("wikitext103")


def test_the_real_pages(real_data: Path) -> None:
    population = load_source("wikitext103")
    assert 100 < len(population) < 130
    assert 15_000 < population.rows < 25_000
    assert "Homarus gammarus" in list(population.ids)
    assert set(population.groups) >= {"battle", OTHER}
