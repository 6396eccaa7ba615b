"""Private state by client: a lazily filled, memory-mapped table. Only clients that trained use memory.

The table belongs to the host; no server function sees it. Each checkpoint writes a segment with the rows changed since
the last one, so that its cost depends on the changed rows, and a kill leaves it whole or absent. A new segment absorbs
older ones that are not much larger. So a checkpoint needs at most twice the rows of the live state, in at most
log2(clients) + 1 files. A segment carries its digest, its name and its run.
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
    """A file of private state, and the clients whose rows it holds."""

    name: str
    clients: Ints
    shared: bool = False  # it also holds rows of other hosts' clients


class PrivateTable:
    """Rows of bytes, one per client that trained, in an unnamed temporary file that ends with the process."""

    def __init__(self, template: Tree) -> None:
        # sorted by name: a template that was read from a file has another order, and rows of segments carry no names
        first = dict(sorted(_named(template).items()))
        self.template = template
        self.fields = {name: (leaf.shape, leaf.dtype) for name, leaf in first.items()}
        self.initial = self._pack({name: leaf[None] for name, leaf in first.items()}, 1)[0]
        self.width = len(self.initial)
        self.slots: dict[int, int] = {}
        self.dirty: set[int] = set()
        self.segments: list[Segment] = []  # later segments override earlier ones; with `dirty` they are the whole table
        self.capacity = 0
        self.rows: NDArray[np.uint8] = np.zeros((0, self.width), dtype=np.uint8)

    def __bool__(self) -> bool:
        return self.width > 0

    def holds(self, clients: Ints) -> NDArray[np.bool_]:
        """Marks the clients that have a state of their own."""
        return np.array([int(client) in self.slots for client in clients], dtype=bool)

    def read(self, clients: Iterable[int]) -> Tree:
        """The state of these clients, stacked; clients that never trained have the initial state."""
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
        """Converts the state of `many` clients to rows of the table, without changing the table."""
        return self._pack(_named(state), count) if self and count else np.zeros((count, 0), np.uint8)

    def put(self, clients: Iterable[int], packed: NDArray[np.uint8]) -> None:
        """Stores rows that `packed` made."""
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
        """Rows of bytes in the order of the template's fields, in whichever order a method returns them."""
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
            part = packed[:, begin : begin + width].copy()  # a slice of a row may be unaligned for its type
            flat[name] = torch.from_numpy(part).view(dtype).reshape(len(packed), *shape)
            begin += width
        return named_map(lambda name, _: flat[name], self.template)

    def save(self, path: Path, only_dirty: bool = True, run: str = "") -> list[str]:
        """Writes changed (or all) rows as a segment, in order of client; returns the names of all current segments.

        The new segment absorbs older ones with at most twice its rows. Their files stay, because the previous
        checkpoint needs them; the caller removes them later.
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
        """Reads a segment's rows (of the clients in `only`)."""
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
    """The leaves by name: an empty tree has no bytes in a row."""
    return {name: leaf for name, leaf in flatten(tree).items() if not name.endswith("/")}
