"""Tables: columns of every type, with missing values, constants, infinities and hostile names."""

from __future__ import annotations

import datetime
import decimal
import gzip
import io
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import tomli_w
from benchmarks.attack import odd
from pyarrow import parquet

DAY = datetime.datetime(2020, 1, 1)
KINDS: dict[str, Callable[[random.Random, int], Any]] = {
    "normal": lambda draw, i: draw.gauss(0, 1),
    "whole": lambda draw, i: draw.randrange(5),
    "constant": lambda draw, i: 1.5,
    "zero": lambda draw, i: 0,
    "rising": lambda draw, i: i,
    "huge": lambda draw, i: draw.choice((1e308, -1e308, 1e30)),
    "tiny": lambda draw, i: draw.choice((1e-308, 5e-324, 0.0)),
    "infinite": lambda draw, i: draw.choice((1.0, float("inf"), -float("inf"))),
    "not a number": lambda draw, i: draw.choice((1.0, 2.0, float("nan"))),
    "beyond int32": lambda draw, i: draw.choice((2**31, 2**53 + 1, 2**63 - 1, -(2**63))),
    "holes": lambda draw, i: draw.choice((None, 1.0, 2.5)),
    "nothing": lambda draw, i: None,
    "boolean": lambda draw, i: draw.random() < 0.5,
    "letters": lambda draw, i: draw.choice("abc"),
    "names": lambda draw, i: draw.choice(odd.NAMES),
    "free text": lambda draw, i: f"text {i} {draw.random()}",
    "long": lambda draw, i: "long " * 2000,
    "date": lambda draw, i: (DAY + datetime.timedelta(days=draw.randrange(900))).date(),
    "moment": lambda draw, i: DAY + datetime.timedelta(seconds=draw.randrange(10**8), microseconds=i),
    "old date": lambda draw, i: draw.choice((datetime.date(1, 1, 1), datetime.date(9999, 12, 31))),
    "text date": lambda draw, i: draw.choice(("2020-01-01", "2021-13-45", "31.12.2020", "noon", "")),
    "text number": lambda draw, i: draw.choice(("1", " 2 ", "3,5", "1e400", "0x1F", "١٢", "--", "+7", "1_000")),
    "mixed": lambda draw, i: draw.choice(("1", "x", "", "NA", "2.5")),
}
ONLY_PARQUET: dict[str, tuple[pyarrow.DataType, Callable[[random.Random, int], Any]]] = {
    "nanoseconds": (pyarrow.timestamp("ns"), lambda draw, i: draw.randrange(10**18)),
    "nanoseconds, zone": (pyarrow.timestamp("ns", "Europe/Berlin"), lambda draw, i: draw.randrange(10**18)),
    "time": (pyarrow.time64("ns"), lambda draw, i: draw.randrange(10**13)),
    "duration": (pyarrow.duration("ns"), lambda draw, i: draw.randrange(10**15)),
    "decimal": (pyarrow.decimal128(20, 5), lambda draw, i: decimal.Decimal(draw.randrange(10**9)) / 1000),
    "half": (pyarrow.float16(), lambda draw, i: draw.gauss(0, 1)),
    "unsigned": (pyarrow.uint64(), lambda draw, i: draw.choice((0, 2**64 - 1))),
    "binary": (pyarrow.binary(), lambda draw, i: b"\xff\x00"),
    "list": (pyarrow.list_(pyarrow.float32()), lambda draw, i: [1.0] * draw.randrange(3)),
    "struct": (pyarrow.struct([("a", pyarrow.int8())]), lambda draw, i: {"a": 1}),
    "map": (pyarrow.map_(pyarrow.string(), pyarrow.int8()), lambda draw, i: [("a", 1)]),
    "null": (pyarrow.null(), lambda draw, i: None),
    "category": (pyarrow.dictionary(pyarrow.int8(), pyarrow.string()), lambda draw, i: draw.choice("ab")),
    "large text": (pyarrow.large_string(), lambda draw, i: draw.choice(("a", "é"))),
    "date64": (pyarrow.date64(), lambda draw, i: 86_400_000 * draw.randrange(20_000)),
}
WILD = 0.35  # of the tables have several things wrong with them; the others can be learnt from, more or less
ENCODINGS = ("utf-8", "utf-8", "utf-8", "utf-8-sig", "latin-1", "cp1252", "utf-16", "utf-16-le", "utf-32", "shift_jis")
TARGETS = ("normal", "normal", "whole", "letters", "boolean", "rising", "holes", "not a number", "infinite", "mixed",
           "half", "decimal", "category")  # fmt: skip


def make(draw: random.Random, folder: Path) -> list[str]:
    """Write a table and return a command that reads it."""
    wild = draw.random() < WILD
    names, columns, roles = _columns(draw, wild)
    name = draw.choice(("t.csv", "t.csv", "t.parquet", "t.parquet", "t.tsv", "t.csv.gz", "t.pq", "t.txt"))
    if name in ("t.parquet", "t.pq"):
        content = _parquet(draw, names, columns)
    else:
        content = _text(draw, names, columns, name, wild)
    if wild and draw.random() < 0.2:
        content = odd.bytes_of(draw, content)
    (folder / name).write_bytes(gzip.compress(content) if name.endswith(".gz") and draw.random() < 0.9 else content)
    methods = ("fedavg", "local", "ditto", "mixed", "shared", "finetune", *(["group-fl"] if "group" in roles else []))
    method = draw.choice(methods)
    if draw.random() < 0.9:
        return _run(folder, name, roles, method)
    words = ["compare", name, "--methods", method, "--rounds", "1", "--seeds", "1", "--no-tune", "--jobs", "1"]
    for role, column in roles.items():
        words += [f"--{role}={column if isinstance(column, str) else ','.join(column)}"]
    return [*words, "--out", "out", *draw.choice(([], ["--json"], ["--model", "mlp"], ["--metric", "auc"]))]


def _run(folder: Path, name: str, roles: dict[str, Any], method: str) -> list[str]:
    """An experiment on the table: quicker than a comparison, for there is no report."""
    from benchmarks.attack.worlds import stages

    engine = {"workers": 0, "kind": "vectorized"}
    made = {"data": {"table": name, **roles}, "stage": stages(method, 1), "engine": engine}
    (folder / "exp.toml").write_text(tomli_w.dumps(made), encoding="utf-8")
    return ["run", "exp.toml", "--out", "out"]


def _columns(draw: random.Random, wild: bool) -> tuple[list[str], list[tuple[str, list[Any]]], dict[str, Any]]:
    """(names, columns by kind, what is what): some clients, a target, features and perhaps a group and a time."""
    clients, each = (draw.choice((0, 1, 2, 5)), draw.choice((1, 2, 8))) if wild else (draw.choice((2, 5, 8)), 8)
    rows = clients * each
    fancy = [*KINDS, *ONLY_PARQUET]
    wanted = {"client": "client", "y": draw.choice(fancy if wild else TARGETS)}
    for number in range(draw.choice((0, 1, 2)) if wild else draw.choice((1, 2, 4))):
        wanted[f"x{number}"] = draw.choice(fancy)
    if draw.random() < 0.3:
        wanted["g"] = draw.choice(fancy) if wild else "group"
    if draw.random() < 0.15:
        wanted["t"] = draw.choice(("moment", "date", "rising", "nanoseconds", "date64", *(fancy if wild else ())))
    ids = [draw.choice(odd.NAMES) if draw.random() < 0.2 else f"c{i}" for i in range(clients)]
    columns = []
    for kind in wanted.values():
        if kind == "client":
            values = [ids[i // each] for i in range(rows)]
            if wild and draw.random() < 0.2:
                values = [KINDS[draw.choice(list(KINDS))](draw, i) for i in range(rows)]
        elif kind == "group":
            values = [f"g{(i // each) % 2}" for i in range(rows)]
        else:
            maker = KINDS[kind] if kind in KINDS else ONLY_PARQUET[kind][1]
            values = [maker(draw, i) for i in range(rows)]
        if wild and draw.random() < 0.2:
            values = [None if draw.random() < 0.3 else entry for entry in values]
        columns.append((kind, values))
    names = list(wanted)
    if draw.random() < 0.3:
        names[draw.randrange(len(names))] = draw.choice(odd.NAMES)
    roles: dict[str, Any] = {"client": names[0], "target": names[1]}
    for key, role in (("g", "group"), ("t", "time")):
        if key in wanted:
            roles[role] = names[list(wanted).index(key)]
    if wild and draw.random() < 0.2:
        roles["features"] = [draw.choice(names) for _ in range(draw.randrange(1, 4))]
    if draw.random() < 0.1:
        roles["task"] = draw.choice(("regression", "classification"))
    return names, columns, roles


def _parquet(draw: random.Random, names: list[str], columns: list[tuple[str, list[Any]]]) -> bytes:
    arrays = []
    for kind, values in columns:
        try:
            wanted = ONLY_PARQUET[kind][0] if kind in ONLY_PARQUET else None
            arrays.append(pyarrow.array(values, wanted))
        except (pyarrow.ArrowException, TypeError, ValueError, OverflowError):
            arrays.append(pyarrow.array([None if entry is None else str(entry) for entry in values]))
    file = io.BytesIO()
    table = pyarrow.Table.from_arrays(arrays, names=[name.replace("\x00", "") for name in names])
    parquet.write_table(table, file, compression=draw.choice(("snappy", "none", "zstd")))
    return file.getvalue()


def _text(draw: random.Random, names: list[str], columns: list[tuple[str, list[Any]]], file: str, wild: bool) -> bytes:
    comma = "\t" if file.endswith(".tsv") else draw.choice((",", ";", "|") if wild else (",",))
    end, holes = draw.choice(("\n", "\n", "\r\n", "\r")), draw.choice(("", "", "NA", "NaN", "null", "?"))
    lines = [names, *([holes if entry is None else entry for entry in row] for row in zip(*(v for _, v in columns)))]
    text = end.join(comma.join(_cell(draw, entry, comma) for entry in line) for line in lines)
    text = text if wild else text.replace("\x00", "")  # one of which makes a file no text
    return (text + draw.choice(("", end))).encode(draw.choice(ENCODINGS) if wild else "utf-8", errors="replace")


def _cell(draw: random.Random, entry: Any, comma: str) -> str:
    text = str(entry)
    quoted = any(letter in text for letter in (comma, '"', "\n", "\r"))
    return '"' + text.replace('"', '""') + '"' if quoted and draw.random() < 0.99 else text
