"""A roster is all that a server knows of its clients. It has no rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from bespoke.data.about import About
from bespoke.data.population import Population
from bespoke.errors import UserError

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Roster:
    """Ids of clients, their numbers of rows and their groups. Clients are numbered in this order."""

    ids: Sequence[str]
    keys: NDArray[np.uint64]  # a stable hash of each id, from which a client's randomness comes
    sizes: Ints
    group: Ints | None = None  # per client, an index into `groups`
    groups: Sequence[str] = ()

    @classmethod
    def of(cls, population: Population) -> Roster:
        return cls(population.ids, population.keys, population.sizes(), population.group, population.groups)

    def __len__(self) -> int:
        return len(self.keys)

    def group_numbers(self) -> Ints | None:
        """Each client's group counted from 1, or 0 if unknown; None without groups."""
        return self.population().group_numbers()

    def population(self, about: About | None = None) -> Population:
        """A population without columns, for splits and samplers that need only ids, sizes and groups."""
        offsets = np.concatenate([[0], np.cumsum(self.sizes)]).astype(np.int64)
        return Population({}, offsets, self.ids, self.keys, self.group, self.groups, about or {})


@dataclass(frozen=True)
class Joined:
    """The rosters of several places as one. Clients are numbered in the order of their ids, wherever they live."""

    roster: Roster
    homes: Ints  # the place of each client
    numbers: tuple[Ints, ...] = field(default=())  # for each place: the numbers of its clients, in its own order


def joined(rosters: Sequence[Roster], names: Sequence[str]) -> Joined:
    """Joins rosters into one, sorted by id as a population is. `names` of the places are for errors."""
    ids = [str(name) for roster in rosters for name in roster.ids]
    homes = np.repeat(np.arange(len(rosters)), [len(roster) for roster in rosters]).astype(np.int64)
    order = np.array(sorted(range(len(ids)), key=ids.__getitem__), dtype=np.int64)
    for first, second in pairwise(order):
        if ids[first] == ids[second]:
            here, there = names[int(homes[first])], names[int(homes[second])]
            raise UserError(f"client {ids[first]!r} lives at {here} and at {there}; give one of the two another id")
    with_groups = [name for roster, name in zip(rosters, names) if roster.group is not None]
    if with_groups and len(with_groups) < len(rosters):
        without = next(name for roster, name in zip(rosters, names) if roster.group is None)
        raise UserError(
            f"clients of {with_groups[0]} come in groups, and those of {without} do not; declare both alike"
        )
    group, groups = None, tuple(sorted({str(name) for roster in rosters for name in roster.groups}))
    if with_groups:
        places = [np.array([groups.index(str(name)) for name in r.groups], dtype=np.int64) for r in rosters]
        group = np.concatenate([place[r.group] for place, r in zip(places, rosters)])[order]
    roster = Roster(
        [ids[place] for place in order],
        np.concatenate([r.keys for r in rosters])[order],
        np.concatenate([r.sizes for r in rosters])[order],
        group,
        groups,
    )
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    ends = np.cumsum([len(r) for r in rosters])
    numbers = tuple(rank[end - len(r) : end] for end, r in zip(ends.tolist(), rosters))
    return Joined(roster, homes[order], numbers)
