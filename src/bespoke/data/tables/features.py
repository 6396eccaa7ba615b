"""Turns the cells of a table into numeric features: category indicators, parts of dates; some columns are left out.

`cells_of` holds a column as it is, without learning anything: numbers, 0 and 1, seconds since 1970, or the place of a
text in a list of levels; NaN where the value is missing. `learned` finds a schema in training rows, `encode` makes the
features that a schema asks for, in all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from bespoke.data.about import About, ColumnKind, RawColumn, without
from bespoke.data.population import Population
from bespoke.data.tables.columns import (
    MISSING,
    is_date,
    is_number,
    is_row_number,
    levels_of,
    numbers_of,
    seconds_of,
)
from bespoke.data.tables.schema import Column, Schema, Target
from bespoke.data.texts import tfidf
from bespoke.errors import UserError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

LEVELS = 20  # of a category that get an indicator of their own; the rest share one
TOO_MANY_TEXTS = 1000  # different texts beyond which a column is taken for ids or free text
OTHER = "(other)"
ENCODED = ("columns", "levels", "schema", "file", "aside", "pieces", "text")  # of a raw table's description
HIGHEST = float(np.finfo(np.float32).max)
WEEK = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


@dataclass(frozen=True)
class Feature:
    """One column of x."""

    name: str
    values: NDArray[np.float32]
    numeric: bool  # to be standardized

    @property
    def varies(self) -> bool:
        present = self.values[~np.isnan(self.values)]
        return len(present) > 0 and bool(present.min() < present.max())


def cells_of(
    name: str, column: pa.ChunkedArray, category: bool, notes: list[str], declared: ColumnKind | None = None
) -> tuple[RawColumn, Floats] | None:
    """A column's name, kind and levels, and its values; None if no feature can be made of it, which `notes` say.

    category: it is one whatever it holds, such as the number of a group. declared: its kind, if it is known.
    """
    kind, category = column.type, category or declared == "category"
    if kind == pa.null():
        return {"name": name, "kind": "number"}, np.full(len(column), np.nan)
    if category or pa.types.is_string(kind):
        levels, code = levels_of(column, MISSING)
        return {"name": name, "kind": "category", "levels": levels.tolist()}, np.where(code < 0, np.nan, code)
    if is_date(kind):
        return {"name": name, "kind": "date"}, seconds_of(column)
    if pa.types.is_boolean(kind):
        return {"name": name, "kind": "boolean"}, numbers_of(column)
    if not is_number(kind):
        notes.append(f"Left out: {name} holds {kind}, which is neither number, text, boolean nor date.")
        return None
    if declared is None and is_row_number(column):
        notes.append(f"Left out: {name} numbers the rows.")
        return None
    values = numbers_of(column)
    infinite = np.abs(values) > HIGHEST
    if infinite.any():
        notes.append(f"{int(infinite.sum())} infinite values of {name} are taken as missing.")
        values = np.where(infinite, np.nan, values)
    return {"name": name, "kind": "number"}, values


# What training rows tell


def learned(raw: Population, rows: Ints, notes: list[str]) -> Schema:
    """The schema of a table, learned from these rows only; `notes` list what is left out."""
    owner = np.searchsorted(raw.offsets, rows, side="right") - 1
    cells = raw.columns["cells"].numpy()[rows]
    columns, dropped, constant = [], set(), []
    for place, entry in enumerate(raw.about["columns"]):
        column = _learned(entry, cells[:, place], owner, len(raw), notes)
        if column is None:
            continue
        candidates = _features(column, cells[:, place], entry.get("levels", ()))
        kept = [feature.name for feature in candidates if feature.varies]
        if not kept:
            constant.append(column.name)
            continue
        columns.append(replace(column, missing=f"{column.name} missing" in kept))
        dropped |= {feature.name for feature in candidates} - {*kept, f"{column.name} missing"}
    if "pieces" in raw.columns:
        words, weights = tfidf.learned(raw, rows)
        columns.append(Column(raw.about["text"]["column"], "text", words=words, weights=weights))
        notes.append(
            f"The {len(words):,} words of {columns[-1].name} that are most frequent in the training rows are features: "
            "TF-IDF, sublinear, rows of norm one, not standardized."
        )
    if constant:
        notes.append(f"Left out, because they are the same in every row: {', '.join(constant)}.")
    return Schema(tuple(columns), _learned_target(raw, rows), left_out=frozenset(dropped))


def _learned_target(raw: Population, rows: Ints) -> Target:
    levels = raw.about.get("levels")
    if levels is None:
        return Target(raw.about["target"])
    seen = np.unique(raw.columns["y"].numpy()[rows])
    return Target(raw.about["target"], tuple(levels[i] for i in seen.tolist()), other=len(seen) < len(levels))


def _learned(entry: RawColumn, cells: Floats, owner: Ints, clients: int, notes: list[str]) -> Column | None:
    name, kind = entry["name"], entry["kind"]
    made = Column(name, kind, missing=True)
    if kind == "number" and bool(np.isin(cells, (0.0, 1.0)).all()):
        return replace(made, kind="boolean")
    if kind == "date" and not np.isnan(cells).all():
        first = float(np.nanmin(cells))
        return replace(made, first=first, first_name=str(np.datetime64(int(first * 1e6), "us")))
    if kind != "category":
        return made
    there = ~np.isnan(cells)
    found, level = np.unique(cells[there].astype(np.int64), return_inverse=True)
    levels, count = np.array([entry["levels"][i] for i in found.tolist()], dtype=str), len(cells)
    if len(levels) > TOO_MANY_TEXTS or (len(levels) > LEVELS and len(levels) > count / 2):
        notes.append(
            f"Left out: {name} has {len(levels)} different texts in {count} rows (ids, or free text: say --text {name} "
            "to use it)."
        )
        return None
    # found at most clients: a count that secure aggregation could give
    pairs = np.unique(level * clients + owner[there])
    spread = np.bincount(pairs // clients, minlength=len(levels))
    frequency = np.bincount(level, minlength=len(levels))
    shown = levels[np.lexsort((levels, -frequency, -spread))[:LEVELS]]
    if len(levels) == 2:
        shown = np.sort(shown)[1:]  # the second says it all
    if len(levels) > LEVELS:
        notes.append(f"Of the {len(levels)} values of {name}, those found at most clients are features; the rest, one.")
    return replace(made, categories=tuple(shown.tolist()), other=len(levels) > LEVELS)


def declare(raw: Population) -> Schema:
    """The schema of a public table from all of its rows, with ranges, means and deviations of its numbers."""
    found, cells = learned(raw, np.arange(raw.rows), []), raw.columns["cells"].numpy()
    places = {entry["name"]: place for place, entry in enumerate(raw.about["columns"])}
    columns = []
    for column in found.columns:
        if column.kind == "text":
            columns.append(column)
            continue
        place = places[column.name]
        if column.kind == "category":
            levels = raw.about["columns"][place]["levels"]
            every = tuple(sorted(levels)) if len(levels) == 2 else column.categories
            column = replace(column, categories=every, other=True)
        columns.append(replace(column, range=_span(cells[:, place]) if column.kind == "number" else None))
    span = _span(raw.columns["y"].numpy()) if found.target.classes is None else None
    schema = Schema(tuple(columns), replace(found.target, range=span))
    population = encode(raw, schema)
    x, about = population.columns["x"].numpy(), population.about
    numbers = {about["features"][place]: x[:, place] for place in np.flatnonzero(about["numeric"]).tolist()}
    if span is not None:
        numbers[schema.target.name] = raw.columns["y"].numpy()
    pairs = {n: (float(np.nanmean(v, dtype=float)), float(np.nanstd(v, dtype=float))) for n, v in numbers.items()}
    return replace(schema, statistics={name: (mean, spread or 1.0) for name, (mean, spread) in pairs.items()})


def _span(values: Any) -> tuple[float, float] | None:
    """The smallest and the largest value; None if they are the same."""
    low, high = (float(end) for end in (np.nanmin(values), np.nanmax(values)))
    return (low, high) if low < high else None


# What a schema makes of them


def encode(raw: Population, schema: Schema, notes: Sequence[str] = ()) -> Population:
    """A table as features and target; `notes` say where the schema came from."""
    known = {entry["name"]: (place, entry.get("levels", ())) for place, entry in enumerate(raw.about["columns"])}
    cells = raw.columns["cells"].numpy()
    built: list[Feature] = []
    written: Column | None = None
    for column in schema.columns:
        if column.kind == "text":
            written = column
            continue
        place, levels = known[column.name]
        built += [f for f in _features(column, cells[:, place], levels) if f.name not in schema.left_out]
    if not built and (written is None or not written.words):
        reasons = " ".join(notes) or "there is no other column."
        raise UserError(f"{raw.about['file']} has no usable feature beside {raw.about['aside']}: {reasons}")
    x = np.column_stack([np.empty((raw.rows, 0), np.float32), *(feature.values for feature in built)])
    names, numeric = [feature.name for feature in built], [feature.numeric for feature in built]
    more: About = {}
    if written is not None:
        x = np.column_stack([x, tfidf.features(raw, written.words, written.weights)])
        names += [f"{written.name}: {word}" for word in written.words]
        numeric += [False] * len(written.words)
        more["tfidf"] = {**raw.about["text"], "words": list(written.words), "weights": list(written.weights)}
    y, classes = raw.columns["y"], list(schema.target.classes or ())
    if schema.target.classes is not None:
        place_of = {name: i for i, name in enumerate(classes)}
        classes += [OTHER] if schema.target.other else []
        levels = raw.about["levels"] or []
        places = torch.tensor([place_of.get(name, len(place_of)) for name in levels], dtype=torch.int64)
        y = places[y]
    about = without(raw.about, ENCODED)
    about |= {
        "features": names,
        "numeric": numeric,
        "missing": bool(np.isnan(x).any()),
        "notes": [*about.get("notes", []), *notes],
        **({"classes": classes} if classes else {}),
        **more,
    }
    rest = {name: column for name, column in raw.columns.items() if name not in ("cells", "pieces", "y")}
    return replace(raw, columns={"x": torch.from_numpy(x), "y": y, **rest}, about=about, reader=None)


def _features(column: Column, cells: Floats, levels: Sequence[str]) -> list[Feature]:
    """All features of a column; the last says where it is missing, if that is asked for."""
    name = column.name
    if column.kind == "category":
        made = _indicators(column, cells, levels)
    elif column.kind == "date":
        made = _dates(column, cells)
    else:
        made = [Feature(name, cells.astype(np.float32), column.kind == "number")]
    if not made or not column.missing:
        return made
    return [*made, Feature(f"{name} missing", np.isnan(cells).astype(np.float32), False)]


def _dates(column: Column, seconds: Floats) -> list[Feature]:
    name, there = column.name, ~np.isnan(seconds)
    moments = np.rint(np.nan_to_num(seconds) * 1e6).astype(np.int64).astype("datetime64[us]")
    months = moments.astype("datetime64[M]").astype(np.int64)
    weekday = np.where(there, (moments.astype("datetime64[D]").astype(np.int64) + 3) % 7, -1)
    angle = 2 * np.pi * (months % 12) / 12
    parts = {"days since first": (seconds - column.first) / 86400, "year": 1970 + months // 12,
             "month sin": np.sin(angle), "month cos": np.cos(angle)}  # fmt: skip
    return [
        *(Feature(f"{name} {part}", np.where(there, v, np.nan).astype(np.float32), True) for part, v in parts.items()),
        *(Feature(f"{name} {day}", (weekday == i).astype(np.float32), False) for i, day in enumerate(WEEK)),
    ]


def _indicators(column: Column, cells: Floats, levels: Sequence[str]) -> list[Feature]:
    """One indicator per category. Unknown values share one, if it exists, and are all zeros otherwise."""
    shown = {name: place for place, name in enumerate(column.categories)}
    places = np.array([*(shown.get(name, len(shown)) for name in levels), -1])  # the last: missing
    place = places[np.where(np.isnan(cells), -1, np.nan_to_num(cells)).astype(np.int64)]
    names = [*column.categories, *([OTHER] if column.other else [])]
    return [Feature(f"{column.name} = {name}", (place == i).astype(np.float32), False) for i, name in enumerate(names)]
