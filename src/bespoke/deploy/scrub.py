"""Removes one client from the files of a folder. Every step can be repeated without further effect."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bespoke.deploy.export import client_folder
from bespoke.digests import SEAL, digest, read_json, sealed
from bespoke.federation.segments import read_segment, segment_owner, write_segment
from bespoke.method import Method, Setting
from bespoke.runs.folder import Mark, RunFolder, read_checkpoint
from bespoke.storage import settle, write_text
from bespoke.tensors import Tree, flatten, unflatten

# keys under which JSON lists clients by id, or has a number for each
NAMING = ("excluded", "watched", "own", "left_out", "cut", "outliers", "clients")
LOGS = ("rounds.jsonl", "ledger.jsonl", "attempts.jsonl")


@dataclass(frozen=True)
class ForgottenClient:
    """The client to remove: its id, and its position among all clients."""

    id: str
    place: int


def replaced(path: Path, write: Callable[[], None]) -> None:
    """Lets `write` replace this file, then overwrites the old file's bytes."""
    old = path.with_name(f".{path.name}.old.partial")  # removed with other half-written files after a crash
    old.unlink(missing_ok=True)
    try:
        os.link(path, old)
    except OSError:  # without hard links the old bytes cannot be overwritten
        write()
        return
    write()
    overwrite(old)


def overwrite(path: Path) -> bool:
    """Writes zeros over a file, and removes it."""
    with open(path, "r+b") as file:
        file.write(bytes(path.stat().st_size))
        file.flush()
        os.fsync(file.fileno())
    path.unlink()
    return True


# -- JSON --------------------------------------------------------------------------------------------------------------
def unnamed(value: Any, client: str) -> Any:
    """JSON without this client's id, wherever clients are named."""
    if isinstance(value, list):
        return [unnamed(entry, client) for entry in value]
    if not isinstance(value, dict):
        return value
    found = {}
    for key, entry in value.items():
        if key in NAMING and isinstance(entry, dict):
            entry = {name: rest for name, rest in entry.items() if name != client}
        elif key in NAMING and isinstance(entry, list):
            entry = [one for one in entry if one != client]
        found[key] = unnamed(entry, client)
    return found


def scrub_json(path: Path, client: str, more: Callable[[dict[str, Any]], None] = lambda value: None) -> bool:
    """Removes the client from a JSON file; returns whether the file changed."""
    if not path.exists():
        return False
    before = read_json(path)
    after = unnamed(before, client)
    more(after)
    if after != before:
        with_seal = sealed(after) if SEAL in json.loads(path.read_text(encoding="utf-8")) else after
        replaced(path, lambda: write_text(path, json.dumps(with_seal, indent=1)))
    return bool(after != before)


def scrub_log(path: Path, client: str) -> bool:
    """Removes the client from a log. Lines keep their lengths, because checkpoints hold the lengths of logs."""
    if not path.exists():
        return False
    before = path.read_bytes()
    lines = []
    for line in before.split(b"\n"):
        if line.strip():
            entry = json.loads(line)
            scrubbed = unnamed(entry, client)
            line = line if scrubbed == entry else json.dumps(scrubbed).encode().ljust(len(line))
        lines.append(line)
    after = b"\n".join(lines)
    if after != before:

        def write() -> None:
            temporary = path.with_name(f".{path.name}.partial")
            temporary.write_bytes(after)
            settle(temporary, path)

        replaced(path, write)
    return after != before


# -- tables ------------------------------------------------------------------------------------------------------------
def scrub_table(path: Path, client: str) -> bool:
    """Removes the client's rows from a Parquet table with a column `client`."""
    import pyarrow
    from pyarrow import compute, parquet

    table = parquet.read_table(path)
    if "client" not in table.column_names:
        return False
    others = compute.not_equal(compute.cast(table["client"], pyarrow.string()), client)
    kept = table.filter(others)
    if len(kept) == len(table):
        return False

    def write() -> None:
        temporary = path.with_name(f".{path.name}.partial")
        parquet.write_table(kept, temporary)
        settle(temporary, path)

    replaced(path, write)
    return True


# -- private state -----------------------------------------------------------------------------------------------------
def scrub_segment(path: Path, client: int) -> bool:
    """Removes one client's row from a file of private state."""
    clients, rows = read_segment(path)
    others = clients != client
    if others.all():
        return False
    kept, remaining, owner = clients[others].clone(), rows[others].clone(), segment_owner(path)
    del clients, rows
    replaced(path, lambda: write_segment(path, kept, remaining, owner))
    return True


def segment_rows(path: Path, client: int) -> tuple[bytes, bytes]:
    """The client's row of a segment (empty if it has none), and those of the others."""
    clients, rows = read_segment(path)
    of_client = clients == client
    return rows[of_client].numpy().tobytes(), rows[~of_client].numpy().tobytes()


# -- checkpoints -------------------------------------------------------------------------------------------------------
def server_rows(method: Method | None, server: Tree) -> dict[str, tuple[Tensor, int]]:
    """The server's leaves with values by client: the value of a client never seen, and the number of client axes.

    The groups of clients are one such leaf. For methods with unicast, the others are found by comparing the server's
    states for two and for three clients: axes that grow are clients.
    """
    found = {"groups": (torch.zeros(2, dtype=torch.int64), 1)} if "groups" in server else {}
    if method is None or type(method).unicast is Method.unicast:
        return found
    two, three = (flatten(method.init_server(method.params(server), Setting(0, n, n))) for n in (2, 3))
    for name, leaf in two.items():
        axes = sum(a != b for a, b in zip(leaf.shape, three[name].shape))
        if axes:
            found[name] = leaf, axes
    return found


def never_seen(flat: dict[str, Tensor], kept: dict[str, tuple[Tensor, int]], client: int) -> dict[str, Tensor]:
    """A server state in which the client has the values of a client never seen."""
    changed = dict(flat)
    for name, (fresh, axes) in kept.items():
        leaf = flat[name].clone()
        if axes == 1:
            leaf[client] = fresh[0].to(leaf.dtype)
        else:  # clients x clients
            leaf[client, :], leaf[:, client] = fresh[0, 1], fresh[1, 0]
            leaf[client, client] = fresh[0, 0]
        changed[name] = leaf
    return changed


def scrub_checkpoint(folder: RunFolder, path: Path, client: ForgottenClient, method: Method | None) -> bool:
    """Removes a client from a checkpoint: its name, and the server's values for it. `method` made the state."""
    found = read_checkpoint(path)
    flat = flatten(found.server)
    kept = server_rows(method if found.round >= 0 else None, found.server)
    after, about = never_seen(flat, kept, client.place), unnamed(found.about, client.id)
    logs: dict[str, Mark] = {log: (mark[0], _so_far(folder.path / log, mark[0])) for log, mark in found.logs.items()}
    same = all(torch.equal(after[name], leaf) for name, leaf in flat.items())
    if same and about == found.about and (logs == found.logs or not found.verified):
        return False
    found.server, found.about, found.logs = unflatten(after), about, logs
    replaced(path, lambda: folder.write_checkpoint(found))
    return True


def _so_far(log: Path, length: int) -> str:
    """The digest of a log up to a checkpoint."""
    return digest(log.read_bytes()[:length] if log.exists() else b"")


# -- exported models ---------------------------------------------------------------------------------------------------
def scrub_exported(run: Path, client: str) -> bool:
    """Removes a client's exported personal model."""
    exported = client_folder(run, client)
    if not exported.is_dir():
        return False
    for path in [*exported.rglob("*")]:
        if path.is_file():
            overwrite(path)
    shutil.rmtree(exported)
    return True


def tables(folder: Path) -> Iterator[Path]:
    """Every Parquet table of a folder, except those of analyses, which are made again."""
    return (path for path in sorted(folder.rglob("*.parquet")) if path.parent.name != "analysis")
