"""Measures how clients' data differ: numbers of examples, targets, and the distance from all clients together.

The distance of a client is that between its targets and those of all clients together: of classes and tokens the
Jensen-Shannon divergence in bits (0: the same, 1: nothing in common), of numbers the Wasserstein distance in standard
deviations of all targets. Small clients differ by chance alone, so the same is computed 19 times with rows dealt out
anew to clients of the same sizes. A client that is further away than in all of these differs at the level of 5 %.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import wasserstein_distance

from bespoke.data.population import Population
from bespoke.randomness import generator

Floats = NDArray[np.float64]
BLOCK = 2**22  # numbers of a table of clients and classes that are held at a time
PADDING = 0
TIMES = 19  # that rows are dealt out anew
QUANTILES = 2001  # of all targets, which stand for them


@dataclass(frozen=True)
class Heterogeneity:
    """Of every client: how many examples, and how far its targets are from everyone's; the same by chance."""

    sizes: NDArray[np.int64]
    distance: Floats
    by_chance: Floats  # a row each time that rows were dealt out anew
    unit: str  # of the distances

    @property
    def beyond_chance(self) -> float:
        """The part of the clients that are further away than chance alone would put them."""
        return float((self.distance > self.by_chance.max(0)).mean())


def heterogeneity(population: Population, seed: int = 0) -> Heterogeneity:
    """Of clients that have rows."""
    sizes = population.sizes()
    sizes = sizes[sizes > 0]
    targets = population.columns["y"].numpy()
    random, kind = generator("dealt out anew", seed), population.about["task"]
    measure: Callable[[NDArray[Any]], Floats]
    if kind == "regression":
        targets = targets / (float(targets.std()) or 1.0)
        everyone = np.quantile(targets, np.linspace(0, 1, QUANTILES))
        measure = partial(_wasserstein, sizes=sizes, everyone=everyone)
    else:
        measure = partial(_divergence, sizes=sizes, tokens=kind == "language")
    by_chance = np.stack([measure(targets[random.permutation(len(targets))]) for _ in range(TIMES)])
    return Heterogeneity(sizes, measure(targets), by_chance, "standard deviations" if kind == "regression" else "bits")


def _wasserstein(targets: NDArray[Any], sizes: NDArray[np.int64], everyone: Floats) -> Floats:
    return np.array([wasserstein_distance(part, everyone) for part in np.split(targets, np.cumsum(sizes)[:-1])])


def _divergence(targets: NDArray[Any], sizes: NDArray[np.int64], tokens: bool) -> Floats:
    """Jensen-Shannon divergence of each client's mix from that of all."""
    ends = np.cumsum(sizes)
    classes = int(targets.max(initial=0)) + 1
    whole = _mix(np.bincount(targets.reshape(-1), minlength=classes).astype(float)[None], tokens)[0]
    step = max(BLOCK // classes, 1)
    found = []
    for first in range(0, len(sizes), step):
        some = slice(first, first + step)
        begin, rows = ends[first] - sizes[first], np.arange(len(sizes[some]))
        block = targets[begin : ends[some][-1]]
        owner = np.repeat(rows, sizes[some])
        owner = np.repeat(owner, block.shape[1]) if block.ndim > 1 else owner
        flat = owner * classes + block.reshape(-1)
        own = _mix(np.bincount(flat, minlength=len(rows) * classes).reshape(len(rows), classes).astype(float), tokens)
        middle = (own + whole) / 2
        found.append((_entropy(middle) - (_entropy(own) + _entropy(whole)) / 2).clip(0))
    return np.concatenate(found)


def _mix(counts: Floats, tokens: bool) -> Floats:
    if tokens:
        counts[:, PADDING] = 0
    mix: Floats = counts / np.maximum(counts.sum(-1, keepdims=True), 1)
    return mix


def _entropy(parts: Floats) -> Any:
    return -(parts * np.log2(np.where(parts > 0, parts, 1))).sum(-1)
