"""Presets in TOML files: the values a paper tried, the values it fixed, and the best values it found.

A preset has no data. `grid`, `knobs` and `best` are tables by method; `entries` are entries of a comparison, by label,
which says what is trained before a method (a warm start), and hold where the comparison's methods name them;
`experiment` holds tables of an experiment file that go with them (cohort, split); `rounds` is how long the paper
trained. Presets of the package lie beside this file, presets of a project in its folder `presets/`; any other is named
by its path.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bespoke.errors import UserError, unknown
from bespoke.experiment.reading import read_toml
from bespoke.experiment.typed import explain
from bespoke.experiment.variants import check_entries
from bespoke.plain import ByMethod, TomlTable
from bespoke.storage import write_text

HERE = Path(__file__).parent
OWN = Path("presets")  # in the working directory

ByMethod = ByMethod


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    title: str
    source: str = ""
    notes: list[str] = []
    rounds: int | None = Field(default=None, ge=1)
    experiment: TomlTable = {}
    knobs: ByMethod = {}
    grid: ByMethod = {}
    best: ByMethod = {}
    entries: ByMethod = {}


@dataclass(frozen=True)
class Preset:
    """Grids, fixed knobs and best values by method."""

    name: str
    title: str
    source: str = ""
    notes: list[str] = field(default_factory=list)
    rounds: int | None = None
    experiment: TomlTable = field(default_factory=dict)
    knobs: ByMethod = field(default_factory=dict)
    grid: ByMethod = field(default_factory=dict)
    best: ByMethod = field(default_factory=dict)
    entries: ByMethod = field(default_factory=dict)

    @classmethod
    def read(cls, name: str) -> Preset:
        """By its name, or from a file."""
        path = preset_path(name)
        if not path.is_file():
            raise unknown("preset", name, names(), "presets (a file is named by its path, as in mine/school.toml)")
        try:
            found = _File.model_validate(read_toml(path))
        except ValidationError as error:
            raise explain(error, _File, f"preset {path}") from None
        check_entries(found.entries, f"preset {path}", "entries")
        return cls(path.stem, **{key: getattr(found, key) for key in _File.model_fields})

    def methods(self) -> list[str]:
        """All methods it says something of."""
        return list(dict.fromkeys([*self.knobs, *self.grid, *self.best]))

    def below(self, raw: TomlTable) -> TomlTable:
        """An experiment with the preset's tables where it has none of its own."""
        return {**self.experiment, **raw}

    def knobs_below(self, knobs: ByMethod, tuned: bool) -> ByMethod:
        """Fixed knobs by method: the preset's (with `tuned` its best values too), and over them those given."""
        under = {m: joined(self.knobs.get(m, {}), self.best.get(m, {}) if tuned else {}) for m in self.methods()}
        return {m: joined(under.get(m, {}), knobs.get(m, {})) for m in [*under, *knobs]}

    def entries_below(self, table: TomlTable) -> TomlTable:
        """A [compare] table with those of the preset's entries that its methods name."""
        methods, entries = table.get("methods"), table.get("entries", {})
        if not (isinstance(methods, list) and isinstance(entries, dict)):
            return table  # which is not checked yet
        named = {label: entry for label, entry in self.entries.items() if label in methods}
        return {**table, "entries": {**named, **entries}} if named else table

    def write(self, path: Path) -> None:
        """Write it for others to use; an existing file is not replaced."""
        if path.exists():
            raise UserError(f"{path} exists already; freeze under another name, or remove it first")
        path.parent.mkdir(parents=True, exist_ok=True)
        parts = {key: getattr(self, key) for key in _File.model_fields}
        write_text(path, tomli_w.dumps({key: part for key, part in parts.items() if part}))


def names() -> list[str]:
    """Presets of the package and of the working directory."""
    return sorted({path.stem for folder in (HERE, OWN) for path in folder.glob("*.toml")})


def preset_path(name: str) -> Path:
    """Where a preset lies or is to lie: a name stands for a file in presets/, anything else is a path."""
    if name.endswith(".toml") or "/" in name:
        return Path(name)
    packaged = HERE / f"{name}.toml"
    return packaged if packaged.is_file() and not (OWN / packaged.name).is_file() else OWN / packaged.name


def joined(under: TomlTable, over: TomlTable) -> TomlTable:
    """Two tables of knobs in one, `over` winning; tables inside (a server) are joined too."""
    result = dict(under)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = joined(result[key], value) if both else value
    return result
