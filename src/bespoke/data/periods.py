"""Populations whose rows change while a federation trains: changed preferences, and clients that join late.

A row may have a first and a last round, the columns `since` and `until` of a population; rounds count from one, over
all stages of a run. What is there between two changes is a population of its own with the same clients in the same
places, so that what is known of a client, by itself or by the server, stays known. One without rows in a period takes
no part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from bespoke.data.population import Population
from bespoke.data.splits import Split

FOREVER = 2**31 - 1  # the last round of a row that stays


@dataclass(frozen=True)
class Period:
    """The population and split that are valid up to a round of the run."""

    until: int  # the last round
    population: Population
    split: Split


def periods(population: Population, split: Callable[[Population], Split]) -> tuple[Period, ...]:
    """The periods between changes of rows, the last one without an end. Without such rows there is one period."""
    if "since" not in population.columns or "until" not in population.columns:
        return (Period(FOREVER, population, split(population)),)
    since, until = (population.columns[name].numpy() for name in ("since", "until"))
    ends = np.unique(np.concatenate([since[since > 1] - 1, until[until < FOREVER], [FOREVER]])).tolist()
    found = []
    for end in ends:
        there = population.having((since <= end) & (until >= end))
        found.append(Period(int(end), there, split(there)))
    return tuple(found)
