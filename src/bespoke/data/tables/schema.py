"""The schema of a table, known before learning: kinds of columns, categories, ranges, and the target's classes.

A schema is a file the user gives (JSON or TOML), or it is learned from training rows. What a schema declares is not
learned. As a file:

    {"columns": {"colour": {"kind": "category", "categories": ["red", "blue"], "missing": true},
                 "age": {"kind": "number", "range": [0, 120]},
                 "day": {"kind": "date", "first": "2020-01-01"},
                 "open": {"kind": "boolean"},
                 "remark": {"kind": "text", "words": {"good": 2.1, "late": 3.4}}},
     "target": {"name": "price", "range": [0, 500]},
     "statistics": {"age": [41.2, 17.9]}}

`missing`: whether a feature says where the value is missing. `words`: those of a text that are features, and the weight
(idf) of each; a list of words has the weight 1 for all. `statistics`: mean and deviation by feature name, or by
the target's. A target of classes has `classes` instead of a range. For a language model a schema is the list of the
words that are known: {"words": ["the", "of"]}.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

from bespoke.data.about import ColumnKind
from bespoke.errors import UserError, unknown
from bespoke.plain import JsonObject

Statistics = dict[str, tuple[float, float]]  # mean and deviation by feature, and by the target's name


@dataclass(frozen=True)
class Column:
    """How one column of a table becomes features."""

    name: str
    kind: ColumnKind
    categories: tuple[str, ...] = ()  # those with an indicator of their own
    other: bool = False  # the rest has one in common
    missing: bool = False  # an indicator says where the value is missing
    first: float = 0.0  # of dates, in seconds since 1970: days are counted from it
    first_name: str = "1970-01-01"
    range: tuple[float, float] | None = None
    words: tuple[str, ...] = ()  # of a text, those that are features
    weights: tuple[float, ...] = ()  # of these words


@dataclass(frozen=True)
class Target:
    """What is predicted; `classes` is None for a number."""

    name: str
    classes: tuple[str, ...] | None = None
    other: bool = False  # the last class is that of all other values
    range: tuple[float, float] | None = None


@dataclass(frozen=True)
class Schema:
    """All that the encoding of a table needs to know."""

    columns: tuple[Column, ...]
    target: Target
    statistics: Statistics = field(default_factory=dict)
    left_out: frozenset[str] = frozenset()  # features that do not vary

    def ranges(self) -> Statistics:
        """Mean and deviation of values spread evenly over their declared range."""
        parts: list[Column | Target] = [*self.columns, self.target]
        found = {part.name: part.range for part in parts if part.range is not None}
        return {name: ((low + high) / 2, (high - low) / math.sqrt(12)) for name, (low, high) in found.items()}

    # -- as a file -----------------------------------------------------------------------------------------------------
    def to_json(self) -> JsonObject:
        """As a file holds it; `left_out` and `other` are there where something was learned."""
        columns = {}
        for column in self.columns:
            entry: JsonObject = {"kind": column.kind}
            if column.kind == "category":
                entry |= {"categories": list(column.categories), "other": column.other}
            if column.kind == "date":
                entry["first"] = column.first_name
            if column.kind == "text":
                entry["words"] = dict(zip(column.words, column.weights))
            columns[column.name] = {**entry, **_said(column.range), **({"missing": True} if column.missing else {})}
        target: JsonObject = {"name": self.target.name, **_said(self.target.range)}
        if self.target.classes is not None:
            target |= {"classes": list(self.target.classes), "other": self.target.other}
        statistics = {name: list(pair) for name, pair in self.statistics.items()}
        return {
            "columns": columns, "target": target, **({"statistics": statistics} if statistics else {}),
            **({"left_out": sorted(self.left_out)} if self.left_out else {}),
        }  # fmt: skip

    def write(self, path: Path) -> None:
        _write(path, self.to_json())

    @classmethod
    def read(cls, path: Path) -> Schema:
        """Reads a JSON or TOML file, or explains what is wrong with it."""
        return cls.of(read_declared(path), str(path))

    @classmethod
    def of(cls, found: Any, where: str) -> Schema:
        """From what a file holds."""
        table = _table(found, where, ("columns", "target", "statistics", "left_out"))
        columns = [
            _column(name, entry, where) for name, entry in _table(table.get("columns"), f"{where}: columns").items()
        ]
        if not columns:
            raise UserError(f"{where}: columns is empty: name the columns to predict from")
        target = _table(table.get("target"), f"{where}: target", ("name", "classes", "other", "range"))
        if not isinstance(target.get("name"), str):
            raise UserError(f"{where}: target.name is missing: the column to predict")
        classes = _texts(target["classes"], f"{where}: target.classes") if "classes" in target else None
        if classes is not None and len(classes) < 2:
            raise UserError(f"{where}: target.classes = {list(classes)}: two or more are needed")
        statistics = {
            name: _pair(pair, f"{where}: statistics.{name}")
            for name, pair in _table(table.get("statistics", {}), f"{where}: statistics").items()
        }
        for name, (_, deviation) in statistics.items():
            if deviation <= 0:
                raise UserError(f"{where}: statistics.{name}: the second number is a deviation, above zero")
        return cls(
            tuple(columns),
            Target(target["name"], classes, bool(target.get("other", False)), _range(target, f"{where}: target")),
            statistics, frozenset(table.get("left_out", ())),
        )  # fmt: skip


def read_declared(path: Path) -> Any:
    """What a schema file holds, JSON or TOML."""
    try:
        text = path.read_text(encoding="utf-8")
        return tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except FileNotFoundError:
        raise UserError(f"there is no schema file {path}; write one with: bespoke data TABLE --write-schema") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the schema file {path} cannot be read ({error})") from None
    except ValueError as error:
        kind = "TOML" if path.suffix == ".toml" else "JSON"
        raise UserError(f"the schema file {path} is not valid {kind}: {error}") from None


def read_words(path: Path) -> tuple[str, ...]:
    """The vocabulary that a schema file declares."""
    table = _table(read_declared(path), str(path), ("words",))
    words = _texts(table.get("words"), f"{path}: words")
    if not words:
        raise UserError(f"{path}: words is empty: list the words that are known")
    return words


def write_words(path: Path, words: Sequence[str]) -> None:
    """A schema file that declares a vocabulary."""
    _write(path, {"words": list(words)})


def _write(path: Path, found: JsonObject) -> None:
    from bespoke.storage import write_text

    if path.suffix == ".toml":
        import tomli_w

        write_text(path, tomli_w.dumps(found))
    else:
        write_text(path, json.dumps(found, indent=1, ensure_ascii=False))


def _column(name: str, entry: Any, where: str) -> Column:
    place = f"{where}: columns.{name}"
    table = _table(entry, place, ("kind", "categories", "other", "missing", "first", "range", "words"))
    kind: Any = table.get("kind")
    if kind not in get_args(ColumnKind):
        raise unknown("kind", str(kind), get_args(ColumnKind), place)
    made = Column(name, kind, missing=bool(table.get("missing", False)), range=_range(table, place))
    if (kind == "category") != ("categories" in table):
        raise UserError(f"{place}: a category, and nothing else, has a list of categories")
    if kind == "category":
        return replace(made, categories=_texts(table["categories"], place), other=bool(table.get("other", True)))
    if (kind == "text") != ("words" in table):
        raise UserError(f"{place}: a text, and nothing else, has words")
    if kind == "text":
        return _text(made, table["words"], place)
    if kind == "date" and "first" in table:
        try:
            first = datetime.fromisoformat(str(table["first"])).replace(tzinfo=UTC)
        except ValueError:
            raise UserError(f"{place}: first = {table['first']!r} is no date such as 2020-01-31") from None
        return replace(made, first=first.timestamp(), first_name=str(table["first"]))
    return made


def _text(made: Column, found: Any, place: str) -> Column:
    """A column of texts with its words, and their weights where they are given."""
    listed = dict.fromkeys(_texts(found, f"{place}.words"), 1.0) if isinstance(found, list) else found
    weights = _table(listed, f"{place}.words")
    if not weights:
        raise UserError(f"{place}.words is empty: list the words that are features")
    for word, weight in weights.items():
        if type(weight) not in (int, float) or not 0 < weight < math.inf:
            raise UserError(f"{place}.words: the weight of {word!r} is {weight!r}; it has to be a number above zero")
    return replace(made, words=tuple(weights), weights=tuple(float(weight) for weight in weights.values()))


def _table(found: Any, where: str, known: tuple[str, ...] = ()) -> JsonObject:
    if not isinstance(found, dict):
        raise UserError(f"{where} has to be a table (see docs/data.md), not {found!r:.60}")
    for key in found:
        if known and key not in known:
            raise unknown("key", key, known, where)
    return found


def _texts(found: Any, where: str) -> tuple[str, ...]:
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise UserError(f"{where}: a list of texts is needed, not {found!r:.60}")
    if len(set(found)) < len(found):
        raise UserError(f"{where}: the same text occurs there twice")
    return tuple(found)


def _pair(found: Any, where: str) -> tuple[float, float]:
    numbers = isinstance(found, list | tuple) and all(type(n) in (int, float) and math.isfinite(n) for n in found)
    if not numbers or len(found) != 2:
        raise UserError(f"{where}: two numbers are needed, not {found!r:.60}")
    return float(found[0]), float(found[1])


def _range(table: JsonObject, where: str) -> tuple[float, float] | None:
    if "range" not in table:
        return None
    low, high = _pair(table["range"], f"{where}.range")
    if low >= high:
        raise UserError(f"{where}.range = [{low:g}, {high:g}]: the first number has to be the smaller one")
    return low, high


def _said(span: tuple[float, float] | None) -> dict[str, list[float]]:
    return {} if span is None else {"range": list(span)}
