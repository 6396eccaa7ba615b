"""One protocol for every place a client can live: rounds that may be repeated, and sites behind a wire of bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import own_models
from bespoke.data.population import Population
from bespoke.data.splits import cross_silo
from bespoke.data.standardize import standardize
from bespoke.errors import RemoteLost, UserError, WorkerFailed
from bespoke.experiment.build import build
from bespoke.experiment.config import ExperimentConfig
from bespoke.experiment.experiment import Experiment
from bespoke.federation.calls import OF_SITES, OPERATIONS, Call, Settle, serve
from bespoke.federation.engine import Choice, Engine
from bespoke.federation.host import Host
from bespoke.federation.remote import Here
from bespoke.federation.segments import read_segment
from bespoke.federation.sites import Wired, learn
from bespoke.federation.wire import decode_answer, encode_call
from bespoke.models.own.model import local_name
from bespoke.privacy.release import Learned
from bespoke.runs.folder import RunFolder
from bespoke.runs.training import Run
from bespoke.tensors import Tree, flatten, take
from kills import assert_identical, contents
from loopback import Loop, SiteHost, federation, site, split_up

LOOPED = Choice(False, 1, 0, 1, "autograd", "for the tests")


def people(task: str = "regression") -> Population:
    """Twelve uneven clients in three groups, each with a line of its own."""
    random = np.random.default_rng(5)
    who = np.repeat(np.arange(12), 6 + 3 * (np.arange(12) % 4))
    x = random.standard_normal((len(who), 3)).astype(np.float32)
    lines = random.standard_normal((12, 3))
    y = (x * lines[who]).sum(1) + 0.1 * random.standard_normal(len(who))
    target = y.astype(np.float32) if task == "regression" else (y > 0).astype(np.int64)
    about: Any = {"name": "people", "task": task, "input": "table", "features": ["a", "b", "c"], "target": "y"}
    if task == "classification":
        about["classes"] = ["low", "high"]
    names = np.array([f"client {i:02d}" for i in range(12)])
    groups = np.array([f"group {i % 3}" for i in range(12)])
    return Population.build({"x": x, "y": target}, names[who], group=groups[who], about=about)


FEDAVG = {"method": "fedavg", "rounds": 2, "lr": 0.1, "batch_size": 4}
STAGES: dict[str, list[dict[str, Any]]] = {
    "fedavg": [FEDAVG, {"method": "finetune", "lrs": [0.1], "epochs": 2}],
    "ditto": [FEDAVG, {"method": "ditto", "rounds": 3, "lr": 0.1, "batch_size": 4}],
    "group-perfl": [FEDAVG, {"method": "group-fl", "rounds": 3, "lr": 0.1}, {"method": "group-perfl", "epochs": 2}],
    "hypcluster": [{"method": "hypcluster", "rounds": 3, "lr": 0.1}],
    "fedembed": [{"method": "fedembed", "rounds": 3, "lr": 0.1, "k": 2, "adapt_epochs": 2}],
    "mocha": [{"method": "mocha", "rounds": 3}],
}
ALONE = [{**FEDAVG, "rounds": 4, "drop_last": True}]


def asked(stages: list[dict[str, Any]], **more: Any) -> ExperimentConfig:
    raw = {
        "seed": 4, "data": {"population": "people", "standardize": "none"}, "cohort": {"size": 7, "dropout": 0.1},
        "stage": stages, **more,
    }  # fmt: skip
    return ExperimentConfig.model_validate(raw)


def experiment(name: str, **more: Any) -> Experiment:
    labels = name == "mocha" or "model" in more
    return build(asked(STAGES.get(name, ALONE), **more), people("classification" if labels else "regression"))


def ran(made: Experiment, folder: Path, **how: Any) -> dict[str, bytes]:
    """A run's files, private state among them."""
    Run(made, RunFolder.create(folder, ""), how=LOOPED, checkpoint_seconds=0.0, **how).run()
    return contents(folder)


# -- rounds that are repeated ------------------------------------------------------------------------------------------
class Restless(Here):
    """Before each round another one is begun and taken back; each call comes twice, as after a lost answer."""

    rounds = 0

    def finish(self) -> Any:
        call, self.call = self.call, None
        assert call is not None
        if call.operation == "train":
            self.rounds += 1
            serve(self.host, Call("settle", settle=call.settle))
            clients = call.values["clients"][::2]
            rows = call.values["rows"]
            own = call.values["own"] and take(call.values["own"], slice(None, None, 2))
            other = {"key": call.values["key"] + 1, "clients": clients, "rows": None if rows is None else rows[::2]}
            serve(self.host, replace(call, values={**call.values, **other, "own": own}))
            if self.rounds % 2:  # taken back; else replaced by the round that follows
                serve(self.host, Call("settle", settle=Settle(call.values["key"] + 1, np.zeros(0, np.int64))))
        first, second = serve(self.host, call), serve(self.host, call)
        if call.operation == "train":
            assert (first.clients, first.norms, first.bytes_up) == (second.clients, second.norms, second.bytes_up)
            for one, other in ((first.sums, second.sums), (first.each, second.each)):
                assert_equal(one, other)
        return second


def assert_equal(one: Tree | None, other: Tree | None) -> None:
    one, other = flatten(one or {}), flatten(other or {})
    assert one.keys() == other.keys()
    assert all(torch.equal(leaf, other[name]) for name, leaf in one.items())


MLP = {"name": "mlp", "hidden": [8]}
REPEATED: dict[str, tuple[str, dict[str, Any]]] = {
    "stateless": ("fedavg", {}),
    "stateful": ("ditto", {}),
    "grouped": ("group-perfl", {}),
    "what a transform remembers": ("alone", {"transform": {"top_k": 0.4}, "model": MLP}),
    "layers of clients' own": ("alone", {"model": {"name": local_name(own_models.normed_privately, "model")}}),
    "held messages": ("ditto", {"robust": {"rule": "median"}}),
}


@pytest.mark.parametrize("name", REPEATED)
def test_rounds_that_are_repeated_or_taken_back_leave_no_trace(name: str, tmp_path: Path) -> None:
    which, more = REPEATED[name]
    made, remotes = experiment(which, **more), []

    def restless(population: Population, choice: Choice) -> Engine:
        remotes.append(Restless(Host(population, choice.mode())))
        return Engine(population, choice, remotes)

    expected = ran(made, tmp_path / "once")
    assert_identical(ran(made, tmp_path / "again", engine_of=restless), expected, name)
    assert remotes[0].rounds >= 2
    assert any(file.startswith("private/") for file in expected) == (name not in ("stateless", "grouped"))


def test_what_a_round_made_is_kept_once_it_is_settled_and_for_the_clients_that_were_used() -> None:
    """Ditto's private models: of a round that is not settled nothing is seen; of a settled one those of `used`."""
    host, train = opened("ditto")
    begun = host.private.read(range(12))
    serve(host, train(1, np.arange(6)))
    assert_equal(host.private.read(range(12)), begun)
    serve(host, train(2, np.arange(6), Settle(1, np.array([2, 3]))))
    assert host.private.holds(np.arange(12)).tolist() == [False, False, True, True] + 8 * [False]
    serve(host, Call("settle", settle=Settle(2)))
    assert host.private.holds(np.arange(12)).tolist() == 6 * [True] + 6 * [False]
    after = host.private.read(range(12))
    serve(host, Call("settle", settle=Settle(2)))  # again: nothing happens
    assert_equal(host.private.read(range(12)), after)
    with pytest.raises(RemoteLost, match=r"round 7 .*go back to a checkpoint"):
        serve(host, Call("settle", settle=Settle(7)))


def test_an_engine_says_what_became_of_a_round_with_the_next_call() -> None:
    """No call of its own; abandoned rounds leave nothing, and rounds of which nothing is said are kept."""
    made = experiment("ditto")
    stage = made.stages[1]
    host = Host(made.population, LOOPED.mode())
    here = Watched(host)
    params = made.task.init(0)
    engine = Engine(made.population, LOOPED, [here])
    engine.open(made.work(stage.method, made.split.train, ()), params)
    server = stage.method.init_server(params)
    engine.round(server, np.array([0, 1]), key=1)
    engine.abandon()
    engine.round(server, np.array([2, 3]), key=2)
    assert not host.private.holds(np.arange(12)).any()
    engine.commit()
    engine.round(server, np.array([4]), key=3)
    assert [call.operation for call in here.calls] == ["open", "train", "train", "train"]
    assert [call.settle and call.settle.key for call in here.calls] == [None, None, 1, 2]
    assert np.flatnonzero(host.private.holds(np.arange(12))).tolist() == [2, 3]
    assert engine.host is host  # looked at, it is settled
    assert np.flatnonzero(host.private.holds(np.arange(12))).tolist() == [2, 3, 4]


class Watched(Here):
    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self.calls: list[Call] = []

    def start(self, call: Call) -> None:
        self.calls.append(call)
        super().start(call)


def opened(name: str) -> tuple[Host, Any]:
    """A host at a method's last stage, and how it is asked to train."""
    made = experiment(name)
    stage, params = made.stages[-1], made.task.init(0)
    host = Host(made.population, LOOPED.mode())
    serve(host, Call("open", {"work": made.work(stage.method, made.split.train, ()), "params": params}))
    shared = stage.method.broadcast(stage.method.init_server(params))

    def train(key: int, clients: Any, settle: Settle | None = None) -> Call:
        values = {"shared": shared, "own": None, "clients": clients, "key": key, "next_clients": None, "rows": None}
        return Call("train", {**values, "number": 1, "transform_state": {}}, settle)

    return host, train


def test_a_call_says_what_its_operation_takes() -> None:
    with pytest.raises(ValueError, match="no operation is called 'shell'; known: hello"):
        Call("shell")
    with pytest.raises(ValueError, match=r"kept_layers takes \['point'\], and was given \['points'\]"):
        Call("kept_layers", {"points": ""})
    assert all(callable(getattr(Host, name)) for name in OPERATIONS.keys() - OF_SITES)  # carried out under its name


# -- sites behind a wire -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", STAGES)
def test_a_site_behind_a_wire_gives_the_bytes_of_a_simulation(name: str, tmp_path: Path) -> None:
    """One site with all clients, and answers that get lost: every file of the run, private state among them."""
    made, loops = experiment(name), []

    def over_the_wire(population: Population, choice: Choice) -> Engine:
        folder = tmp_path / "there" / "private"
        engine, wires = federation([population], choice, [folder], lose=lambda sent: sent % 3 == 0)
        host = wires[0].site.host
        assert isinstance(host, SiteHost)
        host.tells = True  # else its files would not be named in checkpoints
        loops.extend(wires)
        return engine

    expected = ran(made, tmp_path / "here")
    assert_identical(ran(made, tmp_path / "there", engine_of=over_the_wire), expected, name)
    assert len(loops[0].sent) > 8


@pytest.mark.parametrize("name", STAGES)
def test_three_sites_give_the_results_of_a_simulation(name: str, tmp_path: Path) -> None:
    """Up to the rounding of sums, which come in another order; private models too, which stay with their sites."""
    made = experiment(name)
    folders = [tmp_path / f"site {place}" for place in range(3)]

    def of_three(population: Population, choice: Choice) -> Engine:
        return federation(split_up(population, 3), choice, folders)[0]

    for folder in folders:
        folder.mkdir()
    files = ran(made, tmp_path / "here")
    ran(made, tmp_path / "there", engine_of=of_three)
    ended = [RunFolder.existing(tmp_path / where).final() for where in ("here", "there")]
    mine, theirs = (flatten(found.server) for found in ended if found)
    assert mine.keys() == theirs.keys()
    for path, leaf in mine.items():
        torch.testing.assert_close(theirs[path], leaf, rtol=1e-4, atol=1e-5)
    mine, theirs = (pq.read_table(tmp_path / where / "clients.parquet").to_pydict() for where in ("here", "there"))
    assert mine["client"] == theirs["client"]
    for column in mine.keys() - {"client"}:
        if isinstance(mine[column][0], float):
            np.testing.assert_allclose(theirs[column], mine[column], rtol=1e-3, atol=1e-4)
    assert not list((tmp_path / "there" / "private").iterdir())
    kept = [name for name in files if name.startswith("private/")]
    assert bool(kept) == (name in ("ditto", "fedembed"))
    for file in kept:
        clients, rows = read_segment(tmp_path / "here" / file)
        for place, folder in enumerate(folders):
            there, found = read_segment(folder / f"{Path(file).stem[:-1]}{place}.safetensors")
            expected = rows[torch.isin(clients, place + 3 * there)]
            np.testing.assert_allclose(found.view(torch.float32), expected.view(torch.float32), rtol=1e-4, atol=1e-5)


def test_a_federation_is_a_simulation_of_all_its_clients() -> None:
    """Clients are numbered by id, wherever they live, so cohorts and groups are those of one population."""
    population = people()
    engine, _ = federation(split_up(population, 3), LOOPED, [Path()] * 3)
    assert list(engine.roster.ids) == list(population.ids)
    assert engine.roster.keys.tolist() == population.keys.tolist()
    assert engine.roster.sizes.tolist() == population.sizes().tolist()
    assert engine.roster.group_numbers().tolist() == population.group_numbers().tolist()
    assert engine.home(np.arange(12)).tolist() == [0, 1, 2] * 4


def test_a_client_that_two_sites_have_is_refused() -> None:
    population = people()
    with pytest.raises(UserError, match=r"client 'client 03' lives at site 0 and at site 1"):
        federation([population.only(np.array([0, 3])), population.only(np.array([3, 4]))], LOOPED, [Path()] * 2)


def test_a_site_carries_out_what_it_allows_and_keeps_its_bugs_to_itself(tmp_path: Path) -> None:
    heard: list[BaseException] = []
    one = site(people(), LOOPED.mode(), tmp_path)
    one.failed = heard.append
    move = Call("move", {"train": experiment("fedavg").split.train})
    with pytest.raises(UserError, match="does not carry out 'move'"):
        decode_answer(one.answer(encode_call(move)), "move")
    with pytest.raises(WorkerFailed) as failure:  # nothing is open
        decode_answer(one.answer(encode_call(Call("template"))), "template")
    assert str(failure.value) == "AttributeError; the log of that place says more"
    assert isinstance(heard[0], AttributeError)


# -- statistics of the population --------------------------------------------------------------------------------------
def test_means_and_deviations_of_three_sites_are_those_of_all_their_rows(tmp_path: Path) -> None:
    """Far from zero, with gaps, and a column that does not vary."""
    population = people()
    x = population.columns["x"].clone()
    x[:, 0] = 1e4 + x[:, 0]
    x[::5, 1] = torch.nan
    x[:, 2] = 7.0
    about: Any = {**population.about, "numeric": [True, True, True]}
    population = replace(population, columns={**population.columns, "x": x}, about=about)
    split = cross_silo(population, (0.6, 0.2, 0.2), seed=4)
    loops = [Loop(site(part, LOOPED.mode(), tmp_path)) for part in split_up(population, 3)]
    found, floats = learn([Wired(loop, "site") for loop in loops], split.train)
    rows, _ = split.train.of(np.arange(12))
    for place, name in enumerate("abc"):
        values = x.numpy()[rows, place].astype(np.float64)
        deviation = np.nanstd(values)
        assert found[name] == pytest.approx((np.nanmean(values), deviation if deviation else 1.0), rel=1e-12)
    assert found["y"][1] == pytest.approx(float(population.columns["y"].numpy()[rows].astype(float).std()), rel=1e-12)
    assert floats == 2 * 3 * 4
    alike = standardize(population, split.train, "global", True)
    described = replace(population, about={**about, "asked_floats": floats})
    again = standardize(described, split.train, "global", True, found)
    torch.testing.assert_close(again.columns, alike.columns, rtol=1e-6, atol=1e-6)
    assert again.about["statistics_floats"] == floats  # for the ledger, and the account:
    assert Learned.of(again.about, public_statistics=False).unpaid
    assert not Learned.of(again.about, public_statistics=True).unpaid


def test_sites_that_tell_of_different_columns_are_refused(tmp_path: Path) -> None:
    one, other = (population.only(np.arange(6)) for population in (people(), people("classification")))
    loops = [Loop(site(population, LOOPED.mode(), tmp_path)) for population in (one, other)]
    split = cross_silo(people(), (0.6, 0.2, 0.2), seed=4)
    with pytest.raises(UserError, match=r"different columns \(y\); agree on one schema"):
        learn([Wired(loop, "site") for loop in loops], split.train)
