"""Places that are lost in the middle of a run: it goes on from its last checkpoint, and nothing shows in its result."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bespoke.data.population import Population
from bespoke.errors import RemoteLost
from bespoke.federation.calls import Call
from bespoke.federation.engine import Choice, Engine
from bespoke.federation.host import Host
from bespoke.federation.remote import Here
from bespoke.federation.workers import Worker
from bespoke.runs.folder import RunFolder
from bespoke.runs.training import Run
from kills import assert_identical, contents
from loopback import federation
from test_protocol import LOOPED, experiment, ran

OFTEN = 10**6
PRIVATE = {"noise": 0.8, "clip": 0.5, "reproducible": True}


class Fragile(Here):
    """A place that is gone at a call of this number, before or after it was carried out."""

    def __init__(self, host: Host, left: list[int], after: bool) -> None:
        super().__init__(host)
        self.left, self.after, self.gone = left, after, False

    def start(self, call: Call) -> None:
        self.left[0] -= 1
        if self.left[0] == 0 and not self.after:
            self.gone = True
            raise RemoteLost("the place is gone")
        assert not self.gone, "asked again"
        super().start(call)

    def finish(self) -> Any:
        answer = super().finish()
        if self.left[0] == 0:
            self.gone = True
            raise RemoteLost("the place is gone")
        return answer


def fragile(left: list[int], after: bool) -> Callable[[Population, Choice], Engine]:
    """Engines of two such places; the first call that is lost is the only one."""

    def engine(population: Population, choice: Choice) -> Engine:
        return Engine(population, choice, [Fragile(Host(population, choice.mode()), left, after) for _ in range(2)])

    return engine


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "stateless": ("fedavg", {}),
    "stateful": ("ditto", {}),
    "grouped": ("group-perfl", {}),
    "what a transform remembers": ("alone", {"transform": {"top_k": 0.4}, "model": {"name": "mlp", "hidden": [8]}}),
    "an account": ("alone", {"privacy": PRIVATE}),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_place_may_be_lost_at_any_call(name: str, tmp_path: Path) -> None:
    """At every call of a run: its files, private state among them, are those of the run without a loss."""
    which, more = KINDS[name]
    made = experiment(which, **more)
    calls = [OFTEN]
    expected = ran(made, tmp_path / "whole", engine_of=fragile(calls, False))
    many = OFTEN - calls[0]
    assert many > 12
    expected.pop("attempts.jsonl", None)  # which says that a round was begun twice
    for number in range(1, many + 1, 2):
        after = number % 4 == 1
        folder = tmp_path / f"{number}-{after}"
        found = ran(made, folder, engine_of=fragile([number], after), losses=1)
        found.pop("attempts.jsonl", None)
        assert_identical(found, expected, folder.name)


def test_a_checkpoint_is_gone_back_to_however_old(tmp_path: Path) -> None:
    """Rounds since the last checkpoint are repeated, and their lines are not in the logs twice."""
    made = experiment("ditto")
    expected = contents_of(Run(made, RunFolder.create(tmp_path / "whole", ""), how=LOOPED, checkpoint_seconds=OFTEN))
    calls, rounds = [OFTEN], list[tuple[int, int]]()

    def lose(stage: int, number: int) -> None:
        rounds.append((stage, number))
        if (stage, number) == (1, 2) and rounds.count((1, 2)) == 1:
            calls[0] = 2

    run = Run(
        made, RunFolder.create(tmp_path / "run", ""), how=LOOPED, checkpoint_seconds=OFTEN, after_round=lose,
        engine_of=fragile(calls, False), losses=1,
    )  # fmt: skip
    assert_identical(contents_of(run), expected, "no checkpoint but the stages' first")
    assert rounds == [(0, 1), (0, 2), (1, 1), (1, 2), (1, 1), (1, 2), (1, 3)]


def contents_of(run: Run) -> dict[str, bytes]:
    run.engine_of = run.engine_of if run.losses else fragile([OFTEN], False)
    run.run()
    return contents(run.folder.path)


def test_a_run_gives_up_where_places_are_lost_again_and_again(tmp_path: Path) -> None:
    """In a row, that is: a checkpoint in between says that there is progress."""
    made, built = experiment("fedavg"), list[int]()

    def doomed(population: Population, choice: Choice) -> Engine:
        built.append(1)
        return fragile([4], False)(population, choice)

    notes: list[str] = []
    run = Run(made, RunFolder.create(tmp_path / "run", ""), how=LOOPED, engine_of=doomed, losses=2)
    run.progress = Noted(notes)
    with pytest.raises(RemoteLost, match="lost 3 times in a row without a new checkpoint; the run can be resumed"):
        run.run()
    assert len(built) == 4  # the first got as far as the first checkpoint
    assert notes[-1] == "the place is gone; building all places anew and going on from the last checkpoint"
    built.clear()
    with pytest.raises(RemoteLost, match=r"^the place is gone$"):
        Run(made, RunFolder.create(tmp_path / "other", ""), how=LOOPED, engine_of=doomed).run()
    assert len(built) == 1
    whole = ran(made, tmp_path / "whole")
    assert_identical(ran(made, tmp_path / "run"), whole, "resumed")  # later, by another process


class Noted:
    def __init__(self, notes: list[str]) -> None:
        self.notes = notes

    def begin(self, what: str, total: int, done: int = 0) -> None: ...
    def advance(self, steps: int = 1, note: str = "") -> None: ...
    def note(self, text: str) -> None:
        self.notes.append(text)


def test_a_killed_worker_process_costs_rounds_and_nothing_else(tmp_path: Path) -> None:
    """A real loss: SIGKILL between two rounds."""
    made, two = experiment("ditto"), replace(LOOPED, workers=2)
    whole = RunFolder.create(tmp_path / "whole", "")
    Run(made, whole, how=two, checkpoint_seconds=0.0, engine_of=fragile([OFTEN], False)).run()
    killed: list[int] = []

    def kill(stage: int, number: int) -> None:
        if (stage, number) == (1, 1) and not killed:
            worker = run.engine.remotes[1]
            assert isinstance(worker, Worker)
            pid = worker.child.process.pid
            assert pid is not None
            killed.append(pid)
            os.kill(pid, signal.SIGKILL)

    run = Run(made, RunFolder.create(tmp_path / "run", ""), how=two, checkpoint_seconds=0.0, after_round=kill, losses=1)
    run.run()
    assert killed
    assert_identical(contents(tmp_path / "run"), contents(tmp_path / "whole"), "a worker was killed")


def test_a_site_that_comes_back_goes_on_from_its_own_files(tmp_path: Path) -> None:
    """Behind a wire: the site's host is new, and what it saved under a checkpoint's name is still there."""
    made = experiment("ditto")
    folder = tmp_path / "there" / "private"
    saved: dict[str, list[str]] = {}
    lost: list[int] = []

    def site_of(population: Population, choice: Choice) -> Engine:
        engine, wires = federation([population], choice, [folder])
        host: Any = wires[0].site.host
        host.saved, host.tells = saved, True

        def receive(bring: Callable[[], bytes] = wires[0].receive) -> bytes:
            answer = bring()
            if len(wires[0].sent) == 14 and not lost:
                lost.append(1)
                raise RemoteLost("site 0 does not answer")
            return answer

        wires[0].receive = receive  # type: ignore[method-assign]
        return engine

    expected = ran(made, tmp_path / "here")
    found = ran(made, tmp_path / "there", engine_of=site_of, losses=1)
    assert lost
    assert_identical(found, expected, "a site was lost")
