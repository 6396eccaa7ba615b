"""Columns of a table as numbers to learn from: indicators of categories, parts of dates, and what is left out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from bespoke.data.columns import (
    MISSING,
    is_date,
    is_missing,
    is_number,
    is_row_number,
    levels_of,
    numbers_of,
    seconds_of,
)

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

LEVELS = 20  # of a category that get an indicator of their own; the rest share one
TOO_MANY_TEXTS = 1000  # different texts beyond which a column is taken for ids or free text
OTHER = "(other)"
HIGHEST = float(np.finfo(np.float32).max)


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


def encoded(
    table: pa.Table, chosen: list[str], code: Ints, clients: int, notes: list[str], category: str | None = None
) -> list[Feature]:
    """The chosen columns as features; whatever is left out is said in `notes`.

    category: a column that is one whatever it holds, such as the number of a group.
    """
    built: list[Feature] = []
    constant: list[str] = []
    for name in chosen:
        column = table[name]
        if column.type == pa.null():
            constant.append(name)
            continue
        candidates = _encode(name, column, code, clients, notes, name == category)
        kept = [feature for feature in candidates if feature.varies]
        if candidates and not kept:
            constant.append(name)
        built += kept
    if constant:
        notes.append(f"Left out, because they are the same in every row: {', '.join(constant)}.")
    return built


def _encode(
    name: str, column: pa.ChunkedArray, code: Ints, clients: int, notes: list[str], category: bool
) -> list[Feature]:
    kind = column.type
    if category or pa.types.is_string(kind):
        encoded = _category(name, column, code, clients, notes)
    elif is_date(kind):
        encoded = _dates(name, column)
    elif is_number(kind):
        if is_row_number(column):
            notes.append(f"Left out: {name} numbers the rows.")
            return []
        encoded = [_number(name, column, notes)]
    elif pa.types.is_boolean(kind):
        encoded = [Feature(name, numbers_of(column).astype(np.float32), False)]
    else:
        notes.append(f"Left out: {name} holds {kind}, which is neither number, text, boolean nor date.")
        return []
    if not encoded:
        return []
    missing = is_missing(column, MISSING) | np.isnan(encoded[0].values)
    return [*encoded, Feature(f"{name} missing", missing.astype(np.float32), False)]


def _number(name: str, column: pa.ChunkedArray, notes: list[str]) -> Feature:
    values = numbers_of(column)
    infinite = np.abs(values) > HIGHEST
    if infinite.any():
        notes.append(f"{int(infinite.sum())} infinite values of {name} are taken as missing.")
        values = np.where(infinite, np.nan, values)
    yes_no = bool(np.isin(values, (0.0, 1.0)).all())
    return Feature(name, values.astype(np.float32), not yes_no)


def _dates(name: str, column: pa.ChunkedArray) -> list[Feature]:
    seconds = seconds_of(column)
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
    levels, level = levels_of(column, MISSING)
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
