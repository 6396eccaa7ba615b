"""Every method x robust rule: the same on every engine, and equal to the rule worked out by hand where that is easy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any, get_args

import numpy as np
import pytest
import torch
from battery import (
    IN_PROCESS,
    LOOP,
    ROUNDS,
    Play,
    assert_same,
    every_method,
    method_of,
    play,
    setting,
    start,
)

from bespoke.declarations import Reveal, changes, reveals
from bespoke.errors import UserError
from bespoke.federation.engine import Engine
from bespoke.federation.held import Collusion
from bespoke.federation.work import ClientWork
from bespoke.messages.robust.exchange import Rule
from bespoke.messages.robust.settings import RobustConfig, RuleName, check_methods, shown
from bespoke.method import Method
from bespoke.methods import METHODS
from bespoke.tensors import flatten, leaves
from small_worlds import World, world

RULES = get_args(RuleName)


@cache
def known_world(name: str) -> World:
    return world(name)


def fits(method: Method, rule: str) -> bool:
    """Whether the contract lets the rule act on the method: what is refused is refused with a reason."""
    try:
        check_methods(RobustConfig(rule=rule), [method], 7)
    except UserError:
        return False
    return True


def cases() -> Iterator[tuple[str, str, str]]:
    """All rules on a linear model; on a network, whose body and head differ, the one that fits every method."""
    for name, kind in METHODS.items():
        for place, rules in (("linear", RULES), ("mlp", ("norm-bound",))):
            made = method_of(kind, known_world(place))
            if kind.trains and (place == "linear" or not made.needs.linear):
                yield from ((place, name, rule) for rule in rules if fits(made, rule))


def ruled(engine: Engine, place: World, method: Method, rule: Rule | None, collusion: Collusion | None = None) -> Play:
    added = {"robust": rule, "collusion": collusion}
    return play(engine, place, method, rounds=ROUNDS[:2], work=lambda work: replace(work, **added))


@cache
def expected(name: str, method: str, rule: str) -> Play:
    place = known_world(name)
    with Engine(place.population, LOOP) as engine:
        return ruled(engine, place, method_of(every_method()[method], place), Rule(rule))


@pytest.fixture(scope="module")
def workers() -> Iterator[Engine]:
    with Engine(known_world("linear").population, replace(LOOP, workers=2)) as engine:
        yield engine


@pytest.mark.parametrize(("name", "method", "rule"), list(cases()))
def test_every_method_under_every_rule(name: str, method: str, rule: str) -> None:
    """A function of messages and rule: chunks of three come to what the loop comes to."""
    place, wanted = known_world(name), expected(name, method, rule)
    made = method_of(every_method()[method], place)
    assert all(bool(leaf.isfinite().all()) for leaf in wanted.server.values())
    with Engine(place.population, IN_PROCESS["func, chunk 3"]) as engine:
        assert_same(ruled(engine, place, made, Rule(rule)), wanted)


@pytest.mark.parametrize("method", ["fedavg", "group-fl", "clustered-fl", "hypcluster", "self-fl", "fedrep"])
def test_workers_come_to_the_same(method: str, workers: Engine) -> None:
    """One sum, rows of groups, rows of clusters, what is seen of each, other fields, and nothing shared at all."""
    place = known_world("linear")
    made = method_of(every_method()[method], place)
    for rule in (rule for rule in RULES if fits(made, rule)):
        assert_same(ruled(workers, place, made, Rule(rule)), expected("linear", method, rule))


def test_which_methods_are_left_out_follows_from_what_they_declare() -> None:
    for kind in every_method().values():
        made = method_of(kind, known_world("linear"))
        changed = changes(made.uplink)
        assert set(filter(None, changed.values())) <= set(made.uplink), made.card.name
        for rule in RULES:
            sends = kind.trains and bool(made.uplink)
            looks = any(made.uplink[name].reveal is Reveal.EACH for name in changed)
            acts = bool(changed) and (not looks or rule in ("multi-krum", "norm-bound"))
            assert fits(made, rule) == (acts or not sends)


def test_collusion_is_the_same_on_every_engine(workers: Engine) -> None:
    """mean - z deviation of the attackers' changes, by hand from their honest messages; weights are theirs."""
    place = known_world("linear")
    made = method_of(every_method()["fedavg"], place)
    bad = [2, 4, 5]
    attack = Collusion(frozenset(int(key) for key in place.population.keys[bad]), factor=1.5)
    plays = []
    for choice in (LOOP, IN_PROCESS["func, chunk 3"]):
        with Engine(place.population, choice) as engine:
            plays.append(ruled(engine, place, made, None, attack))
    plays.append(ruled(workers, place, made, None, attack))
    assert_same(plays[1], plays[0])
    assert_same(plays[2], plays[0])
    sums, messages = first_round(made, place, attack)
    changes = {client: (up["delta"]["weight"] / up["weight"]).double() for client, up in messages.items()}
    sizes = {client: float(up["weight"]) for client, up in messages.items()}
    together = torch.stack([changes[client] for client in bad])
    agreed = together.mean(0) - 1.5 * together.std(0, correction=0)
    wanted = sum(sizes[c] * (agreed if c in bad else changes[c]) for c in changes)
    torch.testing.assert_close(sums["delta"]["weight"].double(), wanted, rtol=1e-4, atol=1e-5)


def first_round(made: Method, place: World, attack: Collusion | None) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """The sums of the first round, and each client's honest message: the sums of a cohort of one."""
    with Engine(place.population, LOOP) as engine:
        engine.open(ClientWork(made, place.split.train), start(place))
        server = made.init_server(start(place), setting(place))
        alone = {c: engine.round(server, np.array([c]), key=100).cohort.sums for c in ROUNDS[0]}
        engine.open(ClientWork(made, place.split.train, collusion=attack), start(place))
        return engine.round(server, np.array(ROUNDS[0]), key=100).cohort.sums, alone


def test_groups_and_clusters_have_a_rule_of_their_own() -> None:
    """The median of each group's clients, and of each cluster's, by numpy from single messages."""
    place = known_world("linear")
    for name in ("group-fl", "hypcluster"):
        made = method_of(every_method()[name], place, **({"weighting": "uniform"} if name == "group-fl" else {}))
        with Engine(place.population, LOOP) as engine:
            engine.open(ClientWork(made, place.split.train), start(place))
            server = made.init_server(start(place), setting(place))
            alone = [engine.round(server, np.array([c]), key=100).cohort.sums for c in ROUNDS[0]]
            engine.open(ClientWork(made, place.split.train, robust=Rule("median")), start(place))
            found = engine.round(server, np.array(ROUNDS[0]), key=100).cohort.sums
        weights = torch.stack([up["weight"] for up in alone])  # (clients, rows)
        for row in range(weights.shape[1]):
            here = [(up, w) for up, w in zip(alone, weights[:, row]) if w > 0]
            if not here:
                assert not any(leaf[row].any() for leaf in leaves(found["delta"]))
                continue
            for path, leaf in flatten(found["delta"]).items():
                middle = np.median([(flatten(up["delta"])[path][row] / w).numpy() for up, w in here], axis=0)
                np.testing.assert_allclose((leaf[row] / found["weight"][row]).numpy(), middle, rtol=1e-4, atol=1e-6)


def test_what_the_server_sees_is_shown() -> None:
    """Of each for rules over messages; sums and a few norms, or sums alone, for the others."""
    fedavg = method_of(every_method()["fedavg"], known_world("linear"), weighting="uniform")
    weighted = method_of(every_method()["fedavg"], known_world("linear"))
    kinds = {rule: {k: v.name for k, v in shown(fedavg, RobustConfig(rule=rule)).items()} for rule in RULES}
    assert kinds["krum"] == kinds["median"] == {"delta": "EACH", "weight": "COUNT"}
    assert kinds["norm-bound"] == {"delta": "SUM", "weight": "COUNT", "norms": "EACH"}
    assert kinds["geometric-median"] == {"delta": "SUM", "weight": "COUNT"}
    assert shown(fedavg, RobustConfig(rule="norm-bound", bound=1.0)) == reveals(fedavg.uplink)
    assert shown(weighted, RobustConfig(rule="geometric-median"))["norms"] is Reveal.EACH
