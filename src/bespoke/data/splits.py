"""Splits as types: `Train`, `Support`, `Validation` and `Query` rows are different classes and cannot be confused.

A split is a pure function of (seed, client id, number of rows). Adding clients moves no other client, and nothing is
stored.

- cross-silo: the same clients train and are tested; each client's rows go to train / validation / query, and its
  support rows (what it adapts on) are its training rows.
- cross-device: clients are split; those held out never train. Each held-out client's rows go to support (adaptation)
  and to validation or query, at random or by time.

Rows of one unit (column `unit`, neighbours within a client: the segments of one text) fall in one part together: then
units are counted and ordered as rows are otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bespoke.data.population import Population
from bespoke.randomness import shuffles, uniform

Ints = NDArray[np.int64]
Order = Literal["random", "time", "stored", "motley"]
REMEMBERED = 5_000_000  # rows up to which a split is computed once for all; beyond, for each cohort anew


@dataclass(frozen=True)
class Rows:
    """The rows of one part of a split, for each client of `clients`."""

    population: Population
    clients: Ints  # positions in the population, ascending
    part: Part

    def of(self, clients: Ints) -> tuple[Ints, Ints]:
        """The rows of these clients, concatenated, and how many each has."""
        if self.population.rows > REMEMBERED or self.part.fractions == (1.0,):
            return self.part.rows(self.population, clients)
        rows, ends = self._all
        sizes = ends[clients + 1] - ends[clients]
        return rows[_ranges(ends[clients], sizes)], sizes

    @cached_property
    def _all(self) -> tuple[Ints, Ints]:
        """The rows of all clients, cached for small populations, because a split never changes."""
        rows, sizes = self.part.rows(self.population, np.arange(len(self.population)))
        return rows, np.concatenate([[0], np.cumsum(sizes)])

    def sizes(self, clients: Ints | None = None) -> Ints:
        clients = self.clients if clients is None else clients
        if "unit" in self.population.columns:
            return Rows.of(self, clients)[1]  # a Half's own would be halved twice
        sizes: Ints = self.part.counts(self.population.sizes(clients))[self.part.index]
        return sizes

    def fetch(self, clients: Ints, names: Sequence[str]) -> tuple[dict[str, Tensor], Ints]:
        """Columns in which the rows of `of` are found, and how far each client's rows have moved in them."""
        return self.population.fetch(clients, names)


class Train(Rows):
    """Rows on which the federation trains."""


class Support(Rows):
    """Rows with which a client adapts its personal model."""


class Validation(Rows):
    """Rows for choices: hyper-parameters, epochs, personal models."""


@dataclass(frozen=True)
class Half(Validation):
    """Every second validation row of each client: one half is for choosing, the other for judging the choice."""

    odd: bool = False

    @classmethod
    def of_rows(cls, rows: Validation, odd: bool) -> Half:
        return cls(rows.population, rows.clients, rows.part, odd)

    def of(self, clients: Ints) -> tuple[Ints, Ints]:
        rows, sizes = super().of(clients)
        place = np.arange(len(rows)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        return rows[place % 2 == self.odd], self._halved(sizes)

    def sizes(self, clients: Ints | None = None) -> Ints:
        return self._halved(super().sizes(clients))

    def _halved(self, sizes: Ints) -> Ints:
        return (sizes + (not self.odd)) // 2


class Query(Rows):
    """Rows for reported results. Nothing is ever chosen on them."""


@dataclass(frozen=True)
class Part:
    """A slice of each client's rows: after ordering, those between two fractions, by the rounding rule `counts`."""

    index: int  # which of the consecutive parts
    fractions: tuple[float, ...]  # of the consecutive parts; they sum to one
    order: Order = "random"
    seed: int = 0
    time: str = "time"

    def counts(self, sizes: Ints) -> Ints:
        """How many rows of a client fall in each part: shape (parts, clients)."""
        if self.order == "motley":
            return _motley_counts(sizes, self.fractions)
        ends = np.floor(np.cumsum(self.fractions)[:, None] * sizes[None] + 1e-9).astype(np.int64)
        ends[-1] = sizes
        counts: Ints = np.diff(ends, axis=0, prepend=0)
        # A client too small for its fractions still gets a row for training (or adapting) first, then one to be tested
        # on, then one to choose on: without the first two there is nothing to say of it.
        wanted = [0, *reversed(range(1, len(self.fractions)))]
        for rank, part in enumerate(wanted):
            if self.fractions[part] == 0:
                continue
            short = (counts[part] == 0) & (sizes > rank)
            donor = np.argmax(counts[:, short], axis=0)
            counts[donor, np.flatnonzero(short)] -= 1
            counts[part, short] += 1
        return counts

    def rows(self, population: Population, clients: Ints) -> tuple[Ints, Ints]:
        if self.fractions == (1.0,):
            return _ranges(population.offsets[clients], population.sizes(clients)), population.sizes(clients)
        if "unit" not in population.columns:
            return self._chosen(population, clients)
        units, begins = by_unit(population)
        chosen, counts = self._chosen(units, clients)
        sizes = np.diff(begins)[chosen]
        owner = np.repeat(np.arange(len(clients)), counts)
        return _ranges(begins[chosen], sizes), np.bincount(owner, sizes, minlength=len(clients)).astype(np.int64)

    def _chosen(self, population: Population, clients: Ints) -> tuple[Ints, Ints]:
        sizes = population.sizes(clients)
        starts = population.offsets[clients]
        counts = self.counts(sizes)
        begin = counts[: self.index].sum(0)
        kept = counts[self.index]
        where = _ranges(np.cumsum(sizes) - sizes + begin, kept)  # places in the ordered, concatenated rows
        return self._ordered(population, clients, starts, sizes)[where], kept

    def _ordered(self, population: Population, clients: Ints, starts: Ints, sizes: Ints) -> Ints:
        base = np.repeat(starts, sizes)
        if self.order == "stored":
            return _ranges(starts, sizes)
        if self.order == "time":
            rows = _ranges(starts, sizes)
            stamps = population.columns[self.time].numpy()[rows]
            return rows[np.lexsort((stamps, np.repeat(np.arange(len(sizes)), sizes)))]
        if self.order == "motley":  # one integer seed for all: sklearn's train_test_split, applied twice
            orders = [_motley_order(int(n), self.fractions, self.seed) for n in sizes]
            inside: Ints = np.concatenate([np.zeros(0, np.int64), *orders])
            return base + inside
        local = shuffles("split rows", _seeded(population.keys[clients], self.seed), sizes)
        return base + local


def by_unit(population: Population) -> tuple[Population, Ints]:
    """A population with a row for each unit, and the row at which each unit begins (and where the last ends)."""
    unit = population.columns["unit"].numpy()
    new = np.ones(len(unit), dtype=bool)
    new[1:] = unit[1:] != unit[:-1]
    new[population.offsets[:-1][population.sizes() > 0]] = True
    begins = np.flatnonzero(new)
    first = torch.from_numpy(begins)
    columns = {"time": population.columns["time"][first]} if "time" in population.columns else {}
    offsets = np.searchsorted(begins, population.offsets)
    return replace(population, columns=columns, offsets=offsets, reader=None), np.append(begins, len(unit))


def _counted(population: Population) -> Ints:
    """How many units each client has; rows, where they have none."""
    return (by_unit(population)[0] if "unit" in population.columns else population).sizes()


def _seeded(keys: NDArray[np.uint64], seed: int) -> NDArray[np.uint64]:
    return keys ^ np.uint64(seed * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF)


def _ranges(starts: Ints, sizes: Ints) -> Ints:
    """The integers start ... start + size of each pair, concatenated."""
    shift = np.repeat(starts - (np.cumsum(sizes) - sizes), sizes)
    return shift + np.arange(int(sizes.sum()), dtype=np.int64)


def _motley_counts(sizes: Ints, fractions: tuple[float, ...]) -> Ints:
    _, validation, test = fractions
    # rounded as sklearn rounds, where 0.15 / 0.85 of 85 rows are 16
    tests = np.ceil(test * sizes).astype(np.int64)
    validations = np.ceil(validation / (1 - test) * (sizes - tests)).astype(np.int64)
    return np.stack([sizes - tests - validations, validations, tests])


def _motley_order(size: int, fractions: tuple[float, ...], seed: int) -> Ints:
    _, validation, test = (int(c) for c in _motley_counts(np.array([size]), fractions)[:, 0])
    first = np.random.RandomState(seed).permutation(size)
    rest = first[test:]
    second = rest[np.random.RandomState(seed).permutation(len(rest))]
    return np.concatenate([second[validation:], second[:validation], first[:test]])


@dataclass(frozen=True)
class Selection:
    """Clients for choices: they adapt on `support` and are scored on `validation`."""

    support: Support
    validation: Validation


@dataclass(frozen=True)
class Reporting:
    """Clients for results; `validation` rows serve the choices that a client makes for itself."""

    support: Support
    validation: Validation
    query: Query


@dataclass(frozen=True)
class Split:
    """Which clients train, choose and are tested, and on which rows."""

    train: Train
    selection: Selection
    test: Reporting
    kind: Literal["cross-silo", "cross-device"]


def everything(population: Population) -> Train:
    """All rows of all clients, for training without evaluation."""
    return Train(population, np.arange(len(population)), Part(0, (1.0,)))


def cross_silo(
    population: Population,
    fractions: tuple[float, float, float] = (0.7, 0.15, 0.15),
    seed: int = 0,
    order: Order = "random",
) -> Split:
    """Each client's rows into train / validation / query; support rows are the training rows."""
    everyone = np.arange(len(population))
    train, validation, query = (Part(i, fractions, order, seed) for i in range(3))
    counts = train.counts(_counted(population))
    trained = everyone[counts[0] > 0]
    chosen = everyone[(counts[0] > 0) & (counts[1] > 0)]
    tested = everyone[(counts[0] > 0) & (counts[2] > 0)]
    return Split(
        Train(population, trained, train),
        Selection(Support(population, chosen, train), Validation(population, chosen, validation)),
        Reporting(
            Support(population, tested, train),
            Validation(population, tested, validation),
            Query(population, tested, query),
        ),
        "cross-silo",
    )


def cross_device(
    population: Population,
    held_out: tuple[float, float] = (0.15, 0.2),
    adapt: float = 0.5,
    seed: int = 0,
    order: Order = "random",
    own_validation: float = 0.0,
    role: NDArray[np.int64] | None = None,
) -> Split:
    """Clients into train / validation / test (fractions `held_out`, or `role` 0, 1, 2 per client as published).

    A held-out client adapts on the fraction `adapt` of its rows and is scored on the rest; `own_validation` of its
    rows are set aside for choices a test client makes for itself.
    """
    if role is None:
        draw = uniform("split clients", seed, population.keys)
        role = np.where(draw < held_out[1], 2, np.where(draw < held_out[0] + held_out[1], 1, 0))
    enough = _counted(population) >= 2
    training = np.flatnonzero((role == 0) & (population.sizes() > 0))
    choosing, testing = (np.flatnonzero((role == r) & enough) for r in (1, 2))
    halves = (adapt, 1 - adapt)
    support, scored = (Part(i, halves, order, seed) for i in range(2))
    selection = Selection(Support(population, choosing, support), Validation(population, choosing, scored))
    if own_validation:
        thirds = (adapt - own_validation, own_validation, 1 - adapt)
        parts = tuple(Part(i, thirds, order, seed) for i in range(3))
    else:
        parts = (support, replace(support, index=1, fractions=(1.0, 0.0), order="stored"), scored)
    test = Reporting(
        Support(population, testing, parts[0]),
        Validation(population, testing, parts[1]),
        Query(population, testing, parts[2]),
    )
    return Split(Train(population, training, Part(0, (1.0,))), selection, test, "cross-device")
