"""Samples of a split's rows for analyses: fewer support or query rows, and rows of other clients.

All keep the type of the rows they are drawn from, so that what may not be chosen on query rows may not be chosen on
other clients' query rows either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bespoke.data.splits import Ints, Query, Rows, Support
from bespoke.randomness import generator, mix, shuffles


@dataclass(frozen=True)
class _Fewer(Rows):
    """A fraction of each client's rows, at least one and at most `most`. Smaller samples are subsets of larger ones."""

    fraction: float
    seed: int
    most: int  # 0: any number

    @classmethod
    def sample(cls, rows: Rows, fraction: float, seed: int, most: int = 0) -> Self:
        return cls(rows.population, rows.clients, rows.part, fraction, seed, most)

    def of(self, clients: Ints) -> tuple[Ints, Ints]:
        rows, sizes = super().of(clients)
        kept = self._kept(sizes)
        starts = np.repeat(np.cumsum(sizes) - sizes, sizes)
        order = shuffles(int(mix("fewer examples", self.seed)), self.population.keys[clients], sizes)
        first = np.arange(len(rows)) - starts < np.repeat(kept, sizes)
        # in their stored order again, so that all of the rows are batched as they were in the run
        return rows[np.sort((starts + order)[first])], kept

    def sizes(self, clients: Ints | None = None) -> Ints:
        return self._kept(super().sizes(clients))

    def _kept(self, sizes: Ints) -> Ints:
        kept: Ints = np.minimum(np.maximum(np.ceil(self.fraction * sizes - 1e-9).astype(np.int64), 1), sizes)
        return kept.clip(max=self.most) if self.most else kept


class Fewer(_Fewer, Support):
    """A sample of the support rows."""


class FewerTests(_Fewer, Query):
    """A sample of the query rows."""


@dataclass(frozen=True)
class Others(Query):
    """The same sample of query rows for every client, without the client's own (or its group's) rows."""

    rows: Ints
    owners: Ints  # the client of each row
    by_group: bool

    @classmethod
    def sample(cls, query: Query, count: int, seed: int, by_group: bool = False) -> Others:
        """`count` rows, drawn from the query rows of all clients together."""
        sizes = query.sizes()
        total = int(sizes.sum())
        drawn = np.sort(generator("other clients' rows", seed).choice(total, min(count, total), replace=False))
        ends = np.cumsum(sizes)
        place = np.searchsorted(ends, drawn, side="right")
        present, which = np.unique(place, return_inverse=True)
        rows, have = query.of(query.clients[present])  # rows of other clients are not read
        inside = drawn - (ends - sizes)[place]
        chosen = rows[(np.cumsum(have) - have)[which] + inside]
        return cls(query.population, query.clients, query.part, chosen, query.clients[place], by_group)

    def of(self, clients: Ints) -> tuple[Ints, Ints]:
        strange = self._strange(clients)
        return np.broadcast_to(self.rows, strange.shape)[strange], strange.sum(1)

    def sizes(self, clients: Ints | None = None) -> Ints:
        sizes: Ints = self._strange(self.clients if clients is None else clients).sum(1)
        return sizes

    def _strange(self, clients: Ints) -> NDArray[np.bool_]:
        """A mask (clients, rows) of rows that belong to others."""
        group = self.population.group
        if not self.by_group or group is None:
            return np.not_equal(self.owners[None], clients[:, None])
        return np.not_equal(group[self.owners][None], group[clients][:, None])

    def fetch(self, clients: Ints, names: Sequence[str]) -> tuple[dict[str, Tensor], Ints]:
        # not the clients' own rows: nothing can be read ahead of them, and the sample is small
        return {name: self.population.columns[name] for name in names}, np.zeros_like(clients)
