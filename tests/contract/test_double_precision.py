"""Engines that differ in float32 by what Adam makes of rounding agree in float64: the difference is rounding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

import pytest
import torch
from battery import IN_PROCESS, LOOP, assert_close, method_of, play

from bespoke.data.splits import cross_silo
from bespoke.federation.engine import Engine
from bespoke.methods import FedPCGenerated
from bespoke.methods.parts.generator import Reads
from small_worlds import FRACTIONS, World, population_of, world


@pytest.fixture
def double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def doubled(name: str) -> World:
    """The world with its numbers in float64."""
    place = world(name)
    columns = (place.population.columns[name] for name in "xy")
    x, y = (column.double() if column.is_floating_point() else column for column in columns)
    population = population_of(x.numpy(), y.numpy())
    return World(name, place.task, population, cross_silo(population, FRACTIONS, seed=3))


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("reads", get_args(Reads))
@pytest.mark.parametrize("name", ["linear", "mlp"])
def test_generators_agree(name: str, reads: Reads) -> None:
    """A row of a table is one word, and attention over one word has no slope but rounding: Adam makes steps of it.

    Without the pull, for with it the server's Adam does so a second time: (rate / 1e-8)^2 of the rounding.
    """
    place = doubled(name)
    made = method_of(FedPCGenerated, place, reads=reads, mu=0.0, eps=1e-8)
    plays = []
    for choice in (LOOP, IN_PROCESS["func, chunk 64"]):
        with Engine(place.population, choice) as engine:
            plays.append(play(engine, place, made))
    assert any(leaf.dtype == torch.float64 for leaf in plays[0].server.values())
    assert_close(plays[1].server, plays[0].server, rtol=0, atol=1e-9)
