"""A site's own personal models, used on new rows. The models lie in the site's state, and nothing of this leaves it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from bespoke.data.arrays import open_population
from bespoke.data.population import Population
from bespoke.data.tables.columns import fitted
from bespoke.data.tables.features import cells_of, encode
from bespoke.data.tables.read import read_file
from bespoke.data.tables.schema import Schema
from bespoke.deploy.export import client_folder, load_personal
from bespoke.deploy.flare.hardened import BY_BESPOKE
from bespoke.digests import read_json
from bespoke.errors import UserError, unknown
from bespoke.imported import trust


@dataclass(frozen=True)
class Predicted:
    """Predictions in the order of the rows; None for clients that have no personal model."""

    target: str
    method: str
    clients: list[str]
    values: list[Any]

    @property
    def strangers(self) -> list[str]:
        """Clients without a personal model."""
        return sorted({client for client, value in zip(self.clients, self.values) if value is None})


def predict(site: Path, rows: Path) -> Predicted:
    """Predict new rows with the personal models that the last run has left at this site."""
    path = site / "kit" / "local" / BY_BESPOKE
    if not path.exists():
        raise UserError(
            f"{site} is no site's folder: it has no kit; name the folder that `bespoke deploy join` has made"
        )
    said = json.loads(path.read_text(encoding="utf-8"))
    kept = Path(said["state"]) / "models"
    if not (kept / "models.json").exists():
        raise UserError(f"{site} has no personal models yet: they are made at the end of a run in which it takes part")
    about = read_json(kept / "models.json", "take part in a run again")
    trust(*(said.get("models") or ()))
    clients, x = _read(rows, said)
    values: list[Any] = [None] * len(clients)
    target = ""
    for client in dict.fromkeys(clients):
        folder = client_folder(kept, client)
        if not folder.exists():
            continue
        model, places = load_personal(folder), np.flatnonzero(np.array(clients) == client)
        wanted = len(model.about["features"])
        if x.ndim == 2 and wanted and x.shape[1] != wanted:
            raise UserError(f"{rows} has {x.shape[1]} features, and the models were made of {wanted}")
        target = model.about["target"]
        for place, value in zip(places.tolist(), model.predict(x[places]).tolist()):
            values[place] = value
    return Predicted(target, about["method"], clients, values)


def _read(path: Path, said: dict[str, Any]) -> tuple[list[str], NDArray[Any]]:
    """The client and the encoded features of each row, in order; the target need not be there."""
    if not path.exists():
        raise UserError(f"there is no table and no population folder {path}; name the new rows: --rows new.csv")
    if path.is_dir():
        population = open_population(path)
        owners = np.repeat([str(name) for name in population.ids], population.sizes())
        return owners.tolist(), population.columns["x"].numpy()
    columns = said["columns"]
    if columns is None or said["schema"] is None:
        raise UserError(
            f"{path}: tables need the project's schema and [columns] of hub.toml, and this project has none"
        )
    schema = Schema.read(Path(said["schema"]))
    notes: list[str] = []
    table = read_file(path, notes)
    wanted = columns.get("features") or [column.name for column in schema.columns]
    clients = [columns["client"]] if columns["client"] in table.column_names else columns["client"].split(",")
    for name in [*(part.strip() for part in clients), *wanted]:
        if name not in table.column_names:
            raise unknown("column", name, table.column_names, where=path.name)
    names = ["/".join(map(str, row)) for row in zip(*(table[part.strip()].to_pylist() for part in clients))]
    return names, _encoded(table, schema, wanted, columns.get("group"), path).columns["x"].numpy()


def _encoded(table: pa.Table, schema: Schema, wanted: list[str], group: str | None, path: Path) -> Population:
    """The rows as the sites encode them, each under a name of its own, so that their order stays."""
    notes: list[str] = []
    kinds = {column.name: column.kind for column in schema.columns}
    read = [cells_of(name, fitted(table[name], kinds[name]), name == group, notes, kinds[name]) for name in wanted]
    held = [found for found in read if found is not None]
    if len(held) < len(wanted):
        raise UserError(f"{path}: {' '.join(notes)}")
    about: Any = {
        "name": path.name, "title": path.name, "task": "regression", "target": schema.target.name, "input": "table",
        "notes": [], "columns": [entry for entry, _ in held], "levels": list(schema.target.classes or []),
        "file": path.name, "aside": schema.target.name,
    }  # fmt: skip
    many = table.num_rows
    y = np.zeros(many, np.int64 if schema.target.classes else np.float32)
    cells = np.column_stack([values for _, values in held])
    rows = Population.build({"cells": cells, "y": y}, [f"{row:012d}" for row in range(many)], about=about)
    kept = tuple(column for column in schema.columns if column.name in wanted)
    return encode(rows, Schema(kept, schema.target, schema.statistics, schema.left_out))
