"""The forgotten clients of a folder, kept as hashes of ids so that no later command brings a client back.

forgotten.json holds the hashes, and a receipt for each finished forgetting. It is in the folder that was given to
`bespoke forget` and in every run inside.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from bespoke.data.population import Population
from bespoke.errors import UserError
from bespoke.plain import JsonObject
from bespoke.randomness import text_key
from bespoke.storage import write_text

NAME = "forgotten.json"


def key_of(client: str) -> str:
    return f"{text_key(client):016x}"


def is_forgotten(folder: Path, client: str) -> bool:
    """Whether this client was forgotten in a run, or in the comparison or tuning that the run belongs to."""
    return key_of(client) in _keys(folder)


def marked(folder: Path, client: str) -> bool:
    """Whether forgetting this client has begun in this folder."""
    return key_of(client) in _read(folder).get("keys", [])


def mark(folder: Path, client: str, receipt: JsonObject | None = None) -> None:
    """Notes that a client is forgotten here; the receipt says what was done, without the client's id."""
    about, key = _read(folder), key_of(client)
    about["keys"] = [*(k for k in about.get("keys", []) if k != key), key]
    if receipt is not None:
        kept = [old for old in about.get("receipts", []) if old["key"] != key]
        about["receipts"] = [*kept, {"key": key, **receipt}]
    write_text(folder / NAME, json.dumps(about, indent=1))


def without_forgotten(population: Population, folder: Path) -> Population:
    """The population without the rows of clients forgotten in this folder. Clients keep their numbers."""
    keys = np.array([int(key, 16) for key in _keys(folder)], dtype=np.uint64)
    forgotten = np.isin(population.keys, keys)
    return population.having(np.repeat(~forgotten, population.sizes())) if forgotten.any() else population


def _keys(folder: Path) -> list[str]:
    comparison = folder.resolve().parent.parent  # of runs/NAME and tuning/NAME
    return [*_read(folder).get("keys", []), *_read(comparison).get("keys", [])]


def _read(folder: Path) -> JsonObject:
    path = folder / NAME
    if not path.exists():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error}): the forgotten clients are unknown; put the file back") from None
