"""Small populations and tasks for the tests: those of bespoke.testing, and clients whose rows come and go."""

from __future__ import annotations

import numpy as np

from bespoke.data.periods import FOREVER
from bespoke.data.population import Population
from bespoke.testing.worlds import (
    BATCH,
    FRACTIONS,
    SIZES,
    WORLDS,
    World,
    owners,
    population_of,
    spoiled,
    world,
)

__all__ = [
    "BATCH",
    "FRACTIONS",
    "SIZES",
    "WORLDS",
    "World",
    "changing",
    "owners",
    "population_of",
    "spoiled",
    "world",
]


def changing(clients: int = 10, rows: int = 12) -> Population:
    """Clients of a line each. After round 2 client 4 has the opposite one; after round 5 two of ten come besides."""
    random = np.random.default_rng(23)
    who, again = np.repeat(np.arange(clients), rows), np.full(rows, 4)
    x = random.standard_normal((len(who), 2)).astype(np.float32)
    x = np.concatenate([x, x[who == 4]])
    y = (x @ [1.0, -2.0]).astype(np.float32)
    y[len(who) :] *= -1
    since = np.where(who % 10 > 7, 6, 1)
    until = np.where(who == 4, 2, FOREVER)
    columns = {
        "x": x, "y": y, "since": np.append(since, np.full(rows, 3)), "until": np.append(until, np.full(rows, FOREVER)),
    }  # fmt: skip
    about = {"name": "changing", "task": "regression", "input": "table", "features": ["a", "b"], "target": "y"}
    return Population.build(columns, [f"client {i}" for i in (*who, *again)], about=about)
