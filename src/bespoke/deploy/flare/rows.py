"""A site's rows, checked against the schema that the sites have agreed on, before the site starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bespoke.data.arrays import open_population
from bespoke.data.population import Population
from bespoke.data.tables.features import encode
from bespoke.data.tables.schema import Schema
from bespoke.data.tables.table import open_table, read_table
from bespoke.deploy.flare.hardened import BY_BESPOKE
from bespoke.errors import UserError


def check_rows(kit: Path, data: Path | None = None, least: int = 0) -> list[str]:
    """What the site's rows are, a line each; refuses rows that do not fit the agreed schema, or are too few clients.

    `data`: default: what the kit says. `least`: no sum of fewer clients leaves the site.
    """
    said = json.loads((kit / "local" / BY_BESPOKE).read_text(encoding="utf-8"))
    said["data"] = str(data) if data is not None else said["data"]
    rows = load_rows(said)
    if "schema" in rows.about:
        rows = encode(rows, Schema.of(rows.about["schema"], "the schema"))
    clients = len(rows.ids)
    if clients < least:
        raise UserError(
            f"{said['data']} has {clients} clients, and no sum of fewer than least = {least} clients leaves "
            "this site: it could take part in nothing. Lower `least` in site.toml, or wait for more clients"
        )
    return [f"{said['data']}: {rows.rows:,} rows of {clients:,} clients", *rows.about.get("notes", [])]


def load_rows(said: dict[str, Any]) -> Population:
    if said["data"] is None:
        raise UserError("which rows are this site's? Name its table or its population folder: --data rows.csv")
    path = Path(said["data"])
    if not path.exists():
        raise UserError(f"there is no table and no population folder {path}; name the site's rows: --data rows.csv")
    if path.is_dir():
        return open_population(path)
    columns = said["columns"]
    if columns is None:
        raise UserError(
            f"{path}: the project does not say which columns are what, so only population folders can be used; the hub "
            "names them in [columns] of hub.toml"
        )
    schema = Schema.read(Path(said["schema"])) if said["schema"] else None
    target = columns.get("target") or (schema and schema.target.name)
    if not target:
        raise UserError(f"{path}: the project names no target column; the hub does so in [columns] of hub.toml")
    named = {name: columns[name] for name in ("group", "features", "time") if name in columns}
    if schema is None:
        return read_table(path, columns["client"], target, **named)
    return open_table(path, columns["client"], target, schema=schema, **named)  # encoded by each experiment
