"""Divides a cohort into chunks of clients that are executed together, by their rows and steps and by memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bespoke.federation.batches import WHOLE, Layout, buckets
from bespoke.federation.work import Mode
from bespoke.task import Task

Ints = NDArray[np.int64]

ROOM = 2**24  # numbers that the padded rows of a chunk may have
LAUNCH_COST = 12.0  # cost of launching a step of a chunk, in steps of one small client (docs/speed.md)


@dataclass(frozen=True)
class Chunks:
    """Divides a host's clients into chunks; `x` are the host's rows."""

    mode: Mode
    task: Task
    x: Tensor

    def of(self, layout: Layout, among: NDArray[np.bool_] | None = None) -> list[Ints]:
        """The positions of clients (`among` these) that are executed together."""
        filled = layout.sizes > 0  # a client without rows sends nothing
        positions = np.flatnonzero(filled if among is None else filled & among)
        if not len(positions):
            return []
        if not self.mode.vectorized:
            # one at a time, so that memory holds one client's update, however large the cohort
            return [positions[i : i + 1] for i in range(len(positions))]
        if layout.batching.size >= WHOLE.size:  # all rows at once: these are padded to the longest
            return self.alike(positions, layout.sizes)
        if self.mode.gradient == "fused" or self.task.batches_clients:
            # compiled descent, and a task with batches of its own, never touch padding: no need to sort by steps
            return np.array_split(positions, -(-len(positions) // self.mode.chunk))
        return [positions[bucket] for bucket in buckets(layout.steps[positions], self.mode.chunk, LAUNCH_COST)]

    def alike(self, positions: Ints, rows: Ints) -> list[Ints]:
        """Chunks of clients with similar numbers of rows, which are padded to the longest and fit into memory."""
        if not self.mode.vectorized or len(positions) == 1:
            return [positions]
        sizes = (2 ** np.ceil(np.log2(np.maximum(rows[positions], 1)))).astype(np.int64)
        width = max(self.x[:1].numel() + 1, self.task.row_numbers(self.x))
        cut: list[Ints] = []
        for part in buckets(sizes, self.mode.chunk, LAUNCH_COST):
            pieces = -(-int(sizes[part].max()) * len(part) * width // ROOM)
            cut += [positions[piece] for piece in np.array_split(part, min(max(pieces, 1), len(part)))]
        return cut
