"""Sites that are late: left out of rounds, not of the run. The result is that of the clients that took part."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bespoke.deploy.federated.hub import LEGS
from bespoke.errors import RemoteLost, UserError
from bespoke.experiment.build import build
from bespoke.federation.engine import Choice, Engine
from bespoke.federation.remote import Late
from bespoke.federation.site import Site
from bespoke.federation.wire import decode_call
from bespoke.randomness import mix
from bespoke.runs.folder import RunFolder
from bespoke.tensors import Tree, flatten
from deploy.sites_here import NAMES, Line, hub, site
from deploy.test_federation_losses import private, results, run
from kills import assert_identical, contents
from loopback import split_up
from test_protocol import asked, people

DITTO = [{"method": "ditto", "rounds": 4, "lr": 0.1, "batch_size": 4}]
ALL = {"cohort": {"size": 12, "dropout": 0.0}}
SECURE = {**ALL, "secure": {"sums": True, "least": 3}}
LOOPED = Choice(False, 1, 0, 1, "autograd", "for the tests")
NORTHS = np.array([1, 4, 7, 10])  # split_up deals clients out by turns
Asked = Callable[[str, int], bool]  # (operation or step, how often it was asked) -> late


class LateLine(Line):
    """North answers some messages late: after its hub has looked for the answer so many times."""

    def __init__(self, site: Site, late: Asked, looks: int = 0) -> None:
        super().__init__(site)  # type: ignore[arg-type]
        self.late, self.looks = late, looks
        self.counts: dict[str, int] = {}
        self.held: bytes | None = None  # the answer that is late
        self.left = 0

    def receive(self) -> bytes:
        if self.held is not None:
            answer, self.held = self.held, None
            return answer
        answer = super().receive()  # the site has done its work
        call = decode_call(self.sent[-1])
        kind = str(call.values.get("step", call.operation))
        self.counts[kind] = self.counts.get(kind, 0) + 1
        if self.late(kind, self.counts[kind]):
            self.held, self.left = answer, self.looks
            raise Late("north is late")
        return answer

    def ready(self) -> bool:
        self.left -= 1
        return self.left < 0


def late_run(
    folder: Path, config: Any, late: Asked, looks: int = 0, min_sites: int = 1, sites: dict[str, Any] | None = None
) -> LateLine:
    """A run of three sites of which north is late; the sites stay through all legs, as processes would."""
    sites = sites or {name: site(rows, folder / name) for name, rows in zip(NAMES, split_up(people(), 3))}
    line = LateLine(sites["north"], late, looks)

    def connect() -> dict[str, Line]:
        line.held = None
        return {name: line if name == "north" else Line(place) for name, place in sites.items()}

    hub(config, folder / "hub", min_sites).run(connect)
    return line


def log_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "hub" / LEGS).read_text().splitlines()]


def clients_of(folder: Path) -> list[int]:
    lines = (folder / "hub" / "rounds.jsonl").read_text().splitlines()
    return [line["clients"] for line in map(json.loads, lines) if line["round"]]


def without(config: Any, rounds: tuple[int, ...]) -> tuple[Tree, Any]:
    """The oracle: an engine of this process whose cohorts in these rounds are the others. The server's last state, and
    the private state of all clients."""
    made = build(config.model_copy(update={"secure": None}), people())
    stage, params = made.stages[0], made.task.init(int(mix("init", config.seed)) & 0x7FFFFFFF)
    engine = Engine(made.population, LOOPED)
    engine.open(made.work(stage.method, made.split.train, ()), params)
    server = stage.method.init_server(params)
    for number in range(1, 5):
        everyone = np.arange(12)
        cohort = np.setdiff1d(everyone, NORTHS) if number in rounds else everyone
        found = engine.round(server, cohort, int(mix("round", config.seed, 0, number)), number=number)
        server = stage.method.server_round(server, found.cohort)
        engine.commit()
    assert engine.host is not None
    return server, engine.host.private.read(np.arange(12))


def assert_took_part(folder: Path, line: LateLine, oracle: tuple[Tree, Any], rtol: float = 1e-4) -> None:
    """The server's state is the oracle's, and so is the private state of north's clients."""
    ended = RunFolder.existing(folder / "hub").final()
    assert ended is not None
    expected, state = flatten(oracle[0]), flatten(oracle[1])
    found = flatten(ended.server)
    assert found.keys() == expected.keys()
    for path, leaf in expected.items():
        torch.testing.assert_close(found[path], leaf, rtol=rtol, atol=1e-5)
    mine = flatten(line.site.host.private.read(np.arange(4)))
    for path, leaf in state.items():
        torch.testing.assert_close(mine[path], leaf[NORTHS], rtol=rtol, atol=1e-5)


def test_a_late_site_is_left_out_of_its_rounds_and_comes_back_into_the_next(tmp_path: Path) -> None:
    """North is late in round 2 and busy in round 3: both are made by the others, north's private models stay as they
    were, and there is one leg, in which every other site trained each round once."""
    config = asked(DITTO, **ALL)
    line = late_run(tmp_path, config, lambda kind, n: kind == "train" and n == 2, looks=1)
    assert clients_of(tmp_path) == [12, 8, 8, 12]
    assert [entry.get("late", entry.get("sites")) for entry in log_of(tmp_path)] == [list(NAMES), ["north"]]
    assert log_of(tmp_path)[1]["round"] == 2
    assert line.counts["train"] == 3
    assert_took_part(tmp_path, line, without(config, (2, 3)))
    assert RunFolder.existing(tmp_path / "hub").result()["clients"] == 12  # type: ignore[index]


def test_a_hub_that_is_killed_while_a_site_is_behind_goes_back_to_what_happened(tmp_path: Path) -> None:
    """Killed after round 3, of which north has no point: north's private state goes back to that of round 1."""

    class Killed(BaseException):
        pass

    def dies(stage: int, number: int) -> None:
        raise Killed

    config = asked(DITTO, **ALL)
    rows = dict(zip(NAMES, split_up(people(), 3)))
    sites = {name: site(part, tmp_path / name) for name, part in rows.items()}
    line = LateLine(sites["north"], lambda kind, n: kind == "train" and n == 2, looks=9)
    one = hub(config, tmp_path / "hub")
    one.after_round = lambda stage, number: dies(stage, number) if number == 3 else None
    with pytest.raises(Killed):
        one.run(lambda: {name: line if name == "north" else Line(place) for name, place in sites.items()})
    again = {name: site(part, tmp_path / name) for name, part in rows.items()}  # sites too: their files alone are left
    last = late_run(tmp_path, config, lambda kind, n: False, sites=again)
    assert clients_of(tmp_path) == [12, 8, 12, 12]  # round 3 was not saved: with all of them it is made again
    assert_took_part(tmp_path, last, without(config, (2,)))


def test_with_too_few_sites_in_time_the_round_did_not_happen(tmp_path: Path) -> None:
    """min_sites = 3: the leg ends, the round is made again by all: the undisturbed result, to the bit."""
    config = asked(DITTO, **ALL)
    expected = run(tmp_path / "calm", config=config)
    line = late_run(tmp_path / "late", config, lambda kind, n: kind == "train" and n == 2, min_sites=3)
    assert line.counts["train"] == 5
    assert "2 of 3 sites have answered in time, and min_sites = 3" in (tmp_path / "late" / "hub" / LEGS).read_text()
    assert_identical(results(contents(tmp_path / "late" / "hub")), results(expected), "a late site")
    assert private(tmp_path / "late") == private(tmp_path / "calm")


def test_a_round_that_goes_on_without_a_late_site_costs_the_others_no_second_message(tmp_path: Path) -> None:
    """Under local noise a repeated round would be another release: sites that are in time send one a round."""
    privacy = {"local_noise": 1.0, "clip": 0.5, "delta": 1e-3, "public_schema": True, "public_statistics": True}
    stages = [{"method": "fedavg", "rounds": 4, "lr": 0.1}]
    late_run(tmp_path, asked(stages, privacy=privacy, **ALL), lambda kind, n: kind == "train" and n == 2)
    lines = (tmp_path / "hub" / "attempts.jsonl").read_text().splitlines()
    attempts = [json.loads(line) for line in lines if line]
    assert [line["round"] for line in attempts if line["what"] == "begun"] == [1, 2, 3, 4]
    sent = [json.loads(line) for line in (tmp_path / "east" / "sent.jsonl").read_text().splitlines()]
    assert [line["number"] for line in sent if line["operation"] == "train"] == [1, 2, 3, 4]


# -- under secure sums -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("step", ["train", "keys", "shares", "masked"])
def test_a_site_that_is_late_before_its_numbers_are_there_is_not_in_the_sum(step: str, tmp_path: Path) -> None:
    config = asked(DITTO, **SECURE)
    line = late_run(tmp_path, config, lambda kind, n: kind == step and n == 2)
    assert clients_of(tmp_path) == [12, 8, 12, 12]
    assert_took_part(tmp_path, line, without(config, (2,)))


@pytest.mark.parametrize("step", ["consent", "reveal"])
def test_a_site_that_is_late_after_its_numbers_are_there_is_in_the_sum(step: str, tmp_path: Path) -> None:
    """The others unmask it by their shares; the private state that belongs to these numbers is kept."""
    config = asked(DITTO, **SECURE)
    line = late_run(tmp_path, config, lambda kind, n: kind == step and n == 2)
    assert clients_of(tmp_path) == [12, 12, 12, 12]
    assert_took_part(tmp_path, line, without(config, ()))


def test_clients_that_were_introduced_meanwhile_are_known_to_a_site_that_was_behind(tmp_path: Path) -> None:
    """North misses the introductions of round 1 and takes part in round 2, after they were sent to it."""
    config = asked(DITTO, **SECURE)
    line = late_run(tmp_path, config, lambda kind, n: kind == "train" and n == 1)
    assert clients_of(tmp_path) == [8, 12, 12, 12]
    assert_took_part(tmp_path, line, without(config, (1,)))


def test_a_repeated_round_is_added_up_with_the_clients_it_had(tmp_path: Path) -> None:
    """Round 2 was about to be unmasked without north when the hub lost it. It is made again without north, though north
    is there: the difference of the two sums would be north's."""
    config = asked(DITTO, **SECURE)
    sites = {name: site(rows, tmp_path / name) for name, rows in zip(NAMES, split_up(people(), 3))}
    line = LateLine(sites["north"], lambda kind, n: kind == "masked" and n == 2)
    lost = {"n": 0}

    class Losing(Line):
        def receive(self) -> bytes:
            answer = super().receive()
            call = decode_call(self.sent[-1])
            lost["n"] += call.values.get("step") == "reveal"
            if lost["n"] == 2:
                lost["n"] += 1
                raise RemoteLost("west is lost")
            return answer

    def connect() -> dict[str, Line]:
        line.held = None
        return {"east": Line(sites["east"]), "north": line, "west": Losing(sites["west"])}

    hub(config, tmp_path / "hub").run(connect)
    assert any(entry.get("ended") == "west is lost" for entry in log_of(tmp_path))
    assert clients_of(tmp_path) == [12, 8, 12, 12]
    assert_took_part(tmp_path, line, without(config, (2,)))


def test_a_hub_that_adds_the_round_up_with_other_clients_is_refused(tmp_path: Path) -> None:
    """The same, by a hub that has forgotten: the sites consent to one sum of a round alone."""
    config = asked(DITTO, **SECURE)
    sites = {name: site(rows, tmp_path / name) for name, rows in zip(NAMES, split_up(people(), 3))}
    one = hub(config, tmp_path / "hub")
    line = LateLine(sites["north"], lambda kind, n: kind == "masked" and n == 2)
    seen: list[int] = []

    def forget(stage: int, number: int) -> None:
        if number == 2 and not seen:
            seen.append(number)
            (tmp_path / "hub" / "federation" / "sums.json").unlink()
            raise RemoteLost("before the checkpoint of round 2")

    one.after_round = forget

    def connect() -> dict[str, Line]:
        line.held = None
        return {name: line if name == "north" else Line(place) for name, place in sites.items()}

    with pytest.raises(UserError, match="was added up before with 8 clients, and now with 12, some of them the same"):
        one.run(connect)


def test_under_noise_and_secure_sums_the_run_waits_for_a_late_site(tmp_path: Path) -> None:
    """Whether there is a sum would depend on who is late, and the account does not hold that."""
    privacy = {"noise": 0.5, "clip": 0.5, "delta": 1e-3, "public_schema": True, "public_statistics": True}
    stages = [{"method": "fedavg", "rounds": 3, "lr": 0.1}]
    config = asked(stages, privacy=privacy, **SECURE)
    late_run(tmp_path, config, lambda kind, n: kind == "train" and n == 2)
    assert clients_of(tmp_path) == [12, 12, 12]
    assert len(log_of(tmp_path)) == 1


@pytest.mark.parametrize("kind", ["open", "save_private", "score"])
def test_anything_else_that_is_late_is_waited_for(kind: str, tmp_path: Path) -> None:
    """What a site saves belongs to a checkpoint: a hub does not go on before it is there."""
    config = asked(DITTO, **ALL)
    expected = run(tmp_path / "calm", config=config)
    line = late_run(tmp_path / "late", config, lambda asked, n: asked == kind and n == 1)
    assert line.counts[kind] > 0
    assert len(log_of(tmp_path / "late")) == 1
    assert_identical(results(contents(tmp_path / "late" / "hub")), results(expected), kind)
