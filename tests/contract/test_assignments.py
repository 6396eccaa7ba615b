"""FedEmbed's assignments through the battery: data that know the kinds of their rows, tables and images."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from battery import IN_PROCESS, LOOP, assert_same, method_of, play

from bespoke.data.population import Population
from bespoke.data.splits import cross_silo
from bespoke.federation.engine import Engine
from bespoke.methods import FedEmbed
from bespoke.methods.parts.assignment import SelfOrganizingMap
from bespoke.methods.parts.client_optimizer import ClientOptimizer
from bespoke.models.networks import CNN, MLP
from bespoke.models.task import Classification
from small_worlds import FRACTIONS, SIZES, World, owners


def kinds_world(task: Any, width: int) -> World:
    """Uneven clients who like a kind each, with rows to tell the kinds by."""
    random = np.random.default_rng(5)
    kind = random.integers(0, 3, sum(SIZES))
    owner = np.repeat(np.arange(len(SIZES)), SIZES)
    x = (random.standard_normal((len(kind), width)) + kind[:, None]).astype(np.float32)
    if width > 9:
        x = (40 * (x - x.min())).clip(0, 255).astype(np.uint8)
    columns: dict[str, Any] = {"x": x, "y": (kind == owner % 3).astype(np.int64), "kind": kind}
    population = Population.build(columns, owners(), about={"name": "kinds"})
    return World("kinds", task, population, cross_silo(population, FRACTIONS, seed=3))


ASSIGNMENTS: list[dict[str, Any]] = [
    {"assignment": "prototype", "triplets": 2},
    {"assignment": "type"},
    {"assignment": "personal"},
    {"assignment": "none", "kinds": 0.0},
    {"assignment": "som", "som": SelfOrganizingMap(update="sums")},
    {"assignment": "prototype", "optimizer": ClientOptimizer("adam"), "triplets": 2},
    {"assignment": "personal", "optimizer": ClientOptimizer("adam")},
]


@pytest.mark.parametrize("knobs", ASSIGNMENTS, ids=lambda k: "-".join(k))
def test_engines_agree_on_every_assignment(knobs: dict[str, Any]) -> None:
    place = kinds_world(Classification(MLP(3, 2, (4,)), kinds=3), 3)
    method = method_of(FedEmbed, place, **knobs)
    with Engine(place.population, LOOP) as engine:
        expected = play(engine, place, method)
    assert sum(leaf.abs().sum() for name, leaf in expected.private.items() if name == "embedding") > 0
    for name in ("func, chunk 3", "func, chunk 64"):
        with Engine(place.population, IN_PROCESS[name]) as engine:
            assert_same(play(engine, place, method), expected)


def test_engines_agree_on_images() -> None:
    place = kinds_world(Classification(CNN(2, 8), kinds=3), 64)
    method = method_of(FedEmbed, place, assignment="prototype", size=5)
    everyone = (tuple(range(len(SIZES))),)
    with Engine(place.population, LOOP) as engine:
        expected = play(engine, place, method, rounds=everyone)
    with Engine(place.population, IN_PROCESS["func, chunk 64"]) as engine:
        assert_same(play(engine, place, method, rounds=everyone), expected)
