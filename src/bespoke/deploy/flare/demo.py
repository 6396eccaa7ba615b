"""A federation on this machine, to look at: a hub and three sites on loopback, each a process of FLARE."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bespoke.data.sources.registry import load_source
from bespoke.deploy.federated.report import sent
from bespoke.deploy.flare.executor import SENT
from bespoke.deploy.flare.job import Federation
from bespoke.deploy.flare.loopback import make_loopback
from bespoke.experiment.checks import checked
from bespoke.experiment.config import ExperimentConfig
from bespoke.records import RunRecord
from bespoke.runs.events import Progress

SITES = ("north", "south", "west")
CLIENTS, LEAST = 24, 3
SOURCE = {"clients": CLIENTS, "examples": 30, "features": 5, "between": 0.7, "seed": 3}


@dataclass(frozen=True)
class Shown:
    """What a demonstration leaves to look at."""

    result: RunRecord
    run: Path
    sites: dict[str, Path]  # folders of the sites

    def sent(self, name: str) -> list[str]:
        return sent(self.sites[name] / "state" / SENT)

    def models(self, name: str) -> int:
        """How many personal models lie at a site."""
        found = json.loads((self.sites[name] / "state" / "models" / "models.json").read_text(encoding="utf-8"))
        return len(found["models"])


def experiment(rounds: int) -> ExperimentConfig:
    """FedAvg, then Ditto: each client's personal model stays near the shared one."""
    shared = {"method": "fedavg", "rounds": max(rounds // 2, 1), "lr": 0.1}
    return checked(
        {"data": {"source": "synthetic", "options": SOURCE}, "stage": [
            shared, {"method": "ditto", "rounds": rounds, "lr": 0.1}]}, "the demonstration",
    )  # fmt: skip


def demo(folder: Path, rounds: int, progress: Progress, stop: Callable[[], bool]) -> Shown:
    """Make kits, start a hub and three sites, run, and end all of it."""
    population = load_source("synthetic", **SOURCE)
    data = {}
    for place, name in enumerate(SITES):
        data[name] = folder / f"{name}.population"
        population.only(np.arange(place, CLIENTS, len(SITES))).save(data[name])
    progress.note(f"a hub and {len(SITES)} sites in {folder}: {CLIENTS} clients of the source 'synthetic', by turns")
    project = make_loopback(folder, SITES, data, {"least": LEAST}, min_sites=2, least=LEAST)
    with project:
        project.start()
        progress.note(
            f"started: the hub listens on port {project.hub.port} of this machine, {', '.join(SITES)} are registered"
        )
        federation = Federation(project.kit, experiment(rounds), "demo", progress, stop)
        result = federation.run()
    return Shown(result, federation.run_folder, {name: kit.parent for name, kit in project.sites.items()})
