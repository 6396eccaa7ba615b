"""Secure sums in a simulation: the sums are those of a plain run, and no host gives out a plain message."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bespoke.errors import UserError
from bespoke.experiment.build import build
from bespoke.experiment.checks import checked
from bespoke.experiment.experiment import Experiment, Stage
from bespoke.federation import places as places_module
from bespoke.federation.engine import Choice, Engine
from bespoke.federation.masked import Members
from bespoke.federation.work import ClientWork
from bespoke.federation.workers import Worker
from bespoke.messages.robust.settings import RobustConfig
from bespoke.messages.secure.settings import SecureConfig, check_cohorts
from bespoke.messages.transform import Outgoing, Transform
from bespoke.method import Setting
from bespoke.methods import Ditto, FedAvg, GroupFL, HypCluster
from bespoke.privacy.gaussian import Gaussian
from bespoke.runs.events import Interrupted
from bespoke.runs.folder import RunFolder
from bespoke.runs.training import Run
from bespoke.tensors import Tree, flatten
from far_device import NAME, far_device
from small_worlds import population_of, world
from test_private_bytes import Wire

SECURE = SecureConfig(sums=True)
LOOPED, VECTORIZED = Choice(False, 1, 0, 1, "autograd", ""), Choice(True, 3, 0, 1, "closed-form", "")
WORKERS = Choice(False, 1, 2, 1, "autograd", "")
HOWS = {"looped": LOOPED, "vectorized": VECTORIZED}
EVERYONE = np.arange(7)


def rounds(made: Any, how: Choice, secure: SecureConfig | None, groups: Any = None, **more: Any) -> list[Any]:
    """Two rounds of a method on a small world: (result, server's state after it) each."""
    place = world("linear")
    method = made(place.task)
    setting = Setting(3, 7, 7, groups)
    found = []
    with Engine(place.population, how) as engine:
        params = place.task.init(5)
        engine.open(ClientWork(method, place.split.train, setting=setting, secure=secure, **more), params)
        server = method.init_server(params, setting)
        for key in (1, 2):
            result = engine.round(server, EVERYONE, key)
            server = method.server_round(server, result.cohort)
            found.append((result, server))
    return found


GROUPS = torch.tensor([1, 1, 1, 2, 2, 2, 2])
METHODS: dict[str, tuple[Any, Any]] = {
    "fedavg": (partial(FedAvg, lr=0.1, batch_size=4), None),
    "group-fl": (partial(GroupFL, lr=0.1, batch_size=4), GROUPS),
    "hypcluster": (partial(HypCluster, lr=0.1, batch_size=4, k=2), None),
    "ditto": (partial(Ditto, lr=0.1, batch_size=4), None),
}


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", METHODS)
def test_sums_are_those_of_a_plain_round(name: str, how: str) -> None:
    """Up to half a step of 2^-32 a client, and the rounding of float32, in which a plain host adds up."""
    made, groups = METHODS[name]
    plain, masked = (rounds(made, HOWS[how], secure, groups) for secure in (None, SECURE))
    (before, _), (after, _) = plain[0], masked[0]
    assert sorted(after.cohort.clients) == sorted(before.cohort.clients) == EVERYONE.tolist()
    assert flatten(after.cohort.sums).keys() == flatten(before.cohort.sums).keys()
    assert after.cohort.each == {}
    for path, leaf in flatten(before.cohort.sums).items():
        mine = flatten(after.cohort.sums)[path]
        assert mine.dtype == leaf.dtype
        largest = float(leaf.abs().max())
        assert float((mine.double() - leaf.double()).abs().max()) <= 7 * 2.0**-33 + 7 * largest * 2.0**-23, path
    for path, leaf in flatten(plain[1][1]).items():
        torch.testing.assert_close(flatten(masked[1][1])[path], leaf, rtol=1e-4, atol=1e-5)
    assert (after.secure.refused, before.secure) == ((), None)
    assert after.norms == {}  # nobody but the client knows how large its change is


class Huge(Transform):
    """Messages a million times as large."""

    def client(self, sent: Outgoing) -> Outgoing:
        return replace(sent, up={**sent.up, "delta": {n: 1e6 * leaf for n, leaf in sent.up["delta"].items()}})


@pytest.mark.parametrize("name", ["ditto", "group-fl"])
def test_messages_come_back_from_a_device(name: str) -> None:
    """On a device that refuses tensors of the CPU, and without float64."""
    made, groups = METHODS[name]
    near = rounds(made, LOOPED, SECURE, groups)[1]
    with far_device(double=False):
        far = rounds(made, replace(LOOPED, device=NAME), SECURE, groups)[1]
    torch.testing.assert_close(far[0].cohort.sums, near[0].cohort.sums, rtol=1e-4, atol=1e-5)


def watched(monkeypatch: pytest.MonkeyPatch) -> list[Tree]:
    """What clients would have sent, round by round, stacked."""
    sent: list[Tree] = []
    before = Members.hold

    def hold(self: Members, up: Tree, clients: list[int]) -> None:
        sent.append(up)
        before(self, up, clients)

    monkeypatch.setattr(Members, "hold", hold)
    return sent


def test_sums_are_exact_to_the_stated_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against float64 sums of what the clients held: half a step a client, and one rounding to float32."""
    sent = watched(monkeypatch)
    for bits in (12, 32):
        result = rounds(METHODS["fedavg"][0], LOOPED, SecureConfig(sums=True, bits=bits))[0][0]
        for path, leaf in flatten(sent[-2]).items():
            assert len(leaf) == 7
            exact, found = leaf.double().sum(0), flatten(result.cohort.sums)[path].double()
            bound = 7 * 2.0 ** -(bits + 1) + exact.abs().max() * 2.0**-24
            assert float((found - exact).abs().max()) <= float(bound)


# -- dropouts, refused rounds ------------------------------------------------------------------------------------------
def test_clients_that_do_not_answer_are_lost_before_they_send() -> None:
    place = world("linear")
    method = FedAvg(place.task, lr=0.1, batch_size=4)
    params = place.task.init(5)
    there, left = np.array([1, 2, 3, 4, 5, 6]), np.array([2, 3, 5, 6])
    found = []
    for secure in (None, SECURE):
        with Engine(place.population, LOOPED) as engine:
            engine.open(ClientWork(method, place.split.train, secure=secure), params)
            found.append(engine.round(method.init_server(params), left, 1, contacted=there))
    plain, masked = found
    assert masked.cohort.clients == (2, 3, 5, 6)
    torch.testing.assert_close(masked.cohort.sums, plain.cohort.sums, rtol=1e-5, atol=1e-6)


def test_bytes_are_those_that_were_sent() -> None:
    """Head 10 and signature 64 of five messages; keys 2 x 32; six shares of 82 with their length and number (8) and a
    commitment of 32; 8 bytes for each of 5 numbers; a view of 32 and 7 survivors; 7 shares of 33 (and 8)."""
    result = rounds(METHODS["fedavg"][0], LOOPED, SECURE)[0][0]
    numbers = sum(leaf.numel() for leaf in flatten(result.cohort.sums).values())
    assert numbers == 5
    bodies = 64 + (32 + 6 * (8 + 66 + 16)) + 8 * numbers + (32 + 4 * 7) + 7 * (8 + 33)
    assert result.secure is not None
    assert result.secure.bytes_up == 7 * (5 * (10 + 64) + bodies)
    assert result.bytes_up == 0  # nothing went beside it
    assert result.secure.bytes_down > 7 * 7 * (64 + 64)  # everybody's keys, for everybody


def test_a_round_of_too_few_is_not_added_up_and_did_not_happen() -> None:
    """The model stays as it was, and so does private state."""
    place = world("linear")
    method = Ditto(place.task, lr=0.1, batch_size=4)
    params = place.task.init(5)
    with Engine(place.population, LOOPED) as engine:
        engine.open(ClientWork(method, place.split.train, secure=SECURE), params)
        result = engine.round(method.init_server(params), np.array([3, 4, 5]), 1, contacted=EVERYONE)
        assert engine.host is not None
        assert not engine.host.private.holds(EVERYONE).any()
        assert (result.cohort.clients, result.cohort.sums) == ((), {})
        assert result.secure is not None
        assert result.secure.refused == ("3 of 7 clients answered, 5 are needed",)
        engine.round(method.init_server(params), np.array([2, 3, 4, 5, 6]), 2, contacted=EVERYONE)
        assert engine.host.private.holds(EVERYONE).tolist() == [False, False, True, True, True, True, True]


def test_clients_that_are_not_finite_may_leave_too_few() -> None:
    """They send nothing. What the others did is taken back with the round."""
    place = world("linear")
    x = place.population.columns["x"].clone()
    for client in (3, 4, 5):
        x[int(place.population.offsets[client]) : int(place.population.offsets[client + 1])] = torch.nan
    population = replace(place.population, columns={**place.population.columns, "x": x})
    method = Ditto(place.task, lr=0.1, batch_size=4)
    params = place.task.init(5)
    with Engine(population, LOOPED) as engine:
        engine.open(ClientWork(method, replace(place.split.train, population=population), secure=SECURE), params)
        result = engine.round(method.init_server(params), EVERYONE, 1)
        assert result.cohort.excluded == (3, 4, 5)
        assert result.cohort.clients == ()
        assert result.secure is not None
        assert "4 of 7 clients sent their numbers, and secure sums need 5" in result.secure.refused[0]
        assert engine.host is not None
        assert not engine.host.private.holds(EVERYONE).any()


def test_a_group_of_too_few_leaves_the_other_groups_alone() -> None:
    groups = torch.tensor([1, 1, 2, 2, 2, 2, 2])
    result, _ = rounds(METHODS["group-fl"][0], LOOPED, SECURE, groups)[0]
    assert result.cohort.clients == (2, 3, 4, 5, 6)
    assert result.secure.refused == ("group 1: 2 of 2 clients answered, 3 are needed",)
    assert not result.cohort.sums["weight"][1]
    assert result.cohort.sums["weight"][2] > 0


def test_what_is_too_large_names_its_field() -> None:
    with pytest.raises(
        UserError, match=r"secure\.sums: in a client's 'delta/\w+', the value .* use fewer bits, or clip"
    ):
        rounds(partial(FedAvg, lr=0.1, batch_size=4), LOOPED, SecureConfig(sums=True, bits=52), transforms=(Huge(),))


# -- whole runs --------------------------------------------------------------------------------------------------------
def whole(folder: Path, how: Choice, run: Any = None, **more: Any) -> dict[str, list[dict[str, Any]]]:
    place = world("linear")
    method = Ditto(place.task, lr=0.1, batch_size=4)
    sampling = {"dropout": 0.2}
    experiment = Experiment(
        "secure", place.population, place.split, place.task, (Stage(method, 4),), "mse", cohort=6, sampling=sampling,
        **more,
    )  # fmt: skip
    Run(experiment, RunFolder.create(folder, ""), how=how, **(run or {})).run()
    read = {name: (folder / f"{name}.jsonl").read_text().splitlines() for name in ("rounds", "ledger")}
    return {name: [json.loads(line) for line in lines] for name, lines in read.items()}


def traffic(folder: Path, workers: int, **more: Any) -> tuple[dict[str, Any], bytes]:
    """A run in worker processes: its logs, and every byte that crossed a pipe."""
    wires: list[Wire] = []

    class Tapped(Worker):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.pipe: Any = Wire(self.pipe)
            wires.append(self.pipe)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(places_module, "Worker", Tapped)
        found = whole(folder, replace(WORKERS, workers=workers), **more)
    return found, b"\0".join(message for wire in wires for message in (*wire.received, *wire.sent))


@pytest.fixture(scope="module")
def tapped(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], bytes, list[bytes]]:
    """A run under secure sums: logs, traffic, and the plain changes of its clients, round by round."""
    found, sent = traffic(tmp_path_factory.mktemp("tapped") / "run", 2, secure=SECURE)
    with pytest.MonkeyPatch.context() as monkeypatch:
        held = watched(monkeypatch)
        whole(tmp_path_factory.mktemp("watched") / "run", LOOPED, secure=SECURE)
        leaves = [leaf for up in held for leaf in flatten(up["delta"]).values()]
    plain = [row.contiguous().numpy().tobytes() for leaf in leaves for row in leaf]
    return found, sent, [message for message in plain if len(message) >= 12]


def test_the_bytes_that_leave_a_worker_hold_no_plain_message(tapped: Any) -> None:
    """Neither as floats nor in fixed point."""
    _, sent, plain = tapped
    assert len(plain) >= 10
    fixed = [np.rint(np.frombuffer(m, np.float32).astype(float) * 2**32).astype(np.int64).tobytes() for m in plain]
    assert not [needle for needle in (*plain, *fixed) if needle in sent]


def test_the_search_finds_plain_messages(tapped: Any, tmp_path: Path) -> None:
    """Positive control: the same run under a rule that shows the server every message; its first round is the same."""
    _, _, plain = tapped
    _, sent = traffic(tmp_path / "run", 1, robust=RobustConfig(rule="median"))
    assert all(needle in sent for needle in plain[:5])


def test_a_run_in_workers_equals_one_in_process_and_a_plain_one(tapped: Any, tmp_path: Path) -> None:
    found = tapped[0]
    alone = whole(tmp_path / "alone", LOOPED, secure=SECURE)
    for mine, theirs in zip(found["rounds"], alone["rounds"], strict=True):
        assert mine["clients"] == theirs["clients"]
        assert mine["bytes_up"] == theirs["bytes_up"]
        if mine["validation"]:
            assert mine["validation"]["mse"] == pytest.approx(theirs["validation"]["mse"], rel=1e-4)


def test_a_run_that_was_stopped_goes_on_to_the_same_numbers(tmp_path: Path) -> None:
    """Keys are drawn anew, and the sums are the same to the bit, for masks cancel exactly."""
    whole(tmp_path / "whole", LOOPED, secure=SECURE)
    done: list[int] = []
    two = {"after_round": lambda _, number: done.append(number), "stop": lambda: len(done) == 2}
    with pytest.raises(Interrupted):
        whole(tmp_path / "stopped", LOOPED, two, secure=SECURE)
    whole(tmp_path / "stopped", LOOPED, secure=SECURE)
    for name in ("rounds.jsonl", "ledger.jsonl", "clients.parquet"):
        assert (tmp_path / "stopped" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


def test_logs_say_what_was_masked_and_what_was_refused(tapped: Any) -> None:
    found = tapped[0]
    trained = [line for line in found["ledger"] if line["round"]]
    assert all(line["revealed"] == {"delta": "MASKED", "weight": "MASKED"} for line in trained)
    for line in found["rounds"][1:]:
        left = line["clients"]
        contacted = line["dropped"] + left
        if left:
            assert contacted == 6
            assert left >= 4
        else:
            assert line["secure"]["refused"] == [f"{6 - line['dropped']} of 6 clients answered, 4 are needed"]
            assert line["bytes_up"] == 0


def test_noise_of_the_server_and_of_clients_goes_with_secure_sums() -> None:
    """Reproducible noise is the same with and without masks."""
    noise = Gaussian(("delta", "weight"), 1.0, central=0.5, local=0.3, expected=7.0, reproducible=True)
    found = [rounds(METHODS["fedavg"][0], LOOPED, secure, transforms=(noise,))[1][0] for secure in (None, SECURE)]
    torch.testing.assert_close(found[0].cohort.sums, found[1].cohort.sums, rtol=1e-4, atol=1e-5)
    quiet = rounds(METHODS["fedavg"][0], LOOPED, SECURE)[1][0]
    assert not torch.allclose(quiet.cohort.sums["weight"], found[1].cohort.sums["weight"], atol=0.01)


# -- what is refused before a run --------------------------------------------------------------------------------------
def experiment(**more: Any) -> Any:
    population = population_of(np.zeros((66, 2), np.float32), np.zeros(66, np.float32))
    population = replace(population, about={**population.about, "task": "regression", "input": "table"})
    raw = {"data": {"source": "chem97"}, "stage": [{"method": "fedavg", "rounds": 1}], "secure": {"sums": True}, **more}
    return build(checked(raw, "here"), population)


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"secure": {"sums": True, "threshold": 0.5}}, "threshold"),
        ({"secure": {"sums": True, "least": 2}}, "least"),
        ({"secure": {"sums": True, "bits": 60}}, "bits"),
        ({"secure": {"sum": True}}, "sum"),
        ({"robust": {"rule": "median"}}, r"robust\.rule = 'median' asks for more than one sum of plain messages"),
        ({"attack": {"kind": "little-is-enough"}}, "after they were sent, which secure.sums hides"),
        ({"transform": {"top_k": 0.1}}, r"transform\.top_k saves nothing under secure\.sums"),
        ({"transform": {"quantize": "nearest"}}, r"transform\.quantize saves nothing"),
        ({"cohort": {"dropout": 0.5}}, r"cohort\.dropout leave about 50% of a round's clients, and secure\.threshold"),
        ({"cohort": {"over_select": 2.0}}, r"cohort\.over_select leave about 50%"),
        ({"privacy": {"noise": 1.0}, "cohort": {"dropout": 0.1}}, r"cohort\.dropout with \[privacy\].*no sum"),
        ({"privacy": {"noise": 1.0}, "cohort": {"sampling": "poisson"}}, r"'poisson' with \[privacy\].*no sum"),
        ({"privacy": {"noise": 1.0}, "cohort": {"over_select": 1.2}}, r"over_select with \[privacy\].*no sum"),
        ({"cohort": {"size": 2}}, r"2 clients take part in a round, and secure\.least = 3"),
        ({"stage": [{"method": "clustered-fl", "rounds": 2}]}, "has to see every client's delta"),
        ({"stage": [{"method": "hypcluster", "rounds": 2, "upload": "index"}]}, "has to see every client's delta"),
    ],
)
def test_what_does_not_go_together_is_refused(more: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        experiment(**more)


def test_rounds_of_thousands_are_refused() -> None:
    check_cohorts(SECURE, 500, 500, {})
    with pytest.raises(UserError, match="2,410 clients in a round: every two of them agree on a key"):
        check_cohorts(SECURE, 100, 2410, {})


def test_groups_that_are_always_too_small_are_refused() -> None:
    population = population_of(np.zeros((66, 2), np.float32), np.zeros(66, np.float32))
    about = {**population.about, "task": "regression", "input": "table"}
    group = np.array([0, 0, 1, 1, 1, 1, 1])
    population = replace(population, about=about, group=group, groups=["north", "south"])
    raw = {"data": {"source": "chem97"}, "stage": [{"method": "group-fl", "rounds": 1}], "secure": {"sums": True}}
    with pytest.raises(
        UserError, match=r"groups have fewer training clients.*'north' \(2\); put small groups together"
    ):
        build(checked(raw, "here"), population)


def test_without_sums_nothing_changes() -> None:
    assert experiment(secure={"sums": False}).secure is None
    assert experiment().secure == SECURE
    assert experiment(privacy={"noise": 1.0}).secure == SECURE
