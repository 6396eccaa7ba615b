from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from bespoke.data.population import Population
from bespoke.data.splits import cross_device, cross_silo
from bespoke.data.tables.documents import Segmenting, open_texts
from bespoke.data.texts import vocabulary as texts
from bespoke.errors import UserError

POSTS = {
    "ann": ["Hello, World!", "don't   go", "hello again"],
    "bob": ["Bye.", "one two three four five six seven"],
}


def rows() -> list[dict[str, str]]:
    return [{"user": user, "post": post} for user, posts in POSTS.items() for post in posts]


def csv(path: Path, lines: list[dict[str, str]] | None = None) -> Path:
    lines = rows() if lines is None else lines
    quoted = ['"' + '","'.join(value.replace('"', '""') for value in line.values()) + '"' for line in lines]
    path.write_text("\n".join([",".join(lines[0]), *quoted]) + "\n", encoding="utf-8")
    return path


def shown(raw: Population) -> list[str]:
    names = ["", *raw.about["pieces"]]
    return [" ".join(names[i] for i in row if i) for row in raw.columns["pieces"].tolist()]


def test_words_of_a_table(tmp_path: Path) -> None:
    raw = open_texts(csv(tmp_path / "posts.csv"), "user", "post", how=Segmenting(length=3))
    assert list(raw.ids) == ["ann", "bob"]
    # four words and seven words are cut into segments of nearly equal length
    assert shown(raw)[:5] == ["hello ,", "world !", "don't go", "hello again", "bye ."]
    assert shown(raw)[5:] == ["one two", "three four", "five six seven"]
    assert raw.columns["whole"].tolist() == [False, True, True, True, True, False, False, True]
    assert raw.columns["unit"].tolist() == [0, 0, 1, 2, 3, 4, 4, 4]
    # 'hello, ' and 'world!' with its end; 'one two ' 'three four ' 'five six seven' with its end
    assert raw.columns["characters"].tolist() == [7, 7, 9, 12, 5, 8, 11, 15]
    assert raw.about["target"] == "next word"
    assert raw.about["notes"] == [
        "Texts are words, letters and digits with the apostrophes inside; any other sign is a word by itself, "
        "lower-cased.",
        "2 of 5 texts are longer than 3 words and were cut: 8 segments in all. Segments of one text are trained or "
        "tested on together.",
    ]
    assert "Hello" in open_texts(tmp_path / "posts.csv", "user", "post", how=Segmenting(lower=False)).about["pieces"]


def test_characters(tmp_path: Path) -> None:
    raw = open_texts(csv(tmp_path / "posts.csv"), "user", "post", how=Segmenting("characters"))
    assert shown(raw)[1] == "d o n ' t   g o"
    words = open_texts(tmp_path / "posts.csv", "user", "post")
    # the same characters whatever the tokenizer, so that bits per character can be compared
    assert raw.columns["characters"].tolist() == words.columns["characters"].tolist() == [14, 9, 12, 5, 34]
    encoded = texts.encode(raw, texts.learned(raw, np.arange(5)), np.arange(5))
    assert (encoded.columns["y"] > 0).sum(1).tolist() == [14, 9, 12, 5, 34]
    assert encoded.about["target"] == "next character"


def test_every_kind_of_file_gives_the_same_population(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    expected = open_texts(csv(tmp_path / "posts.csv"), "user", "post")
    (tmp_path / "posts.tsv").write_text("user\tpost\n" + "".join(f"{r['user']}\t{r['post']}\n" for r in rows()))
    lines = "".join(json.dumps(row) + "\n" for row in rows())
    (tmp_path / "posts.jsonl").write_text(lines + "\n", encoding="utf-8")
    with gzip.open(tmp_path / "posts.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write(lines)
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows()), tmp_path / "posts.parquet")
    for folder, files in (("flat", False), ("nested", True)):
        for user, posts in POSTS.items():
            place = tmp_path / folder / user / "1.txt" if files else tmp_path / folder / f"{user}.txt"
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(("\n\n" if files else "\n").join(posts) + "\n", encoding="utf-8")
    names = ["posts.tsv", "posts.jsonl", "posts.jsonl.gz", "posts.parquet", "flat", "nested"]
    for name in names:
        columns = (None, None) if name in ("flat", "nested") else ("user", "post")
        found = open_texts(tmp_path / name, *columns)
        assert list(found.ids) == list(expected.ids)
        assert shown(found) == shown(expected)
        assert found.columns["characters"].tolist() == expected.columns["characters"].tolist()


def test_groups_contexts_and_times(tmp_path: Path) -> None:
    lines = [
        {"user": "ann", "post": "late one", "day": "2024-02-01", "club": "x", "place": "home"},
        {"user": "ann", "post": "early", "day": "2024-01-01", "club": "x", "place": "work"},
        {"user": "bob", "post": "b", "day": "2024-03-01", "club": "y", "place": ""},
        {"user": "bob", "post": "", "day": "2024-04-01", "club": "y", "place": "home"},
        {"user": "", "post": "nobody", "day": "2024-04-01", "club": "y", "place": "home"},
    ]
    for name in ("t.csv", "t.jsonl"):
        path = tmp_path / name
        if name == "t.csv":
            csv(path, lines)
        else:
            path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        raw = open_texts(path, "user", "post", group="club", context="place", time="day")
        assert [raw.group_of(c) for c in (0, 1)] == ["x", "y"]
        contexts = [raw.about["contexts"][code] for code in raw.columns["context"].tolist()]
        assert contexts == ["home", "work", "(missing)"]
        assert raw.columns["time"].tolist()[0] - raw.columns["time"].tolist()[1] == 31 * 86400
        assert raw.about["notes"][:2] == [
            "1 of 5 rows were dropped: the client is missing.", "1 of 5 rows were dropped: there is no text.",
        ]  # fmt: skip
        assert raw.about["notes"][-1] == "1 of 2 clients have one text: they can train or be tested, not both."
        train = cross_silo(raw, (0.5, 0.0, 0.5), order="time").train
        assert train.of(np.array([0]))[0].tolist() == [1]  # ann's earlier text, though it stands second


def test_short_texts(tmp_path: Path) -> None:
    raw = open_texts(csv(tmp_path / "posts.csv"), "user", "post", how=Segmenting(shortest=3))
    assert raw.rows == 2
    assert "3 of 5 texts are too short and were dropped: below 3 words." in raw.about["notes"]
    with pytest.raises(UserError, match=r"no text of posts\.csv has 99 words or more"):
        open_texts(tmp_path / "posts.csv", "user", "post", how=Segmenting(shortest=99))


@pytest.mark.parametrize("order", ["random", "time", "stored", "motley"])
def test_segments_of_a_text_stay_together(order: str) -> None:
    """Nine texts of one to three segments a client: every part of a split holds whole texts, and all rows once."""
    sizes = [1, 2, 3] * 3
    unit = np.concatenate([np.repeat(np.arange(9) + 9 * client, sizes) for client in range(4)])
    client = np.repeat(["a", "b", "c", "d"], sum(sizes))
    columns = {"x": np.arange(len(unit)), "unit": unit, "time": -unit.astype(float)}
    population = Population.build(columns, client)
    for seed in range(5):
        splits = [cross_silo(population, (0.6, 0.2, 0.2), seed, order)]
        splits += [] if order == "motley" else [cross_device(population, (0.3, 0.3), seed=seed, order=order)]
        for split in splits:
            test = split.test
            parts = [test.support, *([test.validation] if split.kind == "cross-silo" else []), test.query]
            if not len(test.query.clients):
                continue
            found = [part.of(test.query.clients) for part in parts]
            taken = [set(unit[rows].tolist()) for rows, _ in found]
            assert not any(a & b for place, a in enumerate(taken) for b in taken[:place])
            every = np.sort(np.concatenate([rows for rows, _ in found]))
            tested = np.array(population.ids)[test.query.clients]
            assert every.tolist() == np.flatnonzero(np.isin(client, tested)).tolist()
            for part, (_, counts) in zip(parts, found):
                assert part.sizes(test.query.clients).tolist() == counts.tolist()
    if order == "time":  # the last texts are the earliest
        assert unit[cross_silo(population, (0.6, 0.2, 0.2), 0, "time").train.of(np.array([0]))[0]].min() == 4


def test_texts_of_one_segment_are_split_as_rows_are() -> None:
    plain = Population.build({"x": np.arange(40)}, np.repeat(["a", "b"], 20))
    units = Population.build({"x": np.arange(40), "unit": np.arange(40)}, np.repeat(["a", "b"], 20))
    for split in (cross_silo, cross_device):
        one, other = (split(population, seed=3) for population in (plain, units))
        assert one.train.of(one.train.clients)[0].tolist() == other.train.of(other.train.clients)[0].tolist()


BAD = [
    ({"text": "pots"}, "unknown column 'pots'.*Did you mean 'post'"),
    ({"text": "number"}, "text column 'number' of posts.csv holds int64, no texts; the columns that do: user, post"),
    ({"client": "number"}, "different in each of the 5 rows"),
    ({"text": "user"}, "cannot be client"),
    ({"time": "user"}, "neither numbers nor dates"),
    ({"how": Segmenting(tokenizer="word")}, r"tokenizer = 'word': 'words', 'characters', or the folder"),
]


@pytest.mark.parametrize(("change", "words"), BAD)
def test_bad_columns(tmp_path: Path, change: dict[str, str], words: str) -> None:
    path = csv(tmp_path / "posts.csv", [{**row, "number": str(n)} for n, row in enumerate(rows())])
    with pytest.raises(UserError, match=words):
        open_texts(path, **{"client": "user", "text": "post", **change})  # type: ignore[arg-type]


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no usable row: 2 of 2 rows were dropped: there is no text"):
        open_texts(csv(tmp_path / "empty.csv", [{"user": u, "post": " "} for u in "ab"]), "user", "post")
    with pytest.raises(UserError, match="one client only, user = 'a'"):
        open_texts(csv(tmp_path / "one.csv", [{"user": "a", "post": p} for p in "xyz"]), "user", "post")
    path = tmp_path / "broken.jsonl"
    path.write_text('{"user": "a", "post": "x"}\n\n{"user": "a", "post": \n', encoding="utf-8")
    with pytest.raises(UserError, match=r"line 3 of .*broken.jsonl is not valid JSON"):
        open_texts(path, "user", "post")
    path.write_text('{"user": "a", "post": "x"}\n["a"]\n', encoding="utf-8")
    with pytest.raises(UserError, match=r"line 2 of .*every line has to be an object"):
        open_texts(path, "user", "post")
    with pytest.raises(UserError, match="holds no texts by client"):
        open_texts(tmp_path)
    for place in ("a.txt", "b.txt", "a/1.txt"):
        (tmp_path / "both" / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "both" / place).write_text("x\ny\n")
    with pytest.raises(UserError, match="both a file and a folder for the client 'a'"):
        open_texts(tmp_path / "both")
    with pytest.raises(UserError, match="it has no columns, and client = 'user' names one"):
        open_texts(tmp_path / "both", "user")
    (tmp_path / "tokens").mkdir()
    with pytest.raises(UserError, match=r"there is no .*tokenizer.json"):
        open_texts(csv(tmp_path / "posts.csv"), "user", "post", how=Segmenting(str(tmp_path / "tokens")))
    (tmp_path / "tokens" / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="is not the file of a Hugging Face tokenizer"):
        open_texts(tmp_path / "posts.csv", "user", "post", how=Segmenting(str(tmp_path / "tokens")))


def test_a_hugging_face_tokenizer(tmp_path: Path) -> None:
    """Byte pairs of one merge: 'lo' is a piece, and a space is part of none."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    pieces = {piece: place for place, piece in enumerate(["h", "e", "l", "o", "w", "lo", "[?]"])}
    made = Tokenizer(models.BPE(pieces, [("l", "o")], unk_token="[?]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    (tmp_path / "made").mkdir()
    made.save(str(tmp_path / "made" / "tokenizer.json"))
    path = csv(tmp_path / "t.csv", [{"user": u, "post": p} for u, p in (("a", "hello  low"), ("a", "h"), ("b", "Ho"))])
    raw = open_texts(path, "user", "post", how=Segmenting(str(tmp_path / "made"), length=4))
    assert shown(raw) == ["h e l", "lo lo w", "h", "[?] o"]
    assert raw.columns["characters"].tolist() == [3, 7, 2, 3]  # 'hel', 'lo low' with its end
    assert raw.about["target"] == "next token"
    encoded = texts.encode(raw, texts.learned(raw, np.arange(4)), np.arange(4))
    assert encoded.about["words"] == ["h", "lo", "[?]", "e", "l", "o", "w"]


def test_a_real_tokenizer(tmp_path: Path) -> None:
    folder = Path(__file__).parents[2] / ".." / "shared" / "models" / "stories15M"
    if not (folder / "tokenizer.json").exists():
        pytest.skip("the tokenizer of stories15M is not here")
    raw = open_texts(csv(tmp_path / "posts.csv"), "user", "post", how=Segmenting(str(folder)))
    assert shown(raw)[0] == "\u2581Hello , \u2581World !"
    assert raw.columns["characters"].tolist()[0] == len("Hello, World!") + 1
