"""stackoverflow, tedmulti and ted-two-languages: small files of the published layouts, made here, and other layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from bespoke.data.sources import ted_two_languages, tedmulti
from bespoke.data.sources.formats.words import Vocabulary
from bespoke.data.sources.registry import load_source
from bespoke.errors import UserError
from bespoke.models import build_task
from bespoke.models.networks import LSTM
from bespoke.models.transformer import Transformer


def sentences(population: Any, client: int, column: str = "y") -> list[str]:
    words = ["<pad>", *population.about["words"], "<oov>", "<bos>", "<eos>"]
    rows = population.columns[column][population.offsets[client] : population.offsets[client + 1]]
    return [" ".join(words[token] for token in row) for row in rows.tolist()]


def test_encoding() -> None:
    """Two words: ids 1 and 2; 3 unknown, 4 begin, 5 end; a sentence as long as a row has no end."""
    rows = Vocabulary(("a", "b")).encode([["a"], ["b", "c", "a"], ["b", "b", "b", "a"], []], 3)
    assert rows.tolist() == [[4, 1, 5, 0], [4, 2, 3, 1], [4, 2, 2, 2], [4, 5, 0, 0]]
    assert rows.dtype == np.int16
    assert Vocabulary(tuple(map(str, range(40_000)))).encode([["39999"]], 2).tolist() == [[40002, 40000, 40003]]


# StackOverflow

DATES = ["2015-01-02 10:00:00.5 UTC", "2014-01-02 10:00:00 UTC", "2016-01-02 10:00:00.477 UTC"]
TRAIN = {"21": ["how to sort a list", "how to parse", "a list"], "3": ["a list of how"]}
HELD_OUT = {"10": ["how to fly", "a list"], "20": ["sort", "a"], "30": ["to"]}


def write_stackoverflow(
    folder: Path,
    train: Any = TRAIN,
    held_out: Any = HELD_OUT,
    fields: Any = ("tokens", "creation_date"),
    dates: Any = DATES,
) -> None:
    h5py = pytest.importorskip("h5py")
    (folder / "stackoverflow").mkdir(exist_ok=True)
    for part, users in (("train", train), ("held_out", held_out)):
        with h5py.File(folder / "stackoverflow" / f"stackoverflow_{part}.h5", "w") as file:
            file.create_group("examples")
            for user, said in users.items():
                columns = {"tokens": said, "creation_date": dates[: len(said)]}
                for field in fields:
                    texts = isinstance(columns[field][0], str)
                    file[f"examples/{user}/{field}"] = np.array(columns[field], dtype=object if texts else None)


def test_stackoverflow(folder: Path) -> None:
    write_stackoverflow(folder)
    population = load_source("stackoverflow", vocabulary=4, length=4, validation_clients=1)
    assert list(population.ids) == ["10", "20", "21", "3", "30"]
    # how, list and a occur three times, to twice; held-out users do not count
    assert population.about["words"] == ["a", "how", "list", "to"]
    assert sentences(population, 2) == [  # by date
        "how to <oov> <eos>", "how to <oov> a", "a list <eos> <pad>",
    ]  # fmt: skip
    assert sentences(population, 2, "x")[1] == "<bos> how to <oov>"
    seconds = population.columns["time"][population.offsets[2] : population.offsets[3]].tolist()
    assert seconds == sorted(seconds)
    assert seconds[1] == 1420192800.5
    roles = dict(zip(population.ids, population.columns["role"].numpy()[population.offsets[:-1]].tolist()))
    order = np.random.RandomState(13).permutation(["10", "20", "30"])
    assert roles == {"21": 0, "3": 0, order[0]: 1, order[1]: 2, order[2]: 2}
    task = build_task(population.about)
    assert task.network == LSTM(8, 96, 670, 1, 96)
    assert task.unscored == (5, 7)  # type: ignore[attr-defined]


def test_stackoverflow_of_some_users_and_sentences(folder: Path) -> None:
    write_stackoverflow(folder)
    population = load_source("stackoverflow", most=2, train_clients=1, validation_clients=1, test_clients=1)
    assert population.about["roles"] == {"train": 1, "validation": 1, "test": 1}
    assert population.sizes().max() <= 2
    with pytest.raises(UserError, match=r"'validation_clients' .* is 10000, and .* has 3 users"):
        load_source("stackoverflow")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fields": ("tokens",)}, "without creation_date, expected examples/<USER>/tokens and creation_date"),
        ({"fields": ("creation_date",)}, "without tokens"),
        ({"dates": ["yesterday"] * 3}, "expected dates like 2010-05-08"),
        ({"held_out": {**HELD_OUT, "21": ["a"]}}, "user '21', who is in stackoverflow_train.h5 too"),
        ({"train": {}}, "found no users"),
        ({"train": {"1": [1, 2]}, "dates": [1, 2, 3]}, "tokens of type int64, expected a list of texts"),
    ],
)
def test_stackoverflow_of_another_layout(folder: Path, change: Any, message: str) -> None:
    write_stackoverflow(folder, **change)
    with pytest.raises(UserError, match=message):
        load_source("stackoverflow", validation_clients=1)


# TedMulti

HEADER = "talk_name\ten\tfr\tes"


def write_tedmulti(folder: Path, header: Any = HEADER, **parts: list[str]) -> None:
    (folder / "tedmulti").mkdir(exist_ok=True)
    for part in ("train", "dev", "test"):
        lines = parts.get(part, [f"{part}\tthe end .\tfin\tel fin ."])
        (folder / "tedmulti" / f"all_talks_{part}.tsv").write_text("\n".join([header, *lines]) + "\n", encoding="utf-8")


def test_tedmulti(folder: Path) -> None:
    train = [
        'one\tThe cat &apos; s "hat" .\tx\tEl gato .',
        "one\tThe end\tx\t__NULL__",
        "two\tA cat !\tx\t_ _ NULL _ _",
        "two\tThe dog\tx\tEl perro",
    ]
    write_tedmulti(folder, train=train)
    population = load_source("tedmulti", least=1, in_clients=2, length=4)
    assert list(population.ids) == [
        "en:dev", "en:one", "en:test", "en:two", "es:dev", "es:one", "es:test", "es:two",
    ]  # fmt: skip
    assert population.about["words"] == ["cat", "el", "the"]  # each in two training clients
    assert sentences(population, 1) == ["the cat <oov> <oov>", "the <oov> <eos> <pad>"]  # apos, s, hat: cut
    assert sentences(population, 7) == ["el <oov> <eos> <pad>"]
    assert [population.group_of(c) for c in (0, 7)] == ["en", "es"]
    roles = population.columns["role"].numpy()[population.offsets[:-1]].tolist()
    assert roles == [1, 0, 2, 0, 1, 0, 2, 0]
    assert build_task(population.about).network == Transformer(7)


def test_only_ascii_letters_of_tedmulti_become_lower_case() -> None:
    """As TensorFlow's lower() without an encoding does it, which Motley uses: É is two bytes above 127 and stays."""
    assert tedmulti.plain("ÉL Dijo: ¡SÍ, Señor!<br />Ñandú") == ["Él", "dijo", "¡sÍ", "señor", "Ñandú"]


def test_tedmulti_leaves_out_short_talks_and_long_ends(folder: Path) -> None:
    train = [*["one\tthe cat\tx\tel gato"] * 3, "two\tthe dog\tx\tel perro"]
    write_tedmulti(folder, train=train, dev=["three\tthe dog\tx\tel perro"] * 4)
    population = load_source("tedmulti", least=2, most=2, in_clients=1)
    assert list(population.ids) == ["en:one", "en:three", "es:one", "es:three"]
    assert population.sizes().tolist() == [2, 4, 2, 4]  # only training clients are cut
    assert population.about["words"] == ["cat", "el", "gato", "the"]
    french = load_source("tedmulti", languages="fr", least=1, in_clients=1)
    assert french.groups == ["fr"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"header": "name\ten\tfr\tes"}, r"columns \['name', 'en', 'fr', 'es'\], expected talk_name"),
        ({"header": "talk_name,en,fr,es"}, "expected talk_name and a column per language, between tabs"),
        ({"header": "talk_name\ten\tfr\tde"}, "unknown language 'es' in .*all_talks_train.tsv.*Known: de, en, fr"),
        ({"dev": ["one\ttext"]}, "line 2 of another number of columns, expected 4"),
        ({"dev": ["train\tthe end\tx\tel fin"]}, "the talk 'en:train', which is in all_talks_train.tsv too"),
        ({"dev": ["one\t__NULL__\tx\t__NULL__"]}, "no sentence in en, es"),
    ],
)
def test_tedmulti_of_another_layout(folder: Path, change: Any, message: str) -> None:
    write_tedmulti(folder, **change)
    with pytest.raises(UserError, match=message):
        load_source("tedmulti", least=1, in_clients=1)


def test_tedmulti_without_common_words(folder: Path) -> None:
    write_tedmulti(folder)
    with pytest.raises(UserError, match=r"no word occurs in 20 training clients .* lower the options 'in_clients'"):
        load_source("tedmulti")


# Two languages


def write_two_languages(folder: Path, spanish: Any = None, columns: Any = ("collection", "title", "text")) -> None:
    (folder / "ted").mkdir()
    (folder / "spanish_ted").mkdir()
    text = "Translator: Somebody\nIt's (Laughter) 3 times the\ncat [Music] and — the dog: " * 3
    rows = [["ted", "long talk", text], ["ted", "short", "the cat"], ["tedx", "other", text]]
    table = pyarrow.table(dict(zip(columns, zip(*rows))))
    pyarrow.parquet.write_table(table, folder / "ted" / "ted_talks.parquet")
    lines = spanish or ["Ab_c_0001\t0\t1\tel gato y", "Ab_c_0002\t1\t2\tel perro", "De_0001\t0\t1\tsí"]
    for name in ("valid", "test"):
        (folder / "spanish_ted" / f"{name}.txt").write_text(
            "\n".join(lines if name == "test" else []) + "\n" * (name == "test")
        )


def test_two_languages(folder: Path) -> None:
    write_two_languages(folder)
    population = load_source("ted-two-languages", length=2, least=2)
    assert list(population.ids) == ["en:long talk", "es:Ab_c"]
    assert population.sizes().tolist() == [2, 2]  # five Spanish words, and as much of the English talk
    assert sentences(population, 0) == ["its times", "the cat"]
    assert sentences(population, 1) == ["el gato", "y el"]
    assert list(population.groups) == ["English", "Spanish"]
    assert isinstance(build_task(population.about).network, Transformer)


def test_two_languages_are_made_alike(real_data: Path) -> None:
    """The same sizes, and about as many unknown words: only the words tell the languages apart."""
    population = load_source("ted-two-languages")
    sizes = [sorted(population.sizes()[population.group == language]) for language in (0, 1)]
    assert sizes[0] == sizes[1]
    language = np.repeat(population.group, population.sizes())
    unknown = population.columns["y"].numpy() == population.about["unscored"][0]
    shares = [unknown[language == place].mean() for place in (0, 1)]
    assert shares == pytest.approx([0.23, 0.27], abs=0.02)
    more = load_source("ted-two-languages", english_talks=40)
    assert len(more) == 64
    assert set(population.ids) <= set(more.ids)  # more talks move nobody


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"spanish": ["Ab_0001\tel gato y el perro"]}, {}, "line 1, expected talk_segment, start, end, text"),
        ({"spanish": ["0001\t0\t1\tel gato y el perro"]}, {}, "el gato y el perro' in line 1"),
        ({"columns": ("kind", "title", "text")}, {}, "the columns .*'kind'.*, expected collection, title, text"),
        ({}, {"english_talks": 2}, r"'english_talks' .* is 2, and .* has 1 talks of 4 words or more"),
        ({}, {"least": 50}, "no Spanish talk has 50 pieces of 2 words"),
    ],
)
def test_two_languages_of_another_layout(folder: Path, change: Any, options: Any, message: str) -> None:
    write_two_languages(folder, **change)
    with pytest.raises(UserError, match=message):
        load_source("ted-two-languages", **{"length": 2, "least": 2, **options})


def test_two_languages_with_a_damaged_table(folder: Path) -> None:
    write_two_languages(folder)
    (folder / ted_two_languages.ENGLISH).write_bytes(b"PAR1 and no more")
    with pytest.raises(UserError, match=r"ted_talks.parquet is damaged.*expected a Parquet file"):
        load_source("ted-two-languages", length=2, least=2)
