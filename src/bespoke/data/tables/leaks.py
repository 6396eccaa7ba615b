"""Finds leaks: columns that predict the target alone, at clients to which the prediction was not fitted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from bespoke.data.population import Population
from bespoke.data.splits import Rows, Split

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
CELLS = 1_000_000  # rows times features looked at for leaks
EXPLAINED = 0.99  # of the target's variance, or of its classes, by one column: then it is taken for the target itself
JUDGED = 0.8  # of the rows have to lie where the curve of other clients is known
PIECES = 512  # of the curve that is fitted to one column


def leaks_of(population: Population, split: Split, columns: dict[str, list[int]]) -> dict[str, float]:
    """Finds columns that predict the target alone, by the same rule for every client, and how well."""
    regression = population.about.get("task") == "regression"
    classes = len(population.about.get("classes", ()))
    rows, owner = some_rows(split.train, CELLS // max(population.columns["x"].shape[1], classes, 1))
    fold = owner % 2 == 1
    if len(rows) < 30 or not fold.any() or fold.all():
        return {}
    x = population.columns["x"][torch.from_numpy(rows)].numpy().astype(np.float64)
    y = population.columns["y"][torch.from_numpy(rows)].numpy()
    judge = _Regression.of(y.astype(np.float64), owner) if regression else _Classes.of(y)
    found = {}
    for column, places in columns.items():
        values = x[:, places[0]] if len(places) == 1 else _codes(x[:, places])
        if (explained := judge.explained(values, fold)) > EXPLAINED:
            found[column] = explained
    return found


@dataclass(frozen=True)
class _Regression:
    y: Floats
    overall: Floats  # each row's square about the mean
    within: Floats  # about its client's mean

    @classmethod
    def of(cls, y: Floats, owner: Ints) -> _Regression:
        means = np.bincount(owner, y) / np.maximum(np.bincount(owner), 1)
        return cls(y, (y - y.mean()) ** 2, (y - means[owner]) ** 2)

    def explained(self, values: Floats, fold: Bools) -> float:
        """The share of the variance; zero where within clients, too, the column does not tell nearly all of it.

        So a column that goes with the size of a client, as employment with product, is not taken for the target.
        """
        missed = (self.y - _crossed(values, self.y, fold)) ** 2
        judged = ~np.isnan(missed)
        if judged.mean() < JUDGED:
            return 0.0
        error, overall, within = (float(part[judged].sum()) for part in (missed, self.overall, self.within))
        return 1 - error / overall if error < 10 * (1 - EXPLAINED) * (within or overall) else 0.0


@dataclass(frozen=True)
class _Classes:
    y: Ints
    indicators: list[Floats]
    rest: float  # the share of rows that are not of the most frequent class

    @classmethod
    def of(cls, y: Ints) -> _Classes:
        kinds = np.unique(y)
        indicators = [(y == kind).astype(np.float64) for kind in kinds]
        return cls(np.searchsorted(kinds, y), indicators, 1 - max(one.mean() for one in indicators))

    def explained(self, values: Floats, fold: Bools) -> float:
        """The share of classes that are predicted; zero unless at most a fifth of a constant's errors remain."""
        curves = np.stack([_crossed(values, one, fold) for one in self.indicators])
        judged = ~np.isnan(curves[0])
        if judged.mean() < JUDGED:
            return 0.0
        missed = float((curves.argmax(0) != self.y)[judged].mean())
        return 1 - missed if missed < self.rest / 5 else 0.0


def _crossed(values: Floats, y: Floats, fold: Bools) -> Floats:
    """Each half of the clients as predicted by a curve through the other half: the mean of y along `values`.

    NaN outside of the other half's values: what lies beyond a curve's ends says nothing of it.
    """
    lowest = np.nanmin(values, initial=0.0)
    values = np.where(np.isnan(values), lowest - 1.0, values)  # a missing value is a value of its own
    out = np.empty_like(y)
    for half in (fold, ~fold):
        known, inverse = np.unique(values[half], return_inverse=True)
        counts = np.bincount(inverse)
        if len(known) > PIECES:
            piece = np.minimum((np.cumsum(counts) - 1) * PIECES // len(inverse), PIECES - 1)
            _, piece = np.unique(piece, return_inverse=True)
            known = np.bincount(piece, known * counts) / np.bincount(piece, counts)
            inverse = piece[inverse]
            counts = np.bincount(inverse)
        means = np.bincount(inverse, y[half]) / counts
        out[~half] = np.interp(values[~half], known, means, left=np.nan, right=np.nan)
    return out


def by_column(names: list[str]) -> dict[str, list[int]]:
    """The places of the features that one column of the table was made into: a category has an indicator a level."""
    places: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        places.setdefault(name.split(" = ")[0], []).append(place)
    return places


def _codes(indicators: Floats) -> Floats:
    """The level of a category, zero where no indicator says one."""
    return np.where((indicators > 0).any(1), indicators.argmax(1) + 1.0, 0.0)


def some_rows(part: Rows, most: int) -> tuple[Ints, Ints]:
    """About this many rows of a part of the split, from evenly chosen clients, with the client of each (0, 1, ...)."""
    clients = spread(part.clients, part.sizes(), most)
    rows, sizes = part.of(clients)
    return rows, np.repeat(np.arange(len(clients)), sizes)


def spread(clients: Ints, sizes: Ints, most: int) -> Ints:
    """Every k-th client, so that they have about so many rows."""
    return clients[:: max(1, -(-int(sizes.sum()) // most))]
