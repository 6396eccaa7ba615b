"""Sites that are lost, late, away and back: the run goes on, and private state is that of rounds that happened."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bespoke.deploy.federated.hub import LEGS
from bespoke.deploy.federated.kept import Points
from bespoke.errors import RemoteLost, UserError
from bespoke.federation.private_state import PrivateTable
from bespoke.runs.folder import RunFolder
from deploy.sites_here import MODE, NAMES, Line, hub, site
from deploy.test_federation import assert_like
from kills import assert_identical, contents
from loopback import split_up
from test_protocol import STAGES, asked, people, ran

CHANGES = (
    "federation/legs.jsonl",
    "federation/points.json",
    "federation/agreement.json",
    "timing.jsonl",
)  # what a loss may show in
EVERYONE = {"cohort": {"size": 12, "dropout": 0.0}}


def parts() -> dict[str, Any]:
    return dict(zip(NAMES, split_up(people(), 3)))


def run(
    folder: Path, gone: Callable[[str, int], bool] = lambda name, n: False, config: Any = None, mode: Any = MODE
) -> dict[str, bytes]:
    """A run whose sites are started anew, with nothing but their files, for each leg. `gone(name, n)`: the site is gone
    when its n-th message of the whole run is sent."""
    counts = dict.fromkeys(NAMES, 0)

    def lines() -> dict[str, Line]:
        return {name: Line(site(rows, folder / name, mode=mode), watch(name)) for name, rows in parts().items()}

    def watch(name: str) -> Callable[[int], bool]:
        def at(_: int) -> bool:
            counts[name] += 1
            return gone(name, counts[name])

        return at

    hub(config or asked(STAGES["ditto"]), folder / "hub").run(lines)
    return contents(folder / "hub")


def results(files: dict[str, bytes]) -> dict[str, bytes]:
    return {name: data for name, data in files.items() if name not in CHANGES}


def total_messages(folder: Path) -> int:
    return sum(1 for _ in (folder / "north" / "sent.jsonl").open())


@pytest.mark.parametrize("name", ["ditto", "group-perfl"])
def test_a_site_that_is_killed_at_any_message_changes_nothing(name: str, tmp_path: Path) -> None:
    """The result is that of the undisturbed run, to the bit, and so are the private models."""
    config = asked(STAGES[name])
    expected = run(tmp_path / "calm", config=config)
    many = total_messages(tmp_path / "calm")
    for at in range(9, many, max(many // 7, 1)):
        folder = tmp_path / f"killed at {at}"
        found = run(folder, lambda site, n, at=at: site == "north" and n == at, config)
        assert_identical(results(found), results(expected), f"killed at message {at}")
        assert len((folder / "hub" / LEGS).read_text().splitlines()) > 1
        assert private(folder) == private(tmp_path / "calm")


def private(folder: Path) -> dict[str, bytes]:
    """The rows of private state that each site's last point stands on, by site and client."""
    found: dict[str, bytes] = {}
    for name in NAMES:
        for points in (folder / name / "runs").glob("*/points.json"):
            last = json.loads(points.read_text())["points"]
            rows: dict[int, bytes] = {}
            for file in list(last.values())[-1]:
                from bespoke.federation.segments import read_segment

                clients, stored = read_segment(points.parent / file)
                rows |= {int(client): row.numpy().tobytes() for client, row in zip(clients, stored)}
            found |= {f"{name} {client}": row for client, row in rows.items()}
    return found


def test_a_hub_that_is_killed_goes_on_from_its_last_round(tmp_path: Path) -> None:
    class Killed(BaseException):
        pass

    config = asked(STAGES["ditto"])
    expected = run(tmp_path / "calm", config=config)
    folder = tmp_path / "killed"
    seen = []

    def dies(stage: int, number: int) -> None:
        if (stage, number) in ((0, 2), (1, 1), (1, 3)) and (stage, number) not in seen:
            seen.append((stage, number))
            raise Killed

    for _ in range(4):
        one = hub(config, folder / "hub")
        one.after_round = dies
        try:
            one.run(lambda: {name: Line(site(rows, folder / name)) for name, rows in parts().items()})
        except Killed:
            continue
    assert len(seen) == 3
    assert_identical(results(contents(folder / "hub")), results(expected), "hub killed three times")
    assert private(folder) == private(tmp_path / "calm")


def test_a_run_goes_on_with_the_sites_that_are_there_and_takes_a_site_in_again(tmp_path: Path) -> None:
    """While north is away its clients do not train; when it is back they have the private models they had."""
    config = asked([{"method": "ditto", "rounds": 6, "lr": 0.1, "batch_size": 4}], **EVERYONE)
    sites = {name: site(rows, tmp_path / name) for name, rows in parts().items()}
    away, rounds = {"now": False}, []
    one = hub(config, tmp_path / "hub", min_sites=2)
    held: dict[str, np.ndarray] = {}

    def connect() -> dict[str, Line]:
        return {
            name: Line(place, lambda n, name=name: name == "north" and away["now"])
            for name, place in sites.items()
            if not (name == "north" and away["now"])
        }

    def after(stage: int, number: int) -> None:
        rounds.append(number)
        if number == 3 and rounds.count(3) == 1:
            away["now"] = True  # lost in the next message to it
        if number == 5 and rounds.count(5) == 1:
            host = sites["north"].host
            held["away"] = host.private.rows[: len(host.private.slots)].copy()
            away["now"] = False
            raise RemoteLost("north is there again")

    one.after_round = after
    one.run(connect)
    legs = [json.loads(line) for line in (tmp_path / "hub" / LEGS).read_text().splitlines()]
    assert [leg["away"] for leg in legs if "leg" in leg] == [[], ["north"], []]
    lines = [json.loads(line) for line in (tmp_path / "hub" / "rounds.jsonl").read_text().splitlines()]
    assert [line["clients"] for line in lines if line["round"]] == [12, 12, 8, 8, 12, 12]
    result = RunFolder.existing(tmp_path / "hub").result()
    assert result is not None
    assert result["clients"] == 12


def test_too_few_sites_do_not_go_on(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"1 of 3 sites are there, and min_sites = 2; not there: north, west"):
        hub(asked(STAGES["fedavg"]), tmp_path / "hub", min_sites=2).run(
            lambda: {"east": Line(site(parts()["east"], tmp_path / "east"))}
        )


def test_when_too_few_sites_are_left_the_run_waits_for_them(tmp_path: Path) -> None:
    """Whoever carries the messages hears that a site is lost, and can go on later: it is nobody's mistake."""
    config, there = asked(STAGES["fedavg"]), dict(parts())
    one = hub(config, tmp_path / "hub", min_sites=3)

    def connect() -> dict[str, Line]:
        return {name: Line(site(rows, tmp_path / name), gone(name)) for name, rows in there.items()}

    def gone(name: str) -> Callable[[int], bool]:
        def at(number: int) -> bool:
            return name == "west" and number == 9 and there.pop("west", None) is not None

        return at

    with pytest.raises(RemoteLost, match="the site is gone"):
        one.run(connect)
    there.update(parts())
    assert one.run(lambda: {name: Line(site(rows, tmp_path / name)) for name, rows in there.items()})["rounds"] == 2


def test_a_site_that_comes_back_with_other_clients_is_refused(tmp_path: Path) -> None:
    config = asked(STAGES["fedavg"])
    one = hub(config, tmp_path / "hub")
    places = parts()

    def stop(stage: int, number: int) -> None:
        raise RemoteLost("stopped here")

    one.after_round = stop
    legs = iter([places, {**places, "west": places["west"].only(np.arange(3))}])
    with pytest.raises(UserError, match="site west brings other clients or rows than when the run began"):
        one.run(lambda: {name: Line(site(rows, tmp_path / name)) for name, rows in next(legs).items()})


def test_a_late_sites_round_did_not_happen(tmp_path: Path) -> None:
    """North trains a round, and its answer comes too late: the hub goes back, and so does north's private state."""
    config = asked([{"method": "ditto", "rounds": 4, "lr": 0.1, "batch_size": 4}], **EVERYONE)
    expected = run(tmp_path / "calm", config=config)
    sites = {name: site(rows, tmp_path / "late" / name) for name, rows in parts().items()}
    trained = {"n": 0}

    class Late(Line):
        def receive(self) -> bytes:
            answer = super().receive()  # the site has done its work
            if b'"call": "train"' in self.sent[-1]:
                trained["n"] += 1
                if trained["n"] == 2:
                    raise RemoteLost("north is late")
            return answer

    hub(config, tmp_path / "late" / "hub").run(
        lambda: {name: (Late if name == "north" else Line)(place) for name, place in sites.items()}
    )
    assert trained["n"] > 4
    assert_identical(results(contents(tmp_path / "late" / "hub")), results(expected), "a late site")
    assert private(tmp_path / "late") == private(tmp_path / "calm")


def test_answers_that_are_lost_are_asked_for_again(tmp_path: Path) -> None:
    """Every third answer gets lost, and the message comes a second time."""

    class Lossy(Line):
        def receive(self) -> bytes:
            if len(self.sent) % 3 == 0:
                super().receive()
            return super().receive()

    config = asked(STAGES["ditto"])
    expected = run(tmp_path / "calm", config=config)
    sites = {name: site(rows, tmp_path / "lossy" / name) for name, rows in parts().items()}
    hub(config, tmp_path / "lossy" / "hub").run(lambda: {name: Lossy(place) for name, place in sites.items()})
    assert_identical(results(contents(tmp_path / "lossy" / "hub")), results(expected), "lost answers")


def test_a_site_takes_the_newest_state_that_has_led_to_where_the_hub_stands(tmp_path: Path) -> None:
    """What was saved in a leg that the hub went back on is forgotten; a site that was away has an older state."""
    table = PrivateTable({"n": np_tensor(0.0)})
    points = Points(tmp_path / "run", "run")

    def save(point: str, value: float) -> None:
        table.write([0, 1], {"n": np_tensor(value).repeat(2)[:, None]})
        points.add(point, table.save(points.folder / f"{point}.safetensors", run="run"))

    for number in (1, 2, 3):
        save(f"000-{number:07d}@aaaaaaaa", float(number))
    again = Points(tmp_path / "run", "run")
    assert again.back_to(["000-0000001@aaaaaaaa", "000-0000002@aaaaaaaa", "000-0000003@bbbbbbbb"]) == [
        "000-0000002@aaaaaaaa.safetensors"
    ]
    assert set(again.files) == {"000-0000001@aaaaaaaa", "000-0000002@aaaaaaaa"}
    assert not (tmp_path / "run" / "000-0000003@aaaaaaaa.safetensors").exists()
    assert Points(tmp_path / "run", "run").back_to([]) == []


def np_tensor(value: float) -> Any:
    import torch

    return torch.tensor([value])


def test_the_simulation_is_what_a_disturbed_federation_gives(tmp_path: Path) -> None:
    """Not only equal to an undisturbed federation: equal to the simulation up to rounding."""
    from bespoke.experiment.build import build

    ran(build(asked(STAGES["ditto"]), people()), tmp_path / "here")
    run(tmp_path / "there", lambda name, n: name == "west" and n == 20)
    assert_like(tmp_path / "there" / "hub", tmp_path / "here")
