"""Methods on a frozen language model: clients batched together compute what each would by itself, on every engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from battery import IN_PROCESS, LOOP, ROUNDS, Play, assert_same, every_method, method_of, play, setting, start

from bespoke.federation.choice import choose
from bespoke.federation.engine import Choice, Engine
from bespoke.federation.work import ClientWork
from bespoke.messages.clip import Clip
from bespoke.method import Method
from bespoke.methods.parts.local_adam import LocalAdam
from small_language import prefix_world

OURS = [name for name, kind in every_method().items() if issubclass(kind, LocalAdam)]
METHODS = [*OURS, "fedavg", "knn-per"]
CLIP = (Clip(0.01),)


def made(method: str, **knobs: Any) -> Method:
    """A method whose steps are short beside the embeddings: Adam's go as far where a slope is nothing but rounding."""
    small = {"lr": 0.005} if method in OURS else {}
    return method_of(every_method()[method], prefix_world(), **small, **knobs)


@cache
def alone(method: str, clipped: bool = False) -> Play:
    """One client after the other."""
    place = prefix_world()
    with Engine(place.population, LOOP) as engine:
        return play(engine, place, made(method), CLIP if clipped else ())


@pytest.fixture(scope="module")
def workers() -> Iterator[Engine]:
    with Engine(prefix_world().population, Choice(True, 3, 2, 1, "func", "")) as engine:
        yield engine


@pytest.mark.parametrize("method", METHODS)
def test_clients_batched_together_are_as_alone(method: str) -> None:
    place = prefix_world()
    for how, clipped in (("func, chunk 3", False), ("func, chunk 64", method in OURS)):
        with Engine(place.population, IN_PROCESS[how]) as engine:
            assert_same(play(engine, place, made(method), CLIP if clipped else ()), alone(method, clipped), atol=1e-5)


@pytest.mark.parametrize("method", ["fedpc", "fedpc-split"])
def test_workers_load_the_model_by_themselves(workers: Engine, method: str) -> None:
    assert_same(play(workers, prefix_world(), made(method)), alone(method), atol=1e-5)


def test_a_new_user_begins_with_the_noisy_average() -> None:
    place = prefix_world()
    method = made("fedpc", newcomers="average", average="all")
    with Engine(place.population, LOOP) as engine:
        expected = play(engine, place, method)
    with Engine(place.population, IN_PROCESS["func, chunk 64"]) as engine:
        assert_same(play(engine, place, method), expected, atol=1e-5)
    users = expected.private["user/prefix"]
    np.testing.assert_allclose(expected.server["params/anybody/prefix"], users[list(ROUNDS[-1])].mean(0), rtol=1e-5)


def test_clients_of_a_frozen_model_are_batched_without_a_trial() -> None:
    place = prefix_world()
    work = ClientWork(made("fedpc"), place.split.train, (), setting(place))
    chosen = choose(place.population, work, start(place), 7)
    assert chosen.vectorized
    assert chosen.gradient == "func"
    assert "one batch" in chosen.reason
    assert replace(chosen, reason="") == Choice(True, chosen.chunk, 0, chosen.threads, "func", "")
