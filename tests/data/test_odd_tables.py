"""Tables as other programs write them: times in nanoseconds, headers in any encoding, numbers without room."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from bespoke.data.tables.columns import seconds_of
from bespoke.data.tables.table import read_table
from bespoke.errors import UserError
from bespoke.experiment.checks import check_compare, checked
from bespoke.experiment.reading import read_config

ROWS = 40
WHO = [f"c{i % 4}" for i in range(ROWS)]
Y = np.random.default_rng(0).standard_normal(ROWS)


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
@pytest.mark.parametrize("zone", [None, "Europe/Berlin"])
def test_seconds_of_any_unit(unit: str, zone: str | None) -> None:
    """Against Python's own calendar."""
    moments = [datetime(2024, 2, 29, 23, 59, 58, tzinfo=UTC), datetime(1969, 7, 20, 20, 17, 40, tzinfo=UTC), None]
    column = pa.chunked_array([pa.array(moments, pa.timestamp(unit, tz=zone))])
    np.testing.assert_array_equal(seconds_of(column), [m.timestamp() if m else np.nan for m in moments])


def test_nanoseconds_are_features_and_times(tmp_path: Path) -> None:
    """What no microsecond holds, and what no nanosecond does: year 9999."""
    first = np.datetime64("2024-01-01T00:00:00.123456789", "ns").astype(np.int64)
    times = pa.array([int(first) + i * 86_400 * 10**9 + i for i in range(ROWS)], pa.timestamp("ns"))
    far = pa.array([253_402_300_799 * 1000 - i for i in range(ROWS)], pa.timestamp("ms"))
    parquet.write_table(pa.table({"who": WHO, "y": Y, "t": times, "far": far}), tmp_path / "t.parquet")
    lines = "".join(f"{w},{y},2024-01-{i % 28 + 1:02d} 00:00:00.123456789\n" for i, (w, y) in enumerate(zip(WHO, Y)))
    (tmp_path / "t.csv").write_text(f"who,y,t\n{lines}")
    found = read_table(tmp_path / "t.parquet", "who", "y")
    days = found.columns["x"][:, found.about["features"].index("t days since first")]
    assert sorted(days.round().int().tolist()) == list(range(ROWS))
    assert read_table(tmp_path / "t.parquet", "who", "y", time="t").columns["time"].is_floating_point()
    assert "t days since first" in read_table(tmp_path / "t.csv", "who", "y").about["features"]


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("blank", ["", " "])
def test_headers_in_any_encoding(encoding: str, blank: str, tmp_path: Path) -> None:
    lines = [f"{w},{blank}{i * i},{blank}{y}" for i, (w, y) in enumerate(zip(WHO, Y))]
    (tmp_path / "t.csv").write_bytes("\n".join([f"who,{blank}größe,{blank}y", *lines]).encode(encoding))
    assert read_table(tmp_path / "t.csv", "who", "y").about["features"] == ["größe"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"who,\x81,y\na,1,2\n", "neither in UTF-8 nor in cp1252"),
        ("who,x,y\na,1,2\n".encode("utf-16-le"), "zero bytes"),
        (b"who,x,x,y\na,1,1,2\n", "several columns of one name: 'x'"),
        (b"who,,,y\na,1,1,2\n", "several columns of one name: ''"),
        (b"\xef\xbb\xbf", "Empty CSV file"),
        (f"who,x,y\n{2**63},1,2\n{2**63 + 1},2,3\n".encode(), "too large to be told apart"),
    ],
)
def test_what_cannot_be_read_is_said(content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(content)
    with pytest.raises(UserError, match=words):
        read_table(tmp_path / "t.csv", "who", "y")


BASE = {"data": {"source": "exam"}, "stage": [{"method": "fedavg", "rounds": 1}]}
HUGE: list[Any] = [2**63, -(2**63) - 1, 10**400, 1e300]


@pytest.mark.parametrize("value", HUGE)
@pytest.mark.parametrize("key", ["seed", "cohort.size", "stage.lr", "stage.batch_size", "stage.server", "split.seed"])
def test_numbers_without_room_are_refused(key: str, value: Any, tmp_path: Path) -> None:
    outer, _, inner = key.partition(".")
    own = {**BASE["stage"][0], inner: {"lr": value} if inner == "server" else value}  # type: ignore[index]
    raw = {**BASE, outer: value if not inner else [own] if outer == "stage" else {inner: value}}
    with pytest.raises(UserError, match="single precision" if value == 1e300 else "below 2\\^63"):
        checked(raw, "experiment")


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_options_of_any_type_are_finite_too(value: float) -> None:
    data = {**BASE["data"], "options": {"any": [{"deep": value}]}}
    for part, name in (({"data": data}, r"data\.options\.any\.0\.deep"), ({"model": {"a": value}}, r"model\.a")):
        with pytest.raises(UserError, match=f"{name} = .*finite number"):
            checked({**BASE, **part}, "experiment")
    assert checked({**BASE, "attack": {"kind": math.nan}}, "experiment").attack.kind == "nan"  # as --set reads the word


def test_numbers_of_thousands_of_digits_and_seeds_without_end(tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text(f"seed = {'9' * 5000}\n")
    with pytest.raises(UserError, match="not valid TOML"):
        read_config(tmp_path / "e.toml")
    (tmp_path / "e.toml").write_text('\ufeff[[stage]]\nmethod = "fedavg"\nrounds = 1\n', encoding="utf-8")
    assert read_config(tmp_path / "e.toml").stage[0]["method"] == "fedavg"  # as Windows' editor writes it
    with pytest.raises(UserError, match="at most 1,000"):
        check_compare({"seeds": 2**62}, "file")
    for value in (math.inf, math.nan, -1, ""):
        with pytest.raises(UserError, match=r"stage 0: lr = "):
            checked({**BASE, "stage": [{"method": "fedavg", "rounds": 1, "lr": value}]}, "experiment")
    # None stands for what is not given
    assert checked({**BASE, "stage": [{**BASE["stage"][0], "lr": None}]}, "experiment").stage == BASE["stage"]  # type: ignore[index]
