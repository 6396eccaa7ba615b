"""Columns of Arrow as arrays: what a value is, and which are missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from bespoke.data.about import ColumnKind
from bespoke.errors import UserError

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

MISSING = ["", "?", "NA", "N/A", "n/a", "#N/A", "NaN", "nan", "NULL", "null"]


def is_number(kind: Any) -> bool:
    is_clock = pa.types.is_time(kind) or pa.types.is_duration(kind)
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind) or is_clock)


def is_date(kind: Any) -> bool:
    return bool(pa.types.is_date(kind) or pa.types.is_timestamp(kind))


def plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The column without Parquet's encodings: dictionaries and several kinds of texts."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_large_string(column.type) or pa.types.is_string_view(column.type):
        column = column.cast(pa.string())
    return column


def fitted(column: pa.ChunkedArray, kind: ColumnKind) -> pa.ChunkedArray:
    """The column with its declared type; values that do not fit are missing."""
    fits: dict[str, Callable[[Any], bool]] = {
        "number": is_number, "boolean": pa.types.is_boolean, "date": is_date, "category": pa.types.is_string,
        "text": pa.types.is_string,
    }  # fmt: skip
    if fits[kind](column.type):
        return column
    if kind in ("category", "text"):
        return pa.chunked_array([pa.array(_texts(column), type=pa.string())])
    import pandas as pd

    texts = pd.Series(_texts(column), dtype="object")
    if kind == "date":
        moments = pd.to_datetime(texts, errors="coerce", format="ISO8601", utc=True).dt.tz_localize(None)
        return pa.chunked_array([pa.array(moments.astype("datetime64[us]"), from_pandas=True)])
    words = {"true": 1.0, "yes": 1.0, "false": 0.0, "no": 0.0} if kind == "boolean" else {}
    numbers = pd.to_numeric(texts.map(lambda text: words.get(str(text).lower(), text)), errors="coerce")
    return pa.chunked_array([pa.array(numbers.astype("float64"), from_pandas=True)])


def _texts(column: pa.ChunkedArray) -> list[str | None]:
    names, code = levels_of(column, MISSING)
    return [None if place < 0 else str(names[place]) for place in code.tolist()]


def numbers_of(column: pa.ChunkedArray) -> NDArray[np.float64]:
    """As float64, NaN where missing."""
    if pa.types.is_time(column.type) or pa.types.is_duration(column.type):
        column = column.cast(pa.int32() if pa.types.is_time32(column.type) else pa.int64())
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.int8())
    numbers: NDArray[np.float64] = column.cast(pa.float64(), safe=False).to_numpy()
    return numbers


def seconds_of(column: pa.ChunkedArray) -> NDArray[np.float64]:
    """Dates as seconds since 1970, NaN where missing; from their own unit, for no other holds all of them."""
    if pa.types.is_date(column.type):
        column = column.cast(pa.timestamp("s" if pa.types.is_date32(column.type) else "ms"))
    parts = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}[column.type.unit]
    seconds: NDArray[np.float64] = column.cast(pa.int64()).cast(pa.float64(), safe=False).to_numpy() / parts
    return seconds


def levels_of(column: pa.ChunkedArray, missing: list[str]) -> tuple[NDArray[Any], Ints]:
    """The different values as texts, and each row's place among them (-1 where missing)."""
    if pa.types.is_floating(column.type):
        values = column.to_numpy()
        if np.array_equal(values, np.trunc(values), equal_nan=True):  # 7.0 is the id 7: a gap made floats of integers
            if (large := np.abs(values) >= 2.0**53).any():
                raise UserError(
                    f"a client, group or target is named by numbers such as {values[large][0]:g}, too large to be told "
                    "apart; write them with a letter in front, as texts"
                )
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
    known = encoded.dictionary.to_pylist()
    for text in known:
        if "\0" in text:  # numpy ends texts at zeros: two clients might share one name
            raise UserError(f"the text {text!r} holds a zero character, as no name may; write it otherwise")
    names = np.array(known, dtype=str)
    code = encoded.indices.fill_null(-1).to_numpy().astype(np.int64)
    if (absent := np.isin(names, missing)).any():
        place = np.append(np.where(absent, -1, np.cumsum(~absent) - 1), -1)
        names, code = names[~absent], place[code]
    return names, code


def is_missing(column: pa.ChunkedArray, texts: list[str]) -> Bools:
    """Which values are null, NaN, or one of these texts."""
    missing: Bools = column.is_null(nan_is_null=True).to_numpy()
    if pa.types.is_string(column.type):
        missing |= pc.is_in(column, value_set=pa.array(texts)).to_numpy()
    return missing


def is_row_number(column: pa.ChunkedArray) -> bool:
    if not pa.types.is_integer(column.type) or column.null_count or len(column) < 10:
        return False
    return bool((np.diff(column.to_numpy().astype(np.int64)) == 1).all())
