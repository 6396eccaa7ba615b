"""Segments are files of private state: rows of bytes by client, with a digest. See private_state.py."""

from __future__ import annotations

import json
from pathlib import Path

from torch import Tensor

from bespoke.digests import Damaged, digest
from bespoke.errors import UserError
from bespoke.storage import open_arrays, write_arrays


def write_segment(path: Path, clients: Tensor, rows: Tensor, run: str) -> None:
    """Writes the rows of these clients, with a digest; `run` is the identity of the run."""
    about = {"run": run, "name": path.name, "digest": _digest(path.name, run, clients, rows)}
    write_arrays(path, {"clients": clients, "rows": rows}, {"bespoke": json.dumps(about)})


def read_segment(path: Path, verify: bool = False, run: str = "") -> tuple[Tensor, Tensor]:
    """Reads a segment's (clients, rows). `verify` compares them with their digest and their run with `run`."""
    arrays, metadata = open_arrays(path)
    if set(arrays) != {"clients", "rows"} or len(arrays["clients"]) != len(arrays["rows"]):
        raise UserError(f"{path} does not hold private state")
    if verify and "bespoke" in metadata:  # older versions kept no digests
        try:
            about = json.loads(metadata["bespoke"])
            said, owner = about["digest"], about["run"]
        except (ValueError, KeyError, TypeError) as error:
            raise Damaged(f"{path} is damaged ({error!r})") from None
        if said != _digest(path.name, owner, arrays["clients"], arrays["rows"]):
            raise Damaged(f"{path} is damaged: its contents do not match its digest")
        if owner != run:
            raise Damaged(f"{path} belongs to another run")
    return arrays["clients"], arrays["rows"]


def segment_owner(path: Path) -> str:
    """The run that the segment names as its own."""
    return str(json.loads(open_arrays(path)[1].get("bespoke", "{}")).get("run", ""))


def _digest(name: str, run: str, clients: Tensor, rows: Tensor) -> str:
    parts = (leaf.contiguous().numpy().tobytes() for leaf in (clients, rows))
    return digest(f"{name} {run} {clients.dtype} {rows.dtype} {tuple(rows.shape)}".encode(), *parts)
