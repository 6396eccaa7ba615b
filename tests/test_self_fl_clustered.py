"""Self-FL at the level of clusters: by hand, against the client level, what travels, and as a run of its own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bespoke.data.population import Population
from bespoke.data.splits import cross_silo
from bespoke.declarations import Reveal
from bespoke.errors import UserError
from bespoke.experiment.build import build
from bespoke.experiment.checks import checked
from bespoke.experiment.experiment import Experiment, Stage
from bespoke.federation.choice import choose
from bespoke.federation.engine import Choice, Engine
from bespoke.federation.work import ClientWork
from bespoke.messages.compress import Compress
from bespoke.method import Cohort, Setting
from bespoke.methods import ClusteredSelfFL, SelfFL
from bespoke.models.networks import Linear
from bespoke.models.task import Regression
from bespoke.runs.folder import RunFolder
from bespoke.runs.training import Run
from bespoke.tensors import Tree, flatten, stack, tree_map
from small_worlds import BATCH, FRACTIONS, SIZES, owners, world

TASK = Regression(Linear(1))
LOOP = Choice(False, 1, 0, 1, "autograd", "")
GROUPS = torch.tensor([0, 0, 1, 1])


def at(value: float) -> dict[str, torch.Tensor]:
    return {"weight": torch.zeros(1, 1), "bias": torch.tensor([value])}


def number(value: float) -> torch.Tensor:
    return torch.tensor(value)


def met(made: ClusteredSelfFL, server: Tree, sent: dict[int, tuple[float, float]]) -> Tree:
    """A round in which clients send (change, weight): each puts its message in the place of its cluster."""
    ups = []
    for client, (delta, weight) in sent.items():
        place = made.unicast(server, client)["cluster"]
        up = {"delta": at(weight * delta), "weight": number(weight), "spread": number(weight * delta**2)}
        up["count"] = number(1.0)
        ups.append(tree_map(lambda leaf, p=place: p.reshape(-1, *(1,) * leaf.dim()) * leaf, up))
    each = {"own": torch.tensor([weight for _, weight in sent.values()])} if made.clusters == "uncertainty" else {}
    return made.server_round(server, Cohort(tree_map(lambda leaf: leaf.sum(0), stack(ups)), each, tuple(sent)))


def test_clusters_by_hand() -> None:
    """Two groups of two. Round 1, clients 0, 1, 2 go from 10 by 2, 4, 8 with weights 1/2, 1/4, 1/4.

    Group 0: mean (1 + 1) / (3/4) = 8/3, mean weight 3/8; group 1: 8 and 1/4. W = 3/4, 1/2: theta = 10 + (2 + 4) / (5/4)
    = 14.8. sigma_0^2: within group 0 (2 + 4) / (3/4) - 64/9 = 8/9; between (3/5) (8/3 - 4.8)^2 + (2/5) (3.2)^2.
    Round 2, client 1 alone, by -4.8 to 10 with weight 3/4: group 0 is 10 (W = 3/2), group 1 still 18 (W = 1/2): 12.
    """
    made = ClusteredSelfFL(TASK)
    server = made.init_server(at(10.0), Setting(0, 4, groups=GROUPS))
    first = met(made, server, {0: (2.0, 0.5), 1: (4.0, 0.25), 2: (8.0, 0.25)})
    assert first["models"]["bias"].flatten().tolist() == pytest.approx([10 + 8 / 3, 18.0])
    assert float(first["params"]["bias"]) == pytest.approx(14.8)
    assert float(first["total"]) == pytest.approx(1.25)
    between = 0.6 * (8 / 9 + (8 / 3 - 4.8) ** 2) + 0.4 * 3.2**2
    assert float(first["between"]) == pytest.approx(between)
    second = met(made, first, {1: (-4.8, 0.75)})
    assert second["models"]["bias"].flatten().tolist() == pytest.approx([10.0, 18.0])
    assert float(second["params"]["bias"]) == pytest.approx(12.0)
    assert float(second["total"]) == pytest.approx(2.0)
    assert float(second["counted"]) == 1.0  # the mean is over all clients, and so is the sum over others
    assert float(second["between"]) == pytest.approx(0.75 * 4 + 0.25 * 36)
    smoothed = met(replace(made, activity=0.5), first, {1: (-4.8, 0.75)})
    assert float(smoothed["params"]["bias"]) == pytest.approx((14.8 + 12.0) / 2)
    assert made.observe(second, Cohort({}, {}, (1,)))["clusters_seen"] == 2


def test_a_cluster_never_seen_says_nothing() -> None:
    made = ClusteredSelfFL(TASK)
    server = made.init_server(at(10.0), Setting(0, 4, groups=GROUPS))
    found = met(made, server, {0: (2.0, 0.5), 1: (4.0, 0.5)})
    assert float(found["params"]["bias"]) == pytest.approx(13.0)
    assert float(found["total"]) == pytest.approx(1.0)
    assert float(found["between"]) == pytest.approx(1.0)
    assert made.observe(found, Cohort({}, {}, (0, 1)))["clusters_seen"] == 1


def test_clusters_by_uncertainty_are_equal_parts_in_the_order_of_weights() -> None:
    """Four clients, two clusters, weights 0.9, 0.1, 0.8 and one not heard of (0.5): 1 and 3 against 2 and 0."""
    made = ClusteredSelfFL(TASK, clusters="uncertainty", k=2)
    server = made.init_server(at(0.0), Setting(0, 4))
    found = met(made, server, {0: (1.0, 0.9), 1: (1.0, 0.1), 2: (1.0, 0.8)})
    assert found["member"].tolist() == [1, 0, 1, 0]
    assert [made.unicast(found, c)["cluster"].tolist() for c in (0, 1)] == [[0.0, 1.0], [1.0, 0.0]]
    assert made.uplink["own"].reveal is Reveal.EACH
    assert {made.uplink[name].reveal for name in ("delta", "weight", "spread")} == {Reveal.SUM}


@pytest.mark.parametrize("knobs", [{}, {"variances": "scatter"}, {"between": 0.4, "within": 1.0}])
def test_with_everyone_there_it_is_the_client_level(knobs: dict[str, Any]) -> None:
    """All clients in every round: the mean over clusters by their weights is the mean over clients by theirs."""
    place = world("linear")
    groups = torch.tensor([0, 1, 2, 0, 1, 2, 0])
    results = []
    for kind in (SelfFL, ClusteredSelfFL):
        made = kind(place.task, lr=0.05, batch_size=BATCH, max_steps=6, **knobs)
        with Engine(place.population, LOOP) as engine:
            engine.open(ClientWork(made, place.split.train), place.task.init(5))
            server = made.init_server(place.task.init(5), Setting(0, 7, groups=groups))
            for key in range(4):
                server = made.server_round(server, engine.round(server, np.arange(7), key).cohort)
        results.append({name: server[name] for name in ("params", "between", "total")})
    torch.testing.assert_close(flatten(results[1]), flatten(results[0]), rtol=1e-4, atol=1e-6)


def test_traffic() -> None:
    """Three clusters, a model of 4 floats: up three times (4 + 3) floats, down 4 + 3 and the place among three."""
    place = world("linear")
    made = ClusteredSelfFL(place.task, batch_size=BATCH)
    with Engine(place.population, LOOP) as engine:
        engine.open(ClientWork(made, place.split.train), place.task.init(5))
        server = made.init_server(place.task.init(5), Setting(0, 7, groups=torch.arange(7) % 3))
        result = engine.round(server, np.arange(7), key=1)
    assert (result.bytes_up, result.bytes_down) == (7 * 4 * 3 * 7, 7 * 4 * (7 + 3))
    assert result.cohort.each == {}


def grouped() -> Population:
    plain = world("mlp").population
    group = np.repeat(["a", "b", "a", "b", "a", "b", "a"], SIZES)
    return Population.build(dict(plain.columns), owners(), group=group, about=plain.about)


@pytest.mark.parametrize("clusters", ["groups", "uncertainty"])
def test_a_run_resumes_and_remembers_clusters(tmp_path: Path, clusters: Any) -> None:
    place, population = world("mlp"), grouped()
    made = ClusteredSelfFL(place.task, clusters=clusters, lr=0.05, batch_size=BATCH, steps=2, max_steps=3)
    experiment = Experiment(
        "clustered", population, cross_silo(population, FRACTIONS, seed=3), place.task, (Stage(made, 5),), "accuracy",
        cohort=2,
    )  # fmt: skip
    assert choose(population, ClientWork(made, experiment.split.train), place.task.init(0), 2).workers == 0

    whole = Run(experiment, RunFolder.create(tmp_path / "whole", ""), how=LOOP).run()
    stops = iter([False, True])
    halted = Run(experiment, RunFolder.create(tmp_path / "run", ""), how=LOOP, stop=lambda: next(stops))
    with pytest.raises(Exception, match="stopped after round 2"):
        halted.run()
    assert Run(experiment, RunFolder(tmp_path / "run"), how=LOOP).run() == whole
    logs = [(tmp_path / name / "rounds.jsonl").read_bytes() for name in ("whole", "run")]
    assert logs[0] == logs[1]
    assert json.loads(logs[0].splitlines()[-1])["observed"]["clusters_seen"] >= 1


def test_the_trial_of_engines_has_the_groups_of_the_run() -> None:
    """What a client remembers of its message has a row a cluster: one for each group and one for clients of none."""
    place, population = world("mlp"), grouped()
    made = ClusteredSelfFL(place.task, batch_size=BATCH, steps=2, max_steps=3)
    work = ClientWork(made, cross_silo(population, FRACTIONS, seed=3).train, (Compress(0.5, least=2),))
    server = made.init_server(place.task.init(0), work.before(population))
    assert server["member"].tolist() == [1, 2, 1, 2, 1, 2, 1]
    assert len(server["weights"]) == 3
    assert "trial" in choose(population, work, place.task.init(0), 7).reason


def test_groups_are_needed_where_they_are_asked_for() -> None:
    with pytest.raises(ValueError, match="needs the clients' groups"):
        ClusteredSelfFL(TASK).init_server(at(0.0), Setting(0, 4))
    stage = {"method": "self-fl-clustered", "rounds": 1}
    experiment: Any = {"data": {"source": "synthetic", "options": {"clients": 5, "examples": 8}}, "stage": [stage]}
    with pytest.raises(
        UserError,
        match=r"stage 0: self-fl-clustered .* needs groups of clients, .* has none.* clusters = 'uncertainty'",
    ):
        build(checked(experiment, "test"))
    for grouped in ({**stage, "clusters": "uncertainty"}, stage):
        experiment["stage"] = [grouped]
        assert build(checked(experiment, "test")).stages[0].method.card.name == "self-fl-clustered"
        experiment["data"]["options"]["groups"] = 2
