"""Groups of clients: each a federation of its own, given or found, on numbers that can be checked by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.metrics import adjusted_rand_score

from bespoke.data.population import Population
from bespoke.data.splits import cross_device, cross_silo
from bespoke.declarations import Reveal, reveals
from bespoke.errors import UserError
from bespoke.experiment.build import build
from bespoke.experiment.checks import checked
from bespoke.experiment.experiment import Experiment, Stage
from bespoke.federation.cohorts import Sampler
from bespoke.federation.engine import Choice, Engine
from bespoke.federation.work import ClientWork
from bespoke.method import Cohort, Setting
from bespoke.methods import ClusteredFL, FeatureGroups, FedAvg, FineTune, GroupFL, GroupPerFL
from bespoke.methods.clustered_fl import cosines, divided
from bespoke.methods.parts.server_optimizer import ServerOptimizer
from bespoke.models.networks import Linear
from bespoke.models.task import Regression
from bespoke.runs.events import Interrupted
from bespoke.runs.finished import personal_model
from bespoke.runs.folder import RunFolder
from bespoke.runs.training import Run
from bespoke.study.comparison import GROUP_METHODS, Comparison, default_methods
from bespoke.tensors import nbytes, take

LINE = Regression(Linear(1))
LOOP = Choice(False, 1, 0, 1, "autograd", "")
FUSED = Choice(True, 64, 0, 1, "fused", "")
CLIENTS = 12
FLSIM = ServerOptimizer(name="adam", lr=0.05, beta2=0.999, eps=1e-8, weight_decay=1e-5)


def lines(grouped: bool = True, clients: int = CLIENTS) -> Population:
    """Clients of group "up" have y = 2 x + 1, those of "down" y = -2 x + 1; they take turns."""
    rows = 10
    x = np.tile(np.linspace(-1, 1, rows, dtype=np.float32), clients)[:, None]
    up = np.repeat(np.arange(clients) % 2 == 0, rows)
    y = (np.where(up, 2.0, -2.0) * x[:, 0] + 1).astype(np.float32)
    owners = np.repeat([f"client {i:02d}" for i in range(clients)], rows)
    group = np.where(up, "up", "down") if grouped else None
    return Population.build({"x": x, "y": y}, owners, group=group, about={"name": "lines", "task": "regression"})


@pytest.mark.parametrize("server", ["sgd", "adam"])
def test_the_common_model_in_row_0_never_moves(server: Any) -> None:
    """Clients of no known group sum up to 8 of weight 4 in row 0: neither that model nor its optimizer takes it.

    Row 1 has a sum of 6 and the weight 3, row 2 nobody: plain averaging moves row 1 by 2.
    """
    made = GroupFL(LINE, server=ServerOptimizer(name=server, lr=1.0))
    params = {"weight": torch.ones(1, 1), "bias": torch.zeros(1)}
    began = made.begin(params, torch.tensor([0, 1, 2]), 2)
    delta = {"weight": torch.tensor([8.0, 6.0, 5.0]).reshape(3, 1, 1), "bias": torch.tensor([[8.0], [6.0], [5.0]])}
    ended = made.step(began, delta, torch.tensor([4.0, 3.0, 0.0]))
    for row in (0, 2):
        assert ended["params"]["weight"][row].item() == 1.0
        assert ended["params"]["bias"][row].item() == 0.0
    if server == "sgd":
        assert ended["params"]["weight"].flatten().tolist() == [1.0, 3.0, 1.0]
        assert ended["params"]["bias"].flatten().tolist() == [0.0, 2.0, 0.0]
    else:
        assert ended["optimizer"]["time"].tolist() == [0, 1, 0]
        assert ended["optimizer"]["moment"]["bias"].flatten()[[0, 2]].tolist() == [0.0, 0.0]


def test_a_round_says_how_many_groups_came_and_how_small_the_smallest_was() -> None:
    """Of groups of one, two and three clients those of the last two come; a client of no known group is in none."""
    made = GroupFL(LINE)
    began = made.begin(LINE.init(0), torch.tensor([0, 1, 2, 2, 3, 3, 3]), 3)
    assert made.observe(began, Cohort({}, {}, (0, 2, 3, 4, 5, 6))) == {"groups": 2, "smallest_group": 2}
    assert made.observe(began, Cohort({}, {}, (1,))) == {"groups": 1, "smallest_group": 1}
    assert made.observe(began, Cohort({}, {}, (0,))) == {"groups": 0, "smallest_group": 0}


def experiment(population: Population, *stages: Stage, **more: Any) -> Experiment:
    split = more.pop("split", None) or cross_silo(population, (0.6, 0.2, 0.2), seed=1)
    return Experiment("groups", population, split, LINE, stages, "mse", cohort=more.pop("cohort", CLIENTS), **more)


def run(folder: Path, population: Population, *stages: Stage, **more: Any) -> tuple[dict[str, Any], RunFolder]:
    how = more.pop("how", LOOP)
    result = Run(experiment(population, *stages, **more), RunFolder.create(folder, ""), how=how).run()
    return result, RunFolder(folder)


def clients_of(folder: RunFolder) -> pd.DataFrame:
    return pd.read_parquet(folder.path / "clients.parquet").set_index("client")


# -- Algorithm 2 -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("how", [LOOP, FUSED], ids=["loop", "fused"])
@pytest.mark.parametrize("server", [ServerOptimizer(), FLSIM], ids=["sgd", "flsim"])
def test_each_group_is_a_federation_of_its_own(how: Choice, server: ServerOptimizer) -> None:
    """The models of two groups in one run are those of two runs, each with its own optimizer state and no others."""
    population = lines()
    split = cross_silo(population, (0.6, 0.2, 0.2), seed=1)
    knobs: dict[str, Any] = {"lr": 0.1, "batch_size": 4, "server": server}
    together, alone = GroupFL(LINE, **knobs), FedAvg(LINE, **knobs)
    start = {"weight": torch.tensor([[0.3]]), "bias": torch.tensor([-0.2])}
    groups = torch.from_numpy(population.group_numbers())
    cohorts = [np.arange(CLIENTS), np.array([0, 1, 2, 3, 5]), np.array([4, 6]), np.arange(CLIENTS)]
    with Engine(population, how) as engine:
        engine.open(ClientWork(together, split.train), start)
        server_state = together.init_server(start, Setting(0, CLIENTS, CLIENTS, groups))
        for number, cohort in enumerate(cohorts):
            result = engine.round(server_state, cohort, key=number)
            assert result.bytes_down == nbytes(start) * len(cohort)  # one model each, however many groups there are
            assert result.bytes_up == (nbytes(start) + 4) * len(cohort)
            server_state = together.server_round(server_state, result.cohort)
        for group in (1, 2):
            members = np.flatnonzero(groups.numpy() == group)
            engine.open(ClientWork(alone, split.train), start)
            theirs = alone.init_server(start)
            for number, cohort in enumerate(cohorts):
                mine = np.intersect1d(cohort, members)
                if len(mine):
                    theirs = alone.server_round(theirs, engine.round(theirs, mine, key=number).cohort)
            torch.testing.assert_close(take(server_state["params"], group), theirs["params"])
            if theirs["optimizer"]:
                torch.testing.assert_close(take(server_state["optimizer"], group), theirs["optimizer"])
                assert int(theirs["optimizer"]["time"]) == (4 if group == 2 else 3)  # "down" is 1: not in one cohort
    assert torch.equal(take(server_state["params"], 0)["weight"], start["weight"])  # nobody trains the common model


def test_fedadam_is_that_of_flsim() -> None:
    """torch.optim.Adam with FLSim's constants on the mean change as (minus) the gradient, in each group."""
    made = GroupFL(LINE, server=FLSIM)
    start = {"weight": torch.tensor([[1.0]]), "bias": torch.tensor([2.0])}
    server = made.init_server(start, Setting(0, 2, 2, torch.tensor([1, 2])))
    means = {1: (0.5, -1.0), 2: (-0.25, 0.125)}
    rows = [(0.0, 0.0), *means.values()]
    weights = torch.tensor([0.0, 2.0, 4.0])
    delta = {
        "weight": torch.tensor([[[w]] for w, _ in rows]) * weights[:, None, None],
        "bias": torch.tensor([[b] for _, b in rows]) * weights[:, None],
    }
    for _ in range(3):
        server = made.server_round(server, Cohort({"delta": delta, "weight": weights}, {}, (0, 1)))
    for group, (weight, bias) in means.items():
        params = [start["weight"].clone().requires_grad_(), start["bias"].clone().requires_grad_()]
        adam = torch.optim.Adam(params, lr=0.05, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-5)
        for _ in range(3):
            params[0].grad, params[1].grad = torch.tensor([[-weight]]), torch.tensor([-bias])
            adam.step()
        torch.testing.assert_close(server["params"]["weight"][group], params[0].detach())
        torch.testing.assert_close(server["params"]["bias"][group], params[1].detach())


def test_every_group_has_a_cohort_of_its_own() -> None:
    population = lines(clients=30)
    split = cross_silo(population, (0.6, 0.2, 0.2), seed=1)
    groups = np.array([1] * 20 + [2] * 3 + [0] * 7)
    sampler = Sampler(split.train, 5, 4).by_group(groups)
    drawn = [sampler.draw(number).contacted for number in (1, 2, 3)]
    for cohort in drawn:
        assert (groups[cohort] == 1).sum() == 4
        assert (groups[cohort] == 2).sum() == 3  # the whole group
        assert not (groups[cohort] == 0).any()  # whose group is not known does not train
        assert (np.diff(cohort) > 0).all()
    assert not np.array_equal(drawn[0], drawn[1])
    lap = Sampler(split.train, 5, 4, sampling="round-robin").by_group(groups)
    seen = np.concatenate([lap.draw(number).contacted for number in range(1, 6)])
    assert sorted(seen[groups[seen] == 1]) == list(range(20))  # everyone once in five rounds


def test_the_log_says_how_few_stand_behind_a_sum(tmp_path: Path) -> None:
    _, folder = run(tmp_path / "run", lines(), Stage(GroupFL(LINE), 2), cohort=4)
    rounds = [line for line in folder.read_log("rounds.jsonl") if line["round"]]
    assert [line["observed"] for line in rounds] == [{"groups": 2, "smallest_group": 4}] * 2
    assert [line["clients"] for line in rounds] == [8, 8]
    assert reveals(GroupFL(LINE).uplink) == {"delta": Reveal.SUM, "weight": Reveal.SUM}


# -- the four ways -----------------------------------------------------------------------------------------------------
def test_group_models_serve_and_are_fine_tuned(tmp_path: Path) -> None:
    """The common model cannot serve two slopes; the groups' do, and fine-tuning starts from them."""
    population = lines()
    first, second = Stage(FedAvg(LINE, lr=0.1), 10), Stage(GroupFL(LINE, lr=0.3), 40)
    common, _ = run(tmp_path / "fl", population, first, how=FUSED)
    grouped, folder = run(tmp_path / "group", population, first, second, how=FUSED)
    tuned = GroupPerFL(LINE, lrs=(0.1,), epochs=2)
    personal, last = run(tmp_path / "both", population, first, second, Stage(tuned, 0), how=FUSED)
    assert common["query"] > 1.0
    assert grouped["query"] < 1e-3
    assert personal["query"] <= grouped["query"]
    np.testing.assert_allclose(clients_of(last)["baseline_mse"], clients_of(folder)["query_mse"], rtol=1e-5)
    ended = folder.latest()
    assert ended is not None
    slopes = ended.server["params"]["weight"][:, 0, 0]
    assert slopes[1] == pytest.approx(-2, abs=0.05)  # groups by name: down, up
    assert slopes[2] == pytest.approx(2, abs=0.05)
    assert "served" not in clients_of(folder)  # groups that were given need no telling
    model, name = personal_model(last, experiment(population, first, second, Stage(tuned, 0)), 3)
    assert name in tuned.candidates()
    assert model["weight"].item() == pytest.approx(-2, abs=0.05)


def test_interrupted_groups_end_the_same(tmp_path: Path) -> None:
    """Stopped within a stage whose groups were found by the stage before: the same bytes after resuming."""
    stages = (
        Stage(FedAvg(LINE), 2), Stage(ClusteredFL(LINE), 2), Stage(GroupFL(LINE, server=FLSIM), 3),
        Stage(FineTune(LINE, lrs=(0.1,), epochs=1), 0),
    )  # fmt: skip
    _, whole = run(tmp_path / "whole", lines(False), *stages)
    for stop in (3, 4, 5, 6):
        rounds: list[int] = []
        path = tmp_path / f"stopped {stop}"
        stopping = Run(
            experiment(lines(False), *stages), RunFolder.create(path, ""), how=LOOP,
            stop=lambda seen=rounds, when=stop: len(seen) == when,
        )  # fmt: skip
        stopping.after_round = lambda stage, number, seen=rounds: seen.append(number)
        with pytest.raises(Interrupted):
            stopping.run()
        Run(experiment(lines(False), *stages), RunFolder(path)).run()
        for name in ("rounds.jsonl", "ledger.jsonl", "clients.parquet"):
            assert (path / name).read_bytes() == (whole.path / name).read_bytes()


def test_who_never_trained(tmp_path: Path) -> None:
    """Given groups: its group's model. Found groups: nobody knows its group, so the common model."""
    stages = (Stage(FedAvg(LINE, lr=0.1), 3), Stage(GroupFL(LINE, lr=0.3), 40))
    for grouped in (True, False):
        population = lines(grouped, clients=40)
        split = cross_device(population, (0.2, 0.2), 0.5, seed=3)
        finder = () if grouped else (Stage(ClusteredFL(LINE, lr=0.1), 1),)
        path = tmp_path / str(grouped)
        _, folder = run(path, population, stages[0], *finder, stages[1], split=split, cohort=40, how=FUSED)
        table, ended = clients_of(folder), folder.latest()
        assert ended is not None
        if grouped:
            assert (table["query_mse"] < 1e-3).all()
            continue
        assert set(table["served"]) == {"none"}
        groups = ended.server["groups"].numpy()
        assert (groups[split.train.clients] > 0).all()
        assert (np.delete(groups, split.train.clients) == 0).all()
        weight = ended.server["params"]["weight"][0].item()  # row 0: the model that all had in common
        assert abs(weight) < 1.0
        assert (table["query_mse"] > 0.2).all()


def test_a_missing_group_is_not_a_group() -> None:
    plain = lines()
    found = replace(plain, groups=["(missing)", "up"])
    numbers = found.group_numbers()
    assert numbers is not None
    assert numbers.tolist() == [1, 0] * 6
    assert experiment(found, Stage(GroupFL(LINE), 1)).setting(0).groups.tolist() == numbers.tolist()
    assert lines(False).group_numbers() is None


FILE = """
[data]
source = "synthetic"
options = { clients = 12, examples = 20, groups = 3 }

[engine]
workers = 0

[compare]
methods = ["fedavg", "finetune", "group-fl", "group-perfl"]
seeds = 2
rounds = 3

[compare.knobs.group-fl]
rounds = 2

[compare.grid]
fedavg = { lr = [0.05, 0.1] }
group-fl = { lr = [0.05, 0.1] }
"""


def trained(folder: Path) -> list[tuple[str, int, str]]:
    """(method, seed, learning rate) of each stage that was computed, not taken over: only that leaves timings."""
    found = []
    for path in [*(folder / "tuning").iterdir(), *(folder / "runs").iterdir()]:
        config = json.loads(json.dumps(read_toml(path / "config.toml")))
        timing = path / "timing.jsonl"
        stages = {json.loads(text)["stage"] for text in timing.read_text().splitlines()} if timing.exists() else set()
        found += [(config["stage"][s]["method"], config["seed"], str(config["stage"][: s + 1])) for s in stages]
    return sorted(found)


def read_toml(path: Path) -> dict[str, Any]:
    import tomllib

    return tomllib.loads(path.read_text())


def test_a_stage_that_several_share_is_trained_once(tmp_path: Path) -> None:
    """Four ways through the stages, two seeds, and tuning: each stage of each setting is computed once."""
    (tmp_path / "file.toml").write_text(FILE)
    out = Comparison.read(tmp_path / "file.toml", tmp_path / "out").run()
    found = trained(out)
    assert len(set(found)) == len(found)
    # tuning: two rates each with the first seed; the second seed: fedavg and group-fl at the rates chosen
    assert [(method, seed) for method, seed, _ in found] == [
        ("fedavg", 0), ("fedavg", 0), ("fedavg", 1), ("group-fl", 0), ("group-fl", 0), ("group-fl", 1),
    ]  # fmt: skip
    about = {entry["label"]: entry for entry in json.loads((out / "compare.json").read_text())["methods"]}
    ways = {label: [stage["method"] for stage in entry["stages"]] for label, entry in about.items()}
    assert ways == {
        "fedavg": ["fedavg"], "finetune": ["fedavg", "finetune"], "group-fl": ["fedavg", "group-fl"],
        "group-perfl": ["fedavg", "group-fl", "group-perfl"],
    }  # fmt: skip
    # what was taken over is what would have been computed: the ledger has it all, and the epochs of each
    ledger = RunFolder(out / "runs" / "group-perfl-seed1").read_log("ledger.jsonl")
    rounds = [(line["stage"], line["epochs"], line["reported"]) for line in ledger if line["round"]]
    assert rounds == [(0, 1, 12)] * 3 + [(1, 1, 12)] * 2
    assert ledger[-1]["epochs"] == 10  # most epochs of fine-tuning, at one learning rate


def test_groups_are_compared_where_they_are_named() -> None:
    assert default_methods({"table": "t.csv"})[-1] not in GROUP_METHODS
    assert default_methods({"table": "t.csv", "group": "city"})[-2:] == GROUP_METHODS


def test_without_groups_it_is_refused() -> None:
    data = {"source": "synthetic", "options": {"clients": 5, "examples": 10}}
    stages = [{"method": "fedavg", "rounds": 1}, {"method": "group-fl", "rounds": 1}]
    with pytest.raises(
        UserError, match=r"needs groups of clients, and synthetic has none.*clustered-fl, feature-groups"
    ):
        build(checked({"data": data, "stage": stages}, "here"))
    stages.insert(1, {"method": "feature-groups", "rounds": 1})
    assert len(build(checked({"data": data, "stage": stages}, "here")).stages) == 3
    with pytest.raises(UserError, match="clip acts on what clients send as delta, and feature-groups sends features"):
        build(checked({"data": data, "stage": stages, "transform": {"clip": 1.0}}, "here"))
    wrong = [{"method": "feature-groups", "rounds": 1}, {"method": "ditto", "rounds": 1}]
    with pytest.raises(UserError, match=r"ditto starts from one model, and feature-groups .* a model for each group"):
        build(checked({"data": data, "stage": wrong}, "here"))


# -- groups that are found ---------------------------------------------------------------------------------------------
def test_a_bipartition_by_hand() -> None:
    """Changes at these angles: 0, 10, 20 against 95, 180. Complete linkage: {95, 180} | rest (diameters 85, 20).

    Single linkage cuts the widest gap between neighbours, 85 degrees, of which there are two: 20|95 and 95|180.
    """
    angles = torch.deg2rad(torch.tensor([0.0, 95.0, 10.0, 180.0, 20.0], dtype=torch.float64))
    changes = torch.stack([angles.cos(), angles.sin()], dim=1) * torch.tensor([1.0, 5.0, 2.0, 0.1, 3.0])[:, None]
    assert cosines(changes)[0, 2].item() == pytest.approx(np.cos(np.deg2rad(10)))
    part = divided(changes, "complete", 0.0)
    assert part is not None
    assert part.tolist() == [False, True, False, True, False]
    # the two parts are 75 degrees apart: sqrt((1 - cos 75) / 2) = sin(37.5 degrees) = 0.609
    assert divided(changes, "complete", 0.60) is not None
    assert divided(changes, "complete", 0.62) is None
    angles[1] = np.deg2rad(60.0)
    changes = torch.stack([angles.cos(), angles.sin()], dim=1)
    alone = divided(changes, "single", 0.0)
    assert alone is not None
    assert alone.tolist() == [False, False, False, True, False]  # the gap of 120 degrees


def sent(*changes: tuple[float, float]) -> dict[str, Any]:
    weight = torch.tensor([[[w]] for w, _ in changes])
    return {"delta": {"weight": weight, "bias": torch.tensor([[b] for _, b in changes])},
            "weight": torch.ones(len(changes))}  # fmt: skip


def test_a_group_is_divided_where_its_mean_stands_still() -> None:
    """The criteria of the paper, as lengths: mean below eps1, some change above eps2, three clients at least."""
    made = ClusteredFL(LINE, eps1=0.2, eps2=1.0, norms="absolute")
    start = {"weight": torch.zeros(1, 1), "bias": torch.zeros(1)}
    begun = made.init_server(start, Setting(0, 5))

    def groups(each: Any, clients: tuple[int, ...] = (0, 1, 2, 3), made: ClusteredFL = made) -> list[int]:
        return made.server_round(begun, Cohort({}, each, clients))["groups"].tolist()

    opposed = sent((2.0, 0.1), (-2.0, 0.1), (2.0, -0.1), (-2.0, -0.1))
    assert groups(opposed) in ([1, 2, 1, 2, 0], [2, 1, 2, 1, 0])  # and client 4 was never heard of
    assert groups(opposed, (3, 2, 1, 0)) == groups(opposed)  # hosts answer in any order: by hand both are the same
    assert groups(sent((2.0, 0.1), (1.5, 0.1), (2.0, -0.1), (-2.0, -0.1))) == [1, 1, 1, 1, 0]  # the mean still moves
    assert groups(sent((0.9, 0.1), (-0.9, 0.1), (0.9, 0.1), (-0.9, 0.1))) == [1, 1, 1, 1, 0]  # all are content
    assert groups(sent((2.0, 0.0), (-2.0, 0.0)), (0, 1)) == [1, 1, 0, 0, 0]  # two are no groups
    relative = replace(made, norms="relative", eps1=0.05, eps2=0.5)
    assert groups(sent((0.02, 0.0), (-0.02, 0.0), (0.02, 0.0), (-0.02, 0.0)), made=relative)[:2] in ([1, 2], [2, 1])


def test_found_groups_train_apart_from_copies_of_their_model() -> None:
    made = ClusteredFL(LINE, eps1=0.2, eps2=1.0, norms="absolute", server=ServerOptimizer(name="momentum", lr=1.0))
    start = {"weight": torch.full((1, 1), 10.0), "bias": torch.zeros(1)}
    server = made.init_server(start, Setting(0, 4))
    server = made.server_round(server, Cohort({}, sent((1.0, 0.0), (1.0, 0.0), (1.0, 0.0), (1.0, 0.0)), (0, 1, 2, 3)))
    assert server["params"]["weight"].flatten().tolist() == [11.0, 11.0]  # one group: the common model goes along
    opposed = Cohort({}, sent((2.0, 0.0), (-2.0, 0.0), (2.0, 0.0), (-2.0, 0.0)), (0, 1, 2, 3))
    server = made.server_round(server, opposed)
    # momentum 0.9 x 1 from before the division, in both: 11 + 0.9 + 2 and 11 + 0.9 - 2; row 0 stays
    found = server["params"]["weight"].flatten().tolist()
    assert found[0] == 11.0
    assert sorted(found[1:]) == pytest.approx([9.9, 13.9])
    assert made.observe(server, opposed)["max_norm"] == 2.0


def test_groups_are_found_in_updates_and_in_features(tmp_path: Path) -> None:
    """Opposite slopes are found in updates and not in inputs, which are the same; other inputs are found there."""
    slopes = lines(False)
    truth = np.arange(CLIENTS) % 2
    shifted = replace(slopes, columns={**slopes.columns, "x": slopes.columns["x"] + 5 * torch.from_numpy(
        np.repeat(truth, 10))[:, None]})  # fmt: skip
    finders = {"updates": ClusteredFL(LINE, lr=0.1), "features": FeatureGroups(LINE, k=2)}
    found = {}
    for name, finder in finders.items():
        for data, population in (("slopes", slopes), ("shifted", shifted)):
            stages = (Stage(FedAvg(LINE, lr=0.3), 20), Stage(finder, 1))
            _, folder = run(tmp_path / f"{name} {data}", population, *stages, cohort=6, how=FUSED)
            table = clients_of(folder)  # and all take part in finding groups, whatever the cohort
            found[name, data] = adjusted_rand_score(truth, table["served"])
    assert found["updates", "slopes"] == 1.0
    assert found["features", "shifted"] == 1.0
    assert found["features", "slopes"] < 0.5


def test_what_finding_groups_reveals() -> None:
    assert set(reveals(ClusteredFL(LINE).uplink).values()) == {Reveal.EACH}
    assert reveals(FeatureGroups(LINE).uplink) == {"features": Reveal.EACH}
    assert ClusteredFL.needs.everyone
    assert FeatureGroups.needs.everyone
