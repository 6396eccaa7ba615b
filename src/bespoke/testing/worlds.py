"""Small populations and tasks for tests: uneven clients, every kind of task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bespoke.data.population import Population
from bespoke.data.splits import Split, cross_silo
from bespoke.models.language import LanguageModel
from bespoke.models.networks import CNN, LSTM, MLP, Linear
from bespoke.models.task import BaseTask, Classification, Regression

# Rows in all; with halves for training these clients train on 1, 1, 3, 4, 8, 11 and 5 rows: with batches of 4 that is
# one row, fewer than a batch, exactly a batch, whole batches, and several with a rest. The first has no query rows.
SIZES = (1, 2, 6, 8, 16, 22, 11)
BATCH = 4
FRACTIONS = (0.5, 0.25, 0.25)


@dataclass(frozen=True)
class World:
    """A task with a population that fits it."""

    name: str
    task: BaseTask
    population: Population
    split: Split

    @property
    def linear(self) -> bool:
        return self.task.network.is_linear


def owners(sizes: tuple[int, ...] = SIZES, prefix: str = "client ") -> np.ndarray[Any, Any]:
    return np.repeat([f"{prefix}{i}" for i in range(len(sizes))], sizes)


def population_of(x: Any, y: Any, sizes: tuple[int, ...] = SIZES, **about: Any) -> Population:
    said: Any = {"name": "small", **about}
    return Population.build({"x": x, "y": y}, owners(sizes), about=said)


def _columns(kind: str, rows: int) -> tuple[Any, Any]:
    random = np.random.default_rng(17)
    if kind == "tokens":
        tokens = random.integers(1, 7, (rows, 6))
        return tokens[:, :5].astype(np.uint8), tokens[:, 1:].astype(np.int64)
    x: Any = random.standard_normal((rows, 3)).astype(np.float32)
    if kind == "regression":
        return x, (x @ [1.0, -2.0, 0.5] + 0.3 * random.standard_normal(rows)).astype(np.float32)
    labels = random.integers(0, 2 if kind == "two" else 3, rows)
    if kind in ("bytes", "images"):
        wide = 64 if kind == "images" else 5
        return random.integers(0, 256, (rows, wide)).astype(np.uint8), labels.astype(np.int64)
    return x, labels.astype(np.int64)


_TASKS: dict[str, tuple[str, BaseTask]] = {
    "linear": ("regression", Regression(Linear(3, 1, random_init=True), l2=0.05, unit=2.0)),
    "logistic": ("three", Classification(Linear(3, 3))),
    "logistic-bytes": ("bytes", Classification(Linear(5, 3, random_init=True), l2=0.01)),
    "hinge": ("two", Classification(Linear(3, 1), hinge=True)),
    "mlp": ("three", Classification(MLP(3, 3, (4,)))),
    "cnn": ("images", Classification(CNN(3, 8))),
    "lstm": ("tokens", LanguageModel(LSTM(7, 3, 4, 1))),
}
WORLDS = tuple(_TASKS)


def world(name: str, sizes: tuple[int, ...] = SIZES) -> World:
    kind, task = _TASKS[name]
    x, y = _columns(kind, sum(sizes))
    population = population_of(x, y, sizes)
    return World(name, task, population, cross_silo(population, FRACTIONS, seed=3))


def spoiled(population: Population, client: int) -> Population:
    """The same with a value that is not a number in this client's rows (of float inputs)."""
    x = population.columns["x"].clone()
    x[int(population.offsets[client]) :: 1][: int(population.sizes(np.array([client]))[0])] = torch.nan
    return Population(
        {**population.columns, "x": x}, population.offsets, population.ids, population.keys, about=population.about
    )
