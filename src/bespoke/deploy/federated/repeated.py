"""What the hub has noted of a round that it was about to add up under secure sums, and may have to repeat."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bespoke.digests import read_json, sealed
from bespoke.storage import write_text

SUMS = "federation/sums.json"


def newest_checkpoint(run: Path) -> str:
    """The name of the newest checkpoint in a run's folder."""
    return max((path.name for path in (run / "checkpoints").glob("*.safetensors")), default="")


def unfinished(run: Path) -> bool:
    """Whether a round was about to be added up, and no checkpoint was made since: its clients are needed again."""
    return _noted(run).get("point") == newest_checkpoint(run)


def about_to_be_added(run: Path, key: str) -> list[list[str]]:
    """The names of clients, of each group of this round that was about to be added up before."""
    noted = _noted(run)
    return list(noted["added"]) if noted.get("key") == key else []


def note_added(run: Path, key: str, added: list[list[str]]) -> None:
    write_text(run / SUMS, json.dumps(sealed({"key": key, "added": added, "point": newest_checkpoint(run)})))


def _noted(run: Path) -> dict[str, Any]:
    return read_json(run / SUMS, "begin a new run in another folder") if (run / SUMS).exists() else {}
