"""Clusters of clients and ensembles of models, on numbers that can be checked by hand."""

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
from bespoke.declarations import Reveal, reveals
from bespoke.errors import UserError
from bespoke.experiment.experiment import Experiment, Stage
from bespoke.experiment.fits import check_stages_fit
from bespoke.federation.engine import Choice, Engine
from bespoke.federation.work import ClientWork
from bespoke.method import Cohort, Setting
from bespoke.methods import Ensemble, FedAvg, FineTune, HypCluster
from bespoke.methods.parts.server_optimizer import ServerOptimizer
from bespoke.models.networks import MLP, Linear
from bespoke.models.task import Classification, Regression
from bespoke.runs.events import Interrupted
from bespoke.runs.folder import RunFolder
from bespoke.runs.training import Run
from bespoke.tensors import flatten, nbytes, stack, take, tree_map
from by_hand import batches_of

LINE = Regression(Linear(1))
NETWORK = Classification(MLP(3, 3, (4,)))
LOOP = Choice(False, 1, 0, 1, "autograd", "")
FUSED = Choice(True, 64, 0, 1, "fused", "")
CLIENTS = 8
LINE_LOSS = 0.5  # of an error of one: half the square


@pytest.fixture(scope="module")
def two_lines() -> Population:
    """Clients 0 to 3 have y = 2 x, clients 4 to 7 have y = -2 x: ten rows each, x from -1 to 1."""
    x = np.tile(np.linspace(-1, 1, 10, dtype=np.float32), CLIENTS)[:, None]
    slope = np.repeat(np.where(np.arange(CLIENTS) < 4, 2.0, -2.0), 10)
    owners = np.repeat([f"client {i}" for i in range(CLIENTS)], 10)
    return Population.build({"x": x, "y": (slope * x[:, 0]).astype(np.float32)}, owners, about={"name": "two lines"})


def line(slope: float, offset: float = 0.0) -> dict[str, torch.Tensor]:
    return {"weight": torch.tensor([[slope]]), "bias": torch.tensor([offset])}


def run(folder: Path, population: Population, *stages: Stage, **more: Any) -> tuple[dict[str, Any], Experiment]:
    split = cross_silo(population, (0.6, 0.2, 0.2), seed=1)
    task = stages[-1].method.task
    experiment = Experiment("clusters", population, split, task, stages, "mse", cohort=CLIENTS, **more)
    return Run(experiment, RunFolder.create(folder, ""), how=LOOP).run(), experiment


def read(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (folder / name).read_text().splitlines()]


# -- clusters are found ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_two_obvious_clusters_are_found(two_lines: Population, tmp_path: Path, seed: int) -> None:
    """From random starts: whichever model leans to a side first takes all clients of that side."""
    result, _ = run(tmp_path / "run", two_lines, Stage(HypCluster(LINE, lr=0.3, batch_size=4), 30), seed=seed)
    import pandas as pd

    chosen = pd.read_parquet(tmp_path / "run" / "clients.parquet").set_index("client")["candidate"]
    first, second = set(chosen[:4]), set(chosen[4:])
    assert len(first) == len(second) == 1
    assert first | second == {"cluster 0", "cluster 1"}
    assert result["query"] < 1e-3
    observed = read(tmp_path / "run", "rounds.jsonl")[-1]["observed"]
    assert observed == {"clients": [4, 4], "largest_share": 0.5}


def test_a_model_of_zeros_is_not_among_the_starts() -> None:
    """It would be everybody's first choice: predicting the mean beats a random line."""
    zero = LINE.init(0)
    for made in (HypCluster(LINE, k=3), Ensemble(LINE, k=3)):
        weight = made.init_server(zero, Setting(seed=5))["params"]["weight"]
        assert weight.shape == (3, 1, 1)
        assert len(weight.unique()) == 3
        assert (weight.abs() <= 1).all()
        assert weight.all()
        again, other = (made.init_server(zero, Setting(seed=s))["params"]["weight"] for s in (5, 6))
        assert torch.equal(weight, again)
        assert not torch.equal(weight, other)


def test_starts_of_a_network_and_a_warm_start() -> None:
    """The first is the model handed in, the others are drawn; a stack of k models is taken as it is."""
    params = NETWORK.init(3)
    made = HypCluster(NETWORK, k=3)
    models = made.init_server(params)["params"]
    assert all(torch.equal(models[name][0], leaf) for name, leaf in params.items())
    assert not torch.equal(models["head.weight"][1], models["head.weight"][2])
    warm = stack([NETWORK.init(s) for s in (1, 2, 3)])
    found = made.init_server(warm)["params"]
    assert all(torch.equal(found[name], leaf) for name, leaf in warm.items())


def test_a_start_with_a_single_number_is_no_model_of_zeros() -> None:
    task = Regression(Linear(2))
    given = {"weight": torch.tensor([[1.0, 0.0]]), "bias": torch.zeros(1)}
    assert Ensemble(task).init_server(given)["params"]["weight"][0].tolist() == [[1.0, 0.0]]


def test_linear_models_draw_as_torch_does() -> None:
    drawn = Linear(100, 5).fresh(1)
    both = torch.cat([drawn["weight"].flatten(), drawn["bias"]])
    assert both.abs().max() <= 0.1
    assert both.abs().max() > 0.09
    assert abs(float(both.std()) - 0.1 / 3**0.5) < 0.01
    assert torch.equal(Linear(100, 5).fresh(1)["bias"], drawn["bias"])


# -- a round by hand ---------------------------------------------------------------------------------------------------
def one_round(population: Population, made: HypCluster, server: Any, choice: Choice = LOOP, clients: int = 8) -> Cohort:
    split = cross_silo(population, (0.6, 0.2, 0.2), seed=1)
    with Engine(population, choice) as engine:
        engine.open(ClientWork(made, split.train), server["params"])
        return engine.round(server, np.arange(clients), key=3).cohort


@pytest.mark.parametrize("choice", [LOOP, FUSED], ids=["loop", "fused"])
@pytest.mark.parametrize("name", ["sgd", "momentum", "adam"])
def test_an_empty_cluster_keeps_model_and_optimizer(two_lines: Population, name: Any, choice: Choice) -> None:
    """Clients 0 to 3 (y = 2 x) all pick the slope 1; the one of -1 has nobody, and nothing of it moves."""
    made = HypCluster(LINE, server=ServerOptimizer(name=name))
    server = made.init_server(stack([line(1.0), line(-1.0)]))
    for rounds in (1, 2):
        cohort = one_round(two_lines, made, server, choice, clients=4)
        assert cohort.sums["count"].tolist() == [4, 0]
        assert cohort.sums["weight"].tolist() == [24, 0]  # six training rows each
        server = made.server_round(server, cohort)
        assert float(server["params"]["weight"][0]) > 1.0
        assert float(server["params"]["weight"][1]) == -1.0
        state = server["optimizer"]["own"]
        if name != "sgd":
            assert state["time"].tolist() == [rounds, 0]
            assert float(state["moment"]["weight"][0]) > 0.0
            assert float(state["moment"]["weight"][1]) == 0.0
        if name == "adam":
            assert state["second"]["weight"][1].max() == 0.0
    assert made.broadcast(server)["largest"] == 0


def test_one_cluster_alone_moves_as_fedavg(two_lines: Population) -> None:
    """If everybody picks the same model, that model is FedAvg's."""
    made = HypCluster(LINE, server=ServerOptimizer(name="adam"))
    plain = FedAvg(LINE, server=ServerOptimizer(name="adam"))
    server = made.init_server(stack([line(0.5), line(9.0)]))
    expected = plain.init_server(line(0.5))
    for _ in range(2):
        server = made.server_round(server, one_round(two_lines, made, server))
        split = cross_silo(two_lines, (0.6, 0.2, 0.2), seed=1)
        with Engine(two_lines, LOOP) as engine:
            engine.open(ClientWork(plain, split.train), expected["params"])
            expected = plain.server_round(expected, engine.round(expected, np.arange(8), key=3).cohort)
    torch.testing.assert_close(take(server["params"], 0), expected["params"])


@pytest.mark.parametrize("share", ["none", "body"])
@pytest.mark.parametrize("weighting", ["examples", "uniform"])
@pytest.mark.parametrize("choice", [LOOP, Choice(True, 3, 0, 1, "func", "")], ids=["loop", "vmap"])
def test_both_uploads_give_the_same_server(share: Any, weighting: Any, choice: Choice) -> None:
    """One says which cluster a client is in, the other does not; the sums are the same."""
    random = np.random.default_rng(4)
    sizes = [5, 9, 14, 20, 7]
    columns = {"x": random.standard_normal((55, 3)).astype(np.float32), "y": random.integers(0, 3, 55)}
    population = Population.build(columns, np.repeat([f"c{i}" for i in range(5)], sizes), about={"name": "few"})
    made = HypCluster(NETWORK, k=3, share=share, weighting=weighting, server=ServerOptimizer(name="adam"))
    servers, clusters = [], 0
    for upload in ("sums", "index"):
        told = replace(made, upload=upload)
        server = told.init_server(NETWORK.init(2), Setting(seed=3))
        for _ in range(3):
            cohort = one_round(population, told, server, choice, clients=5)
            server = told.server_round(server, cohort)
            clusters = max(clusters, int((server["count"] > 0).sum()))
        servers.append(flatten(server))
    assert clusters > 1  # else there would be little to tell apart
    assert servers[0].keys() == servers[1].keys()
    for name, leaf in servers[0].items():
        torch.testing.assert_close(servers[1][name], leaf, rtol=1e-4, atol=1e-6, msg=name)


def test_what_travels_depends_on_the_upload(two_lines: Population) -> None:
    """Four floats a line and a cluster's weight and count, or one line with its weight and an index."""
    sums, index = HypCluster(LINE, k=3), HypCluster(LINE, k=3, upload="index")
    assert set(reveals(sums.uplink).values()) == {Reveal.SUM}
    assert set(reveals(index.uplink).values()) == {Reveal.EACH}
    split = cross_silo(two_lines, (0.6, 0.2, 0.2), seed=1)
    server = sums.init_server(LINE.init(0))
    for made, up in ((sums, 3 * 2 * 4 + 3 * 4 + 3 * 4), (index, 2 * 4 + 4 + 4)):
        with Engine(two_lines, LOOP) as engine:
            engine.open(ClientWork(made, split.train), LINE.init(0))
            result = engine.round(server, np.arange(8), key=3)
        assert result.bytes_up == 8 * up
        assert result.bytes_down == 8 * (3 * 2 * 4 + 8)  # three lines, and which is the largest
        assert set(result.cohort.sums) == (set() if made is index else set(made.uplink))


def test_the_ledger_says_what_was_revealed(two_lines: Population, tmp_path: Path) -> None:
    run(tmp_path / "run", two_lines, Stage(HypCluster(LINE, upload="index"), 2))
    lines = read(tmp_path / "run", "ledger.jsonl")
    assert lines[-2]["revealed"] == {"delta": "EACH", "weight": "EACH", "cluster": "EACH"}
    assert lines[-1]["phase"] == "personalization"
    assert lines[-1]["bytes_down"] == 8 * (2 * 2 * 4 + 8)  # every client fetches both models to pick one


def test_a_mean_is_divided_by_one_at_least() -> None:
    """Changes of 3 in all: by 3 with the weight 1, by 1.5 with 2; 0.25, which noise may leave, counts as 1."""
    made = HypCluster(LINE, k=3)
    server = made.init_server(stack([line(1.0)] * 3))
    delta = {"weight": torch.full((3, 1, 1), 3.0), "bias": torch.zeros(3, 1)}
    weights = torch.tensor([1.0, 2.0, 0.25])
    after = made.server_round(server, Cohort({"delta": delta, "weight": weights, "count": weights}, {}, ()))
    assert after["params"]["weight"].flatten().tolist() == [4.0, 2.5, 4.0]


def rows_of(slope: float, made: HypCluster, rows: int = 4) -> Any:
    """A client's batches: x = 1 in every row, y = slope."""
    return batches_of([1.0] * rows, [slope] * rows, made)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("reseed", [0, 3])
def test_nobody_picks_a_model_that_diverged(bad: float, reseed: int) -> None:
    """Model 0 is not a number, model 1 is far off, model 2 is right: 2, and without it 1."""
    made = HypCluster(LINE, k=3, reseed=reseed)
    server = made.init_server(stack([line(bad), line(9.0), line(2.0)]))
    cluster, loss = made.pick(made.broadcast(server), rows_of(2.0, made))
    assert (int(cluster), float(loss)) == (2, 0.0)
    server = made.init_server(stack([line(bad), line(9.0), line(bad)]))
    cluster, loss = made.pick(made.broadcast(server), rows_of(2.0, made))
    assert int(cluster) == 1
    assert float(loss) == pytest.approx(49.0 * LINE_LOSS)


# -- starting an empty cluster again -----------------------------------------------------------------------------------
def test_only_an_empty_cluster_is_started_again_and_as_a_copy_of_the_largest() -> None:
    """k = 3, reseed = 2. Cluster 1 is empty once, then not, then twice: then it is a copy of cluster 2."""
    made = HypCluster(LINE, k=3, reseed=2, server=ServerOptimizer(name="momentum"))
    server = made.init_server(stack([line(1.0), line(2.0), line(3.0)]))

    def after(server: Any, *count: float, loss: float = 6.0) -> Any:
        counts = torch.tensor(count)
        delta = {"weight": counts.reshape(3, 1, 1) * 0.5, "bias": torch.zeros(3, 1)}
        sums = {"delta": delta, "weight": counts, "count": counts, "loss": torch.tensor(loss)}
        return made.server_round(server, Cohort(sums, {}, ()))

    def vacant(server: Any) -> int:
        return int(made.broadcast(server)["vacant"])

    server = after(server, 1, 0, 3)
    assert vacant(server) == -1
    server = after(server, 1, 1, 2)
    assert server["empty"].tolist() == [0, 0, 0]
    server = after(after(server, 1, 0, 2), 1, 0, 4, loss=10.0)
    assert vacant(server) == 1
    assert float(made.broadcast(server)["threshold"]) == pytest.approx(2.0)  # ten among five clients
    weights = server["params"]["weight"].flatten().tolist()
    assert weights[1] == weights[2] > weights[0]
    state = server["optimizer"]["own"]
    assert state["time"].tolist() == [4, 0, 4]  # a new model has a new optimizer
    assert state["moment"]["weight"][1].item() == 0.0
    server = after(server, 1, 0, 4)
    assert vacant(server) == 1  # for two rounds, whoever comes
    server = after(server, 1, 0, 4)
    assert vacant(server) == -1
    assert server["empty"].tolist() == [0, 0, 0]
    server = after(after(server, 0, 0, 4), 0, 0, 4)  # two are empty: one after the other
    assert vacant(server) == 0
    assert vacant(after(after(server, 2, 0, 4), 2, 0, 4)) == 1
    # one client's loss is the mean of one; half a client, which noise may leave, counts as one
    assert float(after(server, 1, 0, 0, loss=3.0)["loss"]) == 3.0
    assert float(after(server, 0.5, 0, 0, loss=3.0)["loss"]) == 3.0


def test_the_worst_served_join_the_cluster_that_is_started_again() -> None:
    """Two of three clients are served well by the slope 1, the third has y = -2 x: a loss of 9 units, the mean is 3.

    It trains the copy, which moves by lr * 2 * LINE_LOSS * 3 towards it; the others train what they picked.
    """
    made = HypCluster(LINE, k=2, reseed=1, lr=0.1, weighting="uniform")
    server = made.init_server(stack([line(1.0), line(50.0)]))
    clients = [rows_of(slope, made) for slope in (1.0, 1.0, -2.0)]

    def played(server: Any) -> tuple[Any, list[Any]]:
        sent = [made.client_round(made.broadcast(server), {}, client)[1] for client in clients]
        sums = {name: tree_map(lambda *parts: sum(parts), *[up[name] for up in sent]) for name in sent[0]}
        return made.server_round(server, Cohort(sums, {}, (0, 1, 2))), sent

    server, sent = played(server)
    assert [up["count"].tolist() for up in sent] == [[1, 0]] * 3
    assert float(server["loss"]) == pytest.approx(3 * LINE_LOSS)
    copied = float(server["params"]["weight"][1])
    assert copied == float(server["params"]["weight"][0])
    server, sent = played(server)
    assert [up["count"].tolist() for up in sent] == [[1, 0], [1, 0], [0, 1]]
    assert float(server["params"]["weight"][1]) < copied < float(server["params"]["weight"][0]) < 1.0
    for _ in range(30):
        server, sent = played(server)
    assert [up["count"].tolist() for up in sent] == [[1, 0], [1, 0], [0, 1]]
    found = server["params"]["weight"].flatten() + server["params"]["bias"].flatten()
    assert found.tolist() == pytest.approx([1.0, -2.0], abs=0.05)


@pytest.mark.parametrize("upload", ["sums", "index"])
@pytest.mark.parametrize("choice", [LOOP, FUSED, Choice(True, 3, 0, 1, "func", "")], ids=["loop", "fused", "vmap"])
def test_a_collapse_is_overcome(two_lines: Population, tmp_path: Path, upload: Any, choice: Choice) -> None:
    """One model in the middle, one far off: all eight pick the first for ever; with reseeding both lines are found."""
    for reseed, clusters in ((0, 1), (3, 2)):
        made = HypCluster(LINE, lr=0.3, batch_size=4, upload=upload, reseed=reseed)
        server = made.init_server(stack([line(0.3), line(90.0)]))
        for _ in range(25):
            cohort = one_round(two_lines, made, server, choice)
            server = made.server_round(server, cohort)
        assert int((server["count"] > 0).sum()) == clusters
    assert sorted(server["params"]["weight"].flatten().tolist()) == pytest.approx([-2.0, 2.0], abs=0.1)
    assert server["count"].tolist() == [4, 4]


def test_reseeding_sends_one_sum_more_and_nothing_without_it(two_lines: Population) -> None:
    plain, made = HypCluster(LINE, k=3), HypCluster(LINE, k=3, reseed=5)
    assert set(made.uplink) - set(plain.uplink) == {"loss"}
    assert made.uplink["loss"].reveal is Reveal.SUM
    assert replace(made, upload="index").uplink["loss"].reveal is Reveal.SUM
    assert "vacant" not in plain.broadcast(plain.init_server(LINE.init(0)))
    assert set(plain.init_server(LINE.init(0))) == {"params", "common", "optimizer", "count"}


# -- weight sharing ----------------------------------------------------------------------------------------------------
def test_weight_sharing_has_one_body(tmp_path: Path) -> None:
    """All layers but the last are one model, trained by everyone; heads differ, and so little travels."""
    made = HypCluster(NETWORK, k=3, share="body", server=ServerOptimizer(name="momentum"))
    params = NETWORK.init(1)
    server = made.init_server(params)
    assert set(server["params"]) == {"head.weight", "head.bias"}
    assert all(torch.equal(leaf, params[name]) for name, leaf in server["common"].items())
    body, heads = nbytes(server["common"]), nbytes(server["params"])
    assert nbytes(made.broadcast(server)) == body + heads + 8
    random = np.random.default_rng(0)
    columns = {"x": random.standard_normal((60, 3)).astype(np.float32), "y": random.integers(0, 3, 60)}
    population = Population.build(columns, np.repeat([f"c{i}" for i in range(6)], 10), about={"name": "few"})
    for _ in range(3):
        before, server = server, made.server_round(server, one_round(population, made, server, clients=6))
    models = made.params(server)
    for name, leaf in models.items():
        assert leaf.shape == (3, *params[name].shape)
        assert name.startswith("head.") or bool((leaf == leaf[0]).all())
    assert not torch.equal(models["head.weight"][0], models["head.weight"][1])
    assert not torch.equal(server["common"]["features.1.weight"], before["common"]["features.1.weight"])
    assert server["optimizer"]["common"]["time"] == 3


def test_the_common_body_moves_by_the_mean_over_all_clients() -> None:
    """Three clients of weights 1, 2 and 5 in two clusters, changes of 8 in all: the body moves by 1, a head by its own.

    The sums of weights are 3 and 5, those of the heads' changes 6 and 10: both heads move by 2.
    """
    made = HypCluster(NETWORK, k=2, share="body")
    server = made.init_server(NETWORK.init(1))
    weights = torch.tensor([3.0, 5.0])
    delta = {name: torch.full_like(leaf, 8.0) for name, leaf in server["common"].items()}
    delta |= {
        name: torch.ones_like(leaf) * torch.tensor([6.0, 10.0]).reshape(2, *(1,) * (leaf.dim() - 1))
        for name, leaf in server["params"].items()
    }
    sums = {"delta": delta, "weight": weights, "count": torch.tensor([2.0, 1.0])}
    after = made.server_round(server, Cohort(sums, {}, (0, 1, 2)))
    for name, leaf in server["common"].items():
        torch.testing.assert_close(after["common"][name], leaf + 1.0)
    for name, leaf in server["params"].items():
        torch.testing.assert_close(after["params"][name], leaf + 2.0)


# -- stages ------------------------------------------------------------------------------------------------------------
def test_stages_that_do_not_fit_are_refused() -> None:
    fitting = [
        (Ensemble(LINE, k=3), HypCluster(LINE, k=3)),
        (FedAvg(NETWORK), HypCluster(NETWORK, share="body")),
        (FedAvg(LINE), FineTune(LINE)),
    ]
    for pair in fitting:
        check_stages_fit(pair)
    refused = [
        (HypCluster(LINE), FineTune(LINE)),
        (Ensemble(LINE, k=2), HypCluster(LINE, k=3)),
        (FedAvg(LINE), HypCluster(LINE)),
        (Ensemble(NETWORK), HypCluster(NETWORK, share="body")),
    ]
    for before, after in refused:
        said = f"stage 1: {after.card.name} starts from .*{before.card.name} before it hands on"
        with pytest.raises(UserError, match=said):
            check_stages_fit((before, after))


def test_what_prepares_a_start_fits_it() -> None:
    """k models for k clusters, one model for clusters with a common body; five rounds before a cluster is reseeded."""
    for knobs, first in (({}, "ensemble"), ({"share": "none"}, "ensemble"), ({"share": "body"}, "fedavg")):
        assert HypCluster.prepared({"k": 3, **knobs}) == (first, {"reseed": 5, "k": 3, **knobs})
    assert HypCluster.prepared({"reseed": 0})[1] == {"reseed": 0}


def test_a_warm_start_begins_where_the_ensemble_ended(two_lines: Population, tmp_path: Path) -> None:
    stages = (Stage(Ensemble(LINE, k=2), 3), Stage(HypCluster(LINE, k=2), 2))
    run(tmp_path / "run", two_lines, *stages)
    folder = RunFolder(tmp_path / "run")
    lines = read(tmp_path / "run", "rounds.jsonl")
    assert [(line["stage"], line["method"]) for line in lines if line["round"]] == [(0, "ensemble")] * 3 + [
        (1, "hypcluster")
    ] * 2
    alone = tmp_path / "alone"
    run(alone, two_lines, stages[0])
    ended = RunFolder(alone).latest()
    assert ended is not None
    began = folder.beginning(1).server["params"]
    assert all(torch.equal(began[name], leaf) for name, leaf in ended.server["params"].items())
    assert "observed" not in lines[1] or not lines[1]["observed"]
    assert lines[-1]["observed"]["largest_share"] in (0.5, 0.625, 0.75, 0.875, 1.0)


@pytest.mark.parametrize("share", ["none", "body"])
def test_interrupted_clusters_end_the_same(two_lines: Population, tmp_path: Path, share: Any) -> None:
    """Stopped in the second stage and resumed: the same logs and the same choices."""
    task = Regression(MLP(1, 1, (3,)))
    first = Ensemble(task, k=2) if share == "none" else FedAvg(task)
    clusters = HypCluster(task, k=2, share=share, server=ServerOptimizer(name="adam", lr=0.1))
    stages = (Stage(first, 2), Stage(clusters, 4))
    run(tmp_path / "whole", two_lines, *stages)
    _, experiment = run(tmp_path / "other", two_lines, Stage(first, 0))
    experiment = replace(experiment, stages=stages)
    rounds: list[int] = []
    stopping = Run(experiment, RunFolder.create(tmp_path / "run", ""), how=LOOP, stop=lambda: len(rounds) == 4)
    stopping.after_round = lambda stage, number: rounds.append(number)
    with pytest.raises(Interrupted):
        stopping.run()
    Run(experiment, RunFolder(tmp_path / "run")).run()
    assert rounds == [1, 2, 1, 2]
    for name in ("rounds.jsonl", "choices.json", "clients.parquet"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


# -- the ensemble ------------------------------------------------------------------------------------------------------
def test_models_of_an_ensemble_are_fedavg_on_orders_of_their_own(two_lines: Population) -> None:
    """With rows in stored order each model moves as FedAvg from its start; shuffled, two equal starts part."""
    split = cross_silo(two_lines, (0.6, 0.2, 0.2), seed=1)
    starts = [line(0.3), line(-0.7)]
    knobs: dict[str, Any] = {"epochs": 2, "batch_size": 4, "momentum": 0.5, "shuffle": False}

    def after_a_round(made: FedAvg, params: Any) -> Any:
        with Engine(two_lines, LOOP) as engine:
            engine.open(ClientWork(made, split.train), params)
            server = made.init_server(params)
            result = engine.round(server, np.arange(8), key=3)
            return made.server_round(server, result.cohort)["params"], result.steps

    together, steps = after_a_round(Ensemble(LINE, **knobs), stack(starts))
    alone = [after_a_round(FedAvg(LINE, **knobs), start) for start in starts]
    torch.testing.assert_close(together, stack([params for params, _ in alone]))
    assert steps == sum(steps for _, steps in alone)
    twins, _ = after_a_round(Ensemble(LINE, **knobs | {"shuffle": True}), stack([line(0.3), line(0.3)]))
    assert float(twins["weight"][0]) != float(twins["weight"][1])


# -- choosing ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", [HypCluster, Ensemble])
def test_who_chooses_on_what(kind: type[Ensemble]) -> None:
    assert kind(LINE).choosing.by == "support"
    assert kind(LINE, select="validation").choosing.by == "client"


@pytest.mark.parametrize("select", ["train", "validation"])
def test_the_final_choice_is_made_on_the_rows_told(tmp_path: Path, select: Any) -> None:
    """Training rows lie on y = 2 x, validation rows on y = -2 x: the two models fit one kind each."""
    x = np.tile(np.linspace(-1, 1, 10, dtype=np.float32), 3)[:, None]
    plain = Population.build(
        {"x": x, "y": np.zeros(30, dtype=np.float32)}, np.repeat(["a", "b", "c"], 10), about={"name": "torn"}
    )
    split = cross_silo(plain, (0.6, 0.2, 0.2), seed=1)
    slope = torch.full((30,), 2.0)
    slope[torch.from_numpy(split.test.validation.of(np.arange(3))[0])] = -2.0
    torn = replace(plain, columns={**plain.columns, "y": slope * plain.columns["x"][:, 0]})

    class Given(HypCluster):
        """Starts from two lines and stays there."""

        def starts(self, params: Any, seed: int) -> Any:
            return stack([line(-2.0), line(2.0)])

    run(tmp_path / "run", torn, Stage(Given(LINE, select=select), 0))
    import pandas as pd

    table = pd.read_parquet(tmp_path / "run" / "clients.parquet")
    assert set(table["candidate"]) == {"cluster 1" if select == "train" else "cluster 0"}
    # before any round nobody has chosen: the first model stands for the largest cluster, and query rows lie on 2 x
    assert HypCluster(LINE).candidates() == ("largest cluster", "cluster 0", "cluster 1")
    assert (table["baseline_mse"] > 0.1).all()
