"""A user's own table, CSV or Parquet, as a population: say which column is the client and which the target.

Numbers stay numbers; booleans become 0 and 1; categories become indicators; dates become year, month, weekday and days.
Whatever is inferred, left out or dropped is said in `about['notes']`.
"""

from __future__ import annotations

import gzip
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet
from numpy.typing import NDArray

from bespoke.data.population import NO_GROUP, Population
from bespoke.errors import UserError, unknown

TableTask = Literal["regression", "classification"]
Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

LEVELS = 20  # of a category that get an indicator of their own; the rest share one
TOO_MANY_TEXTS = 1000  # different texts beyond which a column is taken for ids or free text
MISSING = ["", "?", "NA", "N/A", "n/a", "#N/A", "NaN", "nan", "NULL", "null"]
OTHER = "(other)"
_CSV, _TSV, _PARQUET = (".csv", ".txt"), (".tsv", ".tab"), (".parquet", ".pq")
_HIGHEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Feature:
    """One column of x."""

    name: str
    values: Floats
    numeric: bool  # to be standardized

    @property
    def varies(self) -> bool:
        present = self.values[~np.isnan(self.values)]
        return len(present) > 0 and bool(present.min() < present.max())


def read_table(
    path: str | Path,
    client: str,
    target: str,
    *,
    group: str | None = None,
    features: Sequence[str] | None = None,
    time: str | None = None,
    task: TableTask | None = None,
) -> Population:
    """Read a .csv, .csv.gz, .tsv or .parquet file.

    `client` names a column, or several joined by commas (their ids are joined by '/'). `features` are all other columns
    unless named. `time` is a column of numbers or dates, kept for splits by time. `task` is inferred unless given.
    """
    path = Path(path)
    if task not in (None, "regression", "classification"):
        raise unknown("task", task, ("regression", "classification"))
    notes: list[str] = []
    table = _read(path, notes)
    names = table.column_names
    clients = [client] if client in names else [part.strip() for part in client.split(",")]
    for name in [*clients, target, *([group] if group else []), *([time] if time else []), *(features or [])]:
        if name not in names:
            raise unknown("column", name, names, where=path.name)
    if target in [*clients, *(features or []), group, time]:
        raise UserError(f"the target {target!r} of {path.name} cannot be client, feature, group or time as well")

    table = _drop_unusable(table, clients, target, path, notes)
    ids, code = _clients(table, clients, path)
    if len(ids) < 2:
        raise UserError(f"{path.name} has one client only, {client} = {str(ids[0])!r}; a federation needs two or more")
    if len(ids) == len(code):
        raise UserError(
            f"the column {client!r} of {path.name} is different in each of the {len(code)} rows, so every client would "
            "have one example: nothing to train on and be tested on. Name the column that says whose row it is"
        )
    y, inferred, classes = _target(table[target], target, task, notes)
    taken = {*clients, target, group, time}
    chosen = list(dict.fromkeys(features)) if features else [name for name in names if name not in taken]
    before = len(notes)
    built = _features(table, chosen, code, len(ids), notes)
    if not built:
        reasons = " ".join(notes[before:]) or "there is no other column."
        raise UserError(f"{path.name} has no usable feature beside {', '.join(filter(None, taken))}: {reasons}")
    _note_clients(y, code, len(ids), notes)

    x = np.column_stack([feature.values for feature in built])
    columns: dict[str, Any] = {"x": x, "y": y}
    if time is not None:
        columns["time"] = _time(table[time], time, path, notes)
    about = {
        "name": path.name.split(".")[0],
        "title": f"{path.name}: {target} by {client}",
        "task": inferred,
        "features": [feature.name for feature in built],
        "numeric": [feature.numeric for feature in built],
        "target": target,
        "input": "table",
        "missing": bool(np.isnan(x).any()),
        "licence": "the user's own",
        "notes": notes,
        "standardize": {"features": "global", "target": inferred == "regression"},
    }
    if classes is not None:
        about["classes"] = classes
    labels = None if group is None else _labels(table[group])
    return Population.build(columns, ids[code], group=labels, about=about)


# Reading


def _read(path: Path, notes: list[str]) -> pa.Table:
    if not path.exists():
        raise UserError(f"there is no file {path}")
    if path.is_dir():
        raise UserError(f"{path} is a folder; name one CSV or Parquet file")
    suffix = Path(path.name.removesuffix(".gz")).suffix.lower()
    if suffix in _PARQUET:
        table = _read_parquet(path)
    elif suffix in _CSV + _TSV:
        table = _read_csv(path, suffix, notes)
    else:
        allowed = ", ".join((*_CSV, *_TSV, *_PARQUET))
        raise UserError(f"{path.name} ends in {suffix!r}; tables are read from {allowed}, the texts also as .gz")
    names = table.column_names
    if twice := sorted(name for name, times in Counter(names).items() if times > 1):
        raise UserError(f"{path.name} has several columns of one name: {', '.join(map(repr, twice))}")
    if table.num_rows == 0:
        raise UserError(f"{path.name} is empty: it has {len(names)} columns and no rows")
    kept = [name for name in names if not name.startswith("__index_level_")]  # pandas' row labels
    return pa.table({name: _plain(table[name]) for name in kept})


def _read_parquet(path: Path) -> pa.Table:
    try:
        return pyarrow.parquet.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path} is not a readable Parquet file ({_first_line(error)})") from None


def _read_csv(path: Path, suffix: str, notes: list[str]) -> pa.Table:
    start = _first_bytes(path)
    encodings = ("utf-8", "cp1252")
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):  # as Excel's "Unicode text"
        encodings, start = ("utf-16", "utf-16"), start.decode("utf-16", errors="ignore").encode()
    if b"\0" in start:
        raise UserError(f"{path} is not a readable CSV file: it holds zero bytes, so it is no text")
    delimiter = "\t" if suffix in _TSV else _delimiter(start)
    # Where ';' separates columns, the decimal point is often a comma.
    decimal = "," if delimiter == ";" and b"." not in start.split(b"\n", 1)[-1] else "."
    parse = pyarrow.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
    convert = pyarrow.csv.ConvertOptions(
        null_values=MISSING,
        decimal_point=decimal,
        timestamp_parsers=[pyarrow.csv.ISO8601, "%Y/%m/%d", "%Y/%m/%d %H:%M:%S", "%d.%m.%Y"],
    )
    for encoding in encodings:
        read = pyarrow.csv.ReadOptions(encoding=encoding, block_size=1 << 24)
        try:
            table = pyarrow.csv.read_csv(path, read, parse, convert)
        except UnicodeDecodeError:
            continue
        except (pa.ArrowException, OSError, EOFError, zlib.error) as error:
            read.use_threads = False  # then the error names the row
            raise UserError(f"{path} is not a readable CSV file: {_csv_problem(path, read, parse, error)}") from None
        if not any(pa.types.is_binary(field.type) for field in table.schema):  # bytes that are not UTF-8
            if encoding != "utf-8":
                notes.append(f"The file is not in UTF-8; it was read as {encoding}.")
            return table
    raise UserError(f"{path} is not a readable CSV file: it is neither in UTF-8 nor in cp1252")


def _csv_problem(path: Path, read: Any, parse: Any, error: BaseException) -> str:
    try:
        pyarrow.csv.read_csv(path, read, parse)
    except (pa.ArrowException, OSError, EOFError, zlib.error) as again:
        error = again
    return _first_line(error)


def _first_bytes(path: Path) -> bytes:
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            return file.read(1 << 16)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} cannot be read: {_first_line(error)}") from None


def _delimiter(start: bytes) -> str:
    """The candidate most frequent in the header, quoted names left out."""
    header = start.split(b"\n", 1)[0]
    unquoted = b"".join(header.split(b'"')[::2])
    return max(",;\t|", key=lambda sign: unquoted.count(sign.encode()))


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return lines[0][:300] if lines else type(error).__name__


# Rows and clients


def _drop_unusable(table: pa.Table, clients: list[str], target: str, path: Path, notes: list[str]) -> pa.Table:
    no_client = np.logical_or.reduce([_missing(table[name], [""]) for name in clients])
    no_target = _missing(table[target], MISSING) & ~no_client
    infinite = np.zeros(table.num_rows, dtype=bool)
    if _is_number(table[target].type):
        infinite = (np.abs(_numbers(table[target])) > _HIGHEST) & ~no_client
    dropped = [(no_client, "the client is missing"), (no_target, "the target is missing"),
               (infinite, "the target is infinite")]  # fmt: skip
    for which, reason in dropped:
        if count := int(which.sum()):
            notes.append(f"{count} of {table.num_rows} rows were dropped: {reason}.")
    keep = ~(no_client | no_target | infinite)
    if not keep.any():
        raise UserError(f"{path.name} has no usable row: {' '.join(notes)}")
    return table if keep.all() else table.filter(pa.array(keep))


def _clients(table: pa.Table, columns: list[str], path: Path) -> tuple[NDArray[Any], Ints]:
    """The different client ids, and each row's place among them."""
    names, code = _levels(table[columns[0]], [""])
    for column in columns[1:]:
        more, other = _levels(table[column], [""])
        pairs, code = np.unique(code * len(more) + other, return_inverse=True)
        names = np.array([f"{names[pair // len(more)]}/{more[pair % len(more)]}" for pair in pairs.tolist()])
        if len(set(names.tolist())) < len(names):
            raise UserError(
                f"the ids of {', '.join(columns)} in {path.name} contain '/', so that two clients would share one id"
            )
    return names, code


def _note_clients(y: NDArray[Any], code: Ints, clients: int, notes: list[str]) -> None:
    sizes = np.bincount(code, minlength=clients)
    lowest, highest = np.full(clients, np.inf), np.full(clients, -np.inf)
    np.minimum.at(lowest, code, y)
    np.maximum.at(highest, code, y)
    single, constant = int((sizes == 1).sum()), int(((sizes > 1) & (lowest == highest)).sum())
    if single:
        notes.append(f"{single} of {clients} clients have one example: they can train or be tested, not both.")
    if constant:
        notes.append(f"{constant} of {clients} clients have several examples, all with one and the same target.")


def _time(column: pa.ChunkedArray, name: str, path: Path, notes: list[str]) -> NDArray[np.float64]:
    if _is_date(column.type):
        times = _seconds(column)
    elif _is_number(column.type):
        times = _numbers(column)
    else:
        raise UserError(
            f"the time column {name!r} of {path.name} holds {column.type}, neither numbers nor dates "
            "(such as 2024-12-31)"
        )
    if count := int(np.isnan(times).sum()):
        notes.append(f"{count} rows have no time: in splits by time they come last.")
    return times


def _labels(column: pa.ChunkedArray) -> NDArray[Any]:
    names, code = _levels(column, [""])
    return np.append(names, NO_GROUP)[code]  # the code of a missing value is -1: the last


# The target


def _target(
    column: pa.ChunkedArray, name: str, task: TableTask | None, notes: list[str]
) -> tuple[NDArray[Any], TableTask, list[str] | None]:
    """The target's values, the task, and the classes' names."""
    kind = column.type
    if _is_number(kind):
        values = _numbers(column)
        different = np.unique(values)
        if len(different) < 2:
            raise _constant(name, different[0].item())
        inferred, reason = _numeric_task(kind, values, different)
        if (task or inferred) == "regression":
            if task is None:
                notes.append(f"The task is regression: {name} {reason}.")
            return values.astype(np.float32), "regression", None
        classes = [str(int(value)) if value.is_integer() else str(value) for value in different.tolist()]
        codes = np.searchsorted(different, values)
    elif _is_date(kind) or pa.types.is_nested(kind):
        raise UserError(f"the target {name!r} holds {kind}; it has to hold numbers, texts or booleans")
    else:
        levels, codes = _levels(column, MISSING)
        order = np.argsort(levels)
        classes, codes, reason = levels[order].tolist(), np.argsort(order)[codes], f"holds {kind}"
        if len(classes) < 2:
            raise _constant(name, classes[0])
        if task == "regression" and not pa.types.is_boolean(kind):
            raise UserError(f"the target {name!r} holds texts such as {classes[0]!r}: regression needs numbers")
        if task == "regression":
            return codes.astype(np.float32), "regression", None
    if len(classes) > TOO_MANY_TEXTS or len(classes) > len(codes) / 2:
        raise UserError(
            f"the target {name!r} has {len(classes)} different values in {len(codes)} rows: too many for classes "
            f"(such as {classes[0]!r}). Is it the right column?"
        )
    if task is None:
        notes.append(f"The task is classification into {len(classes)} classes: {name} {reason}.")
    return codes.astype(np.int64), "classification", classes


def _numeric_task(kind: Any, values: NDArray[np.float64], different: NDArray[np.float64]) -> tuple[TableTask, str]:
    """Whole numbers that count 0, 1, 2, ... or 1, 2, 3, ... up to 20 are taken for classes, if each is frequent."""
    few = len(different) <= 20 and len(values) >= 5 * len(different)
    counting = different[0] in (0, 1) and bool((np.diff(different) == 1).all())
    whole = pa.types.is_integer(kind) or len(different) == 2
    if len(different) == 2 and pa.types.is_integer(kind):
        return "classification", "has two different whole numbers"
    if few and counting and whole:
        return "classification", f"counts {different[0]:g} to {different[-1]:g}; say task = regression for a quantity"
    return "regression", f"holds numbers, {len(different)} different ones"


def _constant(name: str, value: object) -> UserError:
    return UserError(f"the target {name!r} is {value!r} in every row: there is nothing to learn")


# Features


def _features(table: pa.Table, chosen: list[str], code: Ints, clients: int, notes: list[str]) -> list[Feature]:
    built: list[Feature] = []
    constant: list[str] = []
    for name in chosen:
        column = table[name]
        if column.type == pa.null():
            constant.append(name)
            continue
        candidates = _encode(name, column, code, clients, notes)
        kept = [feature for feature in candidates if feature.varies]
        if candidates and not kept:
            constant.append(name)
        built += kept
    if constant:
        notes.append(f"Left out, because they are the same in every row: {', '.join(constant)}.")
    return built


def _encode(name: str, column: pa.ChunkedArray, code: Ints, clients: int, notes: list[str]) -> list[Feature]:
    kind = column.type
    if _is_date(kind):
        encoded = _dates(name, column)
    elif _is_number(kind):
        if _is_row_number(column):
            notes.append(f"Left out: {name} numbers the rows.")
            return []
        encoded = [_number(name, column, notes)]
    elif pa.types.is_boolean(kind):
        encoded = [Feature(name, _numbers(column).astype(np.float32), False)]
    elif pa.types.is_string(kind):
        encoded = _category(name, column, code, clients, notes)
    else:
        notes.append(f"Left out: {name} holds {kind}, which is neither number, text, boolean nor date.")
        return []
    if not encoded:
        return []
    missing = _missing(column, MISSING) | np.isnan(encoded[0].values)
    return [*encoded, Feature(f"{name} missing", missing.astype(np.float32), False)]


def _number(name: str, column: pa.ChunkedArray, notes: list[str]) -> Feature:
    values = _numbers(column)
    infinite = np.abs(values) > _HIGHEST
    if infinite.any():
        notes.append(f"{int(infinite.sum())} infinite values of {name} are taken as missing.")
        values = np.where(infinite, np.nan, values)
    yes_no = bool(np.isin(values, (0.0, 1.0)).all())
    return Feature(name, values.astype(np.float32), not yes_no)


def _dates(name: str, column: pa.ChunkedArray) -> list[Feature]:
    seconds = _seconds(column)
    days = (seconds - np.nanmin(seconds)) / 86400 if not np.isnan(seconds).all() else seconds
    moments = column.cast(pa.timestamp("us"))
    year, month, weekday = (part(moments).cast(pa.float64()).to_numpy() for part in (pc.year, pc.month, pc.day_of_week))
    angle = 2 * np.pi * (month - 1) / 12
    numbers = {"days since first": days, "year": year, "month sin": np.sin(angle), "month cos": np.cos(angle)}
    week = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
    return [
        *(Feature(f"{name} {part}", values.astype(np.float32), True) for part, values in numbers.items()),
        *(Feature(f"{name} {day}", (weekday == i).astype(np.float32), False) for i, day in enumerate(week)),
    ]


def _category(name: str, column: pa.ChunkedArray, code: Ints, clients: int, notes: list[str]) -> list[Feature]:
    """Indicators of the levels found at most clients (a count that secure aggregation could give), and of the rest."""
    levels, level = _levels(column, MISSING)
    rows = len(level)
    if len(levels) > TOO_MANY_TEXTS or (len(levels) > LEVELS and len(levels) > rows / 2):
        notes.append(f"Left out: {name} has {len(levels)} different texts in {rows} rows (ids or free text?).")
        return []
    there = level >= 0
    pairs = np.unique(level[there] * clients + code[there])
    spread = np.bincount(pairs // clients, minlength=len(levels))
    frequency = np.bincount(level[there], minlength=len(levels))
    order = np.lexsort((levels, -frequency, -spread))
    shown = order[:LEVELS]
    if len(levels) == 2:
        shown = shown[np.argsort(levels[shown])][1:]  # the second says it all
    features = [Feature(f"{name} = {levels[i]}", (level == i).astype(np.float32), False) for i in shown]
    if len(levels) > LEVELS:
        rest = there & ~np.isin(level, shown)
        features.append(Feature(f"{name} = {OTHER}", rest.astype(np.float32), False))
        notes.append(f"Of the {len(levels)} values of {name}, those found at most clients are features; the rest, one.")
    return features


# Columns of Arrow


def _is_number(kind: Any) -> bool:
    is_clock = pa.types.is_time(kind) or pa.types.is_duration(kind)
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind) or is_clock


def _is_date(kind: Any) -> bool:
    return pa.types.is_date(kind) or pa.types.is_timestamp(kind)


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Without the encodings that Parquet may bring: dictionaries, and texts of several kinds."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_large_string(column.type) or pa.types.is_string_view(column.type):
        column = column.cast(pa.string())
    return column


def _numbers(column: pa.ChunkedArray) -> NDArray[np.float64]:
    """As float64, NaN where missing."""
    if pa.types.is_time(column.type) or pa.types.is_duration(column.type):
        column = column.cast(pa.int32() if pa.types.is_time32(column.type) else pa.int64())
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.int8())
    return column.cast(pa.float64(), safe=False).to_numpy()


def _seconds(column: pa.ChunkedArray) -> NDArray[np.float64]:
    """Dates as seconds since 1970, NaN where missing."""
    return column.cast(pa.timestamp("us")).cast(pa.int64()).cast(pa.float64(), safe=False).to_numpy() / 1e6


def _levels(column: pa.ChunkedArray, missing: list[str]) -> tuple[NDArray[Any], Ints]:
    """The different values as texts, and each row's place among them (-1 where missing)."""
    if pa.types.is_floating(column.type):
        values = column.to_numpy()
        if np.array_equal(values, np.trunc(values), equal_nan=True):  # 7.0 is the id 7: a gap made floats of integers
            column = column.cast(pa.int64(), safe=False)
    try:
        texts = column.cast(pa.string())
    except pa.ArrowException:
        raise UserError(
            f"a client, group or target cannot be a column of {column.type}: its values are no texts"
        ) from None
    encoded = pc.dictionary_encode(texts).combine_chunks()
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.unify_dictionaries().chunk(0)
    names = np.array(encoded.dictionary.to_pylist(), dtype=str)
    code = encoded.indices.fill_null(-1).to_numpy().astype(np.int64)
    if (absent := np.isin(names, missing)).any():
        place = np.append(np.where(absent, -1, np.cumsum(~absent) - 1), -1)
        names, code = names[~absent], place[code]
    return names, code


def _missing(column: pa.ChunkedArray, texts: list[str]) -> Bools:
    """Which values are null, NaN, or one of these texts."""
    missing = column.is_null(nan_is_null=True).to_numpy()
    if pa.types.is_string(column.type):
        missing |= pc.is_in(column, value_set=pa.array(texts)).to_numpy()
    return missing


def _is_row_number(column: pa.ChunkedArray) -> bool:
    if not pa.types.is_integer(column.type) or column.null_count or len(column) < 10:
        return False
    return bool((np.diff(column.to_numpy().astype(np.int64)) == 1).all())
