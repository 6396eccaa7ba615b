"""A population: columns of rows sorted by client, and an offset for each client.

In memory or mapped from disk it is the same object; opening a million clients reads none of their rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from bespoke.data.about import About
from bespoke.errors import UserError
from bespoke.randomness import client_keys
from bespoke.storage import RowReader, open_arrays, write_arrays, write_text

POPULATION_FORMAT = 1  # of the folder on disk
NO_GROUP = "(missing)"  # the group of clients whose group is not known


class Names(Sequence[str]):
    """Many short texts in two arrays, so that a million of them can stay on disk."""

    def __init__(self, text: NDArray[np.uint8], ends: NDArray[np.int64]) -> None:
        self.text, self.ends = text, ends

    @classmethod
    def of(cls, names: Sequence[str]) -> Names:
        encoded = [name.encode() for name in names]
        ends = np.cumsum([len(name) for name in encoded], dtype=np.int64)
        return cls(np.frombuffer(b"".join(encoded), dtype=np.uint8), ends)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = int(index)
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        begin = self.ends[index - 1] if index else 0
        return self.text[begin : self.ends[index]].tobytes().decode()


@dataclass(frozen=True, repr=False)
class Population:
    """Columns of rows; client c owns rows offsets[c] to offsets[c + 1]."""

    columns: dict[str, Tensor]
    offsets: NDArray[np.int64]
    ids: Sequence[str]
    keys: NDArray[np.uint64]  # a stable hash of each id, from which a client's randomness comes
    group: NDArray[np.int64] | None = None  # per client, an index into `groups`
    groups: Sequence[str] = ()
    about: About = field(default_factory=About)  # name, task, features, notes, ...: JSON
    reader: RowReader | None = None  # reads rows of cohorts from disk; without it the columns are in memory

    @classmethod
    def build(
        cls,
        columns: Mapping[str, ArrayLike | Tensor],
        client: ArrayLike,
        *,
        group: ArrayLike | None = None,
        about: About | None = None,
    ) -> Population:
        """Builds a population from rows in any order; `client` (and `group`) give each row's client (and its group)."""
        names = np.asarray(client).astype(str)
        tensors = {name: torch.as_tensor(np.asarray(value)) if not isinstance(value, Tensor) else value
                   for name, value in columns.items()}  # fmt: skip
        for name, tensor in tensors.items():
            if len(tensor) != len(names):
                raise ValueError(f"column {name!r} has {len(tensor)} rows, the client column {len(names)}")
        ids, code = np.unique(names, return_inverse=True)
        order = np.argsort(code, kind="stable")
        offsets = np.concatenate([[0], np.cumsum(np.bincount(code, minlength=len(ids)))]).astype(np.int64)
        if not (code[1:] >= code[:-1]).all():
            tensors = {name: tensor[torch.from_numpy(order)] for name, tensor in tensors.items()}
        kept, group_names = None, np.array([], dtype=str)
        if group is not None:
            labels = np.asarray(group).astype(str)[order]
            first = labels[offsets[:-1]]
            strays = np.flatnonzero(labels != np.repeat(first, np.diff(offsets)))
            if len(strays):
                stray = int(np.searchsorted(offsets, strays[0], side="right")) - 1
                found = sorted(set(labels[offsets[stray] : offsets[stray + 1]]))
                raise UserError(
                    f"client {str(ids[stray])!r} appears in {len(found)} groups ({', '.join(found[:5])}): two clients "
                    "of one id? Name the client by both columns, as in --client GROUP,CLIENT"
                )
            group_names, kept = np.unique(first, return_inverse=True)
        listed = ids.tolist()
        return cls(tensors, offsets, listed, client_keys(listed), kept, group_names.tolist(), about or {})

    @classmethod
    def __get_pydantic_core_schema__(cls, *_: Any) -> Any:
        """Checked as an argument, it is a population or none: its arrays are not looked through."""
        from pydantic_core.core_schema import is_instance_schema

        return is_instance_schema(cls)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __repr__(self) -> str:
        """A line; the rows may be millions."""
        classes = f" of {len(self.about['classes'])} classes" if "classes" in self.about else ""
        name, task = self.about.get("name", "unnamed"), self.about.get("task", "no task")
        return f"Population({name!r}: {task}{classes}, {len(self):,} clients, {self.rows:,} rows)"

    @property
    def rows(self) -> int:
        return int(self.offsets[-1])

    def sizes(self, clients: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
        if clients is None:
            return np.diff(self.offsets)
        return self.offsets[clients + 1] - self.offsets[clients]

    def index(self, client: str) -> int:
        """The position of a client id."""
        found = np.flatnonzero(self.keys == client_keys([client])[0])
        for position in found:
            if self.ids[int(position)] == client:
                return int(position)
        import difflib

        near = difflib.get_close_matches(client, list(self.ids[:5000]), n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"they are named like {self.ids[0]!r}"
        raise UserError(f"no client {client!r} among the {len(self)} of this population; {hint}")

    def group_of(self, client: int) -> str:
        return self.groups[int(self.group[client])] if self.group is not None else ""

    def group_numbers(self) -> NDArray[np.int64] | None:
        """Each client's group number, from 1; 0 if unknown. None if there are no groups."""
        if self.group is None:
            return None
        known = np.array([name != NO_GROUP for name in self.groups])
        return np.where(known, np.cumsum(known), 0)[self.group]

    def only(self, clients: NDArray[np.int64]) -> Population:
        """A population with these clients only (ids must differ)."""
        sizes = self.sizes(clients)
        rows = torch.from_numpy(
            np.repeat(self.offsets[clients] - np.cumsum(sizes) + sizes, sizes) + np.arange(sizes.sum())
        )
        return Population(
            {name: column[rows] for name, column in self.columns.items()},
            np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
            [self.ids[c] for c in clients],
            self.keys[clients],
            None if self.group is None else self.group[clients],
            self.groups,
            self.about,
        )

    def having(self, rows: NDArray[np.bool_]) -> Population:
        """A population with these rows only. Every client keeps its position, even without rows."""
        before = np.concatenate([[0], np.cumsum(rows)]).astype(np.int64)
        kept = torch.from_numpy(np.flatnonzero(rows))
        columns = {name: column[kept] for name, column in self.columns.items()}
        return replace(self, columns=columns, offsets=before[self.offsets], reader=None)

    def fetch(self, clients: NDArray[np.int64], names: Sequence[str]) -> tuple[dict[str, Tensor], NDArray[np.int64]]:
        """Columns that hold these clients' rows, and how far each client's rows have moved in them.

        In memory that is the columns themselves. From disk the rows are read rather than mapped: a map would count the
        neighbours of every row ever touched as memory, and the more so the larger the population.
        """
        if self.reader is None:
            return {name: self.columns[name] for name in names}, np.zeros_like(clients)
        begins, sizes = self.offsets[clients], self.sizes(clients)
        fetched = self.reader.read({name: self.columns[name] for name in names}, begins, sizes)
        return fetched, np.cumsum(sizes) - sizes - begins

    def expect(self, clients: NDArray[np.int64], names: Sequence[str]) -> None:
        """Announces the next rows to be fetched, so that they are read from disk in the background."""
        if self.reader is not None:
            columns = {name: self.columns[name] for name in names}
            self.reader.ahead(columns, self.offsets[clients], self.sizes(clients))

    def save(self, folder: Path) -> None:
        """Writes a folder that `open` maps."""
        folder.mkdir(parents=True, exist_ok=True)
        names = self.ids if isinstance(self.ids, Names) else Names.of(self.ids)
        clients = {
            "offsets": torch.from_numpy(self.offsets),
            "keys": torch.from_numpy(self.keys.view(np.int64)),
            "id_text": torch.from_numpy(names.text.copy()),
            "id_ends": torch.from_numpy(names.ends),
        }
        if self.group is not None:
            clients["group"] = torch.from_numpy(np.ascontiguousarray(self.group, dtype=np.int64))
        write_arrays(folder / "columns.safetensors", self.columns)
        write_arrays(folder / "clients.safetensors", clients)
        about = {"format": POPULATION_FORMAT, "groups": list(self.groups), "about": self.about}
        write_text(folder / "population.json", json.dumps(about, indent=1))

    @classmethod
    def open(cls, folder: Path, resident: bool = False) -> Population:
        """Opens a saved population; only the header is read.

        resident: rows stay in memory once touched, which is faster where all clients take part again and again.
        """
        path = folder / "population.json"
        try:
            meta = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UserError(f"{folder} holds no population (no {path.name})") from None
        except ValueError as error:
            raise UserError(f"{path} is damaged ({error})") from None
        if meta.get("format") != POPULATION_FORMAT:
            found = meta.get("format")
            raise UserError(f"{path} has format {found!r}; this version of bespoke reads {POPULATION_FORMAT}")
        columns, _ = open_arrays(folder / "columns.safetensors")
        reader = None if resident else RowReader(folder / "columns.safetensors")
        clients, _ = open_arrays(folder / "clients.safetensors")
        arrays = {name: array.numpy() for name, array in clients.items()}
        names = Names(arrays["id_text"], arrays["id_ends"])
        keys = arrays["keys"].view(np.uint64)
        return cls(columns, arrays["offsets"], names, keys, arrays.get("group"), meta["groups"], meta["about"], reader)
