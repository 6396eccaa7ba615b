"""From rows to minibatches: exact slices for one client, or padded stacks for many.

Which rows go into which batch is a function of (key, client, epoch) alone, the same in both forms.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bespoke.data.splits import Rows
from bespoke.method import Batching
from bespoke.randomness import mix, shuffles
from bespoke.tensors import Params

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Sliced:
    """One client's rows, already in order: data leaves are (epochs, rows, ...); a batch is a slice of true size."""

    data: Params
    size: int
    repeats: int
    examples: Tensor
    steps: int  # per epoch

    def __len__(self) -> int:
        return self.steps * self.repeats

    def __getitem__(self, step: int) -> Params:
        epoch, place = divmod(step, self.steps)
        batch = {}
        for name, column in self.data.items():
            order = column[epoch if len(column) > 1 else 0]
            batch[name] = order[place * self.size : (place + 1) * self.size]
        return batch

    def live(self, step: int) -> float:
        return 1.0

    def epochs(self) -> Iterator[Sliced]:
        for epoch in range(self.repeats):
            one = {name: column[epoch : epoch + 1] if len(column) > 1 else column for name, column in self.data.items()}
            yield Sliced(one, self.size, 1, self.examples, self.steps)

    def rows(self) -> Params:
        return {name: column[0] for name, column in self.data.items()}


@dataclass(frozen=True)
class Stacked:
    """The same under vmap: data leaves are (epochs, steps, [clients,] batch, ...), padded, with a mask."""

    data: Params
    mask: Tensor  # (steps, [clients,] batch)
    alive: Tensor | None  # (steps, [clients]); None: no client has a padding step
    repeats: int
    examples: Tensor

    def __len__(self) -> int:
        return self.mask.shape[0] * self.repeats

    def __getitem__(self, step: int) -> Params:
        epoch, place = divmod(step, self.mask.shape[0])
        batch = {name: (column[epoch] if column.shape[0] > 1 else column[0])[place] for name, column in self.data.items()}
        return {**batch, "mask": self.mask[place]}

    def live(self, step: int) -> float | Tensor:
        return 1.0 if self.alive is None else self.alive[step % self.mask.shape[0]]

    def epochs(self) -> Iterator[Stacked]:
        for epoch in range(self.repeats):
            one = {n: column[epoch : epoch + 1] if column.shape[0] > 1 else column for n, column in self.data.items()}
            yield Stacked(one, self.mask, self.alive, 1, self.examples)

    def rows(self) -> Params:
        flat = {name: column[0].flatten(0, 1) for name, column in self.data.items()}
        return {**flat, "mask": self.mask.flatten(0, 1)}


def steps_of(sizes: Ints, batching: Batching) -> Ints:
    """Steps per epoch of clients with these numbers of rows."""
    if batching.drop_last:
        return np.maximum(sizes // batching.size, (sizes > 0).astype(np.int64))
    return -(-sizes // batching.size)


@dataclass(frozen=True)
class Orders:
    """The rows of some clients in the order they are to be used: one concatenated list per epoch."""

    clients: Ints
    sizes: Ints
    rows: list[Ints]  # one entry, or one per epoch
    batching: Batching

    @classmethod
    def draw(cls, part: Rows, clients: Ints, batching: Batching, key: int | None) -> Orders:
        """Shuffle each client's rows for each epoch; `key` None keeps the stored order."""
        rows, sizes = part.of(clients)
        if key is None:
            return cls(clients, sizes, [rows], batching)
        starts = np.repeat(np.cumsum(sizes) - sizes, sizes)
        keys = part.population.keys[clients]
        rounds = batching.epochs if batching.reshuffle else 1
        orders = [rows[starts + shuffles(mix(key, epoch), keys, sizes)] for epoch in range(rounds)]
        return cls(clients, sizes, orders, batching)

    @property
    def steps(self) -> Ints:
        return steps_of(self.sizes, self.batching)

    def sliced(self, columns: Params, position: int) -> Sliced:
        """One client's batches, for the loop."""
        size, begin = int(self.sizes[position]), int(self.sizes[:position].sum())
        steps = int(self.steps[position])
        used = min(size, steps * self.batching.size) if self.batching.drop_last else size
        index = torch.from_numpy(np.stack([rows[begin : begin + used] for rows in self.rows]))
        data = {n: column[index.flatten()].unflatten(0, index.shape) for n, column in columns.items()}
        data["mask"] = torch.ones(index.shape)
        return Sliced(data, self.batching.size, self.batching.epochs, torch.tensor(float(size)), steps)

    def stacked(self, columns: Params, positions: Ints) -> Stacked:
        """The batches of several clients, padded to the longest, for vmap. Leaves are ordered step by step, so that
        what one step of all clients reads lies together in memory."""
        size = min(self.batching.size, int(self.sizes[positions].max()))
        sizes = self.sizes[positions]
        steps = self.steps[positions]
        depth, width = int(steps.max()), len(positions)
        if self.batching.drop_last:  # a client smaller than a batch keeps its only, partial one
            sizes = np.where(sizes < self.batching.size, sizes, steps * self.batching.size)
        begins = (np.cumsum(self.sizes) - self.sizes)[positions]
        even = bool((sizes == depth * size).all())
        place = np.arange(depth * size)
        last = np.maximum(sizes - 1, 0)[:, None]
        grid = begins[:, None] + np.minimum(place, last)  # padding repeats the last row, and is masked out
        grid = np.minimum(grid, len(self.rows[0]) - 1)
        shape = (width, depth, size)
        data: dict[str, Any] = {name: [] for name in columns}
        for rows in self.rows:
            index = torch.from_numpy(rows[grid].reshape(shape).transpose(1, 0, 2).copy().reshape(-1))
            for name, column in columns.items():
                data[name].append(column.index_select(0, index).unflatten(0, (depth, width, size)))
        leaves = {name: parts[0][None] if len(parts) == 1 else torch.stack(parts) for name, parts in data.items()}
        if even:
            mask, alive = torch.ones(depth, width, size), None
        else:
            mask = torch.from_numpy((place < sizes[:, None]).reshape(shape).transpose(1, 0, 2).astype(np.float32))
            alive = None if (steps == depth).all() else torch.from_numpy(
                (np.arange(depth)[:, None] < steps[None]).astype(np.float32))  # fmt: skip
        return Stacked(leaves, mask, alive, self.batching.epochs, torch.from_numpy(self.sizes[positions].astype(np.float32)))


def buckets(steps: Ints, chunk: int, launch_cost: float) -> list[Ints]:
    """Group clients (by position) of like numbers of steps into chunks of at most `chunk`.

    A chunk costs (steps of its longest) x (launch_cost + its clients) in units of one client's step: many small chunks
    launch often, few large ones pad much. Cut points over the sorted clients by dynamic programming over distinct steps.
    """
    order = np.argsort(-steps, kind="stable")
    values, first = np.unique(-steps[order], return_index=True)
    values = -values  # distinct numbers of steps, descending
    ends = np.append(first[1:], len(order))
    best = np.full(len(values) + 1, np.inf)
    best[0], cut = 0.0, np.zeros(len(values) + 1, dtype=np.int64)
    for end in range(1, len(values) + 1):
        for begin in range(end):
            clients = ends[end - 1] - first[begin]
            launches = -(-clients // chunk)
            cost = best[begin] + values[begin] * (launches * launch_cost + clients)
            if cost < best[end]:
                best[end], cut[end] = cost, begin
    groups: list[Ints] = []
    end = len(values)
    while end:
        begin = int(cut[end])
        members = order[first[begin] : ends[end - 1]]
        pieces = -(-len(members) // chunk)
        groups = [*np.array_split(members, pieces), *groups]
        end = begin
    return groups


