from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bespoke.data.tables.table import read_table
from bespoke.errors import UserError

SHOPS = """shop,region,day,units,kind,open,note,price
A,north,2024-01-01,3,tea,true,a1,1.5
A,north,2024-01-02,4,coffee,false,a2,2.5
B,south,2024-04-03,,tea,true,a3,3.5
B,south,2024-01-08,6,,true,a4,4.5
C,south,2024-01-01,inf,tea,true,a5,5.5
"""


def write(folder: Path, text: str, name: str = "table.csv") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def column(population: Any, name: Any) -> Any:
    return population.columns["x"][:, population.about["features"].index(name)].tolist()


def said(population: Any, words: Any) -> Any:
    return any(words in note for note in population.about["notes"])


def rows_of(*columns: list[Any]) -> str:
    return "\n".join(",".join(map(str, row)) for row in zip(*columns)) + "\n"


def test_a_table_of_every_kind(tmp_path: Path) -> None:
    path = write(tmp_path, SHOPS)
    shops = read_table(path, "shop", "price", group="region", features=["day", "units", "kind", "open"])
    assert list(shops.ids) == ["A", "B", "C"]
    assert [shops.group_of(c) for c in range(3)] == ["north", "south", "south"]
    assert shops.columns["y"].tolist() == [1.5, 2.5, 3.5, 4.5, 5.5]
    assert np.isnan(column(shops, "units")).tolist() == [False, False, True, False, True]
    assert column(shops, "units missing") == [0, 0, 1, 0, 1]
    assert said(shops, "1 infinite values of units are taken as missing")
    assert column(shops, "kind = tea") == [1, 0, 1, 0, 1]  # of two levels one says it all
    assert column(shops, "kind missing") == [0, 0, 0, 1, 0]
    assert column(shops, "open") == [1, 0, 1, 1, 1]
    assert column(shops, "day days since first") == [0, 1, 93, 7, 0]
    assert column(shops, "day Monday") == [1, 0, 0, 1, 1]  # 1 and 8 January 2024
    assert column(shops, "day month sin") == pytest.approx([0, 0, 1, 0, 0], abs=1e-6)  # April: a quarter turn
    assert "day year" not in shops.about["features"]  # 2024 throughout
    numeric = dict(zip(shops.about["features"], shops.about["numeric"]))
    assert numeric["units"]
    assert not numeric["open"]
    assert shops.about["task"] == "regression"
    assert shops.about["standardize"] == {"features": "global", "target": True}
    assert said(shops, "The task is regression: price holds numbers")
    assert said(shops, "1 of 3 clients have one example")
    assert "classes" not in shops.about


@pytest.mark.parametrize("name", ["t.csv.gz", "t.tsv", "t.parquet", "t.jsonl", "t.ndjson", "semicolon.csv"])
def test_other_formats_read_the_same(tmp_path: Path, name: str) -> None:
    text = "who,x,y\na,1.5,10\na,2.5,20\nb,3.5,30.5\n"
    path = tmp_path / name
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(text.encode()))
    elif name.endswith(".parquet"):
        table = {"who": pa.array(["a", "a", "b"]).dictionary_encode(), "x": [1.5, 2.5, 3.5], "y": [10, 20, 30.5]}
        pyarrow.parquet.write_table(pa.table({**table, "__index_level_0__": [5, 9, 1]}), path)
    elif name in ("t.jsonl", "t.ndjson"):
        rows = zip("aab", (1.5, 2.5, 3.5), (10, 20, 30.5))
        path.write_text("".join(json.dumps({"who": who, "x": x, "y": y}) + "\n" for who, x, y in rows))
    elif name == "semicolon.csv":
        path.write_text(text.replace(",", ";").replace(".", ","))  # as European spreadsheets write it
    else:
        path.write_text(text.replace(",", "\t"))
    population = read_table(path, "who", "y")
    assert population.columns["x"].tolist() == [[1.5], [2.5], [3.5]]
    assert population.columns["y"].tolist() == [10, 20, 30.5]
    assert list(population.ids) == ["a", "b"]


TEXTS = {
    "comma.data": "who,x,y\na,1.5,10\na,,20\nb,3.5,30.5\n",
    "comma and blank.data": "who, x, y\na, 1.5, 10\na, ?, 20\nb, 3.5, 30.5\n",
    "comma.csv": "who, x, y\na, 1.5, 10\na, ?, 20\nb, 3.5, 30.5\n",
    "semicolon.txt": "who;x;y\na;1,5;10\na;;20\nb;3,5;30,5\n",
    "tab.txt": "who\tx\ty\na\t1.5\t10\na\t\t20\nb\t3.5\t30.5\n",
    "bar.dat": "who|x|y\na|1.5|10\na||20\nb|3.5|30.5\n",
    "blank.txt": "who x y\na 1.5 10\na NA 20\nb 3.5 30.5\n",
    "aligned.data": "\n  who    x     y  \n    a  1.5  10.0\n    a   NA  20.0\n\n    b  3.5  30.5\n",
    "as R writes.txt": '"who" "x" "y"\n"1" "a" 1.5 10\n"2" "a" NA 20\n"3" "b" 3.5 30.5\n',
}


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_texts_of_any_delimiter_and_line_end(tmp_path: Path, name: Any, packed: bool, end: str) -> None:
    path = tmp_path / (name + ".gz" * packed)
    text = TEXTS[name].replace("\n", end).encode()
    path.write_bytes(gzip.compress(text) if packed else text)
    population = read_table(path, "who", "y")
    assert population.about["features"] == ["x", "x missing"]
    assert np.nan_to_num(population.columns["x"].numpy(), nan=-1).tolist() == [[1.5, 0], [-1, 1], [3.5, 0]]
    assert population.columns["y"].tolist() == [10, 20, 30.5]
    assert list(population.ids) == ["a", "b"]
    assert said(population, "as R writes tables") == name.startswith("as R")


def test_blanks_within_quotes_are_part_of_a_value(tmp_path: Path) -> None:
    text = '"the shop" x y\n"New York"   1 1.5\n"New York" 2 2.5\nMünchen 3 3.5\n'
    path = tmp_path / "shops.txt"
    path.write_bytes(text.encode("cp1252"))
    population = read_table(path, "the shop", "y")
    assert list(population.ids) == ["München", "New York"]
    assert said(population, "read as cp1252")


@pytest.mark.parametrize(
    ("name", "text", "shown"),
    [
        ("iris.data", "5.1,3.5,1.4,0.2,Iris-setosa\n4.9,3.0,1.4,0.2,Iris-setosa\n", "5.1, 3.5, 1.4, 0.2, Iris-setosa"),
        ("adult.data", "39, State-gov, 77516, Bachelors, 13, Male\n50, Private, 83311, HS, 9, Male\n", "39, State-gov"),
        ("blank.txt", "   1.0  2.0\n   3.0  4.0\n", "1.0, 2.0"),
        ("numbers.csv", "3,1,2\n4,5,6\n", "3, 1, 2"),
        ("rising.csv", "1,2,3\n4,5,6\n", "1, 2, 3"),
    ],
)
def test_a_first_line_of_values_is_refused(tmp_path: Path, name: str, text: str, shown: str) -> None:
    with pytest.raises(UserError, match="has to name the columns") as refused:
        read_table(write(tmp_path, text, name), "who", "y")
    assert f"the first line of {name} holds values ({shown}" in str(refused.value)


def test_numbers_may_be_names(tmp_path: Path) -> None:
    """Years as columns, and the numbers that pandas gives to columns without names."""
    wide = write(tmp_path, "who,1990,1991,1995\na,1,1.5,2\na,2,2.5,1\nb,3,3.5,0\n")
    assert read_table(wide, "who", "1991").about["features"] == ["1990", "1995"]
    unnamed = write(tmp_path, "0,1,2\na,1,1.5\na,2,2.5\nb,3,3.5\n")
    assert read_table(unnamed, "0", "2").about["features"] == ["1"]


def test_ragged_lines_of_blanks_are_named(tmp_path: Path) -> None:
    path = write(tmp_path, "who x y\na 1 1.5\na 2\nb 3 3.5\n", "t.txt")
    with pytest.raises(UserError, match="row 2 has 2 values, the first line 3"):
        read_table(path, "who", "y")


def test_several_client_columns(tmp_path: Path) -> None:
    path = write(tmp_path, "city,shop,x,y\nRome,1,1,1.5\nRome,2,2,2.5\nOslo,1,3,3.5\nOslo,1,4,4.5\n")
    population = read_table(path, "city, shop", "y")
    assert list(population.ids) == ["Oslo/1", "Rome/1", "Rome/2"]
    assert population.sizes().tolist() == [2, 1, 1]
    clash = write(tmp_path, "a,b,x,y\np/q,r,1,1.5\np,q/r,2,2.5\np,q/r,2,2.5\n")
    with pytest.raises(UserError, match="two clients would share one id"):
        read_table(clash, "a,b", "y")


def test_numbered_clients_keep_their_numbers(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    table = {"who": [7.0, 7.0, None, 12.0], "x": [1.0, 2.0, 3.0, 4.0], "y": [0.1, 0.2, 0.3, 0.4]}
    pyarrow.parquet.write_table(pa.table(table), path)
    population = read_table(path, "who", "y")
    assert list(population.ids) == ["12", "7"]
    assert said(population, "1 of 4 rows were dropped: the client is missing")


@pytest.mark.parametrize(
    ("values", "task", "classes"),
    [
        (["yes", "no"] * 10, "classification", ["no", "yes"]),
        (["true", "false"] * 10, "classification", ["false", "true"]),
        ([-1, 1] * 10, "classification", ["-1", "1"]),
        ([0, 1, 2] * 10, "classification", ["0", "1", "2"]),
        (["0.0", "1.0"] * 10, "classification", ["0", "1"]),
        ([0, 2, 4, 6, 8, 10] * 5, "regression", None),  # whole numbers, but not a count of classes
        (list(range(1, 21)), "regression", None),  # each only once
        ([0.5, 1.5] * 10, "regression", None),
        (list(range(40)), "regression", None),
    ],
)
def test_inferred_tasks(tmp_path: Path, values: Any, task: str, classes: Any) -> None:
    n = len(values)
    path = write(tmp_path, "who,x,y\n" + rows_of(["a", "b"] * (n // 2), np.arange(n) * 0.5, values))
    population = read_table(path, "who", "y")
    assert population.about["task"] == task
    assert population.about.get("classes") == classes
    assert said(population, f"The task is {task}")
    expected = "torch.int64" if classes else "torch.float32"
    assert str(population.columns["y"].dtype) == expected
    assert population.about["standardize"]["target"] == (task == "regression")


def test_a_given_task_is_obeyed(tmp_path: Path) -> None:
    path = write(tmp_path, "who,x,y\n" + rows_of(["a", "b"] * 15, np.arange(30) * 0.5, [1, 2, 10] * 10))
    assert read_table(path, "who", "y", task="regression").about["task"] == "regression"
    by_class = read_table(path, "who", "y", task="classification")
    assert by_class.about["classes"] == ["1", "2", "10"]  # as numbers, not as texts
    assert by_class.columns["y"][:3].tolist() == [0, 2, 1]  # rows 0, 2, 4 are a's: 1, 10, 2
    with pytest.raises(UserError, match="unknown task 'guess'"):
        read_table(path, "who", "y", task="guess")  # type: ignore[arg-type]
    words = write(tmp_path, "who,x,y\n" + rows_of(["a", "b"] * 15, np.arange(30) * 0.5, ["u", "v"] * 15))
    with pytest.raises(UserError, match="holds texts such as 'u': regression needs numbers"):
        read_table(words, "who", "y", task="regression")


def test_time_is_kept_for_splits(tmp_path: Path) -> None:
    path = write(tmp_path, "who,when,x,y\na,1970-01-02,1,1.5\na,1970-01-01,2,2.5\nb,1970-01-03,3,3.5\n")
    population = read_table(path, "who", "y", time="when")
    assert population.columns["time"].tolist() == [86400, 0, 2 * 86400]
    assert population.about["features"] == ["x"]
    numbers = write(tmp_path, "who,when,x,y\na,1260759144,1,1.5\na,,2,2.5\nb,5,3,3.5\n")
    timed = read_table(numbers, "who", "y", time="when")
    assert timed.columns["time"][0].item() == 1260759144.0
    assert said(timed, "1 rows have no time")
    words = write(tmp_path, "who,when,x,y\na,soon,1,1.5\na,later,2,2.5\nb,soon,3,3.5\n")
    with pytest.raises(UserError, match=r"time column 'when' of table.csv holds string"):
        read_table(words, "who", "y", time="when")


def test_the_group_is_a_feature_and_the_time_is_not(tmp_path: Path) -> None:
    text = "who,area,when,x,y\na,10,1,1,1.5\na,10,2,2,2.5\nb,30,1,3,3.5\nc,20,1,5,4.5\nd,10,1,5,4.5\n"
    path = write(tmp_path, text)
    population = read_table(path, "who", "y", group="area", time="when")
    # a code of an area is no quantity: an indicator each, the most frequent first
    assert population.about["features"] == ["area = 10", "area = 20", "area = 30", "x"]
    assert column(population, "area = 10") == [1, 1, 0, 0, 1]
    assert said(population, "The group column area is also a feature, as a category")
    assert said(population, "The time column when orders the rows and is no feature")
    assert [population.group_of(c) for c in range(4)] == ["10", "30", "20", "10"]
    named = read_table(path, "who", "y", group="area", time="when", features=["x", "when"])
    assert named.about["features"] == ["x", "when"]
    assert not said(named, "The group column")
    assert not said(named, "The time column")
    by_both = read_table(path, "area, who", "y", group="area")
    assert by_both.about["features"] == ["area = 10", "area = 20", "area = 30", "when", "x"]


def test_a_group_of_each_client_is_no_feature(tmp_path: Path) -> None:
    path = write(tmp_path, "who,area,x,y\na,10,1,1.5\na,10,2,2.5\nb,30,3,3.5\n")
    population = read_table(path, "who", "y", group="area")
    assert population.about["features"] == ["x"]
    assert said(population, "Left out: the group column area is different for every client")


def test_a_missing_level_is_not_another_level(tmp_path: Path) -> None:
    """25 levels, the 20 most frequent shown: the rows of the other five are 'other', the missing ones are missing."""
    kinds = [f"k{i:02d}" for i in range(20)] * 3 + [f"r{i}" for i in range(5)] + ["", "NA", "?"]
    path = write(tmp_path, "who,kind,y\n" + rows_of(["a", "b"] * 34, kinds, np.arange(68) * 0.5))
    population = read_table(path, "who", "y")
    order = np.argsort(["a", "b"] * 34, kind="stable")  # rows are kept by client
    other, missing = (np.zeros(68) for _ in range(2))
    other[60:65], missing[65:] = 1, 1
    assert column(population, "kind = (other)") == other[order].tolist()
    assert column(population, "kind missing") == missing[order].tolist()


def test_levels_found_at_most_clients_come_first(tmp_path: Path) -> None:
    # 'loud' fills many rows of one client; 'wide' is at every client.
    clients = ["a"] * 30 + ["b"] * 30
    kinds = ["loud"] * 20 + ["wide"] * 10 + ["wide"] * 5 + [f"k{i % 24:02d}" for i in range(25)]
    path = write(tmp_path, "who,kind,y\n" + rows_of(clients, kinds, np.arange(60) * 0.5))
    features = read_table(path, "who", "y").about["features"]
    assert features[:2] == ["kind = wide", "kind = loud"]
    assert len(features) == 21
    assert features[-1] == "kind = (other)"
    x = read_table(path, "who", "y").columns["x"]
    assert (x.sum(1) == 1).all()


def test_ids_free_text_row_numbers_and_constants_are_left_out_and_said(tmp_path: Path) -> None:
    n = 2000
    texts = [f"text {i}" for i in range(n)]
    path = write(
        tmp_path,
        "row,who,note,same,nothing,x,y\n"
        + rows_of(range(n), ["a", "b"] * (n // 2), texts, [5] * n, [""] * n, np.arange(n) % 7, np.arange(n) * 0.5),
    )
    population = read_table(path, "who", "y")
    assert population.about["features"] == ["x"]
    assert said(population, "note has 2000 different texts in 2000 rows")
    assert said(population, "row numbers the rows")
    assert said(population, "the same in every row: same, nothing")


def test_a_million_categories(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    n = 1_000_000
    ids = np.char.add("id ", np.arange(n).astype(str))
    table = {"who": np.arange(n) % 1000, "id": ids, "x": np.arange(n) * 0.1, "y": np.sin(np.arange(n))}
    pyarrow.parquet.write_table(pa.table(table), path)
    population = read_table(path, "who", "y")
    assert population.about["features"] == ["x"]
    assert said(population, "id has 1000000 different texts")
    assert len(population) == 1000


def test_unusable_rows_are_dropped_and_counted(tmp_path: Path) -> None:
    path = write(tmp_path, "who,x,y\na,1,1.5\n,2,2.5\na,3,\nb,4,inf\nb,5,5.5\nb,6,NA\nb,7,1e300\na,8,8.5\n")
    population = read_table(path, "who", "y")
    assert population.columns["y"].tolist() == [1.5, 8.5, 5.5]
    assert said(population, "1 of 8 rows were dropped: the client is missing")
    assert said(population, "2 of 8 rows were dropped: the target is missing")
    assert said(population, "2 of 8 rows were dropped: the target is infinite")


def test_clients_with_one_target_are_counted(tmp_path: Path) -> None:
    path = write(tmp_path, "who,x,y\na,1,1.5\na,2,1.5\nb,3,2.5\nb,4,3.5\nc,5,1\n")
    population = read_table(path, "who", "y")
    assert said(population, "1 of 3 clients have one example")
    assert said(population, "1 of 3 clients have several examples, all with one and the same target")


def test_latin_letters_and_quotes(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes('who,x,y\n"Müller, A",1,1.5\n"Müller, A",2,2.5\nZoë,3,3.5\n'.encode("cp1252"))
    population = read_table(path, "who", "y")
    assert list(population.ids) == ["Müller, A", "Zoë"]
    assert said(population, "read as cp1252")


def test_a_missing_group_is_a_group(tmp_path: Path) -> None:
    path = write(tmp_path, "who,team,x,y\na,red,1,1.5\na,red,2,2.5\nb,,3,3.5\n")
    assert list(read_table(path, "who", "y", group="team").groups) == ["(missing)", "red"]


GOOD = "who,x,y\na,1,1.5\na,2,2.5\nb,3,3.5\n"


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (GOOD, {"client": "whom"}, r"unknown column 'whom' in table.csv. Did you mean 'who'\? Known: who, x, y"),
        (GOOD, {"target": "z"}, "unknown column 'z' in table.csv"),
        (GOOD, {"features": ["xx"]}, "unknown column 'xx'"),
        (GOOD, {"group": "g"}, "unknown column 'g'"),
        (GOOD, {"features": ["x", "y"]}, "the target 'y' of table.csv cannot be client, feature"),
        (GOOD, {"target": "who"}, "cannot be client, feature, group or time as well"),
        ("", {}, "not a readable CSV file: Empty CSV file"),
        ("who,x,y\n", {}, "table.csv is empty: it has 3 columns and no rows"),
        ("who,x,y\na,1,1.5\na,2\nb,3,3.5\n", {}, "Expected 3 columns, got 2"),
        ("who,x,x,y\na,1,1,1.5\na,2,2,2.5\n", {}, "several columns of one name: 'x'"),
        ("who,x,y\na,1,1.5\na,2,1.5\nb,3,1.5\n", {}, "the target 'y' is 1.5 in every row"),
        ("who,x,y\na,1,no\na,2,no\nb,3,no\n", {}, "the target 'y' is 'no' in every row"),
        ("who,x,y\na,1,1.5\na,2,2.5\n", {}, "has one client only, who = 'a'"),
        ("who,x,y\na,1,1.5\nb,2,2.5\nc,3,3.5\n", {}, "different in each of the 3 rows"),
        ("who,x,y\na,1,1.5\na,1,2.5\nb,1,3.5\n", {}, "no usable feature .*same in every row: x"),
        ("who,y\na,1.5\na,2.5\nb,3.5\n", {}, "no usable feature beside .*: there is no other column"),
        ("who,x,y\na,1,\n,2,2\nb,3,\n", {}, "table.csv has no usable row: 1 of 3 .* client .* 2 of 3 .* target"),
        ("who,x,y\na,1,u\na,2,v\nb,3,w\n", {}, "has 3 different values in 3 rows: too many for classes"),
        ("who,x,y\na,1,2020-01-01\na,2,2020-01-02\nb,3,2020-01-03\n", {}, "the target 'y' holds date32"),
        ("who,g,x,y\na,u,1,1.5\na,v,2,2.5\nb,v,3,3.5\n", {"group": "g"}, r"client 'a' appears in 2 groups \(u, v\)"),
    ],
)
def test_errors_say_what_is_wrong(tmp_path: Path, text: Any, options: Any, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(UserError, match=message):
        read_table(path, **{"client": "who", "target": "y", **options})


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no file .*none.csv"):
        read_table(tmp_path / "none.csv", "who", "y")
    with pytest.raises(UserError, match="is a folder"):
        read_table(tmp_path, "who", "y")
    with pytest.raises(UserError, match=r"ends in '.xlsx'; tables are read from .csv"):
        read_table(write(tmp_path, GOOD, "t.xlsx"), "who", "y")
    with pytest.raises(UserError, match="not a readable Parquet file"):
        read_table(write(tmp_path, GOOD, "t.parquet"), "who", "y")
    for content in (gzip.compress(GOOD.encode() * 1000)[:40], GOOD.encode()):
        (tmp_path / "t.csv.gz").write_bytes(content)
        with pytest.raises(UserError, match=r"t.csv.gz"):
            read_table(tmp_path / "t.csv.gz", "who", "y")
    noise = np.random.default_rng(0).integers(0, 256, 5000, dtype=np.uint8).tobytes()
    (tmp_path / "noise.csv").write_bytes(noise)
    with pytest.raises(UserError):
        read_table(tmp_path / "noise.csv", "who", "y")


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(-1e6, 1e6, width=32)), min_size=4, max_size=40))
def test_no_row_is_lost_or_moved_to_another_client(tmp_path_factory: pytest.TempPathFactory, rows: Any) -> None:
    clients = [*(client for client, _ in rows), "a", "b", "b"]
    values = [*(value for _, value in rows), 0.5, 1.5, 2.5]
    path = write(tmp_path_factory.mktemp("t"), "who,x,y\n" + rows_of(clients, values, values))
    population = read_table(path, "who", "y", task="regression")
    for c, name in enumerate(population.ids):
        mine = population.columns["y"][population.offsets[c] : population.offsets[c + 1]].tolist()
        assert mine == [np.float32(value) for client, value in zip(clients, values) if client == name]
    assert (population.columns["x"][:, 0] == population.columns["y"]).all()
