"""Every method whose changes TFF's robust aggregator can bound: the same on every engine, in workers and by groups."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
from battery import IN_PROCESS, LINEAR_ONLY, LOOP, Play, assert_same, every_method, method_of, play

from bespoke.declarations import changes
from bespoke.errors import UserError
from bespoke.federation.engine import Engine
from bespoke.federation.work import ClientWork
from bespoke.messages.robust.aggregator import ZeroAndClip
from bespoke.messages.robust.attack import Attack
from bespoke.messages.transform import Transform
from bespoke.method import Method
from bespoke.methods import METHODS
from small_worlds import World, world


@cache
def known_world() -> World:
    return world("linear")


def bounded(method: Method) -> tuple[Transform, ...]:
    """One client sends ten thousand times its change, so that it is zeroed; others are clipped at a length of one."""
    bad = frozenset([int(known_world().population.keys[5])])
    return (Attack("scale", bad, 1e4), ZeroAndClip(changes(method.uplink)))


@cache
def reference(name: str, bound: bool = True) -> Play:
    made = method_of(every_method()[name], known_world())
    with Engine(known_world().population, LOOP) as engine:
        return play(engine, known_world(), made, bounded(made) if bound else ())


TRAINED = [name for name, kind in METHODS.items() if kind.trains]
BOUNDED = [name for name in TRAINED if changes(method_of(METHODS[name], known_world()).uplink)]


@pytest.mark.parametrize("name", BOUNDED)
def test_engines_agree(name: str) -> None:
    made = method_of(every_method()[name], known_world())
    for choice in (IN_PROCESS["func, chunk 3"], LINEAR_ONLY["fused, chunk 64"]):
        with Engine(known_world().population, choice) as engine:
            found = play(engine, known_world(), made, bounded(made))
        assert_same(found, reference(name))
        assert all(bool(leaf.isfinite().all()) for leaf in found.server.values())


@pytest.fixture(scope="module")
def workers() -> Iterator[Engine]:
    with Engine(known_world().population, replace(LOOP, workers=2)) as engine:
        yield engine


@pytest.mark.parametrize("name", ["fedavg", "ensemble", "group-fl", "clustered-fl", "hypcluster", "scaffold"])
def test_workers_agree(name: str, workers: Engine) -> None:
    """One sum, several models, rows of groups, what is seen of each, rows of clusters, several fields."""
    made = method_of(every_method()[name], known_world())
    assert_same(play(workers, known_world(), made, bounded(made)), reference(name))
    with pytest.raises(AssertionError):  # and it is not that nothing happened
        assert_same(reference(name), reference(name, bound=False))


@pytest.mark.parametrize("name", [name for name in TRAINED if name not in BOUNDED])
def test_others_are_refused(name: str) -> None:
    made = method_of(METHODS[name], known_world())
    with pytest.raises(UserError, match=f"aggregator = 'tff-robust' .*{name} sends .*leave aggregator out"):
        ClientWork(made, known_world().split.train, (ZeroAndClip({}),))
