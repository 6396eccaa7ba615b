"""Reads a user's own table (CSV or Parquet) as a population, given its client and target columns.

Numbers stay numbers; booleans become 0 and 1; categories become indicators; dates become year, month, weekday and days.
Whatever is inferred, left out or dropped is said in `about['notes']`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from bespoke.data.about import About, TextRule
from bespoke.data.population import NO_GROUP, Population
from bespoke.data.tables.columns import (
    MISSING,
    fitted,
    is_date,
    is_missing,
    is_number,
    levels_of,
    numbers_of,
    seconds_of,
)
from bespoke.data.tables.features import HIGHEST, TOO_MANY_TEXTS, cells_of, encode, learned
from bespoke.data.tables.read import read_file
from bespoke.data.tables.schema import Schema
from bespoke.data.texts import tfidf
from bespoke.errors import UserError, unknown

TableTask = Literal["regression", "classification"]
Ints = NDArray[np.int64]


def read_table(
    path: str | Path,
    client: str,
    target: str,
    *,
    group: str | None = None,
    features: Sequence[str] | None = None,
    time: str | None = None,
    task: TableTask | None = None,
    schema: Schema | None = None,
) -> Population:
    """Read a .csv, .txt, .data, .tsv or .parquet file (texts also as .gz), and encode it by all of its rows.

    `client` names a column, or several joined by commas (their ids are joined by '/'). `features` are all other columns
    unless named; `group` is one of them, as a category. `time` is a column of numbers or dates, kept for splits by time
    and no feature unless named as one. `task` is inferred unless given. `schema` says what the columns are.

    An experiment encodes a table by its training rows alone: see `open_table`.
    """
    raw = open_table(path, client, target, group=group, features=features, time=time, task=task, schema=schema)
    notes: list[str] = []
    return encode(raw, schema or learned(raw, np.arange(raw.rows), notes), notes)


def open_table(
    path: str | Path,
    client: str,
    target: str,
    *,
    group: str | None = None,
    features: Sequence[str] | None = None,
    time: str | None = None,
    task: TableTask | None = None,
    schema: Schema | None = None,
    text: str | None = None,
    how: TextRule | None = None,
) -> Population:
    """A table as a population of cells, of which nothing is learned but what kind of values a column holds.

    `about["columns"]` has the name, the kind and the texts of each column of `cells`; `about["levels"]` the target's
    classes; `about["schema"]` what the user declared. `text` names a column of texts, kept as the surface ids of its
    words (`pieces`); `how` says how they are read: tokenizer, lower, length, vocabulary (see data/tfidf.py).
    """
    path = Path(path)
    if task not in (None, "regression", "classification"):
        raise unknown("task", task, ("regression", "classification"))
    notes: list[str] = []
    table = read_file(path, notes)
    names = table.column_names
    clients = [client] if client in names else [part.strip() for part in client.split(",")]
    declared = [column.name for column in schema.columns] if schema else []
    for name in [*clients, target, *(name for name in (group, time, text) if name), *(features or declared)]:
        if name not in names:
            raise unknown("column", name, names, where=path.name)
    if target in [*clients, *(features or declared), group, time]:
        raise UserError(f"the target {target!r} of {path.name} cannot be client, feature, group or time as well")
    if text is not None and text in [*clients, target, group, time]:
        raise UserError(f"the text column {text!r} of {path.name} cannot be client, target, group or time as well")
    if schema and (strange := [c.name for c in schema.columns if c.kind == "text" and c.name != text]):
        raise UserError(f"the schema declares {strange[0]!r} of {path.name} as a text; name it: --text {strange[0]}")
    if schema:
        table, task = _fitted(table, target, features, task, schema, path, notes)

    table = drop_unusable(table, clients, target, path, notes)
    ids, code = clients_of(table, clients, path)
    y, inferred, levels = target_of(table[target], target, task, notes)
    taken = {*clients, target, time, text} - {group}
    named = [name for name in dict.fromkeys(features or declared) if name != text]
    chosen = named if features or declared else [name for name in names if name not in taken]
    if group is not None and group in chosen and not features:
        chosen = _with_group(table, group, chosen, code, notes)
    if time is not None and time not in chosen:
        notes.append(
            f"The time column {time} orders the rows and is no feature; name it in --features to use it as one."
        )
    kinds = {column.name: column.kind for column in schema.columns} if schema else {}
    read = [cells_of(name, table[name], name == group, notes, kinds.get(name)) for name in chosen]
    columns: dict[str, NDArray[Any]] = {"cells": np.empty((len(code), 0)), "y": y}
    if held := [found for found in read if found is not None]:
        columns["cells"] = np.column_stack([values for _, values in held])
    _note_clients(y, code, len(ids), notes)
    more: About = {}
    if text is not None:
        columns["pieces"], more = _pieces(table[text], text, how or {}, path, notes)
    if time is not None:
        columns["time"] = times_of(table[time], time, path, notes)
    about: About = {
        "name": path.name.split(".")[0],
        "title": f"{path.name}: {target} by {client}",
        "task": inferred,
        "target": target,
        "input": "table",
        "licence": "the user's own",
        "notes": notes,
        "standardize": {"features": "global", "target": inferred == "regression"},
        "columns": [entry for entry, _ in held],
        "levels": levels,
        "file": path.name,
        "aside": ", ".join(filter(None, taken)),
        **more,
    }
    if schema:
        kept = tuple(column for column in schema.columns if column.name in [*chosen, text])
        about["schema"] = replace(schema, columns=kept).to_json()
    labels = None if group is None else labels_of(table[group])
    return Population.build(columns, ids[code], group=labels, about=about)


def _fitted(
    table: pa.Table, target: str, features: Sequence[str] | None, task: TableTask | None, schema: Schema, path: Path,
    notes: list[str],
) -> tuple[pa.Table, TableTask]:  # fmt: skip
    """The table with every declared column as it is declared, and the task."""
    declared: TableTask = "regression" if schema.target.classes is None else "classification"
    if target != schema.target.name:
        raise UserError(f"the schema is for the target {schema.target.name!r}, and the target here is {target!r}")
    if task not in (None, declared):
        raise UserError(f"task = {task!r}: the schema declares {target!r} for {declared}")
    if strange := [name for name in features or () if name not in {column.name for column in schema.columns}]:
        raise UserError(f"the schema says nothing of the feature {strange[0]!r} of {path.name}; describe it there")
    for column in schema.columns:
        place = table.column_names.index(column.name)
        table = table.set_column(place, column.name, fitted(table[column.name], column.kind))
    goal = fitted(table[target], "number" if schema.target.classes is None else "category")
    if schema.target.classes is not None and not schema.target.other:
        goal = pc.if_else(pc.is_in(goal, value_set=pa.array(schema.target.classes)), goal, pa.scalar(None, pa.string()))
    return table.set_column(table.column_names.index(target), target, goal), declared


# Rows and clients


def drop_unusable(table: pa.Table, clients: list[str], target: str, path: Path, notes: list[str]) -> pa.Table:
    no_client = np.logical_or.reduce([is_missing(table[name], [""]) for name in clients])
    no_target = is_missing(table[target], MISSING) & ~no_client
    infinite = np.zeros(table.num_rows, dtype=bool)
    if is_number(table[target].type):
        infinite = (np.abs(numbers_of(table[target])) > HIGHEST) & ~no_client
    dropped = [(no_client, "the client is missing"), (no_target, "the target is missing"),
               (infinite, "the target is infinite")]  # fmt: skip
    for which, reason in dropped:
        if count := int(which.sum()):
            notes.append(f"{count} of {table.num_rows} rows were dropped: {reason}.")
    keep = ~(no_client | no_target | infinite)
    if not keep.any():
        raise UserError(f"{path.name} has no usable row: {' '.join(notes)}")
    return table if keep.all() else table.filter(pa.array(keep))


def clients_of(table: pa.Table, columns: list[str], path: Path) -> tuple[NDArray[Any], Ints]:
    """The client ids, at least two with several rows, and each row's position among them."""
    names, code = levels_of(table[columns[0]], [""])
    for column in columns[1:]:
        more, other = levels_of(table[column], [""])
        pairs, code = np.unique(code * len(more) + other, return_inverse=True)
        names = np.array([f"{names[pair // len(more)]}/{more[pair % len(more)]}" for pair in pairs.tolist()])
        if len(set(names.tolist())) < len(names):
            raise UserError(
                f"the ids of {', '.join(columns)} in {path.name} contain '/', so that two clients would share one id"
            )
    if len(names) < 2:
        only = f"{','.join(columns)} = {str(names[0])!r}"
        raise UserError(f"{path.name} has one client only, {only}; a federation needs two or more")
    if len(names) == len(code):
        raise UserError(
            f"the column {','.join(columns)!r} of {path.name} is different in each of the {len(code)} rows, so every "
            "client would have one example: nothing to train on and be tested on. Name the column that says whose row "
            "it is"
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


def times_of(column: pa.ChunkedArray, name: str, path: Path, notes: list[str]) -> NDArray[np.float64]:
    if is_date(column.type):
        times = seconds_of(column)
    elif is_number(column.type):
        times = numbers_of(column).copy()  # Arrow lends its memory to be read only
    else:
        raise UserError(
            f"the time column {name!r} of {path.name} holds {column.type}, neither numbers nor dates "
            "(such as 2024-12-31)"
        )
    if count := int(np.isnan(times).sum()):
        notes.append(f"{count} rows have no time: in splits by time they come last.")
    return times


def labels_of(column: pa.ChunkedArray) -> NDArray[Any]:
    names, code = levels_of(column, [""])
    return np.append(names, NO_GROUP)[code]  # the code of a missing value is -1: the last


def _with_group(table: pa.Table, group: str, chosen: list[str], code: Ints, notes: list[str]) -> list[str]:
    """The features with the group added, unless the group identifies every client."""
    groups = len(np.unique(levels_of(table[group], [""])[1]))
    if groups == len(np.unique(code)):
        notes.append(f"Left out: the group column {group} is different for every client.")
        return [name for name in chosen if name != group]
    notes.append(f"The group column {group} is also a feature, as a category; name the --features to leave it out.")
    return chosen


def _pieces(
    column: pa.ChunkedArray, name: str, how: TextRule, path: Path, notes: list[str]
) -> tuple[NDArray[np.int32], About]:
    """A column of texts as surface ids, and what `about` says of it."""
    if not pa.types.is_string(column.type):
        raise UserError(f"the text column {name!r} of {path.name} holds {column.type}, no texts")
    usual: TextRule = {"tokenizer": "words", "lower": True, "length": tfidf.LENGTH, "vocabulary": tfidf.MOST_WORDS}
    settings: TextRule = {**usual, **how, "column": name}
    pieces, surface = tfidf.pieces_of(column.to_pylist(), settings)
    used = (pieces > 0).sum(1)
    if empty := int((used == 0).sum()):
        notes.append(f"{empty:,} of {len(used):,} rows have no {name}: none of its words.")
    if cut := int((used == settings["length"]).sum()):
        notes.append(f"{cut:,} of {len(used):,} texts have {settings['length']} words or more: the rest is not read.")
    return pieces, {"pieces": surface, "text": settings}


# The target


def target_of(
    column: pa.ChunkedArray, name: str, task: TableTask | None, notes: list[str]
) -> tuple[NDArray[Any], TableTask, list[str] | None]:
    """The target's values, the task, and the classes' names."""
    kind = column.type
    if is_number(kind):
        values = numbers_of(column)
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
    elif is_date(kind) or pa.types.is_nested(kind):
        raise UserError(f"the target {name!r} holds {kind}; it has to hold numbers, texts or booleans")
    else:
        levels, codes = levels_of(column, MISSING)
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
