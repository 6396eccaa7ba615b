"""Reads TensorFlow Federated's files: HDF5 (older, one file per part) or SQLite (newer, all parts in one file).

HDF5: a group `examples` with a group per client, which holds an array per field. SQLite (packed as .sqlite.lzma, and
unpacked once into ~/.cache/bespoke/decoded): a table `examples` of split_name, client_id and serialized_example_proto,
a tf.Example for each row. Both are read client by client.
"""

from __future__ import annotations

import hashlib
import lzma
import os
import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bespoke.data.sources.formats.protobuf import tf_example
from bespoke.data.sources.registry import damaged, find_file
from bespoke.errors import needs_extra

BLOCK = 2**22  # bytes unpacked at a time


@dataclass(frozen=True)
class FilePart:
    """A part of the clients' examples, such as those to train on."""

    path: Path
    split: str = ""  # its name in a SQLite file; HDF5 has a file for each part


def find_part(source: str, hdf5: str, sqlite: str, split: str) -> FilePart:
    """The part, from whichever of the two files there is."""
    path = find_file(f"{source}/{hdf5}", source, f"{source}/{sqlite}", f"{source}/{sqlite}.lzma")
    return FilePart(path, "" if path.suffix == ".h5" else split)


def client_ids(part: FilePart, source: str, layout: str) -> list[str]:
    """The clients of a part, sorted."""
    return [client for client, _ in read_clients(part, source, (), layout)]


def read_clients(
    part: FilePart, source: str, fields: Sequence[str], layout: str, clients: Sequence[str] | None = None
) -> Iterator[tuple[str, dict[str, NDArray[Any]]]]:
    """Each client (or each of `clients`) with its arrays; `layout` is what an error says was expected."""
    read = _read_sqlite(part, fields, clients) if part.split else _read_hdf5(part.path, source, fields, layout, clients)
    for client, arrays in read:
        if missing := [field for field in fields if field not in arrays]:
            raise damaged(part.path, f"examples/{client} without {', '.join(missing)}", layout)
        if len({array.shape[:1] for array in arrays.values()}) > 1:
            shapes = ", ".join(f"{field} {array.shape}" for field, array in arrays.items())
            raise damaged(part.path, f"examples/{client} with {shapes}", "as many rows in each")
        yield client, arrays


def texts(path: Path, client: str, field: str, array: NDArray[Any]) -> list[bytes]:
    """An array of texts as bytes."""
    if array.ndim != 1 or array.dtype.kind not in "SO":
        raise damaged(path, f"examples/{client}/{field} of type {array.dtype}", "a list of texts")
    return [bytes(text) for text in array]


def _read_hdf5(
    path: Path, source: str, fields: Sequence[str], layout: str, clients: Sequence[str] | None
) -> Iterator[tuple[str, dict[str, NDArray[Any]]]]:
    try:
        import h5py
    except ImportError:
        raise needs_extra("h5py", "tff", f"the source {source!r}") from None
    try:
        with h5py.File(path) as file:
            if not isinstance(file.get("examples"), h5py.Group):
                raise damaged(path, f"the groups {sorted(file)[:5]}", layout)
            examples = file["examples"]
            for client in sorted(examples) if clients is None else clients:
                group = examples[client] if fields else {}
                known = group if isinstance(group, h5py.Group) else {}
                yield client, {field: known[field][()] for field in fields if field in known}
    except OSError as error:
        raise damaged(path, f"no readable HDF5 file ({error})", "TensorFlow Federated's HDF5 file") from None


def _read_sqlite(
    part: FilePart, fields: Sequence[str], clients: Sequence[str] | None
) -> Iterator[tuple[str, dict[str, NDArray[Any]]]]:
    path = unpacked(part.path) if part.path.suffix == ".lzma" else part.path
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as base:
            if clients is None:
                all_of = "SELECT DISTINCT client_id FROM client_metadata WHERE split_name = ? ORDER BY client_id"
                clients = [client for (client,) in base.execute(all_of, (part.split,))]
            for client in clients:
                yield client, _examples(base, part, client, fields) if fields else {}
    except sqlite3.Error as error:
        raise damaged(part.path, f"no readable SQLite file ({error})", "TensorFlow Federated's SQLite file") from None


def _examples(base: sqlite3.Connection, part: FilePart, client: str, fields: Sequence[str]) -> dict[str, NDArray[Any]]:
    rows = base.execute(
        "SELECT serialized_example_proto FROM examples WHERE split_name = ? AND client_id = ? ORDER BY rowid",
        (part.split, client),
    )
    columns: dict[str, list[Any]] = {field: [] for field in fields}
    for (row,) in rows:
        try:
            example = tf_example(row)
        except ValueError as error:
            raise damaged(part.path, f"an example of {client} that is no tf.Example ({error})", "tf.Example") from None
        for field in fields:
            if field in example:
                columns[field].append(example[field])
    return {field: _stacked(values) for field, values in columns.items() if values}


def _stacked(values: list[Any]) -> NDArray[Any]:
    """A row an example; texts, and what has one number each, in one dimension."""
    if isinstance(values[0], list):  # of bytes
        flat = np.empty(len(values), dtype=object)
        flat[:] = [value[0] if value else b"" for value in values]
        return flat
    return np.stack(values) if values[0].shape != (1,) else np.concatenate(values)


@cache
def unpacked(path: Path) -> Path:
    """A .sqlite.lzma file as a .sqlite file, made once: SQLite reads files, not streams."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    kept = Path.home() / ".cache" / "bespoke" / "decoded" / f"{path.name.split('.')[0]}-{digest}.sqlite"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        making = kept.with_suffix(f".{os.getpid()}")
        try:
            with lzma.open(path) as packed, open(making, "wb") as file:
                shutil.copyfileobj(packed, file, BLOCK)
            making.replace(kept)
        except (lzma.LZMAError, EOFError) as error:
            raise damaged(path, f"no readable LZMA file ({error})", "a .sqlite file packed by LZMA") from None
        finally:
            making.unlink(missing_ok=True)
    return kept
