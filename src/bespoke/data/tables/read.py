"""Reads a CSV, text, JSON Lines or Parquet file into an Arrow table and detects delimiter, encoding and compression."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import math
import re
import zlib
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from bespoke.data.tables.columns import MISSING, plain
from bespoke.errors import UserError
from bespoke.plain import JsonObject

_CSV, _TEXT, _TSV, _PARQUET = (".csv",), (".txt", ".data", ".dat"), (".tsv", ".tab"), (".parquet", ".pq")
_JSON = (".jsonl", ".ndjson")


def read_file(path: Path, notes: list[str]) -> pa.Table:
    if not path.exists():
        raise UserError(f"there is no file {path}")
    if path.is_dir():
        raise UserError(
            f"{path} is a folder; name one CSV, JSON Lines or Parquet file (a folder is taken for texts by client, "
            "or, with --target, for pictures)"
        )
    suffix = Path(path.name.removesuffix(".gz")).suffix.lower()
    if suffix in _PARQUET:
        table = _read_parquet(path)
    elif suffix in _CSV + _TEXT + _TSV:
        table = _read_csv(path, suffix, notes)
    elif suffix in _JSON:
        table = _read_json(path)
    else:
        allowed = ", ".join((*_CSV, *_TEXT, *_TSV, *_JSON, *_PARQUET))
        raise UserError(f"{path.name} ends in {suffix!r}; tables are read from {allowed}, the texts also as .gz")
    names = table.column_names
    if twice := sorted(name for name, times in Counter(names).items() if times > 1):
        raise UserError(f"{path.name} has several columns of one name: {', '.join(map(repr, twice))}")
    if table.num_rows == 0:
        raise UserError(f"{path.name} is empty: it has {len(names)} columns and no rows")
    kept = [name for name in names if not name.startswith("__index_level_")]  # pandas' row labels
    return pa.table({name: plain(table[name]) for name in kept})


def _read_parquet(path: Path) -> pa.Table:
    try:
        table = pyarrow.parquet.read_table(path)
        table.column_names  # noqa: B018  (decoded only here)
        table.validate(full=True)  # texts, too, are decoded only where they are used
        return table
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not a readable Parquet file ({_first_line(error)})") from None


def _read_csv(path: Path, suffix: str, notes: list[str]) -> pa.Table:
    start = _first_bytes(path)
    encodings = ("utf-8", "cp1252")
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):  # as Excel's "Unicode text"
        encodings, start = ("utf-16", "utf-16"), start.decode("utf-16", errors="ignore").encode()
    if b"\0" in start:
        raise UserError(f"{path} is not a readable CSV file: it holds zero bytes, so it is no text")
    delimiter = "\t" if suffix in _TSV else _delimiter(start, " " if suffix in _TEXT else "")
    _check_header(path, start, delimiter)
    if delimiter == " " or delimiter.encode() + b" " in _unquoted_header(start):
        return _read_spaced(path, delimiter, notes)
    parse, convert = _options(delimiter, start)
    for encoding in encodings:
        read = pyarrow.csv.ReadOptions(encoding=encoding, block_size=1 << 24)
        try:
            table = pyarrow.csv.read_csv(path, read, parse, convert)
            table.column_names  # noqa: B018  (decoded only here, while values are checked as they are read)
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


def _read_json(path: Path) -> pa.Table:
    """One object a line; a name that an object lacks is a missing value."""
    columns: dict[str, list[Any]] = {}
    try:
        with (
            gzip.open(path, "rt", encoding="utf-8-sig")
            if path.suffix == ".gz"
            else open(path, encoding="utf-8-sig") as lines
        ):
            count = 0
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                for name, value in _json_object(path, number, line).items():
                    column = columns.setdefault(name, [])
                    column += [None] * (count - len(column))
                    column.append(value)
                count += 1
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not a readable JSON Lines file: {_first_line(error)}") from None
    return pa.table({name: _json_column(values + [None] * (count - len(values))) for name, values in columns.items()})


def _json_object(path: Path, number: int, line: str) -> JsonObject:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"line {number} of {path} is not valid JSON: {_first_line(error)}") from None
    if not isinstance(found, dict):
        raise UserError(f"line {number} of {path} holds {line.strip()[:40]!r}; every line has to be an object {{...}}")
    return found


def _json_column(values: list[Any]) -> pa.Array:
    """Values of several kinds are taken as texts; texts that are all dates as dates, as in a CSV file."""
    try:
        column = pa.array(values)
    except (pa.ArrowException, OverflowError):
        column = pa.array([value if value is None or isinstance(value, str) else json.dumps(value) for value in values])
    if pa.types.is_string(column.type):
        for kind in (pa.date32(), pa.timestamp("s"), pa.timestamp("us")):
            with contextlib.suppress(pa.ArrowException):
                return column.cast(kind)
    return column


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


def _unquoted_header(start: bytes) -> bytes:
    """The first line that is not empty, quoted names left out."""
    return b"".join(_header(start).split(b'"')[::2])


def _header(start: bytes) -> bytes:
    """The first line that is not empty, whichever of the three line ends the file has."""
    return re.split(rb"[\r\n]", start.lstrip(), maxsplit=1)[0]


def _delimiter(start: bytes, otherwise: str) -> str:
    """The candidate most frequent in the header; `otherwise`, if given, where there is none."""
    header = _unquoted_header(start)
    best = max(",;\t|", key=lambda sign: header.count(sign.encode()))
    return best if best.encode() in header or not otherwise else otherwise


def _check_header(path: Path, start: bytes, delimiter: str) -> None:
    """Refuse a file whose first line is a row already: then some names are numbers, but not such as label columns."""
    line = _header(start).decode("utf-8", errors="replace").strip()
    names = next(csv.reader([line], delimiter=delimiter, skipinitialspace=True), [])
    numbers = [number for number in map(_number, names) if number is not None]
    labels = all(number.is_integer() for number in numbers) and all(a < b for a, b in pairwise(numbers))
    if len(numbers) == len(names):
        labels = numbers == list(range(len(names)))  # as pandas writes a table without names
    if numbers and not labels:
        shown = ", ".join(names[:5]) + (", ..." if names[5:] else "")
        raise UserError(
            f"the first line of {path.name} holds values ({shown}); it has to name the columns: put a line with a name "
            "for each column before it"
        )


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _read_spaced(path: Path, delimiter: str, notes: list[str]) -> pa.Table:
    """A text whose values have blanks before them, or nothing but blanks between them."""
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    for encoding in ("utf-16",) if content.startswith((b"\xff\xfe", b"\xfe\xff")) else ("utf-8-sig", "cp1252"):
        try:
            text = content.decode(encoding)
            break
        except UnicodeDecodeError:
            continue
    else:
        raise UserError(f"{path} is not a readable table: it is neither in UTF-8 nor in cp1252")
    if encoding != "utf-8-sig":
        notes.append(f"The file is not in UTF-8; it was read as {encoding}.")
    blank = delimiter == " "
    lines = (" ".join(line.split()) if blank and '"' not in line else line.strip() for line in text.splitlines())
    rows = [row for row in csv.reader(lines, delimiter=delimiter, skipinitialspace=True) if row]
    if blank and len(rows) > 1 and all(len(row) == len(rows[0]) + 1 for row in rows[1:]):
        notes.append("The first value of every line is taken for the row's name and left out, as R writes tables.")
        rows[1:] = [row[1:] for row in rows[1:]]
    for place, row in enumerate(rows):
        if len(row) != len(rows[0]):
            raise UserError(
                f"{path} is not a readable table: row {place} has {len(row)} values, the first line {len(rows[0])}"
            )
    plain_text = io.StringIO()
    csv.writer(plain_text, delimiter=delimiter).writerows([value.strip() for value in row] for row in rows)
    cleaned = plain_text.getvalue().encode()
    parse, convert = _options(delimiter, cleaned)
    return pyarrow.csv.read_csv(io.BytesIO(cleaned), None, parse, convert)


def _options(delimiter: str, start: bytes) -> tuple[Any, Any]:
    """How values are told apart and understood; where ';' separates columns, the decimal point is often a comma."""
    decimal = "," if delimiter == ";" and b"." not in start.split(b"\n", 1)[-1] else "."
    parse = pyarrow.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
    convert = pyarrow.csv.ConvertOptions(
        null_values=MISSING,
        decimal_point=decimal,
        timestamp_parsers=[pyarrow.csv.ISO8601, "%Y/%m/%d", "%Y/%m/%d %H:%M:%S", "%d.%m.%Y"],
    )
    return parse, convert


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return lines[0][:300] if lines else type(error).__name__
