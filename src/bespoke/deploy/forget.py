"""Forgetting a client: its private state and personal model are deleted from a run, and shown to be gone."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any, BinaryIO

from bespoke.data.arrays import open_arrays, write_text
from bespoke.deploy.personal import client_folder, open_run, read_choices
from bespoke.errors import UserError
from bespoke.experiments import load_population
from bespoke.method import Method
from bespoke.methods import METHODS
from bespoke.randomness import text_key
from bespoke.segments import read_segment, segment_owner, write_segment

SHORTEST = 16  # bytes: anything shorter would be found by chance


def is_forgotten(run: Path, client: str) -> bool:
    return f"{text_key(client):016x}" in _forgotten(run)


def _forgotten(run: Path) -> list[str]:
    path = run / "forgotten.json"
    return json.loads(path.read_text(encoding="utf-8"))["keys"] if path.exists() else []


def forget_client(run: Path, client: str) -> dict[str, Any]:
    """Delete, then search every file of the run for what was deleted. Returns a receipt."""
    folder, config = open_run(run)
    if is_forgotten(run, client):
        raise UserError(f"client {client!r} is already forgotten in {run}")
    position = load_population(config).index(client)
    with folder.locked():
        traces: list[bytes] = []
        changed = []
        for path in sorted((run / "private").glob("*.safetensors")):
            found = _drop_row(path, position)
            if found is not None:
                traces.append(found)
                changed.append(str(path.relative_to(run)))
        exported = client_folder(run, client)
        if exported.is_dir():
            traces += _own_arrays(run, exported)
            for path in exported.rglob("*"):
                if path.is_file():
                    _overwrite(path)
            shutil.rmtree(exported)
            changed.append(str(exported.relative_to(run)))
        choices = run / "choices.json"
        chosen = read_choices(run)
        if chosen["own"].pop(client, None) is not None:
            write_text(choices, json.dumps(chosen))
            changed.append("choices.json")
        # the mark is a hash: the id itself need not be kept to know that it is forgotten
        write_text(run / "forgotten.json", json.dumps({"keys": [*_forgotten(run), f"{text_key(client):016x}"]}))
        folder.reseal()
        traces = [trace for trace in traces if len(trace) >= SHORTEST]
        searched, left = _search(run, traces)
    if left:
        raise RuntimeError(f"traces of {client!r} remain in {', '.join(left)}")
    remains = [
        "the shared model, to which this client may have contributed",
        "this client's row of results in clients.parquet (sizes and scores)",
    ]
    kinds = [METHODS[stage["method"]] for stage in config.stage]
    known = {kind.name for kind in kinds if kind.unicast is not Method.unicast or kind.hands_on == 0}  # its group
    remains += [
        f"what the server itself keeps of this client under {name}, in its checkpoints" for name in sorted(known)
    ]
    receipt: dict[str, Any] = {
        "client": client,
        "deleted": changed,
        "files_searched": searched,
        "traces_searched": len(traces),
        "traces_left": 0,
        "digest_of_deleted": hashlib.blake2b(b"".join(traces), digest_size=16).hexdigest() if traces else None,
        "remains": remains,
    }
    receipt["summary"] = [
        f"Forgot client {client}: deleted {', '.join(changed) if changed else 'nothing, there was no private state'}.",
        f"Searched {searched} files of the run for {len(traces)} deleted arrays: none is left.",
        "What remains: " + "; ".join(remains) + ".",
    ]
    return receipt


def _own_arrays(run: Path, exported: Path) -> list[bytes]:
    """The exported arrays that are this client's alone: not those of the shared model or of other clients' models.

    A frozen layer and the federation's means and deviations are the same for all; finding them elsewhere says nothing.
    """
    flat, _ = open_arrays(exported / "model.safetensors")
    others = [*(run / "checkpoints").glob("*.safetensors"), *(run / "personal").glob("*/model.safetensors")]
    shared = [path.read_bytes() for path in others if path.parent != exported]
    own = [leaf.contiguous().numpy().tobytes() for leaf in flat.values()]
    return [leaf for leaf in own if not any(leaf in other for other in shared)]


def _drop_row(path: Path, client: int) -> bytes | None:
    """Take one client's row out of a segment; returns the row's bytes, unless another client's row is the same."""
    clients, rows = read_segment(path)
    owner, mine = segment_owner(path), clients == client
    if not mine.any():
        return None
    row = rows[mine].numpy().tobytes()
    others, left = clients[~mine].clone(), rows[~mine].clone()
    del clients, rows
    with open(path, "r+b") as old:  # held open over the replacement, so that the old bytes can be overwritten
        write_segment(path, others, left, owner)
        _zero(old)
    return b"" if row in left.numpy().tobytes() else row


def _overwrite(path: Path) -> None:
    with open(path, "r+b") as file:
        _zero(file)


def _zero(file: BinaryIO) -> None:
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    file.write(bytes(size))
    file.flush()
    os.fsync(file.fileno())


def _search(run: Path, traces: list[bytes]) -> tuple[int, list[str]]:
    files = [path for path in run.rglob("*") if path.is_file()]
    left = [str(path) for path in files if any(trace in path.read_bytes() for trace in traces)]
    return len(files), left
