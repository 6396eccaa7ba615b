"""What takes minutes of a federation on FLARE: all methods, and every process killed. `make federation` runs it."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from bespoke.deploy.flare.loopback import Loopback
from bespoke.deploy.flare.predict import predict
from bespoke.deploy.flare.running import start
from bespoke.experiment.build import build
from bespoke.runs.folder import RunFolder
from command import bespoke
from deploy.on_flare import Watched, job_process, project_of
from deploy.test_federation import assert_like, config_of, rows_of
from deploy.test_federation_losses import results, run
from kills import contents
from test_protocol import STAGES, asked, people, ran

LONG = [{"method": "ditto", "rounds": 40, "lr": 0.05, "batch_size": 4}]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loopback]:
    with project_of(people(), tmp_path_factory.mktemp("flare")) as made:
        yield made.start()


@pytest.mark.parametrize("name", [name for name in STAGES if name != "mocha"])
def test_methods(name: str, project: Loopback, tmp_path: Path) -> None:
    ran(build(config_of(name), rows_of(name)), tmp_path / "here")
    watched = Watched(project, config_of(name), name)
    watched.ended()
    assert_like(watched.folder, tmp_path / "here")


def test_mocha(tmp_path: Path) -> None:
    """Its clients are classified, and each client's values are sent: sites that allow it."""
    ran(build(config_of("mocha"), rows_of("mocha")), tmp_path / "here")
    with project_of(rows_of("mocha"), tmp_path / "flare") as made:
        made.start()
        watched = Watched(made, config_of("mocha"), "mocha")
        watched.ended()
    assert_like(watched.folder, tmp_path / "here")


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a run that nobody disturbs."""
    return results(run(tmp_path_factory.mktemp("calm"), config=asked(LONG), mode=None))


def assert_undisturbed(watched: Watched, calm: dict[str, bytes]) -> None:
    found = results(contents(watched.folder))
    for name in ("rounds.jsonl", "clients.parquet", "sites.json", "choices.json"):
        assert found[name] == calm[name], name


def legs_of(watched: Watched, kind: str = "leg") -> list[dict[str, Any]]:
    lines = (watched.folder / "federation" / "legs.jsonl").read_text().splitlines()
    return [found for found in map(json.loads, lines) if kind in found]


def test_killed_hub_job(project: Loopback, calm: dict[str, bytes]) -> None:
    watched = Watched(project, asked(LONG), "hub-job")
    watched.until(5)
    job_process(project.running["hub"]).kill()
    watched.ended()
    assert len(legs_of(watched)) >= 2
    assert_undisturbed(watched, calm)


def test_killed_hub(project: Loopback, calm: dict[str, bytes]) -> None:
    """The whole hub, as in a power cut; it is started again, and the same command goes on by itself."""
    watched = Watched(project, asked(LONG), "hub")
    watched.until(5)
    project.running.pop("hub").kill()
    project.running["hub"] = start(project.kit)
    watched.ended(400)
    assert len(legs_of(watched)) >= 2
    assert_undisturbed(watched, calm)


def test_killed_site_that_comes_back(project: Loopback) -> None:
    """With min_sites = 2 the others go on; the site is taken in when it is there again."""
    watched = Watched(project, asked([{**LONG[0], "rounds": 400}]), "site")
    watched.until(5)
    project.running.pop("north").kill()
    begun = time.monotonic()
    while not any("north" in leg["away"] for leg in legs_of(watched)):
        assert time.monotonic() - begun < 200
        time.sleep(0.5)
    project.start("north")
    while legs_of(watched)[-1]["away"]:
        assert time.monotonic() - begun < 400
        assert watched.thread.is_alive(), "the run ended before the site was taken in"
        time.sleep(0.5)
    result = watched.ended(400)
    assert result["clients"] == 12
    lines = RunFolder.existing(watched.folder).read_log("rounds.jsonl")
    assert len(lines) == 401


def test_killed_site_that_is_waited_for(calm: dict[str, bytes], tmp_path: Path) -> None:
    """With min_sites = 3 nobody goes on without it: the result is that of the undisturbed run."""
    with project_of(people(), tmp_path, min_sites=3) as project:
        watched = Watched(project.start(), asked(LONG), "waited")
        watched.until(5)
        project.running.pop("north").kill()
        project.start("north")
        watched.ended(400)
        assert len(legs_of(watched)) >= 2
        assert_undisturbed(watched, calm)


def test_late_site(project: Loopback) -> None:
    """A site that stands still is left out of rounds after `late` seconds, and comes back into them in the same leg."""
    everyone = {"cohort": {"size": 12, "dropout": 0.0}}
    watched = Watched(project, asked([{**LONG[0], "rounds": 150}], **everyone), "late", late=4.0)
    watched.until(5)
    process = job_process(project.running["west"])
    late: list[list[str]] = []
    for _ in range(6):  # it may be stopped while it saves or scores, for which the hub waits twice as long
        process.send_signal(signal.SIGSTOP)
        begun = time.monotonic()
        while not late and time.monotonic() - begun < 6:
            time.sleep(0.1)
            late = [found["late"] for found in legs_of(watched, "late")]
        process.send_signal(signal.SIGCONT)
        if late:
            break
        time.sleep(0.5)
    assert watched.ended(400)["rounds"] == 150
    assert late == [["west"]]
    assert len(legs_of(watched)) == 1
    clients = [line["clients"] for line in RunFolder.existing(watched.folder).read_log("rounds.jsonl") if line["round"]]
    assert set(clients) == {8, 12}
    assert clients[-1] == 12


def test_demo(tmp_path: Path) -> None:
    """The tutorial: it ends by itself, leaves no process, and shows what each site sent and what stayed."""
    done = bespoke("deploy", "demo", "--out", tmp_path / "demo", "--rounds", "2")
    assert done.code == 0, done.err
    assert "ditto: mean mse per client" in done.out
    for name in ("north", "south", "west"):
        assert f"What {name} sent" in done.out
    assert done.out.count("What stayed: 8 personal models") == 3
    assert done.out.count("train: 3 times") == 3
    assert not [p for p in psutil.process_iter() if str(tmp_path) in " ".join(_command(p))]
    found = predict(tmp_path / "demo" / "north", tmp_path / "demo" / "north.population")
    assert not found.strangers
    assert len(set(found.clients)) == 8


def _command(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def test_secure_sums(project: Loopback, tmp_path: Path) -> None:
    more = {"secure": {"sums": True, "least": 3}, "cohort": {"size": 12, "dropout": 0.0}}
    ran(build(config_of("hypcluster", **more), people()), tmp_path / "here")
    watched = Watched(project, config_of("hypcluster", **more), "secure")
    watched.ended()
    assert_like(watched.folder, tmp_path / "here")
