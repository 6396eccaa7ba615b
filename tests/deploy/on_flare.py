"""Runs on a real federation of FLARE on loopback, watched and disturbed by tests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from bespoke.data.population import Population
from bespoke.deploy.flare.job import Federation
from bespoke.deploy.flare.loopback import Loopback, make_loopback
from bespoke.deploy.flare.running import Running
from bespoke.experiment.config import ExperimentConfig
from deploy.sites_here import NAMES
from loopback import split_up

RUNS_JOB = ("worker_process", "runner_process")  # FLARE's programs that carry a job


def project_of(population: Population, folder: Path, min_sites: int = 2, **settings: Any) -> Loopback:
    """Kits of a hub and of three sites that share these clients out among themselves."""
    data = {}
    for name, rows in zip(NAMES, split_up(population, 3)):
        data[name] = folder / f"{name}.population"
        rows.save(data[name])
    told = {"least": 1, "share_clients": True, **settings}
    return make_loopback(folder / "project", NAMES, data, told, min_sites=min_sites)


class Watched:
    """A run in a thread of its own."""

    def __init__(self, project: Loopback, config: ExperimentConfig, name: str, **how: Any) -> None:
        self.federation = Federation(project.kit, config, name, patience=150.0, **how)
        self.result: Any = None
        self.failure: BaseException | None = None
        self.jobs: list[str] = []
        self.federation.after_submit = self.jobs.append
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.result = self.federation.run()
        except BaseException as error:
            self.failure = error

    @property
    def folder(self) -> Path:
        return self.federation.run_folder

    def rounds(self) -> int:
        path = self.folder / "rounds.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def until(self, rounds: int, seconds: float = 150.0) -> None:
        """Wait until so many lines of rounds are written."""
        wait(lambda: self.rounds() >= rounds or not self.thread.is_alive(), seconds, f"{rounds} rounds")
        assert self.thread.is_alive(), f"the run ended first: {self.failure or self.result}"

    def ended(self, seconds: float = 300.0) -> Any:
        self.thread.join(seconds)
        if self.thread.is_alive():
            raise AssertionError(f"the run has not ended after {seconds:g} seconds; {self.rounds()} rounds are done")
        if self.failure is not None:
            raise self.failure
        return self.result


def wait(true: Callable[[], bool], seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"{what}: not within {seconds:g} seconds"
        time.sleep(0.02)


def job_process(running: Running) -> psutil.Process:
    """The process of a hub or a site that carries the job."""
    for process in psutil.Process(running.process.pid).children(recursive=True):
        if any(name in " ".join(process.cmdline()) for name in RUNS_JOB):
            return process
    raise AssertionError(f"{running.name} has no process of a job")
