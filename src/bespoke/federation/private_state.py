"""Private state by client: a lazily filled, memory-mapped table. Only clients that were touched cost anything.

It belongs to the engine; no server function ever sees it. What must survive a kill is written as segments, one per
checkpoint with the rows changed since the last, so that a checkpoint costs what was touched and is whole or not there.
A new segment takes over the older ones that are not much larger than it: a checkpoint stands on at most twice the rows
of the live state, in at most log2(clients) + 1 files. A segment carries its digest, its name and the run it belongs to.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bespoke.errors import UserError
from bespoke.federation.segments import read_segment, write_segment
from bespoke.tensors import Tree, flatten, named_map

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Segment:
    """A file of private state, and whose rows of this table it holds."""

    name: str
    clients: Ints
    shared: bool = False  # it holds rows of other hosts' clients too


class PrivateTable:
    """Rows of bytes, one per touched client, in an unnamed temporary file that is gone with the process."""

    def __init__(self, template: Tree) -> None:
        # in the order of their names: a template that went through a file comes back in another order, and a row lies
        # in segments without names
        first = dict(sorted(_named(template).items()))
        self.template = template
        self.fields = {name: (leaf.shape, leaf.dtype) for name, leaf in first.items()}
        self.initial = self._pack({name: leaf[None] for name, leaf in first.items()}, 1)[0]
        self.width = len(self.initial)
        self.slots: dict[int, int] = {}
        self.dirty: set[int] = set()
        self.segments: list[Segment] = []  # together, later ones before earlier ones, the table without `dirty`
        self.capacity = 0
        self.rows: NDArray[np.uint8] = np.zeros((0, self.width), dtype=np.uint8)

    def __bool__(self) -> bool:
        return self.width > 0

    def holds(self, clients: Ints) -> NDArray[np.bool_]:
        """Which of these clients have a state of their own."""
        return np.array([int(client) in self.slots for client in clients], dtype=bool)

    def read(self, clients: Iterable[int]) -> Tree:
        """The state of these clients, stacked; those never touched have the initial state."""
        chosen = list(clients)
        packed = np.empty((len(chosen), self.width), dtype=np.uint8)
        for place, client in enumerate(chosen):
            slot = self.slots.get(int(client))
            packed[place] = self.initial if slot is None else self.rows[slot]
        return self._unpack(packed)

    def write(self, clients: Iterable[int], state: Tree) -> None:
        chosen = [int(client) for client in clients]
        self.put(chosen, self.packed(state, len(chosen)))

    def packed(self, state: Tree, count: int) -> NDArray[np.uint8]:
        """The state of so many clients as rows of the table, which is not changed."""
        return self._pack(_named(state), count) if self and count else np.zeros((count, 0), np.uint8)

    def put(self, clients: Iterable[int], packed: NDArray[np.uint8]) -> None:
        """Take rows that `packed` made into the table."""
        chosen = [int(client) for client in clients] if self else []
        if chosen:
            self._store(chosen, packed)

    def _store(self, clients: list[int], packed: NDArray[np.uint8]) -> None:
        for client in clients:
            self.slots.setdefault(client, len(self.slots))
        self._grow(len(self.slots))
        self.rows[[self.slots[client] for client in clients]] = packed
        self.dirty.update(clients)

    def _grow(self, needed: int) -> None:
        if needed <= self.capacity:
            return
        old = self.rows
        self.capacity = max(2 * self.capacity, needed, 64)
        with tempfile.TemporaryFile(prefix="bespoke-private-") as file:
            os.ftruncate(file.fileno(), self.capacity * self.width)
            mapped = mmap.mmap(file.fileno(), self.capacity * self.width)
        self.rows = np.frombuffer(mapped, dtype=np.uint8).reshape(self.capacity, self.width)
        self.rows[: len(old)] = old

    def _pack(self, flat: dict[str, Tensor], count: int) -> NDArray[np.uint8]:
        """Rows of bytes in the order of the template's fields, whatever order a method returns them in."""
        found = {name: (leaf.shape[1:], leaf.dtype) for name, leaf in flat.items()}
        if found != self.fields:
            raise TypeError(f"private state began as {self.fields}, and came back from a round as {found}")
        leaves = [flat[name].detach().cpu().contiguous().reshape(count, -1) for name in self.fields]
        none = np.zeros((count, 0), dtype=np.uint8)
        return np.concatenate([none, *(leaf.numpy().view(np.uint8) for leaf in leaves)], axis=1)

    def _unpack(self, packed: NDArray[np.uint8]) -> Tree:
        flat, begin = {}, 0
        for name, (shape, dtype) in self.fields.items():
            width = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            part = packed[:, begin : begin + width].copy()  # a slice of one row need not lie at a multiple of its type
            flat[name] = torch.from_numpy(part).view(dtype).reshape(len(packed), *shape)
            begin += width
        return named_map(lambda name, _: flat[name], self.template)

    def save(self, path: Path, only_dirty: bool = True, run: str = "") -> list[str]:
        """Write changed (or all) rows as a segment, in order of client; returns the names of all segments that count.

        A segment that has at most twice the rows of the new one is taken over by it; its file is left to the caller,
        because the checkpoint before this one still stands on it.
        """
        kept = list(self.segments) if only_dirty else []
        clients = np.array(sorted(self.dirty if only_dirty else self.slots), dtype=np.int64)
        while kept and len(clients) and len(kept[-1].clients) <= 2 * len(clients) and not kept[-1].shared:
            clients = np.union1d(clients, kept.pop().clients)
        if len(clients):
            rows = self.rows[[self.slots[client] for client in clients.tolist()]]
            write_segment(path, torch.from_numpy(clients), torch.from_numpy(rows), run)
            kept.append(Segment(path.name, clients))
        self.segments = kept
        self.dirty.clear()
        return [segment.name for segment in kept]

    def load(self, path: Path, only: set[int] | None = None) -> None:
        """Take over a segment's rows (of the clients in `only`)."""
        found, stored = read_segment(path)
        if stored.shape[1:] != (self.width,):
            raise UserError(f"{path} does not hold this method's private state (width {self.width} bytes expected)")
        clients = found.tolist()
        keep = [place for place, client in enumerate(clients) if only is None or client in only]
        if keep:
            mine = [clients[place] for place in keep]
            self._store(mine, stored.numpy()[keep])
            self.segments.append(Segment(path.name, np.array(mine, dtype=np.int64), len(keep) < len(clients)))
        self.dirty.clear()


def _named(tree: Tree) -> dict[str, Tensor]:
    """The leaves by name: an empty tree takes no bytes of a row."""
    return {name: leaf for name, leaf in flatten(tree).items() if not name.endswith("/")}
