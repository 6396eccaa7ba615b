"""Clients in actors of a Ray cluster: the bytes of a run on this machine, whatever is lost on the way.

The start of a cluster takes 10 to 25 seconds. All tests that need one stand here, so that one process of pytest starts
one; if xdist gives some of them to another process, that one starts its own, which is slower and just as good.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
from filelock import FileLock
from two_nodes import TwoNodes, two_nodes

import bespoke
from bespoke.data.population import Population
from bespoke.errors import UserError
from bespoke.experiment.config import EngineConfig
from bespoke.experiment.experiment import Experiment
from bespoke.federation.engine import Choice, Engine
from bespoke.federation.host import Host
from bespoke.federation.ray_cluster import PREFIX, _clear
from bespoke.federation.remote import Here
from bespoke.runs.folder import RunFolder
from bespoke.runs.places import at_its_places
from bespoke.runs.training import Run
from kills import assert_identical, contents
from test_protocol import LOOPED, asked, experiment, people

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="needs ray: pip install 'bespoke-fl[ray]'")
TWO = replace(LOOPED, workers=2)


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    with two_nodes() as started:
        yield started


def two_here(population: Population, choice: Choice) -> Engine:
    """The oracle: two hosts in this process, whose sums come in the order of two actors'."""
    return Engine(population, choice, [Here(Host(population, choice.mode())) for _ in range(2)])


def expected_of(made: Experiment, folder: Path) -> dict[str, bytes]:
    Run(made, RunFolder.create(folder, ""), how=TWO, checkpoint_seconds=0.0, engine_of=two_here).run()
    return contents(folder)


@contextmanager
def on_ray(made: Experiment, folder: Path, nodes: TwoNodes, **more: Any) -> Iterator[Run]:
    run = Run(made, RunFolder.create(folder, ""), how=TWO, checkpoint_seconds=0.0, **more)
    with at_its_places(run, EngineConfig(address=nodes.address)) as placed:
        yield placed


@pytest.mark.parametrize("name", ["ditto", "group-perfl"])
def test_actors_give_the_bytes_of_hosts_in_this_process(name: str, nodes: TwoNodes, tmp_path: Path) -> None:
    """A stateless method (the first stage of both), a stateful and a grouped one: every file of the run."""
    made = experiment(name)
    expected = expected_of(made, tmp_path / "here")
    where: list[str] = []

    def look(stage: int, number: int) -> None:
        where.extend({remote.node.id for remote in run.engine.remotes})  # type: ignore[attr-defined]

    with on_ray(made, tmp_path / "there", nodes, after_round=look) as run:
        run.run()
        assert all(remote.alive() for remote in run.engine.remotes) is False  # closed with the run
    assert len(set(where)) == 2  # an actor on each node
    assert_identical(contents(tmp_path / "there"), expected, name)
    assert not (tmp_path / "there" / ".rows").exists()


def test_what_a_cluster_cannot_do_is_said(nodes: TwoNodes, tmp_path: Path) -> None:
    """A GPU that is none, and a folder that is not reached; and a run is left that can be resumed."""
    raw = asked([{"method": "fedavg", "rounds": 1}]).model_dump(exclude_none=True, mode="json")
    people().save(tmp_path / "people")
    raw |= {"data": {"population": str(tmp_path / "people"), "standardize": "none"}}
    raw["engine"] = {"kind": "looped", "address": nodes.address, "device": "cuda"}
    with pytest.raises(UserError, match=r"actor 1 of 1 \(on 127.0.0.1\): no GPU that PyTorch can use was given to it"):
        bespoke.run(raw, tmp_path / "run")
    assert not (tmp_path / "run" / ".rows").exists()


def test_trials_are_spread_and_one_whose_place_is_killed_goes_on_elsewhere(nodes: TwoNodes, tmp_path: Path) -> None:
    """The files of every trial are those of trials in this process."""
    people().save(tmp_path / "people")
    raw: dict[str, Any] = {
        "seed": 4, "data": {"population": str(tmp_path / "people"), "standardize": "none"},
        "engine": {"kind": "looped"},
        "stage": [{"method": "ditto", "rounds": 6, "batch_size": 4}],
    }  # fmt: skip
    asked: dict[str, Any] = {"space": {"ditto": {"lr": [0.02, 0.05, 0.1, 0.2]}}}
    killed: list[int] = []

    class Killer(bespoke.Callback):
        def on_round(self, told: Any) -> None:
            if told.round == 3 and not killed:
                while len(places := nodes.actors("RunActor")) < 2:  # a place on each processor, once both are up
                    time.sleep(0.1)
                killed.append(places[0].pid)
                places[0].kill()

    expected = bespoke.tune(raw, tmp_path / "here", **asked)
    far = {**raw, "engine": {"kind": "looped", "address": nodes.address}}
    found = bespoke.tune(far, tmp_path / "there", jobs=None, callbacks=[Killer()], **asked)
    assert killed
    assert "spread over a Ray cluster" in found["engine"]
    assert found["trials"] == expected["trials"]
    for trial in found["trials"]:
        (folder,) = trial["folders"]
        assert_identical(contents(tmp_path / "there" / folder), contents(tmp_path / "here" / folder), folder)
    assert not (tmp_path / "there" / ".rows").exists()
    assert not nodes.actors("RunActor")


def test_a_lost_actor_and_a_lost_node_cost_rounds_and_nothing_else(nodes: TwoNodes, tmp_path: Path) -> None:
    """SIGKILL to an actor; then a whole node goes, and what is left of the cluster does its work, too."""
    made = experiment("ditto")
    expected = expected_of(made, tmp_path / "here")
    notes, rounds = list[str](), list[tuple[int, int]]()

    class Noted:
        def begin(self, what: str, total: int, done: int = 0) -> None: ...
        def advance(self, steps: int = 1, note: str = "") -> None: ...
        def note(self, text: str) -> None:
            notes.append(text)

    def kill(stage: int, number: int) -> None:
        rounds.append((stage, number))
        if rounds == [(0, 1)]:
            actors = nodes.actors()
            assert len(actors) == 2
            actors[1].kill()
        if (stage, number) == (1, 2) and rounds.count((1, 2)) == 1:
            actors = nodes.actors()
            nodes.cluster.remove_node(nodes.second, allow_graceful=False)
            # its actor ends a moment later; before that it could still write its part of the checkpoint
            until = time.monotonic() + 30
            while all(actor.is_running() for actor in actors) and time.monotonic() < until:
                time.sleep(0.05)

    with on_ray(made, tmp_path / "there", nodes, after_round=kill, progress=Noted()) as run:
        run.run()
    # what a checkpoint holds is not made again; the state that the last but one round made was lost with its node
    assert rounds == [(0, 1), (0, 2), (1, 1), (1, 2), (1, 2), (1, 3)]
    lost = [note for note in notes if "is gone" in note]
    assert len(lost) >= 2
    assert all("going on from the last checkpoint" in note for note in lost)
    assert_identical(contents(tmp_path / "there"), expected, "an actor and a node were lost")
    assert not nodes.actors()  # none is left on the nodes that are


ALONE = """
import sys
from bespoke.federation.ray_cluster import Cluster

with Cluster(None, print) as cluster:
    print(cluster.folder, *sorted({cluster.text(), *(node.address for node in cluster.nodes())}), sep="|", flush=True)
    sys.stdin.readline()
"""


def test_a_cluster_of_its_own_listens_to_nobody_and_leaves_nothing(tmp_path: Path) -> None:
    """Ray started for one command: its sockets are on loopback, and its processes and files go with it."""
    base = Path(tempfile.mkdtemp(prefix="own-", dir="/tmp"))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"TMPDIR": str(base), "HOME": str(tmp_path)}
    for _ in range(3):  # a node may take 30 seconds, which on a very busy machine it does not keep to
        process = subprocess.Popen(
            [sys.executable, "-c", ALONE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, env=environment,
        )  # fmt: skip
        assert process.stdout is not None
        assert "starting Ray on this machine" in process.stdout.readline()
        if line := process.stdout.readline():
            break
        assert "Ray did not start on this machine" in process.communicate()[1]
    try:
        folder, address, text = line.strip().split("|")
        assert Path(folder).parent == base
        assert address == "127.0.0.1"
        assert "1 node with " in text
        ours = {p.pid for p in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]}
        assert len(ours) > 4
        heard = {c.laddr.ip for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.pid in ours}
        assert heard
        assert all(ip in ("127.0.0.1", "::ffff:127.0.0.1", "::1") for ip in heard), heard
        process.communicate("\n", timeout=60)
        assert process.returncode == 0
        _, alive = psutil.wait_procs([psutil.Process(pid) for pid in ours if psutil.pid_exists(pid)], timeout=20)
        assert not alive
        assert not list(base.iterdir())
        assert not (tmp_path / ".ray").exists()  # where Ray would leave a token
    finally:
        process.kill()
        shutil.rmtree(base, ignore_errors=True)


def test_the_next_one_clears_what_a_killed_one_left(tmp_path: Path) -> None:
    left, used, others = (tmp_path / f"{PREFIX}{name}" for name in ("left", "used", "others"))
    for folder in (left, used, others):
        folder.mkdir()
    Path(f"{left}.lock").touch()
    with FileLock(f"{used}.lock"):
        _clear(tmp_path)
    assert not left.exists()
    assert not Path(f"{left}.lock").exists()
    assert used.exists()
    assert others.exists()  # without a lock it may be anybody's
